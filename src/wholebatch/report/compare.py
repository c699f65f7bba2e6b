"""Two runs beside each other: where they differ, the samples they share, and their losses on one axis.

Nothing here is drawn; ``compare_view`` does that. ``differences`` looks for what is not the same.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, get_args

from wholebatch.record import Evaluation, UpdateRecord
from wholebatch.report.curves import Point, points_of
from wholebatch.report.differences import Difference, differences_of
from wholebatch.report.summary import run_summary
from wholebatch.run_folder import Run

# Of the JSON of ``wholebatch show A B``.
SCHEMA_VERSION = 1
Axis = Literal["samples", "items", "updates", "seconds"]
AXES: tuple[Axis, ...] = get_args(Axis)
CURVE_COLUMNS = 64
# Two evaluations are beside each other where they are this near, of the axis of the shorter run.
_BESIDE = 0.02
# Samples of two runs are of other sizes where their items differ by more than this.
_OTHER_SIZE = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationPair:
    """Evaluations of two runs at the same or nearly the same place of the axis.

    Args:
        split: name of the split.
        first_at, second_at: where each was, on the axis.
        first_loss, second_loss: ``L / N`` of each; None when it was not finite.
    """

    split: str
    first_at: float
    second_at: float
    first_loss: float | None
    second_loss: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Two runs, compared.

    Args:
        first, second: the runs.
        differences: in the order of how much they matter.
        same_samples: from which update on their global batches hold other samples, in words.
        one_to_one: whether update k of one can be compared with update k of the other.
        losses_comparable: whether a loss of one can be compared with a loss of the other.
        axis: what the losses are shown over.
        why: why over that.
        ends: where each run ends on the axis.
        curves: of each run, (place on the axis, loss per item).
        evaluations: those beside each other.
    """

    first: Run
    second: Run
    differences: list[Difference]
    same_samples: str
    one_to_one: bool
    losses_comparable: bool
    axis: Axis
    why: str
    ends: tuple[float, float]
    curves: tuple[list[Point], list[Point]]
    evaluations: list[EvaluationPair]

    def to_dict(self) -> dict[str, Any]:
        """The comparison as JSON-ready data; its keys are promised within a schema version."""
        return {
            "schema_version": SCHEMA_VERSION,
            "runs": [run_summary(self.first), run_summary(self.second)],
            "differences": [
                {"kind": d.kind, "name": d.name, "first": d.first, "second": d.second}
                for d in self.differences
            ],
            "same_samples": self.same_samples,
            "one_to_one": self.one_to_one,
            "losses_comparable": self.losses_comparable,
            "axis": {"name": self.axis, "why": self.why, "ends": list(self.ends)},
            "curves": [[list(point) for point in points] for points in self.curves],
            "evaluations": [
                {
                    "split": pair.split,
                    "at": [pair.first_at, pair.second_at],
                    "loss_per_item": [pair.first_loss, pair.second_loss],
                }
                for pair in self.evaluations
            ],
        }


def compare_runs(first: Run, second: Run, *, by: str | None = None) -> Comparison:
    """Compare two runs.

    ``loss_per_item`` of a place on the axis is ``sum of losses / sum of items`` of the updates there.

    Args:
        first, second: the runs.
        by: one of ``AXES``; None for samples, or items where the samples of the two are of other sizes.
    """
    differences = list(differences_of(first, second))
    kinds = {d.kind for d in differences}
    axis, why = (_known_axis(by), "as asked") if by is not None else _fitting_axis(first, second)
    values = _axis_values(first.records, axis), _axis_values(second.records, axis)
    ends = values[0][-1] if values[0] else 0.0, values[1][-1] if values[1] else 0.0
    curves = (
        points_of(first.records, values[0], end=max(ends), columns=CURVE_COLUMNS),
        points_of(second.records, values[1], end=max(ends), columns=CURVE_COLUMNS),
    )
    return Comparison(
        first=first,
        second=second,
        differences=differences,
        same_samples=_same_samples(first, second),
        one_to_one=not kinds & {"losses", "updates"},
        losses_comparable="losses" not in kinds,
        axis=axis,
        why=why,
        ends=ends,
        curves=curves,
        evaluations=_beside(first, second, values, ends),
    )


def _same_samples(first: Run, second: Run) -> str:
    """From which update on the digests of the global batches differ, in words."""
    if _global_batch(first) != _global_batch(second):
        return "of other sizes, so which samples they hold is not compared"
    both = list(zip(first.records, second.records, strict=False))
    known = [(a, b) for a, b in both if a.sample_digest and b.sample_digest]
    if not both:
        return "not known: a run has no updates"
    if len(known) < len(both):
        return "not known: the records do not say which samples their updates had"
    other = next((a.updates_attempted for a, b in both if a.sample_digest != b.sample_digest), None)
    if other is None:
        return (
            f"the same samples in each of the first {len(both):,} updates"
            if len(both) > 1
            else ("the same samples in the first update")
        )
    if other == 1:
        return "other samples from the first update on"
    return f"the same samples up to update {other - 1:,}, others from update {other:,} on"


def _global_batch(run: Run) -> tuple[int | None, int | None]:
    return run.header.global_batch_samples, run.header.global_batch_items


def _known_axis(name: str) -> Axis:
    return next(axis for axis in AXES if axis == name)


def _fitting_axis(first: Run, second: Run) -> tuple[Axis, str]:
    """The axis that nobody asked for: samples, unless those of the two runs are of other sizes."""
    a, b = _items_per_sample(first.records), _items_per_sample(second.records)
    if a is not None and b is not None and abs(a - b) > _OTHER_SIZE * max(a, b):
        return "items", f"a sample has {a:,.1f} items in A and {b:,.1f} in B"
    if _global_batch(first) != _global_batch(second):
        return "samples", "an update is not the same number of samples in both"
    return "samples", "the same data seen"


def _items_per_sample(records: Sequence[UpdateRecord]) -> float | None:
    samples = sum(r.samples for r in records)
    return sum(r.items for r in records) / samples if samples else None


def _axis_values(records: Sequence[UpdateRecord], axis: Axis) -> list[float]:
    """Where on the axis each update ended."""
    amounts: dict[Axis, Callable[[UpdateRecord], float]] = {
        "samples": lambda r: r.samples,
        "items": lambda r: r.items,
        "updates": lambda _r: 1,
        "seconds": lambda r: r.seconds,
    }
    return list(accumulate(map(amounts[axis], records)))


def _beside(
    first: Run, second: Run, values: tuple[list[float], list[float]], ends: tuple[float, float]
) -> list[EvaluationPair]:
    """Of every split, the evaluations of both runs that are nearest to each other, each used once."""
    places = [
        _placed(run.evaluations, run.records, axis_values)
        for run, axis_values in zip((first, second), values, strict=True)
    ]
    reach = _BESIDE * min(ends)
    pairs: list[EvaluationPair] = []
    left = list(places[1])
    for at, mine in places[0]:
        near = [
            (abs(other_at - at), index)
            for index, (other_at, other) in enumerate(left)
            if other.split == mine.split and abs(other_at - at) <= reach
        ]
        if near:
            other_at, other = left.pop(min(near)[1])
            pairs.append(
                EvaluationPair(
                    split=mine.split,
                    first_at=at,
                    second_at=other_at,
                    first_loss=mine.loss_per_item,
                    second_loss=other.loss_per_item,
                )
            )
    return sorted(pairs, key=lambda pair: pair.split)


def _placed(
    evaluations: Iterable[Evaluation], records: Sequence[UpdateRecord], axis_values: Sequence[float]
) -> list[tuple[float, Evaluation]]:
    """Where on the axis each evaluation was: at the end of the last update before it."""
    samples = list(accumulate(r.samples for r in records))
    ends = [0.0, *axis_values]
    return [(ends[bisect_right(samples, e.samples_consumed)], e) for e in evaluations]
