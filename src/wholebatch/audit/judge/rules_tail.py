"""Rules on the end of a pass over the data: the rest divided as a whole, dropped, or carried over. No torch
here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from wholebatch.audit.judge.evidence import Evidence, Finding, MicroBatch, Window
from wholebatch.audit.judge.losing import cleared, ignored_clears, losses_of
from wholebatch.audit.judge.reading import (
    applied_windows,
    complete_windows,
    finding,
    is_inferred,
    is_near,
    kept,
    meant_micro_batches,
    num_micro_batches,
    number,
    optimizers_of,
    own,
    pass_positions,
    place_of,
    plural,
    seen_micro_batches,
    trace_of,
    updates_text,
)
from wholebatch.audit.judge.totals import is_right, num_backwards
from wholebatch.audit.trace import Event


def tail_weight(evidence: Evidence) -> Iterable[Finding]:
    """A window with fewer micro-batches than others, divided as if it had them all."""
    for optimizer in optimizers_of(evidence):
        judged = [w for w in applied_windows(evidence, optimizer) if w.total and not _loses(w)]
        tails = [(w, factor) for w in judged if (factor := _tail_factor(evidence, w, judged)) is not None]
        if not tails:
            continue
        window, factor = tails[0]
        meant = _full(evidence, judged)
        yield finding(
            evidence,
            "tail_weight",
            [w for w, _ in tails],
            f"{updates_text([window])}, the last window of a pass has {num_backwards(window)} of "
            f"{plural(meant, 'micro-batch')} and its items weigh {number(factor)} together instead of 1: "
            f"it was divided as if it were full.",
            factor=factor,
            place=window.terms[0].site if window.terms else None,
        )


def _loses(window: Window) -> bool:
    return any(m.lost for rank in window.micro_batches for m in own(window, rank))


def _full(evidence: Evidence, judged: Sequence[Window]) -> int:
    """Return the micro-batches of all ranks in a full window: as said, or of those that came out right."""
    ranks = max((len([r for r in w.micro_batches if own(w, r)]) for w in judged), default=1)
    if not is_inferred(evidence):
        return (evidence.intent.micro_batches or 1) * ranks
    right = Counter(num_backwards(w) for w in judged if is_right(w))
    numbers = right or Counter(num_backwards(w) for w in judged)
    return max(numbers, key=lambda n: (numbers[n], n), default=0)


def _tail_factor(evidence: Evidence, window: Window, judged: Sequence[Window]) -> float | None:
    """Return the total of a tail relative to that of full windows; None where it is no such tail."""
    meant, seen, total = _full(evidence, judged), num_backwards(window), abs(window.total or 0.0)
    full = [abs(w.total or 0.0) for w in judged if num_backwards(w) == meant]
    if seen >= meant or is_right(window):
        return None
    if not full:
        said = not is_inferred(evidence) and ends_a_pass(evidence, window)
        return total if said and is_near(total, seen / meant, window) else None
    if not is_inferred(evidence) and not ends_a_pass(evidence, window):
        return None
    if any(is_near(value, 1.0, window) for value in full):
        return total if total < 1 else None
    if any(is_near(total, never, window) for never in (seen, seen / evidence.num_replicas)):
        return None  # a mean of each micro-batch that nobody divided weighs the same in all windows
    return total / full[0] if is_near(total / full[0], seen / meant, window) else None


def ends_a_pass(evidence: Evidence, window: Window) -> bool:
    """Whether a pass over the data, or the script, ended with a window.

    Args:
        evidence: all traces.
        window: a complete one.

    Returns:
        Whether on some rank a pass ended between its last two backwards (loaders fetch one ahead) or
        before the next window's first.
    """
    for rank in window.micro_batches:
        positions = [m.position for m in own(window, rank)]
        if not positions:
            continue
        events = trace_of(evidence, rank).events
        backwards = [p for p, e in enumerate(events) if e.kind == "backward"]
        begin = max((p for p in backwards if p < positions[-1]), default=0)
        later = [p for p in backwards if p > positions[-1]]
        after = events[begin : later[0] if later else None]
        if any(e.kind == "pass" and e.value == 0.0 for e in after) or _begins_anew(events, begin, after):
            return True
        if not later and trace_of(evidence, rank).ended in ("finished", "exit"):
            return True
    return False


def _begins_anew(events: Sequence[Event], begin: int, after: Sequence[Event]) -> bool:
    """Whether the loader that fed a window begins again after it; some are never asked beyond their end."""
    feeding = [e.detail for e in events[:begin] if e.kind == "pass" and e.value == 1.0][-1:]
    return any(e.kind == "pass" and e.value == 1.0 and [e.detail] == feeding for e in after)


def tail_carried_over(evidence: Evidence) -> Iterable[Finding]:
    """A window with the rest of one pass and a whole window of the next."""
    for optimizer in optimizers_of(evidence):
        windows = applied_windows(evidence, optimizer)
        carried = [w for w in windows if _carries_tail(evidence, w, windows)]
        if not carried:
            continue
        window = carried[0]
        rank = next(r for r in window.micro_batches if own(window, r))
        usual = _usual(evidence, windows)
        yield finding(
            evidence,
            "tail_carried_over",
            carried,
            f"{updates_text([window])}, {plural(seen_micro_batches(window), 'micro-batch')} were stepped "
            f"on at once where {usual} make an update: {seen_micro_batches(window) - usual} were left over "
            f"from the pass before.",
            factor=None if window.total is None else abs(window.total),
            place=place_of(own(window, rank)[0]),
        )


def _usual(evidence: Evidence, windows: Sequence[Window]) -> int:
    if not is_inferred(evidence):
        return evidence.intent.micro_batches or 1
    right = Counter(seen_micro_batches(w) for w in windows if w.total is not None and is_right(w))
    inside = Counter(seen_micro_batches(w) for w in windows if not _has_edge_inside(w))
    numbers = right or inside
    return max(numbers, key=lambda n: (numbers[n], -n), default=0)


def _has_edge_inside(window: Window) -> bool:
    for rank in window.micro_batches:
        positions = [m.position for m in kept(window, rank)]
        if any(min(positions) < p < max(positions) for p in pass_positions(window, rank) if positions):
            return True
    return False


def _carries_tail(evidence: Evidence, window: Window, windows: Sequence[Window]) -> bool:
    usual, seen = _usual(evidence, windows), seen_micro_batches(window)
    if not usual or seen <= usual or _loses(window) or any(m.carried for m in _all(window)):
        return False
    if any(ignored_clears(window, rank) for rank in window.micro_batches):
        return False
    if window.total is None:
        return _has_edge_inside(window)
    if is_right(window):
        return False
    full = [abs(w.total) for w in windows if w.total is not None and seen_micro_batches(w) == usual]
    ratio = abs(window.total) / full[0] if full else abs(window.total)
    return _has_edge_inside(window) or (seen < 2 * usual and is_near(ratio, seen / usual, window))


def _all(window: Window) -> list[MicroBatch]:
    return [m for group in window.micro_batches.values() for m in group]


def tail_dropped(evidence: Evidence) -> Iterable[Finding]:
    """The rest of a pass that was cleared, or left at the end of the script."""
    for optimizer in optimizers_of(evidence):
        losses = losses_of(evidence, optimizer)
        windows = [w for w in applied_windows(evidence, optimizer) if losses.get(w.index) == "edge"]
        dropped = [m for w in windows[:1] for rank in w.micro_batches for m in cleared(w, rank)]
        left = [w for w in evidence.windows if w.optimizer == optimizer and _is_left(evidence, w)]
        if not dropped:
            windows = left
            dropped = [m for w in left for rank in w.micro_batches for m in kept(w, rank)]
        if not dropped:
            continue
        where = "left at the end of the script" if windows == left else "cleared before the next pass"
        usual = meant_micro_batches(evidence, optimizer)
        on_a_rank = num_micro_batches([m for m in dropped if m.rank == dropped[0].rank])
        yield finding(
            evidence,
            "tail_dropped",
            windows,
            f"The last {plural(on_a_rank, 'micro-batch')} of a pass went through backward and were "
            f"{where}: an update takes {usual}, and the rest was never stepped on.",
            place=place_of(dropped[0]),
        )


def _is_left(evidence: Evidence, window: Window) -> bool:
    """Whether an incomplete window is the rest of the same loop that made the complete ones."""
    if window.complete:
        return False
    whole = complete_windows(evidence, window.optimizer)
    sites = {m.backward.site for w in whole for rank in w.micro_batches for m in kept(w, rank)}
    left = [m for rank in window.micro_batches for m in kept(window, rank) if m.backward.site in sites]
    ended = all(trace_of(evidence, rank).ended in ("finished", "exit") for rank in window.micro_batches)
    usual = meant_micro_batches(evidence, window.optimizer)
    return ended and usual > 1 and bool(left)
