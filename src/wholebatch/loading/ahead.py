"""Made ahead: what a function makes of keys, in their order, by worker processes.

A worker hands over each result as one block of shared memory: tensor by tensor a long window would need
thousands of file descriptors. A worker that ends is named, and nothing waits for it.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import signal
import threading
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from wholebatch.errors import JudgeError, UsageError, WholebatchError
from wholebatch.loading.reading import in_words

# Results that a worker may hold ready; each takes a file descriptor.
MOST_AHEAD_PER_WORKER = 64

Key = TypeVar("Key")
Result = TypeVar("Result")


def made_in_order(
    make: Callable[[Key], Result],
    keys: Iterable[Key],
    *,
    told: Callable[[Result], str],
    workers: int,
    ahead: int,
    seed: int,
) -> Generator[Result]:
    """What ``make`` makes of each key, in their order.

    Close it when it is no longer needed, so that its workers end too.

    Args:
        make: called in a worker process, of which each has a copy of its own; in this one without any.
        keys: what to make; key k goes to worker k modulo ``workers``. Drawn in this process.
        told: a result in words, for the message where it can't be sent back.
        workers: processes; 0 makes each result when it is asked for.
        ahead: results that each worker makes before they are asked for, at most MOST_AHEAD_PER_WORKER.
        seed: decides what a worker draws that was never seeded.

    Raises:
        WholebatchError: what ``make`` raised, when its turn comes.
        UsageError: a result can't be sent from a worker; names it.
        JudgeError: a worker ended; says which and how.

    Exactness: the results do not depend on ``workers``, if ``make`` keeps nothing between keys.
    """
    if workers == 0:
        return (make(key) for key in keys)
    in_worker = _InWorker(make=make, told=told)
    return _read_ahead(in_worker, keys, workers=workers, ahead=min(MOST_AHEAD_PER_WORKER, ahead), seed=seed)


def _read_ahead(
    in_worker: _InWorker, keys: Iterable[Any], *, workers: int, ahead: int, seed: int
) -> Generator[Any]:
    with _signal_handlers_kept(), warnings.catch_warnings():
        # More workers than cores are the user's choice, and useful where they wait for a disk.
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        warnings.filterwarnings("ignore", message="Got pickle error")  # our own error says it
        loader = DataLoader(
            in_worker,
            batch_size=None,
            sampler=keys,
            num_workers=workers,
            prefetch_factor=ahead,
            collate_fn=_as_it_is,
            worker_init_fn=_begin_worker,
            # Else the seeds of the workers would be drawn from the global generator.
            generator=torch.Generator().manual_seed(seed % 2**63),
        )
        results = _started(loader)
    try:
        while True:
            try:
                packed = _next(results, workers)
            except StopIteration:
                return
            if isinstance(packed, _Failure):
                raise packed.kind(packed.message) from packed.cause
            yield _unpacked(packed)
    finally:
        results._shutdown_workers()  # type: ignore[attr-defined]


def _started(loader: DataLoader[Any]) -> Iterator[Any]:
    try:
        return iter(loader)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        how = multiprocessing.get_start_method()
        if how == "fork":
            raise
        raise UsageError(
            f"worker processes are started by {how!r} here and are sent the data set and the functions of "
            f"the loader, which failed: {error}; define them at the top of a module, or set workers to 0"
        ) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class _InWorker(Dataset[Any]):
    """In a worker: results as bytes, or the error that came up."""

    make: Callable[[Any], Any]
    told: Callable[[Any], str]

    def __getitem__(self, key: Any) -> Tensor | _Failure:
        try:
            return torch.frombuffer(self._packed(self.make(key)), dtype=torch.uint8)
        except WholebatchError as error:
            return _Failure.of(error)

    def _packed(self, made: Any) -> bytearray:
        written = io.BytesIO()
        try:
            _Packer(written, pickle.DEFAULT_PROTOCOL).dump(made)
        except Exception as error:
            raise UsageError(
                f"{self.told(made)} can't be sent from a worker to the training process "
                f"({in_words(error)}); leave what can't be pickled out of the samples and of what collate "
                f"returns, define its class at the top of a module, or set workers to 0"
            ) from error
        return bytearray(written.getbuffer())


class _Packer(pickle.Pickler):
    """Writes of a view its own numbers: pickle would write the whole tensor that it is a view of."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not Tensor or obj.layout is not torch.strided or obj.device.type != "cpu":
            return NotImplemented
        if obj.untyped_storage().nbytes() <= obj.nbytes:
            return NotImplemented
        alone = obj.detach().clone().requires_grad_(obj.requires_grad)
        alone.__dict__.update(obj.__dict__)
        return alone.__reduce_ex__(pickle.DEFAULT_PROTOCOL)  # type: ignore[no-untyped-call]


def _unpacked(packed: Tensor) -> Any:
    try:
        return pickle.loads(packed.numpy().data)  # these bytes come from our own worker
    except Exception as error:
        raise UsageError(
            f"what a worker sent can't be read back in the training process ({in_words(error)}); a class "
            f"of the samples or of what collate returns pickles itself wrongly; mend it, or set workers=0"
        ) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class _Failure:
    """An error on its way from a worker."""

    kind: type[WholebatchError]
    message: str
    cause: BaseException | None

    @classmethod
    def of(cls, error: WholebatchError) -> _Failure:
        cause = error.__cause__
        try:
            pickle.loads(pickle.dumps(cause))
        except Exception:  # an exception of a class of the user's own may not travel
            assert cause is not None
            cause = RuntimeError(in_words(cause))
        return cls(kind=type(error), message=str(error), cause=cause)


def _next(results: Any, workers: int) -> Any:
    try:
        return next(results)
    except (RuntimeError, OSError, EOFError) as error:
        for process in results._workers:
            process.join(0.1)  # one that was killed just now may not have an exit code yet
        ended = [
            f"number {number} (process {process.pid}, {_end_of(process.exitcode)})"
            for number, process in enumerate(results._workers)
            if process.exitcode is not None
        ]
        if not ended:
            raise
        raise JudgeError(
            f"of {workers} workers that read samples, {', '.join(ended)} ended; "
            f"{'; '.join(_mending(results._workers))}"
        ) from error


def _mending(processes: list[Any]) -> list[str]:
    """What is to be done about the workers that ended, each cause once."""
    codes = [process.exitcode for process in processes if process.exitcode is not None]
    return list(dict.fromkeys(_mend(code) for code in codes))


def _mend(exit_code: int) -> str:
    how = _end_of(exit_code)
    if exit_code >= 0:
        return (
            "an exit code means that code of the data set or the collation ended the process, such as "
            "sys.exit(): let it raise an error, which would name the sample"
        )
    if "SIGKILL" in how:
        return (
            "the usual cause is memory: set workers (data.workers of a training job) lower, or to 0 to "
            "read in the training process"
        )
    if any(name in how for name in ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL")):
        return (
            "native code that the data set or the collation calls crashed: set workers (data.workers of a "
            "training job) to 0 and run with python -X faulthandler to see where"
        )
    return "something outside of the training sent that signal: run again once it does not"


def _end_of(exit_code: int) -> str:
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"killed by signal {-exit_code}"


def _as_it_is(made: Any) -> Any:
    return made


def _begin_worker(_: int) -> None:
    # Ctrl-C reaches every process of the terminal; the training process decides when workers end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End when the training process is gone, however it went.

    torch looks at the id of the parent for that, which under "forkserver" is the server's, and lives on.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


@contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """Leave SIGCHLD as it was.

    DataLoader's handler would raise wherever the training is just then, even inside an update. A worker
    that ended is seen when its next result is asked for.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGCHLD"):
        yield
        return
    found = signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, found)
