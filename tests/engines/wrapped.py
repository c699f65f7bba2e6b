"""How the model of the table comes under each engine. Whoever adds an engine adds one entry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from big_batch import pad
from wholebatch.ranks.pipeline import PipelinedModel


@dataclass(frozen=True, kw_only=True)
class Wrapped:
    """A model under an engine on this rank.

    Attributes:
        model: what the window is given.
        parts: the layers that this rank has parameters of, by their place in the model.
        replica, replicas: this rank's, and how many there are.
        options: of the window.
    """

    model: nn.Module
    parts: dict[int, nn.Module]
    replica: int
    replicas: int
    options: dict[str, Any] = field(default_factory=dict)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor that may lie on several ranks; each of them calls this."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def _one(parts: list[nn.Module], _: torch.dtype, rank: int, ranks: int) -> Wrapped:
    return Wrapped(model=nn.Sequential(*parts), parts=dict(enumerate(parts)), replica=rank, replicas=ranks)


def _ddp(reduce: str) -> Callable[..., Wrapped]:
    def wrap(parts: list[nn.Module], _: torch.dtype, rank: int, ranks: int) -> Wrapped:
        return Wrapped(
            model=nn.parallel.DistributedDataParallel(nn.Sequential(*parts)),
            parts=dict(enumerate(parts)),
            replica=rank,
            replicas=ranks,
            options={"reduce": reduce},
        )

    return wrap


def _fsdp(reduce: str, *, copies: int = 1, tensor: int = 1) -> Callable[..., Wrapped]:
    def wrap(parts: list[nn.Module], dtype: torch.dtype, rank: int, ranks: int) -> Wrapped:
        model = nn.Sequential(*parts)
        replicas = ranks // tensor
        shape, names = (copies, replicas // copies, tensor), ("copy", "shard", "tensor")
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        if tensor > 1:
            _cut(model, mesh["tensor"])
        # half precision computes in bfloat16 and keeps its parameters and sums in float32
        half = dtype == torch.bfloat16
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32) if half else None
        over = mesh["copy", "shard"] if copies > 1 else mesh["shard"]
        for layer in [*parts, model]:
            fully_shard(
                layer.float() if half else layer, mesh=over, **({"mp_policy": policy} if policy else {})
            )
        return Wrapped(
            model=model,
            parts=dict(enumerate(parts)),
            replica=rank // tensor,
            replicas=replicas,
            options={"reduce": reduce},
        )

    return wrap


def _tensor_parallel(parts: list[nn.Module], _: torch.dtype, rank: int, ranks: int) -> Wrapped:  # noqa: ARG001
    model = nn.Sequential(*parts)
    _cut(model, init_device_mesh("cpu", (ranks,)))
    return Wrapped(model=model, parts=dict(enumerate(parts)), replica=0, replicas=1)


def _cut(model: nn.Module, mesh: Any) -> None:
    plan = {
        "0.0": ColwiseParallel(),
        "1.0": RowwiseParallel(),
        "2.0": ColwiseParallel(),
        "3": RowwiseParallel(),
    }
    parallelize_module(model, mesh, plan)


def _pipeline(schedule: type, *, stages: int = 1, copies: int = 1) -> Callable[..., Wrapped]:
    def wrap(parts: list[nn.Module], _: torch.dtype, rank: int, ranks: int) -> Wrapped:  # noqa: ARG001
        length = ranks // copies
        mesh = init_device_mesh("cpu", (copies, length), mesh_dim_names=("data", "stage"))
        place, size = mesh.get_local_rank("stage"), len(parts) // (length * stages)
        own = [place + length * turn for turn in range(stages)]
        held = {at: list(range(at * size, (at + 1) * size)) for at in own}
        model = PipelinedModel(
            [
                PipelineStage(
                    nn.Sequential(*(parts[index] for index in indices)),
                    at,
                    length * stages,
                    torch.device("cpu"),
                    group=mesh.get_group("stage"),
                )
                for at, indices in held.items()
            ],
            schedule=schedule,
            inputs=lambda batch: batch["x"],
            pad=pad,
            data_parallel=mesh["data"] if copies > 1 else None,
        )
        return Wrapped(
            model=model,
            parts={index: parts[index] for indices in held.values() for index in indices},
            replica=mesh.get_local_rank("data"),
            replicas=copies,
        )

    return wrap


@dataclass(frozen=True, kw_only=True)
class Engine:
    """A row of the table.

    Attributes:
        ranks: that it is run on.
        wrap: brings the layers under it.
        divides: who divides by what, in words.
        reduces: when, in words.
        page: of docs, with its details.
    """

    ranks: int
    wrap: Callable[[list[nn.Module], torch.dtype, int, int], Wrapped]
    divides: str
    reduces: str
    page: str


_MEAN = "the engine, by D; the window multiplies by it"
_NOBODY = "nobody"
ENGINES = {
    "one rank": Engine(ranks=1, wrap=_one, divides=_NOBODY, reduces="never", page="window.md"),
    "DDP": Engine(
        ranks=2, wrap=_ddp("per_update"), divides=_MEAN, reduces="in the last backward", page="window.md"
    ),
    "DDP, after agreement": Engine(
        ranks=2, wrap=_ddp("after_agreement"), divides=_NOBODY, reduces="after the last", page="window.md"
    ),
    "FSDP2 on 2": Engine(
        ranks=2,
        wrap=_fsdp("per_update"),
        divides=_MEAN,
        reduces="in the last backward",
        page="engines/fsdp.md",
    ),
    "FSDP2 on 2, per micro-batch": Engine(
        ranks=2,
        wrap=_fsdp("per_micro_batch"),
        divides=_MEAN,
        reduces="in every backward",
        page="engines/fsdp.md",
    ),
    "FSDP2 on 4": Engine(
        ranks=4,
        wrap=_fsdp("per_update"),
        divides=_MEAN,
        reduces="in the last backward",
        page="engines/fsdp.md",
    ),
    "HSDP 2 x 2": Engine(
        ranks=4,
        wrap=_fsdp("per_micro_batch", copies=2),
        divides=_MEAN,
        reduces="to shards in every backward, over copies in the last",
        page="engines/fsdp.md",
    ),
    "TP 2": Engine(
        ranks=2, wrap=_tensor_parallel, divides=_NOBODY, reduces="never (D = 1)", page="engines/fsdp.md"
    ),
    "TP 2 x FSDP2 2": Engine(
        ranks=4,
        wrap=_fsdp("per_update", tensor=2),
        divides=_MEAN,
        reduces="in the last backward",
        page="engines/fsdp.md",
    ),
    "PP 2, 1F1B": Engine(
        ranks=2,
        wrap=_pipeline(Schedule1F1B),
        divides=_NOBODY,
        reduces="never (D = 1)",
        page="engines/pipeline.md",
    ),
    "PP 2, interleaved": Engine(
        ranks=2,
        wrap=_pipeline(ScheduleInterleaved1F1B, stages=2),
        divides=_NOBODY,
        reduces="never (D = 1)",
        page="engines/pipeline.md",
    ),
    "PP 2 x DP 2": Engine(
        ranks=4,
        wrap=_pipeline(Schedule1F1B, copies=2),
        divides=_NOBODY,
        reduces="after the schedule",
        page="engines/pipeline.md",
    ),
}
