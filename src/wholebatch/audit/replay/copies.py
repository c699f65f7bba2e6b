"""Private copies of captured modules, with the state of the window's beginning, in a wider precision."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wholebatch.audit.replay.capture import Call, Shared, WindowCapture
from wholebatch.audit.replay.chain import UnableError, Wired
from wholebatch.audit.replay.nested import changed, fetched
from wholebatch.closeness import as_wide

_DROPOUT_MODULES = nn.modules.dropout._DropoutNd


@dataclass(frozen=True, kw_only=True, slots=True)
class Copies:
    """The modules of a window, copied.

    Attributes:
        modules: by identity of the user's.
        tensors: copies of parameters and buffers, by identity of the user's.
        names: of the parameters whose gradients are wanted, by identity of the user's.
        dtype: of floating tensors; None leaves each as it is.
    """

    modules: Mapping[int, nn.Module]
    tensors: Mapping[int, Tensor]
    names: Mapping[int, str]
    dtype: torch.dtype | None

    def call(self, call: Call, arguments: Any, outputs: list[Any], *, joined: bool, random: bool) -> Any:
        """Run one call on the copies.

        Args:
            call: as captured.
            arguments: to give it, as captured or joined.
            outputs: of the calls before it in the chain.
            joined: the arguments hold the samples of all micro-batches.
            random: draw the same random numbers as the loop did.
        """

        args, kwargs = self.resolved(arguments, outputs, joined=joined)
        if random and call.random is not None:
            call.random.restore()
        cast = call.autocast
        enabled = cast.enabled and self.dtype is None
        with torch.autocast(cast.device_type, dtype=cast.dtype, enabled=enabled):
            return self.modules[id(call.module)](*args, **kwargs)

    def resolved(self, arguments: Any, outputs: list[Any], *, joined: bool = False) -> Any:
        """Arguments with tensors in place of what they are known by.

        Args:
            arguments: as captured or joined; tensors that have a graph stay as they are.
            outputs, joined: as for :meth:`call`.
        """

        def given(_: Any, leaf: Any) -> Any:
            if isinstance(leaf, Wired):
                return leaf.made_from(fetched(outputs[leaf.spot[0]], leaf.spot[1]), joined=joined)
            if isinstance(leaf, Shared):
                return self.tensors[leaf.identity]
            return self.as_input(leaf) if isinstance(leaf, Tensor) and not leaf.requires_grad else leaf

        return changed(arguments, given)

    def as_input(self, tensor: Tensor) -> Tensor:
        """A copy of an input where the parameters are, its numbers in the dtype of the copies."""
        devices = {one.device for one in self.tensors.values()}
        device = devices.pop() if len(devices) == 1 else tensor.device
        return tensor.detach().to(device=device, dtype=_wide(tensor, self.dtype), copy=True)

    def take_gradients(self) -> dict[str, Tensor]:
        """Gradients by parameter name; the copies have none afterwards."""
        found = {}
        for identity, name in self.names.items():
            gradient = self.tensors[identity].grad
            if gradient is not None:
                found[name] = as_wide(gradient)
        for tensor in self.tensors.values():
            tensor.grad = None
        return found

    def without_dropout(self) -> Copies:
        """These copies, dropout off wherever it shows: in modules, and in numbers called so."""
        for module in {id(part): part for one in self.modules.values() for part in one.modules()}.values():
            if isinstance(module, _DROPOUT_MODULES):
                module.eval()
            for name, value in vars(module).items():
                if isinstance(value, float) and "drop" in name:
                    setattr(module, name, 0.0)
        return self


def copies(capture: WindowCapture, dtype: torch.dtype | None, names: frozenset[str]) -> Copies:
    """Copy all modules of a window as they were when it began.

    Args:
        capture: of the window.
        dtype: float64, or None for the dtypes that they have.
        names: of the parameters whose gradients are wanted.

    Raises:
        UnableError: a module can't be copied.

    Exactness: values and structure bit for bit, widening included; the user's modules are only read.
    """
    users = {id(call.module): call.module for one in capture.micro_batches for call in one.calls}
    memo: dict[int, Any] = {}
    for identity, kept in capture.state.items():
        memo[identity] = _copied(kept.tensor, kept.value, kept.requires_grad, dtype)
    tensors = dict(memo)
    parts = {id(part): part for module in users.values() for part in module.modules()}
    for part in parts.values():
        for tensor in _loose_tensors(part):
            memo.setdefault(id(tensor), _copied(tensor, tensor, False, dtype))
    try:
        made = copy.deepcopy(list(users.values()), memo)
    except Exception as error:
        raise UnableError(f"the modules can't be copied ({type(error).__name__}: {error})") from error
    for identity in parts:
        if identity in capture.modes and isinstance(memo.get(identity), nn.Module):
            memo[identity].training = capture.modes[identity]
    return Copies(
        modules=dict(zip(users, made, strict=True)),
        tensors=tensors,
        names={identity: name for identity, name in capture.names.items() if name in names},
        dtype=dtype,
    )


@contextlib.contextmanager
def untouched(capture: WindowCapture) -> Iterator[None]:
    """Keep the gradients of the user's parameters; refuse a replay that reached them all the same.

    Args:
        capture: whose parameters are looked after.

    Raises:
        UnableError: a gradient reached a parameter of the user's.
    """
    parameters = [kept.tensor for kept in capture.state.values() if kept.tensor.is_leaf]
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
        if any(parameter.grad is not None for parameter in parameters):
            raise UnableError(
                "a module reaches parameters past its own copy, by a function that holds them"
            )
    finally:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient


def _copied(tensor: Tensor, value: Tensor, requires_grad: bool, dtype: torch.dtype | None) -> Tensor:
    new = value.detach().to(device=tensor.device, dtype=_wide(value, dtype), copy=True)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(new, requires_grad=requires_grad)
    return new.requires_grad_(requires_grad and new.is_floating_point())


def _wide(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    if dtype is None or not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor.dtype
    return torch.complex128 if tensor.is_complex() and dtype == torch.float64 else dtype


def _loose_tensors(module: nn.Module) -> Iterator[Tensor]:
    """Tensors in plain attributes: deepcopy refuses those with a graph, and would not widen any."""
    for value in vars(module).values():
        inside = value.values() if isinstance(value, dict) else value
        for one in inside if isinstance(inside, (list, tuple)) or isinstance(value, dict) else [inside]:
            if isinstance(one, Tensor) and not isinstance(one, nn.Parameter):
                yield one
