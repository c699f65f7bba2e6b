"""What an update must find unchanged, and what it puts back when it does not commit."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Literal

from torch import Tensor, nn

from wholebatch.errors import StaleGradientsError, WindowUsageError
from wholebatch.gradients import LOOKUPS, GradientWatch, RenewedGradientWatch, clear_gradients
from wholebatch.replay import BufferKeeper, RandomState

OnStaleGradients = Literal["raise", "clear", "include"]
# So many updates at the start, and then one of so many, in which every gradient is asked in every turn.
CLOSE_UPDATES = 16
_STATE = attrgetter("_version", "requires_grad")
GRADIENTS_CHANGED = "gradients were written or cleared (zero_grad, clipping, another backward)"


class Snapshot:
    """The state of a model before the first micro-batch of an update.

    Args:
        model: whose parameters, buffers and mode are watched.
        on_stale_gradients: what to do with gradients that are there before the first micro-batch.
        renewed: the engine shows the same gradients in new tensors after each forward.

    Attributes:
        gradients: tells whether somebody else touches them; to be asked in every turn.
    """

    def __init__(
        self, model: nn.Module, on_stale_gradients: OnStaleGradients, *, renewed: bool = False
    ) -> None:
        if on_stale_gradients not in ("raise", "clear", "include"):
            raise WindowUsageError(
                f'on_stale_gradients={on_stale_gradients!r} is none of "raise", "clear", "include"'
            )
        self._model = model
        self._on_stale = on_stale_gradients
        self._watch = RenewedGradientWatch if renewed else GradientWatch
        self._buffers = BufferKeeper(model)
        self._taken = False
        self._updates = 0
        self._parameters: Sequence[nn.Parameter] = ()
        self._set_aside: list[tuple[nn.Parameter, Tensor]] = []
        self._watched: list[nn.Parameter] = []
        self._states: list[tuple[int, bool]] = []
        self._modes: list[tuple[nn.Module, bool]] = []
        self._whole_modes: list[tuple[nn.Module, bool]] = []
        self.gradients: GradientWatch = GradientWatch(())
        self._random: RandomState | None = None

    @property
    def includes_stale(self) -> bool:
        """Whether gradients found at the start belong to the update."""
        return self._on_stale == "include"

    def take(self, parameters: Sequence[nn.Parameter]) -> None:
        """Remember the state as it is now.

        Args:
            parameters: those that the window's optimizers move.

        Raises:
            StaleGradientsError: gradients are there already and the caller wants to hear of it.
        """
        self._parameters = parameters
        stale = [p for p in parameters if p.grad is not None]
        if stale and self._on_stale == "raise":
            names = [self._name(parameter) for parameter in stale[:3]]
            raise StaleGradientsError(
                f"{len(stale)} of {len(parameters)} parameters have a gradient before the first "
                f"micro-batch of this update ({', '.join(names)}{', ...' if len(stale) > 3 else ''}); it "
                f"would be added to the update. A backward outside the window left it: another window "
                f"whose loss runs through these parameters (a generator's through its discriminator), a "
                f"loop that stepped without clearing, or zero_grad(set_to_none=False). Set them to None, "
                f'or give the window on_stale_gradients="clear", or "include" to add them on purpose'
            )
        self._random = RandomState.capture()
        self._set_aside = [(p, p.grad) for p in stale if p.grad is not None]
        clear_gradients(stale)
        modules = _modules(self._model)  # walked once an update
        self._buffers.keep(modules)
        self._modes = [(module, module.training) for module in modules]
        # A model may itself keep a part in eval, in its forward: only the whole is watched.
        inner = self._model._modules.get("module")  # of a wrapper such as DDP
        self._whole_modes = [(one, one.training) for one in (self._model, inner) if one is not None]
        self._watched = _watched(parameters, modules)
        self._states = _states(self._watched)
        closely = self._updates < CLOSE_UPDATES or self._updates % CLOSE_UPDATES == 0
        self.gradients = self._watch(parameters, light=None if closely else self._updates)
        self._updates += 1
        self._taken = True

    def changed(self) -> str | None:
        """What else changed since :meth:`take` although a window must leave it alone, in words.

        Writes through ``.data`` are not seen: torch does not count them.
        """
        states = _states(self._watched)
        if states != self._states:
            for parameter, before, now in zip(self._watched, self._states, states, strict=True):
                if before != now:
                    how = "written" if before[0] != now[0] else "frozen or unfrozen"
                    return f"the parameter {self._name(parameter)} was {how}"
        if any(module.training != training for module, training in self._whole_modes):
            return "the model was switched between train() and eval()"
        return None

    def add_included(self) -> None:
        """Add the gradients that were there at the start, where they belong to the update."""
        if self.includes_stale:
            for parameter, stale in self._set_aside:
                found = stale if parameter.grad is None else parameter.grad + stale
                parameter.grad = found.to(parameter.grad_dtype or found.dtype)  # which may be kept wide

    def rewind(self) -> None:
        """Put buffers and random state back and keep watching, to run the same forwards again."""
        self._buffers.put_back()
        if self._random is not None:
            self._random.restore()

    def put_back_after_skip(self) -> None:
        """Undo what the forwards did to buffers, and keep gradients that still wait to be included."""
        self._buffers.put_back()
        if self.includes_stale:
            self._put_back_gradients()

    def put_back(self) -> None:
        """Buffers, random state, mode and gradients as they were at :meth:`take`, if it got that far."""
        if not self._taken:
            return
        self._put_back_gradients()
        for module, training in self._modes:
            module.training = training
        self.rewind()

    def forget(self) -> None:
        """Let go of everything that was remembered."""
        self._taken = False
        self._parameters, self._set_aside, self._watched = (), [], []
        self._states, self._modes, self._whole_modes, self._random = [], [], [], None
        self.gradients = GradientWatch(())
        self._buffers.forget()

    def _put_back_gradients(self) -> None:
        clear_gradients(self._parameters)
        for parameter, gradient in self._set_aside:
            parameter.grad = gradient

    def _name(self, parameter: nn.Parameter) -> str:
        for name, one in self._model.named_parameters():
            if one is parameter:
                return name
        return f"a parameter of shape {list(parameter.shape)}"


def _states(parameters: Sequence[nn.Parameter]) -> list[tuple[int, bool]]:
    try:
        return list(map(_STATE, parameters))
    except RuntimeError:  # made under inference_mode, where torch counts no writes
        return [(0 if p.is_inference() else p._version, p.requires_grad) for p in parameters]


def _modules(model: nn.Module) -> list[nn.Module]:
    """``model`` and all its submodules, each once; several times faster than ``model.modules()``."""
    found, seen = [model], {id(model)}
    for module in found:  # grows as it is walked
        for child in module._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                found.append(child)
    return found


def _watched(parameters: Sequence[nn.Parameter], modules: Sequence[nn.Module]) -> list[nn.Parameter]:
    """The parameters that a window must not see written: the optimizers' and all others of the model.

    Not the weights that a forward itself shortens to a largest norm; once or twice comes to the same.
    """
    found = {id(parameter): parameter for parameter in parameters}
    shortened: list[int] = []
    for module in modules:
        if not module._parameters:
            continue
        for parameter in module._parameters.values():
            if parameter is not None:
                found.setdefault(id(parameter), parameter)
        if isinstance(module, LOOKUPS) and module.max_norm is not None:
            shortened.append(id(module.weight))
    for weight in shortened:
        found.pop(weight, None)
    return list(found.values())
