"""What is to be read of one loss while its backward runs: plain records that the walk makes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from wholebatch.audit.watch.graph_nodes import Edge, UnreadableError
from wholebatch.audit.watch.unit_weights import Measure, divided


@dataclass(slots=True)
class Probe:
    """One tensor of the graph whose gradient is measured.

    Attributes:
        edge: the node that made it; None once the hooks are gone.
        measure: from its gradient to four numbers.
        numbers: those four; None until backward came by.
        positions: elements of the tensor.
        dtype: of the gradient.
        failure: why it could not be measured.
        per_unit_shape: of one unit.
        by_element: the units are elements of the tensor.
        source: the node above and which of its inputs the tensor is: measured is then what this node alone
            brings, not what comes from all users of the tensor together.
    """

    edge: Edge | None
    measure: Measure | None
    numbers: Tensor | None = None
    positions: int = 0
    dtype: str = "float32"
    failure: str | None = None
    per_unit_shape: tuple[int, ...] = ()
    by_element: bool = True
    source: Edge | None = None

    def attach(self) -> RemovableHandle:
        """Put a hook before the node."""
        assert self.edge is not None
        handle: RemovableHandle
        if self.source is None:
            handle = self.edge[0].register_prehook(self._before)
        else:
            handle = self.source[0].register_hook(self._behind)
        return handle

    def _behind(self, below: Sequence[Tensor | None], above: Sequence[Tensor | None]) -> None:
        """Measure what the source brings."""
        del above
        if self.source is not None:
            self._read(below[self.source[1]])

    def _before(self, gradients: Sequence[Tensor | None]) -> None:
        """Measure what the node gets."""
        if self.edge is not None:
            self._read(gradients[self.edge[1]])

    def _read(self, gradient: Tensor | None) -> None:
        """Measure; whatever goes wrong stays here, and the gradients are left as they are."""
        try:
            if gradient is None or self.measure is None:
                return
            if type(gradient) not in (Tensor, torch.nn.Parameter) or gradient.layout != torch.strided:
                kind = type(gradient).__name__
                raise UnreadableError(f"the loss has gradients of a kind that is not read: {kind}")
            if gradient.is_complex() or torch._C._functorch.is_functorch_wrapped_tensor(gradient):
                raise UnreadableError("the loss has complex or vmapped gradients")
            with torch.no_grad():
                self.numbers = self.measure(gradient.detach())
            self.positions = gradient.numel()
            self.dtype = str(gradient.dtype).removeprefix("torch.")
        except Exception as error:
            self.failure = str(error) or type(error).__name__

    def detach(self) -> None:
        """Let go of the graph and of what was kept to measure with."""
        self.edge = None
        self.source = None
        self.measure = None


# Whether it is a division, and the number: of arithmetic on the whole loss, as the user wrote it.
Written = tuple[bool, Any]


@dataclass(slots=True)
class Plan:
    """One term: where its units are read.

    Attributes:
        operation: of the reduction.
        root: the edge where the term begins.
        items: probes of the finest units.
        groups: by depth, probes of what the user's code reduced first.
        rows: probes of the implicit reading by the first dimension.
        weighted: probes of the reading in which units count by their factors.
        leaf_depths: how many reductions lie above each finest tensor.
        leaf_names: operations of the finest tensors.
        scores: node of the log-softmax right below, and its classes: a smoothing term shares it.
        quotient: it lies in a quotient of two reductions.
        smooths: this is a sum over the classes of ``scores``.
        written: what the term is multiplied and divided by on its way to the root.
    """

    operation: str
    root: Edge | None
    items: list[Probe] = field(default_factory=list)
    groups: dict[int, list[Probe]] = field(default_factory=dict)
    rows: list[Probe] = field(default_factory=list)
    weighted: list[Probe] = field(default_factory=list)
    leaf_depths: list[int] = field(default_factory=list)
    leaf_names: list[str] = field(default_factory=list)
    coefficients: Literal["none", "class_weights", "factors"] = "none"
    square: bool = False
    surrogate: bool = False
    quotient: bool = False
    scores: object | None = None
    num_classes: int = 0
    smooths: bool = False
    smoothing: Plan | None = None
    written: tuple[Written, ...] = ()

    def probes(self) -> list[Probe]:
        """All of them."""
        below = self.smoothing.probes() if self.smoothing is not None else []
        return [
            *self.items,
            *(p for g in self.groups.values() for p in g),
            *self.rows,
            *self.weighted,
            *below,
        ]

    def forget_graph(self) -> None:
        """Keep numbers only."""
        self.root = None
        self.scores = None
        for probe in self.probes():
            probe.detach()


@dataclass(frozen=True, slots=True)
class Frame:
    """Where the walk stands below a reduction.

    Attributes:
        edge: the tensor looked at.
        mark: the tensor that units are read at: the highest with an element for each of them, as those
            below may have other uses.
        innermost: the last reduction passed, ``"Mean"`` or ``"Sum"``.
        depth: reductions above it, besides the outermost.
        factor: that lies between ``mark`` and ``edge``; None while they are the same.
        keep: masks found below the factor.
        constants: numbers between a mean and ``mark``, and whether each divides: part of an item's own
            loss. (Below a sum they are how the sum is divided.)
    """

    edge: Edge
    mark: Edge
    innermost: str
    depth: int = 0
    factor: Tensor | None = None
    keep: tuple[Tensor, ...] = ()
    constants: tuple[tuple[object, bool], ...] = ()
    passed: tuple[tuple[object, bool], ...] = ()
    above: Edge | None = None
    source: Edge | None = None
    mark_source: Edge | None = None

    def down(self, position: int | None = None) -> Frame:
        """One operation further, to the only input with a gradient or to that at a position."""
        edge, source = self._input(position)
        if self.factor is not None:
            return replace(self, edge=edge, source=source)
        own = (*self.constants, *self.passed) if self.innermost == "Mean" else self.constants
        return replace(
            self, edge=edge, source=source, mark=edge, mark_source=source, constants=own, passed=()
        )

    def along(self, *constants: tuple[object, bool]) -> Frame:
        """Past an operation that has an element for each of its input; units are still read above it."""
        edge, source = self._input(None)
        passed = (*self.passed, *constants) if self.factor is None else self.passed
        return replace(self, edge=edge, source=source, passed=passed)

    def reduced(self, name: str, position: int | None = None) -> Frame:
        """Below another reduction."""
        edge, source = self._input(position)
        depth = self.depth + 1
        return Frame(edge=edge, source=source, mark=edge, mark_source=source, innermost=name, depth=depth)

    def _input(self, position: int | None) -> tuple[Edge, Edge]:
        """An input of the operation, and that it is one."""
        inputs = self.edge[0].next_functions
        if position is None:
            position = next(i for i, (node, _) in enumerate(inputs) if node is not None)
        return inputs[position], (self.edge[0], position)

    def probe(self, measure: Measure, **facts: Any) -> Probe:
        """Read the tensor looked at."""
        own = (*self.constants, *self.passed) if self.innermost == "Mean" else self.constants
        return Probe(self.edge, divided(measure, own), source=self.source, **facts)

    def probe_mark(self, measure: Measure, **facts: Any) -> Probe:
        """Read the tensor that units are read at."""
        below_sum = () if self.innermost == "Mean" else self.passed
        inverse = tuple((constant, not divides) for constant, divides in below_sum)
        own = (*self.constants, *inverse)
        return Probe(self.mark, divided(measure, own), source=self.mark_source, **facts)
