"""Rules on clipping and on the loss scale. No torch here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from wholebatch.audit.judge.evidence import Evidence, Finding, Window
from wholebatch.audit.judge.reading import (
    applied_windows,
    complete_windows,
    events_between,
    events_of,
    finding,
    is_measurement,
    kept,
    number,
    optimizers_of,
    plural,
    updates_text,
)
from wholebatch.audit.trace import Event

USUAL_NORMS = (0.05, 0.1, 0.25, 0.3, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0)


def _cap(event: Event) -> str:
    norm = "a norm of " if "norm" in event.detail else ""
    return "" if event.value is None else f" to {norm}{number(event.value)}"


def _clips(window: Window) -> Iterator[tuple[int, int, Event]]:
    return ((rank, p, e) for rank, p, e in events_of(window, "clip") if not is_measurement(e))


def clip_to_negative_norm(evidence: Evidence) -> Iterable[Finding]:
    """A clip whose largest norm is below zero."""
    for optimizer in optimizers_of(evidence):
        seen = [
            (w, e)
            for w in applied_windows(evidence, optimizer)
            for _, _, e in _clips(w)
            if e.value is not None and e.value < 0
        ]
        if seen:
            window, event = seen[0]
            yield finding(
                evidence,
                "clip_to_negative_norm",
                list({w.index: w for w, _ in seen}.values()),
                f"{updates_text([window])}, gradients were clipped{_cap(event)}, a negative norm: their "
                f"sign was flipped.",
                place=event.place,
            )


def clip_inside_window(evidence: Evidence) -> Iterable[Finding]:
    """A clip between backwards of one update."""
    for optimizer in optimizers_of(evidence):
        seen = [
            (w, entry.event)
            for w in complete_windows(evidence, optimizer)
            for entry in events_between(w, "clip")
            if not is_measurement(entry.event)
        ]
        if seen:
            window, event = seen[0]
            clips = sum(1 for w, _ in seen if w is window)
            yield finding(
                evidence,
                "clip_inside_window",
                list({w.index: w for w, _ in seen}.values()),
                f"{updates_text([window])}, gradients were clipped {plural(clips, 'time')}{_cap(event)} "
                f"before all micro-batches had been added.",
                place=event.place,
            )


def clip_before_reduction(evidence: Evidence) -> Iterable[Finding]:
    """A clip of each rank's own gradient before the collective that combines them."""
    for optimizer in optimizers_of(evidence) if evidence.num_replicas > 1 else ():
        seen = [
            (w, e)
            for w in complete_windows(evidence, optimizer)
            if (e := _clip_before_reduce(w)) is not None
        ]
        if seen:
            window, event = seen[0]
            yield finding(
                evidence,
                "clip_before_reduction",
                [w for w, _ in seen],
                f"{updates_text([window])}, each rank clipped its own gradient{_cap(event)} before the "
                f"{evidence.num_replicas} replicas' gradients were combined.",
                place=event.place,
            )


def _clip_before_reduce(window: Window) -> Event | None:
    for rank, position, event in _clips(window):
        last = max((m.position for m in kept(window, rank)), default=-1)
        reduces = [p for r, p, _ in events_of(window, "reduce") if r == rank]
        if (
            position > last
            and any(p > position for p in reduces)
            and not any(last < p < position for p in reduces)
        ):
            return event
    return None


def clip_before_unscale(evidence: Evidence) -> Iterable[Finding]:
    """A clip while gradients still hold the loss scale."""
    for optimizer in optimizers_of(evidence):
        seen = [
            (w, found)
            for w in complete_windows(evidence, optimizer)
            if (found := _clip_of_scaled(w)) is not None
        ]
        if seen:
            window, (event, scale) = seen[0]
            yield finding(
                evidence,
                "clip_before_unscale",
                [w for w, _ in seen],
                f"{updates_text([window])}, gradients were clipped{_cap(event)} while they still held "
                f"the loss scale of {number(scale)}.",
                place=event.place,
            )


def _clip_of_scaled(window: Window) -> tuple[Event, float] | None:
    for rank, position, event in _clips(window):
        scales = [m.backward.loss_scale for m in kept(window, rank) if m.position < position]
        unscaled = any(r == rank and p < position for r, p, _ in events_of(window, "unscale"))
        if scales and scales[-1] != 1.0 and not unscaled and not _cap_holds_scale(event, scales[-1]):
            return event, scales[-1]
    return None


def _cap_holds_scale(event: Event, scale: float) -> bool:
    """Whether the user multiplied the largest norm by the loss scale as well, which is right."""
    value = event.value or 0.0
    return not _is_usual(value) and _is_usual(value / scale)


def _is_usual(norm: float) -> bool:
    return any(abs(norm - usual) <= 1e-6 * usual for usual in USUAL_NORMS)


def scale_changed_inside_window(evidence: Evidence) -> Iterable[Finding]:
    """The loss scale changed, or was updated, between backwards of one update."""
    several = len(optimizers_of(evidence)) > 1
    for optimizer in optimizers_of(evidence):
        seen = []
        for w in complete_windows(evidence, optimizer):
            scales = sorted({m.backward.loss_scale for rank in w.micro_batches for m in kept(w, rank)})
            updates = [entry.event for entry in events_between(w, "scale_update")]
            if len(scales) > 1 or (updates and not several):
                seen.append((w, scales, updates))
        if seen:
            window, scales, updates = seen[0]
            what = (
                f"the loss scale changed between backwards, from {number(scales[0])} to "
                f"{number(scales[-1])}"
                if len(scales) > 1
                else f"the loss scale was updated {plural(len(updates), 'time')} between backwards"
            )
            yield finding(
                evidence,
                "scale_changed_inside_window",
                [w for w, *_ in seen],
                f"{updates_text([window])}, {what}.",
                place=updates[0].place if updates else None,
            )
