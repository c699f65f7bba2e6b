"""The right sum over the wrong number of items. Cause ``wrong_count``.

Two of three positions are padding in some samples. The loss leaves them out; the count takes the longest
sample times the number of samples, which depends on how the batch is cut.

    wholebatch verify examples/verify_wrong_count.py:problem
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wholebatch.verify import verify_window

Batch = dict[str, Tensor]
Problem = tuple[nn.Module, Callable[[nn.Module, Batch], tuple[Tensor, Tensor]], Batch]


def loss_fn(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    logits, classes = model(batch["features"]), batch["classes"]
    summed = F.cross_entropy(logits.flatten(0, 1), classes.flatten(), ignore_index=-100, reduction="sum")
    longest = (classes != -100).sum(dim=1).max()
    return summed, longest * len(classes)  # right would be (classes != -100).sum()


def problem() -> Problem:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3))
    classes = torch.randint(0, 3, (12, 3))
    classes[::2, 1:] = -100
    return model, loss_fn, {"features": torch.randn(12, 3, 5), "classes": classes}


if __name__ == "__main__":
    verdict = verify_window(*problem())
    print(f"equal: {verdict.equal}, cause: {verdict.cause}, factor: {verdict.factor}")
    print(verdict.advice)
    assert verdict.cause == "wrong_count"
