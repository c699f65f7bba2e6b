"""The record: what is written can be read, also after a crash; what can't be trusted is refused."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import io
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from runs import a_header, a_record, an_evaluation
from wholebatch.errors import RecordError
from wholebatch.record import (
    LOCK_FILE,
    SCHEMA_VERSION,
    Counters,
    Evaluation,
    Resumption,
    RunEnd,
    RunHeader,
    UpdateRecord,
    finite,
    package_versions,
    unsupervised_share,
)
from wholebatch.run_folder import RunLog, only_writer, read_run, used_folder
from wholebatch.run_folder import log as run_log


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    with RunLog(folder, a_header()) as log:
        log.write(a_record())
        log.write(a_record(outcome="skipped_nonfinite", reason="NaN", loss_per_item=math.nan))
        log.write_evaluation(an_evaluation())
    return folder


def test_what_is_written_is_read_back(finished: Path) -> None:
    run = read_run(finished)
    assert run.records == [
        a_record(),
        a_record(outcome="skipped_nonfinite", reason="NaN", loss_per_item=None),
    ]
    assert run.evaluations == [an_evaluation()]
    assert run.header.global_batch_samples == 16
    assert run.header.normalisation == "sum over items / N"
    assert run.header.versions["python"] == ".".join(map(str, sys.version_info[:3]))
    assert run.header.started_at.endswith("+00:00")
    assert run.end is not None
    assert run.end.reason == "done"
    assert not run.torn_line


def test_promised_keys_are_in_every_line(finished: Path) -> None:
    promised = "outcome updates_attempted updates_applied micro_batches samples items positions"
    promised += " loss_per_item gradient_norm seconds schema_version"
    for line in (finished / "records.jsonl").read_text().splitlines():
        assert set(promised.split()) <= set(json.loads(line))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_no_nan_or_infinity_anywhere_in_the_json(bad: float) -> None:
    terms: dict[str, dict[str, float | None]] = {"ce": {"items": 1.0, "loss_per_item": bad}}
    record = a_record(gradient_norm=bad, loss_scale=bad, learning_rates=[bad, 0.1], terms=terms)
    data = record.to_dict()
    json.dumps(data, allow_nan=False)
    assert data["gradient_norm"] is data["loss_scale"] is data["terms"]["ce"]["loss_per_item"] is None
    assert data["learning_rates"] == [None, 0.1]


def test_what_json_can_not_say_becomes_none_at_any_depth() -> None:
    deep = {"a": [1.5, math.nan, (math.inf, "x")], "b": {"c": -math.inf, "d": True}, "e": 3}
    assert finite(deep) == {"a": [1.5, None, [None, "x"]], "b": {"c": None, "d": True}, "e": 3}


def test_a_line_reaches_the_file_when_it_is_written(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "run", a_header())
    log.write(a_record())
    assert len(read_run(tmp_path / "run").records) == 1
    assert read_run(tmp_path / "run").end is None
    log.close()


def test_every_cut_of_the_last_line_is_readable(finished: Path) -> None:
    file = finished / "records.jsonl"
    whole = file.read_bytes()
    start_of_last = whole.rindex(b"\n", 0, -1) + 1
    for end in range(start_of_last + 1, len(whole) - 1):
        file.write_bytes(whole[:end])
        run = read_run(finished)
        assert run.torn_line
        assert run.records == [a_record()]
    file.write_bytes(whole[:-1])  # only the line end is lost: the record is complete
    assert not read_run(finished).torn_line
    assert len(read_run(finished).records) == 2


def test_a_broken_line_in_the_middle_is_named(finished: Path) -> None:
    file = finished / "records.jsonl"
    lines = file.read_bytes().split(b"\n")
    file.write_bytes(b"\n".join([lines[0], b'{"outcome": "app', lines[1], b""]))
    with pytest.raises(RecordError, match=r"records\.jsonl line 2 is not a JSON object"):
        read_run(finished)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff"])
def test_a_broken_header_is_named(finished: Path, content: bytes) -> None:
    (finished / "header.json").write_bytes(content)
    with pytest.raises(RecordError, match=r"header\.json is not a JSON object"):
        read_run(finished)


@pytest.mark.parametrize("content", [b"", b"{", b'{"schema_version": 1, "reas', b"\x00" * 40])
def test_a_torn_end_is_no_end(finished: Path, content: bytes) -> None:
    (finished / "end.json").write_bytes(content)
    run = read_run(finished)
    assert run.end is None
    assert run.torn_line
    assert len(run.records) == 2


WRONG_TYPES = [
    ("records.jsonl", {"samples": "16"}, 'line 1: samples is "16"; it takes a whole number'),
    ("records.jsonl", {"samples": 16.0}, "line 1: samples is 16.0; it takes a whole number"),
    ("records.jsonl", {"samples": True}, "line 1: samples is true; it takes a whole number"),
    ("records.jsonl", {"samples": None}, "line 1: samples is null; it takes a whole number"),
    ("records.jsonl", {"samples": 10**400}, "characters), which is too large"),
    ("records.jsonl", {"seconds": 10**400}, "line 1: seconds is 1000"),
    ("records.jsonl", {"items": [9]}, "line 1: items is [9]; it takes a number"),
    ("records.jsonl", {"items": None}, "line 1: items is null; it takes a number"),
    ("records.jsonl", {"loss_per_item": "2.5"}, 'line 1: loss_per_item is "2.5"; it takes a number'),
    ("records.jsonl", {"gradient_norm": {}}, "line 1: gradient_norm is {}; it takes a number"),
    ("records.jsonl", {"partial": 1}, "line 1: partial is 1; it takes true or false"),
    ("records.jsonl", {"reason": 5}, "line 1: reason is 5; it takes a text"),
    ("records.jsonl", {"outcome": "stepped"}, 'line 1: outcome is "stepped"; it can be applied, skipped_'),
    ("records.jsonl", {"outcome": []}, "line 1: outcome is []; it can be applied, skipped_"),
    ("records.jsonl", {"learning_rates": 0.1}, "line 1: learning_rates is 0.1; it takes a list"),
    (
        "records.jsonl",
        {"learning_rates": [0.1, "x"]},
        'line 1: learning_rates[1] is "x"; it takes a number',
    ),
    (
        "records.jsonl",
        {"peak_memory_bytes": [1.5]},
        "line 1: peak_memory_bytes[0] is 1.5; it takes a whole",
    ),
    ("records.jsonl", {"terms": []}, "line 1: terms is []; it takes an object"),
    ("records.jsonl", {"terms": {"ce": 3}}, "line 1: terms['ce'] is 3; it takes an object"),
    ("records.jsonl", {"terms": {"ce": {"items": "9"}}}, "line 1: terms['ce']['items'] is \"9\"; it takes"),
    ("records.jsonl", {"schema_version": True}, "line 1: schema_version is true; it takes a whole number"),
    ("records.jsonl", {"schema_version": 0}, "line 1: schema_version is 0; it takes a whole number from 1"),
    ("records.jsonl", {"schema_version": "1"}, 'line 1: schema_version is "1"; it takes a whole'),
    ("evaluations.jsonl", {"split": None}, "line 1: split is null; it takes a text"),
    ("evaluations.jsonl", {"loss_per_item": []}, "line 1: loss_per_item is []; it takes a number"),
    ("evaluations.jsonl", {"samples_consumed": 1.5}, "line 1: samples_consumed is 1.5; it takes a whole"),
    ("header.json", {"replicas": "2"}, 'header.json: replicas is "2"; it takes a whole number'),
    ("header.json", {"layout": [1]}, "header.json: layout is [1]; it takes an object"),
    ("header.json", {"layout": {"ranks": "2"}}, "header.json: layout['ranks'] is \"2\"; it takes a whole"),
    ("header.json", {"started_at": 5}, "header.json: started_at is 5; it takes a text"),
    ("header.json", {"versions": {"torch": 2}}, "header.json: versions['torch'] is 2; it takes a text"),
    ("header.json", {"command": "train"}, 'header.json: command is "train"; it takes a list'),
    ("header.json", {"dataset": None}, "header.json: dataset is null; it takes an object"),
    ("header.json", {"proof": True}, "header.json: proof is true; it takes an object"),
    ("header.json", {"schema_version": -1}, "header.json: schema_version is -1; it takes a whole number"),
    ("end.json", {"reason": "bored"}, 'end.json: reason is "bored"; it can be done, interrupted, failed'),
    ("end.json", {"message": 5}, "end.json: message is 5; it takes a text"),
]


@pytest.mark.parametrize(("name", "changes", "message"), WRONG_TYPES)
def test_a_wrong_type_is_told_by_file_line_and_key(
    finished: Path, name: str, changes: dict[str, Any], message: str
) -> None:
    first, *rest = (finished / name).read_text().splitlines(keepends=True)
    if name.endswith(".json"):
        first, rest = first + "".join(rest), []
    (finished / name).write_text("".join([json.dumps(json.loads(first) | changes) + "\n", *rest]))
    with pytest.raises(RecordError, match=re.escape(message)) as caught:
        read_run(finished)
    assert str(finished / name) in str(caught.value)


@pytest.mark.parametrize("line", ["[1]", "NaN", '{"loss_per_item": Infinity}', "[" * 100_000])
def test_what_is_no_json_object_is_named_too(finished: Path, line: str) -> None:
    lines = (finished / "records.jsonl").read_text()
    (finished / "records.jsonl").write_text(f"{line}\n{lines}")
    with pytest.raises(RecordError, match=r"records\.jsonl line 1 is not a JSON object"):
        read_run(finished)


def test_a_number_above_all_floats_is_refused(finished: Path) -> None:
    lines = (finished / "records.jsonl").read_text()
    assert '"loss_per_item": 2.5' in lines
    changed = lines.replace('"loss_per_item": 2.5', '"loss_per_item": 1e999', 1)
    (finished / "records.jsonl").write_text(changed)
    with pytest.raises(RecordError, match="line 1: loss_per_item is Infinity, which is too large"):
        read_run(finished)


def test_what_json_can_not_say_is_read_back_as_none(tmp_path: Path) -> None:
    with RunLog(tmp_path / "run", a_header()) as log:
        log.write(a_record(learning_rates=[math.nan, 1], gradient_norm=math.inf, loss_per_item=3))
    (record,) = read_run(tmp_path / "run").records
    assert (record.learning_rates, record.gradient_norm, record.loss_per_item) == ([None, 1], None, 3)


def test_a_file_that_can_not_be_read_is_named(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(_: Path) -> bytes:
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", denied)
    with pytest.raises(RecordError, match=r"header\.json can't be read: Permission denied"):
        read_run(finished)


def edit_json(file: Path, **changes: Any) -> None:
    data = json.loads(file.read_text())
    for key, value in changes.items():
        if value is ...:
            del data[key]
        else:
            data[key] = value
    file.write_text(json.dumps(data) + "\n")


def test_a_newer_schema_version_is_refused_with_both(finished: Path) -> None:
    edit_json(finished / "header.json", schema_version=SCHEMA_VERSION + 4)
    message = f"has schema version {SCHEMA_VERSION + 4}; this program reads up to {SCHEMA_VERSION}"
    with pytest.raises(RecordError, match=message):
        read_run(finished)


def test_a_file_without_schema_version_is_refused(finished: Path) -> None:
    edit_json(finished / "end.json", schema_version=...)
    with pytest.raises(RecordError, match=r"end\.json has no schema_version"):
        read_run(finished)


def test_a_missing_key_is_named_and_an_unknown_one_ignored(finished: Path) -> None:
    edit_json(finished / "header.json", added_later=1)
    assert read_run(finished).header.replicas == 2
    edit_json(finished / "header.json", replicas=..., tail=...)
    with pytest.raises(RecordError, match=r"header\.json lacks replicas, tail"):
        read_run(finished)


def test_no_run_in_a_folder(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"no run in .*: it has no header\.json"):
        read_run(tmp_path)


def test_a_run_is_never_written_over_another(finished: Path) -> None:
    before = sorted((p.name, p.read_bytes()) for p in finished.iterdir())
    with pytest.raises(RecordError, match=f"run folder {finished} holds files already"):
        RunLog(finished, a_header())
    assert sorted((p.name, p.read_bytes()) for p in finished.iterdir()) == before


class Killed(BaseException):
    """What a kill is to a program: nothing after it happens."""


@pytest.mark.parametrize("call", ["open", "fsync", "replace"])
def test_a_header_that_was_cut_short_is_no_run_and_in_nobodys_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()

    def killed(*_: Any, **__: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(os if call == "fsync" else Path, call, killed)
        with pytest.raises(Killed):
            RunLog(folder, a_header())
    assert [path.name for path in folder.iterdir()] == ["header.json.unfinished"] * (call != "open")
    assert used_folder(folder) is None
    RunLog(folder, a_header()).close()
    assert sorted(path.name for path in folder.iterdir()) == [
        *("end.json", "evaluations.jsonl", "header.json", "records.jsonl"),
    ]
    assert read_run(folder).header.replicas == a_header().replicas


def test_a_header_is_on_the_disk_before_the_run_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.readlink(f"/proc/self/fd/{file}")))
    log = RunLog(tmp_path / "runs" / "new", a_header())
    names = [str(Path(name).relative_to(tmp_path)) for name in synced]
    # The names of both new folders in theirs, the header under its first name, then that in its folder.
    assert names == ["runs", ".", "runs/new/header.json.unfinished", "runs/new"]
    log.close()


def test_a_file_is_no_place_for_a_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "runs" / "new"):
        message = f"run folder {folder} can't be written: {tmp_path / 'file'} is a file, not a folder"
        assert message in str(used_folder(folder))
        with pytest.raises(RecordError, match=re.escape(message)):
            RunLog(folder, a_header())
    assert used_folder(tmp_path / "some" / "new") is None
    assert used_folder("new") is None


def test_a_read_only_folder_is_no_place_for_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Permissions do not bind the root user, as which tests may run.
    monkeypatch.setattr(os, "access", lambda path, _mode: Path(path) != tmp_path)
    for folder in (tmp_path, tmp_path / "runs" / "new"):
        message = (
            f"run folder {folder} can't be written: {tmp_path} takes no new files of this user; make it"
        )
        assert message in str(used_folder(folder))
        with pytest.raises(RecordError, match=re.escape(message)):
            RunLog(folder, a_header())


def test_a_folder_that_can_not_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: Any, **__: Any) -> None:
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", denied)
    with pytest.raises(RecordError, match="can't be written: Permission denied"):
        RunLog(tmp_path / "run", a_header())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_named(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "run", a_header())
    log._files["records.jsonl"].close()
    full = log._files["records.jsonl"] = Path("/dev/full").open("w")  # noqa: SIM115
    with pytest.raises(RecordError, match=r"records\.jsonl can't be written: No space left"):
        log.write(a_record())
    with contextlib.suppress(OSError):  # the lost line is still in its buffer
        full.close()
    log.close()


class FullFile(io.StringIO):
    """A file on a disk without room: every flush fails, also that of its close, as an OS file's does."""

    def flush(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def close(self) -> None:
        self.flush()


def test_a_full_disk_is_told_once_and_the_end_is_still_written(tmp_path: Path) -> None:
    def run() -> None:
        with RunLog(tmp_path / "run", a_header()) as log:
            log._files["records.jsonl"].close()
            log._files["records.jsonl"] = FullFile()
            log.write(a_record())

    with pytest.raises(RecordError, match=r"records\.jsonl can't be written: No space left on device$"):
        run()
    end = read_run(tmp_path / "run").end
    assert end is not None
    assert end.reason == "failed"
    assert "RecordError: " in str(end.message)
    assert "No space left" in str(end.message)
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == [
        *("end.json", "evaluations.jsonl", "header.json", "records.jsonl"),
    ]


def test_a_line_lost_at_the_close_is_an_error_and_no_done_run(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "run", a_header())
    for name in ("records.jsonl", "evaluations.jsonl"):
        log._files[name].close()
        log._files[name] = FullFile()
    message = (
        r"records\.jsonl can't be written: No space.*; .*evaluations\.jsonl can't be written: No space"
    )
    with pytest.raises(RecordError, match=message):
        log.close()
    log.close()  # a second call changes nothing
    end = read_run(tmp_path / "run").end
    assert end is not None
    assert end.reason == "failed"
    assert "records.jsonl can't be written" in str(end.message)


def test_an_end_that_can_not_be_written_leaves_no_half_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = RunLog(tmp_path / "run", a_header())

    def no_room(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_room)
    with pytest.raises(RecordError, match=r"end\.json can't be written: No space left"):
        log.close()
    assert not list((tmp_path / "run").glob("end*"))
    assert read_run(tmp_path / "run").end is None


def test_nothing_is_written_after_the_end(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "run", a_header())
    log.close("failed", "disk full")
    log.close()
    assert read_run(tmp_path / "run").end == RunEnd(
        reason="failed", message="disk full", ended_at=read_run(tmp_path / "run").end.ended_at
    )
    with pytest.raises(RecordError, match=r"is closed; nothing more can be written to records\.jsonl"):
        log.write(a_record())


@pytest.mark.parametrize(
    ("error", "reason", "message"),
    [
        (KeyboardInterrupt(), "interrupted", "stopped from the keyboard"),
        (ValueError("m is 3"), "failed", "ValueError: m is 3"),
    ],
)
def test_the_end_says_why(tmp_path: Path, error: BaseException, reason: str, message: str) -> None:
    def run() -> None:
        with RunLog(tmp_path / "run", a_header()) as log:
            log.write(a_record())
            raise error

    with pytest.raises(type(error)):
        run()
    end = read_run(tmp_path / "run").end
    assert end is not None
    assert end.reason == reason
    assert message in str(end.message)


def test_what_is_not_plain_data_is_refused(tmp_path: Path) -> None:
    with RunLog(tmp_path / "run", a_header()) as log:
        with pytest.raises(RecordError, match="plain numbers, texts and lists only"):
            log.write(a_record(items=object()))
        log.write(a_record())
    assert len(read_run(tmp_path / "run").records) == 1


def test_an_unknown_outcome_is_refused() -> None:
    with pytest.raises(RecordError, match="'stepped' is not one of applied, skipped_nonfinite"):
        a_record(outcome="stepped")
    counters = Counters()
    with pytest.raises(RecordError, match="'stepped' is not one of"):
        counters.advance(outcome="stepped", micro_batches=1, samples=1, items=1)  # type: ignore[arg-type]
    assert counters == Counters()


def test_counters_add_up(finished: Path) -> None:
    counters = read_run(finished).counters()
    assert counters == Counters(
        micro_batches=8,
        updates_attempted=2,
        updates_applied=1,
        updates_skipped_nonfinite=1,
        samples=32,
        items=1800,
    )
    counters.advance(outcome="skipped_empty", micro_batches=4, samples=16, items=0)
    assert (counters.updates_attempted, counters.updates_skipped_empty, counters.samples) == (3, 1, 48)


def test_counters_are_saved_and_loaded() -> None:
    counters = Counters()
    counters.advance(outcome="applied", micro_batches=4, samples=16, items=2.5)
    copy = Counters()
    copy.load_state_dict(counters.state_dict())
    assert copy == counters
    state = counters.state_dict()
    del state["items"]
    with pytest.raises(RecordError, match="items is missing or unknown"):
        copy.load_state_dict(state)
    assert copy == counters


def test_unsupervised_share() -> None:
    assert a_record(items=900, positions=1200).unsupervised_share == 0.25
    assert a_record(positions=0).unsupervised_share is None, "nobody told the positions"
    assert a_record(items=1201, positions=1200).unsupervised_share is None, (
        "a sum of weights, not a share below 0"
    )
    assert unsupervised_share(1200, 1200) == 0.0
    assert unsupervised_share(0, 1200) == 1.0
    assert unsupervised_share(0, 0) is None


def test_names_say_what_is_counted() -> None:
    """No public name of the record is a bare step, batch_size or count."""
    kinds = (UpdateRecord, Evaluation, RunHeader, RunEnd, Resumption, Counters)
    names = {f.name for kind in kinds for f in dataclasses.fields(kind)}
    assert not {n for n in names if "step" in n or "batch_size" in n or "count" in n}
    for kind in kinds[:-1]:
        assert kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
        assert "__slots__" in vars(kind)


def test_versions_of_what_is_not_there() -> None:
    assert package_versions(["no-such-package-here"])["no-such-package-here"] == "not installed"


def test_record_imports_no_torch() -> None:
    code = "import sys, wholebatch.run_folder; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


# Two programs


def test_only_one_program_writes_a_run_folder(tmp_path: Path) -> None:
    folder = tmp_path / "some" / "run"
    with only_writer(folder):
        told = re.escape(f"run folder {folder} is being written by process {os.getpid()} on ")
        with (
            pytest.raises(RecordError, match=told + ".*; wait until it has ended, or end it"),
            only_writer(folder),
        ):
            pass
        (folder / LOCK_FILE).write_bytes(b"")
        with (
            pytest.raises(RecordError, match="is being written by another process; wait"),
            only_writer(folder),
        ):
            pass
    with only_writer(folder):
        assert used_folder(folder) is None, "a lock alone is no run"
        RunLog(folder, a_header()).close()
    assert read_run(folder).end is not None


def test_a_forked_process_does_not_keep_the_lock(tmp_path: Path) -> None:
    """One that reads samples may live for seconds after its run was killed."""
    ready, go = os.pipe(), os.pipe()
    with only_writer(tmp_path):
        child = os.fork()
        if child == 0:
            os.write(ready[1], b"1")
            os.read(go[0], 1)
            os._exit(0)
        os.read(ready[0], 1)
    try:
        with only_writer(tmp_path):
            pass
    finally:
        os.write(go[1], b"1")
        os.waitpid(child, 0)
        for end in (*ready, *go):
            os.close(end)


def test_a_lock_that_cannot_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    words = r"run folder .*file/run can't be written: Not a directory"
    with pytest.raises(RecordError, match=words), only_writer(tmp_path / "file" / "run"):
        pass

    def refuse(_file: int, _how: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(run_log.fcntl, "flock", refuse)
    number = errno.EIO
    with (
        pytest.raises(RecordError, match=r"writer\.lock can't be written: Input/output error"),
        only_writer(tmp_path / "run"),
    ):
        pass
    number = errno.EOPNOTSUPP
    with only_writer(tmp_path / "run"), only_writer(tmp_path / "run"):
        pass
    monkeypatch.setattr(run_log, "fcntl", None)
    with only_writer(tmp_path / "run"), only_writer(tmp_path / "run"):
        pass
