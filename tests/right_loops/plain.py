"""One optimizer, one process: habits that look like mistakes."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from broken_loops.shared import IGNORED, classifier, image_loader, language_model, text_loader

A = 4


def amp_with_skipped_update() -> nn.Module:
    """fp16 under a scaler; the second of three updates overflows."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=2.0**12, growth_factor=2.0**12, backoff_factor=2.0**-12, growth_interval=1
    )
    for i, (x, y) in enumerate(image_loader()):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(x), y) / A
        scaler.scale(loss).backward()
        if (i + 1) % A == 0:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return model


def bfloat16_autocast() -> nn.Module:
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, (x, y) in enumerate(image_loader()):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        (loss / A).backward()
        if (i + 1) % A == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model


def norms_logged() -> nn.Module:
    """The norm is measured at every micro-batch, with an infinite limit."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norms = []
    for i, (x, y) in enumerate(image_loader()):
        (F.cross_entropy(model(x), y) / A).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), float("inf")).item())
        if (i + 1) % A == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model


def no_accumulation() -> nn.Module:
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in image_loader(samples=16):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


def sums_divided_in_grad() -> nn.Module:
    """Sums of tokens, divided once, where the number is known."""
    model = language_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = 0
    for i, batch in enumerate(text_loader()):
        labels = batch["labels"].flatten()
        logits = model(batch["input_ids"]).flatten(0, 1)
        F.cross_entropy(logits, labels, reduction="sum").backward()
        seen += int((labels != IGNORED).sum())
        if (i + 1) % A == 0:
            with torch.no_grad():
                for p in model.parameters():
                    p.grad.div_(seen)
            optimizer.step()
            optimizer.zero_grad()
            seen = 0
    return model


def mean_times_own_count() -> nn.Module:
    """Means, weighted by the tokens that each was over."""
    model = language_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = list(text_loader())
    for start in range(0, len(batches), A):
        window = batches[start : start + A]
        counts = [(batch["labels"] != IGNORED).sum() for batch in window]
        for batch, own in zip(window, counts, strict=True):
            logits = model(batch["input_ids"]).flatten(0, 1)
            loss = F.cross_entropy(logits, batch["labels"].flatten())
            (loss * own / sum(counts)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def _checkpointed(reentrant: bool) -> nn.Module:
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, (x, y) in enumerate(image_loader()):
        hidden = checkpoint(model.body, x.requires_grad_(reentrant), use_reentrant=reentrant)
        (F.cross_entropy(model.head(hidden), y) / A).backward()
        if (i + 1) % A == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model


def checkpointing() -> nn.Module:
    return _checkpointed(False)


def reentrant_checkpointing() -> nn.Module:
    return _checkpointed(True)


def zeros_instead_of_none() -> nn.Module:
    """Cleared twice, to zeros."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.zero_grad(set_to_none=False)
    for i, (x, y) in enumerate(image_loader()):
        if i % A == 0:
            optimizer.zero_grad(set_to_none=False)
        (F.cross_entropy(model(x), y) / A).backward()
        if (i + 1) % A == 0:
            optimizer.step()
            model.zero_grad(set_to_none=False)
    return model


def none_by_hand() -> nn.Module:
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, (x, y) in enumerate(image_loader()):
        (F.cross_entropy(model(x), y) / A).backward()
        if (i + 1) % A == 0:
            optimizer.step()
            for p in model.parameters():
                p.grad = None
    return model


def clipped_by_hand() -> nn.Module:
    """A global norm of 0.1, written out."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, (x, y) in enumerate(image_loader()):
        (F.cross_entropy(model(x), y) / A).backward()
        if (i + 1) % A == 0:
            norm = torch.sqrt(sum(p.grad.pow(2).sum() for p in model.parameters()))
            factor = torch.clamp(0.1 / (norm + 1e-6), max=1.0)
            for p in model.parameters():
                p.grad.mul_(factor)
            optimizer.step()
            optimizer.zero_grad()
    return model


def tail_with_its_own_division() -> nn.Module:
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _epoch in range(2):
        batches = list(image_loader(num_samples=40))
        for start in range(0, len(batches), A):
            window = batches[start : start + A]
            for x, y in window:
                (F.cross_entropy(model(x), y) / len(window)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model


def evaluation_between_updates() -> nn.Module:
    """Evaluated, averaged, and its learning rate set by what evaluation said; numbers logged."""
    model = classifier(dropout=0.0)
    ema = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    history = []
    for i, (x, y) in enumerate(image_loader()):
        loss = F.cross_entropy(model(x), y)
        (loss / A).backward()
        history.append(loss.item())
        if (i + 1) % A == 0:
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for slow, fast in zip(ema.parameters(), model.parameters(), strict=True):
                    slow.lerp_(fast, 0.1)
            model.eval()
            with torch.no_grad():
                plateau.step(sum(F.cross_entropy(model(x), y).item() for x, y in image_loader(16)))
            model.train()
    return model


def warmup_by_hand() -> nn.Module:
    """A learning rate for every update, and for each group."""
    model = classifier()
    groups = [{"params": model.body.parameters(), "lr": 0.01}, {"params": model.head.parameters()}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    base = [group["lr"] for group in optimizer.param_groups]
    for i, (x, y) in enumerate(image_loader()):
        (F.cross_entropy(model(x), y) / A).backward()
        if (i + 1) % A == 0:
            for group, rate in zip(optimizer.param_groups, base, strict=True):
                group["lr"] = rate * min(1.0, (i + 1) / (A * 2))
            optimizer.step()
            optimizer.zero_grad()
    return model


def lbfgs() -> nn.Module:
    """A closure that sees all micro-batches."""
    model = classifier()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
    batches = list(image_loader(num_samples=16))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        total = torch.zeros(())
        for x, y in batches:
            loss = F.cross_entropy(model(x), y) / len(batches)
            loss.backward()
            total += loss.detach()
        return total

    for _ in range(3):
        optimizer.step(closure)
    return model


def compiled() -> nn.Module:
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fast = torch.compile(model, backend="aot_eager")
    for i, (x, y) in enumerate(image_loader()):
        (F.cross_entropy(fast(x), y) / A).backward()
        if (i + 1) % A == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model


def nanogpt_style() -> nn.Module:
    """The loop of a small pretraining script: the next batch is fetched while backward runs."""
    model = language_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95))
    loader = iter(_blocks())
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    x, y = next(loader)
    for iter_num in range(3):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (iter_num + 1) / 3
        for _micro in range(A):
            loss = F.cross_entropy(model(x).view(-1, 20), y.view(-1), ignore_index=-1) / A
            x, y = next(loader)
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
    return model


def _blocks() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """13 blocks of 2 x 8 tokens."""
    tokens = torch.randint(0, 20, (13, 2, 9), generator=torch.Generator().manual_seed(5))
    return [(block[:, :-1].contiguous(), block[:, 1:].contiguous()) for block in tokens]
