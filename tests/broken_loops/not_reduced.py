"""Replicas that never meet: each trains a model of its own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817

from broken_loops.shared import classifier, image_loader

ACCUMULATE = 4


def broken(rank: int, ranks: int) -> nn.Module:
    """``no_sync`` around all micro-batches, and nothing reduces by hand."""
    model = DDP(classifier())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, (x, y) in enumerate(image_loader(rank=rank, ranks=ranks)):
        with model.no_sync():
            (F.cross_entropy(model(x), y) / ACCUMULATE).backward()
        if (i + 1) % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model


def right(rank: int, ranks: int) -> nn.Module:
    """All but the last."""
    model = DDP(classifier())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, (x, y) in enumerate(image_loader(rank=rank, ranks=ranks)):
        model.require_backward_grad_sync = (i + 1) % ACCUMULATE == 0
        (F.cross_entropy(model(x), y) / ACCUMULATE).backward()
        if (i + 1) % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model


def broken_past_the_wrapper(rank: int, ranks: int) -> nn.Module:
    """``model.module(x)`` goes past DDP, whose reducer is never told."""
    model = DDP(classifier())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in image_loader(rank=rank, ranks=ranks):
        optimizer.zero_grad()
        loss = F.cross_entropy(model.module(x), y)
        loss.backward()
        optimizer.step()
    return model


def right_past_the_wrapper(rank: int, ranks: int) -> nn.Module:
    """``model(x)``."""
    model = DDP(classifier())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in image_loader(rank=rank, ranks=ranks):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    return model


def broken_not_wrapped(rank: int, ranks: int) -> nn.Module:
    """A sampler for each rank, and no DDP."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, (x, y) in enumerate(image_loader(rank=rank, ranks=ranks)):
        (F.cross_entropy(model(x), y) / ACCUMULATE).backward()
        if (i + 1) % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model
