"""The same samples twice in one global batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817

from broken_loops.shared import classifier, image_loader

ACCUMULATE = 4


def broken(rank: int, ranks: int) -> nn.Module:  # noqa: ARG001
    """No sampler: all ranks read the data from the beginning."""
    model = DDP(classifier())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in image_loader():
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


def right(rank: int, ranks: int) -> nn.Module:
    """A DistributedSampler."""
    model = DDP(classifier())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in image_loader(rank=rank, ranks=ranks):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


def broken_new_iterator() -> nn.Module:
    """``next(iter(loader))`` begins anew at every micro-batch."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = image_loader()
    for _ in range(3):
        optimizer.zero_grad()
        for _ in range(ACCUMULATE):
            x, y = next(iter(loader))
            loss = F.cross_entropy(model(x), y) / ACCUMULATE
            loss.backward()
        optimizer.step()
    return model


def right_new_iterator() -> nn.Module:
    """One iterator for all."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = iter(image_loader())
    for _ in range(3):
        optimizer.zero_grad()
        for _ in range(ACCUMULATE):
            x, y = next(loader)
            loss = F.cross_entropy(model(x), y) / ACCUMULATE
            loss.backward()
        optimizer.step()
    return model


def broken_outer_loop() -> nn.Module:
    """The accumulation loop stands inside the one over the data, and reuses its batch."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in image_loader():
        optimizer.zero_grad()
        for _ in range(ACCUMULATE):
            loss = F.cross_entropy(model(x), y)
            (loss / ACCUMULATE).backward()
        optimizer.step()
    return model
