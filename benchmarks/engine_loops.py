"""Each engine's own accumulation, written by hand as its documentation has it, and the window on the same.

A loop takes one update: the gradient of the summed next-token loss over N, the items of the global batch,
clipped, then one optimizer step. DeepSpeed clips and steps by itself, in both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

import wholebatch as wb
from wholebatch.ranks.pipeline import PipelinedModel
from wholebatch.train.models.heads import cut_gpt
from wholebatch.train.models.stages import GPTStage
from work import CLIP_GRAD_NORM, LEARNING_RATE, MicroBatch, Work, count_items, new_model, sum_loss

Loop = Callable[[list[MicroBatch]], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """A model on an engine, and one update of it.

    Args:
        model: whose parameters are compared at the end.
        update: takes this rank's micro-batches.
    """

    model: nn.Module
    update: Loop


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """One row of the table.

    Args:
        name: of the engine and of when it reduces.
        ranks: that it is measured on.
        replicas: of the model over those ranks; ranks of one replica have the same micro-batches.
        by_hand: makes the engine's own loop.
        by_window: makes the window's.
        package: that has to be installed beside torch.
    """

    name: str
    ranks: int
    replicas: int
    by_hand: Callable[[Work], Contender]
    by_window: Callable[[Work], Contender]
    package: str = "torch"

    @property
    def is_here(self) -> bool:
        """Whether its package is installed."""
        return find_spec(self.package) is not None


def num_items(batches: Sequence[MicroBatch], replicas: int) -> Tensor:
    """N over all replicas."""
    items = torch.stack([count_items(batch) for batch in batches]).sum()
    if replicas > 1:
        dist.all_reduce(items)
    return items


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)


def _window(model: nn.Module, optimizer: torch.optim.Optimizer, **more: Any) -> Contender:
    objective = wb.next_token_loss()
    window = wb.UpdateWindow(model, optimizer, objective, clip_grad_norm=CLIP_GRAD_NORM, **more)
    if isinstance(model, PipelinedModel):
        return Contender(model=model, update=lambda batches: _ignore(window.run(batches)))

    def loss_fn(model: Any, batch: MicroBatch) -> Any:
        return objective(model(batch["input_ids"]), batch)

    return Contender(model=model, update=lambda batches: _ignore(window.run(batches, loss_fn)))


def _by_window(make: Callable[[Work], nn.Module], **more: Any) -> Callable[[Work], Contender]:
    """The window's loop over the models that ``make`` makes."""

    def by_window(work: Work) -> Contender:
        model = make(work)
        return _window(model, _adamw(model), **more)

    return by_window


def _ignore(record: Any) -> None:
    """A loop gives nothing back."""


# fully_shard -------------------------------------------------------------------------------------------


def _sharded(work: Work, copies: int) -> nn.Module:
    model, ranks = new_model(work), dist.get_world_size()
    mesh = init_device_mesh("cpu", (copies, ranks // copies), mesh_dim_names=("copies", "shards"))
    for part in [*model.blocks, model]:
        fully_shard(part, mesh=mesh if copies > 1 else mesh["shards"])
    return model


def _fsdp_by_hand(work: Work, *, held_back: bool, copies: int) -> Contender:
    model: Any = _sharded(work, copies)
    optimizer, replicas = _adamw(model), dist.get_world_size()

    def update(batches: list[MicroBatch]) -> None:
        share = replicas / num_items(batches, replicas)  # fully_shard divides by the replicas
        for index, batch in enumerate(batches):
            last = index == len(batches) - 1
            model.set_requires_gradient_sync(last or not held_back)
            if copies > 1:
                model.set_requires_all_reduce(last)
            (sum_loss(model(batch["input_ids"]), batch["labels"]) * share).backward()
        clip_grad_norm_(model.parameters(), CLIP_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()

    return Contender(model=model, update=update)


def _fsdp(name: str, *, held_back: bool, copies: int = 1) -> Engine:
    reduce = "per_update" if held_back else "per_micro_batch"
    return Engine(
        name=name,
        ranks=2 * copies,
        replicas=2 * copies,
        by_hand=lambda work: _fsdp_by_hand(work, held_back=held_back, copies=copies),
        by_window=_by_window(lambda work: _sharded(work, copies), reduce=reduce),
    )


def _fsdp1_model(work: Work) -> FullyShardedDataParallel:
    model, place = new_model(work), torch.device("cpu")
    for number, block in enumerate(model.blocks):
        model.blocks[number] = FullyShardedDataParallel(block, device_id=place)
    return FullyShardedDataParallel(model, device_id=place)


def _fsdp1_by_hand(work: Work) -> Contender:
    model = _fsdp1_model(work)
    optimizer, replicas = _adamw(model), dist.get_world_size()

    def update(batches: list[MicroBatch]) -> None:
        share = replicas / num_items(batches, replicas)  # FSDP divides by the replicas
        for index, batch in enumerate(batches):
            with nullcontext() if index == len(batches) - 1 else model.no_sync():
                (sum_loss(model(batch["input_ids"]), batch["labels"]) * share).backward()
        model.clip_grad_norm_(CLIP_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()

    return Contender(model=model, update=update)


# Tensor parallel ---------------------------------------------------------------------------------------


def _tensor_parallel(work: Work) -> nn.Module:
    model = new_model(work)
    cut_gpt(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def _tensor_by_hand(work: Work) -> Contender:
    model = _tensor_parallel(work)
    optimizer = _adamw(model)
    # torch's own clipping takes no mixture of whole parameters and of those in parts
    kinds = [
        [p for p in model.parameters() if isinstance(p, DTensor) is in_parts] for in_parts in (True, False)
    ]

    def update(batches: list[MicroBatch]) -> None:
        items = num_items(batches, 1)
        for batch in batches:
            (sum_loss(model(batch["input_ids"]), batch["labels"]) / items).backward()
        norms: list[Any] = [get_total_norm([p.grad for p in kind if p.grad is not None]) for kind in kinds]
        norm = (norms[0].full_tensor() ** 2 + norms[1] ** 2).sqrt()
        for kind in kinds:
            clip_grads_with_norm_(kind, CLIP_GRAD_NORM, norm)
        optimizer.step()
        optimizer.zero_grad()

    return Contender(model=model, update=update)


# Pipeline ----------------------------------------------------------------------------------------------


def _stage(work: Work) -> PipelineStage:
    number, stages = dist.get_rank(), dist.get_world_size()
    return PipelineStage(GPTStage(new_model(work), number, stages), number, stages, torch.device("cpu"))


def _pipeline_by_hand(work: Work) -> Contender:
    stage, share = _stage(work), torch.zeros(())
    model = stage.submod
    optimizer = _adamw(model)
    schedule = Schedule1F1B(
        stage,
        work.micro_batches_per_window,
        loss_fn=lambda logits, labels: sum_loss(logits, labels) * share,
        scale_grads=False,
    )

    def update(batches: list[MicroBatch]) -> None:
        share.copy_(1.0 / num_items(batches, 1))
        ids = torch.cat([batch["input_ids"] for batch in batches])
        labels = torch.cat([batch["labels"] for batch in batches])
        schedule.step(*([ids] if stage.is_first else []), target=labels if stage.is_last else None)
        square = get_total_norm([p.grad for p in model.parameters() if p.grad is not None]) ** 2
        dist.all_reduce(square)
        clip_grads_with_norm_(model.parameters(), CLIP_GRAD_NORM, square.sqrt())
        optimizer.step()
        optimizer.zero_grad()

    return Contender(model=model, update=update)


def _pipelined(work: Work) -> PipelinedModel:
    return PipelinedModel(_stage(work), schedule=Schedule1F1B, inputs=lambda batch: batch["input_ids"])


# DeepSpeed ---------------------------------------------------------------------------------------------


def _deepspeed(work: Work, stage: int, micro_batches: int) -> Any:
    import deepspeed

    model = new_model(work)
    config = {
        "train_micro_batch_size_per_gpu": work.micro_batch_samples,
        "gradient_accumulation_steps": micro_batches,
        "gradient_clipping": CLIP_GRAD_NORM,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=_adamw(model), config=config)
    return engine


def _deepspeed_by_hand(work: Work, stage: int) -> Contender:
    engine, replicas = _deepspeed(work, stage, work.micro_batches_per_window), dist.get_world_size()

    def update(batches: list[MicroBatch]) -> None:
        # the engine divides by the replicas and by the micro-batches
        share = replicas * len(batches) / num_items(batches, replicas)
        for batch in batches:
            engine.backward(sum_loss(engine(batch["input_ids"]), batch["labels"]) * share)
            engine.step()

    return Contender(model=engine.module, update=update)


def _zero(stage: int) -> Engine:
    def by_window(work: Work) -> Contender:
        engine = _deepspeed(work, stage, 1)
        reduce = "per_update" if stage < 2 else "per_micro_batch"
        window = _window(engine, engine.optimizer, reduce=reduce)
        return Contender(model=engine.module, update=window.update)

    return Engine(
        name=f"DeepSpeed ZeRO {stage}",
        ranks=2,
        replicas=2,
        by_hand=lambda work: _deepspeed_by_hand(work, stage),
        by_window=by_window,
        package="deepspeed",
    )


# Megatron-Core -----------------------------------------------------------------------------------------


@cache
def _megatron() -> Any:
    """``megatron.core``, with all ranks as replicas."""
    if not torch.cuda.is_available():  # which it asks where it makes its buffers
        torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    from megatron import core
    from megatron.core import distributed, parallel_state, transformer  # noqa: F401

    parallel_state.initialize_model_parallel()
    return core


def _megatron_model(work: Work, *, per_token: bool) -> Any:
    core, shape = _megatron(), work.shape
    config = core.transformer.TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.width,
        num_attention_heads=shape.heads,
        use_cpu_initialization=True,
        calculate_per_token_loss=per_token,
    )
    ddp = core.distributed.DistributedDataParallelConfig()
    return core.distributed.DistributedDataParallel(config, ddp, new_model(work))


def _megatron_by_hand(work: Work) -> Contender:
    model, finalize = _megatron_model(work, per_token=True), _megatron().distributed.finalize_model_grads
    parameters, optimizer = list(model.parameters()), _adamw(model)

    def update(batches: list[MicroBatch]) -> None:
        for index, batch in enumerate(batches):
            with nullcontext() if index == len(batches) - 1 else model.no_sync():
                sum_loss(model(batch["input_ids"]), batch["labels"]).backward()
        finalize([model], num_items(batches, 1))  # which adds them up over the replicas, and divides
        for parameter in parameters:
            parameter.grad = parameter.main_grad
        clip_grad_norm_(parameters, CLIP_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
        model.zero_grad_buffer()

    return Contender(model=model, update=update)


ENGINES = (
    _fsdp("FSDP2, per update", held_back=True),
    _fsdp("FSDP2, per micro-batch", held_back=False),
    _fsdp("HSDP 2 x 2, per update", held_back=True, copies=2),
    _fsdp("HSDP 2 x 2, per micro-batch", held_back=False, copies=2),
    Engine(name="FSDP1", ranks=2, replicas=2, by_hand=_fsdp1_by_hand, by_window=_by_window(_fsdp1_model)),
    Engine(
        name="tensor parallel",
        ranks=2,
        replicas=1,
        by_hand=_tensor_by_hand,
        by_window=_by_window(_tensor_parallel),
    ),
    Engine(
        name="pipeline, 1F1B",
        ranks=2,
        replicas=1,
        by_hand=_pipeline_by_hand,
        by_window=_by_window(_pipelined),
    ),
    _zero(1),
    _zero(2),
    _zero(3),
    Engine(
        name="Megatron-Core",
        ranks=2,
        replicas=2,
        by_hand=_megatron_by_hand,
        by_window=_by_window(lambda work: _megatron_model(work, per_token=False)),
        package="megatron",
    ),
)
