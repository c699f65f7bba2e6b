"""The update is right, and what is printed of it is something else."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from broken_loops.shared import IGNORED, classifier, image_loader, language_model, text_loader

ACCUMULATE = 4


def broken() -> list[float]:
    """What is printed is the last micro-batch, divided by 4."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    logged = []
    for i, (x, y) in enumerate(image_loader()):
        loss = F.cross_entropy(model(x), y) / ACCUMULATE
        loss.backward()
        if (i + 1) % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()
            print(f"update {i // ACCUMULATE} loss {loss.item():.6f}")
            logged.append(loss.item())
    return logged


def right() -> list[float]:
    """What is printed is the window."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    logged, window_loss = [], 0.0
    for i, (x, y) in enumerate(image_loader()):
        loss = F.cross_entropy(model(x), y) / ACCUMULATE
        loss.backward()
        window_loss += loss.item()
        if (i + 1) % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()
            print(f"update {i // ACCUMULATE} loss {window_loss:.6f}")
            logged.append(window_loss)
            window_loss = 0.0
    return logged


def broken_sum() -> list[float]:
    """The losses of the window are added up, and not divided."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    logged, running_loss = [], 0.0
    for i, (x, y) in enumerate(image_loader()):
        loss = F.cross_entropy(model(x), y)
        (loss / ACCUMULATE).backward()
        running_loss += loss.item()
        if (i + 1) % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()
            print("train loss:", running_loss)
            logged.append(running_loss)
            running_loss = 0.0
    return logged


def broken_mean_of_means() -> list[float]:
    """The gradient is by tokens; the number is the mean of the micro-batches' means."""
    model = language_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    logged = []
    loader = iter(text_loader())
    while window := [batch for _, batch in zip(range(ACCUMULATE), loader, strict=False)]:
        num_tokens = sum((batch["labels"] != IGNORED).sum() for batch in window)
        means = []
        for batch in window:
            labels = batch["labels"].flatten()
            losses = F.cross_entropy(
                model(batch["input_ids"]).flatten(0, 1), labels, ignore_index=IGNORED, reduction="sum"
            )
            (losses / num_tokens).backward()
            means.append(losses.item() / (labels != IGNORED).sum().item())
        optimizer.step()
        optimizer.zero_grad()
        print(f"loss={sum(means) / len(means)}")
        logged.append(sum(means) / len(means))
    return logged


def right_mean_of_means() -> list[float]:
    """The number is by tokens too."""
    model = language_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    logged = []
    loader = iter(text_loader())
    while window := [batch for _, batch in zip(range(ACCUMULATE), loader, strict=False)]:
        num_tokens = sum((batch["labels"] != IGNORED).sum() for batch in window)
        total = 0.0
        for batch in window:
            labels = batch["labels"].flatten()
            losses = F.cross_entropy(
                model(batch["input_ids"]).flatten(0, 1), labels, ignore_index=IGNORED, reduction="sum"
            )
            (losses / num_tokens).backward()
            total += losses.item()
        optimizer.step()
        optimizer.zero_grad()
        print(f"loss={total / num_tokens.item()}")
        logged.append(total / num_tokens.item())
    return logged
