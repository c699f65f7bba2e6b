"""A clip with -1 for "no clip": the gradient is turned around."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from broken_loops.shared import classifier, image_loader

ACCUMULATE = 4


def broken(max_grad_norm: float = -1.0) -> nn.Module:
    """The norm comes from a config in which -1 is off."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, (x, y) in enumerate(image_loader()):
        (F.cross_entropy(model(x), y) / ACCUMULATE).backward()
        if (i + 1) % ACCUMULATE == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
    return model


def right(max_grad_norm: float = -1.0) -> nn.Module:
    """Asked for first."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, (x, y) in enumerate(image_loader()):
        (F.cross_entropy(model(x), y) / ACCUMULATE).backward()
        if (i + 1) % ACCUMULATE == 0:
            if max_grad_norm > 0:
                torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
    return model


def broken_truthy() -> nn.Module:
    """``if args.clip:`` is true of -1."""
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    clip = -1
    for x, y in image_loader(samples=16):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model


def right_truthy() -> nn.Module:
    """``None`` is off."""
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    clip = None
    for x, y in image_loader(samples=16):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model
