"""A run under way: update, evaluate, save, until it is done or somebody asks it to stop.

``Training.run`` is the loop. What it promises: it ends on an edge between two updates, whatever ends
it, and saves there, so that nothing is lost that was committed and nothing counts twice.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from typing import Any

import torch

from wholebatch.errors import (
    CheckpointError,
    JudgeError,
    PoisonedWindowError,
    RecordError,
    UsageError,
    WholebatchError,
)
from wholebatch.record import Evaluation, UpdateRecord
from wholebatch.report.output import OutputClosedError
from wholebatch.report.words import number_of
from wholebatch.resume import Checkpoints, Found
from wholebatch.run_log import RunLog
from wholebatch.train.average import make_average
from wholebatch.train.display import Display
from wholebatch.train.evaluate import HELD_OUT, HELD_OUT_AVERAGE, evaluate_held_out
from wholebatch.train.loading import windows
from wholebatch.train.material import Batch
from wholebatch.train.parts import Job, data_identity, make_window
from wholebatch.train.signals import Stop

# So many skipped updates in a row do not come right by themselves.
MOST_SKIPS_IN_A_ROW = 10


class Training:
    """The window over a job, and what is done between its updates.

    Args:
        job: what is trained on what.
        checkpoints: where the run is saved; None where it is not.
        display: shows what happens.
        stop: whether somebody asked to stop.
    """

    def __init__(self, job: Job, checkpoints: Checkpoints | None, display: Display, stop: Stop) -> None:
        self.job = job
        self.window = make_window(job)
        self.average = make_average(job.model.module, job.config.average)
        self.log: RunLog | None = None
        self.evaluated_at_start: frozenset[str] = frozenset()  # splits recorded so by an earlier try
        self._checkpoints = checkpoints
        self._display = display
        self._stop = stop
        self._skips_in_a_row = 0
        self._loaded = False
        self._closed: OutputClosedError | None = None  # nobody reads the display any more
        self._saved_updates: int | None = None
        self._score: float | None = None  # the held-out loss at this edge, where it was evaluated

    @property
    def updates_attempted(self) -> int:
        """Updates of the run so far."""
        return self.window.counters.updates_attempted

    def load(self, which: str | None) -> Found:
        """Go on from a checkpoint of this run; the newest where ``which`` is None.

        Raises:
            CheckpointError: it is damaged.
            UsageError: there is none, or it is of another run.
        """
        assert self._checkpoints is not None
        more = {} if self.average is None else {"average": self.average}
        try:
            found = self._checkpoints.load(self.window, more=more, which=which)
        except (CheckpointError, UsageError) as error:
            if "which=" not in str(error):
                raise
            # What a caller in Python gives by that name is --resume on the command line.
            raise type(error)(str(error).replace("which=", "--resume ")) from error
        then, now = found.more["data"], data_identity(self.job)
        for name, value in now.items():
            if then[name] != value:
                raise UsageError(
                    f"the checkpoint {found.facts.path} was made with {name} {then[name]}, and it is "
                    f"{value} now, so the run would not go on with the same global batches; give it back "
                    f"its data and settings, or begin a new run"
                )
        self._skips_in_a_row = found.more["skips_in_a_row"]
        self._score = found.facts.score
        self._loaded = True
        if which is None:
            self._saved_updates = found.updates_attempted
        # One that was named is saved again, which sets aside those after it: they are of another way.
        return found

    # The loop -------------------------------------------------------------------------------------

    def run(self) -> bool:
        """Train until the last update, or until somebody asks to stop.

        Returns:
            True when all updates were attempted, False when it was stopped before.

        Raises:
            OutputClosedError: on the leading rank, after saving, where nobody reads the display.
        """
        run = self.job.config.run
        if not self._loaded:
            self._evaluate()
        self._save()  # a folder that can't take a checkpoint is found out now, not hours later
        if self.updates_attempted >= run.num_updates:
            return True
        with closing(self._windows()) as micro_batches:
            while True:
                record = self._update(micro_batches)
                if record is None or self._take_in(record):
                    self._evaluate_if_quick()
                    self._save()
                    if self._closed is not None:
                        raise self._closed
                    return self.updates_attempted >= run.num_updates
                done = self.updates_attempted >= run.num_updates
                if done or self.updates_attempted % run.evaluate_every_updates == 0:
                    self._evaluate()
                if done or self._checkpoint_is_due():
                    self._save()
                if done:
                    return True

    def _windows(self) -> Generator[list[Batch]]:
        return windows(
            self.job.data,
            self.job.order,
            self.job.plan,
            replica=self.job.world.rank,
            start=self.window.counters.samples,
            workers=self.job.config.data.workers,
            seed=self.job.config.run.seed,
        )

    def _update(self, micro_batches: Iterator[list[Batch]]) -> UpdateRecord | None:
        """One update; None where SIGTERM made it be left, and rolled back, on all ranks."""
        try:
            # Drawn inside the update, so that a sample that can't be read rolls it back on every rank.
            with self.window.update(_drawn_from(micro_batches)) as update:
                for batch in update:
                    if self._stop.in_a_hurry:
                        raise _LeftError
                    update.backward(self.job.loss(self.window.model, batch))
        except Exception as error:
            if self._left_on_some_rank(error):
                return None
            self._save_after(error)
            if _is_out_of_memory(error):
                raise JudgeError(_memory_advice(self.job)) from error
            raise
        return update.record

    def _left_on_some_rank(self, error: Exception) -> bool:
        """Whether an update that was rolled back on every rank was left on purpose."""
        if isinstance(error, PoisonedWindowError):
            return False
        # A SIGTERM to the whole group ends the processes that read samples too.
        told_to = isinstance(error, _LeftError) or (self._stop.terminated and isinstance(error, JudgeError))
        return self.job.world.any(told_to)

    def _take_in(self, record: UpdateRecord) -> bool:
        """Write an update down and show it; whether somebody asked, on any rank, to stop after it."""
        refusal = None
        try:
            if self.log is not None:
                self.log.write(record)
            self._show(lambda: self._display.updated(record))
        except RecordError as error:
            refusal = str(error)
        asked = self._stop.asked or self._closed is not None
        stops, refusals = self.job.world.total([asked, refusal is not None])
        if refusals:
            self.job.world.raise_together(refusal)
        if self.average is not None:
            self.average.follow(record)
        self._score = None
        self._skips_in_a_row = 0 if record.outcome == "applied" else self._skips_in_a_row + 1
        if self._skips_in_a_row >= MOST_SKIPS_IN_A_ROW:
            self._save()
            raise JudgeError(
                f"the last {self._skips_in_a_row} updates were all skipped, the last because "
                f"{record.reason}; lower optimizer.learning_rate or look at the data"
            )
        return stops > 0

    # Between updates ------------------------------------------------------------------------------

    def _evaluate(self) -> None:
        """The held-out loss of the parameters, and of their average where there is one."""
        if not len(self.job.data.held_out):
            return
        found = self._evaluation(HELD_OUT)
        if found is not None:
            self._score = found.loss_per_item
        if self.average is not None:
            with self.average.swapped_in():
                self._evaluation(HELD_OUT_AVERAGE)

    def _evaluation(self, split: str) -> Evaluation | None:
        found = evaluate_held_out(
            self.job, self.window.counters, split=split, leave=lambda: self._stop.in_a_hurry
        )
        if found is not None:
            recorded = self.updates_attempted == 0 and split in self.evaluated_at_start
            if self.log is not None and not recorded:
                self.log.write_evaluation(found)
            self._show(lambda: self._display.evaluated(found))
        return found

    def _show(self, what: Callable[[], None]) -> None:
        """Show it; where nobody reads that any more, the run ends on the next edge, saved."""
        try:
            what()
        except OutputClosedError as closed:
            self._closed = closed

    def _evaluate_if_quick(self) -> None:
        """A last evaluation, which is left out where SIGTERM leaves no time for it."""
        if not self.job.world.any(self._stop.in_a_hurry):
            self._evaluate()

    def _checkpoint_is_due(self) -> bool:
        every = self.job.config.checkpoints.every_updates
        return every > 0 and self.updates_attempted % every == 0

    def _save(self) -> None:
        """Save the run as it is on this edge, if it is saved at all and has not been here."""
        if self._checkpoints is None or self._saved_updates == self.updates_attempted:
            return
        self.job.world.raise_together(self._records_not_synced())
        more: dict[str, Any] = {"data": data_identity(self.job), "skips_in_a_row": self._skips_in_a_row}
        if self.average is not None:
            more["average"] = self.average
        self._checkpoints.save(self.window, more=more, score=self._score)
        self._saved_updates = self.updates_attempted

    def _records_not_synced(self) -> str | None:
        """Put the records on the disk before a checkpoint counts on them; why not, if it fails."""
        try:
            if self.log is not None:
                self.log.sync()
        except RecordError as error:
            return str(error)
        return None

    def _save_after(self, error: Exception) -> None:
        """Save what was committed before an update failed, where all ranks rolled it back."""
        if isinstance(error, PoisonedWindowError):
            return
        try:
            self._save()
        except WholebatchError as problem:
            error.add_note(f"the run could not be saved either: {problem}")


class _LeftError(Exception):
    """An update is left on purpose, to be rolled back."""


def _drawn_from(micro_batches: Iterator[list[Batch]]) -> Iterator[Batch]:
    """The micro-batches of the next global batch, read when the first is asked for."""
    yield from next(micro_batches)


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


def _memory_advice(job: Job) -> str:
    m = job.plan.micro_batch_samples
    smaller = f"set batch.micro_batch_samples to {m // 2}" if m > 1 else "lower data.max_tokens_per_sample"
    unless = ", which changes neither the global batch nor the update" if m > 1 else ""
    return (
        f"memory ran out with {number_of(m, 'sample')} in a micro-batch; {smaller}{unless}, or turn "
        f"model.activation_checkpointing on. The update was rolled back"
    )
