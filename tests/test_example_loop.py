"""The whole loop of the examples prints the same on one process, on several ranks and under torchrun."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from ranks import run_ranks

EXAMPLES = Path(__file__).parents[1] / "examples"
pytestmark = pytest.mark.slow


def printed(rank: int, ranks: int, script: str, *arguments: str) -> list[str]:
    """What the loop prints on this rank, forked: under torchrun each rank would import all by itself."""
    sys.path.insert(0, str(EXAMPLES))
    sys.argv = [script]
    os.environ.pop("RANK", None)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        if ranks == 1:
            runpy.run_module(script, run_name="__main__")
        else:
            os.environ["RANK"] = str(rank)
            importlib.import_module(script).main(ranks, rank, *arguments)
    return output.getvalue().splitlines()


def lines_of(ranks: int, script: str, *arguments: str) -> list[str]:
    first, *others = run_ranks(printed, ranks, script, *arguments)
    assert others == [[]] * (ranks - 1), "only one rank prints"
    return first


def under_torchrun(script: str) -> list[str]:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    command = [sys.executable, *launcher, str(EXAMPLES / f"{script}.py")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_loop_is_the_same_under_torchrun() -> None:
    alone = lines_of(1, "ddp_loop")
    assert len(alone) == 6
    assert alone[4].startswith("update 5: 2 samples, 6 items"), "50 samples by 12 leave a tail of 2"
    assert under_torchrun("ddp_loop") == alone
    # three ranks share the tail's two samples: one rank has none
    assert lines_of(3, "ddp_loop") == alone


def test_the_loop_is_the_same_when_it_is_sharded() -> None:
    costs, *alone = lines_of(1, "sharded_loop")
    assert costs.startswith("0 reductions")
    assert len(alone) == 6
    once, *held_back = under_torchrun("sharded_loop")
    assert once.startswith("1 reduction of gradients an update, 23.8 KiB reduced and 120.2 KiB gathered")
    assert held_back == alone
    # three ranks share the tail's two micro-batches: one runs another's, which weighs nothing
    each, *reduced_each_time = lines_of(3, "sharded_loop", "per_micro_batch")
    assert each.startswith("2 reductions of gradients an update")
    assert each.endswith("8.2 KiB of gradients held meanwhile")
    assert reduced_each_time == alone


def test_the_loop_is_the_same_in_stages_and_with_matrices_in_parts() -> None:
    costs, *alone = lines_of(1, "pipeline_loop")
    assert costs.endswith("of gradients held meanwhile")
    assert len(alone) == 6
    for costs, *shared in (under_torchrun("pipeline_loop"), lines_of(2, "pipeline_loop", "tensor")):
        assert costs.endswith("held meanwhile, and what forwards and backwards exchange, not counted")
        assert shared == alone
