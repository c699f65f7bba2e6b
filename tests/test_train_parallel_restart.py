"""A rank that holds a part of the model is killed: torchrun starts all again from the last checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs import write_own
from runs import write_tiny
from test_train_processes import TWO_RANKS, finish
from wholebatch.run_folder import read_run

pytestmark = pytest.mark.slow


def test_a_killed_rank_is_restarted_and_no_update_is_lost_or_twice(tmp_path: Path) -> None:
    own = write_own(tmp_path)
    write_tiny(
        tmp_path,
        parallel={"strategy": "fsdp"},
        data={"source": f"{own}:data"},
        model={"source": f"{own}:model", "options": {"deadly": 6}, "layers": 0, "width": 0, "heads": 0},
        run={"num_updates": 4, "folder": "run"},
    )
    start = [*TWO_RANKS[:6], "--max-restarts", "1", *TWO_RANKS[6:], "tiny.toml"]
    for bomb in (True, False):
        if bomb:
            (tmp_path / "bomb").touch()  # rank 1 dies in update 3; each rank has two forwards in an update
        result = finish(start, tmp_path)
        assert result.returncode == 0, result.stderr
        run = read_run(tmp_path / "run")
        assert [r.updates_attempted for r in run.records] == [1, 2, 3, 4]
        assert [e.updates_applied for e in run.evaluations] == [0, 2, 4]
        assert run.end is not None
        assert run.end.reason == "done"
        assert [each.updates_attempted for each in run.resumptions] == ([2] if bomb else [])
        (tmp_path / "run").rename(tmp_path / f"run-{bomb}")
    killed, whole = (read_run(tmp_path / f"run-{bomb}").records for bomb in (True, False))
    for name in ("sample_digest", "loss_per_item", "gradient_norm", "items"):
        assert [getattr(r, name) for r in killed] == [getattr(r, name) for r in whole], name
