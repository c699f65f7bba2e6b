"""Random states as plain data, so that reading them back executes nothing; and fresh ones for new ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from wholebatch.replay import RandomState, seed_all


def packed(state: RandomState) -> dict[str, Any]:
    """A random state as numbers and tensors.

    Exactness: nothing is lost; :func:`unpacked` gives the same state back.
    """
    kind, keys, *place = state.numpy
    return {
        "python": state.python,
        "numpy": (kind, [int(key) for key in keys], *place),
        "host": state.host,
        "accelerator": state.accelerator,
    }


def unpacked(given: Mapping[str, Any]) -> RandomState:
    """The random state that :func:`packed` took apart; that of an accelerator only where there is one.

    Exactness: the same state.
    """
    kind, keys, *place = given["numpy"]
    return RandomState(
        python=given["python"],
        numpy=(kind, np.array(keys, dtype=np.uint32), *place),
        host=given["host"],
        accelerator=given["accelerator"] if torch.accelerator.is_available() else None,
    )


def restore(states: list[Mapping[str, Any]], *, rank: int, updates_attempted: int) -> bool:
    """Give this rank its random state back, or a fresh one where none was saved for it.

    ``seed = blake2b(the leading rank's saved torch state, rank, updates)``: the same whenever the same
    checkpoint is loaded on the same number of this rank, and another for every rank and update.

    Args:
        states: the saved ones, by rank.
        rank: number of this rank.
        updates_attempted: updates of the run so far.

    Returns:
        True where the rank's own state was restored.
    """
    if rank < len(states):
        unpacked(states[rank]).restore()
        return True
    material = bytes(states[0]["host"].tolist()) + f"rank {rank}, update {updates_attempted}".encode()
    seed = int.from_bytes(hashlib.blake2b(material, digest_size=7).digest())
    seed_all(seed)
    return False
