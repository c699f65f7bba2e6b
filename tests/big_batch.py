"""The big batch of the engines' tests, done the plain way: classes of samples, some without a label."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

Batch = dict[str, torch.Tensor]


def mean_loss(model: nn.Module, given: Sequence[Batch]) -> torch.Tensor:
    """The mean over all labels of all micro-batches, in one forward."""
    x, labels = (torch.cat([batch[name] for batch in given]) for name in ("x", "labels"))
    return F.cross_entropy(model(x), labels)


def big_batch(
    model: nn.Module, optimizer: torch.optim.Optimizer, given: Sequence[Batch], *, clip: float = 0.5
) -> float:
    """The plain update of the whole global batch; the norm of its gradient before clipping."""
    optimizer.zero_grad()
    mean_loss(model, given).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    return float(norm)


def pad(given: Sequence[Batch]) -> list[Batch]:
    """Micro-batches of one size: what is added has no label."""
    longest = max(len(batch["x"]) for batch in given)
    return [
        {
            "x": F.pad(batch["x"], (0, 0, 0, longest - len(batch["x"]))),
            "labels": F.pad(batch["labels"], (0, longest - len(batch["labels"])), value=-100),
        }
        for batch in given
    ]
