"""Global batches bounded in items: whole samples, as many as fit, the same from any boundary on."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wholebatch.errors import PlanError
from wholebatch.order import ItemOrder, Order, SampleOrder
from wholebatch.order import items as item_order
from wholebatch.order.permutation import Permutation

quick = settings(max_examples=80, deadline=None)


@st.composite
def item_orders(draw: st.DrawFn) -> ItemOrder:
    items = draw(st.lists(st.integers(0, 20), min_size=1, max_size=60).filter(any))
    return ItemOrder(
        num_samples=len(items),
        global_batch_items=max(items) + draw(st.integers(0, 60)),
        items=np.array(items, dtype=draw(st.sampled_from([np.int64, np.uint8, np.int32]))),
        seed=draw(st.integers(0, 2**53)),
        shuffle=draw(st.booleans()),
    )


def cut_plainly(order: ItemOrder, epoch: int) -> list[list[int]]:
    """The rule, sample by sample."""
    samples = SampleOrder(
        num_samples=order.num_samples, global_batch_samples=1, seed=order.seed, shuffle=order.shuffle
    )
    updates: list[list[int]] = [[]]
    held = 0
    for sample in samples.epoch_order(epoch).tolist():
        items = int(order.items[sample])
        if held + items > order.global_batch_items:
            updates.append([])
            held = 0
        updates[-1].append(sample)
        held += items
    return updates


def walk(order: ItemOrder, position: int, end: int) -> list[list[int]]:
    found = []
    while position < end:
        found.append(order.global_batch(position))
        position = order.next_position(position)
    assert position == end
    return found


@given(order=item_orders())
@quick
def test_updates_are_as_many_whole_samples_as_fit(order: ItemOrder) -> None:
    expected = cut_plainly(order, 0) + cut_plainly(order, 1)
    assert walk(order, 0, 2 * order.samples_per_epoch) == expected
    items = [sum(int(order.items[sample]) for sample in ids) for ids in expected]
    begins = np.cumsum([0, *map(len, expected[:-1])]).tolist()
    assert max(items) <= order.global_batch_items
    assert [order.num_items(begin) for begin in begins] == items
    assert sum(items) == 2 * order.items_per_epoch
    for epoch in (0, 1):
        seen = [s for begin, ids in zip(begins, expected, strict=True) for s in ids
                if order.epoch(begin) == epoch]  # fmt: skip
        assert sorted(seen) == list(range(order.num_samples))


@given(order=item_orders(), data=st.data())
@quick
def test_a_run_goes_on_from_any_boundary(order: ItemOrder, data: st.DataObject) -> None:
    """With a new object, that has seen nothing before it; in any order of asking."""
    end = 2 * order.samples_per_epoch
    expected = cut_plainly(order, 0) + cut_plainly(order, 1)
    begins = np.cumsum([0, *map(len, expected[:-1])]).tolist()
    number = data.draw(st.integers(0, len(begins) - 1))
    fresh = dataclasses.replace(order)
    read_together = data.draw(st.sampled_from([1, 2, 5, 17, 2**16]))
    with mock.patch.object(item_order, "_WALK_SAMPLES", read_together):
        assert walk(fresh, begins[number], end) == expected[number:]
        for at_random in data.draw(st.permutations(range(len(begins))))[:10]:
            assert fresh.global_batch(begins[at_random]) == expected[at_random]


@given(order=item_orders(), position=st.integers(0, 150))
@quick
def test_a_position_inside_an_update_is_refused(order: ItemOrder, position: int) -> None:
    epochs = range(order.epoch(position) + 1)
    expected = [ids for epoch in epochs for ids in cut_plainly(order, epoch)]
    begins = np.cumsum([0, *map(len, expected)]).tolist()
    if position in begins:
        assert order.next_position(position) == begins[begins.index(position) + 1]
        return
    below = max(begin for begin in begins if begin < position)
    above = min(begin for begin in begins if begin > position)
    for call in (order.global_batch, order.next_position, order.num_items):
        with pytest.raises(
            PlanError,
            match=f"position={position} lies inside an update: with global_batch_items "
            f"{order.global_batch_items} updates begin at {below} or {above}, the nearest",
        ):
            call(position)


def test_what_was_seen_of_one_epoch_says_nothing_of_the_next() -> None:
    """Three epochs of updates of 2 and 1 samples: 0, 2, 3, 5, 6, 8."""
    order = ItemOrder(
        num_samples=3, global_batch_items=2, items=np.array([1, 1, 1], dtype=np.int64), shuffle=False
    )
    assert walk(order, 0, 3) == [[0, 1], [2]]
    for _ in range(2):
        with pytest.raises(
            PlanError, match=r"position=7 lies inside an update: .* begin at 6 or 8, the near"
        ):
            order.global_batch(7)
    assert order.global_batch(8) == [2]
    with pytest.raises(
        PlanError, match=r"position=4 lies inside an update: .* begin at 3 or 5, the nearest"
    ):
        order.global_batch(4)


@given(order=item_orders(), m=st.integers(1, 4), replicas=st.integers(1, 5))
@quick
def test_every_split_sees_the_same_global_batch(order: ItemOrder, m: int, replicas: int) -> None:
    for position in np.cumsum([0, *map(len, cut_plainly(order, 0)[:-1])]).tolist():
        windows = [
            order.window(position, micro_batch_samples=m, replicas=replicas, replica=replica)
            for replica in range(replicas)
        ]
        ids = [sample for window in windows for micro_batch in window for sample in micro_batch]
        assert ids == order.global_batch(position)
        sizes = [sum(map(len, window)) for window in windows]
        assert max(sizes) - min(sizes) <= 1
        assert all(len(micro_batch) == m for window in windows for micro_batch in window[:-1])
        assert all(1 <= len(micro_batch) <= m for window in windows for micro_batch in window)


def test_a_known_case() -> None:
    items = np.array([4, 4, 3, 0, 8, 1, 0, 0])
    order = ItemOrder(num_samples=8, global_batch_items=8, items=items, shuffle=False)
    # 4 + 4 fit exactly; 3 + 0 and the 8 do not; what has no items joins the update that it comes in.
    assert walk(order, 0, 8) == [[0, 1], [2, 3], [4], [5, 6, 7]]
    assert order.next_position(5) == 8
    assert order.global_batch(8) == [0, 1]
    assert order.epoch(7) == 0
    assert order.epoch(8) == 1
    later: Order = order
    assert later.global_batch(2) == [2, 3]


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many places of the shuffle are computed, call by call."""
    seen: list[int] = []
    between = Permutation.between

    def noted(self: Permutation, first: int, last: int) -> Any:
        seen.append(last - first)
        return between(self, first, last)

    monkeypatch.setattr(Permutation, "between", noted)
    return seen


def long_order(**changes: Any) -> ItemOrder:
    items = np.random.default_rng(0).integers(1, 100, 200_000).astype(np.uint8)
    settings = {"num_samples": 200_000, "global_batch_items": 3200, "items": items, "seed": 1, **changes}
    return ItemOrder(**settings)


def test_going_on_costs_the_update_and_resuming_the_way_there(computed: list[int]) -> None:
    order = long_order()
    position = 0
    for _ in range(700):  # more than are remembered
        computed.clear()
        ids = order.global_batch(position)
        position = order.next_position(position)
        assert sum(computed) < 4 * len(ids), "its own ids, and a few more to see where it ends"
    assert len(order._ends) <= 256
    resumed = long_order()
    computed.clear()
    assert resumed.global_batch(position) == order.global_batch(position)
    assert position <= sum(computed) < position + 2**17
    computed.clear()
    resumed.global_batch(resumed.next_position(position))
    assert sum(computed) < 500


def test_another_seed_or_epoch_cuts_elsewhere() -> None:
    first, other = long_order(), long_order(seed=2)
    assert first.global_batch(0) != other.global_batch(0)
    assert first.global_batch(0) != first.global_batch(200_000)


def test_items_stay_where_they_are(tmp_path: Any) -> None:
    """They are neither copied nor written to, and a file on disk will do."""
    path = tmp_path / "items.npy"
    np.save(path, np.arange(1, 1001, dtype=np.int32))
    order = ItemOrder(num_samples=1000, global_batch_items=5000, items=np.load(path, mmap_mode="r"))
    assert isinstance(order.items, np.memmap)
    assert order.num_items(0) <= 5000
    given = np.arange(1, 11)
    small = ItemOrder(num_samples=10, global_batch_items=20, items=given)
    assert np.shares_memory(small.items, given)
    with pytest.raises(ValueError, match="read-only"):
        small.items[0] = 3
    given[0] = 1  # the caller's own array is as it was
    again = pickle.loads(pickle.dumps(small))
    assert walk(again, 0, 20) == walk(small, 0, 20)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_samples": 0}, "num_samples=0 is too small"),
        ({"global_batch_items": 2.5}, r"global_batch_items=2\.5 is a float"),
        ({"seed": -1}, "seed=-1 is too small"),
        ({"items": np.array([1, 2])}, r"items has the shape \(2,\); num_samples=3 needs \(3,\)"),
        ({"items": np.array([[1, 2, 3]])}, r"items has the shape \(1, 3\)"),
        ({"items": np.array([1.0, 2, 3])}, "items is of dtype float64; give whole numbers"),
        ({"items": [1, -2, 3]}, "sample 1 has -2 items; the least is 0"),
        (
            {"items": [1, 11, 3]},
            "sample 1 has 11 items, more than global_batch_items 10, and samples are not cut; "
            "use at least 11, or shorten it",
        ),
        ({"items": [0, 0, 0]}, "none of the 3 samples has an item"),
        (
            {"items": [2**53, 2**53, 1], "global_batch_items": 2**53},
            "items of all samples=18014398509481984 is too large",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"num_samples": 3, "global_batch_items": 10, "items": np.array([1, 2, 3])}
    with pytest.raises(PlanError, match=message):
        ItemOrder(**{**arguments, **changes})


def test_what_is_no_position_or_replica_is_refused() -> None:
    order = ItemOrder(num_samples=3, global_batch_items=3, items=np.array([1, 2, 3]), shuffle=False)
    for call in (order.global_batch, order.next_position, order.epoch, order.num_items):
        with pytest.raises(PlanError, match="position=-1 is too small"):
            call(-1)
        with pytest.raises(PlanError, match="position='2' is a str"):
            call("2")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="replica=2 does not exist; with replicas=2 it is 0 to 1"):
        order.window(0, micro_batch_samples=1, replicas=2, replica=2)
    with pytest.raises(PlanError, match="position=1 lies inside an update"):
        order.window(1, micro_batch_samples=1, replicas=2, replica=0)
