"""The loader over samples by index: the same windows however they are read, resumed and skipped."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Subset

from loading_data import (
    Bad,
    Drawing,
    Dying,
    Marking,
    Ragged,
    WhoReads,
    cut,
    indices,
    is_alive,
    length_of,
    lengths_of,
    windows,
)
from wholebatch.budget import plan_token_budget
from wholebatch.errors import JudgeError, PlanError, UsageError
from wholebatch.loading import WindowLoader, pad_collate
from wholebatch.order import MixedOrder, SampleOrder, Source
from wholebatch.plan import plan_batch

FIXED = plan_batch(global_batch_samples=8, micro_batch_samples=3 - 1)
BUDGET = plan_token_budget(tokens_per_micro_batch=18, global_batch_samples=8)


def loader(dataset: Any = None, **more: Any) -> WindowLoader:
    dataset = Ragged(21) if dataset is None else dataset
    plan = more.pop("plan", FIXED)
    budget = plan.micro_batch_samples is None
    lengths = more.pop("lengths", lengths_of(len(dataset)) if budget else None)
    settings = {"collate": pad_collate(), "seed": 3, "lengths": lengths} | more
    return WindowLoader(dataset, plan=plan, **settings)


# which samples ---------------------------------------------------------------------------------------


def test_windows_follow_the_order_and_its_cuts() -> None:
    order = SampleOrder(num_samples=21, global_batch_samples=8, seed=3)
    found = windows(loader())
    position = 0
    for window in found:
        ids = order.global_batch(position)
        assert window[1:] == (tuple(ids), (), position, 0)
        assert [batch["sample_ids"] for batch in window[0]] == [
            ids[i : i + 2] for i in range(0, len(ids), 2)
        ]
        position = order.next_position(position)
    assert [len(window[1]) for window in found] == [8, 8, 5], "the tail is a window of its own"
    assert sorted(itertools.chain(*indices(found))) == list(range(21))


@pytest.mark.parametrize("plan", [FIXED, BUDGET])
@pytest.mark.parametrize("workers", [1, 3])
def test_workers_change_nothing(plan: Any, workers: int) -> None:
    make = lambda n: loader(Drawing(21), plan=plan, workers=n, num_epochs=2)  # noqa: E731
    assert windows(make(workers)) == windows(make(0))


def test_workers_change_nothing_where_lengths_are_found() -> None:
    make = lambda n: loader(Drawing(21), plan=BUDGET, lengths=length_of, workers=n)  # noqa: E731
    assert windows(make(2)) == windows(make(0))


def test_a_token_budget_cuts_the_same_global_batch() -> None:
    found, fixed = windows(loader(plan=BUDGET)), windows(loader())
    assert [sorted(window[1]) for window in found] == [sorted(window[1]) for window in fixed]
    shapes = [(len(batch["input_ids"]), len(batch["input_ids"][0])) for w in found for batch in w[0]]
    assert all(samples * tokens <= 18 for samples, tokens in shapes)
    assert len({samples for samples, _ in shapes}) > 1
    for batches, sample_ids, *_ in found:
        assert sample_ids == tuple(number for batch in batches for number in batch["sample_ids"])


@pytest.mark.parametrize(
    "lengths", [lengths_of(21), np.array(lengths_of(21)), torch.tensor(lengths_of(21))]
)
def test_lengths_are_any_sequence(lengths: Any) -> None:
    assert windows(loader(plan=BUDGET, lengths=lengths)) == windows(loader(plan=BUDGET))


def test_the_replicas_share_every_global_batch() -> None:
    for lengths in (lengths_of(21), length_of):
        plan = plan_token_budget(tokens_per_micro_batch=18, global_batch_samples=8, ranks=3)
        parts = [windows(loader(plan=plan, lengths=lengths, replica=r)) for r in range(3)]
        whole = windows(loader())
        for mine, together in zip(zip(*parts, strict=True), whole, strict=True):
            ids = [number for window in mine for number in window[1]]
            assert sorted(ids) == sorted(together[1])
            assert {window[3] for window in mine} == {together[3]}


def test_found_lengths_cut_the_neighbouring_share_alone() -> None:
    plan = plan_token_budget(tokens_per_micro_batch=18, global_batch_samples=8, ranks=3)
    ids = SampleOrder(num_samples=21, global_batch_samples=8, seed=3).global_batch(0)
    shares = [ids[:3], ids[3:6], ids[6:]]
    for replica, share in enumerate(shares):
        (window, *_) = windows(loader(plan=plan, lengths=length_of, replica=replica), 1)
        assert sorted(window[1]) == sorted(share)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("lengths", [None, "found"])
def test_a_replica_without_samples_has_an_empty_window(workers: int, lengths: Any) -> None:
    plan = plan_token_budget(tokens_per_micro_batch=18, global_batch_samples=8, ranks=8)
    made = loader(plan=plan, replica=7, workers=workers, lengths=length_of if lengths else lengths_of(21))
    assert [len(window[1]) for window in windows(made)] == [1, 1, 0]
    fixed = plan_batch(global_batch_samples=8, micro_batch_samples=1, ranks=8)
    found = windows(loader(plan=fixed, replica=7, workers=workers))
    assert found[2][:2] == ([], ())


def test_a_global_batch_in_items_comes_from_their_array() -> None:
    plan = plan_token_budget(tokens_per_micro_batch=18, global_batch_items=20)
    found = windows(loader(plan=plan, items=lengths_of(21), shuffle=False))
    items = [sum(lengths_of(21)[number] for number in window[1]) for window in found]
    assert max(items) <= 20
    assert sorted(itertools.chain(*indices(found))) == list(range(21))
    assert sum(items) == sum(lengths_of(21))


def test_any_order_will_do() -> None:
    order = MixedOrder(
        sources=(Source(num_samples=6, weight=3), Source(num_samples=15, weight=1)),
        global_batch_samples=8,
        seed=0,
    )
    found = windows(loader(order=order), 3)
    assert [window[1] for window in found] == [tuple(order.global_batch(place)) for place in (0, 8, 16)]


def test_a_small_source_draws_anew_each_time_it_comes() -> None:
    """Several times within one epoch of the mixture, and within one global batch."""
    order = MixedOrder(
        sources=(Source(num_samples=3, weight=3), Source(num_samples=18, weight=1)),
        global_batch_samples=8,
        seed=0,
    )
    assert (order.epoch(16), max(order.sample_epochs(16))) == (0, 5)

    def drawn(**more: Any) -> set[Any]:
        return {
            (window[3], number, tuple(numbers))
            for window in windows(loader(Drawing(21), order=order, **more), 3)
            for batch in window[0]
            for number, numbers in zip(batch["index"], batch["drawn"], strict=True)
        }

    found = drawn()
    assert len({numbers for *_, numbers in found}) == 24
    assert found == drawn(workers=2) == drawn(plan=BUDGET) == drawn(plan=BUDGET, lengths=length_of)
    two = plan_batch(global_batch_samples=8, micro_batch_samples=2, ranks=2)
    assert found == drawn(plan=two, replica=0) | drawn(plan=two, replica=1)

    def collate(samples: Any) -> Any:
        return {"index": [0], "first": samples[0]["index"], "drawn": random.random()}

    made = windows(
        loader(
            order=order, collate=collate, plan=plan_batch(global_batch_samples=8, micro_batch_samples=1)
        ),
        3,
    )
    assert len({batch["drawn"] for window in made for batch in window[0]}) == 24


def test_samples_that_are_too_long_are_cut_short() -> None:
    for lengths in (lengths_of(21), length_of):
        plan = plan_token_budget(tokens_per_micro_batch=5, global_batch_samples=8, too_long="truncate")
        found = windows(loader(plan=plan, lengths=lengths, truncate=cut))
        held = {
            number: sum(label != -100 for label in labels)
            for window in found
            for batch in window[0]
            for number, labels in zip(batch["index"], batch["labels"], strict=True)
        }
        assert held == {number: min(5, length) for number, length in enumerate(lengths_of(21))}


def test_samples_that_are_too_long_come_alone_under_the_larger_bound() -> None:
    plan = plan_token_budget(
        tokens_per_micro_batch=6, global_batch_samples=8, too_long="alone", tokens_alone=9
    )
    for batch in (batch for window in windows(loader(plan=plan)) for batch in window[0]):
        longest = max(map(len, batch["input_ids"]))
        assert longest * len(batch["input_ids"]) <= 6 or len(batch["input_ids"]) == 1


def test_epochs_end_and_the_loop_says_when_there_is_no_more() -> None:
    made = loader(num_epochs=2)
    found = windows(made)
    assert [window[4] for window in found] == [0, 0, 0, 1, 1, 1]
    assert found[0][1] != found[3][1]
    assert made.position == 42
    with pytest.raises(UsageError, match=r"come to the end of its data, at position 42; .* num_epochs="):
        iter(made)
    assert len(windows(loader(num_epochs=None), 8)) == 8


# what is drawn at random -----------------------------------------------------------------------------


def test_random_numbers_depend_on_seed_epoch_and_sample_alone() -> None:
    def drawn(**more: Any) -> dict[Any, Any]:
        return {
            (window[4], number): tuple(numbers)
            for window in windows(loader(Drawing(21), num_epochs=2, **more))
            for batch in window[0]
            for number, numbers in zip(batch["index"], batch["drawn"], strict=True)
        }

    found = drawn()
    assert found == drawn(plan=BUDGET, workers=2)
    assert len(set(found.values())) == 42
    assert found != drawn(seed=4)


def test_the_random_state_of_the_training_is_left_alone() -> None:
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # type: ignore[index]
    windows(loader(Drawing(21), workers=2))
    windows(loader(Drawing(21), plan=BUDGET, lengths=length_of))
    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tolist() == before[1]  # type: ignore[index]
    assert torch.equal(torch.get_rng_state(), before[2])


# read ahead ------------------------------------------------------------------------------------------


def test_the_next_window_is_read_while_this_one_runs(tmp_path: Path) -> None:
    running = iter(loader(Marking(21, tmp_path), workers=1, shuffle=False))
    next(running)
    deadline = time.monotonic() + 30
    while not {"8", "15"} <= {path.name for path in tmp_path.iterdir()}:
        assert time.monotonic() < deadline, "nothing was read ahead"
        time.sleep(0.01)


def test_without_workers_a_window_is_read_when_it_is_asked_for(tmp_path: Path) -> None:
    running = iter(loader(Marking(21, tmp_path), shuffle=False))
    assert not list(tmp_path.iterdir())
    next(running)
    # The third micro-batch of the next window would be the first to show that somebody reads on.
    assert {int(path.name) for path in tmp_path.iterdir()} == set(range(8))


@pytest.mark.parametrize("how", ["spawn", "forkserver"])
def test_what_can_not_be_sent_to_a_worker_is_said(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing.context._default_context, "_actual_context", None)  # type: ignore[attr-defined]
    multiprocessing.set_start_method(how)
    with pytest.raises(UsageError, match=rf"started by '{how}' here and are sent the data set .* module"):
        windows(loader(collate=lambda samples: samples, workers=1))


# resumed ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("plan", [FIXED, BUDGET])
def test_a_resumed_loader_gives_what_the_first_would_have(plan: Any, workers: int) -> None:
    whole = windows(loader(Drawing(21), plan=plan, num_epochs=2))
    for after in range(6):
        first = loader(Drawing(21), plan=plan, num_epochs=2, workers=workers)
        assert windows(first, after) == whole[:after]
        second = loader(Drawing(21), plan=plan, num_epochs=2)
        second.load_state_dict(first.state_dict())
        assert windows(second) == whole[after:], after


def test_a_resumed_loader_may_cut_otherwise() -> None:
    first = loader(num_epochs=2)
    windows(first, 2)
    other = plan_token_budget(tokens_per_micro_batch=30, global_batch_samples=8, ranks=2)
    for replica in range(2):
        second = loader(plan=other, replica=replica, num_epochs=2)
        second.load_state_dict(first.state_dict())
        assert [window[3] for window in windows(second)] == [16, 21, 29, 37]


def test_a_position_begins_like_a_state() -> None:
    assert windows(loader(position=16)) == windows(loader())[2:]


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"seed": 4}, "saved with seed 3, and it is 4 now"),
        ({"dataset": Ragged(22)}, "saved with num_samples 21, and it is 22 now"),
        ({"shuffle": False}, "saved with next_global_batch '.*', and it is '.*' now"),
    ],
)
def test_a_state_of_other_samples_is_refused(other: dict[str, Any], words: str) -> None:
    first = loader()
    windows(first, 1)
    state = first.state_dict()
    with pytest.raises(UsageError, match=words):
        loader(other.pop("dataset", None), **other).load_state_dict(state)


def test_a_state_at_no_boundary_or_of_nothing_is_refused() -> None:
    first = loader()
    windows(first, 1)
    state = first.state_dict()
    larger = plan_batch(global_batch_samples=10, micro_batch_samples=2)
    with pytest.raises(PlanError, match="position=8 lies inside an update"):
        loader(plan=larger).load_state_dict(state)
    with pytest.raises(
        UsageError, match=r"no state of a loader of samples by index: it has \['counters'\]"
    ):
        first.load_state_dict({"counters": 1})


# left early ------------------------------------------------------------------------------------------


def test_a_loop_that_was_left_goes_on_where_it_was() -> None:
    made = loader(workers=2)
    whole = windows(loader())
    for window in made:
        assert window.sample_ids == whole[0][1]
        break
    assert made.position == 8
    assert windows(made) == whole[1:]


def test_workers_end_when_the_loop_is_left() -> None:
    pids = set()
    made = loader(WhoReads(21), workers=2)
    for window in made:
        pids = {number for batch in window for number in batch["pid"].tolist()}
        assert all(is_alive(pid) for pid in pids)
        break
    assert len(pids) == 2
    assert not any(is_alive(pid) for pid in pids)
    assert made.position == 8


def test_two_loops_over_one_loader_do_not_mix() -> None:
    made = loader(workers=1)
    first = iter(made)
    next(first)
    windows(made, 1)
    with pytest.raises(
        UsageError, match="this loop over the loader is over: since its last window another"
    ):
        next(first)
    again = iter(made)
    made.load_state_dict(loader().state_dict())
    with pytest.raises(UsageError, match="or a state was loaded; begin a new loop"):
        next(again)
    assert windows(made) == windows(loader())


# what can't be read ----------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_a_bad_sample_is_named(workers: int) -> None:
    made = loader(Bad(21, [6]), workers=workers, shuffle=False)
    with pytest.raises(JudgeError, match="reading sample 6 failed with OSError: a broken record, number 6"):
        windows(made)
    assert made.position == 0, "the window that could not be read was not handed out"
    held = Subset(Bad(21, [6]), list(range(20, -1, -1)))  # type: ignore[arg-type]
    with pytest.raises(JudgeError, match="sample 14, which is 6 of the data set, failed"):
        windows(loader(held, workers=workers))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("how", ["fixed", "budget", "found"])
def test_bad_samples_are_skipped_and_told(workers: int, how: str) -> None:
    plan = FIXED if how == "fixed" else BUDGET
    lengths = {"fixed": None, "budget": lengths_of(21), "found": length_of}[how]
    bad = [3, 8, 9, 20]
    made = loader(Bad(21, bad), plan=plan, lengths=lengths, workers=workers, on_bad_sample="skip")
    found, whole = windows(made), windows(loader(plan=plan, lengths=lengths))
    for window, without_faults in zip(found, whole, strict=True):
        left_out = set(window[2])
        assert left_out == set(without_faults[1]) & set(bad)
        assert sorted(window[1]) == sorted(set(without_faults[1]) - left_out)
        assert sum(len(batch["sample_ids"]) for batch in window[0]) == len(window[1])
        assert window[3] == without_faults[3], "a position counts the samples of the order"
    assert made.samples_left_out == 4
    again = loader(Bad(21, bad), plan=plan, lengths=lengths)
    again.load_state_dict(made.state_dict())
    assert again.samples_left_out == 4


def test_a_window_of_bad_samples_alone_is_empty() -> None:
    made = loader(Bad(21, range(8)), on_bad_sample="skip", shuffle=False)
    (first, second, _) = windows(made)
    assert first[:3] == ([], (), tuple(range(8)))
    assert len(second[1]) == 8


@pytest.mark.parametrize("workers", [0, 1])
def test_what_fails_after_reading_is_never_skipped(workers: int) -> None:
    def collate(_: Any) -> Any:
        raise ZeroDivisionError("odd")

    def length(_: Any) -> int:
        raise ZeroDivisionError("no length")

    settings = {"on_bad_sample": "skip", "shuffle": False, "workers": workers}
    with pytest.raises(JudgeError, match=r"collating samples \[0, 1\] failed with ZeroDivisionError: odd"):
        windows(loader(collate=collate, **settings))
    with pytest.raises(JudgeError, match=r"lengths\(sample\) of sample 0 failed with ZeroDivisionError"):
        windows(loader(plan=BUDGET, lengths=length, **settings))
    with pytest.raises(PlanError, match=r"lengths\(sample\) of sample 0=0.5 is a float"):
        windows(loader(plan=BUDGET, lengths=lambda _: 0.5, **settings))
    plan = plan_token_budget(tokens_per_micro_batch=5, global_batch_samples=8, too_long="truncate")
    with pytest.raises(JudgeError, match=r"truncate\(sample, 5\) of sample 1 failed with ZeroDiv"):
        windows(loader(plan=plan, truncate=lambda *_: 1 // 0, **settings))


@pytest.mark.slow  # torch looks every 5 s
def test_a_worker_that_dies_is_named_and_nothing_is_handed_out_after_it() -> None:
    made = loader(Dying(21), workers=2, shuffle=False, num_epochs=None, on_bad_sample="skip")
    begin = time.monotonic()
    with pytest.raises(
        JudgeError, match=r"of 2 workers .*, number \d \(process \d+, killed by SIGKILL\) ended"
    ):
        windows(made)
    assert time.monotonic() - begin < 30
    assert made.position == 0


def test_a_worker_killed_while_it_reads_ahead_is_seen() -> None:
    made = loader(WhoReads(21), workers=2, num_epochs=None)
    running = iter(made)
    pids = {number for batch in next(running) for number in batch["pid"].tolist()}
    os.kill(min(pids), signal.SIGKILL)
    with pytest.raises(JudgeError, match=rf"process {min(pids)}, killed by SIGKILL"):
        list(itertools.islice(running, 200))
    assert not any(is_alive(pid) for pid in pids)


def test_a_data_set_that_changes_its_size_is_refused() -> None:
    samples = Ragged(21)
    made = loader(samples, num_epochs=2, order=SampleOrder(num_samples=21, global_batch_samples=8))
    running = iter(made)
    next(running)
    samples.lengths.append(1)
    with pytest.raises(UsageError, match="had 21 samples when this loop began and has 22 now"):
        list(running)


def test_an_order_of_other_samples_is_refused() -> None:
    order = SampleOrder(num_samples=30, global_batch_samples=8, shuffle=False)
    with pytest.raises(UsageError, match=r"the order has sample 2\d, and the data set has samples 0 to 20"):
        windows(loader(order=order))
    with pytest.raises(UsageError, match=r"the order has sample 2\d, and the data set has samples 0 to 20"):
        windows(loader(order=order, plan=BUDGET))


def test_an_order_of_larger_updates_than_the_plan_is_refused() -> None:
    class Untold:
        """Does not tell its global batch."""

        def __getattr__(self, name: str) -> Any:
            if name.startswith("global_batch_"):
                raise AttributeError(name)
            return getattr(SampleOrder(num_samples=21, global_batch_samples=16), name)

    order = Untold()
    with pytest.raises(UsageError, match=r"position 0 has 8 micro-batches on replica 0, more than .* 4"):
        windows(loader(order=order))


def test_a_micro_batch_without_samples_is_not_made_up() -> None:
    plan = plan_token_budget(
        tokens_per_micro_batch=18, global_batch_samples=8, ranks=6, equal_micro_batches=True
    )
    made = loader(plan=plan, replica=5)
    with pytest.raises(UsageError, match="the 5 samples of the update at position 16 leave replica 5"):
        windows(made)
