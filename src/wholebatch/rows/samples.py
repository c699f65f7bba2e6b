"""Samples into one packed row, and out of it again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wholebatch.errors import SplitError


def pack_rows(
    samples: Sequence[Mapping[str, Any]],
    ids: Sequence[int] | None = None,
    *,
    shifted: bool = True,
    ignore_index: int = -100,
) -> dict[str, Tensor]:
    """Put samples into one row.

    Nothing is summed or divided. The items of the row are those of its samples: for a loss that shifts,
    each sample's labels without the first, which is no target in the padded form either.

    Args:
        samples: each with ``input_ids``, whole numbers of shape (tokens,), and ``labels`` of the same
            shape, not shifted; without ``labels`` they are the input ids. An ``attention_mask`` of ones
            says nothing, and is left out. An empty list for an empty micro-batch.
        ids: theirs; by default 0, 1, 2 and so on.
        shifted: whether the loss shifts the labels by one, as ``next_token_loss`` does. Then the label at
            the first token of each sample is ignored, or the token before it would be asked for it.
        ignore_index: what the loss ignores.

    Returns:
        The packed micro-batch, on the host.

    Raises:
        SplitError: a sample is no row of token ids, its labels are not as many, it has entries that a row
            does not, or there are more or fewer ids than samples.

    Exactness: no arithmetic; exact in real arithmetic over any split where the model lets no sample see
        another.
    """
    if isinstance(samples, Mapping | str | bytes) or not isinstance(samples, Iterable):
        raise SplitError(
            f"samples is a {type(samples).__name__}, and a row is made of several; give a list of mappings"
        )
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        raise SplitError(f"ignore_index is {ignore_index!r}; give a whole number, such as -100")
    samples = list(samples)
    inputs = [_row_of(sample, "input_ids", place) for place, sample in enumerate(samples)]
    for place, (sample, tokens) in enumerate(zip(samples, inputs, strict=True)):
        _refuse_others(sample, len(tokens), place)
    labels = [
        _row_of(sample, "labels", place) if "labels" in sample else inputs[place]
        for place, sample in enumerate(samples)
    ]
    for place, (tokens, targets) in enumerate(zip(inputs, labels, strict=True)):
        if len(tokens) != len(targets):
            raise SplitError(
                f"sample {place} has {len(tokens)} input_ids and {len(targets)} labels; give each token "
                f"its label, {ignore_index} where nothing is to be learned"
            )
    sample_ids = range(len(samples)) if ids is None else _checked_ids(ids)
    if len(sample_ids) != len(samples):
        raise SplitError(f"{len(sample_ids)} ids were given for {len(samples)} samples; give each its own")
    return join_samples(inputs, labels, sample_ids, shifted=shifted, ignore_index=ignore_index)


def join_samples(
    inputs: Sequence[Tensor],
    labels: Sequence[Tensor],
    sample_ids: Sequence[int],
    *,
    shifted: bool = True,
    ignore_index: int = -100,
) -> dict[str, Tensor]:
    """What :func:`pack_rows` does, of rows that are known to fit each other.

    Args:
        inputs: int64 of shape (tokens,), one for each sample.
        labels: of the same shapes.
        sample_ids: one for each sample.
        shifted: as for :func:`pack_rows`.
        ignore_index: as for :func:`pack_rows`.

    Returns:
        The packed micro-batch.

    Exactness: no arithmetic.
    """
    none = torch.zeros(0, dtype=torch.int64)
    lengths = torch.tensor([len(tokens) for tokens in inputs], dtype=torch.int64)
    begins = lengths.cumsum(0) - lengths
    # cat copies, so that what is ignored below is not written into the caller's samples.
    targets = torch.cat([none, *labels])
    if shifted:
        targets[begins[lengths > 0]] = ignore_index
    positions = torch.arange(len(targets)) - begins.repeat_interleave(lengths)
    return {
        "input_ids": torch.cat([none, *inputs])[None],
        "position_ids": positions[None],
        "labels": targets[None],
        "sample_lengths": lengths,
        "sample_ids": torch.tensor(list(sample_ids), dtype=torch.int64),
    }


def unpack_rows(values: Tensor, sample_lengths: Tensor | Sequence[int]) -> tuple[Tensor, ...]:
    """Cut what a model made of a packed row into its samples.

    Args:
        values: shape (1, tokens, ...).
        sample_lengths: tokens of each sample, on the host.

    Returns:
        One tensor of shape (tokens of the sample, ...) for each sample, a view of ``values``.

    Raises:
        SplitError: the lengths do not add up to the row.

    Exactness: no arithmetic.
    """
    lengths = checked_lengths(sample_lengths)
    if values.ndim < 2 or values.shape[0] != 1 or values.shape[1] != sum(lengths):
        raise SplitError(
            f"samples of {_few(lengths)} tokens make a row of shape (1, {sum(lengths)}, ...), and this is "
            f"{tuple(values.shape)}; give the sample_lengths of the same micro-batch"
        )
    return torch.split(values[0], lengths)


def checked_lengths(sample_lengths: Tensor | Sequence[int]) -> list[int]:
    """The tokens of each sample; SplitError where they are no whole numbers on the host."""
    if isinstance(sample_lengths, Tensor) and sample_lengths.device.type != "cpu":
        raise SplitError(
            f"sample_lengths lie on {sample_lengths.device}, and reading them there would wait for the "
            f"device; leave them on the host"
        )
    if isinstance(sample_lengths, Tensor | np.ndarray):
        sample_lengths = sample_lengths.tolist()
    if not isinstance(sample_lengths, Iterable):
        raise SplitError(f"sample_lengths is {sample_lengths!r}; give the tokens of each sample of the row")
    lengths = [n.item() if isinstance(n, np.integer) else n for n in sample_lengths]
    if any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in lengths):
        raise SplitError(f"sample_lengths are whole numbers of tokens, at least 0; got {_few(lengths)}")
    return lengths


def _row_of(sample: Any, name: str, place: int) -> Tensor:
    found = sample.get(name) if isinstance(sample, Mapping) else None
    if found is None:
        has = f"has {', '.join(map(str, sample))}" if isinstance(sample, Mapping) else "is no mapping"
        raise SplitError(f"sample {place} {has}, and packing it needs {name!r} of shape (tokens,)")
    row = _tensor_of(found, f"{name} of sample {place}")
    whole = not (row.is_floating_point() or row.is_complex() or row.dtype == torch.bool)
    # An empty list becomes a row of no tokens, of torch's default dtype.
    if row.ndim != 1 or not (whole or row.numel() == 0):
        raise SplitError(
            f"{name} of sample {place} is {row.dtype} of shape {tuple(row.shape)}; a row takes whole "
            f"numbers of shape (tokens,)"
        )
    return row.long()


def _tensor_of(found: Any, what: str) -> Tensor:
    try:
        if isinstance(found, np.ndarray):
            # An array may be read-only, or of the other order of bytes; torch takes neither as it is.
            found = np.array(found, dtype=found.dtype.newbyteorder("="))
        return torch.as_tensor(found)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise SplitError(
            f"{what} is a {type(found).__name__}, of which no row can be made ({error}); a row takes whole "
            f"numbers of shape (tokens,)"
        ) from error


# Entries of a sample that a row has, or that say nothing.
_ENTRIES = ("input_ids", "labels", "attention_mask")


def _refuse_others(sample: Mapping[str, Any], tokens: int, place: int) -> None:
    """What is in a sample and in no row would be lost."""
    others = [name for name in sample if name not in _ENTRIES]
    if others:
        raise SplitError(
            f"sample {place} has {', '.join(map(repr, others))}, which a packed row has not; leave it "
            f"out of the sample, or pad the micro-batch"
        )
    if "attention_mask" not in sample:
        return
    mask = _tensor_of(sample["attention_mask"], f"attention_mask of sample {place}")
    if tuple(mask.shape) != (tokens,) or not bool((mask == 1).all()):
        raise SplitError(
            f"attention_mask of sample {place} is not 1 for each of its {tokens} input_ids, and a row has "
            f"no padding; cut the padding off the sample, or pad the micro-batch"
        )


def _checked_ids(ids: Any) -> list[int]:
    found: list[Any] = list(ids) if isinstance(ids, Iterable) else [repr(ids)]
    found = [index.item() if isinstance(index, np.integer | Tensor) else index for index in found]
    if any(type(index) is not int or not -(2**63) <= index < 2**63 for index in found):
        raise SplitError(f"ids are whole numbers, one for each sample; got {_few(found)}")
    return found


def _few(lengths: Sequence[Any]) -> str:
    shown = ", ".join(map(str, lengths[:6]))
    return shown if len(lengths) <= 6 else f"{shown} and {len(lengths) - 6} more"
