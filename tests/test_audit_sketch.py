"""Sketches: linear, the same for parts of a gradient as for the whole, apart from the loop's randomness."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wholebatch.audit.trace import SKETCH_WIDTH
from wholebatch.audit.watch.sketch import Sketcher

SHAPES = [(7,), (7, 5), (6, 3, 2, 2), (70_001,), (1, 1), ()]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_sketch_is_linear(shape):
    sketcher, generator = Sketcher(), torch.Generator().manual_seed(1)
    one, other = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    whole = sketcher.whole(3.0 * one - other)
    assert whole.shape == (SKETCH_WIDTH,)
    torch.testing.assert_close(whole, 3.0 * sketcher.whole(one) - sketcher.whole(other))


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(1, 40), columns=st.integers(1, 9), data=st.data())
def test_ranges_of_a_gradient_add_up_to_the_whole(rows, columns, data):
    gradient = torch.randn(
        rows, columns, generator=torch.Generator().manual_seed(rows), dtype=torch.float64
    )
    cut = data.draw(st.integers(0, gradient.numel()))
    flat, sketcher = gradient.reshape(-1), Sketcher()
    parts = [
        sketcher.range_of(flat[:cut], gradient.shape, 0),
        sketcher.range_of(flat[cut:], gradient.shape, cut),
    ]
    torch.testing.assert_close(parts[0] + parts[1], sketcher.whole(gradient))


@pytest.mark.parametrize("shape", [(9,), (9, 4), (8, 3, 4), (70_002,)])
@pytest.mark.parametrize("dimension", [0, 1])
def test_boxes_of_a_gradient_add_up_to_the_whole(shape, dimension):
    if dimension >= len(shape):
        pytest.skip("no such dimension")
    gradient, sketcher = torch.randn(shape, dtype=torch.float64), Sketcher()
    total = torch.zeros(SKETCH_WIDTH, dtype=torch.float64)
    begin = 0
    for part in gradient.tensor_split(4, dim=dimension):
        offsets = [begin if place == dimension else 0 for place in range(len(shape))]
        total += sketcher.box(part, shape, offsets)
        begin += part.shape[dimension]
    torch.testing.assert_close(total, sketcher.whole(gradient))


def test_the_map_is_the_same_whatever_was_sketched_before():
    small, large = torch.ones(50, 3), torch.ones(9_000, 2)
    fresh, used = Sketcher(), Sketcher()
    used.whole(large)
    assert torch.equal(fresh.whole(small), used.whole(small))
    fresh.whole(large)
    assert torch.equal(fresh.whole(large), used.whole(large))


def test_sketching_draws_nothing_from_the_global_generator():
    before = torch.get_rng_state()
    Sketcher().whole(torch.ones(10_000, 3))
    assert torch.equal(before, torch.get_rng_state())


def test_sparse_low_precision_and_complex_gradients_are_sketched_as_their_values_say():
    dense = torch.zeros(8, 4)
    dense[2] = 1.5
    sketcher = Sketcher()
    assert torch.equal(sketcher.whole(dense.to_sparse()), sketcher.whole(dense))
    assert torch.equal(sketcher.whole(dense.bfloat16()), sketcher.whole(dense))
    assert sketcher.whole(torch.complex(dense, dense)).shape == (SKETCH_WIDTH,)
