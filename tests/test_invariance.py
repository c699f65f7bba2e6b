"""Twenty updates on the embedded text come out the same under every (m, A, D)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ranks import run_ranks
from wholebatch.finish import per_update
from wholebatch.loading.reading import micro_batch
from wholebatch.losses import next_token_loss
from wholebatch.order import SampleOrder
from wholebatch.plan import plan_batch
from wholebatch.train.config import config_from_dict
from wholebatch.train.data import load_data
from wholebatch.train.data.tokens import BEGIN
from wholebatch.train.models.gpt import GPT, GPTShape
from wholebatch.window import UpdateWindow

UPDATES = 20
GLOBAL_BATCH_SAMPLES = 16
LAYOUTS = [(16, 1, 1), (4, 4, 1), (2, 8, 1), (4, 2, 2), (1, 16, 1)]


def train(rank: int, ranks: int, micro_batch_samples: int, dtype: torch.dtype) -> dict[str, Any]:
    """Train from the same start over the same order; return parameters, losses and digests."""
    data = load_data(config_from_dict({"data": {"max_tokens_per_sample": 64}}))
    torch.manual_seed(0)
    shape = GPTShape(vocabulary=BEGIN + 1, max_tokens=64, width=32, layers=2, heads=2, dropout=0.0)
    model = GPT(shape).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    objective = next_token_loss()
    plan = plan_batch(
        global_batch_samples=GLOBAL_BATCH_SAMPLES, micro_batch_samples=micro_batch_samples, ranks=ranks
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / 5))
    window = UpdateWindow(
        DistributedDataParallel(model) if ranks > 1 else model,
        optimizer,
        objective,
        plan=plan,
        clip_grad_norm=1.0,
        scheduler=per_update(schedule),
    )
    order = SampleOrder(
        num_samples=len(data.train), global_batch_samples=GLOBAL_BATCH_SAMPLES, seed=0, tail="partial"
    )
    records = []
    for _ in range(UPDATES):
        ids_by_micro_batch = order.window(
            window.counters.samples,
            micro_batch_samples=micro_batch_samples,
            replicas=ranks,
            replica=rank,
        )
        batches = [
            micro_batch(data.train, data.collate, ids, epoch=0, seed=0) for ids in ids_by_micro_batch
        ]
        records.append(window.run(batches, lambda m, b: objective(m(b["input_ids"]), b)))
    assert {(r.micro_batches, r.samples) for r in records} == {(plan.micro_batches_per_update, 16)}
    return {
        "parameters": [p.detach() for p in model.parameters()],
        "losses": [r.loss_per_item for r in records],
        "items": [r.items for r in records],
        "digests": [r.sample_digest for r in records],
    }


def every_layout(dtype: torch.dtype) -> list[dict[str, Any]]:
    found = []
    for micro_batch_samples, _, ranks in LAYOUTS:
        results = run_ranks(train, ranks, micro_batch_samples, dtype, timeout_s=120)
        for of_rank in results[1:]:
            assert distance(of_rank["parameters"], results[0]["parameters"]) == 0
        found.append(results[0])
    return found


def distance(one: list[Tensor], other: list[Tensor]) -> float:
    return max((a.double() - b.double()).abs().max().item() for a, b in zip(one, other, strict=True))


def spread(one: list[Tensor], other: list[Tensor]) -> float:
    return (
        sum((a.double() - b.double()).square().sum().item() for a, b in zip(one, other, strict=True)) ** 0.5
    )


@pytest.mark.slow
def test_twenty_updates_are_the_same_under_every_layout() -> None:
    exact = every_layout(torch.float64)
    first = exact[0]
    assert first["losses"][-1] < first["losses"][0] - 1.0, "it learned something to compare"
    for other in exact[1:]:
        assert other["digests"] == first["digests"]
        assert other["items"] == first["items"]
        assert other["losses"] == pytest.approx(first["losses"], rel=1e-12)
        assert distance(other["parameters"], first["parameters"]) < 1e-11

    rounded = every_layout(torch.float32)
    # In float32 a split's own rounding is of the size of the big batch's: together, over all
    # parameters, no layout is twice as far from the float64 run. (The largest single difference is a
    # matter of luck: AdamW turns a gradient that is zero but for rounding into a whole step.)
    whole = spread(rounded[0]["parameters"], first["parameters"])
    assert 0 < whole < 1e-3
    for other in rounded[1:]:
        assert other["digests"] == first["digests"]
        assert spread(other["parameters"], first["parameters"]) < 2 * whole
