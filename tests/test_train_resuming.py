"""A run that is gone on with: bit for bit on the same ranks, with the same global batches on others."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
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
from runs import write_tiny
from wholebatch.errors import CheckpointError, RecordError, UsageError
from wholebatch.record import ABANDONED_FILE, RECORDS_FILE
from wholebatch.resume import Checkpoints
from wholebatch.run_folder import only_writer, read_run
from wholebatch.train import training as training_module
from wholebatch.train.command import train as train_command
from wholebatch.train.config import TrainConfig, config_from_dict, config_text
from wholebatch.train.job import run_job
from wholebatch.train.resuming import earlier_of_restart, find_earlier, launch, settings_of
from wholebatch.train.world import World, join_world
from wholebatch.window import UpdateWindow

# Everything that has a state, and random numbers in every forward.
FULL: dict[str, dict[str, Any]] = {
    "run": {"num_updates": 6, "evaluate_every_updates": 3},
    "model": {"dropout": 0.2},
    "average": {"decay_per_update": 0.9},
    "checkpoints": {"every_updates": 3},
}


def interrupted(config: TrainConfig, update: int, world: World | None = None) -> None:
    """A run that Ctrl-C ends after an update."""
    act = after_update(update, lambda: signal.raise_signal(signal.SIGINT))
    result = run_job(built(config, world), Listener(config, after=act))
    assert result.exit_code == 130


def same_run(one: Path, other: Path, update: int = 6) -> None:
    """Records, evaluations and everything that the last checkpoint holds, bit for bit."""
    assert told(one) == told(other)
    assert differing(saved(one, update), saved(other, update)) == []


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"data": {"workers": 1}},
        {"optimizer": {"name": "SGD", "options": {"momentum": 0.9}}, "schedule": {"decay": "linear"}},
        {"run": {**FULL["run"], "seed": 5}, "batch": {"tail": "drop", "micro_batch_samples": 4}},
    ],
    ids=["AdamW", "workers", "SGD", "other settings"],
)
def test_a_resumed_run_is_the_run_that_never_ended(tmp_path: Path, more: dict[str, dict[str, Any]]) -> None:
    sections = FULL | more
    _, whole, _ = run(tiny(tmp_path / "whole", **sections))
    interrupted(tiny(tmp_path / "parts", **sections), 3)
    result, job, display = resumed(tmp_path / "parts")
    assert result.exit_code == 0
    same_run(tmp_path / "whole", tmp_path / "parts")
    assert largest_difference(parameters(whole), parameters(job)) == 0.0
    words = display.words.getvalue()
    assert f"Resumed {tmp_path / 'parts'} after 3 updates, 24 samples." in words
    assert [line[:13] for line in words.splitlines() if line.startswith("update ")] == [
        "update    4/6",
        "update    6/6",
    ]
    written = read_run(tmp_path / "parts")
    (resumption,) = written.resumptions
    assert (resumption.updates_attempted, resumption.samples) == (3, 24)
    assert (resumption.abandoned_updates, resumption.changed_settings) == (0, {})
    assert resumption.previous_end is not None
    assert resumption.previous_end["reason"] == "interrupted"
    assert written.end is not None
    assert written.end.reason == "done"
    assert (tmp_path / "parts" / "model" / "model.pt").is_file()


def resumed_ranks(rank: int, _n: int, tables: dict[str, Any], folder: str) -> dict[str, Tensor]:
    """The whole run, and the same in two parts, on two ranks; Ctrl-C comes to one of them."""
    config = config_from_dict(tables)
    with join_world() as world:
        run(config, world)
        tables["run"]["folder"] = folder
        interrupted_config = config_from_dict(tables)
        act = after_update(3, lambda: signal.raise_signal(signal.SIGINT)) if rank == 1 else None
        job = built(interrupted_config, world)
        assert run_job(job, Listener(interrupted_config, after=act)).exit_code == 130
        _, job, _ = resumed(folder, world=world)
        return parameters(job)


@pytest.mark.slow
def test_so_it_is_on_two_ranks(tmp_path: Path) -> None:
    tables = tiny(tmp_path / "whole", **FULL).to_dict()
    first, second = run_ranks(resumed_ranks, 2, tables, str(tmp_path / "parts"))
    assert largest_difference(first, second) == 0.0
    same_run(tmp_path / "whole", tmp_path / "parts")
    rest = saved(tmp_path / "parts", 6)["rest.pt"]
    assert len(rest["random"]) == 2
    assert differing(rest["random"][0], rest["random"][1]) != [], "both ranks draw the same masks"


def resumed_on_two(_rank: int, _n: int, folder: str) -> dict[str, Tensor]:
    with join_world() as world:
        _, job, _ = resumed(folder, world=world)
        return parameters(job)


def without_dropout(folder: Path) -> TrainConfig:
    return tiny(folder, **{**FULL, "model": {"dropout": 0.0}})


def test_another_micro_batch_goes_on_with_the_same_global_batches(tmp_path: Path) -> None:
    _, whole, _ = run(without_dropout(tmp_path / "whole"))
    interrupted(without_dropout(tmp_path / "parts"), 3)
    _, job, _ = resumed(tmp_path / "parts", "batch.micro_batch_samples=4")
    assert largest_difference(parameters(whole), parameters(job)) < 1e-11
    one, two = read_run(tmp_path / "whole"), read_run(tmp_path / "parts")
    assert [r.sample_digest for r in one.records] == [r.sample_digest for r in two.records]
    assert [r.micro_batches for r in two.records] == [4, 4, 4, 2, 2, 2]
    (resumption,) = two.resumptions
    assert resumption.changed_settings == {"batch.micro_batch_samples": [2, 4]}
    assert (resumption.micro_batch_samples, resumption.micro_batches_per_window) == (4, 2)


@pytest.mark.slow
def test_so_do_more_ranks(tmp_path: Path) -> None:
    _, whole, _ = run(without_dropout(tmp_path / "whole"))
    interrupted(without_dropout(tmp_path / "parts"), 3)
    first, second = run_ranks(resumed_on_two, 2, str(tmp_path / "parts"))
    assert largest_difference(first, second) == 0.0
    assert largest_difference(parameters(whole), first) < 1e-11
    one, two = read_run(tmp_path / "whole"), read_run(tmp_path / "parts")
    assert [r.sample_digest for r in one.records] == [r.sample_digest for r in two.records]
    assert (two.resumptions[0].replicas, two.resumptions[0].layout["ranks"]) == (2, 2)


def test_the_loss_scale_of_float16_goes_on(tmp_path: Path) -> None:
    """The first scale overflows, and is halved in a skipped update."""
    sections = {
        **FULL,
        "precision": {"parameters": "float32", "autocast": "float16", "initial_loss_scale": 2.0**20},
    }
    run(tiny(tmp_path / "whole", **sections))
    interrupted(tiny(tmp_path / "parts", **sections), 3)
    then = saved(tmp_path / "parts", 3)["optimizers.pt"]["scaler"]["scale"]
    assert then < 2.0**20, "the scale has not moved, so nothing is shown"
    resumed(tmp_path / "parts")
    same_run(tmp_path / "whole", tmp_path / "parts")


def test_a_finished_run_goes_on_with_more_updates(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(tiny(folder))
    before = told(folder)
    for change in ([], ["optimizer.learning_rate=1.0"]):
        result, _, display = resumed(folder, *change)
        assert (result.exit_code, told(folder)) == (0, before)
        assert display.words.getvalue() == (
            f"{folder} has 4 updates already; nothing to do. For more, --set run.num_updates=N\n"
        )
    assert read_run(folder).resumptions == []
    result, _, _ = resumed(folder, "run.num_updates=6")
    assert result.exit_code == 0
    records, evaluations = told(folder)
    assert records[:4] == before[0]
    assert [r["updates_attempted"] for r in records] == [1, 2, 3, 4, 5, 6]
    assert [e["updates_applied"] for e in evaluations] == [0, 2, 4, 6]
    assert read_run(folder).resumptions[-1].changed_settings == {"run.num_updates": [4, 6]}
    assert told(folder)[0][3] == before[0][3], "the first updates had the schedule of 4"


def test_what_was_changed_stays_so_when_it_goes_on_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(tiny(folder))
    earlier = find_earlier(folder)
    config = settings_of(earlier, ["run.num_updates=8", "batch.micro_batch_samples=4"])
    display = Listener(config, after=after_update(6, lambda: signal.raise_signal(signal.SIGINT)))
    assert run_job(built(config), display, earlier=earlier).exit_code == 130
    resumed(folder, "optimizer.options.eps=1e-7")
    found = read_run(folder)
    assert [r.micro_batches for r in found.records] == [4, 4, 4, 4, 2, 2, 2, 2]
    assert [each.changed_settings for each in found.resumptions] == [
        {"batch.micro_batch_samples": [2, 4], "run.num_updates": [4, 8]},
        {"optimizer.options": [{}, {"eps": 1e-7}]},
    ]
    assert settings_of(find_earlier(folder), []).batch.micro_batch_samples == 4


def test_what_a_resumption_changed_that_was_cut_short_is_kept_and_told_once(tmp_path: Path) -> None:
    """Ctrl-C twice ends it as it had ended before, in its first update."""
    folder = tmp_path / "run"
    interrupted(tiny(folder), 2)
    earlier = find_earlier(folder)
    config = settings_of(earlier, ["batch.micro_batch_samples=4"])
    job = built(config)

    def stop_hard() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    on_forward(job, 1, stop_hard)
    with pytest.raises(KeyboardInterrupt):
        run_job(job, Listener(config), earlier=earlier)
    resumed(folder)
    found = read_run(folder)
    assert [r.micro_batches for r in found.records] == [4, 4, 2, 2]
    changes = [each.changed_settings for each in found.resumptions if each.changed_settings]
    assert changes == [{"batch.micro_batch_samples": [2, 4]}]


def test_a_change_inside_options_is_told(tmp_path: Path) -> None:
    run(tiny(tmp_path / "run", optimizer={"options": {"eps": 1e-7}}))
    resumed(tmp_path / "run", "optimizer.options.eps=1e-8", "run.num_updates=5")
    assert read_run(tmp_path / "run").resumptions[0].changed_settings == {
        "optimizer.options": [{"eps": 1e-7}, {"eps": 1e-8}],
        "run.num_updates": [4, 5],
    }


def test_a_run_that_was_killed_before_its_first_update_evaluates_once(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    interrupted(tiny(folder), 1)
    whole = tmp_path / "whole"
    run(tiny(whole))
    # What a run has that is killed in its first update.
    for name in checkpoint_names(folder)[1:]:
        (folder / "checkpoints" / name).rename(folder / name)
    (folder / RECORDS_FILE).write_text("")
    (folder / "end.json").unlink()
    resumed(folder)
    assert told(folder) == told(whole)


def test_a_run_that_was_killed_before_it_was_saved_begins_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(tiny(folder))
    (folder / "checkpoints").rename(tmp_path / "gone")
    (folder / RECORDS_FILE).write_text("")
    (folder / "evaluations.jsonl").write_text("")
    resumed(folder)
    run(tiny(tmp_path / "whole"))
    assert told(folder) == told(tmp_path / "whole")


def test_a_run_that_was_not_saved_cannot_be_resumed(tmp_path: Path) -> None:
    config = tiny(tmp_path / "run", checkpoints={"every_updates": 0})
    display = Listener(config, after=after_update(2, lambda: signal.raise_signal(signal.SIGINT)))
    assert run_job(built(config), display).exit_code == 130
    assert "There is no checkpoint of it, so it can't be resumed" in display.words.getvalue()
    assert not (tmp_path / "run" / "checkpoints").exists()
    with pytest.raises(UsageError, match=r"there is no checkpoint in .*run/checkpoints"):
        resumed(tmp_path / "run")
    assert len(read_run(tmp_path / "run").records) == 2


def test_an_export_that_was_cut_short_is_made_when_it_is_resumed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(tiny(folder))
    (folder / "end.json").unlink()
    (folder / "model" / "model.pt").unlink()
    resumed(folder)
    assert (folder / "model" / "model.pt").is_file()


def test_what_was_changed_is_said(tmp_path: Path) -> None:
    """Another number of heads fits every shape, and is another model."""
    folder = tmp_path / "run"
    interrupted(tiny(folder), 2)
    _, _, display = resumed(folder, "model.heads=4", "optimizer.options={eps = 1e-7}")
    words = display.words.getvalue()
    assert "samples.\nChanged: model.heads 2 -> 4, optimizer.options none -> (eps 1e-07)\n" in words


def test_switching_an_average_or_a_loss_scale_on_or_off_is_refused(tmp_path: Path) -> None:
    precision = {"parameters": "float32", "autocast": "float16"}
    interrupted(tiny(tmp_path / "run", precision=precision, average={"decay_per_update": 0.5}), 2)
    with pytest.raises(UsageError, match=r'was "float16" and is "off": .* the checkpoints of .*run hold\.'):
        resumed(tmp_path / "run", "precision.autocast=off")
    with pytest.raises(UsageError, match=r"was 0\.5 and is 0\.0: .* hold an average, and .* be dropped"):
        resumed(tmp_path / "run", "average.decay_per_update=0")
    interrupted(tiny(tmp_path / "other", precision={"parameters": "float32"}), 2)
    with pytest.raises(UsageError, match=r'was "off" and is "float16": .* of .*/other do not hold\.'):
        resumed(tmp_path / "other", "precision.autocast=float16")


def test_momentum_is_not_switched_on_in_between(tmp_path: Path) -> None:
    interrupted(tiny(tmp_path / "run", optimizer={"name": "SGD"}), 2)
    with pytest.raises(UsageError, match="SGD would need momentum_buffer, which no checkpoint of the run"):
        resumed(tmp_path / "run", "optimizer.options.momentum=0.9")


def test_a_run_that_is_being_written_is_not_resumed(tmp_path: Path) -> None:
    """One that was only paused would go on writing beside the other."""
    folder = tmp_path / "run"
    config = tiny(folder)

    def resume_too() -> None:
        with pytest.raises(RecordError, match=f"is being written by process {os.getpid()} on "):
            resumed(folder)

    display = Listener(config, after=after_update(3, resume_too))
    assert run_job(built(config), display).exit_code == 0
    assert len(read_run(folder).records) == 4
    assert read_run(folder).resumptions == []


def two_refused(rank: int, _n: int, folder: str) -> str:
    """Another program, as the lock has it, is one that has the file open beside this one."""
    with join_world() as world, only_writer(folder) if rank == 0 else nullcontext():
        with pytest.raises(RecordError) as caught:
            resumed(folder, world=world)
        return str(caught.value)


def test_fewer_updates_than_it_has_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(tiny(folder))
    with pytest.raises(UsageError, match=r"num_updates is 3, and .*/run is resumed after 4 updates; give"):
        resumed(folder, "run.num_updates=3")
    resumed(folder / "checkpoints" / "update-00000002", "run.num_updates=3")
    assert len(read_run(folder).records) == 3


@pytest.mark.slow
def test_all_ranks_hear_who_writes_it(tmp_path: Path) -> None:
    interrupted(tiny(tmp_path / "run"), 2)
    first, second = run_ranks(two_refused, 2, str(tmp_path / "run"))
    assert first == second
    assert "is being written by process" in first


def test_a_run_that_another_program_resumed_meanwhile_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    interrupted(tiny(folder), 2)
    earlier = find_earlier(folder)
    resumed(folder)
    config = settings_of(earlier, [])
    with pytest.raises(RecordError, match=r"had 2 records when this program began and has 4: another one"):
        run_job(built(config), Listener(config), earlier=earlier)


@contextmanager
def without_what_it_saves(*names: str) -> Iterator[None]:
    """Checkpoints without some of what a run adds to them."""
    real = Checkpoints.save

    def save(self: Checkpoints, window: UpdateWindow, *, more: dict[str, Any], score: float | None) -> Path:
        fewer = {name: one for name, one in more.items() if name not in names}
        return real(self, window, more=fewer, score=score)

    with mock.patch.object(Checkpoints, "save", save):
        yield


def test_a_checkpoint_of_a_version_that_saved_less_is_resumed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with without_what_it_saves("data", "settings", "skipped_updates_in_a_row"):
        interrupted(tiny(folder), 2)
    resumed(folder, "optimizer.learning_rate=1e-3")
    assert len(read_run(folder).records) == 4


def test_a_checkpoint_of_another_order_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    with monkeypatch.context() as before:  # as a version that did not name its order
        identity = training_module.data_identity
        before.setattr(
            training_module,
            "data_identity",
            lambda job: {name: value for name, value in identity(job).items() if name != "order"},
        )
        interrupted(tiny(folder), 2)
    with pytest.raises(UsageError, match=r"was made with order sorted, and it is .* now"):
        resumed(folder)


# Refused, with what was and what is


def own(tmp_path: Path) -> TrainConfig:
    return tiny(tmp_path / "run", data={"source": f"{write_own(tmp_path)}:data"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("data.options.number=60", "was made with train_samples 64, and it is 60 now, so the run would"),
        ("run.seed=1", "was made with seed 0, and it is 1 now, so the run would not resume with the same"),
        ("batch.tail=drop", "was made with tail partial, and it is drop now"),
        ("batch.global_batch_samples=16", "a global batch of 8 samples and the plan has 16; plan with"),
        ("model.width=32", "width|shape"),
        ("optimizer.name=SGD", r"optimizer\.name was 'AdamW' and is 'SGD': the state of one is none of"),
        (
            "precision.initial_loss_scale=8",
            r"initial_loss_scale is 8\.0, and precision\.autocast = \"off\"",
        ),
        ("average.decay_per_update=0.9", r"decay_per_update was 0\.0 and is 0\.9: .* hold no average, and"),
        (
            "optimizer.weight_decay=0",
            r"weight_decay was 0\.1 and is 0\.0: the parameters would be in other",
        ),
        ("optimizer.decayed=all", "optimizer.decayed was 'matrices' and is 'all': the parameters would be"),
        (
            "optimizer.options={amsgrad = true}",
            r"options was \{\} and is \{'amsgrad': True\}: AdamW would need max_exp_avg_sq, which no",
        ),
    ],
)
def test_what_would_make_it_another_run_is_refused(tmp_path: Path, change: str, message: str) -> None:
    interrupted(own(tmp_path), 2)
    before = told(tmp_path / "run")
    with pytest.raises(UsageError, match=message):
        resumed(tmp_path / "run", change)
    assert told(tmp_path / "run") == before
    assert read_run(tmp_path / "run").resumptions == []
    resumed(tmp_path / "run")
    assert len(read_run(tmp_path / "run").records) == 4


def test_another_first_loss_scale_would_do_nothing_and_is_refused(tmp_path: Path) -> None:
    precision = {"parameters": "float32", "autocast": "float16", "initial_loss_scale": 1024.0}
    interrupted(tiny(tmp_path / "run", precision=precision), 2)
    with pytest.raises(UsageError, match=r"initial_loss_scale was 1024\.0 and is 8\.0: a run that is"):
        resumed(tmp_path / "run", "precision.initial_loss_scale=8")


def test_a_file_of_settings_and_a_run_are_one_too_many(tmp_path: Path) -> None:
    file = write_tiny(tmp_path)
    with pytest.raises(UsageError, match=r"tiny\.toml and --resume runs/a both bring settings; a run is"):
        train_command(file, resume=Path("runs/a"))


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    for named in (tmp_path, tmp_path / "none", tmp_path / "checkpoints" / "update-00000002"):
        with pytest.raises(UsageError, match=re.escape(f"--resume {named}: there is no header.json in it")):
            find_earlier(named)


def test_a_run_is_named_from_inside_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    run(tiny(folder))
    monkeypatch.chdir(folder)
    assert find_earlier(Path()).folder == folder
    monkeypatch.chdir(folder / "checkpoints")
    found = find_earlier(Path("update-00000002"))
    assert (found.folder, found.checkpoint) == (folder, "update-00000002")
    monkeypatch.chdir(folder)
    with pytest.raises(UsageError, match="--resume is empty: give the folder of a run, such as runs/NAME"):
        train_command(resume="")


def test_another_folder_for_a_run_that_goes_on_is_refused(tmp_path: Path) -> None:
    run(tiny(tmp_path / "run"))
    earlier = find_earlier(tmp_path / "run")
    for change in ("run.folder=b", "run.folder = b"):
        with pytest.raises(UsageError, match=r"--set run\.folder and --resume .* name two folders"):
            settings_of(earlier, [change])
    with pytest.raises(UsageError, match=r"the settings of .*run: no key in \[run\] is called 'seeds'"):
        settings_of(earlier, ["run.seeds=3"])


def test_the_settings_of_a_run_are_printed_for_the_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny(tmp_path / "run")
    run(config)
    assert train_command(resume=tmp_path / "run", changes=["run.seed=3"], print_config=True) == 0
    expected = config.to_dict()
    expected["run"]["seed"] = 3
    assert capsys.readouterr().out == config_text(config_from_dict(expected))
    assert read_run(tmp_path / "run").resumptions == []


# From another checkpoint than the newest


def test_from_a_checkpoint_in_between_the_rest_is_run_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(tiny(folder, **FULL))
    before = told(folder)
    whole = saved(folder, 6)
    resumed(folder / "checkpoints" / "update-00000003")
    assert told(folder) == before
    assert differing(saved(folder, 6), whole) == []
    lines = [json.loads(line) for line in (folder / ABANDONED_FILE).read_text().splitlines()]
    updates = [each["line"]["updates_attempted"] for each in lines if each["file"] == RECORDS_FILE]
    assert updates == [4, 5, 6]
    assert read_run(folder).resumptions[0].abandoned_updates == 3


def test_what_came_after_a_named_checkpoint_is_not_come_back_to(tmp_path: Path) -> None:
    """A run that is killed before its next checkpoint goes on from the one that was named."""
    folder = tmp_path / "run"
    run(tiny(folder, checkpoints={"keep_last": 5}))
    best = min(read_run(folder).evaluations, key=lambda e: e.loss_per_item or 0.0)
    assert best.updates_applied == 4
    earlier = find_earlier(folder / "checkpoints" / "update-00000002")
    config = settings_of(earlier, ["checkpoints.every_updates=50"])

    def stop_hard() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run_job(built(config), Listener(config, after=after_update(3, stop_hard)), earlier=earlier)
    names = checkpoint_names(folder)
    assert names[-1].startswith("update-00000002")
    resumed(folder)
    run(tiny(tmp_path / "whole"))
    assert told(folder)[0] == told(tmp_path / "whole")[0]


def test_a_damaged_checkpoint_is_refused_and_the_advice_works(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(tiny(folder))
    file = folder / "checkpoints" / "update-00000004" / "model.pt"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    before = told(folder)
    with pytest.raises(CheckpointError, match="update-00000004 can't be loaded") as caught:
        resumed(folder, "run.num_updates=6")
    assert told(folder) == before
    offered = re.search(
        r"of update 2, .*\. To resume from that: wholebatch train --resume (.+)$", str(caught.value)
    )
    assert offered is not None
    assert offered.group(1) == str(folder / "checkpoints" / "update-00000002")
    resumed(offered.group(1), "run.num_updates=6")
    records = read_run(folder).records
    assert [r.updates_attempted for r in records] == [1, 2, 3, 4, 5, 6]
    assert checkpoint_names(folder)[-1] == "update-00000006"


def test_fewer_records_than_the_checkpoint_has_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(tiny(folder))
    lines = (folder / RECORDS_FILE).read_text().splitlines(keepends=True)
    (folder / RECORDS_FILE).write_text("".join(lines[:3]))
    with pytest.raises(RecordError, match=r"has the records of 3 updates, and .* was made after update 4"):
        resumed(folder)


def test_a_checkpoint_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path) -> None:
    run(tiny(tmp_path / "run"))
    with pytest.raises(
        UsageError, match=r"'update-00000009' is no checkpoint; in .* update-00000002, upd.*4$"
    ):
        resumed(tmp_path / "run" / "checkpoints" / "update-00000009")


# torchrun's restarts


def restarts(monkeypatch: pytest.MonkeyPatch, *, most: int, done: int) -> None:
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", str(most))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(done))


def test_only_a_restart_goes_on_with_the_run_of_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny(tmp_path / "run")
    restarts(monkeypatch, most=2, done=1)
    assert earlier_of_restart(config) is None, "it failed before the run began"
    run(config)
    found = earlier_of_restart(config)
    assert found is not None
    assert (found.folder, found.checkpoint, found.num_records) == (tmp_path / "run", None, 4)
    restarts(monkeypatch, most=2, done=0)
    assert earlier_of_restart(config) is None
    restarts(monkeypatch, most=0, done=0)
    assert earlier_of_restart(TrainConfig()) is None


def test_without_a_folder_a_restart_would_find_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    restarts(monkeypatch, most=3, done=0)
    with pytest.raises(UsageError, match=r"--max-restarts=3 may start this job again, .* give --set run"):
        train_command()


def test_a_restart_is_further_than_the_checkpoint_that_was_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tiny(tmp_path / "run"))
    named = tmp_path / "run" / "checkpoints" / "update-00000002"
    assert find_earlier(named).checkpoint == "update-00000002"
    restarts(monkeypatch, most=1, done=1)
    assert find_earlier(named).checkpoint is None


def test_a_restart_leaves_the_run_of_another_torchrun_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first start refused the folder, because it holds a run; the second must not resume it."""
    config = tiny(tmp_path / "run")
    restarts(monkeypatch, most=1, done=0)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "first")
    run(config)
    restarts(monkeypatch, most=1, done=1)
    assert earlier_of_restart(config) is not None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "second")
    assert earlier_of_restart(config) is None
    with pytest.raises(RecordError, match="holds files already"):
        run(config)


def test_a_torchrun_is_known_by_its_run_id_or_else_by_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert launch() == {}
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert launch() == {"host": socket.gethostname(), "process": str(os.getppid())}
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a7")
    assert launch() == {"run_id": "a7"}


# What was changed on the command line takes effect


def rates(folder: Path) -> list[float]:
    return [record.learning_rates[0] or 0.0 for record in read_run(folder).records]


def test_a_changed_learning_rate_takes_effect_from_the_next_update(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    interrupted(tiny(folder), 2)
    then = rates(folder)
    resumed(folder, "optimizer.learning_rate=1e-6")
    run(tiny(tmp_path / "whole"))
    whole = rates(tmp_path / "whole")
    assert rates(folder)[:2] == then == whole[:2]
    assert rates(folder)[2:] == pytest.approx([rate * 1e-4 for rate in whole[2:]])
    group = saved(folder, 4)["optimizers.pt"]["optimizers"][0]["state"]["param_groups"][0]
    assert group["initial_lr"] == 1e-6


def test_a_change_of_a_resumption_that_was_cut_short_takes_effect_in_the_next(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    interrupted(tiny(folder), 2)
    earlier = find_earlier(folder)
    config = settings_of(earlier, ["optimizer.learning_rate=1e-6"])
    job = built(config)

    def fail() -> None:
        raise KeyboardInterrupt

    on_forward(job, 1, fail)
    with pytest.raises(KeyboardInterrupt):
        run_job(job, Listener(config), earlier=earlier)
    resumed(folder)
    assert max(rates(folder)[2:]) <= 1e-6


def test_a_changed_schedule_takes_effect_from_the_next_update(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    interrupted(tiny(folder, schedule={"warmup_updates": 2}), 2)
    resumed(folder, "schedule.decay=constant")
    assert rates(folder)[2:] == [0.01, 0.01]
    other = tmp_path / "other"
    interrupted(tiny(other, schedule={"warmup_updates": 2}), 2)
    resumed(other, "schedule.decay=linear", "schedule.final_share=0.5", "run.num_updates=6")
    run(tiny(tmp_path / "whole", run={"num_updates": 6}, schedule={"decay": "linear", "final_share": 0.5}))
    assert rates(other)[2:] == rates(tmp_path / "whole")[2:]


@pytest.mark.parametrize(
    ("change", "key", "then", "now"),
    [
        ("optimizer.weight_decay=0.5", "weight_decay", [0.1, 0.0], [0.5, 0.0]),
        ("optimizer.options.eps=1e-5", "eps", [1e-7, 1e-7], [1e-5, 1e-5]),
        ("optimizer.options.betas=[0.5, 0.6]", "betas", [(0.9, 0.999)] * 2, [(0.5, 0.6)] * 2),
        ("optimizer.options={}", "eps", [1e-7, 1e-7], [1e-8, 1e-8]),
    ],
)
def test_changed_options_take_effect_and_no_others(
    tmp_path: Path, change: str, key: str, then: list[Any], now: list[Any]
) -> None:
    folder = tmp_path / "run"
    interrupted(tiny(folder, optimizer={"weight_decay": 0.1, "options": {"eps": 1e-7}}), 2)
    before = saved(folder, 2)["optimizers.pt"]["optimizers"][0]["state"]["param_groups"]
    resumed(folder, change)
    after = saved(folder, 4)["optimizers.pt"]["optimizers"][0]["state"]["param_groups"]
    assert [group[key] for group in before] == then
    assert [group[key] for group in after] == now
    for one, other in zip(before, after, strict=True):
        assert {k: v for k, v in one.items() if k not in ("lr", key)} == {
            k: v for k, v in other.items() if k not in ("lr", key)
        }


def test_what_an_optimizer_keeps_in_its_groups_is_left_to_it(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from torch.optim import SGD\n"
        "class Counting(SGD):\n"
        "    def __init__(self, params, lr=0.1, weight_decay=0.0):\n"
        "        super().__init__(params, lr=lr, weight_decay=weight_decay)\n"
        "        for group in self.param_groups:\n"
        "            group['steps'] = 0\n"
        "    def step(self, closure=None):\n"
        "        for group in self.param_groups:\n"
        "            group['steps'] += 1\n"
        "        return super().step(closure)\n"
    )
    optimizer = {"name": f"{tmp_path / 'mine.py'}:Counting"}
    interrupted(tiny(tmp_path / "run", optimizer=optimizer), 2)
    resumed(tmp_path / "run", "optimizer.learning_rate=0.5")
    group = saved(tmp_path / "run", 4)["optimizers.pt"]["optimizers"][0]["state"]["param_groups"][0]
    assert (group["steps"], group["initial_lr"]) == (4, 0.5)


def test_other_samples_of_the_same_number_and_size_are_noticed(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    paragraphs = [f"paragraph number {n:04d}" for n in range(60)]
    text.write_text("\n\n".join(paragraphs))
    held_out = tmp_path / "held_out.txt"
    held_out.write_text("one\n\ntwo")
    data = {"source": "text", "files": [str(text)], "held_out_files": [str(held_out)]}
    interrupted(tiny(tmp_path / "run", data=data), 2)
    text.write_text("\n\n".join(paragraphs).replace("paragraph number 0007", "paragraph nummer 0007"))
    words = r"was made with train_digest [0-9a-f]{16}, and it is [0-9a-f]{16} now"
    with pytest.raises(UsageError, match=words):
        resumed(tmp_path / "run")
    text.write_text("\n\n".join(paragraphs))
    assert resumed(tmp_path / "run")[0].exit_code == 0
