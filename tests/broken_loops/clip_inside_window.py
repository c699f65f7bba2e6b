"""Gradients are clipped while the window is still being filled."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from broken_loops.shared import classifier, image_loader

ACCUMULATE = 4
MAX_NORM = 0.1


def broken() -> nn.Module:
    """Clipped after every backward: what came first is clipped four times."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, (x, y) in enumerate(image_loader()):
        loss = F.cross_entropy(model(x), y) / ACCUMULATE
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=MAX_NORM)
        if (i + 1) % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model


def right() -> nn.Module:
    """Clipped once, before the step."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, (x, y) in enumerate(image_loader()):
        loss = F.cross_entropy(model(x), y) / ACCUMULATE
        loss.backward()
        if (i + 1) % ACCUMULATE == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
    return model


def broken_by_value() -> nn.Module:
    """The same by value."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = iter(image_loader())
    for _ in range(3):
        optimizer.zero_grad()
        for _ in range(ACCUMULATE):
            x, y = next(loader)
            (F.cross_entropy(model(x), y) / ACCUMULATE).backward()
            nn.utils.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
    return model


def right_by_value() -> nn.Module:
    """By value, once."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = iter(image_loader())
    for _ in range(3):
        optimizer.zero_grad()
        for _ in range(ACCUMULATE):
            x, y = next(loader)
            (F.cross_entropy(model(x), y) / ACCUMULATE).backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
    return model


def broken_accelerate() -> nn.Module:
    """Accelerate without the test for ``sync_gradients``."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, image_loader())
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(F.cross_entropy(model(x), y))
            accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
    return model


def right_accelerate() -> nn.Module:
    """With the test."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, image_loader())
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(F.cross_entropy(model(x), y))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
    return model
