"""One launch of an engine: its whole column of cases."""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from engines.wire import Wire
from engines.work import (
    CASES,
    CLIP,
    Batch,
    Case,
    Tensors,
    Truth,
    big_batches,
    global_batch,
    in_dtype,
    layers,
)
from engines.wrapped import Engine, Wrapped
from wholebatch import UpdateWindow, token_loss
from wholebatch.ranks.base import Traffic
from wholebatch.ranks.pipeline import PipelinedModel

UPDATES = 2
OBJECTIVE = token_loss()


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What came of one case: distances are relative to the largest element, in units of the rounding.

    Attributes:
        own_error: of the gradient of the big batch in the same dtype.
        counted: what this rank handed to collectives and held, beside ``predicted``.
        exchanged_bytes: between the ranks of one replica; not predicted.
        idle: whether this rank has no micro-batches.
    """

    case: Case
    gradient_error: float
    parameter_error: float
    norm_error: float
    loss_error: float
    own_error: float
    predicted: Traffic
    counted: Traffic
    exchanged_bytes: int
    idle: bool


# What the forward and backward of four layers may lose, in units of the dtype's rounding. AdamW divides by
# the size of a gradient, so in bfloat16 a small one that was rounded moves its parameter by a whole rate.
GRADIENT = 8.0
PARAMETER = {torch.float64: 4.0, torch.float32: 4.0, torch.bfloat16: 16.0}
# Of a wide sum (docs/exactness.md): twice what the big batch loses in the same dtype, and one rounding of
# the sum to that, which is half a unit.
OF_ITS_OWN, ONE_ROUNDING = 2.0, 0.5


def check_column(engine: Engine, of_ranks: Sequence[Sequence[Cell]]) -> None:
    """Every update is that of the big batch, and costs what is predicted, on every rank."""
    for cell in (cell for of_rank in of_ranks for cell in of_rank):
        assert cell.gradient_error < GRADIENT, cell
        assert cell.parameter_error < PARAMETER[cell.case.dtype], cell
        assert max(cell.norm_error, cell.loss_error) < GRADIENT, cell  # a common factor hides in a clip
        if cell.case.held == "many":
            assert cell.gradient_error <= OF_ITS_OWN * cell.own_error + ONE_ROUNDING, cell
        # a rank that only lends a hand holds nothing in its own last micro-batch
        predicted = replace(cell.predicted, held_bytes=0) if cell.idle else cell.predicted
        for cost, (least, most) in engine.about.items():
            counted = getattr(cell.counted, cost)
            assert least * getattr(predicted, cost) <= counted <= most * getattr(predicted, cost), cell
            predicted = replace(predicted, **{cost: counted})
        assert cell.counted == predicted, cell


def column(rank: int, ranks: int, module: str, name: str) -> list[Cell]:
    """All cases of an engine of ``module``."""
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message="FSDP2-wrapped")
    engine: Engine = importlib.import_module(module).ENGINES[name]
    return [_cell(engine, case, rank, ranks) for case in cases_of(engine)]


def cases_of(engine: Engine) -> list[Case]:
    return [case for case in CASES if case.dtype in engine.dtypes]


def _cell(engine: Engine, case: Case, rank: int, ranks: int) -> Cell:
    wrapped = engine.wrap([part.to(case.dtype) for part in layers()], case, rank, ranks)
    window = UpdateWindow(
        wrapped.model, wrapped.optimizer, OBJECTIVE, clip_grad_norm=CLIP, **wrapped.options
    )
    seen: list[Tensors] = []
    wire, held = Wire(), [0]
    by_schedule = isinstance(wrapped.model, PipelinedModel)

    def look(*_: Any) -> None:
        wire.paused = True  # what is gathered here is for the comparison
        seen.append(wrapped.read(gradients=True))
        wire.paused = False

    wrapped.before_step(look)
    if by_schedule:
        _after_its_schedule(window, lambda: held.append(wrapped.held()))
    errors = []
    truths = big_batches(case, wrapped.replicas, UPDATES)
    for update, truth in enumerate(truths):
        shares = global_batch(update, case, wrapped.replicas)
        mine = [in_dtype(batch, case.dtype) for batch in shares[wrapped.replica]]

        def loss(model: nn.Module, batch: Batch, last: Any = mine[-1:]) -> Any:
            if last and batch is last[0]:
                held.append(wrapped.held())
            return OBJECTIVE(model(batch["x"]), batch)

        wire = Wire()
        # the first update makes what the others have
        with wire if update + 1 == UPDATES else nullcontext():
            record = window.run(mine, None if by_schedule else loss)
        assert record.samples == sum(len(batch["x"]) for share in shares for batch in share)
        assert record.micro_batches == sum(map(len, shares))
        assert record.outcome == "applied"
        errors.append(_errors(wrapped, seen.pop(), truth, record, case.dtype))
    gradient_error, parameter_error, norm_error, loss_error = map(max, zip(*errors, strict=True))
    return Cell(
        case=case,
        gradient_error=gradient_error,
        parameter_error=parameter_error,
        norm_error=norm_error,
        loss_error=loss_error,
        own_error=_own_error(case, wrapped.replicas, truths),
        predicted=window.traffic(max(case.micro_batches(wrapped.replicas))),
        idle=not mine,
        counted=Traffic(
            reductions=record.reductions,
            reduced_bytes=wire.reduced,
            gathered_bytes=wire.gathered,
            held_bytes=max(held),
        ),
        exchanged_bytes=wire.exchanged,
    )


def _after_its_schedule(window: UpdateWindow, look: Callable[[], None]) -> None:
    ranks = window._parts.ranks
    run = ranks.run_window

    def run_and_look(loss: Any) -> None:
        run(loss)
        look()

    ranks.run_window = run_and_look  # type: ignore[method-assign]


def _errors(
    wrapped: Wrapped, gradients: Tensors, truth: Truth, record: Any, dtype: torch.dtype
) -> tuple[float, float, float, float]:
    """Of the gradient, the parameters, the norm and the loss."""
    factor = truth.factor if wrapped.clips_later else 1.0
    wanted = {name: gradient / factor for name, gradient in truth.gradients.items()}
    rounding = torch.finfo(dtype).eps
    return (
        _error(gradients, wanted, dtype),
        _error(wrapped.read(gradients=False), truth.parameters, dtype),
        abs(record.gradient_norm / truth.norm - 1) / rounding,
        abs(record.loss_per_item / truth.loss - 1) / rounding,
    )


def _own_error(case: Case, replicas: int, truths: list[Truth]) -> float:
    """Of the big batch's gradient in the case's own dtype."""
    own = big_batches(case, replicas, UPDATES, case.dtype)
    return max(
        _error(one.gradients, truth.gradients, case.dtype) for one, truth in zip(own, truths, strict=True)
    )


def _error(mine: Tensors, wanted: Tensors, dtype: torch.dtype) -> float:
    """The largest distance of any element, relative to the largest, in units of the dtype's rounding."""
    pairs = [(tensor.double(), wanted[name]) for name, tensor in mine.items()]
    furthest = max(float((tensor - truth).abs().max()) for tensor, truth in pairs)
    return furthest / max(float(truth.abs().max()) for truth in wanted.values()) / torch.finfo(dtype).eps
