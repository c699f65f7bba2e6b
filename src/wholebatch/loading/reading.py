"""Samples to micro-batches in one process: what is drawn at random, and what an error says.

What a data set draws at random for a sample is decided by (seed, epoch, sample id), so that neither the
number of workers, the split nor a resumed run changes it, and the random state of the training process is
left as it was.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from torch.utils.data import Subset

from wholebatch.errors import JudgeError, WholebatchError
from wholebatch.order import random_numbers
from wholebatch.replay import random_state_kept, seed_host
from wholebatch.whereabouts import told

# One micro-batch; mostly a dict of tensors by name.
Batch = Any
# ``collate(samples, ids, epoch)`` makes a micro-batch of chosen samples.
Collate = Callable[[Sequence[Any], Sequence[int], int], Batch]


class Samples(Protocol):
    """A map-style data set: so many samples, each found by its index.

    One with an attribute ``draws_nothing`` that is true is read faster: the random state is not set for
    each of its samples, since neither it nor its collation draws anything.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class Part(NamedTuple):
    """Samples that are read together: one micro-batch, or all of a replica where they are cut later.

    Attributes:
        ids: of the samples; none where a replica has no part in a global batch.
        epoch: passes over the data before this one.
        position, next_position: samples consumed before and after the global batch, over all replicas.
        ends_window: whether it is the last of its window.
        too_long: those of ``ids`` that are longer than a micro-batch may be, and are cut short.
        passes: for each of ``ids`` the passes over its source before this one, where an order mixes
            several and a small one comes again within an epoch; none where that is the epoch.
    """

    ids: Sequence[int]
    epoch: int
    position: int
    next_position: int
    ends_window: bool
    too_long: Sequence[int] = ()
    passes: Sequence[int] = ()

    @property
    def drawing(self) -> Iterator[tuple[int, int]]:
        """Each id, and the passes that decide what is drawn for it."""
        return zip(self.ids, self.passes or itertools.repeat(self.epoch), strict=False)


class Made(NamedTuple):
    """What a part became.

    Attributes:
        batches: micro-batches of the samples that could be read.
        sample_ids: theirs, in order.
        left_out: ids of those that could not be read.
        part: which part it was.
    """

    batches: Sequence[Batch]
    sample_ids: Sequence[int]
    left_out: Sequence[int]
    part: Part


# Samples with their ids.
Chosen = list[tuple[int, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class MapReader:
    """Makes micro-batches of the samples of a part, in whichever process it is called.

    Args:
        samples: the data set.
        collate: makes a micro-batch of chosen samples.
        seed: of the run.
        skips: leave out samples that can't be read, and say so, instead of ending with an error.
        cut: ``cut(chosen)`` cuts samples that were read into micro-batches, where a part is more than one.
        cut_short: ``cut_short(id, sample)``, a sample as short as a micro-batch allows.
        bound: ``bound(batch, ids)`` refuses a micro-batch that is larger than the plan's.
    """

    samples: Samples
    collate: Collate
    seed: int
    skips: bool = False
    cut: Callable[[Chosen], list[Chosen]] | None = None
    cut_short: Callable[[int, Any], Any] | None = None
    bound: Callable[[Batch, Sequence[int]], None] | None = None

    def __call__(self, part: Part) -> Made:
        """Read, cut where that is done here, and collate.

        Raises:
            JudgeError: a sample could not be read, or not be collated; names it.
        """
        passes = dict(part.drawing)
        with _drawing(self.samples):
            chosen, left_out = self._read(part)
            groups = [group for group in ([chosen] if self.cut is None else self.cut(chosen)) if group]
            batches = [
                collated(
                    self.samples,
                    self.collate,
                    group,
                    epoch=part.epoch,
                    seed=self.seed,
                    passes=passes[group[0][0]],
                )
                for group in groups
            ]
        if self.bound is not None:
            for batch, group in zip(batches, filter(None, groups), strict=True):
                self.bound(batch, [index for index, _ in group])
        return Made(batches, [index for group in groups for index, _ in group], left_out, part)

    def told(self, made: Made) -> str:
        """What was made, in words."""
        return f"the micro-batch of samples {list(made.sample_ids)}"

    def _read(self, part: Part) -> tuple[Chosen, list[int]]:
        chosen: Chosen = []
        left_out: list[int] = []
        for index, passes in part.drawing:
            try:
                sample = _sample(self.samples, index, epoch=passes, seed=self.seed)
            except Exception:
                if not self.skips:
                    raise
                left_out.append(index)
                continue
            if index in part.too_long:
                assert self.cut_short is not None
                sample = self.cut_short(index, sample)
            chosen.append((index, sample))
        return chosen, left_out


def micro_batch(samples: Samples, collate: Collate, ids: Sequence[int], *, epoch: int, seed: int) -> Batch:
    """Read chosen samples and make a micro-batch of them, as a loader does.

    Args:
        samples: the data set.
        collate: ``collate(samples, ids, epoch)``.
        ids: which samples; none for a micro-batch without samples, if ``collate`` can make one.
        epoch: passes over the data before this one; 0 in evaluations.
        seed: of the run.

    Raises:
        JudgeError: a sample could not be read or collated; names it, with the user's error as its cause.

    Exactness: no arithmetic; random state is as before.
    """
    with _drawing(samples):
        chosen = [(index, _sample(samples, index, epoch=epoch, seed=seed)) for index in ids]
        return collated(samples, collate, chosen, epoch=epoch, seed=seed)


def read_samples(samples: Samples, ids: Sequence[int], *, epoch: int, seed: int) -> list[Any]:
    """Chosen samples, as a micro-batch has them, not collated.

    Args:
        samples, ids, epoch, seed: as for `micro_batch`.

    Raises:
        JudgeError: a sample could not be read; names it.

    Exactness: no arithmetic; random state is as before.
    """
    with _drawing(samples):
        return [_sample(samples, index, epoch=epoch, seed=seed) for index in ids]


def collated(
    samples: Any,
    collate: Collate,
    chosen: Sequence[tuple[int, Any]],
    *,
    epoch: int,
    seed: int,
    passes: int | None = None,
) -> Batch:
    """A micro-batch of samples that were read, with the random numbers of its first one.

    Args:
        samples: where they are from.
        collate: as for `micro_batch`.
        chosen: ids and samples.
        epoch, seed: as for `micro_batch`.
        passes: over the source of the first one, where that is not ``epoch``; decides what is drawn.

    Raises:
        JudgeError: they could not be collated; names them.

    Exactness: no arithmetic.
    """
    ids = [index for index, _ in chosen]
    if not draws_nothing(samples):
        seed_for(seed, epoch if passes is None else passes, ids[0] if ids else 0)
    with naming(f"collating samples {ids} failed"):
        return collate([sample for _, sample in chosen], ids, epoch)


def seed_for(seed: int, epoch: int, sample_id: int) -> None:
    """Let the generators of the host draw what these three alone decide."""
    (drawn,) = random_numbers("sample", 1, seed=seed, epoch=epoch, sample_id=sample_id)
    seed_host(int(drawn >> np.uint64(1)))


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Say ``what`` failed where something of the user's does; our own errors come as they are."""
    try:
        yield
    except WholebatchError:
        raise
    except Exception as error:
        raise JudgeError(f"{what} with {in_words(error)}") from error


def in_words(error: BaseException) -> str:
    """`told` of an error, of which the text itself may fail."""
    try:
        return told(error)
    except Exception as failed:
        return f"{type(error).__name__}, whose text can't be made ({type(failed).__name__})"


def draws_nothing(samples: Any) -> bool:
    """Whether a data set says that neither it nor its collation draws random numbers."""
    return bool(getattr(samples, "draws_nothing", False))


def _drawing(samples: Any) -> Any:
    """Where samples are read: random state is put back at the end, if they may draw."""
    return nullcontext() if draws_nothing(samples) else random_state_kept(host_alone=True)


def _sample(samples: Samples, index: int, *, epoch: int, seed: int) -> Any:
    if not draws_nothing(samples):
        seed_for(seed, epoch, index)
    with naming(f"reading {_named(samples, index)} failed"):
        return samples[index]


def _named(samples: Any, index: int) -> str:
    """A sample in words; with its index in the user's data set where it is a part of that."""
    if isinstance(samples, Subset):
        return f"sample {index}, which is {samples.indices[index]} of the data set,"
    return f"sample {index}"
