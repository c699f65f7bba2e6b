"""Cut a batch into micro-batches along its samples.

A batch is a tensor, or a dict or tuple of batches, with samples in dimension 0. A list is one entry
per sample, except that a batch which *is* a list of tensors counts as a tuple of them: torch's default
collation makes ``[inputs, labels]`` of samples that are pairs. Numbers, strings, ``None`` and
0-dimensional tensors belong to all samples and go to every micro-batch unchanged. A packed row
(``rows``) has its samples in dimension 1; it says their lengths, and can't be cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch

from wholebatch.errors import SplitError, WindowUsageError

SAMPLE_LENGTHS = "sample_lengths"
_SHARED = (str, bytes, bool, int, float, complex, type(None))


def num_samples(batch: Any) -> int:
    """The number of samples in ``batch``.

    Args:
        batch: tensor ``[samples, ...]``, list of samples, or a dict or tuple of these; or a packed row.

    Returns:
        The common length of dimension 0, in samples; of a packed row its number of ``sample_lengths``.

    Raises:
        SplitError: two parts disagree, nothing in the batch has a dimension of samples, or a
            part is of a type that can't be cut.
    """
    if is_packed(batch):
        return len(batch[SAMPLE_LENGTHS])
    plain = _of_plain_dict(batch) if type(batch) is dict else None
    if plain is not None:
        return plain
    lengths = dict(_lengths(_as_collated(batch), ()))
    if not lengths:
        raise SplitError(
            f"a batch of type {type(batch).__name__} holds no tensor or list with a dimension of samples; "
            f"pass a tensor, tuple or dict with samples in dimension 0, or give the window "
            f"count_samples=, a function that tells the samples of such a batch"
        )
    first_path, first = next(iter(lengths.items()))
    for path, length in lengths.items():
        if length != first:
            raise SplitError(
                f"parts of one batch disagree on the number of samples: {_told(first_path)} has {first}, "
                f"{_told(path)} has {length}; every tensor and list needs samples in dimension 0 (or give "
                f"the window count_samples=)"
            )
    return first


def is_packed(batch: Any) -> bool:
    """Whether a batch is a packed row, in which samples follow each other in dimension 1."""
    return (type(batch) is dict or isinstance(batch, Mapping)) and SAMPLE_LENGTHS in batch


def split_batch(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """Cut ``batch`` into micro-batches of ``sizes`` samples, in order.

    Args:
        batch: as for :func:`num_samples`.
        sizes: samples of each micro-batch; positive, and ``sum(sizes)`` equals the batch's samples.

    Returns:
        One batch of the same structure for each size. Tensors are views of the original.

    Raises:
        SplitError: a size is not positive, the sizes do not add up to the batch, or it is a packed row.

    Exactness: no arithmetic; every sample lands in exactly one micro-batch.
    """
    total = num_samples(batch)
    if any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in sizes):
        raise SplitError(f"micro-batch sizes are whole numbers of samples, at least 1; got {list(sizes)}")
    if sum(sizes) != total:
        raise SplitError(
            f"micro-batches of {list(sizes)} samples hold {sum(sizes)} together, but the batch has {total}"
        )
    if is_packed(batch):
        raise SplitError(
            f"the batch is a packed row of {total} samples, which share dimension 1; split the samples "
            f"into {list(sizes)} before they are packed"
        )
    ends = list(accumulate(sizes))
    parts = _as_collated(batch)
    return [_cut(parts, end - size, end) for size, end in zip(sizes, ends, strict=True)]


def listed_micro_batches(batches: Any, *, most: int | None) -> list[Any]:
    """The micro-batches of one update, checked not to be one batch.

    Args:
        batches: an iterable of micro-batches.
        most: how many there may be; None for any number.

    Raises:
        WindowUsageError: one batch in place of several, or more than ``most``.
    """
    if isinstance(batches, torch.Tensor | Mapping | str) or not isinstance(batches, Iterable):
        raise WindowUsageError(
            f"update takes a list of micro-batches, got one {type(batches).__name__}; cut it with "
            f"wholebatch.split.split_batch(batch, sizes), or pass [batch]"
        )
    held = list(batches)
    if isinstance(batches, tuple) and held and all(isinstance(part, torch.Tensor) for part in held):
        shapes = " and ".join(str(list(part.shape)) for part in held[:4])
        raise WindowUsageError(
            f"update takes a list of micro-batches, got a tuple of {len(held)} tensors ({shapes}), as one "
            f"micro-batch (inputs, targets) is; pass [batch], or list(batches) where each is one"
        )
    if most is not None and len(held) > most:
        raise WindowUsageError(
            f"this update has {len(held)} micro-batches on this rank, more than the plan's {most}; "
            f"each replica takes its own share of the global batch, as window.batches(loader) draws it"
        )
    return held


def like_mapping(mapping: Mapping[Any, Any], parts: dict[Any, Any]) -> Mapping[Any, Any]:
    """``parts`` in the mapping's own class where that is made of a dict, else as they are.

    A loss may read ``batch.input_ids`` from a dict of a class of its own.

    Args:
        mapping: of any class.
        parts: new values under the same keys.
    """
    if type(mapping) is dict:
        return parts
    try:
        made = type(mapping)(parts)  # type: ignore[call-arg]
        same = list(made) == list(parts) and all(made[key] is part for key, part in parts.items())
    except Exception:  # whatever another class's constructor makes of one dict
        return parts
    return made if same else parts


def _of_plain_dict(batch: dict[Any, Any]) -> int | None:
    """Samples of the batch that nearly everybody has, a dict of tensors of one length; else ``None``."""
    lengths = {
        part.shape[0] if isinstance(part, torch.Tensor) and part.ndim else None for part in batch.values()
    }
    return lengths.pop() if len(lengths) == 1 else None


def _as_collated(batch: Any) -> Any:
    """A list of tensors as the tuple that it stands for."""
    tensors = isinstance(batch, list) and batch and all(_is_array(part) and part.ndim for part in batch)
    return tuple(batch) if tensors else batch


def _lengths(part: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], int]]:
    if isinstance(part, _SHARED):
        return
    if isinstance(part, Mapping):
        for key, value in part.items():
            yield from _lengths(value, (*path, key))
    elif isinstance(part, tuple):
        for index, value in enumerate(part):
            yield from _lengths(value, (*path, index))
    elif isinstance(part, list):
        yield path, len(part)
    elif _is_array(part):
        if part.ndim > 0:
            yield path, int(part.shape[0])
    else:
        raise SplitError(
            f"{_told(path)} is a {type(part).__name__}, which can't be cut into micro-batches; "
            f"use tensors, tuples, dicts and lists of samples, or give the window count_samples="
        )


def _told(path: tuple[Any, ...]) -> str:
    return "batch" + "".join(f"[{key!r}]" for key in path)


def _cut(part: Any, start: int, end: int) -> Any:
    if isinstance(part, _SHARED):
        return part
    if isinstance(part, Mapping):
        return like_mapping(part, {key: _cut(value, start, end) for key, value in part.items()})
    if isinstance(part, tuple):
        cut = [_cut(value, start, end) for value in part]
        return type(part)(*cut) if hasattr(part, "_fields") else tuple(cut)
    if _is_array(part) and part.ndim == 0:
        return part
    return part[start:end]


def _is_array(part: Any) -> bool:
    # numpy arrays are cut as tensors are, without importing numpy to ask
    return isinstance(part, torch.Tensor) or (hasattr(part, "ndim") and hasattr(part, "shape"))
