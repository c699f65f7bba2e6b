"""The arithmetic of plans, epochs and intervals, against published figures and plain loops."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wholebatch.epochs import (
    EpochLedger,
    Interval,
    PlanComparison,
    compare_plans,
    resolve_interval,
    samples_after,
    updates_reaching,
)
from wholebatch.errors import PlanError
from wholebatch.layout import Layout
from wholebatch.plan import BatchPlan, plan_batch
from wholebatch.report.ledger import plan_document, plan_findings, plan_text

ROOT = Path(__file__).parents[1]
quick = settings(max_examples=150, deadline=None)


def offered(message: str) -> list[tuple[str, int]]:
    """Read the alternatives out of a message: ``ranks=2 or 4`` is two of them."""
    found = re.findall(r"(\w+)=(\d+)(?: or (\d+))?", message.partition("Nearest that fit")[2])
    return [(name, int(number)) for name, *numbers in found for number in numbers if number]


# Published figures


@pytest.mark.parametrize(
    ("micro_batch", "window", "replicas", "samples"),
    [
        (2, 8, 2, 32),
        (1, 16, 2, 32),
        (4, 4, 2, 32),
        (2, 8, 1, 16),
        (4, 4, 8, 128),
        (4, 8, 4, 128),
        (8, 16, 1, 128),
    ],
)
def test_three_of_four_numbers_give_the_fourth(
    micro_batch: int, window: int, replicas: int, samples: int
) -> None:
    everything = {
        "global_batch_samples": samples,
        "micro_batch_samples": micro_batch,
        "micro_batches_per_window": window,
        "replicas": replicas,
    }
    for left_out in everything:
        plan = plan_batch(**{name: number for name, number in everything.items() if name != left_out})
        assert {name: getattr(plan, name) for name in everything} == everything
        assert plan.assumed == ()
    assert plan_batch(**everything) == plan


@pytest.mark.parametrize(
    ("ranks", "tensor", "pipeline", "samples", "replicas"),
    [
        (32, 1, 1, 512, 32),
        (256, 8, 1, 1024, 32),
        (512, 8, 2, 1536, 32),
        (1024, 8, 4, 1792, 32),
        (1536, 8, 8, 2304, 24),
        (1920, 8, 16, 2160, 15),
        (2520, 8, 35, 2520, 9),
        (3072, 8, 64, 3072, 6),
    ],
)
def test_published_megatron_runs(
    ranks: int, tensor: int, pipeline: int, samples: int, replicas: int
) -> None:
    plan = plan_batch(
        global_batch_samples=samples,
        micro_batch_samples=1,
        ranks=ranks,
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
    )
    assert plan.replicas == replicas
    assert plan.micro_batches_per_window * replicas == samples


def test_eight_devices_as_two_by_two_by_two_are_two_replicas() -> None:
    plan = plan_batch(
        ranks=8, tensor_parallel=2, pipeline_parallel=2, micro_batch_samples=2, micro_batches_per_window=4
    )
    assert plan.global_batch_samples == 16
    (finding,) = [each for each in plan_findings(plan) if each["kind"] == "ranks_are_not_replicas"]
    assert "16 samples, not 64" in finding["message"]


def test_items_of_a_published_run() -> None:
    plan = plan_batch(global_batch_samples=1536, items_per_sample=2048, micro_batch_samples=2, ranks=32)
    assert plan.global_batch_items == 3_145_728
    from_items = plan_batch(
        global_batch_items=3_145_728, items_per_sample=2048, micro_batch_samples=2, ranks=32
    )
    assert from_items == plan
    assert from_items.global_batch_samples == 1536


def test_items_per_sample_follow_from_both_sizes() -> None:
    plan = plan_batch(
        global_batch_samples=1536, global_batch_items=3_145_728, micro_batch_samples=2, replicas=4
    )
    assert plan.items_per_sample == 2048


@pytest.mark.parametrize(("ranks", "near"), [(3, (60, 72)), (6, (48, 72)), (7, (56, 84))])
def test_a_global_batch_that_others_floor_is_refused(ranks: int, near: tuple[int, int]) -> None:
    with pytest.raises(
        PlanError, match=rf"global_batch_samples 64 .* 4 x replicas {ranks}: 64 = "
    ) as caught:
        plan_batch(global_batch_samples=64, micro_batch_samples=4, ranks=ranks)
    assert [number for name, number in offered(str(caught.value)) if "global" in name] == list(near)


# Refusals

DEGREES = ("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel")


@given(
    micro_batch=st.none() | st.integers(1, 12),
    window=st.none() | st.integers(1, 12),
    samples=st.none() | st.integers(1, 120),
    ranks=st.none() | st.integers(1, 24),
    replicas=st.none() | st.integers(1, 8),
    items_per_sample=st.none() | st.integers(1, 6),
    items=st.none() | st.integers(1, 300),
    degrees=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 2), st.integers(1, 3)),
    interleaved=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_a_plan_multiplies_exactly_or_offers_the_nearest_that_do(
    micro_batch: int | None,
    window: int | None,
    samples: int | None,
    ranks: int | None,
    replicas: int | None,
    items_per_sample: int | None,
    items: int | None,
    degrees: tuple[int, int, int, int],
    interleaved: bool,
) -> None:
    request: dict[str, Any] = {
        "micro_batch_samples": micro_batch,
        "micro_batches_per_window": window,
        "global_batch_samples": samples,
        "global_batch_items": items,
        "items_per_sample": items_per_sample,
        "ranks": ranks,
        "replicas": replicas,
        **dict(zip(DEGREES, degrees, strict=True)),
    }
    if interleaved and degrees[1] > 1:
        request |= {"pipeline_schedule": "interleaved_1f1b", "pipeline_virtual_stages": 2}
    try:
        plan = plan_batch(**request)
    except PlanError as refusal:
        check_alternatives(request, str(refusal))
        return
    for name, number in request.items():
        if number is not None and name not in ("pipeline_schedule", "pipeline_virtual_stages"):
            assert getattr(plan, name, getattr(plan.layout, name, None)) == number
    product = plan.micro_batch_samples * plan.micro_batches_per_window * plan.replicas
    assert plan.global_batch_samples == product
    assert plan.layout.ranks == plan.replicas * degrees[0] * degrees[1] * degrees[2]


@given(
    factors=st.tuples(st.integers(1, 40), st.integers(1, 40), st.integers(1, 40)),
    degrees=st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4)),
    items_per_sample=st.none() | st.integers(1, 4096),
    left_out=st.sampled_from(["global", "micro_batch_samples", "micro_batches_per_window", "ranks"]),
    by=st.integers(1, 50),
)
@quick
def test_what_multiplies_is_planned_and_what_does_not_is_refused(
    factors: tuple[int, int, int],
    degrees: tuple[int, int, int],
    items_per_sample: int | None,
    left_out: str,
    by: int,
) -> None:
    micro_batch, window, replicas = factors
    samples = micro_batch * window * replicas
    ranks = replicas * degrees[0] * degrees[1] * degrees[2]
    request: dict[str, Any] = {
        "global_batch_samples": samples,
        "items_per_sample": items_per_sample,
        "micro_batch_samples": micro_batch,
        "micro_batches_per_window": window,
        "ranks": ranks,
        **dict(zip(DEGREES, degrees, strict=False)),
    }
    if items_per_sample:
        request["global_batch_items"] = samples * items_per_sample
        del request["global_batch_samples"]
    if left_out == "global":
        request.pop("global_batch_samples", None)
        request.pop("global_batch_items", None)
    else:
        del request[left_out]
    plan = plan_batch(**request)
    assert (plan.micro_batch_samples, plan.micro_batches_per_window, plan.replicas) == factors
    assert (plan.global_batch_samples, plan.layout.ranks) == (samples, ranks)
    known = [number for name, number in zip(LEFT_OUT, factors, strict=True) if name != left_out]
    if left_out != "global" and (samples + by) % (known[0] * known[1]):
        wrong = {"global_batch_samples": samples + by}
        if items_per_sample:
            wrong = {"global_batch_items": (samples + by) * items_per_sample}
        with pytest.raises(PlanError, match="Nearest that fit"):
            plan_batch(**(request | wrong))


LEFT_OUT = ("micro_batch_samples", "micro_batches_per_window", "ranks")


def plans(request: dict[str, Any]) -> bool:
    """Tell whether a request plans; without looking for alternatives, which would take most of the time."""
    with patch("wholebatch.plan._advice", return_value=""):
        try:
            plan_batch(**request)
        except PlanError:
            return False
    return True


def check_alternatives(request: dict[str, Any], message: str) -> None:
    """Every number offered plans, and no nearer number on its side does; so does every pair of m and A."""
    sizes = {name: request.get(name) for name in ("micro_batch_samples", "micro_batches_per_window")}
    for micro_batch, window in re.findall(r"(\d+) x (\d+)", message.partition("Their product is")[2]):
        pair = {"micro_batch_samples": int(micro_batch), "micro_batches_per_window": int(window)}
        assert plans(request | pair), (pair, message)
    if " open, and " in message:
        # The numbers offered here leave m and A open still: they fit where some pair of them does.
        assert set(sizes.values()) == {None}
        interleaved = request.get("pipeline_schedule") == "interleaved_1f1b"
        request = request | {"micro_batches_per_window": request["pipeline_parallel"] if interleaved else 1}
    for name, number in offered(message):
        assert plans(request | {name: number}), (name, number, message)
        nearer = range(min(number, request[name]) + 1, max(number, request[name]))
        assert not any(plans(request | {name: between}) for between in nearer), (name, number, message)


@given(
    samples=st.integers(1, 200),
    by_ranks=st.booleans(),
    ranks=st.integers(1, 24),
    items_per_sample=st.none() | st.integers(1, 6),
    degrees=st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 2), st.integers(1, 4)),
    interleaved=st.booleans(),
)
@quick
def test_what_is_offered_for_an_open_split_plans_too(
    samples: int,
    by_ranks: bool,
    ranks: int,
    items_per_sample: int | None,
    degrees: tuple[int, int, int, int],
    interleaved: bool,
) -> None:
    request: dict[str, Any] = {
        "ranks" if by_ranks else "replicas": ranks,
        "global_batch_samples": samples,
        **dict(zip(DEGREES, degrees, strict=True)),
    }
    if items_per_sample:
        request |= {"global_batch_items": samples * items_per_sample, "items_per_sample": items_per_sample}
        del request["global_batch_samples"]
    if interleaved and degrees[1] > 1:
        request |= {"pipeline_schedule": "interleaved_1f1b", "pipeline_virtual_stages": 2}
    with pytest.raises(PlanError) as refusal:
        plan_batch(**request)
    check_alternatives(request, str(refusal.value))


def test_every_kind_of_number_is_offered() -> None:
    with pytest.raises(PlanError) as caught:
        plan_batch(
            global_batch_samples=128, micro_batch_samples=2, micro_batches_per_window=8, replicas=4, ranks=4
        )
    assert offered(str(caught.value)) == [
        ("global_batch_samples", 64),
        ("micro_batch_samples", 4),
        ("micro_batches_per_window", 16),
    ]
    with pytest.raises(PlanError, match=r"global_batch_items 1000 does not divide") as caught:
        plan_batch(global_batch_items=1000, items_per_sample=30, micro_batch_samples=2, replicas=4)
    assert offered(str(caught.value)) == [("global_batch_items", 960), ("global_batch_items", 1200)]


BAD_NUMBERS: list[tuple[object, str]] = [
    (0, "=0 is too small"),
    (-4, "=-4 is too small"),
    (2**53 + 1, r"=9007199254740993 is too large; the bound is 2\*\*53"),
    (True, "=True is a bool"),
    (4.0, r"=4\.0 is a float"),
    (float("nan"), "=nan is a float"),
    ("4", "='4' is a str"),
    ([4], r"=\[4\] is a list"),
]
NUMBER_NAMES = [
    "global_batch_samples",
    "global_batch_items",
    "items_per_sample",
    "micro_batch_samples",
    "micro_batches_per_window",
    "ranks",
    "replicas",
    *DEGREES,
    "pipeline_virtual_stages",
]


@pytest.mark.parametrize("name", NUMBER_NAMES)
@pytest.mark.parametrize(("value", "message"), BAD_NUMBERS)
def test_what_is_no_whole_positive_number_is_refused_by_value(name: str, value: Any, message: str) -> None:
    arguments: dict[str, Any] = {"global_batch_samples": 64, "micro_batch_samples": 4, name: value}
    with pytest.raises(PlanError, match=name + message):
        plan_batch(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "nothing says how large the global batch is"),
        ({"micro_batches_per_window": 4, "ranks": 2}, "global_batch_samples, micro_batch_samples are open"),
        (
            {"global_batch_samples": 64, "ranks": 4},
            "over replicas 4 leaves micro_batch_samples and micro_batches_per_window open; give one of "
            "them. Their product is 16: 1 x 16, 2 x 8, 4 x 4, 8 x 2, 16 x 1 would do",
        ),
        (
            {"global_batch_samples": 64, "ranks": 3},
            "64 = 21 x 3 [+] 1. Nearest that fit, changing one number: "
            "global_batch_samples=63 or 66; ranks=2 or 4",
        ),
        (
            {
                "global_batch_samples": 18,
                "ranks": 2,
                "pipeline_parallel": 2,
                "pipeline_schedule": "interleaved_1f1b",
                "pipeline_virtual_stages": 2,
            },
            "product is 18: 1 x 18, 3 x 6, 9 x 2 would do",
        ),
        (
            {
                "global_batch_samples": 15,
                "ranks": 2,
                "pipeline_parallel": 2,
                "pipeline_schedule": "interleaved_1f1b",
                "pipeline_virtual_stages": 2,
            },
            "and no pair of them fits. Nearest that fit, .*: global_batch_samples=14 or 16.$",
        ),
        (
            {"global_batch_samples": 12, "replicas": 3, "expert_parallel": 2},
            "and no pair of them fits. Nearest that fit, changing one number: replicas=2 or 4.$",
        ),
        (
            {"global_batch_samples": 12, "replicas": 5, "expert_parallel": 2},
            "12 = 2 x 5 [+] 2. Nearest that fit, changing one number: replicas=4 or 6.$",
        ),
        (
            {"global_batch_items": 70, "items_per_sample": 10, "replicas": 2},
            "7 = 3 x 2 [+] 1. Nearest that fit, .*: global_batch_items=60 or 80; replicas=1 or 7",
        ),
        ({"global_batch_items": 64, "micro_batch_samples": 4}, "global_batch_items=64 says nothing about"),
        (
            {
                "global_batch_items": 64,
                "items_per_sample": 2,
                "global_batch_samples": 16,
                "micro_batch_samples": 4,
            },
            "global_batch_samples 16 x items_per_sample 2 are 32 items, not global_batch_items 64",
        ),
        (
            {"global_batch_items": 65, "global_batch_samples": 16, "micro_batch_samples": 4},
            "global_batch_items 65 does not divide by global_batch_samples 16: 65 = 4 x 16 [+] 1.*64 or 80",
        ),
        (
            {"ranks": 8, "replicas": 8, "tensor_parallel": 2, "micro_batch_samples": 1},
            "8 ranks at 2 ranks per replica are 4 replicas, not 8.*ranks=16; replicas=4",
        ),
        (
            {"global_batch_samples": 64, "micro_batch_samples": 4, "ranks": 6, "tensor_parallel": 2},
            r"micro_batch_samples 4 x replicas 3 \(6 ranks / 2\): 64 = 5 x 12",
        ),
        (
            {"global_batch_items": 6400, "items_per_sample": 100, "micro_batch_samples": 4, "ranks": 3},
            r"global_batch_samples 64 \(6400 items / 100\) does not divide",
        ),
        (
            {"global_batch_samples": 7, "micro_batch_samples": 3, "ranks": 10, "tensor_parallel": 4},
            "10 ranks do not make whole replicas of 4 .*multiple of 4.*Changing one number alone does not",
        ),
        ({"micro_batch_samples": 4, "tail": "pad"}, "tail='pad' is not known; choose one of partial, drop"),
        (
            {"micro_batch_samples": 4, "pipeline_schedule": "dualpipe"},
            "pipeline_schedule='dualpipe' is not known; choose one of gpipe, 1f1b, interleaved_1f1b",
        ),
        (
            {"micro_batch_samples": 2**40, "micro_batches_per_window": 2**20},
            "global_batch_samples=1152921504606846976 is too large",
        ),
        (
            {"micro_batch_samples": 2**40, "items_per_sample": 2**20},
            "global_batch_items=1152921504606846976 is too large",
        ),
    ],
)
def test_contradictions_and_gaps_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan_batch(**arguments)


def test_numbers_far_from_any_that_fits_are_refused_soon() -> None:
    with pytest.raises(PlanError, match="4503599627370449"):
        plan_batch(global_batch_samples=4503599627370449, micro_batch_samples=4097, ranks=8191)


def test_assumed_numbers_are_named() -> None:
    plan = plan_batch(micro_batch_samples=4, ranks=2)
    assert (plan.micro_batches_per_window, plan.assumed) == (1, ("micro_batches_per_window",))
    plan = plan_batch(global_batch_samples=64, micro_batch_samples=4)
    assert (plan.replicas, plan.assumed) == (1, ("replicas",))
    assert plan == plan_batch(global_batch_samples=64, micro_batch_samples=4, ranks=1)


def test_whole_numbers_of_numpy_are_taken_as_ints() -> None:
    plan = plan_batch(global_batch_samples=np.int64(64), micro_batch_samples=np.int32(4), ranks=np.int64(2))
    assert json.loads(json.dumps(plan.to_dict()))["micro_batches_per_window"] == 8


# Layouts and pipelines


def test_layout_refuses_ranks_that_are_not_whole_replicas() -> None:
    with pytest.raises(
        PlanError, match=r"10 ranks .* replicas of 4 \(tensor_parallel 2 x pipeline_parallel 2"
    ):
        Layout(ranks=10, tensor_parallel=2, pipeline_parallel=2)
    with pytest.raises(PlanError, match=r"10 = 2 x 4 [+] 2. Nearest that fit: ranks=8 or 12"):
        Layout(ranks=10, tensor_parallel=2, context_parallel=2)
    with pytest.raises(PlanError, match=r"ranks=4\.$"):
        Layout(ranks=3, tensor_parallel=4)


def test_experts_do_not_change_the_replicas() -> None:
    assert Layout(ranks=16, tensor_parallel=2, expert_parallel=8).replicas == 8
    with pytest.raises(
        PlanError, match=r"expert_parallel 3 does not divide: 4 = 1 x 3 [+] 1.*ranks=6 or 12"
    ):
        Layout(ranks=8, pipeline_parallel=2, expert_parallel=3)


def test_replicas_that_leave_no_whole_expert_groups_are_refused() -> None:
    with pytest.raises(PlanError, match=r"leave 4 ranks .* expert_parallel 3 .*replicas=3 or 6"):
        plan_batch(micro_batch_samples=1, micro_batches_per_window=2, replicas=4, expert_parallel=3)


def test_too_few_micro_batches_for_the_stages_and_assumed_numbers_are_findings() -> None:
    plan = plan_batch(micro_batch_samples=1, pipeline_parallel=4)
    findings = {each["kind"]: each["message"] for each in plan_findings(plan)}
    assert "1 micro-batch cannot fill 4 stages" in findings["fewer_micro_batches_than_stages"]
    assert "micro_batches_per_window was not given and does not follow: 1 is" in findings["assumed"]
    full = plan_batch(micro_batch_samples=1, micro_batches_per_window=4, replicas=1, pipeline_parallel=4)
    assert {each["kind"] for each in plan_findings(full)} == {"ranks_are_not_replicas", "pipeline_bubble"}


@pytest.mark.parametrize(
    ("schedule", "stages", "parts", "window", "bubble"),
    [
        ("gpipe", 4, 1, 12, 0.25),
        ("1f1b", 4, 1, 4, 0.75),
        ("1f1b", 1, 1, 4, 0.0),
        ("interleaved_1f1b", 4, 2, 12, 0.125),
        ("zero_bubble", 4, 2, 7, 0.0),
        ("zero_bubble", 4, 2, 6, None),
    ],
)
def test_pipeline_bubbles(
    schedule: Any, stages: int, parts: int, window: int, bubble: float | None
) -> None:
    plan = plan_batch(
        micro_batch_samples=1,
        micro_batches_per_window=window,
        replicas=2,
        pipeline_parallel=stages,
        pipeline_schedule=schedule,
        pipeline_virtual_stages=parts,
    )
    assert plan.pipeline_bubble_fraction == bubble
    assert plan.global_batch_samples == 2 * window
    kinds = [each["kind"] for each in plan_findings(plan)]
    assert ("pipeline_bubble" in kinds) == (bubble is None or bubble > 0.25)


def test_interleaved_schedules_want_whole_rounds() -> None:
    pipeline: dict[str, Any] = {
        "pipeline_parallel": 4,
        "pipeline_schedule": "interleaved_1f1b",
        "pipeline_virtual_stages": 2,
    }
    with pytest.raises(
        PlanError, match=r"multiple of 4, not 6: 6 = 1 x 4 [+] 2.*samples=8 or 16; replicas=1 or 3"
    ):
        plan_batch(global_batch_samples=12, micro_batch_samples=1, replicas=2, **pipeline)
    with pytest.raises(PlanError, match="micro_batches_per_window=4 or 8"):
        plan_batch(micro_batches_per_window=6, micro_batch_samples=1, replicas=2, **pipeline)
    with pytest.raises(PlanError, match=r"multiple of 4, not 6: 6 = 1 x 4 [+] 2\."):
        BatchPlan(layout=Layout(ranks=4, **pipeline), micro_batch_samples=1, micro_batches_per_window=6)
    with pytest.raises(PlanError, match="at least 2, not 4 and 1"):
        Layout(ranks=4, pipeline_parallel=4, pipeline_schedule="interleaved_1f1b")
    with pytest.raises(PlanError, match="pipeline_virtual_stages=2 means nothing to 1f1b"):
        Layout(ranks=4, pipeline_parallel=4, pipeline_virtual_stages=2)


@given(stages=st.integers(2, 9), window=st.integers(1, 12), parts=st.integers(1, 3))
@quick
def test_the_bubble_finding_names_the_least_window_that_helps(stages: int, window: int, parts: int) -> None:
    schedule: Any = "1f1b" if parts == 1 else "interleaved_1f1b"
    window *= 1 if parts == 1 else stages

    def bubble(micro_batches: int) -> float:
        layout = Layout(
            ranks=stages,
            pipeline_parallel=stages,
            pipeline_schedule=schedule,
            pipeline_virtual_stages=parts,
        )
        plan = BatchPlan(layout=layout, micro_batch_samples=1, micro_batches_per_window=micro_batches)
        findings = {each["kind"]: each["message"] for each in plan_findings(plan)}
        named = re.search(r"(\d+) micro-batches per window bring", findings.get("pipeline_bubble", ""))
        found.append(int(named[1]) if named else None)
        return plan.pipeline_bubble_fraction or 0.0

    found: list[int | None] = []
    multiple = 1 if parts == 1 else stages
    if bubble(window) > 0.25:
        assert found[0] is not None
        assert bubble(found[0]) <= 0.25
        assert found[0] == multiple or bubble(found[0] - multiple) > 0.25


# What a plan says about itself


def test_reductions_with_one_replica_and_one_micro_batch() -> None:
    assert (
        plan_batch(micro_batch_samples=4, micro_batches_per_window=8, replicas=1).reductions_per_update == 0
    )
    assert "nobody to reduce with" in plan_text(plan_batch(micro_batch_samples=4, ranks=1))
    plan = plan_batch(micro_batch_samples=4, micro_batches_per_window=8, replicas=2)
    assert (plan.reductions_per_update, plan.naive_reductions_per_update) == (1, 8)
    single = plan_batch(micro_batch_samples=4, micro_batches_per_window=1, replicas=2)
    assert (single.reductions_per_update, single.naive_reductions_per_update) == (1, 1)
    assert "at the only micro-batch" in plan_text(single)
    assert "  8  in every micro-batch, so that no rank" in plan_text(plan, reduces_each=True)
    assert "  1  at the last micro-batch; 8 if every" in plan_text(plan)
    assert "no_accumulation" in [each["kind"] for each in plan_findings(single)]


def test_the_json_holds_what_was_promised() -> None:
    document = plan_document(plan_batch(global_batch_samples=64, micro_batch_samples=4, ranks=2))
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    promised = {
        "schema_version": 1,
        "ranks": 2,
        "replicas": 2,
        "micro_batch_samples": 4,
        "micro_batches_per_window": 8,
        "global_batch_samples": 64,
        "global_batch_items": None,
        "reductions_per_update": 1,
        "findings": [],
    }
    assert promised.items() <= document.items()


def test_core_classes_are_frozen_and_keyword_only() -> None:
    for cls in (Layout, BatchPlan, EpochLedger, Interval, PlanComparison):
        assert cls.__dataclass_params__.frozen, cls  # type: ignore[attr-defined]
        assert all(each.kw_only for each in dataclasses.fields(cls)), cls
        assert "__slots__" in vars(cls), cls


# Epochs and intervals, against loops that count


def counted_run(dataset: int, samples: int, tail: str, epochs: int) -> list[int]:
    """The samples of every update of a run, one by one."""
    updates = []
    for _ in range(epochs):
        left = dataset
        while left >= samples or (left and tail == "partial"):
            updates.append(min(left, samples))
            left -= min(left, samples)
    return updates


@given(
    dataset=st.integers(1, 60),
    samples=st.integers(1, 70),
    tail=st.sampled_from(["partial", "drop"]),
    epochs=st.integers(1, 4),
    probe=st.integers(0, 200),
)
@quick
def test_epochs_count_as_a_loop_does(
    dataset: int, samples: int, tail: Any, epochs: int, probe: int
) -> None:
    plan = plan_batch(micro_batch_samples=samples, micro_batches_per_window=1, replicas=1, tail=tail)
    updates = counted_run(dataset, samples, tail, epochs)
    if not updates:
        with pytest.raises(PlanError, match=f"leaves no update: {dataset} samples .* {samples} of one"):
            EpochLedger(plan=plan, dataset_samples=dataset, epochs=epochs)
        return
    ledger = EpochLedger(plan=plan, dataset_samples=dataset, epochs=epochs)
    assert ledger.total_updates == len(updates)
    assert ledger.total_samples == sum(updates)
    assert ledger.updates_per_epoch * epochs == len(updates)
    assert ledger.to_dict()["total_samples_dropped"] == dataset * epochs - sum(updates)
    assert ledger.tail_samples == dataset % samples
    long_run = counted_run(dataset, samples, tail, 201)
    assert samples_after(plan, probe, dataset_samples=dataset) == sum(long_run[:probe])
    reached = updates_reaching(plan, probe, dataset_samples=dataset)
    assert sum(long_run[:reached]) >= probe
    assert reached == 0 or sum(long_run[: reached - 1]) < probe


def test_intervals_in_samples_are_rounded_up_and_say_so() -> None:
    plan = plan_batch(global_batch_samples=512, micro_batch_samples=4, replicas=4)
    interval = resolve_interval(plan, "warmup", 1000, "samples")
    assert (interval.updates, interval.samples, interval.rounded_up) == (2, 1024, True)
    assert not resolve_interval(plan, "warmup", 1024, "samples").rounded_up
    assert not resolve_interval(plan, "save", 3, "updates").rounded_up
    (finding,) = plan_findings(plan, intervals=[interval])
    assert finding["kind"] == "interval_rounded_up"
    assert "1000 samples" in finding["message"]
    assert "2 updates, 1024 samples" in finding["message"]


@pytest.mark.parametrize(
    ("name", "number", "unit", "message"),
    [
        ("log", 0, "updates", "log_updates=0 is too small"),
        ("log", 2.5, "samples", r"log_samples=2\.5 is a float"),
        ("dinner", 1, "updates", "interval='dinner' is not known; choose one of warmup, log"),
        ("log", 1, "steps", "unit='steps' is not known; choose one of updates, samples"),
    ],
)
def test_wrong_intervals_are_refused(name: Any, number: Any, unit: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        resolve_interval(plan_batch(micro_batch_samples=4), name, number, unit)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dataset_samples": 0}, "dataset_samples=0 is too small"),
        ({"dataset_samples": 10, "epochs": 2.5}, r"epochs=2\.5 is a float"),
        (
            {"dataset_samples": 2**50, "epochs": 2**5},
            "dataset_samples x epochs=36028797018963968 is too large",
        ),
    ],
)
def test_wrong_epochs_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        EpochLedger(plan=plan_batch(micro_batch_samples=4), **arguments)
    with pytest.raises(PlanError, match="updates=-1 is too small"):
        samples_after(plan_batch(micro_batch_samples=4), -1)


def findings_of(tail: str, dataset: int, **intervals: int) -> dict[str, str]:
    plan = plan_batch(micro_batch_samples=4, micro_batches_per_window=4, replicas=4, tail=tail)  # type: ignore[arg-type]
    resolved = [resolve_interval(plan, name, number, "updates") for name, number in intervals.items()]  # type: ignore[arg-type]
    epochs = EpochLedger(plan=plan, dataset_samples=dataset, epochs=2)
    return {
        each["kind"]: each["message"] for each in plan_findings(plan, epochs=epochs, intervals=resolved)
    }


def test_tails_and_intervals_out_of_reach_are_findings() -> None:
    assert findings_of("partial", 640) == {}
    assert findings_of("partial", 646).keys() == {"small_tail"}
    assert "10.7 times the variance" in findings_of("partial", 646)["small_tail"]
    smaller = findings_of("partial", 642)["tail_smaller_than_replicas"]
    assert "2 samples leaves 2 of 4 replicas" in smaller
    assert (
        "every epoch leaves out 6 samples of 646, 12 in all" in findings_of("drop", 646)["samples_dropped"]
    )
    assert findings_of("drop", 640) == {}
    assert "20 updates of a run that has 20" in findings_of("partial", 640, warmup=20)["warmup_never_ends"]
    assert "never comes" in findings_of("partial", 640, evaluation=21)["interval_never_reached"]
    assert findings_of("partial", 640, evaluation=20, warmup=19) == {}


@pytest.mark.parametrize(("dataset_samples", "seen"), [(15, True), (16, False)])
def test_a_data_set_below_one_global_batch_is_a_finding(dataset_samples: int, seen: bool) -> None:
    plan = plan_batch(micro_batch_samples=4, micro_batches_per_window=2, replicas=2)
    epochs = EpochLedger(plan=plan, dataset_samples=dataset_samples)
    found = {each["kind"]: each["message"] for each in plan_findings(plan, epochs=epochs)}
    assert ("no_full_global_batch" in found) == seen
    assert ("the data set has 15 samples and a global batch 16" in str(found)) == seen
    text = plan_text(plan, epochs=epochs)
    assert ("of the tail alone: no global batch of 16 samples is full" in text) == seen
    assert ("1 of 16 samples" in text) != seen


def test_updates_that_are_all_tail_are_not_compared_with_others() -> None:
    plan = plan_batch(micro_batch_samples=4, micro_batches_per_window=20, replicas=2)
    epochs = EpochLedger(plan=plan, dataset_samples=3)
    kinds = [each["kind"] for each in plan_findings(plan, epochs=epochs)]
    assert kinds == ["no_full_global_batch"]


def test_a_bubble_above_the_whole_is_said_in_times() -> None:
    full = plan_batch(micro_batch_samples=1, micro_batches_per_window=7, ranks=8, pipeline_parallel=8)
    assert "100.0%  of the ideal time idle" in plan_text(full)
    assert "idles for 100.0% of its ideal time" in plan_text(full)
    over = plan_batch(micro_batch_samples=1, micro_batches_per_window=4, ranks=8, pipeline_parallel=8)
    assert "idle time is 1.75 times the ideal time, 1f1b: (p - 1) / A = 7 / 4" in plan_text(over)
    assert "idles for 1.75 times its ideal time" in plan_text(over)
    assert "%  of the ideal" not in plan_text(over)


def test_a_plan_of_ragged_samples_asks_for_no_items_per_sample() -> None:
    plan = plan_batch(micro_batch_samples=4, replicas=2)
    assert "give the items per sample" in plan_text(plan)
    ragged = plan_text(plan, ragged=True)
    assert "differ from update to update: N is counted in each" in ragged
    assert "give the items per sample" not in ragged


def test_plans_of_one_global_batch_are_the_same_update() -> None:
    first = plan_batch(micro_batch_samples=2, micro_batches_per_window=8, replicas=2)
    second = plan_batch(micro_batch_samples=4, micro_batches_per_window=4, ranks=4, tensor_parallel=2)
    comparison = compare_plans(first, second, dataset_samples=1000, intervals={"log": (10, "updates")})
    assert comparison.same_update
    assert comparison.same_run
    assert not comparison.intervals[0].moves
    assert "are the same update" in plan_text(first, comparison=comparison)
    dropping = dataclasses.replace(second, tail="drop")
    assert compare_plans(first, dropping, dataset_samples=1000).same_run is False
    assert compare_plans(first, dropping, dataset_samples=960).same_run is True
    assert compare_plans(first, second).same_run is None
    other_items = dataclasses.replace(second, items_per_sample=3)
    assert not compare_plans(first, other_items).same_update


def test_another_window_moves_updates_and_intervals() -> None:
    first = plan_batch(micro_batch_samples=2, micro_batches_per_window=8, replicas=2)
    second = plan_batch(micro_batch_samples=2, micro_batches_per_window=32, replicas=2)
    comparison = compare_plans(
        first,
        second,
        dataset_samples=12_800,
        epochs=3,
        intervals={"warmup": (100, "updates"), "save": (3200, "samples")},
    )
    assert not comparison.same_update
    assert (comparison.first_epochs.total_updates, comparison.second_epochs.total_updates) == (1200, 300)  # type: ignore[union-attr]
    warmup, save = comparison.to_dict()["intervals"].values()
    assert warmup == {
        "updates": 100,
        "samples": 3200,
        "other_samples_of_same_updates": 12_800,
        "other_updates_of_same_samples": 25,
    }
    assert save == warmup
    text = plan_text(first, comparison=comparison)
    assert "are different updates, of 32 and 128 samples" in text
    assert "1,200 -> 300" in text
    assert "left at 100 it would be 12,800 samples" in text


def test_the_five_sample_example_runs() -> None:
    done = subprocess.run(
        [sys.executable, "-I", str(ROOT / "examples" / "five_samples.py")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "5/2" in done.stdout
    assert "7/2" in done.stdout
