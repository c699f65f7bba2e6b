"""A whole training loop of your own, on one process or many; the update is the same.

    python examples/ddp_loop.py
    torchrun --nproc-per-node 2 examples/ddp_loop.py

Both print the same losses, items and digests. Each rank takes its share of every global batch from
``SampleOrder``: nothing is repeated to fill up, and the tail of an epoch is a real update. (torch's
``DistributedSampler`` repeats samples when the data does not divide by the ranks.)
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence

import wholebatch as wb

GLOBAL_BATCH_SAMPLES = 12
MICRO_BATCH_SAMPLES = 2
UPDATES = 6


class Tagger(nn.Module):
    """Predicts the next token of a sequence from those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 32)
        self.recurrent = nn.GRU(32, 32, batch_first=True)
        self.head = nn.Linear(32, 20)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.recurrent(self.embedding(input_ids))
        return self.head(hidden)


def ragged_sequences(number: int) -> list[torch.Tensor]:
    """Counting sequences of 3 to 17 tokens: something that can be learned."""
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(0, 20, (number,), generator=generator)
    lengths = torch.randint(3, 18, (number,), generator=generator)
    return [(start + torch.arange(length)) % 20 for start, length in zip(starts, lengths, strict=True)]


def collate(data: list[torch.Tensor], ids: list[int]) -> dict[str, torch.Tensor]:
    """One micro-batch, padded to its own longest sample; padding is not learned from."""
    chosen = [data[i] for i in ids]
    return {
        "input_ids": pad_sequence(chosen, batch_first=True),
        "labels": pad_sequence(chosen, batch_first=True, padding_value=-100),
        "sample_ids": torch.tensor(ids),
    }


def main(ranks: int, rank: int) -> None:
    torch.manual_seed(0)  # every rank starts from the same model
    model: nn.Module = Tagger()
    if ranks > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=UPDATES)

    data = ragged_sequences(50)
    plan = wb.plan_batch(
        global_batch_samples=GLOBAL_BATCH_SAMPLES, micro_batch_samples=MICRO_BATCH_SAMPLES, ranks=ranks
    )
    objective = wb.next_token_loss()
    window = wb.UpdateWindow(
        model, optimizer, objective, plan=plan, clip_grad_norm=1.0, scheduler=wb.per_update(schedule)
    )

    def loss_sum(model: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
        return objective(model(batch["input_ids"]), batch)

    train(window, loss_sum, data, replicas=ranks, replica=rank)


def train(
    window: wb.UpdateWindow, loss_fn: Any, data: list[torch.Tensor], *, replicas: int, replica: int
) -> None:
    """Every replica's share of each global batch, and a line for each update."""
    order = wb.SampleOrder(num_samples=len(data), global_batch_samples=GLOBAL_BATCH_SAMPLES, seed=0)
    for _ in range(UPDATES):
        position = window.counters.samples  # where the run is, under any number of ranks
        ids = order.window(
            position, micro_batch_samples=MICRO_BATCH_SAMPLES, replicas=replicas, replica=replica
        )
        record = window.run([collate(data, ids_of_one) for ids_of_one in ids], loss_fn)
        if os.environ.get("RANK", "0") == "0":
            print(
                f"update {record.updates_applied}: {record.samples} samples, {record.items} items, "
                f"loss per item {record.loss_per_item:.4f}, samples {record.sample_digest}"
            )


if __name__ == "__main__":
    if "RANK" in os.environ:  # started by torchrun
        dist.init_process_group("gloo", timeout=timedelta(minutes=2))
        try:
            main(dist.get_world_size(), dist.get_rank())
        finally:
            dist.destroy_process_group()
    else:
        main(1, 0)
