"""The built-in GPT with its matrices shared by neighbouring ranks (tensor parallel).

Each rank has some heads of every attention and some features of every inner layer. The one matrix that
makes query, key and value becomes three, since its rows of one head do not lie together; put together
again it is what it was.
"""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from wholebatch.rows import RowLayout
from wholebatch.train.models.gpt import GPT, Attention, Block

_PARTS = ("to_query", "to_key", "to_value")
_WHOLE = "to_query_key_value"


class SharedAttention(nn.Module):
    """Causal self-attention over the heads that this rank has.

    Args:
        whole: the attention with all heads, whose values it takes over.
        ranks: that share the heads.

    Exactness: as the whole, but for the order in which the ranks' outputs are added up.
    """

    def __init__(self, whole: Attention, ranks: int) -> None:
        super().__init__()
        self.heads_here = whole.heads // ranks
        matrix = whole.to_query_key_value
        for name, weight, bias in zip(_PARTS, matrix.weight.chunk(3), matrix.bias.chunk(3), strict=True):
            part = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
            part.weight, part.bias = (nn.Parameter(one.detach().clone()) for one in (weight, bias))
            self.add_module(name, part)
        self.to_output = whole.to_output

    def forward(self, x: Tensor, layout: RowLayout | None = None) -> Tensor:
        assert layout is None, "check_parallel refuses packed rows"
        samples, tokens, _ = x.shape
        query, key, value = (
            getattr(self, name)(x).view(samples, tokens, self.heads_here, -1).transpose(1, 2)
            for name in _PARTS
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.to_output(mixed.transpose(1, 2).reshape(samples, tokens, -1))
        return out


def cut_gpt(gpt: GPT, mesh: DeviceMesh) -> None:
    """Share the matrices of every block over the ranks of a mesh, in place; embeddings stay whole.

    Args:
        gpt: the whole model, with the same values on every rank.
        mesh: of one dimension, that divides the heads.

    Exactness: exact in real arithmetic; sums over features are added up in another order.
    """
    for block in gpt.blocks:
        assert isinstance(block, Block)
        block.attention = SharedAttention(block.attention, mesh.size())  # type: ignore[assignment]
        parallelize_module(
            block,
            mesh,
            {
                **{f"attention.{name}": ColwiseParallel() for name in _PARTS},
                "attention.to_output": RowwiseParallel(),
                "network.0": ColwiseParallel(),
                "network.2": RowwiseParallel(),
            },
        )


def whole_attention(state: dict[str, Any]) -> dict[str, Any]:
    """A state dict with query, key and value of each attention in one matrix, as the whole model has it.

    Exactness: bit for bit.
    """
    found: dict[str, Any] = {}
    for name, value in state.items():
        match = re.fullmatch(rf"(blocks\.\d+\.attention)\.({'|'.join(_PARTS)})\.(weight|bias)", name)
        if match is None:
            found[name] = value
        elif match[2] == _PARTS[0]:
            parts = [state[f"{match[1]}.{part}.{match[3]}"] for part in _PARTS]
            found[f"{match[1]}.{_WHOLE}.{match[3]}"] = torch.cat(parts)
    return found
