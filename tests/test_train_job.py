"""The training job: it proves, trains as a plain loop would, evaluates, records and ends well."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor

from ranks import run_ranks
from runs import tiny_tables, write_tiny
from wholebatch.errors import JudgeError, PlanError, RecordError, UsageError
from wholebatch.objective import counted_loss
from wholebatch.record import Evaluation, UpdateRecord
from wholebatch.report.output import OutputClosedError
from wholebatch.run_reader import read_run
from wholebatch.train.command import train as train_command
from wholebatch.train.config import TrainConfig, config_from_dict
from wholebatch.train.data import collate, num_items
from wholebatch.train.display import PlainDisplay
from wholebatch.train.evaluate import evaluate
from wholebatch.train.job import MOST_SKIPS_IN_A_ROW, JobResult, describe, run_job
from wholebatch.train.model import decayed_apart
from wholebatch.train.parts import (
    Job,
    build_job,
    learning_rate_share,
    make_optimizer,
    make_window,
    micro_batches,
)
from wholebatch.train.proof import prove_first_batch
from wholebatch.train.world import World, join_world


def tiny(folder: Path | str, **sections: dict[str, Any]) -> TrainConfig:
    tables = tiny_tables(**sections)
    tables["run"]["folder"] = str(folder)
    return config_from_dict(tables)


def with_few_held_out(job: Job) -> Job:
    """Evaluations are not what most of these tests are about."""
    return dataclasses.replace(job, data=dataclasses.replace(job.data, held_out=job.data.held_out[:7]))


class Listener(PlainDisplay):
    """A plain display that keeps its words, and calls back after each update."""

    def __init__(self, config: TrainConfig, after: Callable[[UpdateRecord], None] | None = None) -> None:
        self.words = io.StringIO()
        self.evaluations: list[Evaluation] = []
        self.after = after
        super().__init__(
            Console(file=self.words, width=200),
            num_updates=config.run.num_updates,
            print_every_updates=config.run.print_every_updates,
        )

    def evaluated(self, evaluation: Evaluation) -> None:
        self.evaluations.append(evaluation)
        super().evaluated(evaluation)

    def updated(self, record: UpdateRecord) -> None:
        super().updated(record)
        if self.after is not None:
            self.after(record)


def run(config: TrainConfig, world: World | None = None) -> tuple[JobResult, Job, Listener]:
    job = with_few_held_out(build_job(config, world or World()))
    display = Listener(config)
    return run_job(job, display, command=["wholebatch", "train"]), job, display


def plain_loop(config: TrainConfig) -> dict[str, Tensor]:
    """The same training without this library's window: whole batches, one division, one step."""
    job = build_job(config, World())
    model = job.model
    optimizer = make_optimizer(decayed_apart(model, config.optimizer.weight_decay), config.optimizer)
    position = 0
    for update in range(config.run.num_updates):
        batch = collate(job.data.train, job.order.global_batch(position))
        logits = model(batch["input_ids"])[:, :-1].flatten(0, 1)
        loss = F.cross_entropy(logits, batch["labels"][:, 1:].flatten(), ignore_index=-100)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = config.optimizer.learning_rate * learning_rate_share(update, config)
        optimizer.step()
        optimizer.zero_grad()
        position = job.order.next_position(position)
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)


def parameters(job: Job) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in job.model.named_parameters()}


def test_it_trains_as_a_plain_loop_over_whole_batches_does(tmp_path: Path) -> None:
    config = tiny(tmp_path / "run")
    start = parameters(build_job(config, World()))
    result, job, _ = run(config)
    assert result == JobResult(exit_code=0, folder=tmp_path / "run")
    whole = plain_loop(config)
    assert largest_difference(whole, start) > 1e-3, "nothing was trained, so nothing is shown"
    assert largest_difference(parameters(job), whole) < 1e-11


def ranks_worker(_rank: int, _n: int, tables: dict[str, Any]) -> dict[str, Tensor]:
    with join_world() as world:
        result, job, _ = run(config_from_dict(tables), world)
        assert result.exit_code == 0
        return parameters(job)


def test_two_ranks_and_other_micro_batches_train_the_same(tmp_path: Path) -> None:
    config = tiny(tmp_path / "one")
    _, job, _ = run(config)
    tables = config.to_dict()
    tables["run"]["folder"] = str(tmp_path / "two")
    tables["batch"]["micro_batch_samples"] = 1
    first, second = run_ranks(ranks_worker, 2, tables)
    assert largest_difference(first, second) == 0.0
    assert largest_difference(parameters(job), first) < 1e-11
    one, two = read_run(tmp_path / "one"), read_run(tmp_path / "two")
    assert [r.sample_digest for r in one.records] == [r.sample_digest for r in two.records]
    assert None not in [r.sample_digest for r in one.records]
    for a, b in zip(one.records, two.records, strict=True):
        assert (a.samples, a.items, b.micro_batches) == (b.samples, b.items, 8)
        assert a.loss_per_item == pytest.approx(b.loss_per_item, rel=1e-12)
        assert a.gradient_norm == pytest.approx(b.gradient_norm, rel=1e-10)
        assert b.peak_memory_bytes is not None
        assert len(b.peak_memory_bytes) == 2
        assert (a.reductions, b.reductions) == (0, 1)
    for mine, other in zip(one.evaluations, two.evaluations, strict=True):
        assert (mine.items, mine.samples) == (other.items, other.samples)
        assert mine.loss_per_item == pytest.approx(other.loss_per_item, rel=1e-12)


def test_what_it_records(tmp_path: Path) -> None:
    _, job, display = run(tiny(tmp_path / "run"))
    written = read_run(tmp_path / "run")
    header = written.header
    assert (header.micro_batch_samples, header.micro_batches_per_window, header.replicas) == (2, 4, 1)
    assert header.global_batch_samples == 8
    assert header.dataset["train_samples"] == len(job.data.train)
    assert header.settings["optimizer"]["learning_rate"] == 0.01
    assert header.command == ["wholebatch", "train"]
    assert "float64" in header.precision
    assert header.proof is None
    position = 0
    for record in written.records:
        ids = job.order.global_batch(position)
        assert record.items == num_items([job.data.train[i] for i in ids])
        assert record.samples == len(ids)
        assert record.outcome == "applied"
        position += len(ids)
    shares = [learning_rate_share(update, job.config) for update in range(4)]
    rates = [r.learning_rates for r in written.records]
    assert rates == [pytest.approx([0.01 * share] * 2) for share in shares]
    assert [e.updates_applied for e in written.evaluations] == [0, 2, 4]
    assert [e.samples_consumed for e in written.evaluations] == [0, 16, 32]
    losses = [e.loss_per_item for e in written.evaluations]
    assert losses[0] == pytest.approx(math.log(257), abs=0.1)
    assert losses == sorted(losses, key=lambda x: -x)
    assert written.end is not None
    assert written.end.reason == "done"
    words = display.words.getvalue()
    assert "samples = m x A x D = 2 x 4 x 1" in words
    assert "update    4/4" in words
    assert "held out after 4 updates" in words


def test_micro_batches_wait_on_the_host_and_move_one_by_one(tmp_path: Path) -> None:
    """A device without memory stands for an accelerator."""
    job = build_job(tiny(tmp_path), World(device=torch.device("meta")))
    assert {p.device.type for p in job.model.parameters()} == {"meta"}
    seen: list[str] = []
    job.model.register_forward_pre_hook(lambda _, given: seen.append(given[0].device.type))
    waiting = micro_batches(job, 0)
    assert seen == []
    loss_sum, _ = job.loss(job.model, waiting[0])
    assert (seen, loss_sum.device.type) == (["meta"], "meta")
    assert {tensor.device.type for batch in waiting for tensor in batch.values()} == {"cpu"}


def test_an_epoch_s_tail_is_an_update_of_its_own_size(tmp_path: Path) -> None:
    config = tiny(tmp_path / "run", run={"num_updates": 3}, batch={"global_batch_samples": 4096})
    config = dataclasses.replace(
        config,
        batch=dataclasses.replace(config.batch, micro_batch_samples=512),
        data=dataclasses.replace(config.data, max_tokens_per_sample=256),
    )
    job = build_job(config, World())
    assert len(job.data.train) < 4096, "this test needs an epoch that ends inside the second update"
    few = dataclasses.replace(job.data, train=job.data.train[:10], held_out=job.data.held_out[:3])
    order = dataclasses.replace(job.order, num_samples=10, global_batch_samples=8)
    plan = dataclasses.replace(job.plan, micro_batch_samples=4, micro_batches_per_window=2)
    job = dataclasses.replace(job, data=few, order=order, plan=plan)
    assert "Note:" not in describe(job)
    assert run_job(job, Listener(config)).exit_code == 0
    records = read_run(tmp_path / "run").records
    assert [(r.samples, r.partial) for r in records] == [(8, False), (2, True), (8, False)]


def test_what_will_be_trained_in_words(tmp_path: Path) -> None:
    job = build_job(tiny(tmp_path), World())
    words = describe(job)
    samples = len(job.data.train)
    assert f"Run: 4 updates, 32 samples; an epoch has {-(-samples // 8):,} updates." in words
    assert "differ from update to update: N is counted in each" in words
    assert "give the items per sample" not in words, "the training job has no such option"
    few = dataclasses.replace(job.data, train=job.data.train[:5])
    order = dataclasses.replace(job.order, num_samples=5)
    words = describe(dataclasses.replace(job, data=few, order=order))
    assert "Run: 4 updates, 20 samples; an epoch has 1 update." in words
    assert "Note: the data set has 5 samples and a global batch 8: no update has a full one" in words


def test_the_first_batch_is_proved_on_the_job_s_own_parts(tmp_path: Path) -> None:
    job = build_job(tiny(tmp_path / "run"), World())
    before = parameters(job)
    proof = prove_first_batch(job)
    assert proof.equal
    assert proof.num_samples == 8
    ids = job.order.global_batch(0)
    assert sum(proof.num_items.values()) == num_items([job.data.train[i] for i in ids])
    assert [list(split.micro_batch_samples) for split in proof.splits] == [[2, 2, 2, 2]]
    assert largest_difference(parameters(job), before) == 0.0


def test_with_a_proof_the_header_has_the_verdict(tmp_path: Path) -> None:
    result, _, display = run(tiny(tmp_path / "run", proof={"check_first_batch": True}))
    assert result.exit_code == 0
    proof = read_run(tmp_path / "run").header.proof
    assert proof is not None
    assert proof["equal"] is True
    assert 0 <= proof["error"] <= proof["bound"]
    assert "4 micro-batches make the update of the big batch" in display.words.getvalue()


def test_an_update_that_is_not_the_big_batch_s_is_not_trained(tmp_path: Path) -> None:
    settings = {"model": {"dropout": 0.2}, "proof": {"check_first_batch": True}}
    result, _, display = run(tiny(tmp_path / "run", **settings))
    assert result == JobResult(exit_code=1)
    assert "NOT the update of the big batch (dropout)" in display.words.getvalue()
    assert not (tmp_path / "run").exists()


def test_unless_the_settings_say_so(tmp_path: Path) -> None:
    proof = {"check_first_batch": True, "train_if_not_equal": True}
    result, _, _ = run(tiny(tmp_path / "run", model={"dropout": 0.2}, proof=proof))
    assert result.exit_code == 0
    header = read_run(tmp_path / "run").header
    assert header.proof is not None
    assert (header.proof["equal"], header.proof["cause"]) == (False, "dropout")


def nan_loss(output: Tensor, _batch: Any) -> tuple[Tensor, int]:
    return output.sum() * math.nan, 1


def test_a_loss_that_is_never_finite_ends_the_run(tmp_path: Path) -> None:
    config = tiny(tmp_path / "run", run={"num_updates": 50})
    job = with_few_held_out(build_job(config, World()))
    job = dataclasses.replace(job, objective=counted_loss(nan_loss, count=lambda _: 1))
    before = parameters(job)
    display = Listener(config)
    with pytest.raises(JudgeError, match=f"the last {MOST_SKIPS_IN_A_ROW} updates were all skipped"):
        run_job(job, display)
    written = read_run(tmp_path / "run")
    assert {r.outcome for r in written.records} == {"skipped_nonfinite"}
    assert len(written.records) == MOST_SKIPS_IN_A_ROW
    assert written.end is not None
    assert written.end.reason == "failed"
    assert largest_difference(parameters(job), before) == 0.0
    assert "update 1 was skipped" in display.words.getvalue()


def test_the_first_ctrl_c_ends_after_a_whole_update(tmp_path: Path) -> None:
    config = tiny(tmp_path / "run")
    job = with_few_held_out(build_job(config, World()))
    found = signal.getsignal(signal.SIGINT)

    def interrupt(record: UpdateRecord) -> None:
        if record.updates_attempted == 2:
            signal.raise_signal(signal.SIGINT)

    result = run_job(job, Listener(config, after=interrupt))
    assert result == JobResult(exit_code=130, folder=tmp_path / "run")
    written = read_run(tmp_path / "run")
    assert len(written.records) == 2
    assert not written.torn_line
    assert written.end is not None
    assert written.end.reason == "interrupted"
    assert signal.getsignal(signal.SIGINT) is found


def test_the_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    config = tiny(tmp_path / "run")
    job = with_few_held_out(build_job(config, World()))

    def interrupt_twice(_: UpdateRecord) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run_job(job, Listener(config, after=interrupt_twice))
    end = read_run(tmp_path / "run").end
    assert end is not None
    assert end.reason == "interrupted"


def terminated(folder: Path, monkeypatch: pytest.MonkeyPatch, *, quick_s: float) -> JobResult:
    """The result of a job that gets SIGTERM, and what torchrun makes of it a second, in update 1."""
    monkeypatch.setattr("wholebatch.train.job.QUICK_EVALUATION_S", quick_s)
    config = tiny(folder)
    job = with_few_held_out(build_job(config, World()))

    def terminate(record: UpdateRecord) -> None:
        if record.updates_attempted == 1:
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)

    found = signal.getsignal(signal.SIGTERM)
    try:
        return run_job(job, Listener(config, after=terminate))
    finally:
        assert signal.getsignal(signal.SIGTERM) is found


@pytest.mark.parametrize(("quick_s", "evaluated"), [(1e9, [0, 1]), (0.0, [0])])
def test_sigterm_ends_after_a_whole_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_s: float, evaluated: list[int]
) -> None:
    # Where nobody handles it the signal would end the test run itself.
    monkeypatch.setattr(signal, "SIGTERM", signal.SIGUSR1)
    result = terminated(tmp_path / "run", monkeypatch, quick_s=quick_s)
    assert result == JobResult(exit_code=143, folder=tmp_path / "run")
    written = read_run(tmp_path / "run")
    assert len(written.records) == 1
    assert [e.updates_applied for e in written.evaluations] == evaluated
    assert written.end is not None
    assert (written.end.reason, written.end.message) == ("interrupted", "stopped by SIGTERM")


def test_a_closed_output_ends_the_run_as_interrupted(tmp_path: Path) -> None:
    config = tiny(tmp_path / "run")

    def close(record: UpdateRecord) -> None:
        if record.updates_attempted == 2:
            raise OutputClosedError("the output was closed before the end")

    with pytest.raises(OutputClosedError):
        run_job(with_few_held_out(build_job(config, World())), Listener(config, after=close))
    written = read_run(tmp_path / "run")
    assert len(written.records) == 2
    assert written.end is not None
    assert (written.end.reason, written.end.message) == (
        "interrupted",
        "the output was closed before the end",
    )


def test_a_file_as_the_folder_is_refused_before_anything_is_computed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    config = tiny(tmp_path / "file", proof={"check_first_batch": True})
    display = Listener(config)
    with pytest.raises(RecordError, match="file is a file, not a folder"):
        run_job(build_job(config, World()), display)
    assert display.words.getvalue() == ""


def test_a_used_folder_is_refused_before_anything_is_computed(tmp_path: Path) -> None:
    (tmp_path / "note").write_text("mine")
    config = tiny(tmp_path, proof={"check_first_batch": True})
    display = Listener(config)
    with pytest.raises(RecordError, match="holds files already"):
        run_job(build_job(config, World()), display)
    assert display.words.getvalue() == ""


def test_a_global_batch_that_does_not_divide_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="global_batch_samples 8 does not divide by micro_batch_samples 3"):
        build_job(tiny(tmp_path, batch={"micro_batch_samples": 3}), World())


def test_evaluation_is_one_sum_over_all_samples(tmp_path: Path) -> None:
    job = build_job(tiny(tmp_path), World())
    samples = job.data.held_out[:23]
    loss_sum, items = evaluate(job, samples)
    expected = 0.0
    for sample in samples:
        logits = job.model(sample[None])[0, :-1]
        expected += F.cross_entropy(logits, sample[1:], reduction="sum").item()
    assert loss_sum == pytest.approx(expected, rel=1e-12)
    assert items == sum(len(sample) - 1 for sample in samples)


def test_evaluation_leaves_the_mode_of_the_model(tmp_path: Path) -> None:
    job = build_job(tiny(tmp_path, model={"dropout": 0.5}), World())
    job.model.train()
    first = evaluate(job, job.data.held_out[:5])
    assert evaluate(job, job.data.held_out[:5]) == first, "dropout was on"
    assert job.model.training
    job.model.eval()
    evaluate(job, job.data.held_out[:5])
    assert not job.model.training


def test_clipping_at_0_is_off(tmp_path: Path) -> None:
    for setting in (0, 1e-3):
        job = build_job(tiny(tmp_path, optimizer={"clip_grad_norm": setting}), World())
        record = make_window(job).run(micro_batches(job, 0), job.loss)
        assert record.gradient_norm is not None
        assert record.gradient_norm > 0.01, "nothing to clip, so nothing is shown"
        expected = setting or record.gradient_norm
        assert record.gradient_norm_after_clip == pytest.approx(expected, rel=1e-3)


def test_the_schedule_rises_to_one_and_falls_to_its_final_share(tmp_path: Path) -> None:
    config = tiny(tmp_path, run={"num_updates": 11}, optimizer={"warmup_updates": 3})
    shares = [learning_rate_share(update, config) for update in range(11)]
    assert shares[:4] == [0.25, 0.5, 0.75, 1.0]
    assert shares[3:] == sorted(shares[3:], reverse=True)
    assert shares[-1] == pytest.approx(0.1)
    assert learning_rate_share(99, config) == pytest.approx(0.1)
    all_warmup = tiny(tmp_path, run={"num_updates": 3}, optimizer={"warmup_updates": 3})
    assert learning_rate_share(3, all_warmup) == 1.0


def test_the_command_writes_json_and_text_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    assert train_command(write_tiny(tmp_path), run_dir=folder, updates=2, json_target="-") == 0
    captured = capsys.readouterr()
    data = json.loads(captured.out)
    assert (data["command"], data["exit_code"], data["folder"]) == ("train", 0, str(folder))
    assert data["counters"]["updates_applied"] == 2
    assert "update    2/2" in captured.err


def test_without_a_folder_the_run_goes_to_one_named_by_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert train_command(write_tiny(tmp_path), updates=1) == 0
    (folder,) = (tmp_path / "runs").iterdir()
    assert len(read_run(folder).records) == 1
    words = capsys.readouterr().out
    assert f"Records go to runs/{folder.name}" in words
    assert words.splitlines()[-1] == f"To look at it: wholebatch show runs/{folder.name}"


def test_a_proof_that_is_negative_still_answers_in_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_tiny(tmp_path, model={"dropout": 0.3}, proof={"check_first_batch": True})
    assert train_command(file, run_dir=tmp_path / "run", json_target="-") == 1
    data = json.loads(capsys.readouterr().out)
    assert (data["folder"], data["exit_code"]) == (None, 1)


def test_the_command_refuses_what_the_settings_refuse() -> None:
    with pytest.raises(UsageError, match=r"run\.num_updates is 0"):
        train_command(None, updates=0)
