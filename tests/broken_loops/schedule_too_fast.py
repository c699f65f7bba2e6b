"""More than one move of the schedule for each update."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817

from broken_loops.shared import classifier, image_loader

ACCUMULATE = 4


def _update(optimizer: torch.optim.Optimizer, scheduler: torch.optim.lr_scheduler.LRScheduler) -> None:
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()


def broken() -> nn.Module:
    """The helper moves it, and so does the loop."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    for i, (x, y) in enumerate(image_loader()):
        (F.cross_entropy(model(x), y) / ACCUMULATE).backward()
        if (i + 1) % ACCUMULATE == 0:
            _update(optimizer, scheduler)
            scheduler.step()
    return model


def right() -> nn.Module:
    """The helper alone."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    for i, (x, y) in enumerate(image_loader()):
        (F.cross_entropy(model(x), y) / ACCUMULATE).backward()
        if (i + 1) % ACCUMULATE == 0:
            _update(optimizer, scheduler)
    return model


def broken_per_rank(rank: int, ranks: int) -> nn.Module:
    """Moved once for each rank, to make up for a shorter epoch that the plan counts already."""
    model = DDP(classifier())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    for x, y in image_loader(num_samples=12, rank=rank, ranks=ranks):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        for _ in range(dist.get_world_size()):
            scheduler.step()
    return model


def right_per_rank(rank: int, ranks: int) -> nn.Module:
    """Once for each update."""
    model = DDP(classifier())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    for x, y in image_loader(num_samples=12, rank=rank, ranks=ranks):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        scheduler.step()
    return model


def broken_per_micro_batch_after() -> nn.Module:
    """As many moves as the window had micro-batches, to bring the schedule up to date."""
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=12)
    loader = iter(image_loader())
    for _ in range(3):
        for _ in range(ACCUMULATE):
            x, y = next(loader)
            (F.cross_entropy(model(x), y) / ACCUMULATE).backward()
        optimizer.step()
        optimizer.zero_grad()
        for _ in range(ACCUMULATE):
            scheduler.step()
    return model
