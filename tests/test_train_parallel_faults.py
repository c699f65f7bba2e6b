"""Ranks that need each other for a forward, and one of them fails alone: all end soon, and say why."""

from __future__ import annotations

import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from jobs import Listener, built, on_forward, tiny, told
from ranks import run_ranks
from wholebatch.errors import UsageError
from wholebatch.ranks.pipeline_ranks import PipelineRanks
from wholebatch.ranks.several import ShardingRanks
from wholebatch.train.command import _refuse_other_settings
from wholebatch.train.data.store import TokenSamples
from wholebatch.train.job import run_job
from wholebatch.train.world import World

pytestmark = pytest.mark.slow


def fails_alone(rank: int, _n: int, folder: str, parallel: dict[str, Any], training: bool) -> Any:
    """How each rank ends when the model of rank 1 fails: its error, its notes and the seconds it took."""
    ShardingRanks.patience_s = PipelineRanks.patience_s = 2.0
    job = built(tiny(folder, parallel=parallel, model={"layers": 4}), World.of_all())

    def fail() -> None:
        raise torch.OutOfMemoryError("no more") if training else ValueError("a bad forward")

    if rank == 1:
        # A schedule runs stages and not the whole, of which block 2 is in one of rank 1's.
        at = job.model.module.blocks[2 if parallel["strategy"] == "pipeline" else 0]

        def count(module: torch.nn.Module, _: Any) -> None:
            if module.training == training:
                fail()

        at.register_forward_pre_hook(count)
    began = time.monotonic()
    try:
        run_job(job, Listener(job.config))
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - began, getattr(error, "__notes__", [])
    return "nothing", "", 0.0, []


@pytest.mark.parametrize("strategy", ["fsdp", "pipeline"])
def test_a_rank_that_fails_in_an_evaluation_is_named_by_the_others(tmp_path: Path, strategy: str) -> None:
    folder = str(tmp_path / "run")
    outcomes = run_ranks(fails_alone, 2, folder, {"strategy": strategy}, False, expect="outcomes")
    (alone, words, seconds, _), (own, said, *_) = (outcome[1] for outcome in outcomes)
    assert alone == "ContactLostError"
    why = "rank 1 failed in an evaluation: ValueError: a bad forward"
    assert f"contact with another rank was lost in an evaluation: {why}" in words
    assert seconds < 20
    assert "a bad forward" in said
    assert own == "ValueError"


def test_a_rank_that_fails_in_an_update_is_named_by_the_others(tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    outcomes = run_ranks(fails_alone, 2, folder, {"strategy": "fsdp"}, True, expect="outcomes")
    (alone, words, seconds, _), (_, said, *_) = (outcome[1] for outcome in outcomes)
    assert alone == "PoisonedWindowError"
    assert "rank 1 failed in update" in words
    assert "OutOfMemoryError: no more" in words
    assert "restart from the last committed update" in words
    assert seconds < 20
    assert said.startswith("memory ran out in an update")


def refused(rank: int, _n: int, folder: str) -> list[tuple[str, str]]:
    """What ranks say that differ before the first update; the group stays whole."""
    world, said = World.of_all(), []

    def attempt(name: str, act: Any = None, **sections: Any) -> None:
        try:
            job = built(tiny(f"{folder}/{name}", parallel={"strategy": "fsdp"}, **sections), world)
            if act is not None and rank == 1:
                act(job)
            run_job(job, Listener(job.config))
        except Exception as error:
            said.append((type(error).__name__, str(error)))
        else:
            said.append(("nothing", ""))

    text = Path(folder) / f"{rank}.txt"
    text.write_text("\n\n".join(f"words {number}" for number in range(40 - rank)) + "\n")
    attempt("data", data={"source": "text", "files": [str(text)]})
    proof = {"proof": {"check_first_batch": True}}

    def fail() -> None:
        raise MemoryError("no more")

    torn = mock.patch.object(TokenSamples, "__getitem__", side_effect=OSError(5, "Input/output error"))
    with torn if rank == 1 else nullcontext():
        attempt("sample", **proof)
    attempt("forward", lambda job: on_forward(job, 2, fail), **proof)
    try:
        config = tiny(f"{folder}/settings", optimizer={"learning_rate": 0.1 * (1 + rank)})
        _refuse_other_settings(config, world)
    except UsageError as error:
        said.append((type(error).__name__, str(error)))
    attempt("well", **proof)
    return said


def test_ranks_that_differ_before_the_first_update_end_together(tmp_path: Path) -> None:
    for data, sample, forward, settings, well in run_ranks(refused, 2, str(tmp_path), timeout_s=90):
        assert data[0] == "UsageError"
        assert "the ranks read different data: train_" in data[1]
        assert "on rank 1, and" in data[1]
        assert sample[0] == "JudgeError"
        assert "Input/output error" in sample[1]
        assert forward[0] == "SomeRanksFailedError"
        assert "on rank 1: the whole batch's update failed with MemoryError: no more" in forward[1]
        assert settings == (
            "UsageError",
            "the ranks have different settings: optimizer.learning_rate is 0.2 on rank 1, and 0.1 on "
            "rank 0; start all of them with the same file and the same --set",
        )
        assert well == ("nothing", "")
    assert len(told(tmp_path / "well")[0]) == 4
