"""The same dropout mask where there should be another."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817

from broken_loops.shared import classifier, image_loader

ACCUMULATE = 4
SEED = 1234


def broken(rank: int, ranks: int) -> nn.Module:
    """All ranks seed alike, and go on alike."""
    torch.manual_seed(SEED)
    model = DDP(classifier(dropout=0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in image_loader(rank=rank, ranks=ranks):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


def right(rank: int, ranks: int) -> nn.Module:
    """The rank is added to the seed once the model is built."""
    torch.manual_seed(SEED)
    model = DDP(classifier(dropout=0.5))
    torch.manual_seed(SEED + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in image_loader(rank=rank, ranks=ranks):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


def broken_reseeded() -> nn.Module:
    """Seeded at every micro-batch, for reproducibility."""
    model = classifier(dropout=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, (x, y) in enumerate(image_loader()):
        torch.manual_seed(SEED)
        (F.cross_entropy(model(x), y) / ACCUMULATE).backward()
        if (i + 1) % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model


def right_reseeded() -> nn.Module:
    """Seeded once."""
    model = classifier(dropout=0.5)
    torch.manual_seed(SEED)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, (x, y) in enumerate(image_loader()):
        (F.cross_entropy(model(x), y) / ACCUMULATE).backward()
        if (i + 1) % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model
