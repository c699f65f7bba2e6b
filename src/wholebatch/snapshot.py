"""What an update must find unchanged, and what it puts back when it does not commit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor, nn

from wholebatch.errors import StaleGradientsError, WindowUsageError
from wholebatch.gradients import clear_gradients, copy_gradients
from wholebatch.replay import BufferKeeper, RandomState

OnStaleGradients = Literal["raise", "clear", "include"]


class Snapshot:
    """The state of a model before the first micro-batch of an update.

    Args:
        model: whose buffers and mode are watched.
        parameters: those that the window's optimizers move.
        on_stale_gradients: what to do with gradients that are there before the first micro-batch.
    """

    def __init__(
        self, model: nn.Module, parameters: Sequence[nn.Parameter], on_stale_gradients: OnStaleGradients
    ) -> None:
        if on_stale_gradients not in ("raise", "clear", "include"):
            raise WindowUsageError(
                f'on_stale_gradients={on_stale_gradients!r} is none of "raise", "clear", "include"'
            )
        self._model = model
        self._parameters = parameters
        self._on_stale = on_stale_gradients
        self._buffers = BufferKeeper(model)
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._random: RandomState | None = None
        self._taken = False
        self._included: list[tuple[nn.Parameter, Tensor | None]] = []
        self._versions: list[int] = []
        self._modes: list[bool] = []

    def take(self) -> None:
        """Remember the state as it is now.

        Raises:
            StaleGradientsError: gradients are there already and the caller wants to hear of it.
        """
        self._taken, self._included = False, []
        stale = [self._name(p) for p in self._parameters if p.grad is not None]
        if stale and self._on_stale == "raise":
            raise StaleGradientsError(
                f"{len(stale)} of {len(self._parameters)} parameters have a gradient before the first "
                f"micro-batch of this update ({_first(stale, 3)}); it would be added to the update. A "
                f"backward outside the window left it: another window whose loss runs through these "
                f"parameters (a generator's through its discriminator), a loop that stepped without "
                f"clearing, or zero_grad(set_to_none=False). Set them to None, or give the window "
                f'on_stale_gradients="clear", or "include" to add them on purpose'
            )
        if stale and self._on_stale == "clear":
            clear_gradients(self._parameters)
        elif stale:
            self._included = copy_gradients(self._parameters)
        self._buffers.keep()
        self._random = RandomState.capture()
        self._versions = [parameter._version for parameter in self._parameters]
        self._modes = [module.training for module in self._model.modules()]
        self._taken = True

    def changed(self) -> str | None:
        """What changed since :meth:`take` although a window must leave it alone, in words."""
        for parameter, version in zip(self._parameters, self._versions, strict=True):
            if parameter._version != version:
                return f"the parameter {self._name(parameter)} was written"
        modes = [module.training for module in self._model.modules()]
        if modes != self._modes:
            return "the model was switched between train() and eval()"
        return None

    def put_back_buffers(self) -> None:
        """Undo what the forwards did to buffers, bit for bit."""
        self._buffers.put_back()

    def rewind(self) -> None:
        """Put buffers and random state back and keep watching, to run the same forwards again."""
        self._buffers.put_back()
        if self._random is not None:
            self._random.restore()

    def put_back(self) -> None:
        """Buffers, random state and gradients as they were at :meth:`take`, if it got that far."""
        if not self._taken:
            return
        self.rewind()
        clear_gradients(self._parameters)
        for parameter, gradient in self._included:
            parameter.grad = gradient

    def _name(self, parameter: nn.Parameter) -> str:
        return self._names.get(id(parameter), f"a parameter of shape {list(parameter.shape)}")


def _first(names: Sequence[str], most: int) -> str:
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")
