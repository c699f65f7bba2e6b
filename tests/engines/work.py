"""What every engine does: a small model and its micro-batches; the big batch, done the plain way."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import nn

from big_batch import Batch, mean_loss

CLIP = 0.25  # within the norms of the cases, 0.12 to 0.44: some updates are clipped and some are not
WIDTH = 8


@dataclass(frozen=True, kw_only=True)
class Case:
    """One cell of an engine's column.

    Attributes:
        dtype: float64, float32, or bfloat16.
        ragged: micro-batches of 1 to 4 samples instead of 3 each.
        tail: replicas hold different numbers of micro-batches.
        optimizer: "adamw" or "sgd".
    """

    dtype: torch.dtype
    ragged: bool
    tail: bool
    optimizer: str

    def held(self, replicas: int) -> list[int]:
        """How many micro-batches each replica has of an update."""
        return [2 + (replica + 1) % 2 * 2 if self.tail else 4 for replica in range(replicas)]


CASES = [
    Case(dtype=dtype, ragged=ragged, tail=tail, optimizer=optimizer)
    for dtype in (torch.float64, torch.float32, torch.bfloat16)
    for ragged in (False, True)
    for tail in (False, True)
    for optimizer in ("adamw", "sgd")
]


def layers() -> list[nn.Module]:
    """Four parts of a model in float64, with weights that bfloat16 can hold."""
    torch.manual_seed(0)
    parts: list[nn.Module] = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)]
    parts.append(nn.Linear(WIDTH, 4))
    return [part.to(torch.bfloat16).to(torch.float64) for part in parts]


def batches(start: int, number: int, *, ragged: bool) -> list[Batch]:
    """Micro-batches in float64, of which some samples have no label."""
    made = []
    for index in range(start, start + number):
        generator = torch.Generator().manual_seed(index)
        size = 1 + index % 4 if ragged else 3
        labels = torch.randint(-1, 4, (size,), generator=generator)
        labels[labels < 0] = -100
        labels[0] = index % 4  # no micro-batch is empty
        x = torch.randn(size, WIDTH, generator=generator).to(torch.bfloat16).to(torch.float64)
        made.append({"x": x, "labels": labels})
    return made


def global_batch(update: int, case: Case, replicas: int) -> list[list[Batch]]:
    """The micro-batches of one update, by replica."""
    return [
        batches(1000 * update + 100 * replica, number, ragged=case.ragged)
        for replica, number in enumerate(case.held(replicas))
    ]


def make_optimizer(parameters: object, kind: str) -> torch.optim.Optimizer:
    if kind == "adamw":
        return torch.optim.AdamW(parameters, lr=0.01)  # type: ignore[arg-type]
    return torch.optim.SGD(parameters, lr=0.25, momentum=0.9)  # type: ignore[arg-type]


Tensors = dict[str, torch.Tensor]


def big_batches(case: Case, replicas: int, updates: int) -> list[tuple[Tensors, Tensors, float, float]]:
    """The clipped gradient, the parameters after each update, the norm before clipping and the mean loss
    of an item, in float64, by the plain loop."""
    model = nn.Sequential(*layers())
    optimizer = make_optimizer(model.parameters(), case.optimizer)
    found = []
    for update in range(updates):
        given = [batch for share in global_batch(update, case, replicas) for batch in share]
        optimizer.zero_grad()
        loss = mean_loss(model, given)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        gradients = {
            name: copy.deepcopy(p.grad) for name, p in model.named_parameters() if p.grad is not None
        }
        optimizer.step()
        parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
        found.append((gradients, parameters, float(norm), float(loss.detach())))
    return found
