"""Data sets of the user's own: what a function may return, and how a wrong one is told."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from wholebatch.errors import JudgeError, UsageError
from wholebatch.targets import find_target
from wholebatch.train.data import load_data
from wholebatch.train.data.pydoc import is_held_out
from wholebatch.train.material import JobData
from wholebatch.train.settings import DataConfig, TrainConfig

MODULE = """
import numpy as np
import torch
import wholebatch as wb

objective = wb.next_token_loss()

def ragged(sizes=(2, 3, 1), **more):
    return [{"input_ids": torch.arange(n), "labels": torch.arange(n), **more} for n in sizes]

def pair(num_samples=40):
    return ragged([2] * num_samples), objective

def lists():
    samples = [
        {"input_ids": [1, 2], "labels": [1, 2], "score": 0.5, "kind": np.array([1, 1])},
        {"input_ids": [3], "labels": [3], "score": 1.5, "kind": np.array([2])},
    ]
    for sample in samples:
        sample["image"] = torch.ones(2, 2)
    found = {"train": samples, "held_out": samples[:1], "objective": objective}
    return found | {"padding_id": 9, "vocabulary": 11}

def masked():
    samples = [{"input_ids": [1, 2], "attention_mask": [0, 1]}, {"input_ids": [3], "attention_mask": [1]}]
    return {"train": samples, "held_out": [], "objective": objective, "num_labels": 4}

def stack(samples):
    labels = torch.tensor([y for _, y in samples])
    return {"x": torch.stack([x for x, _ in samples]), "labels": labels, "unit": 3}

def own_collate():
    pairs = [(torch.ones(2), 1), (torch.zeros(2), 0)]
    return {"train": pairs, "held_out": None, "objective": wb.token_loss(), "collate": stack}

def tuples():
    return {"train": [(torch.ones(2), 1)] * 3, "held_out": [], "objective": objective}

def one_only():
    return [{"input_ids": [1]}], objective

def other_keys():
    return {"train": [{"a": [1]}, {"b": [1]}, 5], "held_out": [], "objective": objective}

def other_shapes():
    samples = [{"a": torch.ones(2, 2)}, {"a": torch.ones(3, 3)}]
    return {"train": samples, "held_out": [], "objective": objective}

def none_of_it():
    return [], objective

def a_stream():
    return iter([1, 2]), objective

def three():
    return 1, 2, 3

def unknown():
    return {"train": [1], "objectives": objective}

def no_objective():
    return ragged(), lambda output, batch: 0

def fails():
    raise FileNotFoundError("no such corpus")

class Failing(list):
    def __getitem__(self, index):
        raise OSError("bad block")

def failing_first():
    return {"train": Failing([1]), "held_out": [], "objective": objective}

def doubled():
    two = {"x": torch.ones(2)}
    return {"train": [1], "held_out": [], "objective": objective, "collate": lambda samples: two}

def failing_collate():
    collate = lambda samples: samples["x"]
    return {"train": [1], "held_out": [], "objective": objective, "collate": collate}

number = 5
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "mine.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("mine", None)


def load(function: str, place: str = "mine.py", **data: Any) -> JobData:
    return load_data(TrainConfig(data=DataConfig(source=f"{place}:{function}", **data)))


def collated(data: JobData, ids: list[int]) -> Any:
    return data.collate([data.train[index] for index in ids], ids, 0)


@pytest.mark.parametrize("place", ["mine", "mine.py"])
def test_a_data_set_and_its_objective(place: str) -> None:
    data = load("pair", place, options={"num_samples": 60}, held_out_one_in=3)
    out = [is_held_out(str(index), 3) for index in range(60)]
    assert (len(data.train), len(data.held_out)) == (60 - sum(out), sum(out))
    assert data.facts["options"] == {"num_samples": 60}
    assert data.facts["split_rule"] == "samples whose index has a BLAKE2b hash that is 0 modulo 3"
    assert data.objective is find_target(f"{place}:objective", what="the same"), "imported once"
    assert (data.vocabulary, data.num_labels, data.lengths) == (None, None, None)
    both = {id(side[index]) for side in (data.train, data.held_out) for index in range(len(side))}
    assert len(both) == 60, "every sample is on one side"


def test_one_dimensional_entries_are_padded_and_others_stacked() -> None:
    data = load("lists")
    batch = collated(data, [1, 0])
    assert batch["input_ids"].tolist() == [[3, 9], [1, 2]]
    assert batch["labels"].tolist() == [[3, -100], [1, 2]]
    assert batch["attention_mask"].tolist() == [[1, 0], [1, 1]]
    assert batch["kind"].tolist() == [[2, 0], [1, 1]]
    assert batch["score"].tolist() == [1.5, 0.5]
    assert batch["image"].shape == (2, 2, 2)
    assert batch["sample_ids"].tolist() == [1, 0]
    assert (data.vocabulary, data.padding_id, len(data.held_out)) == (11, 9, 1)
    assert data.facts["split_rule"] == "held_out of the function"
    assert int(data.objective.count(batch)["loss"]) == 1


def test_an_attention_mask_of_their_own_is_kept() -> None:
    data = load("masked")
    assert collated(data, [0, 1])["attention_mask"].tolist() == [[0, 1], [1, 0]]
    assert data.num_labels == 4


def test_a_collate_of_their_own() -> None:
    data = load("own_collate", held_out_one_in=10**6)
    batch = collated(data, [1, 0])
    assert batch["x"].tolist() == [[0, 0], [1, 1]]
    assert (batch["labels"].tolist(), batch["sample_ids"].tolist(), batch["unit"]) == ([0, 1], [1, 0], 3)


@pytest.mark.parametrize(
    ("function", "name", "shape"), [("own_collate", "x", (0, 2)), ("lists", "image", (0, 2, 2))]
)
def test_a_micro_batch_without_samples_has_the_shape_of_others(
    function: str, name: str, shape: Any
) -> None:
    data = load(function, held_out_one_in=10**6)
    batch = data.collate([], [], 0)
    assert batch[name].shape == shape
    assert batch["sample_ids"].shape == (0,)
    assert len(batch["labels"]) == 0


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            "three",
            r"mine.py:three returned a tuple; it has to return \(train, objective\), or a dict",
        ),
        (
            "unknown",
            r"returned a dict without \['objective'\] and with unknown \['objectives'\]; its",
        ),
        ("a_stream", r"train of mine.py:a_stream is a list_iterator; it has to be a map-style data set"),
        (
            "no_objective",
            r"the objective of mine.py:no_objective is a function; make one with wholebatch",
        ),
        ("none_of_it", r"train of mine.py:none_of_it has no samples"),
        ("tuples", r"a micro-batch is a list, and has to be a dict of tensors; let samples be dicts"),
        ("doubled", r"disagree on the number of samples: batch\['x'\] has 2, .*sample_ids"),
        ("number", r"mine.py:number is a int and no function"),
        ("gone", r"mine.py has no 'gone'; it has"),
    ],
)
def test_what_is_wrong_with_a_function_is_told(function: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load(function)


def test_a_target_of_another_form_is_told() -> None:
    with pytest.raises(
        UsageError, match=r"':x' does not name a function that returns a data set and its objective"
    ):
        load_data(TrainConfig(data=DataConfig(source=":x")))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            "fails",
            r"mine.py:fails\(\) failed with FileNotFoundError: no such corpus, at mine.py:\d+, in fails",
        ),
        ("failing_first", r"mine.py:failing_first: reading sample 0 failed with OSError: bad block"),
        ("failing_collate", r"a micro-batch of sample 0 failed with TypeError"),
    ],
)
def test_their_own_errors_are_named(function: str, message: str) -> None:
    with pytest.raises(JudgeError, match=message):
        load(function)


def test_wrong_options_are_named() -> None:
    with pytest.raises(JudgeError, match=r"mine.py:pair\(\) failed with TypeError: .*unexpected keyword"):
        load("pair", options={"samples": 3})


@pytest.mark.parametrize(
    ("setting", "shown"),
    [({"files": ["a"]}, r"files is \['a'\]"), ({"tokenizer": "here"}, r"tokenizer is 'here'")],
)
def test_settings_that_would_be_passed_over_are_refused(setting: dict[str, Any], shown: str) -> None:
    with pytest.raises(UsageError, match=rf"data.{shown}, and a function of your own, mine.py:pair, reads"):
        load("pair", **setting)


def test_all_samples_held_out_is_refused() -> None:
    assert not is_held_out("0", 10)
    one_in = next(n for n in range(2, 10**4) if is_held_out("0", n))
    with pytest.raises(
        UsageError, match=r"all 1 samples of mine.py:one_only are held out and none is left"
    ):
        load("one_only", held_out_one_in=one_in)


def test_samples_that_do_not_go_together_are_named() -> None:
    data = load("other_keys")
    with pytest.raises(
        UsageError, match=r"samples \[0, 1\] have different keys, \['a'\] and \['b'\]; give all"
    ):
        collated(data, [0, 1])
    with pytest.raises(UsageError, match=r"samples \[0, 2\] have different keys, \['a'\] and int; give"):
        collated(data, [0, 2])
    data = load("other_shapes")
    with pytest.raises(
        UsageError, match=r"'a' of samples \[0, 1\] can't be stacked \(RuntimeError: .*give them one"
    ):
        collated(data, [0, 1])
    assert torch.equal(collated(data, [0])["a"], torch.ones(1, 2, 2))
