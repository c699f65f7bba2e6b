"""Packings: the budget holds, each sample is there once, and the numbers of micro-batches are as asked."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from wholebatch.packing import CostModel, Packing, pack


def positions_of(lengths: list[int], rows: str) -> int:
    """Positions of one micro-batch, by the words of the docstring."""
    if not lengths:
        return 0
    return max(lengths) * len(lengths) if rows == "padded" else sum(lengths)


def cost_of(lengths: list[int], rows: str, model: CostModel) -> float:
    positions = positions_of(lengths, rows)
    if rows == "padded":
        product = positions * max(lengths, default=0)
    else:
        product = sum(length * length for length in lengths)
    return model.per_micro_batch + model.per_position * positions + model.per_position_and_length * product


def complaints(packing: Packing, lengths: list[int], asked: dict[str, Any], model: CostModel) -> list[str]:
    """Return everything that is wrong with a packing, each from the indices alone."""
    found, rows, budget = [], packing.rows, packing.budget
    micro_batches = [list(each) for replica in packing.replicas for each in replica]
    if sorted(itertools.chain(*micro_batches)) != list(range(len(lengths))):
        found.append("a sample is missing or there twice")
    if len(packing.replicas) != asked["replicas"]:
        found.append("not so many replicas")
    cut = [min(length, budget) if asked["too_long"] == "truncate" else length for length in lengths]
    sizes = [positions_of([cut[index] for index in each], rows) for each in micro_batches]
    for each, size in zip(micro_batches, sizes, strict=True):
        allowed = asked["budget_alone"] if len(each) == 1 and each[0] in packing.alone else budget
        if size > allowed:
            found.append(f"{size} positions in {each}, over {allowed}")
    numbers = [len(replica) for replica in packing.replicas]
    multiple = asked["micro_batches_multiple"]
    if any(number % multiple for number in numbers):
        found.append(f"{numbers} micro-batches are no multiples of {multiple}")
    if asked["equal_micro_batches"] and len(set(numbers)) > 1:
        found.append(f"{numbers} micro-batches are not equal")
    if asked["equal_micro_batches"] and len(lengths) >= sum(numbers) and not all(micro_batches):
        found.append("an empty micro-batch without need")
    if multiple == 1 and not asked["equal_micro_batches"] and not all(micro_batches):
        found.append("an empty micro-batch that nobody asked for")
    if packing.micro_batches < packing.lower_bound:
        found.append(f"{packing.micro_batches} micro-batches, below the bound {packing.lower_bound}")
    if (packing.positions, packing.tokens) != (sum(sizes), sum(cut)):
        found.append("positions or tokens are not what they are")
    if packing.largest_micro_batch_positions != max(sizes, default=0):
        found.append("the largest micro-batch is not what it is")
    costs = [
        sum(cost_of([cut[index] for index in each], rows, model) for each in replica)
        for replica in packing.replicas
    ]
    if not np.allclose(costs, packing.costs, rtol=1e-12):
        found.append(f"costs {packing.costs}, and they are {costs}")
    for replica in packing.replicas:
        largest_first = [positions_of([cut[index] for index in each], rows) for each in replica]
        if largest_first != sorted(largest_first, reverse=True):
            found.append(f"{largest_first} positions are not largest first")
    return found


def random_case(rng: np.random.Generator) -> tuple[list[int], dict[str, Any]]:
    """Small and odd cases of every kind; lengths of few values, so that ties abound."""
    num_samples = int(rng.integers(0, 40))
    longest = int(rng.choice([1, 3, 12, 100]))
    lengths = rng.integers(1, longest + 1, num_samples)
    if rng.random() < 0.3 and num_samples:
        lengths[rng.integers(num_samples)] *= 20
    over = int(lengths.max(initial=1))
    too_long = str(rng.choice(["refuse", "alone", "truncate"]))
    budget = (
        int(over * rng.choice([1, 1.5, 3, 8])) if too_long == "refuse" else int(rng.integers(1, over + 5))
    )
    model = CostModel(
        per_micro_batch=float(rng.choice([0, 0, 0.5, 30])),
        per_position=float(rng.choice([1, 0.3])),
        per_position_and_length=float(rng.choice([0, 0.01])),
    )
    return lengths.tolist(), {
        "budget": budget,
        "replicas": int(rng.choice([1, 2, 3, 8])),
        "rows": str(rng.choice(["padded", "packed"])),
        "equal_micro_batches": bool(rng.random() < 0.5),
        "micro_batches_multiple": int(rng.choice([1, 1, 2, 3])),
        "too_long": too_long,
        "budget_alone": max(budget + 1, over) if too_long == "alone" else None,
        "cost": model,
    }


@pytest.mark.slow
def test_ten_thousand_random_cases():
    rng = np.random.default_rng(5)
    for _ in range(10_000):
        lengths, asked = random_case(rng)
        packing = pack(lengths, **asked)
        assert not complaints(packing, lengths, asked, asked["cost"]), (lengths, asked, packing)
        if rng.random() < 0.05:
            assert pack(np.array(lengths, dtype=np.int32), **asked) == packing
