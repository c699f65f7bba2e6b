"""Samples that were read, in micro-batches that tokens bound; for the proof and evaluations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wholebatch.budget import BudgetPlan
from wholebatch.errors import UsageError
from wholebatch.train.material import JobData


def cut_by_tokens(
    plan: BudgetPlan,
    data: JobData,
    chosen: Sequence[tuple[int, Any]],
    lengths: NDArray[np.int64] | None,
) -> list[list[tuple[int, Any]]]:
    """Cut some samples as the plan cuts those of one replica.

    Args:
        plan: of the token budget.
        data: whose samples they are.
        chosen: ids and samples.
        lengths: tokens of all samples of their side, by id; None where they are found in the samples.

    Returns:
        Ids and samples of each micro-batch; where their tokens can't be told, each sample by itself.
    """
    try:
        found = [
            _tokens(data, sample) if lengths is None else int(lengths[index]) for index, sample in chosen
        ]
    except UsageError:
        return [[one] for one in chosen]
    if not found:
        return []
    return [[chosen[place] for place in places] for places in plan.pack(found, replicas=1).replicas[0]]


def _tokens(data: JobData, sample: Any) -> int:
    assert data.length_of is not None
    return data.length_of(sample)
