"""The bounds hold where nothing is wrong, and do not where something is."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from wholebatch.closeness import (
    NarrowingWatch,
    ParameterError,
    RoundingTremor,
    as_wide,
    clipped_bound,
    distance,
    equality_margin,
    largest_tensor_elements,
    magnitude,
    narrower_of,
    reduction_terms,
    rounding_allowance,
    unit_roundoff,
    worst_first,
)

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


@pytest.mark.parametrize(
    ("dtype", "expected"), [(torch.float64, 2.0**-53), (torch.float32, 2.0**-24), (torch.bfloat16, 2.0**-8)]
)
def test_unit_roundoff_is_half_of_eps(dtype: torch.dtype, expected: float) -> None:
    assert unit_roundoff(dtype) == expected
    assert torch.tensor(1.0, dtype=dtype) + expected == 1  # rounds back, ties to even
    assert torch.tensor(1.0, dtype=dtype) + 2 * expected > 1


@given(st.integers(2, 5000), st.integers(0, 10_000), st.booleans())
def test_two_orders_of_one_sum_stay_within_the_margin(num_terms: int, seed: int, cancels: bool) -> None:
    draw = np.random.default_rng(seed)
    terms = draw.standard_normal(num_terms)
    if cancels:
        terms = np.concatenate([terms, -terms])
        draw.shuffle(terms)
    for dtype in (torch.float64, torch.float32):
        values = torch.tensor(terms).to(dtype).double().numpy().astype(str(dtype)[6:])
        one, other = values.cumsum()[-1], np.sort(values).cumsum()[-1]
        scale = float(np.abs(values).sum(dtype=np.float64))
        assert abs(float(one) - float(other)) <= equality_margin(len(terms), dtype) * scale


def test_the_margin_excuses_no_wrong_denominator() -> None:
    # 1e9 terms in float64 and a million in float32: one item missing among a thousand is still seen
    assert equality_margin(10**9, torch.float64) < 1e-6
    assert equality_margin(10**6, torch.float32) < 1e-3
    # the worst case would excuse a denominator that is 6% off
    assert 2 * 10**6 * unit_roundoff(torch.float32) > 0.1


def test_a_narrower_dtype_adds_its_own_roundings() -> None:
    in_float32 = equality_margin(1000, torch.float32)
    in_bfloat16 = equality_margin(1000, torch.bfloat16, num_roundings=9)
    deviations = math.sqrt(2 * math.log(2 * 1000 / 1e-6))
    assert in_bfloat16 - in_float32 == pytest.approx(2 * deviations * 3 * 2.0**-8)


def test_terms_are_the_batch_and_both_sides_of_each_matrix() -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.Conv2d(3, 4, 2), nn.LayerNorm(9))
    assert reduction_terms(model, 100) == 100 + (5 + 7) + (3 * 2 * 2 + 4)
    assert reduction_terms(nn.LayerNorm(9), 0) == 1


def test_the_largest_tensor_of_a_batch() -> None:
    assert largest_tensor_elements(torch.ones(3, 4)) == 12
    assert largest_tensor_elements({"a": torch.ones(3), "b": (torch.ones(5), "x")}) == 5
    assert largest_tensor_elements([torch.ones(3), torch.ones(4)]) == 7
    assert largest_tensor_elements(np.ones((2, 3))) == 6
    assert largest_tensor_elements(()) == 0


def test_distance_counts_a_missing_gradient_as_zeros() -> None:
    one = {"a": torch.tensor([1.0, -3.0]), "b": torch.tensor([2.0])}
    other = {"a": torch.tensor([1.5, -1.0]), "c": torch.tensor([-4.0]), "e": torch.ones(0)}
    assert distance(one, other) == {"a": 2.0, "b": 2.0, "c": 4.0, "e": 0.0}
    assert distance({"a": torch.tensor([1 + 1j])}, {"a": torch.tensor([1 - 3j])}) == {"a": 4.0}
    assert math.isnan(distance({"a": torch.tensor([1.0, math.nan])}, {"a": torch.ones(2)})["a"])
    assert magnitude(one) == {"a": 3.0, "b": 2.0}


def test_distance_is_taken_in_float64() -> None:
    third = torch.tensor(1 / 3, dtype=torch.float64)
    assert distance({"a": third.float()}, {"a": third})["a"] == abs(float(third.float()) - float(third)) > 0
    assert as_wide(torch.eye(2).to_sparse()).tolist() == [[1, 0], [0, 1]]


def test_ratios_and_the_order_of_errors() -> None:
    def error(name: str, size: float, bound: float) -> ParameterError:
        return ParameterError(parameter=name, quantity="gradient", error=size, bound=bound)

    good, bad = error("good", 1.0, 2.0), error("bad", 3.0, 2.0)
    broken, zero, unbounded = error("nan", math.nan, 1.0), error("zero", 0.0, 0.0), error("un", 1.0, 0.0)
    assert [one.parameter for one in worst_first([good, bad, zero])] == ["bad", "good", "zero"]
    assert (good.within, bad.within, broken.within, zero.within, unbounded.within) == (
        (True, False, False, True, False)
    )
    assert broken.ratio == unbounded.ratio == math.inf


@given(st.integers(0, 1000), st.floats(0.01, 3.0))
def test_clipping_carries_the_bound(seed: int, clip_share: float) -> None:
    draw = torch.Generator().manual_seed(seed)
    gradient = torch.randn(50, generator=draw, dtype=torch.float64)
    bound = 1e-6
    moved = gradient + bound * (2 * torch.rand(50, generator=draw, dtype=torch.float64) - 1)
    norm, max_norm = float(gradient.norm()), clip_share * float(gradient.norm())

    def clipped(vector: Tensor) -> Tensor:
        return vector * min(1.0, max_norm / float(vector.norm()))

    allowed = clipped_bound(
        bound, norm=norm, max_norm=max_norm, elements=50, largest=float(gradient.abs().max())
    )
    assert float((clipped(moved) - clipped(gradient)).abs().max()) <= allowed <= 20 * bound


def test_a_zero_norm_clips_nothing() -> None:
    assert clipped_bound(1e-3, norm=0.0, max_norm=1.0, elements=5, largest=0.0) == 1e-3


@pytest.mark.parametrize("num_micro_batches", [4, 64, 1024])
def test_the_allowance_tells_float32_accumulation_from_bfloat16(num_micro_batches: int) -> None:
    draw = torch.Generator().manual_seed(0)
    terms = torch.randn(num_micro_batches, 100, generator=draw).add(1).bfloat16()
    truth = terms.double().sum(0)
    scale = float(terms.double().abs().amax(1).sum())

    def allowed(dtype: torch.dtype) -> float:
        largest = float(truth.abs().max())
        return rounding_allowance(
            0.0, num_micro_batches=num_micro_batches, dtype=dtype, scale=scale, largest=largest
        )

    def lost(dtype: torch.dtype) -> float:
        summed = torch.zeros(100, dtype=dtype)
        for term in terms:
            summed += term.to(dtype)
        return float((summed.double() - truth).abs().max())

    assert lost(torch.float32) <= allowed(torch.float32)
    assert (lost(torch.bfloat16) > allowed(torch.bfloat16)) == (num_micro_batches >= 64)


class Inside(nn.Module):
    """A layer that computes in another dtype inside."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4).double()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).to(self.dtype).double()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_cast_inside_is_seen(dtype: torch.dtype) -> None:
    with NarrowingWatch() as watch:
        Inside(dtype)(torch.randn(2, 4).double())
    assert watch.narrowest == dtype


def test_the_narrowest_of_several_casts_is_kept() -> None:
    x = torch.tensor([0.3], dtype=torch.float64)
    with NarrowingWatch() as watch:
        x.float(), x.bfloat16(), x.float()
    assert watch.narrowest == torch.bfloat16


def test_casts_that_lose_nothing_are_not_seen() -> None:
    x = torch.tensor([0.0, 1.0, -math.inf, math.nan], dtype=torch.float64)
    with NarrowingWatch() as watch:
        x.float()  # a mask
        (x > 0).float()
        torch.randn(2).double().new_zeros(2, dtype=torch.float32)
        torch.rand_like(x, dtype=torch.float32)
        torch.rand(3) * 2  # float32 from the start
    assert watch.narrowest == torch.float64


def test_which_dtype_is_narrower() -> None:
    assert narrower_of(torch.float32, torch.float64) == torch.float32
    assert narrower_of(torch.float64, torch.bfloat16) == torch.bfloat16
    assert narrower_of(torch.int64, torch.float32) == torch.float32


def amplified(offset: float) -> float:
    """By how much a tremor grows in the gradient of a LayerNorm over values with an offset."""
    x = (offset + torch.linspace(-1, 1, 8, dtype=torch.float64)).requires_grad_()

    def gradient() -> Tensor:
        norm = nn.functional.layer_norm(x + 0.0, (8,))
        (found,) = torch.autograd.grad(norm.square().mul(torch.arange(8)).sum(), x)
        return found

    still = gradient()
    with RoundingTremor(2.0**-26, seed=0):
        moved = gradient()
    return float((moved - still).abs().max() / still.abs().max()) * 2.0**26


def test_a_tremor_shows_what_amplifies_rounding() -> None:
    assert 0 < amplified(0.0) < 100
    assert amplified(1e4) > 1000 * amplified(0.0)


def test_a_tremor_draws_no_global_random_numbers_and_spares_infinities() -> None:
    state = torch.get_rng_state()
    x = torch.tensor([1.0, math.inf, -math.inf], dtype=torch.float64)
    with RoundingTremor(1e-3, seed=0):
        moved = x * 1.0
        values, _ = torch.max(torch.stack([x, x]), dim=0)
    assert torch.equal(torch.get_rng_state(), state)
    assert moved[1:].tolist() == [math.inf, -math.inf]
    assert abs(float(moved[0]) - 1) == pytest.approx(1e-3)
    assert 0 < abs(float(values[0]) - 1) < 3e-3
