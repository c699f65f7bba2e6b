"""The window on a device that torch knows under no name of its own."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import foreign_device
from problems import Case, loss_with, oracle
from ranks import run_ranks
from wholebatch import UpdateWindow
from wholebatch.memory import peak_memory_bytes
from wholebatch.ranks.group import _backend

COUNTS = [[[3, 5], [2], [4, 1, 5]]]


def on_the_device(case: Case) -> tuple[nn.Module, UpdateWindow, Any, list[Any]]:
    device = torch.device(foreign_device.NAME)
    objective = case.objective()
    model = case.model().to(device)
    assert {parameter.device.type for parameter in model.parameters()} == {foreign_device.NAME}
    optimizer = case.make_optimizer()(list(model.parameters()))
    window = UpdateWindow(model, optimizer, objective, clip_grad_norm=case.clip_grad_norm)
    held = [{name: part.to(device) for name, part in batch.items()} for batch in case.batches()[0]]
    return model, window, objective, held


def fail_after_one(window: UpdateWindow, loss: Any, held: list[Any]) -> None:
    with window.update(held) as update:
        update.backward(loss(window.model, next(iter(update))))
        raise RuntimeError("not today")


def whole_windows(_rank: int, _ranks: int) -> dict[str, Any]:
    """An update that fails, and the same again; what was read from the device where."""
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    foreign_device.install()
    told: dict[str, Any] = {"accelerator": str(torch.accelerator.current_accelerator())}
    for optimizer in ("sgd", "adamw"):
        case = Case(counts=COUNTS, clip_grad_norm=0.05, optimizer=optimizer, two_terms=True)
        model, window, objective, held = on_the_device(case)
        before = [parameter.detach().cpu() for parameter in model.parameters()]
        with pytest.raises(RuntimeError, match="not today"):
            fail_after_one(window, loss_with(objective), held)
        kept = all(
            torch.equal(a, b.detach().cpu()) for a, b in zip(before, model.parameters(), strict=True)
        )
        cleared = all(parameter.grad is None for parameter in model.parameters())
        reads = []
        foreign_device.CALLS.clear()
        with window.update(held) as update:
            reads.append(foreign_device.reads())
            for batch in update:
                update.backward(loss_with(objective)(model, batch))
            reads.append(foreign_device.reads())
        reads.append(foreign_device.reads())
        truth = oracle(case)
        error = max(
            float((parameter.detach().cpu() - truth.parameters[name]).abs().max())
            for name, parameter in model.named_parameters()
        )
        told[optimizer] = [error, update.record, kept and cleared, reads]
    foreign_device.CALLS.clear()
    with window.update(held) as update:
        begin = foreign_device.reads()
        for batch in update:
            found = loss_with(objective)(model, batch)
            float(found["next"].loss_sum.detach())  # as a loop does that logs each micro-batch
            update.backward(found)
        told["a loop that reads"] = foreign_device.reads() - begin
    told["memory"] = peak_memory_bytes()
    told["foreach"] = foreign_device.CALLS["aten::_foreach_norm"]
    dist.Backend.register_backend("own", lambda *_: None, devices=[foreign_device.NAME])
    told["backend"] = _backend(torch.device(foreign_device.NAME))
    return told


@pytest.mark.slow
def test_a_whole_window_runs_on_a_device_that_torch_does_not_know_by_name() -> None:
    (told,) = run_ranks(whole_windows, 1)
    assert told["accelerator"] == foreign_device.NAME
    for optimizer in ("sgd", "adamw"):
        error, record, rolled_back, (begin, loop, finish) = told[optimizer]
        assert error < 1e-15
        assert record.outcome == "applied"
        assert rolled_back
        assert record.peak_memory_bytes is None
        assert loop == begin, "the host reads the device between micro-batches"
        assert finish == loop + 1, "the finish reads the device more than once"
    assert told["a loop that reads"] == len(COUNTS[0])
    assert told["memory"] is None  # its allocator does not count
    assert told["foreach"] == 1
    assert told["backend"] == "cpu:gloo,foreign:own"
