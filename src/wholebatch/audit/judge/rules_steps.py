"""Rules on steps: too early, on nothing, on what is no number. No torch here."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from wholebatch.audit.judge.evidence import Evidence, Finding, Window
from wholebatch.audit.judge.leftovers import carried_into, leftover_of, step_place
from wholebatch.audit.judge.reading import (
    applied_windows,
    events_of,
    finding,
    is_inferred,
    is_near,
    num_forwards,
    number,
    optimizers_of,
    own,
    plural,
    seen_micro_batches,
    shows,
    updates_text,
)
from wholebatch.audit.judge.rules_tail import ends_a_pass
from wholebatch.audit.judge.totals import is_right


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
    only_last = [w.index for w in windows] == [w.index for w in applied[-1:]]
    if only_last and len(windows) < len(short) and _watch_ended_first(evidence):
        return []  # like the tails before it; whether a pass ended with it was not seen
    if not windows or not shows(short, applied) or _is_tail(evidence, applied, short, meant):
        return []
    if is_inferred(evidence) and all(_is_divided_twice(w) for w in windows):
        return []  # said so already, by its total weight
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
            place=step_place(windows[0]),
        )
    ]


def _watch_ended_first(evidence: Evidence) -> bool:
    """Whether the watch ended with the last update, so that what came after it was not seen."""
    return any(trace.ended == "audited" for trace in evidence.traces)


def _is_tail(evidence: Evidence, applied: Sequence[Window], short: Sequence[Window], meant: int) -> bool:
    """Whether only the last window is short, after whole ones: the rest of the data."""
    last = short == [applied[-1]] and any(seen_micro_batches(w) == meant for w in applied[:-1])
    return last and all(trace.ended != "audited" for trace in evidence.traces)


def _is_divided_twice(window: Window) -> bool:
    """Whether the total is 1/A for the A micro-batches that the window has."""
    size = seen_micro_batches(window)
    return size > 1 and is_near(abs(window.total or 0.0), 1 / size, window)


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
    windows = [w for w in applied if leftover_of(evidence, w) == "stepped early"]
    if not windows:
        return []
    first = windows[0]
    rank = carried_into(first)[0].rank
    before = len([m for m in carried_into(first) if m.rank == rank])
    return [
        finding(
            evidence,
            "step_inside_window",
            windows,
            f"{updates_text([first])}, the optimizer stepped again on gradients that it had stepped on "
            f"before: "
            f"{plural(before, 'micro-batch')} of earlier steps had not been cleared, as only every few "
            f"steps are.",
            place=step_place(first),
        )
    ]


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
            f"had a gradient{' other than zero' if zero else ''}.",
            severity="note" if zero or unseen else "wrong",
            place=step_place(first),
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
                place=step_place(windows[0]),
            )


def _nonfinite(window: Window) -> bool:
    """Whether a step read what isn't finite; under a scaler fused optimizers look for themselves."""
    scaled = any(True for _ in events_of(window, "unscale"))
    norms = [event.gradient_norm for event in window.edges.values() if event.gradient_norm is not None]
    return not scaled and any(not math.isfinite(norm) for norm in norms)
