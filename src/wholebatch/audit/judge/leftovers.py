"""Gradients of earlier updates in what an optimizer read, and why they were still there. No torch here."""

from __future__ import annotations

from typing import Literal

from wholebatch.audit.judge.evidence import Evidence, MicroBatch, Window
from wholebatch.audit.judge.follow import ALL_CLEARED
from wholebatch.audit.judge.reading import (
    trace_of,
)
from wholebatch.audit.trace import Event, Place

Leftover = Literal["", "never cleared", "ignored", "stepped early"]


def step_place(window: Window) -> Place | None:
    """The line of the window's step."""
    return next((event.place for event in window.edges.values()), None)


def carried_into(window: Window) -> list[MicroBatch]:
    """Return micro-batches of earlier windows that stand in what this one's step read."""
    groups = window.micro_batches.values()
    return [m for group in groups for m in group if m.carried and m.kappa != 0 and not m.lost]


def leftover_of(evidence: Evidence, window: Window) -> Leftover:
    """Why micro-batches of earlier windows stand in what a step read."""
    carried = carried_into(window)
    for m in carried:
        since = clears_between(evidence, window.optimizer, m.rank, m.position, window)
        if since:
            return "ignored"
    if not carried:
        return ""
    events = trace_of(evidence, carried[0].rank).events
    first = next((p for p, e in enumerate(events) if e.backward is not None), 0)
    events = events[first:]
    clears = [e for e in events if e.kind == "clear" and e.concerns(window.optimizer) and _is_whole(e)]
    if clears:
        return "stepped early"
    unseen = any(trace.unseen for trace in evidence.traces)
    if all(m.kappa is None for m in carried) and unseen:
        return ""
    return "never cleared"


def _is_whole(event: Event) -> bool:
    return event.value is None or event.value >= ALL_CLEARED


def clears_between(
    evidence: Evidence, optimizer: int, rank: int, position: int, window: Window
) -> list[tuple[int, Event]]:
    """Return calls to clear between a backward and the end of a window that did not clear it."""
    end = max((p for p, _ in window.events.get(rank, ())), default=position)
    events = enumerate(trace_of(evidence, rank).events)
    active = {w.optimizer for w in evidence.windows}
    return [
        (p, e)
        for p, e in events
        if position < p < end
        and e.kind in ("clear", "clear_call")
        # an optimizer that never steps was cleared in place of this one
        and (e.concerns(optimizer) or not active.intersection(e.optimizers))
    ]
