"""Micro-batches that go through the model and reach no gradient."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from broken_loops.shared import classifier, image_loader

ACCUMULATE = 4


def broken() -> nn.Module:
    """``backward`` slipped out of the inner loop: only the last micro-batch's loss is differentiated."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = iter(image_loader())
    for _ in range(3):
        optimizer.zero_grad()
        for _ in range(ACCUMULATE):
            x, y = next(loader)
            loss = F.cross_entropy(model(x), y) / ACCUMULATE
        loss.backward()
        optimizer.step()
    return model


def right() -> nn.Module:
    """``backward`` inside the inner loop."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = iter(image_loader())
    for _ in range(3):
        optimizer.zero_grad()
        for _ in range(ACCUMULATE):
            x, y = next(loader)
            loss = F.cross_entropy(model(x), y) / ACCUMULATE
            loss.backward()
        optimizer.step()
    return model


def broken_continue() -> nn.Module:
    """The micro-batch at which the optimizer steps is never differentiated itself."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, (x, y) in enumerate(image_loader()):
        loss = F.cross_entropy(model(x), y) / ACCUMULATE
        if (i + 1) % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()
            continue
        loss.backward()
    return model


def right_continue() -> nn.Module:
    """It is differentiated first."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, (x, y) in enumerate(image_loader()):
        loss = F.cross_entropy(model(x), y) / ACCUMULATE
        loss.backward()
        if (i + 1) % ACCUMULATE != 0:
            continue
        optimizer.step()
        optimizer.zero_grad()
    return model


def broken_running_loss() -> nn.Module:
    """The running loss is kept as a number, so that only the last summand still has a graph."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    total = 0.0
    for i, (x, y) in enumerate(image_loader()):
        loss = F.cross_entropy(model(x), y) / ACCUMULATE
        total = total + loss
        if (i + 1) % ACCUMULATE == 0:
            total.backward()
            optimizer.step()
            optimizer.zero_grad()
            total = 0.0
        else:
            total = total.detach()
    return model
