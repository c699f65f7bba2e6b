"""Gradients in the update that belong to something else."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from broken_loops.shared import FEATURES, classifier, image_loader

ACCUMULATE = 4


def broken() -> nn.Module:
    """One backward before training, to see that the model runs, and its gradients stay."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = next(iter(image_loader()))
    sanity_loss = F.cross_entropy(model(x), y)
    sanity_loss.backward()
    assert all(p.grad is not None for p in model.parameters())

    for i, (x, y) in enumerate(image_loader()):
        loss = F.cross_entropy(model(x), y) / ACCUMULATE
        loss.backward()
        if (i + 1) % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model


def right() -> nn.Module:
    """The same, and cleared before training."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = next(iter(image_loader()))
    sanity_loss = F.cross_entropy(model(x), y)
    sanity_loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    model.zero_grad()

    for i, (x, y) in enumerate(image_loader()):
        loss = F.cross_entropy(model(x), y) / ACCUMULATE
        loss.backward()
        if (i + 1) % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model


def _gan() -> tuple[nn.Module, nn.Module, torch.optim.Optimizer, torch.optim.Optimizer]:
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, FEATURES))
    discriminator = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer_g = torch.optim.SGD(generator.parameters(), lr=0.1)
    optimizer_d = torch.optim.SGD(discriminator.parameters(), lr=0.1)
    return generator, discriminator, optimizer_g, optimizer_d


def broken_gan() -> nn.Module:
    """The generator's backward leaves gradients in the discriminator, cleared after its own step."""
    generator, discriminator, optimizer_g, optimizer_d = _gan()
    bce = nn.BCEWithLogitsLoss()
    for real, _ in image_loader():
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        fake = generator(torch.randn(len(real), 3))
        loss_d = bce(discriminator(real), ones) + bce(discriminator(fake.detach()), zeros)
        loss_d.backward()
        optimizer_d.step()
        optimizer_d.zero_grad()

        loss_g = bce(discriminator(fake), ones)
        loss_g.backward()
        optimizer_g.step()
        optimizer_g.zero_grad()
    return discriminator


def right_gan() -> nn.Module:
    """The discriminator is cleared before its own backward."""
    generator, discriminator, optimizer_g, optimizer_d = _gan()
    bce = nn.BCEWithLogitsLoss()
    for real, _ in image_loader():
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        fake = generator(torch.randn(len(real), 3))
        optimizer_d.zero_grad()
        loss_d = bce(discriminator(real), ones) + bce(discriminator(fake.detach()), zeros)
        loss_d.backward()
        optimizer_d.step()

        optimizer_g.zero_grad()
        loss_g = bce(discriminator(fake), ones)
        loss_g.backward()
        optimizer_g.step()
    return discriminator


def broken_saliency() -> nn.Module:
    """A saliency map for the log, by ``backward`` on the class score, between two updates."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = next(iter(image_loader()))[0][:1].clone().requires_grad_()
    for i, (x, y) in enumerate(image_loader()):
        if i % ACCUMULATE == 0:
            model(probe).max().backward()
            probe.grad = None
        (F.cross_entropy(model(x), y) / ACCUMULATE).backward()
        if (i + 1) % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model


def right_saliency() -> nn.Module:
    """The map is asked for by ``autograd.grad``, which leaves no gradient behind."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = next(iter(image_loader()))[0][:1].clone().requires_grad_()
    for i, (x, y) in enumerate(image_loader()):
        if i % ACCUMULATE == 0:
            torch.autograd.grad(model(probe).max(), probe)
        (F.cross_entropy(model(x), y) / ACCUMULATE).backward()
        if (i + 1) % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model
