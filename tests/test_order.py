"""The order of samples: the same global batches under any split, each sample once an epoch."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wholebatch.errors import PlanError
from wholebatch.order import (
    ORDER_RULE,
    SampleOrder,
    format_digest,
    random_numbers,
    sample_digest,
)
from wholebatch.order.samples import STREAMS
from wholebatch.plan import plan_batch

quick = settings(max_examples=150, deadline=None)

FACTORS = st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))


def splits(samples: int) -> list[tuple[int, int, int]]:
    """All (m, A, D) whose product is ``samples``."""
    numbers = [number for number in range(1, samples + 1) if samples % number == 0]
    return [(m, samples // m // d, d) for m in numbers for d in numbers if samples % (m * d) == 0]


@st.composite
def orders(draw: st.DrawFn) -> SampleOrder:
    m, a, d = draw(FACTORS)
    tail: Any = draw(st.sampled_from(["partial", "drop"]))
    least = m * a * d if tail == "drop" else 1
    return SampleOrder(
        num_samples=draw(st.integers(least, least + 70)),
        global_batch_samples=m * a * d,
        seed=draw(st.integers(0, 2**53)),
        shuffle=draw(st.booleans()),
        tail=tail,
    )


def positions(order: SampleOrder, epochs: int = 2) -> list[int]:
    """Where the updates of some epochs begin, by walking from one to the next."""
    found = [0]
    while found[-1] < epochs * order.samples_per_epoch:
        found.append(order.next_position(found[-1]))
    return found[:-1]


@given(order=orders())
@quick
def test_every_split_sees_the_same_global_batch(order: SampleOrder) -> None:
    for position in positions(order):
        together = order.global_batch(position)
        epoch, offset = divmod(position, order.samples_per_epoch)
        assert order.epoch(position) == epoch
        assert together == order.epoch_order(epoch)[offset : offset + len(together)].tolist()
        for m, a, d in splits(order.global_batch_samples):
            windows = [
                order.window(position, micro_batch_samples=m, replicas=d, replica=replica)
                for replica in range(d)
            ]
            assert [ids for window in windows for micro_batch in window for ids in micro_batch] == together
            sizes = [sum(map(len, window)) for window in windows]
            assert max(sizes) - min(sizes) <= 1
            assert sizes == sorted(sizes, reverse=True)
            assert all(len(micro_batch) == m for window in windows for micro_batch in window[:-1])
            assert all(1 <= len(micro_batch) <= m for window in windows for micro_batch in window)
            if len(together) == order.global_batch_samples:
                assert [len(window) for window in windows] == [a] * d


@given(order=orders())
@quick
def test_an_epoch_has_every_sample_once_or_drops_what_it_says(order: SampleOrder) -> None:
    updates = [
        (position // order.samples_per_epoch, order.global_batch(position)) for position in positions(order)
    ]
    for epoch in (0, 1):
        batches = [ids for each, ids in updates if each == epoch]
        seen = Counter(sample for ids in batches for sample in ids)
        assert len(batches) == order.updates_per_epoch
        assert set(seen.values()) == {1}
        assert seen.keys() <= set(range(order.num_samples))
        assert order.num_samples - len(seen) == order.samples_dropped_per_epoch
        if order.tail == "partial":
            assert order.samples_dropped_per_epoch == 0
        whole = [len(ids) == order.global_batch_samples for ids in batches]
        assert all(whole[:-1])
        assert all(whole) or order.tail == "partial"


@given(order=orders(), data=st.data())
@quick
def test_a_run_goes_on_from_any_position_under_another_split(
    order: SampleOrder, data: st.DataObject
) -> None:
    """Walk on with a new object and a new split for each update: no repeat and no hole."""
    begins = positions(order)
    reference = [order.global_batch(position) for position in begins]
    for position, expected in zip(begins, reference, strict=True):
        m, _, d = data.draw(st.sampled_from(splits(order.global_batch_samples)))
        fresh = dataclasses.replace(order)
        windows = [
            fresh.window(position, micro_batch_samples=m, replicas=d, replica=replica)
            for replica in range(d)
        ]
        assert [ids for window in windows for micro_batch in window for ids in micro_batch] == expected
    assert begins == list(np.cumsum([0, *map(len, reference[:-1])]))


@given(order=orders(), position=st.integers(0, 200))
@quick
def test_positions_inside_an_update_name_the_nearest_boundaries(order: SampleOrder, position: int) -> None:
    begins = positions(order, epochs=position // order.samples_per_epoch + 2)
    if position in begins:
        return
    below = max(begin for begin in begins if begin < position)
    above = min(begin for begin in begins if begin > position)
    with pytest.raises(
        PlanError, match=rf"position={position} lies inside .* begin at {below} or {above}, the"
    ):
        order.global_batch(position)
    with pytest.raises(PlanError, match=f"{below} or {above}"):
        order.next_position(position)


def test_a_tail_of_fewer_samples_than_replicas_leaves_some_without_any() -> None:
    order = SampleOrder(num_samples=10, global_batch_samples=8, shuffle=False)
    windows = [order.window(8, micro_batch_samples=1, replicas=4, replica=replica) for replica in range(4)]
    assert windows == [[[8]], [[9]], [], []]


def test_a_window_of_the_plan_in_the_design() -> None:
    plan = plan_batch(global_batch_samples=12, micro_batch_samples=2, replicas=2)
    order = SampleOrder(num_samples=31, global_batch_samples=plan.global_batch_samples, shuffle=False)
    assert order.window(12, micro_batch_samples=2, replicas=2, replica=1) == [[18, 19], [20, 21], [22, 23]]
    assert order.window(24, micro_batch_samples=2, replicas=2, replica=0) == [[24, 25], [26, 27]]
    assert order.window(24, micro_batch_samples=2, replicas=2, replica=1) == [[28, 29], [30]]


def test_seeds_and_epochs_give_other_orders_and_stay_as_they_are() -> None:
    order = SampleOrder(num_samples=100, global_batch_samples=10, seed=1)
    assert order.epoch_order(0).tolist() != order.epoch_order(1).tolist()
    assert order.epoch_order(0).tolist() != dataclasses.replace(order, seed=2).epoch_order(0).tolist()
    assert SampleOrder(num_samples=100, global_batch_samples=50, seed=1).epoch_order(3).tolist() == (
        order.epoch_order(3).tolist()
    )
    # The order is a promise to runs that resume: these ids were drawn once and are kept for as long as the
    # rule has this name.
    assert ORDER_RULE == "sorted to 4096, then 8 rounds"
    large = SampleOrder(num_samples=10**12, global_batch_samples=4, seed=1)
    assert large.global_batch(0) == [265002016209, 797459942033, 830929588864, 73032407209]
    assert large.global_batch(10**12) == [149379853355, 471397040327, 117062675891, 565539668369]
    assert order.global_batch(0) == [90, 78, 3, 66, 5, 24, 54, 27, 60, 43]
    assert order.global_batch(100) == [14, 51, 10, 32, 79, 22, 53, 0, 97, 66]
    with pytest.raises(ValueError, match="read-only"):
        order.epoch_order(0)[0] = 1


def test_all_orders_of_a_few_samples_come_equally_often() -> None:
    """Chi-square over the 24 orders of 4 samples; 49.7 is the 0.1% point at 23 degrees of freedom."""
    runs = 4800
    order = SampleOrder(num_samples=4, global_batch_samples=4, seed=7)
    counts = Counter(tuple(order.epoch_order(epoch).tolist()) for epoch in range(runs))
    expected = runs / 24
    assert len(counts) == 24
    assert sum((count - expected) ** 2 / expected for count in counts.values()) < 49.7


BAD_POSITIONS = [
    (-1, "=-1 is too small"),
    (4.0, "=4.0 is a float"),
    (True, "=True is a bool"),
    ("4", "='4' is a str"),
]


@pytest.mark.parametrize(("value", "message"), BAD_POSITIONS)
def test_what_is_no_position_is_refused(value: Any, message: str) -> None:
    order = SampleOrder(num_samples=10, global_batch_samples=4)
    for call in (order.global_batch, order.next_position, order.epoch):
        with pytest.raises(PlanError, match="position" + message):
            call(value)
    with pytest.raises(PlanError, match="epoch" + message):
        order.epoch_order(value)
    with pytest.raises(PlanError, match="sample id" + message):
        sample_digest([value])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_samples": 0}, "num_samples=0 is too small"),
        ({"global_batch_samples": 2.0}, r"global_batch_samples=2\.0 is a float"),
        ({"seed": -1}, "seed=-1 is too small"),
        ({"tail": "pad"}, "tail='pad' is not known; choose one of partial, drop"),
        (
            {"num_samples": 3, "tail": "drop"},
            "no update: num_samples 3 is less than global_batch_samples 4",
        ),
    ],
)
def test_orders_that_make_no_sense_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        SampleOrder(**{"num_samples": 10, "global_batch_samples": 4, **arguments})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"replica": 2}, "replica=2 does not exist; with replicas=2 it is 0 to 1"),
        ({"replica": -1}, "replica=-1 is too small"),
        ({"micro_batch_samples": 0}, "micro_batch_samples=0 is too small"),
        (
            {"replicas": 3},
            "global_batch_samples 8 does not divide by micro_batch_samples 2 x replicas 3: 8 = 1 x 6",
        ),
    ],
)
def test_windows_that_do_not_fit_are_refused(arguments: dict[str, int], message: str) -> None:
    order = SampleOrder(num_samples=10, global_batch_samples=8)
    with pytest.raises(PlanError, match=message):
        order.window(0, **{"micro_batch_samples": 2, "replicas": 2, "replica": 0, **arguments})


@given(ids=st.lists(st.integers(0, 2**53 - 1), max_size=40), data=st.data())
@quick
def test_digests_add_up_over_any_split(ids: list[int], data: st.DataObject) -> None:
    shuffled = data.draw(st.permutations(ids))
    cut = data.draw(st.integers(0, len(ids)))
    parts = sample_digest(shuffled[:cut]) + sample_digest(shuffled[cut:])
    assert sample_digest(ids) == parts % 2**64
    assert format_digest(parts) == format_digest(sample_digest(ids))
    if ids:
        assert sample_digest(ids[1:]) != sample_digest(ids)
        assert sample_digest([*ids, ids[0]]) != sample_digest(ids)
        assert sample_digest([ids[0] ^ 1, *ids[1:]]) != sample_digest(ids)


def test_a_digest_is_a_fixed_function_of_the_ids() -> None:
    """The mixing function done again in Python's own integers."""

    def mix(value: int) -> int:
        value = (value + 0x9E3779B97F4A7C15) % 2**64
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
        return value ^ value >> 31

    assert mix(0) == 0xE220A8397B1DCDAF  # the first output of SplitMix64 from seed 0
    assert sample_digest(range(1000)) == sum(map(mix, range(1000))) % 2**64
    assert sample_digest(np.arange(5)) == sample_digest([4, 3, 2, 1, 0])
    assert sample_digest([]) == 0
    assert format_digest(255) == "00000000000000ff"


def test_streams_of_random_numbers_are_apart_and_stay_what_they_are() -> None:
    assert len(set(STREAMS.values())) == len(STREAMS)
    drawn = {
        (stream, seed, epoch, sample): tuple(
            random_numbers(stream, 3, seed=seed, epoch=epoch, sample_id=sample).tolist()
        )
        for stream in STREAMS
        for seed in (0, 1)
        for epoch in (0, 1)
        for sample in (0, 1)
    }
    numbers = [number for each in drawn.values() for number in each]
    assert len(set(numbers)) == len(numbers)
    # A run that is resumed after an upgrade draws what it would have drawn: these may never change.
    assert drawn["order", 0, 0, 0] == (213000021201967259, 4455796210202625458, 2055444239878205049)
    assert drawn["masks", 1, 0, 1] == (16180638935449168288, 6247990514572806081, 7951280719931355449)
    assert drawn["sample", 0, 1, 1] == (1019125925559392200, 17744824082430567838, 9696671944199848685)
