"""The norm of a gradient whose parts lie on several ranks, each part counted once.

PyTorch's own ``clip_grad_norm_`` refuses a mixture of DTensors over different meshes and plain tensors.
Here every rank adds up the squares of what it holds, divided by the number of ranks that hold the same.
What is left is one sum over the ranks, which they can take with all else that they tell each other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from wholebatch.gradients import careful_norm, is_sharded, on_this_rank, total_norm


@torch.no_grad()
def norm_on_this_rank(gradients: Sequence[Tensor], *, holders: int, device: torch.device) -> Tensor:
    """``sqrt(sum_g |g_r|^2 * shards(g) / holders)``: its squares over the ranks add up to the whole norm's.

    Args:
        gradients: those that lie on this rank, DTensors and plain ones; none where it has none.
        holders: ranks over which the parameters of this rank are spread or copied. A gradient cut in s
            shards is then held by ``holders / s`` ranks at each place, a plain one by all.
        device: of the gradients.

    Returns:
        0-dimensional tensor; nothing is read by the host.

    Exactness: rounding of the sums in float32, or the gradients' own dtype where wider. Overflows where
    the squares do; :func:`careful_norm_on_this_rank` does not.
    """
    return _square(_weighed(gradients, holders), device).sqrt()


@torch.no_grad()
def norm_of_parts(
    parts: Mapping[float, Sequence[Tensor]], *, group: dist.ProcessGroup, device: torch.device
) -> Tensor:
    """``sqrt(sum over ranks of sum_w w * |parts_w|^2)``.

    Args:
        parts: what lies on this rank, by what its squares count for: 1 over the number of ranks that hold
            the same.
        group: the ranks over which the gradient is spread or copied; each calls this.
        device: of the gradients.

    Returns:
        0-dimensional tensor, the same on every rank; nothing is read by the host.

    Exactness: as :func:`norm_on_this_rank`.
    """
    square = _square(parts, device)
    dist.all_reduce(square, group=group)
    return square.sqrt()


@torch.no_grad()
def careful_norm_on_this_rank(gradients: Sequence[Tensor], *, holders: int) -> float:
    """The same where its squares overflow, as :func:`wholebatch.gradients.careful_norm`.

    Returns:
        A number; infinite or NaN only where some gradient is. Reads the device.

    Exactness: rounding of one sum in float64.
    """
    weighed = _weighed(gradients, holders)
    return math.hypot(*(math.sqrt(weight) * careful_norm(held) for weight, held in weighed.items()))


@torch.no_grad()
def careful_norm_of_parts(
    parts: Mapping[float, Sequence[Tensor]], *, group: dist.ProcessGroup, device: torch.device
) -> float:
    """The same where its squares overflow: ``m * norm(g / m)`` with m the largest element of all ranks.

    Returns:
        A number; infinite or NaN only where some gradient is. Reads the device.

    Exactness: rounding of one sum in float64.
    """
    wide = {weight: [part.to(torch.float64) for part in held] for weight, held in parts.items()}
    largest = torch.zeros((), dtype=torch.float64, device=device)
    for part in (part for held in wide.values() for part in held if part.numel()):
        # a NaN is taken for infinite: both say that the gradient is not finite
        largest = torch.maximum(
            largest, part.abs().nan_to_num(nan=math.inf, posinf=math.inf, neginf=math.inf).max()
        )
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    most = float(largest)
    if not 0.0 < most < math.inf:
        return most
    square = torch.zeros((), dtype=torch.float64, device=device)
    for weight, held in wide.items():
        square += total_norm([part / most for part in held]) ** 2 * weight
    dist.all_reduce(square, group=group)
    return most * math.sqrt(float(square))


def _square(parts: Mapping[float, Sequence[Tensor]], device: torch.device) -> Tensor:
    """``sum_w w * |parts_w|^2`` of this rank."""
    square = torch.zeros((), dtype=torch.float64, device=device)
    for weight, held in parts.items():
        square += total_norm(held).to(torch.float64) ** 2 * weight
    return square


def _weighed(gradients: Sequence[Tensor], holders: int) -> dict[float, list[Tensor]]:
    """What lies on this rank of each gradient, by what its squares count for."""
    found: dict[float, list[Tensor]] = {}
    for gradient in gradients:
        found.setdefault(num_shards(gradient) / holders, []).append(on_this_rank(gradient))
    return found


def num_shards(tensor: Tensor) -> int:
    """In how many parts a tensor is cut, each held by other ranks; 1 for a plain tensor or copies.

    Raises:
        ValueError: a DTensor whose parts are still to be added up.
    """
    if not is_sharded(tensor):
        return 1
    if any(placement.is_partial() for placement in tensor.placements):
        raise ValueError(f"a gradient with the placements {tensor.placements} is not added up yet")
    return math.prod(
        tensor.device_mesh.size(dim)
        for dim, placement in enumerate(tensor.placements)
        if not placement.is_replicate()
    )
