"""``wholebatch show RUN --follow``: a run that is going, watched until it ends."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from runs import a_header, a_record, a_resumption, an_evaluation
from wholebatch.cli import main
from wholebatch.errors import RecordError
from wholebatch.report import follow as follow_module
from wholebatch.report.follow import follow, news, panel, update_line
from wholebatch.report.show import show
from wholebatch.run_folder import RunLog, read_run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


def while_waiting(monkeypatch: pytest.MonkeyPatch, *happens: Callable[[], Any]) -> list[float]:
    """Let something happen in each wait between two looks; return the waits."""
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        happens[len(waits)]()
        waits.append(seconds)

    monkeypatch.setattr(follow_module, "sleep", sleep)
    return waits


def kill(log: RunLog) -> None:
    for file in log._files.values():
        file.close()
    log._files.clear()


def plain_lines(folder: Path) -> list[str]:
    console = Console(width=40, file=io.StringIO())
    run = follow(folder, console)
    assert run == read_run(folder)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_every_update_is_a_line_until_the_run_ends(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = RunLog(folder, a_header())
    for update in range(1, 9):
        log.write(a_record(update))

    def more() -> None:
        skipped: dict[str, Any] = {"outcome": "skipped_empty", "reason": "no items", "loss_per_item": None}
        log.write(a_record(9, updates_applied=8, **skipped))
        log.write_evaluation(an_evaluation(updates_applied=8))

    waits = while_waiting(monkeypatch, lambda: None, more, log.close)
    lines = plain_lines(folder)
    assert waits == [follow_module.POLL_S] * 3
    assert lines[0].endswith("run: 4 samples x 2 micro-batches x 2 replicas = 16 samples an update")
    assert [line.split("  ")[0] for line in lines[1:6]] == [f"update {n}" for n in (4, 5, 6, 7, 8)]
    assert lines[6:] == [
        "update 9 was skipped: no items",
        "held out after 8 updates: loss per item 2.7500 over 700 items in 10 samples (0.5 s)",
    ]
    assert lines[5] == update_line(a_record(8))
    assert lines[5] == "update 8  loss per item 2.5000  16 samples  900 items  norm 1.2500  0.500 s"


def test_evaluations_stand_among_the_updates_that_came_with_them(folder: Path) -> None:
    log = RunLog(folder, a_header())
    before = read_run(folder)
    for update in range(1, 6):
        log.write(a_record(update))
        if update in (2, 4):
            log.write_evaluation(an_evaluation(updates_applied=update))
            log.write_evaluation(an_evaluation(updates_applied=update, split="held_out_average"))
    log.close()
    heads = [line.partition("  ")[0].partition(":")[0] for line in news(before, read_run(folder))]
    assert heads == [
        "update 1",
        "update 2",
        "held out after 2 updates",
        "held out average after 2 updates",
        "update 3",
        "update 4",
        "held out after 4 updates",
        "held out average after 4 updates",
        "update 5",
    ]


def test_a_run_that_is_resumed_meanwhile(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = RunLog(folder, a_header())
    for update in range(1, 6):
        log.write(a_record(update))
    log.write_evaluation(an_evaluation(samples_consumed=48))
    log.write_evaluation(an_evaluation(samples_consumed=80))

    def resumed() -> None:
        kill(log)
        with RunLog.resume(folder, a_resumption(3)) as again:
            for update in (4, 5):
                again.write(a_record(update, items=901))
            again.write_evaluation(an_evaluation(updates_applied=5, samples_consumed=80, loss_per_item=2.5))

    while_waiting(monkeypatch, resumed)
    lines = plain_lines(folder)
    assert lines[6:] == [
        "resumed after 3 updates",
        update_line(a_record(4, items=901)),
        update_line(a_record(5, items=901)),
        "held out after 5 updates: loss per item 2.5000 over 700 items in 10 samples (0.5 s)",
    ]


def test_it_waits_for_the_run_to_begin(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir()
    while_waiting(monkeypatch, lambda: None, lambda: RunLog(folder, a_header()).close())
    lines = plain_lines(folder)
    assert lines[0] == f"waiting for a run in {folder}"
    assert lines[1].startswith(f"{folder}: 4 samples x")
    assert len(lines) == 2


def test_a_missing_folder_is_not_waited_for(folder: Path) -> None:
    with pytest.raises(RecordError, match=r"no folder .*run to follow a run in; start the run first"):
        show([folder], follow_it=True)


def test_a_run_that_has_ended_is_shown_at_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunLog(folder, a_header()) as log:
        log.write(a_record(1))
    assert show([folder], follow_it=True, json_target="-") == 0
    captured = capsys.readouterr()
    assert "1 attempted, 1 applied" in captured.err
    assert json.loads(captured.out)["counters"]["updates_applied"] == 1


def test_ctrl_c_ends_the_watching(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    kill(RunLog(folder, a_header()))
    while_waiting(monkeypatch, interrupt)
    assert main(["show", str(folder), "--follow"]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_in_a_terminal_a_panel_is_redrawn_and_gone_at_the_end(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.mkdir()
    logs: list[RunLog] = []

    def begin() -> None:
        logs.append(RunLog(folder, a_header()))
        logs[0].write(a_record(1))

    def go_on() -> None:
        logs[0].write(a_record(2, loss_per_item=1.5))
        logs[0].close()

    while_waiting(monkeypatch, begin, go_on)
    console = Console(width=80, height=24, file=io.StringIO(), force_terminal=True, color_system=None)
    follow(folder, console)
    assert isinstance(console.file, io.StringIO)
    drawn = console.file.getvalue()
    assert "waiting for a run in" in drawn
    assert drawn.index("1 update, 16 samples, 900 items; 1,800 items/s") < drawn.index(
        "2 updates, 32 samples"
    )
    assert drawn.rstrip().endswith("\x1b[2K"), "the last panel is wiped"


@pytest.mark.parametrize("num_updates", [0, 1, 300])
def test_the_panel_fits_a_small_terminal(folder: Path, num_updates: int) -> None:
    log = RunLog(folder, a_header())
    for update in range(1, num_updates + 1):
        log.write(a_record(update, loss_per_item=9.0 / update))
        log.write_evaluation(an_evaluation())
    log.close("failed", "OSError: no room")
    RunLog.resume(folder, a_resumption(num_updates)).close("failed", "OSError: no room")
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(panel(read_run(folder), quiet_seconds=12.0))
    lines = console.export_text().splitlines()
    assert len(lines) <= 24
    assert "nothing new for 12 s" in " ".join(lines)


def test_a_run_that_is_just_quiet_between_updates_says_nothing_of_it(folder: Path) -> None:
    RunLog(folder, a_header()).close()
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(panel(read_run(folder), quiet_seconds=1.0))
    assert "nothing new" not in console.export_text()


def test_a_folder_that_is_removed_meanwhile_ends_the_watching(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill(RunLog(folder, a_header()))
    while_waiting(monkeypatch, lambda: folder.rename(folder.with_name("other")))
    with pytest.raises(RecordError, match=r"no folder .*run to follow a run in; start the run first"):
        show([folder], follow_it=True)
    (folder.with_name("other")).rename(folder)
    while_waiting(monkeypatch, (folder / "header.json").unlink)
    with pytest.raises(RecordError, match=r"no run in .*run: it has no header\.json; give the folder of a"):
        show([folder], follow_it=True)


@pytest.mark.parametrize("terminal", [False, True])
def test_records_that_are_cut_short_by_no_resumption_are_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    log = RunLog(folder, a_header())
    for update in (1, 2, 3):
        log.write(a_record(update))

    def cut() -> None:
        with (folder / "records.jsonl").open("r+b") as file:
            file.truncate(file.read().index(b"\n") + 1)

    while_waiting(monkeypatch, cut, lambda: log.close("failed", "cut"))
    console = Console(width=200, file=io.StringIO(), force_terminal=terminal, color_system=None)
    follow(folder, console)
    assert isinstance(console.file, io.StringIO)
    told = "records.jsonl was cut short while it was watched, and no resumption did that: it had 3 records"
    assert console.file.getvalue().count(f"{told} and has 1") == 1
