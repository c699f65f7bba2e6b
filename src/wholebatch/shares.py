"""What the summed loss of each term counts for in one update: its coefficient over its denominator."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Self

import torch
from torch import Tensor

from wholebatch.errors import ObjectiveError, WindowUsageError
from wholebatch.finish import Finish
from wholebatch.objective import LossSum, Objective
from wholebatch.record import Weighting
from wholebatch.tally import GlobalTally

_KIND = attrgetter("dtype", "shape", "device")


@dataclass(kw_only=True, slots=True)
class Shares:
    """The shares ``c_k * divisor / N_k`` of an update, fixed once N is known over the ranks.

    Attributes:
        of_term: what the summed loss of each term counts for; 0 where no item is to be learnt from. Of
            means of micro-batches ``c_k * divisor / M``, which :meth:`seed` divides by the items of each.
        provisional: N as it is assumed where it is known only after the forwards; None where it is known.
    """

    of_term: dict[str, float]
    provisional: float | None
    _of_means: bool
    _finish: Finish
    _seeds: dict[str, tuple[Any, Tensor]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        total: GlobalTally,
        *,
        objective: Objective,
        weighting: Weighting,
        finish: Finish,
        divisor: float,
        last_items: float | None,
        includes_stale: bool,
    ) -> Self:
        """The shares of an update.

        Args:
            total: what the window holds over all ranks.
            objective: has the coefficients ``c_k``.
            weighting: of the window.
            finish: has the loss scale.
            divisor: what the engine divides by when it reduces.
            last_items: N of the last update, to begin with where N is not known ahead.
            includes_stale: whether gradients found at the start belong to the update.

        Raises:
            ObjectiveError: N is not known ahead where it has to be.
            WindowUsageError: means of micro-batches that no rank holds as a whole.
        """
        of_means = weighting == "micro_batch_means"
        if of_means:
            _refuse_parts(total)
        unknown = [term for term, n in zip(objective.coefficients, total.items, strict=True) if n is None]
        if unknown and not of_means:
            _refuse_unknown(unknown, num_terms=len(total.items), includes_stale=includes_stale)
        # Provisional: the last update's N, corrected once it is known. The first update has none.
        provisional = last_items or float(max(1, total.positions, total.samples))
        shares: dict[str, float] = {}
        for (term, coefficient), n in zip(objective.coefficients.items(), total.items, strict=True):
            by = float(total.micro_batches) if of_means else provisional if n is None else n
            shares[term] = coefficient * divisor / by if by > 0 else 0.0
        return cls(
            of_term=shares,
            provisional=provisional if unknown and not of_means else None,
            _of_means=of_means,
            _finish=finish,
        )

    def seed(self, term: str, loss: LossSum) -> Tensor:
        """The gradient of the update with respect to a term's summed loss, times the loss scale.

        Args:
            term: its name.
            loss: of one micro-batch.

        Returns:
            Tensor of the sum's shape, dtype and device; nothing is read by the host.

        Exactness: one rounding of the share; of means a second one, of the quotient.
        """
        loss_sum = loss.loss_sum
        if self._of_means:
            return self._finish.scaled(share_of_mean(loss, self.of_term[term])).to(loss_sum.dtype)
        kind, made = _KIND(loss_sum), self._seeds.get(term)
        if made is None or made[0] != kind:
            share = torch.full_like(loss_sum, self.of_term[term], requires_grad=False)
            made = self._seeds[term] = kind, self._finish.scaled(share).to(loss_sum.dtype)
        return made[1]

    def correction(self, num_items: float) -> float:
        """What the gradient is multiplied by at the end: provisional N over the real one; else 1."""
        return self.provisional / num_items if self.provisional is not None and num_items > 0 else 1.0


def share_of_mean(loss: LossSum, share: float) -> Tensor:
    """``share / n`` for the summed loss of a micro-batch with n items, and 0 where it has none.

    Args:
        loss: the sum and its items, which may lie on the device.
        share: what the mean of each micro-batch counts for.

    Returns:
        Tensor of the sum's shape and dtype, or float32 where wider; nothing is read by the host.

    Exactness: one rounding.
    """
    wide = torch.promote_types(loss.loss_sum.dtype, torch.float32)
    items = torch.as_tensor(loss.num_items, dtype=wide, device=loss.loss_sum.device).detach()
    return torch.where(items > 0, share / items, torch.zeros_like(items)).reshape(loss.loss_sum.shape)


def _refuse_parts(total: GlobalTally) -> None:
    if total.parts != total.micro_batches:
        raise WindowUsageError(
            f'weighting="micro_batch_means" takes a mean over the items of each micro-batch, and '
            f"{total.micro_batches} micro-batches are cut into {total.parts} parts over "
            f'context-parallel ranks, of which none has them all; use weighting="items"'
        )


def _refuse_unknown(unknown: list[str], *, num_terms: int, includes_stale: bool) -> None:
    if num_terms > 1:
        raise ObjectiveError(
            f"the items of {', '.join(map(repr, unknown))} are not known before the forward, and one "
            f"correction at the finish can't mend one of {num_terms} denominators; give that "
            f"term a count, or use window.run(..., counting_pass=True)"
        )
    if includes_stale:
        raise ObjectiveError(
            'on_stale_gradients="include" needs the number of items ahead of the forward: the '
            "correction of a provisional denominator would scale the included gradient too. Give the "
            "objective a count"
        )
