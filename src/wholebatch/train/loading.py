"""The windows of a training job: its data, order and plan in the loader that everybody uses."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from typing import Any

from wholebatch.budget import AnyPlan, BudgetPlan
from wholebatch.loading import WindowBatches, WindowLoader
from wholebatch.loading.loader import OnBadSample
from wholebatch.order import Order
from wholebatch.train.material import JobData


def windows(
    data: JobData,
    order: Order,
    plan: AnyPlan,
    *,
    replica: int,
    start_samples: int,
    workers: int,
    seed: int,
    on_bad_sample: OnBadSample = "raise",
) -> Generator[WindowBatches]:
    """One replica's micro-batches, one global batch after the other, without end.

    Close it when the run ends (``contextlib.closing``), so that its workers end too.

    Args:
        data: samples to train on, and their collation.
        order: which samples come when.
        plan: how a global batch is cut.
        replica: which of the plan's replicas this is.
        start_samples: position of the first global batch: samples consumed since the start of training.
        workers: processes that read ahead; 0 reads when a global batch is asked for.
        seed: of the run; decides what a data set draws at random.
        on_bad_sample: what becomes of a sample that can't be read.

    Yields:
        The micro-batches of a global batch, on the host; none where a tail leaves this replica without
        samples.

    Raises:
        JudgeError: a sample could not be read, or a worker process ended; names which.

    Exactness: the batches do not depend on ``workers``.
    """
    loader = WindowLoader(
        data.train,
        plan=plan,
        lengths=_lengths(data) if isinstance(plan, BudgetPlan) else None,
        on_bad_sample=on_bad_sample,
        order=order,
        collate=data.collate,
        replica=replica,
        workers=workers,
        seed=seed,
        num_epochs=None,
        position=start_samples,
    )
    with closing(iter(loader)) as found:  # type: ignore[type-var]  # it is a generator
        yield from found


def _lengths(data: JobData) -> Any:
    """The tokens of every sample, or how they are told once it is read."""
    return data.length_of if data.lengths is None else data.lengths
