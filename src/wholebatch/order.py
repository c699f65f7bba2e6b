"""Which sample comes when: the same update sees the same samples under any (m, A, D).

    global_batch(position) = epoch_order(epoch)[offset : offset + global_batch_samples]
    epoch, offset          = divmod(position, samples_per_epoch)

A position is a number of samples consumed since the start of training, so it means the same under
every split. The global batch is cut into one run of neighbours for each replica, and that into
micro-batches; changing m, A or D moves the cuts and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from wholebatch.epochs import EpochCut, cut_epoch
from wholebatch.errors import PlanError
from wholebatch.layout import one_of, or_list, set_whole_numbers, show_remainder, whole_number
from wholebatch.plan import Tail

Stream = Literal["order", "masks", "sample"]
# Everything that is drawn from (seed, epoch), by its number in the generator's counter: the order of the
# samples, which tokens are masked, and what a data set draws for a sample. A number is never given again.
STREAMS: dict[Stream, int] = {"order": 0, "masks": 1, "sample": 2}


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
    # The order of the epoch in use, at most one; no part of what the object means.
    _orders: dict[int, NDArray[np.int64]] = field(
        default_factory=dict, init=False, repr=False, compare=False, hash=False
    )

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

    def epoch_order(self, epoch: int) -> NDArray[np.int64]:
        """Return all sample ids in the order of ``epoch``, read-only.

        The ids are sorted by random 64-bit keys of (seed, epoch). It is the keys' generator whose
        stream is promised to stay the same over versions and machines, not a library's shuffle, so
        that a run resumes in the same order after an upgrade. Needs 16 bytes a sample; a caller asks
        for ids by position only, so a rule in constant memory can take this method's place.

        Source: NumPy's NEP 19 (bit generators keep their stream; distributions and shuffles may not).
        """
        whole_number("epoch", epoch, minimum=0)
        if epoch not in self._orders:
            order = np.arange(self.num_samples, dtype=np.int64)
            if self.shuffle:
                random_keys = random_numbers("order", self.num_samples, seed=self.seed, epoch=epoch)
                order = np.argsort(random_keys, kind="stable").astype(np.int64, copy=False)
            order.setflags(write=False)
            self._orders.clear()
            self._orders[epoch] = order
        return self._orders[epoch]

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
        epoch, begin, end = self._locate(position)
        ids: list[int] = self.epoch_order(epoch)[begin:end].tolist()
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
        micro_batch = whole_number("micro_batch_samples", micro_batch_samples)
        replicas = whole_number("replicas", replicas)
        if whole_number("replica", replica, minimum=0) >= replicas:
            raise PlanError(
                f"replica={replica} does not exist; with replicas={replicas} it is 0 to {replicas - 1}"
            )
        self._check_split(micro_batch, replicas)
        epoch, begin, end = self._locate(position)
        share, extra = divmod(end - begin, replicas)
        first = begin + replica * share + min(replica, extra)
        last = first + share + (1 if replica < extra else 0)
        order = self.epoch_order(epoch)
        cuts = range(first, last, micro_batch)
        return [order[cut : min(cut + micro_batch, last)].tolist() for cut in cuts]

    def _check_split(self, micro_batch: int, replicas: int) -> None:
        samples, together = self.global_batch_samples, micro_batch * replicas
        if samples % together:
            raise PlanError(
                f"global_batch_samples {samples} does not divide by micro_batch_samples {micro_batch} x "
                f"replicas {replicas}: {show_remainder(samples, together)}; plan_batch shows what fits"
            )

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

    Source: NumPy's NEP 19, as for `SampleOrder.epoch_order`.
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
    mixed = np.array(checked, dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed = mixed ^ (mixed >> np.uint64(31))
    return int(np.sum(mixed, dtype=np.uint64))


def format_digest(digest: int) -> str:
    """Write a digest, or a sum of digests modulo 2**64, as 16 hexadecimal digits."""
    return f"{digest % 2**64:016x}"
