"""From the traces of all ranks to the evidence: windows, kappas and what items weigh."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from wholebatch.audit.judge.evidence import INFERRED, Evidence, MicroBatch, TermWeights, Window
from wholebatch.audit.judge.fits import num_directions
from wholebatch.audit.judge.follow import RankWindow, Waiting, follow
from wholebatch.audit.judge.kappa import Measured, clip_factor, is_low, measure
from wholebatch.audit.judge.loops import Site, loops_of
from wholebatch.audit.judge.weights import LOW_TOLERANCE, TOLERANCE, entries, main_term, weigh
from wholebatch.audit.trace import Intent, RankTrace, Sketches

_NOT_MEASURED = Measured(kappas={})


def assemble(traces: Sequence[RankTrace]) -> Evidence:
    """Put together what all ranks saw.

    Args:
        traces: of all ranks.

    Returns:
        Evidence: windows of all optimizers with what their items weigh.
    """
    ordered = sorted(traces, key=lambda trace: trace.rank)
    by_rank = {trace.rank: trace for trace in ordered}
    followed = {rank: follow(trace) for rank, trace in by_rank.items()}
    num_replicas = max((trace.num_replicas for trace in ordered), default=1)
    windows: list[tuple[float, Window]] = []
    for optimizer in range(max((len(found) for found in followed.values()), default=0)):
        parts = {rank: found[optimizer] for rank, found in followed.items() if optimizer < len(found)}
        windows += _windows_of(optimizer, parts, by_rank, num_replicas)
    windows.sort(key=lambda pair: pair[0])
    made = [window for _, window in windows]
    return Evidence(traces=ordered, windows=made, intent=_intent(ordered, made), num_replicas=num_replicas)


def _windows_of(
    optimizer: int,
    parts: Mapping[int, Sequence[RankWindow]],
    traces: Mapping[int, RankTrace],
    num_replicas: int,
) -> Iterator[tuple[float, Window]]:
    """The windows of one optimizer, each with the position of its step."""
    first = traces[min(parts)]
    directions = num_directions(list(_sketches(traces.values())), first.optimizers[optimizer].parameters)
    cut: list[tuple[dict[int, RankWindow], Window]] = []
    for number in range(max((len(found) for found in parts.values()), default=0)):
        ranks = {rank: found[number] for rank, found in parts.items() if number < len(found)}
        index = number + 1 + first.num_skipped_updates
        cut.append((ranks, _assembled(optimizer, index, ranks, traces)))
    usual = _usual_number([window for _, window in cut]) or 1
    for ranks, window in cut:
        judged = window.complete and not window.skipped
        measured = measure(ranks, traces, optimizer, directions) if judged else _NOT_MEASURED
        window = _measured(window, measured, ranks, traces)
        if judged:
            window = _weighed(window, measured, traces, (num_replicas, usual))
        ends = [part.events[-1][0] for _, part in sorted(ranks.items()) if part.end is not None]
        yield ends[0] if ends else math.inf, window


def _sketches(traces: Iterable[RankTrace]) -> Iterator[Sketches]:
    for trace in traces:
        for event in trace.events:
            if event.backward is not None:
                yield event.backward.delivered
            elif event.before is not None:
                yield event.before


def _assembled(
    optimizer: int, index: int, ranks: Mapping[int, RankWindow], traces: Mapping[int, RankTrace]
) -> Window:
    """A window without kappas."""
    ends = {rank: part.end for rank, part in ranks.items() if part.end is not None}
    parameters = traces[min(ranks)].optimizers[optimizer].parameters
    clips = [clip_factor(part, optimizer, parameters) for _, part in sorted(ranks.items())]
    return Window(
        index=index,
        optimizer=optimizer,
        micro_batches={rank: tuple(_micro_batches(part)) for rank, part in ranks.items()},
        events={rank: part.events for rank, part in ranks.items()},
        edges=ends,
        skipped=bool(ends) and all(end.kind == "skip" for end in ends.values()),
        clip_factor=next((clip for clip in clips if clip is not None), None),
        complete=bool(ends),
    )


def _micro_batches(part: RankWindow) -> Iterator[MicroBatch]:
    def made(waiting: Waiting, index: int, carried: bool = False) -> MicroBatch:
        cleared = waiting in part.cleared
        return MicroBatch(
            rank=part.rank,
            index=index,
            position=waiting.position,
            backward=waiting.backward,
            forwards=waiting.forwards,
            kappa=0.0 if cleared else None,
            lost="cleared" if cleared else "",
            carried=carried,
            foreign=waiting.position in part.foreign,
        )

    older = sorted([*part.ghosts, *part.carried], key=lambda waiting: waiting.position)
    for i, waiting in enumerate(older):
        yield made(waiting, i - len(older), carried=True)
    current = sorted([*part.own, *part.cleared], key=lambda waiting: waiting.position)
    for i, waiting in enumerate(current):
        yield made(waiting, i)


def _measured(
    window: Window, measured: Measured, ranks: Mapping[int, RankWindow], traces: Mapping[int, RankTrace]
) -> Window:
    """The window with kappas; ranks of one replica have the same."""
    stand_ins = {}
    for rank in sorted(ranks):
        stand_ins[rank] = next(r for r in sorted(ranks) if traces[r].replica == traces[rank].replica)
    reader = min((rank for rank, part in ranks.items() if part.end is not None), default=0)
    micro_batches = {}
    for rank, found in window.micro_batches.items():
        positions = [m.position for m in window.micro_batches[stand_ins[rank]]]
        ghosts = {waiting.position for waiting in ranks[rank].ghosts}
        kept = []
        for i, micro_batch in enumerate(found):
            position = positions[i] if i < len(positions) else micro_batch.position
            kappa = measured.kappas.get((stand_ins[rank], position), micro_batch.kappa)
            if micro_batch.position in ghosts and not kappa:
                continue
            kept.append(replace(micro_batch, kappa=kappa, lost=_lost(micro_batch, kappa, reader)))
        micro_batches[rank] = tuple(kept)
    return replace(
        window,
        micro_batches=micro_batches,
        ranks_agree=measured.ranks_agree,
        uniform_kappa=measured.uniform,
        per_parameter_kappa=measured.per_parameter,
        odd_parameters=measured.odd_parameters,
        unexplained=measured.unexplained,
    )


def _lost(
    micro_batch: MicroBatch, kappa: float | None, reader: int
) -> Literal["", "cleared", "not reduced"]:
    if kappa != 0.0 or micro_batch.carried:
        return ""
    if micro_batch.lost or micro_batch.rank == reader:
        return "cleared"
    return "not reduced"


def _representatives(window: Window, traces: Mapping[int, RankTrace]) -> list[MicroBatch]:
    """The micro-batches of one rank of each replica."""
    ranks: dict[int, int] = {}
    for rank in sorted(window.micro_batches):
        ranks.setdefault(traces[rank].replica, rank)
    return [m for rank in ranks.values() for m in window.micro_batches[rank]]


def _loops(window: Window) -> Mapping[Site, Site]:
    return loops_of(
        [[m.backward for m in found if not m.carried] for _, found in sorted(window.micro_batches.items())]
    )


def _weighed(
    window: Window, measured: Measured, traces: Mapping[int, RankTrace], layout: tuple[int, int]
) -> Window:
    """The window with what its items weigh; ``layout`` is (replicas, usual number of micro-batches)."""
    own = [m for m in _representatives(window, traces) if not m.carried and not m.foreign]
    if not own:
        unjudged = measured.reason if any(end.before for end in window.edges.values()) else None
        return replace(window, unjudged=unjudged)
    loops = _loops(window)
    unread = _unread(own)
    if measured.reason is not None or any(m.kappa is None for m in own):
        terms = weigh(entries(own, loops, measured=False), *layout)
        reason = measured.reason or "some micro-batches' part in the gradients could not be measured"
        return replace(window, unjudged=reason, relative_terms=terms)
    trace = traces[min(window.edges)]
    low = _is_low(window, trace)
    terms = weigh(entries(own, loops, measured=True), *layout, low=low)
    main = main_term(terms, LOW_TOLERANCE if low else TOLERANCE)
    if main is None:
        return replace(window, unjudged=unread or "the loss has no terms whose weights mean anything")
    return _with_main(replace(window, terms=terms, unjudged=unread), main)


def _with_main(window: Window, main: TermWeights) -> Window:
    return replace(
        window,
        total=main.total,
        lowest=main.lowest,
        highest=main.highest,
        num_items=main.num_units,
    )


def _is_low(window: Window, trace: RankTrace) -> bool:
    end = window.edges[trace.rank]
    return any(is_low(trace, p, end) for p in trace.optimizers[window.optimizer].parameters)


def _unread(own: Sequence[MicroBatch]) -> str | None:
    """Why the terms of some backward could not be read."""
    for micro_batch in own:
        backward = micro_batch.backward
        if backward.unread is not None or not backward.terms:
            place = f"the loss at {backward.site[0]}" if backward.site else "a loss"
            return f"{place} could not be read: {backward.unread or 'it has no reduction that is known'}"
    return None


def _intent(traces: Sequence[RankTrace], windows: Sequence[Window]) -> Intent:
    """What somebody said of an update, else what most windows are."""
    told = [intent for trace in traces for intent in trace.intents]
    for one in told:
        intent = one if one.micro_batches is not None else _by_samples(one, traces)
        if intent is not None:
            return intent
    known = told[0] if told else Intent()
    return replace(known, micro_batches=_usual_number(windows), source=INFERRED)


def _by_samples(intent: Intent, traces: Sequence[RankTrace]) -> Intent | None:
    """Micro-batches of a global batch that was said in samples: N / (samples of most micro-batches x D).

    None where nobody said it, samples were not seen, or they don't divide it.
    """
    events = [event for trace in traces for event in trace.events]
    sizes = Counter(len(e.forward.samples) for e in events if e.forward is not None and e.forward.samples)
    if intent.global_batch_samples is None or not sizes:
        return None
    usual = max(sizes, key=lambda size: (sizes[size], size))
    number, rest = divmod(intent.global_batch_samples, usual * traces[0].num_replicas)
    return replace(intent, micro_batches=number) if number and not rest else None


def _usual_number(windows: Sequence[Window]) -> int | None:
    """The most common number of backwards of one loop in a complete window; the larger of two."""
    numbers: Counter[int] = Counter()
    for window in windows:
        if not window.complete:
            continue
        loops = _loops(window)
        for rank in window.edges:
            own = [m for m in window.micro_batches[rank] if not m.carried and not m.foreign]
            numbers.update(Counter(loops[m.backward.site] for m in own).values())
    return max(numbers, key=lambda number: (numbers[number], number), default=None)
