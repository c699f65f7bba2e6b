"""Many small gradients are added up in bfloat16."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from broken_loops.shared import classifier, image_loader, language_model, text_loader

ACCUMULATE = 64


def broken() -> nn.Module:
    """A model in bfloat16, and its ``.grad`` too, over 64 micro-batches."""
    model = classifier().to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, (x, y) in enumerate(image_loader(num_samples=128, samples=1)):
        loss = F.cross_entropy(model(x.bfloat16()), y) / ACCUMULATE
        loss.backward()
        if (i + 1) % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model


def right() -> nn.Module:
    """A model in float32 under autocast: only the arithmetic is bfloat16."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, (x, y) in enumerate(image_loader(num_samples=128, samples=1)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y) / ACCUMULATE
        loss.backward()
        if (i + 1) % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model


def broken_embedding() -> nn.Module:
    """A language model in bfloat16, 64 sequences, one at a time."""
    model = language_model().to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = iter(text_loader(num_samples=2 * ACCUMULATE, samples=1))
    for _ in range(2):
        window = [next(loader) for _ in range(ACCUMULATE)]
        num_tokens = sum(batch["labels"].numel() for batch in window)
        for batch in window:
            logits = model(batch["input_ids"])
            (F.cross_entropy(logits[0], batch["labels"][0], reduction="sum") / num_tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def right_embedding() -> nn.Module:
    """The same weights in bfloat16, with gradients in float32."""
    model = language_model().to(torch.bfloat16)
    for parameter in model.parameters():
        parameter.grad_dtype = torch.float32
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    loader = iter(text_loader(num_samples=2 * ACCUMULATE, samples=1))
    for _ in range(2):
        window = [next(loader) for _ in range(ACCUMULATE)]
        num_tokens = sum(batch["labels"].numel() for batch in window)
        for batch in window:
            logits = model(batch["input_ids"])
            (F.cross_entropy(logits[0], batch["labels"][0], reduction="sum") / num_tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model
