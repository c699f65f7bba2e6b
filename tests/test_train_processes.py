"""The training job as a user starts it: a process of its own, one or several ranks, and Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from runs import write_tiny
from wholebatch.run_reader import read_run

pytestmark = pytest.mark.slow

ONE_RANK = [sys.executable, "-m", "wholebatch", "train"]
TWO_RANKS = [
    *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
    *("-m", "wholebatch", "train"),
]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_tiny(tmp_path, proof={"check_first_batch": True})


def environment() -> dict[str, str]:
    """One thread for one rank, and no interface but loopback."""
    return os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo" if os.name == "posix" else ""}


def settings(*changes: str) -> list[str]:
    return [word for change in changes for word in ("--set", change)]


def begin(command: list[str], config: Path, cwd: Path, **options: Any) -> subprocess.Popen[str]:
    """A run that would go on for ever."""
    return subprocess.Popen(
        [*command, str(config), *settings("run.folder=run", "run.num_updates=100000")],
        cwd=cwd,
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
        **options,
    )


def wait_for_an_update(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("update "):
            break


def finish(command: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=150, check=False
    )


def test_one_process_and_torchrun_make_the_same_updates(config: Path, tmp_path: Path) -> None:
    one = finish([*ONE_RANK, str(config), *settings("run.folder=one")], tmp_path)
    assert one.returncode == 0, one.stderr
    two = finish([*TWO_RANKS, str(config), *settings("run.folder=two")], tmp_path)
    assert two.returncode == 0, two.stderr
    assert two.stdout.count("update    4/4") == 1, "only one rank prints"
    alone, shared = read_run(tmp_path / "one"), read_run(tmp_path / "two")
    assert (alone.header.replicas, shared.header.replicas) == (1, 2)
    digests = [record.sample_digest for record in alone.records]
    assert len(set(digests)) == 4
    assert digests == [record.sample_digest for record in shared.records]


def test_two_ranks_tell_a_shared_mistake_once_and_torchrun_ends_with_1(tmp_path: Path) -> None:
    (tmp_path / "typo.toml").write_text("[run]\nnum_update = 3\n")
    alone = finish([*ONE_RANK, "typo.toml"], tmp_path)
    assert alone.returncode == 2
    two = finish([*TWO_RANKS, "typo.toml"], tmp_path)
    assert two.returncode == 1, "docs/train.md says so"
    assert two.stderr.count("did you mean num_updates?") == 1
    assert "rank 1: error" not in two.stderr


def test_a_closed_pipe_ends_the_run_and_says_so(config: Path, tmp_path: Path) -> None:
    process = begin(ONE_RANK, config, tmp_path, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    wait_for_an_update(process)
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=60) == 141
    assert errors == "stopped: the output was closed before the end\n"
    end = read_run(tmp_path / "run").end
    assert end is not None
    assert end.reason == "interrupted"


def test_sigterm_leaves_a_readable_run(config: Path, tmp_path: Path) -> None:
    process = begin(ONE_RANK, config, tmp_path, stderr=subprocess.STDOUT)
    wait_for_an_update(process)
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 143, output
    run = read_run(tmp_path / "run")
    assert run.end is not None
    assert (run.end.reason, run.end.message) == ("interrupted", "stopped by SIGTERM")
    assert not run.torn_line
    assert run.records[-1].updates_attempted == len(run.records)


@pytest.mark.parametrize("ranks", [1, 2])
def test_ctrl_c_leaves_a_readable_run(config: Path, tmp_path: Path, ranks: int) -> None:
    """Ctrl-C in a terminal reaches every process of the group, so it is sent to the group."""
    start = ONE_RANK if ranks == 1 else TWO_RANKS
    process = begin(start, config, tmp_path, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        records = tmp_path / "run" / "records.jsonl"
        deadline = time.monotonic() + 120
        while not (records.exists() and records.read_bytes().count(b"\n") >= 3):
            assert time.monotonic() < deadline, "no update was recorded in time"
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    run = read_run(tmp_path / "run")
    assert run.end is not None, output
    assert run.end.reason == "interrupted"
    assert not run.torn_line
    assert run.records[-1].updates_attempted == len(run.records) >= 3
    assert run.evaluations[-1].updates_applied == len(run.records)
    if ranks == 1:  # torchrun answers with a code of its own
        assert process.returncode == 130
        assert "Interrupted between two updates; the records are complete up to there." in output
        assert f"Saved after {len(run.records)} updates. To go on: wholebatch train --resume run" in output
        assert "Traceback" not in output
