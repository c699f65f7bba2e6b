"""Where a command's words and its JSON go: one of them to stdout, never both mixed.

With ``--json -`` stdout carries the JSON alone and people's text goes to stderr; with
``--json FILE`` the JSON goes to the file and the text to stdout. Under several ranks an error that
all of them have is told once.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO, cast

from rich.console import Console

from wholebatch.errors import RecordError
from wholebatch.record import finite

STDOUT = "-"
# How long another rank waits to hear whether the leading one failed in the same way.
_LEADER_FAILS_WITHIN_S = 5.0


class OutputClosedError(Exception):
    """Nobody reads the output any more, as after ``wholebatch train | head -1``."""

    # What a shell says of a program that such a write killed: 128 + SIGPIPE.
    exit_code = 141


class OutputFailedError(OutputClosedError):
    """The output can't be written, as on a full disk."""

    exit_code = 3


class OutputConsole(Console):
    """A console that says that its reader is gone, where rich would end the program with code 1."""

    def on_broken_pipe(self) -> None:
        """Called by rich while it handles a BrokenPipeError.

        Raises:
            OutputClosedError: always.
        """
        raise OutputClosedError("the output was closed before the end")


class _Told:
    """A stream whose failures to write, except that nobody reads, become an ``OutputFailedError``."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with told_when_not_written():
            return self._stream.write(text)

    def flush(self) -> None:
        with told_when_not_written():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def told_when_not_written() -> Iterator[None]:
    """Around a write to stdout or stderr.

    Raises:
        OutputFailedError: it can't be written; that nobody reads it stays a BrokenPipeError.
    """
    try:
        yield
    except BrokenPipeError:
        raise  # rich and typer answer it, each in its way
    except OSError as failure:
        raise OutputFailedError(f"the output can't be written: {failure.strerror}") from failure


def ready_streams() -> None:
    """Give a closed stdout or stderr somewhere to go, and let no letter fail that it can't show."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # as in a shell's `>&-`
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  # open to the end
        reconfigure = getattr(getattr(sys, name), "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")


def leave_closed_output() -> None:
    """Let what is still in the buffers of stdout and stderr go nowhere, so that the exit is quiet."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def text_stream(json_target: str | None) -> TextIO:
    """The stream for people's text: stderr where stdout is the JSON's, else stdout.

    What can't be written to it ends as an ``OutputFailedError``.
    """
    return cast(TextIO, _Told(sys.stderr if json_target == STDOUT else sys.stdout))


def write_json(payload: Mapping[str, Any], target: str | None) -> None:
    """Write a command's result as one JSON document to a file, to stdout for "-", or nowhere for None.

    Args:
        payload: plain JSON values; floats that are not finite are written as null.
        target: the argument of ``--json``.

    Raises:
        RecordError: the file can't be written; the message repeats its path.
        OutputClosedError: nobody reads stdout any more, or it can't be written.
    """
    if target is None:
        return
    document = json.dumps(finite(payload), indent=2, allow_nan=False) + "\n"
    if target == STDOUT:
        try:
            with told_when_not_written():
                sys.stdout.write(document)
                sys.stdout.flush()
        except BrokenPipeError:
            raise OutputClosedError("the output was closed before the end") from None
        return
    try:
        Path(target).write_text(document, encoding="utf-8")
    except OSError as failure:
        raise RecordError(f"can't write the JSON to {target!r}: {failure.strerror}") from None


def tell_error(words: str) -> None:
    """Write an error to stderr: once where all ranks have the same, else with the rank in front.

    Rank 0 always speaks. The others compare with its words over the store of torchrun, not with a
    collective, which would hang where only some ranks failed. Without that store each rank speaks.

    Args:
        words: the whole message.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        print(words, file=sys.stderr)
        return
    rank = int(os.environ.get("RANK", "0"))
    with _outliving_torchrun() as told_to_end:
        leader = _words_of_the_leader(rank, words, told_to_end)
        if rank == 0:
            print(words, file=sys.stderr, flush=True)
        elif leader != words:
            print(f"rank {rank}: {words}", file=sys.stderr, flush=True)


def _words_of_the_leader(rank: int, words: str, told_to_end: list[int]) -> str | None:
    """Leave rank 0's words in the store, or wait for them there; None where they can't be had."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    import torch.distributed as dist

    key = f"wholebatch/error/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    patience = timedelta(seconds=_LEADER_FAILS_WITHIN_S)
    try:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(address, port, is_master=False, timeout=patience)  # type: ignore[attr-defined]
        if rank == 0:
            store.set(key, words)
            return words
        deadline = time.monotonic() + _LEADER_FAILS_WITHIN_S
        while not store.check([key]) and time.monotonic() < deadline and not told_to_end:
            time.sleep(0.02)
        return str(store.get(key).decode()) if store.check([key]) else None
    except (KeyError, ValueError, RuntimeError):  # no such store, or it ended before us
        return None


@contextlib.contextmanager
def _outliving_torchrun() -> Iterator[list[int]]:
    """Put off SIGTERM, which torchrun sends when another rank has ended, until this one has spoken."""
    received: list[int] = []
    found = signal.signal(signal.SIGTERM, lambda number, _frame: received.append(number))
    try:
        yield received
    finally:
        signal.signal(signal.SIGTERM, found)
