"""Model folders of a few thousand random parameters, and the ragged samples that go through them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wholebatch.losses import next_token_loss, token_loss
from wholebatch.train.material import JobData
from wholebatch.train.settings import TrainConfig

VOCABULARY = 50
LENGTHS = [3, 9, 5, 12, 2, 7]


def save_folder(kind: str, folder: Path, **changes: Any) -> Path:
    """Save a random llama, gpt2, bert or roberta; those with dropout keep its default."""
    import transformers

    wide = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 32,
        "pad_token_id": 0,
    }
    gpt2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(0)
    classes = {
        "llama": ("LlamaConfig", "LlamaForCausalLM", {**wide, "num_key_value_heads": 2, **ends}),
        "gpt2": ("GPT2Config", "GPT2LMHeadModel", {**gpt2, **ends}),
        "bert": ("BertConfig", "BertForMaskedLM", wide),
        "roberta": ("RobertaConfig", "RobertaForMaskedLM", {**wide, "pad_token_id": 1}),
    }
    shape, model, sizes = classes[kind]
    config = getattr(transformers, shape)(**{**sizes, **changes})
    getattr(transformers, model)(config).save_pretrained(folder)
    return folder


def settings(**sections: dict[str, Any]) -> TrainConfig:
    """The default settings with some keys changed, samples of at most 16 tokens."""
    config = TrainConfig()
    sections.setdefault("data", {}).setdefault("max_tokens_per_sample", 16)
    changed = {name: dataclasses.replace(getattr(config, name), **keys) for name, keys in sections.items()}
    return dataclasses.replace(config, **changed)


def job_data(kind: str = "next_token", **changes: Any) -> JobData:
    """Data that a model is built for; nothing is read from it."""
    given = {
        "train": [],
        "held_out": [],
        "objective": next_token_loss() if kind == "next_token" else token_loss(),
        "collate": _collate,
        "vocabulary": VOCABULARY,
        "num_labels": 3 if kind == "label" else None,
    }
    return JobData(**{**given, **changes})


def _collate(*_: Any) -> dict[str, Any]:
    raise AssertionError("a model is built without looking at a sample")


def ragged(kind: str = "next_token", lengths: list[int] | None = None) -> dict[str, Tensor]:
    """A batch of samples of unequal lengths, padded on the right, with the labels of an objective."""
    lengths = LENGTHS if lengths is None else lengths
    samples, tokens = len(lengths), max(lengths, default=0)
    numbers = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCABULARY, (samples, tokens), generator=numbers)
    mask = (torch.arange(tokens)[None] < torch.tensor(lengths, dtype=torch.int64)[:, None]).long()
    labels = torch.where(mask == 1, ids, -100)
    if kind == "masked_token":
        masked = torch.rand(samples, tokens, generator=numbers) < 0.5
        labels = torch.where(masked, labels, -100)
        ids = torch.where(masked, 1, ids)
    if kind == "label":
        labels = torch.arange(samples).remainder(3)
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": labels}
