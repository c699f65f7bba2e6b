"""``zero_grad`` is called, and the gradients are still there, or go at another time."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

from broken_loops.shared import classifier, image_loader

ACCUMULATE = 4


def broken() -> nn.Module:
    """The model that is cleared is the copy kept for evaluation."""
    model = classifier()
    best_model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, (x, y) in enumerate(image_loader()):
        (F.cross_entropy(model(x), y) / ACCUMULATE).backward()
        if (i + 1) % ACCUMULATE == 0:
            optimizer.step()
            best_model.zero_grad()
    return model


def right() -> nn.Module:
    """The model that is trained."""
    model = classifier()
    best_model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, (x, y) in enumerate(image_loader()):
        (F.cross_entropy(model(x), y) / ACCUMULATE).backward()
        if (i + 1) % ACCUMULATE == 0:
            optimizer.step()
            model.zero_grad()
            best_model.load_state_dict(model.state_dict())
    return model


def broken_other_optimizer() -> nn.Module:
    """Resuming makes a second optimizer; the old one goes on being cleared, and holds a copy."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpoint = {"model": copy.deepcopy(model), "lr": 0.1}
    model = checkpoint["model"]
    resumed_optimizer = torch.optim.SGD(model.parameters(), lr=checkpoint["lr"])
    for i, (x, y) in enumerate(image_loader()):
        (F.cross_entropy(model(x), y) / ACCUMULATE).backward()
        if (i + 1) % ACCUMULATE == 0:
            resumed_optimizer.step()
            optimizer.zero_grad()
    return model


def broken_accelerate() -> nn.Module:
    """``zero_grad`` at the top of ``accumulate``: Accelerate heeds it at the last micro-batch alone."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, image_loader())
    for x, y in loader:
        with accelerator.accumulate(model):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
    return model


def right_accelerate() -> nn.Module:
    """After ``step``."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, image_loader())
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    return model


def broken_fsdp_held_back(rank: int, ranks: int) -> nn.Module:
    """A bad micro-batch ends the window early; what FSDP2 held back survives ``zero_grad``."""
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(classifier())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = iter(image_loader(rank=rank, ranks=ranks))
    for window in range(3):
        last = 2 if window == 0 else ACCUMULATE
        for i in range(ACCUMULATE):
            x, y = next(loader)
            if i >= last:
                continue
            model.set_requires_gradient_sync(i == ACCUMULATE - 1)
            (F.cross_entropy(model(x), y) / ACCUMULATE).backward()
        if last == ACCUMULATE:
            optimizer.step()
        optimizer.zero_grad()
    return model


def right_fsdp_held_back(rank: int, ranks: int) -> nn.Module:
    """The window that is given up is reduced all the same, and then cleared."""
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(classifier())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = iter(image_loader(rank=rank, ranks=ranks))
    for window in range(3):
        last = 2 if window == 0 else ACCUMULATE
        for i in range(ACCUMULATE):
            x, y = next(loader)
            if i >= last:
                continue
            model.set_requires_gradient_sync(i == last - 1)
            (F.cross_entropy(model(x), y) / ACCUMULATE).backward()
        if last == ACCUMULATE:
            optimizer.step()
        optimizer.zero_grad()
    return model
