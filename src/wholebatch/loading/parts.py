"""Which samples one replica reads together, in the order of the run."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wholebatch.budget import AnyPlan, BudgetPlan
from wholebatch.errors import UsageError
from wholebatch.loading.reading import Part, Samples
from wholebatch.order import ItemOrder, Order, ReplicaShare, SampleOrder


class _Cut(NamedTuple):
    """The samples of a part: ids, places in the global batch, and the ids that are too long for it."""

    ids: list[int]
    places: Sequence[int]
    too_long: Sequence[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """One replica's parts of one global batch after the other.

    Args:
        samples: the data set.
        order: which samples come when.
        plan: how a global batch is cut.
        replica: which of the plan's replicas this is.
        lengths: tokens of each sample by its id, where a token budget cuts; None where they are found
            while reading, and one part is all that this replica reads.
        num_epochs: the pass before which the parts end; None for no end.
    """

    samples: Samples
    order: Order
    plan: AnyPlan
    replica: int
    lengths: NDArray[np.integer[Any]] | None = None
    num_epochs: int | None = None

    def begin_at(self, position: int) -> Iterator[Part]:
        """The parts from a position on.

        Raises:
            UsageError: the data set has another number of samples by now than the order's ids need, or an
                update is larger than the plan's.
            PlanError: no global batch begins at the position.
        """
        num_samples = len(self.samples)
        while self.num_epochs is None or self.order.epoch(position) < self.num_epochs:
            self._check_length(num_samples)
            after, epoch = self.order.next_position(position), self.order.epoch(position)
            cuts, passes = self._cuts(position), self._passes(position)
            for number, (ids, places, too_long) in enumerate(cuts, start=1):
                self._check_ids(ids, num_samples)
                of_these = [passes[place] for place in places] if passes else ()
                yield Part(ids, epoch, position, after, number == len(cuts), too_long, of_these)
            if not cuts:
                yield Part((), epoch, position, after, True)
            position = after

    def _passes(self, position: int) -> Sequence[int]:
        """Of a global batch, how many passes over its source lie before each sample, if the order knows."""
        sample_epochs = getattr(self.order, "sample_epochs", None)
        return () if sample_epochs is None else sample_epochs(position)

    def _cuts(self, position: int) -> list[_Cut]:
        """The parts of the window."""
        plan = self.plan
        if not isinstance(plan, BudgetPlan):
            parts = self.order.window(
                position,
                micro_batch_samples=plan.micro_batch_samples,
                replicas=plan.replicas,
                replica=self.replica,
            )
            if len(parts) > plan.micro_batches_per_window:
                raise UsageError(
                    f"the update at position {position} has {len(parts)} micro-batches on replica "
                    f"{self.replica}, more than the plan's {plan.micro_batches_per_window}; plan the "
                    f"global batch that the order has"
                )
            share = share_of(plan, self.replica).places(0, self.order.next_position(position) - position)
            ends = itertools.accumulate(map(len, parts), initial=share.start)
            return [
                _Cut(ids, range(begin, begin + len(ids)), ())
                for ids, begin in zip(parts, ends, strict=False)
            ]
        ids = self.order.global_batch(position)
        if self.lengths is None:
            places = share_of(plan, self.replica).places(0, len(ids))
            return [_Cut(ids[places.start : places.stop], places, ())] if places else []
        self._check_ids(ids, len(self.lengths))
        packing = plan.pack(self.lengths[ids], ids=ids)
        if plan.equal_micro_batches and not all(packing.replicas[self.replica]):
            raise UsageError(
                f"the {len(ids)} samples of the update at position {position} leave replica {self.replica} "
                f"a micro-batch without samples, which can't be collated, and equal_micro_batches needs "
                f"it; plan a larger global batch, or tail='drop'"
            )
        too_long = set(packing.truncated)
        return [
            _Cut([ids[place] for place in places], places, [ids[p] for p in places if p in too_long])
            for places in packing.replicas[self.replica]
        ]

    def _check_ids(self, ids: list[int], num_samples: int) -> None:
        if ids and not 0 <= min(ids) <= max(ids) < num_samples:
            strange = min(ids) if min(ids) < 0 else max(ids)
            raise UsageError(
                f"the order has sample {strange}, and the data set has samples 0 to {num_samples - 1}; "
                f"give an order over as many samples as there are"
            )

    def _check_length(self, num_samples: int) -> None:
        if (now := len(self.samples)) != num_samples:
            raise UsageError(
                f"the data set had {num_samples} samples when this loop began and has {now} now, so that "
                f"its order is another; keep it as it is while it is trained on, or build a new loader"
            )


def share_of(plan: AnyPlan, replica: int) -> ReplicaShare:
    """One replica's share of a global batch, however that is cut."""
    return ReplicaShare(micro_batch_samples=1, replicas=plan.replicas, replica=replica)


def order_of(
    plan: AnyPlan,
    num_samples: int,
    *,
    items: NDArray[np.integer[Any]] | None,
    seed: int,
    shuffle: bool = True,
) -> SampleOrder | ItemOrder:
    """The order of a data set, cut into the global batches of a plan.

    Args:
        plan: says how much a global batch is, and what becomes of the tail.
        num_samples: of the data set.
        items: of each sample, shape (samples,); needed where the plan's global batch is given in items.
        seed: of the run.
        shuffle: False keeps the samples in the order of their ids.

    Raises:
        UsageError: items bound a global batch, and nobody gave those of the samples.
        PlanError: a sample has more items than an update may, or the plan leaves no update.
    """
    if not isinstance(plan, BudgetPlan) or plan.global_batch_items is None:
        assert plan.global_batch_samples is not None
        return SampleOrder(
            num_samples=num_samples,
            global_batch_samples=plan.global_batch_samples,
            seed=seed,
            shuffle=shuffle,
            tail=plan.tail,
        )
    if items is None:
        raise UsageError(
            f"global_batch_items={plan.global_batch_items} of a map-style data set needs items=, the items "
            f"of each sample by its id, or an order= of your own"
        )
    return ItemOrder(
        num_samples=num_samples,
        global_batch_items=plan.global_batch_items,
        items=items,
        seed=seed,
        shuffle=shuffle,
    )
