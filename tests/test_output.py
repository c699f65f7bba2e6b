"""An error under several ranks: told once where all share it, else with the rank in front."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from wholebatch.report import output
from wholebatch.report.output import OutputClosedError, OutputConsole, tell_error, write_json

KEY = "wholebatch/error/0"


class ClosedPipe(io.StringIO):
    def write(self, _: str) -> int:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")


def test_a_console_without_a_reader_says_so() -> None:
    with pytest.raises(OutputClosedError, match="the output was closed before the end"):
        OutputConsole(file=ClosedPipe()).print("words")


def test_json_without_a_reader_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", ClosedPipe())
    with pytest.raises(OutputClosedError, match="the output was closed before the end"):
        write_json({}, "-")


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.TCPStore:
    """What torchrun gives its ranks: a store, and where it is."""
    made = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=5))
    for name, value in {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(made.port),
        "WORLD_SIZE": "2",
        "RANK": "0",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(output, "_LEADER_FAILS_WITHIN_S", 0.3)
    return made


def told_by(
    rank: int, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    monkeypatch.setenv("RANK", str(rank))
    tell_error(words)
    told = capsys.readouterr()
    assert told.out == ""
    return told.err


def test_alone_it_is_just_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert told_by(0, "error: it broke", monkeypatch, capsys) == "error: it broke\n"


def test_an_error_that_all_share_is_told_once(
    store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told_by(0, "error: it broke", monkeypatch, capsys) == "error: it broke\n"
    assert told_by(1, "error: it broke", monkeypatch, capsys) == ""
    assert store.get(KEY) == b"error: it broke"


def test_an_error_of_its_own_has_the_rank_in_front(
    store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store.set(KEY, "error: another rank failed")
    assert told_by(1, "error: no space", monkeypatch, capsys) == "rank 1: error: no space\n"


def test_a_rank_waits_for_a_leader_that_fails_later(
    store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    later = threading.Timer(0.1, lambda: store.set(KEY, "error: it broke"))
    later.start()
    assert told_by(1, "error: it broke", monkeypatch, capsys) == ""
    later.join()


@pytest.mark.usefixtures("store")
def test_a_rank_speaks_where_the_leader_does_not_fail_or_there_is_no_store(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told_by(1, "error: mine", monkeypatch, capsys) == "rank 1: error: mine\n"
    monkeypatch.delenv("MASTER_PORT")
    assert told_by(1, "error: mine", monkeypatch, capsys) == "rank 1: error: mine\n"
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE")
    assert told_by(1, "error: mine", monkeypatch, capsys) == "rank 1: error: mine\n"
    assert told_by(0, "error: mine", monkeypatch, capsys) == "error: mine\n"


@pytest.mark.usefixtures("store")
def test_a_rank_that_torchrun_ends_still_says_why_it_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The leader may end without words of ours; torchrun then sends SIGTERM to the rank at fault."""
    monkeypatch.setattr(output, "_LEADER_FAILS_WITHIN_S", 30.0)
    found = signal.getsignal(signal.SIGTERM)
    ending = threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGTERM))
    ending.start()
    begin = time.monotonic()
    assert told_by(1, "error: mine", monkeypatch, capsys) == "rank 1: error: mine\n"
    assert time.monotonic() - begin < 20
    ending.join()
    assert signal.getsignal(signal.SIGTERM) is found
