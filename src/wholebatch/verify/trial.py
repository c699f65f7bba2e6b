"""The runs that a verdict rests on: the whole batch, the plain sum of its parts, the real window.

Every run is made on a private copy of the model and puts random state back. Three ways to the same
gradient, each independent of the next: the oracle (one forward), the plain sum (the micro-batches
one by one, added up in float64, divided at the end), and the window under test.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from wholebatch.closeness import (
    NarrowingWatch,
    equality_margin,
    largest_tensor_elements,
    narrower_of,
    reduction_terms,
)
from wholebatch.errors import JudgeError, UsageError, WholebatchError
from wholebatch.objective import LossFunction
from wholebatch.oracle import (
    MakeOptimizer,
    OracleUpdate,
    batch_in,
    big_batch_update,
    gradients_by_name,
    loss_terms,
    private_copy,
    trainable,
)
from wholebatch.record import UpdateRecord, Weighting
from wholebatch.replay import RandomState, random_state_kept, seed_all
from wholebatch.verify.together import SomeRanksFailedError, group_rank_and_size, together
from wholebatch.verify.wrapping import wrapped_answering
from wholebatch.whereabouts import told
from wholebatch.window import UpdateWindow


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """What is to be judged, and how to cut it.

    Attributes:
        model: never run itself; copies are.
        loss_fn: ``loss_fn(model, batch) -> (loss_sum, num_items)`` or a dict of those.
        whole: the whole batch, as ``loss_fn`` takes it.
        cut: sizes in samples to micro-batches.
        make_optimizer: from the list of trainable parameters.
        clip_grad_norm: or ``None``.
        accumulate_in: of the window, for half-precision parameters.
        weighting: of the window.
        coefficients: ``c_k`` by term, or ``None`` for 1.
        objective: counts items ahead, or ``None``.
        collated: whether the user's collate made ``whole`` and makes each micro-batch, in a class of its
            own perhaps, whose samples only the split knows.
        seed: where random state starts in each run.
        dtype: what the runs compute in: float64, or ``None`` for the model as it is.
        judged_in: the narrowest dtype that the forward goes through.
        amplification: how many times more than the scale the gradient moves under rounding; 1 unless
            measured.
    """

    model: nn.Module
    loss_fn: LossFunction
    whole: Any
    cut: Callable[[Sequence[int]], list[Any]]
    make_optimizer: MakeOptimizer
    clip_grad_norm: float | None = None
    accumulate_in: torch.dtype | None = None
    weighting: Weighting = "items"
    coefficients: Mapping[str, float] | None = None
    objective: Any = None
    collated: bool = False
    seed: int = 0
    dtype: torch.dtype | None = torch.float64
    judged_in: torch.dtype = torch.float64
    amplification: float = 1.0

    def margin(self, num_micro_batches: int) -> float:
        """Relative difference that rounding explains, to be multiplied by the scale."""
        matrices = sum(parameter.dim() >= 2 for parameter in self.model.parameters())
        terms = reduction_terms(self.model, largest_tensor_elements(self.whole))
        roundings = 2 * matrices + num_micro_batches
        return self.amplification * equality_margin(terms, self.judged_in, num_roundings=roundings)


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowRun:
    """What the real window came to.

    Attributes:
        gradients: what the optimizer was given, by parameter name.
        parameters: after the update, by name.
        states: the random state before each micro-batch of this rank.
        record: the window's own record.
    """

    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]
    states: list[RandomState]
    record: UpdateRecord


def check_seed(seed: Any) -> None:
    """Refuse what torch takes for no seed.

    Raises:
        UsageError: not a whole number from ``-2**63`` up to, not including, ``2**63``.
    """
    if not isinstance(seed, int) or isinstance(seed, bool) or not -(2**63) <= seed < 2**63:
        raise UsageError(f"seed={seed!r} is no whole number from -2**63 to 2**63 - 1; give one, such as 0")


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Start every global generator from ``seed``, and put all random state back at the end."""
    with random_state_kept():
        seed_all(seed)
        yield


def run_whole(problem: Problem, *, model: nn.Module | None = None, clipped: bool = False) -> OracleUpdate:
    """The oracle's update, from the problem's seed.

    Args:
        problem: what is judged.
        model: another model than the problem's, for an experiment.
        clipped: clip as the problem says; else not at all.

    Returns:
        The update of the whole batch.

    Raises:
        JudgeError: as :func:`wholebatch.oracle.big_batch_update`; or backward or optimizer failed.

    Exactness: the definition.
    """
    try:
        with seeded(problem.seed):
            return big_batch_update(
                problem.model if model is None else model,
                problem.loss_fn,
                problem.whole,
                make_optimizer=problem.make_optimizer,
                clip_grad_norm=problem.clip_grad_norm if clipped else None,
                coefficients=problem.coefficients,
                dtype=problem.dtype,
            )
    except WholebatchError:
        raise
    except Exception as error:
        raise JudgeError(f"the whole batch's update failed with {told(error)}") from error


def terms_of(
    problem: Problem, batch: Any, *, model: nn.Module | None = None, seed: int | None = None
) -> dict[str, tuple[float, float]]:
    """``(L_k, N_k)`` of a batch by term, from one forward without a backward.

    Args:
        problem: what is judged.
        batch: the whole batch or a part of it.
        model: another model than the problem's, for an experiment.
        seed: another seed than the problem's.

    Returns:
        Summed loss and items by term.

    Exactness: rounding of one forward in the problem's dtype.
    """
    # A loss may differentiate by itself (a gradient penalty), so this can't run under no_grad.
    with seeded(problem.seed if seed is None else seed), torch.enable_grad():
        copied = private_copy(problem.model if model is None else model, problem.dtype)
        terms = loss_terms(problem.loss_fn, copied, batch_in(batch, problem.dtype))
        return {name: (float(loss_sum.detach()), items) for name, (loss_sum, items) in terms.items()}


def in_widest_dtype(problem: Problem) -> tuple[Problem, list[str]]:
    """The problem in float64 where it runs there, with the dtype that it is to be judged in.

    Args:
        problem: as the user gave it.

    Returns:
        The problem with ``dtype`` and ``judged_in`` set, and notes for the report.

    Raises:
        JudgeError: loss_fn fails on the whole batch in the model's own dtype too.

    Exactness: no arithmetic on the user's tensors; copies are run.
    """
    try:
        narrowest = together(lambda: narrowest_dtype(problem))
    except SomeRanksFailedError as error:
        raise JudgeError(f"loss_fn failed on the whole batch {error}") from error
    except Exception as wide_error:
        return _in_own_dtype(problem, wide_error)
    if narrowest == torch.float64:
        return problem, []
    name = dtype_name(narrowest)
    note = f"the float64 model computes in {name} inside, so it is judged by {name}"
    return replace(problem, judged_in=narrowest), [note]


def _in_own_dtype(problem: Problem, wide_error: Exception) -> tuple[Problem, list[str]]:
    own = replace(problem, dtype=None)
    try:
        together(lambda: terms_of(own, own.whole))
    except JudgeError:
        raise
    except Exception as error:
        raise JudgeError(_failed(problem, error)) from error
    if isinstance(wide_error, JudgeError):
        raise wide_error
    dtype = working_dtype(problem.model)
    note = f"could not run in float64 ({told(wide_error)}); judged in {dtype_name(dtype)}"
    return replace(own, judged_in=dtype), [note]


# What a loss_fn that expects a batch stumbles over when it gets a list of samples.
_STUMBLES = (TypeError, ValueError, AttributeError, IndexError)


def _failed(problem: Problem, error: Exception) -> str:
    failed = f"loss_fn failed on the whole batch with {told(error)}"
    if isinstance(problem.whole, list) and not problem.collated and isinstance(error, _STUMBLES):
        return (
            f"the batch is a list of samples; give collate, which makes the batch that loss_fn takes of "
            f"these {len(problem.whole)} ({failed})"
        )
    if isinstance(error, AttributeError) and error.name == "module":
        return (
            f"{failed}. The model is not wrapped here: read its attributes from the model itself, which "
            f"works on any number of ranks in verify, or from getattr(model, 'module', model), which works "
            f"in your own DDP loop too"
        )
    return failed


def working_dtype(model: nn.Module) -> torch.dtype:
    """The narrowest dtype among the trainable floating parameters."""
    dtypes = [p.dtype for p in trainable(model).values() if p.is_floating_point()]
    return functools.reduce(narrower_of, dtypes, torch.float64)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def narrowest_dtype(problem: Problem) -> torch.dtype:
    """The narrowest float dtype that a float64 forward of the whole batch goes through."""
    with seeded(problem.seed), torch.enable_grad():
        copied = private_copy(problem.model, torch.float64)
        batch = batch_in(problem.whole, torch.float64)
        with NarrowingWatch() as watch:
            terms = loss_terms(problem.loss_fn, copied, batch)
    narrowest: torch.dtype = watch.narrowest
    for loss_sum, _ in terms.values():
        narrowest = narrower_of(loss_sum.dtype, narrowest)
    return narrowest


def run_window(
    problem: Problem,
    parts: Sequence[Any],
    num_items: Sequence[Mapping[str, float]],
    *,
    sizes: Sequence[int],
    clipped: bool = False,
    count_ahead: bool = False,
    find_unused_parameters: bool = False,
) -> WindowRun:
    """One update by the real :class:`UpdateWindow` over ``parts``, on a copy of the model.

    In a process group of more than one rank the copy is wrapped in DistributedDataParallel and rank r
    runs micro-batches r, r + D, r + 2D, ...

    Args:
        problem: what is judged.
        parts: all micro-batches of the global batch, the same list on every rank.
        num_items: N of each of them by term, for a window over several terms without an objective.
        sizes: samples of each of them.
        clipped: clip as the problem says; else not at all.
        count_ahead: give the window these numbers of items, where the problem has no objective.
        find_unused_parameters: as DDP has it, for micro-batches that do not reach every parameter.

    Returns:
        Gradients as the optimizer got them, parameters after its step, and the record.

    Raises:
        JudgeError: the window skipped the update.
        UpdateError: the window refused it.

    Exactness: this is what is measured.
    """
    rank, ranks = group_rank_and_size()
    # Another seed than the oracle's: randomness must not agree with it by chance.
    with seeded(problem.seed + 1 + rank), torch.enable_grad():
        copied = private_copy(problem.model, problem.dtype)
        parameters = trainable(copied)
        optimizer = problem.make_optimizer(list(parameters.values()))
        given: dict[str, Tensor] = {}
        hook = optimizer.register_step_pre_hook(
            lambda *_: given.update(_handed_over(optimizer, parameters))
        )
        states: list[RandomState] = []
        mine = [batch_in(part, problem.dtype) for part in parts[rank::ranks]]
        samples = {id(batch): size for batch, size in zip(mine, sizes[rank::ranks], strict=True)}
        wrapped: nn.Module = copied
        if ranks > 1:
            wrapped = wrapped_answering(copied, find_unused_parameters=find_unused_parameters)
        window = UpdateWindow(
            wrapped,
            optimizer,
            _window_objective(problem, mine, num_items[rank::ranks], samples, count_ahead=count_ahead),
            count_samples=lambda batch: samples[id(batch)],
            clip_grad_norm=problem.clip_grad_norm if clipped else None,
            accumulate_in=problem.accumulate_in,
            weighting=problem.weighting,
        )
        record = window.run(mine, _recording(problem.loss_fn, states))
        hook.remove()
    if record.outcome != "applied":
        raise JudgeError(f"the window did not apply the update ({record.outcome}): {record.reason}")
    after = {name: parameter.detach() for name, parameter in parameters.items()}
    return WindowRun(gradients=given, parameters=after, states=states, record=record)


def _recording(loss_fn: LossFunction, states: list[RandomState]) -> LossFunction:
    def recorded(model: nn.Module, batch: Any) -> Any:
        states.append(RandomState.capture())
        return loss_fn(model, batch)

    return recorded


def _handed_over(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """The gradients that the step will use; a fused optimizer divides by its ``grad_scale`` first."""
    gradients = gradients_by_name(parameters)
    grad_scale = getattr(optimizer, "grad_scale", None)
    if grad_scale is None:
        return gradients
    return {name: gradient / grad_scale.to(gradient.device) for name, gradient in gradients.items()}


def _window_objective(
    problem: Problem,
    mine: Sequence[Any],
    num_items: Sequence[Mapping[str, float]],
    samples: Mapping[int, int],
    *,
    count_ahead: bool,
) -> Any:
    """The user's objective; none for one plain term; else the terms as they were counted ahead."""
    if problem.objective is not None:
        return problem.objective
    names = {name for counted in num_items for name in counted}
    given = problem.coefficients or {}
    if not count_ahead and names <= {"loss"} and given.get("loss", 1.0) == 1.0:
        return None
    items = {id(batch): counted for batch, counted in zip(mine, num_items, strict=True)}
    return _Counted(
        coefficients={name: given.get(name, 1.0) for name in names}, items=items, samples=samples
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Counted:
    """The problem's terms with their items, counted by a pass ahead, as an objective for the window."""

    coefficients: Mapping[str, float]
    items: Mapping[int, Mapping[str, float]]
    samples: Mapping[int, int]

    def count(self, batch: Any) -> Mapping[str, float]:
        return self.items[id(batch)]

    def positions(self, batch: Any) -> int:
        return self.samples[id(batch)]
