"""Going on with a run folder: nothing counts twice, nothing is lost, and a crash on the way mends."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from runs import a_header, a_record, a_resumption, an_evaluation
from wholebatch.errors import RecordError
from wholebatch.record import RunEnd
from wholebatch.run_folder import RunLog, read_run


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture
def interrupted(tmp_path: Path) -> Path:
    """Five updates and evaluations after 0, 3 and 5; a checkpoint was made after the third."""
    folder = tmp_path / "run"
    log = RunLog(folder, a_header())
    log.write_evaluation(an_evaluation(updates_applied=0, samples_consumed=0))
    for update in range(1, 6):
        log.write(a_record(update))
        if update in (3, 5):
            log.write_evaluation(an_evaluation(updates_applied=update, samples_consumed=16 * update))
    log.close("interrupted", "stopped by SIGTERM")
    return folder


def test_what_came_after_the_checkpoint_counts_once(interrupted: Path) -> None:
    end = read_run(interrupted).end
    assert end is not None
    with RunLog.resume(interrupted, a_resumption()) as log:
        assert read_run(interrupted).end is None, "it is going again"
        for update in range(4, 9):
            log.write(a_record(update, items=901))
    run = read_run(interrupted)
    assert [(r.updates_attempted, r.items) for r in run.records] == [
        *((update, 900) for update in (1, 2, 3)),
        *((update, 901) for update in (4, 5, 6, 7, 8)),
    ]
    assert run.counters().samples == 8 * 16
    assert [e.samples_consumed for e in run.evaluations] == [0, 48]
    assert run.end is not None
    assert run.end.reason == "done"
    (resumption,) = run.resumptions
    assert resumption == a_resumption(
        at=resumption.at, abandoned_updates=2, previous_end=end.to_dict(), versions=resumption.versions
    )
    assert run.disorder is None


def test_nothing_that_was_moved_away_is_lost(interrupted: Path) -> None:
    before = contents(interrupted)
    RunLog.resume(interrupted, a_resumption()).close()
    moved = lines_of(interrupted / "abandoned.jsonl")
    assert all(entry["schema_version"] == 1 and entry["resumption"] == 1 for entry in moved)
    for name in ("records.jsonl", "evaluations.jsonl"):
        kept = lines_of(interrupted / name)
        left = [entry["line"] for entry in moved if entry["file"] == name]
        assert kept + left == [json.loads(line) for line in before[name].splitlines()]
    assert len(moved) == 3


def test_lines_that_stay_are_the_same_bytes(interrupted: Path) -> None:
    before = contents(interrupted)["records.jsonl"]
    RunLog.resume(interrupted, a_resumption()).close()
    after = contents(interrupted)["records.jsonl"]
    assert after == b"".join(before.splitlines(keepends=True)[:3])


def test_a_line_that_was_cut_off_goes_too(interrupted: Path) -> None:
    for name in ("records.jsonl", "evaluations.jsonl"):
        with (interrupted / name).open("ab") as file:
            file.write(b'{"outcome": "app\xff')
    RunLog.resume(interrupted, a_resumption(5, samples=80)).close()
    assert not read_run(interrupted).torn_line
    assert [(e["file"], e["torn"]) for e in lines_of(interrupted / "abandoned.jsonl")] == [
        ("records.jsonl", '{"outcome": "app\\xff'),
        ("evaluations.jsonl", '{"outcome": "app\\xff'),
    ]
    assert read_run(interrupted).resumptions[0].abandoned_updates == 0


def test_a_complete_last_line_without_its_end_gets_one(interrupted: Path) -> None:
    file = interrupted / "records.jsonl"
    file.write_bytes(file.read_bytes()[:-1])
    with RunLog.resume(interrupted, a_resumption(5)) as log:
        log.write(a_record(6))
    assert [r.updates_attempted for r in read_run(interrupted).records] == [1, 2, 3, 4, 5, 6]
    assert not (interrupted / "abandoned.jsonl").exists()


def test_a_killed_run_and_a_second_resumption(interrupted: Path) -> None:
    (interrupted / "end.json").unlink()
    with RunLog.resume(interrupted, a_resumption(4)) as log:
        log.write(a_record(5))
    RunLog.resume(interrupted, a_resumption(3)).close("failed", "again")
    run = read_run(interrupted)
    assert [(r.updates_attempted, r.abandoned_updates) for r in run.resumptions] == [(4, 1), (3, 2)]
    assert run.resumptions[0].previous_end is None
    assert run.resumptions[1].previous_end is not None
    assert run.resumptions[1].previous_end["reason"] == "done"
    moved = lines_of(interrupted / "abandoned.jsonl")
    assert [e["resumption"] for e in moved if e["file"] == "records.jsonl"] == [1, 2, 2]


def test_a_run_can_be_begun_again_from_nothing(interrupted: Path) -> None:
    RunLog.resume(interrupted, a_resumption(0)).close()
    run = read_run(interrupted)
    assert run.records == []
    assert [e.samples_consumed for e in run.evaluations] == [0]


def test_fewer_records_than_the_checkpoint_has_updates(interrupted: Path) -> None:
    before = contents(interrupted)
    message = (
        f"{interrupted} has the records of 5 updates, and the checkpoint to resume from was made after "
        "update 7: resume from one of at most 5 updates"
    )
    with pytest.raises(RecordError, match=re.escape(message)):
        RunLog.resume(interrupted, a_resumption(7))
    assert contents(interrupted) == before


def test_a_checkpoint_of_other_samples(interrupted: Path) -> None:
    before = contents(interrupted)
    message = r"the first 3 updates in .* have 48 samples, and the checkpoint 40: it is of another run"
    with pytest.raises(RecordError, match=message):
        RunLog.resume(interrupted, a_resumption(samples=40))
    assert contents(interrupted) == before


def test_records_out_of_order_are_not_gone_on_with(interrupted: Path) -> None:
    lines = (interrupted / "records.jsonl").read_text().splitlines(keepends=True)
    (interrupted / "records.jsonl").write_text("".join([lines[0], lines[0], *lines[2:]]))
    message = "record 2 is of update 1, where update 2 is due"
    with pytest.raises(RecordError, match=rf"records\.jsonl can't be resumed: {message}"):
        RunLog.resume(interrupted, a_resumption())
    assert read_run(interrupted).disorder == message, "it can still be looked at"


def test_no_run_to_go_on_with(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"no run in .*: it has no header\.json"):
        RunLog.resume(tmp_path, a_resumption())


class Killed(BaseException):
    """What a kill is to a program: nothing after it happens."""


def fail_at(monkeypatch: pytest.MonkeyPatch, number: int, error: BaseException) -> list[str]:
    """Let the ``number``-th call that changes the disk raise; return the list of all such calls."""
    calls: list[str] = []

    def failing(name: str, real: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            if name == "open" and (len(arguments) < 2 or arguments[1] not in ("wb", "a")):
                return real(*arguments, **options)
            calls.append(name)
            if len(calls) == number:
                raise error
            return real(*arguments, **options)

        return call

    monkeypatch.setattr(os, "fsync", failing("fsync", os.fsync))
    for name in ("open", "replace", "unlink"):
        monkeypatch.setattr(Path, name, failing(name, getattr(Path, name)))
    return calls


# Of each of four files that are replaced, and of the folder after each; then the end; then to go on.
DISK_CALLS = ["open", "fsync", "replace", "fsync"] * 4 + ["unlink", "fsync"] + ["open", "open"]


def test_these_are_all_calls(interrupted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        calls = fail_at(patch, 0, Killed())
        log = RunLog.resume(interrupted, a_resumption())
    log.close()
    assert calls == DISK_CALLS


def settled(folder: Path) -> dict[str, bytes]:
    """The files of a folder but for its ends, with the moments left out."""
    return {
        name: re.sub(rb'"(at|ended_at)": "[^"]*"', b"", text)
        for name, text in contents(folder).items()
        if name not in ("resumptions.jsonl", "end.json")
    }


@pytest.mark.parametrize("number", range(1, len(DISK_CALLS) + 1))
@pytest.mark.parametrize("error", [Killed(), OSError(errno.ENOSPC, "No space left on device")])
def test_after_a_failure_at_any_point_it_can_be_gone_on_with(
    interrupted: Path, monkeypatch: pytest.MonkeyPatch, number: int, error: BaseException
) -> None:
    undisturbed = interrupted.parent / "undisturbed"
    shutil.copytree(interrupted, undisturbed)
    resumption = a_resumption()
    RunLog.resume(undisturbed, resumption).close()
    expected = RecordError if isinstance(error, OSError) else Killed
    with monkeypatch.context() as patch:
        fail_at(patch, number, error)
        with pytest.raises(expected, match="No space left on device" if expected is RecordError else None):
            RunLog.resume(interrupted, resumption)
    assert 3 <= len(read_run(interrupted).records) <= 5
    RunLog.resume(interrupted, resumption).close()
    assert settled(interrupted) == settled(undisturbed)
    run = read_run(interrupted)
    # Where the failure came after the end was taken away, the first try counts as one that began.
    assert len(run.resumptions) == (1 if number <= DISK_CALLS.index("unlink") + 1 else 2)
    assert run.resumptions[0].abandoned_updates == 2
    assert run.resumptions[0].previous_end is not None
    assert run.resumptions[0].previous_end["reason"] == "interrupted"


def test_a_folder_that_can_not_be_written_is_named(
    interrupted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "unlink", denied)
    with pytest.raises(RecordError, match=r"end\.json can't be removed: Permission denied"):
        RunLog.resume(interrupted, a_resumption())
    monkeypatch.setattr(Path, "replace", denied)
    with pytest.raises(RecordError, match=r"abandoned\.jsonl can't be written: Permission denied"):
        RunLog.resume(interrupted, a_resumption())


def test_sync_puts_every_file_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = RunLog(tmp_path / "run", a_header())
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.readlink(f"/proc/self/fd/{file}")))
    log.write(a_record())
    log.sync()
    assert [Path(name).name for name in synced] == ["records.jsonl", "evaluations.jsonl", "run"]

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RecordError, match=r"records\.jsonl can't be written: No space left"):
        log.sync()
    monkeypatch.setattr(os, "fsync", lambda file: full(file) if os.path.isdir(file) else None)
    with pytest.raises(RecordError, match=r"run can't be written: No space left"):
        log.sync()
    monkeypatch.undo()
    log.close()
    with pytest.raises(RecordError, match="is closed; nothing more can be written to it"):
        log.sync()


def test_resumptions_are_checked_like_all_else(interrupted: Path) -> None:
    RunLog.resume(interrupted, a_resumption()).close()
    file = interrupted / "resumptions.jsonl"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"changed_settings": {"a": 3}}) + "\n")
    with pytest.raises(RecordError, match=r"line 1: changed_settings\['a'\] is 3; it takes a list"):
        read_run(interrupted)


def test_an_end_is_equal_to_what_it_is_read_back_as() -> None:
    """What tells a resumption that was cut short from one that began: the end beside it."""
    end = RunEnd(reason="failed", message="x")
    data = end.to_dict()
    del data["schema_version"]
    assert RunEnd(**data) == end
