"""What a micro-batch costs, and the same in whole numbers, so that every machine packs alike.

    cost = per_micro_batch + per_position x positions + per_position_and_length x positions x longest

In packed rows the last term is the sum of length^2 over the samples, for attention ends at each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from wholebatch.errors import PlanError

Whole = NDArray[np.int64]

# Costs are searched as whole numbers that add up to less than this, so that no sum depends on its order
# and an int64 holds any two of them.
LARGEST_COST = 2**60


# Where the true cost is between 1/128 and 1/16 of a full micro-batch's positions, packing by this one costs
# within 5% of packing by the true one, on 64 and 256 samples of the draws of benchmarks/packing.py.
_PARTS_OF_FULL = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class CostModel:
    """What a micro-batch costs; see the formula of this file.

    Only ratios matter to a packing: any unit will do, such as seconds measured on the model.

    Args:
        per_micro_batch: cost of a micro-batch whatever is in it. None where it is not known: then it is
            taken for 1/32 of what the positions of a full one cost.
        per_position: cost of a position, padding included.
        per_position_and_length: cost of a position for each position of the longest sample (padded) or
            of its own sample (packed): attention.

    Raises:
        PlanError: a coefficient is negative or not finite, or positions cost nothing.
    """

    per_micro_batch: float | None = None
    per_position: float = 1.0
    per_position_and_length: float = 0.0

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if value is None and each.name == "per_micro_batch":
                continue
            if not isinstance(value, int | float) or isinstance(value, bool) or not (0 <= value < math.inf):
                raise PlanError(f"{each.name}={value!r} of the cost model; give a finite number, 0 or more")
        if not self.per_position and not self.per_position_and_length:
            raise PlanError(
                "per_position=0 and per_position_and_length=0 of the cost model: then no packing is better "
                "than another; give at least one of them a cost"
            )

    def under(self, budget: int) -> CostModel:
        """Return the model with a cost for each micro-batch, where it is not known from the budget."""
        if self.per_micro_batch is not None:
            return self
        return replace(self, per_micro_batch=self.per_position * budget / _PARTS_OF_FULL)

    def cost(self, micro_batches: int, positions: int, positions_and_lengths: int) -> float:
        """Return the cost of some micro-batches from their summed positions and positions x length."""
        return (
            (self.per_micro_batch or 0.0) * micro_batches
            + self.per_position * positions
            + self.per_position_and_length * positions_and_lengths
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    """The samples of a global batch, longest first, with their costs in whole numbers.

    Args:
        lengths: tokens of each, longest first.
        costs: of a row as long as the sample: the padded cost of a position row, or its share packed.
        base: cost of a micro-batch whatever is in it.
        budget: positions of a micro-batch at most; a longer sample is alone.
    """

    lengths: Whole
    costs: Whole
    base: int
    budget: int


def in_whole_numbers(lengths: Whole, budget: int, model: CostModel, micro_batches: int) -> Samples:
    """Return the samples, longest first, with costs in a unit small enough and large enough.

    The unit is a power of two, so that costs of whole coefficients are exact and all others are right
    to about 2^-53 of the whole. ``micro_batches`` is how many there may be beside one for each sample.
    """
    longest, num_samples = int(lengths[0]), len(lengths)
    bound = model.cost(num_samples + micro_batches, num_samples * longest, num_samples * longest**2)
    unit = 2.0 ** (math.frexp(LARGEST_COST)[1] - 2 - math.frexp(bound)[1])
    scaled = [round(value * unit) for value in (model.per_position, model.per_position_and_length)]
    return Samples(
        lengths=lengths,
        costs=lengths * (scaled[0] + scaled[1] * lengths),
        base=round((model.per_micro_batch or 0.0) * unit),
        budget=budget,
    )
