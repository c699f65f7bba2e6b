"""Gradients are cleared while the window is still being filled."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from broken_loops.shared import classifier, image_loader

ACCUMULATE = 4


def broken() -> nn.Module:
    """``zero_grad`` at the top of every micro-batch, from habit: only the last one is trained on."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, (x, y) in enumerate(image_loader()):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y) / ACCUMULATE
        loss.backward()
        if (i + 1) % ACCUMULATE == 0:
            optimizer.step()
    return model


def right() -> nn.Module:
    """At the top of every window."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, (x, y) in enumerate(image_loader()):
        if i % ACCUMULATE == 0:
            optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y) / ACCUMULATE
        loss.backward()
        if (i + 1) % ACCUMULATE == 0:
            optimizer.step()
    return model


def broken_by_hand() -> nn.Module:
    """``.grad`` set to None by hand in a helper that runs one micro-batch."""
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def forward_backward(x: torch.Tensor, y: torch.Tensor) -> float:
        for param in model.parameters():
            param.grad = None
        loss = F.cross_entropy(model(x), y)
        (loss / ACCUMULATE).backward()
        return loss.item()

    loader = iter(image_loader())
    for _ in range(3):
        for _ in range(ACCUMULATE):
            forward_backward(*next(loader))
        optimizer.step()
    return model


def broken_off_by_two() -> nn.Module:
    """Cleared every second micro-batch, stepped every fourth: half of each window is lost."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, (x, y) in enumerate(image_loader()):
        if i % 2 == 0:
            model.zero_grad(set_to_none=False)
        loss = F.cross_entropy(model(x), y) / ACCUMULATE
        loss.backward()
        if (i + 1) % ACCUMULATE == 0:
            optimizer.step()
    return model
