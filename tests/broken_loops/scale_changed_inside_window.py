"""The loss scale moves while scaled gradients are being added up."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from broken_loops.shared import classifier, image_loader

ACCUMULATE = 4


def broken() -> nn.Module:
    """The scale is raised by hand in mid-window."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    for i, (x, y) in enumerate(image_loader()):
        loss = F.cross_entropy(model(x), y) / ACCUMULATE
        scaler.scale(loss).backward()
        if (i + 1) % ACCUMULATE == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        elif i % 2 == 1:
            scaler.update(scaler.get_scale() * 2.0)
    return model


def right() -> nn.Module:
    """Updated after the step, only."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    for i, (x, y) in enumerate(image_loader()):
        loss = F.cross_entropy(model(x), y) / ACCUMULATE
        scaler.scale(loss).backward()
        if (i + 1) % ACCUMULATE == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return model


def broken_unscaled_for_a_look() -> nn.Module:
    """Unscaled to look at the norm at every micro-batch; the scaler is then updated to allow the next."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1)
    for i, (x, y) in enumerate(image_loader()):
        loss = F.cross_entropy(model(x), y) / ACCUMULATE
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.get_total_norm([p.grad for p in model.parameters()])
        if (i + 1) % ACCUMULATE == 0:
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
    return model


def right_unscaled_for_a_look() -> nn.Module:
    """Looked at once, before the step."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1)
    for i, (x, y) in enumerate(image_loader()):
        loss = F.cross_entropy(model(x), y) / ACCUMULATE
        scaler.scale(loss).backward()
        if (i + 1) % ACCUMULATE == 0:
            scaler.unscale_(optimizer)
            nn.utils.get_total_norm([p.grad for p in model.parameters()])
            scaler.step(optimizer)
            optimizer.zero_grad()
            scaler.update()
    return model
