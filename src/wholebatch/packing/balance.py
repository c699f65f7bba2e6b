"""Deal micro-batches, or samples, to the replicas so that the slowest has least.

Longest first to the replica that has least so far; then the slowest exchanges with the fastest ones
as long as that helps. All costs are whole numbers and ties go to the lower index.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from heapq import heapify, heappop, heapreplace

# Replicas, fastest first, that the slowest tries to exchange with before the search ends.
_PARTNERS = 8
# Things that may be given, of those that the slowest has; of more, every second or third and so on.
_GIVEN = 256
# Exchanges at most: so many, and so many for each replica.
_EXCHANGES, _EXCHANGES_PER_REPLICA = 64, 8

Entry = tuple[int, int]  # cost and index, so that sorting breaks ties by index


class Loads:
    """What each replica costs so far, in order, so that a change needs no look at all of them."""

    def __init__(self, loads: Sequence[int]) -> None:
        self.of = list(loads)
        self._ordered = sorted((load, replica) for replica, load in enumerate(loads))

    def slowest(self) -> int:
        """Return the replica with the most, of equal ones the first."""
        most = self._ordered[-1][0]
        return self._ordered[bisect_left(self._ordered, (most, -1))][1]

    def fastest(self, how_many: int) -> list[int]:
        """Return the replicas with the least, of equal ones the first ones first."""
        return [replica for _, replica in self._ordered[:how_many]]

    def add(self, replica: int, cost: int) -> None:
        """Add a cost, which may be negative, to what a replica has."""
        del self._ordered[bisect_left(self._ordered, (self.of[replica], replica))]
        self.of[replica] += cost
        insort(self._ordered, (self.of[replica], replica))


def deal(costs: Sequence[int], replicas: int, most: int | None = None) -> list[list[int]]:
    """Return the indices that each replica gets, its summed cost as even as the search makes it.

    Args:
        costs: of each thing that is dealt.
        replicas: D.
        most: things that a replica gets at most; D times as many have to hold all.
    """
    if replicas == 1:
        return [list(range(len(costs)))]
    shares: list[list[Entry]] = [[] for _ in range(replicas)]
    heap = [(0, replica) for replica in range(replicas)]
    heapify(heap)
    for index in sorted(range(len(costs)), key=lambda each: (-costs[each], each)):
        load, replica = heap[0]
        shares[replica].append((costs[index], index))
        if len(shares[replica]) == most:
            heappop(heap)
        else:
            heapreplace(heap, (load + costs[index], replica))
    for share in shares:
        share.sort()
    even_out(shares, most)
    return [[index for _, index in share] for share in shares]


def even_out(shares: list[list[Entry]], most: int | None = None) -> None:
    """Let the slowest replica exchange with the fastest ones while its cost falls, in place."""
    loads = Loads([sum(cost for cost, _ in share) for share in shares])
    bound = -(-sum(loads.of) // len(loads.of))
    for _ in range(_EXCHANGES + _EXCHANGES_PER_REPLICA * len(shares)):
        slow = loads.slowest()
        if loads.of[slow] <= bound:
            return
        for fast in loads.fastest(_PARTNERS):
            room = most is None or len(shares[fast]) < most
            gap = loads.of[slow] - loads.of[fast]
            found = _best_exchange(shares[slow], shares[fast], gap, room=room)
            if found is not None:
                given, taken = found
                _exchange(shares[slow], shares[fast], given, taken)
                moved = given[0] - (taken[0] if taken else 0)
                loads.add(slow, -moved)
                loads.add(fast, moved)
                break
        else:
            return


def _best_exchange(
    slow: list[Entry], fast: list[Entry], gap: int, *, room: bool
) -> tuple[Entry, Entry | None] | None:
    """Return what the slow share gives and takes so that the larger of the two falls most."""
    best: tuple[Entry, Entry | None] | None = None
    gain = 0
    for given in slow[:: len(slow) // _GIVEN + 1]:
        # Half the gap is the best to move.
        where = bisect_left(fast, (given[0] - gap // 2, -1))
        for taken in fast[max(where - 1, 0) : where + 1]:
            moved = given[0] - taken[0]
            if min(moved, gap - moved) > gain:
                best, gain = (given, taken), min(moved, gap - moved)
        if room and min(given[0], gap - given[0]) > gain:
            best, gain = (given, None), min(given[0], gap - given[0])
    return best


def _exchange(slow: list[Entry], fast: list[Entry], given: Entry, taken: Entry | None) -> None:
    slow.remove(given)
    insort(fast, given)
    if taken is not None:
        fast.remove(taken)
        insort(slow, taken)
