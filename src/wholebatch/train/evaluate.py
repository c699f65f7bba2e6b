"""The loss of the held-out split: one sum over one number of items, over all ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from time import perf_counter

import torch
from torch import Tensor

from wholebatch.record import Evaluation
from wholebatch.train.data import collate, num_items
from wholebatch.train.parts import Job

HELD_OUT = "held_out"


def evaluate_held_out(job: Job, *, updates_applied: int, samples_consumed: int) -> Evaluation:
    """Evaluate the held-out split as the model is now.

    Args:
        job: the job; all its ranks take part.
        updates_applied: applied updates so far.
        samples_consumed: training samples consumed so far.

    Exactness: as for ``evaluate``.
    """
    start = perf_counter()
    loss_sum, items = evaluate(job, job.data.held_out)
    return Evaluation(
        split=HELD_OUT,
        updates_applied=updates_applied,
        samples_consumed=samples_consumed,
        samples=len(job.data.held_out),
        items=items,
        loss_per_item=loss_sum / items if items and math.isfinite(loss_sum) else None,
        seconds=perf_counter() - start,
    )


def evaluate(job: Job, samples: Sequence[Tensor]) -> tuple[float, int]:
    """The summed loss and the items of a split, over all ranks: ``L / N`` is its loss per item.

    Each rank takes every D-th of the samples in order of length, so that little is padded and no
    sample is seen twice.

    Returns:
        L, in nats, and N.

    Exactness: exact in real arithmetic under any number of ranks and micro-batch size.
    """
    by_length = sorted(range(len(samples)), key=lambda i: len(samples[i]))
    mine = by_length[job.world.rank :: job.world.ranks]
    m = job.plan.micro_batch_samples
    training = job.model.training
    loss_sum = torch.zeros((), dtype=torch.float64, device=job.world.device)
    job.model.eval()
    try:
        with torch.no_grad():
            for start in range(0, len(mine), m):
                loss_sum += job.loss(job.model, collate(samples, mine[start : start + m])).loss_sum
    finally:
        job.model.train(training)
    items = num_items([samples[i] for i in mine])
    total_loss, total_items = job.world.total([loss_sum.item(), items])
    return total_loss, int(total_items)
