"""A contrastive loss: every other sample of the batch is a negative. Cause ``coupled_samples``.

A micro-batch has fewer negatives than the whole batch, so splitting it computes another loss.

    wholebatch verify examples/verify_coupled_samples.py:problem
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wholebatch.verify import verify_window

Batch = dict[str, Tensor]
Problem = tuple[nn.Module, Callable[[nn.Module, Batch], tuple[Tensor, int]], Batch]


def loss_fn(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    one, other = F.normalize(model(batch["one"]), dim=1), F.normalize(model(batch["other"]), dim=1)
    similarity = one @ other.T / 0.1
    return F.cross_entropy(similarity, torch.arange(len(one)), reduction="sum"), len(one)


def problem() -> Problem:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 8))
    one = torch.randn(12, 5)
    return model, loss_fn, {"one": one, "other": one + 0.1 * torch.randn(12, 5)}


if __name__ == "__main__":
    verdict = verify_window(*problem())
    print(f"equal: {verdict.equal}, cause: {verdict.cause}, factor: {verdict.factor}")
    print(verdict.advice)
    assert verdict.cause == "coupled_samples"
