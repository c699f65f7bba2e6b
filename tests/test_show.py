"""``wholebatch show``: the facts of a run, for a person and for a program."""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from runs import a_header, a_record, a_resumption, an_evaluation
from wholebatch.checkpoint_folder import begin_folder, finish_folder
from wholebatch.errors import RecordError
from wholebatch.record import Evaluation, RunHeader
from wholebatch.report.curves import BARS, loss_curve, sparkline, unsupervised_line
from wholebatch.report.run_view import ledger_line, render_run, value_words
from wholebatch.report.show import show
from wholebatch.report.summary import run_summary
from wholebatch.report.words import evaluation_words
from wholebatch.run_folder import RunLog, read_run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    header = RunHeader(
        global_batch_samples=16,
        micro_batch_samples=4,
        micro_batches_per_window=2,
        replicas=2,
        layout={"ranks": 2, "tensor_parallel": 1},
        tail="partial",
        precision="float32",
        seeds={"data": 7},
        dataset={"name": "topics [all]", "train_samples": 3147},
        proof={"equal": True, "cause": None, "error": 1.5e-9},
    )
    with RunLog(tmp_path / "run", header) as log:
        for update in range(1, 7):
            log.write(a_record(update, loss_per_item=6.0 - update / 2))
        skip = {"outcome": "skipped_nonfinite", "reason": "a gradient is not finite", "updates_applied": 6}
        log.write(a_record(7, loss_per_item=None, gradient_norm=None, **skip))
        tail = {"samples": 5, "items": 100, "positions": 150, "partial": True}
        log.write(a_record(8, loss_per_item=2.0, updates_applied=7, **tail))
        log.write_evaluation(
            Evaluation(
                split="held_out",
                updates_applied=7,
                samples_consumed=117,
                samples=308,
                items=44111,
                loss_per_item=2.3456,
                seconds=1.5,
            )
        )
    return tmp_path / "run"


def rendered(folder: Path) -> str:
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(render_run(read_run(folder)))
    return console.export_text()


def line_with(text: str, word: str) -> str:
    found = [line for line in text.splitlines() if line.lstrip().startswith(word)]
    assert found, f"no line begins with {word!r} in\n{text}"
    return " ".join(found[0].split())


def test_the_facts_are_there(folder: Path) -> None:
    text = rendered(folder)
    ledger = "ledger 4 samples x 2 micro-batches x 2 replicas = 16 samples an update"
    assert line_with(text, "ledger") == ledger
    assert line_with(text, "updates ") == ("updates 8 attempted, 7 applied; not finite 1, empty 0")
    assert line_with(text, "samples ") == "samples 117 in 32 micro-batches"
    assert line_with(text, "items ") == "items 6,400 in 8,550 positions"
    assert line_with(text, "unsupervised ") == "unsupervised 25.1% of positions"
    assert line_with(text, "reductions") == "reductions 8 of gradients, by one rank"
    assert line_with(text, "seconds ") == "seconds 4.0; 1,600 items/s"
    assert line_with(text, "memory") == "memory 1,000 MiB at the peak of a rank"
    assert line_with(text, "loss per item ") == "loss per item first 5.5000, last 2.0000, lowest 2.0000"
    assert line_with(text, "held_out") == "held_out 7 117 44,111 2.3456"
    assert line_with(text, "first batch") == "first batch equal yes, error 1.5e-09"
    assert line_with(text, "data ") == "data name topics [all], train samples 3,147"
    assert ", done 20" in line_with(text, "began 20")


def test_what_gradients_were_added_up_in_is_told(tmp_path: Path) -> None:
    for name, dtypes in {"one": ["float32"] * 2, "two": ["bfloat16", "float32"]}.items():
        with RunLog(tmp_path / name, a_header()) as log:
            for number, dtype in enumerate(dtypes, 1):
                log.write(a_record(number, accumulated_in=dtype))
    assert line_with(rendered(tmp_path / "one"), "added up in") == "added up in float32"
    told = "added up in bfloat16 in 1 update, float32 in 1 update"
    assert line_with(rendered(tmp_path / "two"), "added up in") == told
    assert run_summary(read_run(tmp_path / "two"))["accumulated_in"] == {"bfloat16": 1, "float32": 1}


def test_the_last_updates_are_listed(folder: Path) -> None:
    text = rendered(folder)
    assert line_with(text, "8 ") == "8 partial 5 100 2.0000 1.2500 0.003 0.500"
    assert line_with(text, "7 ") == "7 not finite 16 900 - - 0.003 0.500"
    assert "update 7 was skipped: a gradient is not finite" in text
    assert "update 3 was" not in text


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"positions": 0}, "items 7,300 in - positions"),  # of this update alone
        ({"items": 8000}, "items 14,400 in 9,750 positions"),  # weights add up to more
    ],
)
def test_no_padding_is_told_that_is_not_known(folder: Path, changes: dict[str, int], line: str) -> None:
    with (folder / "records.jsonl").open("a") as file:
        file.write(json.dumps(a_record(9, **changes).to_dict()) + "\n")
    assert line_with(rendered(folder), "items ") == line
    summary = run_summary(read_run(folder))
    assert summary["unsupervised_share"] is None
    assert summary["positions"] == (9750 if "items" in changes else 0)


def test_nothing_goes_by_another_word(folder: Path) -> None:
    summary = json.dumps(run_summary(read_run(folder)))
    for text in (rendered(folder), summary):
        assert "step" not in text.lower()
        assert "iteration" not in text.lower()


def test_a_run_that_was_killed_says_so(folder: Path) -> None:
    (folder / "end.json").unlink()
    records = folder / "records.jsonl"
    records.write_bytes(records.read_bytes()[:-30])
    text = rendered(folder)
    assert "did not end, or is still going" in text
    assert "cut off in the middle" in text
    assert "7 attempted" in text


def test_a_torn_end_is_shown_as_none(folder: Path) -> None:
    (folder / "end.json").write_text("")
    text = rendered(folder)
    assert "did not end, or is still going" in text
    assert "cut off in the middle" in text


def test_a_learning_rate_that_was_not_finite_is_a_dash(folder: Path) -> None:
    with (folder / "records.jsonl").open("a") as file:
        file.write(json.dumps(a_record(9, learning_rates=[math.nan]).to_dict()) + "\n")
    assert line_with(rendered(folder), "9 ") == "9 applied 16 900 2.5000 1.2500 - 0.500"


def test_a_failed_run_says_why(folder: Path) -> None:
    end = json.loads((folder / "end.json").read_text()) | {
        "reason": "failed",
        "message": "OSError: no space",
    }
    (folder / "end.json").write_text(json.dumps(end))
    assert "OSError: no space" in rendered(folder)


def test_a_run_without_updates(tmp_path: Path, folder: Path) -> None:
    RunLog(tmp_path / "new", read_run(folder).header).close("interrupted")
    text = rendered(tmp_path / "new")
    assert "0 attempted" in text
    assert "loss per item first -, last -, lowest -" in " ".join(text.split())
    summary = run_summary(read_run(tmp_path / "new"))
    assert (
        summary["unsupervised_share"] is summary["items_per_second"] is summary["peak_memory_bytes"] is None
    )


def test_the_json_has_what_it_promises(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert show([folder], json_target="-") == 0
    captured = capsys.readouterr()
    data = json.loads(captured.out)
    assert "8 attempted" in captured.err
    assert data["schema_version"] == 1
    assert data["counters"]["updates_applied"] == 7
    assert data["counters"]["items"] == 6400
    assert data["positions"] == 8550
    assert data["unsupervised_share"] == pytest.approx(1 - 6400 / 8550)
    assert data["loss_per_item"] == {"first": 5.5, "last": 2.0, "lowest": 2.0}
    assert data["header"]["layout"]["ranks"] == 2
    assert data["evaluations"][0]["loss_per_item"] == 2.3456
    assert [r["updates_attempted"] for r in data["last_records"]] == [4, 5, 6, 7, 8]
    assert data["end"]["reason"] == "done"


def test_text_goes_to_standard_output_without_json(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert show([folder]) == 0
    captured = capsys.readouterr()
    assert "8 attempted" in captured.out
    assert captured.err == ""


def test_no_run_there(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="no run in"):
        show([tmp_path])


def test_a_folder_of_runs_is_listed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = folder.parent
    RunLog(runs / "second", read_run(folder).header).close()
    (runs / "second" / "end.json").unlink()  # as if it were still going
    (runs / "torn").mkdir()
    (runs / "torn" / "header.json").write_text("{")
    (runs / "notes").mkdir()
    assert show([runs], json_target="-") == 0
    captured = capsys.readouterr()
    assert "header.json is not a JSON object" in captured.err
    listed = [line.split() for line in captured.err.splitlines()]
    began = read_run(folder).header.started_at[:16].split("T")
    assert ["run", *began, "done", "7", "6,400", "2.0000"] in listed
    assert ["second", *began, "none", "yet", "0", "0", "-"] in listed
    assert ["torn", "can't", "be", "read"] in listed
    data = json.loads(captured.out)
    assert [Path(row["folder"]).name for row in data["runs"]] == ["run", "second", "torn"]
    assert data["runs"][0]["updates_applied"] == 7
    assert data["runs"][0]["loss_per_item"]["last"] == 2.0
    assert data["runs"][1]["end"] is None
    assert "is not a JSON object" in data["runs"][2]["problem"]


@pytest.mark.parametrize("columns", [80, 60])
def test_a_list_breaks_no_name_that_a_run_gets_by_itself_and_cuts_no_number(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: int
) -> None:
    header = read_run(folder).header
    name = "2026-11-30-220849"
    with RunLog(folder.parent / name, header) as log:
        log.write(a_record(1, items=635_311_725, loss_per_item=2.3065))
    monkeypatch.setenv("COLUMNS", str(columns))
    assert show([folder.parent]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= columns
    assert "…" not in out
    assert "  635,311,725     2.3065" in out
    if columns == 80:
        assert f"\n{name}  {header.started_at[:16].replace('T', ' ')}  done" in out


def test_the_ledger_of_one_of_each(folder: Path) -> None:
    header = read_run(folder).header.to_dict() | {"micro_batches_per_window": 1, "replicas": 1}
    del header["schema_version"]
    line = ledger_line(RunHeader(**(header | {"global_batch_samples": 4})))
    assert line == "4 samples x 1 micro-batch x 1 replica = 4 samples an update"
    line = ledger_line(RunHeader(**(header | {"global_batch_samples": 1, "micro_batch_samples": 1})))
    assert line == "1 sample x 1 micro-batch x 1 replica = 1 sample an update"


def test_a_run_of_one_of_each(folder: Path) -> None:
    with RunLog(folder.parent / "one", read_run(folder).header) as log:
        log.write(a_record(1, samples=1, micro_batches=1, items=1, positions=1))
    text = rendered(folder.parent / "one")
    assert line_with(text, "samples") == "samples 1 in 1 micro-batch"
    assert line_with(text, "items ") == "items 1 in 1 position"
    words = evaluation_words(an_evaluation(samples=1, items=1))
    assert words == "held out after 3 updates: loss per item 2.7500 over 1 item in 1 sample (0.5 s)"


def test_the_curve_falls_and_leaves_gaps() -> None:
    records = [
        a_record(1, loss_per_item=4.0),
        a_record(2, loss_per_item=None),
        a_record(3, loss_per_item=2.0),
    ]
    lines = loss_curve(records, width=10, height=2)
    assert lines[0] == "4.000 │█  "
    assert lines[1] == "2.000 │█ ▁"
    assert lines[2].split() == ["update", "1", "3"]


def test_a_column_of_several_updates_is_weighted_by_items() -> None:
    """Items 2 and 6 with losses 1 and 3 make 2.5, where the mean of the means would be 2.0."""
    group = [a_record(1, items=2, loss_per_item=1.0), a_record(2, items=6, loss_per_item=3.0)]
    lines = loss_curve(
        [*group, a_record(3, loss_per_item=9.0), a_record(4, loss_per_item=9.0)], width=2, height=2
    )
    assert lines[0].startswith("9.000")
    assert lines[1].startswith("2.500")


def test_no_curve_of_less_than_two_losses() -> None:
    assert loss_curve([a_record(1), a_record(2, loss_per_item=None)], width=10, height=2) == []
    assert loss_curve([], width=10, height=2) == []


def test_a_flat_curve_is_drawn() -> None:
    flat = [a_record(1, loss_per_item=2.0), a_record(2, loss_per_item=2.0)]
    assert loss_curve(flat, width=10, height=2)[1].endswith("▁▁")


def test_losses_near_the_largest_float_are_drawn() -> None:
    high = [a_record(update, items=10**6, loss_per_item=1e308) for update in (1, 2, 3, 4)]
    assert [line.split()[0] for line in loss_curve(high, width=2, height=2)[:2]] == ["1.000e+308"] * 2
    far = [a_record(update, loss_per_item=sign * 1.7e308) for update, sign in ((1, -1), (2, 1))]
    assert loss_curve(far, width=2, height=2)[:2] == [" 1.700e+308 │ █", "-1.700e+308 │▁█"]


def test_sparkline() -> None:
    assert sparkline([float(i) for i in range(8)]) == BARS
    assert sparkline([1.0, None, 2.0]) == "▁ █"
    assert sparkline([None]) == ""


def test_the_unsupervised_of_a_column_is_that_of_its_items_and_positions() -> None:
    """Items 10 of 20 and 90 of 100 positions leave 20 of 120 unused, where the mean would be 30%."""
    group = [a_record(1, items=10, positions=20), a_record(2, items=90, positions=100)]
    assert unsupervised_line(group, width=1) == ("16.7%", "▁")
    assert unsupervised_line(group, width=2) == ("10.0% to 50.0%", "█▁")
    unknown = a_record(3, items=5, positions=0)
    assert unsupervised_line([*group, unknown], width=3) == ("10.0% to 50.0%", "█▁ ")
    assert unsupervised_line([unknown], width=3) is None
    assert unsupervised_line([], width=3) is None


def test_the_unsupervised_share_is_drawn_under_the_loss(folder: Path) -> None:
    lines = rendered(folder).splitlines()
    (at,) = [
        number for number, line in enumerate(lines) if line.startswith("unsupervised share, by update")
    ]
    assert lines[at].rstrip() == "unsupervised share, by update: 25.0% to 33.3%"
    assert lines[at + 1].rstrip() == "      │▁▁▁▁▁▁▁█"
    assert lines[at - 2].startswith("2.000 │"), "the columns of both stand under each other"


def test_no_unsupervised_line_without_positions(tmp_path: Path, folder: Path) -> None:
    with RunLog(tmp_path / "new", read_run(folder).header) as log:
        for update in (1, 2):
            log.write(a_record(update, positions=0))
    text = rendered(tmp_path / "new")
    assert "unsupervised share" not in text
    assert line_with(text, "unsupervised ") == "unsupervised -"


def a_checkpoint(folder: Path, updates: int, *, samples: int, score: float | None = None) -> Path:
    """A checkpoint as a save leaves it, but for its files."""
    checkpoints = folder / "checkpoints"
    manifest = {
        "created_at": "2026-01-02T03:04:05+00:00",
        "counters": {"updates_attempted": updates, "samples": samples},
        "layout": {},
        "score": score,
        "versions": {},
        "files": {},
    }
    return finish_folder(begin_folder(checkpoints), manifest, updates_attempted=updates)


def test_how_a_run_ended_is_not_cut_short_in_a_list(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    header = read_run(folder).header
    RunLog(tmp_path / "runs" / "one-with-a-name-of-its-own", header).close("interrupted")
    show([tmp_path / "runs"])
    assert "interrupted" in capsys.readouterr().out


def test_checkpoints_are_listed(folder: Path) -> None:
    assert "\ncheckpoints" not in rendered(folder)
    a_checkpoint(folder, 6, samples=96)
    a_checkpoint(folder, 4, samples=64, score=2.5)
    text = rendered(folder)
    assert line_with(text, "update-00000004") == "update-00000004 4 64 2.5000 2026-01-02T03:04:05+00:00"
    assert line_with(text, "update-00000006") == "update-00000006 6 96 - 2026-01-02T03:04:05+00:00"
    assert run_summary(read_run(folder))["checkpoints"][0] == {
        "name": "update-00000004",
        "created_at": "2026-01-02T03:04:05+00:00",
        "updates_attempted": 4,
        "samples": 64,
        "score": 2.5,
    }


@pytest.mark.parametrize("manifest", ["[1]", "{", "\x00", '{"counters": 3, "score": "low"}'])
def test_odd_checkpoints_do_not_keep_a_run_from_being_shown(folder: Path, manifest: str) -> None:
    a_checkpoint(folder, 4, samples=64)
    a_checkpoint(folder, 5, samples=80)
    (folder / "checkpoints" / "update-00000004" / "manifest.json").write_text(manifest)
    (folder / "checkpoints" / ".unfinished-update-00000005").mkdir()
    (folder / "checkpoints" / "update-00000006").mkdir()
    (folder / "checkpoints" / "update-00000005").rename(folder / "checkpoints" / "update-last")
    a_checkpoint(folder, 7, samples=112)
    names = [each["name"] for each in run_summary(read_run(folder))["checkpoints"]]
    assert names == ["update-00000007"]
    text = rendered(folder)
    assert "8 attempted" in text
    assert "checkpoint update-00000004 can't be used: its manifest.json is damaged" in text
    assert run_summary(read_run(folder))["damaged_checkpoints"] == [
        {"name": "update-00000004", "problem": "its manifest.json is damaged"},
        {
            "name": "update-00000006",
            "problem": "its manifest.json can't be read (No such file or directory)",
        },
    ]


def test_a_name_is_shown_and_not_obeyed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("one\x1b[31m", "two\x1b[0m"):
        RunLog(tmp_path / "\x1b[2J" / name, a_header()).close("failed", "odd \x1b[1m file")
    folders = sorted((tmp_path / "\x1b[2J").iterdir())
    (folders[1] / "records.jsonl").write_text("no\n\n")
    for runs in ([folders[0]], [tmp_path / "\x1b[2J"], [folders[0], folders[0]]):
        show(runs)
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert r"\x1b[2J/one\x1b[31m" in text.replace("\n", "")
    assert r"odd \x1b[1m file" in text


def test_resumptions_are_told(folder: Path) -> None:
    changes = {"changed_settings": {"run.num_updates": [8, 12], "batch.drop": [False, None]}}
    RunLog.resume(folder, a_resumption(6, **changes)).close("interrupted")
    (folder / "end.json").unlink()
    on_one = {"changed_settings": {}, "layout": {"ranks": 1}, "replicas": 1}
    RunLog.resume(folder, a_resumption(5, **on_one)).close()
    text = rendered(folder)
    assert line_with(text, "resumed 2 times").startswith("resumed 2 times, last 20")
    lines = [line.split()[1:] for line in text.splitlines() if line.startswith("20")]
    assert lines == [
        ["6", "2", "8", "x", "1", "x", "2", "done"],
        ["5", "1", "8", "x", "1", "x", "1", "killed"],
    ]
    assert "after update 5: ranks 2 -> 1" in text
    assert "after update 6: run.num_updates 8 -> 12, batch.drop no -> None" in text
    data = run_summary(read_run(folder))
    assert [each["abandoned_updates"] for each in data["resumptions"]] == [2, 1]


def test_a_gap_in_the_updates_is_told(folder: Path) -> None:
    lines = (folder / "records.jsonl").read_text().splitlines(keepends=True)
    (folder / "records.jsonl").write_text("".join(lines[:2] + lines[3:]))
    text = rendered(folder)
    assert "The totals can't be trusted: record 3 is of update 4, where update 3 is due." in text
    assert run_summary(read_run(folder))["disorder"] == "record 3 is of update 4, where update 3 is due"


def test_many_evaluations_are_cut_and_said_to_be(tmp_path: Path, folder: Path) -> None:
    with RunLog(tmp_path / "new", read_run(folder).header) as log:
        for samples in range(20):
            log.write_evaluation(an_evaluation(samples_consumed=samples))
    text = rendered(tmp_path / "new")
    assert "evaluations, the last 8 of 20" in text
    assert len([line for line in text.splitlines() if line.startswith("held_out")]) == 8


@pytest.mark.parametrize("width", [80, 120])
def test_nothing_is_wider_than_the_screen(folder: Path, width: int) -> None:
    a_checkpoint(folder, 10**6, samples=10**9)
    huge = {"samples": 10**6, "items": 10**9, "positions": 10**10, "loss_per_item": 1e300, "partial": True}
    with (folder / "records.jsonl").open("a") as file:
        for update in range(9, 100):
            file.write(json.dumps(a_record(update, **huge).to_dict()) + "\n")
    RunLog.resume(folder, a_resumption(98, samples=117 + 90 * 10**6)).close()
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(render_run(read_run(folder)))
    text = console.export_text()
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    assert "…" not in text
    assert line_with(text, "98 ").startswith("98 partial 1,000,000 1,000,000,000 1.000e+300 1.2500")


@pytest.mark.slow
def test_a_hundred_thousand_updates_are_shown_at_once(folder: Path) -> None:
    """Under 2 s of one core on the machine that this was written on; three times that is an error."""
    line = a_record(1, sample_digest="0123456789abcdef").to_dict()
    with (folder / "records.jsonl").open("w") as file:
        for update in range(1, 100_001):
            line["updates_attempted"] = line["updates_applied"] = update
            file.write(json.dumps(line) + "\n")
    begin = time.process_time()
    text = rendered(folder)
    seconds = time.process_time() - begin
    assert "100,000 attempted, 100,000 applied" in text
    assert seconds < 6.0


def test_show_imports_no_torch() -> None:
    code = "import sys, wholebatch.report.show; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_facts_inside_facts_are_words_too() -> None:
    assert value_words({"trained_in_full": [], "files": ["a.txt", "b.txt"], "betas": [0.9, 0.99]}) == (
        "(trained in full none, files [a.txt, b.txt], betas [0.9, 0.99])"
    )
    assert value_words({"dtype": "float64", "apart": 4.5e-16, "seen": True}) == (
        "(dtype float64, apart 4.5e-16, seen yes)"
    )


def test_a_setting_is_shown_as_it_was_typed_and_a_measured_number_in_three_digits() -> None:
    typed = [0.9999, 0.99995, 65536.0, 16.0, 3e-05, 0.0]
    assert [value_words(each) for each in typed] == ["0.9999", "0.99995", "65536", "16", "3e-05", "0"]
    assert [value_words(each) for each in (1 / 3, 2e-16 / 3, math.inf)] == ["0.333", "6.67e-17", "inf"]
