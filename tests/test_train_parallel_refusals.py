"""What the ranks can't do together is refused before anything is loaded, with the user's own numbers."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from runs import tiny_tables
from wholebatch.errors import WholebatchError
from wholebatch.train.config import config_from_dict
from wholebatch.train.layouts.cut import reduces_each
from wholebatch.train.parts import check_settings
from wholebatch.train.settings import ParallelConfig

FSDP = {"strategy": "fsdp"}
PIPELINE = {"strategy": "pipeline"}
TWO_LAYERS = {"layers": 2}
BUDGET = {"micro_batch_samples": 0, "tokens_per_micro_batch": 64}
SHARED = {"parallel": {"context_parallel": 2}}
CUT = {"parallel": {"tensor_parallel": 2}}
PACKED = BUDGET | {"rows": "packed"}
OWN = {"source": "own.py:model"}
STAGED = {"parallel": PIPELINE, "model": TWO_LAYERS}


MUON = r"'Muon' moves matrices only, and 10 of 17 parameters .* shape \(16,\)"


def check(ranks: int, **sections: dict[str, Any]) -> Any:
    return check_settings(config_from_dict(tiny_tables(**sections)), ranks)


@pytest.mark.parametrize(
    ("ranks", "sections", "words"),
    [
        (2, {"parallel": {"pipeline_parallel": 2}}, '_parallel = 2 goes with .* copies .* it is "ddp"'),
        (2, {"parallel": FSDP | {"pipeline_schedule": "gpipe"}}, "'gpipe' goes with .* it is \"fsdp\""),
        (3, {"parallel": PIPELINE | {"pipeline_parallel": 2}}, "3 ranks do not divide by it; start a m"),
        (2, {"parallel": PIPELINE, "model": {"source": "own.py:model"}}, "and model.source is 'own.py:mod"),
        (4, {"parallel": PIPELINE}, "over 4 ranks has 4 stages, and 1 layers .model.layers. leave"),
        (2, STAGED | {"model": TWO_LAYERS | {"dropout": 0.5}}, "dropout = 0.5: the ranks of a pipeline"),
        (2, STAGED | {"lora": {"rank": 2}}, "over 2 ranks does not go with lora.rank = 2"),
        (
            2,
            {"parallel": PIPELINE | {"tensor_parallel": 2}, "model": TWO_LAYERS},
            "with parallel.t",
        ),
        (2, STAGED | {"model": TWO_LAYERS | {"compile": True}}, 'compile goes with .* it is "pipeline"'),
        (2, {"parallel": PIPELINE | {"reduce": "after_agreement"}}, "_agreement.*: .* once, when the sch"),
        (
            2,
            STAGED | {"batch": BUDGET | {"rows": "packed"}},
            'not go with batch.rows = "packed"',
        ),
        (
            2,
            STAGED | {"batch": {"micro_batch_samples": 8}},
            "takes 2 micro-batches .* has 1; lower",
        ),
        (
            2,
            STAGED | {"parallel": PIPELINE | {"pipeline_schedule": "zero_bubble"}},
            "virtual_stages = 1; set",
        ),
        (
            2,
            {
                "parallel": PIPELINE | {"pipeline_schedule": "zero_bubble", "pipeline_virtual_stages": 2},
                "model": {"layers": 4},
                "batch": {"global_batch_samples": 10},
            },
            "runs the 5 micro-batches of a window in 2 equal rounds",
        ),
        (
            2,
            {
                "parallel": PIPELINE
                | {"pipeline_schedule": "interleaved_1f1b", "pipeline_virtual_stages": 2},
                "model": {"layers": 4},
                "batch": {"global_batch_samples": 10},
            },
            "interleaved_1f1b over pipeline_parallel 2 needs",
        ),
        (
            2,
            {
                "parallel": PIPELINE | {"pipeline_virtual_stages": 2},
                "model": {"layers": 4},
                "batch": BUDGET,
            },
            "pipeline_virtual_stages=2 means nothing to 1f1b",
        ),
        (
            2,
            STAGED | {"parallel": PIPELINE | {"pipeline_schedule": "zero_bubble"}, "batch": BUDGET},
            "virtual_stages = 1; set",
        ),
        (
            1,
            {"parallel": {"tensor_parallel": 2}},
            "tensor_parallel = 2, and one rank .* torchrun --nproc",
        ),
        (3, {"parallel": {"context_parallel": 2}}, "context_parallel = 2: 3 ranks do not divide by it"),
        (2, SHARED | {"objective": {"kind": "label"}}, "and objective.kind 'label'; cut sequences in a l"),
        (2, SHARED | {"model": {"dropout": 0.5}}, "dropout = 0.5: the ranks that share a sequence"),
        (2, SHARED | {"model": {"compile": True}}, "context_parallel = 2 does not go with model.compile"),
        (4, {"parallel": PIPELINE | {"context_parallel": 2}}, 'does not go with parallel.strategy = "pip'),
        (
            2,
            {"parallel": {"reduce": "per_micro_batch"}},
            '"per_micro_batch" goes with .* "fsdp" or "hsdp", and',
        ),
        (
            2,
            {"parallel": FSDP | {"reduce": "after_agreement"}},
            '"after_agreement" goes with .* "ddp", and',
        ),
        (
            2,
            {"parallel": {"tensor_parallel": 2, "reduce": "after_agreement"}},
            "2 tensor-parallel ranks are on",
        ),
        (4, {"parallel": FSDP | {"shards": 2}}, 'shards = 2 is for parallel.strategy = "hsdp"'),
        (4, {"parallel": {"strategy": "hsdp"}}, r"shards = 0 has to divide the 4 replicas .* that do: 2"),
        (2, {"parallel": {"strategy": "hsdp", "shards": 2}}, "shards = 2 .* none does; take fsdp"),
        (2, {"parallel": {"tensor_parallel": 2}, "model": {"heads": 1}}, "1 attention heads .* that do: 1"),
        (
            3,
            {"parallel": FSDP | {"tensor_parallel": 2}},
            "3 ranks do not divide by it; start a multiple of 2",
        ),
        (4, {"parallel": {"tensor_parallel": 2}}, "makes 2 replicas of 4 ranks, and .* or start 2 ranks"),
        (
            2,
            {"parallel": {"tensor_parallel": 2}, "model": {"dropout": 0.5}},
            "model.dropout = 0.5: the ranks",
        ),
        (2, {"parallel": {"tensor_parallel": 2}, "lora": {"rank": 2}}, "does not go with lora.rank yet"),
        (
            2,
            {"parallel": {"tensor_parallel": 2}, "optimizer": {"name": "Adafactor"}},
            "Adafactor moves matri",
        ),
        (
            2,
            {"parallel": {"tensor_parallel": 2}, "optimizer": {"options": {"foreach": True}}},
            "not go with optimizer.options.foreach = true",
        ),
        (
            2,
            CUT | {"model": OWN},
            "knows the matrices of the built-in GPT, and model.source is 'own.py:model'",
        ),
        (2, CUT | {"optimizer": {"name": "Muon"}}, "Muon moves matrices as a whole"),
        (2, CUT | {"optimizer": {"name": "Rprop"}}, 'does not go with optimizer.name = "Rprop" yet'),
        (
            2,
            CUT | {"optimizer": {"options": {"fused": True}}},
            "not go with optimizer.options.fused = true",
        ),
        (2, CUT | {"batch": PACKED}, "tensor_parallel = 2 does not go with batch.rows yet"),
        (
            2,
            SHARED | {"model": OWN},
            "model.source 'own.py:model', data.source 'pydoc' and objective.kind",
        ),
        (
            2,
            SHARED | {"data": {"source": "own.py:data"}},
            "and here are model.source 'gpt', data.source 'own",
        ),
        (
            2,
            {"parallel": {"context_parallel": 2, "tensor_parallel": 2}},
            "go with parallel.tensor_parallel = 2",
        ),
        (2, SHARED | {"lora": {"rank": 2}}, "context_parallel = 2 does not go with lora.rank = 2"),
        (2, SHARED | {"batch": PACKED}, 'context_parallel = 2 does not go with batch.rows = "packed"'),
        (2, {"parallel": {"pipeline_virtual_stages": 2}}, '_virtual_stages = 2 goes with .* it is "ddp"'),
        (2, {"parallel": FSDP, "optimizer": {"name": "Adafactor"}}, "Adafactor takes norms of rows"),
        (2, {"parallel": FSDP, "optimizer": {"name": "Rprop"}}, "Rprop writes single elements"),
        (
            2,
            {"parallel": FSDP, "optimizer": {"name": "SGD", "options": {"fused": True}}},
            "torch has no fused SGD for parameters in parts",
        ),
        *[
            (ranks, {"parallel": {"strategy": strategy}, "optimizer": {"name": "Muon"}}, MUON)
            for ranks, strategy in ((1, "ddp"), (2, "ddp"), (2, "fsdp"))
        ],
        (2, {"parallel": FSDP, "model": {"compile": True}}, 'model.compile goes with .* it is "fsdp"'),
        (2, {"parallel": FSDP, "lora": {"rank": 2}}, "lora.rank = 2: adapters of .* 'gpt' are merged"),
        (
            2,
            {"parallel": FSDP, "precision": {"parameters": "float32", "autocast": "float16"}},
            '"float16" needs a loss scale',
        ),
    ],
)
def test_refusals(ranks: int, sections: dict[str, Any], words: str) -> None:
    with pytest.raises(WholebatchError, match=words):
        check(ranks, **sections)


ZERO = {"strategy": "deepspeed", "zero_stage": 2}
FLOAT32 = {"parameters": "float32"}


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"parallel": FSDP | {"zero_stage": 1}}, 'zero_stage = 1 is for .* "deepspeed", and it is "fsdp"'),
        (
            {"parallel": ZERO | {"reduce": "per_micro_batch"}},
            'reduce = "per_micro_batch" and .* leave it out',
        ),
        ({"parallel": ZERO | {"shards": 2}, "precision": FLOAT32}, "shards = 2 is for"),
        (
            {"parallel": ZERO | {"tensor_parallel": 2}},
            "zero_stage = 2 does not go with tensor_parallel = 2",
        ),
        (
            {"precision": {"parameters": "float64"}},
            'precision.parameters = "float64", because DeepSpeed reduces in float32',
        ),
        ({"precision": FLOAT32 | {"autocast": "float16"}}, 'autocast = "float16", whose loss scale'),
        ({"model": {"compile": True}}, "model.compile = true"),
        ({"lora": {"rank": 2}}, "lora.rank = 2"),
        (
            {"parallel": ZERO | {"zero_stage": 3}, "average": {"decay_per_update": 0.5}},
            "of parameters in pie",
        ),
        ({"parallel": ZERO | {"zero_stage": 0}, "optimizer": {"name": "Muon"}}, 'optimizer.name = "Muon"'),
        ({"optimizer": {"name": "Adafactor"}}, '"Adafactor", which moves elements by others'),
        ({"optimizer": {"name": "Adagrad"}}, '"Adagrad", which DeepSpeed makes anew'),
        ({"optimizer": {"name": "mine:Own"}}, "'mine:Own': it may not know how to move flat pieces"),
    ],
)
def test_refusals_under_deepspeed(sections: dict[str, Any], words: str) -> None:
    with pytest.raises(WholebatchError, match=words):
        check(2, **({"parallel": ZERO, "precision": FLOAT32} | sections))


@pytest.mark.parametrize(
    "sections",
    [
        {"parallel": ZERO | {"zero_stage": 0}, "optimizer": {"name": "Adagrad"}},
        {"parallel": ZERO | {"zero_stage": 0}, "optimizer": {"name": "torch.optim:SGD"}},
        {"average": {"decay_per_update": 0.5}},
    ],
)
def test_what_only_pieces_do_not_go_with_goes_without_them(
    sections: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wholebatch.train.layouts.check.need_deepspeed", lambda *_: None)
    assert check(2, **({"parallel": ZERO, "precision": FLOAT32} | sections)).replicas == 2


def test_deepspeed_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(WholebatchError, match=r"pip install 'wholebatch\[deepspeed\]'"):
        check(2, parallel=ZERO, precision=FLOAT32)


def test_replicas_are_what_is_left_of_the_ranks() -> None:
    assert check(4, parallel=FSDP | {"tensor_parallel": 2}).replicas == 2
    assert check(4, parallel=FSDP).replicas == 4
    assert check(4, parallel={"context_parallel": 2}).replicas == 2
    assert check(4, parallel=PIPELINE, model={"layers": 4}).replicas == 1
    assert check(4, parallel=PIPELINE | {"pipeline_parallel": 2}, model=TWO_LAYERS).replicas == 2
    assert check(4, parallel=FSDP | {"tensor_parallel": 2}, batch=BUDGET).replicas == 2


def test_who_reduces_in_every_micro_batch() -> None:
    def each(ranks: int = 2, **settings: Any) -> bool:
        return reduces_each(ParallelConfig(**settings), ranks)

    assert [each(strategy="deepspeed", zero_stage=stage) for stage in range(4)] == [
        False,
        False,
        True,
        True,
    ]
    assert each(strategy="fsdp", reduce="per_micro_batch")
    assert not each(strategy="fsdp")
    assert not each(strategy="ddp", reduce="after_agreement")
    assert not each(1, strategy="deepspeed", zero_stage=3)


@pytest.mark.parametrize("strategy", ["fsdp", "hsdp", "pipeline", "deepspeed"])
def test_one_rank_needs_none_of_it(strategy: str) -> None:
    plan = check(1, parallel={"strategy": strategy}, model={"compile": True}, lora={"rank": 2})
    assert plan.replicas == 1
