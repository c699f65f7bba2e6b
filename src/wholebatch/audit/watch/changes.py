"""What moved between two backwards though no optimizer did: parameters, and averages of them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from wholebatch.audit.trace import Event
from wholebatch.audit.watch.gradients import Gradients

# Parameters, and elements of each, whose values are compared; versions are of all.
_SAMPLED_TENSORS = 8
_SAMPLED_ELEMENTS = 8
# An average of the weights is nearer to them than this, relative to their size; sums of gradients are not.
_NEAR = 0.5


class ParametersBetween:
    """Tells whether watched parameters changed since the last look, but for what a step did.

    Args:
        gradients: that know the parameters.
    """

    def __init__(self, gradients: Gradients) -> None:
        self._gradients = gradients
        self._before: tuple[int, Tensor | None] | None = None

    def forget(self) -> None:
        """A step may have changed them: the next look begins anew."""
        self._before = None

    def release(self) -> None:
        """Hold nothing any longer."""
        self._gradients = Gradients()
        self._before = None

    def __call__(self) -> Callable[[], Event | None] | None:
        """Look, and return what tells (later) whether anything changed."""
        plain = [p for p in self._gradients.parameters if self._gradients.pieces(p) is None]
        now = (sum(p._version for p in plain), _sample(plain))
        before, self._before = self._before, now
        if before is None:
            return None
        versions, old, new = now[0] - before[0], before[1], now[1]

        def changed() -> Event | None:
            same = _same(old, new)
            if same and versions <= 0:
                return None
            detail = "their values differ" if not same else f"written to {versions} times in place"
            return Event(kind="parameters_changed", detail=detail)

        return changed


class AveragesBetween:
    """Finds tensors that follow the watched parameters (EMA, teachers), and tells when they move.

    Args:
        gradients: that know the parameters.
    """

    def __init__(self, gradients: Gradients) -> None:
        self._gradients = gradients
        self._found: list[tuple[str, Any]] = []
        self._before: list[Tensor | None] = []
        self._searched = False

    def search(self) -> None:
        """Look once through everything alive for collections of tensors shaped like the parameters."""
        if self._searched or not self._gradients.parameters:
            return
        self._searched = True
        parameters = [p for p in self._gradients.parameters if p.dim() > 0]
        ours = {id(p) for p in parameters} | {id(p.grad) for p in parameters if p.grad is not None}
        for candidate in gc.get_objects():
            tensors = _tensors_of(candidate)
            if not tensors or any(id(t) in ours for t in tensors):
                continue
            if _follows(tensors, parameters):
                self._found.append((type(candidate).__name__, candidate))
        self._found = _outermost(self._found)

    def forget(self) -> None:
        """The next look begins anew."""
        self._before = []

    def release(self) -> None:
        """Hold nothing any longer."""
        self._gradients = Gradients()
        self._found.clear()
        self._before.clear()

    def __call__(self) -> Callable[[], Event | None] | None:
        """Look, and return what tells (later) whether an average moved."""
        now = [_sample(_tensors_of(holder) or []) for _, holder in self._found]
        before, self._before = self._before, now
        names = [name for name, _ in self._found]
        if not before or len(before) != len(now):
            return None

        def moved() -> Event | None:
            for name, old, new in zip(names, before, now, strict=True):
                if not _same(old, new):
                    return Event(kind="average", detail=f"an average of the weights ({name}) moved")
            return None

        return moved


def _sample(tensors: Sequence[Tensor]) -> Tensor | None:
    """A few values of a few of the tensors, evenly spread, copied."""
    chosen = [t for t in tensors if t.is_floating_point() and t.numel() and t.layout == torch.strided]
    chosen = chosen[:: max(1, len(chosen) // _SAMPLED_TENSORS)][:_SAMPLED_TENSORS]
    if not chosen:
        return None
    with torch.no_grad():
        parts = [_values(t) for t in chosen]
        return torch.cat([part.to(parts[0].device) for part in parts])


def _same(old: Tensor | None, new: Tensor | None) -> bool:
    """Whether the same values were sampled; what could not be compared counts as the same."""
    return old is None or new is None or old.shape != new.shape or torch.equal(old, new)


def _values(tensor: Tensor) -> Tensor:
    flat = tensor.detach()
    flat = flat.reshape(-1) if flat.is_contiguous() else flat.flatten()
    return flat[:: max(1, flat.numel() // _SAMPLED_ELEMENTS)][:_SAMPLED_ELEMENTS].double()


def _tensors_of(candidate: Any) -> list[Tensor] | None:
    """The tensors of a collection that could be an average of the weights; None for anything else."""
    kind = type(candidate)
    if kind is dict or kind.__name__ == "OrderedDict":
        if not candidate or not isinstance(next(iter(candidate.values()), None), Tensor):
            return None
        values = list(candidate.values())
    elif kind is list or kind is tuple:
        if not candidate or not isinstance(candidate[0], Tensor):
            return None
        values = list(candidate)
    elif issubclass(kind, nn.Module):
        values = list(candidate.parameters())
        if not values:
            return None
    else:
        return None
    return [v for v in values if _has_numbers(v)]


def _has_numbers(value: Any) -> bool:
    """Whether this is a plain tensor that can be read: no wrapper of another library's, not on ``meta``."""
    return (
        isinstance(value, Tensor) and type(value).__name__ in ("Tensor", "Parameter") and not value.is_meta
    )


def _follows(tensors: Sequence[Tensor], parameters: Sequence[Tensor]) -> bool:
    """Whether tensors are near to the parameters: all of these have one, or each of them has its own (the
    teacher of an encoder whose student has heads besides)."""
    shapes = sorted(tuple(p.shape) for p in parameters)
    if len(tensors) >= len(shapes) and _shaped_like(tensors, shapes):
        return _near(tensors, parameters)
    some = [t for t in tensors if t.dim() > 0]
    theirs = [tuple(t.shape) for t in some]
    fits = all(shapes.count(shape) >= theirs.count(shape) for shape in set(theirs))
    return fits and any(t.dim() > 1 for t in some) and _near(parameters, some)


def _shaped_like(tensors: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> bool:
    theirs = sorted(tuple(t.shape) for t in tensors if t.dim() > 0)
    if len(theirs) == len(shapes):
        return theirs == list(shapes)
    # buffers may be averaged too, and frozen parameters
    return all(theirs.count(shape) >= shapes.count(shape) for shape in set(shapes))


def _near(tensors: Sequence[Tensor], parameters: Sequence[Tensor]) -> bool:
    """Whether the parameters, all together, have tensors of their shapes near to them in value."""
    size = distance = 0.0
    for parameter in parameters:
        value = parameter.detach().double()
        size += float(value.square().sum())
        distance += min(
            (
                float((t.detach().double().to(value.device) - value).square().sum())
                for t in tensors
                if t.shape == parameter.shape and t.layout == torch.strided
            ),
            default=float("inf"),
        )
    return size > 0 and distance <= _NEAR**2 * size


def _outermost(found: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Without what repeats the tensors of one already there (a module's own dict of parameters)."""
    kept: list[tuple[str, Any]] = []
    known: set[int] = set()
    for name, holder in sorted(found, key=lambda entry: not isinstance(entry[1], nn.Module)):
        identities = {id(t) for t in _tensors_of(holder) or []}
        if not identities <= known:
            kept.append((name, holder))
            known |= identities
    return kept
