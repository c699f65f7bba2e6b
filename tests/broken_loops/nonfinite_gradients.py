"""A step on gradients that are not numbers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from broken_loops.shared import IGNORED, classifier, image_loader, language_model, text_loader

ACCUMULATE = 4


def broken() -> nn.Module:
    """The prompt fills a whole micro-batch, so that no label is left: a mean over nothing."""
    model = language_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, batch in enumerate(text_loader()):
        labels = batch["labels"].masked_fill(torch.tensor(i == 5), IGNORED)
        log_probs = model(batch["input_ids"]).log_softmax(-1)
        mask = labels != IGNORED
        picked = log_probs.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        loss = -(picked * mask).sum() / mask.sum()
        (loss / ACCUMULATE).backward()
        if (i + 1) % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model


def right() -> nn.Module:
    """A sum over nothing is 0, and the window has tokens."""
    model = language_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = list(enumerate(text_loader()))
    for start in range(0, len(batches), ACCUMULATE):
        window = []
        for i, batch in batches[start : start + ACCUMULATE]:
            window.append((batch["input_ids"], batch["labels"].masked_fill(torch.tensor(i == 5), IGNORED)))
        num_tokens = sum((labels != IGNORED).sum() for _, labels in window)
        for ids, labels in window:
            logits = model(ids)
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            (loss / num_tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def broken_square_root() -> nn.Module:
    """A distance whose square root is taken at 0."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for i, (x, _) in enumerate(image_loader()):
        positive = x if i == 2 else x + 0.1
        distance = (model(x) - model(positive)).pow(2).sum(-1).sqrt()
        (distance.mean() / ACCUMULATE).backward()
        if (i + 1) % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model


def right_square_root() -> nn.Module:
    """Something small is added below the root."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for i, (x, _) in enumerate(image_loader()):
        positive = x if i == 2 else x + 0.1
        distance = ((model(x) - model(positive)).pow(2).sum(-1) + 1e-6).sqrt()
        (distance.mean() / ACCUMULATE).backward()
        if (i + 1) % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model
