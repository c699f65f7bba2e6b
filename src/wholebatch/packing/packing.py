"""The samples of one global batch, cut into micro-batches under a hard budget, for D replicas.

    padded: positions = longest x samples          packed: positions = summed tokens, one row
    positions of a micro-batch <= budget           each sample once, whatever D and the budget are

An update divides by the items of its whole global batch, so that micro-batches may have any size and
the cut changes nothing but time and memory. What is made small, in this order: the cost of the slowest
replica, which is the time of the update; the cost of all; the number of micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from wholebatch.packing.checks import (
    Called,
    TooLong,
    checked_bound,
    refuse_longer,
    refuse_too_many,
    whole_lengths,
)
from wholebatch.packing.cost import CostModel, Whole, checked_cost, in_whole_numbers
from wholebatch.packing.packed import fewest_rows, packed_candidates
from wholebatch.packing.padded import fewest_cuts, padded_candidates
from wholebatch.packing.wanted import Candidate, Wanted
from wholebatch.whole_numbers import one_of, whole_number

Rows = Literal["padded", "packed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """Which sample goes through which forward of which replica. Made by `pack`.

    Args:
        replicas: for each replica its micro-batches, largest first (most positions, so that memory peaks
            in the first one), and in each the indices into the lengths that were packed, longest first: in
            a row samples of near length then share a call of attention.
        budget: positions of a micro-batch at most.
        budget_alone: positions at most of a micro-batch of one sample that is longer than the budget;
            None without any.
        rows: "padded" or "packed".
        num_samples: samples packed, all of them.
        tokens: of all samples, after truncation.
        positions: that all forwards compute, padding included.
        largest_micro_batch_positions: of the micro-batch with the most.
        costs: of each replica, by the cost model.
        lower_bound: micro-batches over all replicas below which no packing can be: by the budget and, where
            asked, by equal numbers and multiples. Exact for padded rows, Martello and Toth's L2 for packed.
        truncated: indices of samples that were cut to the budget.
        alone: indices of samples longer than the budget, each in a micro-batch of its own.
    """

    replicas: tuple[tuple[tuple[int, ...], ...], ...]
    budget: int
    budget_alone: int | None
    rows: Rows
    num_samples: int
    tokens: int
    positions: int
    largest_micro_batch_positions: int
    costs: tuple[float, ...]
    lower_bound: int
    truncated: tuple[int, ...]
    alone: tuple[int, ...]

    @property
    def micro_batches(self) -> int:
        """Micro-batches over all replicas, empty ones included."""
        return sum(len(micro_batches) for micro_batches in self.replicas)

    @property
    def padding_share(self) -> float:
        """Share of the computed positions that hold no token: 1 - tokens / positions."""
        return 1 - self.tokens / self.positions if self.positions else 0.0

    @property
    def imbalance(self) -> float:
        """Cost of the slowest replica over the mean of all; 1 is even."""
        mean = sum(self.costs) / len(self.costs)
        return max(self.costs) / mean if mean else 1.0


def pack(
    lengths: Sequence[int] | NDArray[Any],
    budget: int,
    replicas: int = 1,
    *,
    rows: Rows = "padded",
    equal_micro_batches: bool = False,
    micro_batches_multiple: int = 1,
    too_long: TooLong = "refuse",
    budget_alone: int | None = None,
    cost: CostModel | None = None,
    called: Called | None = None,
) -> Packing:
    """Cut one global batch into micro-batches under a budget, the slowest replica's cost least.

    Each sample is in one micro-batch of one replica. Among packings with the same cost of the slowest
    replica the one with the least cost of all is taken, then that with the fewest micro-batches. Ties go to
    the lower index and all sums are of whole numbers: the same arguments give the same packing on every
    machine, and each rank can work it out for itself.

    More and smaller micro-batches have less padding, and each costs something by itself: where the two meet
    is up to the cost model, and the budget is a bound, not an aim.

    Args:
        lengths: tokens of each sample of the global batch, in its order.
        budget: positions of a micro-batch at most.
        replicas: D.
        rows: "padded" to the longest sample of the micro-batch, or "packed" one after the other.
        equal_micro_batches: whether every replica gets the same number of micro-batches, as loops by hand
            under FSDP need. None of them is empty unless there are fewer samples than micro-batches.
        micro_batches_multiple: what the micro-batches of each replica are a multiple of, such as the
            pipeline's degree; filled up with empty ones where a replica has too few samples.
        too_long: what becomes of a sample of more tokens than the budget: "refuse"; "alone", a micro-batch
            of its own within ``budget_alone``; "truncate", counted as so long as the budget.
        budget_alone: the larger bound for a sample that is alone.
        cost: what a micro-batch costs; without it a position costs 1, and a micro-batch by itself 1/32 of
            the budget.
        called: what numbers and samples are called where they are refused; by default the arguments' names
            and the index of a sample.

    Returns:
        The packing, with its padding, imbalance and lower bound.

    Raises:
        PlanError: a length or a number is not a whole positive one, a setting is not known or
            contradicts another, or a sample doesn't fit; the message names it and the choices. Or the
            samples have more than 2**60 tokens, or replicas x multiple are more than 10**7.
    """
    called = Called() if called is None else called
    budget, replicas = whole_number(called.budget, budget), whole_number("replicas", replicas)
    multiple = whole_number("micro_batches_multiple", micro_batches_multiple)
    one_of("rows", rows, get_args(Rows))
    bound = checked_bound(budget, too_long, budget_alone, called)
    model = (CostModel() if cost is None else checked_cost(cost)).under(budget)
    found = whole_lengths(lengths, called)
    over = np.flatnonzero(found > budget)
    refuse_longer(found, bound, budget, called)
    if too_long == "truncate":
        found = np.minimum(found, budget)
    refuse_too_many(found, replicas, multiple)
    wanted = Wanted(replicas=replicas, multiple=multiple, equal=equal_micro_batches)
    # A stable order, so that samples of one length stay in the order of their index.
    order = np.argsort(-found, kind="stable")
    ordered = found[order]
    best, lower_bound = _search(ordered, budget, rows, wanted, model)
    return Packing(
        budget=budget,
        budget_alone=budget_alone,
        rows=rows,
        num_samples=len(found),
        tokens=int(found.sum()),
        lower_bound=lower_bound,
        truncated=tuple(over.tolist()) if too_long == "truncate" else (),
        alone=tuple(over.tolist()) if too_long == "alone" else (),
        **_measured(best, wanted, order, ordered, rows, model),
    )


def _search(
    lengths: Whole, budget: int, rows: Rows, wanted: Wanted, model: CostModel
) -> tuple[Candidate, int]:
    """Return the micro-batches of the replicas that have samples, and the lower bound of all."""
    if not len(lengths):
        return Candidate(shares=[[]], numbers=[0], rank=(0, 0, 0)), 0
    # No more replicas than samples have any.
    busy = replace(wanted, replicas=min(wanted.replicas, len(lengths)))
    samples = in_whole_numbers(lengths, budget, model, busy.replicas * busy.multiple)
    fewest = len(fewest_cuts(samples)) - 1 if rows == "padded" else fewest_rows(samples)
    candidates = padded_candidates if rows == "padded" else packed_candidates
    best = min(candidates(samples, busy, fewest), key=lambda each: each.order)
    return best, wanted.fewest(fewest)


def _measured(
    best: Candidate, wanted: Wanted, order: Whole, lengths: Whole, rows: Rows, model: CostModel
) -> dict[str, Any]:
    """Return the micro-batches as indices, largest first, and what they compute."""
    replicas, costs, positions, largest = [], [], 0, 0
    index, tokens = order.tolist(), lengths.tolist()
    for share, number in zip(best.shares, best.numbers, strict=True):
        sizes = [_size([tokens[place] for place in group], rows) for group in share]
        chosen = [tuple(index[place] for place in sorted(group)) for group in share]  # longest first
        ranked = sorted(range(len(share)), key=lambda each: (-sizes[each][0], chosen[each]))
        replicas.append(tuple(chosen[each] for each in ranked) + ((),) * (number - len(share)))
        summed = sum(size for size, _ in sizes)
        costs.append(model.cost(number, summed, sum(product for _, product in sizes)))
        positions += summed
        largest = max([largest, *(size for size, _ in sizes)])
    idle = wanted.replicas - len(replicas)
    number = best.numbers[0] if wanted.equal else 0
    return {
        "replicas": tuple(replicas) + (((),) * number,) * idle,
        "positions": positions,
        "largest_micro_batch_positions": largest,
        "costs": tuple(costs) + (model.cost(number, 0, 0),) * idle,
    }


def _size(lengths: list[int], rows: Rows) -> tuple[int, int]:
    """Return positions, and positions x length, of a micro-batch with its longest sample first."""
    if not lengths:
        return 0, 0
    if rows == "packed":
        return sum(lengths), sum(length * length for length in lengths)
    return lengths[0] * len(lengths), lengths[0] * lengths[0] * len(lengths)
