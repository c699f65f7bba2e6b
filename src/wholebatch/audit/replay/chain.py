"""How the outputs of one module call reach the next one and the root of backward, read off the graph.

Between module calls users cut, flatten and cast; after the last one they divide. Such operations are
recognised by their autograd nodes and can be done again, on more samples. Anything else is plain Python
that nobody can run again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wholebatch.audit.replay.nested import Leaf, Path

# An output is known by the node that made it and which of the node's results it is.
Source = tuple[Any, int]
# Where an output stands: index of the call, path inside what it returned.
Spot = tuple[int, Path]
Action = Callable[[Tensor, bool], Tensor]
Shape = tuple[int, ...]


class UnableError(Exception):
    """Something can't be replayed; the message says why, as a clause of a sentence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wired(Leaf):
    """A tensor that was made from an output of an earlier call.

    Attributes:
        spot: the output.
        actions: what was done to it on the way, in order; each is given the tensor and whether it holds
            the samples of all micro-batches.
    """

    spot: Spot
    actions: tuple[Action, ...] = ()

    def made_from(self, output: Tensor, *, joined: bool) -> Tensor:
        """The tensor, from the output as it is now.

        Args:
            output: at ``spot``.
            joined: it holds the samples of all micro-batches.

        Raises:
            UnableError: what was done does not carry over to more samples.
        """
        for action in self.actions:
            output = action(output, joined)
        return output


def wired(tensor: Tensor, outputs: Mapping[Source, Spot]) -> Wired:
    """How a tensor came from an output.

    Args:
        tensor: that has a ``grad_fn``.
        outputs: of the calls so far.

    Raises:
        UnableError: it did not, or not by cutting, reshaping and casting alone.
    """
    source: Source = (tensor.grad_fn, tensor.output_nr)
    shape, actions = tuple(tensor.shape), list[Action]()
    while source not in outputs:
        node = source[0]
        edges = [edge for edge in node.next_functions if edge[0] is not None]
        name = node_name(node)
        if len(edges) != 1 or name not in _STEPS:
            raise UnableError(
                f"a function outside any module makes one module's input from another's output ({name})"
            )
        action, shape = _STEPS[name](node, shape)
        actions.append(action)
        source = edges[0]
    return Wired(spot=outputs[source], actions=tuple(reversed(actions)))


def coefficients(root: Tensor, outputs: Mapping[Source, Spot]) -> dict[Spot, float]:
    """The factors of ``root = sum over outputs of factor x output``.

    Args:
        root: what backward is called on, one number.
        outputs: of the calls of this micro-batch.

    Returns:
        Factor by output; their sum where an output comes in more than once.

    Raises:
        UnableError: the root is made by anything but adding outputs and multiplying them by numbers.

    Exactness: products in float64 of the numbers that the graph saved.
    """
    found: dict[Spot, float] = {}
    pending: list[tuple[Source, float]] = [((root.grad_fn, root.output_nr), 1.0)]
    while pending:
        source, factor = pending.pop()
        if source in outputs:
            found[outputs[source]] = found.get(outputs[source], 0.0) + factor
            continue
        for edge, own in _scalar_edges(source[0]):
            pending.append((edge, factor * own))
    return found


def node_name(node: Any) -> str:
    """Name of an autograd node as torch spells it, without the number at its end."""
    return str(node.name()).rsplit("::", 1)[-1].rstrip("0123456789")


def _scalar_edges(node: Any) -> list[tuple[Source, float]]:
    """Inputs of a node that adds or scales numbers, with the derivative by each."""
    if node is None:
        raise UnableError("backward was called on a tensor that no module's output leads to")
    name, edges = node_name(node), list(node.next_functions)
    there = [index for index, edge in enumerate(edges) if edge[0] is not None]
    if name in ("AddBackward", "SubBackward"):
        alpha = (-1.0 if name == "SubBackward" else 1.0) * float(node._saved_alpha)
        return [(edges[index], alpha if index else 1.0) for index in there]
    if name in _UNCHANGED and len(there) == 1:
        return [(edges[there[0]], -1.0 if name in ("NegBackward", "RsubBackward") else 1.0)]
    if name == "MulBackward" and len(there) == 1:
        return [(edges[there[0]], _number(node._saved_self if there[0] else node._saved_other))]
    if name == "DivBackward" and there == [0]:
        return [(edges[0], 1.0 / _number(node._saved_other))]
    raise UnableError(f"the loss is computed by a function outside any module ({name})")


_UNCHANGED = {
    "NegBackward",
    "RsubBackward",
    "CloneBackward",
    "ToCopyBackward",
    "ViewBackward",
    "UnsafeViewBackward",
    "SqueezeBackward",
    "UnsqueezeBackward",
}


def _number(saved: Tensor | None) -> float:
    if saved is None or saved.numel() != 1:
        raise UnableError("the loss is multiplied or divided by a tensor outside any module")
    return float(saved)


def _same(action: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Shape], tuple[Action, Shape]]:
    """A step that keeps the shape."""

    def step(node: Any, shape: Shape) -> tuple[Action, Shape]:
        # What is needed is read here: a node may not be kept beyond its micro-batch.
        dim = _signed(getattr(node, "_saved_dim", 0))
        return (lambda tensor, _: action(dim, tensor)), shape

    return step


def _view(node: Any, shape: Shape) -> tuple[Action, Shape]:
    def action(tensor: Tensor, joined: bool) -> Tensor:
        return tensor.reshape(-1, *shape[1:]) if joined and shape else tensor.reshape(shape)

    return action, tuple(node._saved_self_sym_sizes)


def _slice(node: Any, _: Shape) -> tuple[Action, Shape]:
    before = tuple(node._saved_self_sym_sizes)
    dim = _signed(node._saved_dim) % len(before)
    cut = slice(_signed(node._saved_start), _signed(node._saved_end), _signed(node._saved_step))
    whole = cut.indices(before[dim]) == (0, before[dim], 1)

    def action(tensor: Tensor, joined: bool) -> Tensor:
        if whole:
            return tensor
        return _cut(tensor, dim, joined)[(slice(None),) * dim + (cut,)]

    return action, before


def _select(node: Any, _: Shape) -> tuple[Action, Shape]:
    before = tuple(node._saved_self_sym_sizes)
    dim, index = _signed(node._saved_dim) % len(before), _signed(node._saved_index)
    return (lambda tensor, joined: _cut(tensor, dim, joined).select(dim, index)), before


def _cut(tensor: Tensor, dim: int, joined: bool) -> Tensor:
    if dim == 0 and joined:
        raise UnableError("an output is cut along its samples before it reaches the next module")
    return tensor


def _squeeze(node: Any, _: Shape) -> tuple[Action, Shape]:
    before = tuple(node._saved_self_sym_sizes)
    saved = getattr(node, "_saved_dim", None)
    dims = [index for index, size in enumerate(before) if size == 1]
    if saved is not None:
        numbers = saved if isinstance(saved, tuple) else (saved,)
        dims = [dim for dim in (_signed(one) % len(before) for one in numbers) if before[dim] == 1]
    # A micro-batch of one sample loses its samples' dimension under a bare squeeze(); not the big batch.
    return (lambda tensor, joined: tensor.squeeze([dim for dim in dims if dim or not joined])), before


def _unsqueeze(node: Any, shape: Shape) -> tuple[Action, Shape]:
    dim = _signed(node._saved_dim) % len(shape)
    return (lambda tensor, _: tensor.unsqueeze(dim)), shape[:dim] + shape[dim + 1 :]


def _transpose(node: Any, shape: Shape) -> tuple[Action, Shape]:
    one, other = (_signed(dim) % len(shape) for dim in (node._saved_dim0, node._saved_dim1))
    before = list(shape)
    before[one], before[other] = before[other], before[one]
    return (lambda tensor, _: tensor.transpose(one, other)), tuple(before)


def _permute(node: Any, shape: Shape) -> tuple[Action, Shape]:
    dims = tuple(_signed(dim) % len(shape) for dim in node._saved_dims)
    before = list(shape)
    for place, dim in enumerate(dims):
        before[dim] = shape[place]
    return (lambda tensor, _: tensor.permute(dims)), tuple(before)


def _signed(number: int) -> int:
    """Saved integers come as unsigned 64-bit ones."""
    return number - 2**64 if number >= 2**63 else number


_STEPS: dict[str, Callable[[Any, Shape], tuple[Action, Shape]]] = {
    "ViewBackward": _view,
    "UnsafeViewBackward": _view,
    "ReshapeAliasBackward": _view,
    "SliceBackward": _slice,
    "SelectBackward": _select,
    "SqueezeBackward": _squeeze,
    "UnsqueezeBackward": _unsqueeze,
    "TransposeBackward": _transpose,
    "PermuteBackward": _permute,
    "CloneBackward": _same(lambda _, tensor: tensor),
    "ToCopyBackward": _same(lambda _, tensor: tensor),
    "AliasBackward": _same(lambda _, tensor: tensor),
    "LogSoftmaxBackward": _same(lambda dim, tensor: torch.log_softmax(tensor, dim)),
    "SoftmaxBackward": _same(lambda dim, tensor: torch.softmax(tensor, dim)),
    "SigmoidBackward": _same(lambda _, tensor: torch.sigmoid(tensor)),
    "TanhBackward": _same(lambda _, tensor: torch.tanh(tensor)),
    "ReluBackward": _same(lambda _, tensor: torch.relu(tensor)),
    "ExpBackward": _same(lambda _, tensor: torch.exp(tensor)),
    "NegBackward": _same(lambda _, tensor: -tensor),
}
