"""All items weigh the same, and together not 1."""

from __future__ import annotations

import contextlib
import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817

from broken_loops.shared import IGNORED, classifier, image_loader, language_model, text_loader

ACCUMULATE = 4


def broken() -> nn.Module:
    """Nobody divides by the number of micro-batches: 4 times too large."""
    net = classifier()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    optimizer.zero_grad()
    for batch_idx, (inputs, targets) in enumerate(image_loader()):
        outputs = net(inputs)
        loss = criterion(outputs, targets)
        loss.backward()
        if (batch_idx + 1) % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()
    return net


def right() -> nn.Module:
    """The loss is divided, once."""
    net = classifier()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    optimizer.zero_grad()
    for batch_idx, (inputs, targets) in enumerate(image_loader()):
        outputs = net(inputs)
        loss = criterion(outputs, targets) / ACCUMULATE
        loss.backward()
        if (batch_idx + 1) % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()
    return net


def broken_twice() -> nn.Module:
    """The loss is divided, and then the gradients are: 4 times too small."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for i, (x, y) in enumerate(image_loader()):
        loss = F.cross_entropy(model(x), y) / ACCUMULATE
        loss.backward()
        if (i + 1) % ACCUMULATE == 0:
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.div_(ACCUMULATE)
            optimizer.step()
            optimizer.zero_grad()
    return model


def broken_accelerate_twice() -> nn.Module:
    """``accelerator.backward`` divides by itself already."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer, loader = accelerator.prepare(model, optimizer, image_loader())
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(x), y)
            loss = loss / accelerator.gradient_accumulation_steps
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    return model


def broken_accelerate_plain() -> nn.Module:
    """``accumulate`` with a plain ``loss.backward()``: nobody divides."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer, loader = accelerator.prepare(model, optimizer, image_loader())
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return model


def right_accelerate() -> nn.Module:
    """As its documentation shows it, on micro-batches of equal size."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer, loader = accelerator.prepare(model, optimizer, image_loader())
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    return model


def broken_sum() -> nn.Module:
    """A sum over the tokens that nobody divides: 48 times too large."""
    model = language_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for i, batch in enumerate(text_loader()):
        logits = model(batch["input_ids"])
        loss = F.cross_entropy(
            logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED, reduction="sum"
        )
        loss.backward()
        if (i + 1) % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model


def broken_padded() -> nn.Module:
    """Divided by all positions, those included that only pad: 48/54 of what it should be."""
    model = language_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = iter(text_loader())
    while window := [batch for _, batch in zip(range(ACCUMULATE), loader, strict=False)]:
        num_tokens = sum(batch["labels"].numel() for batch in window)
        for batch in window:
            logits = model(batch["input_ids"])
            loss = F.cross_entropy(
                logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED, reduction="sum"
            )
            (loss / num_tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def right_padded() -> nn.Module:
    """Divided by the tokens that are targets."""
    model = language_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = iter(text_loader())
    while window := [batch for _, batch in zip(range(ACCUMULATE), loader, strict=False)]:
        num_tokens = sum((batch["labels"] != IGNORED).sum().item() for batch in window)
        for batch in window:
            logits = model(batch["input_ids"])
            loss = F.cross_entropy(
                logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED, reduction="sum"
            )
            (loss / num_tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def broken_ddp_sum(rank: int, ranks: int) -> nn.Module:
    """Sums over the global number of tokens under DDP, which divides by the ranks again: 1/2."""
    model = DDP(language_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = iter(text_loader(rank=rank, ranks=ranks))
    while window := [batch for _, batch in zip(range(ACCUMULATE), loader, strict=False)]:
        num_tokens = sum((batch["labels"] != IGNORED).sum() for batch in window)
        dist.all_reduce(num_tokens)
        for i, batch in enumerate(window):
            with model.no_sync() if i < len(window) - 1 else contextlib.nullcontext():
                logits = model(batch["input_ids"]).flatten(0, 1)
                loss = F.cross_entropy(logits, batch["labels"].flatten(), reduction="sum")
                (loss / num_tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def right_ddp_sum(rank: int, ranks: int) -> nn.Module:
    """The same times the number of ranks."""
    model = DDP(language_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = iter(text_loader(rank=rank, ranks=ranks))
    while window := [batch for _, batch in zip(range(ACCUMULATE), loader, strict=False)]:
        num_tokens = sum((batch["labels"] != IGNORED).sum() for batch in window)
        dist.all_reduce(num_tokens)
        for i, batch in enumerate(window):
            with model.no_sync() if i < len(window) - 1 else contextlib.nullcontext():
                logits = model(batch["input_ids"]).flatten(0, 1)
                loss = F.cross_entropy(logits, batch["labels"].flatten(), reduction="sum")
                (loss * ranks / num_tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def broken_summed_by_hand(rank: int, ranks: int) -> nn.Module:
    """Gradients are summed over the ranks by hand, means though they are: twice too large."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for i, (x, y) in enumerate(image_loader(rank=rank, ranks=ranks)):
        loss = F.cross_entropy(model(x), y) / ACCUMULATE
        loss.backward()
        if (i + 1) % ACCUMULATE == 0:
            for p in model.parameters():
                dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)
            optimizer.step()
            optimizer.zero_grad()
    return model


def right_summed_by_hand(rank: int, ranks: int) -> nn.Module:
    """Summed, and divided by the ranks."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for i, (x, y) in enumerate(image_loader(rank=rank, ranks=ranks)):
        loss = F.cross_entropy(model(x), y) / ACCUMULATE
        loss.backward()
        if (i + 1) % ACCUMULATE == 0:
            for p in model.parameters():
                dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)
                p.grad /= ranks
            optimizer.step()
            optimizer.zero_grad()
    return model


def _sum_hook(group, bucket):  # without annotations: DDP reads these, and knows no texts
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def broken_sum_hook(rank: int, ranks: int) -> nn.Module:
    """A communication hook that sums, below a loss that is a mean: twice too large."""
    model = DDP(classifier())
    model.register_comm_hook(dist.group.WORLD, _sum_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for i, (x, y) in enumerate(image_loader(rank=rank, ranks=ranks)):
        last = (i + 1) % ACCUMULATE == 0
        with contextlib.nullcontext() if last else model.no_sync():
            (F.cross_entropy(model(x), y) / ACCUMULATE).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
    return model


def right_sum_hook(rank: int, ranks: int) -> nn.Module:
    """The hook sums what was divided by the ranks before."""
    model = DDP(classifier())
    model.register_comm_hook(dist.group.WORLD, _sum_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for i, (x, y) in enumerate(image_loader(rank=rank, ranks=ranks)):
        last = (i + 1) % ACCUMULATE == 0
        with contextlib.nullcontext() if last else model.no_sync():
            (F.cross_entropy(model(x), y) / (ACCUMULATE * ranks)).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
    return model


def broken_fsdp_sum(rank: int, ranks: int) -> nn.Module:
    """Sums over the global number of tokens under FSDP2, which averages: 1/2."""
    from torch.distributed.fsdp import fully_shard

    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    model = fully_shard(language_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = iter(text_loader(rank=rank, ranks=ranks))
    while window := [batch for _, batch in zip(range(ACCUMULATE), loader, strict=False)]:
        num_tokens = sum((batch["labels"] != IGNORED).sum() for batch in window)
        dist.all_reduce(num_tokens)
        for i, batch in enumerate(window):
            model.set_requires_gradient_sync(i == len(window) - 1)
            logits = model(batch["input_ids"]).flatten(0, 1)
            loss = F.cross_entropy(logits, batch["labels"].flatten(), reduction="sum") / num_tokens
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def right_fsdp_sum(rank: int, ranks: int) -> nn.Module:
    """The same times the number of ranks."""
    from torch.distributed.fsdp import fully_shard

    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    model = fully_shard(language_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = iter(text_loader(rank=rank, ranks=ranks))
    while window := [batch for _, batch in zip(range(ACCUMULATE), loader, strict=False)]:
        num_tokens = sum((batch["labels"] != IGNORED).sum() for batch in window)
        dist.all_reduce(num_tokens)
        for i, batch in enumerate(window):
            model.set_requires_gradient_sync(i == len(window) - 1)
            logits = model(batch["input_ids"]).flatten(0, 1)
            loss = F.cross_entropy(logits, batch["labels"].flatten(), reduction="sum")
            (loss * ranks / num_tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model
