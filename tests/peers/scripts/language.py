"""A language of 48 words, and models of it that are small enough to train in no time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

WORDS = 48
IGNORED = -100
# Two samples a micro-batch and four micro-batches an update: here two updates of each.
EQUAL = [9] * 16
RAGGED = [3, 4, 12, 11, 6, 5, 24, 20, 5, 3, 18, 16, 4, 4, 9, 14]


class TinyLM(nn.Module):
    """Words to scores of the next word."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 16)
        self.hidden = nn.Linear(16, 32)
        self.head = nn.Linear(32, WORDS)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.hidden(self.embed(input_ids))))


def tiny_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=64,
            pad_token_id=0,
        )
    )


def tiny_bert() -> nn.Module:
    """A classifier; its forward takes no number of items from a trainer."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=WORDS,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=64,
            num_labels=3,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def documents(lengths: Sequence[int]) -> list[dict[str, torch.Tensor]]:
    """One document of each length; every word but the first is a label."""
    generator = torch.Generator().manual_seed(0)
    words = [torch.randint(1, WORDS, (length,), generator=generator) for length in lengths]
    return [{"input_ids": ids, "labels": ids.clone()} for ids in words]


def labelled(num_samples: int) -> list[dict[str, torch.Tensor]]:
    """Documents of one length, each with one of three classes."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, WORDS, (num_samples, 9), generator=generator)
    return [{"input_ids": row, "labels": row.sum() % 3} for row in ids]


def pad(samples: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Documents of unequal lengths as one batch; what is padded is no label."""

    def together(name: str, value: int) -> torch.Tensor:
        rows = [sample[name] for sample in samples]
        return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)

    ids = together("input_ids", 0)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": together("labels", IGNORED)}


def next_word_loss(scores: torch.Tensor, labels: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    return F.cross_entropy(
        scores[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED, reduction=reduction
    )


def num_targets(labels: torch.Tensor) -> torch.Tensor:
    return (labels[:, 1:] != IGNORED).sum()
