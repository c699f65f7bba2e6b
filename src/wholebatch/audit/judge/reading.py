"""What several rules ask of the evidence: which micro-batches count, what lies between them, how many there
should be. No torch here."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from wholebatch.audit.judge.evidence import INFERRED, Evidence, Finding, MicroBatch, Severity, Window
from wholebatch.audit.judge.kinds import KINDS
from wholebatch.audit.judge.loops import loops_of
from wholebatch.audit.trace import Event, EventKind, Place, RankTrace

Rule = Callable[[Evidence], Iterable[Finding]]
Across = Literal["items", "micro_batches", "replicas"]

# losses in bfloat16 round what flows back to them by up to 2 ** -8, whatever gradients are kept in
FINE_TOLERANCE = 4e-3
COARSE_TOLERANCE = 3e-2
LARGE_NORM = 1e3  # a cap on the norm from here up, never reached, only measures


@dataclass(frozen=True, kw_only=True, slots=True)
class Between:
    """An event that lies between two backwards of one window that both count, on one rank."""

    window: Window
    rank: int
    event: Event


def optimizers_of(evidence: Evidence) -> range:
    """Return the indices of the optimizers."""
    return range(max((len(trace.optimizers) for trace in evidence.traces), default=0))


def complete_windows(evidence: Evidence, optimizer: int) -> list[Window]:
    """Return the windows of an optimizer that ended with a step or a skip, in order."""
    return [w for w in evidence.windows if w.optimizer == optimizer and w.complete]


def applied_windows(evidence: Evidence, optimizer: int) -> list[Window]:
    """Return those that ended with a step that moved the weights."""
    return [w for w in complete_windows(evidence, optimizer) if not w.skipped]


def own(window: Window, rank: int) -> list[MicroBatch]:
    """Return the backwards of this window on a rank, those that were lost included."""
    return [m for m in window.micro_batches.get(rank, ()) if not (m.carried or m.foreign)]


def kept(window: Window, rank: int) -> list[MicroBatch]:
    """Return those that weren't cleared."""
    return [m for m in own(window, rank) if not was_cleared(window, m)]


def was_cleared(window: Window, micro_batch: MicroBatch) -> bool:
    """Whether a clear came after a backward that is lost; one scaled to nothing was not cleared."""
    events = window.events.get(micro_batch.rank, ())
    return micro_batch.lost == "cleared" and any(
        e.kind == "clear" and p > micro_batch.position and e.concerns(window.optimizer) for p, e in events
    )


def loops(micro_batches: Sequence[MicroBatch]) -> list[list[MicroBatch]]:
    """Return the backwards of one rank's window by the loop that ran them, a GAN's two losses apart."""
    names = loops_of([[m.backward for m in micro_batches]])
    grouped: dict[object, list[MicroBatch]] = {}
    for micro_batch in micro_batches:
        grouped.setdefault(names[micro_batch.backward.site], []).append(micro_batch)
    return list(grouped.values())


def num_micro_batches(micro_batches: Sequence[MicroBatch]) -> int:
    """Return the length of the longest loop among them."""
    return max((len(group) for group in loops(micro_batches)), default=0)


def seen_micro_batches(window: Window) -> int:
    """Return the micro-batches of a window: the most that a rank has, those that were lost included."""
    return max((num_micro_batches(own(window, rank)) for rank in window.micro_batches), default=0)


def is_inferred(evidence: Evidence) -> bool:
    """Whether nobody said how many micro-batches an update should have."""
    return evidence.intent.micro_batches is None or evidence.intent.source == INFERRED


def meant_micro_batches(evidence: Evidence, optimizer: int) -> int:
    """Return how many micro-batches an update of this optimizer should have: said, or most often seen."""
    if not is_inferred(evidence):
        return evidence.intent.micro_batches or 1
    numbers = Counter(seen_micro_batches(w) for w in complete_windows(evidence, optimizer))
    return max(numbers, key=lambda n: (numbers[n], n), default=0)


def frameworks(evidence: Evidence, window: Window | None = None) -> list[str]:
    """Return names of frameworks and wrappers in use, the most telling first."""
    found = [evidence.intent.framework, *(i.framework for t in evidence.traces for i in t.intents)]
    wrappers = {
        forward.wrapper
        for w in ([window] if window is not None else evidence.windows)
        for group in w.micro_batches.values()
        for m in group
        for forward in m.forwards
    }
    if any(w.startswith(("FSDP", "Fully")) for w in wrappers):
        found.append("fsdp")
    if "DeepSpeedEngine" in wrappers:
        found.append("deepspeed")
    if "DistributedDataParallel" in wrappers:
        found.append("ddp")
    if "trl" in found:
        found.append("transformers")
    return [name for name in found if name]


def tolerance(window: Window) -> float:
    """Return how far a weight may be from another through rounding alone."""
    dtypes = {event.gradient_dtype for event in window.edges.values()}
    return COARSE_TOLERANCE if dtypes & {"bfloat16", "float16"} else FINE_TOLERANCE


def is_near(value: float, target: float, window: Window) -> bool:
    """Whether a weight is another, by the tolerance of this window."""
    return abs(value - target) <= tolerance(window) * abs(target)


def averages_weights(evidence: Evidence, optimizer: int) -> bool:
    """Return whether weights change after steps: replicas average them from time to time."""
    return any(
        event.kind == "parameters_changed"
        for w in applied_windows(evidence, optimizer)
        if w.index > 1  # what comes before the first makes replicas start alike
        for rank, events in w.events.items()
        for position, event in events
        if position < min((m.position for m in own(w, rank)), default=-1)
    )


def events_of(window: Window, *kinds: EventKind) -> Iterator[tuple[int, int, Event]]:
    """Yield (rank, position, event) of some kinds that concern the window's optimizer."""
    for rank, events in window.events.items():
        for position, event in events:
            if event.kind in kinds and event.concerns(window.optimizer):
                yield rank, position, event


def events_between(window: Window, *kinds: EventKind) -> Iterator[Between]:
    """Yield events between two backwards of one loop that both reach the step.

    What lies at another optimizer's edge is left out: it belongs there.
    """
    for rank in window.micro_batches:
        positions = sorted(m.position for m in kept(window, rank))
        other_steps = [p for p, e in window.events.get(rank, ()) if e.kind in ("step", "skip")]
        for r, position, event in events_of(window, *kinds):
            earlier = [p for p in positions if p < position]
            later = [p for p in positions if p > position]
            if r != rank or not earlier or not later:
                continue
            if not any(earlier[-1] < p < later[0] for p in other_steps):
                yield Between(window=window, rank=rank, event=event)


def num_forwards(window: Window, rank: int) -> int:
    """Return the forwards of a window on a rank by the module that had the fewest, those included that no
    backward followed: a micro-batch may take several modules, and one of them several times."""
    modules = Counter(e.forward.module for _, e in window.events.get(rank, ()) if e.forward is not None)
    return min(modules.values(), default=0)


def pass_positions(window: Window, rank: int) -> list[int]:
    """Return where passes over data end or begin in a window on a rank."""
    return [p for p, e in window.events.get(rank, ()) if e.kind == "pass"]


def is_measurement(event: Event) -> bool:
    """Whether a clip only measured the norm: no cap, or one far out of reach that changed nothing."""
    if event.value is None:
        return False
    if event.value == float("inf"):
        return True
    return event.value >= LARGE_NORM and not _changed(event)


def _changed(event: Event) -> bool:
    if event.before is None or event.after is None:
        return True
    return any(
        p not in event.after or bool(abs(vector - event.after[p]).max() > 1e-6 * abs(vector).max())
        for p, vector in event.before.items()
    )


def trace_of(evidence: Evidence, rank: int) -> RankTrace:
    """Return the trace of a rank."""
    return next(trace for trace in evidence.traces if trace.rank == rank)


def updates_text(windows: Sequence[Window]) -> str:
    """Return ``"In update 3"``, ``"In updates 3 and 4"``, ``"In updates 3, 4 and 5"``."""
    numbers = [str(w.index) for w in windows]
    if len(numbers) > 4:
        return f"In {len(numbers)} updates, {numbers[0]} to {numbers[-1]},"
    if len(numbers) == 1:
        return f"In update {numbers[0]}"
    return f"In updates {', '.join(numbers[:-1])} and {numbers[-1]}"


def number(value: float) -> str:
    """Return a number in three or four digits: ``8.3``, ``0.25``, ``1536``."""
    if not math.isfinite(value):
        return str(value)
    return f"{value:.0f}" if abs(value - round(value)) < 5e-4 * abs(value) else f"{value:.3g}"


def plural(quantity: int, one: str) -> str:
    """Return ``"1 micro-batch"``, ``"3 micro-batches"``."""
    return f"{quantity} {one}{'' if quantity == 1 else 'es' if one.endswith('ch') else 's'}"


def finding(
    evidence: Evidence,
    kind: str,
    windows: Sequence[Window],
    message: str,
    *,
    severity: Severity | None = None,
    place: Place | None = None,
    factor: float | None = None,
    across: Across | None = None,
) -> Finding:
    """Make a finding of a kind: its effect, how to mend it, the updates that show it.

    Args:
        evidence: what it was read from.
        kind: one of ``KINDS``.
        windows: that show it, all of one optimizer, in order; none for what belongs to no update.
        message: with the numbers.
        severity: where it is not the kind's own.
        place: line of the user's code.
        factor, across: as in ``Finding``.

    Returns:
        The finding, not yet caused by another.
    """
    facts = KINDS[kind]
    first = windows[0] if windows else None
    return Finding(
        kind=kind,
        severity=facts.severity if severity is None else severity,
        message=message,
        update=first.index if first else None,
        optimizer=first.optimizer if first else None,
        factor=factor,
        across=across,
        effect=facts.effect,
        mend=facts.mend(*frameworks(evidence, first)),
        place=place,
        updates=tuple(w.index for w in windows),
    )


def shows(found: Mapping[int, object] | Sequence[object], windows: Sequence[Window]) -> bool:
    """Whether at least half of some windows show a thing: a habit of the loop, no accident."""
    return bool(found) and 2 * len(found) >= len(windows)


def place_of(micro_batch: MicroBatch) -> Place | None:
    """Return the line of a backward."""
    return micro_batch.backward.site[0] if micro_batch.backward.site else None
