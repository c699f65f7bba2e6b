"""The only place in the tests that starts ranks: ``run_ranks(fn, n, *args)``.

Each rank is a process of its own in a gloo process group over loopback, with a file store in a
temporary folder (a port would be a source of flakes). Processes are forked from a server that has
imported torch once, so that starting two ranks costs a fraction of a second instead of several.

``fn(rank, n, *args)`` is a function at the top of a module. What it returns comes back by value,
tensors too; what it raises is raised here, with the rank and the worker's own traceback. In a
worker warnings are errors, algorithms are deterministic, torch has one thread and seed 0. Patches
made by the calling test do not reach it.

Nothing is left behind: processes, files, environment. The server itself ends with the test run.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Literal

_CONTEXT = multiprocessing.get_context("forkserver")
_TESTS = str(Path(__file__).resolve().parent)

# How long a rank that is done stays in the group, so that its peers can read what it sent last.
# Not longer: a peer that waits for one more collective should see the connection close.
_LINGER_S = 2.0
# How long the others may still report after a failure: the one noticed first need not be its cause.
_GRACE_S = 0.3
# For a worker to write its stacks down, and for a killed one to be gone.
_REAP_S = 5.0

Outcome = tuple[Literal["ok"], Any] | tuple[Literal["error"], str, str] | tuple[Literal["died"], int]


class RankTracebackError(Exception):
    """The traceback of a worker, shown as the cause of the exception that it raised."""


class RankDiedError(Exception):
    """A rank ended without a result and without an exception."""


class RanksTimeoutError(Exception):
    """Some ranks were still running at the time limit, and were killed."""


@dataclass(kw_only=True, slots=True)
class _Rank:
    """One worker as its parent sees it; ``report`` is None until it sent one."""

    rank: int
    process: ForkServerProcess
    pipe: connection.Connection
    report: dict[str, Any] | None = None


def run_ranks(
    fn: Callable[..., Any],
    n: int,
    *args: Any,
    timeout_s: float = 60.0,
    expect: Literal["results", "outcomes"] = "results",
) -> list[Any]:
    """Run ``fn(rank, n, *args)`` on n ranks and return what each returned, in order of rank.

    Args:
        fn: function at the top of a module; it finds its process group initialised.
        n: number of ranks, 1 or more.
        *args: passed to every rank by value.
        timeout_s: seconds from their start, after which the ranks are killed. A collective of the
            group gives up after half of it, so that a rank left alone can say so itself.
        expect: "results" raises the exception that a rank raised first. "outcomes" waits for every
            rank and returns for each ("ok", value), ("error", type name, message) or
            ("died", exit code), where a negative exit code is the signal that killed it.

    Raises:
        Exception: what the first failing rank raised, caused by a RankTracebackError.
        RankDiedError: a rank ended without a word.
        RanksTimeoutError: ranks were still running after ``timeout_s``; shows where they stood.
    """
    if n < 1:
        raise ValueError(f"run_ranks needs 1 rank or more, not {n}")
    call = _pickled_call(fn, args)
    folder = Path(tempfile.mkdtemp(prefix="ranks-"))
    ranks: list[_Rank] = []
    try:
        for rank in range(n):  # one by one into the list, so that a failed start ends the others
            ranks += [_start(rank, n, call, folder, timeout_s)]
        deadline = time.monotonic() + timeout_s  # from here: the first start waits for the server's imports
        _collect(ranks, deadline, stop_at_failure=expect == "results")
        late = [one for one in ranks if _is_running(one)]
        if late and not (expect == "results" and _has_failure(ranks)):
            raise RanksTimeoutError(_describe_late(ranks, late, folder, timeout_s))
        return [_outcome(one) for one in ranks] if expect == "outcomes" else _results(ranks)
    finally:
        _end(ranks)
        shutil.rmtree(folder, ignore_errors=True)


def _pickled_call(fn: Callable[..., Any], args: Sequence[Any]) -> bytes:
    """Pickle plainly: torch's own way would share memory and leave a thread behind here."""
    try:
        return pickle.dumps((fn, tuple(args)))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"run_ranks needs a function at the top of a module, and plain arguments: {error}"
        ) from None


def _start(rank: int, n: int, call: bytes, folder: Path, timeout_s: float) -> _Rank:
    with _server_environment():
        forkserver.set_forkserver_preload(["ranks_preload"])
        forkserver.ensure_running()
    here, there = _CONTEXT.Pipe()
    process = _CONTEXT.Process(
        target=_work,
        args=(rank, n, call, there, str(folder), timeout_s, dict(os.environ)),
        name=f"rank {rank} of {n}",
        daemon=True,
    )
    process.start()
    there.close()
    return _Rank(rank=rank, process=process, pipe=here)


@contextlib.contextmanager
def _server_environment() -> Iterator[None]:
    """The server finds ``ranks_preload`` and starts no thread pools, which do not survive a fork."""
    wanted = {"PYTHONPATH": os.pathsep.join(filter(None, [_TESTS, os.environ.get("PYTHONPATH")]))}
    wanted |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    found = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in found.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _collect(ranks: list[_Rank], deadline: float, *, stop_at_failure: bool) -> None:
    """Read reports until all ranks are done or the time is up, soon after a failure where asked."""
    graced = False
    while waiting := [one for one in ranks if _is_running(one)]:
        if stop_at_failure and not graced and _has_failure(ranks):
            deadline, graced = min(deadline, time.monotonic() + _GRACE_S), True
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return
        # A pipe is ready when there is a report, and also at its end when the process has died.
        ready = connection.wait([one.pipe for one in waiting], timeout=left_s)
        for one in waiting:
            if one.pipe in ready:
                _read(one)


def _read(one: _Rank) -> None:
    try:
        one.report = pickle.loads(one.pipe.recv_bytes())
    except (EOFError, ConnectionResetError):
        one.process.join(_REAP_S)
        one.report = {"kind": "died", "exit_code": one.process.exitcode, "at": time.monotonic()}


def _is_running(one: _Rank) -> bool:
    return one.report is None


def _has_failure(ranks: list[_Rank]) -> bool:
    return any(not _is_running(one) and not _is_ok(one) for one in ranks)


def _is_ok(one: _Rank) -> bool:
    return one.report is not None and one.report["kind"] == "ok"


def _outcome(one: _Rank) -> Outcome:
    report = one.report
    assert report is not None
    if report["kind"] == "ok":
        return ("ok", pickle.loads(report["value"]))
    if report["kind"] == "error":
        return ("error", report["type"], report["message"])
    return ("died", report["exit_code"])


def _results(ranks: list[_Rank]) -> list[Any]:
    """Return the values, or raise what went wrong first: later failures are often its echo.

    A death counts as first, since it is noticed last: it has no clock of its own.
    """
    failed = [one for one in ranks if one.report is not None and not _is_ok(one)]
    if not failed:
        return [_outcome(one)[1] for one in ranks]
    first = min(failed, key=_when)
    report = first.report
    assert report is not None
    if report["kind"] == "died":
        raise RankDiedError(f"rank {first.rank} of {len(ranks)} died with exit code {report['exit_code']}")
    cause = RankTracebackError(f"on rank {first.rank} of {len(ranks)}:\n{report['traceback']}")
    raise _unpickled_error(report) from cause


def _when(one: _Rank) -> tuple[bool, float]:
    assert one.report is not None
    return one.report["kind"] != "died", one.report["at"]


def _unpickled_error(report: dict[str, Any]) -> BaseException:
    """Return the worker's exception, or a RuntimeError that quotes it where it can't travel."""
    with contextlib.suppress(Exception):
        error = pickle.loads(report["error"])
        if isinstance(error, BaseException):
            return error
    return RuntimeError(f"{report['type']}: {report['message']}")


def _describe_late(ranks: list[_Rank], late: list[_Rank], folder: Path, timeout_s: float) -> str:
    """Say which ranks were late, and where each of them stood."""
    for one in late:
        if one.process.pid is not None and one.process.is_alive():
            os.kill(one.process.pid, signal.SIGUSR1)
    time.sleep(0.3)  # faulthandler writes the stacks in the worker; it sends no answer
    names = ", ".join(str(one.rank) for one in late)
    lines = [f"after {timeout_s} s, rank(s) {names} of {len(ranks)} were still running"]
    for one in ranks:
        if one in late:
            stacks = _stacks(folder, one.rank)
            lines.append(
                f"rank {one.rank} stood at:\n{stacks.read_text() if stacks.exists() else '(not started)'}"
            )
        else:
            lines.append(f"rank {one.rank}: {one.report['kind'] if one.report else ''}")
    return "\n".join(lines)


def _stacks(folder: Path, rank: int) -> Path:
    return folder / f"stacks-{rank}.txt"


def _end(ranks: list[_Rank]) -> None:
    """Let finished ranks go, kill the others by their own id, and wait until all are gone."""
    for one in ranks:
        if _is_running(one):
            one.process.kill()
        with contextlib.suppress(OSError):
            one.pipe.close()  # the end of the pipe is the worker's leave to go
    for one in ranks:
        one.process.join(_REAP_S)
        if one.process.is_alive():
            one.process.kill()
            one.process.join(_REAP_S)
        one.process.close()


# From here on, in the worker.


def _work(
    rank: int,
    n: int,
    call: bytes,
    pipe: connection.Connection,
    folder: str,
    timeout_s: float,
    environment: dict[str, str],
) -> None:
    """Run the function in a process group, report, and stay until the parent lets go."""
    import faulthandler

    stacks = _stacks(Path(folder), rank).open("w")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    done = threading.Event()
    left = threading.Event()
    threading.Thread(target=_watch_parent, args=(pipe, done, left), daemon=True).start()
    try:
        _prepare(rank, n, folder, timeout_s, environment)
        fn, args = pickle.loads(call)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            value = fn(rank, n, *args)
        report = {"kind": "ok", "value": pickle.dumps(value), "at": time.monotonic()}
    except BaseException as error:
        report = _error_report(error)
    done.set()
    with contextlib.suppress(OSError):
        pipe.send_bytes(pickle.dumps(report))
    if report["kind"] == "ok":
        left.wait(_LINGER_S)
    # Straight out: a failed group may block for a long time in its own clean-up, and on a failure
    # the peers should see the connection close now, as they would in a real job.
    os._exit(0)


def _watch_parent(pipe: connection.Connection, done: threading.Event, left: threading.Event) -> None:
    """Leave when the parent has: it sends nothing, so the pipe is ready only at its end."""
    with contextlib.suppress(OSError):
        pipe.poll(None)
    left.set()
    if not done.is_set():
        os._exit(1)


def _prepare(rank: int, n: int, folder: str, timeout_s: float, environment: dict[str, str]) -> None:
    import torch
    import torch.distributed as dist

    os.environ.clear()
    os.environ.update(environment)
    os.environ["GLOO_SOCKET_IFNAME"] = _loopback()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    store = dist.FileStore(os.path.join(folder, "store"), n)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=n, timeout=timedelta(seconds=timeout_s / 2)
    )


def _loopback() -> str:
    names = {name for _, name in socket.if_nameindex()}
    return "lo" if "lo" in names else "lo0"


def _error_report(error: BaseException) -> dict[str, Any]:
    pickled = b""
    with contextlib.suppress(Exception):
        pickled = pickle.dumps(error)
    return {
        "kind": "error",
        "type": type(error).__name__,
        "message": str(error),
        "traceback": "".join(traceback.format_exception(error)),
        "error": pickled,
        "at": time.monotonic(),
    }
