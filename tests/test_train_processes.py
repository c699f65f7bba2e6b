"""The training job as a user starts it: one process or several, Ctrl-C, restarts, a model folder."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from jobs import write_own
from runs import write_tiny
from wholebatch.run_folder import read_run

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


@pytest.mark.parametrize("when", ["at once", "after an update"])
def test_a_pipe_that_is_closed_under_two_ranks_is_told_once_without_a_traceback(
    config: Path, tmp_path: Path, when: str
) -> None:
    process = begin(TWO_RANKS, config, tmp_path, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    if when == "after an update":
        wait_for_an_update(process)
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=60) == 1
    ours = [line for line in errors.splitlines() if "output was closed" in line]
    assert ours == ["stopped: the output was closed before the end"], errors
    assert "contact with another rank" not in errors
    assert "gloo" not in errors
    if when == "after an update":
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
        assert f"Saved after {len(run.records)} updates. To resume: wholebatch train --resume run" in output
        assert "Traceback" not in output


@pytest.mark.parametrize("bomb", [True, False])
def test_a_killed_rank_is_restarted_and_no_update_is_lost_or_twice(tmp_path: Path, bomb: bool) -> None:
    own = write_own(tmp_path)
    write_tiny(
        tmp_path,
        data={"source": f"{own}:data"},
        model={"source": f"{own}:model", "options": {"deadly": 6}, "layers": 0, "width": 0, "heads": 0},
        run={"num_updates": 4, "folder": "run"},
    )
    if bomb:
        (tmp_path / "bomb").touch()  # rank 1 dies in update 3; each rank has two forwards in an update
    start = [*TWO_RANKS[:6], "--max-restarts", "1", *TWO_RANKS[6:], "tiny.toml"]
    result = finish(start, tmp_path)
    assert result.returncode == 0, result.stderr
    assert not (tmp_path / "bomb").exists()
    run = read_run(tmp_path / "run")
    assert [r.updates_attempted for r in run.records] == [1, 2, 3, 4]
    assert sum(r.samples for r in run.records) == 32
    assert len({r.sample_digest for r in run.records}) == 4
    assert [e.updates_applied for e in run.evaluations] == [0, 2, 4]
    assert run.end is not None
    assert run.end.reason == "done"
    assert [each.updates_attempted for each in run.resumptions] == ([2] if bomb else [])
    assert result.stdout.count("Resumed run after 2 updates, 16 samples.") == bomb


def test_a_restart_does_not_resume_a_run_that_was_there_before(config: Path, tmp_path: Path) -> None:
    """The first start is refused because of it; the second is to be refused too."""
    assert finish([*ONE_RANK, str(config), *settings("run.folder=run")], tmp_path).returncode == 0
    before = (tmp_path / "run" / "records.jsonl").read_bytes()
    more = settings("run.folder=run", "run.num_updates=6")
    start = [*TWO_RANKS[:6], "--max-restarts", "1", *TWO_RANKS[6:], str(config), *more]
    result = finish(start, tmp_path)
    assert result.returncode == 1
    assert result.stderr.count("error: run folder run holds files already") == 2, "once in each start"
    assert "Resumed" not in result.stdout
    assert (tmp_path / "run" / "records.jsonl").read_bytes() == before


def test_restarts_need_a_folder(config: Path, tmp_path: Path) -> None:
    result = finish([*TWO_RANKS[:6], "--max-restarts", "1", *TWO_RANKS[6:], str(config)], tmp_path)
    assert result.returncode == 1
    assert "torchrun --max-restarts=1 may start this job again, and with run.folder empty" in result.stderr
    assert not (tmp_path / "runs").exists()


MAKE_LLAMA = """
import sys
from pathlib import Path
from test_train_data_tokens import build
from tiny_models import save_folder
folder = Path(sys.argv[1])
save_folder("llama", folder)
build(folder, eos_token="</s>", pad_token="<pad>")
"""


def test_a_model_folder_is_trained_from_the_command_line_alone(tmp_path: Path) -> None:
    """A tiny Llama with adapters, on prompts and completions; then gone on with; then loaded."""
    pytest.importorskip("peft")
    from safetensors.torch import load_file

    # In a process of its own, because transformers leaves a thread behind that shows progress.
    made = finish([sys.executable, "-c", MAKE_LLAMA, str(tmp_path / "llama")], Path(__file__).parent)
    assert made.returncode == 0, made.stderr
    words = ["one", "two", "three", "four", "five", "six"]
    rows = [
        {"prompt": f"{a} {b}", "completion": " ".join(words[n % 5 : n % 5 + 2])}
        for n, (a, b) in enumerate(itertools.product(words, words))
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = settings(
        *("data.source=jsonl", 'data.files=["rows.jsonl"]', "data.tokenizer=llama", "model.source=llama"),
        *("data.max_tokens_per_sample=16", "lora.rank=4", "batch.global_batch_samples=8"),
        *("batch.micro_batch_samples=2", "data.held_out_one_in=3", "optimizer.learning_rate=0.01"),
        *("run.folder=run", "run.num_updates=3", "run.print_every_updates=1"),
    )
    result = finish([*ONE_RANK, *changes], tmp_path)
    assert result.returncode == 0, result.stderr
    assert "4 micro-batches make the update of the big batch" in result.stdout
    assert "of them frozen, in float32" in result.stdout
    again = finish([*ONE_RANK, "--resume", "run", *settings("run.num_updates=5")], tmp_path)
    assert again.returncode == 0, again.stderr
    run = read_run(tmp_path / "run")
    assert [r.updates_attempted for r in run.records] == [1, 2, 3, 4, 5]
    assert run.evaluations[-1].loss_per_item < run.evaluations[0].loss_per_item
    folder = tmp_path / "run" / "model"
    assert (folder / "adapter_config.json").is_file()
    assert (folder / "tokenizer.json").is_file()
    trained = load_file(folder / "adapter_model.safetensors")
    assert any(value.abs().max() > 0 for name, value in trained.items() if "lora_B" in name)
