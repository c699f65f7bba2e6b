"""The training job under DeepSpeed, ZeRO 0 to 3: the run of one rank; resumed, evaluated and written."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import environments
from deepspeed_rounds import case_of, config_of, deepspeed_here, start
from jobs import built, largest_difference, resumed, run, tiny, told
from problems import loss_with
from ranks import run_ranks
from wholebatch.checkpoint_folder import checkpoint_paths
from wholebatch.errors import WholebatchError
from wholebatch.resume import Checkpoints
from wholebatch.train.parts import make_window
from wholebatch.train.world import World
from wholebatch.window import UpdateWindow

pytestmark = [
    pytest.mark.peers,
    pytest.mark.slow,
    pytest.mark.skipif(not environments.is_ready("deepspeed"), reason="needs `make peers`"),
]

Sections = dict[str, dict[str, Any]]
FLOAT32, AVERAGE = {"parameters": "float32"}, {"decay_per_update": 0.5}
PACKED = {
    "global_batch_samples": 12,
    "micro_batch_samples": 0,
    "tokens_per_micro_batch": 96,
    "rows": "packed",
}
RUNS: dict[str, Sections] = {
    "zero-0": {"average": AVERAGE},
    "zero-1": {"average": AVERAGE},
    "zero-2": {"average": AVERAGE},
    "zero-3": {"batch": PACKED},
}
HALF = {"precision": FLOAT32 | {"autocast": "bfloat16"}, "model": {"activation_checkpointing": True}}


def sections_of(stage: int | None, more: Sections) -> Sections:
    return {
        "run": {"num_updates": 10, "evaluate_every_updates": 5},
        "batch": {"global_batch_samples": 12},
        "parallel": {} if stage is None else {"strategy": "deepspeed", "zero_stage": stage},
        "precision": FLOAT32,
        "checkpoints": {"every_updates": 5},
    } | more


def written(folder: Path | str, name: str = "model") -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = torch.load(Path(folder) / name / "model.pt", weights_only=True)
    return state


# As on one rank -------------------------------------------------------------------------------------------


def column(rank: int, n: int, folder: str) -> dict[str, Any]:
    """A run of every stage, and the same resumed half way; two in bfloat16 autocast; and one of DDP."""
    deepspeed_here(rank, n)
    world, found = World.of_all(), {}
    for stage, (name, more) in enumerate(RUNS.items()):
        where = f"{folder}/{name}"
        words = run(tiny(where, **sections_of(stage, more)), world)[2].words.getvalue()
        world.total([0.0])  # the others read what the leading rank would overwrite
        before = written(where), told(where)
        world.total([0.0])
        resumed(f"{where}/checkpoints/update-00000005", world=world)
        world.total([0.0])
        found[name] = words, largest_difference(before[0], written(where)), before[1] == told(where)
    is_on = torch.is_autocast_enabled
    with pytest.MonkeyPatch.context() as patch:
        # DeepSpeed asks so, and only an accelerator's autocast answers; what it turns off is this device's.
        patch.setattr(torch, "is_autocast_enabled", lambda *device: is_on(*device) if device else True)
        for stage in (1, 3):
            run(tiny(f"{folder}/half-{stage}", **sections_of(stage, HALF)), world)
    run(tiny(f"{folder}/ddp", **sections_of(None, {})), world)
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """The folder of all runs, those of one rank and of two; and what the two ranks told."""
    folder = tmp_path_factory.mktemp("runs")
    average: Sections = {"average": AVERAGE}
    run(tiny(folder / "true", **sections_of(None, average | {"precision": {"parameters": "float64"}})))
    run(tiny(folder / "one", **sections_of(None, average)))
    run(tiny(folder / "half", **sections_of(None, HALF)))
    return folder, run_ranks(column, 2, str(folder), timeout_s=150)


def rounding(folder: Path, name: str) -> float:
    """Four times how far the run of one rank in float32 ends from that in float64."""
    return 4.0 * largest_difference(written(folder / "true", name), written(folder / "one", name))


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_that_of_one_rank_and_resumes_bit_for_bit(runs: Any, name: str) -> None:
    folder, found = runs
    for of_rank in found:
        words, moved, same_records = of_rank[name]
        assert "Each rank: " in words
        assert (moved, same_records) == (0.0, True)
    models = ["model", "model-average"] if "average" in RUNS[name] else ["model"]
    for model in models:
        apart = largest_difference(written(folder / "true", model), written(folder / name, model))
        assert apart < rounding(folder, model), model
    records, evaluations = told(folder / name)
    for here, there in zip(records, told(folder / "one")[0], strict=True):
        for fact in ("samples", "items", "sample_digest", "outcome", "learning_rates"):
            assert here[fact] == there[fact], fact
        assert here["gradient_norm"] == pytest.approx(there["gradient_norm"], rel=1e-5)
    losses = [each["loss_per_item"] for each in evaluations]
    same_splits = [e for e in told(folder / "one")[1] if len(models) == 2 or e["split"] == "held_out"]
    assert losses == pytest.approx([each["loss_per_item"] for each in same_splits], rel=1e-6)


@pytest.mark.parametrize("stage", [1, 3])
def test_autocast_is_on_inside_the_engine(runs: Any, stage: int) -> None:
    folder, _ = runs
    (half, one, here) = (
        told(folder / name)[0][0]["loss_per_item"] for name in ("half", "one", f"half-{stage}")
    )
    assert abs(here - half) < 0.01 * abs(one - half)


# Checkpoints ----------------------------------------------------------------------------------------------


def contents(checkpoint: Path) -> dict[str, Any]:
    """Everything that a checkpoint says of model, optimizer and schedule, by place."""
    found: dict[str, Any] = {}

    def walk(value: Any, where: str) -> None:
        for key, one in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(one, dict | list):
                walk(one, f"{where}.{key}")
            else:
                found[f"{where}.{key}"] = one

    for name in ("model.pt", "optimizers.pt"):
        walk(torch.load(checkpoint / name, weights_only=True), name)
    return found


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """The places where two checkpoints are not the same to the last bit."""

    def same(here: Any, there: Any) -> bool:
        if isinstance(here, torch.Tensor) and isinstance(there, torch.Tensor):
            return here.dtype == there.dtype and torch.equal(here, there)
        return bool(here == there)

    return [name for name in one.keys() | other.keys() if not same(one.get(name), other.get(name))]


def dealt(rank: int, n: int, folder: str) -> dict[str, Any]:
    """A checkpoint loaded and saved by one stage after another; the run goes on from the last."""
    deepspeed, world, found = deepspeed_here(rank, n), World.of_all(), {}
    checkpoints = Checkpoints(f"{folder}/checkpoints", keep_last=9)
    first = contents(checkpoint_paths(checkpoints.folder)[0])
    assert sum("exp_avg_sq" in name for name in first) > 5
    for stage in (1, 3, 2, 0):
        window = make_window(built(tiny(folder, **sections_of(stage, {})), world))
        checkpoints.load(window)
        found[f"changed in stage {stage}"] = differing(first, contents(checkpoints.save(window)))
        if stage:
            found[f"misfits of stage {stage}"] = misfits(window)
    for stage in (1, 3):
        found[f"put back in stage {stage}"] = put_back(deepspeed, stage, rank, f"{folder}/put-back")
    onto = ["parallel.strategy=deepspeed", "parallel.zero_stage=3"]
    resumed(checkpoint_paths(checkpoints.folder)[-1], *onto, world=world)
    in_turn = {"zero": {"round_robin_gradients": True}}
    for name, mode, more in (("half", "bf16", {}), ("stale", "fp32", {}), ("in turn", "fp32", in_turn)):
        engine = start(deepspeed, config_of(2, mode, **more))
        found[name] = refused_save(engine, rank, folder, stale=name == "stale")
    return found


def put_back(deepspeed: Any, stage: int, rank: int, folder: str) -> dict[str, list[str]]:
    """What differs after a checkpoint of after the first update, and one of before, were loaded again."""
    case = case_of("equal, full")
    model = case.model().float()
    model.register_buffer("seen", torch.full((3,), 5.0))
    engine = start(deepspeed, config_of(stage), model=model, optimizer="AdamW")
    window = UpdateWindow(engine, engine.optimizer, case.objective())
    checkpoints, found = Checkpoints(f"{folder}/{stage}", keep_last=9), {}
    saved = [checkpoints.save(window)]
    window.run(case.batches()[rank % 2], loss_with(case.objective()))
    saved.append(checkpoints.save(window))
    for name, path in zip(("after", "before"), reversed(saved), strict=True):
        engine.module.seen.zero_()
        checkpoints.load(window, which=path)
        found[name] = differing(contents(path), contents(checkpoints.save(window)))
    window.run(case.batches()[rank % 2], loss_with(case.objective()))
    # DeepSpeed itself finds what the optimizer keeps since then
    deepspeed.utils.safe_get_full_optimizer_state(engine.module.head.weight, "exp_avg")
    return found


def misfits(window: UpdateWindow) -> list[str | None]:
    """What a stage says of a whole state that it could not hold."""
    optimizer = window._parts.ranks.as_of_one_rank(window.model, window.finish.optimizers)[1][0]
    said = [optimizer.misfit(optimizer.state_dict())]
    uneven = optimizer.state_dict()
    uneven["state"][1]["step"] += 1
    without = optimizer.state_dict()
    del without["state"][1]
    return [*said, optimizer.misfit(uneven), optimizer.misfit(without)]


def refused_save(engine: Any, rank: int, folder: str, *, stale: bool) -> str:
    """What is said of a save, where a gradient may be left over."""
    case = case_of("equal, full")
    window = UpdateWindow(engine, engine.optimizer, case.objective())
    if stale:
        engine.backward(loss_with(case.objective())(engine, case.batches()[rank % 2][0])[0])
    with pytest.raises(WholebatchError) as refusal:
        Checkpoints(f"{folder}/refused").save(window)
    return str(refusal.value)


def test_a_checkpoint_goes_through_every_stage_without_a_changed_bit(runs: Any, tmp_path: Path) -> None:
    folder, _ = runs
    shutil.copytree(folder / "ddp", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "update-00000010")
    for found in run_ranks(dealt, 3, str(tmp_path / "run"), timeout_s=150):
        for stage in range(4):
            assert found[f"changed in stage {stage}"] == []
        for stage in (1, 3):
            assert found[f"put back in stage {stage}"] == {"before": [], "after": []}
        for stage in (1, 2, 3):
            fits, uneven, without = found[f"misfits of stage {stage}"]
            assert fits is None
            assert "holds step = 5.0 of" in uneven
            assert "resume without ZeRO" in uneven
            assert "and [] of" in without
        assert (
            "Checkpoints holds a DeepSpeed engine in float32, and this one has parameters in bfloat16"
            in found["half"]
        )
        assert "the DeepSpeed engine holds a gradient, which a checkpoint does not" in found["stale"]
        assert 'DeepSpeed engine with "round_robin_gradients"' in found["in turn"]
    half_way = checkpoint_paths(folder / "zero-3" / "checkpoints")[0]
    resumed(half_way)  # on one rank, which needs no DeepSpeed
    for ended in (tmp_path / "run", folder / "zero-3"):
        assert largest_difference(written(folder / "true"), written(ended)) < rounding(folder, "model")
