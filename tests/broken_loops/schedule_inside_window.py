"""The learning rate moves with micro-batches, not with updates."""

from __future__ import annotations

import math
import warnings

import torch
import torch.nn.functional as F
from torch import nn

from broken_loops.shared import classifier, image_loader

ACCUMULATE = 4
UPDATES = 3


def broken() -> nn.Module:
    """``scheduler.step()`` stands outside the ``if``."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
    for i, (x, y) in enumerate(image_loader()):
        loss = F.cross_entropy(model(x), y) / ACCUMULATE
        loss.backward()
        if (i + 1) % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
    return model


def right() -> nn.Module:
    """Inside."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    for i, (x, y) in enumerate(image_loader()):
        loss = F.cross_entropy(model(x), y) / ACCUMULATE
        loss.backward()
        if (i + 1) % ACCUMULATE == 0:
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return model


def _cosine(done: int, planned: int) -> float:
    return 0.05 * (1 + math.cos(math.pi * min(1.0, done / planned)))


def broken_by_hand() -> nn.Module:
    """Set by hand from the number of the micro-batch, over as many as there are updates."""
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for it, (x, y) in enumerate(image_loader()):
        for group in optimizer.param_groups:
            group["lr"] = _cosine(it, UPDATES)
        (F.cross_entropy(model(x), y) / ACCUMULATE).backward()
        if (it + 1) % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model


def right_by_hand() -> nn.Module:
    """Set by hand from the number of the update, where a window begins."""
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for it, (x, y) in enumerate(image_loader()):
        if it % ACCUMULATE == 0:
            for group in optimizer.param_groups:
                group["lr"] = _cosine(it // ACCUMULATE, UPDATES)
        (F.cross_entropy(model(x), y) / ACCUMULATE).backward()
        if (it + 1) % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model


def broken_accelerate() -> nn.Module:
    """The scheduler was not given to ``prepare``."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 0.5**done)
    model, optimizer, loader = accelerator.prepare(model, optimizer, image_loader())
    warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return model


def right_accelerate() -> nn.Module:
    """It was."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 0.5**done)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, image_loader(), scheduler)
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return model
