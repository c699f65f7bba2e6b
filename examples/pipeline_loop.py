"""The loop of ``ddp_loop.py`` with the model in two parts: its layers, or every matrix.

The update is the same, and so are the samples of all ranks: together they are one replica.

    python examples/pipeline_loop.py
    torchrun --nproc-per-node 2 examples/pipeline_loop.py
    torchrun --nproc-per-node 2 examples/pipeline_loop.py tensor

All print the losses, items and digests of one process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import wholebatch as wb
from ddp_loop import GLOBAL_BATCH_SAMPLES, MICRO_BATCH_SAMPLES, ragged_sequences, train
from wholebatch.ranks.pipeline import PipelinedModel

Batch = dict[str, Tensor]


def new_model() -> nn.Sequential:
    """Predicts the next token from the last."""
    torch.manual_seed(0)  # every rank starts from the same model
    return nn.Sequential(nn.Embedding(20, 32), nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 20))


def pad_one(batch: Batch, length: int) -> Batch:
    """More padding, which weighs nothing."""
    more = (0, length - batch["labels"].shape[1])
    return batch | {
        "input_ids": F.pad(batch["input_ids"], more),
        "labels": F.pad(batch["labels"], more, value=-100),
    }


def pad(batches: Sequence[Batch]) -> list[Batch]:
    """Stages exchange tensors of one shape, so the micro-batches of a window get one length."""
    longest = max(batch["labels"].shape[1] for batch in batches)
    return [pad_one(batch, longest) for batch in batches]


def in_stages(ranks: int, rank: int) -> PipelinedModel:
    """The first layers on rank 0, the last on rank 1; a slice keeps the names of the whole model."""
    part = new_model()[:2] if rank == 0 else new_model()[2:]
    return PipelinedModel(
        PipelineStage(part, rank, ranks, torch.device("cpu")),
        schedule=Schedule1F1B,
        tail_schedule=ScheduleGPipe,  # 1F1B does not take the tail, one micro-batch for two stages
        inputs=lambda batch: batch["input_ids"],
        pad=pad,
    )


def in_matrices(ranks: int) -> nn.Module:
    """A part of both matrices on each rank."""
    cut = {"1": ColwiseParallel(), "3": RowwiseParallel()}
    return parallelize_module(new_model(), init_device_mesh("cpu", (ranks,)), cut)


def main(ranks: int, rank: int, kind: str) -> None:
    staged = ranks > 1 and kind == "stages"
    model: nn.Module = new_model()
    if ranks > 1:
        model = in_stages(ranks, rank) if staged else in_matrices(ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    plan = wb.plan_batch(
        global_batch_samples=GLOBAL_BATCH_SAMPLES,
        micro_batch_samples=MICRO_BATCH_SAMPLES,
        ranks=ranks,
        **{"pipeline_parallel" if staged else "tensor_parallel": ranks},
    )
    objective = wb.next_token_loss()
    window = wb.UpdateWindow(model, optimizer, objective, plan=plan, clip_grad_norm=1.0)
    if rank == 0:
        print(window.traffic(plan.micro_batches_per_window))

    def loss_sum(model: nn.Module, batch: Batch) -> Any:
        return objective(model(batch["input_ids"]), batch)

    # the schedule runs the forwards of stages, and the loss is given what the last one puts out
    train(window, objective if staged else loss_sum, ragged_sequences(50), replicas=1, replica=0)


if __name__ == "__main__":
    if "RANK" in os.environ:  # started by torchrun
        dist.init_process_group("gloo", timeout=timedelta(minutes=2))
        try:
            main(dist.get_world_size(), dist.get_rank(), sys.argv[1] if len(sys.argv) > 1 else "stages")
        finally:
            dist.destroy_process_group()
    else:
        main(1, 0, "stages")
