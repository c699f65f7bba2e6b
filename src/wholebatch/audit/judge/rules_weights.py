"""Rules on what items weigh: unequal weights, totals, items that reached no gradient. No torch here."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from wholebatch.audit.judge.evidence import Evidence, Finding, MicroBatch, TermWeights, Window
from wholebatch.audit.judge.losing import losses_of
from wholebatch.audit.judge.reading import (
    Across,
    applied_windows,
    averages_weights,
    finding,
    is_near,
    num_forwards,
    number,
    optimizers_of,
    own,
    place_of,
    plural,
    seen_micro_batches,
    tolerance,
    updates_text,
)
from wholebatch.audit.judge.totals import is_right, judged_totals

NO_WEIGHT = 1e-9


def unequal_item_weights(evidence: Evidence) -> Iterable[Finding]:
    """Items of one term that count differently, by how they were cut up."""
    for optimizer in optimizers_of(evidence):
        seen = [
            (window, term, across, ratio)
            for window in applied_windows(evidence, optimizer)
            for term in window.terms
            for across, ratio in _spread(window, term)
        ]
        if not seen:
            yield from list(_unequal_as_far_as_known(evidence, optimizer)) or _divided_by_another(
                evidence, optimizer
            )
            continue
        # the first of those that show it best
        best = max(entry[3] for entry in seen)
        window, term, across, ratio = next(entry for entry in seen if entry[3] >= 0.99 * best)
        windows = list({w.index: w for w, *_ in seen}.values())
        found = finding(
            evidence,
            "unequal_item_weights",
            windows,
            f"In update {window.index}, {_unequal_text(term, across, ratio)}.",
            place=term.site,
            across=across,
        )
        yield replace(found, ratio=ratio)


def _unequal_as_far_as_known(evidence: Evidence, optimizer: int) -> Iterable[Finding]:
    """Loss weights that differ where kappa is not known: what is done to gradients later may mend it."""
    for window in applied_windows(evidence, optimizer):
        for term in window.relative_terms:
            spreads = [(a, ratio) for a, ratio in _spread(window, term) if a != "replicas"]
            if spreads:
                across, ratio = spreads[0]
                found = finding(
                    evidence,
                    "unequal_item_weights",
                    [window],
                    f"In update {window.index}, as far as the loss tells (what was done to gradients "
                    f"after it could not be told), {_unequal_text(term, across, ratio)}.",
                    severity="note",
                    place=term.site,
                    across=across,
                )
                yield replace(found, ratio=ratio)
                return


def _spread(window: Window, term: TermWeights) -> Iterator[tuple[Across, float]]:
    """Yield where the weights of a term differ, and how many times the lowest the highest is."""
    limit = 1 + 2 * tolerance(window)
    weights = {
        key: (low, high) for key, (n, low, high) in term.by_micro_batch.items() if n and high > NO_WEIGHT
    }
    if not weights or _is_mixture(window, term, limit):
        return
    yield from _cut_inside(window, term)
    inside = max(high / max(low, NO_WEIGHT) for low, high in weights.values())
    by_key = {key: (low + high) / 2 for key, (low, high) in weights.items()}
    if inside > limit:
        groups = _group_weights(window, term)
        if term.coefficients == "factors":
            return
        if not groups:
            yield "items", inside
            return
        by_key = groups
    by_rank: dict[int, list[float]] = {}
    for (rank, _), value in by_key.items():
        by_rank.setdefault(rank, []).append(value)
    ratio = max(by_key.values()) / min(by_key.values())
    if max(max(values) / min(values) for values in by_rank.values()) > limit:
        yield "micro_batches", ratio
    elif ratio > limit:
        yield "replicas", ratio


def _is_mixture(window: Window, term: TermWeights, limit: float) -> bool:
    """Whether terms over the same items weigh alike together, as the two of mixup do: lam and 1 - lam."""
    units = {key: n for key, (n, _, _) in term.by_micro_batch.items()}
    same = [t for t in window.terms if {key: n for key, (n, _, _) in t.by_micro_batch.items()} == units]
    sums = [sum(sum(t.by_micro_batch[key][1:]) for t in same) for key, n in units.items() if n]
    return len(same) > 1 and bool(sums) and min(sums) > 0 and max(sums) <= limit * min(sums)


def _cut_inside(window: Window, term: TermWeights) -> Iterator[tuple[Across, float]]:
    """Yield the spread of items behind means that were taken first and aren't those of sequences.

    Means of the forwards that one backward serves are means of micro-batches; pieces that are all of one
    length but the last are pieces of no meaning.
    """
    if term.unit != "group" or term.coefficients == "factors":
        return
    for m in [m for rank in window.micro_batches for m in own(window, rank)]:
        for seen in m.backward.terms:
            group, item = seen.levels[0], seen.levels[-1]
            spread = item.highest / item.lowest if item.lowest > 0 else 1.0
            if seen.key != term.key or group.unit != "group" or spread <= 1 + 2 * tolerance(window):
                continue
            # a model in several modules gets its samples several times
            numbers = [len(forward.samples) for forward in m.forwards]
            if group.num_units in (sum(numbers), *numbers):
                continue
            if group.num_units == m.backward.num_forwards > 1:
                yield "micro_batches", spread
            elif _is_cut_in_pieces(group.num_units, item.num_units, spread):
                yield "items", spread


def _is_cut_in_pieces(num_pieces: float, num_items: float, spread: float) -> bool:
    """Whether items fall into pieces of one whole length and a shorter last one."""
    length = num_items / (num_pieces - 1 + 1 / spread)
    last = length / spread
    return num_pieces > 2 and all(abs(x - round(x)) <= 1e-3 * x for x in (length, last))


def _entries(term: TermWeights) -> dict[tuple[int, int], tuple[float, float, float]]:
    """Return what micro-batches weigh that have items and were not lost."""
    return {key: entry for key, entry in term.by_micro_batch.items() if entry[0] and entry[2] > NO_WEIGHT}


def _group_weights(window: Window, term: TermWeights) -> dict[tuple[int, int], float]:
    """Return what one sequence weighs where the user's own code averaged by sequence first.

    Empty where it did not, or where sequences differ inside a micro-batch.
    """
    found: dict[tuple[int, int], float] = {}
    for rank in window.micro_batches:
        for m in own(window, rank):
            seen = [level for t in m.backward.terms if t.key == term.key for level in t.levels]
            groups = [level for level in seen if level.unit == "group" and level.lowest > 0]
            even = [g.lowest for g in groups if g.highest <= (1 + tolerance(window)) * g.lowest]
            if seen and not m.lost:
                if not even:
                    return {}
                found[rank, m.index] = even[0] * abs(1.0 if m.kappa is None else m.kappa)
    return {key: value for key, value in found.items() if value > 0}


def _unequal_text(term: TermWeights, across: Across, ratio: float) -> str:
    entries = _entries(term)
    most = max(entries, key=lambda key: entries[key][2])
    least = min(entries, key=lambda key: entries[key][1])
    times = number(ratio)
    if across == "items":
        low, high = entries[most][1], entries[most][2]
        if high <= 1.001 * low:  # the pieces themselves weigh alike
            return f"means of pieces are averaged, and items of a short piece count {times} times others"
        return (
            f"items of one micro-batch count differently: from {number(low)} to {number(high)} times "
            f"their share of 1/{number(term.num_units)}"
        )
    if across == "replicas":
        return (
            f"an item of rank {most[0]} counts {times} times an item of rank {least[0]}: each rank "
            f"divides by a denominator of its own"
        )
    shortest = min(entries, key=lambda key: entries[key][0])
    longest = max(entries, key=lambda key: entries[key][0])
    if (most, least) == (shortest, longest) or entries[most][0] < entries[least][0]:
        return (
            f"an item of the shortest micro-batch ({number(entries[most][0])} items) counts {times} "
            f"times an item of the longest ({number(entries[least][0])} items)"
        )
    first, second = most[1] + 1, least[1] + 1
    return f"an item of micro-batch {first} counts {times} times an item of micro-batch {second}"


def _divided_by_another(evidence: Evidence, optimizer: int) -> Iterable[Finding]:
    """A further term whose items weigh what the main term's weigh, whatever its own number of items."""
    windows = [w for w in applied_windows(evidence, optimizer) if len(w.terms) > 1]
    for position in range(max((len(w.terms) for w in windows), default=0)):
        pairs = [(w, w.terms[position], _main(w)) for w in windows if position < len(w.terms)]
        pairs = [(w, term, main) for w, term, main in pairs if main is not None and main is not term]
        if len(pairs) < 3 or len({(term.key, term.site) for _, term, _ in pairs}) > 1:
            continue
        totals = [term.total for _, term, _ in pairs]
        by_main = [term.total / term.num_units * main.num_units for _, term, main in pairs if main]
        # with the same number of main items in every update any fixed divisor would look like it
        told_apart = _varies([main.num_units for *_, main in pairs if main], 1e-2)
        if told_apart and _varies(totals, 1e-2) and not _varies(by_main, 2e-3):
            window, term, main = pairs[0]
            assert main is not None
            # what is scored everywhere is divided by what is found, by right, in detection
            over_more = all(one.num_units > other.num_units for _, one, other in pairs if other)
            yield finding(
                evidence,
                "unequal_item_weights",
                [w for w, *_ in pairs],
                f"The {number(term.num_units)} items of the further term {term.key} are divided by the "
                f"{number(main.num_units)} items of the main one: its weight is {number(totals[0])} in "
                f"update {window.index} and varies from {number(min(totals))} to {number(max(totals))}.",
                severity="note" if over_more else "wrong",
                place=term.site,
                across="micro_batches",
            )
            return


def _main(window: Window) -> TermWeights | None:
    return next((t for t in window.terms if abs(t.total - 1) <= tolerance(window)), None)


def _varies(values: Sequence[float], limit: float) -> bool:
    return max(values) - min(values) > limit * max(abs(value) for value in values)


def total_weight(evidence: Evidence) -> Iterable[Finding]:
    """All items together count for more or less than 1."""
    for optimizer in optimizers_of(evidence):
        wrong = [entry for entry in judged_totals(evidence, optimizer) if not entry.is_right]
        if not wrong:
            yield from _undivided_beside_divided(evidence, optimizer)
            continue
        full = [entry for entry in wrong if not entry.is_odd] or wrong
        grave = [entry for entry in full if entry.is_wrong] or full
        first = grave[0]
        yield finding(
            evidence,
            "total_weight",
            [entry.window for entry in grave],
            f"In update {first.window.index}, all items together weigh {number(first.factor)} instead "
            f"of 1: {first.meaning}.",
            severity="wrong" if first.is_wrong else "note",
            factor=first.factor,
            place=first.window.terms[0].site if first.window.terms else None,
        )


def _undivided_beside_divided(evidence: Evidence, optimizer: int) -> Iterable[Finding]:
    """A further loss that is not divided by the micro-batches, where the main one is."""
    applied = [w for w in applied_windows(evidence, optimizer) if seen_micro_batches(w) > 1]
    for key in dict.fromkeys(term.key for w in applied for term in w.terms):
        windows = [w for w in applied if _is_undivided(w, key)]
        if windows and len(windows) == len(applied):
            first = windows[0]
            size = seen_micro_batches(first)
            yield finding(
                evidence,
                "total_weight",
                windows,
                f"{updates_text([first])}, the further loss {key} is not divided by {size} micro-batches, "
                f"as the main one is: it weighs {size} times what is written.",
                factor=float(size),
                place=next(term.site for term in first.terms if term.key == key),
            )


def _is_undivided(window: Window, key: str) -> bool:
    main = _main(window)
    term = next((t for t in window.terms if t.key == key), None)
    size = float(seen_micro_batches(window))
    if main is None or term is None or term is main or term.site != main.site:
        return False
    for m in [m for rank in window.micro_batches for m in own(window, rank)]:
        read = {t.key: t for t in m.backward.terms}
        if key not in read or main.key not in read:
            return False
        if size in read[key].divided or size not in read[main.key].divided:
            return False
        factors = [factor for factor in read[key].multiplied if factor != m.backward.loss_scale]
        if abs(abs(term.total) - size * abs(math.prod(factors))) > tolerance(window) * abs(term.total):
            return False
    return True


def uncounted_items(evidence: Evidence) -> Iterable[Finding]:
    """Items that went through backward and are not in what the optimizer read."""
    for optimizer in optimizers_of(evidence):
        losses = losses_of(evidence, optimizer)
        windows = [
            w
            for w in applied_windows(evidence, optimizer)
            if losses.get(w.index, "") != "kept by hand" and _uncounted(w)
        ]
        if not windows:
            yield from _never_differentiated(evidence, optimizer)
            continue
        first = windows[0]
        lost = _uncounted(first)
        everything = sum(len(own(first, rank)) for rank in first.micro_batches)
        by_hand = all(losses.get(w.index) == "skipped by hand" for w in windows)
        apart = averages_weights(evidence, optimizer) and all(m.lost == "not reduced" for m in lost)
        yield finding(
            evidence,
            "uncounted_items",
            windows,
            f"{updates_text([first])}, {plural(len(lost), 'micro-batch')} of "
            f"{everything}{_items_text(lost)} reached no gradient that the optimizer read.",
            severity="note" if by_hand or apart else "wrong",
            place=place_of(lost[0]),
        )


def _never_differentiated(evidence: Evidence, optimizer: int) -> Iterable[Finding]:
    """Forwards that no backward followed, where the rest weighs just its part of what they all would."""
    found = [
        (w, forwards, backwards)
        for w in applied_windows(evidence, optimizer)
        for rank in list(w.micro_batches)[:1]
        if (forwards := num_forwards(w, rank)) > (backwards := len(own(w, rank))) > 0
        and w.total is not None
        and not is_right(w)
        and is_near(abs(w.total), backwards / forwards, w)
    ]
    if found:
        window, forwards, backwards = found[0]
        yield finding(
            evidence,
            "uncounted_items",
            [w for w, *_ in found],
            f"{updates_text([window])}, {forwards} micro-batches went through the model and "
            f"{backwards} through backward: the others reached no gradient.",
            place=place_of(own(window, next(iter(window.micro_batches)))[-1]),
        )


def _uncounted(window: Window) -> list[MicroBatch]:
    everything = [m for rank in window.micro_batches for m in own(window, rank)]
    lost = [m for m in everything if m.lost or m.kappa == 0]
    return [m for m in lost if not m.backward.terms or _num_items([m]) > 0]


def _num_items(micro_batches: Sequence[MicroBatch]) -> float:
    return sum(t.levels[-1].num_units for m in micro_batches for t in m.backward.terms[:1] if t.levels)


def _items_text(micro_batches: Sequence[MicroBatch]) -> str:
    items = _num_items(micro_batches)
    return f" ({number(items)} items)" if items else ""
