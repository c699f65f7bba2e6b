"""Which engine runs a model, which copy of it this rank has, and what to watch of an optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from wholebatch.audit.watch import engines_deepspeed, engines_fsdp
from wholebatch.audit.watch.engines_base import Engine, Piece, accumulation_node, pieces_of_dtensor
from wholebatch.audit.watch.engines_deepspeed import update_method, was_applied

__all__ = [
    "Engine",
    "Piece",
    "accumulation_node",
    "data_parallel_place",
    "engine_of",
    "pieces_of_dtensor",
    "update_method",
    "was_applied",
    "watched_parameters",
]


def engine_of(module: nn.Module) -> Engine | None:
    """The engine that shards a model, wherever in it the wrapper is.

    Args:
        module: the outermost one.

    Returns:
        Engine | None: None for a plain model and for DistributedDataParallel, whose parameters
        receive gradients themselves.
    """
    inside = list(module.modules())
    for one in inside:
        if engines_deepspeed.is_engine(one):
            return engines_deepspeed.Partitioned(one)
    if any(isinstance(one, FSDPModule) for one in inside):
        return engines_fsdp.ShardedModules(module)
    if any(isinstance(one, FullyShardedDataParallel) for one in inside):
        return engines_fsdp.FlatParameters(module)
    return None


def watched_parameters(optimizer: Optimizer) -> list[Tensor]:
    """What to watch in place of what an optimizer holds.

    Args:
        optimizer: as torch's hooks see it.

    Returns:
        list[Tensor]: its parameters; for one that DeepSpeed has taken over, whose parameters are flat
        partitions, those of the model that need gradients.

    Exactness:
        nothing is computed.
    """
    for engine in engines_deepspeed.engines_alive():
        inner = getattr(engine.optimizer, "optimizer", None)
        if any(optimizer is one for one in (engine.basic_optimizer, engine.optimizer, inner)):
            return [one for one in engine.module.parameters() if one.requires_grad]
    return [one for group in optimizer.param_groups for one in group["params"]]


def data_parallel_place(modules: Iterable[nn.Module], optimizers: Iterable[Optimizer]) -> tuple[int, int]:
    """Which of the data-parallel copies of the model this rank belongs to, and how many there are.

    Read from what the wrappers reduce over; without one, from the meshes of distributed parameters, which
    are then taken for tensor parallel.

    Args:
        modules: outermost modules of the job.
        optimizers: its optimizers.

    Returns:
        tuple[int, int]: (replica, number of replicas); (rank, ranks) where nothing says otherwise.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    for module in modules:
        for place in _places(module):
            return place
    return _place_beside_mesh(_largest_mesh(optimizers))


def _places(module: nn.Module) -> Iterator[tuple[int, int]]:
    inside = list(module.modules())
    for one in inside:
        if engines_deepspeed.is_engine(one):
            yield engines_deepspeed.place_in_engine(one)
    found = (engines_fsdp.place_in_sharded(module), engines_fsdp.place_in_flat(module))
    yield from (place for place in found if place is not None)
    for one in inside:
        if isinstance(one, DistributedDataParallel):
            yield dist.get_rank(one.process_group), dist.get_world_size(one.process_group)


def _largest_mesh(optimizers: Iterable[Optimizer]) -> DeviceMesh | None:
    held = (one for optimizer in optimizers for one in watched_parameters(optimizer))
    meshes = [one.device_mesh for one in held if isinstance(one, DTensor)]
    return max(meshes, key=lambda mesh: mesh.size(), default=None)


def _place_beside_mesh(mesh: DeviceMesh | None) -> tuple[int, int]:
    """Ranks of one tensor-parallel mesh share a replica; replicas are counted by their lowest rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if mesh is None or mesh.size() == 1:
        return rank, ranks
    together: Sequence[Any] = sorted(mesh.mesh.flatten().tolist())
    lowest, size = together[0], len(together)
    stride = together[1] - lowest
    return lowest // (stride * size) * stride + lowest % stride, ranks // size
