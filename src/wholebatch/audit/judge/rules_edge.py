"""Rules on gradients that were cleared at the wrong moment, or not. No torch here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from wholebatch.audit.judge.evidence import Evidence, Finding, MicroBatch, Window
from wholebatch.audit.judge.leftovers import Leftover, carried_into, clears_between, leftover_of, step_place
from wholebatch.audit.judge.losing import cleared, ignored_clears, losses_of
from wholebatch.audit.judge.reading import (
    applied_windows,
    events_of,
    finding,
    frameworks,
    kept,
    loops,
    optimizers_of,
    own,
    place_of,
    plural,
    seen_micro_batches,
    shows,
    updates_text,
)
from wholebatch.audit.trace import Place


def never_cleared(evidence: Evidence) -> Iterable[Finding]:
    """No clear between steps: each update holds all micro-batches so far."""
    yield from _left_over(
        evidence,
        "never_cleared",
        "never cleared",
        "gradients are never cleared between steps: the optimizer read {now} of this update and {before} "
        "of earlier ones",
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
        windows = [w for w in applied_windows(evidence, optimizer) if leftover_of(evidence, w) == why]
        if not windows:
            continue
        first = windows[0]
        carried = carried_into(first)
        rank = carried[0].rank
        calls = clears_between(evidence, optimizer, rank, carried[0].position, first)
        now, before = (
            plural(len(kept(first, rank)), "micro-batch"),
            len([m for m in carried if m.rank == rank]),
        )
        yield finding(
            evidence,
            kind,
            windows,
            f"{updates_text([first])}, {text.format(now=now, before=before)}.",
            place=calls[0][1].place if calls else step_place(first),
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
            f"and there it deletes what {plural(seen_micro_batches(first) - 1, 'micro-batch')} brought.",
            place=event.place,
        )


def _cleared_before_last(evidence: Evidence, window: Window) -> bool:
    """Whether a wrapper let through just the clear before the last micro-batch."""
    for rank in window.micro_batches:
        lost, stay = cleared(window, rank), kept(window, rank)
        if len(stay) != 1 or not lost or stay[0].position < lost[-1].position:
            return False
        inside = [
            e
            for p, e in window.events[rank]
            if lost[0].position < p < stay[0].position and e.concerns(window.optimizer)
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
        lost, stay = cleared(first, rank), kept(first, rank)
        yield finding(
            evidence,
            "clear_inside_window",
            windows,
            f"{updates_text([first])}, gradients were cleared between its backwards: {len(lost)} of "
            f"{plural(len(lost) + len(stay), 'micro-batch')} were thrown away.",
            place=_clear_place(first, lost[0]),
        )


def _some_survive(window: Window) -> bool:
    return any(kept(window, rank) for rank in window.micro_batches)


def _clear_place(window: Window, lost: MicroBatch) -> Place | None:
    later = [e for r, p, e in events_of(window, "clear") if r == lost.rank and p > lost.position]
    return later[0].place if later else place_of(lost)


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
            f"that had not been cleared.",
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
