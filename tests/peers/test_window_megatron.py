"""Exact updates under Megatron-Core's DDP, beside those of the engines' table.

``test_engines_of_peers.py`` has the columns of its plain and its overlapping reduction.
"""

from __future__ import annotations

import importlib.util
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import environments
import wholebatch
from megatron_rounds import (
    DTYPES,
    EPS,
    MODES,
    OPTIMIZERS,
    SHAPES,
    Branching,
    Cut,
    Pointwise,
    Scheduled,
    Truth,
    Uncut,
    case_of,
    gradients_of_own_loop,
    megatron_here,
    pieced_together,
    wrap,
)
from problems import Case, loss_with, watch_gradients
from ranks import run_ranks
from wholebatch.errors import OtherRankFailedError, PlanError, PoisonedWindowError, WholebatchError
from wholebatch.losses import token_loss
from wholebatch.objective import counted_loss
from wholebatch.plan import plan_batch
from wholebatch.ranks import megatron as seam
from wholebatch.window import UpdateWindow

pytestmark = [
    pytest.mark.peers,
    pytest.mark.slow,
    pytest.mark.skipif(not environments.is_ready("megatron"), reason="needs `make peers`"),
]


MORE_MODES = MODES.keys() - {"plain", "overlap"}  # than the table has


def of_two_ranks(rank: int, n: int) -> dict[str, Any]:
    """All that two replicas of one rank each can be asked, in one launch."""
    return {
        "modes": in_other_modes(rank, n),
        "exceptional": {mode: exceptional(rank, n, mode) for mode in EXCEPTIONAL},
        "own loop": beside_own_loop(rank, n),
        "page": documented(rank, n),
    }


@pytest.fixture(scope="module")
def of_two() -> list[dict[str, Any]]:
    return run_ranks(of_two_ranks, 2, timeout_s=200)


def in_other_modes(rank: int, _n: int) -> dict[Any, Any]:
    """Every mode and dtype over all shapes, one update after another."""
    core, found = megatron_here(), {}
    for mode in sorted(MORE_MODES):
        for dtype in DTYPES:
            case = case_of("equal, full")
            wrapped = wrap(core, case.model(DTYPES[dtype]), mode)
            steps = OPTIMIZERS["AdamW"](list(wrapped.parameters()))
            window = UpdateWindow(wrapped, steps, case.objective())
            truth = Truth(wrapped, steps, "AdamW")
            for seed, shape in enumerate(SHAPES):
                one = case_of(shape, seed)
                told = truth.update(window, one, rank, loss_with(one.objective()))
                sums = torch.stack([p.main_grad.norm() for p in wrapped.parameters()]).norm()
                told["norm of sums"] = told["record"].gradient_norm / float(sums) - 1.0
                found[mode, dtype, shape] = told
    return found


def test_gradient_and_weights_are_those_of_the_big_batch(of_two: Any) -> None:
    for of_rank in of_two:
        assert len(of_rank["modes"]) == len(MORE_MODES) * len(DTYPES) * len(SHAPES)
        for key, found in of_rank["modes"].items():
            _, dtype, shape = key
            record = found["record"]
            assert record.outcome == "applied", key
            assert record.reductions == 1, key
            assert record.micro_batches == sum(map(len, SHAPES[shape])), key
            assert abs(found["norm"]) < 4 * EPS[dtype], (key, found)
            assert abs(found["norm of sums"]) < 4 * EPS["fp32"], (key, found)  # not of what is delivered
            assert found["gradient"] < 4 * EPS[dtype], (key, found)
            assert found["weights"] < (1e-12 if dtype == "fp64" else 1e-30), (key, found)


EXCEPTIONAL = ("plain", "overlap, distributed optimizer")


def exceptional(rank: int, _n: int, mode: str) -> dict[str, Any]:
    """What is not an ordinary update: failures, numbers that are not finite, N known late."""
    core, found = megatron_here(), {}
    case = case_of("equal, full")
    loss = loss_with(case.objective())
    wrapped = wrap(core, case.model(), mode)
    optimizer = OPTIMIZERS["SGD momentum"](list(wrapped.parameters()))
    window = UpdateWindow(wrapped, optimizer, case.objective(), clip_grad_norm=1e3)
    truth = Truth(wrapped, optimizer)
    turns: list[int] = []

    def failing(model: Any, batch: Any) -> Any:
        given = loss(model, batch)
        turns.append(1)
        if rank == 1 and len(turns) == 2:
            raise ZeroDivisionError
        return given

    def infinite(model: Any, batch: Any) -> Any:
        given, items = loss(model, batch)
        return given * float("inf"), items

    def clearing(model: Any, batch: Any) -> Any:
        wrapped.zero_grad_buffer()
        return loss(model, batch)

    # a backward of one's own, before Megatron has learnt what one reaches, of a part of a bucket
    wrapped.module.head.bias.sum().backward()
    wrapped.force_all_reduce = True
    found["first"] = truth.update(window, case, rank, loss)
    found["switch"] = wrapped.force_all_reduce
    wrapped.force_all_reduce = False
    try:
        window.run(case.batches()[rank], failing)
    except (ZeroDivisionError, OtherRankFailedError) as error:
        found["failed"] = f"{type(error).__name__}: {error}"
    found["cleared buffers"] = not any(bool(buffer.grad_data.any()) for buffer in wrapped.buffers)
    found["again"] = truth.update(window, case, rank, loss)
    before = [parameter.detach().clone() for parameter in wrapped.parameters()]
    found["skipped"] = window.run(case.batches()[rank], infinite)
    found["unmoved"] = all(map(torch.equal, before, wrapped.parameters()))
    found["after skip"] = truth.update(window, case, rank, loss)
    try:
        window.run(case.batches()[rank], clearing)
    except WholebatchError as error:
        found["cleared"] = str(error)
    found["after clearing"] = truth.update(window, case, rank, loss)
    found["traffic"] = window.traffic(3)

    inner = case.objective()
    wrapped = wrap(core, case.model(), mode)
    optimizer = OPTIMIZERS["SGD momentum"](list(wrapped.parameters()))
    window = UpdateWindow(wrapped, optimizer, counted_loss(lambda output, batch: inner(output, batch)))
    found["provisional"] = Truth(wrapped, optimizer).update(window, case, rank, loss)

    # a parameter that the last micro-batch does not use
    unused_last = Case(counts=[[[3], [5, 2]], [[2], [4, 1]]])
    all_used = Case(counts=[[[3, 1], [5]], [[2, 2], [4]]])
    for reduce in ("after_agreement", "per_update"):
        torch.manual_seed(0)
        wrapped = wrap(core, Branching(), mode)
        optimizer = OPTIMIZERS["SGD momentum"](list(wrapped.parameters()))
        window = UpdateWindow(wrapped, optimizer, case.objective(), reduce=reduce)
        truth = Truth(wrapped, optimizer)
        if reduce == "after_agreement":
            truth.update(window, all_used, rank, loss)
            found["after_agreement stands in"] = window._parts.ranks.stands_in
        for name, one in {"all used": all_used, "unused": unused_last}.items():
            try:
                found[f"{name}, {reduce}"] = truth.update(window, one, rank, loss)
            except WholebatchError as error:
                found[f"{name}, {reduce}"] = f"{type(error).__name__}: {error}"
    return found


@pytest.mark.parametrize("mode", EXCEPTIONAL)
def test_failures_skips_and_late_denominators_leave_exact_updates(of_two: Any, mode: str) -> None:
    results = [of_rank["exceptional"][mode] for of_rank in of_two]
    told, own = (found.pop("failed") for found in results)
    # one that failed stands in where all buckets are reduced together
    doing = "agreeing on what came out" if mode == "plain" else "about to reduce gradients"
    assert told.startswith(f"OtherRankFailedError: rank 1 failed while this rank was {doing}")
    assert own.startswith("ZeroDivisionError")
    for found in results:
        assert found.pop("after_agreement stands in") is False
        assert found.pop("unmoved")
        assert found.pop("switch")
        assert found.pop("cleared buffers")
        assert found.pop("skipped").outcome == "skipped_nonfinite"
        assert "gradients were written or cleared" in found.pop("cleared")
        traffic = found.pop("traffic")
        assert (traffic.reductions, traffic.held_bytes) == (1, traffic.reduced_bytes)
        assert traffic.held_bytes >= 8 * (7 * 6 + 6 * 6 + 6 + 6 * 7 + 7)
        if mode != "plain":
            told = found.pop("unused, per_update")
            assert "PoisonedWindowError" in told
            assert "the last micro-batch did not use seldom.weight, seldom.bias" in told
        assert len(found) == 8 + (mode == "plain")
        for name, one in found.items():
            assert one["record"].outcome == "applied", name
            assert one["gradient"] < 4 * EPS["fp64"], name
            assert one["weights"] < 1e-13, name


def broken(rank: int, _n: int) -> dict[str, Any]:
    """What each update comes to without the one thing that makes it exact."""
    core, found = megatron_here(), {}
    case = case_of("equal, full")

    def measured(mode: str, shapes: tuple[str, ...] = ("equal, full",)) -> Any:
        wrapped = wrap(core, case.model(), mode)
        optimizer = OPTIMIZERS["SGD momentum"](list(wrapped.parameters()))
        window = UpdateWindow(wrapped, optimizer, case.objective())
        truth = Truth(wrapped, optimizer)
        try:
            for shape in shapes:
                last = truth.update(window, case_of(shape), rank, loss_with(case.objective()))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return last["gradient"]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(seam.MegatronRanks, "_divides_by", lambda _: 1.0)
        found["divisor of 1"] = measured("plain")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(seam.MegatronRanks, "_divides_by", lambda _: 2.0)
        found["divisor of 2 per token"] = measured("per token")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core.distributed.DistributedDataParallel, "zero_grad_buffer", lambda _: None)
        found["never cleared"] = measured("plain", ("equal, tail", "equal, full"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core.distributed, "finalize_model_grads", lambda *_, **__: None)
        found["never finished"] = measured("plain")
    with pytest.MonkeyPatch.context() as patch:
        finish = core.distributed.finalize_model_grads
        patch.setattr(core.distributed, "finalize_model_grads", lambda model, n, **_: finish(model, n))
        found["shards"] = measured("distributed optimizer")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core.distributed.DistributedDataParallel, "no_sync", lambda _: nullcontext())
        found["not held back"] = measured("overlap", ("equal, tail", "equal, full"))
    return found


def test_each_variant_without_what_makes_it_exact_is_far_from_it() -> None:
    for found in run_ranks(broken, 2, timeout_s=60):
        assert found.pop("divisor of 1") == pytest.approx(0.5, rel=1e-9)
        assert found.pop("divisor of 2 per token") == pytest.approx(1.0, rel=1e-9)
        assert found.pop("never cleared") > 1e-2
        for name in ("never finished", "shards"):
            assert "they were not reduced as a whole" in found.pop(name)
        # Which of Megatron's assertions or of the window's own comes first is a matter of time.
        assert "Error: " in found.pop("not held back")
        assert not found


def over_tensor_ranks(rank: int, _n: int) -> dict[str, Any]:
    """Two replicas of two tensor-parallel ranks, clipped, against the uncut model."""
    core = megatron_here(tensor=2)
    case = Case(counts=[[[5, 2], [3]], [[4, 1], [5, 5]]])
    torch.manual_seed(0)
    model = Cut(core)
    wrapped = wrap(core, model, model={"tensor_model_parallel_size": 2})
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.5)
    group, clip = wrapped.tp_group, 0.05
    uncut = Uncut()
    uncut.load_state_dict(
        pieced_together(group, {name: p.detach() for name, p in model.named_parameters()})
    )
    steps = torch.optim.SGD(uncut.parameters(), lr=0.5)
    window = UpdateWindow(wrapped, optimizer, case.objective(), clip_grad_norm=clip)
    mine = case.batches()[core.parallel_state.get_data_parallel_rank()]
    record = window.run(mine, loss_with(case.objective()))
    batch = case.whole()
    total, items = case.objective()(uncut(batch["input_ids"]), batch)
    (total / items).backward()
    norm = float(nn.utils.clip_grad_norm_(uncut.parameters(), clip))
    steps.step()
    now = pieced_together(group, {name: p.detach() for name, p in model.named_parameters()})
    apart = max(float((now[name] - p).detach().abs().max()) for name, p in uncut.named_parameters())
    for group_of in optimizer.param_groups:
        group_of["lr"] = 0.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(seam.MegatronRanks, "_by_copies", lambda _, gradients: {1.0: list(gradients)})
        twice = window.run(mine, loss_with(case.objective()))
    once = window.run(mine, loss_with(case.objective()))

    def large(model: Any, batch: Any) -> Any:  # the squares of its gradient leave float64
        given, items = loss_with(case.objective())(model, batch)
        return given * 1e160, items

    squares = window.run(mine, large)
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    with pytest.raises(WholebatchError) as refusal:
        UpdateWindow(wrapped, optimizer, case.objective(), process_group=pairs[rank // 2])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(seam, "PATIENCE_S", 2.0)
        window = UpdateWindow(wrapped, optimizer, case.objective())

    def failing(model: Any, batch: Any) -> Any:
        if rank == 0:  # whose neighbour waits for it in the forward
            raise ZeroDivisionError
        return loss_with(case.objective())(model, batch)

    began = time.monotonic()
    with pytest.raises((ZeroDivisionError, PoisonedWindowError)):
        window.run(mine, failing)
    return {
        "stands in": window._parts.ranks.stands_in,
        "record": record,
        "loss": record.loss_per_item / float(total / items) - 1.0,
        "squares": squares.gradient_norm / once.gradient_norm / 1e160 - 1.0,
        "refused": str(refusal.value),
        "waited": time.monotonic() - began,
        "norm": record.gradient_norm / norm - 1.0,
        "apart": apart,
        "counted twice": twice.gradient_norm / once.gradient_norm - 1.0,
    }


def test_tensor_parallel_ranks_share_a_replica() -> None:
    outcomes = run_ranks(over_tensor_ranks, 4, expect="outcomes", timeout_s=60)
    for found in (outcome[1] for outcome in outcomes):
        record = found["record"]
        assert not found["stands in"]  # its neighbour could not
        assert (record.samples, record.micro_batches, record.items) == (7, 4, 18)
        assert abs(found["norm"]) < 1e-12
        assert found["apart"] < 1e-14
        assert found["counted twice"] > 1e-2
        assert abs(found["loss"]) < 1e-12
        assert abs(found["squares"]) < 1e-12
        assert (
            "Megatron has 2 replicas of 2 ranks each (tensor x context parallel = 2 x 1)"
            in found["refused"]
        )
        assert found["waited"] < 20


def over_context_ranks(_rank: int, _n: int) -> dict[str, Any]:
    """Two replicas, each with its sequences cut over two ranks."""
    core = megatron_here(context=2)
    case = Case(counts=[[[5, 2], [3]], [[4, 1], [5, 5]]])
    objective = token_loss()
    torch.manual_seed(0)
    model, truth = Pointwise(), Pointwise()
    truth.load_state_dict(model.state_dict())
    wrapped = wrap(core, model, model={"context_parallel_size": 2})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    seen = watch_gradients(optimizer, dict(model.named_parameters()))
    window = UpdateWindow(wrapped, optimizer, objective)
    part = slice(0, 3) if core.parallel_state.get_context_parallel_rank() == 0 else slice(3, None)
    mine = [
        {key: value[:, part] if value.dim() == 2 else value for key, value in batch.items()}
        for batch in case.batches()[core.parallel_state.get_data_parallel_rank()]
    ]
    record = window.run(mine, loss_with(objective))
    batch = case.whole()
    total, items = objective(truth(batch["input_ids"]), batch)
    (total / items).backward()
    found = {
        "record": record,
        "apart": max(float((seen[name] - p.grad).abs().max()) for name, p in truth.named_parameters()),
    }
    means = UpdateWindow(wrapped, optimizer, objective, weighting="micro_batch_means")
    try:
        means.run(mine, loss_with(objective))
    except WholebatchError as error:
        found["means"] = str(error)
    return found


def test_context_parallel_ranks_count_their_parts() -> None:
    for found in run_ranks(over_context_ranks, 4, timeout_s=60):
        record = found["record"]
        assert (record.samples, record.micro_batches, record.items) == (7, 4, 25)
        assert found["apart"] < 1e-15
        assert "4 micro-batches are cut into 8 parts" in found["means"]


def beside_own_loop(rank: int, _n: int) -> dict[str, float]:
    """The window's gradients beside those of Megatron's own schedule, and of the big batch."""
    core, found = megatron_here(), {}
    case = case_of("ragged, full")
    for mode, weighting in (("plain", "micro_batch_means"), ("per token", "items")):
        torch.manual_seed(0)
        wrapped = wrap(core, Scheduled(), mode)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.5)
        own = gradients_of_own_loop(core, wrapped, case, rank)
        window = UpdateWindow(wrapped, optimizer, case.objective(), weighting=weighting)
        truth = Truth(wrapped, optimizer)
        loss = loss_with(case.objective())
        found[f"{mode}, big batch"] = truth.update(window, case, rank, loss)["gradient"]
        norm = torch.stack([one.norm() for one in own.values()]).norm()
        apart = torch.stack([(truth.seen[name] - one).norm() for name, one in own.items()]).norm()
        found[f"{mode}, own loop"] = float(apart / norm)
    return found


def test_means_of_micro_batches_are_those_of_its_own_loop(of_two: Any) -> None:
    for found in (of_rank["own loop"] for of_rank in of_two):
        assert found["plain, own loop"] < 4 * EPS["fp64"]
        assert found["plain, big batch"] > 1e-2
        # Megatron multiplies by 1 / N in float32, whatever the gradients are
        assert found["per token, own loop"] < EPS["fp32"]
        assert found["per token, big batch"] < 4 * EPS["fp64"]


def refused(_rank: int, _n: int) -> dict[str, str]:
    core, found = megatron_here(), {}
    case = case_of("many")

    def saying(
        name: str, mode: dict[str, Any], *, dtype: torch.dtype = torch.float32, **named: Any
    ) -> None:
        wrapped = wrap(core, named.pop("module", None) or case.model(dtype), "plain", **mode)
        optimizer = named.pop("optimizer", None) or torch.optim.SGD(wrapped.parameters(), lr=0.1)
        set_before, set_later = named.pop("before", {}), named.pop("later", {})
        try:
            for key, value in set_before.items():
                setattr(wrapped.ddp_config, key, value)
            window = UpdateWindow(wrapped, optimizer, case.objective(), **named)
            for key, value in set_later.items():
                setattr(wrapped.ddp_config, key, value)
            found[name] = window.run(case.batches()[0], loss_with(case.objective())).outcome
        except WholebatchError as error:
            found[name] = str(error)

    gathers = {"overlap_param_gather": True, "use_distributed_optimizer": True, "overlap_grad_reduce": True}
    saying("gathers", gathers)
    saying("NaN", {"check_for_nan_in_grad": True})
    saying("large", {"check_for_large_grads": True})
    saying("later", {}, later={"check_for_nan_in_grad": True})
    saying("instances", {}, before={"num_distributed_optimizer_instances": 2})
    for switch in ("reuse_grad_buf_for_mxfp8_param_ag", "fp8_param_gather", "delay_wgrad_compute"):
        saying(switch, {}, before={switch: True})
    saying("experts", {"model": {"num_moe_experts": 2}})
    saying("tokens ahead", {"model": {"mtp_num_layers": 1}})
    expert, frozen = case.model(torch.float32), case.model(torch.float32)
    expert.hidden.weight.allreduce = False
    saying("expert", {}, module=expert)
    frozen.embedding.requires_grad_(False)
    saying("frozen", {}, module=frozen)
    saying("all frozen", {}, module=case.model(torch.float32).requires_grad_(False))
    saying("each time", {}, reduce="per_micro_batch")
    saying("divisor", {}, reduction_divisor=2)
    saying("narrow", {"grad_reduce_in_fp32": False}, dtype=torch.bfloat16)
    saying("narrow as asked", {}, dtype=torch.bfloat16, accumulate_in=torch.bfloat16)
    saying("outside", {}, optimizer=torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1))

    class FP32Optimizer(torch.optim.SGD):
        __module__ = "megatron.core.optimizer.optimizer"

    saying("own", {}, optimizer=FP32Optimizer([torch.zeros(1, requires_grad=True)], lr=0.1))

    class FullyShardedDataParallel(nn.Module):
        __module__ = "megatron.core.distributed.fsdp.mcore_fsdp_adapter"

    model = FullyShardedDataParallel()
    model.inside = case.model()
    try:
        UpdateWindow(model, torch.optim.SGD(model.parameters(), lr=0.1), case.objective())
    except WholebatchError as error:
        found["sharded"] = str(error)
    return found


def test_what_is_not_exact_is_refused_by_name() -> None:
    (found,) = run_ranks(refused, 1, timeout_s=60)
    says = {
        "gathers": "(overlap_param_gather=True) gathers shards in the forward",
        "NaN": "(check_for_nan_in_grad=True) ends the one rank",
        "large": "(check_for_large_grads=True) may end one rank",
        "later": "(check_for_nan_in_grad=True) ends the one rank",
        "instances": "num_distributed_optimizer_instances=2",
        "reuse_grad_buf_for_mxfp8_param_ag": "keeps parameters where gradients are added up",
        "fp8_param_gather": "keeps parameters in fp8",
        "delay_wgrad_compute": "computes gradients of weights after the backward",
        "experts": "num_moe_experts=2: the loss of the balance of experts",
        "tokens ahead": "mtp_num_layers=1: the loss of multi-token prediction",
        "expert": "has expert-parallel parameters",
        "frozen": "applied",
        "all frozen": "no parameter was trainable when Megatron's DistributedDataParallel wrapped",
        "each time": 'reduces "per_update" or "after_agreement"',
        "divisor": "reduction_divisor=2",
        "narrow": "added up in bfloat16",
        "narrow as asked": "applied",
        "outside": "1 of the optimizer's 1 parameters have no place in the buffers",
        "own": "FP32Optimizer is an optimizer of Megatron's own",
        "sharded": "the model is a megatron.FullyShardedDataParallel",
    }
    assert found.keys() == says.keys()
    for name, words in says.items():
        assert words in found[name], found[name]


def stages(_rank: int, _n: int) -> str:
    core = megatron_here(pipeline=2)
    wrapped = wrap(core, Case(counts=[]).model())
    with pytest.raises(WholebatchError) as caught:
        UpdateWindow(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1))
    return str(caught.value)


def test_pipeline_stages_are_refused() -> None:
    for told in run_ranks(stages, 2, timeout_s=60):
        assert "cut into 2 pipeline stages, which Megatron's own schedule runs" in told


def test_its_constant_calculator_plans_the_same_micro_batches() -> None:
    path = environments.folder_of("megatron") / "megatron" / "core" / "num_microbatches_calculator.py"
    spec = importlib.util.spec_from_file_location("calculators", path)
    assert spec is not None
    assert spec.loader is not None
    calculators = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(calculators)
    refusals = plans = 0
    for samples in range(2, 49, 2):
        for held in (1, 2, 3, 5, 8):
            for replicas in (1, 2, 3, 8):
                try:
                    theirs = calculators.ConstantNumMicroBatchesCalculator(
                        samples, held, replicas, False, 0
                    )
                except AssertionError:
                    with pytest.raises(PlanError):
                        plan_batch(global_batch_samples=samples, micro_batch_samples=held, ranks=replicas)
                    refusals += 1
                    continue
                plan = plan_batch(
                    global_batch_samples=samples,
                    micro_batch_samples=held,
                    ranks=2 * replicas,
                    tensor_parallel=2,
                )
                assert plan.micro_batches_per_window == theirs.get(), (samples, held, replicas)
                plans += 1
    assert min(refusals, plans) > 100


def documented(rank: int, _n: int) -> Any:
    """The first block of the page, as it stands there."""
    core = megatron_here()
    page = (Path(__file__).resolve().parents[2] / "docs" / "engines" / "megatron.md").read_text()
    block = page.split("```text\n")[1].split("```")[0]
    case = case_of("ragged, tail")
    names = {
        "wb": wholebatch,
        "torch": torch,
        "module": case.model(torch.float32),
        "batches": case.batches()[rank],
        "config": wrap(core, case.model()).config,
    }
    exec(block, names)
    return names["record"]


def test_the_page_does_what_it_says(of_two: Any) -> None:
    for record in (of_rank["page"] for of_rank in of_two):
        assert (record.outcome, record.samples, record.reductions) == ("applied", 4, 1)
