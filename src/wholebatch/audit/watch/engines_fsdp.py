"""Where torch's two FSDPs deliver gradients, and which parts of them the optimizer reads.

Facts that this file rests on (read in torch 2.13 and tested against it), all of them private there:

* FSDP2 gives the optimizer a DTensor and the graph another leaf, ``FSDPParam._unsharded_param``: made at
  the first all-gather, kept over resharding, so that its accumulation node is the graph's.
* FSDP1 joins parameters to one flat leaf. Its accumulation node is kept from the forward to the end of the
  backward. Asked for at other times the leaf would make one of the shard's size, and the backward would
  fail. So a flat parameter that took no part in a forward is no receiver.
* With ``use_orig_params`` the optimizer holds one view a parameter of this rank's shard, of any length,
  empty too; without, the flat shard itself, which is padded at its end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from wholebatch.audit.watch.engines_base import Piece, pieces_of_dtensor


class ShardedModules:
    """FSDP2, ``fully_shard``, and what is built of it: modules whose parameters are DTensors."""

    name = "FSDPModule"

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def receivers(self) -> Iterator[tuple[Tensor, Tensor]]:
        known: set[int] = set()
        for one in _sharded_parameters(self._module):
            leaf = getattr(one, "_unsharded_param", None)
            known |= {id(one.sharded_param), id(leaf)}
            if leaf is not None and one.sharded_param.requires_grad and not isinstance(leaf, DTensor):
                yield one.sharded_param, leaf
        for parameter in self._module.parameters():
            if (
                id(parameter) not in known
                and parameter.requires_grad
                and not isinstance(parameter, DTensor)
            ):
                yield parameter, parameter

    def own(self, parameter: Tensor, delivered: Tensor) -> Tensor:  # noqa: ARG002
        return delivered

    def pieces(self, parameter: Tensor) -> Sequence[Piece] | None:
        if not isinstance(parameter, DTensor):
            return None
        gradient = parameter.grad
        return pieces_of_dtensor(gradient) if isinstance(gradient, DTensor) else ()

    def loss_scale(self) -> float:
        return 1.0

    def holds_reduction(self) -> bool | None:
        groups = list(_parameter_groups(self._module))
        return all(_holds(group) for group in groups) if groups else None

    def unseen(self) -> tuple[str, ...]:
        known = {id(one.sharded_param) for one in _sharded_parameters(self._module)}
        parallel = sum(one.is_dtensor for one in _sharded_parameters(self._module))
        parallel += sum(isinstance(p, DTensor) and id(p) not in known for p in self._module.parameters())
        if not parallel:
            return ()
        return (
            f"{parallel} parameters are parts of a tensor-parallel layer: what a micro-batch delivers to"
            " them is spread over ranks",
        )


def _parameter_groups(module: nn.Module) -> Iterator[Any]:
    """FSDP2's groups of parameters, each once: modules may share one."""
    seen: set[int] = set()
    for one in module.modules():
        if isinstance(one, FSDPModule):
            state: Any = one._get_fsdp_state()
            for group in state._fsdp_param_groups:
                if id(group) not in seen:
                    seen.add(id(group))
                    yield group


def _sharded_parameters(module: nn.Module) -> Iterator[Any]:
    return (one for group in _parameter_groups(module) for one in group.fsdp_params)


def _holds(group: Any) -> bool:
    """Held back whole, or with hybrid sharding reduced within its shards only."""
    is_hybrid = group.mesh_info.replicate_mesh_dim is not None
    return not group.reduce_grads or (is_hybrid and not group.all_reduce_grads)


class FlatParameters:
    """FSDP1, ``FullyShardedDataParallel``: parameters joined to flat ones."""

    name = "FullyShardedDataParallel"

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._views: dict[int, tuple[Any, int]] = {}
        self._flats: dict[int, Any] = {}
        for unit in FullyShardedDataParallel.fsdp_modules(module):
            handle: Any = unit._handle
            if handle is not None:
                flat = handle.flat_param
                self._flats[id(flat)] = unit
                views = flat._params if handle._use_orig_params else ()
                self._views |= {id(view): (unit, index) for index, view in enumerate(views or ())}

    def receivers(self) -> Iterator[tuple[Tensor, Tensor]]:
        joined: set[int] = set()
        for unit in self._flats.values():
            flat = unit._handle.flat_param
            views = flat._params if unit._handle._use_orig_params else None
            watched = [flat] if views is None else [view for view in views if view.requires_grad]
            joined |= {id(flat), *map(id, views or ())}
            if len(getattr(flat, "_post_backward_hook_state", ())) == 2:  # it took part in the forward
                yield from ((one, flat) for one in watched)
        for parameter in self._module.parameters():
            if id(parameter) not in joined and parameter.requires_grad and parameter.is_leaf:
                yield parameter, parameter

    def own(self, parameter: Tensor, delivered: Tensor) -> Tensor:
        if id(parameter) not in self._views:
            return delivered
        unit, index = self._views[id(parameter)]
        flat = unit._handle.flat_param
        start = _starts(flat)[index]
        shape = flat._shapes[index]
        return delivered.flatten()[start : start + shape.numel()].view(shape)

    def pieces(self, parameter: Tensor) -> Sequence[Piece] | None:
        if id(parameter) in self._views:
            unit, index = self._views[id(parameter)]
            return _pieces_of_view(unit, index, parameter.grad)
        if id(parameter) in self._flats:
            return _pieces_of_flat(self._flats[id(parameter)], parameter.grad)
        return None

    def loss_scale(self) -> float:
        return 1.0

    def holds_reduction(self) -> bool | None:
        units = FullyShardedDataParallel.fsdp_modules(self._module)
        return not any(unit._sync_gradients for unit in units)

    def unseen(self) -> tuple[str, ...]:
        return ()


def _starts(flat: Any) -> list[int]:
    """Where each joined parameter begins in the flat one; padding lies between them."""
    begins = [0, *accumulate(flat._numels_with_padding)]
    return [begin for begin, padding in zip(begins, flat._is_padding_mask, strict=False) if not padding]


def _pieces_of_view(unit: Any, index: int, gradient: Tensor | None) -> tuple[Piece, ...]:
    if gradient is None or gradient.numel() == 0:
        return ()
    flat = unit._handle.flat_param
    shape = tuple(flat._shapes[index])
    info = flat._shard_param_infos[index]
    # Held back gradients are whole, and so are those of a unit that isn't sharded.
    is_shard = info.in_shard and gradient.numel() == info.numel_in_shard
    start = info.intra_param_start_idx if is_shard else 0
    local = gradient.detach().flatten()
    return (Piece(tensor=local, shape=shape, start=start, copy=_copy(unit)),)


def _pieces_of_flat(unit: Any, gradient: Tensor | None) -> tuple[Piece, ...]:
    if gradient is None:
        return ()
    flat = unit._handle.flat_param
    whole = flat._unpadded_unsharded_size.numel()
    local = gradient.detach().flatten()
    is_shard = unit._handle.uses_sharded_strategy and local.numel() == flat._sharded_size.numel()
    start = unit._handle.rank * local.numel() if is_shard else 0
    local = local[: max(0, whole - start)]
    return (Piece(tensor=local, shape=(whole,), start=start, copy=_copy(unit)),) if local.numel() else ()


def _copy(unit: Any) -> int:
    """Which copy this rank has: unsharded units are the same on all ranks, hybrid ones on each node."""
    if not unit._handle.uses_sharded_strategy:
        return int(dist.get_rank(unit.process_group))
    between = getattr(unit, "_inter_node_pg", None)
    return int(dist.get_rank(between)) if between is not None else 0


def place_in_sharded(module: nn.Module) -> tuple[int, int] | None:
    """Place of this rank in the largest data-parallel mesh of FSDP2; None without one."""
    meshes = [group.mesh_info.mesh for group in _parameter_groups(module)]
    places = [_place_in_mesh(mesh) for mesh in meshes if mesh.get_coordinate() is not None]
    return max(places, key=lambda place: place[1], default=None)


def _place_in_mesh(mesh: Any) -> tuple[int, int]:
    place = 0
    for dim, coordinate in enumerate(mesh.get_coordinate()):
        place = place * mesh.size(dim) + coordinate
    return place, mesh.size()


def place_in_flat(module: nn.Module) -> tuple[int, int] | None:
    """Place of this rank in FSDP1's process groups; None without FSDP1."""
    units: list[Any] = FullyShardedDataParallel.fsdp_modules(module)
    if not units:
        return None
    inner = units[0].process_group
    place, size = dist.get_rank(inner), dist.get_world_size(inner)
    between = getattr(units[0], "_inter_node_pg", None)
    if between is None:
        return place, size
    return dist.get_rank(between) * size + place, dist.get_world_size(between) * size
