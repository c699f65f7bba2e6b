"""The plain sum: the micro-batches one by one, added up in float64, divided at the end.

It stands between the oracle and the window. Where the whole batch differs from the plain sum, the model
or the loss does not split; where the plain sum differs from the window, the window is at fault.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from wholebatch.closeness import as_wide, magnitude
from wholebatch.oracle import batch_in, loss_terms, private_copy, trainable
from wholebatch.replay import BufferKeeper, RandomState
from wholebatch.trial import Problem, seeded


@dataclass(frozen=True, kw_only=True, slots=True)
class PlainSum:
    """The micro-batches one by one: ``sum_k c_k / N_k * sum_j grad L_kj``, added up in float64.

    Attributes:
        gradients: by parameter name; only parameters that some micro-batch reached.
        scale: ``max over parameters of sum_j max|g_j|``, the total absolute gradient.
        loss_sums: by micro-batch, then term.
        num_items: by micro-batch, then term.
        moved_buffers: names of buffers that the forwards wrote.
        reaches_all: whether every micro-batch reached every trainable parameter.
    """

    gradients: dict[str, Tensor]
    scale: float
    loss_sums: list[dict[str, float]]
    num_items: list[dict[str, float]]
    moved_buffers: tuple[str, ...]
    reaches_all: bool


@dataclass(kw_only=True, slots=True)
class _Tally:
    """Running sums of one term: gradients by parameter, and their largest elements."""

    gradients: dict[str, Tensor] = field(default_factory=dict)
    largest: dict[str, float] = field(default_factory=dict)

    def add(self, gradients: Mapping[str, Tensor]) -> None:
        for name, gradient in gradients.items():
            wide = as_wide(gradient)
            known = self.gradients.get(name)
            self.gradients[name] = wide if known is None else known + wide
        for name, size in magnitude(gradients).items():
            self.largest[name] = self.largest.get(name, 0.0) + size


def plain_sum(
    problem: Problem,
    parts: Sequence[Any],
    *,
    model: nn.Module | None = None,
    states: Sequence[RandomState] | None = None,
    restore_buffers: bool = False,
    divide_first: Mapping[str, float] | None = None,
) -> PlainSum:
    """Run the micro-batches one by one and add up, without the window.

    ``sum_k c_k / N_k * sum_j grad L_kj`` with ``N_k = sum_j N_kj``; gradients of each term are summed
    in float64 and divided once, at the end.

    Args:
        problem: what is judged.
        parts: the micro-batches.
        model: another model than the problem's, for an experiment.
        states: random state to start each micro-batch from; by default one stream from the seed.
        restore_buffers: put the model's buffers back before each micro-batch.
        divide_first: ``N_k`` by term; each loss is then multiplied by ``c_k / N_k`` before its backward,
            as the window does it, so that in a narrow dtype both round alike and differ only in how
            they add up.

    Returns:
        The gradient, its scale, and what each micro-batch returned.

    Raises:
        JudgeError: as :func:`wholebatch.oracle.loss_terms`.

    Exactness: exact in real arithmetic over the same micro-batches.
    """
    ahead = None if divide_first is None else _weights(problem, [divide_first])
    with seeded(problem.seed), torch.enable_grad():
        copied = private_copy(problem.model if model is None else model, problem.dtype)
        parameters = trainable(copied)
        buffers = BufferKeeper(copied)
        buffers.keep()
        moved: dict[str, None] = {}
        tallies: dict[str, _Tally] = {}
        loss_sums: list[dict[str, float]] = []
        num_items: list[dict[str, float]] = []
        reaches_all = True
        for index, part in enumerate(parts):
            if states is not None:
                states[index].restore()
            if restore_buffers:
                buffers.put_back()
            terms = loss_terms(problem.loss_fn, copied, batch_in(part, problem.dtype))
            moved |= dict.fromkeys(buffers.moved())
            loss_sums.append({name: float(loss_sum.detach()) for name, (loss_sum, _) in terms.items()})
            num_items.append({name: items for name, (_, items) in terms.items()})
            reached: set[str] = set()
            for name, (loss_sum, _) in terms.items():
                share = 1.0 if ahead is None else ahead[name]
                gradients = _gradients(share * loss_sum, parameters)
                tallies.setdefault(name, _Tally()).add(gradients)
                reached |= set(gradients)
            reaches_all = reaches_all and reached == set(parameters)
    weights = _weights(problem, num_items) if ahead is None else dict.fromkeys(ahead, 1.0)
    return PlainSum(
        gradients=_weighted_gradients(tallies, weights),
        scale=_scale(tallies, weights),
        loss_sums=loss_sums,
        num_items=num_items,
        moved_buffers=tuple(moved),
        reaches_all=reaches_all,
    )


def _gradients(loss_sum: Tensor, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    if not loss_sum.requires_grad:  # a micro-batch without items may return a constant
        return {}
    found = torch.autograd.grad(loss_sum, list(parameters.values()), retain_graph=True, allow_unused=True)
    return {name: g for name, g in zip(parameters, found, strict=True) if g is not None}


def _weights(problem: Problem, num_items: Sequence[Mapping[str, float]]) -> dict[str, float]:
    totals: dict[str, float] = {}
    for counted in num_items:
        for name, items in counted.items():
            totals[name] = totals.get(name, 0.0) + items
    given = problem.coefficients or {}
    return {name: given.get(name, 1.0) / total if total else 0.0 for name, total in totals.items()}


def _weighted_gradients(tallies: Mapping[str, _Tally], weights: Mapping[str, float]) -> dict[str, Tensor]:
    gradients: dict[str, Tensor] = {}
    for term, tally in tallies.items():
        for name, summed in tally.gradients.items():
            share = weights[term] * summed
            gradients[name] = gradients[name] + share if name in gradients else share
    return gradients


def _scale(tallies: Mapping[str, _Tally], weights: Mapping[str, float]) -> float:
    totals: dict[str, float] = {}
    for term, tally in tallies.items():
        for name, largest in tally.largest.items():
            totals[name] = totals.get(name, 0.0) + abs(weights[term]) * largest
    return max(totals.values(), default=0.0)
