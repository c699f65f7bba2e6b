"""The objective: which items count, their summed loss and their number, in one object.

The loss of an update is ``sum_k c_k * (sum of term k over its items) / N_k``, where ``N_k`` is the
number of items of term k in the whole global batch (their weights summed, where they have any).
An objective owns the first sum and ``N`` together, so that a count can't drift from its sum; the
division happens once, in the window. Nothing here divides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from numbers import Real
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from wholebatch.errors import ObjectiveError
from wholebatch.gradients import is_sharded
from wholebatch.split import num_samples

Number = Tensor | int | float
# loss_fn(model, batch) -> (loss_sum, num_items), or {term: (loss_sum, num_items)}
LossFunction = Callable[[nn.Module, Any], Any]


class LossSum(NamedTuple):
    """The summed loss of some items, and how many they are.

    Attributes:
        loss_sum: scalar tensor, summed over items and *not* divided.
        num_items: the items in that sum, or the sum of their weights.
    """

    loss_sum: Tensor
    num_items: Number


class CheckedLossSum(LossSum):
    """One that :func:`as_loss_sum` has looked at, so that it needs no second look."""

    __slots__ = ()


class Objective(Protocol):
    """What the window, verify and the training job need to know of a loss."""

    @property
    def coefficients(self) -> Mapping[str, float]:
        """The coefficient ``c_k`` of each term, by the term's name."""

    def count(self, batch: Any) -> Mapping[str, Number | None]:
        """Items of one micro-batch by term, before its forward; ``None`` where unknowable."""

    def positions(self, batch: Any) -> int | None:
        """Elements that the forward computes for this micro-batch, padding included; ``None`` where
        nobody told."""

    def __call__(self, output: Any, batch: Any) -> LossSum | Mapping[str, LossSum]:
        """The summed loss of one micro-batch and its items."""


_ONE_TERM: Mapping[str, float] = MappingProxyType({"loss": 1.0})


@dataclass(frozen=True, kw_only=True, slots=True)
class SummedLoss:
    """An objective with one term.

    Args:
        name: what messages call it.
        loss: ``loss(output, batch) -> (loss_sum, num_items)``, a sum that is not divided.
        items: ``items(batch) -> num_items`` ahead of the forward, or ``None`` where unknowable.
        forward_positions: ``forward_positions(batch) -> int``, or ``None`` where nobody told.
        items_of_each: the same as ``items`` for several micro-batches at once, where that is faster.
    """

    name: str
    loss: Callable[[Any, Any], tuple[Tensor, Number]]
    items: Callable[[Any], Number] | None = None
    forward_positions: Callable[[Any], int] | None = None
    items_of_each: Callable[[Sequence[Any]], Sequence[Number]] | None = None

    @property
    def coefficients(self) -> Mapping[str, float]:
        return _ONE_TERM

    def count(self, batch: Any) -> Mapping[str, Number | None]:
        return {"loss": None if self.items is None else self.items(batch)}

    def positions(self, batch: Any) -> int | None:
        return None if self.forward_positions is None else self.forward_positions(batch)

    def __call__(self, output: Any, batch: Any) -> LossSum:
        return as_loss_sum(self.loss(output, batch), name=self.name)


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightedTerms:
    """An objective of several terms, each with its own items and coefficient."""

    terms: Mapping[str, tuple[SummedLoss, float]]

    @property
    def coefficients(self) -> Mapping[str, float]:
        return {name: coefficient for name, (_, coefficient) in self.terms.items()}

    def count(self, batch: Any) -> Mapping[str, Number | None]:
        return {name: objective.count(batch)["loss"] for name, (objective, _) in self.terms.items()}

    def positions(self, batch: Any) -> int | None:
        known = [objective.positions(batch) for objective, _ in self.terms.values()]
        return max((positions for positions in known if positions is not None), default=None)

    def __call__(self, output: Any, batch: Any) -> Mapping[str, LossSum]:
        by_term = isinstance(output, Mapping) and all(name in output for name in self.terms)
        return {
            name: objective(output[name] if by_term else output, batch)
            for name, (objective, _) in self.terms.items()
        }


def sample_loss(losses: Callable[[Any, Any], Tensor]) -> SummedLoss:
    """A loss with one value per sample, each sample one item: ``sum over samples``; N samples.

    Args:
        losses: ``losses(output, batch)`` returns ``[samples]``, one loss for each sample.

    Returns:
        An objective whose N is the number of samples.

    Raises:
        ObjectiveError: the function returns another shape than ``[samples]``.

    Exactness: exact in real arithmetic over any split, if each loss depends on its sample alone.
    """

    def loss(output: Any, batch: Any) -> tuple[Tensor, Number]:
        samples = num_samples(batch)
        values = losses(output, batch)
        if values.shape != (samples,):
            raise ObjectiveError(
                f"sample_loss wants one loss for each of {samples} samples, shape [{samples}], "
                f"got {list(values.shape)}"
            )
        return values.sum(), samples

    return SummedLoss(name="sample_loss", loss=loss, items=num_samples)


def counted_loss(
    loss: Callable[[Any, Any], tuple[Tensor, Number]],
    *,
    count: Callable[[Any], Number] | None = None,
    positions: Callable[[Any], int] | None = None,
) -> SummedLoss:
    """Any loss of your own that returns ``(loss_sum, num_items)``.

    ``loss_sum`` is summed over ``num_items`` items and not divided by anything.

    Args:
        loss: ``loss(output, batch) -> (loss_sum, num_items)``.
        count: ``count(batch) -> num_items`` ahead of the forward. Without it the window runs with a
            provisional denominator and corrects it once at the finish.
        positions: elements that the forward computes for a micro-batch, padding included, so that the
            record can tell the share of padding.

    Returns:
        An objective with one term.

    Exactness: exact in real arithmetic over any split, if the sum and the number both add up over
    samples; ``verify_window`` shows whether they do.
    """
    return SummedLoss(name="counted_loss", loss=loss, items=count, forward_positions=positions)


def weighted_terms(terms: Mapping[str, tuple[SummedLoss, float]]) -> WeightedTerms:
    """Several losses in one update, each divided by its own number of items.

    ``sum_k c_k / N_k * (sum of term k over its items)``.

    Args:
        terms: name to ``(objective, coefficient c_k)``.

    Returns:
        An objective that hands each term the model's output, or ``output[name]`` where the output
        is a mapping with an entry for every term.

    Raises:
        ObjectiveError: no terms, a term that is no objective, or a coefficient that is no number.

    Exactness: exact in real arithmetic over any split.
    """
    if not terms:
        raise ObjectiveError("weighted_terms needs at least one term, as name: (objective, coefficient)")
    checked: dict[str, tuple[SummedLoss, float]] = {}
    for name, term in terms.items():
        if not (isinstance(term, tuple) and len(term) == 2 and isinstance(term[0], SummedLoss)):
            raise ObjectiveError(f"term {name!r} is {term!r}; give (objective, coefficient)")
        coefficient = term[1]
        if isinstance(coefficient, bool) or not isinstance(coefficient, Real) or not isfinite(coefficient):
            raise ObjectiveError(f"the coefficient of term {name!r} is {coefficient!r}; give a number")
        checked[name] = (term[0], float(coefficient))
    return WeightedTerms(terms=MappingProxyType(checked))


def as_loss_sum(value: Any, *, name: str = "the loss") -> LossSum:
    """Check that ``value`` is ``(loss_sum, num_items)`` and return it as a :class:`LossSum`.

    Args:
        value: what a loss gave.
        name: what messages call it.

    Raises:
        ObjectiveError: not a real scalar sum with one number of items, or summed in half precision.

    Exactness: no arithmetic; the tensors themselves. A DTensor is added up where it is still to be.
    """
    if type(value) is CheckedLossSum:
        return value
    if not (isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], Tensor)):
        raise ObjectiveError(
            f"{name} gave a {type(value).__name__}; it must give (loss_sum, num_items): a loss summed "
            f"over items and not divided, and how many items were summed"
        )
    loss_sum, items = (of_all_ranks(one) for one in value)
    if loss_sum.numel() != 1:
        raise ObjectiveError(
            f"{name} gave a loss of shape {list(loss_sum.shape)}; sum it over its items to a scalar"
        )
    if loss_sum.is_complex():
        raise ObjectiveError(
            f"{name} is of {loss_sum.dtype}, and a loss is one real number; sum its size, such as "
            f"loss.abs() or loss.real"
        )
    if loss_sum.dtype in (torch.bfloat16, torch.float16):
        raise ObjectiveError(
            f"{name} was summed in {loss_sum.dtype}, where a share of 1/N is rounded to a few digits; "
            f"sum in float32, for instance logits.float() before the loss"
        )
    if isinstance(items, Tensor) and items.numel() != 1:
        raise ObjectiveError(f"{name} gave num_items of shape {list(items.shape)}; give one number")
    if isinstance(items, Tensor):
        return CheckedLossSum(loss_sum, items.detach() if items.requires_grad else items)
    number: Any = items
    if isinstance(items, bool) or not isinstance(items, Real) or not -(2**53) <= number <= 2**53:
        raise ObjectiveError(f"{name} gave num_items={items!r}; give a number of items, below 2^53")
    return CheckedLossSum(loss_sum, float(items))


def of_all_ranks(value: Any) -> Any:
    """A DTensor as what it says of all its ranks, with its graph; anything else as it is."""
    return value.full_tensor() if is_sharded(value) else value
