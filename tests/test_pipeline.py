"""The window over pipelined models: every schedule's update is that of the big batch, on every rank."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import DTensor

from big_batch import Batch, big_batch, mean_loss, pad
from ranks import run_ranks
from wholebatch import UpdateWindow, plan_batch, token_loss
from wholebatch.errors import PoisonedWindowError, UnsupportedError, WindowUsageError
from wholebatch.ranks.pipeline import PipelinedModel
from wholebatch.ranks.pipeline_ranks import PipelineRanks

pytestmark = pytest.mark.slow

OBJECTIVE = token_loss()
SCHEDULES: dict[str, type] = {
    "GPipe": ScheduleGPipe,
    "1F1B": Schedule1F1B,
    "Interleaved1F1B": ScheduleInterleaved1F1B,
    "InterleavedZeroBubble": ScheduleInterleavedZeroBubble,
    "ZBV": ScheduleZBVZeroBubble,
}
SEVERAL = ("Interleaved1F1B", "InterleavedZeroBubble", "ZBV")


def layers(dtype: torch.dtype = torch.float64) -> list[nn.Module]:
    """Four parts of a model."""
    torch.manual_seed(0)
    parts: list[nn.Module] = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)]
    return [part.to(dtype) for part in [*parts, nn.Linear(6, 4)]]


def batches(start: int, number: int, *, dtype: torch.dtype = torch.float64) -> list[Batch]:
    """Micro-batches of 3 samples, of which some have no label."""
    made = []
    for index in range(start, start + number):
        generator = torch.Generator().manual_seed(index)
        labels = torch.randint(-1, 4, (3,), generator=generator)
        labels[labels < 0] = -100
        x = torch.randn(3, 6, generator=generator, dtype=torch.float64)
        made.append({"x": x.to(dtype), "labels": labels})
    return made


def make_optimizer(parameters: Any, kind: str) -> torch.optim.Optimizer:
    if kind == "adamw":
        return torch.optim.AdamW(parameters, lr=0.05)
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)


def inputs(batch: Batch) -> torch.Tensor:
    return batch["x"]


def pipelined(
    parts: list[nn.Module],
    schedule: str,
    place: int,
    size: int,
    *,
    group: Any = None,
    wrap: Callable[[nn.Module], nn.Module] = lambda part: part,
    **options: Any,
) -> tuple[PipelinedModel, list[nn.Module]]:
    """The stages of one rank of a pipeline, and the parts of the model that are in them."""
    if schedule in SEVERAL:
        places = [place, 2 * size - 1 - place] if schedule == "ZBV" else [place, place + size]
        own = [[parts[index]] for index in places]
    else:
        places, own = [place], [parts[2 * place : 2 * place + 2]]
    stages = [
        PipelineStage(
            wrap(nn.Sequential(*of_one)), at, size * len(places), torch.device("cpu"), group=group
        )
        for at, of_one in zip(places, own, strict=True)
    ]
    model = PipelinedModel(stages, schedule=SCHEDULES[schedule], inputs=inputs, **options)
    return model, [part for of_one in own for part in of_one]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def distance(mine: Sequence[nn.Module], wanted: Sequence[nn.Module]) -> float:
    """Of the parameters of these parts from those of the same parts of another model."""
    pairs = [
        pair
        for one, other in zip(mine, wanted, strict=True)
        for pair in zip(one.parameters(), other.parameters(), strict=True)
    ]
    return max(float((whole(a) - b.detach()).abs().max()) for a, b in pairs)


# The update of the big batch ------------------------------------------------------------------------


def column(rank: int, ranks: int, schedule: str) -> list[Any]:
    """Full windows, windows of two calls, and tails, with two optimizers, in float64 and float32."""
    found = []
    for dtype in (torch.float64, torch.float32):
        for kind in ("adamw", "sgd"):
            parts, wanted = layers(dtype), layers()
            per_call = 4 if schedule in SEVERAL else 6
            model, own = pipelined(parts, schedule, rank, ranks, micro_batches_per_call=per_call)
            whole_model = nn.Sequential(*wanted)
            optimizer = make_optimizer(model.parameters(), kind)
            plain = make_optimizer(whole_model.parameters(), kind)
            window = UpdateWindow(model, optimizer, OBJECTIVE, clip_grad_norm=0.5)
            for held in (4, 8, 2, 4) if schedule not in SEVERAL else (4, 8, 6, 4):
                record = window.run(batches(100 * held, held, dtype=dtype))
                given = batches(100 * held, held)
                norm = big_batch(whole_model, plain, given)
                items = sum(int((batch["labels"] != -100).sum()) for batch in given)
                assert (record.micro_batches, record.samples, record.items) == (held, 3 * held, items)
                assert record.gradient_norm == pytest.approx(norm, rel=10 * torch.finfo(dtype).eps)
                assert record.loss_per_item is not None
            indices = [parts.index(part) for part in own]
            error = distance(own, [wanted[index] for index in indices])
            found.append((error / torch.finfo(dtype).eps, record.loss_per_item))
    return found


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_makes_the_update_of_the_big_batch(schedule: str) -> None:
    first, second = run_ranks(column, 2, schedule)
    for (error, loss), (other_error, same_loss) in zip(first, second, strict=True):
        assert max(error, other_error) < 64, "in units of the dtype's rounding"
        assert loss == same_loss, "every rank has the record"


def copied(_rank: int, ranks: int, engine: str) -> list[Any]:
    """Two pipelines of two ranks: plain stages, and stages that are sharded."""
    warnings.filterwarnings("ignore", message="FSDP2-wrapped")
    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("data", "stage"))
    place, copy = mesh.get_local_rank("stage"), mesh.get_local_rank("data")
    parts, wanted = layers(), layers()

    def wrap(part: nn.Module) -> nn.Module:
        return fully_shard(part, mesh=mesh["data"]) if engine == "fsdp" else part

    model, own = pipelined(
        parts,
        "1F1B",
        place,
        2,
        group=mesh.get_group("stage"),
        wrap=wrap,
        data_parallel=mesh["data"],
        micro_batches_per_call=2,
    )
    whole_model = nn.Sequential(*wanted)
    window = UpdateWindow(model, make_optimizer(model.parameters(), "adamw"), OBJECTIVE, clip_grad_norm=0.5)
    plain = make_optimizer(whole_model.parameters(), "adamw")
    # plain copies may hold different numbers of micro-batches, also none
    shares = [(4, 4), (2, 2), (4, 4)] if engine != "plain" else [(4, 2), (2, 4), (0, 4)]
    for update, held in enumerate(shares):
        starts = [1000 * update + 10 * one for one in range(2)]
        record = window.run(batches(starts[copy], held[copy]))
        given = [b for start, number in zip(starts, held, strict=True) for b in batches(start, number)]
        norm = big_batch(whole_model, plain, given)
        assert record.gradient_norm == pytest.approx(norm, rel=1e-13)
        assert (record.micro_batches, record.samples) == (sum(held), 3 * sum(held))
    if engine == "fsdp":
        with pytest.raises(WindowUsageError, match="under fully_shard hold different numbers"):
            window.run(batches(0, 4 - 2 * copy))
    indices = [parts.index(part) for part in own]
    return [distance(own, [wanted[index] for index in indices]), record.loss_per_item, record.reductions]


@pytest.mark.parametrize("engine", ["plain", "fsdp"])
def test_copies_of_a_pipeline_add_up(engine: str) -> None:
    found = run_ranks(copied, 4, engine)
    assert len({loss for _, loss, _ in found}) == 1
    for error, _, reductions in found:
        assert error < 1e-14
        assert reductions == (1 if engine == "plain" else 2)


# Bad days ----------------------------------------------------------------------------------------------


def window_of(rank: int, ranks: int, schedule: str = "1F1B", **options: Any) -> tuple[UpdateWindow, Any]:
    model, own = pipelined(layers(), schedule, rank, ranks, **options)
    return UpdateWindow(model, make_optimizer(model.parameters(), "sgd"), OBJECTIVE), own


def skipped(rank: int, ranks: int) -> list[Any]:
    window, own = window_of(rank, ranks)
    bad = batches(0, 2)
    bad[1]["x"][:] = float("nan")
    record = window.run(bad)
    wanted = layers()
    whole_model = nn.Sequential(*wanted)
    window.run(batches(0, 2))
    plain = make_optimizer(whole_model.parameters(), "sgd")
    mean_loss(whole_model, batches(0, 2)).backward()
    plain.step()
    return [record.outcome, record.reason, distance(own, wanted[2 * rank : 2 * rank + 2])]


def test_all_stages_skip_what_is_not_finite() -> None:
    for outcome, reason, error in run_ranks(skipped, 2):
        assert outcome == "skipped_nonfinite"
        assert reason == "the loss of micro-batch 2 on rank 1 is not finite"
        assert error < 1e-14


def refused(rank: int, ranks: int) -> list[str]:
    told: list[str] = []

    def tell(act: Callable[[], Any], kind: type[Exception]) -> None:
        with pytest.raises(kind) as caught:
            act()
        told.append(str(caught.value))

    window, _ = window_of(rank, ranks)
    ragged = batches(0, 2)
    ragged[1] = {name: part[:2] for name, part in ragged[1].items()}
    tell(lambda: window.run(ragged), WindowUsageError)
    interleaved, _ = window_of(rank, ranks, "Interleaved1F1B")
    tell(lambda: interleaved.run(batches(0, 5)), UnsupportedError)
    tell(lambda: list(window.update(batches(0, 2)).__enter__()), WindowUsageError)
    alone, _ = window_of(rank, ranks)
    tell(lambda: alone.run(batches(0, 2), counting_pass=True, loss_fn=OBJECTIVE), WindowUsageError)
    elsewhere, _ = window_of(rank, ranks)
    tell(lambda: elsewhere.run(batches(10 * rank, 2 + rank)), WindowUsageError)
    stages = [PipelineStage(nn.Linear(2, 2), rank, 2, torch.device("cpu"))] * 2
    tell(lambda: PipelinedModel(stages, schedule=Schedule1F1B, inputs=inputs), UnsupportedError)
    plan = plan_batch(global_batch_samples=6, micro_batch_samples=3, ranks=2)
    model, _ = pipelined(layers(), "1F1B", rank, ranks)
    tell(
        lambda: UpdateWindow(model, make_optimizer(model.parameters(), "sgd"), OBJECTIVE, plan=plan),
        WindowUsageError,
    )
    wrapped = [
        PipelineStage(nn.parallel.DistributedDataParallel(nn.Linear(2, 2)), rank, 2, torch.device("cpu"))
    ]
    under = PipelinedModel(wrapped, schedule=Schedule1F1B, inputs=inputs)
    tell(
        lambda: UpdateWindow(under, make_optimizer(under.parameters(), "sgd"), OBJECTIVE), UnsupportedError
    )
    # nothing of this was beyond the point of no return
    window2, _ = window_of(rank, ranks)
    assert window2.run(batches(0, 2)).outcome == "applied"
    return told


def test_what_a_schedule_cannot_do_is_refused_before_it_begins() -> None:
    for told in run_ranks(refused, 2):
        ragged, interleaved, loop, counting, samples, stages, plan, wrapped = told
        assert "run of Schedule1F1B are float64 [3, 6] and float64 [2, 6]" in ragged
        assert (
            "ScheduleInterleaved1F1B can't run 5 micro-batches through 4 stages on 2 ranks" in interleaved
        )
        assert "use window.run(batches)" in loop
        assert "which a pipeline does not" in counting
        assert (
            "other micro-batches were given to rank 1 than to another rank of the same replica" in samples
        )
        assert "runs one stage a rank, and this rank was given 2" in stages
        assert "1 are running; plan with ranks=2 and tensor_parallel x pipeline_parallel x context" in plan
        assert "a stage is under DistributedDataParallel" in wrapped


def padded(rank: int, ranks: int) -> float:
    """Ragged micro-batches, brought to one shape: rows of padding without labels."""
    window, own = window_of(rank, ranks, pad=pad)
    ragged = batches(0, 3)
    ragged[1] = {name: part[:1] for name, part in ragged[1].items()}
    window.run(ragged)
    wanted = layers()
    whole_model = nn.Sequential(*wanted)
    plain = make_optimizer(whole_model.parameters(), "sgd")
    mean_loss(whole_model, ragged).backward()
    plain.step()
    return distance(own, wanted[2 * rank : 2 * rank + 2])


def test_ragged_micro_batches_can_be_padded() -> None:
    assert max(run_ranks(padded, 2)) < 1e-14


def fails_inside(rank: int, ranks: int) -> list[str]:
    """The last stage fails in its forward: nothing can be run again, and the error says where to go on."""
    window, own = window_of(rank, ranks)
    window.run(batches(0, 2))

    def fail(*_: Any) -> None:
        raise ValueError("a bad sample")

    if rank == ranks - 1:
        own[0].register_forward_pre_hook(fail)
    with pytest.raises(PoisonedWindowError) as caught:
        window.run(batches(10, 2))
    with pytest.raises(PoisonedWindowError):
        window.run(batches(0, 2))
    return [str(caught.value), str(window.counters.updates_applied)]


def test_a_failure_inside_a_stage_poisons_the_window() -> None:
    outcomes = run_ranks(fails_inside, 2, expect="outcomes", timeout_s=60)
    kind, (message, applied) = outcomes[1][:2]
    assert kind == "ok"
    assert "ValueError: a bad sample" in message or "failed to run forward" in message
    assert "restart from the last committed update, number 1" in message
    assert applied == "1"


# Broken on purpose --------------------------------------------------------------------------------------


def broken(rank: int, ranks: int, slip: str) -> float:
    parts, wanted = layers(), layers()
    model, own = pipelined(parts, "1F1B", rank, ranks, micro_batches_per_call=2)
    whole_model = nn.Sequential(*wanted)
    window = UpdateWindow(model, make_optimizer(model.parameters(), "sgd"), OBJECTIVE, clip_grad_norm=0.5)
    plain = make_optimizer(whole_model.parameters(), "sgd")
    given = batches(0, 4)

    class Scaling(Schedule1F1B):
        """As it is by default: it divides what is in ``.grad`` by the micro-batches of a call."""

        def __init__(self, *args: Any, scale_grads: bool, **named: Any) -> None:
            super().__init__(*args, scale_grads=not scale_grads, **named)

    norm_of_stage = mock.patch.object(PipelineRanks, "norm_in_parts", False)
    if slip == "scale_grads":
        model.schedule = Scaling
        window.run(given)
    else:
        with norm_of_stage:
            window.run(given)
    big_batch(whole_model, plain, given)
    return distance(own, [wanted[parts.index(part)] for part in own])


@pytest.mark.parametrize("slip", ["scale_grads", "clip by stage"])
def test_each_of_these_slips_shows(slip: str) -> None:
    outcomes = run_ranks(broken, 2, slip, expect="outcomes")
    assert all(outcome[0] == "error" or outcome[1] > 1e-6 for outcome in outcomes), outcomes
