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

from loading_data import Ragged, StatefulStream, Stream, windows
from wholebatch.budget import plan_token_budget
from wholebatch.errors import JudgeError, UsageError
from wholebatch.loading import WindowLoader, pad_collate
from wholebatch.loading.ahead import made_in_order
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
