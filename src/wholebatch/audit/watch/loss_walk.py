"""The walk from a loss down to what it reduces, and where the weights of its units can be read.

From the root through arithmetic of single numbers to the operations that reduce a tensor (``scalar``); from
there through whatever is linear to the finest tensor that is only added up afterwards (``vector``). Its
elements are the items: the gradient that reaches it is what each of them weighs.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from wholebatch.audit.watch import graph_nodes as graph
from wholebatch.audit.watch import loss_traits, unit_weights
from wholebatch.audit.watch.graph_nodes import Edge, UnreadableError, base_name, numel_at, shape_at
from wholebatch.audit.watch.loss_plan import Frame, Plan, Probe, Written
from wholebatch.audit.watch.reduced_losses import (
    plan_loss,
    read_factored,
    read_ignored_of_summand,
    read_labels,
    reading_of_loss,
)

_LINEAR = (
    graph.VIEWS
    | graph.SELECTIONS
    | graph.MASKINGS
    | graph.JOINS
    | {"Add", "Sub", "Rsub", "Mul", "Div", "Index"}
)


@dataclass(slots=True)
class LossWalk:
    """Plans of all terms below a root, why parts of it have none, and which of these may hold a loss."""

    plans: list[Plan] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    hidden: list[str] = field(default_factory=list)
    seen: set[Any] = field(default_factory=set)

    def scalar(self, root: Edge) -> None:
        """Walk from the root through arithmetic of single numbers, depth first, first operands first."""
        stack: list[tuple[Edge, tuple[Written, ...]]] = [(root, ())]
        while stack:
            edge, written = stack.pop()
            if edge in self.seen or graph.is_leaf(edge[0]):
                continue
            self.seen.add(edge)
            planned = len(self.plans)
            try:
                below = self._scalar_node(edge)
                further = (*written, *_written(edge[0], base_name(edge[0])))
                if loss_traits.is_quotient(edge[0]):
                    further = (*further, (True, None))
                stack += [(child, further) for child in reversed(below)]
                for plan in self.plans[planned:]:
                    plan.written = tuple(one for one in written if one[1] is not None)
                    plan.quotient = len(plan.written) < len(written)
            except UnreadableError as error:
                self.problems.append(str(error))
                if graph.is_custom(edge[0]) or "Compiled" in edge[0].name():
                    self.hidden.append(str(error))

    def _scalar_node(self, edge: Edge) -> list[Edge]:
        """Plan the term that begins at a node, or say where to go on."""
        node = edge[0]
        name = base_name(node)
        if name in graph.LOSSES:
            self.plans.append(plan_loss(edge))
            return []
        if graph.is_custom(node):
            return [self._through_custom(edge)]
        below = graph.edges_below(node)
        if name in graph.REDUCERS or (name in _LINEAR and any(numel_at(child) > 1 for child in below)):
            if all(shape_at(child) == () for child in below) and name not in graph.JOINS:
                return below
            self._plan_reduction(edge, name)
            return []
        if name == "Div" and len(below) == 2:
            return below[:1]
        if name in _LINEAR:
            return below
        self._plan_single(edge, name)
        return []

    def _through_custom(self, edge: Edge) -> Edge:
        """Below a custom function of single numbers, or one that hands on all its inputs."""
        node = edge[0]
        below = list(node.next_functions)
        if len(below) == len(node._input_metadata) and below[edge[1]][0] is not None:
            same = below[edge[1]]
            if shape_at(same) == shape_at(edge):
                return same[0], same[1]
        raise UnreadableError(f"the loss is made by {node.name()}, which reduces out of sight")

    def _plan_reduction(self, edge: Edge, name: str) -> None:
        """A term that begins at a mean or a sum."""
        if loss_traits.is_penalty(edge):
            return
        operation = name if name in graph.REDUCERS and name != "Dot" else "Sum"
        plan = Plan(operation=operation, root=edge)
        frame = Frame(edge=edge, mark=edge, innermost=operation)
        if name == "Dot":
            self._vector_product(plan, frame)
        elif name in graph.REDUCERS or name in graph.SELECTIONS | graph.VIEWS:
            self._vector(plan, frame.down())
        else:
            self._vector(plan, frame)
        self.plans.append(plan)

    def _plan_single(self, edge: Edge, name: str) -> None:
        """A term of one item: a loss that was one number before anything was reduced."""
        if loss_traits.is_penalty(edge):
            return
        below = graph.edges_below(edge[0])
        compiled = "Compiled" in edge[0].name()
        if compiled or (name in graph.WHOLE and any(numel_at(child) > 1 for child in below)):
            raise UnreadableError(f"the loss is made by {edge[0].name()}, which reduces out of sight")
        if loss_traits.reduces_below(edge):
            raise UnreadableError(
                f"the loss is {edge[0].name()} of a reduction, which is not linear in its items"
            )
        plan = Plan(operation=name, root=edge)
        _read_items(plan, Frame(edge=edge, mark=edge, innermost="Sum"))
        self.plans.append(plan)

    def _vector(self, plan: Plan, frame: Frame) -> None:
        """Walk down from a reduction through what is linear."""
        while True:
            node = frame.edge[0]
            name = base_name(node)
            below = graph.edges_below(node)
            if name in graph.LOSSES:
                reading_of_loss(plan, frame)
                return
            if name in graph.JOINS:
                self._join(plan, frame)
                return
            step = self._one_down(plan, frame, name, below)
            if step is None:
                _read_items(plan, frame)
                return
            frame = step

    def _one_down(self, plan: Plan, frame: Frame, name: str, below: list[Edge]) -> Frame | None:
        """The tensor below where the way there is linear; None where the finest is reached."""
        if len(below) != 1 or graph.is_custom(frame.edge[0]):
            return None
        child = below[0]
        if name in graph.REDUCERS and name != "Dot":
            if numel_at(child) == numel_at(frame.edge):
                return frame.down()
            plan.groups.setdefault(frame.depth, []).append(frame.probe_mark(unit_weights.elements))
            return replace(frame.reduced(name), above=frame.edge)
        if name in graph.VIEWS or name in ("Add", "Sub", "Rsub"):
            return frame.along() if numel_at(child) == numel_at(frame.edge) else frame.down()
        if name in graph.SELECTIONS:
            return frame.down() if frame.factor is None else None
        if name in graph.MASKINGS:
            return _masked(frame, name)
        if name == "Index":
            return frame.down() if frame.factor is None and _selects_entries(frame.edge[0]) else None
        if name in ("Mul", "Div"):
            return _multiplied(plan, frame, name)
        return None

    def _vector_product(self, plan: Plan, frame: Frame) -> None:
        """A dot product: a sum of products with a tensor without gradient."""
        node = frame.edge[0]
        constant = graph.saved(node, "tensor") if node.next_functions[0][0] is not None else None
        if constant is None:
            constant = graph.saved(node, "self")
        below = graph.edges_below(node)
        if len(below) != 1 or constant is None:
            _read_items(plan, frame)
            return
        kind = kind_of_factor(constant)
        if kind == "signed" and loss_traits.is_surrogate(node, constant):
            plan.surrogate = True
        if kind in ("weights", "signed"):
            plan.coefficients = "factors"
        self._vector(plan, frame.down())

    def _join(self, plan: Plan, frame: Frame) -> None:
        """Each tensor that was stacked or concatenated; single numbers are groups of their own."""
        inputs = list(enumerate(frame.edge[0].next_functions))
        parts = [(i, child) for i, child in inputs if child[0] is not None and not graph.is_leaf(child[0])]
        entries = [shape_at(child) == () and base_name(child[0]) not in graph.JOINS for _, child in parts]
        if frame.factor is not None and not all(entries):
            _read_items(plan, frame)
            return
        groups = plan.groups.setdefault(frame.depth, []) if any(entries) else []
        if frame.factor is not None:
            groups.append(frame.probe_mark(unit_weights.elements))
        for (position, _), entry in zip(parts, entries, strict=True):
            if not entry:
                self._vector(plan, frame.down(position))
                continue
            if frame.factor is None:
                groups.append(frame.down(position).probe_mark(unit_weights.elements))
            self._vector(plan, frame.reduced(frame.innermost, position))


def _written(node: Any, name: str) -> list[Written]:
    """The number that a node of single numbers multiplies or divides by."""
    if name not in ("Mul", "Div") or (name == "Div" and node.next_functions[0][0] is None):
        return []
    number = graph.constant_side(node)
    return [] if number is None else [(name == "Div", number)]


def _masked(frame: Frame, name: str) -> Frame:
    """Below ``where`` and ``masked_fill``: what is filled in has no gradient, so no weight."""
    node = frame.edge[0]
    if frame.factor is None:
        return frame.down()
    if name == "MaskedFill":
        mask = ~graph.saved(node, "mask")
    else:
        condition = graph.saved(node, "condition")
        mask = condition if node.next_functions[0][0] is not None else ~condition
    return replace(frame.down(), keep=(*frame.keep, mask))


def _selects_entries(node: Any) -> bool:
    """Whether an index is a mask or picks along one dimension, so that what it picks from are losses
    too."""
    indices = [one for one in graph.saved(node, "indices") if one is not None]
    return len(indices) == 1


def _multiplied(plan: Plan, frame: Frame, name: str) -> Frame | None:
    """Below a product or quotient: numbers and masks pass, other factors are taken out of the weights."""
    node = frame.edge[0]
    if name == "Div" and node.next_functions[0][0] is None:
        return None
    constant = graph.constant_side(node)
    factor = graph.as_tensor(constant)
    if factor is None:
        return frame.along((constant, name == "Div"))
    scores = _scores_below(frame.edge)
    if (
        name == "Mul"
        and frame.factor is None
        and frame.innermost == "Sum"
        and _over_classes(frame.edge, scores)
    ):
        return None
    kind = kind_of_factor(factor)
    if kind == "mask" or (kind == "scaled mask" and name == "Mul" and frame.innermost == "Sum"):
        return frame.down() if frame.factor is None else replace(frame.down(), keep=(*frame.keep, factor))
    if frame.factor is not None:
        return None
    if kind == "signed":
        whole = name == "Mul" and frame.depth == 0  # summed in pieces first it is a similarity of rows
        plan.surrogate = plan.surrogate or (whole and loss_traits.is_surrogate(node, factor))
        plan.coefficients = "factors"
        return replace(frame, factor=torch.ones((), dtype=torch.bool, device=factor.device)).down()
    return replace(frame, factor=1 / factor if name == "Div" else factor).down()


def kind_of_factor(factor: Tensor) -> str:
    """What multiplying by a tensor does.

    ``"mask"`` where it holds nothing but zeros and ones, ``"scaled mask"`` where all that is not zero is
    one number, ``"weights"`` where nothing is negative, else ``"signed"``.
    """
    if factor.dtype == torch.bool:
        return "mask"
    with torch.no_grad():
        wide = factor.detach().float()
        some = wide != 0
        ends = [torch.where(some, wide, torch.inf).min(), torch.where(some, wide, -torch.inf).max()]
        lowest, highest = torch.stack(ends).tolist()
    if lowest > highest or lowest == highest == 1:
        return "mask"
    if lowest == highest and factor.numel() > 1:
        return "scaled mask"
    return "weights" if lowest > 0 else "signed"


def _over_classes(edge: Edge, scores: Edge) -> bool:
    """Whether a product is of log-probabilities with something, each in its place."""
    return base_name(scores[0]) == "LogSoftmax" and shape_at(scores) == shape_at(edge)


def _read_items(plan: Plan, frame: Frame) -> None:
    """The finest tensor: read its elements, or the rows of a sum over classes."""
    node = frame.edge[0]
    plan.leaf_depths.append(frame.depth)
    plan.leaf_names.append(base_name(node))
    plan.square = plan.square or loss_traits.is_square(frame.edge)
    if frame.factor is not None:
        read_factored(plan, frame)
        return
    scores = _scores_below(frame.edge)
    if base_name(scores[0]) == "LogSoftmax":
        plan.scores, dim = scores[0], _dim_of(scores)
        plan.num_classes = shape_at(scores)[dim]
        if graph.through_views(frame.edge)[0] == scores[0]:
            _read_smoothing(plan, frame, dim, scores)
            return
        if (
            frame.innermost == "Sum"
            and base_name(frame.edge[0]) == "Mul"
            and _over_classes(frame.edge, scores)
        ):
            _read_class_rows(plan, frame, dim, scores)
            return
    if read_ignored_of_summand(plan, frame) or read_labels(plan, frame):
        return
    plan.items.append(frame.probe_mark(unit_weights.elements))
    _read_rows(plan, frame)


def _scores_below(edge: Edge) -> Edge:
    """The log-probabilities that a gather or a product with targets took from; else the edge itself."""
    if base_name(edge[0]) in ("Gather", "Mul", "Index") and len(graph.edges_below(edge[0])) == 1:
        edge = graph.edges_below(edge[0])[0]
    edge = graph.through_views(edge)
    while base_name(edge[0]) in ("Add", "Sub", "Rsub") and len(graph.edges_below(edge[0])) == 1:
        edge = graph.through_views(graph.edges_below(edge[0])[0])
    return edge


def _dim_of(scores: Edge) -> int:
    """The dimension of the classes."""
    dim = int(graph.saved(scores[0], "dim"))
    dim = dim - (1 << 64) if dim >= 1 << 63 else dim
    return dim % max(len(shape_at(scores)), 1)


def _read_smoothing(plan: Plan, frame: Frame, dim: int, scores: Edge) -> None:
    """All classes added up alike: read above, as the targets' own gradient comes to the same tensor."""
    plan.smooths = True
    mean = frame.innermost == "Mean"
    plan.num_classes = 1 if mean else shape_at(scores)[dim]
    if frame.above is not None:
        plan.items.append(Probe(frame.above, unit_weights.elements))
    else:
        rows = numel_at(scores) // shape_at(scores)[dim]
        plan.items.append(Probe(plan.root, unit_weights.shared(rows, mean=mean), by_element=False))


def _read_class_rows(plan: Plan, frame: Frame, dim: int, scores: Edge) -> None:
    """Items are the distributions over classes that were summed."""
    targets = graph.as_tensor(graph.constant_side(frame.edge[0]))
    measure = unit_weights.class_rows(dim, targets)
    plan.items.append(frame.probe(measure, by_element=False))
    plan.smooths = targets is not None and targets.numel() == shape_at(scores)[dim]
    leading = shape_at(scores)[1:dim] + shape_at(scores)[dim + 1 :] if dim else ()
    if leading and frame.depth == 0:
        measure = _rows_of_classes(dim, targets)
        plan.rows.append(frame.probe(measure, per_unit_shape=leading))


def _rows_of_classes(dim: int, targets: Tensor | None) -> unit_weights.Measure:
    """Entries of the first dimension, where each holds several distributions."""
    whole = unit_weights.class_rows(dim, targets)

    def measure(gradient: Tensor) -> Tensor:
        number, total, lowest, highest = whole(gradient)
        rows = gradient.shape[0]
        per_row = number / rows
        return torch.stack([per_row * 0 + rows, total, lowest * per_row, highest * per_row])

    return measure


def _read_rows(plan: Plan, frame: Frame) -> None:
    """The implicit reading of a dense tensor that was reduced in one go."""
    shape = shape_at(frame.mark)
    if len(shape) > 1 and numel_at(frame.mark) > shape[0]:
        plan.rows.append(frame.probe_mark(unit_weights.rows, per_unit_shape=shape[1:]))
