"""The comparison of packers measures what it says, and sees a packer that is beaten or wrong."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
if str(FOLDER) not in sys.path:
    sys.path.insert(0, str(FOLDER))

import packing as benchmark  # noqa: E402

NAMED = [name for name in benchmark.METHODS if name != "wholebatch"]
with_transformers = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is an extra")


def small_task(**changed):
    values = {"lengths": [9, 7, 5, 4, 2, 2], "budget": 12, "replicas": 2, "rows": "padded"}
    return benchmark.Task(**values | changed)


def test_the_methods_by_hand():
    """Padded to 12 positions over two replicas."""
    task = small_task()
    assert benchmark.sorted_fixed(task) == [[[0], [2], [4]], [[1], [3], [5]]]
    # 9 and 7; 5 to the 7, 4 to the 9; 2 to the 12, 2 to the 13.
    assert benchmark.longest_first_greedy(task) == [[[0], [3, 5]], [[1], [2, 4]]]
    sums = sorted(
        sum(task.lengths[i] for group in share for i in group) for share in benchmark.karmarkar_karp(task)
    )
    assert sums == [14, 15]
    # The first two fill two rows; the third begins the next two.
    assert benchmark.multipack(task) == [[[0], [2, 3]], [[1], [4, 5]]]
    packed = small_task(rows="packed")
    assert benchmark.first_fit(packed, packed.longest_first) == [[0, 4], [1, 2], [3, 5]]


@pytest.mark.slow  # transformers takes seconds to import
@with_transformers
def test_the_sampler_of_transformers_gets_as_many_micro_batches_as_it_needs():
    task = small_task(lengths=[6, 6, 6, 6, 1, 1, 1, 1], budget=12)
    shares = benchmark.batch_rebalance(task)
    assert shares is not None
    assert task.fits(shares)
    assert sorted(index for share in shares for group in share for index in group) == list(range(8))
    # Each of two samples would have to be alone, and there are three replicas.
    assert benchmark.batch_rebalance(small_task(lengths=[12, 12], budget=12, replicas=3)) is None


def test_the_outcome_by_hand():
    outcome = benchmark.measure(small_task(lengths=[4, 2, 3], replicas=2), lambda _: [[[0, 1]], [[2]]])
    assert outcome.padding_share == pytest.approx(1 - 9 / 11)
    costs = [64 + 8 + 0.001 * 32, 64 + 3 + 0.001 * 9]
    assert outcome.imbalance == pytest.approx(max(costs) / np.mean(costs))
    assert outcome.slowest_over_ideal == pytest.approx(costs[0] / ((9 + 0.001 * 29) / 2))
    assert outcome.micro_batches_over_bound == 2


@pytest.mark.parametrize(
    ("shares", "words"),
    [
        ([[[0, 1]], []], "missing or there twice"),
        ([[[0, 1], [1]], [[2]]], "missing or there twice"),
        ([[[0, 1, 2]], []], "over the budget"),
    ],
)
def test_a_wrong_packing_is_not_measured(shares, words):
    with pytest.raises(AssertionError, match=words):
        benchmark.measure(small_task(lengths=[5, 5, 5], budget=14), lambda _: shares)


@pytest.mark.slow
@with_transformers
@pytest.mark.parametrize("rows", ["padded", "packed"])
@pytest.mark.parametrize("draw", benchmark.draws(), ids=lambda draw: draw.name)
def test_no_named_method_is_better_on_any_draw(draw, rows):
    for replicas in (1, 4, 8):
        found = benchmark.compare(draw, replicas, rows, 2)
        assert benchmark.worst_against_others(found) <= benchmark.TIE, found


def test_a_packer_that_is_beaten_is_seen(monkeypatch, capsys):
    arguments = ["--draws", "all equal", "--replicas", "3", "--repeat", "1"]
    monkeypatch.setattr(benchmark, "MICRO_BATCHES_PER_REPLICA", 1)
    assert benchmark.main([*arguments, "--markdown"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    assert len([line for line in lines if line.startswith("| all equal | 3 | packed |")]) == 6
    assert lines[-1].endswith("at worst: 1.000000")
    monkeypatch.setitem(benchmark.METHODS, "wholebatch", benchmark.sorted_fixed)
    assert benchmark.main(arguments) == 1
