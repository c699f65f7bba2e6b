"""Tiny data and tiny models that all loops train on; the same on every machine."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FEATURES, CLASSES, VOCABULARY, WIDTH = 6, 4, 20, 8
IGNORED = -100
# A window of 4 micro-batches of 2 sequences holds 5, 21, 9 and 13 tokens, or 48; padded it holds 54.
LENGTHS = (2, 3, 9, 12, 4, 5, 7, 6)


class Classifier(nn.Module):
    """Two linear layers."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Tanh(), nn.Dropout(dropout))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class LanguageModel(nn.Module):
    """The next token from the last."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embedding(ids)))


def classifier(dropout: float = 0.0) -> Classifier:
    """A classifier with the same weights each time."""
    torch.manual_seed(0)
    return Classifier(dropout)


def language_model() -> LanguageModel:
    """A language model with the same weights each time."""
    torch.manual_seed(0)
    return LanguageModel()


def images(num_samples: int = 48) -> TensorDataset:
    """Features and classes."""
    numbers = torch.Generator().manual_seed(1)
    x = torch.randn(num_samples, FEATURES, generator=numbers)
    return TensorDataset(x, torch.randint(0, CLASSES, (num_samples,), generator=numbers))


def texts(num_samples: int = 24, lengths: Sequence[int] = LENGTHS) -> list[Tensor]:
    """Sequences of tokens; of each the last is only a target."""
    numbers = torch.Generator().manual_seed(2)
    return [
        torch.randint(0, VOCABULARY, (lengths[i % len(lengths)] + 1,), generator=numbers)
        for i in range(num_samples)
    ]


def collate(sequences: Sequence[Tensor]) -> dict[str, Tensor]:
    """Pad on the right; what is padded is no target."""
    pad = nn.utils.rnn.pad_sequence
    return {
        "input_ids": pad([tokens[:-1] for tokens in sequences], batch_first=True),
        "labels": pad([tokens[1:] for tokens in sequences], batch_first=True, padding_value=IGNORED),
    }


def image_loader(num_samples: int = 48, samples: int = 4, rank: int = 0, ranks: int = 1) -> DataLoader:
    """12 micro-batches of 4 samples on each of the ranks, in order."""
    dataset = images(num_samples * ranks)
    sampler = DistributedSampler(dataset, ranks, rank, shuffle=False) if ranks > 1 else None
    return DataLoader(dataset, batch_size=samples, sampler=sampler)


def text_loader(num_samples: int = 24, samples: int = 2, rank: int = 0, ranks: int = 1) -> DataLoader:
    """12 micro-batches of 2 ragged sequences on each of the ranks, in order."""
    dataset = texts(num_samples * ranks)
    sampler = DistributedSampler(dataset, ranks, rank, shuffle=False) if ranks > 1 else None
    return DataLoader(dataset, batch_size=samples, sampler=sampler, collate_fn=collate)
