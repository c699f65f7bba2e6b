"""What an optimizer read, recorded by torch's own hooks on every ``step``: the loops stay as they are."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)


@dataclass(slots=True, kw_only=True)
class Step:
    """One call of ``step`` that reached the optimizer.

    Attributes:
        optimizer: in the order in which optimizers stepped first.
        parameters: before it.
        gradients: that it read; None where there was none.
        learning_rate: of the first group.
    """

    optimizer: int
    parameters: list[Tensor]
    learning_rate: float
    gradients: list[Tensor | None] = field(default_factory=list)


def _whole(tensor: Tensor) -> Tensor:
    """A copy, all shards together."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


@contextlib.contextmanager
def witness() -> Iterator[list[Step]]:
    """Record every step in here. Gradients are read after it: a closure may have made them inside."""
    steps: list[Step] = []
    known: list[Optimizer] = []

    def parameters(optimizer: Optimizer) -> list[Any]:
        return [p for group in optimizer.param_groups for p in group["params"]]

    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ARG001
        if not any(optimizer is one for one in known):
            known.append(optimizer)
        number = next(i for i, one in enumerate(known) if one is optimizer)
        weights = [_whole(p) for p in parameters(optimizer)]
        rate = float(optimizer.param_groups[0]["lr"])
        steps.append(Step(optimizer=number, parameters=weights, learning_rate=rate))

    def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ARG001
        steps[-1].gradients = [None if p.grad is None else _whole(p.grad) for p in parameters(optimizer)]

    hooks = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
    try:
        with torch.enable_grad():
            yield steps
    finally:
        for hook in hooks:
            hook.remove()


@dataclass(slots=True, kw_only=True)
class Forward:
    """An outermost forward with gradients: after how many steps, of what, with which weights and masks."""

    num_steps: int
    samples: Tensor
    weights: list[Tensor]
    masks: list[Tensor] = field(default_factory=list)


@contextlib.contextmanager
def forwards_seen(steps: list[Step]) -> Iterator[list[Forward]]:
    """Record every outermost forward with gradients in here."""
    seen: list[Forward] = []
    inside: list[nn.Module] = []

    def before(module: nn.Module, args: tuple[Any, ...]) -> None:
        if not inside and torch.is_grad_enabled() and args and isinstance(args[0], Tensor):
            weights = [p.detach().clone() for p in module.parameters()]
            seen.append(Forward(num_steps=len(steps), samples=args[0].detach().clone(), weights=weights))
        inside.append(module)

    def after(module: nn.Module, args: Any, output: Any) -> None:  # noqa: ARG001
        inside.pop()
        if isinstance(module, nn.Dropout) and seen:
            seen[-1].masks.append((output == 0).detach().clone())

    register = torch.nn.modules.module
    hooks = [
        register.register_module_forward_pre_hook(before),
        register.register_module_forward_hook(after, always_call=True),
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


@dataclass(slots=True, kw_only=True)
class Seen:
    """Everything that was seen of a loop.

    Attributes:
        steps, forwards: in order.
        final: parameters and buffers of the model that it returned.
        value: what else it returned.
        num_reductions: all-reduces of the process group.
    """

    steps: list[Step]
    forwards: list[Forward]
    final: dict[str, Tensor]
    value: Any = None
    num_reductions: int = 0


def watch(function: Callable[..., Any], *args: Any, count_reductions: bool = False) -> Seen:
    """Run a loop and return everything that was seen of it."""
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with contextlib.ExitStack() as stack:
        steps = stack.enter_context(witness())
        forwards = stack.enter_context(forwards_seen(steps))
        if count_reductions:
            stack.enter_context(profiler)
        value = function(*args)
    final = {}
    if isinstance(value, nn.Module):
        final = {name: _whole(tensor) for name, tensor in value.state_dict().items()}
        value = None
    if hasattr(value, "last_epoch"):
        value = value.last_epoch
    reductions = [event.name for event in profiler.events()] if count_reductions else []
    num_reductions = sum(name in ("gloo:all_reduce", "gloo:allreduce") for name in reductions)
    return Seen(steps=steps, forwards=forwards, final=final, value=value, num_reductions=num_reductions)
