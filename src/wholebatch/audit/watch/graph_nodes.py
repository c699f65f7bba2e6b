"""Nodes of an autograd graph: what they are called, what shapes they made, what they saved."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

# a node and which of its outputs
Edge = tuple[Any, int]


def names(text: str) -> frozenset[str]:
    """Words of a text."""
    return frozenset(text.split())


# one number for each element of their input; linear, nothing is left out or multiplied
VIEWS = names(
    """
    View Reshape ReshapeAlias UnsafeView Squeeze Unsqueeze Transpose Permute T Flatten Unflatten ToCopy
    Clone Alias Contiguous Neg Flip Roll Expand Repeat NanToNum Copy CopyBackwards Movedim
    """
)
# linear, and leave elements out
SELECTIONS = names(
    "Select Slice Unbind Split SplitWithSizes UnsafeSplit Narrow Diagonal MaskedSelect IndexSelect Take"
)
MASKINGS = names("MaskedFill Where")
JOINS = names("Stack Cat CopySlices IndexPut")
REDUCERS = names("Mean Sum Dot Nanmean Nansum")
# have a reduction of their own: none, mean or sum (0, 1, 2)
LOSSES = names(
    """
    NllLoss NllLoss2D MseLoss BinaryCrossEntropy BinaryCrossEntropyWithLogits SmoothL1Loss HuberLoss
    MultiMarginLoss MultilabelMarginLoss SoftMarginLoss
    """
)
# of these one item is a row of the input
ROW_LOSSES = names("MultiMarginLoss MultilabelMarginLoss")
# not linear, and one number for a whole tensor: no item can be told from another in it
WHOLE = names("LinalgVectorNorm Norm Max Min Median Logsumexp Std Var Prod Amax Amin Kthvalue Dist")


class UnreadableError(Exception):
    """Says in words why the terms of a loss can't be read."""


def base_name(node: Any) -> str:
    """``"MeanBackward0"`` without its ending and number: ``"Mean"``."""
    name = str(node.name()).rsplit("::", 1)[-1]
    return re.sub(r"Backward\d*$", "", name)


def is_custom(node: Any) -> bool:
    """Whether it is a node of a custom autograd function written in Python."""
    return isinstance(node, torch.autograd.function.BackwardCFunction)


def is_leaf(node: Any) -> bool:
    """Whether it collects the gradient of a leaf tensor."""
    return base_name(node) == "AccumulateGrad"


def edges_below(node: Any) -> list[Edge]:
    """Inputs of the operation that need gradients."""
    return [(child, index) for child, index in node.next_functions if child is not None]


def shape_at(edge: Edge) -> tuple[int, ...]:
    """Shape of the tensor that the operation of a node made."""
    metadata = edge[0]._input_metadata
    if edge[1] >= len(metadata):
        raise UnreadableError(f"{edge[0].name()} does not say the shape of what it made")
    shape = metadata[edge[1]].shape
    return tuple(int(size) for size in shape)


def numel_at(edge: Edge) -> int:
    """Elements of the tensor that the operation of a node made."""
    return math.prod(shape_at(edge))


def saved(node: Any, name: str) -> Any:
    """What an operation saved for its backward, without running anything again.

    Raises:
        UnreadableError: if it was handed to an activation checkpoint, which would run the forward again, or
            was freed.
    """
    if is_checkpointed(node, name):
        raise UnreadableError("the loss lies inside an activation checkpoint")
    try:
        return getattr(node, "_saved_" + name, None)
    except RuntimeError as error:
        raise UnreadableError(f"what {node.name()} saved is gone: {error}") from error


def is_checkpointed(node: Any, name: str) -> bool:
    """Whether what an operation saved was left to an activation checkpoint."""
    raw = getattr(node, "_raw_saved_" + name, None)
    for one in raw if isinstance(raw, tuple | list) else (raw,):
        hook = getattr(one, "unpack_hook", None)
        if hook is not None and "checkpoint" in f"{hook.__module__}.{hook.__qualname__}":
            return True
    return False


def constant_side(node: Any) -> Any:
    """Of a product or quotient the operand without gradient; None where both have one."""
    below = node.next_functions
    if len(below) < 2 or below[1][0] is None:
        return saved(node, "other")
    if below[0][0] is None:
        return saved(node, "self")
    return None


def below(edge: Edge, limit: int) -> Iterator[Edge]:
    """Edges below an edge and itself, the nearest first, each node once, at most ``limit``."""
    seen = {edge[0]}
    queue = [edge]
    for position in range(limit):
        if position >= len(queue):
            return
        yield queue[position]
        for child in edges_below(queue[position][0]):
            if child[0] not in seen:
                seen.add(child[0])
                queue.append(child)


def through_views(edge: Edge) -> Edge:
    """The first edge below that is no view (a change of sign counts as one)."""
    while base_name(edge[0]) in VIEWS and len(edges_below(edge[0])) == 1:
        edge = edges_below(edge[0])[0]
    return edge


def as_tensor(value: Any) -> Tensor | None:
    """A saved operand with dimensions; None for numbers and scalars.

    Exactness: the same numbers.
    """
    if isinstance(value, Tensor) and value.dim() > 0:
        return value.detach()
    return None
