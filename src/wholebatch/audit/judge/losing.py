"""Why backwards of a window were cleared before its step: inside the window, at the edge of a pass, or by a
loop that keeps its own sums or skips updates by hand. No torch here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from wholebatch.audit.judge.evidence import Evidence, MicroBatch, Window
from wholebatch.audit.judge.reading import (
    applied_windows,
    is_inferred,
    kept,
    own,
    pass_positions,
    was_cleared,
)
from wholebatch.audit.trace import Event, Sketches

Loss = Literal["", "inside", "edge", "skipped by hand", "kept by hand"]

SAME_DIRECTION = 0.9995
OTHER_DIRECTION = 0.998


def cleared(window: Window, rank: int) -> list[MicroBatch]:
    """Return the backwards of this window that were cleared."""
    return [m for m in own(window, rank) if was_cleared(window, m)]


def losses_of(evidence: Evidence, optimizer: int) -> Mapping[int, Loss]:
    """Return why backwards were cleared, by index of the update; updates that lost none are left out.

    Args:
        evidence: all windows.
        optimizer: whose.

    Returns:
        ``"edge"``: fewer than a window has, before a whole window (the rest of a pass); ``"skipped by
        hand"``: whole windows, before a whole window; ``"kept by hand"``: the optimizer read them all the
        same; else ``"inside"``.
    """
    windows = applied_windows(evidence, optimizer)
    told = any(event.kind == "pass" for trace in evidence.traces for event in trace.events)
    whole = {_num_surviving(w) for w in windows if not _num_cleared(w)}
    if not is_inferred(evidence):
        whole.add(evidence.intent.micro_batches or 0)
    return {w.index: _loss_of(w, whole, told) for w in windows if _num_cleared(w)}


def ignored_clears(window: Window, rank: int) -> list[Event]:
    """Return calls of zero_grad inside this window, for its optimizer, that cleared nothing."""
    stay = [m.position for m in kept(window, rank) if m.kappa != 0]
    return [
        event
        for position, event in window.events.get(rank, ())
        if event.kind == "clear_call" and window.optimizer in event.optimizers and not event.through
        if stay and min(stay) < position < max(stay)
    ]


def _loss_of(window: Window, whole: set[int], passes_are_told: bool) -> Loss:
    lost, stay = _num_cleared(window), _num_surviving(window)
    if any(_was_kept(window, rank) for rank in window.micro_batches):
        return "kept by hand"
    if stay and (stay in whole or _edge_between(window)):
        # where passes are seen to end, what is cleared elsewhere was given up knowingly
        at_edge = not passes_are_told or _edge_between(window)
        return "edge" if lost % stay and at_edge else "skipped by hand"
    return "inside"


def _num_cleared(window: Window) -> int:
    return max((len(cleared(window, rank)) for rank in window.micro_batches), default=0)


def _num_surviving(window: Window) -> int:
    return max((len(kept(window, rank)) for rank in window.micro_batches), default=0)


def _edge_between(window: Window) -> bool:
    """Whether on each rank a pass ends between what was cleared, all at once, and what survived."""
    for rank in window.micro_batches:
        lost = [m.position for m in cleared(window, rank)]
        stay = [m.position for m in kept(window, rank)]
        if not lost:
            continue
        clears = [p for p, e in window.events.get(rank, ()) if e.kind == "clear" and p > lost[0]]
        edges = [p for p in pass_positions(window, rank) if stay and max(lost) < p < min(stay)]
        if not edges or any(p < max(lost) for p in clears):
            return False
    return True


def _was_kept(window: Window, rank: int) -> bool:
    """Whether the optimizer read what was cleared all the same: a loop with sums of its own."""
    lost, stay = cleared(window, rank), kept(window, rank)
    end = window.edges.get(rank)
    if not lost or end is None or not end.before:
        return False
    read = _stacked([end.before], end.before)
    everything = _stacked([m.backward.delivered for m in [*lost, *stay]], end.before)
    rest = _stacked([m.backward.delivered for m in stay], end.before)
    is_all = _cosine(read, everything) > SAME_DIRECTION
    return is_all and _cosine(read, rest) < OTHER_DIRECTION


def _stacked(parts: Sequence[Sketches], like: Sketches) -> NDArray[np.float64]:
    zero = np.zeros_like(next(iter(like.values())))
    return np.concatenate([sum((part.get(p, zero) for part in parts), zero) for p in sorted(like)])


def _cosine(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    norms = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / norms if norms > 0 and np.isfinite(norms) else 0.0
