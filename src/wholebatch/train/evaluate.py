"""The loss of the held-out split: one sum over one number of items, over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import perf_counter

import torch

from wholebatch.objective import LossSum
from wholebatch.record import Counters, Evaluation
from wholebatch.result import losses_by_term, whole
from wholebatch.train.loading import micro_batch
from wholebatch.train.material import Samples
from wholebatch.train.parts import Job

HELD_OUT = "held_out"
HELD_OUT_AVERAGE = "held_out_average"


def evaluate_held_out(
    job: Job, counters: Counters, *, split: str = HELD_OUT, leave: Callable[[], bool] = lambda: False
) -> Evaluation | None:
    """Evaluate the held-out split as the model is now.

    Args:
        job: the job; all its ranks take part.
        counters: totals of the run so far.
        split: its name in the record.
        leave: asked now and then; the evaluation is left when it says so on any rank.

    Returns:
        The evaluation; None where it was left.

    Exactness: as for ``evaluate``.
    """
    start = perf_counter()
    found = evaluate(job, job.data.held_out, leave=leave)
    if found is None:
        return None
    loss_per_item, items = found
    return Evaluation(
        split=split,
        updates_applied=counters.updates_applied,
        samples_consumed=counters.samples,
        samples=len(job.data.held_out),
        items=items,
        loss_per_item=loss_per_item,
        seconds=perf_counter() - start,
    )


def evaluate(
    job: Job, samples: Samples, *, leave: Callable[[], bool] = lambda: False
) -> tuple[float | None, int | float] | None:
    """``sum_k c_k * L_k / N_k`` over the terms of the objective and all samples of a split.

    Each rank takes every D-th of the samples, in order of length where that is known, so that little is
    padded and no sample is seen twice.

    Returns:
        The loss per item, in nats for the losses of the training job, or None where it is not finite;
        and N of the first term. None where it was left.

    Exactness: exact in real arithmetic under any number of ranks and micro-batch size.
    """
    lengths = getattr(samples, "lengths", None)
    order = range(len(samples)) if lengths is None else sorted(range(len(samples)), key=lengths.__getitem__)
    mine = list(order)[job.world.rank :: job.world.ranks]
    m = job.plan.micro_batch_samples
    module = job.model.module
    training = module.training
    coefficients = job.data.objective.coefficients
    left = False
    sums = torch.zeros(2, len(coefficients), dtype=torch.float64, device=job.world.device)
    module.eval()
    try:
        with torch.no_grad():
            for start in range(0, len(mine), m):
                if left := leave():
                    break
                ids = mine[start : start + m]
                batch = micro_batch(samples, job.data.collate, ids, epoch=0, seed=job.config.run.seed)
                for term, (loss_sum, items) in enumerate(_in_order(job, job.loss(module, batch))):
                    sums[0, term] += loss_sum.reshape(())
                    sums[1, term] += items
    finally:
        module.train(training)
    some_left, *totals = job.world.total([float(left), *sums.flatten().tolist()])
    if some_left:
        return None
    losses, numbers = totals[: len(coefficients)], totals[len(coefficients) :]
    _, loss_per_item = losses_by_term(coefficients, losses, numbers)
    return loss_per_item, whole(numbers[0])


def _in_order(job: Job, loss: LossSum | Mapping[str, LossSum]) -> list[LossSum]:
    """The sums of all terms, in the order of the objective."""
    if not isinstance(loss, Mapping):
        return [loss]
    return [loss[term] for term in job.data.objective.coefficients]
