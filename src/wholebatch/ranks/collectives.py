"""What the ranks of a DDP model say to each other, in torch's own collectives.

Small vectors travel on the host, in a group apart from all other traffic; gradients and buffers in
flat buckets on the model's own group.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_BUCKET_BYTES = 25 * 2**20  # as DDP's own buckets


@dataclass(frozen=True, slots=True)
class HostTotal:
    """A small vector on its way: the sum over the ranks."""

    vector: Tensor
    work: Any

    def wait(self) -> list[float]:
        self.work.wait()
        return [float(value) for value in self.vector.tolist()]


# One for each group of a model, however many windows are built over it: a group holds threads and sockets.
_APART: weakref.WeakKeyDictionary[dist.ProcessGroup, weakref.ref[dist.ProcessGroup]]
_APART = weakref.WeakKeyDictionary()


def host_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of the same ranks for small vectors on the host, apart from all other traffic.

    Apart, because a rank that fails answers its exchange here while others may be inside a
    collective of the model's own group.
    """
    made = _APART.get(group)
    known = made() if made is not None else None
    if known is not None:
        return known
    ranks = dist.get_process_group_ranks(group)
    apart: dist.ProcessGroup = dist.new_group(
        ranks, backend="gloo", timeout=_timeout(group), use_local_synchronization=True
    )
    _APART[group] = weakref.ref(apart)
    return apart


def _timeout(group: dist.ProcessGroup) -> Any:
    """The timeout of ``group``, so that a lost rank is noticed here as soon as there."""
    for device in ("cpu", str(torch.accelerator.current_accelerator() or "cpu")):
        try:
            return group._get_backend(torch.device(device)).options._timeout
        except (RuntimeError, AttributeError):
            continue
    return None


Part = list[Tensor]


def _flattened(tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, Part]]:
    """Flat copies of ``tensors`` in buckets of one device and dtype, with the parts of each."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    for group in kinds.values():
        part: Part = []
        held_bytes = 0
        for tensor in group:
            if part and held_bytes + tensor.nbytes > _BUCKET_BYTES:
                yield torch.cat([t.detach().flatten() for t in part]), part
                part, held_bytes = [], 0
            part.append(tensor)
            held_bytes += tensor.nbytes
        yield torch.cat([t.detach().flatten() for t in part]), part


@torch.no_grad()
def _copy_back(flat: Tensor, parts: Part) -> None:
    pieces = torch.split(flat, [tensor.numel() for tensor in parts])
    for tensor, piece in zip(parts, pieces, strict=True):
        tensor.copy_(piece.view_as(tensor))


def sum_over_ranks(gradients: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Add gradients up over the ranks, all buckets under way at once."""
    under_way = [
        (flat, parts, dist.all_reduce(flat, group=group, async_op=True))
        for flat, parts in _flattened(gradients)
    ]
    for flat, parts, work in under_way:
        work.wait()
        _copy_back(flat, parts)


def copy_from_first(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Give every rank the values that the first rank of the group has."""
    for flat, parts in _flattened(tensors):
        dist.broadcast(flat, src=dist.get_global_rank(group, 0), group=group)
        _copy_back(flat, parts)
