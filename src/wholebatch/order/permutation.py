"""A shuffle of 0 to n - 1 by index arithmetic: any place alone, in constant memory, both ways.

    value = L b + R,  L in 0..a-1, R in 0..b-1,  a = ceil(sqrt(n)),  b = ceil(n / a)
    round 0, 2, ...:  L <- (L + F(key, R)) mod a
    round 1, 3, ...:  R <- (R + F(key, L)) mod b
    again from the start while value >= n

Each round can be undone, so the whole is a permutation of 0 to a b - 1; walking on from a value outside
0 to n - 1 ends inside, because a permutation has only circles. Less than one walk in sqrt(n) goes on.
Up to `SORTED_VALUES` values the rectangle is too small for that to look random in every respect, and they
are sorted by random keys instead, which makes every order equally likely.

All of it is integer arithmetic modulo 2**64, the same on every platform.

Source: Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains" (the rectangle, the walk).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isqrt

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wholebatch.errors import PlanError

# Up to so many values are sorted by random keys; above it, this many rounds.
SORTED_VALUES = 4096
ROUNDS = 8
LARGEST_DOMAIN = 2**62
# 2**64 over the golden ratio, the step of SplitMix64.
GOLDEN_RATIO = np.uint64(0x9E3779B97F4A7C15)
# Values that pass through the rounds together: their temporaries stay in the processor's cache.
_BLOCK = 4096

Draw = Callable[[int], NDArray[np.uint64]]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Permutation:
    """A permutation of 0 to num_values - 1. Made by `draw_permutation`.

    Args:
        num_values: n, 1 to 2**62.
        sorted_values: the values in their order, where they are few; else None.
        round_keys: one 64-bit key a round; none where the values are sorted.
    """

    num_values: int
    sorted_values: NDArray[np.uint16] | None
    round_keys: tuple[int, ...]

    def at(self, places: ArrayLike) -> NDArray[np.int64]:
        """Return the values at some places.

        Args:
            places: whole numbers from 0 to num_values - 1, any shape; may repeat.

        Returns:
            The value at each place, in the shape of ``places``.

        Raises:
            PlanError: a place does not exist.
        """
        checked = _inside("place", places, self.num_values)
        if self.sorted_values is not None:
            return self.sorted_values[checked].astype(np.int64)
        return self._walk(checked, undo=False)

    def between(self, first: int, last: int) -> NDArray[np.int64]:
        """Return the values at the places ``first`` to ``last - 1``; time and memory in their number only.

        Args:
            first, last: places, 0 <= first <= last <= num_values.

        Returns:
            Shape (last - first,).

        Raises:
            PlanError: the places do not exist.
        """
        if not 0 <= first <= last <= self.num_values:
            raise PlanError(
                f"places {first} to {last} are not within the {self.num_values} that there are; "
                f"give 0 <= first <= last <= {self.num_values}"
            )
        if self.sorted_values is not None:
            return self.sorted_values[first:last].astype(np.int64)
        values = np.empty(last - first, dtype=np.int64)
        for begin in range(first, last, _BLOCK):
            end = min(begin + _BLOCK, last)
            places = np.arange(begin, end, dtype=np.int64)
            values[begin - first : end - first] = self._walk(places, undo=False)
        return values

    def places_of(self, values: ArrayLike) -> NDArray[np.int64]:
        """Return the places at which some values come: the inverse of `at`.

        Args:
            values: whole numbers from 0 to num_values - 1, any shape.

        Returns:
            The place of each value, in the shape of ``values``.

        Raises:
            PlanError: a value does not exist.
        """
        checked = _inside("value", values, self.num_values)
        if self.sorted_values is not None:
            return np.argsort(self.sorted_values, kind="stable")[checked]
        return self._walk(checked, undo=True)

    def _walk(self, start: NDArray[np.int64], *, undo: bool) -> NDArray[np.int64]:
        """Pass values through the rounds, those that leave 0 to n - 1 again until they are back."""
        flat = start.reshape(-1).astype(np.uint64)
        for begin in range(0, flat.size, _BLOCK):
            block = flat[begin : begin + _BLOCK]
            block[:] = self._rounds(block, undo=undo)
            outside = np.flatnonzero(block >= self.num_values)
            while outside.size:
                block[outside] = self._rounds(block[outside], undo=undo)
                outside = outside[block[outside] >= self.num_values]
        return flat.astype(np.int64).reshape(start.shape)

    def _rounds(self, values: NDArray[np.uint64], *, undo: bool) -> NDArray[np.uint64]:
        high, low = _rectangle(self.num_values)
        halves: list[NDArray[np.uint64]] = [values // np.uint64(low), values % np.uint64(low)]
        sizes = (high, low)
        order = range(len(self.round_keys))
        for number in reversed(order) if undo else order:
            side = number % 2
            size = np.uint64(sizes[side])
            added = _random_function(self.round_keys[number], halves[1 - side]) % size
            if undo:
                added = size - added
            halves[side] = (halves[side] + added) % size
        together: NDArray[np.uint64] = halves[0] * np.uint64(low) + halves[1]
        return together


def draw_permutation(num_values: int, draw: Draw) -> Permutation:
    """Draw a permutation of 0 to num_values - 1; every one equally likely up to `SORTED_VALUES` values.

    Args:
        num_values: n, 1 to 2**62.
        draw: returns so many random 64-bit numbers, the same at every call; decides the permutation. It
            is asked for ``num_values`` numbers where these are few, else for `ROUNDS`.

    Returns:
        The permutation; it holds 8 KiB at most.

    Raises:
        PlanError: num_values is outside its bounds.
    """
    if not 1 <= num_values <= LARGEST_DOMAIN:
        raise PlanError(f"a permutation of {num_values} values can't be drawn; give 1 to 2**62")
    if num_values <= SORTED_VALUES:
        order = np.argsort(draw(num_values), kind="stable").astype(np.uint16)
        order.setflags(write=False)
        return Permutation(num_values=num_values, sorted_values=order, round_keys=())
    return rounds_alone(num_values, draw(ROUNDS))


def rounds_alone(num_values: int, keys: NDArray[np.uint64]) -> Permutation:
    """Make a permutation by rounds, of however few values: one round for each key.

    Args:
        num_values: n, 1 to 2**62.
        keys: 64-bit numbers, one a round.
    """
    return Permutation(num_values=num_values, sorted_values=None, round_keys=tuple(map(int, keys)))


def _rectangle(num_values: int) -> tuple[int, int]:
    """Return a and b, as near each other as can be with a x b at least n, and under n + a."""
    high = isqrt(num_values - 1) + 1
    return high, -(-num_values // high)


def _random_function(key: int, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """F: the number that SplitMix64 gives at place ``values`` from the state ``key``."""
    return mix64(values * GOLDEN_RATIO + np.uint64(key))


def mix64(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix the bits of 64-bit numbers, one to one: the output step of SplitMix64.

    Source: Steele, Lea and Flood 2014, "Fast Splittable Pseudorandom Number Generators".
    """
    mixed = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def _inside(name: str, numbers: ArrayLike, num_values: int) -> NDArray[np.int64]:
    given = np.asarray(numbers)
    if given.size and not np.issubdtype(given.dtype, np.integer):
        raise PlanError(f"{name}s of dtype {given.dtype} are no whole numbers; give integers")
    wrong = given[(given < 0) | (given >= num_values)]
    if wrong.size:
        raise PlanError(
            f"{name} {wrong.flat[0]} does not exist; with {num_values} values it is 0 to {num_values - 1}"
        )
    return given.astype(np.int64)
