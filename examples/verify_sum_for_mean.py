"""A sum with num_items=1, as if it were a mean. Cause ``sum_for_mean``, with the factor.

The window divides by the items of all micro-batches, here by A instead of by the number of samples, and
the gradient changes with the number of micro-batches.

    wholebatch verify examples/verify_sum_for_mean.py:problem
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
    logits = model(batch["features"])
    return F.cross_entropy(logits, batch["classes"], reduction="sum"), 1


def problem() -> Problem:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3))
    batch = {"features": torch.randn(12, 5), "classes": torch.randint(0, 3, (12,))}
    return model, loss_fn, batch


if __name__ == "__main__":
    verdict = verify_window(*problem())
    print(f"equal: {verdict.equal}, cause: {verdict.cause}, factor: {verdict.factor}")
    print(verdict.advice)
    assert verdict.cause == "sum_for_mean"
    assert verdict.factor is not None
    assert abs(verdict.factor - 1 / 12) < 1e-9  # twelve micro-batches of one sample
