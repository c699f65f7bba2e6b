"""Whatever goes wrong on the disk: the checkpoints before it are there, and no half one is."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ranks import run_ranks
from test_resume import assert_same, build, names
from wholebatch import checkpoint_folder as folder
from wholebatch.errors import CheckpointError, UsageError
from wholebatch.resume import Checkpoints

# Every call through which a save reaches the disk.
CALLS = ["fsync", "rename", "mkdir", "open"]


class CountedFile:
    """The file below what a save writes to."""

    def __init__(self, file: Any, disk: Disk) -> None:
        self.write = disk.counted(file.write, "write")
        self.flush = disk.counted(file.flush, "flush")


class Disk:
    """Counts the calls to the disk, and fails the one that is asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_calls = 0
        self.fails_at = -1
        self.failed = ""
        for name in CALLS:
            monkeypatch.setattr(os, name, self.counted(getattr(os, name), name))
        plain = folder.DigestingFile
        monkeypatch.setattr(folder, "DigestingFile", lambda file: plain(CountedFile(file, self)))

    def counted(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def counted(*args: Any, **keywords: Any) -> Any:
            self.num_calls += 1
            if self.num_calls == self.fails_at:
                self.failed = name
                raise OSError(28, "No space left on device")
            return call(*args, **keywords)

        return counted


def saved_once(where: Path) -> tuple[Any, Checkpoints, dict[str, Any]]:
    run, checkpoints = build(), Checkpoints(where, keep_last=1, keep_best=False)
    run.go(1)
    checkpoints.save(run.window)
    state = run.state()
    run.go(1)
    return run, checkpoints, state


def assert_intact(where: Path, state: dict[str, Any], *, which: Any = None) -> None:
    """The one checkpoint loads and is that of ``state``."""
    again = build(seed=8)
    Checkpoints(where).load(again.window, which=which)
    again.ema.load_state_dict(state["ema"])  # was not saved
    assert_same(again.state(), state)


@pytest.mark.slow
def test_each_call_to_the_disk_fails_in_turn(tmp_path, monkeypatch):
    run, checkpoints, state = saved_once(tmp_path / "plain")
    shutil.copytree(tmp_path / "plain", tmp_path / "counted")
    disk = Disk(monkeypatch)
    Checkpoints(tmp_path / "counted", keep_last=1, keep_best=False).save(run.window)
    num_calls, hit = disk.num_calls, set()
    assert num_calls > 40
    where = tmp_path / "plain"
    for number in range(2, num_calls + 1):  # the first makes the folder, which is there already
        disk.num_calls, disk.fails_at, caught = 0, number, None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                checkpoints.save(run.window)
        except CheckpointError as error:
            caught = str(error)
        disk.fails_at = -1
        if caught is None:
            break  # the new one is there: what failed came after, in the removal of the old one
        hit.add(disk.failed)
        assert f"the checkpoint of update 2 could not be written to {where}: No space left on" in caught
        assert "on device; free some space, or keep fewer checkpoints" in caught
        assert f"{where / 'update-00000001'} and those before it are as they were" in caught
        left = [name for name in names(where) if not name.startswith(".removed-")]
        assert left == ["update-00000001"], (number, disk.failed)
        if number % 5 == 0 or disk.failed != "write":
            assert_intact(where, state)
    assert disk.failed == "rename"
    assert number >= num_calls - 2
    assert names(where) == ["update-00000001", "update-00000002"]
    # Named by kind, so that a call that a later version makes without the wrapper shows up here.
    assert hit == {"write", "flush", "fsync", "rename", "mkdir", "open"}
    checkpoints.save(run.window)
    assert names(where) == ["update-00000002-2"]
    assert_intact(where, run.state())


def test_all_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """Files, then the manifest, then the folder; then the name, and the folder that holds the name."""
    order: list[str] = []
    sync, rename = os.fsync, os.rename

    def synced(handle: int) -> None:
        order.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        sync(handle)

    def renamed(old: Path, new: Path) -> None:
        order.append(f"rename to {Path(new).name}")
        rename(old, new)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    Checkpoints(tmp_path / "run").save(build().window)
    assert order.pop(4).startswith(".unfinished-")
    assert order == [*FILES, "rename to update-00000000", "run"]


def test_an_old_one_that_can_not_be_removed_is_a_warning(tmp_path, monkeypatch):
    run, checkpoints, _ = saved_once(tmp_path)

    def refuse(_path: Path) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(folder, "remove_folder", refuse)
    with pytest.warns(
        UserWarning, match=r"update-00000002 is written, but an older .* Operation not permitted"
    ):
        checkpoints.save(run.window)
    assert names(tmp_path) == ["update-00000001", "update-00000002"]


def test_an_interrupt_while_writing_leaves_no_half_one(tmp_path, monkeypatch):
    run, checkpoints, state = saved_once(tmp_path)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(folder.DigestingFile, "write", interrupt)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.save(run.window)
    assert names(tmp_path) == ["update-00000001"]
    assert_intact(tmp_path, state)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda path: path.write_text("x"),
            r"File exists; give a folder, not a file. There is none before it",
        ),
        (lambda path: os.symlink("/proc", path), r"; (make the folder writable|look at the disk)"),
    ],
    ids=["a file", "a place where nobody writes"],
)
def test_a_folder_that_can_not_be_written_is_named(tmp_path, make, words):
    make(tmp_path / "run")
    with pytest.raises(
        CheckpointError, match=f"the checkpoint of update 0 could not be written to .*run: .*{words}"
    ):
        Checkpoints(tmp_path / "run").save(build().window)


@pytest.mark.parametrize(
    ("number", "todo"),
    [(13, "make the folder writable, or give another one"), (5, "look at the disk and save again")],
)
def test_what_to_do_follows_from_the_kind_of_failure(tmp_path, number, todo):
    assert f"; {todo}. There is none before it" in folder.write_problem(
        tmp_path, OSError(number, "x"), updates_attempted=3
    )


def test_what_killed_saves_left_is_cleared_by_the_next(tmp_path):
    for left in (".unfinished-1", ".removed-2"):
        (tmp_path / left).mkdir()
        (tmp_path / left / "model.pt").write_text("half")
    (tmp_path / "notes.txt").write_text("mine")
    Checkpoints(tmp_path).save(build().window)
    assert names(tmp_path) == ["notes.txt", "update-00000000"]


# Damaged ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_saved(tmp_path_factory):
    where = tmp_path_factory.mktemp("two")
    run, checkpoints = build(), Checkpoints(where)
    for _ in range(2):
        run.go(1)
        checkpoints.save(run.window)
    return where


@pytest.fixture
def copied(two_saved, tmp_path) -> Path:
    shutil.copytree(two_saved, tmp_path / "run")
    return tmp_path / "run"


def refused(where: Path, words: str) -> None:
    """The newest is refused with ``words``, nothing moves, and the one before is offered and loads."""
    run = build(seed=8)
    before = run.state()
    with pytest.raises(
        CheckpointError,
        match=rf"update-00000002 can't be loaded: {words}.*\. Nothing was changed; the newest whole one is "
        rf"that of update 1, {where}/update-00000001",
    ):
        Checkpoints(where).load(run.window)
    assert_same(run.state(), before)
    assert Checkpoints(where).load(run.window, which=1).updates_attempted == 1


FILES = ["model.pt", "optimizers.pt", "rest.pt", "manifest.json"]


@pytest.mark.parametrize("name", FILES)
def test_one_changed_byte_is_seen(copied, name):
    path = copied / "update-00000002" / name
    whole = path.read_bytes()
    for place in random.Random(name).sample(range(len(whole)), 25):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        words = (
            f"its file {name} was changed|its manifest.json (was changed|is damaged)|it has schema version"
        )
        with pytest.raises(CheckpointError, match=words):
            Checkpoints(copied).load(build().window)
    refused(copied, "(its file|its manifest|it has)")


@pytest.mark.parametrize("name", FILES)
def test_a_file_cut_short_or_missing_is_seen(copied, name):
    path = copied / "update-00000002" / name
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    is_manifest = name == "manifest.json"
    refused(
        copied,
        "its manifest.json is damaged"
        if is_manifest
        else f"its file {name} has {len(whole) // 2} bytes and was",
    )
    path.unlink()
    refused(
        copied,
        r"its manifest.json can't be read \(No such file or directory\)"
        if is_manifest
        else f"its file {name} is missing",
    )


def test_a_file_that_can_not_be_opened_is_named(copied):
    path = copied / "update-00000002" / "model.pt"
    path.unlink()
    path.symlink_to(path)  # a circle
    refused(copied, r"its file model.pt can't be read \(Too many levels of symbolic links\)")


def test_a_file_that_the_manifest_does_not_list_is_seen(copied):
    (copied / "update-00000002" / "extra.safetensors").write_text("x")
    refused(copied, "its file extra.safetensors is not in the manifest")


def test_no_other_whole_one_is_said(copied):
    for path in copied.glob("*/model.pt"):
        path.write_text("x")
    (copied / "update-00000001" / "manifest.json").unlink()
    assert [facts.updates_attempted for facts in Checkpoints(copied).list()] == [2]
    with pytest.raises(CheckpointError, match="there is no other in the folder that is whole"):
        Checkpoints(copied).load(build().window)


def forge(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a checkpoint as somebody would who knows how its manifest is made."""
    body = json.loads((path / "manifest.json").read_text())
    del body["manifest_blake2b"]
    for name in body["files"]:
        body["files"][name] = folder.file_facts(path / name)
    change(body)
    text = json.dumps({**body, "manifest_blake2b": folder._digest_of(body)})
    (path / "manifest.json").write_text(text)


def test_a_newer_schema_is_refused(copied):
    forge(copied / "update-00000002", lambda body: body.update(schema_version=9))
    refused(
        copied, r"it has schema version 9 and this version of wholebatch reads up to 1; install a newer"
    )


class Malicious:
    """Runs a command when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


@pytest.mark.parametrize("name", FILES[:3])
def test_a_planted_pickle_is_not_executed(copied, tmp_path, name):
    mark = tmp_path / "executed"
    path = copied / "update-00000002" / name
    torch.save({"model": Malicious(mark)}, path)
    forge(path.parent, lambda _: None)
    refused(
        copied, f"its file {name} holds something other than tensors and plain data; it was not executed"
    )
    assert not mark.exists()
    torch.load(path, weights_only=False)
    assert mark.exists()  # it would have


def test_counters_of_another_kind_are_refused_before_anything_is_loaded(copied):
    path = copied / "update-00000002" / "rest.pt"
    rest = torch.load(path, weights_only=True)
    rest["window"]["counters"]["epochs"] = rest["window"]["counters"].pop("items")
    torch.save(rest, path)
    forge(path.parent, lambda _: None)
    run = build(seed=8)
    before = run.state()
    with pytest.raises(
        UsageError, match=r"its counters are \['epochs', .* and here \['items', .*Nothing was lo"
    ):
        Checkpoints(copied).load(run.window)
    assert_same(run.state(), before)


def test_a_file_that_torch_can_not_read_is_named(copied):
    path = copied / "update-00000002" / "model.pt"
    path.write_bytes(b"PK\x03\x04 no archive of torch")
    forge(path.parent, lambda _: None)
    refused(copied, r"its file model.pt can't be read \(RuntimeError\)")


# Killed -----------------------------------------------------------------------------------------------


def save_for_ever(rank: int, n: int, where: str, delay_s: float) -> None:  # noqa: ARG001
    """Save after each update, and be killed at some moment of it."""
    run, checkpoints = build(), Checkpoints(where, keep_last=2)
    signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    run.go(1)
    checkpoints.save(run.window, more={"ema": run.ema})
    Path(where, "started").touch()
    signal.setitimer(signal.ITIMER_REAL, delay_s)
    while True:
        run.go(1)
        checkpoints.save(run.window, more={"ema": run.ema}, score=1.0 / run.window.counters.samples)


def delays() -> Iterator[float]:
    chance = random.Random(4)
    return (chance.uniform(0.001, 0.12) for _ in range(12))


@pytest.mark.slow
def test_killed_at_any_moment_the_newest_is_whole(tmp_path):
    halves = 0
    for number, delay_s in enumerate(delays()):
        where = tmp_path / str(number)
        ((kind, code),) = run_ranks(save_for_ever, 1, str(where), delay_s, expect="outcomes")
        assert (kind, code) == ("died", -signal.SIGKILL)
        halves += any(name.startswith(".") for name in names(where))
        run = build(seed=8)
        found = Checkpoints(where).load(run.window, more={"ema": run.ema})
        run.go(1)
        truth = build()
        truth.go(found.updates_attempted + 1)
        assert_same(dict(run.model.state_dict()), dict(truth.model.state_dict()))
        Checkpoints(where).save(run.window)
        assert not any(name.startswith(".") for name in names(where))
    assert halves > 0  # some were killed while they wrote
