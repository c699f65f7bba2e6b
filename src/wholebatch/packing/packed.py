"""Cut samples into packed rows: positions = summed tokens, one row a micro-batch.

What a sample costs doesn't depend on the others of its row, so that evenness is a matter of who gets
which sample, and the rows a matter of the budget alone. Two ways are tried: deal samples to the replicas
and fill rows in each, which is the most even; or fill rows and deal those, which needs the fewest where
the budget is tight.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from heapq import heapify, heapreplace

import numpy as np

from wholebatch.packing.balance import deal
from wholebatch.packing.cost import Samples
from wholebatch.packing.wanted import Candidate, Group, Wanted, candidate, round_up

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
    has_empty = any(len(share) < number for share, number in zip(first.shares, first.numbers, strict=True))
    if not wanted.equal or not has_empty or sum(first.numbers) > num_samples:
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
        yield candidate([[rows[row] for row in share] for share in dealt], wanted, price)
