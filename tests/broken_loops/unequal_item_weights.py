"""Means of means: what an item weighs depends on the company it was in."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817

from broken_loops.shared import IGNORED, classifier, image_loader, language_model, text_loader

ACCUMULATE = 4


def broken() -> nn.Module:
    """Each micro-batch is a mean over its own tokens, and counts a quarter."""
    model = language_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer.zero_grad()
    for i, batch in enumerate(text_loader()):
        logits = model(batch["input_ids"])
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED)
        (loss / ACCUMULATE).backward()
        if (i + 1) % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model


def right() -> nn.Module:
    """Tokens are counted before the first backward; every micro-batch is a sum over that number."""
    model = language_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = iter(text_loader())
    while window := [batch for _, batch in zip(range(ACCUMULATE), loader, strict=False)]:
        num_tokens = sum((batch["labels"] != IGNORED).sum() for batch in window)
        for batch in window:
            logits = model(batch["input_ids"])
            loss = F.cross_entropy(
                logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED, reduction="sum"
            )
            (loss / num_tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def _masked_mean(logits: Tensor, labels: Tensor) -> Tensor:
    mask = (labels != IGNORED).float()
    log_probs = torch.log_softmax(logits, dim=-1)
    picked = log_probs.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return -(picked * mask).sum() / mask.sum()


def broken_by_hand() -> nn.Module:
    """The same with a masked mean written by hand, as in reinforcement learning code."""
    policy = language_model()
    opt = torch.optim.SGD(policy.parameters(), lr=0.1)
    for step, batch in enumerate(text_loader(), start=1):
        loss = _masked_mean(policy(batch["input_ids"]), batch["labels"]) / ACCUMULATE
        loss.backward()
        if step % ACCUMULATE == 0:
            opt.step()
            opt.zero_grad(set_to_none=True)
    return policy


def broken_by_samples() -> nn.Module:
    """Weighted by samples, which all micro-batches have alike, where the items are tokens."""
    model = language_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss_fn = nn.CrossEntropyLoss()
    pending, total_samples = 0, 2 * ACCUMULATE
    for batch in text_loader():
        ids, labels = batch["input_ids"], batch["labels"]
        loss = loss_fn(model(ids).transpose(1, 2), labels)
        (loss * len(ids) / total_samples).backward()
        pending += len(ids)
        if pending == total_samples:
            optimizer.step()
            optimizer.zero_grad()
            pending = 0
    return model


def broken_small_last() -> nn.Module:
    """The last micro-batch of the epoch has two images instead of four, and counts as much."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    criterion = nn.CrossEntropyLoss()
    for i, (x, y) in enumerate(image_loader(num_samples=46)):
        loss = criterion(model(x), y) / ACCUMULATE
        loss.backward()
        if (i + 1) % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model


def right_small_last() -> nn.Module:
    """Sums, and the images that there really were."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    criterion = nn.CrossEntropyLoss(reduction="sum")
    seen = 0
    for i, (x, y) in enumerate(image_loader(num_samples=46)):
        criterion(model(x), y).backward()
        seen += len(x)
        if (i + 1) % ACCUMULATE == 0:
            for parameter in model.parameters():
                parameter.grad /= seen
            optimizer.step()
            optimizer.zero_grad()
            seen = 0
    return model


def broken_chunks() -> nn.Module:
    """To save memory the loss is taken over 5 positions at a time, and the means are averaged."""
    model = language_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in text_loader(samples=8):
        hidden = torch.tanh(model.embedding(batch["input_ids"])).flatten(0, 1)
        labels = batch["labels"].flatten()
        keep = labels != IGNORED
        losses = [
            F.cross_entropy(model.head(part), target)
            for part, target in zip(hidden[keep].split(5), labels[keep].split(5), strict=True)
        ]
        loss = torch.stack(losses).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def right_chunks() -> nn.Module:
    """Sums over 5 positions at a time, divided once."""
    model = language_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in text_loader(samples=8):
        hidden = torch.tanh(model.embedding(batch["input_ids"])).flatten(0, 1)
        labels = batch["labels"].flatten()
        keep = labels != IGNORED
        losses = [
            F.cross_entropy(model.head(part), target, reduction="sum")
            for part, target in zip(hidden[keep].split(5), labels[keep].split(5), strict=True)
        ]
        loss = torch.stack(losses).sum() / keep.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def broken_replicas(rank: int, ranks: int) -> nn.Module:
    """No accumulation: every replica takes the mean over its own tokens, and DDP averages these."""
    model = DDP(language_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in text_loader(rank=rank, ranks=ranks):
        optimizer.zero_grad()
        logits = model(batch["input_ids"])
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED)
        loss.backward()
        optimizer.step()
    return model


def right_replicas(rank: int, ranks: int) -> nn.Module:
    """The tokens of all replicas, and DDP's own division taken out."""
    model = DDP(language_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in text_loader(rank=rank, ranks=ranks):
        optimizer.zero_grad()
        num_tokens = (batch["labels"] != IGNORED).sum()
        dist.all_reduce(num_tokens)
        logits = model(batch["input_ids"]).flatten(0, 1)
        loss = F.cross_entropy(logits, batch["labels"].flatten(), ignore_index=IGNORED, reduction="sum")
        (loss * ranks / num_tokens).backward()
        optimizer.step()
    return model


def broken_window_per_replica(rank: int, ranks: int) -> nn.Module:
    """Right on each replica, by the tokens of its own window; the other's window is longer."""
    model = DDP(language_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = iter(text_loader(rank=rank, ranks=ranks))
    while window := [batch for _, batch in zip(range(ACCUMULATE), loader, strict=False)]:
        num_tokens = sum((batch["labels"] != IGNORED).sum() for batch in window)
        for i, batch in enumerate(window):
            model.require_backward_grad_sync = i == len(window) - 1
            logits = model(batch["input_ids"]).flatten(0, 1)
            loss = F.cross_entropy(logits, batch["labels"].flatten(), reduction="sum") / num_tokens
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def right_window_per_replica(rank: int, ranks: int) -> nn.Module:
    """The window's tokens, over all replicas."""
    model = DDP(language_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = iter(text_loader(rank=rank, ranks=ranks))
    while window := [batch for _, batch in zip(range(ACCUMULATE), loader, strict=False)]:
        num_tokens = sum((batch["labels"] != IGNORED).sum() for batch in window)
        dist.all_reduce(num_tokens)
        for i, batch in enumerate(window):
            model.require_backward_grad_sync = i == len(window) - 1
            logits = model(batch["input_ids"]).flatten(0, 1)
            loss = F.cross_entropy(logits, batch["labels"].flatten(), reduction="sum")
            (loss * ranks / num_tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def broken_accelerate() -> nn.Module:
    """Accelerate as its first page shows it, on sequences of unequal length."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
    model = language_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, text_loader())
    for batch in loader:
        with accelerator.accumulate(model):
            logits = model(batch["input_ids"])
            loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    return model


def right_accelerate() -> nn.Module:
    """A sum over the window's tokens, and a window by hand, which Accelerate knows nothing of.

    Not ``accumulate``: with a window fetched ahead it takes all of the last one for the loader's end.
    """
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = language_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, text_loader())
    batches = iter(loader)
    for _ in range(len(loader) // ACCUMULATE):
        window = [next(batches) for _ in range(ACCUMULATE)]
        num_tokens = sum((batch["labels"] != IGNORED).sum() for batch in window)
        for batch in window:
            logits = model(batch["input_ids"])
            loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
            accelerator.backward(loss / num_tokens)
        optimizer.step()
        optimizer.zero_grad()
    return model
