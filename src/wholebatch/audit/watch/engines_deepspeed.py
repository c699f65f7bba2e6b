"""Where DeepSpeed delivers gradients, and which parts of them its optimizer reads.

Facts that this file rests on (read in DeepSpeed 0.19.8 and tested against it), most of them private there:

* Gradients are delivered to the model's own parameters, whole in every stage. The optimizer that torch's
  hooks see steps flat float32 partitions, in a call for each of its groups, and gets their gradients only
  then, clipped and divided by the loss scale.
* ``DeepSpeedEngine._take_model_step`` is called once an update. When it begins, the reduced gradients, not
  clipped yet, lie in ``averaged_gradients`` (ZeRO 1 and 2), in the optimizer's own flat buffer (bf16, CPU
  offload), by parameter (ZeRO 3), or in ``.grad`` (stage 0). So that is where to read them.
* ``_hp_mapping`` says which range of a parameter lies in this rank's partition (None: no part of it).
* Without ``gradient_clipping`` in its configuration DeepSpeed clips at norm 1.0.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from wholebatch.audit.watch.engines_base import Piece

_BY_ZERO_3 = "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"


class Partitioned:
    """A DeepSpeedEngine of any ZeRO stage; watched are the parameters of its model."""

    name = "DeepSpeedEngine"

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def receivers(self) -> Iterator[tuple[Tensor, Tensor]]:
        return ((one, one) for one in self._engine.module.parameters() if one.requires_grad)

    def own(self, parameter: Tensor, delivered: Tensor) -> Tensor:  # noqa: ARG002
        return delivered

    def pieces(self, parameter: Tensor) -> Sequence[Piece] | None:
        optimizer = self._engine.optimizer
        if hasattr(parameter, "ds_id"):
            return _pieces_of_zero_3(optimizer, parameter)
        if hasattr(parameter, "_hp_mapping"):
            return _pieces_of_fragment(optimizer, parameter)
        return None

    def loss_scale(self) -> float:
        optimizer = self._engine.optimizer
        own = getattr(optimizer, "loss_scale_config", None)
        return float(getattr(optimizer, "loss_scale", getattr(own, "cur_scale", 1.0)))

    def holds_reduction(self) -> bool | None:
        engine = self._engine
        if engine.inside_no_sync_ctxt:
            return True
        if engine.zero_optimization_stage() >= 2:
            return False
        is_set = engine._is_gradient_accumulation_boundary is not None
        ask = getattr(engine, "managed_gradient_accumulation", None)  # younger than the engine
        if ask is not None and not ask() and not is_set:  # the script's own call of step says it
            return None
        return not engine.is_gradient_accumulation_boundary()

    def unseen(self) -> tuple[str, ...]:
        if getattr(self._engine.optimizer, "swap_optimizer", False):
            return ("gradients that DeepSpeed swaps out to disk are not read",)
        return ()


def _range(local: Tensor, parameter: Any, start: int) -> tuple[Piece, ...]:
    """A flat range as a piece, without what pads it beyond the parameter's end."""
    shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
    local = local.detach().flatten()[: max(0, torch.Size(shape).numel() - start)]
    return (Piece(tensor=local, shape=shape, start=start),) if local.numel() else ()


def _partition(optimizer: Any, parameter: Any) -> Tensor:
    """The flat float32 partition that holds this rank's range of a parameter."""
    group = parameter._hp_mapping.param_group_index
    for name in ("single_partition_of_fp32_groups", "fp32_groups_flat_partition"):
        if hasattr(optimizer, name):
            return cast(Tensor, getattr(optimizer, name)[group])
    raise AttributeError(f"{type(optimizer).__name__} has no flat partitions")


def _pieces_of_fragment(optimizer: Any, parameter: Any) -> tuple[Piece, ...]:
    """ZeRO 1 and 2, and the bf16 optimizer."""
    mapping = parameter._hp_mapping
    if mapping is None:  # the whole of it lies on other ranks
        return ()
    address, whole = mapping.hp_fragment_address, mapping.lp_fragment_address
    gradient = _partition(optimizer, parameter).grad
    if gradient is not None:
        return _range(gradient.flatten().narrow(0, address.start, address.numel), parameter, whole.start)
    try:
        local = mapping.get_lp_grad_fragment(parameter._index_in_param_group).flatten()
    except (ValueError, IndexError, KeyError):  # nothing has been reduced
        return ()
    if local.numel() == parameter.numel():
        local = local.narrow(0, whole.start, whole.numel)
    return _range(local, parameter, whole.start)


def _pieces_of_zero_3(optimizer: Any, parameter: Any) -> tuple[Piece, ...]:
    group, offset, length = optimizer.grad_position[optimizer.get_param_id(parameter)]
    gradient = optimizer.fp32_partitioned_groups_flat[group].grad
    if gradient is not None:
        local = gradient.narrow(0, offset, length)
    elif optimizer.averaged_gradients.get(group) is not None:
        local = getattr(optimizer, _BY_ZERO_3)[parameter.ds_id]
    else:  # no backward has reached its boundary
        return ()
    place = dist.get_rank(group=parameter.ds_process_group)
    return _range(local, parameter, place * parameter.ds_tensor.ds_numel)


def update_method() -> tuple[type, str] | None:
    """The class and the method that each DeepSpeed update goes through once; None where not imported.

    Torch's own hooks see the optimizer inside it once for each parameter group.
    """
    kind = _engine_class()
    return None if kind is None else (kind, "_take_model_step")


def was_applied(engine: Any) -> bool:
    """Whether the update that has just ended moved the parameters: not after an overflow."""
    return not getattr(engine.optimizer, "overflow", False)


def _engine_class() -> type | None:
    module = sys.modules.get("deepspeed.runtime.engine")
    return getattr(module, "DeepSpeedEngine", None)


def engines_alive() -> list[Any]:
    """DeepSpeed engines of this process, found among all objects; none where it isn't imported."""
    kind = _engine_class()
    if kind is None:
        return []
    return [one for one in gc.get_objects() if issubclass(type(one), kind)]


def is_engine(module: nn.Module) -> bool:
    """Whether a module is a DeepSpeedEngine, without importing DeepSpeed."""
    kind = _engine_class()
    return kind is not None and isinstance(module, kind)


def place_in_engine(module: nn.Module) -> tuple[int, int]:
    """Place of this rank among the data-parallel copies of a DeepSpeedEngine."""
    group = cast(Any, module).data_parallel_group
    return dist.get_rank(group), dist.get_world_size(group)
