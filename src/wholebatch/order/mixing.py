"""Several sources mixed by weight: an endless order with random access.

    samples of source s before position N = its share of N, whole numbers all the way:
        of N samples of sources l..r, those of l..m are  floor(N (w_l + ... + w_m) / (w_l + ... + w_r))
    the k-th sample of source s          = shuffle(s, pass k // n_s) at the place k % n_s

The samples of the sources are spread as evenly as whole samples can be: before any position a source of k
has had its share to within less than ceil(log2 k) samples, and exactly its share at every multiple of the
sum of the whole weights. A small source comes again and again, in another order each time; a large one
may not be seen whole. Nothing is held between calls, and no source waits for another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import gcd, inf, lcm
from numbers import Rational, Real

import numpy as np
from numpy.typing import NDArray

from wholebatch.errors import PlanError
from wholebatch.order.samples import ReplicaShare, epoch_permutation
from wholebatch.whole_numbers import or_list, set_whole_numbers, whole_number

# A weight is read as the nearest fraction with a denominator up to here: 0.1 is one tenth.
_LARGEST_DENOMINATOR = 10**6
# The most that whole weights may add up to, so that products of two of them fit 64 bits.
_LARGEST_SUM = 2**31


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One of several data sets that are mixed.

    Args:
        num_samples: its samples.
        weight: its share of the samples of the mixture, beside the weights of the others; any positive
            number.

    Raises:
        PlanError: num_samples is no whole number in its bounds, or the weight no positive number.
    """

    num_samples: int
    weight: float | Fraction = 1

    def __post_init__(self) -> None:
        set_whole_numbers(self, "num_samples")
        if isinstance(self.weight, bool) or not isinstance(self.weight, Real):
            raise PlanError(
                f"weight={self.weight!r} is a {type(self.weight).__name__}; give a number such as 2"
            )
        if not 0 < self.weight < inf:
            raise PlanError(
                f"weight={self.weight} is not positive and finite; leave out what has no weight"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class MixedOrder:
    """The order of the samples of several sources, cut into global batches.

    Sample ids count through the sources as if they stood one after the other: those of source 1 begin at
    the num_samples of source 0. There is no tail: the mixture goes on without end, every global
    batch is whole, and one that is larger than a small source's share allows has some of its samples twice.

    An epoch is a number of whole global batches: as many as hold at least the samples of all
    sources together. It is a measure of length; passes over a source have their own ends (`sample_epochs`).

    Args:
        sources: what is mixed, and by which weights.
        global_batch_samples: samples of one update over all replicas.
        seed: with the source and its pass, decides the order; 0 to 2**53.
        shuffle: False keeps the samples of each source in their own order.

    Raises:
        PlanError: a number is not a whole one in its bounds; no source, or a weight that is too small
            beside the others.
    """

    sources: tuple[Source, ...]
    global_batch_samples: int
    seed: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        set_whole_numbers(self, "global_batch_samples")
        set_whole_numbers(self, "seed", minimum=0)
        object.__setattr__(self, "sources", tuple(self.sources))
        if not self.sources:
            raise PlanError("sources is empty; a mixture needs at least one Source")
        whole_number("num_samples of all sources", self.num_samples)
        _ = self.weights

    @property
    def num_samples(self) -> int:
        """Samples of all sources together; their ids are below it."""
        return sum(source.num_samples for source in self.sources)

    @property
    def weights(self) -> tuple[int, ...]:
        """The whole numbers that stand for the weights: source s gives weights[s] of every sum(weights)."""
        return whole_weights(tuple(source.weight for source in self.sources))

    @property
    def updates_per_epoch(self) -> int:
        """Updates of one epoch; each of them has a whole global batch."""
        return -(-self.num_samples // self.global_batch_samples)

    @property
    def samples_per_epoch(self) -> int:
        """Samples of an epoch, repeated ones included: a position moves on by so many in an epoch."""
        return self.updates_per_epoch * self.global_batch_samples

    def epoch(self, position: int) -> int:
        """Return the epoch of the mixture in which ``position`` lies, from 0."""
        return whole_number("position", position, minimum=0) // self.samples_per_epoch

    def next_position(self, position: int) -> int:
        """Return where the next update begins: ``position + global_batch_samples``."""
        return self._begin(position) + self.global_batch_samples

    def global_batch(self, position: int) -> list[int]:
        """Return the sample ids of the update that begins at ``position``, over all replicas.

        Args:
            position: samples consumed before it, a multiple of ``global_batch_samples``.

        Returns:
            ``global_batch_samples`` ids.

        Raises:
            PlanError: the position is not a whole number or lies inside an update; the message names
                the nearest boundaries.
        """
        return self._ids(range(self._begin(position), self.next_position(position)))

    def sample_epochs(self, position: int) -> list[int]:
        """Return for each sample of `global_batch` which pass over its source it belongs to, from 0.

        Args:
            position: as for `global_batch`.

        Raises:
            PlanError: as for `global_batch`.
        """
        places = range(self._begin(position), self.next_position(position))
        number, drawn = _draws(self.weights, places)
        passes: list[int] = (drawn // self._sizes()[number]).tolist()
        return passes

    def samples_by_source(self, position: int) -> tuple[int, ...]:
        """Return how many samples each source has given before ``position``, which may be any.

        Raises:
            PlanError: the position is not a whole number in its bounds.
        """
        return tuple(_shared_out(self.weights, whole_number("position", position, minimum=0)))

    def window(
        self, position: int, *, micro_batch_samples: int, replicas: int, replica: int
    ) -> list[list[int]]:
        """Return the sample ids of one replica's micro-batches in the update at ``position``.

        Args:
            position: as for `global_batch`.
            micro_batch_samples: m.
            replicas: D.
            replica: which one, 0 to D - 1.

        Returns:
            One list of ids for each micro-batch; as for `SampleOrder.window`.

        Raises:
            PlanError: as for `global_batch`; a replica that does not exist; a global batch that m x D
                does not divide.
        """
        share = ReplicaShare(micro_batch_samples=micro_batch_samples, replicas=replicas, replica=replica)
        share.check_divides(self.global_batch_samples)
        return share.cut(self._ids(share.places(self._begin(position), self.next_position(position))))

    def _begin(self, position: int) -> int:
        position = whole_number("position", position, minimum=0)
        inside = position % self.global_batch_samples
        if inside:
            boundaries = or_list([position - inside, position - inside + self.global_batch_samples])
            raise PlanError(
                f"position={position} lies inside an update: updates of global_batch_samples "
                f"{self.global_batch_samples} begin at {boundaries}, the nearest"
            )
        return position

    def _sizes(self) -> NDArray[np.int64]:
        return np.array([source.num_samples for source in self.sources], dtype=np.int64)

    def _ids(self, places: range) -> list[int]:
        """Return the sample ids at some places of the run, in time and memory for these alone."""
        number, drawn = _draws(self.weights, places)
        ids = np.empty(len(places), dtype=np.int64)
        begins_at = 0
        for source, each in enumerate(self.sources):
            mine = np.flatnonzero(number == source)
            ids[mine] = begins_at + self._drawn_from(source, drawn[mine])
            begins_at += each.num_samples
        listed: list[int] = ids.tolist()
        return listed

    def _drawn_from(self, source: int, drawn: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return which samples of a source its draws are, numbered from the start of training."""
        num_samples = self.sources[source].num_samples
        passes, places = np.divmod(drawn, num_samples)
        if not self.shuffle:
            return places
        chosen = np.empty_like(places)
        for epoch in np.unique(passes).tolist():
            of_pass = passes == epoch
            order = epoch_permutation(num_samples, seed=self.seed, epoch=epoch, source=source)
            chosen[of_pass] = order.at(places[of_pass])
        return chosen


@lru_cache(maxsize=8)
def whole_weights(weights: tuple[float | Fraction, ...]) -> tuple[int, ...]:
    """Return the least whole numbers in the proportion of the weights.

    Each weight is read as the nearest fraction with a denominator of at most a million, so that 0.1 means
    one tenth, and whole numbers mean themselves. Where the whole numbers would add up to more than
    2**31, the shares are rounded to multiples of 2**-30 instead.

    Args:
        weights: positive and finite.

    Returns:
        Whole numbers from 1, one a weight, without a common factor.

    Raises:
        PlanError: a weight is too small beside the others to be told from 0; names which.
    """
    exact = [Fraction(weight) if isinstance(weight, Rational) else _near(weight) for weight in weights]
    denominator = lcm(*(each.denominator for each in exact))
    whole = [int(each * denominator) for each in exact]
    if sum(whole) // gcd(*whole) > _LARGEST_SUM:
        whole = [round(each * (_LARGEST_SUM // 2) / sum(exact)) for each in exact]
    for number, (weight, rounded) in enumerate(zip(weights, whole, strict=True)):
        if rounded == 0:
            raise PlanError(
                f"weight={weight} of source {number} is too small beside {', '.join(map(str, weights))}: "
                f"a share below 2**-31 is never drawn; raise it, or leave the source out"
            )
    return tuple(each // gcd(*whole) for each in whole)


def _near(weight: float) -> Fraction:
    """Return the short fraction that a float was meant to be, itself where it is too small for one."""
    given = Fraction(float(weight))
    return given.limit_denominator(_LARGEST_DENOMINATOR) or given


def _shared_out(weights: Sequence[int], samples: int) -> list[int]:
    """Return how many of the first ``samples`` samples each source has: half the sources, and again."""
    if len(weights) == 1:
        return [samples]
    middle = len(weights) // 2
    left = samples * sum(weights[:middle]) // sum(weights)
    return _shared_out(weights[:middle], left) + _shared_out(weights[middle:], samples - left)


def _draws(weights: Sequence[int], places: range) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return from which source each place is drawn, and how many draws that source had before it."""
    source = np.zeros(len(places), dtype=np.int64)
    drawn = np.arange(places.start, places.stop, dtype=np.int64)
    open_ends = [(0, len(weights), np.arange(len(places)))]
    while open_ends:
        first, last, chosen = open_ends.pop()
        if last - first == 1 or not chosen.size:
            source[chosen] = first
            continue
        middle = first + (last - first) // 2
        shares = sum(weights[first:middle]), sum(weights[first:last])
        before, after = (_share(drawn[chosen] + more, *shares) for more in (0, 1))
        is_left = after > before
        drawn[chosen] = np.where(is_left, before, drawn[chosen] - before)
        open_ends += [(first, middle, chosen[is_left]), (middle, last, chosen[~is_left])]
    return source, drawn


def _share(samples: NDArray[np.int64], part: int, whole: int) -> NDArray[np.int64]:
    """floor(samples x part / whole) without a product that leaves 64 bits."""
    rounds, rest = np.divmod(samples, whole)
    share: NDArray[np.int64] = rounds * part + rest * part // whole
    return share
