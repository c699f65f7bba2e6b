"""What the items of a window weigh: loss weight / loss scale x kappa; right where all are 1/N."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from wholebatch.audit.judge.evidence import MicroBatch, TermWeights
from wholebatch.audit.judge.loops import Site
from wholebatch.audit.trace import Level, Term

# weights are equal to 1/N within this; where kappa was measured on gradients in low precision
TOLERANCE, LOW_TOLERANCE = 1e-3, 3e-2
# Of a dense loss that is a mean over rows of sums, the rows are what is counted; its items, the features of
# a row, weigh too much by right. What is known as a mean has divided by its elements already: rows would
# divide once more. What may be either is read by rows only where no usual mistake explains its total.
_MEAN, _SUM = "Mean", "Sum"


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One term of one backward.

    Attributes:
        loop: site that stands for its loop.
        factor: kappa over the loss scale.
    """

    loop: Site
    micro_batch: MicroBatch
    term: Term
    factor: float


def entries(
    micro_batches: Iterable[MicroBatch], loops: Mapping[Site, Site], *, measured: bool
) -> list[Entry]:
    """The terms of a window's own micro-batches.

    Args:
        micro_batches: of one rank of each replica.
        loops: which loop each site belongs to.
        measured: whether kappas were; without, they are taken for 1.
    """
    found = []
    chosen = list(micro_batches)
    for micro_batch in chosen:
        backward = micro_batch.backward
        kappa = micro_batch.kappa
        if not measured:
            kappa = 0.0 if micro_batch.lost == "cleared" else 1.0
        if micro_batch.carried or micro_batch.foreign or kappa is None:
            continue
        found += [
            Entry(
                loop=loops[backward.site],
                micro_batch=micro_batch,
                term=term,
                factor=kappa / backward.loss_scale,
            )
            for term in backward.terms
            if not (term.surrogate or (term.quotient and len(chosen) > 1))
        ]
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class _Reading:
    """One reading of a term over the window."""

    weights: TermWeights
    right: bool
    equal: bool


def weigh(
    found: Sequence[Entry], num_replicas: int, usual_number: int, *, low: bool = False
) -> tuple[TermWeights, ...]:
    """Weigh the items of every term of a window.

    Args:
        found: its terms, of all micro-batches and replicas.
        num_replicas: D.
        usual_number: of micro-batches in a window.
        low: kappas were measured on gradients in low precision.
    """
    groups: dict[tuple[Site, str], list[Entry]] = {}
    for entry in found:
        groups.setdefault((entry.loop, entry.term.key), []).append(entry)
    tolerance = LOW_TOLERANCE if low else TOLERANCE
    return tuple(
        _choose(group, _expected({_num_micro_batches(group), usual_number}, num_replicas), tolerance)
        for group in groups.values()
    )


def is_right(weights: TermWeights, tolerance: float) -> bool:
    """Whether every item weighs 1/N."""
    return (
        weights.lowest >= 1 - tolerance and weights.highest <= 1 + tolerance and _is_one(weights, tolerance)
    )


def _is_one(weights: TermWeights, tolerance: float) -> bool:
    return abs(weights.total - 1) <= tolerance


def main_term(terms: Sequence[TermWeights], tolerance: float) -> TermWeights | None:
    """The term that speaks for the window: one that is right, else the one of the largest total."""
    ordered = sorted(terms, key=lambda term: (not is_right(term, tolerance), -abs(term.total)))
    return ordered[0] if ordered else None


def _choose(group: Sequence[Entry], expected: Sequence[float], tolerance: float) -> TermWeights:
    """The coarsest explicit reading at which all is right, else the one that explains most.

    A row is implicit: it only tells a sum over features from a missing division.
    """
    readings = _readings(group, tolerance)
    explicit = [reading for reading in readings if reading.weights.unit != "row"]
    right = next((reading for reading in explicit if reading.right), None)
    if right is not None:
        return right.weights
    best = item = explicit[-1]
    distance = _distance(item.weights.total, expected)
    rows = [reading for reading in readings if reading.weights.unit == "row" and item.equal]
    summed = group[0].term.operation == _SUM
    for reading in rows:
        if reading.right and (summed or distance > tolerance):
            return reading.weights
    for reading in reversed([*explicit[:-1], *rows]):
        other = _distance(reading.weights.total, expected)
        as_near = other <= distance + tolerance and not best.equal
        if reading.equal and (other < distance - tolerance or as_near):
            best, distance = reading, other
    return best.weights


def _num_micro_batches(group: Sequence[Entry]) -> int:
    by_rank: dict[int, int] = {}
    for entry in group:
        by_rank[entry.micro_batch.rank] = by_rank.get(entry.micro_batch.rank, 0) + 1
    return max(by_rank.values())


def _expected(numbers: Iterable[int], num_replicas: int) -> list[float]:
    """Totals that a right or an often seen wrong division gives.

    Args:
        numbers: of micro-batches: in this window, and in most.
        num_replicas: D.
    """
    whole = {float(number) for number in (1, *numbers)}
    parts = {one / other for one in whole for other in whole}
    return sorted({part * power for part in parts for power in (1.0, num_replicas, 1 / num_replicas)})


def _distance(total: float, expected: Sequence[float]) -> float:
    if total <= 0 or not math.isfinite(total):
        return math.inf
    return min(abs(math.log(total / one)) for one in expected)


def _readings(group: Sequence[Entry], tolerance: float) -> list[_Reading]:
    """All readings that hold over the window, the coarsest first, the items last."""
    with_units = [e for e in group if any(level.num_units > 0 for level in e.term.levels)] or list(group)
    names = _names(with_units[0].term.levels)
    shared = [name for name in names if all(name in _names(e.term.levels) for e in with_units)]
    found = []
    for name in shared:
        levels = [_names(e.term.levels).get(name) or e.term.levels[-1] for e in group]
        if name[0] == "row":
            levels = _rows(group, levels)
        if not levels:
            continue
        found.append(_read(group, levels, tolerance))
    if not found or found[-1].weights.unit != "item":
        found.append(_read(group, [e.term.levels[-1] for e in group], tolerance))
    return found


def _names(levels: Sequence[Level]) -> dict[tuple[str, int], Level]:
    """Readings by unit and how many of that unit are finer."""
    named: dict[tuple[str, int], Level] = {}
    for level in reversed(levels):
        finer = sum(unit == level.unit for unit, _ in named)
        named[level.unit, finer] = level
    return dict(reversed(named.items()))


def _rows(group: Sequence[Entry], levels: Sequence[Level]) -> list[Level]:
    """Rows whose loss is the sum of their elements; empty where rows are no units."""
    shapes = {level.per_unit_shape for level in levels if level.num_units > 0}
    if len(shapes) > 1 or group[0].term.operation == _MEAN:
        return []
    pairs = [(entry.term.levels[-1], level.num_units) for entry, level in zip(group, levels, strict=True)]
    return [
        Level(
            unit="row",
            num_units=num_rows,
            total=item.total * num_rows / item.num_units if item.num_units else 0.0,
            lowest=item.lowest,
            highest=item.highest,
        )
        for item, num_rows in pairs
    ]


def _read(group: Sequence[Entry], levels: Sequence[Level], tolerance: float) -> _Reading:
    num_units = sum(level.num_units for level in levels)
    total = math.fsum(
        entry.factor * level.total
        for entry, level in zip(group, levels, strict=True)
        if level.num_units > 0
    )
    by_micro_batch = {}
    for entry, level in zip(group, levels, strict=True):
        place = (entry.micro_batch.rank, entry.micro_batch.index)
        ends = (entry.factor * level.lowest * num_units, entry.factor * level.highest * num_units)
        low, high = (min(ends), max(ends)) if level.num_units > 0 else (0.0, 0.0)
        by_micro_batch[place] = (level.num_units, low, high)
    ends_of_all = [(low, high) for units, low, high in by_micro_batch.values() if units > 0]
    weights = TermWeights(
        key=group[0].term.key,
        unit=levels[0].unit,
        num_units=num_units,
        total=total,
        lowest=min((low for low, _ in ends_of_all), default=0.0),
        highest=max((high for _, high in ends_of_all), default=0.0),
        by_micro_batch=by_micro_batch,
        coefficients=_coefficients(group),
        site=group[0].loop[0] if group[0].loop else None,
        samples=_samples(group),
    )
    equal = weights.lowest > 0 and weights.highest - weights.lowest <= tolerance * weights.highest
    return _Reading(weights=weights, right=is_right(weights, tolerance), equal=equal)


def _coefficients(group: Sequence[Entry]) -> Literal["none", "class_weights", "factors"]:
    found = {entry.term.coefficients for entry in group if entry.term.levels[-1].num_units > 0}
    if "factors" in found:
        return "factors"
    return "class_weights" if "class_weights" in found else "none"


def _samples(group: Sequence[Entry]) -> int | None:
    """Samples of all micro-batches, by their largest forward; None where forwards don't tell."""
    counts = [
        max((len(forward.samples) for forward in entry.micro_batch.forwards), default=0) for entry in group
    ]
    return sum(counts) if counts and all(counts) else None
