"""How many micro-batches each replica has to have, and what the ways to cut are compared by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappush, heapreplace

Group = Sequence[int]  # the samples of a micro-batch, as places in the order of length


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What is asked of the numbers of micro-batches.

    Args:
        replicas: D.
        multiple: what the micro-batches of a replica are a multiple of.
        equal: whether all replicas have the same number.
    """

    replicas: int
    multiple: int
    equal: bool

    def per_replica(self, micro_batches: int) -> int:
        """Return the micro-batches of each replica where at least so many are shared out evenly."""
        rounded = self.replicas * self.multiple
        return -(-micro_batches // rounded) * self.multiple

    def fewest(self, micro_batches: int) -> int:
        """Return the least micro-batches over all replicas where the budget alone needs so many."""
        if self.equal:
            return self.replicas * self.per_replica(micro_batches)
        return -(-micro_batches // self.multiple) * self.multiple


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One way to cut.

    Args:
        shares: the micro-batches of each replica, none of them empty.
        numbers: of micro-batches of each replica; what is more than its share is empty.
        rank: what is made small: the slowest replica's cost, then that of all, then the micro-batches.
    """

    shares: list[list[Group]]
    numbers: list[int]
    rank: tuple[int, int, int]

    @property
    def order(self) -> tuple[int, int, int, int]:
        """What candidates are compared by: first the empty micro-batches, which can't be collated."""
        return sum(self.numbers) - sum(map(len, self.shares)), *self.rank


def candidate(
    shares: Sequence[Sequence[Group]], wanted: Wanted, price: Callable[[Group], int]
) -> Candidate:
    """Return shares with as many micro-batches as are asked for, and their rank.

    Args:
        shares: the micro-batches of each replica.
        wanted: what is asked of their numbers.
        price: the cost of a micro-batch in whole numbers.
    """
    largest = max(len(share) for share in shares)
    needed = [largest if wanted.equal else len(share) for share in shares]
    numbers = [-(-number // wanted.multiple) * wanted.multiple for number in needed]
    filled = [round_up(share, number) for share, number in zip(shares, numbers, strict=True)]
    loads = [
        sum(map(price, share)) + (number - len(share)) * price(())
        for share, number in zip(filled, numbers, strict=True)
    ]
    return Candidate(shares=filled, numbers=numbers, rank=(max(loads), sum(loads), sum(numbers)))


def round_up(share: Sequence[Group], micro_batches: int) -> list[Group]:
    """Return the micro-batches of a replica, so many where there are samples enough.

    The one with the most samples is cut in the middle, which never costs more positions; of equal ones the
    first. Where none has two samples, the rest is left to be empty ones.
    """
    if len(share) >= micro_batches:
        return list(share)
    # Parts as size, micro-batch and first place in it, so that the widest and then the first comes first.
    parts = [(-len(group), number, 0) for number, group in enumerate(share)]
    heapify(parts)
    while parts and len(parts) < micro_batches and parts[0][0] < -1:
        size, number, start = parts[0]
        half = (1 - size) // 2
        heapreplace(parts, (-half, number, start))
        heappush(parts, (size + half, number, start + half))
    parts.sort(key=lambda part: part[1:])
    return [share[number][start : start - size] for size, number, start in parts]
