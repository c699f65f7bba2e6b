"""What the watch keeps of an optimizer and of a backward while their numbers are still on their device."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from wholebatch.audit.trace import Backward, Event, Place
from wholebatch.audit.watch.gradients import PendingSketches
from wholebatch.audit.watch.terms import TermReader

# An event, or what makes one (or None) once its numbers may be moved to the host.
Recorded = Event | Callable[[], Event | None]


# Nodes of a graph that are followed, from the root along first inputs.
_MARKED_NODES = 4


@dataclass(kw_only=True, slots=True, weakref_slot=True, eq=False)
class OptimizerSeen:
    """One optimizer under watch: its parameters by index, and the updates that it has attempted."""

    optimizer: weakref.ref[torch.optim.Optimizer]
    name: str
    parameters: tuple[int, ...]
    updates: int = 0

    def shares_with(self, other: OptimizerSeen) -> bool:
        """Whether another optimizer steps some of its parameters too, as one inside it does."""
        return self is not other and bool(set(self.parameters) & set(other.parameters))


@dataclass(kw_only=True, slots=True, weakref_slot=True, eq=False)
class BackwardSeen:
    """One backward; the fields are those of ``Backward``, on the device."""

    site: tuple[Place, ...]
    loss: Tensor | None
    reader: TermReader
    loss_scale: Tensor | None
    learning_rates: tuple[float | Tensor, ...]
    num_forwards: int
    in_step: bool
    holds_reduction: bool | None
    outputs: tuple[weakref.ref[Tensor], ...]
    num_collectives: int = 0
    delivered: PendingSketches = field(default_factory=PendingSketches)
    error: Tensor | None = None
    graph: tuple[weakref.ref[Any], ...] = ()
    graph_alive: bool = False
    outputs_alive: bool = False

    def follow(self, root: Tensor) -> None:
        """Hang something on the end of the graph that is gone when it is.

        On more than the root: what is kept may be the loss before it was divided for backward.
        """
        node: Any = root.grad_fn
        marks = []
        for _ in range(_MARKED_NODES):
            if node is None or node.name().endswith("AccumulateGrad"):
                break
            mark = _Mark()
            node.metadata[f"wholebatch {id(mark)}"] = mark
            marks.append(weakref.ref(mark))
            node = node.next_functions[0][0] if node.next_functions else None
        self.graph = tuple(marks)

    def look_back(self) -> None:
        """Note what of it is still referred to, when its window's step begins."""
        self.graph_alive = any(mark() is not None for mark in self.graph)
        self.outputs_alive = any(output() is not None for output in self.outputs)

    def settle(self) -> Backward:
        """What was recorded, with its numbers on the host."""
        return Backward(
            site=self.site,
            loss=None if self.loss is None else float(self.loss),
            terms=self.reader.terms(),
            unread=self.reader.unread,
            delivered=self.delivered.settle(),
            num_collectives=self.num_collectives,
            holds_reduction=self.holds_reduction,
            loss_scale=1.0 if self.loss_scale is None else float(self.loss_scale),
            graph_alive=self.graph_alive,
            outputs_alive=self.outputs_alive,
            learning_rates=tuple(float(rate) for rate in self.learning_rates),
            num_forwards=self.num_forwards,
            in_step=self.in_step,
            low_precision_error=None if self.error is None else float(self.error),
        )


class _Mark:
    """Hung on a node of a graph."""


def quietly(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of the watch that never fails the loop: what goes wrong is noted as unseen."""

    @functools.wraps(method)
    def guarded(self: Any, *given: Any, **named: Any) -> Any:
        watch = getattr(self, "watch", self)
        if not watch.here:
            return None
        try:
            return method(self, *given, **named)
        except Exception as error:
            watch.cannot_see(f"{method.__name__}: {type(error).__name__}: {error}")
            return None

    return guarded
