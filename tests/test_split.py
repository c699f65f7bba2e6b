"""Cutting batches."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple

import numpy as np
import pytest
import torch

from wholebatch.errors import SplitError
from wholebatch.split import num_samples, split_batch

Pair = namedtuple("Pair", "x y")


def test_every_structure_is_cut_along_its_samples() -> None:
    x = torch.arange(10).reshape(5, 2)
    batch = {
        "x": x,
        "names": list("abcde"),
        "pair": Pair(x + 1, np.arange(5)),
        "nested": {"y": (x, None)},
        "scale": torch.tensor(2.0),
        "rate": 0.5,
    }
    assert num_samples(batch) == 5
    first, second = split_batch(batch, [2, 3])
    assert torch.equal(first["x"], x[:2])
    assert second["names"] == ["c", "d", "e"]
    assert isinstance(second["pair"], Pair)
    assert second["pair"].y.tolist() == [2, 3, 4]
    assert torch.equal(second["nested"]["y"][0], x[2:])
    assert first["nested"]["y"][1] is None
    assert second["scale"] is batch["scale"]
    assert second["rate"] == 0.5
    assert [part.tolist() for part in split_batch(torch.arange(3), [1, 2])] == [[0], [1, 2]]
    assert split_batch([1, 2, 3], [3]) == [[1, 2, 3]]


def test_a_dict_of_another_class_keeps_it_where_it_is_made_of_a_dict() -> None:
    class Kept(OrderedDict[str, torch.Tensor]):
        pass

    class Doubling(dict[str, torch.Tensor]):
        def __init__(self, parts: dict[str, torch.Tensor]) -> None:
            super().__init__({name: part + 1 for name, part in parts.items()})

    x = torch.arange(4)
    first, second = split_batch(Kept(x=x), [1, 3])
    assert isinstance(first, Kept)
    assert second["x"].tolist() == [1, 2, 3]
    for odd in (defaultdict(list, x=x), Doubling({"x": x - 1})):
        first, _ = split_batch(odd, [1, 3])
        assert type(first) is dict
        assert first["x"].tolist() == [0]


def test_a_list_of_tensors_is_what_default_collation_makes_of_pairs() -> None:
    inputs, labels = torch.zeros(5, 2), torch.arange(5)
    assert num_samples([inputs, labels]) == 5
    first, _ = split_batch([inputs, labels], [2, 3])
    assert isinstance(first, tuple)
    assert first[1].tolist() == [0, 1]
    assert num_samples({"images": [inputs, inputs, inputs]}) == 3, "inside a dict: one for each sample"


@pytest.mark.parametrize(
    ("batch", "sizes", "message"),
    [
        (torch.zeros(5), [2, 2], r"micro-batches of \[2, 2\] samples hold 4 together, but the batch has 5"),
        (torch.zeros(5), [5, 0], r"at least 1; got \[5, 0\]"),
        (torch.zeros(1), [True], r"got \[True\]"),
        ({"a": torch.zeros(5), "b": torch.zeros(4)}, [5], r"batch\['a'\] has 5, batch\['b'\] has 4"),
        ({"a": torch.zeros(5), "b": [1]}, [5], r"batch\['a'\] has 5, batch\['b'\] has 1"),
        ({"a": torch.zeros(5), "b": {1}}, [5], r"batch\['b'\] is a set, which can't be cut"),
        ({"a": torch.tensor(1.0)}, [1], "a batch of type dict holds no tensor or list"),
        ({}, [1], "a batch of type dict holds no tensor or list"),
        ({"a": 1.0}, [1], "holds no tensor or list with a dimension of samples"),
        ({"a": {1, 2}}, [1], r"batch\['a'\] is a set, which can't be cut"),
    ],
)
def test_what_can_not_be_cut_is_refused(batch: object, sizes: list[int], message: str) -> None:
    with pytest.raises(SplitError, match=message):
        split_batch(batch, sizes)


def test_a_packed_row_tells_its_samples_and_is_not_cut() -> None:
    row = {"input_ids": torch.zeros(1, 9), "sample_lengths": torch.tensor([4, 3, 2])}
    assert num_samples(row) == 3
    with pytest.raises(
        SplitError, match=r"a packed row of 3 samples.*split the samples into \[1, 2\] before"
    ):
        split_batch(row, [1, 2])
