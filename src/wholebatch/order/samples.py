"""The order of one data set, in global batches of so many samples.

    global_batch(position) = shuffle(epoch) of the places offset to offset + global_batch_samples - 1
    epoch, offset          = divmod(position, samples_per_epoch)

A position is a number of samples consumed since the start of training, so it means the same under
every split. The global batch is cut into one run of neighbours for each replica, and that into
micro-batches; changing m, A or D moves the cuts and nothing else. The shuffle is computed place by place
(`wholebatch.order.permutation`): no list of samples is held or sent to anybody, however many there are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from wholebatch.epochs import EpochCut, cut_epoch
from wholebatch.errors import PlanError
from wholebatch.order.permutation import GOLDEN_RATIO, Permutation, draw_permutation, mix64
from wholebatch.plan import Tail
from wholebatch.whole_numbers import one_of, or_list, set_whole_numbers, show_remainder, whole_number

# Names how (seed, epoch) becomes an order. A run goes on in the same order only under the same rule; it
# gets another name whenever any order of any size changes.
ORDER_RULE = "sorted to 4096, then 8 rounds"
# Permutations that are held for the next call, of 8 KiB at most each: a mixture has one for each source.
_HELD_PERMUTATIONS = 32

Stream = Literal["order", "masks", "sample"]
# Everything that is drawn from (seed, epoch), by its number in the generator's counter: the order of the
# samples, which tokens are masked, and what a data set draws for a sample. A number is never given again.
STREAMS: dict[Stream, int] = {"order": 0, "masks": 1, "sample": 2}


class Order(Protocol):
    """What says which samples an update sees: one global batch after the other, without end.

    Each method is a function of its arguments alone, the same on every rank. A position is the number of
    samples consumed since the start of training; 0 is one, and `next_position` leads from one to the next.
    """

    def global_batch(self, position: int) -> list[int]:
        """Return the sample ids of the update that begins at ``position``, over all replicas."""
        ...

    def next_position(self, position: int) -> int:
        """Return where the next update begins: ``position`` + the samples of this one."""
        ...

    def epoch(self, position: int) -> int:
        """Return how many passes over the data lie before ``position``."""
        ...

    def window(
        self, position: int, *, micro_batch_samples: int, replicas: int, replica: int
    ) -> list[list[int]]:
        """Return the sample ids of one replica's micro-batches of at most ``micro_batch_samples``."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleOrder:
    """The order of the samples over all epochs, cut into global batches.

    A global batch never crosses the end of an epoch. What is left there is a smaller global batch
    (tail "partial": its update has its own, real denominator) or is left out of that epoch
    ("drop"); samples are never repeated to fill it. With a shuffle each epoch drops other samples.

    Args:
        num_samples: samples of the data set; their ids are 0 to num_samples - 1.
        global_batch_samples: samples of one update over all replicas.
        seed: with the epoch, decides the order; 0 to 2**53, so that JSON holds it.
        shuffle: False keeps the ids in their own order in every epoch.
        tail: "partial" or "drop".

    Raises:
        PlanError: a number is not a whole one in its bounds, or dropping the tail leaves no update.
    """

    num_samples: int
    global_batch_samples: int
    seed: int = 0
    shuffle: bool = True
    tail: Tail = "partial"

    def __post_init__(self) -> None:
        set_whole_numbers(self, "num_samples", "global_batch_samples")
        set_whole_numbers(self, "seed", minimum=0)
        one_of("tail", self.tail, get_args(Tail))
        if self.updates_per_epoch == 0:
            raise PlanError(
                f"tail='drop' leaves no update: num_samples {self.num_samples} is less than "
                f"global_batch_samples {self.global_batch_samples}; use tail='partial', or a global batch "
                f"of at most {self.num_samples}"
            )

    @property
    def _cut(self) -> EpochCut:
        return cut_epoch(self.num_samples, self.global_batch_samples, self.tail)

    @property
    def samples_dropped_per_epoch(self) -> int:
        """Samples of an epoch that no update sees: the remainder where the tail is dropped, else 0."""
        return self._cut.dropped_samples

    @property
    def samples_per_epoch(self) -> int:
        """Samples of an epoch that updates consume; a position moves on by so many in an epoch."""
        return self.num_samples - self.samples_dropped_per_epoch

    @property
    def updates_per_epoch(self) -> int:
        """Updates of one epoch, the partial one at its end included."""
        return self._cut.updates

    def next_position(self, position: int) -> int:
        """Return where the next update begins: ``position`` + the samples of this one."""
        _, begin, end = self._locate(position)
        return int(position) + end - begin

    def epoch(self, position: int) -> int:
        """Return the epoch in which ``position`` lies, from 0."""
        return whole_number("position", position, minimum=0) // self.samples_per_epoch

    def epoch_order(self, epoch: int) -> NDArray[np.int64]:
        """Return all sample ids in the order of ``epoch``, read-only.

        To look at a data set of moderate size: unlike the other methods it needs 8 bytes for each sample.
        """
        order = self._ids(whole_number("epoch", epoch, minimum=0), 0, self.num_samples)
        order.setflags(write=False)
        return order

    def global_batch(self, position: int) -> list[int]:
        """Return the sample ids of the update that begins at ``position``, over all replicas.

        Args:
            position: samples consumed before it, over all epochs; a boundary between two updates.

        Returns:
            ``global_batch_samples`` ids, fewer at the end of an epoch whose tail is partial.

        Raises:
            PlanError: the position is not a whole number or lies inside an update; the message names
                the nearest boundaries.
        """
        ids: list[int] = self._ids(*self._locate(position)).tolist()
        return ids

    def window(
        self, position: int, *, micro_batch_samples: int, replicas: int, replica: int
    ) -> list[list[int]]:
        """Return the sample ids of one replica's micro-batches in the update at ``position``.

        Replicas in their order hold neighbouring parts of `global_batch`, whose sizes differ by at
        most one sample; only at a tail do they differ. A part is cut into micro-batches of
        ``micro_batch_samples``, the last one shorter where it must be.

        Args:
            position: as for `global_batch`.
            micro_batch_samples: m.
            replicas: D.
            replica: which one, 0 to D - 1.

        Returns:
            One list of ids for each micro-batch. A tail of fewer samples than replicas leaves some
            replicas without any: theirs is an empty list, and they still take part in the update.

        Raises:
            PlanError: as for `global_batch`; a replica that does not exist; a global batch that m x D
                does not divide.
        """
        share = ReplicaShare(micro_batch_samples=micro_batch_samples, replicas=replicas, replica=replica)
        share.check_divides(self.global_batch_samples)
        epoch, begin, end = self._locate(position)
        mine = share.places(begin, end)
        return share.cut(self._ids(epoch, mine.start, mine.stop).tolist())

    def _ids(self, epoch: int, first: int, last: int) -> NDArray[np.int64]:
        return epoch_ids(self, epoch, first, last)

    def _locate(self, position: int) -> tuple[int, int, int]:
        """Return the epoch of a position, and where in its order the update begins and ends."""
        position = whole_number("position", position, minimum=0)
        epoch, begin = divmod(position, self.samples_per_epoch)
        inside = begin % self.global_batch_samples
        end = min(begin - inside + self.global_batch_samples, self.samples_per_epoch)
        if inside:
            boundaries = or_list([position - inside, position - begin + end])
            raise PlanError(
                f"position={position} lies inside an update: updates of global_batch_samples "
                f"{self.global_batch_samples} in epochs of {self.samples_per_epoch} samples begin at "
                f"{boundaries}, the nearest"
            )
        return epoch, begin, end


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaShare:
    """Which part of a global batch is one replica's, and how that is cut into micro-batches.

    Replicas in their order hold neighbouring parts, whose sizes differ by at most one sample.

    Args:
        micro_batch_samples: m; the last micro-batch of a part is shorter where it must be.
        replicas: D.
        replica: which one, 0 to D - 1.

    Raises:
        PlanError: a number is not a whole one in its bounds, or the replica does not exist.
    """

    micro_batch_samples: int
    replicas: int
    replica: int

    def __post_init__(self) -> None:
        set_whole_numbers(self, "micro_batch_samples", "replicas")
        set_whole_numbers(self, "replica", minimum=0)
        if self.replica >= self.replicas:
            raise PlanError(
                f"replica={self.replica} does not exist; with replicas={self.replicas} it is 0 to "
                f"{self.replicas - 1}"
            )

    def check_divides(self, global_batch_samples: int) -> None:
        """Raise PlanError where m x D does not divide a global batch of so many samples."""
        together = self.micro_batch_samples * self.replicas
        if global_batch_samples % together:
            raise PlanError(
                f"global_batch_samples {global_batch_samples} does not divide by micro_batch_samples "
                f"{self.micro_batch_samples} x replicas {self.replicas}: "
                f"{show_remainder(global_batch_samples, together)}; plan_batch shows what fits"
            )

    def places(self, begin: int, end: int) -> range:
        """Return this replica's part of the places ``begin`` to ``end - 1``, perhaps none."""
        share, extra = divmod(end - begin, self.replicas)
        first = begin + self.replica * share + min(self.replica, extra)
        return range(first, first + share + (self.replica < extra))

    def cut(self, ids: list[int]) -> list[list[int]]:
        """Cut the ids of this replica's part into its micro-batches."""
        m = self.micro_batch_samples
        return [ids[cut : cut + m] for cut in range(0, len(ids), m)]


class _Shuffled(Protocol):
    """What decides the order of an epoch."""

    @property
    def num_samples(self) -> int: ...
    @property
    def seed(self) -> int: ...
    @property
    def shuffle(self) -> bool: ...


def epoch_ids(order: _Shuffled, epoch: int, first: int, last: int) -> NDArray[np.int64]:
    """Return the sample ids at the places ``first`` to ``last - 1`` of an epoch.

    Args:
        order: its ``num_samples``, ``seed`` and ``shuffle`` decide.
        epoch: passes over the data before this one.
        first, last: places, 0 <= first <= last <= num_samples.

    Returns:
        Shape (last - first,); in time and memory for these alone.
    """
    if not order.shuffle:
        return np.arange(first, last, dtype=np.int64)
    return epoch_permutation(order.num_samples, seed=order.seed, epoch=epoch).between(first, last)


@lru_cache(maxsize=_HELD_PERMUTATIONS)
def epoch_permutation(num_samples: int, *, seed: int, epoch: int, source: int = 0) -> Permutation:
    """Return the permutation in whose order an epoch's samples come.

    Args:
        num_samples: samples of the data set, or of one source of a mixture.
        seed: of the run.
        epoch: passes over these samples before this one.
        source: which source of a mixture they are; 0 where there is one data set.

    Returns:
        Place -> sample id. Its random numbers are a generator's raw stream, which is promised to stay as it
        is over versions and machines, so that a run resumes in the same order after an upgrade.

    Source: NumPy's NEP 19 (bit generators keep their stream; distributions and shuffles may not).
    """

    def draw(how_many: int) -> NDArray[np.uint64]:
        return random_numbers("order", how_many, seed=seed, epoch=epoch, sample_id=source)

    return draw_permutation(num_samples, draw)


def random_numbers(
    stream: Stream, how_many: int, *, seed: int, epoch: int, sample_id: int = 0
) -> NDArray[np.uint64]:
    """Draw 64-bit numbers that the arguments alone decide.

    Every stream and sample has a range of the generator's counter of its own, of 2**64 blocks of four
    numbers, so that no two of them share a number.

    Args:
        stream: what the numbers are for; one of ``STREAMS``.
        how_many: numbers to draw.
        seed: of the run.
        epoch: passes over the data before this one.
        sample_id: which sample they are for, where they are for one.

    Returns:
        Shape (how_many,), evenly from 0 to 2**64 - 1.

    Source: NumPy's NEP 19, as for `epoch_permutation`.
    """
    key = np.array([seed, epoch], dtype=np.uint64)
    first = np.array([0, sample_id, STREAMS[stream], 0], dtype=np.uint64)
    drawn: NDArray[np.uint64] = np.random.Philox(key=key, counter=first).random_raw(how_many)
    return drawn


def sample_digest(ids: Iterable[int]) -> int:
    """Return a 64-bit digest of a bag of sample ids, the same in any order and under any split.

    ``sum over ids of mix(id), modulo 2**64``: digests of micro-batches and ranks add up to that of
    the global batch (modulo 2**64), and a repeated or missing sample changes it.

    Args:
        ids: sample ids, whole numbers from 0; a repeated id counts twice.

    Returns:
        A number from 0, for no ids, to 2**64 - 1.

    Raises:
        PlanError: an id is negative, too large, or not a whole number.

    Source: the mixing function is the output step of SplitMix64 (Steele, Lea and Flood 2014).
    """
    checked = [whole_number("sample id", sample, minimum=0) for sample in ids]
    mixed = mix64(np.array(checked, dtype=np.uint64) + GOLDEN_RATIO)
    return int(np.sum(mixed, dtype=np.uint64))


def format_digest(digest: int) -> str:
    """Write a digest, or a sum of digests modulo 2**64, as 16 hexadecimal digits."""
    return f"{digest % 2**64:016x}"
