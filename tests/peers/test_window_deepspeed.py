"""Exact updates of DeepSpeed engines, ZeRO 0 to 3; one launch for a stage runs its whole column."""

from __future__ import annotations

from typing import Any

import environments
import pytest
import torch
import torch.distributed as dist
from deepspeed_rounds import (
    CLIP,
    EPS,
    MODES,
    SHAPES,
    Branching,
    Truth,
    case_of,
    config_of,
    deepspeed_here,
    start,
    weights,
)

from problems import Case, loss_with
from ranks import run_ranks
from wholebatch.errors import OtherRankFailedError, WholebatchError
from wholebatch.objective import counted_loss
from wholebatch.window import UpdateWindow

pytestmark = [
    pytest.mark.peers,
    pytest.mark.slow,
    pytest.mark.skipif(not environments.is_ready("deepspeed"), reason="needs `make peers`"),
]
WEIGHTS_BOUND = 2.0**-20  # of weights below 3, which the engine moves in float32


def modes_of(stage: int) -> list[str]:
    return [mode for mode in MODES if stage > 0 or mode != "bf16, fp32 gradients"]


def column(rank: int, n: int, stage: int) -> dict[str, Any]:
    """Every mode and optimizer of a stage, over all shapes, one update after another."""
    deepspeed, found = deepspeed_here(rank, n), {}
    for mode in modes_of(stage):
        for optimizer, clip in (("SGD momentum", None), ("AdamW", CLIP)):
            engine = start(deepspeed, config_of(stage, mode, clip), optimizer=optimizer)
            case = case_of("equal, full")
            window = UpdateWindow(engine, engine.optimizer, case.objective(), clip_grad_norm=clip)
            truth = Truth(deepspeed, engine, optimizer=optimizer)
            for seed, shape in enumerate(SHAPES):
                found[mode, optimizer, shape] = truth.update(window, case_of(shape, seed), rank)
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradient_and_weights_are_those_of_the_big_batch(stage: int) -> None:
    results = run_ranks(column, 2, stage, timeout_s=150)
    assert len(results[0]) == len(modes_of(stage)) * 2 * len(SHAPES)
    for of_rank in results:
        for (mode, optimizer, shape), found in of_rank.items():
            where = f"ZeRO {stage}, {mode}, {optimizer}, {shape}"
            record = found["record"]
            turns = max(map(len, SHAPES[shape]))
            assert record.outcome == "applied", where
            assert record.reductions == (1 if stage < 2 else turns), where
            assert record.micro_batches == sum(map(len, SHAPES[shape])), where
            assert abs(found["norm"]) < 4 * EPS[mode], where
            assert found["gradient"] < 4 * EPS[mode], where
            assert found["weights"] < WEIGHTS_BOUND, where
            assert (record.loss_scale is None) == (mode != "fp16"), where


def exceptional(rank: int, n: int, stage: int) -> dict[str, Any]:
    """What is not an ordinary update: failures, numbers that are not finite, N known late."""
    deepspeed, found = deepspeed_here(rank, n), {}
    case = case_of("equal, full")
    loss = loss_with(case.objective())

    # a failure in the second micro-batch of one rank rolls back on both, and the update runs again
    engine = start(deepspeed, config_of(stage))
    truth = Truth(deepspeed, engine)
    window = UpdateWindow(engine, engine.optimizer, case.objective())
    turns = []

    def failing(model: Any, batch: Any) -> Any:
        given = loss(model, batch)
        turns.append(1)
        if rank == 1 and len(turns) == 2:
            raise ZeroDivisionError
        return given

    try:
        window.run(case.batches()[rank], failing)
    except (ZeroDivisionError, OtherRankFailedError) as error:
        found["failed"] = type(error).__name__
    found["again"] = truth.update(window, case, rank)

    # a loss that is not finite is skipped, and the next update is exact
    before = weights(deepspeed, engine)

    def infinite(model: Any, batch: Any) -> Any:
        given, items = loss(model, batch)
        return given * float("inf"), items

    found["skipped"] = window.run(case.batches()[rank], infinite)
    after = weights(deepspeed, engine)
    found["unmoved"] = all(torch.equal(before[name], after[name]) for name in before)
    found["after skip"] = truth.update(window, case, rank)

    # the denominator known only after the forwards, and the learning rate of the engine's own schedule
    inner = case.objective()
    unknown = counted_loss(lambda output, batch: inner(output, batch))
    schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.3, "warmup_min_lr": 0.3}}
    engine = start(deepspeed, config_of(stage, clip=CLIP, scheduler=schedule))
    window = UpdateWindow(engine, engine.optimizer, unknown, clip_grad_norm=CLIP)
    found["provisional"] = Truth(deepspeed, engine).update(window, case, rank)
    moved = [engine.lr_scheduler.last_batch_iteration]
    window.run(case.batches()[rank], infinite)
    found["schedule"] = [*moved, engine.lr_scheduler.last_batch_iteration]

    # float16: the engine sees its own overflow and backs off
    engine = start(deepspeed, config_of(stage, "fp16"))
    window = UpdateWindow(engine, engine.optimizer, case.objective())
    scales = [window.finish.loss_scale()]
    found["overflow"] = window.run(case.batches()[rank], infinite)
    scales.append(window.finish.loss_scale())
    found["scales"] = scales
    found["after overflow"] = Truth(deepspeed, engine).update(window, case, rank)

    # a parameter that the first micro-batch does not use, and then none does
    engine = start(deepspeed, config_of(stage), model=Branching())
    window = UpdateWindow(engine, engine.optimizer, case.objective())
    truth = Truth(deepspeed, engine)
    used = Case(counts=[[[5, 2], [3]], [[4, 1], [2]]])
    found["unused"] = [truth.update(window, one, rank) for one in (used, used, case)]
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_failures_skips_and_late_denominators_leave_exact_updates(stage: int) -> None:
    results = run_ranks(exceptional, 2, stage, timeout_s=150)
    assert [found["failed"] for found in results] == ["OtherRankFailedError", "ZeroDivisionError"]
    for found in results:
        exact = [found["again"], found["after skip"], found["provisional"], *found["unused"]]
        for one in exact:
            assert one["record"].outcome == "applied"
            assert abs(one["norm"]) < 4 * EPS["fp32"]
            assert one["gradient"] < 4 * EPS["fp32"]
            assert one["weights"] < WEIGHTS_BOUND
        assert found["skipped"].outcome == "skipped_nonfinite"
        assert found["unmoved"]
        assert found["schedule"] == [found["schedule"][0]] * 2
        assert found["overflow"].outcome == "skipped_nonfinite"
        assert found["overflow"].loss_scale == found["scales"][0] == 2 * found["scales"][1]
        assert found["after overflow"]["record"].loss_scale == found["scales"][1]
        assert found["after overflow"]["gradient"] < 4 * EPS["fp16"]
