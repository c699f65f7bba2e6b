"""The loops that are compared. Each has its own model and optimizer, and does the work of ``work.py``.

All get their micro-batches as tensors in memory: nobody's data loading is measured. The peers are driven
as their documentation has it for a causal language model with a variable number of labels.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

import wholebatch as wb
from work import (
    CLIP_GRAD_NORM,
    MicroBatch,
    Work,
    count_items,
    new_model,
    new_optimizer,
    num_replicas,
    sum_loss,
)

Around = AbstractContextManager[Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Contestant:
    """One loop.

    Args:
        name: the row of the table.
        model: the bare module, for its parameters.
        optimizer: the torch optimizer that steps them.
        run: ``run(batches, around)`` does one update inside ``around``, which measures it, on whatever
            thread the loop runs.
        close: ends what the loop has started.
    """

    name: str
    model: nn.Module
    optimizer: Optimizer
    run: Callable[[list[MicroBatch], Around], None]
    close: Callable[[], None] = lambda: None


def inside(update: Callable[[list[MicroBatch]], None]) -> Callable[[list[MicroBatch], Around], None]:
    """Make of a plain update one that runs inside what measures it."""

    def run(batches: list[MicroBatch], around: Around) -> None:
        with around:
            update(batches)

    return run


def wrapped(model: nn.Module) -> nn.Module:
    """``model`` in DDP where there are several ranks."""
    return DistributedDataParallel(model) if num_replicas() > 1 else model


def num_items(batches: list[MicroBatch]) -> Tensor:
    """N, over all replicas."""
    total = torch.stack([count_items(batch) for batch in batches]).sum()
    if num_replicas() > 1:
        dist.all_reduce(total)
    return total


def hand(work: Work, name: str = "hand-written loop", dtype: torch.dtype = torch.float32) -> Contestant:
    """The loop that the window stands for, with nothing else in it: no checks, no record."""
    bare = new_model(work).to(dtype)
    model, replicas = wrapped(bare), num_replicas()
    optimizer, parameters = new_optimizer(bare), list(bare.parameters())

    def update(batches: list[MicroBatch]) -> None:
        share = replicas / num_items(batches)  # DDP divides by the replicas
        for index, batch in enumerate(batches):
            held_back = replicas > 1 and index < len(batches) - 1
            with model.no_sync() if held_back else nullcontext():
                loss = sum_loss(model(batch["input_ids"]), batch["labels"])
                (loss * share).backward()
        clip_grad_norm_(parameters, CLIP_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()

    return Contestant(name=name, model=bare, optimizer=optimizer, run=inside(update))


def _window(work: Work) -> tuple[nn.Module, Optimizer, Any, wb.UpdateWindow]:
    bare = new_model(work)
    model, optimizer, objective = wrapped(bare), new_optimizer(bare), wb.next_token_loss()
    window = wb.UpdateWindow(model, optimizer, objective, clip_grad_norm=CLIP_GRAD_NORM)
    return bare, optimizer, objective, window


def wholebatch_run(work: Work) -> Contestant:
    """``window.run``."""
    bare, optimizer, objective, window = _window(work)

    def loss_fn(model: nn.Module, batch: MicroBatch) -> Any:
        return objective(model(batch["input_ids"]), batch)

    def update(batches: list[MicroBatch]) -> None:
        window.run(batches, loss_fn)

    return Contestant(name="Wholebatch, run", model=bare, optimizer=optimizer, run=inside(update))


def wholebatch_loop(work: Work) -> Contestant:
    """``with window.update``, with the loop written out."""
    bare, optimizer, objective, window = _window(work)

    def update(batches: list[MicroBatch]) -> None:
        with window.update(batches) as update:
            for batch in update:
                update.backward(objective(window.model(batch["input_ids"]), batch))

    return Contestant(name="Wholebatch, loop", model=bare, optimizer=optimizer, run=inside(update))


class OwnGradientState:
    """Keeps Accelerate's accumulation settings apart, which all of its users in a process share.

    Entered around a turn, outside of what is measured.
    """

    def __init__(self) -> None:
        from accelerate.state import GradientState

        self._shared: dict[str, Any] = GradientState._shared_state
        self._own = dict(self._shared)

    def __enter__(self) -> None:
        self._shared.clear()
        self._shared.update(self._own)

    def __exit__(self, *_: object) -> None:
        self._own = dict(self._shared)


def accelerate(work: Work, *, accumulate: bool) -> Contestant:
    """Accelerate by ``accumulate()``, or by ``no_sync`` as its guide for causal language models has it.

    Source: Accelerate's guide to gradient accumulation, the part on samples of variable size: summed
    losses, times the micro-batches and processes that Accelerate and DDP divide by, over N.
    """
    from accelerate import Accelerator
    from accelerate.state import GradientState

    GradientState._shared_state.clear()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=work.micro_batches_per_window)
    bare = new_model(work)
    optimizer = new_optimizer(bare)
    model, stepper = accelerator.prepare(bare, optimizer)
    state = OwnGradientState()

    def scope(last: bool) -> Around:
        if accumulate:
            return accelerator.accumulate(model)
        return nullcontext() if last or accelerator.num_processes == 1 else accelerator.no_sync(model)

    def update(batches: list[MicroBatch]) -> None:
        local = torch.stack([count_items(batch) for batch in batches]).sum()
        total = accelerator.gather(local).sum().item()
        scale = accelerator.gradient_accumulation_steps * accelerator.num_processes / total
        for index, batch in enumerate(batches):
            last = index == len(batches) - 1
            with scope(last):
                loss = sum_loss(model(batch["input_ids"]), batch["labels"])
                accelerator.backward(loss * scale)
                if accumulate:  # as its loops are written: called in every turn, heeded in the last
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), CLIP_GRAD_NORM)
                    stepper.step()
                    stepper.zero_grad()
        if not accumulate:
            accelerator.clip_grad_norm_(model.parameters(), CLIP_GRAD_NORM)
            stepper.step()
            stepper.zero_grad()

    def run(batches: list[MicroBatch], around: Around) -> None:
        with state, around:
            update(batches)

    name = f"Accelerate, {'accumulate' if accumulate else 'no_sync'}"
    return Contestant(name=name, model=bare, optimizer=optimizer, run=run)


def fabric(work: Work) -> Contestant:
    """Lightning Fabric with ``no_backward_sync``."""
    from lightning.fabric import Fabric

    replicas = num_replicas()
    runner = Fabric(accelerator="cpu", devices=replicas, strategy="ddp" if replicas > 1 else "auto")
    runner.launch()
    bare = new_model(work)
    optimizer = new_optimizer(bare)
    model, stepper = runner.setup(bare, optimizer)

    def update(batches: list[MicroBatch]) -> None:
        total = torch.stack([count_items(batch) for batch in batches]).sum()
        total = runner.all_reduce(total, reduce_op="sum")
        for index, batch in enumerate(batches):
            held_back = replicas > 1 and index < len(batches) - 1
            with runner.no_backward_sync(model, enabled=held_back):
                loss = sum_loss(model(batch["input_ids"]), batch["labels"])
                runner.backward(loss * (replicas / total))
        runner.clip_gradients(model, stepper, max_norm=CLIP_GRAD_NORM)
        stepper.step()
        stepper.zero_grad()

    return Contestant(name="Lightning Fabric", model=bare, optimizer=optimizer, run=inside(update))


def trainer(work: Work) -> Contestant:
    """Transformers' Trainer, by turns."""
    from trainer_turns import TrainerTurns

    turns = TrainerTurns(work)
    state = OwnGradientState()

    def run(batches: list[MicroBatch], around: Around) -> None:
        with state:
            turns.run(batches, around)

    return Contestant(
        name="Transformers Trainer", model=turns.gpt, optimizer=turns.optimizer, run=run, close=turns.close
    )


def ours(work: Work) -> list[Contestant]:
    """The hand-written loop, twice, and the window. The first is what all are compared with."""
    return [hand(work), hand(work, "the same again"), wholebatch_run(work), wholebatch_loop(work)]


def peers(work: Work) -> list[Contestant]:
    """Those peers that are installed."""
    found = []
    if find_spec("accelerate"):
        found += [accelerate(work, accumulate=True), accelerate(work, accumulate=False)]
    if find_spec("lightning"):
        found.append(fabric(work))
    if find_spec("transformers") and find_spec("accelerate"):
        found.append(trainer(work))
    return found
