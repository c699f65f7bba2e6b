"""The built-in GPT with each sequence shared by neighbouring ranks (context parallel).

Each rank has a part of the positions of every sample. Only attention looks at others: its keys and values
are gathered from all parts, so that a position sees what it sees in the whole.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from wholebatch.train.models.gpt import GPT, Block


def share_sequences(gpt: GPT, mesh: DeviceMesh) -> None:
    """Let a GPT take parts of sequences, in place: the part of each rank by its place in the mesh.

    Args:
        gpt: the whole model.
        mesh: of one dimension; the ranks that share sequences, in their order.

    Exactness: exact in real arithmetic.
    """
    gpt.part_of_sequence = mesh.get_local_rank()
    for block in gpt.blocks:
        assert isinstance(block, Block)
        block.attention.attend = partial(_attend_to_all_parts, group=mesh.get_group())


def _attend_to_all_parts(
    query: Tensor, key: Tensor, value: Tensor, *, dropout: float, group: dist.ProcessGroup
) -> Tensor:
    """Causal attention of this rank's positions to those of all parts up to each; no sums over ranks."""
    assert dropout == 0.0, "check_parallel refuses it"
    tokens, before = query.shape[2], dist.get_rank(group) * query.shape[2]
    both = torch.stack([key, value]).transpose(0, 3)  # positions first, as parts lie one after the other
    gathered: Tensor = _AllParts.apply(both.contiguous(), group)  # type: ignore[no-untyped-call]
    keys, values = gathered.transpose(0, 3)
    own = torch.arange(before, before + tokens, device=query.device)
    seen = own[:, None] >= torch.arange(keys.shape[2], device=query.device)
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=seen)


class _AllParts(torch.autograd.Function):
    """All parts one after the other; what their gradients are on all ranks adds up in the part's own.

    The backward of torch.distributed.nn.functional.all_gather sends whole gradients to all, but for two
    backends, and adds them up there.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        whole = part.new_empty((dist.get_world_size(group) * part.shape[0], *part.shape[1:]))
        dist.all_gather_single(whole, part, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (whole,) = gradients
        part = whole.new_empty((whole.shape[0] // dist.get_world_size(ctx.group), *whole.shape[1:]))
        dist.reduce_scatter_single(part, whole.contiguous(), group=ctx.group)
        return part, None
