"""Updates of a whole run: epochs, tails, intervals, and two plans side by side.

    updates_per_epoch = ceil(dataset_samples / global_batch_samples)     tail "partial"
                      = floor(dataset_samples / global_batch_samples)    tail "drop"

A global batch never crosses the end of an epoch. All intervals are counted from the start of
training, in updates and in samples; whoever changes the micro-batches per window changes the global
batch, and with it every one of these numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from wholebatch.errors import PlanError
from wholebatch.plan import BatchPlan, Tail
from wholebatch.whole_numbers import one_of, set_whole_numbers, whole_number

Unit = Literal["updates", "samples"]
IntervalName = Literal["warmup", "log", "evaluation", "save"]


class EpochCut(NamedTuple):
    """An epoch cut into global batches. Made by `cut_epoch`.

    Args:
        updates: updates of the epoch, the partial one at its end included.
        tail_samples: samples left after the whole global batches; 0 where they divide.
        dropped_samples: samples that no update sees: the tail where it is dropped, else 0.
    """

    updates: int
    tail_samples: int
    dropped_samples: int


def cut_epoch(dataset_samples: int, global_batch_samples: int, tail: Tail) -> EpochCut:
    """Return the updates of one epoch and what is left over, as at the head of this file.

    Args:
        dataset_samples: samples of the data set, each of which comes once in an epoch.
        global_batch_samples: samples of one update over all replicas.
        tail: "partial" or "drop".

    Returns:
        The cut; no update where the tail is dropped and is all there is.
    """
    whole, left = divmod(dataset_samples, global_batch_samples)
    if tail == "drop":
        return EpochCut(updates=whole, tail_samples=left, dropped_samples=left)
    return EpochCut(updates=whole + (left > 0), tail_samples=left, dropped_samples=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochLedger:
    """What a plan does with a data set over some epochs.

    Args:
        plan: the plan; its ``tail`` says what becomes of the samples left at the end of an epoch.
        dataset_samples: samples of the data set, each of which comes once in an epoch.
        epochs: whole passes over the data set.

    Raises:
        PlanError: a number is not a whole positive one, or dropping the tail leaves no update.
    """

    plan: BatchPlan
    dataset_samples: int
    epochs: int = 1

    def __post_init__(self) -> None:
        set_whole_numbers(self, "dataset_samples", "epochs")
        dataset = self.dataset_samples
        whole_number("dataset_samples x epochs", dataset * self.epochs)
        if self.updates_per_epoch == 0:
            raise PlanError(
                f"tail='drop' leaves no update: {dataset} samples in the data set are fewer than the "
                f"{self.plan.global_batch_samples} of one global batch; use tail='partial', or a global "
                f"batch of at most {dataset}"
            )

    @property
    def _cut(self) -> EpochCut:
        return cut_epoch(self.dataset_samples, self.plan.global_batch_samples, self.plan.tail)

    @property
    def tail_samples(self) -> int:
        """Samples left in an epoch after its whole global batches; 0 where they divide."""
        return self._cut.tail_samples

    @property
    def samples_dropped_per_epoch(self) -> int:
        """Samples of an epoch that no update sees: the tail where it is dropped, else 0."""
        return self._cut.dropped_samples

    @property
    def samples_per_epoch(self) -> int:
        """Samples of an epoch that pass through updates."""
        return self.dataset_samples - self.samples_dropped_per_epoch

    @property
    def updates_per_epoch(self) -> int:
        """Updates of one epoch, the partial one at its end included."""
        return self._cut.updates

    @property
    def total_updates(self) -> int:
        """Updates of all epochs."""
        return self.updates_per_epoch * self.epochs

    @property
    def total_samples(self) -> int:
        """Samples that pass through updates in all epochs."""
        return self.samples_per_epoch * self.epochs

    def to_dict(self) -> dict[str, Any]:
        """Return the ledger as plain JSON values, under "epochs" in ``wholebatch plan --json``."""
        per_sample = self.plan.items_per_sample
        return {
            "dataset_samples": self.dataset_samples,
            "epochs": self.epochs,
            "updates_per_epoch": self.updates_per_epoch,
            "samples_per_epoch": self.samples_per_epoch,
            "tail": self.plan.tail,
            "tail_samples": self.tail_samples,
            "samples_dropped_per_epoch": self.samples_dropped_per_epoch,
            "total_updates": self.total_updates,
            "total_samples": self.total_samples,
            "total_samples_dropped": self.samples_dropped_per_epoch * self.epochs,
            "total_items": None if per_sample is None else self.total_samples * per_sample,
        }


def samples_after(plan: BatchPlan, updates: int, *, dataset_samples: int | None = None) -> int:
    """Return the samples that ``updates`` updates from the start consume, tails included.

    ``updates x global_batch_samples`` where no data set is given.
    """
    return _samples_after(plan, whole_number("updates", updates, minimum=0), dataset_samples)


def _samples_after(plan: BatchPlan, updates: int, dataset_samples: int | None) -> int:
    """The same for a number that nobody gave and that may be of any size."""
    if dataset_samples is None:
        return updates * plan.global_batch_samples
    ledger = EpochLedger(plan=plan, dataset_samples=dataset_samples)
    epochs, rest = divmod(updates, ledger.updates_per_epoch)
    return epochs * ledger.samples_per_epoch + rest * plan.global_batch_samples


def updates_reaching(plan: BatchPlan, samples: int, *, dataset_samples: int | None = None) -> int:
    """Return the fewest updates from the start that consume at least ``samples`` samples."""
    return _updates_reaching(plan, whole_number("samples", samples, minimum=0), dataset_samples)


def _updates_reaching(plan: BatchPlan, samples: int, dataset_samples: int | None) -> int:
    """The same for a number that nobody gave and that may be of any size."""
    if dataset_samples is None:
        return -(-samples // plan.global_batch_samples)
    ledger = EpochLedger(plan=plan, dataset_samples=dataset_samples)
    epochs, rest = divmod(samples, ledger.samples_per_epoch)
    return epochs * ledger.updates_per_epoch + -(-rest // plan.global_batch_samples)


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A point or period of a run, in updates and in samples.

    Args:
        name: "warmup", "log", "evaluation" or "save".
        given: the number that was given.
        unit: "updates" or "samples", the unit of ``given``.
        updates: the same in whole updates; samples are rounded up to the next update.
        samples: samples consumed after that many updates from the start.
    """

    name: IntervalName
    given: int
    unit: Unit
    updates: int
    samples: int

    @property
    def rounded_up(self) -> bool:
        """True where samples were given that end inside an update."""
        return self.unit == "samples" and self.samples != self.given

    def to_dict(self) -> dict[str, Any]:
        """Return the interval as plain JSON values."""
        return {
            "given": self.given,
            "unit": self.unit,
            "updates": self.updates,
            "samples": self.samples,
            "rounded_up": self.rounded_up,
        }


def resolve_interval(
    plan: BatchPlan, name: IntervalName, given: int, unit: Unit, *, dataset_samples: int | None = None
) -> Interval:
    """Express an interval in both units: updates as given, or the first update at or after the samples.

    Args:
        plan: the plan whose updates are counted.
        name: "warmup", "log", "evaluation" or "save".
        given: the interval, at least 1, or 0 for no warm-up.
        unit: "updates" or "samples".
        dataset_samples: samples of an epoch, so that tails count; None for whole global batches only.

    Raises:
        PlanError: the name or unit is not known, or the number is not a whole positive one.
    """
    one_of("interval", name, get_args(IntervalName))
    one_of("unit", unit, get_args(Unit))
    whole_number(f"{name}_{unit}", given, minimum=0 if name == "warmup" else 1)
    return _interval(plan, name, given, unit, dataset_samples)


def _interval(
    plan: BatchPlan, name: IntervalName, given: int, unit: Unit, dataset_samples: int | None
) -> Interval:
    updates = given if unit == "updates" else _updates_reaching(plan, given, dataset_samples)
    samples = _samples_after(plan, updates, dataset_samples)
    return Interval(name=name, given=given, unit=unit, updates=updates, samples=samples)


@dataclass(frozen=True, kw_only=True, slots=True)
class IntervalMove:
    """What an interval of the first plan becomes under the second.

    Args:
        first: the interval as given, under the first plan.
        same_updates: as many updates under the second plan.
        same_samples: as many samples under the second plan.
    """

    first: Interval
    same_updates: Interval
    same_samples: Interval

    @property
    def moves(self) -> bool:
        """True where the same number of updates is another number of samples."""
        return self.first.samples != self.same_updates.samples

    def to_dict(self) -> dict[str, Any]:
        """Return the move as plain JSON values."""
        return {
            "updates": self.first.updates,
            "samples": self.first.samples,
            "other_samples_of_same_updates": self.same_updates.samples,
            "other_updates_of_same_samples": self.same_samples.updates,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanComparison:
    """Two plans side by side. Made by `compare_plans`.

    Args:
        first, second: the plans.
        first_epochs, second_epochs: their ledgers over the same data, or None without a data set.
        intervals: each interval of the first plan, and what it becomes under the second.
    """

    first: BatchPlan
    second: BatchPlan
    first_epochs: EpochLedger | None
    second_epochs: EpochLedger | None
    intervals: tuple[IntervalMove, ...]

    @property
    def same_update(self) -> bool:
        """True where one update has the same samples and items: only memory and time differ."""
        first, second = self.first, self.second
        same_samples = first.global_batch_samples == second.global_batch_samples
        return same_samples and first.items_per_sample == second.items_per_sample

    @property
    def same_run(self) -> bool | None:
        """True where all updates over the data are the same, tails included; None without a data set."""
        if self.first_epochs is None or self.second_epochs is None:
            return None
        same_used = self.first_epochs.samples_per_epoch == self.second_epochs.samples_per_epoch
        return self.same_update and same_used

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as plain JSON values, under "against" in ``wholebatch plan --json``."""
        return {
            "plan": self.second.to_dict(),
            "same_update": self.same_update,
            "same_run": self.same_run,
            "epochs": self.second_epochs.to_dict() if self.second_epochs else None,
            "intervals": {move.first.name: move.to_dict() for move in self.intervals},
        }


def compare_plans(
    first: BatchPlan,
    second: BatchPlan,
    *,
    dataset_samples: int | None = None,
    epochs: int = 1,
    intervals: Mapping[IntervalName, tuple[int, Unit]] | None = None,
) -> PlanComparison:
    """Say whether two plans make the same update, and what the second does to epochs and intervals.

    Two plans make the same update when ``m x A x D`` is the same number of samples; how it is split
    does not matter.

    Args:
        first, second: the plans.
        dataset_samples: samples of the data set that both read, or None.
        epochs: passes over it.
        intervals: name -> (number, "updates" | "samples"), as set for the first plan.

    Returns:
        The comparison; `PlanComparison.same_update` is the verdict.

    Raises:
        PlanError: as `EpochLedger` and `resolve_interval`.
    """
    ledgers: list[EpochLedger | None] = [None, None]
    if dataset_samples is not None:
        both = (first, second)
        ledgers = [EpochLedger(plan=each, dataset_samples=dataset_samples, epochs=epochs) for each in both]
    moves = []
    for name, (given, unit) in (intervals or {}).items():
        mine = resolve_interval(first, name, given, unit, dataset_samples=dataset_samples)
        moves.append(_move(mine, second, dataset_samples))
    return PlanComparison(
        first=first,
        second=second,
        first_epochs=ledgers[0],
        second_epochs=ledgers[1],
        intervals=tuple(moves),
    )


def _move(mine: Interval, second: BatchPlan, dataset_samples: int | None) -> IntervalMove:
    name = mine.name
    return IntervalMove(
        first=mine,
        same_updates=_interval(second, name, mine.updates, "updates", dataset_samples),
        same_samples=_interval(second, name, mine.samples, "samples", dataset_samples),
    )
