"""How the ranks share the model: whole on each, cut by ``fully_shard``, or its matrices over several.

The proof judges the model before it is cut, on every rank; the cut keeps every number of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from wholebatch.ranks.deepspeed_state import gathered_state, holds_pieces
from wholebatch.train.models.gpt import GPT
from wholebatch.train.models.heads import cut_gpt, whole_attention
from wholebatch.train.settings import ParallelConfig, TrainConfig
from wholebatch.train.world import World

_REPLICAS, _SHARDS, _TENSOR = "replicas", "shards", "tensor"
CUT = ("fsdp", "hsdp")
STAGED = "pipeline"


def forwards_are_meetings(settings: ParallelConfig, ranks: int) -> bool:
    """Whether no rank can run a forward alone: its parameters or its sequences lie on others too."""
    return is_cut(settings, ranks) or settings.context_parallel > 1


def is_cut(settings: ParallelConfig, ranks: int) -> bool:
    """Whether parameters lie in parts over the ranks."""
    in_pieces = settings.strategy == "deepspeed" and settings.zero_stage == 3
    cut = settings.strategy in (*CUT, STAGED) or in_pieces
    return ranks > 1 and (cut or settings.tensor_parallel > 1)


def reduces_each(settings: ParallelConfig, ranks: int) -> bool:
    """Whether gradients are reduced in every micro-batch, and not once an update."""
    in_shards = settings.strategy in CUT and settings.reduce == "per_micro_batch"
    return ranks > 1 and (in_shards or (settings.strategy == "deepspeed" and settings.zero_stage >= 2))


def num_stage_ranks(settings: ParallelConfig, ranks: int) -> int:
    """Ranks that hold the layers of one replica between them: all of them unless a number is given."""
    if settings.strategy != STAGED or settings.pipeline_parallel > 1:
        return settings.pipeline_parallel
    return ranks


def parallel_model(module: nn.Module, config: TrainConfig, world: World, *, padding_id: int) -> nn.Module:
    """The model as the ranks hold it together: in DDP, or cut in place.

    Args:
        module: the whole model, with the same values on every rank, on this rank's device.
        config: all settings, checked.
        world: the ranks.
        padding_id: token id of padding.

    Exactness: no number is changed, only where it lies.
    """
    settings = config.parallel
    if not is_cut(settings, world.ranks):
        return world.parallel(module)
    if settings.strategy == STAGED:
        from wholebatch.train.layouts.stages import pipelined

        assert isinstance(module, GPT)
        stages = num_stage_ranks(settings, world.ranks)
        return pipelined(module, config, world, stage_ranks=stages, padding_id=padding_id)
    mesh = _mesh(settings, world)
    if settings.tensor_parallel > 1:
        assert isinstance(module, GPT)
        cut_gpt(module, mesh[_TENSOR])
    if world.ranks > settings.tensor_parallel:
        over = mesh[_REPLICAS, _SHARDS] if settings.strategy == "hsdp" else mesh[_SHARDS]
        for layer in _layers(module):
            fully_shard(layer, mesh=over)
        fully_shard(module, mesh=over)
    return module


def _mesh(settings: ParallelConfig, world: World) -> DeviceMesh:
    """The ranks in a box: copies, shards of a copy, and neighbours that share each matrix."""
    replicas = world.ranks // settings.tensor_parallel
    shards = settings.shards if settings.strategy == "hsdp" else replicas
    sizes = (replicas // shards, shards, settings.tensor_parallel)
    return init_device_mesh(world.device.type, sizes, mesh_dim_names=(_REPLICAS, _SHARDS, _TENSOR))


def _layers(module: nn.Module) -> list[nn.Module]:
    """The entries of the model's outermost lists of layers, but for those that share a parameter.

    Each is gathered by itself in its forward; what is left over is gathered with the whole.
    """
    owners = Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))
    found: list[nn.Module] = []
    for child in module.children():
        inside = list(child) if isinstance(child, nn.ModuleList) else None
        for layer in _layers(child) if inside is None else inside:
            own = list(layer.parameters())
            if own and all(owners[id(p)] == 1 for p in own):
                found.append(layer)
    return found


def reshard(module: nn.Module) -> None:
    """Let go of parameters that a forward without a backward left gathered; none where nothing is cut.

    Whoever changes or reads parameters next would else meet the gathered copies.
    """
    for each in module.modules():
        if isinstance(each, FSDPModule):
            each.reshard()


def whole_state(module: nn.Module, world: World) -> dict[str, Any] | None:
    """The state dict of a model in parts, put together on the leading rank; None on the others.

    A model that is whole on every rank gives None everywhere. All ranks call it.

    Exactness: the values bit for bit.
    """
    if holds_pieces(module):
        return gathered_state(module, keep=world.leads)
    state: Mapping[str, Any] = module.state_dict()
    names = world.gather([(name, one.shape, one.dtype) for name, one in state.items()])
    if any(of_rank != names[0] for of_rank in names):
        return _of_all_stages(state, names, world)
    if not any(isinstance(value, DTensor) for value in state.values()):
        return None
    found: dict[str, Any] = {}
    for name, value in state.items():  # one after the other: the others hold no second whole model
        one = value.full_tensor() if isinstance(value, DTensor) else value
        if world.leads:
            found[name] = one.detach().cpu() if isinstance(one, Tensor) else one
    return whole_attention(found) if world.leads else {}


def _of_all_stages(
    state: Mapping[str, Tensor], held: Sequence[Sequence[tuple[str, torch.Size, torch.dtype]]], world: World
) -> dict[str, Any]:
    """What the ranks hold under names of their own, sent to the leading rank one after the other."""
    found: dict[str, Any] = {}
    for owner, of_rank in enumerate(held):
        for name, shape, dtype in of_rank:
            if name in found:
                continue  # of a copy of the pipeline
            one = state[name].detach().cpu() if owner == world.rank else torch.empty(shape, dtype=dtype)
            if world.rank == owner != 0:
                dist.send(one, dst=0, group=world.group)
            elif world.leads and owner != 0:
                dist.recv(one, src=owner, group=world.group)
            found[name] = one if world.leads else None
    return found if world.leads else {}
