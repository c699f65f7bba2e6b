"""The samples of one global batch, cut into micro-batches under a hard budget, for D replicas.

    padded: positions = longest x samples          packed: positions = summed tokens, one row
    positions of a micro-batch <= budget           each sample once, whatever D and the budget are

An update divides by the items of its whole global batch, so that micro-batches may have any size and
the cut changes nothing but time and memory. What is made small, in this order: the cost of the slowest
replica, which is the time of the update; the cost of all; the number of micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from wholebatch.errors import PlanError
from wholebatch.layout import one_of, whole_number
from wholebatch.packing.cost import CostModel, Whole, in_whole_numbers
from wholebatch.packing.packed import fewest_rows, packed_candidates
from wholebatch.packing.padded import fewest_cuts, padded_candidates
from wholebatch.packing.wanted import Group, Wanted

Rows = Literal["padded", "packed"]
TooLong = Literal["refuse", "alone", "truncate"]


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
        equal_micro_batches: whether every replica gets the same number of micro-batches, as FSDP needs.
            None of them is empty unless there are fewer samples than micro-batches.
        micro_batches_multiple: what the micro-batches of each replica are a multiple of, such as the
            pipeline's degree; filled up with empty ones where a replica has too few samples.
        too_long: what becomes of a sample of more tokens than the budget: "refuse"; "alone", a micro-batch
            of its own within ``budget_alone``; "truncate", counted as so long as the budget.
        budget_alone: the larger bound for a sample that is alone.
        cost: what a micro-batch costs; without it a position costs 1, and a micro-batch by itself 1/32 of
            the budget.

    Returns:
        The packing, with its padding, imbalance and lower bound.

    Raises:
        PlanError: a length or a number is not a whole positive one, a setting is not known or
            contradicts another, or a sample doesn't fit; the message names it and the choices.
    """
    budget, replicas = whole_number("budget", budget), whole_number("replicas", replicas)
    multiple = whole_number("micro_batches_multiple", micro_batches_multiple)
    one_of("rows", rows, get_args(Rows))
    bound = _bound(budget, too_long, budget_alone)
    found, model = _whole_lengths(lengths), (CostModel() if cost is None else cost).under(budget)
    over = np.flatnonzero(found > budget)
    _refuse_longer(found, bound, budget, too_long)
    if too_long == "truncate":
        found = np.minimum(found, budget)
    wanted = Wanted(replicas=replicas, multiple=multiple, equal=equal_micro_batches)
    # A stable order, so that samples of one length stay in the order of their index.
    order = np.argsort(-found, kind="stable")
    ordered = found[order]
    shares, lower_bound = _search(ordered, budget, rows, wanted, model)
    return Packing(
        budget=budget,
        budget_alone=budget_alone,
        rows=rows,
        num_samples=len(found),
        tokens=int(found.sum()),
        lower_bound=lower_bound,
        truncated=tuple(over.tolist()) if too_long == "truncate" else (),
        alone=tuple(over.tolist()) if too_long == "alone" else (),
        **_measured(shares, order, ordered, rows, model),
    )


def _bound(budget: int, too_long: TooLong, budget_alone: int | None) -> int | None:
    """Return the length that no sample may be over, or None where they are cut."""
    one_of("too_long", too_long, get_args(TooLong))
    if too_long != "alone":
        if budget_alone is not None:
            raise PlanError(
                f"budget_alone={budget_alone} is for samples that get a micro-batch of their own, and "
                f"too_long={too_long!r}; set too_long='alone', or leave budget_alone out"
            )
        return budget if too_long == "refuse" else None
    if budget_alone is None:
        raise PlanError(
            f"too_long='alone' lets a micro-batch of one sample be over the budget of {budget}; say how "
            f"far with budget_alone"
        )
    alone = whole_number("budget_alone", budget_alone)
    if alone <= budget:
        raise PlanError(
            f"budget_alone={alone} is not over the budget of {budget}, so no sample would be alone; "
            f"raise it, or use too_long='refuse'"
        )
    return alone


def _whole_lengths(lengths: Sequence[int] | NDArray[Any]) -> Whole:
    found = np.asarray(lengths)
    if found.size == 0 and found.ndim == 1:
        return np.zeros(0, dtype=np.int64)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise PlanError(
            f"lengths have the shape {found.shape} and the kind {found.dtype}; give the number of tokens "
            f"of each sample, one whole number a sample"
        )
    if int(found.min()) < 1:
        first = int(np.flatnonzero(found < 1)[0])
        raise PlanError(
            f"sample {first} has {int(found[first])} tokens, and a sample needs at least 1; leave it out"
        )
    longest = int(found.argmax())
    whole_number(f"lengths[{longest}]", int(found[longest]))
    return found.astype(np.int64)


def _refuse_longer(lengths: Whole, bound: int | None, budget: int, too_long: TooLong) -> None:
    if bound is None or not (over := np.flatnonzero(lengths > bound)).size:
        return
    first, others = int(over[0]), over.size - 1
    longest = int(lengths.max())
    which = f"sample {first} has {int(lengths[first])} tokens"
    if others:
        which += f", and {others} other{'s are' if others > 1 else ' is'} too long as well"
    if too_long == "alone":
        raise PlanError(
            f"{which}: over budget_alone={bound}, the bound for a sample that is alone. Raise it, to "
            f"{longest} for all of them; cut samples to the budget of {budget} with too_long='truncate'; "
            f"or leave them out"
        )
    raise PlanError(
        f"{which}: over the budget of {budget} positions in a micro-batch. Raise the budget, to {longest} "
        f"for all of them; cut samples to it with too_long='truncate'; let a micro-batch of one sample be "
        f"larger with too_long='alone' and budget_alone={longest}; or leave them out"
    )


def _search(
    lengths: Whole, budget: int, rows: Rows, wanted: Wanted, model: CostModel
) -> tuple[list[list[Group]], int]:
    """Return the micro-batches of each replica, and the lower bound of their number."""
    if not len(lengths):
        return [[] for _ in range(wanted.replicas)], 0
    spare = wanted.replicas * wanted.multiple
    samples = in_whole_numbers(lengths, budget, model, spare)
    fewest = len(fewest_cuts(samples)) - 1 if rows == "padded" else fewest_rows(samples)
    candidates = padded_candidates if rows == "padded" else packed_candidates
    best = min(candidates(samples, wanted, fewest), key=lambda each: each.rank)
    return best.shares, wanted.fewest(fewest)


def _measured(
    shares: list[list[Group]], order: Whole, lengths: Whole, rows: Rows, model: CostModel
) -> dict[str, Any]:
    """Return the micro-batches as indices, largest first, and what they compute."""
    replicas, costs, positions, largest = [], [], 0, 0
    index, tokens = order.tolist(), lengths.tolist()
    for share in shares:
        sizes = [_size([tokens[place] for place in group], rows) for group in share]
        chosen = [tuple(index[place] for place in sorted(group)) for group in share]  # longest first
        ranked = sorted(range(len(share)), key=lambda each: (-sizes[each][0], chosen[each]))
        replicas.append(tuple(chosen[each] for each in ranked))
        summed = sum(size for size, _ in sizes)
        costs.append(model.cost(len(share), summed, sum(product for _, product in sizes)))
        positions += summed
        largest = max([largest, *(size for size, _ in sizes)])
    return {
        "replicas": tuple(replicas),
        "positions": positions,
        "largest_micro_batch_positions": largest,
        "costs": tuple(costs),
    }


def _size(lengths: list[int], rows: Rows) -> tuple[int, int]:
    """Return positions, and positions x length, of a micro-batch with its longest sample first."""
    if not lengths:
        return 0, 0
    if rows == "packed":
        return sum(lengths), sum(length * length for length in lengths)
    return lengths[0] * len(lengths), lengths[0] * lengths[0] * len(lengths)
