"""Every broken loop is broken as its table says, and its twin is right: against the big batch in float64.

The audit takes no part in it. ``test_broken_loops_effects.py`` confirms the faults that leave the gradient
as it is.
"""

from __future__ import annotations

import math

import pytest

from broken_loops import EXPECTED, Expected, loop
from broken_loops.observe import FAILING, observed
from broken_loops.truth import big_batch_gradient, clipped, compare, samples_of_updates
from broken_loops.witness import Seen

# A direction that differs by less is rounding, or would be hard to tell from it.
VISIBLE = 0.02
COMPARED = [name for name, expected in EXPECTED.items() if expected.objective and name not in FAILING]


def slow_ones(names: list[str]) -> list[object]:
    """Parameters of a test; loops on ranks or with a library that takes seconds to import are slow."""
    return [
        pytest.param(name, marks=pytest.mark.slow if _is_slow(EXPECTED[name]) else ()) for name in names
    ]


def _is_slow(expected: Expected) -> bool:
    return expected.ranks > 1 or bool(expected.library)


def readings(seen: Seen, expected: Expected, samples: object) -> list[tuple[float, float]]:
    """How each step's gradient compares with the big batch's: how many times it, and how far from that."""
    by_rank = samples if isinstance(samples[0], tuple) else (samples,) * expected.ranks
    updates = list(samples_of_updates(by_rank, expected.num_samples))
    found = []
    for step, indices in zip(seen.steps, updates, strict=False):
        num_samples = expected.num_samples * expected.ranks
        truth = big_batch_gradient(expected.objective, step.parameters, indices, num_samples)
        found.append(compare(step.gradients, clipped(truth, expected.clip)))
    assert len(found) == len(updates)
    return found


def is_right(reading: tuple[float, float], tolerance: float) -> bool:
    times, distance = reading
    return abs(times - 1.0) <= tolerance and distance <= tolerance


@pytest.mark.parametrize("name", slow_ones(COMPARED))
def test_the_right_twin_reads_the_gradient_of_the_big_batch(name):
    expected = EXPECTED[name]
    for seen in observed(name)[1]:
        found = readings(seen, expected, expected.samples)
        assert all(is_right(reading, expected.tolerance) for reading in found), found
        assert len(seen.steps) == len(found)


@pytest.mark.parametrize("name", slow_ones([name for name in COMPARED if EXPECTED[name].read]))
def test_the_broken_loop_reads_what_its_table_says(name):
    expected = EXPECTED[name]
    for seen in observed(name)[0]:
        found = readings(seen, expected, expected.broken_samples or expected.samples)
        wrong = [reading for reading in found if not is_right(reading, expected.tolerance)]
        assert bool(wrong) == (expected.read != "exact"), found
        if expected.read == "factor":
            times = expected.times or expected.factor
            assert all(distance <= expected.tolerance for _, distance in wrong), found
            assert times is None or all(math.isclose(t, times, rel_tol=1e-5) for t, _ in wrong), found
        elif expected.read == "direction":
            assert any(distance > VISIBLE for _, distance in wrong), found


def test_a_total_weight_is_wrong_in_every_update():
    names = [name for name, e in EXPECTED.items() if e.kind == "total_weight" and not _is_slow(e)]
    for name in names:
        found = readings(observed(name)[0][0], EXPECTED[name], EXPECTED[name].samples)
        assert all(math.isclose(t, EXPECTED[name].factor, rel_tol=1e-5) for t, _ in found)


def test_each_kind_has_two_broken_loops_and_functions_of_its_own():
    kinds: dict[str, set[object]] = {}
    for name, expected in EXPECTED.items():
        one = loop(name)
        assert one.broken is not one.right
        assert name.split("/")[0] == expected.kind
        kinds.setdefault(expected.kind, set()).add(one.broken)
    assert all(len(functions) >= 2 for functions in kinds.values())


def test_no_broken_loop_is_left_out_of_the_table():
    kinds = {expected.kind for expected in EXPECTED.values()}
    in_table = {loop(name).broken for name in EXPECTED}
    for kind in kinds:
        module = loop(kind).broken.__globals__
        written = {value for key, value in module.items() if key.startswith("broken") and callable(value)}
        assert written <= in_table, kind
