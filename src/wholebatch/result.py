"""What came out of a window: agreed over the ranks, then written down as a record."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from wholebatch.objective import LossSum
from wholebatch.ranks.base import Roles
from wholebatch.record import finite


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What one rank found when its last micro-batch was reduced.

    Attributes:
        nonfinite: whether the reduced gradient is NaN or infinite somewhere.
        losses: for each micro-batch and term, its summed loss.
        items: for each micro-batch and term, the items that the loss summed.
        norm: Euclidean norm of the reduced gradient, or of this rank's part of it.
        norm_of_copies: of what ``roles.copies`` ranks must have alike.
        num_gradients: parameters of the optimizers that have one on this rank.
        peak_memory_bytes: of this process; 0 where unknown.
    """

    nonfinite: bool
    norm: float
    norm_of_copies: float
    num_gradients: int
    losses: tuple[tuple[float, ...], ...]
    items: tuple[tuple[float, ...], ...]
    peak_memory_bytes: int

    def payload(self, *, roles: Roles, num_terms: int) -> list[float]:
        """The numbers to tell the other ranks; fewer than those of a tally."""
        first_bad = self._bad_micro_batch()
        counted = roles.counts_losses
        return [
            float(self.nonfinite or first_bad != 0),
            self.norm,
            *self._copies(roles),
            self.num_gradients,
            first_bad,
            self.peak_memory_bytes,
            *(sum(row[term] for row in self.losses) if counted else 0.0 for term in range(num_terms)),
            *(sum(row[term] for row in self.items) if counted else 0.0 for term in range(num_terms)),
        ]

    def miscounted(
        self, ahead: Sequence[Sequence[float | None]], terms: Sequence[str]
    ) -> tuple[int, str] | None:
        """The first micro-batch whose loss summed other items than were counted, and how, in words.

        Args:
            ahead: for each micro-batch and term, the items counted before its forward; None where unknown.
            terms: their names.
        """
        if ahead == self.items:
            return None
        for index, (before, summed) in enumerate(zip(ahead, self.items, strict=True)):
            for term, counted, number in zip(terms, before, summed, strict=True):
                wanted = number if counted is None else counted
                if not 0.0 <= number < math.inf:
                    return index, (
                        f"the loss of term {term!r} says that it summed {number:g} items; a number of "
                        f"items is finite and not negative"
                    )
                if abs(number - wanted) > 1e-6 * wanted:
                    return index, (
                        f"the loss of term {term!r} summed {number:g} items and the objective counted "
                        f"{wanted:g} ahead of the forward; count what is summed (shifted labels, ignored "
                        f"labels, class weights). Everything was rolled back"
                    )
        return None

    def _copies(self, roles: Roles) -> tuple[float, float]:
        """``s * p^2`` and ``p^2``: the first adds up to zero where copies have the same norm p."""
        square = self.norm_of_copies * self.norm_of_copies
        sign = roles.copies * roles.counts_losses - 1 if roles.copies > 1 else 0
        return sign * square, square

    def _bad_micro_batch(self) -> int:
        """Number, from 1, of the first micro-batch whose loss is not finite; negative if it has no
        items; 0 if there is none."""
        for number, (losses, items) in enumerate(zip(self.losses, self.items, strict=True), start=1):
            for loss, count in zip(losses, items, strict=True):
                if not math.isfinite(loss):
                    return number if count > 0 else -number
        return 0


@dataclass(frozen=True, kw_only=True, slots=True)
class GlobalResult:
    """The same over all ranks.

    Attributes:
        nonfinite: the gradient, or some loss, on any rank.
        losses, items: by term, summed over all micro-batches and replicas.
        bad: by rank, as ``Result._bad_micro_batch``.
        same_gradient: whether every rank finds the same norm, as of one reduced gradient.
        same_copies: whether ranks that hold the same parameters find the same norm of their gradients.
        norm_of_parts: the norm of a gradient of which each rank tells a part.
        some_gradient: whether a parameter of the optimizers has one on some rank.
        peak_memory_bytes: by rank; ``None`` where unknown.
    """

    nonfinite: bool
    same_gradient: bool
    same_copies: bool
    norm_of_parts: float
    some_gradient: bool
    losses: tuple[float, ...]
    items: tuple[float, ...]
    bad: tuple[int, ...]
    peak_memory_bytes: list[int] | None

    @classmethod
    def of_ranks(cls, told: Sequence[Sequence[float]], *, num_terms: int) -> GlobalResult:
        """Add up what the ranks told: for each number of a payload that of every rank."""
        nonfinite, norms, gaps, of_copies, num_gradients, bad, peaks, *by_term = told
        sums = tuple(map(sum, by_term))
        largest = max(norms)
        return cls(
            nonfinite=any(nonfinite),
            # other kernels on other machines may round the norm differently, and no more than that
            same_gradient=not all(map(math.isfinite, norms)) or largest - min(norms) <= 1e-4 * largest,
            # a norm in bfloat16 may be added up in another order; parts of a sequence differ by far more
            same_copies=not abs(sum(gaps)) > 1e-3 * sum(of_copies),
            norm_of_parts=math.hypot(*norms),
            some_gradient=any(num_gradients),
            losses=sums[:num_terms],
            items=sums[num_terms:],
            bad=tuple(map(round, bad)),
            peak_memory_bytes=list(map(round, peaks)) if all(peaks) else None,
        )

    def why_odd(self, own: Result, norm: float, *, norm_in_parts: bool, steps_itself: bool) -> str | None:
        """Why this is no gradient of one update, in words; None where it is one. Every rank sees it.

        Args:
            own: what this rank found.
            norm: of the whole gradient.
            norm_in_parts: whether each rank told the norm of a part.
            steps_itself: whether the engine steps, and shows no gradients.
        """
        if not self.some_gradient and norm == 0.0 and any(self.items) and not steps_itself:
            return (
                "no parameter of the optimizer received a gradient; is the optimizer built from the "
                "parameters of this model?"
            )
        if not (norm_in_parts or self.same_gradient):
            return (
                f"a gradient of norm {norm:.6g} is here and another on another rank: they were not reduced "
                f"as a whole. Something ran the engine's reduction beside the window, such as "
                f"torch.autograd.grad in the first update of DDP(static_graph=True). Everything was rolled "
                f"back"
            )
        if not self.same_copies:
            return (
                f"ranks of one replica hold copies of parameters, as of a norm, and other gradients of "
                f"them (of norm {own.norm_of_copies:.6g} here): each would train its own. Their layer runs "
                f"on a part of the sequence, or with other random numbers on each rank: make its "
                f"parameters DTensors with SequenceParallel in parallelize_module, which adds up over the "
                f"parts, or seed the ranks alike. Everything was rolled back"
            )
        return None

    def why_nonfinite(self) -> str:
        """Which micro-batch of which rank made the update NaN or infinite, in words."""
        named = [
            f"the loss of micro-batch {abs(number)} on rank {rank} is not finite"
            + (", which has no items: a mean over nothing is 0/0, give a sum" if number < 0 else "")
            for rank, number in enumerate(self.bad)
            if number
        ]
        if not named:
            return "the gradient is NaN or infinite although every summed loss is finite"
        return "; ".join(named)


def losses_by_term(
    coefficients: Mapping[str, float], losses: Sequence[float], items: Sequence[float]
) -> tuple[dict[str, dict[str, float | None]], float | None]:
    """The losses of the whole global batch.

    Args:
        coefficients: ``c_k`` by term.
        losses: summed loss ``L_k`` of each term.
        items: ``N_k`` of each term.

    Returns:
        By term its items, ``L_k / N_k`` and ``c_k``; and ``sum_k c_k * L_k / N_k`` over the terms
        that have items. ``None`` in place of a number that is not finite.
    """
    terms: dict[str, dict[str, float | None]] = {}
    total = 0.0
    for (name, coefficient), loss, count in zip(coefficients.items(), losses, items, strict=True):
        per_item = loss / count if count > 0 else math.nan
        if count > 0:
            total += coefficient * per_item
        terms[name] = {"items": whole(count), "loss_per_item": finite(per_item), "coefficient": coefficient}
    return terms, finite(total) if any(count > 0 for count in items) else None


def whole(number: float) -> int | float:
    """A number of items as an integer where it is one."""
    return int(number) if float(number).is_integer() else number


def without_graph(loss: LossSum) -> LossSum:
    """``loss`` with its graph let go, also in the tensor that the caller holds.

    A parameter that is itself the loss stays a parameter, and a view keeps its graph: torch can't take
    it away.

    Exactness: no arithmetic; the same values.
    """
    held = loss.loss_sum
    if not held.is_leaf and not held._is_view():
        return LossSum(held.detach_(), loss.num_items)
    return LossSum(held.detach(), loss.num_items)
