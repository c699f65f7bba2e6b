"""The shuffle by index arithmetic: a permutation at any size, that looks random, in constant memory."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from math import factorial, isqrt

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rounds import values_computed
from wholebatch.errors import PlanError
from wholebatch.order.permutation import (
    LARGEST_DOMAIN,
    ROUNDS,
    SORTED_VALUES,
    Permutation,
    draw_permutation,
    rounds_alone,
)

quick = settings(max_examples=100, deadline=None)


def keys_of(seed: int) -> Callable[[int], np.ndarray]:
    """Random 64-bit numbers that a seed decides."""
    return lambda how_many: np.random.Philox(key=seed).random_raw(how_many)


def by_rounds(num_values: int, seed: int, rounds: int = ROUNDS) -> Permutation:
    return rounds_alone(num_values, keys_of(seed)(rounds))


SIZES = st.one_of(
    st.integers(1, 200),
    st.integers(SORTED_VALUES - 3, SORTED_VALUES + 3),
    st.integers(1, 30_000),
    st.sampled_from([1, 2, 3, 5, 4099, 8191, 10_007, 16_384, 19_997]),
)


@given(num_values=SIZES, seed=st.integers(0, 2**64 - 1), drawn=st.booleans())
@quick
def test_every_value_comes_once_and_is_found_again(num_values: int, seed: int, drawn: bool) -> None:
    """By sorting and by rounds, the latter at sizes too where they are not used."""
    shuffle = draw_permutation(num_values, keys_of(seed)) if drawn else by_rounds(num_values, seed)
    values = shuffle.between(0, num_values)
    assert np.array_equal(np.sort(values), np.arange(num_values))
    assert np.array_equal(shuffle.places_of(values), np.arange(num_values))


@given(num_values=SIZES, seed=st.integers(0, 2**32), data=st.data())
@quick
def test_any_place_alone_is_what_it_is_among_all(num_values: int, seed: int, data: st.DataObject) -> None:
    shuffle = draw_permutation(num_values, keys_of(seed))
    values = shuffle.between(0, num_values)
    first = data.draw(st.integers(0, num_values))
    last = data.draw(st.integers(first, min(num_values, first + 50)))
    assert np.array_equal(shuffle.between(first, last), values[first:last])
    places = data.draw(st.lists(st.integers(0, num_values - 1), max_size=20))
    assert shuffle.at(places).tolist() == values[places].tolist()
    assert shuffle.at(np.array(places, dtype=np.uint32).reshape(-1, 1)).shape == (len(places), 1)


def mixed(state: int, number: int) -> int:
    """SplitMix64 in Python's own integers, which have no size to overflow."""
    value = (state + number * 0x9E3779B97F4A7C15) % 2**64
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
    return value ^ value >> 31


def walked(num_values: int, keys: list[int], value: int) -> int:
    """The rule of the file's head, value by value."""
    high = isqrt(num_values)
    high += high * high < num_values
    low = (num_values + high - 1) // high
    while True:
        left, right = divmod(value, low)
        for number, key in enumerate(keys):
            if number % 2 == 0:
                left = (left + mixed(key, right)) % high
            else:
                right = (right + mixed(key, left)) % low
        value = left * low + right
        if value < num_values:
            return value


@pytest.mark.parametrize(
    "num_values",
    [1, 2, 3, 7, 4097, 10**6 + 3, 2**32 + 1, 10**12, 2**53, 2**61 + 1, LARGEST_DOMAIN - 57, LARGEST_DOMAIN],
)
def test_the_arithmetic_is_that_of_whole_numbers_of_any_size(num_values: int) -> None:
    keys = [int(key) for key in keys_of(5)(ROUNDS)]
    places = sorted({0, 1 % num_values, num_values // 3, num_values // 2, num_values - 1})
    shuffle = by_rounds(num_values, 5)
    assert shuffle.at(places).tolist() == [walked(num_values, keys, place) for place in places]
    assert shuffle.places_of(shuffle.at(places)).tolist() == places


@pytest.mark.parametrize("num_values", [10**12, 2**53 - 111, LARGEST_DOMAIN])
def test_a_slice_of_an_immense_order_has_no_value_twice(num_values: int) -> None:
    shuffle = draw_permutation(num_values, keys_of(1))
    values = shuffle.between(num_values - 20_000, num_values)
    assert len(np.unique(values)) == 20_000
    assert 0 <= values.min() < num_values // 1000
    assert num_values - num_values // 1000 < values.max() < num_values
    assert np.array_equal(shuffle.places_of(values), np.arange(num_values - 20_000, num_values))


def test_the_orders_are_those_that_they_were() -> None:
    """Runs that resume rely on them; whoever changes them gives ORDER_RULE another name."""
    assert by_rounds(11, 0).between(0, 11).tolist() == PINNED[11]
    assert draw_permutation(7, keys_of(0)).between(0, 7).tolist() == PINNED[7]
    assert draw_permutation(SORTED_VALUES, keys_of(0)).between(0, 4).tolist() == PINNED[SORTED_VALUES]
    assert draw_permutation(10**12, keys_of(0)).between(0, 4).tolist() == PINNED[10**12]


PINNED = {
    7: [0, 2, 1, 5, 4, 3, 6],
    11: [8, 0, 9, 7, 1, 2, 4, 6, 3, 5, 10],
    SORTED_VALUES: [1926, 3556, 3085, 2561],
    10**12: [880769733958, 54440220716, 975133065771, 664474211221],
}


# Does it look random? Each statistic of many drawn orders is compared with its distribution over all
# orders; the bounds are the points that chance passes once in a thousand on either side. Seeds are fixed.


def bounds(freedom: int) -> tuple[float, float]:
    """The 0.1% and 99.9% points of chi-square (Wilson and Hilferty's approximation)."""
    low, high = (
        freedom * (1 - 2 / (9 * freedom) + z * (2 / (9 * freedom)) ** 0.5) ** 3 for z in (-3.09, 3.09)
    )
    return low, high


def test_the_bounds_are_those_of_the_tables() -> None:
    assert bounds(23) == pytest.approx((7.529, 49.728), rel=0.02)
    assert bounds(100) == pytest.approx((61.92, 149.45), rel=0.002)


def chi_square(seen: np.ndarray) -> float:
    expected = seen.sum() / seen.size
    return float(((seen - expected) ** 2 / expected).sum())


def orders(num_values: int, how_many: int, rounds: int = ROUNDS) -> Iterator[np.ndarray]:
    for seed in range(how_many):
        yield by_rounds(num_values, seed, rounds).between(0, num_values)


CELLS = 16
# Just above the size at which sorting ends, where the rectangle is smallest: 4112 = 16 x 257.
SMALLEST = 4112
LOW = -(-SMALLEST // (isqrt(SMALLEST - 1) + 1))  # b of the rectangle


def pairs(distance: int, rounds: int = ROUNDS, how_many: int = 300) -> float:
    """Chi-square of (value, value at a distance), in 16 x 16 cells; 225 degrees of freedom."""
    seen = np.zeros(CELLS * CELLS)
    for values in orders(SMALLEST, how_many, rounds):
        cell = values * CELLS // SMALLEST
        both = cell[: SMALLEST - distance] * CELLS + cell[distance:]
        seen += np.bincount(both, minlength=CELLS * CELLS)
    return chi_square(seen)


@pytest.mark.parametrize("distance", [1, 2, LOW - 1, LOW, LOW + 1, SMALLEST // 2])
def test_neighbours_of_any_distance_are_independent(distance: int) -> None:
    low, high = bounds(225)
    assert low < pairs(distance) < high


def test_half_the_rounds_would_be_seen() -> None:
    """Places in the same column of the rectangle stay related through 4 rounds."""
    assert pairs(LOW, rounds=4) > 5 * bounds(225)[1]


def test_every_place_gets_every_value() -> None:
    seen = np.zeros((CELLS, CELLS))
    for values in orders(SMALLEST, 300):
        cell = (values * CELLS // SMALLEST).reshape(CELLS, -1)
        seen += [np.bincount(each, minlength=CELLS) for each in cell]
    low, high = bounds((CELLS - 1) ** 2)
    assert low < chi_square(seen) < high


def test_fixed_points_and_ascents_and_serial_correlation() -> None:
    """Of 300 orders: fixed points Poisson(1); ascents and correlation of neighbours normal."""
    fixed, ascents, correlations = [], [], []
    for values in orders(SMALLEST, 300):
        fixed.append(int((values == np.arange(SMALLEST)).sum()))
        ascents.append(int((values[1:] > values[:-1]).sum()))
        correlations.append(float(np.corrcoef(values[:-1], values[1:])[0, 1]))
    assert abs(np.mean(fixed) - 1) < 3.3 / 300**0.5
    assert abs(np.var(fixed) - 1) < 0.35
    spread = ((SMALLEST + 1) / 12) ** 0.5  # of the Eulerian numbers
    assert abs(np.mean(ascents) - (SMALLEST - 1) / 2) < 3.3 * spread / 300**0.5
    assert 0.75 < np.std(ascents) / spread < 1.25
    assert abs(np.mean(correlations) + 1 / SMALLEST) < 3.3 / (SMALLEST * 300) ** 0.5
    assert 0.75 < np.std(correlations) * SMALLEST**0.5 < 1.25


def orders_of_few(num_values: int, make: Callable[[int, int], Permutation]) -> float:
    """Chi-square of how often each order of so few values comes."""
    seen: Counter[tuple[int, ...]] = Counter()
    for seed in range(60 * factorial(num_values)):
        seen[tuple(make(num_values, seed).between(0, num_values).tolist())] += 1
    return chi_square(np.array([*seen.values(), *[0] * (factorial(num_values) - len(seen))]))


@pytest.mark.parametrize("num_values", [2, 3, 4, 5])
def test_all_orders_of_a_few_values_come_equally_often(num_values: int) -> None:
    found = orders_of_few(num_values, lambda size, seed: draw_permutation(size, keys_of(seed)))
    assert found < bounds(factorial(num_values) - 1)[1]


def test_by_rounds_alone_they_would_not() -> None:
    """Why few values are sorted: 8 rounds in a rectangle of 3 x 2 prefer some of the 120 orders."""
    assert orders_of_few(5, by_rounds) > 1.5 * bounds(119)[1]


# Cost


def test_few_values_are_walked_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a rectangle of a x b less than a places lie outside: fewer than one walk in sqrt(n) goes on."""
    seen = values_computed(monkeypatch)
    for num_values in (4097, 10_007, 99_991):
        seen.clear()
        by_rounds(num_values, 0).between(0, num_values)
        assert num_values <= sum(seen) <= num_values + 2 * isqrt(num_values)


@pytest.mark.parametrize("num_values", [SORTED_VALUES, 10**6, LARGEST_DOMAIN])
def test_memory_is_constant(num_values: int) -> None:
    """Beside the values that were asked for, under 1 MiB, at any size."""
    asked = min(num_values, 300_000)
    tracemalloc.start()
    try:
        shuffle = draw_permutation(num_values, keys_of(0))
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        values = shuffle.between(num_values - asked, num_values)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 16 * 1024
    assert peak - values.nbytes < 2**20


# What is refused


@pytest.mark.parametrize("num_values", [0, -1, LARGEST_DOMAIN + 1])
def test_sizes_that_can_not_be_are_refused(num_values: int) -> None:
    with pytest.raises(
        PlanError, match=rf"permutation of {num_values} values can't be drawn; give 1 to 2\*\*62"
    ):
        draw_permutation(num_values, keys_of(0))


@pytest.mark.parametrize("num_values", [10, 5000])
def test_places_and_values_that_do_not_exist_are_refused(num_values: int) -> None:
    shuffle = draw_permutation(num_values, keys_of(0))
    for wrong in (-1, num_values, 2**63):
        with pytest.raises(
            PlanError, match=f"place {wrong} does not exist; with {num_values} values it is 0"
        ):
            shuffle.at([wrong])
    with pytest.raises(PlanError, match=f"value {num_values} does not exist; .* is 0 to {num_values - 1}"):
        shuffle.places_of([0, num_values])
    with pytest.raises(PlanError, match="places of dtype float64 are no whole numbers"):
        shuffle.at([0.5])
    for first, last in ((-1, 3), (4, 3), (0, num_values + 1)):
        with pytest.raises(PlanError, match=f"places {first} to {last} are not within the {num_values}"):
            shuffle.between(first, last)
    assert shuffle.between(3, 3).tolist() == shuffle.at([]).tolist() == []
