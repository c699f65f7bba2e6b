"""The plan of a token budget as a person reads it; ``ledger.py`` has that of m samples a micro-batch."""

from __future__ import annotations

from wholebatch.budget import BudgetPlan
from wholebatch.report.ledger import IN_EACH, Row, accumulation, columns_of


def budget_text(plan: BudgetPlan, *, reduces_each: bool = False) -> str:
    """What is fixed about an update, and what its samples decide.

    Args:
        plan: what the ledger is of.
        reduces_each: True where the engine is known to reduce in every micro-batch.
    """
    layout = plan.layout
    degrees = f"{layout.tensor_parallel} x {layout.pipeline_parallel} x {layout.context_parallel}"
    rows: list[Row] = [
        ("ranks", f"{layout.ranks:,}", "processes of the job"),
        ("replicas, D", f"{plan.replicas:,}", f"ranks / (tensor x pipeline x context = {degrees})"),
        _global_batch(plan),
        ("micro-batch", f"{plan.tokens_per_micro_batch:,}", _micro_batch(plan)),
        ("window, A", "-", "as many micro-batches as the lengths of its samples make"),
        ("items", "-", "differ from update to update: N is counted in each"),
        _reductions(plan, reduces_each),
        accumulation("where"),
    ]
    if plan.tokens_alone is not None:
        rows.insert(4, ("alone", f"{plan.tokens_alone:,}", "tokens at most for a sample that is alone"))
    return "\n".join(["One update", *columns_of(rows)]) + "\n"


def _global_batch(plan: BudgetPlan) -> Row:
    if plan.global_batch_samples is not None:
        return ("global batch", f"{plan.global_batch_samples:,}", "samples, over all replicas")
    return ("global batch", f"{plan.global_batch_items:,}", "items at most, in whole samples")


def _micro_batch(plan: BudgetPlan) -> str:
    if plan.rows == "packed":
        return "tokens of one row at most, sample after sample"
    return "positions at most: longest sample x samples"


def _reductions(plan: BudgetPlan, reduces_each: bool) -> Row:
    if plan.layout.copies == 1:
        return ("gradient reductions", "0", "one replica has nobody to reduce with")
    if reduces_each:
        return ("gradient reductions", "A", IN_EACH)
    return ("gradient reductions", "1", "at the last micro-batch")
