"""The loop of ``ddp_loop.py`` with parameters, gradients and optimizer state in shards.

The update is the same.

    torchrun --nproc-per-node 2 examples/sharded_loop.py
    torchrun --nproc-per-node 2 examples/sharded_loop.py per_micro_batch

What differs from DistributedDataParallel is ``fully_shard`` and what it costs: held back until the last
micro-batch, gradients are reduced once but held whole; reduced with every micro-batch, only a shard of
them is held. Both print the losses, items and digests of one process.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import wholebatch as wb
from ddp_loop import GLOBAL_BATCH_SAMPLES, MICRO_BATCH_SAMPLES, ragged_sequences, train


class Tagger(nn.Module):
    """Predicts the next token of a sequence from the mean of those before it and the last."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 32)
        self.hidden = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
        self.head = nn.Linear(64, 20)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        seen = self.embedding(input_ids)
        lengths = torch.arange(1, seen.shape[1] + 1).view(1, -1, 1)
        before = torch.cat([seen, seen.cumsum(1) / lengths], dim=-1)
        return self.head(self.hidden(before)).log_softmax(-1)


def main(ranks: int, rank: int, reduce: str) -> None:
    torch.manual_seed(0)
    data = ragged_sequences(40)
    model = Tagger()
    if ranks > 1:
        fully_shard(model.hidden)
        fully_shard(model)  # the whole model too: what is left outside would be reduced by nobody
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)  # built over the shards

    plan = wb.plan_batch(
        global_batch_samples=GLOBAL_BATCH_SAMPLES, micro_batch_samples=MICRO_BATCH_SAMPLES, ranks=ranks
    )
    objective = wb.next_token_loss()
    window = wb.UpdateWindow(model, optimizer, objective, plan=plan, clip_grad_norm=1.0, reduce=reduce)
    if rank == 0:
        print(window.traffic(plan.micro_batches_per_window))

    def loss_sum(model: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
        return objective(model(batch["input_ids"]), batch)

    train(window, loss_sum, data, replicas=ranks, replica=rank)


if __name__ == "__main__":
    when = sys.argv[1] if len(sys.argv) > 1 else "per_update"
    if "RANK" in os.environ:  # started by torchrun
        dist.init_process_group("gloo", timeout=timedelta(minutes=2))
        try:
            main(dist.get_world_size(), dist.get_rank(), when)
        finally:
            dist.destroy_process_group()
    else:
        main(1, 0, "per_update")
