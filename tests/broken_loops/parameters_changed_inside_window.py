"""Weights change between the micro-batches of one window."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from broken_loops.shared import FEATURES, classifier, image_loader

ACCUMULATE = 4


@torch.no_grad()
def _decay(model: nn.Module, rate: float) -> None:
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.mul_(1.0 - rate)


def broken() -> nn.Module:
    """Decoupled weight decay, by hand, at every micro-batch."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, (x, y) in enumerate(image_loader()):
        (F.cross_entropy(model(x), y) / ACCUMULATE).backward()
        _decay(model, 0.05)
        if (i + 1) % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model


def right() -> nn.Module:
    """After the step."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, (x, y) in enumerate(image_loader()):
        (F.cross_entropy(model(x), y) / ACCUMULATE).backward()
        if (i + 1) % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()
            _decay(model, 0.05)
    return model


def _critic() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 1))


def broken_critic() -> nn.Module:
    """A Wasserstein critic whose weights are clamped at every micro-batch, and start outside the range."""
    critic = _critic()
    optimizer = torch.optim.RMSprop(critic.parameters(), lr=0.01)
    clamp = 0.2
    for i, (real, _) in enumerate(image_loader()):
        for p in critic.parameters():
            p.data.clamp_(-clamp / (i + 1), clamp / (i + 1))
        fake = torch.zeros_like(real)
        ((critic(fake).mean() - critic(real).mean()) / ACCUMULATE).backward()
        if (i + 1) % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()
    return critic


def right_critic() -> nn.Module:
    """Clamped after every step."""
    critic = _critic()
    optimizer = torch.optim.RMSprop(critic.parameters(), lr=0.01)
    clamp = 0.2
    for i, (real, _) in enumerate(image_loader()):
        fake = torch.zeros_like(real)
        ((critic(fake).mean() - critic(real).mean()) / ACCUMULATE).backward()
        if (i + 1) % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()
            for p in critic.parameters():
                p.data.clamp_(-clamp, clamp)
    return critic
