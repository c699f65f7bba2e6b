"""What a run leaves behind loads elsewhere and gives the same logits."""

from __future__ import annotations

import json
import os
import resource
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from tiny_models import job_data, ragged, save_folder, settings
from wholebatch.errors import RecordError
from wholebatch.train.material import JobModel
from wholebatch.train.models.choose import build_model
from wholebatch.train.models.export import export_model
from wholebatch.train.models.gpt import GPT, GPTShape

SMALL = {"layers": 2, "width": 16, "heads": 2}


def build(kind: str = "next_token", **sections) -> JobModel:
    model = build_model(settings(objective={"kind": kind}, **sections), data=job_data(kind), device="cpu")
    with torch.no_grad():  # as if it had been trained
        for parameter in model.module.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.module.eval()
    return model


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder("llama", tmp_path_factory.mktemp("folders") / "llama")


def load_gpt(folder: Path) -> GPT:
    model = GPT(GPTShape(**json.loads((folder / "shape.json").read_text())))
    model.load_state_dict(torch.load(folder / "model.pt", weights_only=True))
    return model.eval()


@pytest.mark.parametrize("kind", ["next_token", "label"])
def test_a_gpt_is_a_state_dict_and_its_sizes(tmp_path, kind):
    model = build(kind, model=SMALL)
    assert export_model(model, tmp_path / "model") == tmp_path / "model"
    assert sorted(path.name for path in tmp_path.rglob("*.*")) == ["model.pt", "shape.json"]
    again = JobModel(module=load_gpt(tmp_path / "model"), forward=model.forward)
    batch = ragged(kind)
    assert torch.equal(again.forward(again.module, batch), model.forward(model.module, batch))


def test_adapters_of_a_gpt_are_merged_into_its_weights(tmp_path):
    model = build(model=SMALL, lora={"rank": 2}, precision={"parameters": "float64"})
    names = list(model.module.state_dict())
    export_model(model, tmp_path / "model")
    again = load_gpt(tmp_path / "model").double()
    again.load_state_dict(torch.load(tmp_path / "model" / "model.pt", weights_only=True))
    expected = model.forward(model.module, ragged())
    torch.testing.assert_close(again(ragged()["input_ids"]), expected, rtol=0, atol=1e-12)
    assert list(model.module.state_dict()) == names  # the model goes on as it was
    assert torch.equal(model.forward(model.module, ragged()), expected)


def test_a_module_of_ones_own_is_a_state_dict(tmp_path):
    module = nn.Sequential(nn.Embedding(50, 4), nn.Linear(4, 50))
    export_model(JobModel(module=module, forward=lambda module, batch: module(batch)), tmp_path / "model")
    stored = torch.load(tmp_path / "model" / "model.pt", weights_only=True)
    assert list(stored) == list(module.state_dict())
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["model.pt"]


def test_a_hugging_face_model_is_a_folder_with_its_tokenizer(llama, tmp_path, capfd):
    from transformers import AutoModelForCausalLM

    tokenizer = tmp_path / "tokens"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text('{"some": "tokens"}')
    (tokenizer / "model.safetensors").write_text("not the tokenizer's")
    model = build(model={"source": str(llama)})
    export_model(model, tmp_path / "model", tokenizer=tokenizer)
    assert capfd.readouterr() == ("", "")
    assert (tmp_path / "model" / "tokenizer.json").read_text() == '{"some": "tokens"}'
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model", local_files_only=True)
    batch = ragged()
    given = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    assert torch.equal(again(**given).logits, model.forward(model.module, batch))
    assert not list((tmp_path / "model").glob("*.bin"))


@pytest.mark.filterwarnings(
    "ignore:.*is_gradient_checkpointing:FutureWarning"
)  # peft 0.21 on transformers 5
@pytest.mark.parametrize("kind", ["next_token", "label"])
def test_adapters_on_a_folder_load_onto_the_same_base(llama, tmp_path, kind):
    import transformers
    from peft import PeftModel

    base = llama if kind == "next_token" else save_folder("bert", tmp_path / "bert")
    model = build(kind, model={"source": str(base)}, lora={"rank": 2})
    export_model(model, tmp_path / "model")
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {
        path.name for path in (tmp_path / "model").iterdir()
    }
    stored = json.loads((tmp_path / "model" / "adapter_config.json").read_text())
    assert stored["task_type"] == {"next_token": "CAUSAL_LM", "label": "SEQ_CLS"}[kind]
    assert stored["base_model_name_or_path"] == str(base)
    name = "AutoModelForCausalLM" if kind == "next_token" else "AutoModelForSequenceClassification"
    labels = {} if kind == "next_token" else {"num_labels": 3}
    plain = getattr(transformers, name).from_pretrained(base, **labels)
    again = PeftModel.from_pretrained(plain, tmp_path / "model").eval()
    batch = ragged(kind)
    given = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    # The new head is among what was trained, so it comes with the adapter.
    assert torch.equal(again(**given).logits, model.forward(model.module, batch))


def test_an_adapter_is_written_without_asking_a_server_about_its_base(tmp_path, monkeypatch):
    def asked(*_, **__):
        raise AssertionError("a server was asked")

    monkeypatch.setattr("peft.utils.save_and_load.check_file_exists_on_hf_hub", asked)
    base = save_folder("gpt2", tmp_path / "gpt2")
    model = build(model={"source": str(base)}, lora={"rank": 2})
    shutil.rmtree(base)
    export_model(model, tmp_path / "model")
    assert (tmp_path / "model" / "adapter_model.safetensors").is_file()


def test_an_export_replaces_the_one_before_only_when_it_is_whole(tmp_path, monkeypatch):
    folder = tmp_path / "model"
    export_model(build(model=SMALL), folder)
    before = (folder / "model.pt").read_bytes()
    model = build(model=SMALL)

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("torch.save", full)
        with pytest.raises(RecordError, match=r"can't be written to .*model: .*No space left on device"):
            export_model(model, folder)
    assert (folder / "model.pt").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    rename = Path.rename

    def refused(path, target):
        if path.name == "model.part":
            raise PermissionError(13, "Permission denied")
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", refused)
        with pytest.raises(RecordError, match=r"can't be written to .*model: .*Permission denied"):
            export_model(model, folder)
    assert (folder / "model.pt").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    export_model(model, folder)
    assert (folder / "model.pt").read_bytes() != before
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_full_disk_is_told_as_the_system_has_it_and_lets_go_of_the_file(tmp_path):
    """torch hides it behind an error of its own, which keeps the file open and so the disk full."""
    model = build(model=SMALL)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(RecordError, match=r"can't be written to .*model: File too large") as caught:
            export_model(model, tmp_path / "model")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []
    links = [Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd")]
    assert [str(p) for p in links if p.is_symlink() and "model.pt" in os.readlink(p)] == [], caught.value


def test_an_export_is_on_the_disk_with_its_names(tmp_path, monkeypatch):
    synced = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda f: synced.append(os.readlink(f"/proc/self/fd/{f}")) or fsync(f))
    export_model(build(model=SMALL), tmp_path / "model")
    names = [os.path.relpath(name, tmp_path) for name in synced]
    assert names[0] == "model.part/model.pt"  # as it is written, and with the others
    assert sorted(names[1:3]) == ["model.part/model.pt", "model.part/shape.json"]
    assert names[3:] == ["model.part", "."]
