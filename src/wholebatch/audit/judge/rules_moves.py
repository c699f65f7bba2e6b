"""Rules on what should move once per update: schedules, averages of the weights, the weights. No torch
here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

from wholebatch.audit.judge.evidence import Evidence, Finding, Window
from wholebatch.audit.judge.reading import (
    applied_windows,
    complete_windows,
    events_between,
    finding,
    kept,
    meant_micro_batches,
    number,
    optimizers_of,
    pass_positions,
    place_of,
    plural,
    shows,
    trace_of,
    updates_text,
)
from wholebatch.audit.trace import Event, EventKind, Place

# these move or wait by themselves; the user can't do it otherwise
OWN_SCHEDULES = ("accelerate", "transformers", "trl", "lightning", "deepspeed", "composer")


def schedule_inside_window(evidence: Evidence) -> Iterable[Finding]:
    """The learning rate moved between backwards of one update."""
    for optimizer in optimizers_of(evidence):
        several = [w for w in complete_windows(evidence, optimizer) if _length(w) > 1]
        seen = [(w, place, times) for w in several for place, times in _moves_inside(w)]
        windows = list({w.index: w for w, *_ in seen}.values())
        if not shows(windows, several) and not any(times > 1 for *_, times in seen):
            continue
        window, place, times = seen[0]
        yield finding(
            evidence,
            "schedule_inside_window",
            windows,
            f"{updates_text([window])}, the learning rate moved {plural(times, 'time')} between "
            f"backwards of the same update.",
            place=place,
        )


def _length(window: Window) -> int:
    return max((len(kept(window, rank)) for rank in window.micro_batches), default=0)


def _moves_inside(window: Window) -> list[tuple[Place | None, int]]:
    """Return where and how often the learning rate moved inside a window, on the first rank that shows it.

    A move at the end of a pass is not a habit of the window's.
    """
    for rank in window.micro_batches:
        events = [b.event for b in events_between(window, "schedule") if b.rank == rank]
        if events and not (len(events) == 1 and pass_positions(window, rank)):
            return [(events[0].place, len(events))]
        changed = _rates_changed(window, rank)
        if changed and not events:
            return [(changed[0], len(changed))]
    return []


def _rates_changed(window: Window, rank: int) -> list[Place | None]:
    rates = [
        (m.backward.learning_rates[window.optimizer], place_of(m))
        for m in kept(window, rank)
        if window.optimizer < len(m.backward.learning_rates) and not m.backward.in_step
    ]
    return [
        place
        for (before, _), (after, place) in pairwise(rates)
        if abs(after - before) > 1e-9 * max(abs(before), abs(after))
    ]


def _after_step(evidence: Evidence, window: Window, *kinds: EventKind) -> list[Event]:
    """Return events between a window's last backward and the next window's first, on its first rank."""
    for rank in window.micro_batches:
        positions = [m.position for m in kept(window, rank)]
        if positions:
            events = trace_of(evidence, rank).events[positions[-1] + 1 :]
            end = next(
                (
                    i
                    for i, e in enumerate(events)
                    if e.backward is not None or (e.kind == "forward" and _stepped(events[:i], window))
                ),
                len(events),
            )
            return [e for e in events[:end] if e.kind in kinds and e.concerns(window.optimizer)]
    return []


def _stepped(events: Sequence[Event], window: Window) -> bool:
    return any(e.kind in ("step", "skip") and window.optimizer in e.optimizers for e in events)


def schedule_on_skipped_update(evidence: Evidence) -> Iterable[Finding]:
    """The schedule moved although the optimizer was left alone."""
    for optimizer in optimizers_of(evidence):
        windows = complete_windows(evidence, optimizer)
        moves = {w.index: _own_moves(evidence, w, optimizer) for w in windows}
        skipped = [w for w in windows if w.skipped and moves[w.index]]
        applied = [w for w in windows if not w.skipped and w is not windows[-1]]
        habit = shows([w for w in applied if moves[w.index]], applied) if applied else True
        at_edge = all(_after_step(evidence, w, "pass") for w in skipped)
        if not skipped or not habit or (at_edge and not applied):
            continue
        event = moves[skipped[0].index][0]
        yield finding(
            evidence,
            "schedule_on_skipped_update",
            skipped,
            f"{updates_text(skipped)} the optimizer was left alone because of an overflow, and the "
            f"schedule moved all the same.",
            severity="note" if event.through in OWN_SCHEDULES else "wrong",
            place=event.place,
        )


def _own_moves(evidence: Evidence, window: Window, optimizer: int) -> list[Event]:
    """Return moves that are this optimizer's and nobody else's."""
    alone = len(optimizers_of(evidence)) == 1
    moves = _after_step(evidence, window, "schedule")
    return [e for e in moves if alone or e.optimizers == (optimizer,)]


def schedule_too_fast(evidence: Evidence) -> Iterable[Finding]:
    """The schedule moved more than once per update."""
    for optimizer in optimizers_of(evidence):
        windows = applied_windows(evidence, optimizer)
        often = {w.index: most for w in windows if (most := _moves_of_one(evidence, w, optimizer))}
        fast = [w for w in windows if w.index in often]
        if not shows(fast, windows):
            continue
        event, times = often[fast[0].index]
        yield finding(
            evidence,
            "schedule_too_fast",
            fast,
            f"After update {fast[0].index} the schedule moved {number(times)} times instead of once.",
            place=event.place,
        )


def _moves_of_one(evidence: Evidence, window: Window, optimizer: int) -> tuple[Event, int] | None:
    """Return one schedule's move and how often it was made after an update, where it was more than once."""
    moves = [e for e in _own_moves(evidence, window, optimizer) if e.through not in OWN_SCHEDULES]
    names = Counter(e.detail for e in moves)
    if not names:
        return None
    name, times = names.most_common(1)[0]
    return (next(e for e in moves if e.detail == name), times) if times > 1 else None


def average_inside_window(evidence: Evidence) -> Iterable[Finding]:
    """An average of the weights moved between backwards of one update."""
    for optimizer in optimizers_of(evidence):
        several = [w for w in complete_windows(evidence, optimizer) if _length(w) > 1]
        seen = [(w, entry.event) for w in several for entry in events_between(w, "average")]
        windows = list({w.index: w for w, _ in seen}.values())
        if not shows(windows, several):
            continue
        window, event = seen[0]
        times = sum(1 for w, _ in seen if w is window)
        yield finding(
            evidence,
            "average_inside_window",
            windows,
            f"{updates_text([window])}, the average of the weights moved {plural(times, 'time')} before "
            f"the weights did: an update has "
            f"{plural(meant_micro_batches(evidence, optimizer), 'micro-batch')}.",
            place=event.place,
        )


def parameters_changed_inside_window(evidence: Evidence) -> Iterable[Finding]:
    """Parameters changed between backwards of one update, without a step."""
    for optimizer in optimizers_of(evidence):
        seen = [
            (w, entry.event)
            for w in complete_windows(evidence, optimizer)
            for entry in events_between(w, "parameters_changed")
        ]
        if seen:
            window, event = seen[0]
            detail = f" ({event.detail})" if event.detail else ""
            yield finding(
                evidence,
                "parameters_changed_inside_window",
                list({w.index: w for w, _ in seen}.values()),
                f"{updates_text([window])}, parameters changed between backwards, without a step{detail}.",
                place=event.place,
            )
