"""The learning rate over a run, in one unit: applied updates, samples or items.

The rate of an update is decided before it runs, from what was consumed until then. An update that is
run again therefore has the rate it had, and so has a run that is resumed from a checkpoint, or on
another number of ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from wholebatch.errors import UsageError
from wholebatch.finish import DeclaredSchedule, ScheduleUnit
from wholebatch.report.words import number_of
from wholebatch.train.settings import ScheduleConfig, TrainConfig

LengthUnit = Literal["updates", "samples", "items"]
UNITS: tuple[LengthUnit, ...] = ("updates", "samples", "items")
ADVANCED_BY: dict[LengthUnit, ScheduleUnit] = {
    "updates": "applied_update",
    "samples": "sample",
    "items": "item",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RateCurve:
    """The share of the highest learning rate, by what was consumed before an update.

    With x consumed before the update, q what a full update consumes, W the warm-up and E the end::

        x < W                    (x + q) / (W + q)                 so the first is above 0
        W <= x, t = (x - W) / (E - q - W), at most 1:
            cosine               f + (1 - f) (1 + cos(pi t)) / 2
            linear               f + (1 - f) (1 - t)
            constant             1

    The update that begins at x = W has the highest rate, and the one that reaches E has the final share
    f, as do all later ones.

    Args:
        unit: of all the lengths below.
        warmup: W.
        decay_end: E.
        consumed_per_update: q; 1 update, the samples of a global batch, or the mean items of one.
        decay: the way down.
        final_share: f.
    """

    unit: LengthUnit
    warmup: float
    decay_end: float
    consumed_per_update: float
    decay: Literal["cosine", "linear", "constant"]
    final_share: float

    def share(self, consumed: float) -> float:
        """The share of the highest rate for an update before which so much was consumed."""
        if consumed < self.warmup:
            return (consumed + self.consumed_per_update) / (self.warmup + self.consumed_per_update)
        last = self.decay_end - self.consumed_per_update
        if self.decay == "constant" or consumed == self.warmup:
            return 1.0
        done = min(1.0, (consumed - self.warmup) / (last - self.warmup)) if last > self.warmup else 1.0
        left = 1.0 - done if self.decay == "linear" else (1.0 + math.cos(math.pi * done)) / 2.0
        return self.final_share + (1.0 - self.final_share) * left


def schedule_unit(settings: ScheduleConfig) -> LengthUnit:
    """The one unit of the lengths that are given; updates where none is.

    Needs no data, so that a schedule that does not fit is refused before anything is loaded.

    Raises:
        UsageError: lengths in two units, a way down that ends before it begins, one that would never
            begin, or one in items without an end.
    """
    lengths = {
        f"{part}_{unit}": getattr(settings, f"{part}_{unit}")
        for unit in UNITS
        for part in ("warmup", "decay_end")
    }
    given = {key: length for key, length in lengths.items() if length}
    units = [unit for unit in UNITS if any(key.endswith(unit) for key in given)]
    if len(units) > 1:
        shown = " and ".join(f"schedule.{key} = {length}" for key, length in given.items())
        raise UsageError(
            f"{shown}: the lengths of a schedule need one unit, because samples and items per update are "
            f"not the same all through a run; give them all in {units[0]} or all in {units[-1]}, and set "
            f"the others to 0"
        )
    unit = units[0] if units else "updates"
    _refuse_odd_end(settings, unit, lengths[f"warmup_{unit}"], lengths[f"decay_end_{unit}"])
    return unit


def check_schedule(config: TrainConfig) -> None:
    """Refuse a schedule that does not fit itself or the run; needs no data.

    Raises:
        UsageError: as :func:`schedule_unit`, or a warm-up that the run ends in before anything decays.
    """
    unit = schedule_unit(config.schedule)
    run, batch = config.run.num_updates, config.batch.global_batch_samples
    warmup = getattr(config.schedule, f"warmup_{unit}")
    if unit == "samples" and not batch and _ends_with_the_run(config.schedule, unit):
        raise UsageError(
            f'schedule.warmup_samples = {warmup} and schedule.decay = "{config.schedule.decay}", with '
            f"batch.global_batch_items = {config.batch.global_batch_items}: nobody knows ahead how many "
            f"samples a run will have; give schedule.decay_end_samples, or the lengths in updates or items"
        )
    longest = {"updates": run, "samples": run * batch or None}.get(unit)  # nobody knows a run's items
    if longest is None or config.schedule.decay == "constant" or warmup < max(longest, 1):
        return
    raise UsageError(
        f"schedule.warmup_{unit} = {warmup}, and the run ends after {number_of(longest, unit[:-1])} "
        f"(run.num_updates = {run}), so "
        f'schedule.decay = "{config.schedule.decay}" would never begin; give a shorter warm-up, '
        f'a longer run, or decay = "constant"'
    )


def rate_curve(
    config: TrainConfig,
    *,
    samples_of_run: int | None,
    samples_per_update: float | None = None,
    items_per_update: float = 1.0,
) -> RateCurve:
    """The curve that the settings describe; the decay ends with the run where no end is given.

    Args:
        config: all settings: the schedule, the global batch and the updates of the run.
        samples_of_run: that ``run.num_updates`` updates consume, short tails taken into account; 1 or more.
            None where the global batch is in items: then the end of a schedule in samples is given.
        samples_per_update: of a full global batch, or their mean; by default those of the settings.
        items_per_update: mean items of a global batch, where the lengths of the samples tell it; above 0.
            Only a schedule in items needs it, to begin above 0: 1 makes the first update of its warm-up
            almost nothing.

    Raises:
        UsageError: as :func:`schedule_unit`.
    """
    settings = config.schedule
    unit = schedule_unit(settings)
    consumed_per_update = {
        "updates": 1.0,
        "samples": _least(samples_per_update or float(config.batch.global_batch_samples), samples_of_run),
        "items": float(items_per_update),
    }
    # Nobody knows the items of a run: there the end was given, or nothing decays.
    ends = {
        "updates": float(config.run.num_updates),
        "samples": _least(math.inf, samples_of_run),
        "items": math.inf,
    }
    return RateCurve(
        unit=unit,
        warmup=float(getattr(settings, f"warmup_{unit}")),
        decay_end=float(getattr(settings, f"decay_end_{unit}")) or ends[unit],
        consumed_per_update=consumed_per_update[unit],
        decay=settings.decay,
        final_share=settings.final_share,
    )


def _least(amount: float, bound: int | None) -> float:
    return amount if bound is None else min(amount, float(bound))


def make_schedule(
    optimizer: Optimizer,
    config: TrainConfig,
    *,
    samples_of_run: int | None,
    samples_per_update: float | None = None,
    items_per_update: float = 1.0,
) -> DeclaredSchedule:
    """The schedule to give to the window, declared in the unit of its lengths.

    In updates it advances by *applied* ones, so a skipped update repeats its rate; samples and items
    are those consumed, in skipped updates too.

    Args:
        optimizer: the optimizer that the window steps; its rates are the highest ones.
        config: as for :func:`rate_curve`.
        samples_of_run, samples_per_update, items_per_update: as for :func:`rate_curve`.

    Raises:
        UsageError: as :func:`rate_curve`.

    Exactness: the rate depends on what was consumed and on nothing else, so it is the same under any
    micro-batch and number of replicas.
    """
    curve = rate_curve(
        config,
        samples_of_run=samples_of_run,
        samples_per_update=samples_per_update,
        items_per_update=items_per_update,
    )

    # A plain function: a scheduler's state takes in what any other callable holds.
    def share(consumed: int) -> float:
        return curve.share(consumed)

    return DeclaredSchedule(scheduler=LambdaLR(optimizer, share), unit=ADVANCED_BY[curve.unit])


def _ends_with_the_run(settings: ScheduleConfig, unit: LengthUnit) -> bool:
    return settings.decay != "constant" and not getattr(settings, f"decay_end_{unit}")


def _refuse_odd_end(settings: ScheduleConfig, unit: LengthUnit, warmup: int, decay_end: int) -> None:
    if settings.decay == "constant" and decay_end:
        raise UsageError(
            f'schedule.decay_end_{unit} = {decay_end} and schedule.decay = "constant": nothing decays, so '
            f'nothing ends; leave the end at 0, or choose "cosine" or "linear"'
        )
    if unit == "items" and _ends_with_the_run(settings, unit):
        raise UsageError(
            f'schedule.warmup_items = {warmup} and schedule.decay = "{settings.decay}": nobody knows ahead '
            f"how many items a run will have; give schedule.decay_end_items, or set the decay to "
            f'"constant", or the lengths in samples'
        )
    if decay_end and decay_end <= warmup:
        raise UsageError(
            f"schedule.decay_end_{unit} = {decay_end} is not after schedule.warmup_{unit} = {warmup}; the "
            f"way down begins where the warm-up ends, so give a later end or a shorter warm-up"
        )
