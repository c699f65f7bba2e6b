"""Several optimizers, or several backwards for one step."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from broken_loops.shared import FEATURES, classifier, image_loader
from broken_loops.stale_gradients import _gan


def gan() -> nn.Module:
    """As in DCGAN: two backwards before the discriminator's step."""
    generator, discriminator, optimizer_g, optimizer_d = _gan()
    criterion = nn.BCEWithLogitsLoss()
    for real, _ in image_loader():
        discriminator.zero_grad()
        label = torch.full((len(real),), 1.0)
        criterion(discriminator(real).view(-1), label).backward()
        fake = generator(torch.randn(len(real), 3))
        criterion(discriminator(fake.detach()).view(-1), label.fill_(0.0).clone()).backward()
        optimizer_d.step()
        generator.zero_grad()
        criterion(discriminator(fake).view(-1), torch.ones(len(real))).backward()
        optimizer_g.step()
    return discriminator


def wgan_gp() -> nn.Module:
    """A gradient penalty in the critic, which steps twice for each step of the generator."""
    generator, critic, optimizer_g, optimizer_d = _gan()
    for i, (real, _) in enumerate(image_loader()):
        fake = generator(torch.randn(len(real), 3))
        share = torch.rand(len(real), 1)
        between = (share * real + (1 - share) * fake.detach()).requires_grad_()
        (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        penalty = (slope.norm(dim=-1) - 1).pow(2).mean()
        optimizer_d.zero_grad()
        (critic(fake.detach()).mean() - critic(real).mean() + 10 * penalty).backward()
        optimizer_d.step()
        if i % 2 == 1:
            optimizer_g.zero_grad()
            (-critic(generator(torch.randn(len(real), 3))).mean()).backward()
            optimizer_g.step()
    return critic


def one_backward_two_optimizers() -> nn.Module:
    model = classifier()
    slow = torch.optim.SGD(model.body.parameters(), lr=0.01)
    fast = torch.optim.AdamW(model.head.parameters(), lr=0.01)
    for i, (x, y) in enumerate(image_loader()):
        (F.cross_entropy(model(x), y) / 4).backward()
        if (i + 1) % 4 == 0:
            for optimizer in (slow, fast):
                optimizer.step()
                optimizer.zero_grad()
    return model


def two_losses_backward_each() -> nn.Module:
    """Two losses, each a mean over its own items, one backward for each."""
    torch.manual_seed(0)
    body, head, other = nn.Linear(FEATURES, 8), nn.Linear(8, 4), nn.Linear(8, 1)
    model = nn.ModuleList([body, head, other])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, (x, y) in enumerate(image_loader()):
        hidden = torch.tanh(body(x))
        (F.cross_entropy(head(hidden), y) / 4).backward(retain_graph=True)
        (F.mse_loss(other(hidden)[:2, 0], x[:2, 0]) / 4).backward()
        if (i + 1) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model
