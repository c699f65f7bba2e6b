"""The gradients of the watched parameters: what each backward delivers, what ``.grad`` holds, who wrote it.

What a backward delivers is seen by hooks before the node of the graph that adds it to ``.grad``: below
every wrapper's reduction, and never called for ``autograd.grad``. The hooks are there for one backward at
a time, so that nothing of a wrapped model is held between them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wholebatch.audit.trace import Sketches
from wholebatch.audit.watch.engines import Piece, accumulation_node
from wholebatch.audit.watch.sketch import Sketcher

# Elements of each low-precision gradient whose sum is followed in float64.
_SAMPLED_ELEMENTS = 64
_LOW_PRECISION = (torch.bfloat16, torch.float16)
# The part of what a leaf received that is one watched parameter's.
Cut = Callable[[Tensor, Tensor], Tensor]
Receiver = tuple[Tensor, Tensor, Cut]


@dataclass(kw_only=True, slots=True)
class PendingSketches:
    """Sketches still on their device, by index of the parameter."""

    values: dict[int, Tensor] = field(default_factory=dict)
    scale: Tensor | None = None

    def add(self, index: int, sketch: Tensor) -> None:
        """Add to what is there: a parameter may get its gradient in several parts."""
        before = self.values.get(index)
        self.values[index] = sketch if before is None else before + sketch

    def over(self, scale: Tensor) -> PendingSketches:
        """The same divided by a number on the device."""
        return PendingSketches(values=self.values, scale=scale)

    def settle(self) -> Sketches:
        """The numbers on the host: one transfer for each device and dtype."""
        groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for index, value in self.values.items():
            groups.setdefault((value.device, value.dtype), []).append(index)
        divisor = 1.0 if self.scale is None else float(self.scale)
        settled: dict[int, Any] = {}
        for indices in groups.values():
            stacked = torch.stack([self.values[index] for index in indices]).double().cpu().numpy()
            for index, row in zip(indices, stacked, strict=True):
                settled[index] = np.asarray(row / divisor, dtype=np.float64)
        return dict(sorted(settled.items()))


class Gradients:
    """The watched parameters, numbered in the order in which they were first seen."""

    def __init__(self) -> None:
        self.parameters: list[Tensor] = []
        self.names: dict[int, str] = {}
        self.sharded: set[int] = set()
        # parts of the gradient that this rank holds, for parameters whose whole one it does not
        self.pieces: Callable[[Tensor], Sequence[Piece] | None] = lambda _: None
        # (watched parameter, leaf that autograd adds its gradient to), where they are not the same
        # and how what it gets becomes the parameter's own
        self.receivers: Callable[[], Iterable[Receiver]] = tuple
        self.delivered = PendingSketches()
        # what could not be sketched, and why
        self.failures: list[str] = []
        self._index: dict[int, int] = {}
        self._sketcher = Sketcher()
        self._seen: list[tuple[int, int]] = []
        self._handles: list[Any] = []
        # held while a backward runs: re-entrant checkpointing makes the rest of the graph only then
        self._nodes: list[Any] = []
        self._low_precision: dict[int, Tensor] = {}

    def watch(self, parameter: Tensor) -> int:
        """Number a parameter; the same number for the same parameter."""
        index = self._index.get(id(parameter))
        if index is None:
            index = self._index[id(parameter)] = len(self.parameters)
            self.parameters.append(parameter)
            self._seen.append(_state(parameter.grad))
        return index

    def index_of(self, parameter: Tensor) -> int | None:
        """The number of a parameter, None where it is not watched."""
        return self._index.get(id(parameter))

    def listen(self) -> None:
        """Hook the nodes that will add to ``.grad`` in the backward that is about to run."""
        self.delivered = PendingSketches()
        elsewhere = {id(parameter): (leaf, cut) for parameter, leaf, cut in self.receivers()}
        for index, parameter in enumerate(self.parameters):
            leaf, cut = elsewhere.get(id(parameter), (parameter, None))
            if leaf.requires_grad and leaf.is_leaf:
                with contextlib.suppress(RuntimeError):
                    hook = self._receiver(index, cut)
                    self._nodes.append(accumulation_node(leaf))
                    self._handles.append(self._nodes[-1].register_prehook(hook))

    def unlisten(self) -> PendingSketches:
        """Remove the hooks and return what was delivered."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._nodes.clear()
        return self.delivered

    def read(self, indices: Iterable[int] | None = None) -> PendingSketches:
        """Sketch what ``.grad`` holds now; parameters without a gradient are left out."""
        found = PendingSketches()
        for index in range(len(self.parameters)) if indices is None else indices:
            parameter = self.parameters[index]
            pieces = self.pieces(parameter)
            if pieces is not None:
                self.sharded.add(index)
                for piece in pieces:
                    if piece.copy == 0:
                        found.add(index, self._piece(piece))
            elif parameter.grad is not None:
                found.add(index, self._sketcher.whole(parameter.grad))
        return found

    def norm(self, indices: Iterable[int]) -> Tensor | None:
        """The norm of what ``.grad`` holds, on the device; None where it can't be taken here."""
        chosen = [self.parameters[index] for index in indices]
        if any(self.pieces(parameter) is not None for parameter in chosen):
            return None
        held = [parameter.grad.detach() for parameter in chosen if parameter.grad is not None]
        dense = [gradient for gradient in held if gradient.layout == torch.strided]
        if not dense or len(dense) != len(held) or len({gradient.device for gradient in dense}) > 1:
            return None
        norms: list[Tensor] = [one.double() for one in torch._foreach_norm(dense)]
        total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
        return total

    def remember(self) -> None:
        """Take what ``.grad`` holds now as known."""
        self._seen = [_state(parameter.grad) for parameter in self.parameters]

    def changed(self) -> tuple[list[int], list[int]]:
        """Parameters whose gradient is gone since it was remembered, and those where it is another."""
        gone: list[int] = []
        others: list[int] = []
        for index, parameter in enumerate(self.parameters):
            before, now = self._seen[index], _state(parameter.grad)
            if before == now or not before[0]:
                continue
            (others if now[0] else gone).append(index)
        return gone, others

    def present(self, indices: Iterable[int]) -> list[int]:
        """Those that have a gradient."""
        return [index for index in indices if self.parameters[index].grad is not None]

    def forget_low_precision(self) -> None:
        """Begin the sums of sampled elements anew: gradients were cleared."""
        self._low_precision.clear()

    def low_precision_error(self) -> Tensor | None:
        """Relative distance of ``.grad`` on sampled elements from a float64 sum of what was delivered."""
        squares, differences = [], []
        for index, total in self._low_precision.items():
            held = self.parameters[index].grad
            if held is None or held.dtype not in _LOW_PRECISION or held.numel() == 0:
                continue
            squares.append(total.square().sum())
            differences.append((_sample(held) - total).square().sum())
        if not squares:
            return None
        return (torch.stack(differences).sum() / torch.stack(squares).sum()).sqrt()

    def _receiver(self, index: int, cut: Cut | None) -> Callable[[tuple[Tensor | None, ...]], None]:
        def receive(gradients: tuple[Tensor | None, ...]) -> None:
            gradient = gradients[0]
            if gradient is None or gradient.numel() == 0:
                return
            try:
                with torch.no_grad():
                    self._take(index, gradient if cut is None else cut(self.parameters[index], gradient))
            except Exception as error:  # this runs inside the loop's own backward
                self.failures.append(f"a delivered gradient: {type(error).__name__}: {error}")

        return receive

    def _take(self, index: int, gradient: Tensor) -> None:
        self.delivered.add(index, self._sketcher.whole(gradient))
        if gradient.dtype in _LOW_PRECISION and gradient.layout == torch.strided:
            sample = _sample(gradient)
            before = self._low_precision.get(index)
            self._low_precision[index] = sample if before is None else before + sample

    def _piece(self, piece: Piece) -> Tensor:
        if piece.offsets is not None:
            return self._sketcher.box(piece.tensor, piece.shape, piece.offsets)
        return self._sketcher.range_of(piece.tensor, piece.shape, piece.start or 0)


def all_zero(sketches: Sketches) -> bool:
    """Whether every sketch is zero, as those of gradients that were zeroed in place are."""
    return all(not values.any() for values in sketches.values())


def _state(gradient: Tensor | None) -> tuple[int, int]:
    """What tells a gradient from another and from itself after a write: (0, 0) without one."""
    return (0, 0) if gradient is None else (id(gradient) or 1, gradient._version)


def _sample(gradient: Tensor) -> Tensor:
    flat = gradient.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // _SAMPLED_ELEMENTS)][:_SAMPLED_ELEMENTS].double()
