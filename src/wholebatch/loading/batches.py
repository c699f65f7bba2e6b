"""The micro-batches of one replica in one global batch, and what a loader knows of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from wholebatch.errors import UsageError
from wholebatch.split import like_mapping


class WindowBatches(list[Any]):
    """A list of micro-batches: all of one update on one replica.

    Args:
        batches: the micro-batches; none where a tail, or unreadable samples, leave this replica without.
        sample_ids: ids of their samples, in order; shape (samples,).
        left_out: ids of samples of this replica that could not be read and are in no micro-batch.
        position: samples consumed before this global batch: over all replicas, or where the data set is
            a stream, by this replica.
        epoch: passes over the data before this one; 0 for a stream.
    """

    def __init__(
        self,
        batches: Iterable[Any],
        *,
        sample_ids: Sequence[int],
        left_out: Sequence[int] = (),
        position: int = 0,
        epoch: int = 0,
    ) -> None:
        super().__init__(batches)
        self.sample_ids = tuple(sample_ids)
        self.left_out = tuple(left_out)
        self.position = position
        self.epoch = epoch


def check_pinning(pin_memory: bool) -> None:
    """Raise UsageError where memory is to be pinned and there is no accelerator to copy to."""
    if pin_memory and not torch.accelerator.is_available():
        raise UsageError(
            "pin_memory=True is for copies to an accelerator, and this process sees none; leave it out"
        )


def pinned(batch: Any) -> Any:
    """A micro-batch with its tensors in pinned memory.

    Args:
        batch: a tensor, or dicts, tuples and lists of them; everything else stays as it is.

    Exactness: the same values.
    """
    if isinstance(batch, Tensor):
        return batch.pin_memory()
    if isinstance(batch, dict):
        return like_mapping(batch, {name: pinned(part) for name, part in batch.items()})
    if isinstance(batch, tuple):
        parts = [pinned(part) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else tuple(parts)
    if isinstance(batch, list):
        return [pinned(part) for part in batch]
    return batch
