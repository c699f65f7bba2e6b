"""The lengths of samples: told ahead or found, and what a token budget makes of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wholebatch.budget import BudgetPlan
from wholebatch.errors import PlanError, UsageError
from wholebatch.loading.reading import Chosen, naming
from wholebatch.whole_numbers import whole_number


def checked_numbers(name: str, numbers: Any, num_samples: int) -> NDArray[np.integer]:
    """Numbers of all samples by their id, as an array that is not copied if it is one.

    Args:
        name: of the argument, for the message.
        numbers: one whole number from 0 for each sample; shape (samples,).
        num_samples: of the data set.

    Raises:
        UsageError: they are something else; says what.
    """
    try:
        found = np.asarray(numbers)
    except ValueError as error:  # of lists of different lengths
        raise UsageError(
            f"{name} is no sequence of {num_samples} numbers ({error}); give one whole number for each "
            f"sample, in the order of their ids"
        ) from error
    if found.shape != (num_samples,):
        raise UsageError(
            f"{name} has shape {list(found.shape)}, and the data set has {num_samples} samples; give one "
            f"number for each, in the order of their ids"
        )
    if found.dtype.kind not in "iu":
        raise UsageError(f"{name} holds {found.dtype}; give whole numbers, such as an array of int64")
    if len(found) and found.min() < 0:
        worst = int(found.argmin())
        raise UsageError(f"{name} of sample {worst} is {found[worst]}; none is below 0")
    return found


def refuse_too_long(lengths: Any, plan: BudgetPlan, *, ids: Sequence[int] | None = None) -> None:
    """Refuse a sample that no micro-batch of the plan may hold, before it is packed, by its id.

    Args:
        lengths: tokens of each sample; shape (samples,).
        plan: of the token budget.
        ids: theirs, where they are not 0, 1, 2 ...

    Raises:
        PlanError: the first of them is named, with what can be done.
    """
    if plan.too_long == "truncate":
        return
    most = plan.tokens_per_micro_batch if plan.tokens_alone is None else plan.tokens_alone
    over = np.flatnonzero(np.asarray(lengths) > most)
    if not len(over):
        return
    first = int(over[0])
    bound = "tokens_per_micro_batch" if plan.tokens_alone is None else "tokens_alone"
    raise PlanError(
        f"sample {first if ids is None else ids[first]} has {int(np.asarray(lengths)[first])} tokens, more "
        f"than {bound}={most}; raise that, plan with too_long='alone' and a tokens_alone as large, or with "
        f"too_long='truncate', or leave the sample out of the data set"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class CutShort:
    """``truncate(sample, tokens)`` of the user's own, at the plan's budget.

    Args:
        truncate: gives the sample's first ``tokens`` tokens, or whichever of them should stay.
        tokens: the plan's budget.
    """

    truncate: Callable[[Any, int], Any]
    tokens: int

    def __call__(self, index: int, sample: Any) -> Any:
        """The sample cut to the budget.

        Raises:
            JudgeError: it failed; names the sample.
        """
        with naming(f"truncate(sample, {self.tokens}) of sample {index} failed"):
            return self.truncate(sample, self.tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class PackAlone:
    """Cuts the samples of one replica by the token budget, whatever the other replicas hold.

    Args:
        plan: of the token budget.
        length_of: tokens of a sample that was read.
        cut_short: for samples that are longer than a micro-batch may be; None where they are refused.
    """

    plan: BudgetPlan
    length_of: Callable[[Any], int]
    cut_short: CutShort | None = None

    def __call__(self, chosen: Chosen) -> list[Chosen]:
        """The samples in micro-batches; every one in exactly one.

        Raises:
            JudgeError: a length could not be told, or a sample not be truncated; names it.
            PlanError: a length is no whole number, or longer than the plan allows; names the sample.
        """
        if not chosen:
            return []
        lengths = [self._length(index, sample) for index, sample in chosen]
        ids = [index for index, _ in chosen]
        refuse_too_long(lengths, self.plan, ids=ids)
        packing = self.plan.pack(lengths, replicas=1, ids=ids)
        chosen = list(chosen)
        for place in packing.truncated:
            assert self.cut_short is not None
            index, sample = chosen[place]
            chosen[place] = index, self.cut_short(index, sample)
        return [[chosen[place] for place in places] for places in packing.replicas[0]]

    def _length(self, index: int, sample: Any) -> int:
        with naming(f"lengths(sample) of sample {index} failed"):
            found = self.length_of(sample)
        return whole_number(f"lengths(sample) of sample {index}", found, minimum=0)
