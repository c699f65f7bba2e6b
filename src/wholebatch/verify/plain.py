"""The plain sum: the batch cut, the micro-batches one by one, added up in float64, divided at the end.

It stands between the oracle and the window. Where the whole batch differs from the plain sum, the model
or the loss does not split; where the plain sum differs from the window, the window is at fault.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from wholebatch.closeness import as_wide, magnitude
from wholebatch.errors import JudgeError, SplitError
from wholebatch.oracle import batch_in, loss_terms, private_copy, trainable
from wholebatch.replay import BufferKeeper, RandomState
from wholebatch.split import num_samples, split_batch
from wholebatch.verify.trial import Problem, seeded
from wholebatch.verify.words import counted_word
from wholebatch.whereabouts import told

# Sampled splits stop at so many micro-batches: more of the same show nothing new and take long.
_MOST_MICRO_BATCHES = 16

Cut = Callable[[Sequence[int]], list[Any]]


def cutter(batch: Any, collate: Callable[[list[Any]], Any] | None) -> tuple[Cut, Any, int]:
    """How to cut the batch, the whole batch, and its number of samples.

    Args:
        batch: what the user gave.
        collate: makes a batch from a list of samples, or ``None``.

    Returns:
        A function from sizes in samples to micro-batches, the whole batch as ``loss_fn`` takes it, and
        the number of samples.

    Raises:
        SplitError: the batch can't be cut.
        JudgeError: ``collate`` fails on the whole batch.

    Exactness: no arithmetic; every sample lands in exactly one micro-batch.
    """
    if collate is None:
        return lambda sizes: split_batch(batch, sizes), batch, _num_samples(batch)
    if not isinstance(batch, Sequence) or isinstance(batch, str | bytes) or not batch:
        raise SplitError(
            f"collate was given, so batch has to be a list of samples, at least one; got a "
            f"{type(batch).__name__}"
        )
    samples = list(batch)

    def cut(sizes: Sequence[int]) -> list[Any]:
        ends = list(itertools.accumulate(sizes))
        return [
            collate(batch_in(samples[end - size : end], None))
            for size, end in zip(sizes, ends, strict=True)
        ]

    try:
        return cut, *cut([len(samples)]), len(samples)
    except Exception as error:
        raise JudgeError(f"collate failed on all {len(samples)} samples with {told(error)}") from error


def _num_samples(batch: Any) -> int:
    try:
        return num_samples(batch)
    except SplitError as error:
        if not isinstance(batch, list):
            raise
        raise SplitError(
            f"the batch is a list of samples; give collate, which makes the batch that loss_fn takes of "
            f"these {len(batch)}. Without it a list of tensors is cut as a tuple is: {error}"
        ) from error


def sampled_splits(samples: int, seed: int, *, ranks: int) -> list[tuple[int, ...]]:
    """A few splits of a batch: single samples, halves, unequal ones; at most 16 micro-batches each.

    Args:
        samples: samples of the whole batch, 2 or more.
        seed: for the unequal ones.
        ranks: each gets one micro-batch at least.

    Returns:
        Different lists of sizes in samples.

    Raises:
        JudgeError: too few samples to split.
    """
    if samples < max(2, ranks):
        raise JudgeError(
            f"a batch of {counted_word(samples, 'sample')} can't be split over "
            f"{counted_word(ranks, 'rank')} into {max(2, ranks)} micro-batches or more; give "
            f"verify at least {max(2, ranks)} samples"
        )
    draw = random.Random(seed)
    finest = min(samples, _MOST_MICRO_BATCHES)
    counts = {finest, max(2, ranks), min(finest, ranks + 1 if ranks > 1 else 3)}
    found = {_even(samples, count): None for count in sorted(counts, reverse=True)}
    for count in sorted(counts):
        edges = sorted(draw.sample(range(1, samples), count - 1))
        found[tuple(b - a for a, b in zip([0, *edges], [*edges, samples], strict=True))] = None
    return list(found)


def _even(samples: int, count: int) -> tuple[int, ...]:
    low, longer = divmod(samples, count)
    return (low + 1,) * longer + (low,) * (count - longer)


def checked_splits(splits: Sequence[Sequence[int]], samples: int, *, ranks: int) -> list[tuple[int, ...]]:
    """The user's splits as tuples of sizes in samples.

    Args:
        splits: lists of micro-batch sizes in samples.
        samples: samples of the whole batch, which each list has to add up to.
        ranks: each gets one micro-batch at least.

    Returns:
        The same sizes.

    Raises:
        SplitError: a list that does not fit; repeats its numbers.
    """
    if not splits:
        raise SplitError("splits=[] tries nothing; give lists of micro-batch sizes, or None to sample some")
    listed = [sizes if isinstance(sizes, Sequence) else [sizes] for sizes in splits]
    for sizes in listed:
        whole_numbers = all(isinstance(size, int) and not isinstance(size, bool) for size in sizes)
        if not whole_numbers or min(sizes, default=0) < 1 or sum(sizes) != samples:
            raise SplitError(
                f"micro-batches of {list(sizes)} samples do not make the batch of {samples}; give whole "
                f"numbers, at least 1, that add up to {samples}{_one_split_meant(listed, samples)}"
            )
        if len(sizes) < ranks:
            raise SplitError(
                f"{list(sizes)} has {counted_word(len(sizes), 'micro-batch', 'micro-batches')} for {ranks} "
                f"ranks; give each rank one"
            )
    return [tuple(sizes) for sizes in listed]


def _one_split_meant(splits: Sequence[Sequence[Any]], samples: int) -> str:
    """A suggestion where the sizes of all splits together make the batch: ``8,8`` for ``8+8``."""
    sizes = [size for split in splits for size in split]
    if len(splits) < 2 or not all(isinstance(size, int) for size in sizes) or sum(sizes) != samples:
        return ""
    return f". One split into them all is written [{sizes}], on the command line --splits " + "+".join(
        map(str, sizes)
    )


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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Call:
    """One call of a module: what went in and what came out, where both are tensors."""

    name: str
    given: Tensor
    result: Tensor


def where_samples_meet(problem: Problem, model: nn.Module, part: Any) -> str | None:
    """The first module whose output for a sample depends on the other samples beside it.

    Runs the whole batch and its first micro-batch, and compares call by call: the first rows went in
    alike and come out different.

    Args:
        problem: what is judged.
        model: in the mode of the experiment.
        part: the first micro-batch.

    Returns:
        ``"name (class)"``, or ``None`` where no module does it alone: then the loss does, or a forward
        between its modules.

    Exactness: compared within the problem's margin.
    """
    wholes, parts = (_calls(problem, model, batch) for batch in (problem.whole, part))
    margin = problem.margin(1)
    for whole, alone in zip(wholes, parts, strict=False):
        if whole.name != alone.name or whole.given.shape[1:] != alone.given.shape[1:]:
            return None
        if _alike(whole.given, alone.given, margin) and not _alike(whole.result, alone.result, margin):
            return f"{whole.name} ({type(model.get_submodule(whole.name)).__name__})"
    return None


def _calls(problem: Problem, model: nn.Module, batch: Any) -> list[_Call]:
    """The calls of modules without children, in order."""
    calls: list[_Call] = []

    def note(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, given: tuple[Any, ...], result: Any) -> None:
            if given and isinstance(given[0], Tensor) and isinstance(result, Tensor):
                wide = as_wide(given[0].detach()), as_wide(result.detach())
                calls.append(_Call(name=name, given=wide[0], result=wide[1]))

        return hook

    with seeded(problem.seed), torch.enable_grad():  # a loss may differentiate by itself
        copied = private_copy(model, problem.dtype)
        for name, module in copied.named_modules():
            if name and not any(module.children()):
                module.register_forward_hook(note(name))
        loss_terms(problem.loss_fn, copied, batch_in(batch, problem.dtype))
    return calls


def _alike(whole: Tensor, alone: Tensor, margin: float) -> bool:
    """Whether the first rows of one are the rows of the other, up to rounding."""
    if not (whole.dim() and alone.dim() and whole.shape[1:] == alone.shape[1:]):
        return False
    rows = whole[: len(alone)]
    scale = float(alone.abs().max()) if alone.numel() else 0.0
    return rows.shape == alone.shape and bool(((rows - alone).abs() <= margin * scale).all())
