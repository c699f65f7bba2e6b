"""The loader over streams: windows in the order of arrival, a tail that counts, and exact resumption."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from loading_data import (
    FailingStream,
    IteratorStream,
    KilledStream,
    StatefulIterator,
    StatefulStream,
    Stream,
    cut,
    indices,
    length_of,
    windows,
)
from wholebatch.budget import plan_token_budget
from wholebatch.errors import JudgeError, PlanError, UnsupportedError, UsageError
from wholebatch.loading import WindowLoader, pad_collate
from wholebatch.plan import plan_batch

FIXED = plan_batch(global_batch_samples=8, micro_batch_samples=2)
FIXED_OF_TWO = plan_batch(global_batch_samples=8, micro_batch_samples=2, ranks=2)
BUDGET = plan_token_budget(tokens_per_micro_batch=18, global_batch_samples=8)
ITEMS = plan_token_budget(tokens_per_micro_batch=18, global_batch_items=20)


def loader(dataset: Any = None, **more: Any) -> WindowLoader:
    dataset = Stream(21) if dataset is None else dataset
    plan = more.pop("plan", FIXED)
    budget = plan.micro_batch_samples is None
    settings: dict[str, Any] = {"collate": pad_collate(), "seed": 3}
    settings |= {"lengths": length_of} if budget else {}
    settings |= {"items": length_of} if plan is ITEMS else {}
    return WindowLoader(dataset, plan=plan, **settings | more)


def turns(num_samples: int, workers: int, block: int) -> list[int]:
    """The order in which blocks of the workers' shares take turns."""
    shares = [list(range(num_samples))[worker::workers] for worker in range(workers)]
    taken = [[share[begin : begin + block] for share in shares] for begin in range(0, num_samples, block)]
    return list(itertools.chain(*itertools.chain(*taken)))


# which samples ---------------------------------------------------------------------------------------


def test_windows_are_filled_as_samples_arrive() -> None:
    found = windows(loader())
    assert indices(found) == [[*range(8)], [*range(8, 16)], [*range(16, 21)]], "the tail is a window"
    assert [[len(batch["index"]) for batch in window[0]] for window in found] == [[2] * 4] * 2 + [[2, 2, 1]]
    assert [window[1:4] for window in found] == [
        (tuple(range(8)), (), 0),
        (tuple(range(8, 16)), (), 8),
        (tuple(range(16, 21)), (), 16),
    ]


def test_a_budget_cuts_each_window_where_it_lies() -> None:
    found = windows(loader(plan=BUDGET))
    assert [sorted(window) for window in indices(found)] == [[*range(8)], [*range(8, 16)], [*range(16, 21)]]
    for window in found:
        for batch in window[0]:
            assert len(batch["input_ids"]) * len(batch["input_ids"][0]) <= 18
        assert list(window[1]) == [number for batch in window[0] for number in batch["sample_ids"]]


def test_a_share_in_items_holds_whole_samples() -> None:
    found = windows(loader(plan=ITEMS))
    expected: list[list[int]] = [[]]
    for index in range(21):
        length = 1 + (7 * index) % 9
        if sum(1 + (7 * number) % 9 for number in expected[-1]) + length > 20:
            expected.append([])
        expected[-1].append(index)
    assert [sorted(window) for window in indices(found)] == expected


def test_samples_without_items_do_not_fill_one_window_without_end() -> None:
    """A stream that never ends and has no item gives windows all the same."""
    endless = ({"input_ids": [1], "labels": [-100]} for _ in itertools.count())
    found = windows(loader(endless, plan=ITEMS, items=lambda _: 0), 2)
    assert [len(window[1]) for window in found] == [20, 20]


def test_replicas_take_their_share_and_no_id_twice() -> None:
    plan = plan_token_budget(tokens_per_micro_batch=18, global_batch_samples=8, ranks=3)
    parts = [
        windows(loader(Stream(21, first=replica, every=3), plan=plan, replica=replica))
        for replica in range(3)
    ]
    assert [[len(window[1]) for window in part] for part in parts] == [[3, 3, 1], [3, 3, 1], [2, 2, 2, 1]]
    ids = [number for part in parts for window in part for number in window[1]]
    assert len(set(ids)) == 21
    items = plan_token_budget(tokens_per_micro_batch=18, global_batch_items=29, ranks=2)
    for replica, share in [(0, 15), (1, 14)]:
        found = windows(loader(plan=items, items=lambda _: 1, replica=replica))
        assert len(found[0][1]) == share


@pytest.mark.parametrize("plan", [FIXED, BUDGET, ITEMS])
def test_one_worker_gives_what_none_gives(plan: Any) -> None:
    assert windows(loader(plan=plan, workers=1)) == windows(loader(plan=plan))


@pytest.mark.parametrize("num_samples", [1, 40, 53])
def test_workers_take_turns(num_samples: int) -> None:
    plan = plan_batch(global_batch_samples=20, micro_batch_samples=4)
    found = windows(loader(Stream(num_samples), plan=plan, workers=2))
    arrived = turns(num_samples, 2, 16)
    assert indices(found) == [arrived[begin : begin + 20] for begin in range(0, num_samples, 20)]
    assert found == windows(loader(Stream(num_samples), plan=plan, workers=2))


@pytest.mark.parametrize("workers", [0, 2])
def test_an_empty_stream_has_no_window(workers: int) -> None:
    made = loader(Stream(0), workers=workers)
    assert windows(made) == []
    assert made.position == 0
    with pytest.raises(UsageError, match=r"its data, at position 0; .* over a stream make a new one"):
        iter(made)


def test_any_iterable_will_do_and_a_function_that_returns_one() -> None:
    expected = indices(windows(loader()))

    def generated() -> Iterator[Any]:
        yield from Stream(21)

    assert indices(windows(loader(generated()))) == expected
    assert indices(windows(loader(generated, workers=1))) == expected


def test_samples_that_are_too_long_are_cut_short() -> None:
    plan = plan_token_budget(tokens_per_micro_batch=5, global_batch_samples=8, too_long="truncate")
    found = windows(loader(plan=plan, truncate=cut))
    assert max(len(row) for window in found for batch in window[0] for row in batch["input_ids"]) == 5


def test_random_numbers_follow_the_seed_and_the_training_s_are_left_alone() -> None:
    def drawn(**more: Any) -> list[float]:
        found = windows(loader(StatefulStream(21), **more))
        return [number for window in found for batch in window[0] for number in batch["drawn"]]

    before = random.getstate(), torch.get_rng_state()
    first = drawn()
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert len(set(first)) == 21
    assert first == drawn(workers=1)
    assert first != drawn(seed=4)
    plan = plan_batch(global_batch_samples=16, micro_batch_samples=2, ranks=2)
    both = [set(drawn(plan=plan, replica=replica)) for replica in range(2)]
    assert not both[0] & both[1], "replicas draw other numbers"


# resumed ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("plan", [FIXED, BUDGET, ITEMS])
def test_a_resumed_stream_goes_on_bit_for_bit(plan: Any, workers: int) -> None:
    make = lambda: loader(StatefulStream(75), plan=plan, workers=workers)  # noqa: E731
    whole = windows(make())
    for after in (1, len(whole) // 2) if workers else range(len(whole)):
        first, second = make(), make()
        assert windows(first, after) == whole[:after]
        second.load_state_dict(first.state_dict())
        assert windows(second) == whole[after:], after


@pytest.mark.parametrize(("workers", "plan"), [(0, ITEMS), (2, FIXED)])
def test_a_stream_resumes_again_and_again(workers: int, plan: Any) -> None:
    make = lambda: loader(StatefulStream(40), plan=plan, workers=workers)  # noqa: E731
    whole = windows(make())
    found: list[Any] = []
    state = make().state_dict()
    for _ in range(len(whole)):
        one = make()
        one.load_state_dict(state)
        found += windows(one, 1)
        state = one.state_dict()
    assert found == whole


def test_the_state_may_be_the_iterator_s_own() -> None:
    for dataset in (IteratorStream, lambda: StatefulIterator(23)):
        first, second = loader(dataset()), loader(dataset())
        whole = windows(loader(dataset()))
        windows(first, 1)
        second.load_state_dict(first.state_dict())
        assert windows(second) == whole[1:]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("plan", [FIXED, BUDGET, ITEMS])
def test_a_loop_that_was_left_goes_on_with_nothing_lost(plan: Any, workers: int) -> None:
    whole = windows(loader(StatefulStream(40), plan=plan))
    made = loader(StatefulStream(40), plan=plan, workers=workers)
    begin = made.state_dict()
    assert windows(made, 1) + windows(made, 2) + windows(made) == whole
    if workers:
        made.load_state_dict(begin)
        assert windows(made) == whole, "the stream of this process was never read"


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_without_a_state_is_not_begun_twice(workers: int) -> None:
    made = loader(workers=workers)
    windows(made, 1)
    with pytest.raises(UnsupportedError, match="this Stream was begun, and what was read of it can't"):
        iter(made)


def test_a_stream_that_failed_before_its_first_window_is_not_begun_twice() -> None:
    made = loader(FailingStream(40))
    begin = made.state_dict()
    for _ in range(2):
        with pytest.raises((JudgeError, UnsupportedError)):
            windows(made)
    made.load_state_dict(begin)
    with pytest.raises(UnsupportedError, match="this FailingStream was begun"):
        windows(made)


def test_no_more_is_read_than_the_window_needs() -> None:
    def read_for_one(plan: Any, **more: Any) -> int:
        stream = StatefulStream(75)
        windows(loader(stream, plan=plan, **more), 1)
        return stream.next

    assert read_for_one(FIXED) == read_for_one(BUDGET) == 8
    assert read_for_one(ITEMS) == 16


def test_reading_ahead_is_not_in_the_state() -> None:
    """The stream has been asked for more than was handed out."""
    first = loader(StatefulStream(75), workers=1)
    windows(first, 1)
    cursor = first.state_dict()["source"]["cursor"]
    assert cursor["samples"] == 8
    assert cursor["copies"][0]["samples"] <= 8


def test_states_are_asked_for_at_the_begin_and_after_each_block() -> None:
    stream = StatefulStream(75)
    windows(loader(stream))
    assert stream.states_asked == 11


def test_a_stream_without_a_state_is_refused_by_name() -> None:
    made = loader()
    assert made.state_dict()["source"]["cursor"]["samples"] == 0, "nothing has been handed out yet"
    windows(made, 1)
    with pytest.raises(
        UnsupportedError,
        match=r"over this Stream can't be resumed exactly: it has no state_dict\(\) and load_state_dict",
    ):
        made.state_dict()


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"seed": 4}, "with seed 3, and it is 4 now"),
        ({"workers": 2}, "with copies 1, and it is 2 now"),
        ({"plan": FIXED_OF_TWO, "replica": 1}, "with replicas 1, and it is 2 now"),
    ],
)
def test_a_state_of_other_circumstances_is_refused(other: dict[str, Any], words: str) -> None:
    first = loader(StatefulStream(75))
    windows(first, 1)
    with pytest.raises(UsageError, match=f"the state of the stream was saved {words}"):
        loader(StatefulStream(75), **other).load_state_dict(first.state_dict())


def test_several_copies_need_the_blocks_that_they_had() -> None:
    first = loader(StatefulStream(75), workers=2)
    windows(first, 1)
    larger = plan_batch(global_batch_samples=16, micro_batch_samples=2)
    with pytest.raises(UsageError, match="saved with block_samples 8, and it is 16 now"):
        loader(StatefulStream(75), workers=2, plan=larger).load_state_dict(first.state_dict())


def test_one_copy_goes_on_under_another_plan() -> None:
    first = loader(StatefulStream(75), plan=ITEMS)
    used = sum(len(window[1]) for window in windows(first, 3))
    assert 8 < used < 16, "more of a block than the other plan reads at once"
    second = loader(StatefulStream(75), plan=FIXED)
    second.load_state_dict(first.state_dict())
    assert list(itertools.chain(*indices(windows(second)))) == list(range(used, 75))


def test_a_state_of_the_other_kind_or_of_another_stream_is_refused() -> None:
    first = loader(StatefulStream(75), plan=ITEMS)
    windows(first, 1)
    state = first.state_dict()
    with pytest.raises(UsageError, match="no state of a loader of samples by index"):
        loader([1, 2, 3]).load_state_dict(state)
    shorter = loader(StatefulStream(2), plan=ITEMS)
    shorter.load_state_dict(state)
    with pytest.raises(
        JudgeError, match="4 samples of the stream were used before, and now it ends after 2; it is not the"
    ):
        windows(shorter)


def test_a_position_can_not_be_found_in_a_stream() -> None:
    with pytest.raises(UsageError, match="position=8 of a stream can't be found"):
        loader(position=8)


# what fails ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_stream_that_fails_names_the_sample(workers: int) -> None:
    where = " in worker 0" if workers == 2 else ""
    made = loader(FailingStream(40), workers=workers)
    with pytest.raises(
        JudgeError, match=f"reading sample 5 of the stream{where} failed with OSError: the socket closed"
    ):
        windows(made)
    plan = plan_batch(global_batch_samples=16, micro_batch_samples=2, ranks=2)
    with pytest.raises(JudgeError, match="sample 5 of the stream of replica 1 failed"):
        windows(loader(FailingStream(40), plan=plan, replica=1))


def test_a_stream_that_does_not_open_says_so() -> None:
    def broken() -> Any:
        raise OSError("no such host")

    with pytest.raises(JudgeError, match="opening the stream failed with OSError: no such host"):
        windows(loader(broken))


def test_a_state_that_can_not_be_told_says_so() -> None:
    class Odd(StatefulStream):
        def state_dict(self) -> Any:
            raise RuntimeError("not now")

    with pytest.raises(JudgeError, match="the state_dict of the stream failed with RuntimeError: not now"):
        windows(loader(Odd(9)))


@pytest.mark.slow  # torch looks every 5 s
def test_a_killed_worker_is_named() -> None:
    made = loader(KilledStream(40), workers=2)
    with pytest.raises(JudgeError, match=r"of 2 workers .*killed by SIGKILL\) ended"):
        windows(made)


def test_what_was_handed_out_before_a_failure_can_be_resumed() -> None:
    class Broken(StatefulStream):
        def __iter__(self) -> Iterator[Any]:
            for sample in super().__iter__():
                if sample["index"] == 12:
                    raise OSError("gone")
                yield sample

    first, second = loader(Broken(21)), loader(StatefulStream(21))
    with pytest.raises(JudgeError, match="reading sample 12 of the stream"):
        windows(first)
    assert first.position == 8
    second.load_state_dict(first.state_dict())
    assert indices(windows(second)) == [[*range(8, 16)], [*range(16, 21)]]


def test_items_and_lengths_that_do_not_fit_name_the_sample() -> None:
    with pytest.raises(UsageError, match="sample 0 has 21 items, more than this replica's share of 20"):
        windows(loader(plan=ITEMS, items=lambda _: 21))
    with pytest.raises(JudgeError, match=r"items\(sample\) of sample 0 failed with ZeroDivisionError"):
        windows(loader(plan=ITEMS, items=lambda _: 1 // 0))
    with pytest.raises(PlanError, match=r"items\(sample\) of sample 0=-1 is too small"):
        windows(loader(plan=ITEMS, items=lambda _: -1))
    short = plan_token_budget(tokens_per_micro_batch=5, global_batch_samples=8)
    with pytest.raises(PlanError, match="sample 1 has 8 tokens, more than tokens_per_micro_batch=5; raise"):
        windows(loader(plan=short))
