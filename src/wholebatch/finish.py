"""The finish of an update: unscale, agree, clip, step, update the loss scale, advance, clear.

Each happens once, in this order, after the last micro-batch was reduced. Gradients are read once for
their norm and once by the optimizer: clipping, and the correction of a provisional denominator, are
one factor, which a fused optimizer applies in its own kernel.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from wholebatch.accumulation import WideGradients
from wholebatch.errors import UnsupportedError, WindowUsageError
from wholebatch.gradients import (
    gradients_of,
    is_sharded,
    on_this_rank,
    own_parameters,
    read_scalars,
    scale_gradients,
)
from wholebatch.optimizers import refuse_broken_kernel, refuse_several_passes
from wholebatch.ranks.base import Ranks
from wholebatch.record import Counters

_DTYPE = attrgetter("dtype")
ScheduleUnit = Literal["applied_update", "attempted_update", "sample", "item"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DeclaredSchedule:
    """A learning-rate scheduler together with the unit that it advances by."""

    scheduler: LRScheduler
    unit: ScheduleUnit

    def __post_init__(self) -> None:
        if isinstance(self.scheduler, ReduceLROnPlateau):
            raise UnsupportedError(
                "ReduceLROnPlateau advances by an evaluated metric, not by updates; call its step(metric) "
                "yourself after an evaluation"
            )
        if not isinstance(self.scheduler, LRScheduler):
            raise WindowUsageError(f"a {type(self.scheduler).__name__} is no torch learning-rate scheduler")
        if self.unit in ("sample", "item") and not isinstance(self.scheduler, LambdaLR):
            raise UnsupportedError(
                f"a schedule by the {self.unit} jumps by many at once, which a "
                f"{type(self.scheduler).__name__} can't do exactly; use a LambdaLR, whose function then "
                f"takes a number of {self.unit}s"
            )

    def advance(self, counters: Counters, *, applied: bool) -> None:
        """Advance after one attempted update; ``counters`` include it."""
        if self.unit == "applied_update" and not applied:
            return
        if self.unit in ("sample", "item"):
            consumed = counters.samples if self.unit == "sample" else counters.items
            self.scheduler.last_epoch = int(consumed) - 1
        with warnings.catch_warnings():
            # torch expects an optimizer's step before each; a skipped update has none, as declared
            warnings.filterwarnings("ignore", message=r"Detected call of `lr_scheduler\.step\(\)` before")
            self.scheduler.step()


def per_update(scheduler: LRScheduler) -> DeclaredSchedule:
    """Advance ``scheduler`` once for each **applied** update; a skipped one does not move it.

    Args:
        scheduler: any torch learning-rate scheduler, except ``ReduceLROnPlateau``.

    Raises:
        UnsupportedError: a scheduler that advances by a metric.
    """
    return DeclaredSchedule(scheduler=scheduler, unit="applied_update")


def per_attempted_update(scheduler: LRScheduler) -> DeclaredSchedule:
    """Advance ``scheduler`` once for each attempted update, skipped ones included."""
    return DeclaredSchedule(scheduler=scheduler, unit="attempted_update")


def per_sample(scheduler: LambdaLR) -> DeclaredSchedule:
    """Set ``scheduler`` to the samples consumed so far, over all replicas."""
    return DeclaredSchedule(scheduler=scheduler, unit="sample")


def per_item(scheduler: LambdaLR) -> DeclaredSchedule:
    """Set ``scheduler`` to the items consumed so far, over all replicas (those of the first term, where
    the objective has several)."""
    return DeclaredSchedule(scheduler=scheduler, unit="item")


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """What the finish read from the device, once.

    Attributes:
        norm: Euclidean norm of the reduced gradient as it lies, before any correction.
        values: the scalars that were asked for, in order.
        norm_of_copies: of what several ranks must have alike; see ``Ranks.norm_of_copies``.
    """

    norm: float
    values: list[float]
    norm_of_copies: float = 0.0


class Finish:
    """Takes reduced gradients to an optimizer's step.

    Args:
        optimizers: each is stepped once an update.
        clip_grad_norm: largest Euclidean norm of the gradient, or ``None``.
        scaler: a ``GradScaler`` for float16, driven through its own methods, or ``None``.
        schedules: learning-rate schedules, each with its unit.
        accumulate_in: what gradients of narrow parameters are added up in; see ``WideGradients``.

    Attributes:
        wide: keeps those gradients wide until the step.

    Raises:
        UnsupportedError: an optimizer that needs a closure, one known to be broken here, or a
            scaler over float16 parameters.
        WindowUsageError: a clip that is not positive, or a schedule without a unit.
    """

    def __init__(
        self,
        *,
        optimizers: Sequence[Optimizer],
        clip_grad_norm: float | None,
        scaler: GradScaler | None,
        schedules: Sequence[DeclaredSchedule],
        accumulate_in: torch.dtype | None = None,
    ) -> None:
        self.optimizers = tuple(optimizers)
        self._refuse_no_optimizers()
        self.parameters: list[nn.Parameter] = []
        self._of_each: list[list[nn.Parameter]] = []  # the same by optimizer
        self._known_scale: tuple[tuple[int, int] | None, float] | None = None
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._clip = clip_grad_norm
        self.wide = WideGradients(accumulate_in)
        self.schedules = tuple(schedules)
        self._check()
        self.begin()

    def begin(self) -> None:
        """Take in the parameter groups as they are now, and let the scaler make its scale.

        Raises:
            UnsupportedError: a parameter of two optimizers, or of a kind that can't be stepped exactly.
        """
        known, self._of_each = self.parameters, [own_parameters([one]) for one in self.optimizers]
        several = len(self._of_each) > 1
        self.parameters = own_parameters(self.optimizers) if several else self._of_each[0]
        if self.scaler is not None and self.scale_mark() is None and self.parameters:
            self.scaler.scale(torch.zeros((), device=self.parameters[0].device))
        if list(map(id, known)) == list(map(id, self.parameters)):
            return
        held = sum(len(group["params"]) for o in self.optimizers for group in o.param_groups)
        if held > len(self.parameters):
            raise UnsupportedError(
                f"the optimizers hold {held} parameters of which {len(self.parameters)} are different; a "
                f"parameter of two optimizers or groups would be scaled, clipped and stepped twice"
            )
        for optimizer in self.optimizers:
            refuse_broken_kernel(optimizer)
        if self.scaler is not None and any(
            parameter.dtype == torch.float16 for parameter in self.parameters
        ):
            raise UnsupportedError(
                "a GradScaler can't unscale the gradients of float16 parameters; keep the parameters in "
                "float32 and run the forward under torch.autocast(dtype=torch.float16)"
            )

    def scaled(self, seed: Tensor) -> Tensor:
        """The gradient that a backward starts from, times the loss scale."""
        if self.scaler is None:
            return seed
        scaled: Tensor = self.scaler.scale(seed)
        return scaled

    def scale_mark(self) -> tuple[int, int] | None:
        """Changes whenever somebody changes the loss scale; does not read the device."""
        scale = getattr(self.scaler, "_scale", None)
        return None if scale is None else (id(scale), scale._version)

    def unscale(self) -> None:
        """Take the loss scale out of the gradients; of a DTensor, out of the part on this rank."""
        if self.scaler is None:
            return
        for optimizer, parameters in zip(self.optimizers, self._of_each, strict=True):
            gradients = gradients_of(parameters)
            if not any(map(is_sharded, gradients)):
                self.scaler.unscale_(optimizer)
                continue
            # torch's kernel takes no DTensor beside a plain tensor, nor beside one over another mesh
            parts: Any = _Parts(list(map(on_this_rank, gradients)))
            self.scaler.unscale_(parts)
            states = self.scaler._per_optimizer_states
            states[id(optimizer)] = states.pop(id(parts))

    def read(self, ranks: Ranks, scalars: Sequence[Tensor | int | float]) -> Reading:
        """Read the norm and ``scalars`` from the device, once.

        Where the squares of the norm overflow although every gradient is finite, it is summed again
        with care, so that an infinite norm means an infinite gradient.
        """
        gradients = gradients_of(self.parameters)
        norms = [ranks.gradient_norm(gradients), ranks.norm_of_copies(gradients)]
        norm, of_copies, *values = read_scalars([*norms, *scalars])
        if not math.isfinite(norm):
            norm = ranks.careful_norm(gradients)
        return Reading(norm=norm, values=values, norm_of_copies=of_copies)

    def clip_factor(self, norm: float) -> float:
        """``min(1, clip / (norm + 1e-6))``, as ``torch.nn.utils.clip_grad_norm_`` has it."""
        return 1.0 if self._clip is None else min(1.0, self._clip / (norm + 1e-6))

    def can_be_stepped(self, norm: float) -> bool:
        """Whether a gradient of this norm is finite for the optimizer too, in the parameters' own dtype."""
        return math.isfinite(norm) and norm * self.clip_factor(norm) <= self.wide.largest_delivered

    def loss_scale(self) -> float | None:
        """The loss scale of this update; ``None`` without a scaler. Reads the device if it changed."""
        mark = self.scale_mark()
        if self.scaler is not None and (self._known_scale is None or self._known_scale[0] != mark):
            self._known_scale = (mark, float(self.scaler.get_scale()))
        return self._known_scale[1] if self._known_scale else None

    def rate_marks(self) -> list[object]:
        """Changes whenever somebody changes a learning rate; does not read the device."""
        rates = [group["lr"] for optimizer in self.optimizers for group in optimizer.param_groups]
        return [(id(rate), rate._version) if isinstance(rate, Tensor) else rate for rate in rates]

    def settings(self) -> str:
        """What must be the same on every rank and may change between updates, in words."""
        rates = [rate for rate in self.rate_marks() if isinstance(rate, float)]
        return f"learning rates {rates}, loss scale {self.loss_scale()}"

    def learning_rates(self) -> list[float]:
        """The learning rate of each parameter group, in order."""
        return [float(group["lr"]) for optimizer in self.optimizers for group in optimizer.param_groups]

    def apply(self, factor: float) -> None:
        """Step every optimizer once with its gradients times ``factor``; update the loss scale.

        Exactness: one rounding of ``factor`` to float32 where a fused optimizer applies it, else one
        of each product to the gradient's dtype.
        """
        for optimizer, parameters in zip(self.optimizers, self._of_each, strict=True):
            left = self.wide.deliver(parameters, factor)
            gradients = gradients_of(parameters)
            if not gradients:
                continue  # a scaler asserts that it checked some gradient; without one there is no step
            with _times(optimizer, gradients, left):
                if self.scaler is None:
                    optimizer.step()
                else:
                    self.scaler.step(optimizer)
        self._move_scale(overflowed=False)
        torch.clear_autocast_cache()  # it holds casts of the parameters as they were

    def skip(self, *, gradient_overflowed: bool) -> None:
        """Leave the optimizers alone; a loss scale that overflowed backs off."""
        if gradient_overflowed:
            self._move_scale(overflowed=True)
        else:
            self.forget_unscaling()

    def _move_scale(self, *, overflowed: bool) -> None:
        """Update the loss scale by what all ranks found: this one may hold a finite part, or none."""
        if self.scaler is None:
            return
        device: Any = self.parameters[0].device
        found = torch.full((), float(overflowed), dtype=torch.float32, device=device)
        for optimizer in self.optimizers:
            self.scaler._found_inf_per_device(optimizer)[device] = found
        self.scaler.update()

    def forget_unscaling(self) -> None:
        """Forget that gradients were unscaled, without moving the loss scale."""
        if self.scaler is not None and self.scale_mark() is not None:
            self.scaler.update(new_scale=self.scaler.get_scale())

    def advance(self, counters: Counters, *, applied: bool) -> None:
        """Advance every schedule in its own unit."""
        for schedule in self.schedules:
            schedule.advance(counters, applied=applied)

    # Refusals -------------------------------------------------------------------------------------

    def _check(self) -> None:
        clip = self._clip
        if clip is not None and (
            isinstance(clip, bool) or not isinstance(clip, int | float) or not clip > 0
        ):
            raise WindowUsageError(
                f"clip_grad_norm={self._clip!r} is not a positive number; None leaves gradients unclipped"
            )
        for schedule in self.schedules:
            if not isinstance(schedule, DeclaredSchedule):
                raise WindowUsageError(
                    f"scheduler is a {type(schedule).__name__} without a unit; say what advances it: "
                    f"wholebatch.per_update(scheduler), or per_attempted_update, per_sample, per_item "
                    f"from wholebatch.finish"
                )
            if not any(schedule.scheduler.optimizer is optimizer for optimizer in self.optimizers):
                raise WindowUsageError(
                    f"the {type(schedule.scheduler).__name__} belongs to an optimizer that this window "
                    f"does not step"
                )
        for optimizer in self.optimizers:
            refuse_several_passes(optimizer)

    def _refuse_no_optimizers(self) -> None:
        for optimizer in self.optimizers:
            if not hasattr(optimizer, "param_groups") or not hasattr(optimizer, "step"):
                raise WindowUsageError(
                    f"optimizer is a {type(optimizer).__name__}; give a torch optimizer, or a list of them"
                )
        if not self.optimizers:
            raise WindowUsageError("a window needs at least one optimizer")


class _Parts:
    """Gradients as the optimizer of parameters that a scaler wants to see."""

    def __init__(self, gradients: Sequence[Tensor]) -> None:
        parameters = [gradient.detach() for gradient in gradients]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        self.param_groups = [{"params": parameters}]


@contextmanager
def _times(optimizer: Optimizer, gradients: Sequence[Tensor], factor: float) -> Iterator[None]:
    """Let ``optimizer`` see its gradients times ``factor`` in the step inside."""
    if factor == 1.0:
        yield
    elif _folds(optimizer, gradients, factor):
        # A fused kernel divides by grad_scale as it reads the gradient. GradScaler sets and removes it in
        # the same way, with a found_inf, which costs a pass; the window steps where nothing is infinite.
        device = gradients[0].device
        fused: Any = optimizer
        try:
            fused.grad_scale = torch.tensor(1.0 / factor, dtype=torch.float32, device=device)
            yield
        finally:
            if hasattr(fused, "grad_scale"):  # GradScaler.step removes it itself
                del fused.grad_scale
    else:
        scale_gradients(gradients, factor)
        yield


def _folds(optimizer: Optimizer, gradients: Sequence[Tensor], factor: float) -> bool:
    """Whether the optimizer's kernel can take the factor without losing digits."""
    fused = getattr(optimizer, "_step_supports_amp_scaling", False) and all(
        group.get("fused") for group in optimizer.param_groups
    )
    # a float32: a float64 gradient would lose half its digits to it, and not every factor fits
    fits = 1e-30 < factor < 1e30
    # the kernel takes a plain scale beside plain gradients only
    whole = not any(map(is_sharded, gradients))
    return fused and fits and whole and torch.float64 not in map(_DTYPE, gradients)
