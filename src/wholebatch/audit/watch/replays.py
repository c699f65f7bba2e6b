"""When a window is captured for a replay: the one after the first whose losses could not be read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from wholebatch.audit.replay.capture import WindowCapture
from wholebatch.audit.replay.replaying import replay
from wholebatch.audit.trace import Replayed
from wholebatch.audit.watch.seen import OptimizerSeen, quietly
from wholebatch.audit.watch.watcher import Watch


class Replays:
    """At most one replay of one window of the first optimizer that steps.

    Args:
        watch: that it belongs to.
        wanted: whether any replay may be tried.
    """

    def __init__(self, watch: Watch, wanted: bool) -> None:
        self.watch = watch
        self._wanted = wanted
        self._functions = _Functions(self)
        # calls of modules that are running, told by whoever follows them
        self.inside = 0
        self._unread = False
        self._capture: WindowCapture | None = None
        self._read: dict[str, Tensor] = {}
        self._loss_scale = 1.0

    def unread(self) -> None:
        """The weights of a backward of this window could not be read."""
        self._unread = True

    @quietly
    def forward_begins(self, module: nn.Module, given: Any) -> None:
        """An outermost module is about to be called with gradients enabled."""
        if self._capture is not None:
            self._capture.forward_begins(module, given)

    @quietly
    def forward_called(self, module: nn.Module, given: Any, named: Mapping[str, Any], output: Any) -> None:
        """It was called."""
        if self._capture is not None:
            self._capture.forward_called(module, given, named, output)

    @quietly
    def backward_called(
        self, roots: Sequence[Tensor], gradient: Tensor | None, loss_scale: Tensor | None
    ) -> None:
        """A backward is about to run."""
        self._read.clear()
        if self._capture is not None and len(roots) > 1:
            self._capture.release()
            self._capture.unable = f"backward was called on {len(roots)} tensors at once"
        elif self._capture is not None:
            self._loss_scale = 1.0 if loss_scale is None else float(loss_scale)
            self._capture.backward_called(roots[0], gradient, self._loss_scale)

    @quietly
    def gradients_read(self) -> None:
        """Gradients are about to be clipped, unscaled or read: the first look of a window counts."""
        if self._capture is None or self._read:
            return
        for name, parameter in self._named().items():
            if parameter.grad is not None:
                self._read[name] = parameter.grad.detach().clone() / self._loss_scale

    @quietly
    def update_ended(self, seen: OptimizerSeen) -> None:
        """Replay the window that was captured, or begin to capture the next."""
        watch = self.watch
        if not self._wanted or watch.replayed is not None or seen is not watch.optimizers[0]:
            return
        if self._capture is None:
            if self._unread:
                self._capture = WindowCapture()
                self._capture.begin(list(watch.models), self._named())
                self._functions.follow()
            return
        self._functions.leave()
        capture, self._capture = self._capture, None
        try:
            with watch.paused(), torch.enable_grad():
                watch.replayed = replay(capture, self._read, seen.updates, num_ranks=watch.num_ranks)
        except Exception as error:
            watch.replayed = Replayed(update=seen.updates, unable=f"{type(error).__name__}: {error}")
        finally:
            capture.release()
            self._read.clear()

    def release(self) -> None:
        """Hold nothing any longer."""
        self._functions.leave()
        if self._capture is not None:
            self._capture.release()
        self._capture = None
        self._read.clear()

    def stand_in(self, function: type[torch.autograd.Function]) -> nn.Module | None:
        """What a function that is applied outside any module is captured as; None where it is not."""
        wanted = (
            self._capture is not None and not self.inside and self.watch.here and torch.is_grad_enabled()
        )
        return self._capture.stand_in(function) if wanted and self._capture is not None else None

    def _named(self) -> dict[str, nn.Parameter]:
        gradients = self.watch.gradients
        return {
            gradients.names.get(index, f"parameter {index}"): parameter
            for index in self.watch.optimizers[0].parameters
            if isinstance(parameter := gradients.parameters[index], nn.Parameter)
        }


class _Functions:
    """Follows ``Function.apply`` while a window is captured: fused losses that no module calls.

    Args:
        replays: that are told.
    """

    def __init__(self, replays: Replays) -> None:
        self._replays = replays
        self._original: Any = None

    def follow(self) -> None:
        """Begin."""
        original = self._original = vars(torch.autograd.Function)["apply"]
        replays = self._replays

        def apply(function: Any, *given: Any, **named: Any) -> Any:
            call = original.__get__(None, function)
            stand_in = None if torch.compiler.is_compiling() else replays.stand_in(function)
            if stand_in is None:
                return call(*given, **named)
            replays.forward_begins(stand_in, given)
            output = call(*given, **named)
            replays.forward_called(stand_in, given, named, output)
            return output

        setattr(torch.autograd.Function, "apply", classmethod(apply))  # noqa: B010 - a method, for mypy

    def leave(self) -> None:
        """Put it back."""
        if self._original is not None:
            setattr(torch.autograd.Function, "apply", self._original)  # noqa: B010
        self._original = None
