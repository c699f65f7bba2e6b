"""What micro-batches hold, in a few numbers: by which ranks that share a replica see that theirs differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def content_marks(batches: Any) -> list[Tensor | int]:
    """Numbers that are the same for the same tensors, and nearly always others for others.

    For each dense tensor the bytes of an element and its shape; then for each device ``sum_s (s + 1) * sum
    of the bits of sample s`` with the bits read as whole numbers, modulo 2^64. s counts dimension 0 of one
    tensor after another.

    Args:
        batches: a tensor, or a mapping, tuple or list of batches; what else is in it is not looked at.

    Returns:
        Whole numbers, and 0-dimensional int64 tensors on the devices of the batches, which nobody reads
        here.

    Exactness: whole numbers, so the same on every device. Elements that change places within one sample are
    not seen.
    """
    tensors = [one for one in tensors_in(batches) if one.layout is torch.strided]
    marks: list[Tensor | int] = [n for tensor in tensors for n in (tensor.element_size(), *tensor.shape)]
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        by_device.setdefault(tensor.device, []).append(_bits_by_sample(tensor.detach()))
    for parts in by_device.values():
        bits = torch.cat(parts)
        marks.append(torch.arange(1, 1 + len(bits), device=bits.device).mul_(bits).sum())
    return marks


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in nested lists, tuples and mappings, a model's output that is one among them.

    Exactness: the same tensors, not copies.
    """
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part)
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from tensors_in(part)


def _bits_by_sample(values: Tensor) -> Tensor:
    """The bits of each sample as whole numbers, added up: int64 ``[samples]``; of a scalar as of one."""
    values = torch.view_as_real(values) if values.is_complex() else values
    bits = values.contiguous().view(_BITS[values.element_size()])
    return bits.flatten(1).sum(1) if bits.ndim > 1 else bits.reshape(-1).long()
