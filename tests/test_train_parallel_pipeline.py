"""The training job as a pipeline: the same run as on one rank, resumed on the same stages and on others."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe, ScheduleLoopedBFS

from jobs import (
    Listener,
    after_update,
    built,
    check_same_ends,
    checkpoint_names,
    differing,
    largest_difference,
    parameters,
    resumed,
    run,
    saved,
    tiny,
    told,
)
from ranks import run_ranks
from wholebatch import UpdateWindow, token_loss
from wholebatch.errors import UnsupportedError
from wholebatch.ranks.pipeline import PipelinedModel
from wholebatch.resume import Checkpoints
from wholebatch.train.job import run_job
from wholebatch.train.world import World

pytestmark = pytest.mark.slow

Sections = dict[str, dict[str, Any]]
SEVERAL = {"strategy": "pipeline", "pipeline_virtual_stages": 2}


def ten_updates(folder: Path) -> Sections:
    """25 samples of different lengths to train on: every fourth update has one, fewer than stages."""
    words = [" ".join(["word"] * (number % 7 + 1)) + f" {number}" for number in range(33)]
    (folder / "words.txt").write_text("\n\n".join(words) + "\n")
    return {
        "run": {"num_updates": 10, "evaluate_every_updates": 10},
        "data": {"source": "text", "files": [str(folder / "words.txt")], "held_out_one_in": 3},
        "model": {"layers": 4},
        "average": {"decay_per_update": 0.5},
        "checkpoints": {"every_updates": 5, "keep_last": 9},
    }


def labelled(folder: Path) -> Sections:
    """The same with a label for each sample, and micro-batches that tokens bound."""
    texts = ["word " * (number % 5 + 1) + str(number) for number in range(33)]
    rows = [json.dumps({"text": text, "label": str(len(text) % 3)}) for text in texts]
    (folder / "rows.jsonl").write_text("\n".join(rows) + "\n")
    return ten_updates(folder) | {
        "data": {"source": "jsonl", "files": [str(folder / "rows.jsonl")], "held_out_one_in": 3},
        "objective": {"kind": "label"},
        "batch": {"micro_batch_samples": 0, "tokens_per_micro_batch": 64},
    }


def merged(*sections: Sections) -> Sections:
    names = {name for one in sections for name in one}
    return {name: {k: v for one in sections for k, v in one.get(name, {}).items()} for name in names}


def train(rank: int, n: int, folder: str, cases: dict[str, Sections]) -> Any:  # noqa: ARG001
    """A run of each case; what this rank holds of it, and what it showed."""
    found = {}
    for name, sections in cases.items():
        _, job, display = run(tiny(f"{folder}/{name}", **sections), World.of_all())
        found[name] = parameters(job), display.words.getvalue()
    return found


def apart(alone: dict[str, Tensor], of_ranks: list[dict[str, Tensor]]) -> float:
    """How far what the ranks hold is from one rank's; each parameter is held by some, and few by all."""
    assert {name for one in of_ranks for name in one} == set(alone)
    assert all(len(one) < len(alone) for one in of_ranks)
    return max(float((alone[name] - p).abs().max()) for one in of_ranks for name, p in one.items())


def check_same_run(one: Path, other: Path, reductions: list[int]) -> None:
    """Two runs of the same updates, evaluations and models."""
    (records, _), (others, _) = told(one), told(other)
    for number, (here, there) in enumerate(zip(records, others, strict=True)):
        for name in ("samples", "items", "sample_digest", "outcome"):
            assert here[name] == there[name], name
        assert there["reductions"] == reductions[number]
        for name in ("gradient_norm", "loss_per_item"):
            assert here[name] == pytest.approx(there[name], rel=1e-9), name
    check_same_ends(one, other)


# Ten updates -----------------------------------------------------------------------------------------


def test_two_stages_train_as_one_rank_does(tmp_path: Path) -> None:
    base, labels = ten_updates(tmp_path), labelled(tmp_path)
    checkpointed = {"model": {"activation_checkpointing": True}}
    cases: dict[str, tuple[Sections, Sections]] = {
        "1f1b": (base, {"parallel": {"strategy": "pipeline"}}),
        "interleaved_1f1b": (labels, {"parallel": SEVERAL} | checkpointed),
        "zero_bubble": (base, {"parallel": SEVERAL}),
    }
    alone = {}
    for name, (one, more) in cases.items():
        more["parallel"] = more["parallel"] | {"pipeline_schedule": name}
        alone[name] = parameters(run(tiny(tmp_path / "one" / name, **one))[1])
    several = {name: merged(one, more) for name, (one, more) in cases.items()}
    of_ranks = run_ranks(train, 2, str(tmp_path / "several"), several, timeout_s=180)
    for name in cases:
        assert apart(alone[name], [of_rank[name][0] for of_rank in of_ranks]) < 1e-11, name
        check_same_run(tmp_path / "one" / name, tmp_path / "several" / name, [0] * 10)
    assert "25.0%  of the ideal time idle, 1f1b" in of_ranks[0]["1f1b"][1]


def train_and_resume(rank: int, n: int, folder: str, sections: Sections, others: Any) -> Any:  # noqa: ARG001
    """What differs in a run when it is resumed half way; and others, resumed under another strategy."""
    world = World.of_all()
    first = parameters(run(tiny(f"{folder}/same", **sections), world)[1])
    records, state = told(f"{folder}/same"), saved(f"{folder}/same", 10)
    world.total([0.0])  # the leading rank reads what the others' resumption would overwrite
    again = parameters(resumed(f"{folder}/same/checkpoints/update-00000005", world=world)[1])
    same = differing([first, records, state], [again, told(f"{folder}/same"), saved(f"{folder}/same", 10)])
    for name, (begin, changes) in others.items():
        if begin is not None:
            run(tiny(f"{folder}/{name}", **(sections | {"parallel": begin})), world)
        resumed(f"{folder}/{name}/checkpoints/update-00000005", *changes, world=world)
    return same


def test_a_pipeline_and_a_copy_resume_on_the_same_stages_on_others_and_on_none(tmp_path: Path) -> None:
    base = ten_updates(tmp_path)
    run(tiny(tmp_path / "one", **base))
    shutil.copytree(tmp_path / "one", tmp_path / "from_one")
    copies = {"strategy": "pipeline", "pipeline_parallel": 2}
    to_pipeline = ["parallel.strategy=pipeline", "parallel.pipeline_parallel=4"]
    others = {
        "to_fsdp": (copies, ["parallel.strategy=fsdp", "parallel.pipeline_parallel=1"]),
        "from_fsdp": ({"strategy": "fsdp"}, to_pipeline),
        "from_one": (None, to_pipeline),
    }
    sections = merged(base, {"parallel": copies})
    found = run_ranks(train_and_resume, 4, str(tmp_path), sections, others, timeout_s=240)
    assert found == [[]] * 4
    # Records before a resumption are of the strategy before it; one replica reduces nothing.
    half_way = tmp_path / "same" / "checkpoints" / "update-00000005-2"
    resumed(half_way, "parallel.strategy=ddp", "parallel.pipeline_parallel=1")
    one, four = [0] * 5, [1] * 5
    for name, reductions in {
        "same": four + one,
        "to_fsdp": four + four,
        "from_fsdp": four + one,
        "from_one": one + one,
    }.items():
        check_same_run(tmp_path / "one", tmp_path / name, reductions)


# What ends it, and what is refused -------------------------------------------------------------------


def stop_and_resume(rank: int, n: int, folder: str, sections: Sections) -> Any:
    """How a run ended whose second rank was sent SIGTERM after update 3; then it is resumed to its end."""
    config, world = tiny(folder, **sections), World.of_all()
    job = built(config, world)
    send = after_update(3, lambda: os.kill(os.getpid(), signal.SIGTERM))
    code = run_job(job, Listener(config, send if rank == 1 else None)).exit_code
    return code, resumed(folder, world=world)[0].exit_code, refused(rank, n, f"{folder}/refused")


def refused(rank: int, n: int, folder: str) -> list[str]:
    """What is said of stages of one's own that no checkpoint could tell apart, or whose parts it lacks."""
    said = []
    for number, sharded in ((1, False), (2, False), (1, True)):
        parts = [torch.nn.Sequential(torch.nn.Linear(2, 2)) for _ in range(number)]
        if sharded:
            mesh = init_device_mesh("cpu", (n, 1), mesh_dim_names=("stages", "data"))
            parts = [torch.nn.Sequential(OrderedDict({f"layer{rank}": torch.nn.Linear(2, 2)}))]
            fully_shard(parts[0], mesh=mesh["data"])
        cpu = torch.device("cpu")
        stages = [PipelineStage(p, rank + n * i, n * number, cpu) for i, p in enumerate(parts)]
        schedule = ScheduleLoopedBFS if number > 1 else ScheduleGPipe
        model = PipelinedModel(stages, schedule=schedule, inputs=lambda batch: batch["x"])
        window = UpdateWindow(model, torch.optim.SGD(model.parameters(), lr=0.1), token_loss())
        with pytest.raises(UnsupportedError) as error:
            Checkpoints(f"{folder}-{number}-{sharded}").save(window)
        said.append(str(error.value))
    return said


def test_a_signal_ends_all_stages_on_one_edge_and_odd_stages_are_not_saved(tmp_path: Path) -> None:
    base = ten_updates(tmp_path)
    run(tiny(tmp_path / "one", **base))
    sections = merged(base, {"parallel": {"strategy": "pipeline"}})
    for stopped, done, (between, inside, sharded) in run_ranks(
        stop_and_resume, 2, str(tmp_path / "run"), sections
    ):
        assert (stopped, done) == (143, 0)
        assert "stages 0 and 1 of the pipeline both have '0.weight'" in between
        assert "'0.weight' is a name in stage" in inside
        assert "a stage of the pipeline is in parts over ranks" in sharded
    assert "update-00000003" in checkpoint_names(tmp_path / "run")
    assert len(told(tmp_path / "run")[0]) == 10
    state, other = (
        torch.load(tmp_path / name / "model" / "model.pt", weights_only=True) for name in ("one", "run")
    )
    assert largest_difference(state, other) < 1e-11
