"""Losses whose weights look odd and are meant."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from broken_loops.shared import (
    CLASSES,
    FEATURES,
    IGNORED,
    WIDTH,
    classifier,
    image_loader,
    language_model,
    text_loader,
)

A = 4


def _train(model: nn.Module, loss_of, loader=None) -> nn.Module:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for i, batch in enumerate(image_loader() if loader is None else loader):
        (loss_of(batch) / A).backward()
        if (i + 1) % A == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model


def auxiliary_loss() -> nn.Module:
    """A coefficient for a second term, which is a mean of its own."""
    model = classifier()

    def loss_of(batch):
        logits = model(batch[0])
        return F.cross_entropy(logits, batch[1]) + 0.01 * logits.logsumexp(-1).pow(2).mean()

    return _train(model, loss_of)


def two_heads() -> nn.Module:
    model, second = classifier(), nn.Linear(WIDTH, 1)
    model.second = second

    def loss_of(batch):
        hidden = model.body(batch[0])
        regression = F.mse_loss(second(hidden).squeeze(-1), batch[0].sum(-1))
        return F.cross_entropy(model.head(hidden), batch[1]) + 0.5 * regression

    return _train(model, loss_of)


def label_smoothing() -> nn.Module:
    model = classifier()
    return _train(model, lambda batch: F.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.1))


def distillation() -> nn.Module:
    model, teacher = classifier(), copy.deepcopy(classifier()).requires_grad_(False)

    def loss_of(batch):
        with torch.no_grad():
            target = F.softmax(2 * teacher(batch[0]), dim=-1)
        return F.kl_div(F.log_softmax(model(batch[0]) / 2, dim=-1), target, reduction="batchmean") * 4

    return _train(model, loss_of)


def focal() -> nn.Module:
    model = classifier()

    def loss_of(batch):
        ce = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return ((1 - torch.exp(-ce)) ** 2 * ce).mean()

    return _train(model, loss_of)


def frozen_body() -> nn.Module:
    model = classifier()
    model.body.requires_grad_(False)
    return _train(model, lambda batch: F.cross_entropy(model(batch[0]), batch[1]))


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, WIDTH)
        self.head = nn.Linear(WIDTH, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embedding(ids)))


def tied_weights() -> nn.Module:
    torch.manual_seed(0)
    model = _Tied()
    lengths = torch.randint(0, 20, (12, 2, 9), generator=torch.Generator().manual_seed(5))

    def loss_of(block):
        return F.cross_entropy(model(block[:, :-1]).flatten(0, 1), block[:, 1:].flatten())

    return _train(model, loss_of, lengths)


def sequence_means() -> nn.Module:
    """Every sequence counts alike, whatever its length, and says so."""
    model = language_model()

    def loss_of(batch):
        labels = batch["labels"]
        losses = F.cross_entropy(model(batch["input_ids"]).transpose(1, 2), labels, reduction="none")
        return (losses.sum(-1) / (labels != IGNORED).sum(-1)).mean()

    return _train(model, loss_of, text_loader())


def class_weights() -> nn.Module:
    """Weighted items over the summed weights of the whole window."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weights = torch.tensor([1.0, 2.0, 0.5, 3.0])
    batches = list(image_loader())
    for start in range(0, len(batches), A):
        window = batches[start : start + A]
        total = sum(weights[y].sum() for _, y in window)
        for x, y in window:
            (F.cross_entropy(model(x), y, weight=weights, reduction="sum") / total).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def dpo() -> nn.Module:
    policy = language_model()
    reference = copy.deepcopy(policy).requires_grad_(False)
    blocks = torch.randint(0, 20, (12, 4, 9), generator=torch.Generator().manual_seed(5))

    def log_prob(model, block):
        log_probs = model(block[:, :-1]).log_softmax(-1)
        return log_probs.gather(-1, block[:, 1:].unsqueeze(-1)).squeeze(-1).sum(-1)

    def loss_of(block):
        gain = log_prob(policy, block) - log_prob(reference, block)
        return -F.logsigmoid(0.1 * (gain[:2] - gain[2:])).mean()

    return _train(policy, loss_of, blocks)


def _policy_gradient(advantages: Tensor) -> nn.Module:
    policy = classifier()
    with torch.no_grad():
        old = [policy(x).log_softmax(-1).gather(-1, y[:, None])[:, 0] - 0.05 for x, y in image_loader()]

    def loss_of(batch):
        (x, y), before, advantage = batch
        ratio = (policy(x).log_softmax(-1).gather(-1, y[:, None])[:, 0] - before).exp()
        return -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()

    return _train(policy, loss_of, list(zip(image_loader(), old, advantages, strict=True)))


def ppo() -> nn.Module:
    return _policy_gradient(torch.randn(12, 4, generator=torch.Generator().manual_seed(3)))


def grpo() -> nn.Module:
    """Advantages relative to their own group."""
    rewards = torch.rand(12, 4, generator=torch.Generator().manual_seed(3))
    centred = rewards - rewards.mean(-1, keepdim=True)
    return _policy_gradient(centred / (rewards.std(-1, keepdim=True) + 1e-4))


class _Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(FEATURES, 2 * CLASSES)
        self.decoder = nn.Linear(CLASSES, FEATURES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_var = self.encoder(x).chunk(2, dim=-1)
        return self.decoder(mean + torch.randn_like(mean) * (log_var / 2).exp()), mean, log_var


def vae() -> nn.Module:
    """A sum over features, a mean over samples, and a beta."""
    torch.manual_seed(0)
    model = _Autoencoder()

    def loss_of(batch):
        x, _ = batch
        again, mean, log_var = model(x)
        kl = -0.5 * torch.sum(1 + log_var - mean.pow(2) - log_var.exp())
        return (F.mse_loss(again, x, reduction="sum") + 0.5 * kl) / len(x)

    return _train(model, loss_of)


def gradient_penalty() -> nn.Module:
    """The gradient of the loss with respect to its input is kept small."""
    model = classifier()

    def loss_of(batch):
        x = batch[0].clone().requires_grad_()
        loss = F.cross_entropy(model(x), batch[1])
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + 0.1 * slope.pow(2).sum(-1).mean()

    return _train(model, loss_of)


def truncated_backpropagation() -> nn.Module:
    """A recurrent net that steps after every part of the sequence."""
    torch.manual_seed(0)
    cell = nn.GRU(FEATURES, WIDTH, batch_first=True)
    optimizer = torch.optim.SGD(cell.parameters(), lr=0.1)
    sequence = torch.randn(2, 24, FEATURES)
    hidden = None
    for part in sequence.split(6, dim=1):
        optimizer.zero_grad()
        output, hidden = cell(part, hidden)
        F.mse_loss(output, part.mean(-1, keepdim=True).expand_as(output)).backward()
        optimizer.step()
        hidden = hidden.detach()
    return cell
