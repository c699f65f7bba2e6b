"""The same run on nine layouts, with the same parameters in float64; ``tests/peers`` has ZeRO 0 to 3."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from layouts import Found, alone, check_agreement, gpt, make_optimizer, trained
from ranks import run_ranks
from wholebatch.ranks.pipeline import PipelinedModel
from wholebatch.train.models.gpt import GPT
from wholebatch.train.models.stages import GPTStage

Wrap = Callable[[GPT, int], tuple[nn.Module, int, int]]


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
        part, group = GPTStage(gpt, place, 2), mesh.get_group("stage")
        stage = PipelineStage(part, place, 2, torch.device("cpu"), group=group)
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


def on_layouts(rank: int, ranks: int) -> dict[str, Found]:
    """The run on each layout of so many ranks."""
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    return {name: on_a_layout(rank, name) for name, (needed, _) in LAYOUTS.items() if needed == ranks}


def on_a_layout(rank: int, name: str) -> Found:
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


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_ten_updates_are_the_same_on_every_layout(ranks: int) -> None:
    wanted, of_ranks = alone(), run_ranks(on_layouts, ranks, timeout_s=120)
    for name in of_ranks[0]:
        check_agreement([of_rank[name] for of_rank in of_ranks], wanted, within=1e-10)
