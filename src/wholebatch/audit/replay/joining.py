"""Put the inputs of several micro-batches together to those of one big batch."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from wholebatch.audit.replay.capture import CapturedMicroBatch, Shared
from wholebatch.audit.replay.chain import UnableError, Wired
from wholebatch.audit.replay.nested import Path, changed, fetched, leaves

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, Enum, range, slice)


@dataclass(frozen=True, kw_only=True, slots=True)
class Joined:
    """Arguments of one call for all samples.

    Attributes:
        whole: with the samples of all micro-batches.
        padded: those of each micro-batch by itself, padded as in ``whole``; empty where nothing was padded.
    """

    whole: Arguments
    padded: tuple[Arguments, ...] = ()


def joined(module: nn.Module, each: Sequence[Arguments], sizes: Sequence[int]) -> Joined:
    """Concatenate the tensors of every micro-batch along the first dimension.

    Args:
        module: that is called; its forward's signature names positional arguments.
        each: its arguments in each micro-batch.
        sizes: samples of each micro-batch.

    Returns:
        The arguments of the big batch; where trailing shapes differ tensors are padded at their ends:
        labels by the ignored value, everything else by 0.

    Raises:
        UnableError: the micro-batches' arguments are not alike, or not cut by samples.
    """
    ways = [[path for path, _ in leaves(arguments)] for arguments in each]
    if any(way != ways[0] for way in ways):
        raise UnableError(f"{type(module).__name__} was not called alike in all micro-batches")
    columns = {path: [fetched(arguments, path) for arguments in each] for path in ways[0]}
    names = {path: _name(module, path) for path in ways[0]}
    filled = {path: _padded(names[path], column) for path, column in columns.items()}
    whole = changed(each[0], lambda path, _: _together(names[path], filled[path], sizes))
    if all(new is old for path in ways[0] for new, old in zip(filled[path], columns[path], strict=True)):
        return Joined(whole=whole)
    padded = tuple(_at(each[0], filled, place) for place in range(len(each)))
    return Joined(whole=whole, padded=padded)


def num_samples(micro_batch: CapturedMicroBatch) -> int:
    """Length of the first tensor among the inputs.

    Args:
        micro_batch: as captured.

    Raises:
        UnableError: there is none with a dimension.
    """
    for call in micro_batch.calls:
        for _, leaf in leaves(call.arguments):
            if isinstance(leaf, Tensor) and leaf.dim():
                return leaf.shape[0]
    raise UnableError("no tensor was given to the modules, so there are no samples to put together")


def _at(like: Arguments, columns: Mapping[Path, Sequence[Any]], place: int) -> Arguments:
    found: Arguments = changed(like, lambda path, _: columns[path][place])
    return found


def _together(name: str, column: Sequence[Any], sizes: Sequence[int]) -> Any:
    first = column[0]
    if all(isinstance(one, Tensor) for one in column):
        return _tensors_together(name, column, sizes)
    if all(isinstance(one, Wired) for one in column):
        if any(one.spot != first.spot or len(one.actions) != len(first.actions) for one in column):
            raise UnableError(f"the modules were not connected alike in all micro-batches (at {name})")
        return first
    alike = all(type(one) is type(first) for one in column)
    plain = isinstance(first, (*_PLAIN, Shared))
    if alike and (all(one is first for one in column) or (plain and all(one == first for one in column))):
        return first
    if alike and plain:
        raise UnableError(f"{name} was {first!r} in one micro-batch and {_other(column)!r} in another")
    raise UnableError(f"{name} is a {type(first).__name__}, which can't be put together")


def _other(column: Sequence[Any]) -> Any:
    return next(one for one in column if one != column[0])


def _tensors_together(name: str, column: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    first = column[0]
    cut = [one.dim() > 0 and n > 0 and one.shape[0] % n == 0 for one, n in zip(column, sizes, strict=True)]
    per_sample = {one.shape[0] // n for one, n, fits in zip(column, sizes, cut, strict=True) if fits}
    flattened = len(per_sample) > 1  # lengths differ: [samples x length] of each micro-batch
    if all(cut) and (per_sample == {1} or flattened or first.requires_grad or not _all_equal(column)):
        return torch.cat(list(column))
    if _all_equal(column) and not first.requires_grad:
        return first
    if first.dim() == 0:
        raise UnableError(f"{name} was another number in each micro-batch")
    shapes = ", ".join(str(list(one.shape)) for one in column[:3])
    raise UnableError(f"{name} is not cut by samples along its first dimension (shapes {shapes})")


def _all_equal(column: Sequence[Tensor]) -> bool:
    return all(one.shape == column[0].shape and bool(torch.equal(one, column[0])) for one in column)


def _padded(name: str, column: Sequence[Any]) -> Sequence[Any]:
    """The tensors with trailing dimensions of the longest; the very same list where nothing differs."""
    if not all(isinstance(one, Tensor) and one.dim() for one in column):
        return column
    if len({one.dim() for one in column}) > 1:
        raise UnableError(f"{name} has another number of dimensions in each micro-batch")
    trailing = [max(sizes) for sizes in zip(*(one.shape[1:] for one in column), strict=True)]
    if all(list(one.shape[1:]) == trailing for one in column):
        return column
    value = _filler(name, column)
    return [_to_shape(one, [one.shape[0], *trailing], value) for one in column]


def _filler(name: str, column: Sequence[Tensor]) -> int:
    if column[0].is_floating_point() or column[0].dtype == torch.bool:
        return 0
    lowest = min(int(one.min()) for one in column if one.numel())
    if lowest < 0:
        return lowest
    return -100 if "label" in name or "target" in name else 0


def _to_shape(tensor: Tensor, shape: Sequence[int], value: int) -> Tensor:
    result = tensor.new_full(tuple(shape), value)
    result[tuple(slice(size) for size in tensor.shape)] = tensor
    return result


def _name(module: nn.Module, path: Path) -> str:
    """What the user calls an argument: ``labels``; of a positional one the name in forward."""
    kind, *rest = path
    if kind == 0 and rest:
        # a stand-in's function, whose forward has a context before the arguments
        owner: Any = getattr(module, "applied_function", module)
        try:
            parameters = list(inspect.signature(owner.forward).parameters)[owner is not module :]
        except (TypeError, ValueError):
            parameters = []
        if rest[0] < len(parameters):
            rest[0] = parameters[rest[0]]
    return ".".join(str(key) for key in rest) or "an argument"
