"""Is my split equal to the big batch? The real window against the oracle, on the user's model and loss.

Two verdicts (design in docs/exactness.md). *Equal*: window and whole batch, both in float64, agree to
what rounding of float64 explains, in gradients and in parameters after one update. *Rounding*: in the
model's own dtype, the window is no farther from the float64 truth than the whole batch itself and a
float32 sum explain. Where either fails, :mod:`wholebatch.diagnosis` finds out why.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from wholebatch.closeness import ParameterError, magnitude, worst_first
from wholebatch.comparison import Tried, equal_when_replayed, judge_rounding, ratio_of, try_split
from wholebatch.diagnosis import ADVICE, Diagnosis, diagnose, is_random
from wholebatch.errors import JudgeError, SplitError, UsageError, WholebatchError
from wholebatch.oracle import LossFunction, MakeOptimizer, OracleUpdate, no_trainable, trainable
from wholebatch.split import num_samples, split_batch
from wholebatch.trial import (
    Problem,
    caller_untouched,
    dtype_name,
    gathered,
    group_rank_and_size,
    in_widest_dtype,
    run_whole,
    working_dtype,
)
from wholebatch.verification import Rounding, SplitResult, Verification

# Sampled splits stop at so many micro-batches: more of the same show nothing new and take long.
_MOST_MICRO_BATCHES = 16
# A bound wider than this share of the gradient would excuse a wrong denominator.
_WIDEST_MARGIN = 0.25


def sgd_with_momentum(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The default optimizer: SGD with learning rate 1 and momentum 0.9, which hides no scale."""
    return torch.optim.SGD(parameters, lr=1.0, momentum=0.9)


def verify_window(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    *,
    splits: Sequence[Sequence[int]] | None = None,
    ranks: int | None = None,
    make_optimizer: MakeOptimizer | None = None,
    clip_grad_norm: float | None = None,
    coefficients: Mapping[str, float] | None = None,
    objective: Any = None,
    collate: Callable[[list[Any]], Any] | None = None,
    seed: int = 0,
) -> Verification:
    """Compare one update by the window over several splits with one update by the whole batch.

    Both are to be the gradient of ``sum_k c_k * L_k / N_k`` over the whole batch, and the optimizer's
    step with it. Inside a process group of D ranks the window runs on all of them, under DDP.

    Args:
        model: a plain module, not wrapped; copies of it are run.
        loss_fn: ``loss_fn(model, batch)`` returns ``(loss_sum, num_items)``, or a dict by term.
        batch: the whole batch: tensor, tuple or dict with samples in dimension 0, or with
            ``collate`` a list of samples. The same on every rank.
        splits: lists of micro-batch sizes in samples, each adding up to the batch; sampled by default.
        ranks: number of ranks that you expect to be running; ``None`` for as many as there are.
        make_optimizer: makes the optimizer from a list of parameters; SGD with momentum by default.
        clip_grad_norm: largest global norm of the gradient.
        coefficients: ``c_k`` by term, 1 by default.
        objective: objective that counts items ahead of the forward, as the window would be given it.
        collate: makes a batch from a list of samples; called on each micro-batch's samples.
        seed: for random state and for sampling splits.

    Returns:
        The verdict, the worst parameter first, and the cause where they differ.

    Raises:
        JudgeError: no verdict could be reached, and why.
        SplitError: ``splits`` do not fit the batch.
        UsageError: ``ranks`` is not the number of ranks that run.

    Exactness: *equal* is a statement about float64 within ``2 n u`` of the total absolute gradient,
        see docs/exactness.md. The model, its gradients, buffers and modes and all random state are
        afterwards what they were, also after an exception.
    """
    with caller_untouched(model):
        _check_model(model)
        _check_ranks(ranks)
        cut, whole, samples = _cutter(batch, collate)
        problem = Problem(
            model=model,
            loss_fn=loss_fn,
            whole=whole,
            cut=cut,
            make_optimizer=sgd_with_momentum if make_optimizer is None else make_optimizer,
            clip_grad_norm=clip_grad_norm,
            coefficients=coefficients if objective is None else objective.coefficients,
            objective=objective,
            seed=seed,
        )
        chosen = _checked_splits(splits, samples) if splits is not None else sampled_splits(samples, seed)
        return _Judge(samples=samples, given=splits is not None).judge(problem, chosen)


def sampled_splits(samples: int, seed: int) -> list[tuple[int, ...]]:
    """A few splits of a batch: single samples, halves, unequal ones; at most 16 micro-batches each.

    Args:
        samples: samples of the whole batch, 2 or more.
        seed: for the unequal ones.

    Returns:
        Different lists of sizes in samples, with at least as many micro-batches as ranks.
    """
    _, ranks = group_rank_and_size()
    if samples < max(2, ranks):
        raise JudgeError(
            f"a batch of {samples} sample(s) can't be split over {ranks} rank(s) into two micro-batches or "
            f"more; give verify at least {max(2, ranks)} samples"
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


def _checked_splits(splits: Sequence[Sequence[int]], samples: int) -> list[tuple[int, ...]]:
    _, ranks = group_rank_and_size()
    if not splits:
        raise SplitError("splits=[] tries nothing; give lists of micro-batch sizes, or None to sample some")
    for sizes in splits:
        whole_numbers = all(isinstance(size, int) and not isinstance(size, bool) for size in sizes)
        if not whole_numbers or min(sizes, default=0) < 1 or sum(sizes) != samples:
            raise SplitError(
                f"micro-batches of {list(sizes)} samples do not make the batch of {samples}; give whole "
                f"numbers, at least 1, that add up to {samples}"
            )
        if len(sizes) < ranks:
            raise SplitError(
                f"{list(sizes)} has {len(sizes)} micro-batch(es) for {ranks} ranks; give each rank one"
            )
    return [tuple(sizes) for sizes in splits]


def _check_model(model: nn.Module) -> None:
    if isinstance(model, DistributedDataParallel):
        raise JudgeError(
            "model is wrapped in DistributedDataParallel; pass the plain module (model.module), verify "
            "wraps its own copies"
        )
    if not trainable(model):
        raise JudgeError(no_trainable(model))


def _check_ranks(ranks: int | None) -> None:
    _, running = group_rank_and_size()
    if ranks is not None and ranks != running:
        raise UsageError(
            f"ranks={ranks} was asked for and {running} is running; verify runs on the ranks that its "
            f"process group has. Start {ranks} of them and initialise the group first:\n"
            f"    torchrun --standalone --nproc-per-node {ranks} your_script.py\n"
            f"or let the command do it: wholebatch verify your_module:problem --ranks {ranks}"
        )


Cut = Callable[[Sequence[int]], list[Any]]


def _cutter(batch: Any, collate: Callable[[list[Any]], Any] | None) -> tuple[Cut, Any, int]:
    """How to cut the batch, the whole batch, and its number of samples."""
    if collate is None:
        return lambda sizes: split_batch(batch, sizes), batch, num_samples(batch)
    if not isinstance(batch, Sequence) or isinstance(batch, str | bytes) or not batch:
        raise SplitError(
            f"collate was given, so batch has to be a list of samples, at least one; got a "
            f"{type(batch).__name__}"
        )
    samples = list(batch)

    def cut(sizes: Sequence[int]) -> list[Any]:
        ends = list(itertools.accumulate(sizes))
        return [collate(samples[end - size : end]) for size, end in zip(sizes, ends, strict=True)]

    return cut, collate(samples), len(samples)


@dataclass(kw_only=True, slots=True)
class _Judge:
    """Runs the splits of one problem and puts the verdict together."""

    samples: int
    given: bool  # the user chose the splits: one that can't run is then no verdict
    notes: list[str] = field(default_factory=list)

    def judge(self, problem: Problem, splits: Sequence[tuple[int, ...]]) -> Verification:
        problem, notes = in_widest_dtype(problem)
        self.notes += notes
        margin = problem.margin(max(map(len, splits)))
        if margin >= _WIDEST_MARGIN:
            raise JudgeError(
                f"rounding of {dtype_name(problem.judged_in)} alone explains differences of {margin:.0%} "
                f"of the gradient here, so nothing can be told; give a smaller batch, or a model that "
                f"runs in float64"
            )
        whole = run_whole(problem)
        _check_whole(whole)
        _check_same_on_all_ranks(whole)
        chance = any(gathered(is_random(problem)))
        tried = [one for sizes in splits if (one := self._try(problem, whole, sizes)) is not None]
        if not tried:
            raise JudgeError(f"no split could be run: {'; '.join(self.notes)}")
        if chance or not all(one.result.equal for one in tried):
            return self._unequal(problem, whole, tried, chance)
        return self._equal(problem, whole, tried)

    def _try(self, problem: Problem, whole: OracleUpdate, sizes: tuple[int, ...]) -> Tried | None:
        """Run one split, or note why it can't be run."""
        try:
            return try_split(problem, whole, sizes)
        except Exception as error:
            message = f"micro-batches of {list(sizes)} samples fail with {type(error).__name__}: {error}"
            if self.given:
                raise JudgeError(message) from error
            self.notes.append(message)
            return None

    def _equal(self, problem: Problem, whole: OracleUpdate, tried: Sequence[Tried]) -> Verification:
        finest = max(tried, key=lambda one: len(one.sizes))
        rounding, cause, advice = self._rounding(problem, whole, finest)
        return self._verification(
            problem,
            whole,
            tried,
            equal=cause is None,
            cause=cause,
            worst=_worst(tried) if cause is None or rounding is None else rounding.worst,
            rounding=rounding,
            advice=advice,
        )

    def _unequal(
        self, problem: Problem, whole: OracleUpdate, tried: Sequence[Tried], chance: bool
    ) -> Verification:
        failed = [one for one in tried if not one.result.equal] or list(tried)
        worst = max(failed, key=lambda one: (one.result.refused is None, ratio_of(one.result)))
        found = diagnose(
            problem,
            worst.sizes,
            random=chance,
            refused=worst.result.refused if worst.count_mismatch else None,
            replayed=lambda: equal_when_replayed(problem, worst),
        )
        # Where samples are coupled or noise is drawn, a factor would be an accident.
        constant = found.cause in ("mean_for_sum", "sum_for_mean", "wrong_count", "unknown")
        named = [one.result for one in failed if one.result.factor is not None and constant and not chance]
        factored = max(named, key=lambda one: len(one.micro_batch_samples), default=None)
        return self._verification(
            problem,
            whole,
            tried,
            equal=False,
            cause=found.cause,
            worst=_worst(failed),
            factor=None if factored is None else factored.factor,
            found=found,
            advice=found.advice + _factor_words(factored),
        )

    def _verification(
        self,
        problem: Problem,
        whole: OracleUpdate,
        tried: Sequence[Tried],
        *,
        equal: bool,
        cause: str | None,
        worst: ParameterError | None,
        advice: str,
        factor: float | None = None,
        rounding: Rounding | None = None,
        found: Diagnosis | None = None,
    ) -> Verification:
        return Verification(
            equal=equal,
            cause=cause,
            factor=factor,
            worst=worst,
            splits=tuple(one.result for one in tried),
            judged_in=dtype_name(problem.judged_in),
            rounding=rounding,
            advice=advice,
            num_samples=self.samples,
            num_items=whole.num_items,
            ranks=group_rank_and_size()[1],
            also=found.also if found else (),
            equal_when_replayed=found.equal_when_replayed if found else None,
            ruled_out=found.ruled_out if found else (),
            notes=tuple(self.notes),
        )

    def _rounding(
        self, problem: Problem, whole: OracleUpdate, finest: Tried
    ) -> tuple[Rounding | None, str | None, str]:
        """The second verdict, and cause and advice where it is negative."""
        good = "The split update is the big batch's update."
        own = replace(problem, dtype=None)
        if problem.dtype is None or working_dtype(problem.model) == torch.float64:
            return None, None, good
        try:
            rounding = judge_rounding(own, whole, finest)
        except (WholebatchError, RuntimeError) as error:
            self.notes.append(f"rounding in the working dtype was not judged: {error}")
            return None, None, good
        rounding = min(gathered(rounding), key=lambda one: (one.within, -one.worst.ratio))
        if rounding.within:
            return rounding, None, good
        cause = "low_precision" if rounding.cured_when_wide else "unknown"
        return rounding, cause, ADVICE[cause].format(dtype=rounding.dtype)


def _check_whole(whole: OracleUpdate) -> None:
    sizes = magnitude(whole.gradients)
    broken = [name for name, size in sizes.items() if not math.isfinite(size)]
    if broken:
        raise JudgeError(
            f"the whole batch's own gradient of {broken[0]} is not finite; nothing can be compared with it"
        )
    if not any(sizes.values()):
        raise JudgeError(
            "every gradient of the whole batch is exactly zero, so any split of it is too; give a batch "
            "from which something is learned"
        )


def _check_same_on_all_ranks(whole: OracleUpdate) -> None:
    seen = gathered((whole.loss_sums, whole.num_items))
    if any(one != seen[0] for one in seen):
        raise JudgeError(
            f"the ranks were given different models or batches: their whole batches have loss sums "
            f"{[sums for sums, _ in seen]}; build both from the same seed on every rank"
        )


def _factor_words(split: SplitResult | None) -> str:
    """Say which number a factor is, where it is one that people know."""
    if split is None or split.factor is None:
        return ""
    micro_batches = len(split.micro_batch_samples)
    known = {"A": float(micro_batches), "1/A": 1.0 / micro_batches}
    same = [
        f" = {name}" for name, value in known.items() if math.isclose(split.factor, value, rel_tol=1e-6)
    ]
    return (
        f" Over {micro_batches} micro-batches the gradient is {split.factor:.6g}{''.join(same[:1])} times "
        f"the big batch's."
    )


def _worst(tried: Sequence[Tried]) -> ParameterError | None:
    errors = [one.result.worst for one in tried if one.result.worst is not None]
    return worst_first(errors)[0] if errors else None
