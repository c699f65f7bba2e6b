"""A data set of a user's own, whose samples draw at random; reading one can be made to fail."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch

import wholebatch as wb


class Texts:
    """Bytes of short texts; one byte of each is another at every reading."""

    def __init__(self, file: str) -> None:
        self._texts = [json.loads(line)["text"] for line in Path(file).read_text().splitlines()]

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = list(self._texts[index].encode())
        tokens[random.randrange(len(tokens))] = random.randrange(128)
        return {"input_ids": torch.tensor(tokens), "labels": torch.tensor(tokens)}


def texts(train: str, held_out: str) -> dict[str, Any]:
    """What ``data.source`` calls."""
    return {
        "train": Texts(train),
        "held_out": Texts(held_out),
        "objective": wb.next_token_loss(),
        "vocabulary": 128,
    }
