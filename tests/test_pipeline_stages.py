"""Stages of every kind in a pipeline's window: what is exact, what is rolled back, what is refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from big_batch import Batch, big_batch
from ranks import run_ranks
from test_pipeline import (
    OBJECTIVE,
    batches,
    distance,
    inputs,
    layers,
    make_optimizer,
    pipelined,
    window_of,
)
from wholebatch import UpdateWindow
from wholebatch.errors import UnsupportedError, WholebatchError, WindowUsageError
from wholebatch.ranks.pipeline import PipelinedModel

pytestmark = pytest.mark.slow

SPLIT = ("InterleavedZeroBubble", "ZBV")


class Detached(nn.Module):
    """Trains, and lets no gradient through."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x.detach()))


def detached() -> list[nn.Module]:
    torch.manual_seed(0)
    return [*(Detached().double() for _ in range(3)), nn.Linear(6, 4).double()]


def frozen(*places: int) -> list[nn.Module]:
    parts = layers()
    for place in places:
        parts[place].requires_grad_(False)
    return parts


def tied() -> list[nn.Module]:
    """The first layer and the last share a weight; ZBV holds both on one rank."""
    parts = layers()
    parts[3] = nn.Linear(6, 6).double()
    parts[3].weight = parts[0][0].weight
    nn.init.zeros_(parts[3].bias)
    return parts


ODD: dict[str, tuple[Callable[[], list[nn.Module]], tuple[str, ...]]] = {
    "frozen at the front": (lambda: frozen(0, 1), ("1F1B", *SPLIT)),
    "frozen at the end": (lambda: frozen(2, 3), ("1F1B", "ZBV")),
    "detached": (detached, SPLIT),
    "tied": (tied, ("ZBV",)),
}


def odd(rank: int, ranks: int) -> dict[str, float]:
    """An update of each odd model by the schedules that it is hard for; distances from the big batch."""
    found = {}
    for name, (make, schedules) in ODD.items():
        for schedule in schedules:
            parts, wanted = make(), make()
            model, own = pipelined(parts, schedule, rank, ranks)
            window = UpdateWindow(
                model, make_optimizer(model.parameters(), "sgd"), OBJECTIVE, clip_grad_norm=0.5
            )
            whole_model = nn.Sequential(*wanted)
            plain = make_optimizer(whole_model.parameters(), "sgd")
            record = window.run(batches(0, 4))
            norm = big_batch(whole_model, plain, batches(0, 4))
            assert record.gradient_norm == pytest.approx(norm, rel=1e-13), (name, schedule)
            found[f"{name}, {schedule}"] = distance(own, [wanted[parts.index(part)] for part in own])
    return found


def test_frozen_detached_and_tied_stages_make_the_update_of_the_big_batch() -> None:
    for found in run_ranks(odd, 2):
        assert max(found.values()) < 1e-14, found


def narrow(rank: int, ranks: int, schedule: str) -> list[Any]:
    """8 micro-batches of bfloat16 stages, whose gradients are added up in float32."""
    parts = [part.bfloat16() for part in layers()]
    model, own = pipelined(parts, schedule, rank, ranks)
    window = UpdateWindow(model, torch.optim.SGD(model.parameters(), lr=0.5), OBJECTIVE)
    record = window.run(batches(0, 8, dtype=torch.bfloat16))
    return [record.gradient_norm, {parts.index(part): part.state_dict() for part in own}]


def test_gradients_of_half_precision_stages_are_kept_wide_by_every_schedule() -> None:
    whole_model = nn.Sequential(*(part.bfloat16() for part in layers()))
    window = UpdateWindow(whole_model, torch.optim.SGD(whole_model.parameters(), lr=0.5), OBJECTIVE)
    record = window.run(
        batches(0, 8, dtype=torch.bfloat16), lambda model, batch: OBJECTIVE(model(batch["x"]), batch)
    )
    for schedule in ("1F1B", *SPLIT):
        for norm, own in run_ranks(narrow, 2, schedule):
            assert norm == pytest.approx(record.gradient_norm, rel=1e-6)
            for place, state in own.items():
                wanted = whole_model[place].state_dict()
                torch.testing.assert_close(state, wanted, rtol=0, atol=0)


class Noting(nn.Module):
    """Batch statistics, and a second embedding of ids that pass through the first stage."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 6)
        self.norm = nn.BatchNorm1d(6)
        self.to_labels = None if first else nn.Linear(6, 4)

    def forward(self, ids: torch.Tensor, x: torch.Tensor) -> Any:
        found = self.norm(x + self.embedding(ids))
        return (ids, found) if self.to_labels is None else self.to_labels(torch.tanh(found))


def learns_shapes(rank: int, ranks: int) -> list[float]:
    """What torch does to learn shapes leaves no trace; neither does a schedule of the user's own."""
    torch.manual_seed(0)
    wanted = [Noting(first).double() for first in (True, False)]
    torch.manual_seed(0)
    mine = [Noting(first).double() for first in (True, False)][rank]
    stage = PipelineStage(mine, rank, ranks, torch.device("cpu"))
    model = PipelinedModel(
        stage, schedule=Schedule1F1B, inputs=lambda batch: (batch["labels"].clamp(0), batch["x"])
    )
    window = UpdateWindow(model, make_optimizer(model.parameters(), "sgd"), OBJECTIVE)
    plain = make_optimizer([p for part in wanted for p in part.parameters()], "sgd")
    for start in (0, 10):
        given = batches(start, 3)
        window.run(given)
        items = sum(int((batch["labels"] != -100).sum()) for batch in given)
        for batch in given:
            output = wanted[1](*wanted[0](batch["labels"].clamp(0), batch["x"]))
            (F.cross_entropy(output, batch["labels"], reduction="sum") / items).backward()
        plain.step()
        plain.zero_grad()
        evaluated = ScheduleGPipe(stage, 1)
        mine.eval()
        with torch.no_grad():
            evaluated.step(*(model.inputs(given[0]) if rank == 0 else ()))
        mine.train()
    states = zip(mine.state_dict().values(), wanted[rank].state_dict().values(), strict=True)
    return [float((a.double() - b.double()).abs().max()) for a, b in states]


def test_learning_shapes_leaves_no_trace_and_an_evaluation_between_updates_no_harm() -> None:
    for distances in run_ranks(learns_shapes, 2):
        assert max(distances) < 1e-14


# Bad days ----------------------------------------------------------------------------------------------


def rolled_back(rank: int, ranks: int) -> dict[str, str]:
    """A loss that fails is told when the schedule is over; the update can be run again at once."""
    found = {}

    def raises(output: torch.Tensor, batch: Batch) -> Any:
        if torch.equal(batch["x"], batches(1, 1)[0]["x"]):
            raise ValueError("a bad sample")
        return OBJECTIVE(output, batch)

    losses: dict[str, Callable[..., Any]] = {
        "raises": raises,
        "detached": lambda output, batch: OBJECTIVE(output.detach(), batch),
        "wrong count": lambda output, batch: (OBJECTIVE(output, batch).loss_sum, 77),
    }
    for schedule in ("1F1B", "InterleavedZeroBubble"):
        for name, loss_fn in losses.items():
            window, own = window_of(rank, ranks, schedule)
            with pytest.raises((ValueError, WholebatchError)) as caught:
                window.run(batches(0, 4), loss_fn)
            found[name] = f"{type(caught.value).__name__}: {caught.value}"
            assert window.counters.updates_attempted == 0
            window.run(batches(0, 4))
            wanted = layers()
            whole_model = nn.Sequential(*wanted)
            big_batch(whole_model, make_optimizer(whole_model.parameters(), "sgd"), batches(0, 4), clip=1e9)
            places = [2 * rank, 2 * rank + 1] if schedule == "1F1B" else [rank, rank + 2]
            assert distance(own, [wanted[place] for place in places]) < 1e-14
    return found


def test_a_loss_that_fails_inside_a_schedule_is_rolled_back_everywhere() -> None:
    others, last = run_ranks(rolled_back, 2)
    assert last["raises"] == "ValueError: a bad sample"
    assert "ObjectiveError: the loss of micro-batch 1 of 4 on rank 1 does not depend" in last["detached"]
    assert "summed 77 items and the objective counted" in last["wrong count"]
    for told in others.values():
        assert told.startswith("OtherRankFailedError: rank 1 failed while this rank was agreeing")


def scaled(rank: int, ranks: int) -> list[Any]:
    """A loss scale that overflows in one stage moves on all ranks, also where a stage is frozen."""
    parts = [part.float() for part in frozen(2, 3)]
    model, _ = pipelined(parts, "1F1B", rank, ranks)
    scaler = GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    window = UpdateWindow(model, make_optimizer(model.parameters(), "sgd"), OBJECTIVE, scaler=scaler)
    given = batches(0, 4, dtype=torch.float32)
    hooks = [p.register_hook(lambda g: g * float("inf")) for p in model.parameters() if p.requires_grad]
    outcomes = [window.run(given).outcome]
    for hook in hooks:
        hook.remove()
    outcomes += [window.run(given).outcome for _ in range(2)]
    return [outcomes, scaler.get_scale()]


def test_a_loss_scale_is_that_of_all_stages() -> None:
    for outcomes, scale in run_ranks(scaled, 2):
        assert outcomes == ["skipped_nonfinite", "applied", "applied"]
        assert scale == 1024.0, "halved once, doubled after two updates"


def refused(rank: int, ranks: int) -> dict[str, str]:
    warnings.filterwarnings("ignore", message="FSDP2-wrapped")
    mesh = init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("data", "one"))
    stage = PipelineStage(nn.Linear(6, 6), rank, ranks, torch.device("cpu"))

    def model_of(**changed: Any) -> PipelinedModel:
        given = {"stages": stage, "schedule": Schedule1F1B, "inputs": inputs} | changed
        return PipelinedModel(given.pop("stages"), **given)

    def window_over(model: PipelinedModel, **named: Any) -> UpdateWindow:
        return UpdateWindow(model, make_optimizer(model.parameters(), "sgd"), OBJECTIVE, **named)

    def placed(*indices: int, schedule: type = Schedule1F1B) -> PipelinedModel:
        number = ranks * len(indices)
        stages = [PipelineStage(nn.Linear(6, 6).double(), n, number, torch.device("cpu")) for n in indices]
        return model_of(stages=stages, schedule=schedule)

    def without_gradients() -> None:
        with torch.no_grad():
            window_of(rank, ranks)[0].run(batches(0, 2))

    def given_to_the_first(gives: Any) -> Callable[[], Any]:
        window, _ = window_of(rank, ranks)
        window.model.inputs = lambda _: gives
        return lambda: window.run(batches(0, 2))

    def sharded(*parts: nn.Module, over: str = "one", **named: Any) -> PipelinedModel:
        """Stages of which the first is under ``fully_shard``; "one" is a mesh of this rank."""
        fully_shard(parts[0], mesh=mesh[over], **named.pop("shard", {}))
        places, number = [rank + ranks * turn for turn in range(len(parts))], ranks * len(parts)
        stages = [
            PipelineStage(part, place, number, torch.device("cpu"))
            for place, part in zip(places, parts, strict=True)
        ]
        schedule = Schedule1F1B if len(parts) == 1 else ScheduleInterleaved1F1B
        return model_of(stages=stages, schedule=schedule, **named)

    def with_a_factor() -> PipelinedModel:
        model = sharded(nn.Linear(6, 6))
        model.parts[0].set_gradient_divide_factor(2.0)
        return model

    def in_part() -> PipelinedModel:
        part = nn.Sequential(fully_shard(nn.Linear(6, 6), mesh=mesh["one"]), nn.Linear(6, 6))
        return model_of(stages=PipelineStage(part, rank, ranks, torch.device("cpu")))

    def of_others() -> UpdateWindow:
        other = nn.Linear(2, 2)
        other.bias.requires_grad_(False)  # which nobody moves, wherever it is
        return UpdateWindow(model_of(), make_optimizer(other.parameters(), "sgd"), OBJECTIVE)

    narrow = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
    wide = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
    eight = batches(0, 8, dtype=torch.bfloat16)
    acts: dict[str, Callable[[], Any]] = {
        "other parameters": of_others,
        "after agreement": lambda: window_over(model_of(), reduce="after_agreement"),
        "some sharded": lambda: window_over(sharded(nn.Linear(6, 6), nn.Linear(6, 6))),
        "sharded over others": lambda: window_over(sharded(nn.Linear(6, 6), over="data")),
        "a factor": lambda: window_over(with_a_factor()),
        "in part": lambda: window_over(in_part()),
        "held back narrow": lambda: window_over(sharded(nn.Linear(6, 6), shard=narrow)).run(eight),
        "narrow over calls": lambda: window_over(
            sharded(nn.Linear(6, 6).bfloat16(), shard=wide, micro_batches_per_call=4)
        ).run(eight),
        "no stage": lambda: model_of(stages=nn.Linear(6, 6)),
        "no stages": lambda: model_of(stages=[]),
        "by name": lambda: model_of(schedule="1F1B"),
        "inputs": lambda: model_of(inputs="x"),
        "per call": lambda: model_of(micro_batches_per_call=True),
        "mesh": lambda: model_of(data_parallel=mesh),
        "one stage twice": lambda: window_over(placed(0)),
        "elsewhere": lambda: window_over(placed(1 - rank)).run(batches(0, 2)),
        "in blocks": lambda: window_over(
            placed(2 * rank, 2 * rank + 1, schedule=ScheduleInterleaved1F1B)
        ).run(batches(0, 4)),
        "other schedules": lambda: window_over(model_of(schedule=ScheduleGPipe if rank else Schedule1F1B)),
        "copies of other stages": lambda: window_over(model_of(data_parallel=mesh["data"])),
        "context parallel": lambda: window_over(model_of(), context_parallel=mesh["data"]),
        "no_grad": without_gradients,
        "a dict": given_to_the_first({"x": torch.ones(3, 6)}),
        "no sample": given_to_the_first(torch.ones(0, 6)),
    }
    told = {}
    for name, act in acts.items():
        with pytest.raises((WindowUsageError, UnsupportedError)) as caught:
            act()
        told[name] = str(caught.value)
    return told


def test_what_is_no_pipeline_is_refused() -> None:
    for rank, told in enumerate(run_ranks(refused, 2)):
        words = {
            "other parameters": "1 of the optimizer's 2 parameters are in no stage of this rank",
            "after agreement": "reduce='after_agreement': a pipeline's gradients are reduced when",
            "some sharded": "some stages of a rank are under fully_shard and some not",
            "sharded over others": "stages are sharded over 2 ranks and there are 1 copies",
            "a factor": "a stage has a factor of its own",
            "in part": "0.weight of a stage is a DTensor that fully_shard of the whole stage does not",
            "held back narrow": "keeps gradients that are held back in the reduce_dtype",
            "narrow over calls": "adds sharded gradients up in the dtype of the parameters",
            "no stage": "is no torch.distributed.pipelining.PipelineStage",
            "no stages": "stages=[] is no",
            "by name": "schedule='1F1B' is no class of torch.distributed.pipelining",
            "inputs": "inputs='x' and pad=None",
            "per call": "micro_batches_per_call=True is no number",
            "mesh": "is no dimension of a mesh",
            "one stage twice": "ranks 0 and 1 of one pipeline hold the stages [[0], [0]]",
            "elsewhere": f"stage {1 - rank} is on rank {rank} of its pipeline, and Schedule1F1B looks",
            "in blocks": "and ScheduleInterleaved1F1B looks for it on rank",
            "other schedules": "micro_batches_per_call of rank 1 are ('ScheduleGPipe', 2, None)",
            "copies of other stages": "a pipeline of 2 ranks with 2 copies takes 4",
            "context parallel": "context_parallel over PipelinedModel is not known",
            "no_grad": "was begun under no_grad",
            "a dict": "inputs(batch) gave a dict",
            "no sample": "inputs(batch) gave float32 [0, 6]",
        }
        assert told.keys() == words.keys()
        for name, wanted in words.items():
            assert wanted in told[name], (name, told[name])
