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
    if isinstance(batch, Tensor):
        if batch.layout is torch.strided:
            yield from (batch.element_size(), *batch.shape)
            yield _sum_of_bits(batch.detach())
    elif isinstance(batch, Mapping):
        for part in batch.values():
            yield from content_marks(part)
    elif isinstance(batch, tuple | list):
        for part in batch:
            yield from content_marks(part)


def _sum_of_bits(values: Tensor) -> Tensor:
    values = torch.view_as_real(values) if values.is_complex() else values
    bits = values.contiguous().view(_BITS[values.element_size()])
    of_samples = bits.flatten(1).sum(1, dtype=torch.int64) if bits.ndim > 1 else bits.reshape(-1)
    return (of_samples * torch.arange(1, 1 + len(of_samples), device=values.device)).sum()
