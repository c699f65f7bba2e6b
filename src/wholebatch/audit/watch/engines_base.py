"""What the watcher asks of an engine that keeps parameters or gradients in parts of its own.

Each optimizer steps *watched* parameters. Where a wrapper shards them, what the optimizer holds isn't what
autograd delivers to, and what it reads is a part of a gradient. An ``Engine`` says for each watched
parameter which leaf receives its whole gradient, and which parts of the reduced one this rank reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A part of one whole gradient: an n-d box of it, or a range of its flattened elements.

    Attributes:
        tensor: local values; of the box's shape, or one-dimensional for a range.
        shape: of the whole.
        offsets: of a box: where it begins in the whole, per dimension; None for a range.
        start: of a range: its first flattened element; None for a box.
        copy: which of the copies of this part this rank has; the parts with copy 0 of all ranks make up
            the whole, once.
    """

    tensor: Tensor
    shape: tuple[int, ...]
    offsets: tuple[int, ...] | None = None
    start: int | None = None
    copy: int = 0


class Engine(Protocol):
    """One wrapped model: where its gradients are delivered, and what its optimizer reads."""

    name: str

    def receivers(self) -> Iterable[tuple[Tensor, Tensor]]:
        """Pairs of a watched parameter and the leaf that gets its whole gradient in the next backward.

        One leaf may receive the gradients of several parameters: ``own`` cuts each one's out.
        Register on ``accumulation_node(leaf)``, after the forward and before the backward.
        """
        ...

    def own(self, parameter: Tensor, delivered: Tensor) -> Tensor:
        """The part that is this watched parameter's, in its shape, of what its leaf received."""
        ...

    def pieces(self, parameter: Tensor) -> Sequence[Piece] | None:
        """What the optimizer reads of this watched parameter on this rank now.

        Returns:
            None where it is a plain ``.grad``; no pieces where this rank reads nothing of it.
        """
        ...

    def loss_scale(self) -> float:
        """What the engine itself multiplies the loss by before its backward, to take out again."""
        ...

    def holds_reduction(self) -> bool | None:
        """Whether a backward that runs now would leave its gradients on this rank; None if unknown."""
        ...

    def unseen(self) -> tuple[str, ...]:
        """Which gradients can't be seen, and why, in words."""
        ...


def accumulation_node(leaf: Tensor) -> Node:
    """The node of the graph that adds up what backwards bring to a leaf.

    Args:
        leaf: as ``Engine.receivers`` gives it, or any parameter that needs gradients.

    Returns:
        Node: to register a pre-hook on.
    """
    # FSDP1 swaps the data of its flat parameter after the forward; with mixed precision it then has
    # another node than the one that the graph leads to, which FSDP keeps here.
    kept = getattr(leaf, "_post_backward_hook_state", None)
    if kept is not None and len(kept) == 2:
        return cast(Node, kept[0])
    return get_gradient_edge(leaf).node


def pieces_of_dtensor(value: DTensor) -> tuple[Piece, ...]:
    """The part of a distributed tensor that this rank has, as a box of the whole.

    Replicated over a dimension of its mesh, the copy is the rank's place in these dimensions; partial sums
    over one all count as copy 0, because they add up.

    Args:
        value: a gradient or a parameter.

    Returns:
        tuple[Piece, ...]: one, or none where this rank has no element of it.
    """
    local = value.to_local().detach()
    coordinate = value.device_mesh.get_coordinate()
    if coordinate is None or local.numel() == 0:
        return ()
    shape = tuple(value.shape)
    _, offsets = compute_local_shape_and_global_offset(shape, value.device_mesh, value.placements)
    copy = 0
    for dim, placement in enumerate(value.placements):
        if placement.is_replicate():
            copy = copy * value.device_mesh.size(dim) + coordinate[dim]
    return (Piece(tensor=local, shape=shape, offsets=tuple(offsets), copy=copy),)
