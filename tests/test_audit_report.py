"""The report of an audit: its first line, the picture of a window, its findings, on 80 and 100 columns."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from audit_judgements import COST, NOTE, TOTAL, UNEQUAL, judgement
from audit_traces import event
from wholebatch.audit.judge.evidence import Judgement
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


def test_nothing_seen_is_not_judged_and_says_why():
    empty = judgement(verdict="not_judged")
    empty = replace(empty, evidence=replace(empty.evidence, windows=()))
    assert report_text(empty).startswith("Not judged: no optimizer took an update while")


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
    lines = report_text(told).splitlines()
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
