"""What a loader refuses before it reads anything, and how it calls a collation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from loading_data import Ragged, Stream, cut, length_of, lengths_of, windows
from wholebatch.budget import plan_token_budget
from wholebatch.errors import PlanError, UsageError
from wholebatch.loading import WindowLoader
from wholebatch.loading.parts import order_of
from wholebatch.order import ItemOrder, SampleOrder
from wholebatch.plan import plan_batch
from wholebatch.rows import pack_rows

FIXED = plan_batch(global_batch_samples=8, micro_batch_samples=2)
BUDGET = plan_token_budget(tokens_per_micro_batch=18, global_batch_samples=8)
TWO = plan_batch(global_batch_samples=8, micro_batch_samples=2, ranks=2)
ITEMS = plan_token_budget(tokens_per_micro_batch=18, global_batch_items=20)
SMALL = plan_token_budget(tokens_per_micro_batch=7, global_batch_samples=8)
TRUNCATE = plan_token_budget(tokens_per_micro_batch=5, global_batch_samples=8, too_long="truncate")
EQUAL = plan_token_budget(
    tokens_per_micro_batch=18, global_batch_samples=8, ranks=2, equal_micro_batches=True
)


class OnlyItems:
    def __getitem__(self, index: int) -> int:
        return index


class Nothing:
    pass


REFUSED = {
    "no data set": (
        {"dataset": 7},
        UsageError,
        "is a int with neither __getitem__ and __len__ nor",
    ),
    "nothing": ({"dataset": Nothing()}, UsageError, "is a Nothing with neither"),
    "text": ({"dataset": "file.txt"}, UsageError, "the data set is a str; give a data set"),
    "dict": ({"dataset": {}}, UsageError, "the data set is a dict; give a data set"),
    "another loader": (
        {"dataset": DataLoader([1, 2])},  # type: ignore[arg-type]
        UsageError,
        "is a DataLoader, whose place a WindowLoader takes; give its dataset",
    ),
    "no samples": ({"dataset": []}, UsageError, "the data set has no samples"),
    "which replica": ({"plan": TWO}, UsageError, "the plan has 2 replicas; give replica="),
    "no such replica": (
        {"plan": TWO, "replica": 2},
        UsageError,
        "replica=2 does not exist: the plan has 2, from 0; plan with the ranks that run",
    ),
    "negative replica": ({"replica": -1}, PlanError, "replica=-1 is too small"),
    "half a worker": ({"workers": 0.5}, PlanError, "workers=0.5 is a float"),
    "no epochs": ({"num_epochs": 0}, PlanError, "num_epochs=0 is too small"),
    "seed": ({"seed": -1}, PlanError, "seed=-1 is too small"),
    "position": ({"position": 3}, PlanError, "position=3 lies inside an update"),
    "bad sample": ({"on_bad_sample": "ignore"}, PlanError, "on_bad_sample='ignore' is not known; choose"),
    "collate": ({"collate": 3}, UsageError, "collate is a int; give a function of a list of samples"),
    "no lengths": ({"plan": BUDGET}, UsageError, "tokens_per_micro_batch=18 cuts by the lengths"),
    "few lengths": (
        {"plan": BUDGET, "lengths": [1, 2]},
        UsageError,
        r"lengths has shape \[2\], and the data set has 21 samples",
    ),
    "float lengths": (
        {"plan": BUDGET, "lengths": [1.5] * 21},
        UsageError,
        "lengths holds float64; give whole numbers",
    ),
    "negative lengths": (
        {"plan": BUDGET, "lengths": [1, -2] + [1] * 19},
        UsageError,
        "lengths of sample 1 is -2; none is below 0",
    ),
    "lengths of another data set": (
        {"lengths": lengths_of(20)},
        UsageError,
        r"lengths has shape \[20\], and the data set has 21",
    ),
    "too long": (
        {"plan": SMALL, "lengths": lengths_of(21)},
        PlanError,
        "sample 1 has 8 tokens, more than tokens_per_micro_batch=7; raise that, plan with too_long='alone'",
    ),
    "too long alone": (
        {
            "plan": plan_token_budget(
                tokens_per_micro_batch=5, global_batch_samples=8, too_long="alone", tokens_alone=8
            ),
            "lengths": lengths_of(21),
        },
        PlanError,
        "sample 5 has 9 tokens, more than tokens_alone=8",
    ),
    "no truncate": (
        {"plan": TRUNCATE, "lengths": lengths_of(21)},
        UsageError,
        "too_long='truncate'; give truncate=, a function",
    ),
    "truncate": (
        {"truncate": cut},
        UsageError,
        "truncate= is for a plan of a token budget with too_long='truncate'; leave it out",
    ),
    "no items": (
        {"plan": ITEMS, "lengths": lengths_of(21)},
        UsageError,
        "global_batch_items=20 of a map-style data set needs items=",
    ),
    "float items": (
        {"plan": ITEMS, "lengths": lengths_of(21), "items": [0.5] * 21},
        UsageError,
        "items holds float64",
    ),
    "equal and found": (
        {"plan": EQUAL, "replica": 0, "lengths": length_of},
        UsageError,
        "equal_micro_batches=True, and a replica that cuts its share alone may have another number",
    ),
    "equal and skipped": (
        {"plan": EQUAL, "replica": 0, "lengths": lengths_of(21), "on_bad_sample": "skip"},
        UsageError,
        "equal_micro_batches=True, and one that skips samples may have another number",
    ),
}
REFUSED_FOR_STREAMS = {
    "order": ({"order": SampleOrder(num_samples=21, global_batch_samples=8)}, "order= and shuffle=False"),
    "shuffle": ({"shuffle": False}, "order= and shuffle=False are of samples by index"),
    "epochs": ({"num_epochs": 2}, "num_epochs=2: a stream ends when it ends"),
    "no end": ({"num_epochs": None}, "num_epochs=None: a stream ends when it ends"),
    "skip": ({"on_bad_sample": "skip"}, 'on_bad_sample="skip": a stream that failed'),
    "drop": (
        {"plan": plan_batch(global_batch_samples=8, micro_batch_samples=2, tail="drop")},
        "tail='drop': that it ends is known only when it has",
    ),
    "lengths": ({"plan": BUDGET, "lengths": lengths_of(21)}, "lengths by sample id"),
    "items": ({"plan": ITEMS, "lengths": length_of, "items": lengths_of(21)}, "items by sample id"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused(case: str) -> None:
    more, error, words = REFUSED[case]
    settings: dict[str, Any] = {"dataset": Ragged(21), "plan": FIXED} | more
    with pytest.raises(error, match=words):
        WindowLoader(settings.pop("dataset"), **settings)


@pytest.mark.parametrize("case", REFUSED_FOR_STREAMS)
def test_what_a_stream_can_not_do_is_refused(case: str) -> None:
    more, words = REFUSED_FOR_STREAMS[case]
    settings: dict[str, Any] = {"plan": FIXED} | more
    with pytest.raises(UsageError, match=rf"the data set is a stream \(Stream\), and {words}"):
        WindowLoader(Stream(21), **settings)


def test_a_stream_in_items_needs_to_know_them() -> None:
    with pytest.raises(UsageError, match=r"global_batch_items=20 of a stream needs items\(sample\)"):
        WindowLoader(Stream(21), plan=ITEMS, lengths=length_of)


def test_samples_without_a_number_of_them_are_no_data_set() -> None:
    with pytest.raises(UsageError, match="is a OnlyItems with neither __getitem__ and __len__"):
        WindowLoader(OnlyItems(), plan=FIXED)


def test_the_default_order_is_there_for_others_too() -> None:
    drop = plan_batch(global_batch_samples=8, micro_batch_samples=2, tail="drop")
    assert order_of(drop, 21, items=None, seed=3) == SampleOrder(
        num_samples=21, global_batch_samples=8, seed=3, tail="drop"
    )
    items = np.array(lengths_of(21))
    found = order_of(ITEMS, 21, items=items, seed=3, shuffle=False)
    assert isinstance(found, ItemOrder)
    assert (found.global_batch_items, found.seed, found.shuffle) == (20, 3, False)
    assert found.items.tolist() == lengths_of(21)
    with pytest.raises(UsageError, match="global_batch_items=20 of a map-style data set needs items="):
        order_of(ITEMS, 21, items=None, seed=3)


# the collation ---------------------------------------------------------------------------------------


def test_torch_s_own_collation_is_the_default() -> None:
    samples = TensorDataset(torch.arange(8.0), torch.arange(8))
    (window,) = WindowLoader(samples, plan=FIXED, shuffle=False)
    assert window[1][0].tolist() == [2.0, 3.0]
    assert window.sample_ids == tuple(range(8))


def test_a_collation_is_given_what_it_names() -> None:
    def all_of_it(samples: Any, ids: Any, epoch: int) -> Any:
        return {"index": samples, "ids": list(ids), "epoch": epoch}

    def ids_alone(samples: Any, *, ids: Any) -> Any:
        return {"index": samples, "ids": list(ids)}

    def neither(samples: Any, pad: int = 7) -> Any:
        return {"index": samples, "pad": pad}

    numbers = list(range(10, 18))
    for collate, expected in [
        (all_of_it, {"index": [10, 11], "ids": [0, 1], "epoch": 0}),
        (ids_alone, {"index": [10, 11], "ids": [0, 1]}),
        (neither, {"index": [10, 11], "pad": 7}),
    ]:
        (window, *_) = windows(WindowLoader(numbers, plan=FIXED, collate=collate, shuffle=False))
        assert window[0][0] == expected
    (window,) = WindowLoader(numbers, plan=FIXED, collate=iter, shuffle=False)
    assert list(window[0]) == [10, 11], "a function whose parameters nobody can tell is given the samples"


def test_a_budget_of_packed_rows_is_one_too() -> None:
    plan = plan_token_budget(tokens_per_micro_batch=20, global_batch_samples=8, rows="packed")

    def in_rows(samples: list[Any]) -> Any:
        return pack_rows([{"input_ids": sample["input_ids"]} for sample in samples])

    made = WindowLoader(Ragged(21), plan=plan, lengths=lengths_of(21), collate=in_rows)
    tokens = [batch["input_ids"].shape for window in made for batch in window]
    assert all(rows == 1 and num_tokens <= 20 for rows, num_tokens in tokens)
    assert sum(num_tokens for _, num_tokens in tokens) == sum(lengths_of(21))
