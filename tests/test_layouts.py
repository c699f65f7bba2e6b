"""The same run on nine layouts: ten updates of the built-in GPT, the same parameters in float64."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ranks import run_ranks
from wholebatch import SampleOrder, UpdateWindow, next_token_loss, plan_batch
from wholebatch.ranks.pipeline import PipelinedModel
from wholebatch.train.models.gpt import GPT, GPTShape

UPDATES, GLOBAL_BATCH, MICRO_BATCH, TOKENS = 10, 16, 2, 24
SHAPE = GPTShape(vocabulary=256, max_tokens=TOKENS, layers=2, width=16, heads=2)
OBJECTIVE = next_token_loss()
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


def samples() -> list[Tensor]:
    """Paragraphs as bytes, of many lengths."""
    paragraphs = [text for topic in sorted(topics) for text in topics[topic].split("\n\n") if len(text) > 3]
    return [torch.tensor(list(text.encode()[:TOKENS])) for text in paragraphs[:200]]


def micro_batch(data: list[Tensor], ids: list[int]) -> dict[str, Tensor]:
    """Padded to one length, which pipelines need."""
    input_ids = torch.zeros(len(ids), TOKENS, dtype=torch.long)
    labels = torch.full((len(ids), TOKENS), -100)
    for row, index in enumerate(ids):
        input_ids[row, : len(data[index])] = labels[row, : len(data[index])] = data[index]
    return {"input_ids": input_ids, "labels": labels}


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


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(SHAPE).double()


def trained(model: nn.Module, replica: int, replicas: int) -> list[Any]:
    """Ten updates; what the records say of them."""
    data = samples()
    window = UpdateWindow(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        OBJECTIVE,
        plan=plan_batch(global_batch_samples=GLOBAL_BATCH, micro_batch_samples=MICRO_BATCH, ranks=replicas),
        clip_grad_norm=1.0,
    )
    order = SampleOrder(num_samples=len(data), global_batch_samples=GLOBAL_BATCH, seed=0)
    told = []
    for _ in range(UPDATES):
        position = window.counters.samples
        ids = order.window(position, micro_batch_samples=MICRO_BATCH, replicas=replicas, replica=replica)
        batches = [micro_batch(data, one) for one in ids]
        by_schedule = isinstance(model, PipelinedModel)
        record = window.run(batches, None if by_schedule else lambda m, b: OBJECTIVE(m(b["input_ids"]), b))
        told.append((record.samples, record.items))
    return told


def on_a_layout(rank: int, ranks: int, name: str) -> tuple[dict[str, Tensor], list[Any]]:  # noqa: ARG001
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    whole = gpt()
    model, replica, replicas = LAYOUTS[name][1](whole, rank)
    told = trained(model, replica, replicas)
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
def alone() -> tuple[dict[str, Tensor], list[Any]]:
    model = gpt()
    told = trained(model, 0, 1)
    return {name: p.detach() for name, p in model.named_parameters()}, told


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_ten_updates_are_the_same_on_every_layout(name: str, alone: Any) -> None:
    wanted, told = alone
    seen: set[str] = set()
    for found, told_here in run_ranks(on_a_layout, LAYOUTS[name][0], name):
        assert told_here == told
        for parameter, value in found.items():
            torch.testing.assert_close(value, wanted[parameter], rtol=0, atol=1e-10)
        seen |= found.keys()
    assert seen == wanted.keys()
