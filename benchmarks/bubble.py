"""How long the stages of a pipeline wait for each other, beside the formula.

    python benchmarks/bubble.py

Stages that sleep instead of computing take the same time on a busy machine as on a quiet one: forward t,
backward 2 t. With p ranks, v stages a rank and m micro-batches the stages idle for
(p - 1) / v of ideal m, a share of (p - 1) / (v m + p - 1) of the whole.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

from overhead import start_ranks
from wholebatch import UpdateWindow, token_loss
from wholebatch.ranks.pipeline import PipelinedModel

RANKS = 2
FORWARD_S = 0.02
CASES: list[tuple[type, int, int]] = [
    (schedule, stages, micro_batches)
    for schedule, stages in [(ScheduleGPipe, 1), (Schedule1F1B, 1), (ScheduleInterleaved1F1B, 2)]
    for micro_batches in (2, 4, 8, 16)
]
ROUNDS = 5


class _Sleep(torch.autograd.Function):
    """Passes on what it is given, after a while, both ways."""

    @staticmethod
    def forward(context: Any, given: torch.Tensor, seconds: float) -> torch.Tensor:
        context.seconds = seconds
        time.sleep(seconds)
        return given.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        time.sleep(2 * context.seconds)
        return gradient, None


class SleepingLinear(nn.Linear):
    """A layer whose forward takes a given time and whose backward twice that."""

    seconds = 0.0

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        slept: torch.Tensor = _Sleep.apply(super().forward(given), self.seconds)
        return slept


def main() -> int:
    """Measure, print the table; return the exit code."""
    if "RANK" not in os.environ:
        return start_ranks(RANKS, [], __file__)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=2))
    try:
        if dist.get_rank() == 0:
            print("schedule                   m   share of the time idle   formula")
        for schedule, stages, micro_batches in CASES:
            measured = _idle_share(schedule, stages, micro_batches)
            formula = (RANKS - 1) / (stages * micro_batches + RANKS - 1)
            if dist.get_rank() == 0:
                print(f"{schedule.__name__:<24} {micro_batches:>3} {measured:>23.1%} {formula:>9.1%}")
    finally:
        dist.destroy_process_group()
    return 0


def _idle_share(schedule: type, stages: int, micro_batches: int) -> float:
    """The shortest of several updates, without what its stages slept."""
    rank = dist.get_rank()
    parts = []
    for stage in range(stages):
        part = SleepingLinear(4, 4)
        part.seconds = FORWARD_S / stages
        parts.append(PipelineStage(part, rank + stage * RANKS, stages * RANKS, torch.device("cpu")))
    model = PipelinedModel(parts, schedule=schedule, inputs=lambda batch: batch["x"])
    window = UpdateWindow(model, torch.optim.SGD(model.parameters(), lr=0.1), token_loss())
    batches = [{"x": torch.randn(2, 4), "labels": torch.randint(0, 4, (2,))} for _ in range(micro_batches)]
    for batch in batches:  # every rank of a pipeline is given the same
        dist.broadcast(batch["x"], 0)
        dist.broadcast(batch["labels"], 0)
    seconds = [window.run(batches).seconds for _ in range(ROUNDS + 1)][1:]
    return 1.0 - micro_batches * 3 * FORWARD_S / min(seconds)


if __name__ == "__main__":
    sys.exit(main())
