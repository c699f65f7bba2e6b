"""What the settings determine: text, plan, order, model, optimizer, schedule and window."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from wholebatch.finish import per_update
from wholebatch.losses import next_token_loss
from wholebatch.objective import LossSum, SummedLoss
from wholebatch.order import SampleOrder
from wholebatch.plan import BatchPlan, plan_batch
from wholebatch.train.config import OptimizerConfig, TrainConfig
from wholebatch.train.data import VOCABULARY, TextData, collate, load_text
from wholebatch.train.model import GPT, GPTShape, decayed_apart
from wholebatch.train.world import World
from wholebatch.window import UpdateWindow


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Everything that the settings determine, built and not yet run."""

    config: TrainConfig
    world: World
    data: TextData
    plan: BatchPlan
    order: SampleOrder
    model: GPT
    objective: SummedLoss

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> LossSum:
        """The summed loss of a micro-batch and its items; nothing here divides.

        The batch waits on the host until its turn: its input moves to the rank's device here, its
        labels in the objective, and its sample ids never.
        """
        input_ids = batch["input_ids"].to(self.world.device, non_blocking=True)
        return self.objective(model(input_ids), batch)


def build_job(config: TrainConfig, world: World) -> Job:
    """Read the text, plan the global batch over the ranks there are, and build the model.

    Raises:
        PlanError: the global batch does not divide over micro-batches and ranks.
    """
    data = load_text(
        max_tokens_per_sample=config.data.max_tokens_per_sample,
        held_out_one_in=config.data.held_out_one_in,
    )
    plan = plan_batch(
        global_batch_samples=config.batch.global_batch_samples,
        micro_batch_samples=config.batch.micro_batch_samples,
        ranks=world.ranks,
        tail=config.batch.tail,
    )
    order = SampleOrder(
        num_samples=len(data.train),
        global_batch_samples=plan.global_batch_samples,
        seed=config.run.seed,
        tail=config.batch.tail,
    )
    torch.manual_seed(config.run.seed)
    shape = GPTShape(
        vocabulary=VOCABULARY,
        max_tokens=config.data.max_tokens_per_sample,
        layers=config.model.layers,
        width=config.model.width,
        heads=config.model.heads,
        dropout=config.model.dropout,
    )
    model = GPT(shape).to(dtype=getattr(torch, config.model.dtype), device=world.device)
    # One seed gives every rank the same parameters; dropout must differ between ranks.
    torch.manual_seed(config.run.seed + 1 + world.rank)
    return Job(
        config=config,
        world=world,
        data=data,
        plan=plan,
        order=order,
        model=model,
        objective=next_token_loss(),
    )


def micro_batches(job: Job, position: int) -> list[dict[str, Tensor]]:
    """This rank's micro-batches of the update that begins at a position, in samples; on the host."""
    ids_of_each = job.order.window(
        position,
        micro_batch_samples=job.plan.micro_batch_samples,
        replicas=job.plan.replicas,
        replica=job.world.rank,
    )
    return [collate(job.data.train, ids) for ids in ids_of_each]


def make_window(job: Job) -> UpdateWindow:
    """The window over the job's model, with its optimizer, clipping and schedule."""
    settings = job.config.optimizer
    model = job.world.parallel(job.model)
    optimizer = make_optimizer(decayed_apart(job.model, settings.weight_decay), settings)
    schedule = LambdaLR(optimizer, lambda update: learning_rate_share(update, job.config))
    return UpdateWindow(
        model,
        optimizer,
        job.objective,
        plan=job.plan,
        clip_grad_norm=settings.clip_grad_norm or None,
        scheduler=per_update(schedule),
    )


def make_optimizer(parameters: Any, settings: OptimizerConfig) -> torch.optim.AdamW:
    """Fused AdamW over parameters or parameter groups."""
    return torch.optim.AdamW(
        parameters,
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        weight_decay=settings.weight_decay,
        fused=True,
    )


def learning_rate_share(update: int, config: TrainConfig) -> float:
    """The share of the highest learning rate for an update, counted from 0.

    Up along a line over the warm-up, then down along half a cosine to the final share, which the
    last update has.
    """
    warmup, last = config.optimizer.warmup_updates, config.run.num_updates - 1
    if update < warmup:
        return (update + 1) / (warmup + 1)
    if last <= warmup:
        return 1.0
    done = min(1.0, (update - warmup) / (last - warmup))
    final = config.optimizer.final_learning_rate_share
    return final + (1 - final) * (1 + math.cos(math.pi * done)) / 2
