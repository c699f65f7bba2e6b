"""Spectral norm: a buffer moves with each forward, and the output depends on it. Cause ``buffers``.

A micro-batches move it A times before the update, the whole batch once. With the buffer put back before
each micro-batch the update is equal, which tells this from BatchNorm.

    wholebatch verify examples/verify_buffers.py:problem
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from wholebatch.verify import verify_window

Batch = dict[str, Tensor]
Problem = tuple[nn.Module, Callable[[nn.Module, Batch], tuple[Tensor, int]], Batch]


def loss_fn(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    logits = model(batch["features"])
    return F.cross_entropy(logits, batch["classes"], reduction="sum"), len(batch["classes"])


def problem() -> Problem:
    torch.manual_seed(0)
    model = nn.Sequential(spectral_norm(nn.Linear(5, 16)), nn.Tanh(), nn.Linear(16, 3))
    batch = {"features": torch.randn(12, 5), "classes": torch.randint(0, 3, (12,))}
    return model, loss_fn, batch


if __name__ == "__main__":
    verdict = verify_window(*problem())
    print(f"equal: {verdict.equal}, cause: {verdict.cause}, factor: {verdict.factor}")
    print(verdict.advice)
    assert verdict.cause == "buffers"
