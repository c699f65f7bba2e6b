"""Packed rows: one row without padding, in which every sample is as it is alone."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from wholebatch.errors import SplitError
from wholebatch.losses import next_token_loss
from wholebatch.rows import (
    attend_in_rows,
    pack_rows,
    row_layout,
    unpack_rows,
)
from wholebatch.split import is_packed, num_samples

SAMPLES = [{"input_ids": [5, 6, 7]}, {"input_ids": [8]}, {"input_ids": [9, 10], "labels": [-100, 11]}]


def test_a_row_holds_the_samples_one_after_the_other() -> None:
    row = pack_rows(SAMPLES, [40, 2, 7])
    assert {name: values.tolist() for name, values in row.items()} == {
        "input_ids": [[5, 6, 7, 8, 9, 10]],
        "position_ids": [[0, 1, 2, 0, 0, 1]],
        "labels": [[-100, 6, 7, -100, -100, 11]],
        "sample_lengths": [3, 1, 2],
        "sample_ids": [40, 2, 7],
    }
    assert all(values.dtype == torch.int64 for values in row.values())
    assert pack_rows(SAMPLES)["sample_ids"].tolist() == [0, 1, 2]


def test_labels_that_are_not_shifted_stay() -> None:
    row = pack_rows(SAMPLES, shifted=False, ignore_index=-1)
    assert row["labels"].tolist() == [[5, 6, 7, 8, -100, 11]]
    assert pack_rows(SAMPLES, ignore_index=-1)["labels"].tolist() == [[-1, 6, 7, -1, -1, 11]]


def test_the_samples_of_the_caller_are_not_written_to() -> None:
    ids = torch.arange(4)
    pack_rows([{"input_ids": ids}])
    assert ids.tolist() == [0, 1, 2, 3]


def test_an_empty_sample_and_an_empty_row_are_fine() -> None:
    row = pack_rows([{"input_ids": []}, {"input_ids": [3, 4]}])
    assert row["labels"].tolist() == [[-100, 4]]
    assert num_samples(row) == 2
    empty = pack_rows([])
    assert {name: tuple(values.shape) for name, values in empty.items()} == {
        "input_ids": (1, 0),
        "position_ids": (1, 0),
        "labels": (1, 0),
        "sample_lengths": (0,),
        "sample_ids": (0,),
    }
    assert num_samples(empty) == 0
    assert unpack_rows(empty["input_ids"], empty["sample_lengths"]) == ()


def test_samples_are_counted_in_either_form() -> None:
    padded = {"input_ids": torch.zeros(4, 9)}
    assert (is_packed(padded), num_samples(padded)) == (False, 4)
    assert (is_packed(pack_rows(SAMPLES)), num_samples(pack_rows(SAMPLES))) == (True, 3)
    assert not is_packed(torch.zeros(4, 9))


def test_a_row_counts_the_items_of_its_samples() -> None:
    samples = [{"input_ids": list(range(n))} for n in (3, 1, 5)]
    objective = next_token_loss()
    assert int(objective.count(pack_rows(samples))["loss"]) == 2 + 0 + 4
    crossing = pack_rows(samples, shifted=False)
    assert int(objective.count(crossing)["loss"]) == 8  # one across each edge
    assert objective.positions(pack_rows(samples)) == 9


def test_a_row_is_cut_into_what_belongs_to_each_sample() -> None:
    row = pack_rows(SAMPLES)
    parts = unpack_rows(row["input_ids"], row["sample_lengths"])
    assert [part.tolist() for part in parts] == [[5, 6, 7], [8], [9, 10]]
    assert [tuple(part.shape) for part in unpack_rows(torch.zeros(1, 6, 4), [2, 4])] == [(2, 4), (4, 4)]


@pytest.mark.parametrize(
    ("samples", "ids", "words"),
    [
        ([{"tokens": [1]}], None, r"sample 0 has tokens, and packing it needs 'input_ids' of shape"),
        ([SAMPLES[0], [1, 2]], None, r"sample 1 is no mapping, and packing it needs 'input_ids'"),
        (
            [{"input_ids": [1.5]}],
            None,
            r"input_ids of sample 0 is torch.float32 of shape \(1,\); a row takes",
        ),
        ([{"input_ids": [[1, 2]]}], None, r"input_ids of sample 0 is torch.int64 of shape \(1, 2\); a row"),
        ([{"input_ids": [1, 2], "labels": [1]}], None, r"sample 0 has 2 input_ids and 1 labels; give each"),
        (SAMPLES, [1, 2], r"2 ids were given for 3 samples; give each its own"),
    ],
)
def test_what_makes_no_row_is_refused(samples, ids, words) -> None:
    with pytest.raises(SplitError, match=words):
        pack_rows(samples, ids)


def test_lengths_that_are_none_or_another_rows_are_refused() -> None:
    with pytest.raises(
        SplitError, match=r"samples of 2, 5 tokens make a row of shape \(1, 7, \.\.\.\), and"
    ):
        unpack_rows(torch.zeros(1, 6), [2, 5])
    with pytest.raises(SplitError, match=r"whole numbers of tokens, at least 0; got 2, -1"):
        row_layout([2, -1])
    with pytest.raises(SplitError, match=r"got 1, 1, 1, 1, 1, 1 and 1 more"):
        row_layout([1] * 6 + [True])
    with pytest.raises(SplitError, match=r"sample_lengths lie on meta, and reading them there would wait"):
        row_layout(torch.zeros(3, dtype=torch.int64, device="meta"))
    with pytest.raises(
        SplitError, match=r"a layout of 7 tokens does not fit a query, key and value of 6, 6"
    ):
        attend_in_rows(*torch.zeros(3, 6, 1, 2), layout=row_layout([2, 5]))


# Attention


def drawn(tokens: int, heads: int = 2, key_heads: int = 2, features: int = 4):
    numbers = torch.Generator().manual_seed(0)

    def one(its_heads: int) -> torch.Tensor:
        made = torch.randn(tokens, its_heads, features, generator=numbers, dtype=torch.float64)
        return made.requires_grad_()

    return one(heads), one(key_heads), one(key_heads)


def each_alone(query, key, value, lengths, scale=None):
    """Attention of each sample by itself, written out."""
    shared = query.shape[1] // key.shape[1]
    outs = [query.new_zeros(0, query.shape[1], value.shape[-1])]
    for q, k, v in zip(*(each.split(lengths) for each in (query, key, value)), strict=True):
        q, k, v = (part.transpose(0, 1) for part in (q, k, v))
        k, v = (part.repeat_interleave(shared, dim=0) for part in (k, v))
        scores = q @ k.transpose(1, 2) * (q.shape[-1] ** -0.5 if scale is None else scale)
        future = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        outs.append((scores.masked_fill(future, -torch.inf).softmax(-1) @ v).transpose(0, 1))
    return torch.cat(outs)


def compared(lengths: list[int], key_heads: int = 2, scale: float | None = None) -> float:
    """The largest difference of outputs and gradients."""
    worst, found = 0.0, []
    for attend in (
        lambda *three: attend_in_rows(*three, row_layout(torch.tensor(lengths).long()), scale=scale),
        lambda *three: each_alone(*three, lengths, scale),
    ):
        three = drawn(sum(lengths), key_heads=key_heads)
        out = attend(*three)
        (out * torch.arange(out.numel()).view(out.shape).cos()).sum().backward()
        found.append([out.detach(), *(each.grad for each in three if each.grad is not None)])
    for one, other in itertools.zip_longest(*found):
        worst = max(worst, float((one - other).abs().max()) if one.numel() else 0.0)
    return worst


@given(st.lists(st.integers(0, 40), max_size=12))
def test_every_sample_attends_as_if_it_were_alone(lengths: list[int]) -> None:
    if sum(lengths):
        assert compared(lengths) < 1e-12


def test_fewer_heads_of_keys_and_another_scale() -> None:
    assert compared([5, 3, 1, 9], key_heads=1, scale=0.3) < 1e-12


def test_dropout_drops_weights() -> None:
    query, key, value = drawn(9)
    layout = row_layout([4, 5])
    torch.manual_seed(0)
    dropped = attend_in_rows(query, key, torch.ones_like(value), layout, dropout=0.5)
    assert dropped.std() > 0.1
    assert torch.allclose(
        attend_in_rows(query, key, torch.ones_like(value), layout), torch.ones(()).double()
    )


def test_an_empty_row_keeps_the_graph() -> None:
    query, key, value = drawn(0)
    out = attend_in_rows(query, key, value, row_layout([]))
    assert out.shape == (0, 2, 4)
    out.sum().backward()
    assert query.grad is not None


def test_attention_costs_the_samples_and_not_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Near lengths share a call; the pairs computed stay near the sum of squares."""
    shapes = []
    whole = F.scaled_dot_product_attention

    def counted(query, *rest, **options):
        shapes.append(tuple(query.shape))
        return whole(query, *rest, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", counted)
    lengths = [(37 * place) % 221 + 30 for place in range(40)]
    attend_in_rows(*drawn(sum(lengths)), layout=row_layout(lengths))
    pairs = sum(samples * longest**2 for samples, _, longest, _ in shapes)
    assert sum(samples for samples, *_ in shapes) == 40
    assert len(shapes) <= 20
    assert sum(n * n for n in lengths) <= pairs <= 1.27 * sum(n * n for n in lengths)


def test_one_very_long_sample_pads_no_other() -> None:
    layout = row_layout([3] * 50 + [4000])
    assert layout.groups == ((50, 3), (1, 4000))
    assert layout.longest == 4000


# what makes no row, or no attention ------------------------------------------------------------------


STRANGE = [
    (
        [{"input_ids": [1], "weight": 2}],
        None,
        r"sample 0 has 'weight', which a packed row has not; leave it",
    ),
    (
        [{"input_ids": [1, 2], "attention_mask": [1, 0]}],
        None,
        r"mask of sample 0 is not 1 for each of its 2",
    ),
    ([{"input_ids": [1, 2], "attention_mask": [1]}], None, r"attention_mask of sample 0 is not 1 for each"),
    (
        [{"input_ids": "abc"}],
        None,
        r"input_ids of sample 0 is a str, of which no row can be made \(.*\); a row",
    ),
    ([{"input_ids": [[1], [2, 3]]}], None, r"input_ids of sample 0 is a list, of which no row can be made"),
    ([{"input_ids": [None]}], None, r"input_ids of sample 0 is a list, of which no row can be made"),
    ([{"input_ids": [2**70]}], None, r"input_ids of sample 0 is a list, of which no row can be made"),
    ([{"input_ids": {1: 2}}], None, r"input_ids of sample 0 is a dict, of which no row can be made"),
    ([{"input_ids": np.array(["a"])}], None, r"input_ids of sample 0 is a ndarray, of which no row"),
    (
        [{"input_ids": [1], "labels": "a"}],
        None,
        r"labels of sample 0 is a str, of which no row can be made",
    ),
    (None, None, r"samples is a NoneType, and a row is made of several; give a list of mappings"),
    ({"input_ids": [1]}, None, r"samples is a dict, and a row is made of several"),
    (SAMPLES[:1], [0.5], r"ids are whole numbers, one for each sample; got 0.5"),
    (SAMPLES[:1], [True], r"ids are whole numbers, one for each sample; got True"),
    (SAMPLES[:1], ["a"], r"ids are whole numbers, one for each sample; got a"),
    (SAMPLES[:1], [2**63], r"ids are whole numbers, one for each sample; got 9223372036854775808"),
    (SAMPLES[:1], torch.tensor([3.7]), r"ids are whole numbers, one for each sample; got 3.7"),
    (SAMPLES[:1], 5, r"ids are whole numbers, one for each sample; got 5"),
]


@pytest.mark.parametrize(("samples", "ids", "words"), STRANGE)
def test_what_is_lost_in_a_row_or_is_none_is_named(samples, ids, words) -> None:
    with pytest.raises(SplitError, match=words):
        pack_rows(samples, ids)


@pytest.mark.parametrize("ignored", [None, 1.5, True])
def test_an_ignored_label_is_a_whole_number(ignored) -> None:
    with pytest.raises(SplitError, match=f"ignore_index is {ignored}; give a whole number, such as -100"):
        pack_rows(SAMPLES, ignore_index=ignored)


@pytest.mark.filterwarnings("error")
def test_any_whole_numbers_make_a_row() -> None:
    expected = pack_rows(SAMPLES, [4, 5, 6])
    read_only = np.array([5, 6, 7])
    read_only.flags.writeable = False
    kinds = [read_only, np.array([5, 6, 7], dtype=">i4"), range(5, 8), torch.tensor([5, 6, 7]).short()]
    for first in kinds:
        samples = [{"input_ids": first, "attention_mask": [1, 1, 1]}, *SAMPLES[1:]]
        for ids in ([4, 5, 6], np.array([4, 5, 6]), torch.tensor([4, 5, 6]), iter([4, np.int64(5), 6])):
            row = pack_rows(iter(samples), ids)
            assert all(torch.equal(row[name], values) for name, values in expected.items())


@pytest.mark.parametrize(
    "lengths", [np.array([2, 3]), [np.int64(2), np.int32(3)], (2, 3), torch.tensor([2, 3])]
)
def test_lengths_are_whole_numbers_of_any_kind(lengths) -> None:
    assert row_layout(lengths).groups == row_layout([2, 3]).groups
    assert [len(part) for part in unpack_rows(torch.zeros(1, 5), lengths)] == [2, 3]


@pytest.mark.parametrize("lengths", [None, 3, torch.tensor(3), np.array(3)])
def test_lengths_that_are_no_row_of_numbers_are_named(lengths) -> None:
    words = rf"sample_lengths is {3 if lengths is not None else None}; give the tokens of each sample"
    with pytest.raises(SplitError, match=words):
        row_layout(lengths)


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ([(5, 2), (5, 2), (5, 2)], r"the shapes \(5, 2\), \(5, 2\), \(5, 2\); a row's are \(tokens, heads"),
        ([(1, 5, 2, 4)] * 3, r"\(1, 5, 2, 4\); a row's are .* without the 1 of the row"),
        (
            [(5, 4, 2), (5, 3, 2), (5, 3, 2)],
            r"\(5, 4, 2\), \(5, 3, 2\), .*; .* of which the query has a multiple",
        ),
        (
            [(5, 4, 2), (5, 2, 2), (5, 4, 2)],
            r"\(5, 2, 2\), .*; key and value need as many heads as each other",
        ),
        ([(5, 4, 2), (5, 0, 2), (5, 0, 2)], r"\(5, 0, 2\), .* the query has a multiple"),
        ([(5, 4, 2), (5, 4, 3), (5, 4, 3)], r"\(5, 4, 3\), .* query and key as many features"),
        ([(5, 4, 2), (4, 4, 2), (5, 4, 2)], r"a layout of 5 tokens does not fit .* of 5, 4 and 5"),
    ],
)
def test_what_does_not_attend_is_named(shapes, words) -> None:
    with pytest.raises(SplitError, match=words):
        attend_in_rows(*map(torch.zeros, shapes), row_layout([2, 3]))


def test_attention_is_of_one_dtype_and_drops_less_than_all() -> None:
    query = torch.zeros(5, 4, 2)
    with pytest.raises(SplitError, match=r"are torch.float32, torch.float64 and torch.float32; give one"):
        attend_in_rows(query, query.double(), query, row_layout([2, 3]))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attend_in_rows(query, query.bfloat16(), query, row_layout([2, 3])).shape == (5, 4, 2)
    for dropout in (1.0, 1.5, -0.1, float("nan")):
        with pytest.raises(
            SplitError, match=rf"dropout is {dropout}; give a probability from 0 to below 1"
        ):
            attend_in_rows(query, query, query, row_layout([2, 3]), dropout=dropout)
