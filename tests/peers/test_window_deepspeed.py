"""Exact updates of DeepSpeed engines, ZeRO 0 to 3, beside those of the engines' table.

``test_engines_of_peers.py`` has the column of each stage in float32, and in bfloat16 with float32 sums.
"""

from __future__ import annotations

import gc
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import environments
import wholebatch
from deepspeed_rounds import (
    CLIP,
    EPS,
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
from wholebatch.errors import (
    ChangedInsideWindowError,
    OtherRankFailedError,
    PoisonedWindowError,
    StaleGradientsError,
    WholebatchError,
)
from wholebatch.finish import per_update
from wholebatch.objective import counted_loss
from wholebatch.plan import plan_batch
from wholebatch.ranks import deepspeed as seam
from wholebatch.ranks import deepspeed_gradients as held
from wholebatch.window import UpdateWindow

pytestmark = [
    pytest.mark.peers,
    pytest.mark.slow,
    pytest.mark.skipif(not environments.is_ready("deepspeed"), reason="needs `make peers`"),
]
WEIGHTS_BOUND = 2.0**-20  # of weights below 3, which the engine moves in float32


def half(stage: int) -> dict[str, tuple[str, float | None]]:
    """Modes that the table does not have, with an optimizer and the norm that it clips by."""
    wide = {"fp16, fp32 gradients": ("AdamW", None)} if stage == 1 else {}
    return {"bf16": ("SGD momentum", None), "fp16": ("AdamW", CLIP)} | wide


def of_a_stage(rank: int, n: int, stage: int) -> dict[str, Any]:
    """All that needs two ranks and a stage, in one launch."""
    return {
        "half": in_half_precision(rank, n, stage),
        "exceptional": exceptional(rank, n, stage),
        "interrupted": interrupted(rank, n, stage),
    }


@pytest.fixture(scope="module", params=[0, 1, 2, 3])
def stage_and_found(request: pytest.FixtureRequest) -> tuple[int, list[dict[str, Any]]]:
    return request.param, run_ranks(of_a_stage, 2, request.param, timeout_s=200)


def in_half_precision(rank: int, n: int, stage: int) -> dict[str, Any]:
    """Windows of all shapes, one update after another."""
    deepspeed, found = deepspeed_here(rank, n), {}
    for mode, (optimizer, clip) in half(stage).items():
        engine = start(deepspeed, config_of(stage, mode, clip), optimizer=optimizer)
        case = case_of("equal, full")
        window = UpdateWindow(engine, engine.optimizer, case.objective(), clip_grad_norm=clip)
        truth = Truth(deepspeed, engine, optimizer=optimizer, clip=clip)
        for seed, shape in enumerate(SHAPES):
            found[mode, shape] = truth.update(window, case_of(shape, seed), rank)
    return found


def test_gradient_and_weights_are_those_of_the_big_batch(stage_and_found: Any) -> None:
    stage, results = stage_and_found
    for of_rank in results:
        assert len(of_rank["half"]) == len(half(stage)) * len(SHAPES)
        for (mode, shape), found in of_rank["half"].items():
            where = f"ZeRO {stage}, {mode}, {shape}"
            record = found["record"]
            turns = max(map(len, SHAPES[shape]))
            assert record.outcome == "applied", where
            assert record.reductions == (1 if stage < 2 else turns), where
            assert record.micro_batches == sum(map(len, SHAPES[shape])), where
            assert abs(found["norm"]) < 4 * EPS[mode], where
            assert found["gradient"] < 4 * EPS[mode], where
            assert found["weights"] < WEIGHTS_BOUND, where
            assert (record.loss_scale is None) == (mode == "bf16"), where


def exceptional(rank: int, n: int, stage: int) -> dict[str, Any]:
    """What is not an ordinary update: failures, numbers that are not finite, N known late."""
    deepspeed, found = deepspeed_here(rank, n), {}
    case = case_of("equal, full")
    loss = loss_with(case.objective())

    # a failure of one rank, or of all alike in the middle, rolls back on both, and the update runs again
    mode = (
        "bf16, fp32 gradients" if stage == 1 else "fp32"
    )  # that optimizer of stage 1 keeps its own buffers
    engine = start(deepspeed, config_of(stage, mode))
    truth = Truth(deepspeed, engine)
    window = UpdateWindow(engine, engine.optimizer, case.objective())
    turns: list[int] = []
    # where every backward reduces, one rank alone can turn back before the last
    for ranks, turn in (((1,), 2 if stage < 2 else 3), ((0, 1), 2)):
        turns.clear()

        def failing(model: Any, batch: Any, ranks: tuple[int, ...] = ranks, turn: int = turn) -> Any:
            given = loss(model, batch)
            turns.append(1)
            if rank in ranks and len(turns) == turn:
                raise ZeroDivisionError
            return given

        try:
            window.run(case.batches()[rank], failing)
        except (ZeroDivisionError, OtherRankFailedError) as error:
            found["failed", ranks] = type(error).__name__
    found["again"] = truth.update(window, case, rank)

    # what a loop of its own does beside the window: it is seen, or comes to nothing
    def beside(call: Any) -> Any:
        def loop(model: Any, batch: Any) -> Any:
            given = loss(model, batch)
            turns.append(1)
            if len(turns) == 2:
                call(given[0])
            return given

        turns.clear()
        return loop

    calls = {
        "backward": lambda given: engine.backward(given, retain_graph=True),
        "zero_grad": lambda _: engine.optimizer.zero_grad(),
    }
    for name, call in calls.items():
        try:
            found[name] = window.run(case.batches()[rank], beside(call)).outcome
        except WholebatchError as error:
            found[name] = str(error)

    def stepping(batches: Any, loss: Any) -> Any:
        with window.update(batches) as update:
            for batch in update:
                update.backward(loss(engine, batch))
                engine.step()
                engine.set_train_batch_size(4 * of_update)
            engine.set_train_batch_size(of_update)
            engine.step()
        return update.record

    engine.set_gradient_accumulation_boundary(False)  # what the loop says of it does not count either
    of_update = engine.train_batch_size()
    found["step"] = truth.update(SimpleNamespace(run=stepping), case, rank)
    found["boundary"] = engine.is_gradient_accumulation_boundary()
    engine.destroy()
    try:
        found["destroyed"] = window.run(case.batches()[rank], loss).outcome
    except WholebatchError as error:
        found["destroyed"] = str(error)
    engine = start(deepspeed, config_of(stage))
    truth = Truth(deepspeed, engine)
    window = UpdateWindow(engine, engine.optimizer, case.objective())
    found["traffic"] = window.traffic(3)

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
    found["provisional"] = Truth(deepspeed, engine, clip=CLIP).update(window, case, rank)
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
    overlap = {"overlap_comm": stage in (1, 2)}
    engine = start(deepspeed, config_of(stage, zero=overlap), model=Branching())
    window = UpdateWindow(engine, engine.optimizer, case.objective())
    truth = Truth(deepspeed, engine)
    used = Case(counts=[[[5, 2], [3]], [[4, 1], [2]]])
    unused_last = Case(counts=[[[3], [5, 2]], [[2], [4, 1]]])
    found["unused"] = [truth.update(window, one, rank) for one in (used, used, case, unused_last)]
    return found


def test_failures_skips_and_late_denominators_leave_exact_updates(stage_and_found: Any) -> None:
    stage, of_ranks = stage_and_found
    results = [of_rank["exceptional"] for of_rank in of_ranks]
    failed = [(found["failed", (1,)], found["failed", (0, 1)]) for found in results]
    assert failed == [("OtherRankFailedError", "ZeroDivisionError"), ("ZeroDivisionError",) * 2]
    for found in results:
        for name in ("again", "step"):
            assert found[name]["gradient"] < 4 * EPS["bf16" if stage == 1 else "fp32"], name
        assert not found["boundary"]  # as the loop had said
        assert "gradients were written or cleared" in found["backward"]
        # stage 2 has handed over what it reduced, and clears nothing of that
        assert ("gradients were written or cleared" in found["zero_grad"]) is (stage != 2)
        assert ("the DeepSpeed engine was destroyed" in found["destroyed"]) is (stage > 1)
        assert found["traffic"].reductions == (1 if stage < 2 else 3)
        exact = [found["after skip"], found["provisional"], *found["unused"]]
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


# Ways to hold gradients, for backwards that end half way: in buckets smaller than the head's weight.
SMALL = {"reduce_bucket_size": 40}
WAYS: dict[int, dict[str, tuple[str, dict[str, Any]]]] = {
    0: {"": ("fp32", {}), "fp16": ("fp16", {})},
    1: {
        "": ("fp32", SMALL),
        "whole": ("bf16, fp32 gradients", {}),
        "wide": ("fp16, fp32 gradients", SMALL),
    },
    2: {
        "": ("fp32", SMALL),
        "overlap": ("fp32", SMALL | {"overlap_comm": True, "contiguous_gradients": False}),
        "wide": ("bf16, fp32 gradients", SMALL),
    },
    3: {"": ("fp32", SMALL | {"stage3_param_persistence_threshold": 0})},
}


def interrupted(rank: int, n: int, stage: int) -> dict[str, dict[str, bool]]:
    """What a backward left half way on both ranks is followed by, beside an engine that had none."""
    deepspeed, found = deepspeed_here(rank, n), {}
    case, uneven = case_of("equal, full"), case_of("ragged, tail", 1)
    loss = loss_with(case.objective())
    for name, (mode, zero) in WAYS[stage].items():
        pair = [start(deepspeed, config_of(stage, mode, zero=zero), optimizer="AdamW") for _ in range(2)]
        windows = [UpdateWindow(engine, engine.optimizer, case.objective()) for engine in pair]

        def alike(pair: list[Any] = pair) -> bool:
            one, other = (weights(deepspeed, engine, master=True) for engine in pair)
            return all(torch.equal(one[name], other[name]) for name in one)

        here = found[name] = {}
        for place in ("hidden", "embedding"):
            hook = failing_backward(getattr(pair[0].module, place), turn=2)
            with pytest.raises(ZeroDivisionError):
                windows[0].run(case.batches()[rank], loss)
            hook.remove()
            if stage == 3:
                here[place, "freed"] = not any(one.numel() for one in pair[0].module.parameters())
            for one in (case, uneven):
                records = [window.run(one.batches()[rank], loss) for window in windows]
                here[place, one.seed] = alike() and records[0].gradient_norm == records[1].gradient_norm
        hook = failing_backward(pair[0].module.hidden, turn=2)
        with pytest.raises(ZeroDivisionError):
            windows[0].run(case.batches()[rank], loss)
        hook.remove()
        pair[0].set_gradient_accumulation_boundary(False)
        for engine in (pair[0], *pair):  # a loop of one's own; what it leaves at first is thrown away
            total, items = loss(engine, case.batches()[rank][0])
            engine.scale(total / items).backward() if stage else engine.backward(total / items)
            if not engine.is_gradient_accumulation_boundary():
                with pytest.raises(StaleGradientsError):
                    windows[0].run(case.batches()[rank], loss)
                engine.set_gradient_accumulation_boundary(True)
            else:
                engine.step()
        here["own loop"] = alike()

        def clearing(model: Any, batch: Any, optimizer: Any = pair[0].optimizer) -> Any:
            optimizer.zero_grad()
            return loss(model, batch)

        if stage != 2:  # which has handed over what it reduced, and clears nothing of that
            with pytest.raises(ChangedInsideWindowError):
                windows[0].run(case.batches()[rank], clearing)
    return found


def failing_backward(module: Any, *, turn: int) -> Any:
    """A hook of ``module``, with which the gradient of its output is an exception in one turn."""
    turns: list[int] = []

    def fail(_: Any) -> None:
        raise ZeroDivisionError

    def watch(_module: Any, _given: Any, output: torch.Tensor) -> None:
        turns.append(1)
        if len(turns) == turn:
            output.register_hook(fail)

    return module.register_forward_hook(watch)


def test_a_backward_left_half_way_leaves_nothing(stage_and_found: Any) -> None:
    stage, of_ranks = stage_and_found
    for found in (of_rank["interrupted"] for of_rank in of_ranks):
        assert found.keys() == WAYS[stage].keys()
        for name, here in found.items():
            assert len(here) == (7 if stage == 3 else 5)
            assert all(here.values()), (name, here)


def fails_alone(rank: int, n: int) -> tuple[list[str], float]:
    """Rank 1 fails before the backward of its second micro-batch, in which rank 0 then waits for it."""
    deepspeed = deepspeed_here(rank, n)
    case = case_of("equal, full")
    loss = loss_with(case.objective())
    engine = start(deepspeed, config_of(2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(seam, "PATIENCE_S", 2.0)
        window = UpdateWindow(engine, engine.optimizer, case.objective())
    window.run(case.batches()[rank], loss)
    second = case.batches()[rank][1]["input_ids"]

    def failing(model: Any, batch: Any) -> Any:
        if rank == 1 and torch.equal(batch["input_ids"], second):
            raise ValueError("a bad sample")
        return loss(model, batch)

    began = time.monotonic()
    try:
        window.run(case.batches()[rank], failing)
    except (ValueError, PoisonedWindowError) as error:
        said = [f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])]
    took = time.monotonic() - began
    with pytest.raises(PoisonedWindowError) as caught:
        window.run(case.batches()[rank], loss)
    return [*said, str(caught.value)], took


def test_a_rank_that_fails_alone_between_reductions_is_named_by_the_other() -> None:
    outcomes = run_ranks(fails_alone, 2, expect="outcomes")
    (other, waited), (own, took) = (outcome[1] for outcome in outcomes)
    assert other[0].startswith("PoisonedWindowError: contact with another rank was lost in a collective of")
    assert "rank 1 failed in update 2: ValueError: a bad sample" in other[0]
    assert "restart from the last committed update, number 1" in other[0]
    assert own[0] == "ValueError: a bad sample"
    assert "did not answer within 2 seconds; no sign of rank 0" in own[1]
    assert (other[-1] in other[0], own[-1]) == (True, own[1])
    assert max(waited, took) < 20


def broken(rank: int, n: int) -> dict[str, Any]:
    """What each update comes to without the one thing that makes it exact."""
    deepspeed, found = deepspeed_here(rank, n), {}

    def measured(
        engine: Any, shapes: tuple[Case, ...] = (case_of("equal, full"),), *, clip: float | None = None
    ) -> dict[str, Any]:
        window = UpdateWindow(engine, engine.optimizer, shapes[0].objective(), clip_grad_norm=clip)
        truth = Truth(deepspeed, engine, clip=clip)
        return [truth.update(window, case, rank) for case in shapes][-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(seam, "check_config", lambda _: None)
        engine = start(deepspeed, config_of(0, gradient_accumulation_steps=4))
        backward = engine.backward
        engine.backward = lambda loss, **_: backward(loss)
        found["gradient_accumulation_steps left at 4"] = measured(engine)["gradient"]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(seam.EngineStepper, "check_clip", lambda *_: None)
        config = config_of(1)
        del config["gradient_clipping"]
        model = Case(counts=[]).model().float()
        with torch.no_grad():
            model.head.weight *= 30.0  # for a norm above 1
        found["gradient_clipping absent"] = measured(start(deepspeed, config, model=model))["weights"]

    engine = start(deepspeed, config_of(2))
    says = engine.set_gradient_accumulation_boundary
    engine.set_gradient_accumulation_boundary = lambda _: says(True)
    found["boundary left on"] = measured(engine)["gradient"]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(held.InShards, "begin", lambda _: None)
        used = Case(counts=[[[5, 2], [3]], [[4, 1], [2]]])
        engine = start(deepspeed, config_of(3), model=Branching())
        found["last update's shards kept"] = measured(engine, (used, case_of("equal, full")))["gradient"]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(seam.EngineStepper, "scaled", lambda _, seed: seed)
        found["fp16 without ZeRO not scaled"] = measured(start(deepspeed, config_of(0, "fp16")))["gradient"]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(held.InWholeBuffer, "prepare", lambda _: None)
        engine = start(deepspeed, config_of(1, "bf16, fp32 gradients", CLIP))
        try:
            measured(engine, (case_of("one rank has none"),), clip=CLIP)
        except WholebatchError as error:
            found["marked as not reached"] = str(error)
    return found


def test_each_variant_without_what_makes_it_exact_is_far_from_it() -> None:
    for found in run_ranks(broken, 2, timeout_s=150):
        assert found.pop("gradient_accumulation_steps left at 4") == pytest.approx(0.75, rel=1e-5)
        assert found.pop("fp16 without ZeRO not scaled") == pytest.approx(1 - 2.0**-6, rel=1e-2)
        assert "they were not reduced as a whole" in found.pop("marked as not reached")
        assert len(found) == 3
        assert min(found.values()) > 1e-2, found


def refused(rank: int, n: int) -> dict[str, str]:
    """What the window says where DeepSpeed's configuration and its own arguments contradict each other."""
    deepspeed, found = deepspeed_here(rank, n), {}
    objective = case_of("equal, full").objective()
    plan = plan_batch(global_batch_samples=24, micro_batch_samples=3, ranks=n)

    def saying(name: str, stage: int = 0, clip: float | None = None, **named: Any) -> None:
        more = named.pop("config", {})
        engine = start(deepspeed, {**config_of(stage), **more}, beside=named.pop("beside", ()))
        schedule = named.pop("schedule", None)
        if schedule:
            named["scheduler"] = per_update(
                torch.optim.lr_scheduler.LambdaLR(engine.basic_optimizer, lambda _: 1.0)
            )
        optimizers = [named.pop("optimizer", engine.optimizer), *named.pop("and_optimizers", ())]
        try:
            UpdateWindow(engine, optimizers, objective, clip_grad_norm=clip, **named)
        except WholebatchError as error:
            found[name] = str(error)

    saying("steps", config={"gradient_accumulation_steps": 8})
    saying("clip", clip=0.5, config={"gradient_clipping": 2.0})
    saying("clip absent", config={"gradient_clipping": 1.0})
    saying("micro-batch", plan=plan)
    saying("predivide", config={"gradient_predivide_factor": 2.0})
    saying("sum", config={"gradient_allreduce_op": "sum"})
    saying("whole", reduce="per_micro_batch")
    saying("sharded", 2, reduce="after_agreement")
    another = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    saying("other", optimizer=another)
    saying("two", and_optimizers=[another])
    warmup = {"type": "WarmupLR", "params": {}}
    saying("outside", beside=[torch.nn.Parameter(torch.zeros(3))])
    saying("schedules", schedule=True, config={"scheduler": warmup})
    saying("schedule of one's own", schedule=True)
    return found


def misused(rank: int, n: int) -> dict[str, str]:
    """What the window says where an engine was changed after it was given, or used otherwise."""
    deepspeed, found = deepspeed_here(rank, n), {}
    case = case_of("equal, full")
    batches, loss = case.batches()[0], loss_with(case.objective())

    def saying(
        name: str, config: dict[str, Any], change: Any, *, run: Any = None, loss: Any = loss, **named: Any
    ) -> None:
        engine = start(deepspeed, config, model=named.pop("model", None))
        optimizer = named.pop("optimizer", "optimizer")
        try:
            window = UpdateWindow(engine, getattr(engine, optimizer), case.objective(), **named)
            change(engine)
            found[name] = (run or (lambda _, update: update()))(
                engine, lambda: window.run(batches, loss).outcome
            )
        except WholebatchError as error:
            found[name] = str(error)

    def nothing(_: Any) -> None:
        """Leave the engine as it is."""

    def inside_no_sync(engine: Any, update: Any) -> Any:
        with engine.no_sync():
            return update()

    turns: list[int] = []

    def past_the_engine(model: Any, batch: Any) -> Any:
        turns.append(1)
        if len(turns) == 1:
            return loss(model, batch)
        with torch.no_grad():
            model(batch["input_ids"])
        return loss(model.module, batch)

    def stepping(model: Any, batch: Any) -> Any:
        given = loss(model, batch)
        model.step()
        return given

    def counting(engine: Any, update: Any) -> Any:
        return f"{update()} in {engine.global_steps} step"

    saying("own step", config_of(0), nothing, loss=stepping, run=counting)
    saying("steps", config_of(0), lambda engine: engine.set_train_batch_size(8))
    saying("frozen", config_of(1), lambda engine: engine.module.head.bias.requires_grad_(False))
    saying("no_sync", config_of(0), nothing, run=inside_no_sync)
    saying("past the engine", config_of(1), nothing, loss=past_the_engine)
    sparse = case.model().float()
    sparse.embedding.sparse = True
    saying("sparse", config_of(0), nothing, model=sparse)
    saying("narrow", config_of(2, "bf16"), nothing, accumulate_in=torch.float32)
    saying("inner optimizer", config_of(1), nothing, optimizer="basic_optimizer")
    model = case.model().float()
    steps = torch.optim.SGD([model.embedding.weight], lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=steps, config=config_of(1))
    with pytest.raises(WholebatchError) as refusal:
        UpdateWindow(engine, engine.optimizer, case.objective())
    found["untrained"] = str(refusal.value)
    engine = start(deepspeed, config_of(0))
    hooks = list(engine._forward_pre_hooks)
    UpdateWindow(engine, engine.optimizer, case.objective())
    gc.collect()
    found["hooks"] = "as before" if list(engine._forward_pre_hooks) == hooks else "left behind"
    return found


def of_one_rank(rank: int, n: int) -> dict[str, dict[str, str]]:
    """What needs no second rank, in one launch."""
    return {"refused": refused(rank, n), "misused": misused(rank, n)}


@pytest.fixture(scope="module")
def told() -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]]
    (found,) = run_ranks(of_one_rank, 1, timeout_s=100)
    return found


def test_what_happens_to_an_engine_later_is_refused(told: Any) -> None:
    says = {
        "steps": "has gradient_accumulation_steps 4 and the window accumulates itself",
        "own step": "applied in 1 step",
        "frozen": "1 parameters were frozen, unfrozen, added or replaced after deepspeed.initialize (head",
        "no_sync": "leave engine.no_sync() to the window",
        "past the engine": "the forward of this micro-batch did not run through the DeepSpeed engine",
        "sparse": "a parameter has a sparse gradient",
        "narrow": "would be added up in bfloat16",
        "inner optimizer": "applied",
        "hooks": "as before",
        "untrained": "4 trainable parameters are in no group of the DeepSpeed engine's optimizer (hidden.w",
    }
    found = told["misused"]
    assert found.keys() == says.keys()
    for name, words in says.items():
        assert words in found[name], (name, found[name])


def test_contradictions_are_refused_with_both_numbers(told: Any) -> None:
    found = told["refused"]
    says = {
        "steps": "has gradient_accumulation_steps 8 and the window accumulates itself",
        "clip": 'clip_grad_norm=0.5 and the DeepSpeed configuration "gradient_clipping": 2.0,',
        "clip absent": 'clip_grad_norm=None and the DeepSpeed configuration "gradient_clipping": 1.0 (1.0',
        "micro-batch": 'of 3 samples and the DeepSpeed configuration "train_micro_batch_size_per_gpu": 2 (',
        "predivide": "gradient_predivide_factor 2",
        "sum": 'gradient_allreduce_op "sum"',
        "whole": 'reduce="per_micro_batch" with ZeRO 0',
        "sharded": 'reduce="after_agreement" with ZeRO 2',
        "other": "was given 1 optimizers (SGD) and a DeepSpeed engine steps its own, a SGD",
        "two": "was given 2 optimizers (SGD, SGD) and a DeepSpeed engine steps its own",
        "outside": "1 of the optimizer's 6 parameters are not in the module of the DeepSpeed engine",
        "schedules": "was given 1 schedules and the DeepSpeed engine moves its own WarmupLR",
    }
    assert found.keys() == says.keys()
    for name, words in says.items():
        assert words in found[name], found[name]


def documented(rank: int, n: int) -> Any:
    """The first block of the page, as it stands there."""
    deepspeed = deepspeed_here(rank, n)
    page = (Path(__file__).resolve().parents[2] / "docs" / "engines" / "deepspeed.md").read_text()
    block = page.split("```text\n")[1].split("```")[0]
    case = case_of("ragged, tail")
    model = case.model().float()
    names = {"deepspeed": deepspeed, "wb": wholebatch, "model": model, "batches": case.batches()[rank]}
    names["optimizer"] = torch.optim.AdamW(model.parameters(), lr=0.01)
    exec(block, names)
    return names["record"]


def test_the_page_does_what_it_says() -> None:
    for record in run_ranks(documented, 2, timeout_s=60):
        assert (record.outcome, record.samples, record.reductions) == ("applied", 4, 2)
