"""The optimizer steps before the window is whole."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from broken_loops.shared import classifier, image_loader

ACCUMULATE = 4


def broken() -> nn.Module:
    """``step`` at every micro-batch; only ``zero_grad`` waits: steps on growing sums."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, (x, y) in enumerate(image_loader()):
        loss = F.cross_entropy(model(x), y) / ACCUMULATE
        loss.backward()
        optimizer.step()
        if (i + 1) % ACCUMULATE == 0:
            optimizer.zero_grad()
    return model


def right() -> nn.Module:
    """Both wait."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, (x, y) in enumerate(image_loader()):
        loss = F.cross_entropy(model(x), y) / ACCUMULATE
        loss.backward()
        if (i + 1) % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model


def broken_indented() -> nn.Module:
    """Both happen at every micro-batch, each worth a quarter."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, (x, y) in enumerate(image_loader()):
        loss = F.cross_entropy(model(x), y) / ACCUMULATE
        loss.backward()
        if (i + 1) % ACCUMULATE == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        optimizer.zero_grad()
    return model


def broken_accelerate() -> nn.Module:
    """The optimizer was not given to ``prepare``, so nothing holds its steps back."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, loader = accelerator.prepare(model, image_loader())
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    return model


def right_accelerate() -> nn.Module:
    """It was."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, image_loader())
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    return model
