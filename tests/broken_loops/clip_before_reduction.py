"""Each rank clips its own gradients; only then are they averaged."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817

from broken_loops.shared import classifier, image_loader

ACCUMULATE = 4
MAX_NORM = 0.1


def _average_gradients(model: nn.Module) -> None:
    for param in model.parameters():
        dist.all_reduce(param.grad, op=dist.ReduceOp.SUM)
        param.grad.data /= dist.get_world_size()


def broken(rank: int, ranks: int) -> nn.Module:
    """Clipped, then averaged by hand."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in image_loader(rank=rank, ranks=ranks):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        _average_gradients(model)
        optimizer.step()
    return model


def right(rank: int, ranks: int) -> nn.Module:
    """Averaged, then clipped."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in image_loader(rank=rank, ranks=ranks):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        _average_gradients(model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
    return model


def broken_held_back(rank: int, ranks: int) -> nn.Module:
    """All of the window under ``no_sync``, clipped, and one flat reduction at the end."""
    model = DDP(classifier())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, (x, y) in enumerate(image_loader(rank=rank, ranks=ranks)):
        with model.no_sync():
            (F.cross_entropy(model(x), y) / ACCUMULATE).backward()
        if (i + 1) % ACCUMULATE == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            _flat_average(model)
            optimizer.step()
            optimizer.zero_grad()
    return model


def right_held_back(rank: int, ranks: int) -> nn.Module:
    """One flat reduction, then clipped."""
    model = DDP(classifier())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, (x, y) in enumerate(image_loader(rank=rank, ranks=ranks)):
        with model.no_sync():
            (F.cross_entropy(model(x), y) / ACCUMULATE).backward()
        if (i + 1) % ACCUMULATE == 0:
            _flat_average(model)
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
    return model


def _flat_average(model: nn.Module) -> None:
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(part.view_as(grad))
