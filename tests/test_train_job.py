"""The training job: it proves, trains as a plain loop would, evaluates, records and exports."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Subset

from jobs import Listener, built, largest_difference, parameters, resumed, run, tiny
from ranks import run_ranks
from runs import write_tiny
from wholebatch.errors import JudgeError, PlanError, RecordError, UsageError
from wholebatch.loading.reading import micro_batch
from wholebatch.run_folder import read_run
from wholebatch.train.command import train as train_command
from wholebatch.train.config import TrainConfig, config_from_dict, config_text
from wholebatch.train.evaluate import evaluate
from wholebatch.train.job import JobResult, run_folder, run_job
from wholebatch.train.loading import windows
from wholebatch.train.material import Batch
from wholebatch.train.models.gpt import GPT, GPTShape
from wholebatch.train.optimize import make_optimizer, parameter_groups
from wholebatch.train.parts import Job, make_window
from wholebatch.train.proof import _micro_batches as micro_batches_of_proof
from wholebatch.train.proof import proof_words, prove_first_batch
from wholebatch.train.schedule import rate_curve
from wholebatch.train.world import World, join_world


def first_window(job: Job) -> list[Batch]:
    return next(windows(job.data, job.order, job.plan, replica=0, start_samples=0, workers=0, seed=0))


def num_items(job: Job, ids: list[int]) -> int:
    """Every byte is predicted, and the begin mark is none."""
    return sum(len(job.data.train[i].tokens) - 1 for i in ids)


def learning_rate_shares(config: TrainConfig, updates: int) -> list[float]:
    curve = rate_curve(config, samples_of_run=8 * config.run.num_updates)
    return [curve.share(update) for update in range(updates)]


def plain_loop(config: TrainConfig) -> dict[str, Tensor]:
    """The same training without this library's window: whole batches, one division, one step."""
    job = built(config)
    model = job.model.module
    optimizer = make_optimizer(parameter_groups(model, config.optimizer), config.optimizer)
    position = 0
    for share in learning_rate_shares(config, config.run.num_updates):
        ids = job.order.global_batch(position)
        batch = micro_batch(job.data.train, job.data.collate, ids, epoch=0, seed=0)
        logits = model(batch["input_ids"])[:, :-1].flatten(0, 1)
        loss = F.cross_entropy(logits, batch["labels"][:, 1:].flatten(), ignore_index=-100)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = config.optimizer.learning_rate * share
        optimizer.step()
        optimizer.zero_grad()
        position = job.order.next_position(position)
    return parameters(job)


def test_it_trains_as_a_plain_loop_over_whole_batches_does(tmp_path: Path) -> None:
    config = tiny(tmp_path / "run")
    start = parameters(built(config))
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


def test_ranks_begin_with_the_same_parameters_and_draw_other_masks(tmp_path: Path) -> None:
    begun = []
    for rank in (0, 1):
        job = built(tiny(tmp_path), World(rank=rank, ranks=2))
        begun.append((parameters(job), torch.rand(3)))
    assert largest_difference(begun[0][0], begun[1][0]) == 0.0
    assert not torch.equal(begun[0][1], begun[1][1])


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
        assert (record.items, record.samples) == (num_items(job, ids), len(ids))
        assert record.outcome == "applied"
        position += len(ids)
    rates = [r.learning_rates for r in written.records]
    assert rates == [pytest.approx([0.01 * share] * 2) for share in learning_rate_shares(job.config, 4)]
    assert [e.updates_applied for e in written.evaluations] == [0, 2, 4]
    assert [e.samples_consumed for e in written.evaluations] == [0, 16, 32]
    losses = [e.loss_per_item for e in written.evaluations]
    assert losses[0] == pytest.approx(math.log(257), abs=0.1)
    assert losses == sorted(losses, reverse=True)
    assert written.end is not None
    assert written.end.reason == "done"
    words = display.words.getvalue()
    assert "samples = m x A x D = 2 x 4 x 1" in words
    assert "update    4/4" in words
    assert "held out after 4 updates" in words


def test_the_trained_model_and_its_average_can_be_loaded(tmp_path: Path) -> None:
    config = tiny(tmp_path / "run", average={"decay_per_update": 0.5})
    _, job, display = run(config)
    where = tmp_path / "run" / "model"
    words = f"The trained model is in {where}, its average in {where}-average\n"
    assert words in display.words.getvalue()
    loaded = {}
    for name in ("model", "model-average"):
        folder = tmp_path / "run" / name
        module = GPT(GPTShape(**json.loads((folder / "shape.json").read_text()))).double()
        module.load_state_dict(torch.load(folder / "model.pt", weights_only=True))
        loaded[name] = {key: p.detach() for key, p in module.named_parameters()}
    assert largest_difference(loaded["model"], parameters(job)) == 0.0
    assert largest_difference(loaded["model-average"], parameters(job)) > 1e-4
    assert largest_difference(loaded["model-average"], parameters(built(config))) > 1e-4
    splits = [e.split for e in read_run(tmp_path / "run").evaluations]
    assert splits == ["held_out", "held_out_average"] * 3


def test_a_model_that_cannot_be_written_fails_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RecordError("no room for the model")

    config = tiny(tmp_path / "run")
    display = Listener(config)
    with monkeypatch.context() as patched:
        patched.setattr("wholebatch.train.job.export_model", refuse)
        with pytest.raises(RecordError, match="no room for the model"):
            run_job(built(config), display)
    written = read_run(tmp_path / "run")
    assert (len(written.records), written.end and written.end.reason) == (4, "failed")
    how = f"Saved after 4 updates. To resume: wholebatch train --resume {tmp_path / 'run'}"
    assert display.words.getvalue().splitlines()[-1] == how
    assert resumed(tmp_path / "run")[0].exit_code == 0
    assert (tmp_path / "run" / "model" / "model.pt").is_file()


def test_micro_batches_wait_on_the_host_and_move_one_by_one(tmp_path: Path) -> None:
    """A device without memory stands for an accelerator."""
    job = built(tiny(tmp_path), World(device=torch.device("meta")))
    assert {p.device.type for p in job.model.module.parameters()} == {"meta"}
    seen: list[str] = []
    job.model.module.register_forward_pre_hook(lambda _, given: seen.append(given[0].device.type))
    waiting = first_window(job)
    assert seen == []
    loss_sum, _ = job.loss(job.model.module, waiting[0])
    assert (seen, loss_sum.device.type) == (["meta"], "meta")
    assert {tensor.device.type for batch in waiting for tensor in batch.values()} == {"cpu"}


def test_an_epoch_s_tail_is_an_update_of_its_own_size(tmp_path: Path) -> None:
    config = tiny(tmp_path / "run", run={"num_updates": 3}, batch={"micro_batch_samples": 4})
    job = built(config)
    few = dataclasses.replace(job.data, train=Subset(job.data.train, range(10)))
    order = dataclasses.replace(job.order, num_samples=10)
    job = dataclasses.replace(job, data=few, order=order)
    assert job.samples_of_run == 18
    assert run_job(job, Listener(config)).exit_code == 0
    records = read_run(tmp_path / "run").records
    assert [(r.samples, r.partial) for r in records] == [(8, False), (2, True), (8, False)]


def test_the_first_batch_is_proved_on_the_job_s_own_parts(tmp_path: Path) -> None:
    job = built(tiny(tmp_path / "run"))
    before = parameters(job)
    proof = prove_first_batch(job)
    assert proof.equal
    assert proof.num_samples == 8
    assert sum(proof.num_items.values()) == num_items(job, job.order.global_batch(0))
    assert [list(split.micro_batch_samples) for split in proof.splits] == [[2, 2, 2, 2]]
    assert largest_difference(parameters(job), before) == 0.0


@pytest.mark.parametrize(
    ("sections", "pieces", "words"),
    [
        (
            {"proof": {"max_samples": 6}},
            [2, 2, 2],
            "First 6 samples of the first global batch: 3 micro-batches make",
        ),
        (
            {"batch": {"global_batch_samples": 1, "micro_batch_samples": 1}},
            [1],
            "First global batch: 1 micro-batch makes the update",
        ),
        # One micro-batch would be compared with itself.
        ({"batch": {"micro_batch_samples": 8}}, [4, 4], "First global batch: 2 micro-batches make"),
        (
            {"proof": {"max_samples": 5}, "batch": {"micro_batch_samples": 8}},
            [2, 3],
            "First 5 samples of the first global batch: 2 micro-batches make",
        ),
    ],
)
def test_a_part_of_the_global_batch_is_proved(
    tmp_path: Path, sections: dict[str, Any], pieces: list[int], words: str
) -> None:
    job = built(tiny(tmp_path / "run", **sections))
    proof = prove_first_batch(job)
    assert [list(split.micro_batch_samples) for split in proof.splits] == [pieces]
    assert proof_words(proof, job).startswith(words)


@pytest.mark.parametrize(
    ("ranks", "max_samples", "pieces"), [(3, 8, [2, 2, 4]), (4, 2, [1, 1, 1, 1]), (8, 8, [1] * 8)]
)
def test_every_rank_proves_a_micro_batch(
    tmp_path: Path, ranks: int, max_samples: int, pieces: list[int]
) -> None:
    job = built(
        tiny(tmp_path / "run", proof={"max_samples": max_samples}, batch={"micro_batch_samples": 4})
    )
    job = dataclasses.replace(job, world=dataclasses.replace(job.world, ranks=ranks))
    assert [len(part) for part in micro_batches_of_proof(job)] == pieces


def test_a_first_global_batch_with_fewer_samples_than_ranks_is_refused(tmp_path: Path) -> None:
    job = built(tiny(tmp_path / "run"))
    job = dataclasses.replace(job, world=dataclasses.replace(job.world, ranks=9))
    with pytest.raises(JudgeError, match=r"has 8 samples for 9 ranks, .* proof.check_first_batch = false"):
        micro_batches_of_proof(job)


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


def test_a_loss_that_is_no_number_is_told_of_the_first_global_batch(tmp_path: Path) -> None:
    job = built(tiny(tmp_path / "run", proof={"check_first_batch": True}))
    with torch.no_grad():
        next(job.model.module.parameters()).fill_(float("nan"))
    message = r"first global batch can't be judged: .* loss_sum=nan .* proof.check_first_batch = false$"
    with pytest.raises(JudgeError, match=message):
        run_job(job, Listener(job.config))
    assert not (tmp_path / "run").exists()


def test_unless_the_settings_say_so(tmp_path: Path) -> None:
    proof = {"check_first_batch": True, "train_if_not_equal": True}
    result, _, _ = run(tiny(tmp_path / "run", model={"dropout": 0.2}, proof=proof))
    assert result.exit_code == 0
    header = read_run(tmp_path / "run").header
    assert header.proof is not None
    assert (header.proof["equal"], header.proof["cause"]) == (False, "dropout")


def test_a_file_as_the_folder_is_refused_before_anything_is_computed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    config = tiny(tmp_path / "file", proof={"check_first_batch": True})
    display = Listener(config)
    with pytest.raises(RecordError, match="file is a file, not a folder"):
        run_job(built(config), display)
    assert display.words.getvalue() == ""


def test_a_used_folder_is_refused_before_anything_is_computed(tmp_path: Path) -> None:
    (tmp_path / "note").write_text("mine")
    config = tiny(tmp_path, proof={"check_first_batch": True})
    display = Listener(config)
    with pytest.raises(RecordError, match="holds files already"):
        run_job(built(config), display)
    assert display.words.getvalue() == ""


@pytest.mark.parametrize(
    ("sections", "kind", "message"),
    [
        ({"batch": {"micro_batch_samples": 3}}, PlanError, "8 does not divide by micro_batch_samples 3"),
        ({"precision": {"autocast": "bfloat16"}}, UsageError, "autocast leaves float64 alone"),
        ({"schedule": {"warmup_samples": 9}}, UsageError, "the lengths of a schedule need one unit"),
        ({"optimizer": {"name": "AdamX"}}, UsageError, "optimizer.name = 'AdamX' is no optimizer"),
        ({"optimizer": {"name": "LBFGS"}}, UsageError, "its step needs a closure"),
        ({"model": {"heads": 3}}, UsageError, "model.width 16 is not divisible by model.heads 3"),
        ({"model": {"source": "nowhere"}}, UsageError, "nowhere"),
        ({"objective": {"kind": "masked_token"}}, UsageError, "needs a model that sees both sides"),
        (
            {"optimizer": {"options": {"beta": 1}}},
            UsageError,
            "AdamW has no such option; did you mean betas",
        ),
        ({"optimizer": {"name": "Rprop"}}, UsageError, "Rprop has no weight decay; set it to 0"),
        ({"optimizer": {"options": {"differentiable": True}}}, UsageError, "can't make an update"),
        ({"schedule": {"warmup_updates": 4}}, UsageError, 'so schedule.decay = "cosine" would never begin'),
        ({"precision": {"initial_loss_scale": 2.0}}, UsageError, "scales no loss"),
        (
            {"model": {"source": "math:root", "layers": 0, "width": 0, "heads": 0}},
            UsageError,
            "model.source: math has no 'root'",
        ),
        ({"lora": {"alpha": 1.0}}, UsageError, "lora.rank = 0 makes no adapters"),
    ],
)
def test_what_needs_no_data_is_refused_before_data_is_read(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sections: dict[str, Any],
    kind: type[Exception],
    message: str,
) -> None:
    def read(_: TrainConfig) -> None:
        raise AssertionError("data was read")

    monkeypatch.setattr("wholebatch.train.parts.load_data", read)
    with pytest.raises(AssertionError, match="data was read"):
        train_command(write_tiny(tmp_path))
    with pytest.raises(kind, match=message):
        train_command(write_tiny(tmp_path, **sections))


def test_a_used_folder_is_refused_before_data_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(_: TrainConfig) -> None:
        raise AssertionError("data was read")

    monkeypatch.setattr("wholebatch.train.parts.load_data", read)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "note").write_text("mine")
    for folder in (str(tmp_path / "used"), "~/used"):
        with pytest.raises(RecordError, match="used holds files already"):
            train_command(write_tiny(tmp_path), changes=[f"run.folder={folder}"])
    with pytest.raises(AssertionError, match="data was read"):
        train_command(write_tiny(tmp_path), changes=["run.folder=~/new"])
    assert run_folder(config_from_dict({"run": {"folder": "~/new"}})) == tmp_path / "new"


def test_evaluation_is_one_sum_over_all_samples_divided_once(tmp_path: Path) -> None:
    job = built(tiny(tmp_path, batch={"micro_batch_samples": 4}))
    chosen = range(23)
    expected, items = 0.0, 0
    for index in chosen:
        tokens = torch.tensor(job.data.train[index].tokens, dtype=torch.int64)
        logits = job.model.module(tokens[None])[0, :-1]
        expected += F.cross_entropy(logits, tokens[1:], reduction="sum").item()
        items += len(tokens) - 1
    found = evaluate(job, Subset(job.data.train, chosen))
    assert found is not None
    assert found[0] == pytest.approx(expected / items, rel=1e-12)
    assert found[1] == items


def test_evaluation_leaves_the_mode_of_the_model(tmp_path: Path) -> None:
    job = built(tiny(tmp_path, model={"dropout": 0.5}))
    module = job.model.module
    module.train()
    first = evaluate(job, job.data.held_out)
    assert evaluate(job, job.data.held_out) == first, "dropout was on"
    assert module.training
    module.eval()
    evaluate(job, job.data.held_out)
    assert not module.training


def test_an_evaluation_is_left_when_asked(tmp_path: Path) -> None:
    job = built(tiny(tmp_path))
    module = job.model.module
    asked = iter([False, True])
    assert evaluate(job, job.data.held_out, leave=lambda: next(asked)) is None
    assert next(asked, None) is None
    assert module.training


def test_clipping_at_0_is_off(tmp_path: Path) -> None:
    for setting in (0, 1e-3):
        job = built(tiny(tmp_path, optimizer={"clip_grad_norm": setting}))
        record = make_window(job).run(first_window(job), job.loss)
        assert record.gradient_norm is not None
        assert record.gradient_norm > 0.01, "nothing to clip, so nothing is shown"
        expected = setting or record.gradient_norm
        assert record.gradient_norm_after_clip == pytest.approx(expected, rel=1e-3)


# The command


def test_the_command_writes_json_and_text_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    changes = [f"run.folder={folder}", "run.num_updates=2", "schedule.warmup_updates=1"]
    assert train_command(write_tiny(tmp_path), changes=changes, json_target="-") == 0
    captured = capsys.readouterr()
    data = json.loads(captured.out)
    assert (data["command"], data["exit_code"], data["folder"]) == ("train", 0, str(folder))
    assert data["counters"]["updates_applied"] == 2
    assert "update    2/2" in captured.err


def test_without_a_folder_the_run_goes_to_one_named_by_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert (
        train_command(write_tiny(tmp_path), changes=["run.num_updates=1", "schedule.warmup_updates=0"]) == 0
    )
    (folder,) = (tmp_path / "runs").iterdir()
    assert len(read_run(folder).records) == 1
    words = capsys.readouterr().out
    assert f"Records go to runs/{folder.name}" in words
    assert words.splitlines()[-1] == f"To look at it: wholebatch show runs/{folder.name}"
    assert run_folder(TrainConfig()).parent == Path("runs")


def test_a_proof_that_is_negative_still_answers_in_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_tiny(tmp_path, model={"dropout": 0.3}, proof={"check_first_batch": True})
    assert train_command(file, changes=[f"run.folder={tmp_path / 'run'}"], json_target="-") == 1
    data = json.loads(capsys.readouterr().out)
    assert (data["folder"], data["exit_code"]) == (None, 1)


def test_the_command_refuses_what_the_settings_refuse() -> None:
    with pytest.raises(UsageError, match=r"run\.num_updates is 0"):
        train_command(None, changes=["run.num_updates=0"])


def test_the_settings_are_printed_and_nothing_else_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert train_command(changes=["run.num_updates=9"], print_config=True) == 0
    text = capsys.readouterr().out
    assert text == config_text(config_from_dict({"run": {"num_updates": 9}}))
    assert list(tmp_path.iterdir()) == []
