"""The training job, from the settings to the end of the run.

The order in which things happen: read the text, plan the global batch, build the model, **prove on
the first global batch that the accumulated update is that of the big batch**, then train with the
window, evaluating now and then. ``train`` near the end is the loop itself.
"""

from __future__ import annotations

import shlex
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import FrameType

from wholebatch.epochs import EpochLedger, samples_after
from wholebatch.errors import JudgeError, RecordError
from wholebatch.record import STOPPED_BY_USER, RunHeader, UpdateRecord
from wholebatch.report.ledger import plan_findings, plan_text
from wholebatch.report.output import OutputClosedError
from wholebatch.report.words import number_of
from wholebatch.run_log import RunLog, used_folder
from wholebatch.train.config import TrainConfig
from wholebatch.train.display import Display
from wholebatch.train.evaluate import evaluate_held_out
from wholebatch.train.model import num_parameters
from wholebatch.train.parts import Job, make_window, micro_batches
from wholebatch.train.proof import proof_facts, proof_words, prove_first_batch
from wholebatch.verify.verification import Verification

DONE, NOT_EQUAL, INTERRUPTED, TERMINATED = 0, 1, 130, 143
STOPPED_BY_SIGTERM = "stopped by SIGTERM"
# Whoever sends SIGTERM kills soon after; an evaluation that takes longer is left out then.
QUICK_EVALUATION_S = 5.0
# So many skipped updates in a row do not come right by themselves.
MOST_SKIPS_IN_A_ROW = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class JobResult:
    """What came out.

    Args:
        exit_code: 0 done, 1 the first batch was not equal, 130 interrupted, 143 ended by SIGTERM.
        folder: where the records are; None on ranks that do not lead and where nothing was trained.
    """

    exit_code: int
    folder: Path | None = None


def run_job(job: Job, display: Display, *, command: Sequence[str] = ()) -> JobResult:
    """Prove, train and record.

    Args:
        job: what ``build_job`` made.
        display: shows what happens; one that shows nothing on ranks that do not lead.
        command: the words of the command line, for the header.

    Raises:
        RecordError: the run folder can't be written.
        JudgeError: the first batch could not be judged, or too many updates in a row were skipped.
        OutputClosedError: nobody reads the display any more; the run ends as interrupted.
    """
    folder = _folder(job.config)
    job.world.raise_together(used_folder(folder) if job.world.leads else None)
    display.say(describe(job))
    proof = prove_first_batch(job) if job.config.proof.check_first_batch else None
    if proof is not None:
        display.say(proof_words(proof, job))
        if not proof.equal and not job.config.proof.train_if_not_equal:
            display.say("Not trained: see [proof] train_if_not_equal, or mend what is named above.")
            return JobResult(exit_code=NOT_EQUAL)
    with _log(job, folder, proof, command) as log, stop_on_signal() as stop:
        try:
            if log is not None:
                display.say(f"Records go to {log.folder}")
            with display:
                finished = train(job, display, log, stop)
        except OutputClosedError as closed:
            if log is not None:
                log.close("interrupted", str(closed))
            raise
        terminated = not finished and job.world.any(stop.terminated)
        if not finished and log is not None:
            log.close("interrupted", STOPPED_BY_SIGTERM if terminated else STOPPED_BY_USER)
    if not finished:
        display.say("Interrupted: stopped after a whole update; the records are complete up to it.")
    if log is not None:
        display.say(f"To look at it: wholebatch show {shlex.quote(str(log.folder))}")
    exit_code = DONE if finished else TERMINATED if terminated else INTERRUPTED
    return JobResult(exit_code=exit_code, folder=log.folder if log else None)


def train(job: Job, display: Display, log: RunLog | None, stop: Stop) -> bool:
    """The loop: one global batch, one update, one record.

    Returns:
        True when all updates were attempted, False when it was stopped before.
    """
    run = job.config.run
    window = make_window(job)
    position = 0
    skips_in_a_row = 0

    def evaluate_and_log(updates_applied: int, samples_consumed: int) -> float:
        evaluation = evaluate_held_out(
            job, updates_applied=updates_applied, samples_consumed=samples_consumed
        )
        if log is not None:
            log.write_evaluation(evaluation)
        display.evaluated(evaluation)
        return evaluation.seconds

    evaluation_seconds = evaluate_and_log(0, 0)
    for update in range(1, run.num_updates + 1):
        batches = micro_batches(job, position)
        record = window.run(batches, job.loss)
        position = job.order.next_position(position)
        if log is not None:
            log.write(record)
        display.updated(record)
        skips_in_a_row = 0 if record.outcome == "applied" else skips_in_a_row + 1
        _refuse_endless_skips(skips_in_a_row, record)
        stopped = job.world.any(stop.asked)
        due = update % run.evaluate_every_updates == 0 or update == run.num_updates or stopped
        if due and not (stopped and _in_a_hurry(job, stop, evaluation_seconds)):
            evaluation_seconds = evaluate_and_log(record.updates_applied, position)
        if stopped:
            return update == run.num_updates
    return True


def describe(job: Job) -> str:
    """What will be trained, in the words of the ledger."""
    run, plan = job.config.run, job.plan
    samples = samples_after(plan, run.num_updates, dataset_samples=len(job.data.train))
    facts = job.data.facts()
    epoch = EpochLedger(plan=plan, dataset_samples=len(job.data.train))
    return (
        f"{plan_text(plan, ragged=True)}\n"
        f"Data: {facts['train_samples']:,} samples with {facts['train_items']:,} items to train on, "
        f"{facts['held_out_samples']:,} with {facts['held_out_items']:,} held out.\n"
        f"Model: a GPT of {num_parameters(job.model):,} parameters in {job.config.model.dtype}.\n"
        f"Run: {number_of(run.num_updates, 'update')}, {samples:,} samples; an epoch has "
        f"{number_of(job.order.updates_per_epoch, 'update')}."
        + "".join(
            # The one finding about the data that is true of runs shorter than an epoch too.
            f"\nNote: {finding['message']}."
            for finding in plan_findings(plan, epochs=epoch)
            if finding["kind"] == "no_full_global_batch"
        )
    )


@dataclass(kw_only=True, slots=True)
class Stop:
    """Whether somebody asked the job to stop, and whether by SIGTERM."""

    asked: bool = False
    terminated: bool = False


@contextmanager
def stop_on_signal() -> Iterator[Stop]:
    """Let the first Ctrl-C or SIGTERM end the run after the update under way; a second Ctrl-C at once.

    A second SIGTERM changes nothing: torchrun passes on the one that all processes have had already.
    """
    stop = Stop()

    def ask(number: int, _frame: FrameType | None) -> None:
        if stop.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.terminated |= number == signal.SIGTERM
        stop.asked = True

    found = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in found.items():
            signal.signal(number, handler)


def _in_a_hurry(job: Job, stop: Stop, evaluation_seconds: float) -> bool:
    """Whether the last evaluation is left out, on all ranks or none: SIGTERM came, and it takes long."""
    return job.world.any(stop.terminated) and job.world.any(evaluation_seconds > QUICK_EVALUATION_S)


def _refuse_endless_skips(skips_in_a_row: int, record: UpdateRecord) -> None:
    if skips_in_a_row >= MOST_SKIPS_IN_A_ROW:
        raise JudgeError(
            f"the last {skips_in_a_row} updates were all skipped, the last because {record.reason}; "
            "lower optimizer.learning_rate or look at the data"
        )


@contextmanager
def _log(
    job: Job, folder: Path, proof: Verification | None, command: Sequence[str]
) -> Iterator[RunLog | None]:
    """The log on the leading rank, None on the others; all end together where it can't be written."""
    log: RunLog | None = None
    refusal: str | None = None
    if job.world.leads:
        try:
            log = RunLog(folder, _header(job, proof, command))
        except RecordError as error:
            refusal = str(error)
    job.world.raise_together(refusal)
    if log is None:
        yield None
        return
    with log:
        yield log


def _folder(config: TrainConfig) -> Path:
    if config.run.folder:
        return Path(config.run.folder)
    return Path("runs") / datetime.now().strftime("%Y-%m-%d-%H%M%S")


def _header(job: Job, proof: Verification | None, command: Sequence[str]) -> RunHeader:
    plan, config = job.plan, job.config
    return RunHeader(
        global_batch_samples=plan.global_batch_samples,
        micro_batch_samples=plan.micro_batch_samples,
        micro_batches_per_window=plan.micro_batches_per_window,
        replicas=plan.replicas,
        layout={
            "ranks": plan.layout.ranks,
            "tensor_parallel": plan.layout.tensor_parallel,
            "pipeline_parallel": plan.layout.pipeline_parallel,
            "context_parallel": plan.layout.context_parallel,
        },
        tail=plan.tail,
        precision=f"parameters and forward in {config.model.dtype}, on {job.world.device.type}",
        normalisation="sum over items / N, the items of the global batch",
        seeds={"run": config.run.seed},
        command=list(command),
        dataset=job.data.facts(),
        model={"name": "GPT", "parameters": num_parameters(job.model)},
        settings=config.to_dict(),
        proof=proof_facts(proof),
    )
