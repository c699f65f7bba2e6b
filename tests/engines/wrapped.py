"""How the model of the table comes under each engine. Whoever adds an engine adds one entry."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from big_batch import pad
from engines.work import DTYPES, Case, Tensors, make_optimizer
from wholebatch.gradients import on_this_rank
from wholebatch.ranks.pipeline import PipelinedModel


@dataclass(kw_only=True)
class Wrapped:
    """A model under an engine on this rank.

    Attributes:
        model: what the window is given.
        optimizer: over its parameters.
        parts: the layers that this rank has parameters of, by their place in the model.
        replica, replicas: this rank's, and how many there are.
        options: of the window.
    """

    model: nn.Module
    optimizer: Any
    parts: dict[int, nn.Module]
    replica: int
    replicas: int
    options: dict[str, Any] = field(default_factory=dict)
    clips_later = False  # than gradients are read

    def before_step(self, look: Callable[..., None]) -> None:
        """Call ``look`` when the optimizer is about to step."""
        self.optimizer.register_step_pre_hook(look)

    def read(self, *, gradients: bool) -> Tensors:
        """Whole tensors of this rank's layers, by their name in the model; every rank calls this."""
        return {
            f"{index}.{name}": whole(parameter.grad if gradients else parameter)
            for index, part in self.parts.items()
            for name, parameter in part.named_parameters()
        }

    def held(self) -> int:
        """Bytes of gradients that lie on this rank now."""
        own = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        return sum(on_this_rank(gradient).nbytes for gradient in own)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor that may lie on several ranks; each of them calls this."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


Wrap = Callable[[list[nn.Module], Case, int, int], Wrapped]


@cache
def _mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """One for all cases: each has process groups of its own."""
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def wrap_plainly(
    model: nn.Module,
    parts: list[nn.Module],
    case: Case,
    replica: int,
    replicas: int,
    *,
    kind: type[Wrapped] = Wrapped,
    **options: Any,
) -> Wrapped:
    """Every rank has parameters of all parts."""
    return kind(
        model=model,
        optimizer=make_optimizer(model.parameters(), case.optimizer),
        parts=dict(enumerate(parts)),
        replica=replica,
        replicas=replicas,
        options=options,
    )


def _one(parts: list[nn.Module], case: Case, rank: int, ranks: int) -> Wrapped:
    return wrap_plainly(nn.Sequential(*parts), parts, case, rank, ranks)


def _ddp(reduce: str) -> Wrap:
    def wrap(parts: list[nn.Module], case: Case, rank: int, ranks: int) -> Wrapped:
        model = nn.parallel.DistributedDataParallel(nn.Sequential(*parts))
        return wrap_plainly(model, parts, case, rank, ranks, reduce=reduce)

    return wrap


class _UnderFSDP2(Wrapped):
    def held(self) -> int:
        groups = {
            id(group): group
            for module in self.model.modules()
            if isinstance(module, FSDPModule)
            for group in module._get_fsdp_state()._fsdp_param_groups
        }
        parameters = [one for group in groups.values() for one in group.fsdp_params]
        inside = [one.unsharded_accumulated_grad for one in parameters]
        inside += [one._unsharded_param.grad for one in parameters if hasattr(one, "_unsharded_param")]
        inside += [group._partial_reduce_output for group in groups.values()]
        return super().held() + sum(on_this_rank(one).nbytes for one in inside if one is not None)


def _fsdp(reduce: str, *, copies: int = 1, tensor: int = 1) -> Wrap:
    def wrap(parts: list[nn.Module], case: Case, rank: int, ranks: int) -> Wrapped:
        model = nn.Sequential(*parts)
        replicas = ranks // tensor
        mesh = _mesh((copies, replicas // copies, tensor), ("copy", "shard", "tensor"))
        if tensor > 1:
            _cut(model, mesh["tensor"])
        # half precision computes in bfloat16 and keeps its parameters and sums in float32
        half = case.dtype == torch.bfloat16
        policy = MixedPrecisionPolicy(param_dtype=case.dtype, reduce_dtype=torch.float32) if half else None
        over = mesh["copy", "shard"] if copies > 1 else mesh["shard"]
        for layer in [*parts, model]:
            fully_shard(
                layer.float() if half else layer, mesh=over, **({"mp_policy": policy} if policy else {})
            )
        place = rank // tensor
        return wrap_plainly(model, parts, case, place, replicas, kind=_UnderFSDP2, reduce=reduce)

    return wrap


class _UnderFSDP1(Wrapped):
    """Each layer is one flat parameter, of which this rank has a part."""

    def read(self, *, gradients: bool) -> Tensors:
        found = {}
        for index, part in self.parts.items():
            flat: Any = part._handle.flat_param  # type: ignore[attr-defined]
            mine = (flat.grad if gradients else flat).detach().contiguous()
            shards = [torch.empty_like(mine) for _ in range(self.replicas)]
            dist.all_gather(shards, mine)
            sizes = [math.prod(shape) for shape in flat._shapes]
            pieces = torch.cat(shards)[: sum(sizes)].split(sizes)
            for name, shape, piece in zip(flat._fqns, flat._shapes, pieces, strict=True):
                found[f"{index}.{name}"] = piece.view(shape).clone()
        return found


def _fsdp1(reduce: str) -> Wrap:
    def wrap(parts: list[nn.Module], case: Case, rank: int, ranks: int) -> Wrapped:
        half = case.dtype == torch.bfloat16
        named: dict[str, Any] = {"device_id": torch.device("cpu"), "use_orig_params": False}
        if half:  # as under fully_shard
            named["mixed_precision"] = MixedPrecision(param_dtype=case.dtype, reduce_dtype=torch.float32)
        within = [FullyShardedDataParallel(part.float() if half else part, **named) for part in parts]
        model = FullyShardedDataParallel(nn.Sequential(*within), **named)
        return wrap_plainly(model, within, case, rank, ranks, kind=_UnderFSDP1, reduce=reduce)

    return wrap


def _tensor_parallel(parts: list[nn.Module], case: Case, rank: int, ranks: int) -> Wrapped:  # noqa: ARG001
    model = nn.Sequential(*parts)
    _cut(model, _mesh((ranks,), ("tensor",)))
    return wrap_plainly(model, parts, case, 0, 1)


def _cut(model: nn.Module, mesh: Any) -> None:
    plan = {
        "0.0": ColwiseParallel(),
        "1.0": RowwiseParallel(),
        "2.0": ColwiseParallel(),
        "3": RowwiseParallel(),
    }
    parallelize_module(model, mesh, plan)


def _pipeline(schedule: type, *, stages: int = 1, copies: int = 1) -> Wrap:
    def wrap(parts: list[nn.Module], case: Case, rank: int, ranks: int) -> Wrapped:  # noqa: ARG001
        length = ranks // copies
        mesh = _mesh((copies, length), ("data", "stage"))
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
            optimizer=make_optimizer(model.parameters(), case.optimizer),
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
        dtypes: that it runs.
        about: which costs are only near what is predicted, from what share of it to what.
    """

    ranks: int
    wrap: Wrap
    divides: str
    reduces: str
    page: str
    dtypes: tuple[torch.dtype, ...] = DTYPES
    about: dict[str, tuple[float, float]] = field(default_factory=dict)


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
    "FSDP1 on 2": Engine(
        ranks=2,
        wrap=_fsdp1("per_update"),
        divides=_MEAN,
        reduces="in the last backward",
        page="engines/fsdp1.md",
        dtypes=(torch.float64, torch.float32),  # bfloat16 would be added up in bfloat16, and is refused
    ),
    "FSDP1 on 2, per micro-batch": Engine(
        ranks=2,
        wrap=_fsdp1("per_micro_batch"),
        divides=_MEAN,
        reduces="in every backward",
        page="engines/fsdp1.md",
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
