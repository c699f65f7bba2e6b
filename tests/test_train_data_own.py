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
from wholebatch.train.data.rows import is_held_out
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

def shown(*values, key="y"):
    return {"train": [{key: value} for value in values], "held_out": [], "objective": objective}

def of_values(values):
    return shown(*values)

def with_numbers(kind="mixed"):
    first, other = {
        "lists": ([1, 2], [1.5, 2.75]),
        "numbers": (1, 2.5),
        "arrays": (np.array([1]), np.array([1.5])),
        "tensors": (torch.ones(2), torch.ones(2, dtype=torch.float64)),
        "flags": (True, 2),
        "nested": ({"in": 1}, {"in": 2.5}),
        "dimensions": (torch.ones(2), torch.ones(2, 2)),
    }[kind]
    return shown(first, other)

def ints_in_the_middle():
    return shown([1.0, 2.0], [1, 2], [0.5])

def empty_lists(first=True):
    return shown([], [1.5]) if first else shown([1.5, 2.0], [])

def one_short():
    collate = lambda samples: {"x": torch.ones(max(1, len(samples) - 1), 2)}
    return {"train": [1, 2, 3], "held_out": [], "objective": objective, "collate": collate}

def strange_ids(*, held_out=False):
    sides = [{"input_ids": [1, 2]}], [{"input_ids": [3, 11]}]
    train, held = sides if held_out else (sides[0] + sides[1], [])
    return {"train": train, "held_out": held, "objective": objective, "vocabulary": 10}

def bad_held_out():
    return {"train": [{"a": [1]}], "held_out": Failing([1]), "objective": objective}

class Length:
    def __init__(self, length):
        self.length = length
    def __len__(self):
        if self.length is None:
            raise OSError("no index")
        return self.length
    def __getitem__(self, index):
        return {"a": [1]}

def lengths(train=1, held_out=1):
    kinds = {"none": None, "below": -1, "part": 1.5}
    train, held_out = (Length(kinds.get(one, one)) for one in (train, held_out))
    return {"train": train, "held_out": held_out, "objective": objective}

def sizes(**wrong):
    return {"train": [{"a": [1]}], "held_out": [], "objective": objective, **wrong}

def two_terms(counted=False):
    count = len if counted else None
    from wholebatch.objective import sample_loss
    terms = {"a": (wb.counted_loss(None, count=count), 1.0), "b": (sample_loss(None), 0.5)}
    return {"train": [{"a": [1]}], "held_out": [], "objective": wb.weighted_terms(terms)}

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
    assert (data.vocabulary, data.num_labels) == (None, None)
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
        ("doubled", r"collate made a batch of 2 of the 1 samples \[0\]; let every tensor"),
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
    with pytest.raises(
        UsageError,
        match=r"data.options for mine.py:pair are \{'samples': 3\}: .*unexpected keyword argument .*; it "
        r"takes \(num_samples=40\)",
    ):
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
        UsageError, match=r"all of mine.py:one_only, 1 sample, is held out and none is left"
    ):
        load("one_only", held_out_one_in=one_in)


def test_samples_that_do_not_go_together_are_named() -> None:
    data = load("other_keys")
    with pytest.raises(
        UsageError,
        match=r"sample 1 has the entries \['b'\] and sample 0 to train on has \['a'\]; let every",
    ):
        collated(data, [0, 1])
    with pytest.raises(UsageError, match=r"sample 2 is a int, and padding by name needs dicts"):
        collated(data, [2])
    data = load("other_shapes")
    with pytest.raises(
        UsageError, match=r"'a' of 2 samples can't be stacked \(RuntimeError: .*give them one"
    ):
        collated(data, [0, 1])
    assert torch.equal(collated(data, [0])["a"], torch.ones(1, 2, 2))


# The dtype of a micro-batch does not depend on which samples are in it


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("lists", "float32 of 1 dimension in sample 1 and int64 of 1 dimension in sample 0 to train on"),
        ("numbers", "float32 of 0 dimensions in sample 1 and int64 of 0 dimensions in sample 0"),
        ("arrays", "float64 of 1 dimension in sample 1 and int64 of 1 dimension in sample 0"),
        ("tensors", "float64 of 1 dimension in sample 1 and float32 of 1 dimension in sample 0"),
        ("flags", "int64 of 0 dimensions in sample 1 and bool of 0 dimensions in sample 0"),
        ("nested", r"\{in: one float\} in sample 1 and \{in: one int\} in sample 0"),
        ("dimensions", "float32 of 2 dimensions in sample 1 and float32 of 1 dimension in sample 0"),
    ],
)
@pytest.mark.parametrize("ids", [[0, 1], [1, 0], [1]])
def test_mixed_kinds_are_refused_in_every_split(kind: str, told: str, ids: list[int]) -> None:
    data = load("with_numbers", options={"kind": kind})
    with pytest.raises(UsageError, match=rf"'y' is {told}.*write the numbers alike"):
        collated(data, ids)
    collated(data, [0])


def test_whole_numbers_among_others_are_refused_also_alone() -> None:
    data = load("ints_in_the_middle")
    for ids in ([1], [0, 1], [1, 2]):
        with pytest.raises(UsageError, match="'y' is int64 of 1 dimension in sample 1 and float32 of 1"):
            collated(data, ids)
    assert collated(data, [2, 0])["y"].tolist() == [[0.5, 0.0], [1.0, 2.0]]


def test_an_empty_list_has_the_dtype_of_sample_0() -> None:
    data = load("empty_lists", options={"first": False})
    assert collated(data, [1])["y"].dtype == torch.float32
    assert collated(data, [1, 0])["y"].tolist() == [[0.0, 0.0], [1.5, 2.0]]
    with pytest.raises(
        UsageError, match="'y' of sample 0 to train on is an empty list, which does not say"
    ):
        load("empty_lists")


def test_single_samples_and_the_whole_batch_give_one_update() -> None:
    """What used to be truncated to whole numbers where a sample of whole numbers came first."""
    values = [[1.0, 2.0], [1.5, 2.75, 0.25], [3.0], [0.5], [], [2.0, 2.0], [7.25], [1.0]]
    data = load("of_values", options={"values": values})

    def gradient(m: int) -> torch.Tensor:
        weight = torch.ones(1, dtype=torch.float64, requires_grad=True)
        for start in range(0, 8, m):
            y = collated(data, list(range(start, start + m)))["y"].double()
            ((weight * y) ** 2).sum().backward()
        assert weight.grad is not None
        return weight.grad

    expected = 2 * sum(value**2 for listed in values for value in listed)
    assert gradient(1).item() == gradient(8).item() == gradient(2).item() == expected


# What is found when the data is loaded, or named when a sample is read


def test_a_batch_of_another_number_of_samples_is_refused_whenever_it_comes() -> None:
    data = load("one_short")
    with pytest.raises(UsageError, match=r"collate made a batch of 1 of the 2 samples \[1, 2\]; let every"):
        collated(data, [1, 2])


def test_token_ids_outside_the_vocabulary_are_named() -> None:
    data = load("strange_ids")
    with pytest.raises(
        UsageError, match="sample 1 has the token id 11, and vocabulary is 10; ids go from 0 to"
    ):
        collated(data, [0, 1])
    collated(data, [0])
    with pytest.raises(UsageError, match="sample 0 has the token id 11"):
        load("strange_ids", options={"held_out": True})


def test_one_of_several_terms_without_a_count_is_refused() -> None:
    with pytest.raises(
        UsageError,
        match=r"objective of mine.py:two_terms has 2 terms, and 'a' can't count its items ahead of .*; "
        r"give each of several terms a count",
    ):
        load("two_terms")
    load("two_terms", options={"counted": True})


def test_a_bad_held_out_sample_is_found_at_once() -> None:
    with pytest.raises(
        JudgeError, match="reading held-out sample 0 and collating it failed with OSError: bad block"
    ):
        load("bad_held_out")


@pytest.mark.parametrize("side", ["train", "held_out"])
@pytest.mark.parametrize(
    ("length", "why"), [("none", "OSError: no index"), ("below", "ValueError"), ("part", "TypeError")]
)
def test_a_length_that_is_none(side: str, length: str, why: str) -> None:
    with pytest.raises(JudgeError, match=rf"mine.py:lengths: len\({side}\) failed with {why}"):
        load("lengths", options={side: length})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"vocabulary": 2.5}, "vocabulary of mine.py:sizes is 2.5; it has to be a whole number, 1 or more"),
        ({"vocabulary": "many"}, "vocabulary of mine.py:sizes is 'many'"),
        ({"num_labels": 0}, "num_labels of mine.py:sizes is 0"),
        ({"padding_id": -1}, "padding_id of mine.py:sizes is -1; it has to be a whole number, 0 or more"),
    ],
)
def test_sizes_that_are_none(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load("sizes", options=wrong)
