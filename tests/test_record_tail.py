"""A run that is being written, read again and again: only what is new, and all of it once."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runs import a_header, a_record, a_resumption, an_evaluation
from wholebatch.errors import RecordError
from wholebatch.run_folder import RunLog, RunTail
from wholebatch.run_folder import tail as run_tail


def updates_of(tail: RunTail) -> list[int]:
    run, _ = tail.poll()
    assert run is not None
    return [r.updates_attempted for r in run.records]


def kill(log: RunLog) -> None:
    """Close the files without an end, as when the program is killed."""
    for file in log._files.values():
        file.close()
    log._files.clear()


def test_each_line_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[int] = []

    def counted(kind: Any, data: dict[str, Any], place: Any) -> Any:
        built.append(data.get("updates_attempted", -1))
        return real(kind, data, place)

    real = run_tail.build
    monkeypatch.setattr(run_tail, "build", counted)
    with RunLog(tmp_path / "run", a_header()) as log:
        tail = RunTail(tmp_path / "run")
        log.write(a_record(1))
        assert updates_of(tail) == [1]
        for update in (2, 3):
            log.write(a_record(update))
        log.write_evaluation(an_evaluation())
        run, changed = tail.poll()
        assert changed
        assert run is not None
        assert run.evaluations == [an_evaluation()]
        assert tail.poll() == (run, False)
    assert built == [1, 2, 3, -1]
    run, changed = tail.poll()
    assert changed
    assert run is not None
    assert run.end is not None


def test_a_line_is_waited_for_until_it_is_whole(tmp_path: Path) -> None:
    kill(RunLog(tmp_path / "run", a_header()))
    tail = RunTail(tmp_path / "run")
    line = (json.dumps(a_record(1).to_dict()) + "\n").encode()
    with (tmp_path / "run" / "records.jsonl").open("ab", buffering=0) as file:
        for begin, end in ((0, 40), (40, len(line) - 1)):
            file.write(line[begin:end])
            assert updates_of(tail) == []
        file.write(line[-1:])
    assert updates_of(tail) == [1]


def test_a_run_that_is_resumed_is_read_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    log = RunLog(folder, a_header())
    tail = RunTail(folder)
    for update in range(1, 6):
        log.write(a_record(update))
    assert updates_of(tail) == [1, 2, 3, 4, 5]
    kill(log)
    with RunLog.resume(folder, a_resumption(3)) as again:
        for update in (4, 5, 6):
            again.write(a_record(update, items=901))
        run, _ = tail.poll()
        assert run is not None
        assert [(r.updates_attempted, r.items) for r in run.records] == [
            *((update, 900) for update in (1, 2, 3)),
            *((update, 901) for update in (4, 5, 6)),
        ]
        assert len(run.resumptions) == 1
        assert run.disorder is None
        again.write(a_record(7))
        assert updates_of(tail) == [1, 2, 3, 4, 5, 6, 7]


def test_a_file_that_became_shorter_is_read_again(tmp_path: Path) -> None:
    with RunLog(tmp_path / "run", a_header()) as log:
        tail = RunTail(tmp_path / "run")
        for update in (1, 2):
            log.write(a_record(update))
        assert updates_of(tail) == [1, 2]
        file = tmp_path / "run" / "records.jsonl"
        with file.open("r+b") as cut:
            cut.truncate(file.read_bytes().index(b"\n") + 1)
        assert updates_of(tail) == [1]


def test_a_gap_is_found_where_it_is(tmp_path: Path) -> None:
    with RunLog(tmp_path / "run", a_header()) as log:
        tail = RunTail(tmp_path / "run")
        log.write(a_record(1))
        assert updates_of(tail) == [1]
        log.write(a_record(3))
        run, _ = tail.poll()
        log.write(a_record(4))
        later, _ = tail.poll()
    for each in (run, later):
        assert each is not None
        assert each.disorder == "record 2 is of update 3, where update 2 is due"


def test_it_waits_for_a_run_in_an_empty_folder(tmp_path: Path) -> None:
    tail = RunTail(tmp_path)
    assert tail.poll() == (None, False)
    (tmp_path / "header.json.unfinished").write_text('{"schema')
    assert tail.poll() == (None, False)
    assert RunTail(tmp_path).poll() == (None, False)
    RunLog(tmp_path, a_header()).close()
    assert updates_of(tail) == []


def test_no_folder_and_no_run(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"no folder .*none to follow a run in; start the run first"):
        RunTail(tmp_path / "none")
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(RecordError, match=r"no run in .*: it has no header\.json"):
        RunTail(tmp_path)


def test_a_broken_line_is_named_by_its_place_in_the_file(tmp_path: Path) -> None:
    with RunLog(tmp_path / "run", a_header()) as log:
        tail = RunTail(tmp_path / "run")
        log.write(a_record(1))
        assert updates_of(tail) == [1]
        with (tmp_path / "run" / "records.jsonl").open("a") as file:
            file.write('{"schema_version": 1}\n')
        with pytest.raises(RecordError, match=r"records\.jsonl line 2 lacks outcome"):
            tail.poll()


def test_a_file_that_can_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    RunLog(tmp_path / "run", a_header()).close()
    tail = RunTail(tmp_path / "run")

    def denied(*_: Any, **__: Any) -> None:
        raise OSError(errno.EACCES, "Permission denied")

    assert updates_of(tail) == []
    monkeypatch.setattr(run_tail, "os", SimpleNamespace(fstat=denied))
    with pytest.raises(RecordError, match=r"records\.jsonl can't be read: Permission denied"):
        tail.poll()
