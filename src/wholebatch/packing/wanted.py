"""How many micro-batches each replica has to have, and what the ways to cut are compared by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
        shares: the micro-batches of each replica.
        rank: what is made small: the slowest replica's cost, then that of all, then the micro-batches.
    """

    shares: list[list[Group]]
    rank: tuple[int, int, int]


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
    numbers = [largest if wanted.equal else len(share) for share in shares]
    filled = [
        round_up(share, -(-number // wanted.multiple) * wanted.multiple)
        for share, number in zip(shares, numbers, strict=True)
    ]
    loads = [sum(map(price, share)) for share in filled]
    return Candidate(shares=filled, rank=(max(loads), sum(loads), sum(map(len, filled))))


def round_up(share: Sequence[Group], micro_batches: int) -> list[Group]:
    """Return the micro-batches of a replica, at least so many.

    The one with the most samples is cut in the middle, which never costs more positions; where no
    samples are left to cut, empty ones are added.
    """
    found = list(share)
    while len(found) < micro_batches:
        widest = max(range(len(found)), key=lambda each: (len(found[each]), -each), default=None)
        if widest is None or len(found[widest]) < 2:
            found.append(())
            continue
        half = (len(found[widest]) + 1) // 2
        found[widest : widest + 1] = [found[widest][:half], found[widest][half:]]
    return found
