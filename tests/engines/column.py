"""One launch of an engine: its whole column of cases."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from engines.work import (
    CASES,
    CLIP,
    Batch,
    Case,
    Tensors,
    big_batches,
    global_batch,
    layers,
    make_optimizer,
)
from engines.wrapped import ENGINES, Wrapped, whole
from wholebatch import UpdateWindow, token_loss
from wholebatch.ranks.base import Traffic

UPDATES = 2
OBJECTIVE = token_loss()
_REDUCES, _GATHERS = (
    ("_reduce_scatter_base_", "reduce_scatter_tensor"),
    ("_allgather_base_", "all_gather_into"),
)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What came of one case: distances are relative to the largest element, in units of the rounding."""

    gradient_error: float
    parameter_error: float
    norm_error: float
    loss_error: float
    reductions: int
    items: int
    predicted: Traffic
    reduced_bytes: int
    gathered_bytes: int


class CollectiveBytes(TorchDispatchMode):
    """Counts the bytes that are handed to reductions and gathers of shards."""

    def __init__(self) -> None:
        super().__init__()
        self.reduced = self.gathered = 0
        self.paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        if self.paused:
            pass
        elif any(one in name for one in _REDUCES):
            self.reduced += args[1].nbytes
        elif any(one in name for one in _GATHERS):
            self.gathered += args[0].nbytes
        return func(*args, **(kwargs or {}))


@contextmanager
def quiet() -> Iterator[None]:
    """Without what torch says of views, and of gathers over two dimensions of a mesh."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="FSDP2-wrapped")
        yield


def column(rank: int, ranks: int, name: str) -> list[Cell]:
    """All cases of an engine."""
    import logging

    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    with quiet():
        return [_cell(name, case, rank, ranks) for case in CASES]


def _cell(name: str, case: Case, rank: int, ranks: int) -> Cell:
    parts = [part.to(case.dtype) for part in layers()]
    wrapped = ENGINES[name].wrap(parts, case.dtype, rank, ranks)
    optimizer = make_optimizer(wrapped.model.parameters(), case.optimizer)
    window = UpdateWindow(wrapped.model, optimizer, OBJECTIVE, clip_grad_norm=CLIP, **wrapped.options)
    seen: list[Tensors] = []
    errors, counted = [], CollectiveBytes()

    def look(*_: Any) -> None:
        counted.paused = True  # what is gathered here is for the comparison
        seen.append(_named(wrapped, gradients=True))

    optimizer.register_step_pre_hook(look)
    for update, (gradients, parameters, norm, loss) in enumerate(
        big_batches(case, wrapped.replicas, UPDATES)
    ):
        shares = global_batch(update, case, wrapped.replicas)
        mine = [_in_dtype(batch, case.dtype) for batch in shares[wrapped.replica]]
        counted = CollectiveBytes()
        with counted:
            record = window.run(mine, None if _by_schedule(wrapped.model) else _loss)
        assert record.samples == sum(len(batch["x"]) for share in shares for batch in share)
        assert record.outcome == "applied"
        rounding = torch.finfo(case.dtype).eps
        errors.append(
            (
                _error(seen.pop(), gradients, case.dtype),
                _error(_named(wrapped, gradients=False), parameters, case.dtype),
                abs(record.gradient_norm / norm - 1) / rounding,
                abs(record.loss_per_item / loss - 1) / rounding,
            )
        )
    gradient_error, parameter_error, norm_error, loss_error = map(max, zip(*errors, strict=True))
    return Cell(
        gradient_error=gradient_error,
        parameter_error=parameter_error,
        norm_error=norm_error,
        loss_error=loss_error,
        reductions=record.reductions,
        items=int(record.items),
        predicted=window.traffic(max(case.held(wrapped.replicas))),
        reduced_bytes=counted.reduced,
        gathered_bytes=counted.gathered,
    )


def _by_schedule(model: nn.Module) -> bool:
    return type(model).__name__ == "PipelinedModel"


def _loss(model: nn.Module, batch: Batch) -> Any:
    return OBJECTIVE(model(batch["x"]), batch)


def _in_dtype(batch: Batch, dtype: torch.dtype) -> Batch:
    return {"x": batch["x"].to(dtype), "labels": batch["labels"]}


def _named(wrapped: Wrapped, *, gradients: bool) -> Tensors:
    """Whole tensors of this rank's layers, by their name in the model."""
    return {
        f"{index}.{name}": whole(parameter.grad if gradients else parameter)
        for index, part in wrapped.parts.items()
        for name, parameter in part.named_parameters()
    }


def _error(mine: Tensors, wanted: Tensors, dtype: torch.dtype) -> float:
    """The largest distance of any element, relative to the largest, in units of the dtype's rounding."""
    pairs = [(tensor.double(), wanted[name]) for name, tensor in mine.items()]
    furthest = max(float((tensor - truth).abs().max()) for tensor, truth in pairs)
    return furthest / max(float(truth.abs().max()) for truth in wanted.values()) / torch.finfo(dtype).eps
