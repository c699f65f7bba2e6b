"""The training job, from the settings to the end of the run.

The order in which things happen: refuse what can be refused, read the samples, build the model,
**prove on the first global batch that the accumulated update is that of the big batch**, then train,
evaluating and saving now and then. ``training.py`` has the loop.

The leading rank writes and shows; where it can't, every rank ends, with the same words.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from wholebatch.errors import RecordError, UsageError
from wholebatch.record import STOPPED_BY_USER
from wholebatch.report.output import OutputClosedError
from wholebatch.report.run_view import changes_words
from wholebatch.report.words import number_of
from wholebatch.resume import Checkpoints
from wholebatch.run_folder import RunLog, only_writer, used_folder
from wholebatch.train import facts
from wholebatch.train.advice import how_to_resume
from wholebatch.train.display import Display
from wholebatch.train.hyperparameters import refuse_other_state
from wholebatch.train.layouts.cut import whole_state
from wholebatch.train.models.export import export_model
from wholebatch.train.parts import Job, data_identity
from wholebatch.train.proof import proof_words, prove_first_batch
from wholebatch.train.resuming import (
    CHECKPOINTS,
    Earlier,
    nothing_left,
    refuse_changes,
    refuse_what_moved_on,
    settings_before,
)
from wholebatch.train.settings import TrainConfig
from wholebatch.train.signals import Stop, stop_on_signal
from wholebatch.train.training import Training

DONE, NOT_EQUAL, HUNG_UP, INTERRUPTED, TERMINATED = 0, 1, 129, 130, 143
STOPPED = {
    HUNG_UP: "stopped by SIGHUP",
    INTERRUPTED: STOPPED_BY_USER,
    TERMINATED: "stopped by SIGTERM",
}
MODEL_FOLDER, AVERAGE_FOLDER = "model", "model-average"


@dataclass(frozen=True, kw_only=True, slots=True)
class JobResult:
    """What came out.

    Args:
        exit_code: 0 done, 1 the first batch was not equal, 129 ended by SIGHUP, 130 interrupted, 143 ended
            by SIGTERM.
        folder: where the records are; None on ranks that do not lead and where nothing was trained.
    """

    exit_code: int
    folder: Path | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Begun:
    """A run that is ready for its next update: its folder, its training and what is said of it first."""

    folder: Path
    training: Training
    words: str


def run_job(
    job: Job,
    display: Display,
    *,
    command: Sequence[str] = (),
    earlier: Earlier | None = None,
    stop: Stop | None = None,
) -> JobResult:
    """Prove, train, record and save.

    Args:
        job: what ``build_job`` made.
        display: shows what happens; one that shows nothing on ranks that do not lead.
        command: the words of the command line, for the header.
        earlier: the run to resume; None for a new one.
        stop: of a ``stop_on_signal`` that goes on after the run; None for one of its own.

    Raises:
        CheckpointError: the run can't be saved, or its checkpoint is damaged.
        RecordError: the run folder can't be written, or another program is writing it.
        JudgeError: the first batch could not be judged, or too many updates in a row were skipped.
        OutputClosedError: nobody reads the display any more; the run ends as interrupted.
        UsageError: the run that is to be resumed does not fit the settings.
    """
    _refuse_other_data(job)
    with ExitStack() as held:
        if earlier is None:
            begun = _begin_new(job, display, command, held)
        else:
            _hold(job, earlier.folder, held)
            if _has_nothing_left(job, display, earlier):
                return JobResult(exit_code=DONE, folder=earlier.folder if job.world.leads else None)
            begun = _resume(job, display, command, earlier)
        if begun is None:
            return JobResult(exit_code=NOT_EQUAL)
        if stop is None:
            stop = held.enter_context(stop_on_signal())
        stop.on_edges = True
        return _run(job, display, begun, stop)


def _run(job: Job, display: Display, begun: _Begun, stop: Stop) -> JobResult:
    """Train to the end, or to the edge on which somebody asked to stop."""
    folder, training = begun.folder, begun.training
    with _log_closed(training):
        _say(job, display, begun.words)
        exit_code = DONE if _train(training, stop, display, folder) else _code_of(stop, job)
        if exit_code in (DONE, INTERRUPTED):  # whoever sends another signal does not wait
            with _told_how_to_resume(display, folder):
                _export(training, folder)
            which = "trained model" if exit_code == DONE else "model as it is now"
            average = "" if training.average is None else f", its average in {folder / AVERAGE_FOLDER}"
            _say(job, display, f"The {which} is in {folder / MODEL_FOLDER}{average}")
        if exit_code != DONE:
            job.world.all_or_none(lambda: training.close_log("interrupted", STOPPED[exit_code]))
    if exit_code != DONE:
        _say(job, display, "Interrupted between two updates; the records are complete up to there.")
        _say(job, display, job.world.on_leader(lambda: how_to_resume(folder)))
    _say(job, display, f"To look at it: wholebatch show {shlex.quote(str(folder))}")
    return JobResult(exit_code=exit_code, folder=folder if job.world.leads else None)


def _code_of(stop: Stop, job: Job) -> int:
    """The exit code of a run that somebody asked to stop, the same on every rank."""
    if job.world.any(stop.terminated and not stop.hung_up):
        return TERMINATED
    return HUNG_UP if job.world.any(stop.hung_up) else INTERRUPTED


def run_folder(config: TrainConfig) -> Path:
    """Where a new run is written."""
    if config.run.folder:
        return Path(config.run.folder).expanduser()
    return Path("runs") / datetime.now().strftime("%Y-%m-%d-%H%M%S")


# A new run, or one that is resumed -----------------------------------------------------------------


def _begin_new(job: Job, display: Display, command: Sequence[str], held: ExitStack) -> _Begun | None:
    """A run before its first update; None where the first global batch was not equal."""
    folder = job.world.on_leader(lambda: unused_folder(job.config))  # by its clock and its disk for all
    _say(job, display, facts.describe(job))
    proof = None
    if job.config.proof.check_first_batch:
        proof = prove_first_batch(job)
        _say(job, display, proof_words(proof, job))
        if not proof.equal and not job.config.proof.train_if_not_equal:
            _say(job, display, "Not trained: see [proof] train_if_not_equal, or mend what is named above.")
            return None
    _hold(job, folder, held)
    saved = job.config.checkpoints.every_updates > 0
    training = Training(job, _checkpoints(job, folder) if saved else None, display)
    training.log = _log_of_the_leader(job, lambda: RunLog(folder, facts.header(job, proof, command)))
    words = f"Records go to {folder}{facts.price(job, training.window)}"
    return _Begun(folder=folder, training=training, words=words)


def _resume(job: Job, display: Display, command: Sequence[str], earlier: Earlier) -> _Begun:
    """A run as its checkpoint has it."""
    folder = earlier.folder
    refuse_other_state(job.model.module, settings_before(earlier).optimizer, job.config.optimizer)
    _say(job, display, facts.describe(job))
    training = Training(job, _checkpoints(job, folder), display)
    training.evaluated_at_start = earlier.evaluated_at_start
    found = None if _never_saved(job, earlier) else training.load(earlier.checkpoint)
    updates, samples = (found.updates_attempted, found.samples) if found else (0, 0)
    told = facts.resumption(job, earlier.settings, command, updates_attempted=updates, samples=samples)
    training.log = _log_of_the_leader(job, lambda: RunLog.resume(folder, told))
    price = facts.price(job, training.window)
    words = f"Resumed {folder} after {number_of(updates, 'update')}, {number_of(samples, 'sample')}.{price}"
    if changes := changes_words(earlier.layout, told):
        words += f"\nChanged: {changes}"
    return _Begun(folder=folder, training=training, words=words)


def _refuse_other_data(job: Job) -> None:
    """Refuse ranks that read different samples, of which each would take a share by their numbers.

    Raises:
        UsageError: on every rank.
    """
    told = data_identity(job) | {"held_out_samples": len(job.data.held_out)}
    if words := job.world.difference(told):
        raise UsageError(f"the ranks read different data: {words}; give all of them the same files")


def _hold(job: Job, folder: Path, held: ExitStack) -> None:
    """Be the only program that writes the folder, until ``held`` is left; else all ranks end."""
    job.world.all_or_none(lambda: held.enter_context(only_writer(folder)) if job.world.leads else None)


def _has_nothing_left(job: Job, display: Display, earlier: Earlier) -> bool:
    """Whether the run is done already, which is said; refuses what can't be resumed as it is now."""
    job.world.on_leader(lambda: refuse_what_moved_on(earlier))
    refuse_changes(earlier, job.config)
    if not nothing_left(earlier, job.config):
        return False
    updates = number_of(earlier.num_records, "update")
    words = f"{earlier.folder} has {updates} already; nothing to do. For more, --set run.num_updates=N"
    _say(job, display, words)
    return True


def unused_folder(config: TrainConfig) -> Path:
    """Where a new run is written, once it is known that nothing is there.

    Raises:
        RecordError: there are files in it already, or it is none.
    """
    folder = run_folder(config)
    if refusal := used_folder(folder):
        raise RecordError(refusal)
    return folder


def _checkpoints(job: Job, folder: Path) -> Checkpoints:
    settings = job.config.checkpoints
    return Checkpoints(folder / CHECKPOINTS, keep_last=settings.keep_last, keep_best=settings.keep_best)


def _never_saved(job: Job, earlier: Earlier) -> bool:
    """Whether the run was killed before its first checkpoint, and so begins again."""
    folder = earlier.folder / CHECKPOINTS
    return job.world.on_leader(lambda: earlier.num_records == 0 and not any(folder.glob("update-*")))


def _log_of_the_leader(job: Job, make: Callable[[], RunLog]) -> RunLog | None:
    """The log on the leading rank, None on the others; all end together where it can't be written."""
    return job.world.all_or_none(lambda: make() if job.world.leads else None)


# While it runs ---------------------------------------------------------------------------------------


def _say(job: Job, display: Display, text: str) -> None:
    """Show some words; where nobody can read them on the leading rank, all ranks end."""
    job.world.all_or_none(lambda: display.say(text))


def _train(training: Training, stop: Stop, display: Display, folder: Path) -> bool:
    """Train, to the end or to the edge on which somebody asked to stop."""
    with _told_how_to_resume(display, folder), _shown(display, training.job):
        return training.run(stop)


@contextmanager
def _told_how_to_resume(display: Display, folder: Path) -> Iterator[None]:
    """Say how to resume, whatever ends the run."""
    try:
        yield
    except OutputClosedError:
        raise
    except (Exception, KeyboardInterrupt) as error:
        with contextlib.suppress(Exception):  # the error under way came first and says more
            if isinstance(error, KeyboardInterrupt):
                display.say("Interrupted at once: what was under way is lost, and was not saved.")
            display.say(how_to_resume(folder))
        raise


@contextmanager
def _shown(display: Display, job: Job) -> Iterator[None]:
    """Keep a live display up; where it fails on the leading rank, all ranks end."""
    job.world.all_or_none(display.__enter__)
    try:
        yield
    except BaseException:
        with contextlib.suppress(Exception):  # as above
            display.__exit__(None, None, None)
        raise
    job.world.all_or_none(lambda: display.__exit__(None, None, None))


@contextmanager
def _log_closed(training: Training) -> Iterator[None]:
    """Write how the run ended, whatever ends it."""
    log = training.log
    try:
        yield
    except BaseException as error:
        if log is not None and isinstance(error, OutputClosedError):
            with contextlib.suppress(RecordError):  # the error under way came first
                log.close("interrupted", str(error))
        elif log is not None:
            log.__exit__(type(error), error, error.__traceback__)
        raise
    training.job.world.all_or_none(training.close_log)


def _export(training: Training, folder: Path) -> None:
    """Write the trained model, and its average beside it, where others can load them; on every rank."""
    _export_one(training.job, folder / MODEL_FOLDER)
    if training.average is not None:
        with training.average.swapped_in():
            _export_one(training.job, folder / AVERAGE_FOLDER)


def _export_one(job: Job, folder: Path) -> None:
    tokenizer = None if job.config.data.tokenizer == "bytes" else job.config.data.tokenizer
    state = whole_state(job.model.module, job.world)
    job.world.on_leader(lambda: export_model(job.model, folder, tokenizer=tokenizer, state=state))
