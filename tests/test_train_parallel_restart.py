"""A rank that holds a part of the model is killed: torchrun starts all again from the last checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jobs import newest_checkpoint, run, tiny, told, write_own
from ranks import run_ranks
from runs import write_tiny
from test_train_processes import TWO_RANKS, finish
from wholebatch.run_folder import read_run
from wholebatch.train.world import World

pytestmark = pytest.mark.slow

STAGES = {"strategy": "pipeline", "pipeline_parallel": 2}


def sections_of(own: str, parallel: dict[str, Any], deadly: int) -> dict[str, dict[str, Any]]:
    """A run of four updates of eight samples, of which the third kills rank 1."""
    return {
        "parallel": parallel,
        "data": {"source": f"{own}:data", "options": {"deadly": deadly}},
        "model": {"layers": 2},
    }


def undisturbed(rank: int, n: int, folder: str, cases: dict[str, Any]) -> None:  # noqa: ARG001
    world = World.of_all()
    for name, sections in cases.items():
        run(tiny(f"{folder}/{name}-whole", **sections), world)


def test_a_killed_rank_is_restarted_and_no_update_is_lost_or_twice(tmp_path: Path) -> None:
    own = write_own(tmp_path)
    cases = {  # each rank reads its replica's share
        "fsdp": sections_of(own, {"strategy": "fsdp"}, 10),
        "pipeline": sections_of(own, STAGES, 18),
    }
    run_ranks(undisturbed, 2, str(tmp_path), cases, timeout_s=180)
    for name, sections in cases.items():
        write_tiny(tmp_path, run={"folder": name}, **sections)
        (tmp_path / "bomb").touch()
        result = finish([*TWO_RANKS[:6], "--max-restarts", "1", *TWO_RANKS[6:], "tiny.toml"], tmp_path)
        assert result.returncode == 0, result.stderr
        assert not (tmp_path / "bomb").exists()
        killed, whole = tmp_path / name, tmp_path / f"{name}-whole"
        resumptions = read_run(killed).resumptions
        assert [each.updates_attempted for each in resumptions] == [2], name
        assert told(killed) == told(whole), name
        assert newest_checkpoint(killed) == newest_checkpoint(whole), name
