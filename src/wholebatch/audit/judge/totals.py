"""What the items of an update weigh together, and what a total other than 1 means. No torch here."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from wholebatch.audit.judge.evidence import Evidence, Window
from wholebatch.audit.judge.reading import (
    applied_windows,
    is_near,
    meant_micro_batches,
    num_micro_batches,
    number,
    own,
    seen_micro_batches,
    tolerance,
)
from wholebatch.audit.trace import Term

# what people multiply a whole loss by: half a squared error, squared temperatures, plain weights
COEFFICIENTS = (
    0.5,
    0.25,
    0.2,
    0.1,
    0.05,
    0.02,
    0.01,
    1e-3,
    1e-4,
    2.0,
    3.0,
    4.0,
    5.0,
    9.0,
    10.0,
    16.0,
    25.0,
    100.0,
    1e3,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Total:
    """The total of one window, judged.

    Attributes:
        window: whose.
        factor: the total weight that stands for it: of its main term, or of all; 1 when right.
        is_right: whether it is 1.
        is_wrong: whether no coefficient of the loss explains it.
        is_odd: whether the window has more or fewer micro-batches than others.
        meaning: who divided by what, in words.
    """

    window: Window
    factor: float
    is_right: bool
    is_wrong: bool
    is_odd: bool
    meaning: str


def is_right(window: Window) -> bool:
    """Whether the items weigh 1 together: those of some term, or of all terms."""
    totals = [term.total for term in window.terms]
    candidates = [*totals, sum(totals)] if totals else []
    if window.total is not None:
        candidates.append(window.total)
    return any(is_near(abs(total), 1.0, window) for total in candidates)


def num_backwards(window: Window) -> int:
    """Return the micro-batches of all ranks, of the longest loop on each."""
    return sum(num_micro_batches(own(window, rank)) for rank in window.micro_batches)


def judged_totals(evidence: Evidence, optimizer: int) -> list[Total]:
    """Judge the totals of an optimizer's windows.

    Args:
        evidence: all windows.
        optimizer: whose.

    Returns:
        One for each window whose weights are known; a total of 1 is right. Where nothing was accumulated
        and nothing reduced, another total is a coefficient of the loss and is left out, unless it is one
        that only a fault explains.
    """
    windows = [
        w
        for w in applied_windows(evidence, optimizer)
        if w.total is not None and w.terms and w.unjudged is None
    ]
    clips = _clips_by_hand(evidence, windows)
    meant = meant_micro_batches(evidence, optimizer)
    return [
        entry for w in windows for entry in _judged(evidence, w, windows, meant, clips.get(w.index, 1.0))
    ]


def _judged(
    evidence: Evidence, window: Window, windows: Sequence[Window], meant: int, clip: float
) -> Iterator[Total]:
    right = is_right(window)
    single = len({(term.key, term.site) for term in window.terms}) == 1
    totals = [abs(term.total) / clip for term in window.terms]
    candidates = totals if single else [max(totals), sum(totals)]
    faults = [*_faults(evidence, window, meant), *_fixed_divisors(window, windows)]
    explained = list(_explained(faults, window, candidates, single))
    factor, meaning = explained[0] if explained else (candidates[0], _division(window, candidates[0]))
    splits = max(seen_micro_batches(window), meant) * evidence.num_replicas > 1
    if right or not (explained or (single and splits)) or (single and _is_written(window, meant)):
        factor = 1.0 if right else factor
        is_wrong = False
    else:
        is_wrong = bool(explained) or not (
            _is_coefficient(factor, windows) or _by_samples(window, factor, windows)
        )
    if not right and is_near(factor, 1.0, window):  # clipped by hand, else right
        right = True
    if right or is_wrong or (single and splits):
        seen = seen_micro_batches(window)
        yield Total(
            window=window,
            factor=factor,
            is_right=right,
            is_wrong=is_wrong and not right,
            is_odd=seen != meant,
            meaning=meaning,
        )


def _explained(
    faults: Sequence[tuple[float, str]], window: Window, candidates: Sequence[float], single: bool
) -> Iterator[tuple[float, str]]:
    """Yield those candidates that a division which was forgotten or made twice explains."""
    for value, meaning in faults:
        for candidate in candidates:
            if is_near(candidate, value, window) and not (value == 0.5 and not single):
                yield candidate, meaning


def _faults(evidence: Evidence, window: Window, meant: int) -> Iterator[tuple[float, str]]:
    replicas = evidence.num_replicas
    sizes = sorted({seen_micro_batches(window), meant} - {0, 1}, reverse=True)
    for size in sizes:
        yield (
            float(size),
            f"the mean losses of {size} micro-batches were added up and never divided by {size}",
        )
        yield 1 / size, f"the loss was divided by its {size} micro-batches twice"
    if replicas > 1:
        yield (
            float(replicas),
            f"gradients of {replicas} replicas were summed and never divided by {replicas}",
        )
        yield 1 / replicas, f"the {replicas} replicas are divided by twice, once in the reduction"
        for size in sizes:
            yield float(size * replicas), f"nobody divided by {size} micro-batches and {replicas} replicas"
            yield (
                1 / (size * replicas),
                f"{size} micro-batches and {replicas} replicas are divided by twice",
            )
            yield (
                size / replicas,
                (
                    f"{size} micro-batches are never divided by, and {replicas} replicas are divided by "
                    f"twice"
                ),
            )
            yield (
                replicas / size,
                (
                    f"{replicas} replicas are never divided by, and {size} micro-batches are divided by "
                    f"twice"
                ),
            )
    num_items = window.num_items or 0.0
    if num_items > 1 and max([*sizes, 1]) * replicas > 1:
        yield num_items, f"a sum over {number(num_items)} items that nobody divided"
        if replicas > 1:
            yield (
                num_items / replicas,
                f"a sum over {number(num_items)} items that only the reduction divided",
            )
    for scale in {m.backward.loss_scale for rank in window.micro_batches for m in own(window, rank)}:
        if scale not in (0.0, 1.0):
            yield scale, f"the loss scale of {number(scale)} was never taken out"


def _fixed_divisors(window: Window, windows: Sequence[Window]) -> Iterator[tuple[float, str]]:
    """Yield totals of a loop whose updates grow in micro-batches, and whose divisor stays."""
    size = seen_micro_batches(window)
    for other in sorted({seen_micro_batches(w) for w in windows if is_right(w)} - {0, size}):
        yield size / other, f"they were divided by {other} micro-batches where the update has {size}"


def _division(window: Window, factor: float) -> str:
    if not window.num_items or not factor:
        return "they were scaled by something else"
    return (
        f"they were divided by {number(window.num_items / factor)} where {number(window.num_items)} count"
    )


def _is_written(window: Window, meant: int) -> bool:
    """Whether the loss is divided by its micro-batches, and multiplied by just what the total shows."""
    micro_batches = [m for rank in window.micro_batches for m in own(window, rank)]
    terms = [(term, m.backward.loss_scale) for m in micro_batches for term in m.backward.terms]
    return bool(terms) and all(_written_alone(term, scale, window, meant) for term, scale in terms)


def _written_alone(term: Term, loss_scale: float, window: Window, meant: int) -> bool:
    factors = [factor for factor in term.multiplied if factor not in (1.0, loss_scale)]
    total = next((abs(t.total) for t in window.terms if t.key == term.key), 0.0)
    sizes = {float(meant), float(seen_micro_batches(window))}
    return (
        bool(factors)
        and any(divisor in sizes for divisor in term.divided)
        and is_near(total, abs(math.prod(factors)), window)
    )


def _is_coefficient(factor: float, windows: Sequence[Window]) -> bool:
    """Whether it is a plain number, the same in every window of the same kind: a weight of the loss."""
    same = sum(any(is_near(abs(t.total), factor, w) for t in w.terms) for w in windows)
    return 2 * same > len(windows) and any(abs(factor - c) <= 1e-3 * c for c in COEFFICIENTS)


def _by_samples(window: Window, factor: float, windows: Sequence[Window]) -> bool:
    """Whether sums over items were divided by samples in most windows, as an objective over whole
    sequences is."""
    same = sum(is_near(abs(w.terms[0].total), _items_per_sample(w), w) for w in windows)
    return is_near(factor, _items_per_sample(window), window) and 2 * same > len(windows)


def _items_per_sample(window: Window) -> float:
    return window.terms[0].num_units / (window.terms[0].samples or math.inf)


def _clips_by_hand(evidence: Evidence, windows: Sequence[Window]) -> dict[int, float]:
    """Return what the user's own arithmetic clipped by, by index of the update.

    Clipping by hand shows as one factor below 1 for all micro-batches, with which updates come out at the
    same norm, or which differs while what is left is right.
    """
    found: dict[int, float] = {}
    for window in windows:
        clip = (window.uniform_kappa or 1.0) * evidence.num_replicas
        if window.clip_factor is None and clip < 1 - tolerance(window):
            found[window.index] = clip
    if len(found) < 2:
        return {}
    clipped = [w for w in windows if w.index in found]
    norms = [min((e.gradient_norm or 0.0 for e in w.edges.values()), default=0.0) for w in clipped]
    same_norm = min(norms) > 0 and max(norms) - min(norms) <= 1e-3 * max(norms)
    factors = list(found.values())
    differs = max(factors) - min(factors) > 1e-2 * max(factors)
    rest_right = all(is_near((w.total or 0.0) / found[w.index], 1.0, w) for w in clipped)
    return found if differs and (same_norm or rest_right) else {}
