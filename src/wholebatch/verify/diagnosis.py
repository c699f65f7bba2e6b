"""Why a split differs from the whole batch, found by experiment.

No names of layers or functions are looked up. Each experiment changes one thing and asks whether the
difference goes away, or asks the user's loss_fn for numbers that have to add up:

==================  ==========================================================================
cause               experiment
==================  ==========================================================================
dropout             the same batch under two random states gives two losses, or two gradients
buffers             equal once the buffers are put back before each micro-batch
batch_norm          equal once the modules whose buffers move are in eval mode
mean_for_sum        the loss is a weighted mean of its parts' losses, not their sum
sum_for_mean        the losses add up, the number of items is 1 whatever the batch
wrong_count         the losses add up, the numbers of items do not
coupled_samples     the loss is neither the sum nor a mean of its parts'
low_precision       equal once the micro-batches' gradients are added up in float64
unknown             none of these; what was ruled out is listed
==================  ==========================================================================

The first five concern what the user hands to the window, so they are found with the plain sum of the
micro-batches alone. Where the plain sum equals the whole and the window does not, the window is at fault.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from wholebatch.closeness import distance, magnitude
from wholebatch.oracle import OracleUpdate, hooked, private_copy
from wholebatch.verify.padding import (
    PADDED_LENGTH_ADVICE,
    PADDING_ADVICE,
    PADDING_COUNTED_ADVICE,
    PADDING_NOT_TRIED,
    cut_after_collating,
    divides_by_length,
    padded_lengths,
)
from wholebatch.verify.plain import PlainSum, plain_sum, where_samples_meet
from wholebatch.verify.thirds import is_weighted_mean, same_amount_per_call, thirds_of
from wholebatch.verify.trial import Problem, run_whole, terms_of

ADVICE: Mapping[str, str] = {
    "dropout": (
        "The forward draws random numbers, so the whole batch and its split see different noise; the "
        "update is right for the noise that was drawn. Judge the rest in eval mode, or with dropout 0."
    ),
    "batch_norm": (
        "Modules normalise by statistics of the samples they see together ({modules}): micro-batches "
        "have other statistics than the whole batch. Use GroupNorm or LayerNorm, keep these modules "
        "in eval mode, or take the micro-batch for what it is: another model."
    ),
    "buffers": (
        "Buffers move with every forward and the output depends on them ({modules}): A micro-batches "
        "move them A times, the whole batch once. Let them move once an update, or put those modules "
        "in eval mode during training."
    ),
    "coupled_samples": (
        "The loss of the whole batch is not made of the losses of its parts: samples are compared with "
        "each other (in-batch negatives, batch statistics, a normalisation over the batch, padding to the "
        "longest){place}. "
        "Splitting changes what is computed; this update can't be accumulated as it is."
    ),
    "mean_for_sum": (
        "loss_fn returned a mean where the window wants a sum; it divides once, by the items of the "
        "whole global batch. Return (loss_sum, num_items), for instance with reduction='sum'."
    ),
    "sum_for_mean": (
        "loss_fn returned a summed loss with num_items=1 for every batch, as if it were a mean. Return "
        "the number of items that were summed: then the window divides by all of them, once."
    ),
    "wrong_count": (
        "The losses add up over micro-batches, the numbers of items do not ({counts}). Count exactly "
        "the items that were summed: no padding, no first labels that are never targets, nothing that "
        "depends on how the batch was cut."
    ),
    "low_precision": (
        "In {dtype} the gradients lose what the sum in float64 keeps: they are added up in a dtype with "
        "too few digits. Keep parameters (and so their gradients) in float32 and compute under autocast, "
        "or use fewer, larger micro-batches."
    ),
    "unknown": "None of the known causes explains the difference; see what was ruled out.",
}

_HOOKS = (
    "Gradient hooks on parameters ({names}) change each micro-batch's gradient, or the sum so far; without "
    "them the split equals the whole batch. Do once an update what these hooks do: in the optimizer's "
    "step, or on the gradients before it."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """What the experiments found.

    Attributes:
        cause: one of the table above.
        advice: what to change, in plain words.
        also: further causes seen that would remain, or that had to be taken out first.
        equal_when_replayed: with randomness: whether the window equals the plain sum of the same
            micro-batches under the same random states; ``None`` where that was not the question.
        ruled_out: what was tried and did not explain the difference.
    """

    cause: str
    advice: str
    also: tuple[str, ...] = ()
    equal_when_replayed: bool | None = None
    ruled_out: tuple[str, ...] = ()


_NOT_REPEATABLE = (
    "Two forwards of the same model and batch under the same random state differ: loss_fn or the model "
    "draws from a generator of its own, or keeps state outside the model's parameters and buffers. Nothing "
    "can be replayed; draw from torch's global generator, or keep the state in a buffer."
)


def is_random(
    problem: Problem,
    *,
    model: nn.Module | None = None,
    seeds: Sequence[int] | None = None,
    gradients: bool = True,
) -> bool:
    """Whether the whole batch's loss, items or gradient depend on the random state.

    Args:
        problem: what is judged.
        model: another model than the problem's, for an experiment.
        seeds: of the runs; four different ones by default. Noise that comes rarely needs more.
        gradients: compare them too where the losses are the same: noise before a layer that is zero,
            such as a new adapter, reaches the gradient alone.

    Returns:
        True if two runs give values that rounding does not explain.
    """
    seeds = range(problem.seed, problem.seed + 4) if seeds is None else seeds
    first, *others = (terms_of(problem, problem.whole, model=model, seed=seed) for seed in seeds)
    margin = problem.margin(1)
    if any(
        not _same(a, b, margin, abs(a))
        for other in others
        for term in first
        for a, b in zip(first[term], other[term], strict=True)
    ):
        return True
    return gradients and _gradient_is_random(problem, model, seeds)


def _gradient_is_random(problem: Problem, model: nn.Module | None, seeds: Sequence[int]) -> bool:
    runs = (run_whole(replace(problem, seed=seed), model=model).gradients for seed in seeds)
    first = next(runs)
    bound = problem.margin(1) * max(magnitude(first).values(), default=0.0)
    return any(not error <= bound for other in runs for error in distance(first, other).values())


def many_seeds(problem: Problem) -> range:
    """Enough random states to meet noise that comes rarely, such as a layer that is seldom skipped."""
    return range(problem.seed, problem.seed + 16)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Case:
    """One split that differs, with an experiment's changes to it."""

    problem: Problem
    sizes: Sequence[int]
    parts: Sequence[Any]
    model: nn.Module

    def whole(self) -> OracleUpdate:
        return run_whole(self.problem, model=self.model)

    def plain(self, *, restore_buffers: bool = False) -> PlainSum:
        return plain_sum(self.problem, self.parts, model=self.model, restore_buffers=restore_buffers)

    def agrees(self, plain: PlainSum, whole: OracleUpdate) -> bool:
        bound = self.problem.margin(len(self.parts)) * plain.scale
        return all(error <= bound for error in distance(plain.gradients, whole.gradients).values())


def diagnose(
    problem: Problem,
    sizes: Sequence[int],
    *,
    replayed: bool | None,
    refused: str | None,
) -> Diagnosis:
    """Find why one split differs from the whole batch.

    Args:
        problem: what is judged.
        sizes: the micro-batches of the split, in samples.
        replayed: where :func:`is_random`: whether the window equals the plain sum under its own random
            states; else ``None``.
        refused: the message of a window that refused because counts did not match, or ``None``.

    Returns:
        The cause, what to do, and what was ruled out.
    """
    case = _Case(problem=problem, sizes=sizes, parts=problem.cut(sizes), model=problem.model)
    return _diagnose_determined(case, refused) if replayed is None else _diagnose_random(case, replayed)


def _diagnose_random(case: _Case, replayed: bool) -> Diagnosis:
    """Dropout, unless something else is wrong too once eval mode silences it."""
    problem = case.problem
    found = Diagnosis(cause="dropout", advice=ADVICE["dropout"], equal_when_replayed=replayed)
    if is_random(problem, seeds=(problem.seed, problem.seed)):
        return replace(found, cause="unknown", advice=_NOT_REPEATABLE, ruled_out=("global random state",))
    silent = private_copy(problem.model, None).eval()
    if is_random(problem, model=silent, seeds=many_seeds(problem)):
        return replace(found, ruled_out=("randomness that eval mode switches off",))
    moved = case.plain().moved_buffers
    case = replace(case, model=silent)
    if not case.agrees(case.plain(), case.whole()):
        other = _diagnose_determined(case, None)
        return replace(other, also=("dropout", *other.also), equal_when_replayed=found.equal_when_replayed)
    # Eval mode silences batch statistics too: bring those modules back alone and look again.
    case = replace(case, model=_in_mode(silent, moved, training=True))
    if moved and not is_random(problem, model=case.model) and not case.agrees(case.plain(), case.whole()):
        return replace(found, also=(_diagnose_determined(case, None).cause,))
    return replace(found, ruled_out=("a difference that remains in eval mode",))


def _diagnose_determined(case: _Case, refused: str | None) -> Diagnosis:
    """A forward without randomness: buffers first, then sums and counts."""
    whole, plain = case.whole(), case.plain()
    if case.agrees(plain, whole):
        return _window_at_fault(refused)
    if (names := hooked(case.model)) and _agrees_without_hooks(case):
        advice = _HOOKS.format(names=", ".join(names))
        return Diagnosis(cause="unknown", advice=advice, ruled_out=("randomness", "buffers that move"))
    if not plain.moved_buffers:
        return _sums_and_counts(case, whole, plain, ruled_out=("randomness", "buffers that move"))
    owners = ", ".join(sorted({name.rpartition(".")[0] or "the model" for name in plain.moved_buffers}))
    if case.agrees(case.plain(restore_buffers=True), whole):
        return Diagnosis(
            cause="buffers", advice=ADVICE["buffers"].format(modules=owners), ruled_out=("randomness",)
        )
    quiet = replace(case, model=_in_mode(case.model, plain.moved_buffers, training=False))
    quiet_whole, quiet_plain = quiet.whole(), quiet.plain()
    if quiet.agrees(quiet_plain, quiet_whole):
        advice = ADVICE["batch_norm"].format(modules=owners)
        return Diagnosis(cause="batch_norm", advice=advice, ruled_out=("randomness", "buffers alone"))
    ruled_out = ("randomness", "buffers that move, as the only cause")
    found = _sums_and_counts(quiet, quiet_whole, quiet_plain, ruled_out=ruled_out)
    loud = _sums_and_counts(case, whole, plain, ruled_out=ruled_out)
    return found if loud.cause == found.cause else replace(found, also=("batch_norm",))


def _agrees_without_hooks(case: _Case) -> bool:
    bare = replace(case, model=private_copy(case.model, None, hooks=False))
    return bare.agrees(bare.plain(), bare.whole())


def _window_at_fault(refused: str | None) -> Diagnosis:
    if refused is not None:
        counts = f"the window refused: {refused}"
        return Diagnosis(cause="wrong_count", advice=ADVICE["wrong_count"].format(counts=counts))
    return Diagnosis(
        cause="unknown",
        advice=(
            "The plain sum of the same micro-batches equals the whole batch, so loss_fn and the model are "
            "right and the window is at fault. Please report it with this output."
        ),
        ruled_out=("randomness", "buffers that move", "sums and counts of loss_fn"),
    )


def _in_mode(model: nn.Module, buffers: Sequence[str], *, training: bool) -> nn.Module:
    """A copy of the model with the owners of these buffers in training or eval mode."""
    copied = private_copy(model, None)
    for name in buffers:
        copied.get_submodule(name.rpartition(".")[0]).training = training
    return copied


def _sums_and_counts(
    case: _Case, whole: OracleUpdate, plain: PlainSum, *, ruled_out: tuple[str, ...]
) -> Diagnosis:
    """Ask of each term whether its losses and its numbers of items add up over the micro-batches."""
    margin = case.problem.margin(len(case.parts))
    for term, loss in whole.loss_sums.items():
        items = whole.num_items[term]
        losses = [sums.get(term, 0.0) for sums in plain.loss_sums]
        counts = [counted.get(term, 0.0) for counted in plain.num_items]
        losses_add_up = _same(loss, math.fsum(losses), margin, math.fsum(map(abs, losses)))
        counts_add_up = _same(items, math.fsum(counts), margin, math.fsum(map(abs, counts)))
        if losses_add_up and counts_add_up:
            continue
        if losses_add_up:
            return replace(_count_diagnosis(term, items, counts), ruled_out=(*ruled_out, "coupled samples"))
        weighted = math.fsum(n * value for n, value in zip(counts, losses, strict=True))
        by_items = _same(items * loss, weighted, margin, abs(items * loss))
        if (counts_add_up and by_items) or _is_mean(case, term):
            return Diagnosis(cause="mean_for_sum", advice=ADVICE["mean_for_sum"], ruled_out=ruled_out)
        if (padding := _padding(case, whole, plain, term)) is not None:
            return replace(padding, ruled_out=ruled_out)
        advice = _penalty_advice(case, term) or _coupled_advice(case)
        return Diagnosis(
            cause="coupled_samples", advice=advice, ruled_out=(*ruled_out, "a mean taken for a sum")
        )
    return Diagnosis(
        cause="unknown",
        advice="Losses and numbers of items add up over the micro-batches, but their gradients do not.",
        ruled_out=(*ruled_out, "sums and counts of loss_fn"),
    )


def _padding(case: _Case, whole: OracleUpdate, own: PlainSum, term: str) -> Diagnosis | None:
    """A cause that shows once the batch is collated as a whole and cut afterwards, or ``None``."""
    once = cut_after_collating(case.problem, case.sizes)
    if once is None:
        return None
    cut = replace(case, problem=once, parts=once.cut(case.sizes))
    try:
        plain = cut.plain()
    except Exception:  # what collate made may be more than dimension 0 can cut
        return None
    if not cut.agrees(plain, whole):
        found = _sums_and_counts(cut, whole, plain, ruled_out=())
        return found if found.cause == "mean_for_sum" else None
    if any(
        one.get(term) != other.get(term) for one, other in zip(own.num_items, plain.num_items, strict=True)
    ):
        return Diagnosis(cause="wrong_count", advice=PADDING_COUNTED_ADVICE)
    lengths = [padded_lengths(one, other) for one, other in zip(case.parts, cut.parts, strict=True)]
    margin = case.problem.margin(len(case.parts))
    if divides_by_length(own, plain, term=term, lengths=lengths, margin=margin):
        return Diagnosis(cause="wrong_count", advice=PADDED_LENGTH_ADVICE)
    return Diagnosis(cause="coupled_samples", advice=PADDING_ADVICE)


def _coupled_advice(case: _Case) -> str:
    advice = ADVICE["coupled_samples"].format(place=_place(case))
    untried = case.problem.collated and cut_after_collating(case.problem, case.sizes) is None
    return advice + PADDING_NOT_TRIED if untried else advice


def _place(case: _Case) -> str:
    module = where_samples_meet(case.problem, case.model, case.parts[0])
    return ", in the loss or between modules" if module is None else f", first in module {module}"


def _is_mean(case: _Case, term: str) -> bool:
    thirds = thirds_of(case.problem, case.sizes, case.model, term)
    return thirds is not None and is_weighted_mean(thirds, case.problem.margin(len(case.parts)))


def _count_diagnosis(term: str, items: float, counts: Sequence[float]) -> Diagnosis:
    if items == 1.0 and all(count == 1.0 for count in counts):
        return Diagnosis(cause="sum_for_mean", advice=ADVICE["sum_for_mean"])
    parts = " + ".join(f"{count:g}" for count in counts)
    text = f"term {term!r}: {items:g} in the whole batch, {parts} = {math.fsum(counts):g} in its parts"
    return Diagnosis(cause="wrong_count", advice=ADVICE["wrong_count"].format(counts=text))


def _penalty_advice(case: _Case, term: str) -> str | None:
    """Advice for a loss that adds the same amount once per call, such as a penalty on weights."""
    thirds = thirds_of(case.problem, case.sizes, case.model, term)
    amount = None if thirds is None else same_amount_per_call(thirds, case.problem.margin(len(case.parts)))
    if amount is None:
        return None
    return (
        f"Every call of loss_fn adds the same {amount:.6g} to term {term!r}, whatever its samples (a "
        f"penalty on weights?), so A micro-batches add it A times. Return it as a term of its own, "
        f"multiplied by the number of samples and with num_items the number of samples."
    )


def _same(one: float, other: float, margin: float, size: float) -> bool:
    """Equal up to rounding of sums of this absolute size; whole numbers have to be equal."""
    allowed = margin * size
    if one.is_integer() and other.is_integer():
        allowed = min(allowed, 0.5)
    return abs(one - other) <= allowed
