"""Which engine reduces the gradients of a model, and what the window needs of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from wholebatch.errors import UnsupportedError
from wholebatch.gradients import is_sharded
from wholebatch.ranks.base import Ranks, Reduce
from wholebatch.ranks.single import SingleRank


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What the user said of the ranks.

    Attributes:
        process_group: the ranks of the job; None for the engine's own, or all.
        reduce: when the engine reduces.
        reduction_divisor: what a communication hook of DDP divides by.
        context_parallel: the ranks that hold parts of the same sequences.
    """

    process_group: dist.ProcessGroup | None
    reduce: Reduce
    reduction_divisor: float | None
    context_parallel: DeviceMesh | None

    def all_ranks(self) -> dist.ProcessGroup:
        """The group of all ranks of the job."""
        group = self.process_group if self.process_group is not None else dist.group.WORLD
        assert group is not None
        return group


def find_ranks(
    model: nn.Module,
    *,
    process_group: dist.ProcessGroup | None,
    reduce: Reduce,
    reduction_divisor: float | None,
    context_parallel: DeviceMesh | None = None,
) -> Ranks:
    """The seam for ``model``'s engine.

    Args:
        model: the module whose forward the loop calls.
        process_group: the ranks of the job; by default the model's own, or all ranks.
        reduce: when the engine reduces; see ``UpdateWindow``.
        reduction_divisor: what a communication hook of DDP divides by.
        context_parallel: one dimension of a mesh, of the ranks that hold parts of the same sequences.

    Raises:
        UnsupportedError: a wrapper that this version does not know, or several ranks without one.
    """
    asked = Asked(
        process_group=process_group,
        reduce=reduce,
        reduction_divisor=reduction_divisor,
        context_parallel=context_parallel,
    )
    _refuse_odd(model, asked)
    name, make = _engine(model)
    _refuse_nested(model, name)
    if reduction_divisor is not None and make is not _ddp:
        raise UnsupportedError(
            f"reduction_divisor={reduction_divisor!r} tells what a communication hook of "
            f"DistributedDataParallel divides by, and {name} has none; leave it out"
        )
    if context_parallel is not None and make not in _CONTEXT_PARALLEL:
        raise UnsupportedError(
            f"context_parallel over {name} is not known to the window, which would count the items of "
            f"one part alone; shard the model with fully_shard, or wrap it in DistributedDataParallel, "
            f"over the ranks of that mesh"
        )
    return make(model, asked)


# The engines, each imported once a model needs it ----------------------------------------------------


def _ddp(model: Any, asked: Asked) -> Ranks:
    from wholebatch.ranks.ddp import DDPRanks

    group, own = asked.process_group, model.process_group
    if group is not None and group is not own:
        raise UnsupportedError(
            f"the window's process group has {dist.get_world_size(group)} ranks and DDP's another one of "
            f"{dist.get_world_size(own)}; give both the same group"
        )
    return DDPRanks(
        model,
        reduce=asked.reduce,
        reduction_divisor=asked.reduction_divisor,
        context_parallel=asked.context_parallel,
    )


def _fsdp(model: nn.Module, asked: Asked) -> Ranks:
    from wholebatch.ranks.fsdp import FSDPRanks

    return FSDPRanks(
        model, reduce=asked.reduce, group=asked.all_ranks(), context_parallel=asked.context_parallel
    )


def _fsdp1(model: Any, asked: Asked) -> Ranks:
    from wholebatch.ranks.fsdp1 import FSDP1Ranks

    return FSDP1Ranks(model, reduce=asked.reduce, group=asked.all_ranks())


def _deepspeed(model: Any, asked: Asked) -> Ranks:
    from wholebatch.ranks.deepspeed import DeepSpeedRanks

    return DeepSpeedRanks(model, reduce=asked.reduce)


def _megatron(model: Any, asked: Asked) -> Ranks:
    from wholebatch.ranks.megatron import MegatronRanks

    if asked.context_parallel is not None:
        raise UnsupportedError(
            "context_parallel is what megatron.core.parallel_state says of a model under Megatron-Core; "
            "leave it out"
        )
    return MegatronRanks(model, reduce=asked.reduce, group=asked.all_ranks())


def _pipeline(model: Any, asked: Asked) -> Ranks:
    from wholebatch.ranks.pipeline_ranks import PipelineRanks

    return PipelineRanks(model, reduce=asked.reduce, group=asked.all_ranks())


def _tensor_parallel(model: nn.Module, asked: Asked) -> Ranks:
    from wholebatch.ranks.tensor_parallel import TensorParallelRanks

    return TensorParallelRanks(model, reduce=asked.reduce, group=asked.all_ranks())


def _plain(model: nn.Module, asked: Asked) -> Ranks:
    group = asked.process_group
    ranks = dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1
    if ranks > 1:
        raise UnsupportedError(
            f"{ranks} ranks are running and the model is a plain {type(model).__name__}, whose gradients "
            f"nobody reduces; wrap it in torch.nn.parallel.DistributedDataParallel, or use fully_shard"
        )
    if asked.reduce == "per_micro_batch":
        raise UnsupportedError(
            'reduce="per_micro_batch" is for engines that shard gradients, and one rank reduces nothing; '
            "leave it out"
        )
    return SingleRank()


_Make = Callable[[Any, Asked], Ranks]
# Those that know ranks which hold parts of one sequence; Megatron-Core's says so in words of its own.
_CONTEXT_PARALLEL: frozenset[_Make] = frozenset({_ddp, _fsdp, _megatron})
# By name, so that no engine is imported to say that a model is not one of its own.
_BY_CLASS: dict[str, _Make] = {
    "DistributedDataParallel": _ddp,
    "FSDPModule": _fsdp,
    "FullyShardedDataParallel": _fsdp1,
    "DeepSpeedEngine": _deepspeed,
    "PipelinedModel": _pipeline,
    "megatron.DistributedDataParallel": _megatron,
}
_KNOWN = (
    "a plain module on one rank, and on several torch.nn.parallel.DistributedDataParallel, fully_shard, "
    "FullyShardedDataParallel, DeepSpeed, Megatron-Core's DistributedDataParallel, a PipelinedModel, or "
    "DTensors over a mesh of tensor-parallel ranks"
)
# Known by name, and refused.
_FOREIGN = {
    "DataParallel",
    "PipelineEngine",
    "megatron.FullyShardedDataParallel",
    "megatron.TorchFullyShardedDataParallel",
}
# Engines that wrap parts of a model as well as all of it.
_NESTING = {"FSDPModule", "FullyShardedDataParallel"}


def engine_of(model: nn.Module) -> str | None:
    """What spreads a model over ranks, such as "FSDPModule"; None for a plain module."""
    name, make = _engine(model)
    return None if make is _plain else name


def _engine(model: nn.Module) -> tuple[str, _Make]:
    """The name of the engine that a model is under, and what makes its ranks."""
    for name, make in _BY_CLASS.items():
        if name in _class_names(model):
            return name, make
    inside = {name for module in model.modules() for name in _class_names(module)}
    if "FSDPModule" in inside:
        return "FSDPModule", _fsdp
    if any(is_sharded(parameter) for parameter in model.parameters()):
        return "a model of DTensors", _tensor_parallel
    return "a plain module", _plain


def _refuse_odd(model: Any, asked: Asked) -> None:
    if asked.reduce not in get_args(Reduce):
        raise UnsupportedError(
            f"reduce={asked.reduce!r} is none of {', '.join(map(repr, get_args(Reduce)))}"
        )
    if asked.process_group is not None and not isinstance(asked.process_group, dist.ProcessGroup):
        raise UnsupportedError(
            f"process_group={asked.process_group!r} is no torch.distributed process group"
        )
    if asked.context_parallel is not None and not isinstance(asked.context_parallel, DeviceMesh):
        raise UnsupportedError(
            f"context_parallel={asked.context_parallel!r} is no DeviceMesh; give a dimension of one, as "
            f'mesh["cp"]'
        )
    if not isinstance(model, nn.Module):
        raise UnsupportedError(f"the model is a {type(model).__name__}; the window knows {_KNOWN}")


def _refuse_nested(model: nn.Module, engine: str) -> None:
    """Refuse wrappers that the window does not know, and those that it knows inside of another."""
    for path, module in model.named_modules():
        names = _class_names(module)
        found = names & (_FOREIGN | set(_BY_CLASS))
        if not found or (found == {engine} and (not path or engine in _NESTING)):
            continue
        if engine == "PipelinedModel" and found <= {"DistributedDataParallel", "FSDPModule"}:
            continue  # its stages
        where = f"{path} inside the model" if path else "the model"
        raise UnsupportedError(
            f"{where} is a {min(found)}, which the window does not know there. It knows {_KNOWN}; "
            f"compile or nest what is inside DistributedDataParallel, not the wrapper itself"
        )


def _class_names(module: nn.Module) -> set[str]:
    return {_known_as(base) for base in type(module).__mro__}


def _known_as(kind: type) -> str:
    """The name of a class; Megatron's wrappers are named as torch's are, and work otherwise."""
    megatron = kind.__module__.split(".")[0] == "megatron"
    return f"megatron.{kind.__name__}" if megatron else kind.__name__
