"""The whole loop of the examples prints the same on one process and under torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


def lines_of(script: str, *launcher: str, arguments: Sequence[str] = ()) -> list[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, str(EXAMPLES / script), *arguments]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_the_loop_is_the_same_under_torchrun() -> None:
    alone = lines_of("ddp_loop.py")
    assert len(alone) == 6
    assert alone[4].startswith("update 5: 2 samples, 6 items"), "50 samples by 12 leave a tail of 2"
    # three ranks share the tail's two samples: one rank has none
    for ranks in ("2", "3"):
        assert lines_of("ddp_loop.py", *TORCHRUN, ranks) == alone


@pytest.mark.slow
def test_the_loop_is_the_same_when_it_is_sharded() -> None:
    costs, *alone = lines_of("sharded_loop.py")
    assert costs.startswith("0 reductions")
    assert len(alone) == 6
    once, *held_back = lines_of("sharded_loop.py", *TORCHRUN, "2")
    assert once.startswith("1 reduction of gradients an update, 23.8 KiB reduced and 120.2 KiB gathered")
    assert held_back == alone
    # three ranks share the tail's two micro-batches: one runs another's, which weighs nothing
    each, *reduced_each_time = lines_of("sharded_loop.py", *TORCHRUN, "3", arguments=["per_micro_batch"])
    assert each.startswith("2 reductions of gradients an update")
    assert each.endswith("8.2 KiB of gradients held meanwhile")
    assert reduced_each_time == alone


@pytest.mark.slow
def test_the_loop_is_the_same_in_stages_and_with_matrices_in_parts() -> None:
    costs, *alone = lines_of("pipeline_loop.py")
    assert costs.endswith("of gradients held meanwhile")
    assert len(alone) == 6
    for arguments in ([], ["tensor"]):
        costs, *shared = lines_of("pipeline_loop.py", *TORCHRUN, "2", arguments=arguments)
        assert costs.endswith("held meanwhile, and what forwards and backwards exchange, not counted")
        assert shared == alone
