"""What the units of a loss weigh, from a gradient: four numbers that stay on its device.

Number of units, summed weight, lowest and highest weight of one unit, as one tensor of float64. A unit
whose gradient is zero was masked and is no unit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

# gradient of the probed tensor -> number, total, lowest, highest
Measure = Callable[[Tensor], Tensor]

_CHUNK_ELEMENTS = 1 << 21


def wide(tensor: Tensor) -> Tensor:
    """In the widest floating dtype that the device has.

    Exactness: the same numbers (float32 where the device has no float64).
    """
    return tensor.to(torch.float32 if tensor.device.type == "mps" else torch.float64)


def without_repeats(gradient: Tensor) -> tuple[Tensor, int]:
    """A gradient that was expanded, with each repeated element once, and how often it was repeated.

    Exactness: the same numbers.
    """
    repeats = 1
    for dim in range(gradient.dim()):
        if gradient.stride(dim) == 0 and gradient.size(dim) > 1:
            repeats *= gradient.size(dim)
            gradient = gradient.narrow(dim, 0, 1)
    return gradient, repeats


def spread(weights: Tensor, keep: Tensor, coefficients: Tensor | None = None) -> Tensor:
    """Number, total, lowest and highest of the weights that are kept, each unit counted by its
    coefficient.

    Exactness: exact in real arithmetic.
    """
    none = torch.zeros_like(weights)
    counted = torch.where(keep, torch.ones_like(weights) if coefficients is None else coefficients, none)
    total = torch.where(keep, weights * counted, none).sum()
    lowest = torch.where(keep, weights, torch.full_like(weights, torch.inf)).min()
    highest = torch.where(keep, weights, torch.full_like(weights, -torch.inf)).max()
    some = keep.any()
    zero = torch.zeros_like(total)
    return torch.stack(
        [counted.sum(), total, torch.where(some, lowest, zero), torch.where(some, highest, zero)]
    )


def joined(parts: Sequence[Tensor]) -> Tensor:
    """The four numbers of all parts together.

    Exactness: exact in real arithmetic.
    """
    if len(parts) == 1:
        return parts[0]
    table = torch.stack(list(parts))
    some = table[:, 0] != 0
    inf = torch.full_like(table[:, 2], torch.inf)
    lowest = torch.where(some, table[:, 2], inf).min()
    highest = torch.where(some, table[:, 3], -inf).max()
    zero = torch.zeros_like(lowest)
    any_unit = some.any()
    return torch.stack(
        [
            table[:, 0].sum(),
            table[:, 1].sum(),
            torch.where(any_unit, lowest, zero),
            torch.where(any_unit, highest, zero),
        ]
    )


def elements(gradient: Tensor) -> Tensor:
    """Each element with a gradient is a unit; worked through in pieces, so that it takes little memory.

    Exactness: exact in real arithmetic.
    """
    once, repeats = without_repeats(gradient)
    pieces = []
    for piece in torch.split(once.reshape(-1), _CHUNK_ELEMENTS):
        weights = wide(piece)
        pieces.append(spread(weights, weights != 0))
    if not pieces:
        return wide(gradient.new_zeros(4))
    numbers = joined(pieces)
    return numbers * numbers.new_tensor([repeats, repeats, 1, 1])


def kept_elements(keep: Sequence[Tensor], coefficients: Tensor | None = None) -> Measure:
    """Elements that every mask keeps are units, whatever their gradient; with coefficients these count."""

    def measure(gradient: Tensor) -> Tensor:
        weights = wide(gradient)
        mask = torch.ones_like(weights, dtype=torch.bool)
        for one in keep:
            mask &= fitted(one, gradient)
        counted = None if coefficients is None else wide(fitted(coefficients, gradient))
        return spread(weights, mask, counted)

    return measure


def supervised_elements(keep: Tensor, coefficients: Tensor | None = None) -> Measure:
    """Elements that have a target and a gradient are units."""

    def measure(gradient: Tensor) -> Tensor:
        weights = wide(gradient)
        counted = None if coefficients is None else wide(fitted(coefficients, gradient))
        return spread(weights, fitted(keep, gradient) & (weights != 0), counted)

    return measure


def fitted(tensor: Tensor, gradient: Tensor) -> Tensor:
    """A mask or a factor in the shape of a gradient: reshaped where the elements are as many, else
    expanded.

    Exactness: the same numbers.
    """
    if tensor.numel() == gradient.numel():
        return tensor.reshape(gradient.shape)
    return tensor.expand(gradient.shape)


def rows(gradient: Tensor) -> Tensor:
    """Each entry of the first dimension is a unit, with the summed weight of its elements.

    Exactness: exact in real arithmetic.
    """
    dtype = wide(gradient.new_zeros(())).dtype
    weights = gradient.sum(dim=tuple(range(1, gradient.dim())), dtype=dtype)
    return spread(weights, weights != 0)


def targets_picked(gradient: Tensor) -> Tensor:
    """From the gradient of log-probabilities: each position with a target has one that is not zero.

    Exactness: exact in real arithmetic.
    """
    return elements(gradient.sum(dim=min(1, gradient.dim() - 1)))


def class_rows(dim: int, targets: Tensor | None) -> Measure:
    """Each distribution over classes is a unit; its loss is a sum over classes, so all of them weigh
    alike."""

    def measure(gradient: Tensor) -> Tensor:
        weights = gradient.select(dim, 0)
        if targets is not None:
            present = fitted(targets, gradient) if targets.dim() else targets
            keep = (present != 0).any(dim)
            weights = (gradient * (present != 0)).sum(dim) / (present != 0).sum(dim).clamp(min=1)
            return spread(wide(weights), keep & (weights != 0))
        return spread(wide(weights), weights != 0)

    return measure


def shared(units: Tensor | float, *, mean: bool) -> Measure:
    """All units of a loss that reduces by itself weigh alike: g / units after a mean, g after a sum."""

    def measure(gradient: Tensor) -> Tensor:
        g = wide(gradient.reshape(()))
        number = wide(torch.as_tensor(units, device=g.device))
        some = number > 0
        weight = torch.where(
            some, g / torch.where(some, number, torch.ones_like(number)) if mean else g, 0.0
        )
        return torch.stack([number.to(g.dtype), weight * number, weight, weight])

    return measure


def divided(measure: Measure, constants: Sequence[tuple[object, bool]]) -> Measure:
    """A measure of what was multiplied (or divided, where the flag says so) by constants, without them."""

    if not constants:
        return measure

    def measured(gradient: Tensor) -> Tensor:
        numbers = measure(gradient)
        for constant, divides in constants:
            value = wide(torch.as_tensor(constant, device=numbers.device).detach().reshape(())).abs()
            value = torch.where(value == 0, torch.ones_like(value), value)
            factor = value if divides else 1 / value
            one = torch.ones_like(factor)
            numbers = numbers * torch.stack([one, factor, factor, factor])
        return numbers

    return measured
