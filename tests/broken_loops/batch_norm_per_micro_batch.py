"""BatchNorm sees micro-batches, and moves its running statistics with each."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from broken_loops.shared import CLASSES, FEATURES, image_loader

ACCUMULATE = 4


def _network(norm: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 8), norm, nn.Tanh(), nn.Linear(8, CLASSES))


def broken() -> nn.Module:
    """A classifier with BatchNorm and four micro-batches."""
    model = _network(nn.BatchNorm1d(8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, (x, y) in enumerate(image_loader()):
        (F.cross_entropy(model(x), y) / ACCUMULATE).backward()
        if (i + 1) % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model


def right() -> nn.Module:
    """GroupNorm, which knows no batch."""
    model = _network(nn.GroupNorm(2, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, (x, y) in enumerate(image_loader()):
        (F.cross_entropy(model(x), y) / ACCUMULATE).backward()
        if (i + 1) % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model


def broken_frozen_weights() -> nn.Module:
    """Fine-tuning with a frozen BatchNorm that was left in training mode."""
    model = _network(nn.BatchNorm1d(8))
    model[0].requires_grad_(False)
    model[1].requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for i, (x, y) in enumerate(image_loader()):
        (F.cross_entropy(model(x), y) / ACCUMULATE).backward()
        if (i + 1) % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model


def right_frozen_weights() -> nn.Module:
    """A frozen BatchNorm in evaluation mode."""
    model = _network(nn.BatchNorm1d(8))
    model[0].requires_grad_(False)
    model[1].requires_grad_(False).eval()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for i, (x, y) in enumerate(image_loader()):
        (F.cross_entropy(model(x), y) / ACCUMULATE).backward()
        if (i + 1) % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model
