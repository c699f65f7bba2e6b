"""Whether a micro-batch, once it is made, keeps to the token budget that it was cut for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from wholebatch.budget import BudgetPlan
from wholebatch.errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """The bound of a plan. Lengths are what the caller says; this is what came of them.

    Args:
        plan: of the token budget.
    """

    plan: BudgetPlan

    def check(self, batch: Any, ids: Sequence[int]) -> None:
        """Compare ``input_ids`` of shape (samples, tokens), or of a packed row, with the bound.

        Args:
            batch: a micro-batch; one of another form is not looked at.
            ids: its samples.

        Raises:
            UsageError: it has more positions than the plan allows; names its samples and both numbers.

        Exactness: no arithmetic.
        """
        tokens = batch.get("input_ids") if isinstance(batch, Mapping) else None
        if not isinstance(tokens, Tensor) or tokens.is_nested or tokens.dim() != 2:
            return
        alone = self.plan.tokens_alone if len(ids) == 1 else None
        most = self.plan.tokens_per_micro_batch if alone is None else alone
        if tokens.numel() <= most:
            return
        bound = "tokens_per_micro_batch" if alone is None else "tokens_alone"
        rows, longest = tokens.shape
        raise UsageError(
            f"the micro-batch of samples {list(ids)} has {rows} x {longest} = {tokens.numel()} positions, "
            f"more than {bound}={most}, so that lengths= does not tell what collation makes of them; "
            f"{self._mend(rows)}"
        )

    def _mend(self, rows: int) -> str:
        if self.plan.rows == "packed" and rows > 1:
            return (
                "the plan has rows='packed' and this is padded: collate by pack_rows, or plan padded rows"
            )
        of_truncate = "let truncate= cut to the tokens that it is given, "
        return (
            f"{of_truncate * (self.plan.too_long == 'truncate')}count in lengths= what collation adds, "
            f"such as each length rounded up to a multiple of 8, or raise the bound"
        )
