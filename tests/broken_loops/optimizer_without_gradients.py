"""The optimizer steps, and has no gradients."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

from broken_loops.shared import classifier, image_loader

ACCUMULATE = 4


def broken() -> nn.Module:
    """``zero_grad`` between ``backward`` and ``step``."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, (x, y) in enumerate(image_loader()):
        loss = F.cross_entropy(model(x), y) / ACCUMULATE
        loss.backward()
        if (i + 1) % ACCUMULATE == 0:
            optimizer.zero_grad()
            optimizer.step()
    return model


def right() -> nn.Module:
    """After ``step``."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, (x, y) in enumerate(image_loader()):
        loss = F.cross_entropy(model(x), y) / ACCUMULATE
        loss.backward()
        if (i + 1) % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model


def broken_other_model() -> nn.Module:
    """The optimizer was made before the model was replaced by the checkpoint's."""
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    checkpoint = copy.deepcopy(model)
    model = checkpoint
    for i, (x, y) in enumerate(image_loader()):
        loss = F.cross_entropy(model(x), y) / ACCUMULATE
        loss.backward()
        if (i + 1) % ACCUMULATE == 0:
            optimizer.step()
            model.zero_grad()
    return model


def right_other_model() -> nn.Module:
    """The checkpoint is loaded into the model that the optimizer has."""
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    checkpoint = copy.deepcopy(model.state_dict())
    model.load_state_dict(checkpoint)
    for i, (x, y) in enumerate(image_loader()):
        loss = F.cross_entropy(model(x), y) / ACCUMULATE
        loss.backward()
        if (i + 1) % ACCUMULATE == 0:
            optimizer.step()
            model.zero_grad()
    return model


def broken_fsdp_never_reduced(rank: int, ranks: int) -> nn.Module:
    """FSDP2 told to hold back, and never told to reduce: the shards get nothing."""
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(classifier())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.set_requires_gradient_sync(False)
    for i, (x, y) in enumerate(image_loader(rank=rank, ranks=ranks)):
        (F.cross_entropy(model(x), y) / ACCUMULATE).backward()
        if (i + 1) % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model


def right_fsdp_never_reduced(rank: int, ranks: int) -> nn.Module:
    """Told to reduce at the last micro-batch."""
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(classifier())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, (x, y) in enumerate(image_loader(rank=rank, ranks=ranks)):
        model.set_requires_gradient_sync((i + 1) % ACCUMULATE == 0)
        (F.cross_entropy(model(x), y) / ACCUMULATE).backward()
        if (i + 1) % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model
