"""A run under way: update, evaluate, save, until it is done or somebody asks it to stop.

``Training.run`` is the loop. What it promises: it ends on an edge between two updates, whatever ends
it, and saves there, so that nothing is lost that was committed and nothing counts twice.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

from torch import nn

from wholebatch.errors import CheckpointError, JudgeError, PoisonedWindowError, RecordError, UsageError
from wholebatch.loading import WindowBatches
from wholebatch.memory import is_out_of_memory
from wholebatch.objective import LossSum
from wholebatch.ranks.lost import last_words
from wholebatch.ranks.together import ContactLostError
from wholebatch.record import EndReason, Evaluation, UpdateRecord
from wholebatch.report.output import OutputClosedError
from wholebatch.resume import Checkpoints, Found
from wholebatch.run_folder import RunLog
from wholebatch.train.advice import memory_advice, with_the_command
from wholebatch.train.average import make_average
from wholebatch.train.display import Display
from wholebatch.train.evaluate import HELD_OUT, HELD_OUT_AVERAGE, evaluate_held_out
from wholebatch.train.hyperparameters import apply_settings, groups_as_built, settings_to_save
from wholebatch.train.layouts.sequences import sequence_mesh
from wholebatch.train.loading import windows
from wholebatch.train.material import Batch
from wholebatch.train.parts import Job, as_shared, data_identity, make_window
from wholebatch.train.signals import Stop

# So many skipped updates in a row do not come right by themselves.
MOST_SKIPS_IN_A_ROW = 10
# Of checkpoints that do not name theirs.
_FORMER_ORDER_RULE = "sorted"


class Training:
    """The window over a job, and what is done between its updates.

    Args:
        job: what is trained on what.
        checkpoints: where the run is saved; None where it is not.
        display: shows what happens.
    """

    def __init__(self, job: Job, checkpoints: Checkpoints | None, display: Display) -> None:
        sequences = sequence_mesh(job.config.parallel, job.world)
        self.job = job = as_shared(job, sequences)
        self.window = make_window(
            job, sequences, say=lambda text: job.world.all_or_none(lambda: display.say(text))
        )
        self.average = make_average(job.model.module, job.config.average)
        self.log: RunLog | None = None
        self.evaluated_at_start: frozenset[str] = frozenset()  # splits recorded so by an earlier try
        self._checkpoints = checkpoints
        self._display = display
        self._stop = Stop()
        self._skipped_updates_in_a_row = 0
        self._loaded = False
        self._closed: OutputClosedError | None = None  # nobody reads the display any more
        self._saved_updates: int | None = None
        self._score: float | None = None  # the held-out loss at this edge, where it was evaluated

    @property
    def updates_attempted(self) -> int:
        """Updates of the run so far."""
        return self.window.counters.updates_attempted

    def load(self, which: str | None) -> Found:
        """Resume from a checkpoint of this run; the newest where ``which`` is None.

        Raises:
            CheckpointError: it is damaged.
            UsageError: there is none, or it is of another run.
        """
        assert self._checkpoints is not None
        more = {} if self.average is None else {"average": self.average}
        built = groups_as_built(self.window)
        try:
            found = self._checkpoints.load(self.window, more=more, which=which)
        except CheckpointError as error:
            raise with_the_command(error) from error
        # A version before this one may not have saved all of it: what it did is compared.
        then, now = found.more.get("data", {}), data_identity(self.job)
        if then:
            then = {"order": _FORMER_ORDER_RULE, **then}
        for name, value in now.items():
            if name in then and then[name] != value:
                raise UsageError(
                    f"the checkpoint {found.facts.path} was made with {name} {_given(then[name])}, and it "
                    f"is {_given(value)} now, so the run would not resume with the same global batches; "
                    f"give it back its data and settings, or begin a new run"
                )
        apply_settings(
            self.window, built, saved=found.more.get("settings", {}), settings=self.job.config.optimizer
        )
        self._skipped_updates_in_a_row = found.more.get("skipped_updates_in_a_row", 0)
        self._score = found.facts.score
        self._loaded = True
        if which is None:
            self._saved_updates = found.updates_attempted
        # One that was named is saved again, which sets aside those after it: they are of another way.
        return found

    def close_log(self, reason: EndReason = "done", message: str | None = None) -> None:
        """Write how the run ended, on the rank that has the log."""
        if self.log is not None:
            self.log.close(reason, message)

    # The loop -------------------------------------------------------------------------------------

    def run(self, stop: Stop) -> bool:
        """Train until the last update, or until somebody asks to stop.

        Args:
            stop: whether somebody asked.

        Returns:
            True when all updates were attempted, False when it was stopped before.

        Raises:
            OutputClosedError: on every rank, after saving, where nobody reads the display.
        """
        self._stop = stop
        run = self.job.config.run
        if not self._loaded:
            self._evaluate()
        self._save()  # a folder that can't take a checkpoint is found out now, not hours later
        if self.updates_attempted >= run.num_updates:
            return True
        with closing(self._windows()) as micro_batches:
            while True:
                record = self._update(micro_batches)
                stopped = record is None or self._take_in(record)
                done = self.updates_attempted >= run.num_updates
                if stopped or done or self.updates_attempted % run.evaluate_every_updates == 0:
                    self._evaluate()
                if stopped or done or self._checkpoint_is_due():
                    self._save()
                if self._closed is not None and stopped:
                    raise self._closed
                if stopped or done:
                    return done

    def _windows(self) -> Generator[WindowBatches]:
        return windows(
            self.job.data,
            self.job.order,
            self.job.plan,
            replica=self.job.replica,
            start_samples=self.window.counters.position,
            workers=self.job.config.data.workers,
            seed=self.job.config.run.seed,
            on_bad_sample=self.job.config.data.on_bad_sample,
        )

    def _update(self, micro_batches: Iterator[WindowBatches]) -> UpdateRecord | None:
        """One update; None where SIGTERM made it be left, and rolled back, on all ranks."""
        try:
            # Drawn inside the update, so that a sample that can't be read rolls it back on every rank.
            with self.window.update(_NextWindow(micro_batches)) as update:
                update.run(self.job.loss_of_output if self.job.staged else self._loss)
        except Exception as error:
            if self._left_or_saved(error):
                return None
            if is_out_of_memory(error):
                raise JudgeError(memory_advice(self.job.plan, during="an update")) from error
            raise
        return update.record

    def _loss(self, model: nn.Module, batch: Batch) -> LossSum | Mapping[str, LossSum]:
        # Where forwards are meetings, a rank that left one would leave the others waiting.
        if self._stop.in_a_hurry and not self.job.forwards_together:
            raise _LeftError
        return self.job.loss(model, batch)

    def _left_or_saved(self, error: Exception) -> bool:
        """Whether an update that was rolled back was left on purpose, on every rank.

        Where it was not, what was committed before it is saved. The error of the update came first and
        says more than any problem with that.
        """
        if isinstance(error, PoisonedWindowError) or last_words():
            return False
        # A SIGTERM to the whole group ends the processes that read samples too.
        told_to = isinstance(error, _LeftError) or (self._stop.terminated and isinstance(error, JudgeError))
        try:
            if self.job.world.any(told_to):
                return True
        except ContactLostError as lost:
            error.add_note(f"the other ranks could not be asked: {lost}")
            return False
        self._save_after(error)
        return False

    def _take_in(self, record: UpdateRecord) -> bool:
        """Write an update down and show it; whether somebody asked, on any rank, to stop after it."""

        def write_and_show() -> None:
            if self.log is not None:
                self.log.write(record)
            self._display.updated(record)

        self._shown_or_closed(write_and_show)
        stopped = self.job.world.any(self._stop.asked) or self._closed is not None
        if self.average is not None:
            self.average.follow(record)
        self._score = None
        if record.outcome == "applied":
            self._skipped_updates_in_a_row = 0
        elif record.outcome != "skipped_nonfinite" or (record.loss_scale or 1.0) <= 1.0:
            # Above 1 the scale is halved by such a skip, and may just have been too high.
            self._skipped_updates_in_a_row += 1
        if self._skipped_updates_in_a_row >= MOST_SKIPS_IN_A_ROW:
            self._save()
            raise JudgeError(
                f"the last {self._skipped_updates_in_a_row} updates were all skipped, the last because "
                f"{record.reason}; lower optimizer.learning_rate or look at the data"
            )
        return stopped

    # Between updates ------------------------------------------------------------------------------

    def _evaluate(self) -> None:
        """The held-out loss of the parameters, and of their average where there is one.

        One that fails ends the run, which is saved on this edge first.
        """
        if not len(self.job.data.held_out):
            return
        try:
            found = self._evaluation(HELD_OUT)
            if found is not None:
                self._score = found.loss_per_item
            if self.average is not None:
                with self.average.swapped_in():
                    self._evaluation(HELD_OUT_AVERAGE)
        except Exception as error:
            # Where only its record could not be written, resuming has to evaluate again. Where a rank left
            # the others in a forward, none can ask whether all have saved.
            if not isinstance(error, ContactLostError | RecordError) and not last_words():
                self._save_after(error)
            if is_out_of_memory(error):
                raise JudgeError(memory_advice(self.job.plan, during="an evaluation")) from error
            raise

    def _evaluation(self, split: str) -> Evaluation | None:
        found = evaluate_held_out(
            self.job,
            self.window.counters,
            split=split,
            model=self.window.model,
            leave=lambda: self._stop.in_a_hurry,
        )
        if found is None:
            return None
        recorded = self.updates_attempted == 0 and split in self.evaluated_at_start

        def write_and_show() -> None:
            if self.log is not None and not recorded:
                self.log.write_evaluation(found)
            self._display.evaluated(found)

        self._shown_or_closed(write_and_show)
        return found

    def _shown_or_closed(self, act: Callable[[], None]) -> None:
        """Act on all ranks or none; where nobody reads the display, the run ends on the next edge."""
        try:
            self.job.world.all_or_none(act)
        except OutputClosedError as closed:
            self._closed = closed

    def _checkpoint_is_due(self) -> bool:
        every = self.job.config.checkpoints.every_updates
        return every > 0 and self.updates_attempted % every == 0

    def _save(self) -> None:
        """Save the run as it is on this edge, if it is saved at all and has not been here."""
        if self._checkpoints is None or self._saved_updates == self.updates_attempted:
            return
        # A checkpoint counts on the records before it, so they are on the disk first.
        self.job.world.all_or_none(self._sync_log)
        more: dict[str, Any] = {
            "data": data_identity(self.job),
            "settings": settings_to_save(self.job.config),
            "skipped_updates_in_a_row": self._skipped_updates_in_a_row,
        }
        if self.average is not None:
            more["average"] = self.average
        self._checkpoints.save(self.window, more=more, score=self._score)
        self._saved_updates = self.updates_attempted

    def _sync_log(self) -> None:
        if self.log is not None:
            self.log.sync()

    def _save_after(self, error: Exception) -> None:
        """Save what was committed, where all ranks know of an error; that came first, and says more."""
        try:
            self._save()
        except Exception as problem:
            error.add_note(f"the run could not be saved either: {problem}")


class _LeftError(Exception):
    """An update is left on purpose, to be rolled back."""


def _given(value: Any) -> Any:
    return "not given" if value is None else value


class _NextWindow:
    """The micro-batches of the next global batch, read when the first is asked for.

    Args:
        windows: one global batch after the other.

    Attributes:
        left_out: ids of its samples that could not be read.
    """

    def __init__(self, windows: Iterator[WindowBatches]) -> None:
        self._windows = windows
        self.left_out: Sequence[int] = ()

    def __iter__(self) -> Iterator[Batch]:
        window = next(self._windows)
        self.left_out = window.left_out
        return iter(window)
