"""What is said of a job before it runs, and written down of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import Subset

from jobs import built, tiny, write_own
from wholebatch.train.facts import describe, header, layout, precision, resumption
from wholebatch.train.parts import Job, data_identity
from wholebatch.train.proof import prove_first_batch


def with_few(job: Job, samples: int) -> Job:
    few = dataclasses.replace(job.data, train=Subset(job.data.train, range(samples)))
    return dataclasses.replace(job, data=few, order=dataclasses.replace(job.order, num_samples=samples))


def test_what_will_be_trained_in_words(tmp_path: Path) -> None:
    job = built(tiny(tmp_path))
    words = describe(job)
    samples, items = len(job.data.train), job.data.facts["train_items"]
    assert (
        f"Data: {samples:,} samples with {items:,} items to train on, 8 with 190 items held out." in words
    )
    assert "Model: GPT of 12,048 parameters in float64." in words
    assert f"Run: 4 updates, 32 samples; an epoch has {-(-samples // 8):,} updates." in words
    assert "differ from update to update: N is counted in each" in words
    assert "give the items per sample" not in words, "the training job has no such option"
    assert "Note:" not in words


def test_a_data_set_below_a_global_batch_is_noted(tmp_path: Path) -> None:
    words = describe(with_few(built(tiny(tmp_path)), 5))
    assert "Run: 4 updates, 20 samples; an epoch has 1 update." in words
    assert "Note: the data set has 5 samples and a global batch 8: no update has a full one" in words
    assert "Note:" not in describe(with_few(built(tiny(tmp_path)), 10))


def test_a_strategy_of_several_ranks_is_noted_on_one(tmp_path: Path) -> None:
    alone = describe(built(tiny(tmp_path, parallel={"strategy": "fsdp"})))
    assert alone.endswith(
        'Note: parallel.strategy = "fsdp" does nothing on one rank; '
        "torchrun --nproc-per-node 2 -m wholebatch train starts 2."
    )


def test_items_that_nobody_counted_are_not_told(tmp_path: Path) -> None:
    job = built(tiny(tmp_path, data={"source": f"{write_own(tmp_path)}:data"}))
    assert "Data: 64 samples to train on, 8 held out." in describe(job)
    assert data_identity(job)["train_items"] is None


def test_what_would_not_be_expected_is_noted(tmp_path: Path) -> None:
    job = built(tiny(tmp_path))
    model = {**job.model.facts, "new_parameters": ["head.weight"], "unexpected_parameters": ["a", "b"]}
    data = {**job.data.facts, "train_samples_without_items": 3}
    job = dataclasses.replace(
        job,
        model=dataclasses.replace(job.model, facts=model),
        data=dataclasses.replace(job.data, facts=data),
    )
    samples = f"{len(job.data.train):,}"
    assert describe(job).splitlines()[-3:] == [
        f"Note: 3 of {samples} samples to train on have no item to learn and only fill batches.",
        "Note: 1 parameter of the model, such as head.weight, is not in its folder and random at first.",
        "Note: 2 weights of the folder, such as a, are not used.",
    ]


def test_that_the_first_updates_wait_for_a_compiler_is_noted(tmp_path: Path) -> None:
    job = built(tiny(tmp_path, model={"compile": True}))
    assert describe(job).endswith(
        "\nNote: model.compile = true: the first forwards wait for the compiler, for a minute or more."
    )


def test_frozen_parameters_are_told(tmp_path: Path) -> None:
    job = built(tiny(tmp_path))
    facts = {**job.model.facts, "trainable_parameters": 48}
    job = dataclasses.replace(job, model=dataclasses.replace(job.model, facts=facts))
    assert "Model: GPT of 12,048 parameters, 12,000 of them frozen, in float64." in describe(job)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"parameters": "float64"}, "float64"),
        (
            {"parameters": "float32", "autocast": "bfloat16"},
            "float32, forward in bfloat16 autocast",
        ),
    ],
)
def test_precision_in_words(tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    job = built(tiny(tmp_path, precision=settings))
    assert precision(job) == words
    assert header(job, None, []).precision == f"{words}, on cpu"


def test_the_header_has_all_that_stays_the_same(tmp_path: Path) -> None:
    job = built(tiny(tmp_path))
    found = header(job, prove_first_batch(job), ["wholebatch", "train"])
    assert found.settings == job.config.to_dict()
    assert (found.dataset, found.model) == (job.data.facts, job.model.facts)
    assert found.seeds == {"run": 0}
    assert found.proof is not None
    assert found.proof["equal"] is True
    assert found.layout == layout(job)
    assert found.layout["ranks"] == 1


def test_a_resumption_tells_only_what_is_other(tmp_path: Path) -> None:
    job = built(tiny(tmp_path))
    before = job.config.to_dict()
    before["run"]["seed"] = 3
    before["batch"]["gone"] = 1
    del before["optimizer"]["options"]
    found = resumption(job, before, ["again"], updates_attempted=2, samples=16)
    assert found.changed_settings == {
        "batch.gone": [1, None],
        "optimizer.options": [None, {}],
        "run.seed": [3, 0],
    }
    assert (found.updates_attempted, found.samples, found.command) == (2, 16, ["again"])
    assert (found.micro_batch_samples, found.micro_batches_per_window, found.replicas) == (2, 4, 1)
    assert found.precision == "float64, on cpu"
