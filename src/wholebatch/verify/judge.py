"""Is my split equal to the big batch? The real window against the oracle, on the user's model and loss.

Two verdicts (design in docs/exactness.md). *Equal*: window and whole batch, both in float64, agree to
what rounding of float64 explains, in gradients and in parameters after one update. *Rounding*: in the
model's own dtype, the window is no farther from the float64 truth than the whole batch itself and a
float32 sum explain. Where either fails, :mod:`wholebatch.verify.diagnosis` finds out why.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from wholebatch.closeness import ParameterError, magnitude, worst_first
from wholebatch.errors import JudgeError, UsageError, WholebatchError
from wholebatch.objective import LossFunction
from wholebatch.oracle import MakeOptimizer, OracleUpdate, no_trainable, trainable
from wholebatch.ranks import engine_of
from wholebatch.record import Weighting
from wholebatch.verify.comparison import (
    Tried,
    amplification,
    equal_when_replayed,
    judge_rounding,
    ratio_of,
    try_split,
)
from wholebatch.verify.diagnosis import ADVICE, Diagnosis, diagnose, is_random, many_seeds
from wholebatch.verify.plain import PlainSum, checked_splits, cutter, plain_sum, sampled_splits
from wholebatch.verify.together import (
    SomeRanksFailedError,
    gathered,
    group_rank_and_size,
    together,
)
from wholebatch.verify.trial import (
    Problem,
    check_seed,
    dtype_name,
    in_widest_dtype,
    run_whole,
    working_dtype,
)
from wholebatch.verify.untouched import caller_untouched
from wholebatch.verify.verification import Rounding, Verification
from wholebatch.verify.weighted import EQUAL_BY_CHANCE, weighted_otherwise
from wholebatch.verify.words import factor_sentence
from wholebatch.whereabouts import kept_running, place_of, told

# A bound wider than this share of the gradient would excuse a wrong denominator.
_WIDEST_MARGIN = 0.25


_ZERO = (
    "on micro-batches of {sizes} samples every gradient is exactly zero, so the bound on rounding is 0 too"
)


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
    accumulate_in: torch.dtype | None = None,
    weighting: Weighting = "items",
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
        accumulate_in: what gradients of half-precision parameters are added up in, as in ``UpdateWindow``.
        weighting: as in ``UpdateWindow``; means of micro-batches are judged unequal with their cause.
        coefficients: ``c_k`` by term, 1 by default.
        objective: objective that counts items ahead of the forward, as the window would be given it.
        collate: makes a batch from a list of samples; called on each micro-batch's samples.
        seed: for random state and for sampling splits.

    Returns:
        The verdict, the worst parameter first, and the cause where they differ.

    Raises:
        JudgeError: no verdict could be reached, and why.
        SplitError: ``splits`` do not fit the batch.
        UsageError: ``ranks`` is not the number of ranks that run; ``objective`` is none, or was given with
            ``coefficients``; ``seed`` is beyond what torch takes.

    Exactness: *equal* is a statement about float64 within ``2 n u`` of the total absolute gradient,
        see docs/exactness.md. The model, its gradients, buffers and modes and all random state are
        afterwards what they were, also after an exception.
    """
    with caller_untouched(model):
        together(lambda: _check_model(model))
        _check_ranks(ranks)
        together(lambda: _check_options(coefficients, objective, seed))
        cut, whole, samples = together(
            lambda: cutter(batch, None if collate is None else kept_running(collate))
        )
        problem = Problem(
            model=model,
            loss_fn=kept_running(loss_fn),
            whole=whole,
            cut=cut,
            collated=collate is not None,
            make_optimizer=kept_running(make_optimizer or sgd_with_momentum),
            clip_grad_norm=clip_grad_norm,
            accumulate_in=accumulate_in,
            weighting=weighting,
            coefficients=coefficients if objective is None else objective.coefficients,
            objective=objective,
            seed=seed,
        )
        running = group_rank_and_size()[1]
        chosen = (
            sampled_splits(samples, seed, ranks=running)
            if splits is None
            else checked_splits(splits, samples, ranks=running)
        )
        try:
            return _Judge(samples=samples, given=splits is not None).judge(problem, chosen)
        except WholebatchError:
            raise
        except SystemExit as error:
            raise JudgeError(f"an experiment of verify failed with {told(error)}") from error
        except Exception as error:
            if not place_of(error):  # not the user's: a mistake of ours keeps its traceback
                raise
            raise JudgeError(f"an experiment of verify failed with {told(error)}") from error


def _check_model(model: nn.Module) -> None:
    if not trainable(model):
        raise JudgeError(no_trainable(model))
    if engine := engine_of(model):
        raise JudgeError(
            f"model is under {engine}, and verify runs and wraps copies of its own; pass the plain module "
            f"(model.module under DistributedDataParallel), before it is wrapped or cut over ranks"
        )


def _check_options(coefficients: Any, objective: Any, seed: Any) -> None:
    check_seed(seed)
    if objective is None:
        return
    if coefficients is not None:
        raise UsageError(
            f"coefficients={coefficients!r} and objective={objective!r} were both given, and an objective "
            f"has coefficients of its own; give one of them"
        )
    if not (isinstance(getattr(objective, "coefficients", None), Mapping) and hasattr(objective, "count")):
        raise UsageError(
            f"objective={objective!r} is no objective: it has no coefficients by term, or no count(batch); "
            f"give what your window is given, such as token_loss(labels=...)"
        )


def _check_ranks(ranks: int | None) -> None:
    _, running = group_rank_and_size()
    if ranks is not None and ranks != running:
        raise UsageError(
            f"ranks={ranks} was asked for and {running} is running; verify runs on the ranks that its "
            f"process group has. Start {ranks} of them and initialise the group first:\n"
            f"    torchrun --standalone --nproc-per-node {ranks} your_script.py\n"
            f"or let the command do it: wholebatch verify your_module:problem --ranks {ranks}"
        )


@dataclass(kw_only=True, slots=True)
class _Judge:
    """Runs the splits of one problem and puts the verdict together."""

    samples: int
    given: bool  # the user chose the splits: one that can't run is then no verdict
    notes: list[str] = field(default_factory=list)

    def judge(self, problem: Problem, splits: Sequence[tuple[int, ...]]) -> Verification:
        problem, notes = in_widest_dtype(problem)
        self.notes += notes
        whole = together(lambda: _checked(run_whole(problem)))
        _check_same_on_all_ranks(whole)
        _check_margin(problem, splits)
        chance = any(gathered(together(lambda: is_random(problem, gradients=False))))
        tried = self._try_all(problem, whole, splits)
        if not chance and not all(one.result.equal for one in tried):
            # Before anything is called different: is there noise that comes rarely, or that only the
            # gradient sees? Does this model amplify rounding?
            chance = any(gathered(together(lambda: is_random(problem, seeds=many_seeds(problem)))))
            scale = max(one.plain.scale for one in tried)
            problem = replace(problem, amplification=amplification(problem, whole, scale))
            _check_margin(problem, splits)
            tried = self._try_all(problem, whole, splits)
            if all(one.result.equal for one in tried):
                self.notes.append(
                    f"this model amplifies rounding {problem.amplification:.1e} times (measured); the "
                    f"bounds allow for it"
                )
        if chance or not all(one.result.equal for one in tried):
            return self._unequal(problem, whole, tried, chance)
        return self._equal(problem, whole, tried)

    def _try_all(
        self, problem: Problem, whole: OracleUpdate, splits: Sequence[tuple[int, ...]]
    ) -> list[Tried]:
        tried = [one for sizes in splits if (one := self._try(problem, whole, sizes)) is not None]
        if not tried:
            raise JudgeError(f"no split could be run: {'; '.join(self.notes)}")
        return tried

    def _try(self, problem: Problem, whole: OracleUpdate, sizes: tuple[int, ...]) -> Tried | None:
        """Run one split, or note why it can't be run."""
        try:
            parts, plain = together(lambda: _cut_and_summed(problem, sizes))
        except Exception as error:
            if isinstance(error, SomeRanksFailedError):
                raise JudgeError(f"micro-batches of {list(sizes)} samples fail {error}") from error
            message = f"micro-batches of {list(sizes)} samples fail with {told(error)}"
            if self.given:
                raise JudgeError(message) from error
            if message not in self.notes:
                self.notes.append(message)
            return None
        return try_split(problem, whole, sizes, parts, plain)

    def _equal(self, problem: Problem, whole: OracleUpdate, tried: Sequence[Tried]) -> Verification:
        finest = max(tried, key=lambda one: len(one.sizes))
        if problem.weighting != "items":
            self.notes.append(EQUAL_BY_CHANCE)
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
        self.notes += [_ZERO.format(sizes=list(one.sizes)) for one in failed if one.plain.scale == 0.0]
        worst = max(failed, key=lambda one: (one.result.refused is None, ratio_of(one.result)))
        replayed = equal_when_replayed(problem, worst) if chance else None
        by_choice = weighted_otherwise(problem, whole, worst)
        found = by_choice or together(
            lambda: diagnose(problem, worst.sizes, replayed=replayed, refused=worst.result.refused)
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
            advice=found.advice
            + factor_sentence(
                None if factored is None else factored.factor,
                0 if factored is None else len(factored.micro_batch_samples),
            ),
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
            rounding = together(lambda: judge_rounding(own, whole, finest))
        except (WholebatchError, RuntimeError) as error:
            if isinstance(error, SomeRanksFailedError) and not error.everywhere:
                raise
            self.notes.append(f"rounding in the working dtype was not judged: {error}")
            return None, None, good
        rounding = min(gathered(rounding), key=lambda one: (one.within, -one.worst.ratio))
        if rounding.within:
            return rounding, None, good
        cause = "low_precision" if rounding.cured_when_wide else "unknown"
        return rounding, cause, ADVICE[cause].format(dtype=rounding.dtype)


def _cut_and_summed(problem: Problem, sizes: Sequence[int]) -> tuple[list[Any], PlainSum]:
    parts = problem.cut(sizes)
    return parts, plain_sum(problem, parts)


def _checked(whole: OracleUpdate) -> OracleUpdate:
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
    return whole


def _check_margin(problem: Problem, splits: Sequence[tuple[int, ...]]) -> None:
    margin = problem.margin(max(map(len, splits)))
    if margin < _WIDEST_MARGIN:
        return
    times = problem.amplification
    amplified = f", amplified {times:.1e} times by this model," if times > 1.0 else ""
    raise JudgeError(
        f"rounding of {dtype_name(problem.judged_in)}{amplified} explains differences of {margin:.1g} "
        f"times the gradient, so nothing can be told; give a smaller batch or a milder model (smaller "
        f"weights, shorter recurrences), or one that runs in float64"
    )


def _check_same_on_all_ranks(whole: OracleUpdate) -> None:
    seen = gathered((whole.loss_sums, whole.num_items))
    if any(one != seen[0] for one in seen):
        raise JudgeError(
            f"the ranks were given different models or batches: their whole batches have loss sums "
            f"{[sums for sums, _ in seen]}; build both from the same seed on every rank"
        )


def _worst(tried: Sequence[Tried]) -> ParameterError | None:
    errors = [one.result.worst for one in tried if one.result.worst is not None]
    return worst_first(errors)[0] if errors else None
