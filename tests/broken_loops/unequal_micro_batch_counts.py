"""Ranks with different numbers of micro-batches."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817

from broken_loops.shared import classifier, image_loader

ACCUMULATE = (4, 3)


def broken(rank: int, ranks: int) -> nn.Module:
    """The slower machine takes 3 micro-batches where the faster takes 4; each divides by its own."""
    model = DDP(classifier())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mine = ACCUMULATE[rank]
    loader = iter(image_loader(rank=rank, ranks=ranks))
    for _ in range(3):
        for i in range(mine):
            x, y = next(loader)
            model.require_backward_grad_sync = i == mine - 1
            (F.cross_entropy(model(x), y) / mine).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def right(rank: int, ranks: int) -> nn.Module:
    """Both take 4."""
    model = DDP(classifier())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mine = max(ACCUMULATE)
    loader = iter(image_loader(rank=rank, ranks=ranks))
    for _ in range(3):
        for i in range(mine):
            x, y = next(loader)
            model.require_backward_grad_sync = i == mine - 1
            (F.cross_entropy(model(x), y) / mine).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def broken_one_waits(rank: int, ranks: int) -> nn.Module:
    """A bad file on one rank leaves it with two micro-batches fewer; the other waits for it."""
    model = DDP(classifier())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = list(image_loader(rank=rank, ranks=ranks))[: 12 - 2 * rank]
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


def right_one_waits(rank: int, ranks: int) -> nn.Module:
    """As many as all ranks have."""
    model = DDP(classifier())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own = torch.tensor(12 - 2 * rank)
    torch.distributed.all_reduce(own, op=torch.distributed.ReduceOp.MIN)
    batches = list(image_loader(rank=rank, ranks=ranks))[: int(own)]
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model
