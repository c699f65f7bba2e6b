"""What the finish needs of an engine that scales, clips and steps by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor, nn


class Stepper(Protocol):
    """An engine's own way from a reduced gradient to updated parameters."""

    def parameters(self) -> list[nn.Parameter]:
        """The model's own trainable parameters; the engine's optimizer may hold others, made of them."""

    def param_groups(self) -> list[dict[str, Any]]:
        """The groups with the learning rates."""

    def check_optimizers(self, optimizers: Sequence[Any]) -> Any:
        """The torch optimizer that the engine steps; refuses any other than the engine's."""

    def check_clip(self, clip_grad_norm: float | None) -> None:
        """Refuse a largest norm that is not the one that the engine clips by."""

    def check_schedules(self, schedules: Sequence[Any]) -> None:
        """Refuse schedules beside one that the engine moves itself."""

    def loss_scale(self) -> float | None:
        """The loss scale of the next backward; None where there is none. Does not read the device."""

    def scaled(self, seed: Tensor) -> Tensor:
        """``seed`` times the loss scale, where the engine's backward does not multiply by it."""

    def correct(self, factor: float) -> None:
        """Multiply the reduced gradient in place."""

    def step(self) -> bool:
        """Clip and step once; False where the engine skipped because of an overflow."""

    def drop(self) -> None:
        """Forget the gradient without a step."""
