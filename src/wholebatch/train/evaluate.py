"""The loss of the held-out split: one sum over one number of items, over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from time import perf_counter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from wholebatch.loading.reading import collated, micro_batch, read_samples
from wholebatch.objective import LossSum
from wholebatch.plan import BatchPlan
from wholebatch.ranks.pipeline import PipelinedModel
from wholebatch.record import Counters, Evaluation
from wholebatch.replay import RandomState
from wholebatch.result import losses_by_term, whole
from wholebatch.train.cutting import cut_by_tokens
from wholebatch.train.layouts.cut import reshard
from wholebatch.train.material import Batch, Samples
from wholebatch.train.parts import Job

# Samples whose lengths are looked at together, where tokens bound a micro-batch.
_READ_TOGETHER = 1024
_DURING = "in an evaluation"
HELD_OUT = "held_out"
HELD_OUT_AVERAGE = "held_out_average"


def evaluate_held_out(
    job: Job,
    counters: Counters,
    *,
    split: str = HELD_OUT,
    model: nn.Module | None = None,
    leave: Callable[[], bool] = lambda: False,
) -> Evaluation | None:
    """Evaluate the held-out split as the model is now.

    Args:
        job: the job; all its ranks take part.
        counters: totals of the run so far.
        split: its name in the record.
        model: as the ranks hold it, where it is a pipeline; None for that of the job.
        leave: asked now and then; the evaluation is left when it says so on any rank.

    Returns:
        The evaluation; None where it was left.

    Exactness: as for ``evaluate``.
    """
    start = perf_counter()
    found = evaluate(job, job.data.held_out, model=model, leave=leave)
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
    job: Job,
    samples: Samples,
    *,
    model: nn.Module | None = None,
    leave: Callable[[], bool] = lambda: False,
) -> tuple[float | None, int | float] | None:
    """``sum_k c_k * L_k / N_k`` over the terms of the objective and all samples of a split.

    Each replica takes every D-th of the samples, in order of length where that is known, so that little is
    padded and no sample is seen twice.

    Returns:
        The loss per item, in nats for the losses of the training job, or None where it is not finite;
        and N of the first term. None where it was left.

    Exactness: exact in real arithmetic under any number of ranks and micro-batch size.
    """
    coefficients = job.data.objective.coefficients
    # A rank that fails alone would leave the others waiting for its sums.
    if isinstance(model, PipelinedModel):
        left, sums = _sums_through_stages(job, model, samples, leave)
    elif job.forwards_together:
        left, sums = _sums_together(job, samples, leave)
    else:
        left, sums = job.world.all_or_none(lambda: _sums_of_this_rank(job, samples, leave))
    some_left, *totals = job.world.total([float(left), *sums])
    if some_left:
        return None
    losses, numbers = totals[: len(coefficients)], totals[len(coefficients) :]
    _, loss_per_item = losses_by_term(coefficients, losses, numbers)
    return loss_per_item, whole(numbers[0])


def _sums_of_this_rank(job: Job, samples: Samples, leave: Callable[[], bool]) -> tuple[bool, list[float]]:
    """Whether it was left, and ``L_k`` and then ``N_k`` of every term over this rank's samples."""
    module = job.model.module
    sums = _no_sums(job)
    with _aside(module), torch.no_grad():
        for batch in _micro_batches(job, samples, _of_this_rank(job, samples)):
            if leave():
                return True, sums.flatten().tolist()
            _add(sums, _losses(job, batch))
    return False, sums.flatten().tolist()


def _sums_together(job: Job, samples: Samples, leave: Callable[[], bool]) -> tuple[bool, list[float]]:
    """The same where every forward is a meeting of the ranks: each runs as many as the others.

    A rank that has no more runs the first sample again, for nothing. Micro-batches are read and left by
    all or none, so that no rank waits in a forward that another does not come to.
    """
    world, sums = job.world, _no_sums(job)
    seed = job.config.run.seed
    mine = iter(_micro_batches(job, samples, _of_this_rank(job, samples)))
    spare = world.all_or_none(lambda: micro_batch(samples, job.data.collate, [0], epoch=0, seed=seed))
    with _aside(job.model.module), torch.no_grad():
        while True:
            batch = world.all_or_none(lambda: next(mine, None))
            some_left, some_have = world.total([float(leave()), float(batch is not None)])
            if some_left or not some_have:
                break
            counted = batch is not None and job.speaks
            with world.meeting(_DURING):
                losses = _losses(job, spare if batch is None else batch)
            _add(sums if counted else torch.zeros_like(sums), losses)
    reshard(job.model.module)
    return bool(some_left), sums.flatten().tolist()


def _sums_through_stages(
    job: Job, model: PipelinedModel, samples: Samples, leave: Callable[[], bool]
) -> tuple[bool, list[float]]:
    """The same where forwards are those of a pipeline, whose last rank has the sums of its replica."""
    world, sums = job.world, _no_sums(job)
    found: dict[int, list[LossSum]] = {}

    def keep(output: Tensor, batch: Batch, number: int) -> Tensor:
        found[number] = _in_order(job, job.loss_of_output(output, batch))
        return found[number][0].loss_sum

    mine = iter(_micro_batches(job, samples, _of_this_rank(job, samples)))
    at_once = 2 * model.stages[0].group_size  # enough to keep most stages at work, and few to hold
    with _aside(job.model.module), torch.no_grad():
        while True:
            some = world.all_or_none(lambda: list(islice(mine, at_once)))
            some_left, some_have = world.total([float(leave()), float(bool(some))])
            if some_left or not some_have:
                break
            with world.meeting(_DURING):
                model.evaluate(some, keep)
            for number in range(len(some)) if model.is_last else ():
                _add(sums, found[number])
    return bool(some_left), sums.flatten().tolist()


def _of_this_rank(job: Job, samples: Samples) -> list[int]:
    """Ids of every D-th sample, in order of length where that is known."""
    lengths = _lengths(job, samples)
    order = range(len(samples)) if lengths is None else sorted(range(len(samples)), key=lengths.__getitem__)
    return list(order)[job.replica :: job.plan.replicas]


def _no_sums(job: Job) -> Tensor:
    terms = len(job.data.objective.coefficients)
    return torch.zeros(2, terms, dtype=torch.float64, device=job.world.device)


def _losses(job: Job, batch: Batch) -> list[LossSum]:
    return _in_order(job, job.loss(job.model.module, batch))


def _add(sums: Tensor, losses: Sequence[LossSum]) -> None:
    """Add the sums and items of a micro-batch, by term."""
    for term, (loss_sum, items) in enumerate(losses):
        sums[0, term] += loss_sum.reshape(())
        sums[1, term] += items


def _lengths(job: Job, samples: Samples) -> NDArray[np.int64] | None:
    """Tokens of each sample, where they are known ahead: of the samples that the job holds out."""
    return job.data.held_out_lengths if samples is job.data.held_out else None


def _micro_batches(job: Job, samples: Samples, ids: list[int]) -> Iterator[Batch]:
    """Some samples, in micro-batches that fit where those of the training fit."""
    plan, collate, seed = job.plan, job.data.collate, job.config.run.seed
    if isinstance(plan, BatchPlan):
        m = plan.micro_batch_samples
        for start in range(0, len(ids), m):
            yield micro_batch(samples, collate, ids[start : start + m], epoch=0, seed=seed)
        return
    lengths = _lengths(job, samples)
    for start in range(0, len(ids), _READ_TOGETHER):
        some = ids[start : start + _READ_TOGETHER]
        read = read_samples(samples, some, epoch=0, seed=seed)
        chosen = list(zip(some, read, strict=True))
        for part in cut_by_tokens(plan, job.data, chosen, lengths, what="held-out sample"):
            yield collated(samples, collate, part, epoch=0, seed=seed)


@contextmanager
def _aside(module: nn.Module) -> Iterator[None]:
    """The mode of evaluation, beside the training: each module's mode and random state are put back.

    A model of one's own may draw random numbers in this mode too, and how often a run is evaluated,
    which Ctrl-C makes once more, must not change what is trained.
    """
    # Module by module: a batch norm that is to stay in eval mode would be woken by train() on the whole.
    modes = [(part, part.training) for part in module.modules()]
    random_state = RandomState.capture()
    module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training
        random_state.restore()


def _in_order(job: Job, loss: LossSum | Mapping[str, LossSum]) -> list[LossSum]:
    """The sums of all terms, in the order of the objective."""
    if not isinstance(loss, Mapping):
        return [loss]
    return [loss[term] for term in job.data.objective.coefficients]
