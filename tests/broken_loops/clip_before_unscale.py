"""The norm that is clipped still has the loss scale in it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from broken_loops.shared import classifier, image_loader

ACCUMULATE = 4
MAX_NORM = 1.0


def broken() -> nn.Module:
    """``unscale_`` was forgotten."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for i, (x, y) in enumerate(image_loader()):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(x), y) / ACCUMULATE
        scaler.scale(loss).backward()
        if (i + 1) % ACCUMULATE == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return model


def right() -> nn.Module:
    """Unscaled, clipped, stepped."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for i, (x, y) in enumerate(image_loader()):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(x), y) / ACCUMULATE
        scaler.scale(loss).backward()
        if (i + 1) % ACCUMULATE == 0:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return model


def broken_wrong_order() -> nn.Module:
    """Clipped, then unscaled, in full precision."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
    for x, y in image_loader():
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    return model


def right_wrong_order() -> nn.Module:
    """Unscaled, then clipped, in full precision."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
    for x, y in image_loader():
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
    return model
