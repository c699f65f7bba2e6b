"""The loader under attack: large views, what can't be sent, and workers that end; each once broke."""

from __future__ import annotations

import json
import os
import pickle
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from loading_data import Bad, Ragged, StatefulStream, Stream, lengths_of, windows
from wholebatch.budget import plan_token_budget
from wholebatch.errors import JudgeError, PlanError, UsageError
from wholebatch.loading import WindowBatches, WindowLoader, pad_collate
from wholebatch.loading.ahead import made_in_order
from wholebatch.loading.twins import is_same
from wholebatch.loading.unread import Unread
from wholebatch.order import ItemOrder, SampleOrder
from wholebatch.plan import plan_batch

FIXED = plan_batch(global_batch_samples=8, micro_batch_samples=2)
BUDGET = plan_token_budget(tokens_per_micro_batch=18, global_batch_samples=8)


def loader(dataset: Any = None, **more: Any) -> WindowLoader:
    dataset = Ragged(21) if dataset is None else dataset
    return WindowLoader(dataset, **({"plan": FIXED, "collate": pad_collate(), "seed": 3} | more))


# what workers send -----------------------------------------------------------------------------------


def sent(make: Any) -> Any:
    """What comes over from a worker that makes it, once."""
    (found,) = made_in_order(make, [0], told=str, workers=1, ahead=1, seed=0)
    return found


def test_views_of_a_large_tensor_travel_alone() -> None:
    shard = torch.arange(5_000_000)
    array = np.arange(5_000_000)

    def views(_: int) -> Any:
        turned = torch.arange(12.0).view(3, 4).t()
        leaf = torch.arange(8.0)[2:4].requires_grad_()
        return shard[4:7], array[4:7], turned, turned[1:3], leaf, shard[:1].expand(3)

    view, cut, turned, part, leaf, expanded = sent(views)
    assert view.tolist() == cut.tolist() == [4, 5, 6]
    assert view.untyped_storage().nbytes() == view.nbytes, "the whole shard came over"
    assert turned.tolist() == torch.arange(12.0).view(3, 4).t().tolist()
    assert part.tolist() == turned[1:3].tolist()
    assert leaf.requires_grad
    assert leaf.tolist() == [2.0, 3.0]
    assert expanded.tolist() == [0, 0, 0]
    assert expanded.untyped_storage().nbytes() <= 3 * 8


def test_entries_that_are_one_tensor_stay_one() -> None:
    def twice(_: int) -> Any:
        tokens = torch.arange(100)[2:5]
        return {"input_ids": tokens, "labels": tokens}

    found = sent(twice)
    assert found["input_ids"] is found["labels"]


def test_samples_of_a_shard_cost_what_they_hold() -> None:
    class Shard:
        def __init__(self) -> None:
            self.shard = torch.arange(5_000_000)

        def __len__(self) -> int:
            return 32

        def __getitem__(self, index: int) -> Any:
            return self.shard[4 * index : 4 * index + 3]

    for window in loader(Shard(), collate=list, workers=1, shuffle=False):
        assert all(
            sample.untyped_storage().nbytes() == sample.nbytes for batch in window for sample in batch
        )


class Locked(Ragged):
    """Samples that no process can send to another."""

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index) | {"lock": threading.Lock()}


class LockedStream(Stream):
    def __iter__(self) -> Iterator[Any]:
        for sample in super().__iter__():
            yield sample | {"made": lambda: 0}


def test_what_a_worker_can_not_send_is_named() -> None:
    words = r"the micro-batch of samples \[0, 1\] can't be sent from a worker .*lock.*set workers to 0"
    with pytest.raises(UsageError, match=words):
        windows(loader(Locked(21), collate=lambda samples: samples, workers=1, shuffle=False))
    words = r"samples 0 to 7 of the stream can't be sent from a worker .*lambda"
    with pytest.raises(UsageError, match=words):
        windows(loader(LockedStream(20), workers=1, collate=lambda samples: samples))
    words = r"samples 0 to 7 of the stream in worker 0 can't be sent"
    with pytest.raises(UsageError, match=words):
        windows(loader(LockedStream(20), workers=2, collate=lambda samples: samples))


class PickledWrongly:
    def __reduce__(self) -> Any:
        return int, ("no number",)


def test_what_can_not_be_read_back_is_said() -> None:
    with pytest.raises(UsageError, match=r"can't be read back .*no number.*pickles itself wrongly; mend"):
        sent(lambda _: PickledWrongly())


class SilentError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_without_words_is_named_by_its_class(workers: int) -> None:
    class Silent(Ragged):
        def __getitem__(self, index: int) -> Any:
            raise SilentError

    with pytest.raises(
        JudgeError, match=r"reading sample \d+ failed with SilentError, whose text can't be"
    ):
        windows(loader(Silent(21), workers=workers))


class Ending(Ragged):
    """A worker that reads sample 0 ends in its own way."""

    def __init__(self, how: Any) -> None:
        super().__init__(21)
        self.how = how

    def __getitem__(self, index: int) -> Any:
        if index == 0:
            self.how()
        return super().__getitem__(index)


def ended_by(number: int) -> Any:
    return lambda: os.kill(os.getpid(), number)


@pytest.mark.slow  # torch looks every 5 s
@pytest.mark.parametrize(
    ("how", "words"),
    [
        (lambda: os._exit(3), r"exit code 3\) ended; an exit code means .* ended the process"),
        (ended_by(signal.SIGKILL), r"SIGKILL\) ended; the usual cause is memory"),
        (ended_by(signal.SIGSEGV), r"SIGSEGV\) ended; native code .* faulthandler"),
        (ended_by(signal.SIGTERM), r"SIGTERM\) ended; something outside"),
        (ended_by(signal.SIGRTMIN + 3), r"killed by .*\) ended; something outside"),
    ],
)
def test_the_end_of_a_worker_is_told_with_its_cause(how: Any, words: str) -> None:
    with pytest.raises(JudgeError, match=words) as caught:
        windows(loader(Ending(how), workers=1, shuffle=False))
    assert ("memory" in str(caught.value)) == ("memory" in words)


# states ----------------------------------------------------------------------------------------------


@dataclass
class Place:
    """A state of the user's own class."""

    next: int


class PlaceStream(StatefulStream):
    def state_dict(self) -> Any:
        return {"place": Place(self.next)}

    def load_state_dict(self, state: Any) -> None:
        self.next = state["place"].next


@pytest.mark.parametrize("workers", [0, 1])
def test_a_state_of_a_class_of_the_user_s_is_kept_as_it_is(workers: int) -> None:
    whole = windows(loader(PlaceStream(21), workers=workers))
    first, second = (loader(PlaceStream(21), workers=workers) for _ in range(2))
    begun = windows(first, 1)
    second.load_state_dict(pickle.loads(pickle.dumps(first.state_dict())))
    assert begun + windows(second) == whole


def test_a_state_of_plain_values_is_plain() -> None:
    made = loader(StatefulStream(21))
    windows(made, 1)
    assert json.loads(json.dumps(made.state_dict())) == made.state_dict()


@pytest.mark.parametrize(
    ("dataset", "state", "words"),
    [
        (Ragged(21), None, "samples by index: it has a NoneType"),
        (Ragged(21), {"source": {}}, r"it has \['source'\]"),
        (Ragged(21), {"source": None, "samples_left_out": 0}, "its source has a NoneType"),
        (Ragged(21), {"source": {"position": 8}, "samples_left_out": 0}, r"its source has \['position'\]"),
        (StatefulStream(21), [1, 2], "a stream: it has a list"),
        (StatefulStream(21), {"source": {}, "samples_left_out": 0}, r"its source has \[\]"),
    ],
)
def test_what_is_no_state_is_refused(dataset: Any, state: Any, words: str) -> None:
    with pytest.raises(UsageError, match=f"no state of a loader of .*{words}; give what state_dict"):
        loader(dataset).load_state_dict(state)


@pytest.mark.parametrize("cursor", [None, {"copies": []} | {"strange": 1}, {"copies": [3]}])
def test_a_damaged_cursor_is_refused(cursor: Any) -> None:
    made = loader(StatefulStream(21))
    state = made.state_dict()
    state["source"]["cursor"] = cursor
    with pytest.raises(UsageError, match=r"cursor of the state is none that a loader saved .*: .*; give"):
        made.load_state_dict(state)


def test_a_state_with_a_wrong_number_changes_nothing() -> None:
    made = loader()
    windows(made, 1)
    state = made.state_dict()
    with pytest.raises(UsageError, match="samples_left_out=None"):
        loader().load_state_dict(state | {"samples_left_out": None})


def test_a_loader_that_begins_at_its_end_says_so() -> None:
    for at_end in (loader(position=21), loader()):
        if not at_end.position:
            done = loader()
            windows(done)
            at_end.load_state_dict(done.state_dict())
        with pytest.raises(UsageError, match=r"the end of its data, at position 21; .* num_epochs="):
            iter(at_end)
    assert len(windows(loader(position=21, num_epochs=2))) == 3
    done, made = loader(StatefulStream(21)), loader(StatefulStream(21))
    windows(done)
    made.load_state_dict(done.state_dict())
    with pytest.raises(UsageError, match="the end of its data, at position 21"):
        iter(made)


def test_a_replica_whose_stream_ended_before_the_others_goes_on_with_nothing() -> None:
    plan = plan_batch(global_batch_samples=8, micro_batch_samples=2, ranks=2)
    done, made = (loader(StatefulStream(6), plan=plan, replica=1) for _ in range(2))
    windows(done)
    made.load_state_dict(done.state_dict())
    assert windows(made) == []


# each sample once ------------------------------------------------------------------------------------


class Whole(IterableDataset[Any]):
    """Does not divide its samples, or only from one number on."""

    def __init__(self, num_samples: int = 20, make: Any = lambda index: {"x": index}) -> None:
        self.num_samples = num_samples
        self.make = make

    def __iter__(self) -> Iterator[Any]:
        yield from map(self.make, range(self.num_samples))


@pytest.mark.parametrize(
    "dataset",
    [
        iter([{"x": 1}] * 20),
        ({"x": n} for n in range(20)),
        {1, 2, 3},
        {1: 2, 3: 4}.values(),
        map(int, "123"),
    ],
)
def test_what_can_not_divide_itself_is_not_given_to_several_workers(dataset: Any) -> None:
    with pytest.raises(
        UsageError, match=r"each of 2 workers would read whole, so that every .* came 2 times"
    ):
        loader(dataset, workers=2, collate=list)
    loader(dataset, workers=1, collate=list)


SAMPLES: list[Any] = [
    lambda index: {"x": torch.arange(index + 1), "y": [np.arange(index), "text"]},
    lambda index: (index, 2.5, None),
    lambda _: np.float64(1.0),
]


@pytest.mark.parametrize("make", SAMPLES)
def test_workers_that_read_the_same_are_found_before_a_window(make: Any) -> None:
    made = loader(Whole(make=make), workers=2, collate=list)
    with pytest.raises(UsageError, match=r"same first 8 samples .* would come 2 times; .*get_worker_info"):
        next(iter(made))
    assert made.position == 0
    assert sum(len(window.sample_ids) for window in loader(Whole(make=make), workers=1, collate=list)) == 20
    with pytest.raises(UsageError, match="workers 0 and 1 read the same first 8 samples"):
        next(iter(loader(lambda: iter(Whole(make=make)), workers=3, collate=list)))


def test_what_differs_is_not_the_same() -> None:
    class Incomparable:
        def __eq__(self, other: object) -> bool:
            raise RuntimeError

        __hash__ = None  # type: ignore[assignment]

    pairs: list[tuple[Any, Any]] = [
        (1, 1.0),
        (torch.zeros(2), torch.zeros(2, 1)),
        (torch.zeros(2), torch.zeros(2).double()),
        (torch.zeros(2), torch.tensor([0.0, 1.0])),
        (np.zeros(2), np.ones(2)),
        ({"a": 1}, {"b": 1}),
        ({"a": 1}, {"a": 2}),
        ([1], [1, 1]),
        ((1, 2), (1, 3)),
        (Incomparable(), Incomparable()),
    ]
    for one, other in pairs:
        assert not is_same(one, other), (one, other)


def test_a_stream_that_divides_itself_is_left_alone() -> None:
    made = loader(Stream(21), workers=2)
    assert sorted(n for window in made for batch in window for n in batch["index"].tolist()) == list(
        range(21)
    )
    assert windows(loader(Stream(0), workers=2)) == []
    assert len(windows(loader(Stream(1), workers=2))) == 1


# arguments -------------------------------------------------------------------------------------------


class OddLength(Ragged):
    def __len__(self) -> int:
        return 3.5  # type: ignore[return-value]


class OwnOrder:
    """An order that does not tell its global batch."""

    def __init__(self) -> None:
        self._order = SampleOrder(num_samples=21, global_batch_samples=8)
        self.epoch, self.global_batch = self._order.epoch, self._order.global_batch
        self.next_position, self.window = self._order.next_position, self._order.window


ORDER = SampleOrder(num_samples=21, global_batch_samples=8)
MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "class": ({"dataset": Ragged}, r"the data set is the class Ragged; give an instance of it, Ragged\("),
    "length": ({"dataset": OddLength(21)}, "a OddLength, failed with TypeError: .*float.*; let __len__"),
    "no samples": ({"dataset": []}, "the data set has no samples"),
    "plan": ({"plan": None}, "plan is a NoneType; give what plan_batch or"),
    "plan of a dict": ({"plan": {"x": 1}}, "plan is a dict"),
    "order of a list": (
        {"order": [1, 2]},
        "order is a list without epoch, global_batch, next_position, window",
    ),
    "order and shuffle": ({"order": ORDER, "shuffle": False}, "shuffle=False is of the default order"),
    "order and items": (
        {
            "order": OwnOrder(),
            "items": [1] * 21,
            "plan": plan_token_budget(global_batch_items=20, tokens_per_micro_batch=18),
            "lengths": lengths_of(21),
        },
        "items= is of the default order",
    ),
    "order of another size": (
        {"order": SampleOrder(num_samples=21, global_batch_samples=16)},
        "the order has global_batch_samples=16 and the plan global_batch_samples=8",
    ),
    "order of another size under a budget": (
        {
            "order": SampleOrder(num_samples=21, global_batch_samples=4),
            "plan": BUDGET,
            "lengths": lengths_of(21),
        },
        "the order has global_batch_samples=4 and the plan global_batch_samples=8",
    ),
    "order in items": (
        {"order": ItemOrder(num_samples=3, global_batch_items=20, items=np.array([1, 2, 3]))},
        "the order has global_batch_items=20 and the plan global_batch_items=None",
    ),
    "items": ({"items": [1] * 21}, "items= is for a plan of global_batch_items, .* global_batch_samples=8"),
    "shuffle": ({"shuffle": "no"}, "shuffle is 'no'; give True or False"),
    "lengths": (
        {"plan": BUDGET, "lengths": [[1], [2, 3]]},
        r"lengths is no sequence of 21 numbers \(.*\); give one whole number",
    ),
    "items of lists": (
        {
            "plan": plan_token_budget(global_batch_items=20, tokens_per_micro_batch=18),
            "lengths": lengths_of(21),
            "items": [[1], [2, 3]],
        },
        "items is no sequence of 21 numbers",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_plain_mistakes_are_named(name: str) -> None:
    given, words = MISTAKES[name]
    with pytest.raises(UsageError, match=words):
        loader(**given)


def test_an_order_that_tells_no_size_is_taken() -> None:
    assert windows(loader(order=OwnOrder())) == windows(loader(order=ORDER))


# all left out ----------------------------------------------------------------------------------------


class Typo(Ragged):
    """Its code is wrong: no sample can be read."""

    def __getitem__(self, index: int) -> Any:
        return self.lenghts[index]  # type: ignore[attr-defined]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_set_that_gives_no_sample_is_not_skipped(workers: int) -> None:
    made = loader(Typo(21), on_bad_sample="skip", workers=workers, num_epochs=3)
    words = (
        r"none of 21 samples in epoch 0 could be read, and .*: reading sample \d+ failed with Attr.*lenghts"
    )
    with pytest.raises(JudgeError, match=words) as caught:
        windows(made)
    assert isinstance(caught.value.__cause__, AttributeError)
    assert made.position == 16, "the window that ends the epoch was not handed out"


def test_many_samples_in_a_row_that_can_not_be_read_end_the_run() -> None:
    plan = plan_batch(global_batch_samples=250, micro_batch_samples=250)
    made = loader(Bad(5000, range(100, 5000)), plan=plan, on_bad_sample="skip", shuffle=False)
    with pytest.raises(JudgeError, match=r"1000 samples in a row could not be read, .* number 1249"):
        windows(made)
    windows(loader(Bad(2000, range(1000, 1999)), plan=plan, on_bad_sample="skip", shuffle=False))


def test_a_replica_whose_share_is_bad_goes_on() -> None:
    plan = plan_batch(global_batch_samples=2, micro_batch_samples=1, ranks=2)
    made = loader(Bad(2, [1]), plan=plan, replica=1, on_bad_sample="skip", shuffle=False, num_epochs=3)
    assert [window[2] for window in windows(made)] == [(1,)] * 3


def test_an_epoch_that_was_begun_before_is_not_judged() -> None:
    made = loader(Typo(21), on_bad_sample="skip", position=16, num_epochs=2)
    with pytest.raises(JudgeError, match="samples in epoch 1 could be read"):
        windows(made)
    assert made.position == 37


def test_what_could_be_read_the_second_time_has_no_cause() -> None:
    class Flaky(Ragged):
        broken = True

        def __getitem__(self, index: int) -> Any:
            if self.broken:
                raise OSError("gone")
            return super().__getitem__(index)

    flaky = Flaky(21)
    unread = Unread(samples=flaky, seed=0, any_read=False, in_a_row=999)
    flaky.broken = False
    with pytest.raises(
        JudgeError, match=r"1000 samples in a row could not be read, .* leave out all; mend"
    ) as caught:
        unread.see(WindowBatches([], sample_ids=(), left_out=(3,)), ends_epoch=False)
    assert caught.value.__cause__ is None


# the bound -------------------------------------------------------------------------------------------


def to_eights(samples: list[Any]) -> Any:
    """Pads to a multiple of 8, which the lengths do not know."""
    rows = pad_collate()(samples)["input_ids"]
    return {"input_ids": torch.nn.functional.pad(rows, (0, -rows.shape[1] % 8))}


TRUNCATING = plan_token_budget(global_batch_samples=8, tokens_per_micro_batch=4, too_long="truncate")
ALONE = plan_token_budget(
    global_batch_samples=8, tokens_per_micro_batch=4, too_long="alone", tokens_alone=9
)
SMALL = plan_token_budget(global_batch_samples=8, tokens_per_micro_batch=12)
PACKED = plan_token_budget(global_batch_samples=8, tokens_per_micro_batch=18, rows="packed")
BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "lengths": (
        {"lengths": [1] * 21},
        r"0, .*\] has 8 x \d = \d+ positions, more than tokens_per_micro_batch=18",
    ),
    "found": (
        {"lengths": lambda _: 1},
        r"8 x \d = \d+ positions, more .* count in lengths= what collation",
    ),
    "truncate": (
        {"plan": TRUNCATING, "lengths": lengths_of(21), "truncate": lambda sample, _: sample},
        r"1 x \d = \d positions, more than tokens_per_micro_batch=4, .*; let truncate= cut",
    ),
    "alone": (
        {"plan": ALONE, "lengths": lengths_of(21), "collate": to_eights},
        "1 x 16 = 16 .* tokens_alone=9",
    ),
    "eights": (
        {"lengths": lengths_of(21), "collate": to_eights, "plan": SMALL},
        "rounded up to a multiple of 8, or raise the",
    ),
    "packed": (
        {"plan": PACKED, "lengths": lengths_of(21)},
        "the plan has rows='packed' and this is padded",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_micro_batch_over_the_bound_is_refused(name: str) -> None:
    given, words = BROKEN[name]
    settings = {"plan": BUDGET, "shuffle": False} | given
    with pytest.raises(UsageError, match=words):
        windows(loader(**settings))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_micro_batch_of_a_stream_over_the_bound_is_refused(workers: int) -> None:
    made = loader(Stream(21), plan=BUDGET, lengths=lambda _: 1, workers=workers)
    with pytest.raises(
        UsageError, match=r"samples \[0, 1, .*7\] has 8 x 9 = 72 positions, more than .*=18"
    ):
        windows(made)


def test_what_is_no_row_of_tokens_is_not_measured() -> None:
    def nested(samples: list[Any]) -> Any:
        parts = [torch.tensor(sample["input_ids"]) for sample in samples]
        return {"input_ids": torch.nested.nested_tensor(parts, layout=torch.jagged)}

    for collate in (list, nested, lambda _: {"input_ids": torch.zeros(9, 9, 9)}, lambda _: {"x": 1}):
        made = loader(plan=BUDGET, lengths=[1] * 21, collate=collate)
        assert sum(len(window.sample_ids) for window in made) == 21


# padding ---------------------------------------------------------------------------------------------


UNEVEN = [{"a": torch.tensor([1.0])}, {"a": torch.tensor([1.0, 2.0])}]
WHOLE = [{"a": [1]}, {"a": [1, 2]}]
PADDING: dict[str, tuple[Any, tuple[Any, ...], str]] = {
    "name": (
        pad_collate(inputs_ids=1),
        (WHOLE,),
        r"pad_collate\(inputs_ids=...\) fills an entry that sample 0 does not have, which has \['a'\]",
    ),
    "few ids": (pad_collate(), (WHOLE, [3]), "1 ids were given for 2 samples; give each its own"),
    "none": (pad_collate(), ([],), "padding of no samples has no shape; give at least one"),
    "nothing": (pad_collate(), (None,), "padding takes a list of samples, and this is a NoneType"),
    "text": (pad_collate(), ("ab",), "padding takes a list of samples, and this is a str"),
    "fill text": (pad_collate(a="x"), (WHOLE,), "padding of 'a' is to hold 'x', which is no number"),
    "fill None": (pad_collate(a=None), (WHOLE,), "padding of 'a' is to hold None, which is no number"),
    "fill NaN": (
        pad_collate(a=float("nan")),
        (WHOLE,),
        "padding of 'a' is to hold nan, which torch.int64 can't",
    ),
    "fill infinity": (pad_collate(a=float("inf")), (WHOLE,), "is to hold inf, which torch.int64 can't"),
    "fill half": (pad_collate(a=1.5), (WHOLE,), "is to hold 1.5, which torch.int64 can't"),
    "fill too large": (pad_collate(a=1e300), (UNEVEN,), r"is to hold 1e\+300, which torch.float32 can't"),
    "fill complex": (pad_collate(a=1j), (UNEVEN,), "is to hold 1j, which torch.float32 can't"),
    "mask of numbers": (
        pad_collate(attention_mask=True),
        ([{"input_ids": 1}],),
        "input_ids, which in sample 0 of the micro-batch have 0 dimensions",
    ),
    "sample_ids": (
        pad_collate(),
        ([{"sample_ids": 7}], [3]),
        "sample 3 has an entry .sample_ids., where a",
    ),
}


@pytest.mark.parametrize("name", PADDING)
def test_padding_that_would_go_wrong_is_named(name: str) -> None:
    collate, given, words = PADDING[name]
    with pytest.raises(UsageError, match=words):
        collate(*given)


def test_padding_holds_the_nearest_number_of_its_dtype() -> None:
    assert pad_collate(a=0.1)(UNEVEN)["a"][0, 1] == torch.tensor(0.1)
    assert pad_collate(a=float("inf"))(UNEVEN)["a"][0, 1] == float("inf")
    assert pad_collate(a=float("nan"))(UNEVEN)["a"][0, 1].isnan()
    assert pad_collate()([{"sample_ids": 7}])["sample_ids"].tolist() == [7]


@pytest.mark.parametrize("ahead", [True, False], ids=["list", "function"])
def test_a_sample_without_tokens_is_named_by_its_id(ahead: bool) -> None:
    rows = [{"input_ids": list(range(1 + index % 3))} for index in range(20)] + [{"input_ids": []}]
    plan = plan_token_budget(global_batch_samples=8, tokens_per_micro_batch=18)
    tokens = [len(row["input_ids"]) for row in rows]
    lengths = tokens if ahead else lambda sample: len(sample["input_ids"])
    loader = WindowLoader(rows, plan=plan, lengths=lengths, collate=pad_collate())
    with pytest.raises(PlanError, match="sample 20 has 0 tokens"):
        list(loader)
