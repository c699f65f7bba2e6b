"""The training job with micro-batches that tokens bound: the same updates, in less padding."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from jobs import built, differing, largest_difference, parameters, resumed, run, saved, tiny, told
from ranks import run_ranks
from runs import tiny_tables, write_tiny
from wholebatch.budget import BudgetPlan
from wholebatch.cli import app
from wholebatch.errors import JudgeError, UsageError
from wholebatch.order import ItemOrder
from wholebatch.packing import CostModel
from wholebatch.run_folder import read_run
from wholebatch.train.config import config_from_dict, load_config
from wholebatch.train.data import load_data
from wholebatch.train.measure import Timed, fit_cost, measure_cost
from wholebatch.train.world import join_world

BY_SAMPLES = {"global_batch_samples": 8, "micro_batch_samples": 2}
LESS_MEMORY = {"global_batch_samples": 8, "micro_batch_samples": 0, "tokens_per_micro_batch": 40}
MORE_MEMORY = {"global_batch_samples": 8, "micro_batch_samples": 0, "tokens_per_micro_batch": 200}
PACKED = LESS_MEMORY | {"rows": "packed"}
RAGGED = {"max_tokens_per_sample": 32, "held_out_one_in": 800, "too_long": "truncate"}


def ragged(folder: Path | str, batch: dict[str, Any], **sections: dict[str, Any]) -> Any:
    """A tiny job on samples of 2 to 32 tokens."""
    return tiny(folder, **{"batch": batch, "data": RAGGED} | sections)


def words_of_show(folder: Path) -> str:
    """What ``wholebatch show`` says, whatever the width of the terminal."""
    return " ".join(CliRunner().invoke(app, ["show", str(folder)]).output.split())


@pytest.mark.parametrize("batch", [LESS_MEMORY, MORE_MEMORY, PACKED], ids=["small", "large", "packed"])
def test_the_budget_changes_neither_samples_nor_update(tmp_path: Path, batch: dict[str, Any]) -> None:
    _, plain, _ = run(ragged(tmp_path / "plain", BY_SAMPLES))
    _, job, _ = run(ragged(tmp_path / "cut", batch))
    assert largest_difference(parameters(plain), parameters(built(ragged(tmp_path, batch)))) > 1e-3
    assert largest_difference(parameters(plain), parameters(job)) < 1e-11
    one, two = read_run(tmp_path / "plain"), read_run(tmp_path / "cut")
    budget = batch["tokens_per_micro_batch"]
    for a, b in zip(one.records, two.records, strict=True):
        assert None is not a.sample_digest == b.sample_digest
        assert (a.samples, a.items) == (b.samples, b.items)
        assert a.loss_per_item == pytest.approx(b.loss_per_item, rel=1e-12)
        assert b.positions <= budget * b.micro_batches
        if batch is PACKED:
            assert b.positions == b.items + b.samples  # every token but the first of a sample is learned
    for mine, other in zip(one.evaluations, two.evaluations, strict=True):
        assert (mine.items, mine.samples) == (other.items, other.samples)
        assert mine.loss_per_item == pytest.approx(other.loss_per_item, rel=1e-12)


def test_the_header_and_the_screen_say_what_bounds_a_micro_batch(tmp_path: Path) -> None:
    _, job, display = run(ragged(tmp_path / "run", PACKED))
    header = read_run(tmp_path / "run").header
    assert (header.micro_batch_samples, header.micro_batches_per_window) == (None, None)
    assert (header.tokens_per_micro_batch, header.rows, header.global_batch_samples) == (40, "packed", 8)
    assert isinstance(job.plan, BudgetPlan)
    assert "tokens of one row at most, sample after sample" in display.words.getvalue()
    shown = words_of_show(tmp_path / "run")
    assert "8 samples an update in micro-batches of up to 40 tokens, packed, x 1 replica" in shown


def ranks_worker(_rank: int, _n: int, tables: dict[str, Any]) -> dict[str, torch.Tensor]:
    with join_world() as world:
        result, job, _ = run(config_from_dict(tables), world)
        assert result.exit_code == 0
        return parameters(job)


@pytest.mark.parametrize("batch", [LESS_MEMORY, PACKED], ids=["padded", "packed"])
def test_two_ranks_train_the_same(tmp_path: Path, batch: dict[str, Any]) -> None:
    _, plain, _ = run(ragged(tmp_path / "plain", BY_SAMPLES))
    first, second = run_ranks(ranks_worker, 2, ragged(tmp_path / "two", batch).to_dict())
    assert largest_difference(first, second) == 0.0
    assert largest_difference(parameters(plain), first) < 1e-11
    digests = [[r.sample_digest for r in read_run(tmp_path / name).records] for name in ("plain", "two")]
    assert digests[0] == digests[1]


@pytest.mark.parametrize(
    "change",
    [
        ("batch.tokens_per_micro_batch=70",),
        ("batch.micro_batch_samples=4",),
        ("batch.rows=packed",),
    ],
    ids=["budget", "samples", "packed"],
)
def test_a_run_goes_on_with_the_same_global_batches(tmp_path: Path, change: tuple[str, ...]) -> None:
    _, whole, _ = run(ragged(tmp_path / "whole", LESS_MEMORY, run={"num_updates": 4}))
    run(ragged(tmp_path / "parts", LESS_MEMORY, run={"num_updates": 2}, schedule={"decay": "constant"}))
    run(ragged(tmp_path / "other", LESS_MEMORY, run={"num_updates": 4}, schedule={"decay": "constant"}))
    _, job, _ = resumed(tmp_path / "parts", "run.num_updates=4", *change)
    one, two = told(tmp_path / "other")[0], told(tmp_path / "parts")[0]
    assert [r["sample_digest"] for r in one] == [r["sample_digest"] for r in two]
    for a, b in zip(one, two, strict=True):
        assert a["loss_per_item"] == pytest.approx(b["loss_per_item"], rel=1e-12)
    again = read_run(tmp_path / "parts").resumptions[-1]
    assert (again.micro_batch_samples is None) == ("samples" not in change[0])
    assert largest_difference(parameters(job), parameters(whole)) > 1e-6  # another schedule


def test_bit_for_bit_under_the_same_budget(tmp_path: Path) -> None:
    constant = {"decay": "constant"}
    dropping = {"layers": 1, "width": 16, "heads": 2, "dropout": 0.1}
    for name, updates in (("whole", 4), ("parts", 2)):
        run(
            ragged(tmp_path / name, PACKED, run={"num_updates": updates}, schedule=constant, model=dropping)
        )
    resumed(tmp_path / "parts", "run.num_updates=4")
    whole, parts = saved(tmp_path / "whole", 4), saved(tmp_path / "parts", 4)
    assert [place for place in differing(whole, parts) if "settings" not in place] == []
    assert told(tmp_path / "whole")[0] == told(tmp_path / "parts")[0]


def test_a_global_batch_in_items_ends_on_whole_samples(tmp_path: Path) -> None:
    batch = {"global_batch_items": 150, "tokens_per_micro_batch": 64}
    tables = tiny_tables(data=RAGGED)
    tables["batch"] = batch
    tables["run"]["folder"] = str(tmp_path / "run")
    _, job, display = run(config_from_dict(tables))
    assert isinstance(job.order, ItemOrder)
    items = np.asarray(job.data.items)
    position = 0
    for record in read_run(tmp_path / "run").records:
        ids = job.order.global_batch(position)
        assert record.items == items[ids].sum() <= 150
        assert record.samples == len(ids)
        assert record.sample_digest is not None
        following = job.order.global_batch(position + len(ids))
        assert record.items + items[following[0]] > 150  # the next sample did not fit
        position += len(ids)
    words = display.words.getvalue()
    assert "150  items at most, in whole samples" in words
    assert "Run: 4 updates of up to 150 items" in words
    shown = words_of_show(tmp_path / "run")
    assert "up to 150 items an update in micro-batches of up to 64 tokens, padded, x 1 replica" in shown


def test_it_proves_the_packed_update_against_the_padded_big_batch(tmp_path: Path) -> None:
    _, _, display = run(ragged(tmp_path / "run", PACKED, proof={"check_first_batch": True}))
    assert "micro-batches make the update of the big batch" in display.words.getvalue()


# Settings ---------------------------------------------------------------------------------------


def test_one_of_two_keys_takes_the_place_of_the_other(tmp_path: Path) -> None:
    config = config_from_dict({"batch": {"tokens_per_micro_batch": 64}})
    assert (config.batch.micro_batch_samples, config.batch.global_batch_samples) == (0, 32)
    file = write_tiny(tmp_path)
    changed = load_config(file, ["batch.tokens_per_micro_batch=64", "batch.global_batch_items=900"])
    assert (changed.batch.micro_batch_samples, changed.batch.global_batch_samples) == (0, 0)
    back = load_config(file, ["batch.tokens_per_micro_batch=64", "batch.tokens_per_micro_batch=0"])
    assert back.batch.micro_batch_samples == 2


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (
            {"micro_batch_samples": 4, "tokens_per_micro_batch": 64},
            "one of batch.micro_batch_samples and batch.tokens_per_micro_batch says what it is, and here "
            "are both, 4 and 64",
        ),
        (
            {"global_batch_samples": 0},
            "one of batch.global_batch_samples and batch.global_batch_items says what it is, and here are "
            "none of them",
        ),
    ],
)
def test_both_or_none_of_two_keys_are_refused(batch: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)):
        config_from_dict({"batch": batch})


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        (
            {"batch": {"micro_batch_samples": 2, "rows": "packed"}},
            "batch.rows = 'packed' goes with micro-batches that are cut by tokens; set "
            "batch.tokens_per_micro_batch in place of batch.micro_batch_samples = 2",
        ),
        (
            {"batch": {"micro_batch_samples": 2, "tokens_alone": 90}},
            "batch.tokens_alone = 90 goes with micro-batches",
        ),
        (
            {"batch": {"tokens_per_micro_batch": 31}, "data": RAGGED},
            "has 32 tokens, more than batch.tokens_per_micro_batch = 31, and so have",
        ),
        (
            {"batch": {"tokens_per_micro_batch": 20, "tokens_alone": 30}, "data": RAGGED},
            "has 32 tokens, more than batch.tokens_per_micro_batch = 20 and batch.tokens_alone = 30",
        ),
        (
            {"batch": {"tokens_per_micro_batch": 64, "tokens_alone": 64}, "data": RAGGED},
            "batch.tokens_alone = 64 is the larger bound for a sample that is alone, and "
            "batch.tokens_per_micro_batch = 64 is no smaller; raise it, or set it to 0",
        ),
        (
            {"batch": {"tokens_per_micro_batch": 64, "cost_per_position": 0}, "data": RAGGED},
            "batch.cost_per_position and batch.cost_per_position_and_length are both 0",
        ),
        (
            {"batch": {"micro_batch_samples": 2, "cost_per_position": 3}},
            "batch.cost_per_position = 3.0 goes with micro-batches that are cut by tokens",
        ),
        (
            {"batch": {"global_batch_items": 20, "tokens_per_micro_batch": 64}, "data": RAGGED},
            "has 31 items, more than batch.global_batch_items = 20, and so have",
        ),
        (
            {
                "batch": {"global_batch_items": 90, "tokens_per_micro_batch": 64},
                "schedule": {"warmup_samples": 10},
            },
            "nobody knows ahead how many samples a run will have; give schedule.decay_end_samples",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    tmp_path: Path, sections: dict[str, dict[str, Any]], words: str
) -> None:
    tables = tiny_tables() | sections
    tables["run"] = {"folder": str(tmp_path / "run")}
    with pytest.raises(UsageError, match=re.escape(words)):
        built(config_from_dict(tables))


def test_a_sample_that_is_alone_may_be_longer(tmp_path: Path) -> None:
    batch = {"tokens_per_micro_batch": 20, "tokens_alone": 32, "micro_batch_samples": 0}
    _, plain, _ = run(ragged(tmp_path / "plain", BY_SAMPLES))
    _, job, _ = run(ragged(tmp_path / "alone", batch))
    assert largest_difference(parameters(plain), parameters(job)) < 1e-11


OWN = """
import torch
import wholebatch

class Sentences(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        if index == {bad}:
            raise OSError("the file of sentence {bad} is gone")
        tokens = torch.arange(2 + index % 7) % 11
        return {{"input_ids": tokens, "labels": tokens}}

def data():
    return {{
        "train": Sentences(),
        "held_out": [],
        "objective": wholebatch.next_token_loss(),
        "vocabulary": 11,
        {more}
    }}
"""


def own(tmp_path: Path, *, more: str = "", bad: int = -1, **data: Any) -> dict[str, Any]:
    file = tmp_path / "own.py"
    file.write_text(OWN.format(more=more, bad=bad), encoding="utf-8")
    return {"source": f"{file}:data", "max_tokens_per_sample": 16, **data}


def test_samples_of_ones_own_are_cut_by_what_is_read_of_them(tmp_path: Path) -> None:
    _, plain, _ = run(tiny(tmp_path / "plain", batch=BY_SAMPLES, data=own(tmp_path)))
    told_ahead = '"lengths": [2 + i % 7 for i in range(40)],'
    for name, more, batch in (
        ("read", "", LESS_MEMORY),
        ("told", told_ahead, LESS_MEMORY),
        ("packed", told_ahead, PACKED),
    ):
        config = tiny(tmp_path / name, batch=batch, data=own(tmp_path, more=more))
        assert (load_data(config).lengths is None) == (name == "read")
        _, job, _ = run(config)
        assert largest_difference(parameters(plain), parameters(job)) < 1e-11
        for record in read_run(tmp_path / name).records:
            assert record.positions <= 40 * record.micro_batches


def test_an_objective_that_does_not_shift_keeps_the_first_label_in_a_row(tmp_path: Path) -> None:
    unshifted = '"objective": wholebatch.token_loss(),'
    for batch, items in ((LESS_MEMORY, 5), (PACKED, 5)):
        data = load_data(tiny(tmp_path / "run", batch=batch, data=own(tmp_path, more=unshifted)))
        both = data.collate([data.train[0], data.train[1]], [0, 1], 0)
        assert int(data.objective.count(both)["loss"] or 0) == items  # 2 tokens and 3


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ('"collate": torch.utils.data.default_collate,', "brings a collate, and batch.rows"),
        ('"train": [{"input_ids": [1], "labels": [1], "x": 1.0}] * 40,', "sample 0 of .* has x; set batch"),
        (
            '"objective": wholebatch.counted_loss(lambda output, batch: (output.sum(), 3)),',
            r"twice in a row, has the items \{'loss': None\}",
        ),
    ],
)
def test_samples_that_no_row_can_be_made_of_are_refused(tmp_path: Path, more: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        load_data(tiny(tmp_path / "run", batch=PACKED, data=own(tmp_path, more=more)))


def test_a_label_for_each_sample_has_no_packed_rows(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r'batch.rows = "packed" joins the samples'):
        built(ragged(tmp_path, PACKED, objective={"kind": "label"}))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (
            '"lengths": [1, 2],',
            "is an array of int64 of shape [2]; it has to hold a whole number for each of the 40 samples",
        ),
        ('"lengths": [1.5] * 40,', "lengths of .* is an array of float64"),
        ('"lengths": [3] * 39 + [-1],', "is -1 for sample 39; none is below 0"),
        ('"items": "many",', "items of .* is an array of "),
    ],
)
def test_lengths_that_are_none_are_refused(tmp_path: Path, more: str, words: str) -> None:
    pattern = words if ".*" in words else re.escape(words)
    with pytest.raises(UsageError, match=pattern):
        load_data(tiny(tmp_path / "run", batch=LESS_MEMORY, data=own(tmp_path, more=more)))


def test_items_of_ones_own_samples_have_to_be_given_for_a_global_batch_of_items(tmp_path: Path) -> None:
    batch = {"global_batch_items": 30, "tokens_per_micro_batch": 40}
    tables = tiny_tables(data=own(tmp_path), run={"folder": str(tmp_path / "run")})
    tables["batch"] = batch
    with pytest.raises(UsageError, match="needs the items of every sample ahead"):
        built(config_from_dict(tables))
    tables["data"] = own(tmp_path, more='"items": [1 + i % 7 for i in range(40)],')
    run(config_from_dict(tables))
    assert all(r.items <= 30 for r in read_run(tmp_path / "run").records)


BY_LENGTH = """
def collate(samples):
    longest = max(len(one["x"]) for one in samples)
    rows = [list(one["x"]) + [0] * (longest - len(one["x"])) for one in samples]
    labels = [list(one["x"]) + [-100] * (longest - len(one["x"])) for one in samples]
    return {"input_ids": torch.tensor(rows), "labels": torch.tensor(labels)}
"""


@pytest.mark.parametrize("held_out", ["", '"held_out": [{"x": [1, 2, 3]}, {"x": [4]}],'])
def test_lengths_that_are_given_serve_samples_that_do_not_tell_theirs(
    tmp_path: Path, held_out: str
) -> None:
    more = (
        '"train": [{"x": [1 + i % 9] * (2 + i % 7)} for i in range(40)],'
        f'"lengths": [2 + i % 7 for i in range(40)], "collate": collate, {held_out}'
    )
    config = tiny(
        tmp_path / "run",
        batch=LESS_MEMORY,
        data=own(tmp_path, more=more) | {"held_out_one_in": 4},
        proof={"check_first_batch": True},
    )
    file = tmp_path / "own.py"
    text = file.read_text().replace('        "held_out": [],\n', "")
    file.write_text(text + BY_LENGTH, encoding="utf-8")
    _, job, display = run(config)
    assert "micro-batches make the update of the big batch" in display.words.getvalue()
    assert (job.data.held_out_lengths is None) == bool(held_out)
    assert [e.samples for e in read_run(tmp_path / "run").evaluations] == [len(job.data.held_out)] * 3


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_that_cannot_be_read_is_left_out_and_recorded(tmp_path: Path, workers: int) -> None:
    skip = own(tmp_path, bad=3, on_bad_sample="skip", workers=workers)
    config = tiny(tmp_path / "run", batch=LESS_MEMORY, data=skip, run={"num_updates": 5})
    _, job, _ = run(config)
    records = read_run(tmp_path / "run").records
    assert [r.samples + r.samples_left_out for r in records] == [8] * 5
    assert sum(r.samples_left_out for r in records) == 1
    assert sum(r.items for r in records) == sum(1 + i % 7 for i in range(40) if i != 3)
    position = 0
    for record in records:
        ids = [i for i in job.order.global_batch(position) if i != 3]
        assert record.items == sum(1 + i % 7 for i in ids)
        position += 8
    resumed(tmp_path / "run", "run.num_updates=7")
    again = read_run(tmp_path / "run").records
    assert again[5].sample_digest is not None
    assert again[5].items == sum(1 + i % 7 for i in job.order.global_batch(40) if i != 3)
    shown = words_of_show(tmp_path / "run")
    assert "2 samples that could not be read" in shown  # once in each of two epochs


def test_without_leave_a_sample_that_cannot_be_read_ends_the_run(tmp_path: Path) -> None:
    config = tiny(tmp_path / "run", batch=LESS_MEMORY, data=own(tmp_path, bad=3), run={"num_updates": 5})
    with pytest.raises(JudgeError, match="sample 3 failed with OSError"):
        run(config)


def test_the_proof_takes_the_samples_that_can_be_read(tmp_path: Path) -> None:
    skip = own(tmp_path, bad=3, on_bad_sample="skip")
    proved = {"check_first_batch": True, "max_samples": 40}
    config = tiny(
        tmp_path / "run",
        batch=LESS_MEMORY | {"global_batch_samples": 40},
        data=skip,
        proof=proved,
        run={"num_updates": 1},
        schedule={"warmup_updates": 0, "decay": "constant"},
    )
    _, _, display = run(config)
    assert "micro-batches make the update of the big batch" in display.words.getvalue()
    (record,) = read_run(tmp_path / "run").records
    assert (record.samples, record.samples_left_out) == (39, 1)


def test_where_no_sample_can_be_read_the_proof_says_so(tmp_path: Path) -> None:
    config = tiny(tmp_path / "run", batch=LESS_MEMORY, data=own(tmp_path, on_bad_sample="skip"))
    text = (tmp_path / "own.py").read_text().replace("if index == -1:", "if index > 0:")
    (tmp_path / "own.py").write_text(text, encoding="utf-8")
    proved = replace(
        config, run=replace(config.run, seed=1), proof=replace(config.proof, check_first_batch=True)
    )
    with pytest.raises(JudgeError, match="none of the first 8 samples can be read"):
        run(proved)


def test_a_held_out_sample_that_does_not_fit_is_named_before_training(tmp_path: Path) -> None:
    held_out = '"held_out": [{"input_ids": torch.arange(9), "labels": torch.arange(9)}] * 2,'
    batch = {"tokens_per_micro_batch": 8, "micro_batch_samples": 0}
    with pytest.raises(UsageError, match=r"held-out sample 0 has 9 tokens, more than batch\.tokens_per"):
        run(tiny(tmp_path / "run", batch=batch, data=own(tmp_path, more=held_out)))


def test_samples_that_do_not_tell_their_tokens_are_refused_before_anything_runs(tmp_path: Path) -> None:
    more = '"train": [{"x": torch.arange(3), "labels": torch.arange(3)}] * 9,'
    with pytest.raises(UsageError, match="without input_ids, so its tokens can't be told"):
        built(tiny(tmp_path / "run", batch=LESS_MEMORY, data=own(tmp_path, more=more)))


COUNTS_TO_FOUR = """
import torch
from torch import nn

class Model(nn.Module):
    \"\"\"Keeps the first four samples of a row apart, and mixes those after them.\"\"\"

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(300, 8)
        self.out = nn.Linear(8, 300)

    def forward(self, tokens, groups):
        x = self.embed(tokens)
        same = groups[:, :, None] == groups[:, None, :]
        causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        weights = (same & causal).to(x.dtype)
        return self.out(x + weights @ x / weights.sum(-1, keepdim=True))

def forward(module, batch):
    positions = batch.get("position_ids")
    tokens = batch["input_ids"]
    groups = torch.zeros_like(tokens) if positions is None else (positions == 0).cumsum(1).clamp(max={most})
    return module(tokens, groups)

def model():
    return Model(), forward
"""


@pytest.mark.parametrize(("most", "refused"), [(99, False), (4, True)])
def test_a_model_that_counts_samples_no_further_than_four_is_refused(
    tmp_path: Path, most: int, refused: bool
) -> None:
    file = tmp_path / "model.py"
    file.write_text(COUNTS_TO_FOUR.format(most=most), encoding="utf-8")
    tables = tiny_tables(batch=PACKED, data=RAGGED, run={"folder": str(tmp_path / "run")})
    tables["model"] = {"source": f"{file}:model"}
    if refused:
        with pytest.raises(UsageError, match="packed row"):
            built(config_from_dict(tables))
    else:
        built(config_from_dict(tables))


# Measuring ---------------------------------------------------------------------------------------


def test_the_cost_that_made_the_seconds_is_found() -> None:
    truth = (3e-3, 2e-6, 1e-9)
    timed = [
        Timed(
            samples=n,
            longest=length,
            positions=n * length,
            positions_and_length=n * length**2,
            seconds=truth[0] + truth[1] * n * length + truth[2] * n * length**2,
        )
        for n in (1, 4, 16)
        for length in (10, 100, 1000)
    ]
    found = fit_cost(timed)
    assert found.cost.per_position == 1.0
    assert found.cost.per_micro_batch == pytest.approx(truth[0] / truth[1], rel=1e-6)
    assert found.cost.per_position_and_length == pytest.approx(truth[2] / truth[1], rel=1e-6)
    assert found.largest_error < 1e-9


def test_no_cost_is_below_zero() -> None:
    timed = [
        Timed(samples=n, longest=8, positions=8 * n, positions_and_length=64 * n, seconds=s)
        for n, s in ((1, 1.0), (2, 2.5), (4, 6.0))
    ]
    cost = fit_cost(timed).cost
    assert cost == CostModel(
        per_micro_batch=0.0, per_position=cost.per_position, per_position_and_length=0.0
    )


def test_a_cost_is_measured_and_written_as_settings(tmp_path: Path) -> None:
    file, out = write_tiny(tmp_path, data=RAGGED), tmp_path / "cost.json"
    arguments = ["measure", str(file), "--cost", "--rounds", "2", "--json", str(out)]
    result = CliRunner().invoke(app, [*arguments, "--set", "batch.tokens_per_micro_batch=256"])
    assert result.exit_code == 0, result.output
    assert "set these three in the section [batch]" in result.output
    told_cost = json.loads(out.read_text())
    assert len({(m["samples"], m["longest"]) for m in told_cost["micro_batches"]}) >= 4
    assert max(m["positions"] for m in told_cost["micro_batches"]) <= 256
    tables = tiny_tables(data=RAGGED)
    tables["batch"] = {"tokens_per_micro_batch": 64} | {
        key: told_cost[key] for key in told_cost if key.startswith("cost_")
    }
    plan = built(config_from_dict(tables)).plan
    assert isinstance(plan, BudgetPlan)
    assert plan.cost.per_micro_batch == told_cost["cost_per_micro_batch"]


def test_measuring_needs_to_be_told_what() -> None:
    result = CliRunner().invoke(app, ["measure"])
    assert result.exit_code != 0
    assert "say what to measure: --cost" in str(result.exception) + result.output


def test_a_cost_needs_lengths_of_more_than_one_size(tmp_path: Path) -> None:
    with pytest.raises(JudgeError, match="does not tell the lengths of its samples ahead"):
        measure_cost(built(tiny(tmp_path / "run", batch=BY_SAMPLES, data=own(tmp_path))), rounds=1)
