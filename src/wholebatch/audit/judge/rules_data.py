"""Rules on which samples are in an update, and on the randomness they meet. No torch here."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from wholebatch.audit.judge.evidence import Evidence, Finding, MicroBatch, Window
from wholebatch.audit.judge.reading import (
    applied_windows,
    finding,
    kept,
    loops,
    num_micro_batches,
    optimizers_of,
    own,
    place_of,
    plural,
    seen_micro_batches,
    shows,
    tolerance,
    trace_of,
    updates_text,
)
from wholebatch.audit.judge.totals import is_right
from wholebatch.audit.trace import RankTrace

# samples that agree in fewer bits than this may agree by chance
BITS_BY_CHANCE = 24.0
# frameworks that seed all ranks alike by themselves, whatever the script says
SEEDING = ("transformers", "trl")
Pair = tuple[MicroBatch, MicroBatch]


def _samples(m: MicroBatch) -> tuple[int, ...]:
    return tuple(sample for forward in m.forwards for sample in forward.samples)


def _bits(m: MicroBatch) -> float:
    """Return how many bits the inputs of a micro-batch have, about: few values, few bits."""
    bits = 0.0
    for forward in m.forwards:
        elements, values = math.prod(forward.shape), forward.num_distinct_values
        few = values < min(elements, 256) or elements < 8
        bits += elements * (math.log2(max(values, 1)) if few else 32.0)
    return bits


def _trains(window: Window, rank: int) -> list[list[MicroBatch]]:
    """Return a rank's micro-batches by loop, without those that a closure of the step ran again."""
    return loops([m for m in kept(window, rank) if m.lost == "" and _samples(m)])


def _ranks_of_replicas(evidence: Evidence, window: Window) -> list[int]:
    """Return one rank of each replica."""
    first: dict[int, int] = {}
    for rank in sorted(window.micro_batches):
        first.setdefault(trace_of(evidence, rank).replica, rank)
    return list(first.values())


def _same_across(evidence: Evidence, window: Window) -> Iterator[Pair]:
    """Yield micro-batches of two replicas that hold the same samples."""
    seen: dict[tuple[int, tuple[int, ...]], MicroBatch] = {}
    for rank in _ranks_of_replicas(evidence, window):
        for number, group in enumerate(_trains(window, rank)):
            for m in group:
                key = (number, tuple(sorted(_samples(m))))
                other = seen.setdefault(key, m)
                if other.rank != rank:
                    yield other, m


def _same_within(window: Window) -> Iterator[Pair]:
    """Yield micro-batches of one rank and loop that hold the same samples."""
    for rank in window.micro_batches:
        for group in _trains(window, rank):
            seen: dict[tuple[int, ...], MicroBatch] = {}
            for m in group:
                other = seen.setdefault(tuple(sorted(_samples(m))), m)
                if other is not m and not (other.backward.in_step and m.backward.in_step):
                    yield other, m


def duplicate_samples(evidence: Evidence) -> Iterable[Finding]:
    """The same samples more than once in an update."""
    for optimizer in optimizers_of(evidence):
        applied = applied_windows(evidence, optimizer)
        across = [(w, pairs) for w in applied if (pairs := list(_same_across(evidence, w)))]
        within = [(w, pairs) for w in applied if (pairs := list(_same_within(w)))]
        if _is_sure(across) and shows(across, applied):
            yield _duplicates(
                evidence, across, "wrong", "rank {0} and rank {1} had the same samples in {2}"
            )
        elif _is_sure(within):
            fixed = len({_samples(m) for w in applied for r in w.micro_batches for m in own(w, r)}) == 1
            restarted = any(_begins_inside(w) for w, _ in within)
            severe = shows(within, applied) and (restarted or not fixed)
            text = "{2} had the same samples as another one of the same update on rank {0}"
            yield _duplicates(evidence, within, "wrong" if severe else "note", text)
        else:
            yield from _overlap(evidence, applied)


def _begins_inside(window: Window) -> bool:
    """Whether a pass over data begins between a window's backwards: the same one, fetched again."""
    for rank in window.micro_batches:
        positions = [m.position for m in kept(window, rank)]
        begins = [p for p, e in window.events.get(rank, ()) if e.kind == "pass" and e.value == 1.0]
        if positions and any(min(positions) < p < max(positions) for p in begins):
            return True
    return False


def _is_sure(found: Sequence[tuple[Window, list[Pair]]]) -> bool:
    return sum(_bits(pair[0]) for _, pairs in found for pair in pairs) >= BITS_BY_CHANCE


def _duplicates(
    evidence: Evidence, found: Sequence[tuple[Window, list[Pair]]], severity: str, text: str
) -> Finding:
    window, pairs = found[0]
    one, other = pairs[0]
    what = text.format(one.rank, other.rank, plural(len(pairs), "micro-batch"))
    return finding(
        evidence,
        "duplicate_samples",
        [w for w, _ in found],
        f"{updates_text([window])}, {what}.",
        severity="wrong" if severity == "wrong" else "note",
        place=place_of(other),
    )


def _overlap(evidence: Evidence, applied: Sequence[Window]) -> Iterable[Finding]:
    """Some samples on two replicas: what a sampler repeats to fill up the last batch."""
    for window in applied:
        owner: dict[int, int] = {}
        shared = 0
        micro_batches = []
        for rank in _ranks_of_replicas(evidence, window):
            for m in [m for group in _trains(window, rank)[:1] for m in group]:
                again = [s for s in _samples(m) if owner.setdefault(s, rank) != rank]
                shared += len(again)
                micro_batches += [m] if again else []
        if micro_batches and sum(_bits(m) for m in micro_batches) >= 4 * BITS_BY_CHANCE:
            yield finding(
                evidence,
                "duplicate_samples",
                [window],
                f"{updates_text([window])}, {plural(shared, 'sample')} of one replica were on another as "
                f"well: samplers repeat some to fill up the last batch of a pass.",
                severity="note",
                place=place_of(micro_batches[0]),
            )
            return


def unequal_micro_batch_counts(evidence: Evidence) -> Iterable[Finding]:
    """Ranks with different numbers of micro-batches in one update, or a rank that waited for ever."""
    for optimizer in optimizers_of(evidence) if len(evidence.traces) > 1 else ():
        windows = [w for w in applied_windows(evidence, optimizer) if len(set(_numbers(evidence, w))) > 1]
        stalled = _stalled(evidence, optimizer)
        if stalled:
            yield stalled
        elif windows:
            wrong = [w for w in windows if _comes_out_wrong(w)]
            first = (wrong or windows)[0]
            end = "their items don't count alike" if wrong else "the update came out right"
            if not wrong and any(w.total is None for w in windows):
                end = "what items weigh could not be judged"
            yield finding(
                evidence,
                "unequal_micro_batch_counts",
                wrong or windows,
                f"{updates_text([first])}, ranks had {_listed(_numbers(evidence, first))} micro-batches; "
                f"{end}.",
                severity="wrong" if wrong else "note",
                place=next((place_of(m) for rank in first.micro_batches for m in own(first, rank)), None),
            )


def _listed(numbers: Sequence[int]) -> str:
    return f"{', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"


def _numbers(evidence: Evidence, window: Window) -> list[int]:
    """Return the micro-batches of each replica; none of one whose loop had ended before this update."""
    found = {
        trace_of(evidence, rank).replica: num_micro_batches(own(window, rank))
        for rank in _ranks_of_replicas(evidence, window)
    }
    for trace in evidence.traces:
        if trace.ended in ("finished", "exit") and trace.rank not in window.micro_batches:
            found.setdefault(trace.replica, 0)
    return [found[replica] for replica in sorted(found)]


def _comes_out_wrong(window: Window) -> bool:
    if window.total is None or window.unjudged is not None:
        return False
    unequal = any(
        t.highest > (1 + 2 * tolerance(window)) * t.lowest
        for t in window.terms
        if t.coefficients != "factors"
    )
    return unequal or not is_right(window)


def _stalled(evidence: Evidence, optimizer: int) -> Finding | None:
    """Return the finding where a rank ended while another waited for it."""
    ends = {trace.rank: "dry" if _ran_dry(trace) else trace.ended for trace in evidence.traces}
    numbers = [_begun(trace) for trace in evidence.traces]
    waits = [r for r, end in ends.items() if end == "stalled"]
    failed = [r for r, end in ends.items() if end == "failed"]
    through = [r for r, end in ends.items() if end in ("finished", "exit", "audited", "dry")]
    if optimizer or not (waits or (failed and through)):
        return None
    apart = len(waits) == len(ends) and {_waits_held_back(t) for t in evidence.traces} == {True, False}
    if len(set(numbers)) == 1 and not apart:
        return None
    rank = (waits or failed)[0]
    last = [e.place for e in trace_of(evidence, rank).events if e.place is not None]
    windows = [w for w in evidence.windows if w.optimizer == optimizer][-1:]
    return finding(
        evidence,
        "unequal_micro_batch_counts",
        windows,
        "Ranks wait for each other in backward, some of them in the last micro-batch of an update and "
        "others not."
        if len(set(numbers)) == 1
        else f"Ranks had {_listed(numbers)} micro-batches in all: rank {rank} waited for a reduction that "
        f"the other never came to.",
        place=last[-1] if last else None,
    )


def _ran_dry(trace: RankTrace) -> bool:
    """Return whether a rank had no more data where it asked for some."""
    return trace.ended == "failed" and (trace.failure or "").startswith("StopIteration")


def _waits_held_back(trace: RankTrace) -> bool | None:
    """Return whether the last micro-batch of an open update held its reduction back; None without one."""
    events = [event for event in trace.events if event.kind in ("forward", "backward", "step", "skip")]
    last = (events[-1].forward or events[-1].backward) if events else None
    return None if last is None else last.holds_reduction


def _begun(trace: RankTrace) -> int:
    """Return the micro-batches that a rank began: a backward that waits for ever has no event."""
    kinds = [event.kind for event in trace.events if event.kind in ("forward", "backward")]
    waits = trace.ended in ("stalled", "failed") and not _ran_dry(trace) and kinds[-1:] == ["forward"]
    return kinds.count("backward") + waits


def coupled_samples(evidence: Evidence) -> Iterable[Finding]:
    """A loss of a batch against itself, or a quotient of two of its sums, micro-batch by micro-batch."""
    for optimizer in optimizers_of(evidence):
        applied = [w for w in applied_windows(evidence, optimizer) if seen_micro_batches(w) > 1]
        windows = [w for w in applied if _squares(w)]
        quotients = [w for w in applied if _quotients(w)]
        if quotients and not windows:
            yield finding(
                evidence,
                "coupled_samples",
                quotients,
                f"{updates_text(quotients[:1])}, the loss is a quotient of two sums over a micro-batch, "
                f"and the mean of {seen_micro_batches(quotients[0])} of them is not the whole's.",
                severity="note",
                place=place_of(_quotients(quotients[0])[0]),
            )
        if windows:
            first = windows[0]
            sizes = [
                int(t.levels[-1].num_units)
                for m in _squares(first)[:1]
                for t in m.backward.terms
                if t.square
            ]
            yield finding(
                evidence,
                "coupled_samples",
                windows,
                f"{updates_text([first])}, each sample is compared with the {sizes[0]} of its own "
                f"micro-batch only: the "
                f"{seen_micro_batches(first)} micro-batches see none of each other's.",
                place=place_of(_squares(first)[0]),
            )


def _squares(window: Window) -> list[MicroBatch]:
    micro_batches = [m for rank in window.micro_batches for m in kept(window, rank)]
    return [m for m in micro_batches if any(t.square and not t.surrogate for t in m.backward.terms)]


def _quotients(window: Window) -> list[MicroBatch]:
    micro_batches = [m for rank in window.micro_batches for m in kept(window, rank)]
    return [m for m in micro_batches if any(t.quotient for t in m.backward.terms)]


def same_randomness(evidence: Evidence) -> Iterable[Finding]:
    """Dropout that drew the same numbers twice."""
    for optimizer in optimizers_of(evidence):
        applied = applied_windows(evidence, optimizer)
        across = [(w, pairs) for w in applied if (pairs := list(_same_state_across(evidence, w)))]
        within = [(w, pairs) for w in applied if (pairs := list(_same_state_within(w)))]
        found = within or across
        if not found:
            continue
        window, pairs = found[0]
        one, other = pairs[0]
        where = (
            f"{len(pairs) + 1} micro-batches of rank {one.rank} drew"
            if within
            else f"rank {one.rank} and rank {other.rank} drew, in {plural(len(pairs), 'micro-batch')},"
        )
        yield finding(
            evidence,
            "same_randomness",
            [w for w, _ in found],
            f"{updates_text([window])}, {where} the same dropout masks.",
            severity="note" if not within and evidence.intent.framework in SEEDING else None,
            place=place_of(other),
        )


def _states(m: MicroBatch) -> tuple[int, ...]:
    return tuple(f.random_state for f in m.forwards if f.num_dropout)


def _same_state_across(evidence: Evidence, window: Window) -> Iterator[Pair]:
    ranks = _ranks_of_replicas(evidence, window)
    first = [m for m in kept(window, ranks[0]) if _states(m)] if ranks else []
    for rank in ranks[1:]:
        others = [m for m in kept(window, rank) if _states(m)]
        yield from ((a, b) for a, b in zip(first, others, strict=False) if _states(a) == _states(b))


def _same_state_within(window: Window) -> Iterator[Pair]:
    for rank in window.micro_batches:
        for group in loops([m for m in kept(window, rank) if m.lost == "" and _states(m)]):
            seen: dict[tuple[int, ...], MicroBatch] = {}
            for m in group:
                other = seen.setdefault(_states(m), m)
                if other is not m and not (other.backward.in_step and m.backward.in_step):
                    yield other, m
