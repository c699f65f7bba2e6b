"""The training job under each strategy: the same run as on one rank, resumed, evaluated and written."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from jobs import (
    check_same_ends,
    largest_difference,
    newest_checkpoint,
    parameters,
    resumed,
    run,
    tiny,
    told,
    write_own,
)
from ranks import run_ranks
from wholebatch.train.models.heads import whole_attention
from wholebatch.train.world import World

pytestmark = pytest.mark.slow

Sections = dict[str, dict[str, Any]]


def whole(job: Any) -> dict[str, torch.Tensor]:
    """The parameters of a job, put together."""
    found = {
        name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in parameters(job).items()
    }
    return whole_attention(found)


def train(rank: int, n: int, folder: str, cases: dict[str, Sections]) -> Any:  # noqa: ARG001
    """A run of each case: its parameters, and what it showed."""
    found = {}
    for name, sections in cases.items():
        _, job, display = run(tiny(f"{folder}/{name}", **sections), World.of_all())
        found[name] = whole(job), display.words.getvalue()
    return found


def by_strategy(**parallel: Any) -> Sections:
    return {"parallel": parallel, "average": {"decay_per_update": 0.5}}


BATCH: Sections = {"batch": {"global_batch_samples": 24}}
# By the ranks of one launch.
CASES: dict[int, dict[str, Sections]] = {
    2: {
        "fsdp": by_strategy(strategy="fsdp") | BATCH,
        "each": by_strategy(strategy="fsdp", reduce="per_micro_batch") | BATCH,
        "tensor": by_strategy(tensor_parallel=2) | BATCH,
        "checkpointed": by_strategy(strategy="fsdp")
        | {"model": {"activation_checkpointing": True}, "optimizer": {"name": "SGD"}},
        "packed": by_strategy(strategy="fsdp")
        | {"batch": {"micro_batch_samples": 0, "tokens_per_micro_batch": 96, "rows": "packed"}},
    },
    3: {
        "fsdp": by_strategy(strategy="fsdp") | BATCH,
        "context": by_strategy(context_parallel=3) | BATCH,
        # Ragged: one rank has more micro-batches of held-out samples than the other, and in tails too.
        "ragged": by_strategy(strategy="fsdp")
        | {"data": {"held_out_one_in": 500}, "batch": {"global_batch_samples": 6}},
    },
    4: {
        "tensor": by_strategy(strategy="fsdp", tensor_parallel=2) | BATCH,
        "hsdp": by_strategy(strategy="hsdp", shards=2) | BATCH,
        "context": by_strategy(strategy="hsdp", shards=2, context_parallel=2) | BATCH,
    },
}


@pytest.mark.parametrize("ranks", CASES)
def test_a_run_is_the_same_as_on_one_rank(tmp_path: Path, ranks: int) -> None:
    several = run_ranks(train, ranks, str(tmp_path / "several"), CASES[ranks], timeout_s=180)
    for name, sections in CASES[ranks].items():
        alone = whole(run(tiny(tmp_path / "one" / name, **(sections | by_strategy())))[1])
        for of_rank in several:
            found, words = of_rank[name]
            assert largest_difference(alone, found) < 1e-11, name
            assert "Each rank: " in words, name
            assert ("in every micro-batch, so" in words) == (name == "each"), name
        check_same_run(tmp_path / "one" / name, tmp_path / "several" / name, ranks, sections["parallel"])


def check_same_run(one: Path, several: Path, ranks: int, parallel: dict[str, Any]) -> None:
    """Two runs of the same updates, evaluations and models."""
    (records, _), (others, _) = told(one), told(several)
    for here, there in zip(records, others, strict=True):
        for name in ("samples", "items", "sample_digest", "outcome"):
            assert here[name] == there[name], name
        # Parts of one length may take a position or two more.
        assert here["positions"] <= there["positions"] < here["positions"] * 1.1
        expected = 1
        if parallel.get("reduce") == "per_micro_batch":
            expected = there["micro_batches"] // ranks
        elif ranks == parallel.get("tensor_parallel"):
            expected = 0  # one replica
        assert there["reductions"] == expected
        assert here["gradient_norm"] == pytest.approx(there["gradient_norm"], rel=1e-10)
        assert here["loss_per_item"] == pytest.approx(there["loss_per_item"], rel=1e-12)
    check_same_ends(one, several)


def train_and_resume(rank: int, n: int, folder: str, cases: dict[str, Sections]) -> Any:  # noqa: ARG001
    """Of each case a run, and what is the same of it when it is resumed half way."""
    world, found = World.of_all(), {}
    for name, sections in cases.items():
        at = f"{folder}/{name}"
        before = whole(run(tiny(at, **sections), world)[1]), told(at), newest_checkpoint(at)
        world.total([0.0])  # the leading rank reads what the others' resumption would overwrite
        after = whole(resumed(f"{at}/checkpoints/update-00000002", world=world)[1])
        found[name] = before, (after, told(at), newest_checkpoint(at))
    return found


def test_a_run_in_parts_is_resumed_bit_for_bit(tmp_path: Path) -> None:
    own, dropout = write_own(tmp_path), {"model": {"dropout": 0.2}}
    cases = {
        "ddp": by_strategy() | dropout,
        # 26 samples: each second update has two of them, and three ranks have none.
        "tails": by_strategy()
        | {
            "data": {"source": f"{own}:data", "options": {"number": 26}},
            "model": {"source": f"{own}:model", "layers": 0, "width": 0, "heads": 0},
            "batch": {"global_batch_samples": 24},
            "run": {"num_updates": 6},
            "checkpoints": {"keep_last": 3},
        },
        "fsdp": by_strategy(strategy="fsdp") | dropout,
        "hsdp": by_strategy(strategy="hsdp", shards=2) | dropout,
        "tensor": by_strategy(strategy="fsdp", tensor_parallel=2),
        "pipeline": by_strategy(strategy="pipeline", pipeline_parallel=2) | {"model": {"layers": 2}},
        "context": by_strategy(context_parallel=2),
    }
    for of_rank in run_ranks(train_and_resume, 4, str(tmp_path), cases, timeout_s=300):
        for name, (before, after) in of_rank.items():
            assert largest_difference(before[0], after[0]) == 0.0, name
            assert before[1:] == after[1:], name


def resume(rank: int, n: int, folder: str, changes: dict[str, list[str]]) -> Any:  # noqa: ARG001
    """What each run comes to from the middle on."""
    world = World.of_all()
    return {
        name: whole(resumed(f"{folder}/{name}/{HALF_WAY}", *of, world=world)[1])
        for name, of in changes.items()
    }


HALF_WAY = "checkpoints/update-00000002"
BEGUN_BY_TWO: dict[str, Sections] = {
    "fsdp": by_strategy(strategy="fsdp"),
    "ddp": by_strategy(),
    "tensor": by_strategy(tensor_parallel=2),
    "context": by_strategy(context_parallel=2),
}
# How a run was begun, and what is changed of it.
BY_ONE = {"fsdp": ["parallel.strategy=ddp"], "context": ["parallel.context_parallel=1"]}
BY_FOUR = {
    "fsdp": ["parallel.strategy=hsdp", "parallel.shards=2"],
    "ddp": ["parallel.strategy=fsdp", "parallel.reduce=per_micro_batch"],
    "tensor": ["parallel.strategy=fsdp"],
    "context": ["parallel.context_parallel=1"],
}


def test_other_ranks_go_on_with_the_same_updates(tmp_path: Path) -> None:
    alone = whole(run(tiny(tmp_path / "alone", **by_strategy()))[1])
    run_ranks(train, 2, str(tmp_path / "one"), BEGUN_BY_TWO, timeout_s=120)
    shutil.copytree(tmp_path / "one", tmp_path / "four")
    found = [whole(resumed(tmp_path / "one" / name / HALF_WAY, *of)[1]) for name, of in BY_ONE.items()]
    for of_rank in run_ranks(resume, 4, str(tmp_path / "four"), BY_FOUR, timeout_s=120):
        found += of_rank.values()
    for one in found:
        assert largest_difference(alone, one) < 1e-11
    digests = [r["sample_digest"] for r in told(tmp_path / "alone")[0]]
    for at in [
        *(tmp_path / "one" / name for name in BY_ONE),
        *(tmp_path / "four" / name for name in BY_FOUR),
    ]:
        assert [r["sample_digest"] for r in told(at)[0]] == digests, at


CHAIN: Sections = {
    "run": {"num_updates": 8},
    "checkpoints": {"keep_last": 4},
    "model": {"layers": 2},
    "average": {"decay_per_update": 0.5},
}
# Ranks, the update after which they take over, and what they change.
LEGS = [
    (4, 2, ["parallel.strategy=fsdp", "batch.micro_batch_samples=1"]),
    (2, 4, ["parallel.strategy=pipeline", "parallel.pipeline_parallel=2", "batch.micro_batch_samples=2"]),
    (1, 6, ["parallel.strategy=ddp", "parallel.pipeline_parallel=1", "batch.micro_batch_samples=4"]),
]


def take_over(rank: int, n: int, checkpoint: str, changes: list[str]) -> Any:  # noqa: ARG001
    return whole(resumed(checkpoint, *changes, world=World.of_all())[1])


def test_one_run_goes_through_strategies_ranks_and_micro_batches(tmp_path: Path) -> None:
    alone = whole(run(tiny(tmp_path / "alone", **CHAIN))[1])
    run_ranks(train, 2, str(tmp_path), {"chain": CHAIN}, timeout_s=120)
    for ranks, after, changes in LEGS:
        checkpoint = tmp_path / "chain" / "checkpoints" / f"update-{after:08d}"
        last, *_ = run_ranks(take_over, ranks, str(checkpoint), changes, timeout_s=120)
    assert largest_difference(alone, last) < 1e-11
    (records, evaluations), (others, other_evaluations) = told(tmp_path / "alone"), told(tmp_path / "chain")
    assert [r["micro_batches"] for r in others] == [4, 4, 8, 8, 4, 4, 2, 2]
    for name in ("sample_digest", "samples", "items", "updates_applied"):
        assert [r[name] for r in others] == [r[name] for r in records], name
    losses = [e["loss_per_item"] for e in evaluations]
    assert [e["loss_per_item"] for e in other_evaluations] == pytest.approx(losses, rel=1e-11)


def train_folders(rank: int, n: int, folder: str) -> Any:  # noqa: ARG001
    """Runs of a Hugging Face model, cut where there are several ranks; what each wrote."""
    from safetensors.torch import load_file

    from tiny_models import save_folder

    world, found = World.of_all(), []
    world.on_leader(lambda: str(save_folder("llama", Path(folder) / "llama", vocab_size=257)))
    for rank_of_adapters in (0, 2):
        sections: Sections = {
            "parallel": {"strategy": "fsdp"},
            "model": {
                "source": f"{folder}/llama",
                "from_scratch": True,
                "layers": 0,
                "width": 0,
                "heads": 0,
            },
            "lora": {"rank": rank_of_adapters},
        }
        at = f"{folder}/run-{n}-{rank_of_adapters}"
        job = run(tiny(at, **sections), world)[1]
        layers = [m for m in job.model.module.modules() if type(m).__name__ == "FSDPLlamaDecoderLayer"]
        (written,) = Path(f"{at}/model").glob("*.safetensors")
        found.append((len(layers), load_file(written)))
    return found


def test_a_model_folder_is_cut_by_its_layers_and_written_whole(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    (of_one,) = run_ranks(train_folders, 1, str(tmp_path), timeout_s=120)
    for of_rank in run_ranks(train_folders, 2, str(tmp_path), timeout_s=120):
        for (none, alone), (layers, written) in zip(of_one, of_rank, strict=True):
            assert none == 0 < layers
            assert largest_difference(alone, written) < 1e-11
