"""An average of the weights moves with micro-batches, not with updates."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from broken_loops.shared import classifier, image_loader

ACCUMULATE = 4
DECAY = 0.9


def broken() -> nn.Module:
    """``update_parameters`` at every micro-batch."""
    model = classifier()
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for i, (x, y) in enumerate(image_loader()):
        (F.cross_entropy(model(x), y) / ACCUMULATE).backward()
        if (i + 1) % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()
        ema.update_parameters(model)
    return ema.module


def right() -> nn.Module:
    """At every update."""
    model = classifier()
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for i, (x, y) in enumerate(image_loader()):
        (F.cross_entropy(model(x), y) / ACCUMULATE).backward()
        if (i + 1) % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()
            ema.update_parameters(model)
    return ema.module


@torch.no_grad()
def _update_teacher(teacher: nn.Module, student: nn.Module) -> None:
    for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
        slow.mul_(DECAY).add_(fast, alpha=1 - DECAY)


def broken_teacher() -> nn.Module:
    """A mean teacher, by hand, at the end of every pass through the loop."""
    student = classifier()
    teacher = copy.deepcopy(student).requires_grad_(False)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.5)
    for i, (x, y) in enumerate(image_loader()):
        logits = student(x)
        with torch.no_grad():
            target = teacher(x).softmax(-1)
        loss = F.cross_entropy(logits, y) + 0.1 * F.cross_entropy(logits, target)
        (loss / ACCUMULATE).backward()
        if (i + 1) % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()
        _update_teacher(teacher, student)
    return teacher


def right_teacher() -> nn.Module:
    """A mean teacher, by hand, after every step."""
    student = classifier()
    teacher = copy.deepcopy(student).requires_grad_(False)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.5)
    for i, (x, y) in enumerate(image_loader()):
        logits = student(x)
        with torch.no_grad():
            target = teacher(x).softmax(-1)
        loss = F.cross_entropy(logits, y) + 0.1 * F.cross_entropy(logits, target)
        (loss / ACCUMULATE).backward()
        if (i + 1) % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()
            _update_teacher(teacher, student)
    return teacher
