"""The right loops are right: their optimizers read the gradient of the big batch, in float64.

Where the loss is not one of ``broken_loops.truth``, the loop itself is run again with one micro-batch of
everything, or it is only seen to train on finite gradients.
"""

from __future__ import annotations

import math
import warnings

import pytest

from broken_loops.truth import big_batch_gradient, clipped, compare, samples_of_updates
from broken_loops.witness import Seen, watch
from ranks import run_ranks
from right_loops import RIGHT_LOOPS, right_loop


def _watch(rank: int, ranks: int, name: str) -> Seen:
    arguments = (rank, ranks) if RIGHT_LOOPS[name].ranks > 1 else ()
    with warnings.catch_warnings():
        return watch(right_loop(name), *arguments)


def _seen(name: str) -> list[Seen]:
    row = RIGHT_LOOPS[name]
    return run_ranks(_watch, row.ranks, name) if row.slow and name != "compiled" else [_watch(0, 1, name)]


NAMES = [pytest.param(name, marks=[pytest.mark.slow] * row.slow) for name, row in RIGHT_LOOPS.items()]


@pytest.mark.parametrize("name", NAMES)
def test_the_optimizer_reads_the_gradient_of_the_big_batch(name):
    row = RIGHT_LOOPS[name]
    for seen in _seen(name):
        gradients = [gradient for step in seen.steps for gradient in step.gradients]
        assert gradients
        assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients)
        if row.objective is None:
            continue
        by_rank = row.samples if isinstance(row.samples[0], tuple) else (row.samples,) * row.ranks
        updates = list(samples_of_updates(by_rank, row.num_samples))
        assert len(updates) == len(seen.steps)
        for step, indices in zip(seen.steps, updates, strict=True):
            truth = big_batch_gradient(row.objective, step.parameters, indices, row.num_samples * row.ranks)
            times, distance = compare(step.gradients, clipped(truth, row.clip))
            assert math.isclose(times, 1.0, rel_tol=row.tolerance)
            assert distance <= row.tolerance


def test_a_loop_that_is_not_right_would_be_seen():
    from broken_loops.total_weight import broken

    step = watch(broken).steps[0]
    truth = big_batch_gradient("images", step.parameters, range(16), 48)
    assert compare(step.gradients, truth)[0] == pytest.approx(4.0)
