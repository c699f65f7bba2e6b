"""Samples that were read, in micro-batches that tokens bound; for the proof and evaluations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wholebatch.budget import BudgetPlan
from wholebatch.errors import UsageError
from wholebatch.train.material import JobData


def cut_by_tokens(
    plan: BudgetPlan,
    data: JobData,
    chosen: Sequence[tuple[int, Any]],
    lengths: NDArray[np.int64] | None,
    *,
    what: str = "sample",
) -> list[list[tuple[int, Any]]]:
    """Cut some samples as the plan cuts those of one replica.

    Args:
        plan: of the token budget.
        data: whose samples they are.
        chosen: ids and samples.
        lengths: tokens of all samples of their side, by id; None where they are found in the samples.
        what: they are, for a message.

    Returns:
        Ids and samples of each micro-batch; where their tokens can't be told, each sample by itself.

    Raises:
        UsageError: a sample that no micro-batch can take; names it.
    """
    try:
        found = [
            _tokens(data, sample) if lengths is None else int(lengths[index]) for index, sample in chosen
        ]
    except UsageError:
        return [[one] for one in chosen]
    if not found:
        return []
    ids = [index for index, _ in chosen]
    refuse_too_long(plan, found, ids=ids, what=what)
    packing = plan.pack(found, replicas=1, ids=ids)
    return [[chosen[place] for place in places] for places in packing.replicas[0]]


def refuse_too_long(
    plan: BudgetPlan, lengths: ArrayLike, *, ids: Sequence[int] | None = None, what: str = "sample"
) -> None:
    """Refuse samples that no micro-batch can take, in the words of the settings.

    Args:
        plan: of the token budget.
        lengths: tokens of each sample.
        ids: theirs; None for 0, 1, 2 and so on.
        what: they are, for the message.

    Raises:
        UsageError: with the longest of them.
    """
    found, alone = np.asarray(lengths), plan.tokens_alone
    over = int((found > max(plan.tokens_per_micro_batch, alone or 0)).sum())
    if not over:
        return
    place = int(found.argmax())
    bounds = f"{plan.tokens_per_micro_batch}{f' and batch.tokens_alone = {alone}' if alone else ''}"
    others = f", and so have {over - 1} others" if over > 1 else ""
    raise UsageError(
        f"{what} {place if ids is None else ids[place]} has {found[place]} tokens, more than "
        f"batch.tokens_per_micro_batch = {bounds}{others}; raise it, set batch.tokens_alone to "
        f"{found[place]} or more to give such a sample a micro-batch of its own, or cut samples with "
        f"data.max_tokens_per_sample"
    )


def _tokens(data: JobData, sample: Any) -> int:
    assert data.length_of is not None
    return data.length_of(sample)
