"""The last window of a pass has fewer micro-batches, and is divided as if it had all."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from broken_loops.shared import classifier, image_loader

ACCUMULATE = 4
NUM_SAMPLES = 40  # 10 micro-batches: 4, 4 and 2


def broken() -> nn.Module:
    """The tail is stepped on, and its two micro-batches count a quarter each: 2/4."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = image_loader(num_samples=NUM_SAMPLES)
    for _epoch in range(2):
        for i, (x, y) in enumerate(loader):
            loss = F.cross_entropy(model(x), y) / ACCUMULATE
            loss.backward()
            if (i + 1) % ACCUMULATE == 0 or i + 1 == len(loader):
                optimizer.step()
                optimizer.zero_grad()
    return model


def right() -> nn.Module:
    """Divided by the micro-batches that the window really has."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = image_loader(num_samples=NUM_SAMPLES)
    rest = len(loader) % ACCUMULATE
    for _epoch in range(2):
        for i, (x, y) in enumerate(loader):
            in_tail = i >= len(loader) - rest
            loss = F.cross_entropy(model(x), y) / (rest if in_tail else ACCUMULATE)
            loss.backward()
            if (i + 1) % ACCUMULATE == 0 or i + 1 == len(loader):
                optimizer.step()
                optimizer.zero_grad()
    return model


def broken_after_the_loop() -> nn.Module:
    """The rest is flushed after the loop: 2/4."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _epoch in range(2):
        pending = 0
        for x, y in image_loader(num_samples=NUM_SAMPLES):
            (F.cross_entropy(model(x), y) / ACCUMULATE).backward()
            pending += 1
            if pending == ACCUMULATE:
                optimizer.step()
                optimizer.zero_grad()
                pending = 0
        if pending:
            optimizer.step()
            optimizer.zero_grad()
    return model


def right_after_the_loop() -> nn.Module:
    """Flushed after the loop, and scaled up first."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _epoch in range(2):
        pending = 0
        for x, y in image_loader(num_samples=NUM_SAMPLES):
            (F.cross_entropy(model(x), y) / ACCUMULATE).backward()
            pending += 1
            if pending == ACCUMULATE:
                optimizer.step()
                optimizer.zero_grad()
                pending = 0
        if pending:
            for p in model.parameters():
                p.grad.mul_(ACCUMULATE / pending)
            optimizer.step()
            optimizer.zero_grad()
    return model


def broken_accelerate() -> nn.Module:
    """Accelerate divides by 4 always, and steps at the end of the loader: 2/4."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = image_loader(num_samples=NUM_SAMPLES)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _epoch in range(2):
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
    return model


def right_accelerate() -> nn.Module:
    """The loss of a tail is scaled up before Accelerate scales it down."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = image_loader(num_samples=NUM_SAMPLES)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    rest = len(loader) % ACCUMULATE
    for _epoch in range(2):
        for i, (x, y) in enumerate(loader):
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(x), y)
                if i >= len(loader) - rest:
                    loss = loss * ACCUMULATE / rest
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
    return model
