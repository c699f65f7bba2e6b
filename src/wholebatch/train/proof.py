"""Shown before the first update: accumulating the first global batch is the big batch."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from wholebatch.train.data import collate
from wholebatch.train.parts import Job, make_optimizer
from wholebatch.verify import verify_window
from wholebatch.verify.verification import Verification


def prove_first_batch(job: Job) -> Verification:
    """Compare the accumulated update of the first global batch with the big batch's.

    It judges the job's own model, objective, optimizer, clipping and padding, in the micro-batches
    that training will use, and leaves the model as it was.

    Raises:
        JudgeError: no verdict could be reached.

    Exactness: equal means exact in real arithmetic; how near, is measured in float64.
    """
    ids = job.order.global_batch(0)
    m = job.plan.micro_batch_samples
    sizes = [len(ids[start : start + m]) for start in range(0, len(ids), m)]
    settings = job.config.optimizer

    def collated(samples: list[Tensor]) -> dict[str, Tensor]:
        return collate(samples, range(len(samples)))

    return verify_window(
        job.model,
        job.loss,
        [job.data.train[i] for i in ids],
        splits=[sizes],
        make_optimizer=lambda parameters: make_optimizer(parameters, settings),
        clip_grad_norm=settings.clip_grad_norm or None,
        objective=job.objective,
        collate=collated,
    )


def proof_words(proof: Verification, job: Job) -> str:
    """The verdict on the first global batch, in words."""
    worst = proof.worst
    where = "" if worst is None else f" Worst: {worst.parameter} ({worst.quantity}),"
    if worst is not None:
        where += f" error {worst.error:.2e}, bound {worst.bound:.2e}."
    if proof.equal:
        pieces = job.plan.micro_batches_per_update
        return f"First global batch: {pieces} micro-batches make the update of the big batch.{where}"
    return f"First global batch: NOT the update of the big batch ({proof.cause}).{where} {proof.advice}"


def proof_facts(proof: Verification | None) -> dict[str, Any] | None:
    if proof is None:
        return None
    worst = proof.worst
    facts: dict[str, Any] = {"equal": proof.equal, "cause": proof.cause}
    if worst is not None:
        facts |= {"worst_parameter": worst.parameter, "error": worst.error, "bound": worst.bound}
    return facts
