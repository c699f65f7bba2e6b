"""The finish where an engine scales, clips and steps by itself; the rest is as in ``finish.py``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from wholebatch.errors import UpdateError, WindowUsageError
from wholebatch.finish import DeclaredSchedule, Finish, Reading
from wholebatch.gradients import read_scalars
from wholebatch.ranks.base import Ranks
from wholebatch.ranks.stepper import Stepper


def finish_for(
    ranks: Ranks,
    *,
    optimizers: Sequence[Optimizer],
    clip_grad_norm: float | None,
    scaler: GradScaler | None,
    schedules: Sequence[DeclaredSchedule],
    accumulate_in: torch.dtype | None = None,
) -> Finish:
    """The finish that belongs to an engine: its own where it steps itself, else the plain one.

    Args:
        ranks: the seam, which knows whether its engine has a stepper.
        optimizers: each is stepped once an update.
        clip_grad_norm: largest Euclidean norm of the gradient, or ``None``.
        scaler: a ``GradScaler`` for float16, or ``None``.
        schedules: learning-rate schedules, each with its unit.
        accumulate_in: what gradients of narrow parameters are added up in.

    Raises:
        UnsupportedError: as :class:`wholebatch.finish.Finish`.
        WindowUsageError: what the engine does itself, configured otherwise or a second time.
    """
    given: dict[str, Any] = {
        "optimizers": optimizers,
        "clip_grad_norm": clip_grad_norm,
        "scaler": scaler,
        "schedules": schedules,
        "accumulate_in": accumulate_in,
    }
    return Finish(**given) if ranks.stepper is None else EngineFinish(ranks.stepper, **given)


class EngineFinish(Finish):
    """Takes reduced gradients to the step of an engine.

    Args:
        stepper: the engine's own scaling, clipping and step.
        optimizers: the engine's optimizer.
        clip_grad_norm: what the engine is configured to clip by, or ``None``.
        scaler: must be ``None``; the engine has its own.
        schedules: must be empty where the engine moves its own schedule.
        accumulate_in: what the engine must add gradients up in at least.

    Raises:
        WindowUsageError: any of these is otherwise.
    """

    def __init__(
        self,
        stepper: Stepper,
        *,
        optimizers: Sequence[Optimizer],
        clip_grad_norm: float | None,
        scaler: GradScaler | None,
        schedules: Sequence[DeclaredSchedule],
        accumulate_in: torch.dtype | None = None,
    ) -> None:
        self._stepper = stepper
        self._clip_factor = 1.0
        inner = stepper.check_optimizers(optimizers)  # the one that a user's schedule was built over
        stepper.check_schedules(schedules)
        if scaler is not None and scaler.is_enabled():
            raise WindowUsageError(
                "a GradScaler beside an engine that scales its losses itself; leave scaler= out"
            )
        super().__init__(
            optimizers=[inner],
            clip_grad_norm=clip_grad_norm,
            scaler=None,
            schedules=schedules,
            accumulate_in=accumulate_in,
        )
        stepper.check_clip(clip_grad_norm)

    def begin(self) -> None:
        """Take in the model's own parameters; the engine's optimizer holds others, made of them."""
        self.parameters = self._stepper.parameters()
        self._of_each = [self.parameters]

    def scaled(self, seed: Tensor) -> Tensor:
        return self._stepper.scaled(seed)

    def scale_mark(self) -> Any:
        return self._stepper.loss_scale()

    def loss_scale(self) -> float | None:
        return self._stepper.loss_scale()

    def unscale(self) -> None:
        """The engine does, in its step; ``read`` takes the scale out of the norm."""

    def read(self, ranks: Ranks, scalars: Sequence[Tensor | int | float]) -> Reading:
        norm, *values = read_scalars([ranks.gradient_norm(()), *scalars])
        if not abs(norm) < float("inf"):
            norm = ranks.careful_norm(())
        return Reading(norm=norm, values=values)

    def clip_factor(self, norm: float) -> float:
        """What the engine will multiply by; ``apply`` is told it together with a correction."""
        self._clip_factor = super().clip_factor(norm)
        return self._clip_factor

    def apply(self, factor: float) -> None:
        """Have the engine clip and step.

        Args:
            factor: the correction of a provisional denominator times :meth:`clip_factor`. The correction
                is applied to the gradient here; the engine finds the same clip by itself.

        Raises:
            UpdateError: the engine skipped what every rank had found finite.
        """
        correction = factor / self._clip_factor
        if correction != 1.0:
            self._stepper.correct(correction)
        if not self._stepper.step():
            raise UpdateError(
                "the engine skipped its step because it found an overflow in a gradient that the window "
                "had found finite; parameters are as before, and the engine's loss scale has backed off"
            )

    def skip(self, *, gradient_overflowed: bool) -> None:
        """Drop the gradient. Where a loss scale made it overflow, the engine sees it and backs off itself.

        Raises:
            UpdateError: the engine stepped on a gradient that is not finite.
        """
        if not gradient_overflowed or self.loss_scale() is None:
            self._stepper.drop()
        elif self._stepper.step():
            raise UpdateError("the engine stepped although the gradient is not finite")

    def forget_unscaling(self) -> None:
        """Nothing was unscaled."""

    def learning_rates(self) -> list[float]:
        return [float(group["lr"]) for group in self._stepper.param_groups()]
