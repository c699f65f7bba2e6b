"""What every engine does: a small model and its micro-batches; the big batch, done the plain way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from big_batch import Batch, mean_loss

CLIP = 0.25  # within the norms of the cases, 0.12 to 0.44: some updates are clipped and some are not
WIDTH = 8


Held = Literal["full", "tail", "one without", "many"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One cell of an engine's column.

    Attributes:
        dtype: float64, float32, or bfloat16.
        ragged: micro-batches of 1 or 4 samples instead of 3 each.
        held: "full": 4 micro-batches on every replica. "tail": 2 on every other one. "one without": none
            on the last of several. "many": 8 on each, which half precision adds up in float32.
        optimizer: "adamw" or "sgd".
    """

    dtype: torch.dtype
    ragged: bool
    held: Held
    optimizer: str

    def micro_batches(self, replicas: int) -> list[int]:
        """How many each replica has of an update."""
        if self.held == "tail":
            return [4, 2] * (replicas // 2) or [2]
        if self.held == "one without":
            return [4] * (replicas - 1) + [0] if replicas > 1 else [4]
        return [8 if self.held == "many" else 4] * replicas


DTYPES = (torch.float64, torch.float32, torch.bfloat16)
_WINDOWS: tuple[Held, ...] = ("full", "tail")
CASES = [
    *(
        Case(dtype=dtype, ragged=ragged, held=held, optimizer=optimizer)
        for dtype in DTYPES
        for ragged in ((True,) if dtype == torch.float64 else (False, True))
        for held in _WINDOWS
        for optimizer in ("adamw", "sgd")
    ),
    *(Case(dtype=dtype, ragged=True, held="one without", optimizer="adamw") for dtype in DTYPES),
    *(
        Case(dtype=torch.bfloat16, ragged=ragged, held="many", optimizer="adamw")
        for ragged in (False, True)
    ),
]
PRICED = Case(dtype=torch.float32, ragged=False, held="full", optimizer="adamw")


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
        size = 1 + 3 * (index % 2) if ragged else 3
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
        for replica, number in enumerate(case.micro_batches(replicas))
    ]


def make_optimizer(parameters: object, kind: str) -> torch.optim.Optimizer:
    if kind == "adamw":
        return torch.optim.AdamW(parameters, lr=0.01)  # type: ignore[arg-type]
    return torch.optim.SGD(parameters, lr=0.25, momentum=0.9)  # type: ignore[arg-type]


Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Truth:
    """What the big batch came to in one update.

    Attributes:
        gradients: clipped.
        factor: that they were clipped by.
        parameters: after the update.
        norm: before clipping.
        loss: of an item.
    """

    gradients: Tensors
    factor: float
    parameters: Tensors
    norm: float
    loss: float


def big_batches(case: Case, replicas: int, updates: int, dtype: torch.dtype = torch.float64) -> list[Truth]:
    """The updates of the big batch, by the plain loop."""
    model = nn.Sequential(*layers()).to(dtype)
    optimizer = make_optimizer(model.parameters(), case.optimizer)
    found = []
    for update in range(updates):
        given = [
            in_dtype(batch, dtype) for share in global_batch(update, case, replicas) for batch in share
        ]
        optimizer.zero_grad()
        loss = mean_loss(model, given)
        loss.backward()
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), CLIP))
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
        found.append(
            Truth(
                gradients=gradients,
                factor=min(1.0, CLIP / (norm + 1e-6)),  # as torch and DeepSpeed do
                parameters=parameters,
                norm=norm,
                loss=float(loss.detach()),
            )
        )
    return found


def in_dtype(batch: Batch, dtype: torch.dtype) -> Batch:
    return {"x": batch["x"].to(dtype), "labels": batch["labels"]}
