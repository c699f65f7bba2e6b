"""Cut samples into padded micro-batches: positions = longest x samples.

Only cuts of the samples *sorted by length* are looked at, and nothing is lost by that. Take any
micro-batches, longest first, and refill them from the sorted samples in the same sizes: those after
the first i hold no longer samples than before, so no micro-batch gets longer, none dearer, and none
over the budget. What is left to choose is where to cut and who gets what.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from itertools import pairwise
from math import isqrt

import numpy as np

from wholebatch.packing.balance import Loads, deal
from wholebatch.packing.cost import LARGEST_COST, Samples, Whole
from wholebatch.packing.wanted import Candidate, Group, Wanted, candidate

# Numbers that the search for the cheapest cuts looks at, at most: beyond that it looks near given cuts
# only, several times, and among still more micro-batches, where next to no padding is left, not at all.
_WORK, _NEAR_MICRO_BATCHES, _NEAR_ROUNDS = 150_000, 2048, 3
# Samples up to which the best number of micro-batches is searched exactly.
_EXACT_SAMPLES = 4096
_BISECTIONS, _BISECTIONS_OF_MANY = 24, 10
# How much dearer than in the most even cuts, in percent, a micro-batch of the cheapest cuts may be.
_LIMITS = (0, 10)
# A slowest replica within one part in so many of the least that there can be is not searched further.
_GOOD_ENOUGH = 1000
# Times that the micro-batches of some cuts are dealt, with the cuts moved between; then how many moves
# there are at most, of so many samples each.
_DEALS = 3
_MOVES, _MOVES_PER_REPLICA = 32, 4
_MOVED = (1, 2, 3, 5, 8, 16)

Cuts = list[int]  # the first sample of each micro-batch, and the number of samples at the end


def most_samples(samples: Samples) -> Whole:
    """Return how many samples a micro-batch may have that begins with each; 1 beyond the budget."""
    return np.maximum(samples.budget // samples.lengths, 1)


def fewest_cuts(samples: Samples) -> Cuts:
    """Return the cuts into the fewest micro-batches: each takes what the budget allows, longest first."""
    return _greedy((np.arange(len(samples.lengths)) + most_samples(samples)).tolist())


def least_dearest(samples: Samples, micro_batches: int) -> int:
    """Return what the dearest of so many micro-batches costs at least, without its base."""
    most, costs, places = most_samples(samples), samples.costs, np.arange(len(samples.lengths))
    low, high = int(costs[0]), int((costs * np.minimum(most, len(places) - places)).max())
    for _ in range(_BISECTIONS if len(places) <= _EXACT_SAMPLES else _BISECTIONS_OF_MANY):
        if low >= high:
            break
        limit = (low + high) // 2
        if len(_greedy((places + np.minimum(most, limit // costs)).tolist())) - 1 <= micro_batches:
            high = limit
        else:
            low = limit + 1
    return high


def spread_cuts(samples: Samples, following: list[int], micro_batches: int) -> Cuts:
    """Return cuts at even shares of the padded cost, moved to where the rest can still be cut.

    ``following`` is the farthest end of a micro-batch that begins with each sample.
    """
    num_samples = len(following)
    full = np.array(_greedy(following))
    costs = samples.costs[full[:-1]]
    summed = np.concatenate([[0], np.cumsum((full[1:] - full[:-1]) * costs)])
    share, rest = divmod(int(summed[-1]), micro_batches)
    numbers = np.arange(1, micro_batches + 1)
    shares = share * numbers + rest * numbers // micro_batches
    group = np.searchsorted(summed, shares) - 1
    wanted = full[group] - (summed[group] - shares) // costs[group]
    cuts = [0]
    for place, within in zip(wanted.tolist(), _ranges(following, micro_batches)[1:], strict=True):
        cuts.append(min(max(place, within.start, cuts[-1] + 1), following[cuts[-1]], within.stop - 1))
    assert cuts[-1] == num_samples
    return cuts


def cheapest_cuts(samples: Samples, limit: int, start: Cuts) -> Cuts:
    """Return the cuts into as many micro-batches as ``start`` has that cost least together.

    ``cost(k, j) = min over i < j of cost(k - 1, i) + base + (j - i) x cost of sample i``, for each k
    only over the places j that k micro-batches reach and from where the others reach the end. Exact up to
    some hundred samples, and the best near ``start`` beyond.

    Args:
        samples: longest first.
        limit: the largest cost of one micro-batch; those of ``start`` are within it.
        start: some cuts within the budget.
    """
    num_samples, micro_batches = len(samples.lengths), len(start) - 1
    if micro_batches > _NEAR_MICRO_BATCHES:
        return start
    most = np.minimum(most_samples(samples), (limit - samples.base) // samples.costs)
    ranges = _ranges((np.arange(num_samples) + most).tolist(), micro_batches)
    if sum(len(before) * len(after) for before, after in pairwise(ranges)) <= _WORK:
        return _cheapest_within(samples, most, ranges)
    cuts, near = start, isqrt(_WORK // micro_batches) // 2
    for _ in range(_NEAR_ROUNDS):
        narrow = [
            range(max(each.start, cut - near), min(each.stop, cut + near + 1))
            for each, cut in zip(ranges, cuts, strict=True)
        ]
        found = _cheapest_within(samples, most, narrow)
        if found == cuts:
            break
        cuts = found
    return cuts


def _cheapest_within(samples: Samples, most: Whole, ranges: list[range]) -> Cuts:
    """Return the cheapest cuts of which each lies in its range."""
    cost, origins = np.zeros(1, dtype=np.int64), []
    for before, after in pairwise(ranges):
        starts = np.arange(before.start, before.stop)
        widths = np.arange(after.start, after.stop)[:, None] - starts
        fits = (widths > 0) & (widths <= most[starts])
        summed = np.where(fits, cost + widths * samples.costs[starts], LARGEST_COST)
        origin = summed.argmin(axis=1)
        origins.append(origin)
        cost = np.minimum(summed[np.arange(len(origin)), origin], LARGEST_COST)
    found = [ranges[-1].start]
    for (before, after), origin in zip(reversed([*pairwise(ranges)]), reversed(origins), strict=True):
        found.append(before.start + int(origin[found[-1] - after.start]))
    return found[::-1]


def _ranges(following: list[int], micro_batches: int) -> list[range]:
    """Return between which places the k-th cut has to lie, for all k."""
    num_samples = len(following)
    needed = [0] * (num_samples + 1)  # micro-batches from each place to the end, at least
    for place in range(num_samples - 1, -1, -1):
        needed[place] = 1 + needed[min(following[place], num_samples)]
    highest = [0]
    while len(highest) <= micro_batches:
        last = highest[-1]
        highest.append(num_samples if last == num_samples else min(following[last], num_samples))
    found, place = [], 0
    for cuts, high in enumerate(highest):
        left = micro_batches - cuts
        place = max(place, cuts)
        while needed[place] > left:
            place += 1
        # No micro-batch is empty: as many samples are left as there are micro-batches.
        found.append(range(place, min(high, num_samples - left) + 1))
    return found


def cheapest_of_all(samples: Samples) -> Cuts:
    """Return the cuts that cost least together, into however many micro-batches.

    ``cost(j) = min over i < j of cost(i) + base + (j - i) x cost of sample i``. Exact up to 4,096
    samples; of more, the best of some even cuts.
    """
    num_samples, costs, most = len(samples.lengths), samples.costs, most_samples(samples).tolist()
    if num_samples > _EXACT_SAMPLES:
        return _about_cheapest(samples)
    places, least = np.arange(num_samples + 1), np.zeros(num_samples + 1, dtype=np.int64)
    origins, first = [0], 0
    for end in range(1, num_samples + 1):
        while first + most[first] < end:
            first += 1
        summed = least[first:end] + (end - places[first:end]) * costs[first:end]
        best = int(summed.argmin())
        least[end] = summed[best] + samples.base
        origins.append(first + best)
    cuts = [num_samples]
    while cuts[-1]:
        cuts.append(origins[cuts[-1]])
    return cuts[::-1]


def _about_cheapest(samples: Samples) -> Cuts:
    places, costs, most = np.arange(len(samples.lengths)), samples.costs, most_samples(samples)
    largest = int((costs * np.minimum(most, len(places) - places)).max())
    best, best_cost = fewest_cuts(samples), LARGEST_COST
    for quarters in range(4, 65):
        sizes = np.maximum(np.minimum(most, 4 * largest // quarters // costs), 1)
        cuts = np.array(_greedy((places + sizes).tolist()))
        padded = int(((cuts[1:] - cuts[:-1]) * costs[cuts[:-1]]).sum())
        cost = padded + samples.base * (len(cuts) - 1)
        if cost >= best_cost:
            break
        best, best_cost = cuts.tolist(), cost
    return best


def _greedy(following: list[int]) -> Cuts:
    cuts, where, end = [0], 0, len(following)
    while where < end:
        where = following[where]
        cuts.append(min(where, end))
    return cuts


def split_cuts(samples: Samples, cuts: Cuts, micro_batches: int) -> Cuts:
    """Return the cuts with more of them, up to so many micro-batches, each where it saves most."""
    if len(cuts) > micro_batches:
        return cuts
    costs = samples.costs
    starts, ends = np.array(cuts[:-1]), np.array(cuts[1:])
    # More than this a cut can't save: the padding if all samples were as short as the shortest.
    padding = (ends - starts) * (costs[starts] - costs[ends - 1])
    heap = list(zip((-padding).tolist(), starts.tolist(), ends.tolist(), strict=True))
    alone = [start for _, start, end in heap if end - start == 1]
    heap = [each for each in heap if each[2] - each[1] > 1]
    heapify(heap)
    while len(heap) + len(alone) < micro_batches:
        _, start, end = heappop(heap)
        inner = np.arange(start + 1, end)
        cut = start + 1 + int(((end - inner) * (costs[start] - costs[inner])).argmax())
        for first, last in ((start, cut), (cut, end)):
            if last - first == 1:
                alone.append(first)
            else:
                heappush(heap, (int((first - last) * (costs[first] - costs[last - 1])), first, last))
    return [*sorted([*alone, *(start for _, start, _ in heap)]), cuts[-1]]


def move_cuts(samples: Samples, cuts: Cuts, shares: list[list[int]]) -> Cuts:
    """Let the slowest replica give samples to the neighbours of its micro-batches while its cost falls.

    Who has which micro-batch stays; a micro-batch gives its last samples to the next one in the order of
    length, or its first ones to the one before.
    """
    cuts, costs, base = list(cuts), samples.costs.tolist(), samples.base
    most = most_samples(samples).tolist()
    owner = {group: replica for replica, share in enumerate(shares) for group in share}
    prices = [base + (end - start) * costs[start] for start, end in pairwise(cuts)]
    loads = Loads([sum(prices[group] for group in share) for share in shares])
    for _ in range(_MOVES + _MOVES_PER_REPLICA * len(shares)):
        slow = loads.slowest()
        best, found = loads.of[slow], None
        for group in shares[slow]:
            for move in _moves(cuts, group, most):
                other, first, sizes = move
                kept, grown = base + sizes[0] * costs[first[0]], base + sizes[1] * costs[first[1]]
                fallen = loads.of[slow] - prices[group] + kept
                risen = (fallen if owner[other] == slow else loads.of[owner[other]]) + grown - prices[other]
                worst = risen if owner[other] == slow else max(fallen, risen)
                if worst < best:
                    best, found = worst, (group, move, (kept, grown))
        if found is None:
            break
        group, (other, first, _), new = found
        cuts[max(group, other)] = max(first)
        for each, price in zip((group, other), new, strict=True):
            loads.add(owner[each], price - prices[each])
            prices[each] = price
    return cuts


def _moves(
    cuts: Cuts, group: int, most: list[int]
) -> Iterator[tuple[int, tuple[int, int], tuple[int, int]]]:
    """Yield the other micro-batch, and first sample and size of both, of what the budget allows."""
    start, end = cuts[group], cuts[group + 1]
    for moved in _MOVED:
        if moved >= end - start:
            return
        if group + 2 < len(cuts):
            first, size = end - moved, cuts[group + 2] - end + moved
            if size <= most[first]:
                yield group + 1, (start, first), (end - start - moved, size)
        if group:
            first, size = cuts[group - 1], start + moved - cuts[group - 1]
            if size <= most[first]:
                yield group - 1, (start + moved, first), (end - start - moved, size)


def padded_candidates(samples: Samples, wanted: Wanted, fewest: int) -> Iterator[Candidate]:
    """Yield ways to cut and deal; ``fewest`` micro-batches are needed at least."""
    costs, base = samples.costs.tolist(), samples.base

    def price(group: Group) -> int:
        return base + len(group) * costs[group[0]] if group else base

    best: Candidate | None = None
    cheapest = cheapest_of_all(samples)
    for micro_batches in _numbers(samples, wanted, fewest, len(cheapest) - 1):
        most = wanted.per_replica(micro_batches) if wanted.equal else None
        known = cheapest if micro_batches == len(cheapest) - 1 else None
        for cuts in _all_cuts(samples, micro_batches, known, evenly=wanted.replicas > 1):
            prices = [price(range(start, end)) for start, end in pairwise(cuts)]
            if best is not None and sum(prices) > best.rank[0] * wanted.replicas:
                continue  # no deal makes the slowest cheaper than the mean
            for found in _dealt(samples, cuts, wanted, most):
                now = candidate(found, wanted, price)
                yield now
                best = now if best is None or now.order < best.order else best
                least = max(sum(prices) // wanted.replicas, base + costs[0])
                if best.rank[0] <= least + least // _GOOD_ENOUGH:
                    break
            assert best is not None
            if best.rank[0] <= least + least // _GOOD_ENOUGH:
                break


def _dealt(samples: Samples, cuts: Cuts, wanted: Wanted, most: int | None) -> Iterator[list[list[Group]]]:
    """Yield the micro-batches of each replica, and those after the slowest gave samples away."""
    for _ in range(_DEALS if wanted.replicas > 1 else 1):
        groups = [range(start, end) for start, end in pairwise(cuts)]
        prices = [samples.base + len(group) * int(samples.costs[group.start]) for group in groups]
        shares = deal(prices, wanted.replicas, most)
        yield [[groups[number] for number in share] for share in shares]
        moved = move_cuts(samples, cuts, shares)
        if moved == cuts:
            return
        cuts = moved


def _numbers(samples: Samples, wanted: Wanted, fewest: int, cheapest: int) -> list[int]:
    """Return the numbers of micro-batches to try, none below the fewest nor above the samples."""
    rounded = wanted.replicas * wanted.multiple
    below = max(wanted.per_replica(fewest), cheapest // rounded * wanted.multiple)
    # Among many, one more or less costs nothing, and whole rounds are even.
    tried = [] if wanted.equal or len(samples.lengths) > _EXACT_SAMPLES else [cheapest]
    tried += [wanted.replicas * below, wanted.replicas * (below + wanted.multiple)]
    return list(dict.fromkeys(min(number, len(samples.lengths)) for number in tried))


def _all_cuts(
    samples: Samples, micro_batches: int, cheapest: Cuts | None, *, evenly: bool
) -> Iterator[Cuts]:
    """Yield the cheapest cuts and the most even ones, and cuts between the two."""
    if cheapest is None:
        start = split_cuts(samples, fewest_cuts(samples), micro_batches)
        cheapest = cheapest_cuts(samples, LARGEST_COST, start)
    yield cheapest
    if evenly:
        dearest = least_dearest(samples, micro_batches)
        sizes = np.minimum(most_samples(samples), dearest // samples.costs)
        following = (np.arange(len(sizes)) + sizes).tolist()
        yield spread_cuts(samples, following, micro_batches)
        start = split_cuts(samples, _greedy(following), micro_batches)
        for more in _LIMITS:
            yield cheapest_cuts(samples, samples.base + dearest + dearest * more // 100, start)
