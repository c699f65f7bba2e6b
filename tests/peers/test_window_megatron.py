"""Exact updates under Megatron-Core's DDP; one launch runs every mode, dtype and optimizer."""

from __future__ import annotations

from typing import Any

import pytest

import environments
from megatron_rounds import (
    DTYPES,
    EPS,
    MODES,
    OPTIMIZERS,
    SHAPES,
    Truth,
    case_of,
    megatron_here,
    wrap,
)
from problems import loss_with
from ranks import run_ranks
from wholebatch.window import UpdateWindow

pytestmark = [
    pytest.mark.peers,
    pytest.mark.slow,
    pytest.mark.skipif(not environments.is_ready("megatron"), reason="needs `make peers`"),
]


def column(rank: int, _n: int) -> dict[Any, Any]:
    """Every mode, dtype and optimizer over all shapes, one update after another."""
    core, found = megatron_here(), {}
    for mode in MODES:
        for dtype in DTYPES:
            for optimizer in OPTIMIZERS:
                case = case_of("equal, full")
                wrapped = wrap(core, case.model(DTYPES[dtype]), mode)
                steps = OPTIMIZERS[optimizer](list(wrapped.parameters()))
                window = UpdateWindow(wrapped, steps, case.objective())
                truth = Truth(wrapped, steps, optimizer)
                for seed, shape in enumerate(SHAPES):
                    one = case_of(shape, seed)
                    key = mode, dtype, optimizer, shape
                    found[key] = truth.update(window, one, rank, loss_with(one.objective()))
    return found


def test_gradient_and_weights_are_those_of_the_big_batch() -> None:
    for of_rank in run_ranks(column, 2, timeout_s=150):
        assert len(of_rank) == len(MODES) * len(DTYPES) * len(OPTIMIZERS) * len(SHAPES)
        for key, found in of_rank.items():
            dtype, shape, record = key[1], key[3], found["record"]
            assert record.outcome == "applied", key
            assert record.reductions == 1, key
            assert record.micro_batches == sum(map(len, SHAPES[shape])), key
            assert abs(found["norm"]) < 4 * EPS[dtype], (key, found)
            assert found["gradient"] < 4 * EPS[dtype], (key, found)
            assert found["weights"] < (1e-12 if dtype == "fp64" else 1e-30), (key, found)
