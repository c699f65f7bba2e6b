"""The plan of a global batch whose micro-batches are cut by a bound on tokens, not by samples.

    positions of a micro-batch <= tokens_per_micro_batch

Samples of different lengths then make micro-batches of different sizes, as many as are needed. The
window divides by the items of the whole global batch, so where the cuts lie does not change the
update. ``plan.py`` is for micro-batches of m samples each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, get_args

from numpy.typing import NDArray

from wholebatch.errors import PlanError
from wholebatch.layout import Layout
from wholebatch.packing import (
    Called,
    CostModel,
    Packing,
    Rows,
    TooLong,
    checked_bound,
    checked_cost,
    pack,
)
from wholebatch.plan import BatchPlan, Tail
from wholebatch.whole_numbers import one_of, set_whole_numbers, whole_number

# Of either plan: up to so many micro-batches of a window, gradients of bfloat16 and float16 parameters are
# added up in their own dtype, which costs less than what each is rounded by; more of them in float32.
MICRO_BATCHES_IN_OWN_DTYPE = 4
# The packer's names for the bounds are not those of a plan.
_CALLED = Called(budget="tokens_per_micro_batch", budget_alone="tokens_alone")


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetPlan:
    """One update over micro-batches of at most so many tokens. Made by `plan_token_budget`.

    Args:
        layout: the ranks, and the D replicas that they make.
        tokens_per_micro_batch: positions of a micro-batch at most: longest sample x samples where they
            are padded, summed tokens in packed rows.
        global_batch_samples: samples of one update over all replicas; None where it is in items.
        global_batch_items: items of one update at most, in whole samples; None where it is in samples.
        rows: "padded" to the longest sample of the micro-batch, or "packed" one after the other.
        tail: "partial" uses the samples left at the end of an epoch as a smaller global batch, divided by
            its own denominator; "drop" leaves them out.
        too_long: what becomes of a sample of more tokens than a micro-batch may have: "refuse", "alone"
            (a micro-batch of its own, of at most ``tokens_alone``), or "truncate".
        tokens_alone: the larger bound for a sample that is alone; None without one.
        equal_micro_batches: whether every replica needs the same number of micro-batches.
        cost: what a micro-batch costs, to choose how many there are and to balance the replicas.

    Raises:
        PlanError: a number is not a whole positive one, or the settings contradict each other.
    """

    layout: Layout
    tokens_per_micro_batch: int
    global_batch_samples: int | None = None
    global_batch_items: int | None = None
    rows: Rows = "padded"
    tail: Tail = "partial"
    too_long: TooLong = "refuse"
    tokens_alone: int | None = None
    equal_micro_batches: bool = False
    cost: CostModel = field(default_factory=CostModel)

    def __post_init__(self) -> None:
        set_whole_numbers(self, "tokens_per_micro_batch")
        for name in ("global_batch_samples", "global_batch_items", "tokens_alone"):
            if getattr(self, name) is not None:
                set_whole_numbers(self, name)
        one_of("rows", self.rows, get_args(Rows))
        one_of("tail", self.tail, get_args(Tail))
        self._check_global_batch()
        checked_bound(self.tokens_per_micro_batch, self.too_long, self.tokens_alone, _CALLED)
        checked_cost(self.cost)

    def _check_global_batch(self) -> None:
        samples, items = self.global_batch_samples, self.global_batch_items
        if (samples is None) == (items is None):
            given = (
                "neither is given" if samples is None else f"here are {samples} samples and {items} items"
            )
            raise PlanError(
                f"a global batch is given in samples or in items, and {given}; give one of "
                f"global_batch_samples and global_batch_items"
            )
        if items is not None and self.tail == "drop":
            raise PlanError(
                f"tail='drop' with global_batch_items={items}: a global batch in items ends on a whole "
                f"sample, so none is full and none can be told to be a tail; use tail='partial'"
            )
        if samples is not None and samples < self.replicas:
            raise PlanError(
                f"global_batch_samples {samples} over replicas {self.replicas} leaves "
                f"{self.replicas - samples} of them without a sample in every update; use at most "
                f"{samples} replicas, or a larger global batch"
            )

    @property
    def replicas(self) -> int:
        """D, the replicas of the layout."""
        return self.layout.replicas

    @property
    def micro_batch_samples(self) -> None:
        """Not the same for all micro-batches."""
        return None

    @property
    def micro_batches_per_window(self) -> None:
        """Not the same for all windows."""
        return None

    @property
    def items_per_sample(self) -> None:
        """Not the same for all samples."""
        return None

    def pack(
        self,
        lengths: Sequence[int] | NDArray[Any],
        *,
        replicas: int | None = None,
        ids: Sequence[object] | NDArray[Any] | None = None,
    ) -> Packing:
        """Cut the samples of one global batch into micro-batches for all replicas.

        Args:
            lengths: tokens of each of its samples; shape (samples,).
            replicas: to cut for; by default all, 1 for samples of a replica that the others do not know.
            ids: of the samples in the data set, to name one by where it is refused; shape (samples,). By
                default it is named by its place in ``lengths``.

        Returns:
            For every replica its micro-batches, as indices into ``lengths``; see `packing.pack`.

        Raises:
            PlanError: as `packing.pack`; names the sample by its id.
        """
        return pack(
            lengths,
            self.tokens_per_micro_batch,
            self.replicas if replicas is None else replicas,
            rows=self.rows,
            equal_micro_batches=self.equal_micro_batches,
            micro_batches_multiple=self.layout.micro_batch_multiple,
            too_long=self.too_long,
            budget_alone=self.tokens_alone,
            cost=self.cost,
            called=_CALLED if ids is None else replace(_CALLED, samples=list(ids)),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain JSON values; what is not the same for all updates is None."""
        return {
            "ranks": self.layout.ranks,
            "replicas": self.replicas,
            "tensor_parallel": self.layout.tensor_parallel,
            "pipeline_parallel": self.layout.pipeline_parallel,
            "context_parallel": self.layout.context_parallel,
            "micro_batch_samples": None,
            "micro_batches_per_window": None,
            "tokens_per_micro_batch": self.tokens_per_micro_batch,
            "tokens_alone": self.tokens_alone,
            "rows": self.rows,
            "global_batch_samples": self.global_batch_samples,
            "global_batch_items": self.global_batch_items,
            "equal_micro_batches": self.equal_micro_batches,
            "too_long": self.too_long,
            "tail": self.tail,
            "cost": asdict(self.cost),
        }


# A number that is not the same for all micro-batches or windows of a plan is None in it.
AnyPlan = BatchPlan | BudgetPlan


def plan_token_budget(
    *,
    tokens_per_micro_batch: int,
    global_batch_samples: int | None = None,
    global_batch_items: int | None = None,
    ranks: int = 1,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    context_parallel: int = 1,
    rows: Rows = "padded",
    tail: Tail = "partial",
    too_long: TooLong = "refuse",
    tokens_alone: int | None = None,
    equal_micro_batches: bool | None = None,
    cost: CostModel | None = None,
) -> BudgetPlan:
    """Plan a global batch whose micro-batches are cut by a bound on tokens.

    Args:
        tokens_per_micro_batch: as for `BudgetPlan`.
        global_batch_samples, global_batch_items: one of them, over all replicas.
        ranks: processes of the job.
        tensor_parallel, pipeline_parallel, context_parallel: see `Layout`.
        rows, tail, too_long, tokens_alone: as for `BudgetPlan`.
        equal_micro_batches: by default where there is a pipeline, whose stages need it.
        cost: by default 1 for each position, and 1/32 of the budget for each micro-batch.

    Returns:
        The plan; the same global batches whatever the ranks and the budget.

    Raises:
        PlanError: as for `BudgetPlan` and `Layout`.
    """
    stages = whole_number("pipeline_parallel", pipeline_parallel)
    return BudgetPlan(
        layout=Layout(
            ranks=ranks,
            tensor_parallel=tensor_parallel,
            pipeline_parallel=stages,
            context_parallel=context_parallel,
        ),
        tokens_per_micro_batch=tokens_per_micro_batch,
        global_batch_samples=global_batch_samples,
        global_batch_items=global_batch_items,
        rows=rows,
        tail=tail,
        too_long=too_long,
        tokens_alone=tokens_alone,
        equal_micro_batches=stages > 1 if equal_micro_batches is None else equal_micro_batches,
        cost=CostModel() if cost is None else cost,
    )
