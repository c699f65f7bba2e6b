"""How a run ends: on an edge between two updates, saved there, and with nothing lost or twice."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import math
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from jobs import (
    Listener,
    after_update,
    built,
    checkpoint_names,
    differing,
    largest_difference,
    on_forward,
    parameters,
    resumed,
    run,
    saved,
    tiny,
    told,
    write_own,
)
from ranks import run_ranks
from wholebatch import checkpoint_folder as disk
from wholebatch.errors import CheckpointError, JudgeError, RecordError
from wholebatch.objective import counted_loss
from wholebatch.record import Evaluation, UpdateRecord
from wholebatch.report.output import OutputClosedError
from wholebatch.run_folder import RunLog, read_run
from wholebatch.train import signals
from wholebatch.train.advice import with_the_command
from wholebatch.train.config import TrainConfig, config_from_dict
from wholebatch.train.job import JobResult, run_job
from wholebatch.train.signals import Stop, stop_on_signal
from wholebatch.train.training import MOST_SKIPS_IN_A_ROW, Training
from wholebatch.train.world import join_world

# With dropout a run that was rolled back wrongly draws other numbers, and is seen to.
DROPOUT = {"model": {"dropout": 0.2}, "run": {"evaluate_every_updates": 10}}


def end_of(folder: Path) -> tuple[str | None, str | None]:
    end = read_run(folder).end
    return (None, None) if end is None else (end.reason, end.message)


def goes_on_as_if_nothing_had_happened(folder: Path, config: TrainConfig, beside: Path) -> None:
    """Resume the run, and compare it bit for bit with one that never ended."""
    result, _, _ = resumed(folder)
    assert result == JobResult(exit_code=0, folder=folder)
    run(dataclasses.replace(config, run=dataclasses.replace(config.run, folder=str(beside))))
    assert told(folder)[0] == told(beside)[0]
    last = config.run.num_updates
    assert differing(saved(folder, last), saved(beside, last)) == []


# Ctrl-C and SIGTERM


def test_the_first_ctrl_c_ends_after_a_whole_update(tmp_path: Path) -> None:
    config = tiny(tmp_path / "run", **DROPOUT)
    job = built(config)
    on_forward(job, 6, lambda: signal.raise_signal(signal.SIGINT))
    found = signal.getsignal(signal.SIGINT)
    display = Listener(config)
    assert run_job(job, display) == JobResult(exit_code=130, folder=tmp_path / "run")
    assert signal.getsignal(signal.SIGINT) is found
    written = read_run(tmp_path / "run")
    assert len(written.records) == 2
    assert not written.torn_line
    assert [e.updates_applied for e in written.evaluations] == [0, 2]
    assert end_of(tmp_path / "run") == ("interrupted", "stopped from the keyboard")
    assert checkpoint_names(tmp_path / "run")[-1] == "update-00000002"
    how = f"Saved after 2 updates. To resume: wholebatch train --resume {tmp_path / 'run'}"
    assert how in display.words.getvalue()
    goes_on_as_if_nothing_had_happened(tmp_path / "run", config, tmp_path / "beside")


@pytest.mark.parametrize(
    ("ranks", "here", "program"),
    [
        (None, None, "wholebatch"),
        (1, 1, "wholebatch"),
        (4, 4, "torchrun --nproc-per-node 4 -m wholebatch"),
        (16, 8, "torchrun --nnodes 2 --nproc-per-node 8 -m wholebatch"),
    ],
)
def test_what_is_to_be_typed_starts_as_many_ranks_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int | None, here: int | None, program: str
) -> None:
    for name, value in (("WORLD_SIZE", ranks), ("LOCAL_WORLD_SIZE", here)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, str(value))
    told = CheckpointError("it is damaged")
    told.newest_intact = tmp_path / "update-00000002"
    assert str(with_the_command(told)).endswith(f": {program} train --resume {told.newest_intact}")


def test_the_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    config = tiny(tmp_path / "run", **DROPOUT)
    job = built(config)

    def interrupt_twice() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    on_forward(job, 10, interrupt_twice)
    with pytest.raises(KeyboardInterrupt):
        run_job(job, Listener(config))
    assert end_of(tmp_path / "run")[0] == "interrupted"
    assert len(read_run(tmp_path / "run").records) == 2
    goes_on_as_if_nothing_had_happened(tmp_path / "run", config, tmp_path / "beside")


@pytest.mark.parametrize(("grace_s", "updates"), [(1e9, 3), (0.0, 2)])
def test_sigterm_finishes_an_update_or_rolls_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grace_s: float, updates: int
) -> None:
    # Where nobody handles it the signal would end the test run itself.
    monkeypatch.setattr(signal, "SIGTERM", signal.SIGUSR1)
    monkeypatch.setattr(signals, "GRACE_S", grace_s)
    config = tiny(tmp_path / "run", **DROPOUT)
    job = built(config)

    def terminate() -> None:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)  # torchrun passes on what all have had already

    on_forward(job, 10, terminate)  # in update 3
    found = signal.getsignal(signal.SIGTERM)
    assert run_job(job, Listener(config)) == JobResult(exit_code=143, folder=tmp_path / "run")
    assert signal.getsignal(signal.SIGTERM) is found
    written = read_run(tmp_path / "run")
    assert [r.updates_attempted for r in written.records] == list(range(1, updates + 1))
    assert [e.updates_applied for e in written.evaluations] == ([0, 3] if updates == 3 else [0])
    assert checkpoint_names(tmp_path / "run")[-1] == f"update-{updates:08d}"
    assert end_of(tmp_path / "run") == ("interrupted", "stopped by SIGTERM")
    goes_on_as_if_nothing_had_happened(tmp_path / "run", config, tmp_path / "beside")


def test_an_evaluation_is_left_where_sigterm_gives_no_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signal, "SIGTERM", signal.SIGUSR1)
    monkeypatch.setattr(signals, "GRACE_S", 0.0)
    config = tiny(tmp_path / "run", model={"dropout": 0.2})  # evaluates after 2 updates
    job = built(config)
    on_forward(job, 6, lambda: signal.raise_signal(signal.SIGTERM), training=False)  # of 4 each
    assert run_job(job, Listener(config)).exit_code == 143
    written = read_run(tmp_path / "run")
    assert len(written.records) == 2
    assert [e.updates_applied for e in written.evaluations] == [0]
    assert checkpoint_names(tmp_path / "run")[-1] == "update-00000002"
    goes_on_as_if_nothing_had_happened(tmp_path / "run", config, tmp_path / "beside")


def test_a_closed_terminal_ends_a_run_like_sigterm(tmp_path: Path) -> None:
    config = tiny(tmp_path / "run")
    display = Listener(config, after=after_update(2, lambda: signal.raise_signal(signal.SIGHUP)))
    found = signal.signal(signal.SIGHUP, lambda *_: None)  # else a failure here would end the test run
    try:
        assert run_job(built(config), display).exit_code == 129
        assert end_of(tmp_path / "run") == ("interrupted", "stopped by SIGHUP")
        assert checkpoint_names(tmp_path / "run")[-1] == "update-00000002"
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with stop_on_signal() as stop:
            signal.raise_signal(signal.SIGHUP)
        assert not stop.asked, "nohup"
    finally:
        signal.signal(signal.SIGHUP, found)


@pytest.fixture
def ctrl_c_as_in_a_terminal() -> Iterator[None]:
    """A job that a script puts in the background has SIGINT ignored, and so has what it starts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c_as_in_a_terminal")
def test_signals_before_the_first_update_do_what_they_did(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(signals, "os", SimpleNamespace(getpid=lambda: 7, kill=lambda *to: sent.append(to)))
    with stop_on_signal(on_edges=False) as stop, pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    with stop_on_signal(on_edges=False) as stop:
        signal.raise_signal(signal.SIGTERM)
        assert sent == [(7, signal.SIGTERM)]
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert not stop.asked


def test_a_second_sigterm_after_the_run_has_ended_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signal, "SIGTERM", signal.SIGUSR1)
    config = tiny(tmp_path / "run")
    display = Listener(config, after=after_update(2, lambda: signal.raise_signal(signal.SIGTERM)))
    with stop_on_signal(on_edges=False) as stop:
        result = run_job(built(config), display, stop=stop)
        signal.raise_signal(signal.SIGTERM)
    assert result.exit_code == 143


def test_an_interrupt_at_once_says_how_to_resume(tmp_path: Path) -> None:
    config = tiny(tmp_path / "run")

    def twice() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    display = Listener(config, after=after_update(3, twice))
    with pytest.raises(KeyboardInterrupt):
        run_job(built(config), display)
    assert display.words.getvalue().endswith(
        f"Interrupted at once: what was under way is lost, and was not saved.\n"
        f"Saved after 2 updates. To resume: wholebatch train --resume {tmp_path / 'run'}\n"
    )


def terminated_rank(rank: int, _n: int, tables: dict[str, Any], grace_s: float) -> int:
    """Rank 1 alone gets the signal, in update 3."""
    signals.GRACE_S = grace_s
    config = config_from_dict(tables)
    with join_world() as world:
        job = built(config, world)
        if rank == 1:
            on_forward(job, 10 // 2, lambda: signal.raise_signal(signal.SIGTERM))
        return run_job(job, Listener(config)).exit_code


@pytest.mark.slow
@pytest.mark.parametrize(("grace_s", "updates"), [(1e9, 3), (0.0, 2)])
def test_ranks_leave_an_update_together(tmp_path: Path, grace_s: float, updates: int) -> None:
    config = tiny(tmp_path / "run", **DROPOUT)
    assert run_ranks(terminated_rank, 2, config.to_dict(), grace_s) == [143, 143]
    assert len(read_run(tmp_path / "run").records) == updates
    assert checkpoint_names(tmp_path / "run")[-1] == f"update-{updates:08d}"
    assert end_of(tmp_path / "run") == ("interrupted", "stopped by SIGTERM")


def interrupted_rank(rank: int, _n: int, tables: dict[str, Any]) -> int:
    config = config_from_dict(tables)
    act = after_update(2, lambda: signal.raise_signal(signal.SIGINT)) if rank == 1 else None
    with join_world() as world:
        return run_job(built(config, world), Listener(config, after=act)).exit_code


@pytest.mark.slow
def test_ctrl_c_on_one_rank_ends_both_after_the_same_update(tmp_path: Path) -> None:
    config = tiny(tmp_path / "run")
    assert run_ranks(interrupted_rank, 2, config.to_dict()) == [130, 130]
    assert len(read_run(tmp_path / "run").records) == 2


def test_a_stop_is_in_a_hurry_only_some_time_after_sigterm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "monotonic", lambda: 105.5)
    assert not Stop(asked=True).in_a_hurry
    assert not Stop(asked=True).terminated
    assert not Stop(asked=True, terminated_at=101.0).in_a_hurry
    assert Stop(asked=True, terminated_at=100.0).in_a_hurry
    with stop_on_signal() as stop:
        assert (stop.asked, stop.terminated) == (False, False)


# What is not a wish


def test_a_closed_output_ends_the_run_as_interrupted_and_saved(tmp_path: Path) -> None:
    config = tiny(tmp_path / "run", **DROPOUT)

    def close() -> None:
        raise OutputClosedError("the output was closed before the end")

    with pytest.raises(OutputClosedError):
        run_job(built(config), Listener(config, after=after_update(3, close)))
    assert len(read_run(tmp_path / "run").records) == 3
    assert end_of(tmp_path / "run") == ("interrupted", "the output was closed before the end")
    assert checkpoint_names(tmp_path / "run")[-1] == "update-00000003"
    goes_on_as_if_nothing_had_happened(tmp_path / "run", config, tmp_path / "beside")


def test_an_output_that_closes_in_an_evaluation_ends_after_the_next_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def close(_display: Listener, evaluation: Evaluation) -> None:
        if evaluation.updates_applied == 2:
            raise OutputClosedError("the output was closed before the end")

    monkeypatch.setattr(Listener, "evaluated", close)
    with pytest.raises(OutputClosedError):
        run(tiny(tmp_path / "run"))
    assert len(read_run(tmp_path / "run").records) == 3
    assert checkpoint_names(tmp_path / "run")[-1] == "update-00000003"


def nan_loss(output: Tensor, _batch: Any) -> tuple[Tensor, int]:
    return output.float().sum() * math.nan, 1


def test_a_loss_that_is_never_finite_ends_the_run(tmp_path: Path) -> None:
    config = tiny(tmp_path / "run", run={"num_updates": 50}, checkpoints={"every_updates": 50})
    job = built(config)
    objective = counted_loss(nan_loss, count=lambda _: 1)
    job = dataclasses.replace(job, data=dataclasses.replace(job.data, objective=objective))
    before = parameters(job)
    display = Listener(config)
    with pytest.raises(JudgeError, match=f"the last {MOST_SKIPS_IN_A_ROW} updates were all skipped"):
        run_job(job, display)
    written = read_run(tmp_path / "run")
    assert {r.outcome for r in written.records} == {"skipped_nonfinite"}
    assert len(written.records) == MOST_SKIPS_IN_A_ROW
    assert end_of(tmp_path / "run")[0] == "failed"
    assert largest_difference(parameters(job), before) == 0.0
    assert "update 1 was skipped" in display.words.getvalue()
    assert checkpoint_names(tmp_path / "run") == ["update-00000000", "update-00000010"]
    assert (
        saved(tmp_path / "run", 10)["rest.pt"]["plain"]["skipped_updates_in_a_row"] == MOST_SKIPS_IN_A_ROW
    )


def test_skips_that_halve_a_loss_scale_do_not_end_the_run(tmp_path: Path) -> None:
    """A scale of 2^32 overflows more often in a row than other updates may be skipped."""
    scaled = {"parameters": "float32", "autocast": "float16", "initial_loss_scale": 2.0**32}
    config = tiny(tmp_path / "run", run={"num_updates": 30}, precision=scaled)
    run_job(built(config), Listener(config))
    records = read_run(tmp_path / "run").records
    # Later ones, where the scale is just low enough for most updates, are another thing.
    skipped = list(itertools.takewhile(lambda record: record.outcome == "skipped_nonfinite", records))
    assert len(skipped) > MOST_SKIPS_IN_A_ROW, "the scale was not too high for long, so nothing is shown"
    assert [record.updates_attempted for record in skipped] == list(range(1, len(skipped) + 1))
    assert [record.loss_scale for record in skipped] == [2.0 ** (32 - n) for n in range(len(skipped))]
    assert records[-1].outcome == "applied"


def test_a_loss_that_is_never_finite_ends_a_run_with_a_loss_scale_too(tmp_path: Path) -> None:
    scaled = {"parameters": "float32", "autocast": "float16", "initial_loss_scale": 4.0}
    config = tiny(tmp_path / "run", run={"num_updates": 50}, precision=scaled)
    job = built(config)
    objective = counted_loss(nan_loss, count=lambda _: 1)
    job = dataclasses.replace(job, data=dataclasses.replace(job.data, objective=objective))
    with pytest.raises(JudgeError, match=f"the last {MOST_SKIPS_IN_A_ROW} updates were all skipped"):
        run_job(job, Listener(config))
    scales = [record.loss_scale for record in read_run(tmp_path / "run").records]
    assert scales[:3] == [4.0, 2.0, 1.0]
    assert len(scales) == 2 + MOST_SKIPS_IN_A_ROW


def own_job(tmp_path: Path, **sections: dict[str, Any]) -> TrainConfig:
    own = write_own(tmp_path)
    data = {"source": f"{own}:data", "options": {"torn": str(tmp_path / "torn")}}
    return tiny(tmp_path / "run", data=data | sections.pop("data", {}), **sections)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_that_cannot_be_read_leaves_a_run_that_goes_on(tmp_path: Path, workers: int) -> None:
    config = own_job(tmp_path, **DROPOUT, data={"workers": workers})
    job = built(config)
    bad = job.order.global_batch(16)[5]  # in update 3, micro-batch 3
    (tmp_path / "torn").write_text(str(bad))
    display = Listener(config)
    with pytest.raises(JudgeError, match=f"reading sample {bad} failed with ValueError.*{bad} is torn"):
        run_job(job, display)
    assert len(read_run(tmp_path / "run").records) == 2
    assert checkpoint_names(tmp_path / "run")[-1] == "update-00000002"
    assert end_of(tmp_path / "run")[0] == "failed"
    assert "Saved after 2 updates. To resume: " in display.words.getvalue()
    (tmp_path / "torn").unlink()
    goes_on_as_if_nothing_had_happened(tmp_path / "run", config, tmp_path / "beside")


@pytest.mark.parametrize(
    ("m", "error", "advice"),
    [
        (
            2,
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
            "memory ran out in an update with 2 samples in a micro-batch; set "
            "batch.micro_batch_samples to 1, which changes neither the global batch nor the update, or "
            "turn model.activation_checkpointing on",
        ),
        (4, torch.OutOfMemoryError("CUDA out of memory"), "4 samples in a micro-batch; set .* to 2, which"),
        (
            1,
            MemoryError(),
            "ran out in an update with 1 sample in a micro-batch; lower data.max_tokens_per_sample, or",
        ),
    ],
)
def test_where_memory_runs_out_the_advice_keeps_the_global_batch(
    tmp_path: Path, m: int, error: Exception, advice: str
) -> None:
    config = tiny(tmp_path / "run", batch={"micro_batch_samples": m}, checkpoints={"every_updates": 50})
    job = built(config)

    def fail() -> None:
        raise error

    on_forward(job, 2 * 8 // m + 1, fail)  # the first of update 3
    with pytest.raises(JudgeError, match=advice) as caught:
        run_job(job, Listener(config))
    assert caught.value.__cause__ is error
    assert checkpoint_names(tmp_path / "run") == ["update-00000000", "update-00000002"]
    if m == 2:
        run(tiny(tmp_path / "beside"))
        resumed(tmp_path / "run", "batch.micro_batch_samples=1")
        digests = [
            [r.sample_digest for r in read_run(tmp_path / name).records] for name in ("run", "beside")
        ]
        assert digests[0] == digests[1]


def test_another_error_is_told_as_it_is(tmp_path: Path) -> None:
    config = tiny(tmp_path / "run")
    job = built(config)

    def fail() -> None:
        raise RuntimeError("shapes do not match")

    on_forward(job, 5, fail)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        run_job(job, Listener(config))
    assert checkpoint_names(tmp_path / "run")[-1] == "update-00000001"


def full_after(monkeypatch: pytest.MonkeyPatch, files: int) -> None:
    """Let the disk be full after so many files of checkpoints."""
    written = 0
    real = disk.write_file

    def write(path: Path, how: Any) -> dict[str, Any]:
        nonlocal written
        written += 1
        if written > files:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(path, how)

    monkeypatch.setattr(disk, "write_file", write)


def test_a_checkpoint_that_finds_no_room_ends_the_run_with_those_before_intact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny(tmp_path / "run", **DROPOUT)
    with monkeypatch.context() as patched:
        full_after(patched, 4 + 4 + 2)  # those of update 0 and 2, and half of those of update 4
        display = Listener(config)
        with pytest.raises(CheckpointError, match="No space left on device") as caught:
            run_job(built(config), display)
    assert caught.value.exit_code == 3
    assert checkpoint_names(tmp_path / "run") == ["update-00000000", "update-00000002"]
    assert "Saved after 2 updates. To resume: " in display.words.getvalue()
    assert end_of(tmp_path / "run")[0] == "failed"
    goes_on_as_if_nothing_had_happened(tmp_path / "run", config, tmp_path / "beside")


def test_a_folder_that_takes_no_checkpoint_is_found_out_before_the_first_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny(tmp_path / "run", **DROPOUT)
    display = Listener(config)
    with monkeypatch.context() as patched:
        full_after(patched, 0)
        with pytest.raises(CheckpointError, match="No space left on device"):
            run_job(built(config), display)
    assert read_run(tmp_path / "run").records == []
    how = f"It has no update yet. To begin it again: wholebatch train --resume {tmp_path / 'run'}"
    assert how in display.words.getvalue()
    goes_on_as_if_nothing_had_happened(tmp_path / "run", config, tmp_path / "beside")


def test_an_update_that_failed_and_cannot_be_saved_says_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny(tmp_path / "run")
    job = built(config)

    def fail() -> None:
        full_after(monkeypatch, 0)
        raise RuntimeError("shapes do not match")

    on_forward(job, 5, fail)
    with pytest.raises(RuntimeError, match="shapes do not match") as caught:
        run_job(job, Listener(config))
    assert "the run could not be saved either" in "".join(caught.value.__notes__)
    assert checkpoint_names(tmp_path / "run") == ["update-00000000"]


def test_records_that_do_not_reach_the_disk_get_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = RunLog.sync

    def sync(log: RunLog) -> None:
        if len(read_run(log.folder).records) == 2:
            raise RecordError("the disk is full")
        real(log)

    monkeypatch.setattr(RunLog, "sync", sync)
    with pytest.raises(RecordError, match="the disk is full"):
        run(tiny(tmp_path / "run"))
    assert checkpoint_names(tmp_path / "run") == ["update-00000000"]


def unwritten_rank(rank: int, _n: int, tables: dict[str, Any], what: str) -> None:
    """The leading rank can't write a record after update 2, or the evaluation there."""
    real: Callable[[RunLog, Any], None] = getattr(RunLog, what)

    def write(log: RunLog, line: UpdateRecord | Evaluation) -> None:
        assert rank == 0
        if line.updates_applied == 2:
            raise RecordError("records.jsonl can't be written: no room")
        real(log, line)

    setattr(RunLog, what, write)
    config = config_from_dict(tables)
    with join_world() as world:
        run_job(built(config, world), Listener(config))


@pytest.mark.slow
@pytest.mark.parametrize(("what", "other"), [("write", "RecordError"), ("write_evaluation", "RecordError")])
def test_a_log_that_cannot_be_written_ends_both_ranks(tmp_path: Path, what: str, other: str) -> None:
    tables = tiny(tmp_path / "run").to_dict()
    first, second = run_ranks(unwritten_rank, 2, tables, what, timeout_s=40, expect="outcomes")
    assert first[:2] == ("error", "RecordError")
    assert second[:2] == ("error", other)
    assert "no room" in first[2]
    assert checkpoint_names(tmp_path / "run") == ["update-00000000"]


# An evaluation that fails, and one more of them


EVALUATES_AT_RANDOM = """
import torch
from torch import nn

class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20))

    def forward(self, tokens):
        output = self.inside(tokens)
        return output + 0.01 * torch.randn_like(output)

def model():
    return Noisy()
"""


def test_one_more_evaluation_changes_nothing_that_is_trained(tmp_path: Path) -> None:
    """Ctrl-C adds one, and a model of one's own may draw random numbers in it."""
    (tmp_path / "noisy.py").write_text(EVALUATES_AT_RANDOM)
    sections: dict[str, Any] = {
        "data": {"source": f"{write_own(tmp_path)}:data"},
        "model": {"source": f"{tmp_path / 'noisy.py'}:model", "layers": 0, "width": 0, "heads": 0},
        "run": {"num_updates": 4, "evaluate_every_updates": 4},
        "checkpoints": {"every_updates": 4},
    }
    _, whole, _ = run(tiny(tmp_path / "whole", **sections))
    config = tiny(tmp_path / "run", **sections)
    display = Listener(config, after=after_update(2, lambda: signal.raise_signal(signal.SIGINT)))
    assert run_job(built(config), display).exit_code == 130
    _, parts, _ = resumed(tmp_path / "run")
    assert largest_difference(parameters(whole), parameters(parts)) == 0.0


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (ValueError("mine"), ValueError, "^mine$"),
        (
            torch.OutOfMemoryError("CUDA out of memory"),
            JudgeError,
            "memory ran out in an evaluation with 2 samples in a micro-batch; set .* to 1, which changes "
            "neither the global batch nor the update$",
        ),
    ],
)
def test_an_evaluation_that_fails_ends_a_run_that_is_saved(
    tmp_path: Path, error: Exception, kind: type[Exception], words: str
) -> None:
    config = tiny(tmp_path / "run", checkpoints={"every_updates": 50}, average={"decay_per_update": 0.5})
    job = built(config)

    def fail() -> None:
        raise error

    on_forward(job, 13, fail, training=False)  # in the evaluation of the average, after update 2
    display = Listener(config)
    with pytest.raises(kind, match=words):
        run_job(job, display)
    assert checkpoint_names(tmp_path / "run") == ["update-00000000", "update-00000002"]
    assert "Saved after 2 updates. To resume: " in display.words.getvalue()
    assert job.model.module.training
    resumed(tmp_path / "run")
    beside = tiny(tmp_path / "beside", average={"decay_per_update": 0.5})
    run(beside)
    assert told(tmp_path / "run")[0] == told(tmp_path / "beside")[0]


def failing_evaluation(rank: int, _n: int, tables: dict[str, Any]) -> None:
    config = config_from_dict(tables)
    with join_world() as world:
        job = built(config, world)

        def fail() -> None:
            raise ValueError("mine")

        if rank == 1:
            on_forward(job, 3, fail, training=False)  # of 2 in each evaluation
        run_job(job, Listener(config))


@pytest.mark.slow
def test_an_evaluation_that_fails_on_one_rank_is_saved_by_both(tmp_path: Path) -> None:
    tables = tiny(tmp_path / "run", checkpoints={"every_updates": 50}).to_dict()
    first, second = run_ranks(failing_evaluation, 2, tables, timeout_s=40, expect="outcomes")
    assert first == ("error", "JudgeError", "rank 1 failed between two updates: ValueError: mine")
    assert second[:2] == ("error", "ValueError")
    assert checkpoint_names(tmp_path / "run") == ["update-00000000", "update-00000002"]


# What fails on the leading rank alone


class Breaks(Listener):
    """A display of which one method fails on the leading rank."""

    def __init__(self, config: TrainConfig, what: str, error: Exception | None) -> None:
        super().__init__(config)
        self.what, self.error = what, error

    def say(self, text: str) -> None:
        if self.error is not None and text.startswith(self.what):
            raise self.error
        super().say(text)


def breaking(rank: int, _n: int, tables: dict[str, Any], what: str, error: Exception) -> None:
    config = config_from_dict(tables)
    with join_world() as world:
        run_job(built(config, world), Breaks(config, what, error if rank == 0 else None))


CLOSED = OutputClosedError("the output was closed before the end")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "updates", "end"),
    [
        ("One update", None, None),
        ("Records go to", 0, "interrupted"),
        ("held out after 0 updates", 1, "interrupted"),
        ("update    2/4", 2, "interrupted"),
        ("The trained model", 4, "interrupted"),
        ("To look at it", 4, "done"),
    ],
)
def test_an_output_that_is_closed_ends_all_ranks_alike(
    tmp_path: Path, what: str, updates: int | None, end: str | None
) -> None:
    tables = tiny(tmp_path / "run", run={"print_every_updates": 1}).to_dict()
    first, second = run_ranks(breaking, 2, tables, what, CLOSED, timeout_s=40, expect="outcomes")
    assert first == second == ("error", "OutputClosedError", "the output was closed before the end")
    assert (tmp_path / "run").exists() == (updates is not None)
    if updates is not None:
        assert len(read_run(tmp_path / "run").records) == updates
        assert end_of(tmp_path / "run")[0] == end
    if updates and updates < 4:
        assert checkpoint_names(tmp_path / "run")[-1] == f"update-{updates:08d}"


@pytest.mark.slow
def test_a_display_that_fails_otherwise_ends_all_ranks(tmp_path: Path) -> None:
    tables = tiny(tmp_path / "run", run={"print_every_updates": 1}).to_dict()
    error = PermissionError(13, "Permission denied")
    first, second = run_ranks(breaking, 2, tables, "update    2/4", error, timeout_s=40, expect="outcomes")
    assert first[:2] == ("error", "PermissionError")
    words = "rank 0 failed between two updates: PermissionError: [Errno 13] Permission denied"
    assert second == ("error", "JudgeError", words)


def test_the_first_error_is_told_though_nobody_can_be_told_how_to_resume(tmp_path: Path) -> None:
    config = tiny(tmp_path / "run")
    job = built(config)

    def fail() -> None:
        raise RuntimeError("shapes do not match")

    on_forward(job, 5, fail)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        run_job(job, Breaks(config, "Saved after", CLOSED))
    assert end_of(tmp_path / "run")[0] == "failed"


def lonely(rank: int, _n: int, tables: dict[str, Any]) -> list[str]:
    """Rank 1 dies while rank 0 waits to ask it whether an update was left on purpose."""
    config = config_from_dict(tables)
    with join_world() as world:
        training = Training(built(config, world), None, Listener(config))
        if rank == 1:
            os._exit(0)
        error = ValueError("shapes do not match")
        assert training._left_or_saved(error) is False
        return list(error.__notes__)


@pytest.mark.slow
def test_the_first_error_is_told_though_another_rank_is_gone(tmp_path: Path) -> None:
    told, _ = run_ranks(lonely, 2, tiny(tmp_path / "run").to_dict(), timeout_s=40, expect="outcomes")
    assert told[0] == "ok", told
    (note,) = told[1]
    assert note.startswith("the other ranks could not be asked: contact with another rank was lost between")
