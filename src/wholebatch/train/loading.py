"""Micro-batches in the order of the run: read in between, or ahead by worker processes.

Both ways give the same batches. What a data set of the user's own draws at random for a sample is decided
by (seed, epoch, sample id), so that neither the number of workers, the split nor a resumed run changes it,
and the random state of the training process is left as it was.
"""

from __future__ import annotations

import pickle
import signal
import threading
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

from wholebatch.errors import JudgeError, WholebatchError
from wholebatch.order import SampleOrder, random_numbers
from wholebatch.plan import BatchPlan
from wholebatch.replay import random_state_kept, seed_host
from wholebatch.train.data.store import TokenSamples
from wholebatch.train.material import Batch, JobData, Samples
from wholebatch.whereabouts import told

# Micro-batches that a worker may hold ready; each takes a file descriptor.
_MOST_AHEAD_PER_WORKER = 64


def windows(
    data: JobData,
    order: SampleOrder,
    plan: BatchPlan,
    *,
    replica: int,
    start_samples: int,
    workers: int,
    seed: int,
) -> Generator[list[Batch]]:
    """One replica's micro-batches, one global batch after the other, without end.

    Close it when the run ends (``contextlib.closing``), so that its workers end too.

    Args:
        data: samples to train on, and their collation.
        order: which samples come when.
        plan: how a global batch is cut.
        replica: which of the plan's replicas this is.
        start_samples: position of the first global batch: samples consumed since the start of training.
        workers: processes that read ahead; 0 reads when a global batch is asked for.
        seed: of the run; decides what a data set draws at random.

    Yields:
        The micro-batches of a global batch, on the host; none where a tail leaves this replica without
        samples.

    Raises:
        JudgeError: a sample could not be read, or a worker process ended; names which.

    Exactness: the batches do not depend on ``workers``.
    """
    keys = _keys(order, plan, replica, start_samples)
    reader = _Reader(train=data.train, collate=data.collate, seed=seed)
    if workers == 0:
        made: Iterator[tuple[Batch | None, bool]] = ((reader.batch(key), key.ends_window) for key in keys)
    else:
        ahead = min(_MOST_AHEAD_PER_WORKER, max(2, -(-plan.micro_batches_per_window // workers)))
        made = _read_ahead(reader, keys, workers=workers, ahead=ahead, seed=seed + start_samples)
    try:
        window: list[Batch] = []
        for batch, ends_window in made:
            if batch is not None:
                window.append(batch)
            if ends_window:
                yield window
                window = []
    finally:
        made.close()  # type: ignore[attr-defined]  # both are generators


def micro_batch(
    samples: Samples,
    collate: Callable[[Sequence[Any], Sequence[int], int], Batch],
    ids: Sequence[int],
    *,
    epoch: int,
    seed: int,
) -> Batch:
    """Read chosen samples and make a micro-batch of them; for evaluations, and behind `windows`.

    Args:
        samples: of one side of the split.
        collate: of the same data.
        ids: which samples; none for a micro-batch without samples.
        epoch: passes over the data before this one; 0 in evaluations.
        seed: of the run.

    Raises:
        JudgeError: a sample could not be read or collated; names it, with the user's error as its cause.

    Exactness: no arithmetic; random state is as before.
    """
    if isinstance(samples, TokenSamples):  # which draw nothing at random
        return collate([samples[index] for index in ids], ids, epoch)
    with random_state_kept(host_alone=True):
        chosen = _read(samples, ids, epoch=epoch, seed=seed)
        _seed(seed, epoch, ids[0] if ids else 0)
        with _naming(f"collating samples {list(ids)} failed"):
            return collate(chosen, ids, epoch)


def read(samples: Samples, ids: Sequence[int], *, epoch: int, seed: int) -> list[Any]:
    """Chosen samples, as a micro-batch has them, not collated.

    Args:
        samples, ids, epoch, seed: as for `micro_batch`.

    Raises:
        JudgeError: a sample could not be read; names it.

    Exactness: no arithmetic; random state is as before.
    """
    with random_state_kept(host_alone=True):
        return _read(samples, ids, epoch=epoch, seed=seed)


def _read(samples: Samples, ids: Sequence[int], *, epoch: int, seed: int) -> list[Any]:
    chosen = []
    for index in ids:
        _seed(seed, epoch, index)
        with _naming(f"reading {_named(samples, index)} failed"):
            chosen.append(samples[index])
    return chosen


class _Key(NamedTuple):
    """Which micro-batch; without ids it only says that a window ends."""

    ids: list[int] | None
    epoch: int
    ends_window: bool


def _keys(order: SampleOrder, plan: BatchPlan, replica: int, position: int) -> Iterator[_Key]:
    while True:
        window = order.window(
            position,
            micro_batch_samples=plan.micro_batch_samples,
            replicas=plan.replicas,
            replica=replica,
        )
        epoch = position // order.samples_per_epoch
        for number, ids in enumerate(window, start=1):
            yield _Key(ids, epoch, ends_window=number == len(window))
        if not window:
            yield _Key(None, epoch, ends_window=True)
        position = order.next_position(position)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Reader(Dataset[Any]):
    """Micro-batches by their key; in a worker, as bytes or as the error that came up."""

    train: Samples
    collate: Callable[[Sequence[Any], Sequence[int], int], Batch]
    seed: int

    def batch(self, key: _Key) -> Batch | None:
        if key.ids is None:
            return None
        return micro_batch(self.train, self.collate, key.ids, epoch=key.epoch, seed=self.seed)

    def __getitem__(self, key: _Key) -> tuple[Tensor | _Failure, bool]:
        """What a worker hands over.

        The whole micro-batch travels as one block of shared memory: tensor by tensor a long window would
        need thousands of file descriptors.
        """
        try:
            packed = bytearray(pickle.dumps(self.batch(key)))
        except WholebatchError as error:
            return _Failure.of(error), True
        return torch.frombuffer(packed, dtype=torch.uint8), key.ends_window


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
            cause = RuntimeError(f"{type(cause).__name__}: {cause}")
        return cls(kind=type(error), message=str(error), cause=cause)


def _read_ahead(
    reader: _Reader, keys: Iterator[_Key], *, workers: int, ahead: int, seed: int
) -> Iterator[tuple[Batch | None, bool]]:
    """What `_Reader.batch` makes of each key, in their order, made by worker processes."""
    with _signal_handlers_kept(), warnings.catch_warnings():
        # More workers than cores are the user's choice, and useful where they wait for a disk.
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        loader = DataLoader(
            reader,
            batch_size=None,
            sampler=keys,  # any iterable will do
            num_workers=workers,
            prefetch_factor=ahead,
            collate_fn=_as_it_is,
            worker_init_fn=_begin_worker,
            # Else the seeds of the workers would be drawn from the global generator.
            generator=torch.Generator().manual_seed(seed % 2**63),
        )
        results = iter(loader)
    try:
        while True:
            packed, ends_window = _next(results, workers)
            if isinstance(packed, _Failure):
                raise packed.kind(packed.message) from packed.cause
            # These bytes come from our own worker.
            yield pickle.loads(packed.numpy().tobytes()), ends_window
    finally:
        results._shutdown_workers()  # type: ignore[attr-defined]


def _next(results: Any, workers: int) -> Any:
    try:
        return next(results)
    except (RuntimeError, OSError, EOFError) as error:
        for process in results._workers:
            process.join(0.1)  # one that was killed just now may not have an exit code yet
        ended = [
            f"{number} (process {process.pid}, {_end_of(process.exitcode)})"
            for number, process in enumerate(results._workers)
            if process.exitcode is not None
        ]
        if not ended:
            raise
        raise JudgeError(
            f"of {workers} workers that read samples, {', '.join(ended)} ended; the usual cause is memory: "
            f"set data.workers lower, or to 0 to read in the training process"
        ) from error


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


@contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """Leave SIGCHLD as it was.

    DataLoader's handler would raise wherever the training is just then, even inside an update. A worker
    that ended is seen when its next micro-batch is asked for.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGCHLD"):
        yield
        return
    found = signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, found)


def _named(samples: Samples, index: int) -> str:
    """A sample in words; with its index in the user's data set where some of that was held out."""
    if isinstance(samples, Subset):
        return f"sample {index}, which is {samples.indices[index]} of the data set,"
    return f"sample {index}"


@contextmanager
def _naming(what: str) -> Iterator[None]:
    try:
        yield
    except WholebatchError:
        raise
    except Exception as error:
        raise JudgeError(f"{what} with {told(error)}") from error


def _seed(seed: int, epoch: int, sample_id: int) -> None:
    """Let the generators of the host draw what these three alone decide."""
    (drawn,) = random_numbers("sample", 1, seed=seed, epoch=epoch, sample_id=sample_id)
    seed_host(int(drawn >> np.uint64(1)))
