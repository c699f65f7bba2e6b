"""How the model of the engines' table comes under DeepSpeed and Megatron-Core; runs inside a rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import deepspeed_rounds
import megatron_rounds
from engines.work import CLIP, Case, Tensors, make_optimizer
from engines.wrapped import Engine, Wrap, Wrapped, wrap_plainly


class _UnderDeepSpeed(Wrapped):
    """A DeepSpeed engine, which clips in its own step."""

    clips_later = True

    def before_step(self, look: Callable[..., None]) -> None:
        engine: Any = self.model
        taken = engine._take_model_step

        def take(*given: Any) -> Any:
            look()
            return taken(*given)

        engine._take_model_step = take

    def read(self, *, gradients: bool) -> Tensors:
        read = deepspeed_rounds.gradients if gradients else deepspeed_rounds.weights
        return read(deepspeed_rounds.deepspeed_here(self.replica, self.replicas), self.model)

    def held(self) -> int:
        optimizer: Any = self.optimizer
        groups = list(getattr(optimizer, "averaged_gradients", {}).values())
        groups += list(getattr(optimizer, "all_grad_tensors", {}).values())
        kept = [one for group in groups for one in group or () if not getattr(one, "_zero_padding", False)]
        kept += [one.grad for one in self.model.parameters()]
        kept += [getattr(one, "grad_accum", None) for one in self.model.parameters()]
        kept += getattr(optimizer, "fp32_groups_gradients_flat", [])
        own = {one.data_ptr(): one.nbytes for one in kept if one is not None}
        return sum(own.values())


def _zero(stage: int) -> Wrap:
    def wrap(parts: list[nn.Module], case: Case, rank: int, ranks: int) -> Wrapped:
        half = case.dtype == torch.bfloat16
        mode = "bf16, fp32 gradients" if half else "fp32"
        module = nn.Sequential(*parts)
        engine, optimizer, *_ = deepspeed_rounds.deepspeed_here(rank, ranks).initialize(
            model=module,
            optimizer=make_optimizer(module.parameters(), case.optimizer),
            config=deepspeed_rounds.config_of(stage, mode, CLIP, zero=_NONE_KEPT if stage == 3 else {}),
        )
        return _UnderDeepSpeed(
            model=engine, optimizer=optimizer, parts=dict(enumerate(parts)), replica=rank, replicas=ranks
        )

    return wrap


class _UnderMegatron(Wrapped):
    def held(self) -> int:
        return sum(buffer.grad_data.nbytes for buffer in self.model.buffers)  # type: ignore[union-attr]


def _megatron_ddp(mode: str) -> Wrap:
    def wrap(parts: list[nn.Module], case: Case, rank: int, ranks: int) -> Wrapped:
        model = megatron_rounds.wrap(megatron_rounds.megatron_here(), nn.Sequential(*parts), mode)
        return wrap_plainly(model, parts, case, rank, ranks, kind=_UnderMegatron)

    return wrap


# ZeRO 2 holds a gradient that lies across two parts whole, here up to a fifth of all; ZeRO 3 goes back with
# parameters that its forward has just gathered.
_ABOUT = {2: {"held_bytes": (1.0, 1.5)}, 3: {"gathered_bytes": (0.4, 1.0)}}
# Else ZeRO 3 keeps what is as small as all of this model gathered for good.
_NONE_KEPT = {"stage3_param_persistence_threshold": 0}
_BY_D = "the engine, by D; the window multiplies by it"
ENGINES = {
    **{
        f"DeepSpeed, ZeRO {stage}": Engine(
            ranks=2,
            wrap=_zero(stage),
            divides=_BY_D,
            reduces="after the last" if stage < 2 else "in every backward",
            page="engines/deepspeed.md",
            # in bfloat16 without ZeRO it adds up in bfloat16, and begins with a step on zeros
            dtypes=(torch.float32, torch.bfloat16) if stage else (torch.float32,),
            about=_ABOUT.get(stage, {}),
        )
        for stage in range(4)
    },
    "Megatron-Core": Engine(
        ranks=2,
        wrap=_megatron_ddp("plain"),
        divides=_BY_D,
        reduces="after the last",
        page="engines/megatron.md",
    ),
    "Megatron-Core, overlap": Engine(
        ranks=2,
        wrap=_megatron_ddp("overlap"),
        divides=_BY_D,
        reduces="in the last backward",
        page="engines/megatron.md",
    ),
}
