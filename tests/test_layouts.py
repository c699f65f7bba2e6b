"""The same run on nine layouts, with the same parameters in float64; ``tests/peers`` has ZeRO 0 to 3."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from layouts import Found, alone, check_agreement, gpt, make_optimizer, trained
from ranks import run_ranks
from wholebatch.ranks.pipeline import PipelinedModel
from wholebatch.train.models.gpt import GPT

Wrap = Callable[[GPT, int], tuple[nn.Module, int, int]]


class Front(nn.Module):
    """The first stage of the model: what is under the same names in the whole."""

    def __init__(self, gpt: GPT) -> None:
        super().__init__()
        self.token_embedding, self.position_embedding = gpt.token_embedding, gpt.position_embedding
        self.blocks = nn.ModuleList([gpt.blocks[0]])

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.blocks[0](
            self.token_embedding(ids) + self.position_embedding.weight[: ids.shape[1]]
        )
        return out


class Back(nn.Module):
    """The last stage."""

    def __init__(self, gpt: GPT) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({"1": gpt.blocks[1]})
        self.final_norm, self.to_logits = gpt.final_norm, gpt.to_logits

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.to_logits(self.final_norm(self.blocks["1"](x)))
        return out


def _ddp(gpt: GPT, rank: int) -> tuple[nn.Module, int, int]:
    return nn.parallel.DistributedDataParallel(gpt), rank, 2


def _fsdp(*, copies: int = 1, tensor: int = 1) -> Wrap:
    def wrap(gpt: GPT, rank: int) -> tuple[nn.Module, int, int]:
        replicas = torch.distributed.get_world_size() // tensor
        names = ("copy", "shard", "tensor")
        mesh = init_device_mesh("cpu", (copies, replicas // copies, tensor), mesh_dim_names=names)
        if tensor > 1:
            _cut(gpt, mesh["tensor"])
        for part in [*gpt.blocks, gpt]:
            fully_shard(part, mesh=mesh["copy", "shard"] if copies > 1 else mesh["shard"])
        return gpt, rank // tensor, replicas

    return wrap


def _fsdp1(gpt: GPT, rank: int) -> tuple[nn.Module, int, int]:
    model = FullyShardedDataParallel(gpt, device_id=torch.device("cpu"), use_orig_params=False)
    return model, rank, 2


def _tensor(gpt: GPT, rank: int) -> tuple[nn.Module, int, int]:  # noqa: ARG001
    _cut(gpt, init_device_mesh("cpu", (2,)))
    return gpt, 0, 1


def _cut(gpt: GPT, mesh: Any) -> None:
    for block in gpt.blocks:
        parallelize_module(block, mesh, {"network.0": ColwiseParallel(), "network.2": RowwiseParallel()})


def _pipeline(copies: int) -> Wrap:
    def wrap(gpt: GPT, rank: int) -> tuple[nn.Module, int, int]:  # noqa: ARG001
        mesh = init_device_mesh("cpu", (copies, 2), mesh_dim_names=("data", "stage"))
        place = mesh.get_local_rank("stage")
        stage = PipelineStage(
            Back(gpt) if place else Front(gpt), place, 2, torch.device("cpu"), group=mesh.get_group("stage")
        )
        model = PipelinedModel(
            stage,
            schedule=Schedule1F1B,
            inputs=lambda batch: batch["input_ids"],
            data_parallel=mesh["data"] if copies > 1 else None,
        )
        return model, mesh.get_local_rank("data"), copies

    return wrap


LAYOUTS: dict[str, tuple[int, Wrap]] = {
    "DDP 2": (2, _ddp),
    "FSDP2 2": (2, _fsdp()),
    "FSDP2 4": (4, _fsdp()),
    "HSDP 2 x 2": (4, _fsdp(copies=2)),
    "FSDP1 2": (2, _fsdp1),
    "TP 2": (2, _tensor),
    "TP 2 x FSDP2 2": (4, _fsdp(tensor=2)),
    "PP 2": (2, _pipeline(1)),
    "PP 2 x DP 2": (4, _pipeline(2)),
}


def on_a_layout(rank: int, ranks: int, name: str) -> Found:  # noqa: ARG001
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    whole = gpt()
    model, replica, replicas = LAYOUTS[name][1](whole, rank)
    told = trained(model, make_optimizer(model), replica, replicas)
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model):
            return {name: p.detach().clone() for name, p in whole.named_parameters()}, told
    parts = model.parts[0] if isinstance(model, PipelinedModel) else whole
    found = {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach()
        for name, p in parts.named_parameters()
    }
    return found, told


@pytest.fixture(scope="module")
def of_one_rank() -> Found:
    return alone()


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_ten_updates_are_the_same_on_every_layout(name: str, of_one_rank: Found) -> None:
    check_agreement(run_ranks(on_a_layout, LAYOUTS[name][0], name), of_one_rank, within=1e-10)
