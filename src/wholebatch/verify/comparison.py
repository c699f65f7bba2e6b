"""One split beside the whole batch: errors with their bounds, parameter by parameter."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from wholebatch.closeness import (
    ParameterError,
    RoundingTremor,
    as_wide,
    clipped_bound,
    distance,
    magnitude,
    rounding_allowance,
    unit_roundoff,
    worst_first,
)
from wholebatch.errors import CountMismatchError, JudgeError
from wholebatch.oracle import OracleUpdate, private_copy, trainable
from wholebatch.verify.plain import PlainSum, plain_sum
from wholebatch.verify.together import failures_told, gathered, in_words, together
from wholebatch.verify.trial import Problem, WindowRun, dtype_name, run_whole, run_window, seeded
from wholebatch.verify.verification import Rounding, SplitResult

# Roundings of one element in the longest first update of torch.optim, AdamW's: 3 for decay and step, 2
# for each moment, 6 for the bias corrections, root, quotient. Twice, for window and oracle both round.
_STEP_ROUNDINGS = 2 * 13


@dataclass(kw_only=True, slots=True)
class Tried:
    """One split after it was run: its result, and what the diagnosis needs of it."""

    sizes: tuple[int, ...]
    plain: PlainSum
    result: SplitResult
    run: WindowRun | None = None


def try_split(
    problem: Problem, whole: OracleUpdate, sizes: tuple[int, ...], parts: Sequence[Any], plain: PlainSum
) -> Tried:
    """Run the window over one split and compare it with the whole batch.

    Gradients always without clipping, which would hide a constant factor; with clipping asked for, the
    window and the oracle run once more with it, and clipped gradients are compared too.

    Args:
        problem: what is judged.
        whole: the oracle's update, not clipped.
        sizes: samples of each micro-batch.
        parts: the micro-batches.
        plain: their plain sum.

    Returns:
        The worst over all ranks, and this rank's runs.

    Raises:
        JudgeError: the window refused for another reason than its counts, or loss_fn failed inside it, on
            some rank; told on every rank.

    Exactness: errors are measured; bounds are those of :mod:`wholebatch.closeness`.
    """
    result = SplitResult(micro_batch_samples=sizes, equal=False, worst=None)
    tried = Tried(sizes=sizes, plain=plain, result=result)
    failure: Exception | None = None
    try:
        tried.run = _window(problem, parts, plain, sizes)
    except Exception as error:
        failure = error
    mismatches = gathered(str(failure) if isinstance(failure, CountMismatchError) else None)
    failures = gathered(None if failure is None else in_words(failure))
    if any(mismatches):
        tried.result = replace(result, refused=next(filter(None, mismatches)))
        return tried
    if any(failures):
        what = f"the window fails on micro-batches of {list(sizes)} samples"
        raise JudgeError(f"{what}: {failures_told(failures)}") from failure
    assert tried.run is not None
    errors = worst_first(_compare(problem, whole, plain, tried.run, parts, sizes))
    bound = problem.margin(len(sizes)) * plain.scale
    factor = None if errors[0].within else factor_of(tried.run.gradients, whole.gradients, bound)
    # Every rank measured its own copy; the worst of them speaks for all.
    results = gathered(replace(result, equal=errors[0].within, worst=errors[0], factor=factor))
    tried.result = min(results, key=lambda one: (one.equal, -ratio_of(one)))
    return tried


# Tremors to try, the largest first: one is too large where the gradient answers with its own size.
_TREMORS = (2.0**-26, 2.0**-36, 2.0**-46)
_STILL_LINEAR = 0.01


def amplification(problem: Problem, whole: OracleUpdate, scale: float) -> float:
    """How many times more than its scale the whole batch's gradient moves under rounding; at least 1.

    ``max(1, max|g' - g| / (tremor * scale))`` with g' computed under a
    :class:`wholebatch.closeness.RoundingTremor`.

    Args:
        problem: what is judged.
        whole: the oracle's update, not clipped.
        scale: the total absolute gradient.

    Returns:
        A number without a unit, to multiply bounds by; the same on every rank.

    Exactness: an estimate from one draw of signs.
    """
    return float(max(gathered(together(lambda: _amplification(problem, whole, scale)))))


def _amplification(problem: Problem, whole: OracleUpdate, scale: float) -> float:
    found = 1.0
    for tremor in _TREMORS:
        with RoundingTremor(tremor, problem.seed):
            moved = run_whole(problem).gradients
        shift = max(distance(moved, whole.gradients).values())
        found = max(1.0, shift / (tremor * scale)) if scale > 0.0 else 1.0
        if shift <= _STILL_LINEAR * scale:
            break
    return found


def factor_of(split: Mapping[str, Tensor], whole: Mapping[str, Tensor], tolerance: float) -> float | None:
    """The one number by which the split is too large, where there is one.

    Least squares over all elements: ``a = <split, whole> / <whole, whole>``, given only where
    ``max|split - a * whole|`` is at most ``max(1, |a|) * tolerance``.

    Args:
        split: gradients by name.
        whole: gradients by name.
        tolerance: what rounding explains.

    Returns:
        ``a``, or ``None`` where the two are not proportional or either is zero.

    Exactness: rounding of two sums in float64.
    """
    pairs = [(as_wide(split[name]), as_wide(g)) for name, g in whole.items() if name in split]
    dot = sum(float((one * other.conj()).real.sum()) for one, other in pairs)
    square = sum(float(as_wide(gradient).abs().square().sum()) for gradient in whole.values())
    if not (square > 0.0 and math.isfinite(dot) and math.isfinite(square)):
        return None
    factor = dot / square
    if not any(magnitude(split).values()):  # nothing arrived, which is not a matter of scale
        return None
    left = distance(split, {name: factor * as_wide(gradient) for name, gradient in whole.items()})
    return factor if max(left.values()) <= max(1.0, abs(factor)) * tolerance else None


def ratio_of(result: SplitResult) -> float:
    """The worst error of a split in units of its bound; infinite where the window refused."""
    return math.inf if result.worst is None else result.worst.ratio


def _window(
    problem: Problem,
    parts: Sequence[Any],
    plain: PlainSum,
    sizes: Sequence[int],
    *,
    clipped: bool = False,
    count_ahead: bool = False,
) -> WindowRun:
    return run_window(
        problem,
        parts,
        plain.num_items,
        sizes=sizes,
        clipped=clipped,
        count_ahead=count_ahead,
        find_unused_parameters=not plain.reaches_all,
    )


def _compare(
    problem: Problem,
    whole: OracleUpdate,
    plain: PlainSum,
    run: WindowRun,
    parts: Sequence[Any],
    sizes: Sequence[int],
) -> Iterator[ParameterError]:
    bound = problem.margin(len(parts)) * plain.scale
    yield from _gradient_errors(run, whole, bound, quantity="gradient")
    if problem.clip_grad_norm is not None:
        norm = whole.gradient_norm
        bound = clipped_bound(
            bound,
            norm=norm,
            max_norm=problem.clip_grad_norm,
            elements=sum(gradient.numel() for gradient in whole.gradients.values()),
            largest=max(magnitude(whole.gradients).values()),
        )
        whole = together(lambda: run_whole(problem, clipped=True))
        run = together(lambda: _window(problem, parts, plain, sizes, clipped=True))
        yield from _gradient_errors(run, whole, bound, quantity="clipped gradient")
    yield from together(lambda: list(_parameter_errors(problem, whole, run, bound)))


def _gradient_errors(
    run: WindowRun, whole: OracleUpdate, bound: float, *, quantity: str
) -> Iterator[ParameterError]:
    for name, error in distance(run.gradients, whole.gradients).items():
        yield ParameterError(parameter=name, quantity=quantity, error=error, bound=bound)


def _parameter_errors(
    problem: Problem, whole: OracleUpdate, run: WindowRun, bound: float
) -> Iterator[ParameterError]:
    """Carry the gradient's bound through the optimizer by running it at both ends.

    An optimizer that moves each element monotonically with its own gradient (SGD, Adam, RMSprop, Lion)
    takes all gradients within ``g - bound .. g + bound`` to between the two ends. Where Adam's first
    update divides a gradient below the bound by its own size, that is about 2 lr.
    """
    ends = [_stepped(problem, whole.gradients, shift) for shift in (-bound, bound)]
    before = {name: parameter.detach() for name, parameter in trainable(problem.model).items()}
    for name, after in whole.parameters.items():
        reach = torch.maximum(*((end[name] - after).abs() for end in ends))
        start = before[name].to(after.dtype)
        size = torch.maximum(torch.maximum(after.abs(), start.abs()), (after - start).abs())
        allowed = reach + _STEP_ROUNDINGS * unit_roundoff(after.dtype) * size
        yield _worst_element(name, (run.parameters[name] - after).abs(), allowed)


def _stepped(problem: Problem, gradients: Mapping[str, Tensor], shift: float) -> dict[str, Tensor]:
    """Parameters after the optimizer's step with every element of the gradient shifted."""
    with seeded(problem.seed):
        parameters = trainable(private_copy(problem.model, problem.dtype))
        optimizer = problem.make_optimizer(list(parameters.values()))
        for name, gradient in gradients.items():
            parameters[name].grad = (gradient + shift).to(parameters[name].dtype)
        optimizer.step()
        return {name: parameter.detach() for name, parameter in parameters.items()}


def _worst_element(name: str, errors: Tensor, allowed: Tensor) -> ParameterError:
    if not errors.numel():
        return ParameterError(parameter=name, quantity="parameter", error=0.0, bound=0.0)
    ratios = torch.where(errors == 0, 0.0, errors / allowed).nan_to_num(nan=math.inf)
    worst = int(ratios.argmax())
    return ParameterError(
        parameter=name,
        quantity="parameter",
        error=float(errors.flatten()[worst]),
        bound=float(allowed.flatten()[worst]),
    )


def judge_rounding(problem: Problem, truth: OracleUpdate, tried: Tried) -> Rounding:
    """The second verdict: the window in the model's own dtype, from the float64 truth.

    ``d_window <= 2 d + sqrt(A) u_acc * scale + u * max|g|`` by parameter, where d is the whole batch's own
    distance from the truth. Where this fails, the micro-batches are added up in float64 and d is the
    larger of both distances: what remains is lost by accumulating.

    Args:
        problem: with ``dtype=None``.
        truth: the oracle's update in float64.
        tried: the split to run, and its scale.

    Returns:
        The worst parameter, and whether adding up in float64 cures it.

    Raises:
        JudgeError: the working dtype gives no finite loss.
        WholebatchError: the window refuses the loss in this dtype.

    Exactness: errors are measured against float64.
    """
    parts = together(lambda: problem.cut(tried.sizes))
    whole = distance(together(lambda: run_whole(problem)).gradients, truth.gradients)
    run = together(lambda: _window(problem, parts, tried.plain, tried.sizes, count_ahead=True))
    window = distance(run.gradients, truth.gradients)
    worst = worst_first(_rounding_errors(problem, truth, window, whole, tried))[0]
    cured: bool | None = None
    if not worst.within:
        wide = plain_sum(problem, parts, divide_first=truth.num_items)
        plain = distance(wide.gradients, truth.gradients)
        free_of_sum = {name: max(error, plain.get(name, 0.0)) for name, error in whole.items()}
        worst = worst_first(_rounding_errors(problem, truth, window, free_of_sum, tried))[0]
        cured = None if worst.within else plain[worst.parameter] <= worst.bound
    return Rounding(
        dtype=dtype_name(_dtype_of(problem, worst.parameter)),
        within=worst.within,
        worst=worst,
        whole_error=whole[worst.parameter],
        micro_batch_samples=tried.sizes,
        cured_when_wide=cured,
    )


def _rounding_errors(
    problem: Problem,
    truth: OracleUpdate,
    window: Mapping[str, float],
    free_of_sum: Mapping[str, float],
    tried: Tried,
) -> Iterator[ParameterError]:
    largest = magnitude(truth.gradients)
    for name, error in window.items():
        allowed = rounding_allowance(
            free_of_sum.get(name, 0.0),
            num_micro_batches=len(tried.sizes),
            dtype=_dtype_of(problem, name),
            scale=tried.plain.scale,
            largest=largest.get(name, 0.0),
        )
        yield ParameterError(parameter=name, quantity="gradient", error=error, bound=allowed)


def _dtype_of(problem: Problem, name: str) -> torch.dtype:
    return problem.model.get_parameter(name).dtype


def equal_when_replayed(problem: Problem, tried: Tried) -> bool:
    """Whether the window equals the plain sum of its micro-batches under the same random states.

    Args:
        problem: what is judged.
        tried: the split with its window run, which kept its random states.

    Returns:
        True if randomness is all that the window and the plain sum could differ by.

    Exactness: compared within float64's bound.
    """
    if any(gathered(tried.run is None)):
        return False
    assert tried.run is not None
    by_rank = gathered(tried.run.states)
    ranks = len(by_rank)
    num_parts = len(tried.sizes)
    if sum(map(len, by_rank)) != num_parts:
        return False
    states = [by_rank[index % ranks][index // ranks] for index in range(num_parts)]
    plain = together(lambda: plain_sum(problem, problem.cut(tried.sizes), states=states))
    bound = problem.margin(num_parts) * plain.scale
    near = all(error <= bound for error in distance(tried.run.gradients, plain.gradients).values())
    return all(gathered(near))
