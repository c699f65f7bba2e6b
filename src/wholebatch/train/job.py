"""The training job, from the settings to the end of the run.

The order in which things happen: refuse what can be refused, read the samples, build the model,
**prove on the first global batch that the accumulated update is that of the big batch**, then train,
evaluating and saving now and then. ``training.py`` has the loop.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from wholebatch.errors import RecordError
from wholebatch.record import STOPPED_BY_USER
from wholebatch.report.output import OutputClosedError
from wholebatch.report.words import number_of
from wholebatch.resume import Checkpoints, Found
from wholebatch.run_log import RunLog, used_folder
from wholebatch.train import facts
from wholebatch.train.display import Display
from wholebatch.train.models.export import export_model
from wholebatch.train.parts import Job
from wholebatch.train.proof import proof_words, prove_first_batch
from wholebatch.train.resuming import CHECKPOINTS, Earlier
from wholebatch.train.settings import TrainConfig
from wholebatch.train.signals import stop_on_signal
from wholebatch.train.training import Training
from wholebatch.verify.verification import Verification

DONE, NOT_EQUAL, INTERRUPTED, TERMINATED = 0, 1, 130, 143
STOPPED_BY_SIGTERM = "stopped by SIGTERM"
MODEL_FOLDER = "model"


@dataclass(frozen=True, kw_only=True, slots=True)
class JobResult:
    """What came out.

    Args:
        exit_code: 0 done, 1 the first batch was not equal, 130 interrupted, 143 ended by SIGTERM.
        folder: where the records are; None on ranks that do not lead and where nothing was trained.
    """

    exit_code: int
    folder: Path | None = None


def run_job(
    job: Job, display: Display, *, command: Sequence[str] = (), earlier: Earlier | None = None
) -> JobResult:
    """Prove, train, record and save.

    Args:
        job: what ``build_job`` made.
        display: shows what happens; one that shows nothing on ranks that do not lead.
        command: the words of the command line, for the header.
        earlier: the run to go on with; None for a new one.

    Raises:
        CheckpointError: the run can't be saved, or its checkpoint is damaged.
        RecordError: the run folder can't be written.
        JudgeError: the first batch could not be judged, or too many updates in a row were skipped.
        OutputClosedError: nobody reads the display any more; the run ends as interrupted.
    """
    folder = run_folder(job.config) if earlier is None else earlier.folder
    if earlier is None:
        job.world.raise_together(used_folder(folder) if job.world.leads else None)
    display.say(facts.describe(job))
    proof = None
    if earlier is None and job.config.proof.check_first_batch:
        proof = prove_first_batch(job)
        display.say(proof_words(proof, job))
        if not proof.equal and not job.config.proof.train_if_not_equal:
            display.say("Not trained: see [proof] train_if_not_equal, or mend what is named above.")
            return JobResult(exit_code=NOT_EQUAL)
    with stop_on_signal() as stop:
        training = Training(job, _checkpoints(job, folder, earlier), display, stop)
        found = _load(training, earlier)
        if earlier is not None:
            training.evaluated_at_start = earlier.evaluated_at_start
        with _log(job, folder, proof, command, earlier, found) as log:
            training.log = log
            display.say(f"Records go to {folder}" if earlier is None else _where(folder, training))
            finished = _run(training, folder, display)
            terminated = not finished and job.world.any(stop.terminated)
            if finished:
                _export(job, training, folder)
                display.say(f"The trained model is in {folder / MODEL_FOLDER}")
            elif log is not None:
                log.close("interrupted", STOPPED_BY_SIGTERM if terminated else STOPPED_BY_USER)
    if not finished:
        display.say("Interrupted between two updates; the records are complete up to there.")
        display.say(how_to_go_on(folder))
    display.say(f"To look at it: wholebatch show {shlex.quote(str(folder))}")
    exit_code = DONE if finished else TERMINATED if terminated else INTERRUPTED
    return JobResult(exit_code=exit_code, folder=folder if job.world.leads else None)


def how_to_go_on(folder: Path) -> str:
    """What to type to go on with a run from its newest checkpoint, or why that can't be done."""
    saved = Checkpoints(folder / CHECKPOINTS).list()
    if not saved:
        return "There is no checkpoint of it, so it can't be gone on with; see checkpoints.every_updates."
    return (
        f"Saved after {number_of(saved[-1].updates_attempted, 'update')}. "
        f"To go on: wholebatch train --resume {shlex.quote(str(folder))}"
    )


def _run(training: Training, folder: Path, display: Display) -> bool:
    """Train; whatever ends it, say how to go on."""
    try:
        with display:
            return training.run()
    except OutputClosedError as closed:
        if training.log is not None:
            training.log.close("interrupted", str(closed))
        raise
    except Exception:
        display.say(how_to_go_on(folder))
        raise


def _checkpoints(job: Job, folder: Path, earlier: Earlier | None) -> Checkpoints | None:
    settings = job.config.checkpoints
    if not settings.every_updates and earlier is None:
        return None
    return Checkpoints(folder / CHECKPOINTS, keep_last=settings.keep_last, keep_best=settings.keep_best)


def _load(training: Training, earlier: Earlier | None) -> Found | None:
    """Put the run back to its checkpoint; None for a new run, or one that never got to its first."""
    if earlier is None:
        return None
    world, folder = training.job.world, earlier.folder / CHECKPOINTS
    never_saved = world.leads and not Checkpoints(folder).list() and not any(folder.glob("update-*"))
    if world.any(never_saved) and earlier.num_records == 0:
        return None
    return training.load(earlier.checkpoint)


def _where(folder: Path, training: Training) -> str:
    updates, samples = training.updates_attempted, training.window.counters.samples
    return f"Going on with {folder} after {number_of(updates, 'update')}, {samples:,} samples."


@contextmanager
def _log(
    job: Job,
    folder: Path,
    proof: Verification | None,
    command: Sequence[str],
    earlier: Earlier | None,
    found: Found | None,
) -> Iterator[RunLog | None]:
    """The log on the leading rank, None on the others; all end together where it can't be written."""
    log: RunLog | None = None
    refusal: str | None = None
    if job.world.leads:
        try:
            if earlier is None:
                log = RunLog(folder, facts.header(job, proof, command))
            else:
                told = facts.resumption(
                    job,
                    earlier.settings,
                    command,
                    updates_attempted=found.updates_attempted if found else 0,
                    samples=found.samples if found else 0,
                )
                log = RunLog.resume(folder, told)
        except RecordError as error:
            refusal = str(error)
    job.world.raise_together(refusal)
    if log is None:
        yield None
        return
    with log:
        yield log


def run_folder(config: TrainConfig) -> Path:
    """Where a new run is written."""
    if config.run.folder:
        return Path(config.run.folder)
    return Path("runs") / datetime.now().strftime("%Y-%m-%d-%H%M%S")


def _export(job: Job, training: Training, folder: Path) -> None:
    """Write the trained model, and its average beside it, where others can load them."""
    refusal = None
    if job.world.leads:
        tokenizer = None if job.config.data.tokenizer == "bytes" else job.config.data.tokenizer
        try:
            export_model(job.model, folder / MODEL_FOLDER, tokenizer=tokenizer)
            if training.average is not None:
                with training.average.swapped_in():
                    export_model(job.model, folder / f"{MODEL_FOLDER}-average", tokenizer=tokenizer)
        except RecordError as error:
            refusal = str(error)
    job.world.raise_together(refusal)
