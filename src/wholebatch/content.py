"""What micro-batches hold, in a few numbers: by which ranks that share a replica see that theirs differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def content_marks(batch: Any) -> Iterator[Tensor | int]:
    """Numbers that are the same for the same tensors, and nearly always others for others.

    For each dense tensor in the batch the bytes of an element, its shape, and ``sum_s (s + 1) * sum of the
    bits of sample s`` with the bits read as whole numbers, modulo 2^64; s counts dimension 0.

    Args:
        batch: a tensor, or a mapping, tuple or list of batches; what else is in it is not looked at.

    Yields:
        Whole numbers, and 0-dimensional int64 tensors on the devices of the batch, which nobody reads here.

    Exactness: whole numbers, so the same on every device. Elements that change places within one sample are
    not seen.
    """
    for tensor in tensors_in(batch):
        if tensor.layout is torch.strided:
            yield from (tensor.element_size(), *tensor.shape)
            yield _sum_of_bits(tensor.detach())


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


def _sum_of_bits(values: Tensor) -> Tensor:
    values = torch.view_as_real(values) if values.is_complex() else values
    bits = values.contiguous().view(_BITS[values.element_size()])
    of_samples = bits.flatten(1).sum(1, dtype=torch.int64) if bits.ndim > 1 else bits.reshape(-1)
    return (of_samples * torch.arange(1, 1 + len(of_samples), device=values.device)).sum()
