"""The schedule moves although the loss scale overflowed and the optimizer was left alone."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from broken_loops.shared import classifier, image_loader

ACCUMULATE = 4


def _scaler() -> torch.amp.GradScaler:
    """Updates 1 and 3 fit into fp16 and update 2 doesn't."""
    return torch.amp.GradScaler(
        "cpu", init_scale=2.0**12, growth_factor=2.0**12, backoff_factor=2.0**-12, growth_interval=1
    )


def _pieces() -> tuple[nn.Module, torch.optim.Optimizer, Any, torch.amp.GradScaler]:
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    return model, optimizer, scheduler, _scaler()


def broken() -> Any:
    """``scheduler.step()`` whatever the scaler did."""
    model, optimizer, scheduler, scaler = _pieces()
    for i, (x, y) in enumerate(image_loader()):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(x), y) / ACCUMULATE
        scaler.scale(loss).backward()
        if (i + 1) % ACCUMULATE == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scheduler.step()
    return scheduler


def right() -> Any:
    """Only where the scale did not fall."""
    model, optimizer, scheduler, scaler = _pieces()
    for i, (x, y) in enumerate(image_loader()):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(x), y) / ACCUMULATE
        scaler.scale(loss).backward()
        if (i + 1) % ACCUMULATE == 0:
            scaler.step(optimizer)
            scale_before = scaler.get_scale()
            scaler.update()
            optimizer.zero_grad()
            if scaler.get_scale() >= scale_before:
                scheduler.step()
    return scheduler


def broken_before_update() -> Any:
    """A = 1, clipped, and the scheduler between ``step`` and ``update``."""
    model, optimizer, scheduler, scaler = _pieces()
    for x, y in image_loader(num_samples=12):
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scheduler.step()
        scaler.update()
    return scheduler


def right_before_update() -> Any:
    """A = 1, clipped, and the scheduler where the scale did not fall."""
    model, optimizer, scheduler, scaler = _pieces()
    for x, y in image_loader(num_samples=12):
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scale = scaler.get_scale()
        scaler.update()
        if scale <= scaler.get_scale():
            scheduler.step()
    return scheduler
