"""The training job under each strategy: the same run as on one rank, resumed, evaluated and written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from jobs import largest_difference, parameters, resumed, run, tiny, told
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


def train(rank: int, n: int, folder: str, sections: Sections) -> Any:  # noqa: ARG001
    _, job, display = run(tiny(folder, **sections), World.of_all())
    return whole(job), display.words.getvalue()


def by_strategy(**parallel: Any) -> Sections:
    return {"parallel": parallel, "average": {"decay_per_update": 0.5}}


LAYOUTS = [
    (2, {"strategy": "fsdp"}),
    (2, {"strategy": "fsdp", "reduce": "per_micro_batch"}),
    (3, {"strategy": "fsdp"}),
    (2, {"tensor_parallel": 2}),
    (4, {"strategy": "fsdp", "tensor_parallel": 2}),
    (4, {"strategy": "hsdp", "shards": 2}),
    (3, {"context_parallel": 3}),
    (4, {"strategy": "fsdp", "context_parallel": 2}),
]


@pytest.mark.parametrize(("ranks", "parallel"), LAYOUTS)
def test_a_run_is_the_same_as_on_one_rank(tmp_path: Path, ranks: int, parallel: dict[str, Any]) -> None:
    batch = {"global_batch_samples": 24}
    _, job, _ = run(tiny(tmp_path / "one", batch=batch, **by_strategy()))
    alone = whole(job)
    sections = by_strategy(**parallel) | {"batch": batch}
    for found, _ in run_ranks(train, ranks, str(tmp_path / "several"), sections):
        assert largest_difference(alone, found) < 1e-11
    one, several = told(tmp_path / "one"), told(tmp_path / "several")
    for here, there in zip(one[0], several[0], strict=True):
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
    for here, there in zip(one[1], several[1], strict=True):
        assert here["loss_per_item"] == pytest.approx(there["loss_per_item"], rel=1e-11)
        assert (here["items"], here["samples"]) == (there["items"], there["samples"])
    for name in ("model", "model-average"):
        state = torch.load(tmp_path / "one" / name / "model.pt", weights_only=True)
        other = torch.load(tmp_path / "several" / name / "model.pt", weights_only=True)
        assert largest_difference(state, other) < 1e-11


def train_and_resume(rank: int, n: int, folder: str, sections: Sections) -> Any:  # noqa: ARG001
    """A run, and what is the same of it when it is resumed half way."""
    job = run(tiny(folder, **sections), World.of_all())[1]
    before, records = whole(job), told(folder)
    World.of_all().total([0.0])  # the leading rank reads what the others' resumption would overwrite
    job = resumed(f"{folder}/checkpoints/update-00000002", world=World.of_all())[1]
    return before, whole(job), records, told(folder)


@pytest.mark.parametrize(
    ("ranks", "parallel"), [(2, {"strategy": "fsdp"}), (4, {"strategy": "fsdp", "tensor_parallel": 2})]
)
def test_a_run_in_parts_is_resumed_bit_for_bit(tmp_path: Path, ranks: int, parallel: Any) -> None:
    found = run_ranks(train_and_resume, ranks, str(tmp_path / "run"), by_strategy(**parallel))
    for before, after, records, records_after in found:
        assert largest_difference(before, after) == 0.0
        assert records == records_after


def resume(rank: int, n: int, named: str, changes: list[str]) -> Any:  # noqa: ARG001
    return whole(resumed(named, *changes, world=World.of_all())[1])


@pytest.mark.parametrize(
    ("begun", "ranks", "then", "ranks_then"),
    [
        (["parallel.strategy=fsdp"], 2, ["parallel.strategy=ddp"], 2),
        (["parallel.strategy=fsdp"], 2, ["parallel.strategy=ddp"], 1),
        (["parallel.strategy=fsdp"], 2, ["parallel.strategy=hsdp", "parallel.shards=2"], 4),
        ([], 2, ["parallel.strategy=fsdp", "parallel.reduce=per_micro_batch"], 4),
        (["parallel.tensor_parallel=2"], 2, ["parallel.strategy=fsdp"], 4),
        (["parallel.context_parallel=2"], 2, ["parallel.context_parallel=1"], 1),
    ],
)
def test_other_ranks_go_on_with_the_same_updates(
    tmp_path: Path, begun: list[str], ranks: int, then: list[str], ranks_then: int
) -> None:
    _, job, _ = run(tiny(tmp_path / "one", **by_strategy()))
    alone = whole(job)
    pairs = dict(change.removeprefix("parallel.").split("=") for change in begun)
    parallel = {key: int(value) if value.isdigit() else value for key, value in pairs.items()}
    run_ranks(train, ranks, str(tmp_path / "run"), by_strategy(**parallel))
    named = str(tmp_path / "run" / "checkpoints" / "update-00000002")
    if ranks_then == 1:
        found = [whole(resumed(named, *then)[1])]
    else:
        found = run_ranks(resume, ranks_then, named, then)
    for one in found:
        assert largest_difference(alone, one) < 1e-11
    digests = [[r["sample_digest"] for r in told(tmp_path / name)[0]] for name in ("one", "run")]
    assert digests[0] == digests[1]


MORE: list[tuple[int, Sections]] = [
    (2, by_strategy(strategy="fsdp") | {"model": {"activation_checkpointing": True}}),
    (
        2,
        by_strategy(strategy="fsdp")
        | {"batch": {"micro_batch_samples": 0, "tokens_per_micro_batch": 96, "rows": "packed"}},
    ),
    # Ragged: one rank has more micro-batches of held-out samples than the other, and in tails too.
    (
        3,
        by_strategy(strategy="fsdp")
        | {"data": {"held_out_one_in": 500}, "batch": {"global_batch_samples": 6}},
    ),
]


@pytest.mark.parametrize(("ranks", "sections"), MORE)
def test_other_settings_go_with_it(tmp_path: Path, ranks: int, sections: Sections) -> None:
    alone = whole(run(tiny(tmp_path / "one", **(sections | by_strategy())))[1])
    for found, words in run_ranks(train, ranks, str(tmp_path / "several"), sections):
        assert largest_difference(alone, found) < 1e-11
        assert "Each rank: " in words
    one, several = told(tmp_path / "one")[1], told(tmp_path / "several")[1]
    for here, there in zip(one, several, strict=True):
        assert here["loss_per_item"] == pytest.approx(there["loss_per_item"], rel=1e-11)
        assert (here["items"], here["samples"]) == (there["items"], there["samples"])
    state, other = (
        torch.load(tmp_path / name / "model" / "model.pt", weights_only=True) for name in ("one", "several")
    )
    assert largest_difference(state, other) < 1e-11


def train_folder(rank: int, n: int, folder: str, rank_of_adapters: int) -> Any:  # noqa: ARG001
    """A run of a Hugging Face model, cut where there are several ranks; what was written."""
    from safetensors.torch import load_file

    from tiny_models import save_folder

    world = World.of_all()
    world.on_leader(lambda: str(save_folder("llama", Path(folder) / "llama", vocab_size=257)))
    sections: Sections = {
        "parallel": {"strategy": "fsdp"},
        "model": {"source": f"{folder}/llama", "from_scratch": True, "layers": 0, "width": 0, "heads": 0},
        "lora": {"rank": rank_of_adapters},
    }
    job = run(tiny(f"{folder}/run-{n}", **sections), world)[1]
    layers = [m for m in job.model.module.modules() if type(m).__name__ == "FSDPLlamaDecoderLayer"]
    (written,) = Path(f"{folder}/run-{n}/model").glob("*.safetensors")
    return len(layers), load_file(written)


@pytest.mark.parametrize("rank_of_adapters", [0, 2])
def test_a_model_folder_is_cut_by_its_layers_and_written_whole(
    tmp_path: Path, rank_of_adapters: int
) -> None:
    pytest.importorskip("peft")
    ((layers, alone),) = run_ranks(train_folder, 1, str(tmp_path), rank_of_adapters)
    assert layers == 0
    for layers, written in run_ranks(train_folder, 2, str(tmp_path), rank_of_adapters):
        assert layers > 0
        assert largest_difference(alone, written) < 1e-11
