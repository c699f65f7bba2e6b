"""The last micro-batches of a pass stay in ``.grad`` and join the first window of the next."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from broken_loops.shared import classifier, image_loader

ACCUMULATE = 4
NUM_SAMPLES = 40  # 10 micro-batches: 4, 4 and 2


def broken() -> nn.Module:
    """``enumerate`` begins at 0 again, with two micro-batches already in ``.grad``: 6 of 4."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _epoch in range(2):
        for i, (x, y) in enumerate(image_loader(num_samples=NUM_SAMPLES)):
            loss = F.cross_entropy(model(x), y) / ACCUMULATE
            loss.backward()
            if (i + 1) % ACCUMULATE == 0:
                optimizer.step()
                optimizer.zero_grad()
    return model


def right() -> nn.Module:
    """One number for all passes: a window may span two, and has 4 micro-batches."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    micro_batches_seen = 0
    for _epoch in range(2):
        for x, y in image_loader(num_samples=NUM_SAMPLES):
            loss = F.cross_entropy(model(x), y) / ACCUMULATE
            loss.backward()
            micro_batches_seen += 1
            if micro_batches_seen % ACCUMULATE == 0:
                optimizer.step()
                optimizer.zero_grad()
    return model


def broken_train_function() -> nn.Module:
    """The same from one function for each epoch."""
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def train_one_epoch() -> float:
        model.train()
        total = 0.0
        for step, (x, y) in enumerate(image_loader(num_samples=NUM_SAMPLES), 1):
            loss = F.cross_entropy(model(x), y)
            (loss / ACCUMULATE).backward()
            total += loss.item()
            if step % ACCUMULATE == 0:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        return total

    for _epoch in range(2):
        train_one_epoch()
    return model


def right_train_function() -> nn.Module:
    """The rest is an update of its own, with its own division."""
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def train_one_epoch() -> float:
        model.train()
        total = 0.0
        batches = list(image_loader(num_samples=NUM_SAMPLES))
        for start in range(0, len(batches), ACCUMULATE):
            window = batches[start : start + ACCUMULATE]
            for x, y in window:
                loss = F.cross_entropy(model(x), y)
                (loss / len(window)).backward()
                total += loss.item()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return total

    for _epoch in range(2):
        train_one_epoch()
    return model
