"""Facts about a loss that its graph tells from nearby: square scores, cached gradients, regularisers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from wholebatch.audit.watch.graph_nodes import (
    LOSSES,
    REDUCERS,
    VIEWS,
    Edge,
    base_name,
    below,
    constant_side,
    edges_below,
    is_leaf,
    names,
    numel_at,
    shape_at,
    through_views,
)

_PRODUCTS = names("Mm Bmm Cdist EuclideanDist Pdist")
# between scores and their reduction; anything else ends the search
_BETWEEN_SCORES = VIEWS | names(
    """
    LogSoftmax Softmax Logsumexp Log Exp Div Mul Sub Add Rsub Sum Mean Gather Index Diagonal MaskedFill
    FillDiagonal MaskedSelect MaskedScatter CopySlices IndexPut Expand Stack Log1p Max Min
    Where Cat Relu ClampMin Clamp Threshold Softplus LogSigmoid Sqrt Pow Max Amax Select Slice Triu
    Tril Fill BinaryCrossEntropyWithLogits NllLoss MseLoss
    """
)
_LOSS_NAMES = names("LogSoftmax Gather Log Logsumexp NllLoss LogSigmoid Index")
_PENALTY_NAMES = names(
    """
    Pow Abs Mul LinalgVectorNorm Norm Sum Mean Add Sqrt Stack Cat Neg Max Exp Log Softplus Sigmoid
    Reciprocal Select Slice Unbind Clamp ClampMin
    """
)
_FARTHEST = 2000


def is_square(edge: Edge) -> bool:
    """Whether the scores below are a batch against itself: a product of two tensors, both from the
    model."""
    seen = {edge[0]}
    queue = [edge]
    for position in range(48):
        if position >= len(queue):
            return False
        node = queue[position][0]
        name = base_name(node)
        if name in _PRODUCTS:
            if _is_batch_against_itself(queue[position]):
                return True
            continue
        if name == "Mul" and _is_each_with_each(node):
            return True
        if (
            position > 0
            and name not in _BETWEEN_SCORES
            and through_views(queue[position]) == queue[position]
        ):
            continue
        for child in edges_below(node):
            if child[0] not in seen:
                seen.add(child[0])
                queue.append(child)
    return False


def _is_each_with_each(node: Any) -> bool:
    """Whether a product is of [n, 1, d] and [1, n, d], both from the model: similarities of all pairs."""
    sides = edges_below(node)
    if len(sides) != 2:
        return False
    one, other = (_before_expanding(side) for side in sides)
    if len(one) < 3 or len(one) != len(other):
        return False
    pairs = {(a == 1, b == 1) for a, b in zip(one[:-1], other[:-1], strict=True) if a != b}
    return {(True, False), (False, True)} <= pairs


def _before_expanding(edge: Edge) -> tuple[int, ...]:
    """Shape of a side before it was expanded; divisions by its norm and the like left aside."""
    while base_name(edge[0]) in ("Expand", "Div") and edges_below(edge[0]):
        edge = edges_below(edge[0])[0]
    return shape_at(edge)


def _is_batch_against_itself(edge: Edge) -> bool:
    """Whether a product is [n, n], or [n, k n] with more candidates, and neither side is a parameter."""
    node = edge[0]
    sides = [through_views(side) for side in edges_below(node)]
    if base_name(node) == "Pdist":
        return True
    if len(sides) != 2 or any(is_leaf(s[0]) and isinstance(s[0].variable, nn.Parameter) for s in sides):
        return False
    shape = [size for size in shape_at(edge) if size != 1]
    return len(shape) == 2 and min(shape) >= 2 and max(shape) % min(shape) == 0


def is_surrogate(node: Any, factor: torch.Tensor) -> bool:
    """Whether a product with a signed tensor is of a model's output, not of a loss."""
    inputs = edges_below(node)
    if len(inputs) != 1:
        return False
    shape = shape_at(inputs[0])
    source = inputs[0]
    while base_name(source[0]) in ("View", "Reshape", "UnsafeView", "ToCopy", "Clone"):
        source = edges_below(source[0])[0]
        shape = max(shape, shape_at(source), key=len)
    if len(shape) < 2 or factor.numel() != numel_at(inputs[0]) or shape[-1] < 2:
        return False
    return not any(base_name(edge[0]) in _LOSS_NAMES for edge in below(inputs[0], 8))


def is_penalty(edge: Edge) -> bool:
    """Whether nothing but parameters lies below: a regulariser, which has no items."""
    edges = list(below(edge, _FARTHEST))
    leaves = [node for node, _ in edges if is_leaf(node)]
    if len(edges) >= _FARTHEST or not all(isinstance(leaf.variable, nn.Parameter) for leaf in leaves):
        return False
    return bool(leaves) and all(is_leaf(node) or _penalises(node) for node, _ in edges)


def _penalises(node: Any) -> bool:
    """Whether an operation brings no data to parameters."""
    name = base_name(node)
    if name == "Mul" and len(edges_below(node)) == 1:
        return _by_number(node)
    return name in VIEWS or (
        name in _PENALTY_NAMES and all(child is not None for child, _ in node.next_functions)
    )


def _by_number(node: Any) -> bool:
    """Whether a product is with one number."""
    other = constant_side(node)
    return not isinstance(other, torch.Tensor) or other.numel() == 1


def first_parameter(edge: Edge) -> Any:
    """The nearest parameter below: losses of one head share it."""
    for node, _ in below(edge, 60):
        if is_leaf(node) and isinstance(node.variable, nn.Parameter):
            return node
    return None


def is_quotient(node: Any) -> bool:
    """Whether one reduction is divided by another that data go into as well."""
    if base_name(node) != "Div" or len(edges_below(node)) != 2:
        return False
    return all(
        numel_at(child) == 1 and reduces_below(child) and not is_penalty(child)
        for child in edges_below(node)
    )


def reduces_below(edge: Edge) -> bool:
    """Whether a single number was made from a reduction by arithmetic of single numbers."""
    stack, seen = [edge], {edge[0]}
    while stack:
        node = stack.pop()[0]
        name = base_name(node)
        if name in LOSSES:
            return True
        if name in REDUCERS and name != "Dot" and numel_at((node, 0)) == 1 and shape_at((node, 0)) == ():
            return True
        for child in edges_below(node):
            if child[0] not in seen and not is_leaf(child[0]) and numel_at(child) == 1:
                seen.add(child[0])
                stack.append(child)
    return False
