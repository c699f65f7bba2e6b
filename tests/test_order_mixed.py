"""Sources mixed by weight: exact proportions, every source's passes whole, any position by itself."""

from __future__ import annotations

import dataclasses
import tracemalloc
from collections import Counter
from decimal import Decimal
from fractions import Fraction
from math import ceil, gcd, log2
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rounds import values_computed
from wholebatch.errors import PlanError
from wholebatch.order import Order, epoch_permutation
from wholebatch.order.mixing import MixedOrder, Source, whole_weights

quick = settings(max_examples=80, deadline=None)

WEIGHTS = st.one_of(st.integers(1, 40), st.fractions(Fraction(1, 50), 20, max_denominator=50))


@st.composite
def mixtures(draw: st.DrawFn) -> MixedOrder:
    sources = st.builds(Source, num_samples=st.integers(1, 40), weight=WEIGHTS)
    return MixedOrder(
        sources=tuple(draw(st.lists(sources, min_size=1, max_size=7))),
        global_batch_samples=draw(st.sampled_from([1, 2, 6, 12, 24])),
        seed=draw(st.integers(0, 2**53)),
        shuffle=draw(st.booleans()),
    )


def run_of(order: MixedOrder, updates: int) -> tuple[list[int], list[int]]:
    """All ids of the first updates, and the pass of each."""
    ids, passes, position = [], [], 0
    for _ in range(updates):
        ids += order.global_batch(position)
        passes += order.sample_epochs(position)
        position = order.next_position(position)
    assert position == updates * order.global_batch_samples
    return ids, passes


def sources_of(order: MixedOrder, ids: list[int]) -> list[int]:
    ends = np.cumsum([source.num_samples for source in order.sources])
    return np.searchsorted(ends, ids, side="right").tolist()


@given(order=mixtures())
@quick
def test_the_proportions_hold_before_every_position(order: MixedOrder) -> None:
    ids, _ = run_of(order, 20)
    weights, num_sources = order.weights, len(order.sources)
    seen = [0] * num_sources
    for position, source in enumerate(sources_of(order, ids), start=1):
        seen[source] += 1
        for mine, weight in zip(seen, weights, strict=True):
            distance = abs(mine - Fraction(position * weight, sum(weights)))
            assert distance < max(1, ceil(log2(num_sources))), (position, seen)
        assert order.samples_by_source(position) == tuple(seen)
        if position % sum(weights) == 0:
            assert tuple(seen) == tuple(weight * position // sum(weights) for weight in weights)


@given(order=mixtures())
@quick
def test_every_pass_over_a_source_has_each_of_its_samples_once(order: MixedOrder) -> None:
    ids, passes = run_of(order, 30)
    begins_at = np.cumsum([0, *(source.num_samples for source in order.sources)]).tolist()
    drawn: dict[int, list[tuple[int, int]]] = {number: [] for number in range(len(order.sources))}
    for source, sample, epoch in zip(sources_of(order, ids), ids, passes, strict=True):
        drawn[source].append((epoch, sample - begins_at[source]))
    for source, draws in drawn.items():
        num_samples = order.sources[source].num_samples
        assert [epoch for epoch, _ in draws] == [number // num_samples for number in range(len(draws))]
        assert max(Counter(draws).values(), default=1) == 1
        for begin in range(0, len(draws) - num_samples + 1, num_samples):
            one_pass = [sample for _, sample in draws[begin : begin + num_samples]]
            assert sorted(one_pass) == list(range(num_samples))
            if order.shuffle:
                shuffle = epoch_permutation(
                    num_samples, seed=order.seed, epoch=begin // num_samples, source=source
                )
                assert one_pass == shuffle.between(0, num_samples).tolist()
            else:
                assert one_pass == list(range(num_samples))


@given(order=mixtures(), updates=st.integers(0, 10**9))
@quick
def test_every_split_and_every_fresh_object_sees_the_same_global_batch(
    order: MixedOrder, updates: int
) -> None:
    """At any position without what came before it: this is how a run resumes."""
    position = updates * order.global_batch_samples
    together = order.global_batch(position)
    assert len(together) == order.global_batch_samples
    fresh = dataclasses.replace(order)
    for replicas in (1, 2, 3, 6, 12):
        m, rest = divmod(order.global_batch_samples, replicas)
        if rest or m == 0:
            continue
        m = m // 2 if m % 2 == 0 else m
        windows = [
            fresh.window(position, micro_batch_samples=m, replicas=replicas, replica=replica)
            for replica in range(replicas)
        ]
        assert [
            sample for window in windows for micro_batch in window for sample in micro_batch
        ] == together
        assert all(len(micro_batch) == m for window in windows for micro_batch in window)
    before, after = (order.samples_by_source(each) for each in (position, order.next_position(position)))
    seen = Counter(sources_of(order, together))
    assert [seen[number] for number in range(len(order.sources))] == np.subtract(after, before).tolist()


@given(order=mixtures(), factor=st.integers(2, 5))
@quick
def test_the_order_does_not_depend_on_the_global_batch(order: MixedOrder, factor: int) -> None:
    larger = dataclasses.replace(order, global_batch_samples=factor * order.global_batch_samples)
    assert run_of(larger, 4) == run_of(order, 4 * factor)


def test_a_known_case() -> None:
    order = MixedOrder(
        sources=(Source(num_samples=100, weight=0.75), Source(num_samples=3, weight=0.25)),
        global_batch_samples=8,
        shuffle=False,
    )
    assert order.weights == (3, 1)
    assert order.global_batch(0) == [100, 0, 1, 2, 101, 3, 4, 5]
    assert order.global_batch(8) == [102, 6, 7, 8, 100, 9, 10, 11]
    assert order.sample_epochs(8) == [0, 0, 0, 0, 1, 0, 0, 0]
    assert order.samples_by_source(10) == (7, 3)
    assert order.num_samples == 103
    assert order.updates_per_epoch == 13
    assert order.samples_per_epoch == 104
    assert [order.epoch(position) for position in (0, 96, 104, 208)] == [0, 0, 1, 2]
    later: Order = order
    assert later.next_position(8) == 16


def test_the_order_is_what_it_was() -> None:
    """A promise to runs that resume, as that of one data set."""
    order = MixedOrder(
        sources=(Source(num_samples=10**12), Source(num_samples=50, weight=2), Source(num_samples=10**6)),
        global_batch_samples=8,
        seed=1,
    )
    assert order.global_batch(800) == PINNED
    for changes in ({"seed": 2}, {"shuffle": False}):
        assert dataclasses.replace(order, **changes).global_batch(800) != PINNED


PINNED = [
    1000000118119,
    1000000000022,
    1000000000006,
    49614810735,
    1000000495691,
    1000000000033,
    1000000000019,
    892581375852,
]


@pytest.mark.parametrize(
    ("weights", "whole"),
    [
        ((1,), (1,)),
        ((2.5,), (1,)),
        ((1, 1), (1, 1)),
        ((6, 4), (3, 2)),
        ((0.1, 0.2, 0.7), (1, 2, 7)),
        ((1 / 3, 2 / 3), (1, 2)),
        ((Fraction(1, 7), Fraction(6, 7)), (1, 6)),
        ((np.float32(0.5), np.int64(1)), (1, 2)),
        ((10**15, 3 * 10**15), (1, 3)),
        ((1e-9, 3e-9), (1, 3)),
        ((123_456_789, 987_654_321), (13_717_421, 109_739_369)),
    ],
)
def test_weights_are_the_least_whole_numbers(weights: Any, whole: tuple[int, ...]) -> None:
    assert whole_weights(weights) == whole
    assert all(isinstance(weight, int) for weight in whole_weights(weights))


@given(weights=st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=30))
@quick
def test_any_weights_are_met_to_one_in_a_billion(weights: list[float]) -> None:
    whole = whole_weights(tuple(weights))
    assert sum(whole) <= 2**31
    assert gcd(*whole) == 1
    for weight, each in zip(weights, whole, strict=True):
        assert abs(weight / sum(weights) - each / sum(whole)) < 1e-6 * weight / sum(weights) + 2e-9


def test_large_numbers_do_not_overflow() -> None:
    """The last positions there are, with the largest weights there are: against Python's own integers."""
    order = MixedOrder(
        sources=(Source(num_samples=2**50, weight=2**31 - 2), Source(num_samples=2**50, weight=1)),
        global_batch_samples=64,
    )
    assert order.weights == (2**31 - 2, 1)
    position = 2**53 - 64
    seen = Counter(sources_of(order, order.global_batch(position)))
    expected = [
        (position + 64) * weight // (2**31 - 1) - position * weight // (2**31 - 1)
        for weight in (2**31 - 2,)
    ]
    assert [seen[0]] == expected
    assert seen[0] + seen[1] == 64


def test_a_window_costs_its_own_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """1e12 samples over 100,000 ranks: the values that are computed, and the memory."""
    computed = values_computed(monkeypatch)
    order = MixedOrder(
        sources=(Source(num_samples=10**12, weight=0.9), Source(num_samples=10**6, weight=0.1)),
        global_batch_samples=800_000,
    )
    order.window(0, micro_batch_samples=2, replicas=100_000, replica=0)  # numpy is imported whole
    computed.clear()
    tracemalloc.start()
    try:
        window = order.window(800_000 * 1234, micro_batch_samples=2, replicas=100_000, replica=99_999)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [len(micro_batch) for micro_batch in window] == [2] * 4
    assert sum(computed) == 8
    assert peak < 2**20
    last = order.global_batch(800_000 * 1234)[-8:]
    assert [sample for micro_batch in window for sample in micro_batch] == last


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_samples": 0}, "num_samples=0 is too small"),
        ({"weight": 0}, "weight=0 is not positive and finite; leave out what has no weight"),
        ({"weight": -1.5}, r"weight=-1\.5 is not positive"),
        ({"weight": float("inf")}, "weight=inf is not positive and finite"),
        ({"weight": float("nan")}, "weight=nan is not positive and finite"),
        ({"weight": True}, "weight=True is a bool; give a number such as 2"),
        ({"weight": "2"}, "weight='2' is a str; give a number"),
        ({"weight": Decimal(2)}, "is a Decimal; give a number"),
    ],
)
def test_sources_that_make_no_sense_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Source(**{"num_samples": 3, **arguments})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sources": ()}, "sources is empty; a mixture needs at least one Source"),
        ({"global_batch_samples": 0}, "global_batch_samples=0 is too small"),
        ({"seed": -1}, "seed=-1 is too small"),
        (
            {"sources": (Source(num_samples=2**53), Source(num_samples=1))},
            "num_samples of all sources=9007199254740993 is too large",
        ),
        (
            {"sources": (Source(num_samples=5, weight=1e-12), Source(num_samples=5))},
            r"weight=1e-12 of source 0 is too small beside 1e-12, 1: a share below 2\*\*-31 is never drawn",
        ),
    ],
)
def test_mixtures_that_make_no_sense_are_refused(arguments: dict[str, Any], message: str) -> None:
    sources = (Source(num_samples=3), Source(num_samples=4))
    with pytest.raises(PlanError, match=message):
        MixedOrder(**{"sources": sources, "global_batch_samples": 4, **arguments})


def test_what_is_no_position_or_split_is_refused() -> None:
    order = MixedOrder(sources=(Source(num_samples=3), Source(num_samples=4)), global_batch_samples=4)
    for call in (order.global_batch, order.next_position, order.sample_epochs):
        with pytest.raises(
            PlanError, match=r"position=6 lies inside an update: .* 4 begin at 4 or 8, the near"
        ):
            call(6)
    for call in (order.global_batch, order.next_position, order.epoch, order.samples_by_source):
        with pytest.raises(PlanError, match=r"position=4\.0 is a float"):
            call(4.0)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="replica=2 does not exist"):
        order.window(0, micro_batch_samples=1, replicas=2, replica=2)
    with pytest.raises(
        PlanError, match="global_batch_samples 4 does not divide by micro_batch_samples 3 x"
    ):
        order.window(0, micro_batch_samples=3, replicas=1, replica=0)
    with pytest.raises(PlanError, match="position=2 lies inside"):
        order.window(2, micro_batch_samples=2, replicas=1, replica=0)
