"""Global batches that are bounded in items: whole samples in the order of the epoch, as many as fit.

    global_batch(position) = ids[position : end],  the largest end with
                             items[ids[position]] + ... + items[ids[end - 1]] <= global_batch_items

A sample is never cut, so an update has a few items fewer than the bound; its denominator is the number
that it really has. Nothing here knows m, A or D: every split sees the same global batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wholebatch.errors import PlanError
from wholebatch.order.samples import ReplicaShare, epoch_ids
from wholebatch.whole_numbers import or_list, set_whole_numbers, whole_number

# Updates whose ends are remembered: a loader asks for one a few times, and then for the next.
_KNOWN_ENDS = 256
# Samples that are looked at together on the way through an epoch.
_WALK_SAMPLES = 2**16


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ItemOrder:
    """The order of the samples over all epochs, cut into global batches of at most so many items.

    A global batch never crosses the end of an epoch; the last one there has what is left. A sample
    without items joins the update that it comes in. Where updates begin follows from the items of all
    samples before them, so a position from elsewhere (a resumed run) is looked for by walking through
    its epoch once; from there on an update costs time and memory in its own size only.

    Args:
        num_samples: samples of the data set; their ids are 0 to num_samples - 1.
        global_batch_items: the most items of one update over all replicas.
        items: shape (num_samples,), the items of each sample, whole numbers from 0. It is not copied (a
            memory-mapped file stays on disk): don't change it.
        seed: with the epoch, decides the order; 0 to 2**53.
        shuffle: False keeps the ids in their own order in every epoch.

    Raises:
        PlanError: a number is not a whole one in its bounds; ``items`` is of another shape or kind; a
            sample has more items than an update may have; no sample has any; all have over 2**53.
    """

    num_samples: int
    global_batch_items: int
    items: NDArray[np.integer[Any]] = field(repr=False)
    seed: int = 0
    shuffle: bool = True
    # Not part of what the object means: the items of an epoch, added up once; begin of an update -> its
    # end, for those found last.
    _total_items: int = field(default=0, init=False, repr=False)
    _ends: dict[int, int] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        set_whole_numbers(self, "num_samples", "global_batch_items")
        set_whole_numbers(self, "seed", minimum=0)
        items = np.asanyarray(self.items).view()
        if items.shape != (self.num_samples,):
            raise PlanError(
                f"items has the shape {items.shape}; num_samples={self.num_samples} needs "
                f"({self.num_samples},), one number for each sample"
            )
        if not np.issubdtype(items.dtype, np.integer):
            raise PlanError(f"items is of dtype {items.dtype}; give whole numbers, such as int64")
        items.setflags(write=False)
        object.__setattr__(self, "items", items)
        self._check_items(items)

    def _check_items(self, items: NDArray[np.integer[Any]]) -> None:
        fewest, most = int(items.argmin()), int(items.argmax())
        if items[fewest] < 0:
            raise PlanError(f"sample {fewest} has {items[fewest]} items; the least is 0")
        if items[most] > self.global_batch_items:
            raise PlanError(
                f"sample {most} has {items[most]} items, more than global_batch_items "
                f"{self.global_batch_items}, and samples are not cut; use at least {items[most]}, or "
                f"shorten it"
            )
        if items[most] == 0:
            raise PlanError(
                f"none of the {self.num_samples} samples has an item; there is nothing to train"
            )
        # So that no sum of some of them can be too large for an integer of 64 bits.
        whole_number("items of all samples", int(items.sum(dtype=np.float64)))
        object.__setattr__(self, "_total_items", int(items.sum(dtype=np.int64)))

    @property
    def samples_per_epoch(self) -> int:
        """Samples of an epoch, all of which are consumed: a position moves on by so many in an epoch."""
        return self.num_samples

    @property
    def items_per_epoch(self) -> int:
        """Items of an epoch."""
        return self._total_items

    def epoch(self, position: int) -> int:
        """Return the epoch in which ``position`` lies, from 0."""
        return whole_number("position", position, minimum=0) // self.num_samples

    def next_position(self, position: int) -> int:
        """Return where the next update begins: ``position`` + the samples of this one."""
        return self._end(position)

    def global_batch(self, position: int) -> list[int]:
        """Return the sample ids of the update that begins at ``position``, over all replicas.

        Args:
            position: samples consumed before it, over all epochs; a boundary between two updates.

        Returns:
            At least one id; together they have at most ``global_batch_items`` items.

        Raises:
            PlanError: the position is not a whole number or lies inside an update; the message names
                the nearest boundaries.
        """
        ids: list[int] = self._ids(position, self._end(position)).tolist()
        return ids

    def num_items(self, position: int) -> int:
        """Return the items of the update that begins at ``position``, over all replicas."""
        ids = self._ids(position, self._end(position))
        return int(self.items[ids].sum(dtype=np.int64))

    def window(
        self, position: int, *, micro_batch_samples: int, replicas: int, replica: int
    ) -> list[list[int]]:
        """Return the sample ids of one replica's micro-batches in the update at ``position``.

        The samples are shared out as by `SampleOrder.window`; how many micro-batches they make differs
        from update to update, and by at most one between replicas.

        Args:
            position: as for `global_batch`.
            micro_batch_samples: m; the last micro-batch is shorter where it must be.
            replicas: D.
            replica: which one, 0 to D - 1.

        Returns:
            One list of ids for each micro-batch; none where the update has too few samples.

        Raises:
            PlanError: as for `global_batch`; a replica that does not exist.
        """
        share = ReplicaShare(micro_batch_samples=micro_batch_samples, replicas=replicas, replica=replica)
        end = self._end(position)
        mine = share.places(int(position), end)
        return share.cut(self._ids(mine.start, mine.stop).tolist())

    def _ids(self, begin: int, end: int) -> NDArray[np.int64]:
        """Return the ids of the samples ``begin`` to ``end - 1`` of the run, all of one epoch."""
        epoch, first = divmod(int(begin), self.num_samples)
        return epoch_ids(self, epoch, first, first + end - int(begin))

    def _end(self, position: int) -> int:
        position = whole_number("position", position, minimum=0)
        if position not in self._ends:
            self._check_begin(position)
            mean = max(1, self.items_per_epoch // self.num_samples)
            likely = self.global_batch_items * 5 // (4 * mean) + 16
            self._remember(position, next(self._ends_from(position, min(likely, _WALK_SAMPLES))))
        return self._ends[position]

    def _remember(self, begin: int, end: int) -> None:
        if len(self._ends) >= _KNOWN_ENDS:
            for old in list(self._ends)[: _KNOWN_ENDS // 2]:
                self._ends.pop(old, None)
        self._ends[begin] = end

    def _check_begin(self, position: int) -> None:
        """Refuse a position inside an update; walk there from the last known boundary before it."""
        epoch_begin = position - position % self.num_samples
        known = [end for end in list(self._ends.values()) if epoch_begin <= end <= position]
        begin = max(known, default=epoch_begin)
        if begin == position:
            return
        for end in self._ends_from(begin, _WALK_SAMPLES):
            if end == position:
                return
            if end > position:
                raise PlanError(
                    f"position={position} lies inside an update: with global_batch_items "
                    f"{self.global_batch_items} updates begin at {or_list([begin, end])}, the nearest"
                )
            begin = end

    def _ends_from(self, begin: int, read_samples: int) -> Iterator[int]:
        """Yield where the update at ``begin`` ends, then the next, to the end of the epoch.

        Args:
            begin: where an update begins.
            read_samples: samples that are looked at together.
        """
        epoch_end = begin - begin % self.num_samples + self.num_samples
        read_to = begin
        # Items from ``begin`` to the end of each sample that was read and not given away.
        totals = np.zeros(0, dtype=np.int64)
        first = given = 0
        while begin < epoch_end:
            end = int(np.searchsorted(totals, given + self.global_batch_items, side="right"))
            if end == totals.size and read_to < epoch_end:
                more = min(read_to + read_samples, epoch_end)
                items = self.items[self._ids(read_to, more)].astype(np.int64)
                before = int(totals[-1]) if totals.size else 0
                totals = np.concatenate([totals[first:], before + np.cumsum(items)]) - given
                first, given, read_to = 0, 0, more
                continue
            yield begin + end - first
            begin += end - first
            first, given = end, int(totals[end - 1])
