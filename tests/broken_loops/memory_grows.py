"""What one micro-batch held is still held at the last."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from broken_loops.shared import classifier, image_loader

ACCUMULATE = 4


def broken() -> nn.Module:
    """The losses are added up before one backward: four graphs at once."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    total_loss = 0.0
    for i, (x, y) in enumerate(image_loader()):
        total_loss = total_loss + F.cross_entropy(model(x), y) / ACCUMULATE
        if (i + 1) % ACCUMULATE == 0:
            total_loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total_loss = 0.0
    return model


def right() -> nn.Module:
    """One backward for each."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    total_loss = 0.0
    for i, (x, y) in enumerate(image_loader()):
        loss = F.cross_entropy(model(x), y) / ACCUMULATE
        loss.backward()
        total_loss += loss.item()
        if (i + 1) % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()
            total_loss = 0.0
    return model


def broken_losses_kept() -> nn.Module:
    """Losses and outputs are kept for the log, with their graphs."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, outputs = [], []
    for i, (x, y) in enumerate(image_loader()):
        logits = model(x)
        loss = F.cross_entropy(logits, y) / ACCUMULATE
        loss.backward()
        losses.append(loss)
        outputs.append(logits)
        if (i + 1) % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()
    (torch.stack(losses).mean() + torch.cat(outputs).mean()).item()
    return model


def right_losses_kept() -> nn.Module:
    """Detached."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, outputs = [], []
    for i, (x, y) in enumerate(image_loader()):
        logits = model(x)
        loss = F.cross_entropy(logits, y) / ACCUMULATE
        loss.backward()
        losses.append(loss.detach())
        outputs.append(logits.detach().argmax(-1))
        if (i + 1) % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()
    (torch.stack(losses).mean() + torch.cat(outputs).float().mean()).item()
    return model


def broken_running_loss() -> nn.Module:
    """A running loss for the progress bar, to which each loss is added as a tensor."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    running_loss = torch.zeros(())
    for i, (x, y) in enumerate(image_loader()):
        loss = F.cross_entropy(model(x), y)
        (loss / ACCUMULATE).backward()
        running_loss += loss
        if (i + 1) % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model
