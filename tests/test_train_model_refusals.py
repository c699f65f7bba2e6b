"""Models that are not what their settings say: refused, or told, before anything trains on them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from jobs import built, tiny
from tiny_models import job_data, save_folder, settings
from wholebatch.errors import UsageError
from wholebatch.train.evaluate import evaluate
from wholebatch.train.material import JobModel
from wholebatch.train.models.choose import build_model, check_model_settings

SOURCE = """
import torch
from torch import nn

class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(300, 4), nn.BatchNorm1d(4)
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(4, 300)
        self.norm.eval()

    def forward(self, ids):
        x = self.norm(self.embedding(ids).transpose(1, 2)).transpose(1, 2)
        return self.head(self.drop(x))

def normed(quiet=False):
    return Normed().eval() if quiet else Normed()
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("folders")
    return {kind: save_folder(kind, root / kind) for kind in ("gpt2", "bert")}


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(SOURCE)
    return f"{tmp_path / 'mine.py'}:normed"


def model_of(folder: Path, kind: str = "next_token", **sections: dict[str, Any]) -> JobModel:
    sections["model"] = {"source": str(folder), **sections.get("model", {})}
    config = settings(objective={"kind": kind}, **sections)
    check_model_settings(config)
    return build_model(config, data=job_data(kind), device="cpu")


def changed(
    folder: Path, to: Path, rename: Callable[[str], str | None] = lambda name: name, **config: Any
) -> Path:
    """A copy of a folder with other names of its weights, or without them, and other settings."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, to)
    weights = load_file(to / "model.safetensors")
    kept = {new: value for name, value in weights.items() if (new := rename(name))}
    save_file(kept, to / "model.safetensors", metadata={"format": "pt"})
    shape = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(shape | config))
    return to


# Code that a folder brings along


@pytest.mark.parametrize("from_scratch", [False, True])
def test_code_of_a_folder_is_refused_and_not_run(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, from_scratch: bool
) -> None:
    def ask(*_: Any) -> str:
        raise AssertionError("somebody was asked whether to run it")

    monkeypatch.setattr("builtins.input", ask)
    auto_map = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}
    folder = changed(folders["gpt2"], tmp_path / "evil", model_type="novel", auto_map=auto_map)
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'was run')!r}, 'w')\n")
    with pytest.raises(
        UsageError, match=r"is a model with code of its own .*, which is not run; take a model"
    ):
        model_of(folder, model={"from_scratch": from_scratch})
    assert not (tmp_path / "was run").exists()


@pytest.mark.parametrize("from_scratch", [False, True])
def test_a_model_that_transformers_knows_is_loaded_without_the_code_of_its_folder(
    folders: dict[str, Path], tmp_path: Path, from_scratch: bool
) -> None:
    auto_map = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}
    folder = changed(folders["gpt2"], tmp_path / "evil", auto_map=auto_map)
    (folder / "evil.py").write_text("raise SystemExit('code of a folder was run')\n")
    assert model_of(folder, model={"from_scratch": from_scratch}).facts["name"] == "GPT2LMHeadModel"


# Weights that do not fit


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod."])
@pytest.mark.parametrize(("name", "kind"), [("gpt2", "next_token"), ("bert", "label")])
def test_weights_under_other_names_are_refused(
    folders: dict[str, Path], tmp_path: Path, name: str, kind: str, prefix: str
) -> None:
    folder = changed(folders[name], tmp_path / "renamed", lambda key: prefix + key)
    with pytest.raises(
        UsageError,
        match=rf"\d+ of the \d+ parameters of \w+ below its head have no weights in the folder, .* weights "
        rf"fit nothing, such as {prefix}.*; save the model",
    ):
        model_of(folder, kind)
    assert model_of(folder, kind, model={"from_scratch": True}).facts["from_scratch"]


def test_one_weight_under_another_name_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = changed(
        folders["gpt2"], tmp_path / "one", lambda key: key.replace("0.mlp.c_fc.weight", "0.mlp.fc.weight")
    )
    with pytest.raises(
        UsageError, match=r"1 of the 28 parameters .* and 1 of its weights fit nothing, such"
    ):
        model_of(folder)


def test_a_base_without_weights_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = changed(
        folders["bert"], tmp_path / "bare", lambda key: None if key.startswith("bert.") else key
    )
    with pytest.raises(
        UsageError, match=r"37 of the 37 parameters of BertForMaskedLM below its head have no"
    ):
        model_of(folder, "masked_token")


def test_layers_that_are_left_out_are_in_the_facts(folders: dict[str, Path], tmp_path: Path) -> None:
    fewer = model_of(changed(folders["gpt2"], tmp_path / "fewer", n_layer=1))
    assert len(fewer.facts["unexpected_parameters"]) == 11
    assert "new_parameters" not in fewer.facts
    more = model_of(changed(folders["gpt2"], tmp_path / "more", n_layer=3))
    assert len(more.facts["new_parameters"]) == 12
    assert "unexpected_parameters" not in more.facts


def test_a_head_that_is_not_used_is_in_the_facts(folders: dict[str, Path]) -> None:
    facts = model_of(folders["bert"], "label").facts
    assert "classifier.weight" in facts["new_parameters"]
    assert "cls.predictions.bias" in facts["unexpected_parameters"]


def test_adapters_on_what_is_trained_in_full_alone_are_refused(tmp_path: Path) -> None:
    from transformers import BertConfig, BertModel

    sizes = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    BertModel(BertConfig(**sizes, max_position_embeddings=32)).save_pretrained(tmp_path / "headless")
    with pytest.raises(
        UsageError,
        match=r"lora.target_modules \['transform.dense'\] names layers alone that start at random .*",
    ):
        model_of(
            tmp_path / "headless", "masked_token", lora={"rank": 2, "target_modules": ["transform.dense"]}
        )


# What is known before data and weights are read


def test_samples_longer_than_the_positions_of_config_json(folders: dict[str, Path]) -> None:
    config = settings(data={"max_tokens_per_sample": 33}, model={"source": str(folders["gpt2"])})
    with pytest.raises(
        UsageError, match=r"max_tokens_per_sample is 33, and model.source .*gpt2 has 32 positions"
    ):
        check_model_settings(config)


def test_a_function_that_is_not_there_or_takes_no_such_option(own: str) -> None:
    with pytest.raises(UsageError, match=r"model.source: .* has no 'abnormed'; it has Normed, normed"):
        check_model_settings(settings(model={"source": own.replace(":normed", ":abnormed")}))
    with pytest.raises(
        UsageError, match=r"model.options for .*: got an unexpected .*'silent'; it takes \(quiet"
    ):
        check_model_settings(settings(model={"source": own, "options": {"silent": True}}))


@pytest.mark.parametrize("key", ["layers", "width", "heads", "size", "dropout"])
def test_sizes_of_the_gpt_for_another_model_are_refused(
    folders: dict[str, Path], own: str, key: str
) -> None:
    value = {"size": "small", "dropout": 0.5}.get(key, 4)
    with pytest.raises(UsageError, match=rf"model.{key} is .*has its own; leave it out, or hand it on in"):
        check_model_settings(settings(model={"source": own, key: value}))
    of_folder = settings(model={"source": str(folders["gpt2"]), key: value})
    if key == "dropout":  # which a folder has
        check_model_settings(of_folder)
        return
    with pytest.raises(UsageError, match=rf"model.{key} is .* has its own; leave it out$"):
        check_model_settings(of_folder)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"lora": {"alpha": 8.0}}, "lora.alpha is 8.0, and lora.rank = 0 makes no adapters; give a rank"),
        ({"lora": {"dropout": 0.5}}, "lora.dropout is 0.5, and lora.rank = 0"),
        ({"lora": {"target_modules": ["a"]}}, r"lora.target_modules is \['a'\], and lora.rank = 0"),
        ({"objective": {"masked_share": 0.5}}, "masked_share is 0.5, and nothing is masked here, with obj"),
        (
            {"objective": {"masked_share": 0.5}, "data": {"source": "mine:data"}},
            "nothing is masked here, with objective.kind = 'next_token' and data.source = 'mine:data'",
        ),
    ],
)
def test_settings_that_nothing_would_read_are_refused(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_model_settings(settings(**sections))


def test_an_objective_that_neither_model_nor_data_reads_is_refused(
    folders: dict[str, Path], own: str
) -> None:
    mine, label = {"source": "mine:data"}, {"kind": "label"}
    with pytest.raises(UsageError, match=r"kind is 'label', and data.source 'mine:data' brings its own"):
        check_model_settings(settings(data=mine, objective=label, model={"source": own}))
    # It chooses the head of a folder's model, and of the GPT.
    check_model_settings(settings(data=mine, objective=label, model={"source": str(folders["gpt2"])}))
    check_model_settings(settings(data=mine, objective=label))


@pytest.mark.parametrize(
    "error",
    [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory"), torch.OutOfMemoryError()],
)
def test_memory_that_runs_out_while_the_model_is_built(
    monkeypatch: pytest.MonkeyPatch, own: str, error: Exception
) -> None:
    def no_memory(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("wholebatch.train.models.choose.GPT", no_memory)
    config = settings(model={"layers": 900, "width": 2048, "heads": 2})
    with pytest.raises(
        UsageError,
        match=r"memory ran out while the model was built: .* model.layers = 900 of model.width = 2048 have",
    ):
        build_model(config, data=job_data(), device="cpu")
    monkeypatch.setattr(nn.Module, "to", no_memory)
    with pytest.raises(UsageError, match=r"that model.source .*mine.py:normed has; take a smaller one"):
        build_model(settings(model={"source": own}), data=job_data(), device="cpu")


def test_other_errors_of_a_model_are_left_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*_: Any, **__: Any) -> None:
        raise RuntimeError("another")

    monkeypatch.setattr("wholebatch.train.models.choose.GPT", wrong)
    with pytest.raises(RuntimeError, match="another"):
        build_model(settings(), data=job_data(), device="cpu")


# Parts that are in eval mode on purpose


def modes(module: nn.Module) -> dict[str, bool]:
    return {name: part.training for name, part in module.named_modules()}


def test_a_part_in_eval_mode_stays_so_through_building_and_evaluating(own: str, tmp_path: Path) -> None:
    config = tiny(tmp_path / "run", model={"source": own, "layers": 0, "width": 0, "heads": 0})
    job = built(config)
    assert modes(job.model.module) == {
        "": True,
        "embedding": True,
        "norm": False,
        "drop": True,
        "head": True,
    }
    before = {name: value.clone() for name, value in job.model.module.state_dict().items()}
    first = evaluate(job, job.data.held_out)
    assert evaluate(job, job.data.held_out) == first, "dropout was on"
    assert not modes(job.model.module)["norm"]
    assert modes(job.model.module)["drop"]
    after = job.model.module.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_a_model_returned_in_eval_mode_stays_so(own: str) -> None:
    config = settings(model={"source": own, "options": {"quiet": True}})
    assert not any(modes(build_model(config, data=job_data(), device="cpu").module).values())
