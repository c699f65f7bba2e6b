"""What an optimizer can't step on exactly, or at all, found out before the first update."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from wholebatch.errors import UnsupportedError
from wholebatch.gradients import is_sharded, on_this_rank


def needs_closure(optimizer_step: Callable[..., Any]) -> bool:
    """Whether a ``step`` can't be called without a closure that computes the loss again."""
    closure = inspect.signature(optimizer_step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def refuse_several_passes(optimizer: Optimizer) -> None:
    """Refuse an optimizer that needs the window's graph in its step, or after it.

    Raises:
        UnsupportedError: it needs a closure, or is differentiable itself.
    """
    if needs_closure(optimizer.step):
        raise UnsupportedError(
            f"{type(optimizer).__name__}.step needs a closure that computes the loss again; one update "
            f"would then be several passes over a window that is already reduced and cleared. Use an "
            f"optimizer that steps on gradients"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise UnsupportedError(
            f"{type(optimizer).__name__}(differentiable=True) keeps the graph of its step; a "
            f"window ends with gradients cleared, so use differentiable=False"
        )


def refuse_broken_kernel(optimizer: Optimizer) -> None:
    """Refuse what fails in the step, where it is too late, or does nothing there without an error.

    Raises:
        UnsupportedError: torch's own optimizer does not take the parameters of a group.
    """
    for group in optimizer.param_groups:
        _refuse_failing_step(optimizer, group)
        _refuse_kernel_that_does_nothing(optimizer, group)


def _refuse_failing_step(optimizer: Optimizer, group: Mapping[str, Any]) -> None:
    """Try a step over DTensors on small ones, over each mesh of the group; the same on every rank."""
    learning = [parameter for parameter in group["params"] if parameter.requires_grad]
    sharded = [parameter for parameter in learning if is_sharded(parameter)]
    if not sharded or not type(optimizer).__module__.startswith("torch.optim"):
        return
    from torch.distributed.tensor import DTensor, Shard  # imported long since where there are any

    probes = [_small(one) for one in learning if not is_sharded(one)][:1]
    for one in {id(one.device_mesh): one for one in sharded}.values():
        placements = [Shard(0)] * one.device_mesh.ndim
        probes.append(DTensor.from_local(_small(one), one.device_mesh, placements, run_check=False))
    parameters = [nn.Parameter(probe) for probe in probes]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    flags = {name: True for name in ("fused", "foreach") if group.get(name)}
    kind: Any = type(optimizer)
    try:
        kind.step.__wrapped__(kind(parameters, lr=1e-3, **flags))  # without the hooks of all optimizers
    except (RuntimeError, NotImplementedError) as error:
        told = "".join(f"({name}=True)" for name in flags)
        plain = len(learning) - len(sharded)
        advice = f"leave {next(iter(flags))} out" if flags else "use another optimizer"
        raise UnsupportedError(
            f"{kind.__name__}{told} of torch {torch.__version__} can't step on a group of {len(sharded)} "
            f"DTensors and {plain} plain parameters; {advice}"
            f"{', or give plain ones a group of their own' if plain and flags else ''} "
            f"({str(error).splitlines()[0]})"
        ) from error


def _small(like: Any) -> Tensor:
    return torch.ones(2, 2, dtype=like.dtype, device=on_this_rank(like).device)


def _refuse_kernel_that_does_nothing(optimizer: Optimizer, group: Mapping[str, Any]) -> None:
    """Refuse a fused SGD that silently leaves half-precision parameters where they are."""
    if not isinstance(optimizer, torch.optim.SGD) or not group.get("fused"):
        return
    for parameter in group["params"]:
        half = parameter.dtype in (torch.bfloat16, torch.float16)
        if half and parameter.device.type == "cpu" and not _fused_sgd_moves(parameter.dtype):
            raise UnsupportedError(
                f"SGD(fused=True) in torch {torch.__version__} does not move {parameter.dtype} "
                f"parameters of 16 or more elements on CPU, without an error (pytorch issue 191763); "
                f"use fused=False"
            )


@functools.cache
def _fused_sgd_moves(dtype: torch.dtype) -> bool:
    """Try it: versions with and without the fault can't be told apart by number alone."""
    probe = nn.Parameter(torch.ones(32, dtype=dtype))
    probe.grad = torch.ones_like(probe)
    torch.optim.SGD([probe], lr=0.5, fused=True).step()
    return bool((probe != 1).all())
