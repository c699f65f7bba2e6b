"""Streams that every worker reads whole, so that each sample would come once for each worker."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from wholebatch.errors import UsageError, WholebatchError
from wholebatch.loading.stream import Block


def refusing_twins(blocks: Iterator[Block], workers: int) -> Iterator[Block]:
    """The blocks as they come, of which the first two must not be the same.

    A stream that divides nothing gives each worker the same samples. That shows before one is used, unless
    it draws them at random, where every worker draws others.

    Args:
        blocks: of the copies in turn, from the begin of the stream.
        workers: how many copies there are, at least 2.

    Raises:
        UsageError: the first samples of two copies are the same.
    """
    first = next(blocks, None)
    if first is None:
        return
    try:
        second = next(blocks, None)
    except WholebatchError:
        yield first  # what can be used before the failure is
        raise
    if second is not None and first.samples and is_same(first.samples, second.samples):
        raise UsageError(
            f"workers 0 and 1 read the same first {len(first.samples)} samples from the stream, so that "
            f"every sample would come {workers} times; divide it by get_worker_info() as torch asks of an "
            f"IterableDataset, or set workers to 0 or 1"
        )
    yield first
    if second is not None:
        yield second
    yield from blocks


def is_same(one: Any, other: Any) -> bool:
    """Whether two samples hold the same values; of classes that can't be compared, False."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor | np.ndarray):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        equal = one == other
        return bool(equal.all() if isinstance(equal, Tensor | np.ndarray) else equal)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(is_same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    try:
        return bool(one == other)
    except Exception:  # it is of a class of the user's own
        return False
