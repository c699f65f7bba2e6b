"""A mean where the window wants a sum. Cause ``mean_for_sum``, with the factor.

The window adds the micro-batches up and divides once; means are then divided by N again and added A
times. With micro-batches of equal size the gradient is A times too large.

    wholebatch verify examples/verify_mean_for_sum.py:problem
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
    return F.cross_entropy(logits, batch["classes"]), len(batch["classes"])  # reduction="mean"


def problem() -> Problem:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3))
    batch = {"features": torch.randn(12, 5), "classes": torch.randint(0, 3, (12,))}
    return model, loss_fn, batch


if __name__ == "__main__":
    verdict = verify_window(*problem())
    print(f"equal: {verdict.equal}, cause: {verdict.cause}, factor: {verdict.factor}")
    print(verdict.advice)
    assert verdict.cause == "mean_for_sum"
    assert verdict.factor is not None
    assert abs(verdict.factor - 12) < 1e-9  # twelve micro-batches of one sample
