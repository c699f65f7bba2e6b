"""Losses that reduce by themselves: how many items they have, and what the reduction does to each."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from wholebatch.audit.watch import graph_nodes as graph
from wholebatch.audit.watch import loss_traits, unit_weights
from wholebatch.audit.watch.graph_nodes import Edge, base_name, shape_at
from wholebatch.audit.watch.loss_plan import Frame, Plan, Probe

_NONE, _MEAN = 0, 1


def plan_loss(edge: Edge) -> Plan:
    """A term that is one such loss."""
    plan = Plan(operation=base_name(edge[0]).removesuffix("2D"), root=edge)
    reading_of_loss(plan, Frame(edge=edge, mark=edge, innermost="Sum"))
    return plan


def reading_of_loss(plan: Plan, frame: Frame) -> None:
    """Add the items of one such loss to a term; of unreduced ones each element's gradient is read."""
    edge = frame.edge
    node = edge[0]
    plan.leaf_depths.append(frame.depth)
    plan.leaf_names.append(base_name(node))
    reduction = int(graph.saved(node, "reduction"))
    plan.square = plan.square or loss_traits.is_square(edge)
    if base_name(node) in ("NllLoss", "NllLoss2D"):
        _read_targets(plan, frame, reduction)
    elif reduction == _NONE:
        _read_elements(plan, frame)
    else:
        _read_reduced(plan, edge, mean=reduction == _MEAN)


def _read_elements(plan: Plan, frame: Frame) -> None:
    """Unreduced losses that were reduced afterwards."""
    if isinstance(graph.saved(frame.edge[0], "weight"), Tensor):
        plan.coefficients = "factors"
    if frame.factor is not None:
        read_factored(plan, frame)
        return
    plan.items.append(frame.probe_mark(unit_weights.elements))
    shape = shape_at(frame.mark)
    if len(shape) > 1 and math.prod(shape) > shape[0]:
        plan.rows.append(frame.probe_mark(unit_weights.rows, per_unit_shape=shape[1:]))


def _read_reduced(plan: Plan, edge: Edge, *, mean: bool) -> None:
    """A mean or sum over all elements of the input (or over its rows)."""
    node = edge[0]
    shape = _input_shape(node)
    if base_name(node) in graph.ROW_LOSSES:
        shape = shape[:-1]
    items = math.prod(shape)
    plan.items.append(Probe(edge, unit_weights.shared(items, mean=mean), by_element=False))
    if isinstance(graph.saved(node, "weight"), Tensor):
        plan.coefficients = "factors"
    if len(shape) > 1 and items > shape[0]:
        plan.rows.append(Probe(edge, _shared_rows(items, shape[0], mean=mean), per_unit_shape=shape[1:]))


def _shared_rows(items: int, rows: int, *, mean: bool) -> unit_weights.Measure:
    """Rows of equal size: each weighs as much as its elements together."""
    whole = unit_weights.shared(items, mean=mean)

    def measure(gradient: Tensor) -> Tensor:
        number, total, lowest, highest = whole(gradient)
        return torch.stack([number * rows / items, total, lowest * items / rows, highest * items / rows])

    return measure


def _input_shape(node: Any) -> tuple[int, ...]:
    """Shape of what a loss compares with its target."""
    return max((shape_at(child) for child in graph.edges_below(node)), key=math.prod)


def _read_targets(plan: Plan, frame: Frame, reduction: int) -> None:
    """Items are the targets that are not ignored; class weights count for more or less than one."""
    edge = frame.edge
    node = edge[0]
    if graph.is_checkpointed(node, "target"):
        plan.items.append(Probe(edge, unit_weights.targets_picked, source=(node, 0), by_element=False))
        return
    with torch.no_grad():
        target = graph.saved(node, "target").detach()
        ignore = int(graph.saved(node, "ignore_index"))
        ignore = ignore - (1 << 64) if ignore >= 1 << 63 else ignore
        keep = target != ignore
        weight = graph.saved(node, "weight")
        weights = None
        if weight is not None:
            plan.coefficients = "class_weights"
            weights = torch.where(keep, weight.detach()[target.clamp(0, weight.numel() - 1)], 0)
            keep = keep & (weights != 0)
        _note_scores(plan, edge)
        if reduction == _NONE and frame.factor is not None:
            read_factored(plan, replace(frame, keep=(*frame.keep, keep)))
        elif reduction == _NONE:
            plan.items.append(frame.probe_mark(unit_weights.supervised_elements(keep, weights)))
        else:
            units = keep.sum() if weights is None else unit_weights.wide(weights).sum()
            measure = unit_weights.shared(units, mean=reduction == _MEAN)
            plan.items.append(Probe(edge, measure, by_element=False))


def read_factored(plan: Plan, frame: Frame) -> None:
    """Items that were multiplied by numbers: their weights without these, and counted by these."""
    factor = frame.factor
    assert factor is not None
    plan.coefficients = "factors"
    shape = shape_at(frame.mark)
    masks = [one != 0 for one in (factor, *frame.keep) if _fits(one, shape)]
    plan.items.append(frame.probe_mark(unit_weights.kept_elements(masks)))
    if factor.dim() and _fits(factor, shape):
        plan.weighted.append(frame.probe_mark(unit_weights.kept_elements(masks, factor)))


def _fits(tensor: Tensor, shape: tuple[int, ...]) -> bool:
    """Whether a mask or factor has an entry for each element of a shape."""
    if tensor.numel() == math.prod(shape):
        return True
    sizes = (1,) * (len(shape) - tensor.dim()) + tuple(tensor.shape)
    return len(sizes) == len(shape) and all(a in (1, b) for a, b in zip(sizes, shape, strict=True))


def read_ignored_of_summand(plan: Plan, frame: Frame) -> bool:
    """Read a sum of unreduced losses, one of which ignores targets: what it ignores is no item of the
    sum (label smoothing adds a loss of its own to that of the targets).

    Returns:
        Whether there is such a summand, with an element for each of the sum.
    """
    if base_name(frame.edge[0]) not in ("Add", "Sub"):
        return False
    for edge in _summands(frame.edge):
        if base_name(edge[0]) in ("NllLoss", "NllLoss2D") and shape_at(edge) == shape_at(frame.edge):
            if graph.is_checkpointed(edge[0], "target") or graph.saved(edge[0], "reduction") != _NONE:
                return False
            _read_targets(plan, replace(frame, edge=edge), _NONE)
            return True
    return False


def read_labels(plan: Plan, frame: Frame) -> bool:
    """Read a loss of whole sequences of labels (CTC): items are labels, sequences a reading above.

    Returns:
        Whether it is one.
    """
    node = frame.edge[0]
    if base_name(node) != "CtcLoss":
        return False
    lengths = torch.as_tensor(graph.saved(node, "target_lengths")).detach().reshape(-1)
    measure = unit_weights.kept_elements([lengths > 0], lengths)
    plan.items.append(frame.probe_mark(measure, by_element=False))
    plan.weighted.append(frame.probe_mark(unit_weights.elements))
    return True


def _summands(edge: Edge) -> list[Edge]:
    """What is added up elementwise, numbers that it is multiplied by left aside."""
    found: list[Edge] = []
    queue = [edge]
    while queue and len(found) < 8:
        node = queue.pop(0)
        below = graph.edges_below(node[0])
        name = base_name(node[0])
        number = name in ("Mul", "Div") and len(below) == 1
        if name in ("Add", "Sub") or (number and graph.as_tensor(graph.constant_side(node[0])) is None):
            queue += [child for child in below if shape_at(child) == shape_at(edge)]
        else:
            found.append(node)
    return found


def _note_scores(plan: Plan, edge: Edge) -> None:
    """Which scores the targets are compared with."""
    scores = graph.through_views(graph.edges_below(edge[0])[0])
    if base_name(scores[0]) == "LogSoftmax":
        plan.scores = scores[0]
        plan.num_classes = shape_at(scores)[1 if len(shape_at(scores)) > 1 else 0]
