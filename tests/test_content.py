"""What tells other tensors: values, dtypes, shapes and the order of samples."""

from __future__ import annotations

import pytest
import torch

from wholebatch.content import content_marks
from wholebatch.gradients import read_scalars

IDS = torch.arange(12).reshape(3, 4)
WEIGHTS = torch.linspace(-1, 1, 6).reshape(3, 2)


def marks(batch: object) -> list[float]:
    return read_scalars(content_marks(batch))


def test_the_same_values_have_the_same_marks_wherever_they_lie_in_memory() -> None:
    assert marks({"x": IDS}) == marks({"x": IDS.clone()}) == marks({"x": IDS.t().contiguous().t()})
    assert marks([IDS, (WEIGHTS, None, "name", 3)]) == marks((IDS, [WEIGHTS]))


@pytest.mark.parametrize(
    "other",
    [
        {"x": IDS + 1, "w": WEIGHTS},
        {"x": IDS.flip(0), "w": WEIGHTS},
        {"x": IDS.int(), "w": WEIGHTS},
        {"x": IDS.reshape(3, 2, 2), "w": WEIGHTS},
        {"x": IDS[:2], "w": WEIGHTS},
        {"x": IDS, "w": WEIGHTS * (1 + 2**-20)},
        {"x": IDS, "w": -WEIGHTS},
        {"x": IDS, "w": WEIGHTS.where(WEIGHTS > -1, torch.nan)},
        {"x": IDS},
        {"w": WEIGHTS, "x": IDS},
        [{"x": IDS[:1], "w": WEIGHTS[:1]}, {"x": IDS[1:], "w": WEIGHTS[1:]}],
    ],
)
def test_other_tensors_have_others(other: dict[str, torch.Tensor]) -> None:
    assert marks({"x": IDS, "w": WEIGHTS}) != marks(other)


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.float16, torch.bfloat16, torch.complex64, torch.float64]
)
def test_every_kind_of_number_is_read(dtype: torch.dtype) -> None:
    ones = torch.ones(2, 3, dtype=dtype)
    ones[1, 2] = 0
    assert marks(ones) == marks(ones.clone()) != marks(torch.ones(2, 3, dtype=dtype))


def test_a_number_alone_nothing_and_sparse_tensors_are_no_problem() -> None:
    assert marks(torch.tensor(3)) != marks(torch.tensor(4))
    assert marks(torch.zeros(0, 4)) == [4.0, 0.0, 4.0, 0.0]
    assert marks(IDS.to_sparse()) == []
