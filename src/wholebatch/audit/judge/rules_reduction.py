"""Rules on combining gradients over replicas: when, whether, and of which micro-batches. No torch here."""

from __future__ import annotations

from collections.abc import Iterable

from wholebatch.audit.judge.evidence import Evidence, Finding, MicroBatch, Window
from wholebatch.audit.judge.leftovers import step_place
from wholebatch.audit.judge.reading import (
    applied_windows,
    averages_weights,
    events_of,
    finding,
    kept,
    loops,
    optimizers_of,
    own,
    place_of,
    plural,
    seen_micro_batches,
    shows,
    trace_of,
    updates_text,
)
from wholebatch.audit.trace import Place

# these scatter gradients at every micro-batch by design
SHARDED = ("FSDPModule", "FullyShardedDataParallel", "DeepSpeedEngine")


def not_reduced(evidence: Evidence) -> Iterable[Finding]:
    """Ranks stepped on gradients of their own: nothing was combined."""
    for optimizer in optimizers_of(evidence):
        applied = applied_windows(evidence, optimizer)
        held = [w for w in applied if _all_held_back(evidence, w)]
        windows = held or [w for w in applied if w.ranks_agree is False and not _some_reduced(w)]
        if not windows:
            continue
        first = windows[0]
        if held:
            yield finding(
                evidence,
                "not_reduced",
                held,
                f"{updates_text([first])}, the wrapper was told not to reduce in any of the "
                f"{plural(seen_micro_batches(first), 'micro-batch')}: the optimizer had no gradients.",
                place=step_place(first),
            )
            continue
        micro_batches = [m for rank in first.micro_batches for m in own(first, rank)]
        past = any(not f.inside_wrapper for m in micro_batches for f in m.forwards)
        some = " of some parameters" if first.per_parameter_kappa else ""
        yield finding(
            evidence,
            "not_reduced",
            windows,
            f"{updates_text([first])}, the {len(first.edges)} ranks stepped on different gradients: "
            f"those{some} were never "
            f"combined{', as the model was called past its wrapper' if past else ''}.",
            severity="note" if averages_weights(evidence, optimizer) else "wrong",
            place=place_of(micro_batches[-1]) if micro_batches else None,
        )


def _all_held_back(evidence: Evidence, window: Window) -> bool:
    """Whether gradients were delivered and all of them held back, so that none reached the optimizer."""
    if evidence.num_replicas < 2:
        return False
    micro_batches = [m for rank in window.micro_batches for m in own(window, rank)]
    held = [m for m in micro_batches if m.backward.holds_reduction and m.backward.delivered]
    nothing_read = all(not event.before for event in window.edges.values())
    return bool(micro_batches) and len(held) == len(micro_batches) and nothing_read


def _reduced(window: Window) -> list[tuple[MicroBatch, bool]]:
    """Return micro-batches of other ranks than the first, and whether the first rank read them.

    Where kappa isn't known, those that issued collectives.
    """
    first = min(window.micro_batches, default=0)
    others = [m for rank in window.micro_batches if rank != first for m in own(window, rank)]
    if any(m.kappa is not None for m in others):
        return [(m, m.kappa != 0 and not m.lost) for m in others]
    everything = [m for rank in window.micro_batches for m in own(window, rank)]
    return [(m, m.backward.num_collectives > 0) for m in everything]


def _some_reduced(window: Window) -> bool:
    """Whether some micro-batches were combined, unless all were and parameters were left out."""
    reduced = [one for _, one in _reduced(window)]
    return any(reduced) and not (window.per_parameter_kappa and all(reduced))


def reduced_wrong_micro_batch(evidence: Evidence) -> Iterable[Finding]:
    """Some micro-batch was combined over replicas, and a later one was not."""
    for optimizer in optimizers_of(evidence):
        windows = [
            w for w in applied_windows(evidence, optimizer) if w.ranks_agree is False and _some_reduced(w)
        ]
        if not windows:
            continue
        first = windows[0]
        seen = _reduced(first)
        late = [m for m, reduced in seen if not reduced]
        indices = sorted({m.index + 1 for m in late})
        numbers = ", ".join(map(str, indices)) or "some"
        yield finding(
            evidence,
            "reduced_wrong_micro_batch",
            windows,
            f"{updates_text([first])}, ranks stepped on different gradients: of "
            f"{plural(seen_micro_batches(first), 'micro-batch')}, the reduction did not include number "
            f"{numbers}.",
            place=place_of(late[-1] if late else seen[-1][0]),
        )


def _early(window: Window, rank: int) -> list[MicroBatch]:
    """Return backwards that are not the last of their loop."""
    return [m for group in loops(kept(window, rank)) for m in group[:-1]]


def forward_outside_scope(evidence: Evidence) -> Iterable[Finding]:
    """Backward ran under the scope that holds the reduction back, its forward did not."""
    for optimizer in optimizers_of(evidence):
        applied = applied_windows(evidence, optimizer)
        windows = [w for w in applied if _outside(w)]
        if not shows(windows, applied):
            continue
        first = windows[0]
        outside = _outside(first)
        yield finding(
            evidence,
            "forward_outside_scope",
            windows,
            f"{updates_text([first])}, {plural(len(outside), 'backward')} ran where the reduction is "
            f"held back and reduced all the same: their forwards ran outside.",
            place=_forward_place(evidence, outside[0]) or place_of(outside[0]),
        )


def _forward_place(evidence: Evidence, m: MicroBatch) -> Place | None:
    """The line of the forward before a backward."""
    events = trace_of(evidence, m.rank).events[: m.position]
    return next((event.place for event in reversed(events) if event.kind == "forward"), None)


def _outside(window: Window) -> list[MicroBatch]:
    return [
        m
        for rank in window.micro_batches
        for m in _early(window, rank)
        if m.backward.holds_reduction
        and m.backward.num_collectives > 0
        and any(f.holds_reduction is False and f.wrapper not in SHARDED for f in m.forwards)
    ]


def reduced_every_micro_batch(evidence: Evidence) -> Iterable[Finding]:
    """Every backward of a window combined gradients over the replicas."""
    for optimizer in optimizers_of(evidence) if len(evidence.traces) > 1 else ():
        several = [
            w for w in applied_windows(evidence, optimizer) if any(_early(w, r) for r in w.micro_batches)
        ]
        windows = [w for w in several if all(_reduces_each(evidence, w, r) for r in w.micro_batches)]
        if not shows(windows, several):
            continue
        first = windows[0]
        early = [m for rank in first.micro_batches for m in _early(first, rank)]
        sharded = any(f.wrapper in SHARDED for m in early for f in m.forwards)
        by_design = " That is how sharded gradients work unless they are held back." if sharded else ""
        yield finding(
            evidence,
            "reduced_every_micro_batch",
            windows,
            f"{updates_text([first])}, each of the {seen_micro_batches(first)} micro-batches combined "
            f"its gradients over the replicas; once per update is enough.{by_design}",
            severity="note" if sharded else "cost",
            place=place_of(early[0]),
        )


def _reduces_each(evidence: Evidence, window: Window, rank: int) -> bool:
    early = _early(window, rank)
    by_hand = [p for r, p, _ in events_of(window, "reduce") if r == rank]
    if not early or trace_of(evidence, rank).num_replicas < 2:
        return False
    return all(_reduces(m) for m in early) or all(
        any(m.position < p < later.position for p in by_hand)
        for m, later in zip(early, [*early[1:], kept(window, rank)[-1]], strict=True)
    )


def _reduces(m: MicroBatch) -> bool:
    """Whether a backward reduced: collectives that a scope which holds it back lets through don't count."""
    held = m.backward.holds_reduction and not any(f.holds_reduction is False for f in m.forwards)
    return m.backward.num_collectives > 0 and not held
