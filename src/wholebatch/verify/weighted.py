"""A window that was asked for means of micro-batches: is that why it differs from the whole batch?"""

from __future__ import annotations

from dataclasses import replace

from wholebatch.oracle import OracleUpdate
from wholebatch.verify.comparison import Tried, try_split
from wholebatch.verify.diagnosis import Diagnosis
from wholebatch.verify.together import together
from wholebatch.verify.trial import Problem

_ADVICE = (
    'weighting="micro_batch_means" averages the means of micro-batches, so an item of one with fewer items '
    'counts for more: not equal to the big batch, as was asked for. With weighting="items" this split is.'
)
EQUAL_BY_CHANCE = (
    'weighting="micro_batch_means" is the mean over items only because the micro-batches of each split '
    "have as many items as each other; where they differ, the update is not equal to the big batch"
)


def weighted_otherwise(problem: Problem, whole: OracleUpdate, worst: Tried) -> Diagnosis | None:
    """The diagnosis where the split that differs is equal under ``weighting="items"``, else ``None``.

    Args:
        problem: what is judged.
        whole: the oracle's update.
        worst: the split that differs most.
    """
    if problem.weighting == "items":
        return None
    parts = together(lambda: problem.cut(worst.sizes))
    by_items = try_split(replace(problem, weighting="items"), whole, worst.sizes, parts, worst.plain)
    if not by_items.result.equal:
        return None
    return Diagnosis(cause="micro_batch_means", advice=_ADVICE, ruled_out=("the model and its loss",))
