"""Rules on the edge of a window: step and clear in the wrong place, or on what isn't there. No torch
here."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal

from wholebatch.audit.judge.evidence import Evidence, Finding, MicroBatch, Window
from wholebatch.audit.judge.follow import ALL_CLEARED
from wholebatch.audit.judge.losing import cleared, ignored_clears, losses_of, surviving
from wholebatch.audit.judge.reading import (
    applied_windows,
    concerns,
    events_of,
    finding,
    frameworks,
    is_inferred,
    is_near,
    kept,
    loops,
    num_forwards,
    number,
    optimizers_of,
    own,
    place_of,
    plural,
    seen_micro_batches,
    shows,
    trace_of,
    updates_text,
)
from wholebatch.audit.judge.rules_tail import ends_a_pass
from wholebatch.audit.judge.totals import is_right
from wholebatch.audit.trace import Event, Place

Leftover = Literal["", "never cleared", "ignored", "stepped early"]


def _step_place(window: Window) -> Place | None:
    return next((event.place for event in window.edges.values()), None)


def _carried(window: Window) -> list[MicroBatch]:
    """Return micro-batches of earlier windows that stand in what this one's step read."""
    groups = window.micro_batches.values()
    return [m for group in groups for m in group if m.carried and m.kappa != 0 and not m.lost]


def _leftover(evidence: Evidence, window: Window) -> Leftover:
    """Why micro-batches of earlier windows stand in what a step read."""
    carried = _carried(window)
    for m in carried:
        since = _clears(evidence, window.optimizer, m.rank, m.position, window)
        if since:
            return "ignored"
    if not carried:
        return ""
    events = trace_of(evidence, carried[0].rank).events
    first = next((p for p, e in enumerate(events) if e.backward is not None), 0)
    events = events[first:]
    clears = [e for e in events if e.kind == "clear" and concerns(e, window.optimizer) and _is_whole(e)]
    if clears:
        return "stepped early"
    unseen = any(trace.unseen for trace in evidence.traces)
    if all(m.kappa is None for m in carried) and unseen:
        return ""
    return "never cleared"


def _is_whole(event: Event) -> bool:
    return event.value is None or event.value >= ALL_CLEARED


def _clears(
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
        and (concerns(e, optimizer) or not active.intersection(e.optimizers))
    ]


def never_cleared(evidence: Evidence) -> Iterable[Finding]:
    """No clear between steps: each update holds all micro-batches so far."""
    yield from _left_over(
        evidence,
        "never_cleared",
        "never cleared",
        "gradients are never cleared between steps: the optimizer read {now} of this update and {before} "
        "of "
        "earlier ones",
    )


def clear_ignored(evidence: Evidence) -> Iterable[Finding]:
    """zero_grad was called and gradients survived it, or it was heeded at the last micro-batch only."""
    found = list(
        _left_over(
            evidence,
            "clear_ignored",
            "ignored",
            "zero_grad was called and gradients survived it: the optimizer read {now} of this update and "
            "{before} of earlier ones",
        )
    )
    yield from found or list(_survived(evidence)) or _heeded_last(evidence)


def _survived(evidence: Evidence) -> Iterable[Finding]:
    """Gradients that an engine holds where zero_grad does not reach them (FSDP2, held back)."""
    for optimizer in optimizers_of(evidence):
        applied = applied_windows(evidence, optimizer)
        found = [(w, e) for w in applied for rank in w.micro_batches for e in ignored_clears(w, rank)]
        if found:
            window, event = found[0]
            yield finding(
                evidence,
                "clear_ignored",
                list({w.index: w for w, _ in found}.values()),
                f"{updates_text([window])}, zero_grad was called between two micro-batches and what "
                f"came before it survived: the optimizer read it too.",
                place=event.place,
            )


def _left_over(evidence: Evidence, kind: str, why: Leftover, text: str) -> Iterable[Finding]:
    for optimizer in optimizers_of(evidence):
        windows = [w for w in applied_windows(evidence, optimizer) if _leftover(evidence, w) == why]
        if not windows:
            continue
        first = windows[0]
        carried = _carried(first)
        rank = carried[0].rank
        calls = _clears(evidence, optimizer, rank, carried[0].position, first)
        now, before = (
            plural(len(kept(first, rank)), "micro-batch"),
            len([m for m in carried if m.rank == rank]),
        )
        yield finding(
            evidence,
            kind,
            windows,
            f"{updates_text([first])}, {text.format(now=now, before=before)}.",
            place=calls[0][1].place if calls else _step_place(first),
        )


def _heeded_last(evidence: Evidence) -> Iterable[Finding]:
    """A wrapped optimizer whose zero_grad does nothing except at the last micro-batch."""
    for optimizer in optimizers_of(evidence):
        losses = losses_of(evidence, optimizer)
        windows = [
            w
            for w in applied_windows(evidence, optimizer)
            if losses.get(w.index) == "inside" and _cleared_before_last(evidence, w)
        ]
        if not windows:
            continue
        first = windows[0]
        _, _, event = next(iter(events_of(first, "clear")))
        yield finding(
            evidence,
            "clear_ignored",
            windows,
            f"{updates_text([first])}, zero_grad is called at each micro-batch, ignored until the last, "
            f"and "
            f"there it deletes what {plural(seen_micro_batches(first) - 1, 'micro-batch')} brought.",
            place=event.place,
        )


def _cleared_before_last(evidence: Evidence, window: Window) -> bool:
    """Whether a wrapper let through just the clear before the last micro-batch."""
    for rank in window.micro_batches:
        lost, stay = cleared(window, rank), surviving(window, rank)
        if len(stay) != 1 or not lost or stay[0].position < lost[-1].position:
            return False
        inside = [
            e
            for p, e in window.events[rank]
            if lost[0].position < p < stay[0].position and concerns(e, window.optimizer)
        ]
        clears = [e for e in inside if e.kind == "clear"]
        ignored = any(e.kind == "clear_call" for e in inside)
        wrapped = "accelerate" in frameworks(evidence) or any(e.through == "accelerate" for e in clears)
        if len(clears) != 1 or not (ignored or wrapped):
            return False
    return True


def clear_inside_window(evidence: Evidence) -> Iterable[Finding]:
    """Gradients cleared between backwards of one update, or between backward and step."""
    for optimizer in optimizers_of(evidence):
        losses = losses_of(evidence, optimizer)
        applied = applied_windows(evidence, optimizer)
        windows = [w for w in applied if losses.get(w.index) == "inside" and _some_survive(w)]
        if not shows(windows, applied):
            continue
        first = windows[0]
        rank = next(r for r in first.micro_batches if cleared(first, r))
        lost, stay = cleared(first, rank), surviving(first, rank)
        yield finding(
            evidence,
            "clear_inside_window",
            windows,
            f"{updates_text([first])}, gradients were cleared between its backwards: {len(lost)} of "
            f"{plural(len(lost) + len(stay), 'micro-batch')} were thrown away.",
            place=_clear_place(first, lost[0]),
        )


def _some_survive(window: Window) -> bool:
    return any(surviving(window, rank) for rank in window.micro_batches)


def _clear_place(window: Window, lost: MicroBatch) -> Place | None:
    later = [e for r, p, e in events_of(window, "clear") if r == lost.rank and p > lost.position]
    return later[0].place if later else place_of(lost)


def step_inside_window(evidence: Evidence) -> Iterable[Finding]:
    """The optimizer stepped before all micro-batches of the update were added."""
    for optimizer in optimizers_of(evidence):
        yield from _growing_sums(evidence, optimizer) or _fewer_than_said(evidence, optimizer)


def _fewer_than_said(evidence: Evidence, optimizer: int) -> list[Finding]:
    applied = [w for w in applied_windows(evidence, optimizer) if seen_micro_batches(w)]
    divided = _divided_by(evidence, applied)
    meant = divided if is_inferred(evidence) else evidence.intent.micro_batches or 1
    short = [w for w in applied if seen_micro_batches(w) < meant]
    windows = [w for w in short if not ends_a_pass(evidence, w)]
    if not windows or not shows(short, applied) or _is_tail(evidence, applied, short, meant):
        return []
    source = "the loss is divided by" if is_inferred(evidence) else f"{evidence.intent.source} says"
    # one micro-batch each, divided by a whole number: that may be a coefficient
    sure = not is_inferred(evidence) or len({seen_micro_batches(w) for w in applied}) > 1
    return [
        finding(
            evidence,
            "step_inside_window",
            windows,
            f"{updates_text([windows[0]])}, the optimizer stepped after "
            f"{plural(seen_micro_batches(windows[0]), 'micro-batch')}; {source} {meant}.",
            severity="wrong" if sure else "note",
            place=_step_place(windows[0]),
        )
    ]


def _is_tail(evidence: Evidence, applied: Sequence[Window], short: Sequence[Window], meant: int) -> bool:
    """Whether only the last window is short, after whole ones: the rest of the data."""
    last = short == [applied[-1]] and any(seen_micro_batches(w) == meant for w in applied[:-1])
    return last and all(trace.ended != "audited" for trace in evidence.traces)


def _divided_by(evidence: Evidence, windows: Sequence[Window]) -> int:
    """Return what every micro-batch was divided by, if that is more than any window has; else 0."""
    if evidence.num_replicas > 1 or any(len(w.terms) != 1 or not w.total or is_right(w) for w in windows):
        return 0
    if any(num_forwards(w, rank) > len(own(w, rank)) for w in windows for rank in w.micro_batches):
        return 0  # forwards without a backward explain it as well
    if any(m.lost for w in windows for rank in w.micro_batches for m in own(w, rank)):
        return 0
    divisors = {round(seen_micro_batches(w) / abs(w.total or 1.0)) for w in windows}
    divisor = divisors.pop() if len(divisors) == 1 else 0
    fits = all(is_near(abs(w.total or 0.0), seen_micro_batches(w) / max(divisor, 1), w) for w in windows)
    more = all(seen_micro_batches(w) < divisor for w in windows)
    return divisor if fits and more and 2 <= divisor <= 64 else 0


def _growing_sums(evidence: Evidence, optimizer: int) -> list[Finding]:
    applied = applied_windows(evidence, optimizer)
    windows = [w for w in applied if _leftover(evidence, w) == "stepped early"]
    if not windows:
        return []
    first = windows[0]
    rank = _carried(first)[0].rank
    before = len([m for m in _carried(first) if m.rank == rank])
    return [
        finding(
            evidence,
            "step_inside_window",
            windows,
            f"{updates_text([first])}, the optimizer stepped again on gradients that it had stepped on "
            f"before: "
            f"{plural(before, 'micro-batch')} of earlier steps had not been cleared, as only every few "
            f"steps are.",
            place=_step_place(first),
        )
    ]


def stale_gradients(evidence: Evidence) -> Iterable[Finding]:
    """Gradients of another optimizer's loss, or of a probe before training, in what was read."""
    for optimizer in optimizers_of(evidence):
        applied = applied_windows(evidence, optimizer)
        foreign = [(w, stale) for w in applied if (stale := _foreign(w))]
        found = foreign or [(w, stale) for w in applied if (stale := _probes(evidence, w, applied))]
        what = "of another optimizer's loss" if foreign else "from a backward before the loop began"
        if not found:
            found = [(w, stale) for w in applied if (stale := _asked_for_inputs(w))]
            what = "from a backward that asked for the gradient of an input"
        if not found:
            continue
        window, stale = found[0]
        yield finding(
            evidence,
            "stale_gradients",
            [w for w, _ in found],
            f"{updates_text([window])}, the optimizer also read {plural(len(stale), 'gradient')} {what} "
            f"that "
            f"had not been cleared.",
            place=place_of(stale[0]),
        )


def _foreign(window: Window) -> list[MicroBatch]:
    micro_batches = [m for group in window.micro_batches.values() for m in group]
    if not any(not m.foreign and not m.carried for m in micro_batches):
        return []
    return [m for m in micro_batches if m.foreign and not m.lost and m.kappa != 0]


def _probes(evidence: Evidence, window: Window, applied: Sequence[Window]) -> list[MicroBatch]:
    """Return backwards that came before the first window's loop and never again."""
    others = [w for w in applied if w is not window]
    if window.index != 1 or any(t.num_skipped_updates for t in evidence.traces) or len(others) < 2:
        return []
    later = {m.backward.site for w in others for rank in w.micro_batches for m in own(w, rank)}
    found = []
    for rank in window.micro_batches:
        groups = loops([m for m in kept(window, rank) if m.kappa != 0])
        usual = [g[0].position for g in groups if any(m.backward.site in later for m in g)]
        odd = [g for g in groups if all(m.backward.site not in later for m in g)]
        found += [m for g in odd for m in g if usual and m.position < min(usual)]
    return found


def _asked_for_inputs(window: Window) -> list[MicroBatch]:
    """Return backwards for an input's gradient (a saliency map), beside those that train."""
    found = []
    for rank in window.micro_batches:
        groups = loops([m for m in kept(window, rank) if m.kappa != 0])
        asked = [
            g
            for g in groups
            if all(f.input_needs_gradient for m in g for f in m.forwards) and g[0].forwards
        ]
        others = [g for g in groups if not any(f.input_needs_gradient for m in g for f in m.forwards)]
        unread = [g for g in asked if all(not m.backward.terms for m in g)]
        if others:
            found += [m for g in unread for m in g]
    return found


def optimizer_without_gradients(evidence: Evidence) -> Iterable[Finding]:
    """A step on no gradients at all."""
    for optimizer in optimizers_of(evidence):
        applied = applied_windows(evidence, optimizer)
        windows = [w for w in applied if _has_none(w)]
        if not shows(windows, applied):
            continue
        first = windows[0]
        unseen = any(trace.unseen for trace in evidence.traces)
        zero = any(event.before for event in first.edges.values())
        name = evidence.traces[0].optimizers[optimizer].name
        parameters = max(event.num_parameters for event in first.edges.values())
        yield finding(
            evidence,
            "optimizer_without_gradients",
            windows,
            f"{updates_text([first])}, {name} stepped and none of its {plural(parameters, 'parameter')} "
            f"had a "
            f"gradient{' other than zero' if zero else ''}.",
            severity="note" if zero or unseen else "wrong",
            place=_step_place(first),
        )


def _has_none(window: Window) -> bool:
    steps = list(window.edges.values())
    asked = [e for e in steps if e.num_parameters]
    return (
        bool(asked)
        and all(e.num_without_gradient >= e.num_parameters for e in asked)
        and window.num_items != 0
    )


def nonfinite_gradients(evidence: Evidence) -> Iterable[Finding]:
    """A step on NaN or infinity."""
    for optimizer in optimizers_of(evidence):
        windows = [w for w in applied_windows(evidence, optimizer) if _nonfinite(w)]
        if windows:
            norm = next(
                n for e in windows[0].edges.values() if not math.isfinite(n := e.gradient_norm or 0.0)
            )
            yield finding(
                evidence,
                "nonfinite_gradients",
                windows,
                f"{updates_text([windows[0]])}, the optimizer stepped on a gradient of norm "
                f"{number(norm)}.",
                place=_step_place(windows[0]),
            )


def _nonfinite(window: Window) -> bool:
    """Whether a step read what isn't finite; under a scaler fused optimizers look for themselves."""
    scaled = any(True for _ in events_of(window, "unscale"))
    norms = [event.gradient_norm for event in window.edges.values() if event.gradient_norm is not None]
    return not scaled and any(not math.isfinite(norm) for norm in norms)
