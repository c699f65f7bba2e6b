"""``no_sync`` around ``backward`` alone: DDP decided in the forward, and reduces every time."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817

from broken_loops.shared import classifier, image_loader

ACCUMULATE = 4


def broken(rank: int, ranks: int) -> nn.Module:
    """The forward stands before the scope."""
    model = DDP(classifier())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, (x, y) in enumerate(image_loader(rank=rank, ranks=ranks)):
        loss = F.cross_entropy(model(x), y) / ACCUMULATE
        if (i + 1) % ACCUMULATE != 0:
            with model.no_sync():
                loss.backward()
        else:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return model


def right(rank: int, ranks: int) -> nn.Module:
    """Inside it."""
    model = DDP(classifier())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, (x, y) in enumerate(image_loader(rank=rank, ranks=ranks)):
        if (i + 1) % ACCUMULATE != 0:
            with model.no_sync():
                loss = F.cross_entropy(model(x), y) / ACCUMULATE
                loss.backward()
        else:
            loss = F.cross_entropy(model(x), y) / ACCUMULATE
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return model


def broken_flag(rank: int, ranks: int) -> nn.Module:
    """The flag is set right before ``backward``, as nanoGPT does before the forward."""
    model = DDP(classifier())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = iter(image_loader(rank=rank, ranks=ranks))
    for _ in range(3):
        model.require_backward_grad_sync = True
        for micro_step in range(ACCUMULATE):
            x, y = next(loader)
            loss = F.cross_entropy(model(x), y) / ACCUMULATE
            model.require_backward_grad_sync = micro_step == ACCUMULATE - 1
            loss.backward()
            model.require_backward_grad_sync = True
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return model


def right_flag(rank: int, ranks: int) -> nn.Module:
    """As nanoGPT does."""
    model = DDP(classifier())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = iter(image_loader(rank=rank, ranks=ranks))
    for _ in range(3):
        for micro_step in range(ACCUMULATE):
            x, y = next(loader)
            model.require_backward_grad_sync = micro_step == ACCUMULATE - 1
            loss = F.cross_entropy(model(x), y) / ACCUMULATE
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return model
