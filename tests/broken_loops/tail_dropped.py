"""The last micro-batches of each pass are differentiated, and thrown away."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from broken_loops.shared import classifier, image_loader

ACCUMULATE = 4
NUM_SAMPLES = 40  # 10 micro-batches: 4, 4 and 2


def broken() -> nn.Module:
    """``zero_grad`` at the top of every epoch clears what the last one left."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _epoch in range(2):
        optimizer.zero_grad()
        for i, (x, y) in enumerate(image_loader(num_samples=NUM_SAMPLES)):
            loss = F.cross_entropy(model(x), y) / ACCUMULATE
            loss.backward()
            if (i + 1) % ACCUMULATE == 0:
                optimizer.step()
                optimizer.zero_grad()
    return model


def right() -> nn.Module:
    """The rest is an update of its own."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = image_loader(num_samples=NUM_SAMPLES)
    for _epoch in range(2):
        optimizer.zero_grad()
        for i, (x, y) in enumerate(loader):
            first = i - i % ACCUMULATE
            loss = F.cross_entropy(model(x), y) / min(ACCUMULATE, len(loader) - first)
            loss.backward()
            if (i + 1) % ACCUMULATE == 0 or (i + 1) == len(loader):
                optimizer.step()
                optimizer.zero_grad()
    return model


def broken_one_pass() -> nn.Module:
    """One pass; the script ends with two micro-batches in ``.grad``."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, (x, y) in enumerate(image_loader(num_samples=NUM_SAMPLES)):
        (F.cross_entropy(model(x), y) / ACCUMULATE).backward()
        if (i + 1) % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model


def right_one_pass() -> nn.Module:
    """One pass over what divides; the rest is left out before any work is done on it."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = image_loader(num_samples=NUM_SAMPLES)
    usable = len(loader) - len(loader) % ACCUMULATE
    for i, (x, y) in enumerate(loader):
        if i >= usable:
            break
        (F.cross_entropy(model(x), y) / ACCUMULATE).backward()
        if (i + 1) % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model
