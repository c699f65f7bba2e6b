"""Some micro-batch is reduced, and not the last: ranks step on different gradients, without an error."""

from __future__ import annotations

import contextlib

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817

from broken_loops.shared import classifier, image_loader

ACCUMULATE = 4


def broken(rank: int, ranks: int) -> nn.Module:
    """Reduces where ``i`` divides, which is the first of each window."""
    model = DDP(classifier())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, (x, y) in enumerate(image_loader(rank=rank, ranks=ranks)):
        with contextlib.nullcontext() if i % ACCUMULATE == 0 else model.no_sync():
            (F.cross_entropy(model(x), y) / ACCUMULATE).backward()
        if (i + 1) % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model


def right(rank: int, ranks: int) -> nn.Module:
    """Reduces where ``i + 1`` does."""
    model = DDP(classifier())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, (x, y) in enumerate(image_loader(rank=rank, ranks=ranks)):
        with contextlib.nullcontext() if (i + 1) % ACCUMULATE == 0 else model.no_sync():
            (F.cross_entropy(model(x), y) / ACCUMULATE).backward()
        if (i + 1) % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model


def broken_off_by_one(rank: int, ranks: int) -> nn.Module:
    """The flag comes on one micro-batch too early, and goes off again."""
    model = DDP(classifier())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = iter(image_loader(rank=rank, ranks=ranks))
    for _ in range(3):
        for micro_step in range(ACCUMULATE):
            x, y = next(loader)
            model.require_backward_grad_sync = micro_step + 1 == ACCUMULATE - 1
            (F.cross_entropy(model(x), y) / ACCUMULATE).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return model


def right_off_by_one(rank: int, ranks: int) -> nn.Module:
    """The flag comes on at the last."""
    model = DDP(classifier())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = iter(image_loader(rank=rank, ranks=ranks))
    for _ in range(3):
        for micro_step in range(ACCUMULATE):
            x, y = next(loader)
            model.require_backward_grad_sync = micro_step + 1 == ACCUMULATE
            (F.cross_entropy(model(x), y) / ACCUMULATE).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return model
