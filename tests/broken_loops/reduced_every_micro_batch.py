"""DDP reduces the gradients of every micro-batch; one reduction would do."""

from __future__ import annotations

import contextlib

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817

from broken_loops.shared import classifier, image_loader

ACCUMULATE = 4


def broken(rank: int, ranks: int) -> nn.Module:
    """No ``no_sync``."""
    model = DDP(classifier())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, (x, y) in enumerate(image_loader(rank=rank, ranks=ranks)):
        (F.cross_entropy(model(x), y) / ACCUMULATE).backward()
        if (i + 1) % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model


def right(rank: int, ranks: int) -> nn.Module:
    """``no_sync`` around forward and backward of all but the last."""
    model = DDP(classifier())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, (x, y) in enumerate(image_loader(rank=rank, ranks=ranks)):
        is_last = (i + 1) % ACCUMULATE == 0
        with contextlib.nullcontext() if is_last else model.no_sync():
            (F.cross_entropy(model(x), y) / ACCUMULATE).backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
    return model


def broken_condition(rank: int, ranks: int) -> nn.Module:
    """The condition counts windows, and is never true in here."""
    model = DDP(classifier())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = image_loader(rank=rank, ranks=ranks)
    for i, (x, y) in enumerate(loader):
        should_hold_back = ACCUMULATE > 1 and i >= len(loader)
        with model.no_sync() if should_hold_back else contextlib.nullcontext():
            (F.cross_entropy(model(x), y) / ACCUMULATE).backward()
        if (i + 1) % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model
