"""What the finish needs from gradients: who owns them, their norm, a copy, a common factor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

# What looks rows of its weight up: its gradient may be sparse, and its forward may shorten rows.
LOOKUPS = (nn.Embedding, nn.EmbeddingBag)


def own_parameters(optimizers: Sequence[Optimizer]) -> list[nn.Parameter]:
    """Every parameter that ``optimizers`` move, each once, in the order of their groups."""
    unique: dict[int, nn.Parameter] = {
        id(parameter): parameter
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    return list(unique.values())


def gradients_of(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """The gradients that are present, in order.

    Exactness: no arithmetic; the tensors themselves.
    """
    return [gradient for gradient in map(_GRADIENT, parameters) if gradient is not None]


def on_this_rank(tensor: Tensor) -> Tensor:
    """The part of a tensor that lies on this rank: a DTensor's own shard, or the tensor itself.

    Exactness: no arithmetic; the same memory.
    """
    local: Tensor = tensor._local_tensor if is_sharded(tensor) else tensor
    return local


def is_sharded(tensor: Tensor) -> TypeGuard[Any]:
    """Whether it is a DTensor, of which each rank holds a part or a copy."""
    return hasattr(tensor, "placements") and hasattr(tensor, "_local_tensor")


@torch.no_grad()
def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The Euclidean norm over all elements of all gradients, ``sqrt(sum_g sum_i g_i^2)``.

    Args:
        gradients: tensors of any shapes and devices; at least one.

    Returns:
        0-dimensional tensor on the first gradient's device; nothing is read by the host.

    Exactness: rounding of one sum in float32, or the gradients' own dtype where wider. Overflows to
    infinity where the squares of finite gradients leave it; :func:`careful_norm` does not.
    """
    home = gradients[0].device
    norms: list[Tensor] = []
    for group in _by_kind(gradients):
        if group[0].is_sparse or group[0].is_complex():
            group = [_real(gradient) for gradient in group]
        # a norm summed in bfloat16 would itself be wrong in its third digit
        wide = torch.promote_types(group[0].dtype, torch.float32)
        norms += [norm.to(home) for norm in torch._foreach_norm(group, 2, dtype=wide)]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


@torch.no_grad()
def careful_norm(gradients: Sequence[Tensor]) -> float:
    """The same norm where its squares overflow: ``m * sqrt(sum (g / m)^2)`` with ``m = max |g|``.

    Returns:
        A number; infinite or NaN only where some gradient is. Reads the device.

    Exactness: rounding of one sum in float64.
    """
    wide = [_real(gradient).to(torch.float64) for gradient in gradients]
    largest = max(float(gradient.abs().max()) if gradient.numel() else 0.0 for gradient in wide)
    if not 0.0 < largest < float("inf") or any(bool(gradient.isnan().any()) for gradient in wide):
        return float(total_norm(wide))
    return largest * float(total_norm([gradient / largest for gradient in wide]))


@torch.no_grad()
def scale_gradients(gradients: Sequence[Tensor], factor: float) -> None:
    """Multiply every gradient by ``factor`` in place, one pass.

    Exactness: one rounding in the gradient's dtype; none when ``factor`` is 1.
    """
    if factor == 1.0:
        return
    for group in _by_kind(gradients):
        torch._foreach_mul_(group, factor)


def read_scalars(values: Sequence[Tensor | int | float]) -> list[float]:
    """Bring scalars to the host with one read of the device, however many they are.

    Args:
        values: 0-dimensional or one-element tensors, or plain numbers, in any mixture.

    Returns:
        Their values in order; those of a device pass through float64.
    """
    away = [value for value in values if isinstance(value, Tensor) and not value.is_cpu]
    if not away:  # what lies on the host already would only be slowed down by stacking
        return [float(value.item() if isinstance(value, Tensor) else value) for value in values]
    read = iter(read_stacked(away))
    return [
        next(read) if isinstance(value, Tensor) and not value.is_cpu else float(value) for value in values
    ]


def read_stacked(tensors: Sequence[Tensor]) -> list[float]:
    """The values of 0-dimensional or one-element tensors, in order, by one copy to the host.

    Args:
        tensors: of any dtypes and devices; at least one.
    """
    home = tensors[0].device
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, tensor in enumerate(tensors):
        kinds.setdefault((tensor.device, tensor.dtype), []).append(index)
    stacked = [
        torch.stack([tensors[index].detach().reshape(()) for index in indices]).to(home, torch.float64)
        for indices in kinds.values()
    ]
    order = [index for indices in kinds.values() for index in indices]
    read = dict(zip(order, torch.cat(stacked).tolist(), strict=True))
    return [read[index] for index in range(len(tensors))]


def copy_gradients(parameters: Iterable[nn.Parameter]) -> list[tuple[nn.Parameter, Tensor | None]]:
    """Each parameter with a copy of its gradient (``None`` where it has none), to put back later.

    Exactness: bit for bit.
    """
    return [(p, None if p.grad is None else p.grad.detach().clone()) for p in parameters]


class GradientWatch:
    """Sees whether somebody else writes, replaces or clears gradients; reads no value.

    Torch counts the writes of every tensor (``Tensor._version``). To ask for a count takes a microsecond
    or more between a forward and a backward, where nothing of it is in a cache. So a light watch asks one
    gradient between two turns, another one in each update, and sees at once whatever writes them all.
    After the last backward it asks all. Whether each is still the same tensor is asked of all before it
    can get lost.

    Args:
        parameters: those whose gradients are watched; none has a gradient yet, unless a mark follows.
        light: which gradient a light watch asks, counted round; ``None`` asks all in every turn.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], *, light: int | None = None) -> None:
        self._parameters = list(parameters)
        self._light = light
        self._without = self._parameters  # those that had no gradient at the last mark
        self._with: list[nn.Parameter] = []
        self._gradients: list[Tensor] = []
        self._asked: list[Tensor] = []
        self._versions: list[int] = []

    def mark(self, *, whole: bool = True) -> None:
        """Note the gradients as they are.

        Args:
            whole: note all, also those that are other tensors than before, as after a reduction.
        """
        if whole or self._without:
            self._note(self._parameters if whole else self._without, keep=not whole)
        self._versions = [gradient._version for gradient in self._asked]

    def _note(self, parameters: list[nn.Parameter], *, keep: bool) -> None:
        found = gradients_of(parameters)
        present = parameters
        self._without = []
        if len(found) < len(parameters):
            present = [parameter for parameter in parameters if parameter.grad is not None]
            self._without = [parameter for parameter in parameters if parameter.grad is None]
        self._with = self._with + present if keep else present
        self._gradients = self._asked = self._gradients + found if keep else found
        if keep and self._light is not None and self._gradients:
            self._asked = [self._gradients[self._light % len(self._gradients)]]

    def changed(self, *, whole: bool = True) -> bool:
        """Whether gradients are not as at the last mark.

        Args:
            whole: ask of all whether they are the same tensors, not only of those that were marked.
        """
        if self._versions != [gradient._version for gradient in self._asked]:
            return True
        if self._without and gradients_of(self._without):
            return True
        # a dense gradient that is added to a sparse one takes its place, in torch itself
        return whole and any(
            now is not gradient and not gradient.is_sparse
            for now, gradient in zip(map(_GRADIENT, self._with), self._gradients, strict=True)
        )


class RenewedGradientWatch(GradientWatch):
    """The same where an engine shows gradients in new tensors after each forward: asks where they lie."""

    def mark(self, *, whole: bool = True) -> None:  # noqa: ARG002
        self._seen = self._look()

    def changed(self, *, whole: bool = True) -> bool:  # noqa: ARG002
        return self._look() != self._seen

    def __init__(self, parameters: Iterable[nn.Parameter], *, light: int | None = None) -> None:
        super().__init__(parameters, light=light)
        self.mark()

    def _look(self) -> list[tuple[int, int] | None]:
        gradients = map(_GRADIENT, self._parameters)
        return [None if one is None else (one._version, one.data_ptr()) for one in gradients]


_GRADIENT = attrgetter("grad")
_KIND = attrgetter("device", "dtype", "layout")


def clear_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Set every gradient to ``None``."""
    for parameter in parameters:
        parameter.grad = None


def _real(gradient: Tensor) -> Tensor:
    """The numbers of a gradient that may be sparse or complex."""
    dense = gradient.coalesce().values() if gradient.is_sparse else gradient
    return torch.view_as_real(dense) if dense.is_complex() else dense


def _by_kind(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Groups of one device, dtype and layout, as the foreach operations want them."""
    tensors = list(map(on_this_rank, tensors))
    kinds = list(map(_KIND, tensors))
    if kinds and kinds.count(kinds[0]) == len(kinds):  # nearly always, and several times faster
        return [list(tensors)]
    groups: dict[tuple[torch.device, torch.dtype, torch.layout], list[Tensor]] = {}
    for kind, tensor in zip(kinds, tensors, strict=True):
        groups.setdefault(kind, []).append(tensor)
    return list(groups.values())
