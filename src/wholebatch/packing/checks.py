"""What `pack` takes, checked under the names that its caller has for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from wholebatch.errors import PlanError
from wholebatch.packing.cost import Whole
from wholebatch.whole_numbers import LARGEST_NUMBER, one_of, whole_number

TooLong = Literal["refuse", "alone", "truncate"]

# Tokens of all samples at most, so that an int64 holds every sum over them.
_MOST_TOKENS = 2**60
# Empty micro-batches cost little to list, but beyond this a packing is a mistake and not a list.
_MOST_MICRO_BATCHES = 10**7


@dataclass(frozen=True, kw_only=True, slots=True)
class Called:
    """What the caller calls its numbers and its samples, for the messages of what is refused.

    Args:
        budget: positions of a micro-batch at most.
        budget_alone: the larger bound for a sample that is alone.
        samples: each sample, in the order of the lengths, such as by its id; None for its index.
    """

    budget: str = "budget"
    budget_alone: str = "budget_alone"
    samples: Sequence[object] | None = None

    def sample(self, index: int) -> str:
        """Return what a sample is called."""
        return f"sample {index if self.samples is None else self.samples[index]}"


def checked_bound(budget: int, too_long: TooLong, budget_alone: int | None, called: Called) -> int | None:
    """Return the length that no sample may be over, or None where they are cut to the budget.

    Raises:
        PlanError: ``too_long`` is not known, or contradicts the larger bound.
    """
    one_of("too_long", too_long, get_args(TooLong))
    name, bound = called.budget_alone, f"{called.budget}={budget}"
    if too_long != "alone":
        if budget_alone is not None:
            raise PlanError(
                f"{name}={budget_alone} is for samples that get a micro-batch of their own, and "
                f"too_long={too_long!r}; set too_long='alone', or leave {name} out"
            )
        return budget if too_long == "refuse" else None
    if budget_alone is None:
        raise PlanError(
            f"too_long='alone' lets a micro-batch of one sample be over {bound}; say how far with {name}"
        )
    alone = whole_number(name, budget_alone)
    if alone <= budget:
        raise PlanError(
            f"{name}={alone} is not over {bound}, so no sample would be alone; raise it, or use "
            f"too_long='refuse'"
        )
    return alone


def whole_lengths(lengths: Sequence[int] | NDArray[Any], called: Called) -> Whole:
    """Return the tokens of each sample as an array.

    Raises:
        PlanError: they are no whole numbers from 1 to 2**53, or there are not as many as samples.
    """
    try:
        found = np.asarray(lengths)
    except ValueError:
        raise PlanError(
            "lengths are rows of different sizes; give the number of tokens of each sample, one whole "
            "number a sample"
        ) from None
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise PlanError(
            f"lengths have the shape {found.shape} and the kind {found.dtype}; give the number of tokens "
            f"of each sample, one whole number a sample"
        )
    if called.samples is not None and len(called.samples) != len(found):
        raise PlanError(
            f"there are {len(found)} lengths and {len(called.samples)} ids; give one id for each length"
        )
    if not found.size:
        return np.zeros(0, dtype=np.int64)
    if int(found.min()) < 1:
        first = int(np.flatnonzero(found < 1)[0])
        raise PlanError(
            f"{called.sample(first)} has {int(found[first])} tokens, and a sample needs at least 1; leave "
            f"it out"
        )
    longest = int(found.argmax())
    if int(found[longest]) > LARGEST_NUMBER:
        raise PlanError(
            f"{called.sample(longest)} has {int(found[longest])} tokens, more than 2**53 = "
            f"{LARGEST_NUMBER}, the most that can be told; leave it out"
        )
    return found.astype(np.int64)


def refuse_longer(lengths: Whole, bound: int | None, budget: int, called: Called) -> None:
    """Refuse samples over the bound, and tell what would hold them.

    Raises:
        PlanError: there are some; names the first.
    """
    if bound is None or not (over := np.flatnonzero(lengths > bound)).size:
        return
    first, others = int(over[0]), over.size - 1
    longest = int(lengths.max())
    which = f"{called.sample(first)} has {int(lengths[first])} tokens"
    if others:
        which += f", and {others} other{'s are' if others > 1 else ' is'} too long as well"
    if bound != budget:
        raise PlanError(
            f"{which}: over {called.budget_alone}={bound}, the bound for a sample that is alone. Raise it, "
            f"to {longest} for all of them; cut samples to {called.budget}={budget} with "
            f"too_long='truncate'; or leave them out"
        )
    raise PlanError(
        f"{which}: over {called.budget}={budget}, the positions of a micro-batch at most. Raise it, to "
        f"{longest} for all of them; cut samples to it with too_long='truncate'; let a micro-batch of one "
        f"sample be larger with too_long='alone' and {called.budget_alone}={longest}; or leave them out"
    )


def refuse_too_many(lengths: Whole, replicas: int, multiple: int) -> None:
    """Refuse numbers whose sums or lists no longer fit.

    Raises:
        PlanError: more tokens than an int64 adds up, or more micro-batches than are worth a list.
    """
    if replicas * multiple > _MOST_MICRO_BATCHES:
        raise PlanError(
            f"replicas={replicas} x micro_batches_multiple={multiple} are {replicas * multiple} "
            f"micro-batches, more than the {_MOST_MICRO_BATCHES} that a packing may list; use fewer "
            f"replicas, or a smaller multiple"
        )
    if len(lengths) * int(lengths.max(initial=0)) <= _MOST_TOKENS:
        return
    tokens = sum(lengths.tolist())  # Python's own sum: that of an int64 would turn over
    if tokens > _MOST_TOKENS:
        raise PlanError(
            f"the {len(lengths)} samples have {tokens} tokens together, more than the 2**60 = "
            f"{_MOST_TOKENS} that one global batch may have; use fewer samples, or cut them with "
            f"too_long='truncate'"
        )
