"""The report of an audit: its first line, the picture of a window, its findings, on 80 and 100 columns."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from audit_judgements import COST, NOTE, TOTAL, UNEQUAL, judgement, place
from audit_traces import event
from wholebatch.audit.judge.evidence import Judgement, Window
from wholebatch.audit.picture import num_micro_batches, window_picture
from wholebatch.audit.report import pictured_window, render_report, report_text
from wholebatch.audit.trace import Intent, Place
from wholebatch.audit.words import event_words, first_sentence, place_text, weight_text


def picture(told: Judgement, width: int = 80, window: int = 0) -> list[str]:
    return [
        line.plain for line in window_picture(told.evidence.windows[window], told.evidence, width=width)
    ]


def rows_of(lines: list[str]) -> list[str]:
    """The lines of micro-batches."""
    return [line for line in lines if "│" in line]


@pytest.mark.parametrize(
    ("told", "first"),
    [
        (
            judgement(num_updates=3, verdict="findings", findings=[UNEQUAL, TOTAL, NOTE]),
            "In update 2, an item of train.py's shortest micro-batch counts 8.3 times one of the longest.",
        ),
        (judgement(num_updates=2), "Nothing wrong in 2 updates: every item counts 1/N, once"),
        (judgement(findings=[NOTE]), "Nothing wrong in 1 update: every item counts 1/N, once"),
        (
            judgement(weights=[(0.5, 1.5), (1.0, 1.0)]),
            "Nothing wrong in 1 update: an item counts 0.5 to 1.5 times 1/N, as the loss means it",
        ),
        (
            judgement(verdict="findings", findings=[COST]),
            "The updates are right, at a price. Four graphs are alive at the step.",
        ),
        (
            judgement(verdict="not_judged", unjudged=["FusedLoss is not known"], findings=[NOTE]),
            "Not judged: FusedLoss is not known",
        ),
    ],
)
def test_the_first_line_is_the_verdict(told, first):
    assert report_text(told).splitlines()[0] == first


@pytest.mark.parametrize("width", [72, 80])
def test_the_verdict_is_broken_at_the_width(width):
    lines = report_text(
        judgement(num_updates=3, findings=[UNEQUAL], verdict="findings"), width
    ).splitlines()
    assert max(map(len, lines)) <= width
    assert " ".join(lines[:2]).startswith(first_sentence(UNEQUAL.message))


def nothing_seen(told: Judgement, backwards: bool = True) -> Judgement:
    """The judgement as it is where no optimizer stepped."""
    traces = [
        replace(t, events=tuple(e for e in t.events if backwards and e.kind == "backward"))
        for t in told.evidence.traces
    ]
    evidence = replace(told.evidence, windows=(), traces=traces)
    return replace(told, evidence=evidence, unjudged=("no update was seen: no optimizer stepped",))


def test_nothing_seen_is_not_judged_and_says_why():
    told = judgement(verdict="not_judged")
    assert report_text(nothing_seen(told)).splitlines() == [
        "Not judged: no optimizer stepped while the script was watched; 2 backwards were seen",
        "watched 0 updates of SGD",
    ]
    assert (
        report_text(nothing_seen(judgement((8,), verdict="not_judged")))
        .splitlines()[0]
        .endswith("; 1 backward was seen")
    )
    assert (
        report_text(nothing_seen(told, backwards=False))
        .splitlines()[0]
        .endswith("watched, and nothing ran backward")
    )


def test_a_script_that_ends_before_the_first_watched_update_says_so():
    told = nothing_seen(judgement(verdict="not_judged", num_skipped_updates=1000), backwards=False)
    assert report_text(told).splitlines() == [
        "Not judged: the script ended before the 1,000 updates that --skip-updates passes over",
        "watched 0 updates of SGD",
    ]


def test_a_script_that_failed_before_any_update_begins_with_that():
    failed = {"ended": "failed", "failure": "ValueError: no data, at train.py:7"}
    told = nothing_seen(judgement(verdict="not_judged", **failed))
    assert report_text(told).splitlines() == [
        "The script failed: ValueError: no data, at train.py:7",
        "watched 0 updates of SGD",
        "not judged: no optimizer stepped while the script was watched; 2 backwards were seen",
    ]
    failed["failure"] = "ValueError: no data \n  in it\nat train.py:7"
    lines = report_text(nothing_seen(judgement(verdict="not_judged", **failed))).splitlines()
    assert lines[0] == "The script failed: ValueError: no data ... at train.py:7"
    assert lines[2:5] == ["the script failed: ValueError: no data", "  in it", "at train.py:7"]


@pytest.mark.parametrize(
    ("told", "first"),
    [
        (
            judgement(num_updates=3, ended="failed", failure="ValueError: no data"),
            "The script failed after 3 updates: ValueError: no data; nothing was wrong in these",
        ),
        (
            judgement(ended="failed", failure="KeyboardInterrupt, at train.py:7"),
            "The script was interrupted after 1 update: KeyboardInterrupt, at train.py:7; "
            "nothing was wrong in this one",
        ),
        (
            judgement(verdict="findings", findings=[COST], ended="failed", failure="ValueError: no"),
            "The script failed after 1 update: ValueError: no. These updates are right, at a price. "
            "Four graphs are alive at the step.",
        ),
        (
            judgement(num_updates=2, verdict="findings", findings=[UNEQUAL], ended="failed", failure="E"),
            first_sentence(UNEQUAL.message),
        ),
        (
            judgement(verdict="not_judged", unjudged=["no graph"], ended="failed", failure="E"),
            "Not judged: no graph",
        ),
        (
            judgement(ended="exit", failure="sys.exit(4)"),
            "Nothing wrong in 1 update: every item counts 1/N, once",
        ),
    ],
)
def test_a_script_that_failed_later_does_not_read_all_right(told, first):
    lines = report_text(told, 200).splitlines()
    assert lines[0] == first
    how = {"exit": "ended itself"}.get(told.evidence.traces[0].ended, "failed")
    how = "was interrupted" if "interrupted" in first else how
    assert f"the script {how}: {told.evidence.traces[0].failure}" in lines


def test_a_rank_that_failed_is_named():
    told = judgement(num_ranks=2)
    first, second = told.evidence.traces
    traces = [first, replace(second, ended="stalled", failure="it waited")]
    told = replace(told, evidence=replace(told.evidence, traces=traces))
    assert report_text(told).startswith(
        "Rank 1 stalled after 1 update: it waited; nothing was wrong in this"
    )


def test_the_picture_has_a_row_for_each_micro_batch_and_rank_and_its_events_in_order():
    lines = picture(judgement((512, 64), num_ranks=2, weights=[(0.5625, 0.5625), (4.5, 4.5)]))
    assert lines[0] == "update 1 of SGD: 2 micro-batches on each of 2 replicas, N = 1,152"
    words = [re.sub(r"\s+", " ", re.sub("[█▌▐▒]+", "", line)).strip() for line in lines[2:]]
    assert words == [
        "· gradients cleared: optimizer.zero_grad() src/train.py:20",
        "1 0 512 0.562 │ src/train.py:27",
        "1 1 512 0.562 │ src/train.py:27",
        "· logged 2.5 src/train.py:28",
        "2 0 64 4.5 │ src/train.py:27",
        "2 1 64 4.5 │ src/train.py:27",
        "· logged 2.5 src/train.py:28",
        "· gradients clipped to a norm of 1 src/train.py:30",
        "· step src/train.py:31",
        "total weight 1",
    ]


@pytest.mark.parametrize(
    ("weights", "bars"),
    [
        ([(1.0, 1.0), (1.0, 1.0)], ["        │        ", "        │        "]),
        ([(8.0, 8.0), (0.125, 0.125)], ["        │████████", "████████│        "]),
        # between two weights of one micro-batch it is lighter
        ([(2.0, 4.0), (0.25, 4.0)], ["        │████▒▒▒▒", "▒▒▒▒▒▒▒▒│▒▒▒▒▒▒▒▒"]),
        ([(2.0**0.25, 2.0**0.25), (0.5, 0.5)], ["        │█       ", "    ████│        "]),
        # nothing that a logarithm could show
        ([(0.0, 0.0), (-1.0, -1.0)], ["        │        ", "        │        "]),
    ],
)
def test_the_bar_shows_weights_by_their_logarithm(weights, bars):
    lines = picture(judgement(weights=weights))
    assert [row[37:54] for row in (line.ljust(54) for line in rows_of(lines))] == bars


def test_the_scale_reaches_as_far_as_the_weights():
    assert re.search(r"1/4 +1 +4$", picture(judgement())[1])
    assert re.search(r"1/16 +1 +16$", picture(judgement(weights=[(9.0, 9.0), (0.5, 0.5)]))[1])


@pytest.mark.parametrize("width", [72, 80, 100])
def test_no_line_of_the_picture_is_longer_than_the_width(width):
    told = judgement((512, 64), num_ranks=2, weights=[(0.01, 9.125), (4.5, 4.5)], lost=[(1, 0)])
    deep = Place(file="src/a_rather_long_folder/of_a_project/training_script.py", line=1234)
    window = told.evidence.windows[0]
    long_event = event("clear", place=deep, detail="optimizer.zero_grad(" + "x" * 90).events[0]
    window = replace(window, events={0: ((0, long_event), *window.events[0]), 1: window.events[1]})
    lines = [line.plain for line in window_picture(window, told.evidence, width=width)]
    assert max(map(len, lines[1:])) <= width
    assert any("rank 0: gradients cl" in line for line in lines)


def between(window: Window, row: int, **fields: Any) -> Window:
    """The window with an event right after a micro-batch of its first rank."""
    added = event(**fields).events[0]
    position = window.micro_batches[0][row].position
    events = [(at, e) for at, e in window.events[0] if at <= position]
    events += [(position, added), *((at, e) for at, e in window.events[0] if at > position)]
    return replace(window, events={**window.events, 0: tuple(events)})


def drawn(window: Window, told: Judgement, width: int = 80) -> list[str]:
    lines = [line.plain for line in window_picture(window, told.evidence, width=width)]
    return [re.sub(r"\s+", " ", re.sub("[█▌▐▒]+", "", line)).strip() for line in lines[2:]]


def test_words_of_an_event_take_the_columns_that_its_place_leaves():
    told = judgement()
    detail = "DataLoader of 1,000 batches of 8 rows"
    window = between(
        told.evidence.windows[0],
        0,
        kind="pass",
        value=1.0,
        detail=detail,
        place=Place(file="a/b/t.py", line=9),
    )
    lines = [line.plain for line in window_picture(window, told.evidence, width=80)]
    (line,) = [line for line in lines if "pass over" in line]
    assert line.endswith("pass over the data begins: DataLoader of 1,000 batches ...  t.py:9")
    assert len(line) == 80
    window = between(told.evidence.windows[0], 0, kind="pass", value=1.0, detail=detail, place=None)
    lines = [line.plain for line in window_picture(window, told.evidence, width=80)]
    assert any(line.endswith("DataLoader of 1,000 batches of 8 rows") for line in lines)


def test_what_happens_several_times_in_one_place_says_how_often_before_the_value():
    told = judgement()
    window = told.evidence.windows[0]
    for _ in range(3):
        window = between(window, 0, kind="clip", value=1.0, place=Place(file="src/train.py", line=30))
    assert "· gradients clipped 3 times to a norm of 1 src/train.py:30" in drawn(window, told)


def test_what_happens_at_each_micro_batch_is_said_once():
    told = judgement((8, 8, 8, 8))
    rows = [line for line in drawn(told.evidence.windows[0], told) if "logged" in line or "│" in line]
    assert rows == [
        "1 8 1 │ src/train.py:27",
        "· after each micro-batch: logged 2.5 src/train.py:28",
        *(f"{i} 8 1 │ src/train.py:27" for i in (2, 3, 4)),
    ]
    # where one is unlike the others all are shown
    window = told.evidence.windows[0]
    kept = [pair for pair in window.events[0] if pair[0] != window.micro_batches[0][2].position + 1]
    window = replace(window, events={0: tuple(kept)})
    assert sum("logged 2.5" in line for line in drawn(window, told)) == 3


def test_what_happens_before_each_micro_batch_is_told_from_what_comes_after():
    told = judgement((8, 8, 8))
    window = told.evidence.windows[0]
    events = []
    for at, e in window.events[0]:
        if e.kind == "backward":
            events.append((at - 1, event("average", place=Place(file="t.py", line=5)).events[0]))
        events.append((at, e))
    lines = drawn(replace(window, events={0: tuple(events)}), told)
    assert lines[:4] == [
        "· gradients cleared: optimizer.zero_grad() src/train.py:20",
        "· before each micro-batch: average of the weights moved t.py:5",
        "1 8 1 │ src/train.py:27",
        "· after each micro-batch: logged 2.5 src/train.py:28",
    ]
    assert sum("average" in line for line in lines) == 1


def test_events_of_a_window_that_carries_are_beside_its_own_micro_batches():
    told = judgement((8, 8))
    window = told.evidence.windows[0]
    first, second = window.micro_batches[0]
    carried = replace(first, index=-1, carried=True)
    window = replace(window, micro_batches={0: (carried, replace(second, index=0))})
    lines = drawn(window, told)
    assert lines[:-1] == [
        "· gradients cleared: optimizer.zero_grad() src/train.py:20",
        "0 ? ? │ carried over ...n.py:27",
        "· logged 2.5 src/train.py:28",
        "1 8 1 │ src/train.py:27",
        "· logged 2.5 src/train.py:28",
        "· gradients clipped to a norm of 1 src/train.py:30",
        "· step src/train.py:31",
    ]


def test_a_long_window_shows_its_ends_the_most_unlike_and_what_is_rare():
    items, weights = [10] * 60, [(1.0, 1.0)] * 60
    weights[30], weights[40] = (4.0, 4.0), (0.25, 0.25)
    told = judgement(items, weights=weights)
    window = told.evidence.windows[0]
    positions = [micro_batch.position for micro_batch in window.micro_batches[0]]
    clipped = event("clip", value=1.0).events[0]
    window = replace(
        window,
        events={0: tuple((at, clipped if at == positions[20] - 2 else e) for at, e in window.events[0])},
    )
    lines = [line.plain for line in window_picture(window, told.evidence, width=80)]
    assert [int(row.split()[0]) for row in rows_of(lines)] == [1, 2, 21, 31, 41, 59, 60]
    assert sum("gradients clipped" in line for line in lines) == 2
    gaps = [line.strip() for line in lines if line.strip().startswith("...")]
    assert gaps[0] == "... 18 more micro-batches, weight x N 1"


def test_what_was_lost_carried_or_unknown_is_said():
    told = judgement(lost=[(0, 0)])
    window = told.evidence.windows[0]
    lines = picture(told)
    assert re.search(r"512 +0 .*│ +cleared", rows_of(lines)[0])
    assert any("total weight 0.111, 1 is right" in line for line in lines)
    first, second = window.micro_batches[0]
    unknown = replace(
        window,
        terms=(),
        total=None,
        unjudged="no graph",
        micro_batches={0: (replace(first, carried=True), second)},
        complete=False,
    )
    lines = [line.plain for line in window_picture(unknown, told.evidence, width=80)]
    assert lines[0] == "after the last update of SGD: 1 micro-batch without a step"
    assert re.search(r"\? +\? .*│ +cleared, carried over", rows_of(lines)[0])
    assert lines[-1].strip() == "weights not known: no graph"


def test_the_window_of_the_gravest_finding_is_drawn():
    told = judgement(num_updates=3, verdict="findings", findings=[UNEQUAL])
    assert pictured_window(told) is told.evidence.windows[1]
    assert pictured_window(judgement(num_updates=3, findings=[NOTE])).index == 1
    other = replace(UNEQUAL, optimizer=1)
    assert pictured_window(judgement(num_updates=3, findings=[other])).index == 1


@pytest.mark.parametrize("width", [80, 100])
def test_each_finding_says_what_where_effect_mend_and_page(width):
    told = judgement(num_updates=3, verdict="findings", findings=[UNEQUAL, TOTAL])
    text = report_text(told, width)
    assert max(map(len, text.splitlines()[1:])) <= width
    first, second = text.split("\nwrong  ")[1:]
    assert first.splitlines()[0] == "unequal_item_weights, across micro-batches  updates 2 to 3, 5"
    assert re.search(r"where +src/train.py:27 in epoch\n +loss = F.cross_entropy\(x, y\) / A\n", first)
    assert re.search(r"effect +Short samples are learned", first)
    assert re.search(r"mend +Divide sums .*:\n {14}loss = sum_of_losses / num_items", first)
    assert "docs/defects/unequal_item_weights.md" in first
    assert second.splitlines()[0] == "total_weight, factor 0.25  update 2"
    # its cause is mended, not the consequence
    assert "it follows from unequal_item_weights" in second
    assert "Divide once." not in second


def test_a_long_line_of_code_keeps_its_indentation_where_it_is_broken():
    code = "loss = " + " + ".join(f"torch.nn.functional.cross_entropy(outputs[{i}], y)" for i in range(3))
    odd = replace(UNEQUAL, place=place(27, code=code))
    lines = report_text(judgement(num_updates=2, findings=[odd], verdict="findings"), 80).splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("  where"))
    assert [len(line) - len(line.lstrip()) for line in lines[at + 1 : at + 4]] == [12, 12, 12]
    assert " ".join(line.strip() for line in lines[at + 1 : at + 4]).startswith(code)


def test_the_tally_counts_causes():
    lines = report_text(judgement(num_updates=3, findings=[UNEQUAL, TOTAL, COST, NOTE, NOTE])).splitlines()
    assert lines[1] == "1 wrong, 1 cost, 2 notes; 1 more follows from them"


def test_what_was_watched_meant_and_not_seen_is_told():
    told = judgement(
        num_updates=2,
        num_ranks=2,
        intent=Intent(micro_batches=4, source="--expect-micro-batches"),
        unseen=("ZeRO-3 partitions",),
        num_skipped_updates=5,
        ended="failed",
        failure="RuntimeError: no more data",
        unjudged=["the auxiliary loss"],
    )
    lines = report_text(told, 120).splitlines()
    assert lines[0] == (
        "The script failed after 2 updates: RuntimeError: no more data; nothing was wrong in these"
    )
    assert lines[1:7] == [
        "watched 2 updates of SGD, after 5 that were not watched, on 2 ranks (2 replicas)",
        "meant: 4 micro-batches an update (--expect-micro-batches)",
        "rank 0 failed: RuntimeError: no more data",
        "rank 1 failed: RuntimeError: no more data",
        "not judged: the auxiliary loss",
        "not seen: ZeRO-3 partitions",
    ]


def test_several_updates_have_a_line_each():
    told = judgement(num_updates=3)
    skipped = replace(told.evidence.windows[1], skipped=True, total=None, lowest=None)
    windows = [told.evidence.windows[0], skipped, told.evidence.windows[2]]
    told = replace(told, evidence=replace(told.evidence, windows=windows))
    lines = [line.split() for line in report_text(told).splitlines()]
    assert ["1", "2", "576", "1", "1"] in lines
    assert ["2", "2", "576", "-", "skipped"] in lines


def test_updates_with_findings_have_a_line_however_many_there_are():
    told = judgement(
        num_updates=30, verdict="findings", findings=[replace(UNEQUAL, updates=(2, 12, 13, 30))]
    )
    table = report_text(told).split("update  micro-batches")[1].split("\n\n")[0].splitlines()[1:]
    assert [line.split()[0] for line in table] == [*map(str, range(1, 9)), "...", "12", "13", "...", "30"]
    other = replace(told, findings=(replace(told.findings[0], optimizer=1),))
    table = report_text(other).split("update  micro-batches")[1].split("\n\n")[0].splitlines()[1:]
    assert [line.split()[0] for line in table] == [*map(str, range(1, 9)), "..."]


def test_a_judgement_and_its_parts_are_short_in_a_notebook():
    told = judgement(
        num_updates=3, num_ranks=2, verdict="findings", findings=[UNEQUAL, NOTE], unjudged=["x"]
    )
    words = "Judgement(findings: wrong unequal_item_weights, note coupled_samples; 1 not judged)"
    assert repr(told) == str(told) == words
    assert repr(judgement()) == "Judgement(clean: no findings)"
    assert repr(told.evidence) == "Evidence(windows=3, ranks=2, num_replicas=2)"
    window = told.evidence.windows[0]
    assert repr(window) == "Window(index=1, optimizer=0, micro_batches=2, num_items=1152, total=1.0)"
    assert repr(window.micro_batches[1][0]) == "MicroBatch(rank=1, index=0, kappa=1.0, lost='')"


def test_colours_are_for_terminals_only():
    told = judgement(num_updates=3, verdict="findings", findings=[UNEQUAL])
    assert "\x1b" not in report_text(told)
    stream = io.StringIO()
    render_report(told, Console(file=stream, force_terminal=True, color_system="standard", width=80))
    assert "\x1b[1;31mIn update 2" in stream.getvalue()
    assert "\x1b[32m           1\x1b[0m" in stream.getvalue()  # a weight of 1 is green
    plain = re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue())
    assert max(map(len, plain.splitlines())) <= 80


def test_a_terminal_is_not_given_what_it_would_obey():
    odd = replace(UNEQUAL, message="Loss \x1b[2J is odd.", mend="a\x1bb")
    text = report_text(judgement(num_updates=3, verdict="findings", findings=[odd]))
    assert "\x1b" not in text
    assert "Loss \\x1b[2J is odd." in text


@pytest.mark.parametrize(
    ("message", "first"),
    [
        ("In update 3, it is 8.3 times. And more.", "In update 3, it is 8.3 times."),
        ("train.py never clears. It has to.", "train.py never clears."),
        ("One only", "One only"),
    ],
)
def test_first_sentence(message, first):
    assert first_sentence(message) == first


@pytest.mark.parametrize(
    ("weights", "text"),
    [
        ((1.0, 1.00001), "1"),
        ((0.999, 1.01), "0.999 to 1.01"),
        ((0.416666, 4.0), "0.417 to 4"),
        ((0.0, 0.0), "0"),
        ((-1.0, -1.0), "-1"),
    ],
)
def test_weights_in_words(weights, text):
    assert weight_text(*weights) == text


def test_places_lose_their_folders_first():
    deep = Place(file="src/loops/train.py", line=12)
    assert place_text(deep, 30) == "src/loops/train.py:12"
    assert place_text(deep, 12) == "train.py:12"
    assert place_text(deep, 8) == "...py:12"


def test_events_in_words():
    begins = event("pass", value=1.0).events[0]
    scheduled = event("schedule", value=0.0003, through="accelerate", detail="LambdaLR").events[0]
    logged = event("logged", value=0.25, detail="loss 0.25 after 3").events[0]
    assert event_words(logged) == "logged: loss 0.25 after 3"
    assert event_words(begins) == "pass over the data begins"
    assert event_words(scheduled) == "schedule moved to a rate of 0.0003: LambdaLR (by accelerate)"


def test_two_losses_of_a_micro_batch_are_one_micro_batch_and_what_was_carried_is_none():
    window = judgement((8, 8, 8, 8)).evidence.windows[0]
    group = window.micro_batches[0]
    other = (Place(file="src/train.py", line=29),)
    two = [replace(each, backward=replace(each.backward, site=other)) for each in group[1::2]]
    mixed = replace(window, micro_batches={0: (group[0], two[0], group[2], two[1])})
    carried = replace(window, micro_batches={0: (replace(group[0], carried=True), *group[1:])})
    assert [num_micro_batches(each) for each in (window, mixed, carried)] == [(4, 4), (2, 2), (3, 3)]
