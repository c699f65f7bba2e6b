"""Shown before the first update: accumulating the first global batch is the big batch."""

from __future__ import annotations

from typing import Any

from wholebatch.errors import JudgeError
from wholebatch.loading.reading import read_samples
from wholebatch.plan import BatchPlan
from wholebatch.report.words import number_of
from wholebatch.train.cutting import cut_by_tokens
from wholebatch.train.material import Batch
from wholebatch.train.optimize import make_optimizer
from wholebatch.train.parts import Job
from wholebatch.verify import verify_window
from wholebatch.verify.verification import Verification

_IN_ROWS = (
    'With batch.rows = "packed" look at the model first: it may let the samples of a row see each other; '
    'let it heed position_ids or sample_lengths, or set batch.rows = "padded".'
)


def prove_first_batch(job: Job) -> Verification:
    """Compare the accumulated update of the first global batch with the big batch's.

    It judges the job's own model, objective, optimizer, clipping and padding, in the micro-batches
    that training will use, and leaves the model as it was. Of a large global batch the first
    ``proof.max_samples`` are taken, in at least two micro-batches.

    Raises:
        JudgeError: no verdict could be reached; says that it was the first global batch's.

    Exactness: equal means exact in real arithmetic; how near, is measured in float64.
    """
    settings = job.config.optimizer
    parts = job.world.all_or_none(lambda: _micro_batches(job))
    samples = [sample for part in parts for sample in part]

    def collated(some: list[tuple[int, Any]]) -> Batch:
        # The big batch is a padded one whatever the rows of training are.
        data = job.data
        collate = (data.collate_padded or data.collate) if len(some) == len(samples) else data.collate
        return collate([one for _, one in some], [number for number, _ in some], 0)

    try:
        return verify_window(
            job.model.module,
            job.loss,
            samples,
            splits=[[len(part) for part in parts]],
            make_optimizer=lambda parameters: make_optimizer(list(parameters), settings),
            clip_grad_norm=settings.clip_grad_norm or None,
            objective=job.data.objective,
            collate=collated,
        )
    except JudgeError as error:
        if type(error) is not JudgeError:  # of the ranks, and nothing that a setting would change
            raise
        raise JudgeError(
            f"the first global batch can't be judged: {error}. Judge fewer of its samples with "
            f"proof.max_samples, or none with proof.check_first_batch = false"
        ) from error


def proved_samples(job: Job) -> list[int]:
    """The samples of the first global batch that the proof takes; one for each rank at least."""
    return job.order.global_batch(0)[: max(job.config.proof.max_samples, job.world.ranks)]


def _micro_batches(job: Job) -> list[list[tuple[int, Any]]]:
    """The samples that the proof takes, with their ids, in micro-batches as the plan cuts them.

    At least two where there are two samples, so that there is something to accumulate, and one for each
    rank.
    """
    samples, ranks = _read(job), job.world.ranks
    if len(samples) < ranks:
        raise JudgeError(
            f"the first global batch has {number_of(len(samples), 'sample')} for {ranks} ranks, of which "
            f"each needs one to show that it makes the update of the big batch; give it more, or set "
            f"proof.check_first_batch = false"
        )
    if isinstance(job.plan, BatchPlan):
        m = job.plan.micro_batch_samples
        parts = [samples[start : start + m] for start in range(0, len(samples), m)]
    else:
        parts = cut_by_tokens(job.plan, job.data, samples, job.data.lengths)
    while len(parts) < min(max(2, ranks), len(samples)):
        longest = max(parts, key=len)
        half, place = len(longest) // 2, parts.index(longest)
        parts[place : place + 1] = [longest[:half], longest[half:]]
    return parts


def _read(job: Job) -> list[tuple[int, Any]]:
    """The samples that the proof takes, with their ids; without those that the training leaves out."""
    found: list[tuple[int, Any]] = []
    skipped: Exception | None = None
    for index in proved_samples(job):
        try:
            (sample,) = read_samples(job.data.train, [index], epoch=0, seed=job.config.run.seed)
        except JudgeError as error:
            if job.config.data.on_bad_sample == "raise":
                raise
            skipped = error
            continue
        found.append((index, sample))
    if not found:
        raise JudgeError(
            f"none of the first {len(proved_samples(job))} samples can be read, and the first update is "
            f"shown on them; mend the data, or set proof.check_first_batch = false"
        ) from skipped
    return found


def proof_words(proof: Verification, job: Job) -> str:
    """The verdict on the first global batch, in words."""
    worst = proof.worst
    where = "" if worst is None else f" Worst: {worst.parameter} ({worst.quantity}),"
    if worst is not None:
        where += f" error {worst.error:.2e}, bound {worst.bound:.2e}."
    taken, whole = len(proved_samples(job)), len(job.order.global_batch(0))
    advice = proof.advice
    if job.config.batch.rows == "packed":
        advice = f"{_IN_ROWS} {advice}"
    which = "First global batch" if taken == whole else f"First {taken} samples of the first global batch"
    if proof.equal:
        pieces = len(proof.splits[0].micro_batch_samples)
        make = "1 micro-batch makes" if pieces == 1 else f"{pieces} micro-batches make"
        return f"{which}: {make} the update of the big batch.{where}"
    return f"{which}: NOT the update of the big batch ({proof.cause}).{where} {advice}"


def proof_facts(proof: Verification | None) -> dict[str, Any] | None:
    """The verdict, for the header of the run."""
    if proof is None:
        return None
    worst = proof.worst
    facts: dict[str, Any] = {"equal": proof.equal, "cause": proof.cause}
    if worst is not None:
        facts |= {"worst_parameter": worst.parameter, "error": worst.error, "bound": worst.bound}
    return facts
