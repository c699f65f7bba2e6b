"""The whole loop of the examples prints the same on one process and under torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

LOOP = Path(__file__).parents[1] / "examples" / "ddp_loop.py"


def lines_of(*launcher: str) -> list[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, str(LOOP)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_the_loop_is_the_same_under_torchrun() -> None:
    alone = lines_of()
    assert len(alone) == 6
    assert alone[4].startswith("update 5: 2 samples, 6 items"), "50 samples by 12 leave a tail of 2"
    # three ranks share the tail's two samples: one rank has none
    for ranks in ("2", "3"):
        together = lines_of("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks)
        assert together == alone
