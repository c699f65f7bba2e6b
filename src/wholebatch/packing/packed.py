"""Cut samples into packed rows: positions = summed tokens, one row a micro-batch.

What a sample costs doesn't depend on the others of its row, so that evenness is a matter of who gets
which sample, and the rows a matter of the budget alone. Two ways are tried: deal samples to the replicas
and fill rows in each, which is the most even; or fill rows, deal those and exchange samples of equal
enough length, which needs the fewest rows where the budget is tight.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from heapq import heapify, heapreplace

import numpy as np

from wholebatch.packing.balance import PARTNERS, deal
from wholebatch.packing.cost import Samples
from wholebatch.packing.wanted import Candidate, Group, Wanted, candidate, round_up

# Samples compared with rows at most, in all exchanges together: among more rows, dealing evens them out.
_COMPARED = 10_000
# A slowest replica within one part in so many of the least that there can be is not searched further.
_GOOD_ENOUGH = 1000

Rows = list[list[int]]  # places of samples among all, longest first


def fewest_rows(samples: Samples) -> int:
    """Return a number of rows below which no packing can be: by tokens, and by samples over half a row.

    For each bound on what is small, those over half a row have a row each, and those between small and
    half fill what is left beside them, or rows of their own.

    Source: Martello and Toth 1990, Knapsack Problems, section 8.3.2, bound L2.
    """
    budget, alone = samples.budget, int((samples.lengths > samples.budget).sum())
    lengths = samples.lengths[alone:][::-1]
    summed = np.concatenate([[0], np.cumsum(lengths)])
    half = int(np.searchsorted(lengths, budget // 2, side="right"))
    small = np.concatenate([[0], np.unique(lengths[:half])])
    first = np.searchsorted(lengths, small)
    beside = np.searchsorted(lengths, budget - small, side="right")  # the longer ones take nothing small
    room = (beside - half) * budget - (summed[beside] - summed[half])
    left = summed[half] - summed[first] - room
    return alone + len(lengths) - half + int(np.maximum(-(-left // budget), 0).max())


def best_fit(places: Sequence[int], lengths: Sequence[int], budget: int) -> Rows:
    """Fill rows, longest sample first, each into the row with the least room that takes it."""
    rows: Rows = []
    rooms: list[tuple[int, int]] = []  # of each open row, smallest first, with its number
    shortest = min((lengths[place] for place in places), default=0)
    for place in places:
        length = lengths[place]
        found = bisect_left(rooms, (length, -1))
        if found < len(rooms):
            room, row = rooms.pop(found)
            rows[row].append(place)
        else:
            room, row = budget, len(rows)
            rows.append([place])
        if room - length >= shortest:
            insort(rooms, (room - length, row))
    return rows


def even_rows(samples: Samples, num_rows: int) -> Rows | None:
    """Fill exactly so many rows, longest sample first, each into the row with the fewest tokens.

    None where one doesn't fit, or where there are fewer samples than rows.
    """
    lengths, budget = samples.lengths.tolist(), samples.budget
    alone = sum(length > budget for length in lengths)
    if not alone < num_rows <= len(lengths):
        return None
    rows: Rows = [[place] for place in range(alone)] + [[] for _ in range(num_rows - alone)]
    filled = [(0, row) for row in range(alone, num_rows)]
    heapify(filled)
    for place in range(alone, len(lengths)):
        tokens, row = filled[0]
        if tokens + lengths[place] > budget:
            return None
        rows[row].append(place)
        heapreplace(filled, (tokens + lengths[place], row))
    return rows


def packed_candidates(samples: Samples, wanted: Wanted, fewest: int) -> Iterator[Candidate]:
    """Yield ways to fill rows and deal; ``fewest`` rows are needed at least."""
    costs: list[int] = samples.costs.tolist()
    lengths, base, num_samples = samples.lengths.tolist(), samples.base, len(samples.lengths)

    def price(group: Group) -> int:
        return base + sum(costs[place] for place in group)

    shares = [sorted(share) for share in deal(costs, wanted.replicas)]
    first = candidate([best_fit(share, lengths, samples.budget) for share in shares], wanted, price)
    has_empty = any(not group for share in first.shares for group in share)
    if not wanted.equal or not has_empty or sum(map(len, first.shares)) > num_samples:
        yield first
        least = max(first.rank[1] // wanted.replicas, base + costs[0])
        in_fewest = first.rank[2] <= wanted.replicas * wanted.per_replica(fewest)
        if in_fewest and first.rank[0] <= least + least // _GOOD_ENOUGH:
            return
    filled = best_fit(range(num_samples), lengths, samples.budget)
    per_replica = wanted.per_replica(len(filled))
    num_rows = min(num_samples, wanted.replicas * per_replica)
    ways = [even_rows(samples, num_rows), round_up(filled, num_rows)]
    if not wanted.equal and len(filled) < num_rows:
        ways.append(filled)
    for rows in ways:
        if rows is None:
            continue
        dealt = deal([price(row) for row in rows], wanted.replicas, per_replica if wanted.equal else None)
        kept = [list(row) for row in rows]
        exchange_samples(samples, kept, dealt)
        yield candidate([[kept[row] for row in share] for share in dealt], wanted, price)


def exchange_samples(samples: Samples, rows: Rows, shares: list[list[int]]) -> None:
    """Let the slowest replica exchange samples with the fastest ones while its cost falls, in place.

    Rows stay with their replicas and within the budget, and none gets empty: a sample is given for one
    that costs less.
    """
    costs, lengths = samples.costs.tolist(), samples.lengths.tolist()
    # Each replica keeps its rows, so that what they cost by themselves counts and never changes.
    loads = [
        sum(samples.base + sum(costs[place] for place in rows[row]) for row in share) for share in shares
    ]
    compared = 0
    while compared < _COMPARED:
        order = sorted(range(len(shares)), key=lambda each: (loads[each], each))
        slow = max(range(len(shares)), key=lambda each: (loads[each], -each))
        num_given = sum(len(rows[row]) for row in shares[slow])
        for fast in order[:PARTNERS]:
            compared += num_given * len(shares[fast])
            if compared > _COMPARED:
                return
            gap = loads[slow] - loads[fast]
            found = _best_exchange(samples, (costs, lengths), rows, (shares[slow], shares[fast]), gap)
            if found is not None:
                break
        else:
            return
        giver, given, taker, taken = found
        rows[giver].remove(given)
        rows[taker].remove(taken)
        insort(rows[taker], given)
        insort(rows[giver], taken)
        moved = costs[given] - costs[taken]
        loads[slow] -= moved
        loads[fast] += moved


def _best_exchange(
    samples: Samples,
    values: tuple[list[int], list[int]],
    rows: Rows,
    pair: tuple[list[int], list[int]],
    gap: int,
) -> tuple[int, int, int, int] | None:
    """Return row and sample that the slow replica gives, and row and sample that it takes."""
    costs, lengths = values
    rooms = [samples.budget - sum(lengths[place] for place in rows[row]) for row in pair[1]]
    best, gain = None, 0
    for giver in pair[0]:
        for given in rows[giver]:
            target = bisect_left(costs, gap // 2 - costs[given], key=_minus)
            for taker, room in zip(pair[1], rooms, strict=True):
                row = rows[taker]
                where = bisect_left(row, target)
                for taken in row[max(where - 1, 0) : where + 1]:
                    moved = costs[given] - costs[taken]
                    fits = lengths[given] - lengths[taken] <= room
                    if fits and min(moved, gap - moved) > gain:
                        best, gain = (giver, given, taker, taken), min(moved, gap - moved)
    return best


def _minus(cost: int) -> int:
    return -cost
