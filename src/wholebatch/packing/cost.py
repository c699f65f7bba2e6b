"""What a micro-batch costs, and the same in whole numbers, so that every machine packs alike.

    cost = per_micro_batch + per_position x positions + per_position_and_length x positions x longest

In packed rows the last term is the sum of length^2 over the samples, for attention ends at each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from numbers import Real

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

# What a coefficient may be beside 0: no product with positions and lengths leaves the range of a double.
# That of a micro-batch may be more, for it may be made of a position's and a budget.
_POWER, _POWER_PER_MICRO_BATCH = 100, 120


@dataclass(frozen=True, kw_only=True, slots=True)
class CostModel:
    """What a micro-batch costs; see the formula of this file.

    Only ratios matter to a packing: any unit will do, such as seconds measured on the model.

    Args:
        per_micro_batch: cost of a micro-batch whatever is in it, 0 or from 1e-120 to 1e120. None where it
            is not known: then a packing takes 1/32 of what the positions of a full one cost, see `under`.
        per_position: cost of a position, padding included; 0 or from 1e-100 to 1e100.
        per_position_and_length: cost of a position for each position of the longest sample (padded) or
            of its own sample (packed): attention; 0 or from 1e-100 to 1e100.

    Raises:
        PlanError: a coefficient is no real number or not in its range, or positions cost nothing.
    """

    per_micro_batch: float | None = None
    per_position: float = 1.0
    per_position_and_length: float = 0.0

    def __post_init__(self) -> None:
        if self.per_micro_batch is not None:
            _set_coefficient(self, "per_micro_batch", _POWER_PER_MICRO_BATCH)
        _set_coefficient(self, "per_position", _POWER)
        _set_coefficient(self, "per_position_and_length", _POWER)
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
        """Return the cost of some micro-batches from their summed positions and positions x length.

        Raises:
            PlanError: what a micro-batch costs by itself is not known; see `under`.
        """
        if self.per_micro_batch is None:
            raise PlanError(
                "per_micro_batch=None of the cost model is known under a budget only; give it, or take the "
                "model that under(budget) returns"
            )
        return (
            self.per_micro_batch * micro_batches
            + self.per_position * positions
            + self.per_position_and_length * positions_and_lengths
        )


def _set_coefficient(model: CostModel, name: str, power: int) -> None:
    """Check a coefficient and store it as a plain float."""
    value = getattr(model, name)
    number, told = math.inf, ""
    if isinstance(value, Real) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            told = "a number beyond any float"  # which can have too many digits to be printed
    if number != 0 and not 10.0**-power <= number <= 10.0**power:
        raise PlanError(
            f"{name}={told or repr(value)} of the cost model; give 0, or a real number from 1e-{power} to "
            f"1e{power}: only ratios matter, so another unit will do"
        )
    object.__setattr__(model, name, abs(number))  # 0 may have a sign


def checked_cost(cost: object) -> CostModel:
    """Return the cost model that was given.

    Raises:
        PlanError: it is something else.
    """
    if not isinstance(cost, CostModel):
        raise PlanError(
            f"cost is a {type(cost).__name__}; give a CostModel, such as CostModel(per_micro_batch=64)"
        )
    return cost


@dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    """The samples of a global batch, longest first, with their costs in whole numbers.

    Args:
        lengths: tokens of each, longest first.
        costs: of a row as long as the sample, at least 1: the padded cost of a position row, or its share
            packed.
        base: cost of a micro-batch whatever is in it.
        budget: positions of a micro-batch at most; a longer sample is alone.
    """

    lengths: Whole
    costs: Whole
    base: int
    budget: int


def in_whole_numbers(lengths: Whole, budget: int, model: CostModel, micro_batches: int) -> Samples:
    """Return the samples, longest first, with costs in a unit small enough and large enough.

    The unit is a power of two, so that costs of whole coefficients are exact where they are whole in it;
    all others are right to 2^-51 of themselves, or to half a unit, which is about 2^-59 of the whole. A
    sample that costs less than a unit costs one: a cost of 0 would be as good with any padding.
    ``micro_batches`` is how many there may be beside one for each sample.
    """
    known, num_samples = model.under(budget), len(lengths)
    longest = int(lengths[0])
    bound = known.cost(num_samples + micro_batches, num_samples * longest, num_samples * longest**2)
    unit = 2.0 ** (math.frexp(LARGEST_COST)[1] - 2 - math.frexp(bound)[1])
    # Each operation is rounded by itself, alike on every machine, and none makes a longer sample cheaper.
    tokens = lengths.astype(np.float64)
    costs = tokens * (known.per_position * unit + known.per_position_and_length * unit * tokens)
    assert known.per_micro_batch is not None
    return Samples(
        lengths=lengths,
        costs=np.maximum(np.rint(costs).astype(np.int64), 1),
        base=round(known.per_micro_batch * unit),
        budget=budget,
    )
