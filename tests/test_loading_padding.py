"""Padding to the longest of a micro-batch, and what it refuses; pinned memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from loading_data import Drawing, Ragged, windows
from wholebatch.errors import UsageError
from wholebatch.loading import WindowLoader, pad_collate
from wholebatch.loading.batches import pinned
from wholebatch.plan import plan_batch

ONE = {"input_ids": [5, 6, 7], "labels": torch.tensor([5, 6, 7]), "weight": 0.5, "kind": 2}
TWO = {"input_ids": [8], "labels": torch.tensor([8]), "weight": 1.5, "kind": 3}


def test_the_longest_decides() -> None:
    batch = pad_collate()([ONE, TWO], [4, 9])
    assert {name: part.tolist() for name, part in batch.items()} == {
        "input_ids": [[5, 6, 7], [8, 0, 0]],
        "labels": [[5, 6, 7], [8, -100, -100]],
        "weight": [0.5, 1.5],
        "kind": [2, 3],
        "sample_ids": [4, 9],
    }
    assert [part.dtype for part in batch.values()] == [torch.int64, torch.int64, torch.float32] + [
        torch.int64
    ] * 2


def test_padding_by_name_and_a_mask() -> None:
    batch = pad_collate(attention_mask=True, input_ids=1, labels=-1)([TWO, ONE])
    assert batch["input_ids"].tolist() == [[8, 1, 1], [5, 6, 7]]
    assert batch["labels"].tolist() == [[8, -1, -1], [5, 6, 7]]
    assert batch["attention_mask"].tolist() == [[1, 0, 0], [1, 1, 1]]
    assert "sample_ids" not in batch


def test_other_loaders_can_use_it() -> None:
    (batch,) = DataLoader(Ragged(3), batch_size=3, collate_fn=pad_collate())  # type: ignore[arg-type]
    assert batch["input_ids"].shape == (3, 8)


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
@pytest.mark.parametrize("numbers", [[1, 2], [1.5, 2.5], [True, False]])
def test_any_kind_of_row(kind: Any, numbers: list[Any]) -> None:
    row = kind(numbers)
    if isinstance(row, np.ndarray):
        row.setflags(write=False)  # as those of a memory-mapped file
    batch = pad_collate()([{"x": row}, {"x": row[:1]}])
    assert batch["x"].tolist() == [numbers, [numbers[0], 0]]


def test_an_empty_row_takes_the_dtype_of_the_others() -> None:
    for rows in ([[], [1, 2]], [[1, 2], []]):
        batch = pad_collate()([{"labels": row} for row in rows])
        assert batch["labels"].dtype == torch.int64
        assert batch["labels"].tolist() == [row or [-100, -100] for row in rows]
    assert pad_collate()([{"x": []}, {"x": []}])["x"].shape == (2, 0)


def test_short_dtypes_are_kept() -> None:
    batch = pad_collate()([{"x": np.array([1, 2], np.uint16)}, {"x": np.array([3], np.uint16)}])
    assert batch["x"].dtype == torch.uint16
    assert batch["x"].tolist() == [[1, 2], [3, 0]]


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        ([ONE, (1, 2)], "sample 12 is a tuple, and padding by name needs dicts"),
        ([{"a": 1}, {"b": 1}], r"sample 12 has the entries \['b'\] and sample 11 has \['a'\]"),
        ([{"a": 1}, {"a": "text"}], "'a' is one str in sample 12 and int64 of 0 dimensions in sample 11"),
        ([{"a": ["x"]}] * 2, "'a' of sample 11 is a list, of which no tensor can be made"),
        ([{"a": np.array(["x"])}] * 2, "'a' of sample 11 is a ndarray, of which no tensor can be made"),
        ([{"a": [1]}, {"a": 1}], "'a' is int64 of 0 dimensions in sample 12 and int64 of 1 dimension in"),
        (
            [{"a": torch.ones(2, 2)}, {"a": torch.ones(3, 2)}],
            "'a' of 2 samples can't be stacked .* one shape",
        ),
        ([{"a": None}] * 2, "'a' of 2 samples can't be stacked .*NoneType"),
        (
            [{"a": [1]}, {"a": [1.5]}],
            "'a' is float32 of 1 dimension in sample 12 and int64 of 1 dimension in",
        ),
    ],
)
def test_what_can_not_be_padded_is_named(samples: list[Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        pad_collate()(samples, [11, 12])


def test_tensors_of_more_dimensions_are_stacked_and_texts_listed() -> None:
    batch = pad_collate()([{"x": torch.ones(2, 3), "t": "a", "in": {"y": 1}}] * 2)
    assert batch["x"].shape == (2, 2, 3)
    assert (batch["t"], batch["in"]["y"].tolist()) == (["a", "a"], [1, 1])


# every sample is like one ----------------------------------------------------------------------------

LONG, SHORT = {"y": torch.ones(2, dtype=torch.float64)}, {"y": torch.ones(1)}
ALTERNATING = [LONG, SHORT, LONG, SHORT]
SINGLE = plan_batch(global_batch_samples=4, micro_batch_samples=1)


@pytest.mark.parametrize("samples", [[SHORT], [SHORT, LONG], [LONG, SHORT]])
def test_a_sample_of_another_kind_is_refused_also_alone(samples: list[Any]) -> None:
    with pytest.raises(
        UsageError, match=r"'y' is float32 of 1 dimension in sample . and float64 of 1 .* like="
    ):
        pad_collate(like=LONG)(samples)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_compares_every_sample_with_the_first(workers: int) -> None:
    """Two workers at m = 1 each see one dtype alone."""
    made = WindowLoader(ALTERNATING, plan=SINGLE, collate=pad_collate(), shuffle=False, workers=workers)
    with pytest.raises(
        UsageError, match=r"'y' is float32 of 1 .* in sample 1 and float64 of 1 .* in sample 0,"
    ):
        windows(made)
    later = WindowLoader(
        [LONG, *[SHORT] * 7], plan=SINGLE, collate=pad_collate(), shuffle=False, position=4
    )
    with pytest.raises(UsageError, match=r"float32 of 1 dimension in sample 4 and float64 .* in sample 0,"):
        windows(later)
    stream = WindowLoader(iter(ALTERNATING), plan=SINGLE, collate=pad_collate(), workers=workers // 2)
    with pytest.raises(UsageError, match=r"float32 of 1 dimension in sample 1 and float64 .* in sample 0,"):
        windows(stream)


@pytest.mark.parametrize("workers", [0, 1])
def test_the_first_sample_may_be_one_that_can_not_be_read(workers: int) -> None:
    class First(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            if index == 0:
                raise UsageError("zero is gone")
            return super().__getitem__(index)

    def made(**more: Any) -> WindowLoader:
        samples = First([*ALTERNATING, *[LONG] * 4])
        return WindowLoader(
            samples, plan=SINGLE, collate=pad_collate(), shuffle=False, workers=workers, **more
        )

    with pytest.raises(UsageError, match=r"float64 of 1 dimension in sample 4 and float32 .* in sample 1,"):
        windows(made(position=4, on_bad_sample="skip"))
    with pytest.raises(UsageError, match="zero is gone"):
        windows(made(position=4))


def test_a_first_sample_with_an_empty_list_decides_nothing() -> None:
    made = WindowLoader([{"y": []}, {"y": [1]}] * 2, plan=SINGLE, collate=pad_collate())
    with pytest.raises(UsageError, match="'y' of sample 0 is an empty list, which does not say"):
        windows(made)
    given = pad_collate(like={"y": [1.5]})
    made = WindowLoader([{"y": []}, {"y": [2.0]}] * 2, plan=SINGLE, collate=given, shuffle=False)
    assert [batch["y"].dtype for window in made for batch in window] == [torch.float32] * 4


def test_reading_the_first_sample_leaves_what_is_drawn_alone() -> None:
    def drawn(position: int) -> list[Any]:
        samples = Drawing(8)
        made = WindowLoader(samples, plan=SINGLE, collate=pad_collate(), shuffle=False, position=position)
        return [batch["drawn"] for window in windows(made) for batch in window[0]]

    assert drawn(4) == drawn(0)[4:]


def test_padding_that_would_become_a_label_is_refused() -> None:
    rows = [{"labels": np.array([1, 2], np.uint8)}, {"labels": np.array([1], np.uint8)}]
    with pytest.raises(
        UsageError, match=r"'labels' is to hold -100, which torch.uint8 can't; .*labels=\.{3}"
    ):
        pad_collate()(rows)
    assert pad_collate(labels=255)(rows)["labels"].tolist() == [[1, 2], [1, 255]]
    with pytest.raises(UsageError, match=r"'x' is to hold 0.5, which torch.int64 can't"):
        pad_collate(x=0.5)([{"x": [1, 2]}, {"x": [1]}])
    assert pad_collate(x=float("nan"))([{"x": [1.0, 2.0]}, {"x": [1.0]}])["x"].isnan().sum() == 1


def test_a_mask_of_nothing_or_of_what_has_one_is_refused() -> None:
    with pytest.raises(UsageError, match="attention_mask=True, and the samples have one already"):
        pad_collate(attention_mask=True)([{"input_ids": [1], "attention_mask": [1]}])
    with pytest.raises(UsageError, match=r"marks the tokens of input_ids, and the samples have \['x'\]"):
        pad_collate(attention_mask=True)([{"x": [1]}])


# pinned memory, which was never seen on an accelerator by these tests ---------------------------------


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


def test_all_tensors_of_a_micro_batch_are_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor + 1)
    zero = torch.zeros(1)
    found = pinned({"a": zero, "b": [zero, "text"], "c": Pair(zero, zero), "d": (zero, 3)})
    assert found == {"a": 1, "b": [1, "text"], "c": Pair(1, 1), "d": (1, 3)}  # type: ignore[arg-type]
    assert type(found["c"]) is Pair


def test_a_loader_pins_where_there_is_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_batch(global_batch_samples=2, micro_batch_samples=2)
    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator")
    with pytest.raises(UsageError, match=r"pin_memory=True is for copies to an accelerator, .* sees none"):
        WindowLoader(Ragged(2), plan=plan, pin_memory=True)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor + 1)
    made = WindowLoader(Ragged(2), plan=plan, collate=pad_collate(), pin_memory=True, shuffle=False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)  # reading asks it too
    assert windows(made)[0][0][0]["index"] == [1, 2]
