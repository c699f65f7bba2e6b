"""Samples of different lengths to one micro-batch, padded to the longest of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from wholebatch.errors import UsageError

# What an objective ignores, wherever nothing else was said.
_IGNORED_LABEL = -100


def pad_collate(*, attention_mask: bool = False, **fill_values: float) -> PadCollate:
    """A collation of samples that are dicts: padded to the longest of the micro-batch.

    Args:
        attention_mask: add one beside ``input_ids``: 1 for tokens, 0 for padding.
        **fill_values: what padding holds, by the name of the entry; -100 in ``labels`` and 0 in all others
            by default. ``pad_collate(input_ids=tokenizer.pad_token_id)``.

    Returns:
        ``collate(samples)``, for `WindowLoader` or any other loader. Entries of one dimension become
        tensors of shape (samples, longest), numbers tensors of shape (samples,). A `WindowLoader` finds
        ``sample_ids`` of shape (samples,) in them too.

    Exactness: no arithmetic. Padding supervises nothing; a model that heeds the mask, or sees only what
    comes before, computes for each sample what it would compute without padding.
    """
    return PadCollate(attention_mask=attention_mask, fill_values=dict(fill_values))


@dataclass(frozen=True, kw_only=True, slots=True)
class PadCollate:
    """What `pad_collate` returns; its arguments are those of that function."""

    attention_mask: bool = False
    fill_values: Mapping[str, float] = field(default_factory=dict)

    def __call__(self, samples: Sequence[Any], ids: Sequence[int] | None = None) -> dict[str, Tensor]:
        """A micro-batch of the samples.

        Args:
            samples: dicts of tensors, arrays or lists of one dimension, or of numbers; at least one.
            ids: theirs; without them there are no ``sample_ids``.

        Returns:
            Tensors by name.

        Raises:
            UsageError: samples of which no such batch can be made; names the sample and the entry.

        Exactness: as for `pad_collate`.
        """
        told = [f"sample {place}" for place in (range(len(samples)) if ids is None else ids)]
        _check_entries(samples, told)
        batch: dict[str, Tensor] = {}
        for name in samples[0]:
            parts = [_as_tensor(sample[name], name, who) for sample, who in zip(samples, told, strict=True)]
            batch[name] = self._together(name, _of_one_dtype(parts, name, told), told)
        if self.attention_mask:
            batch["attention_mask"] = _mask(samples)
        if ids is not None:
            batch["sample_ids"] = torch.tensor(ids, dtype=torch.int64)
        return batch

    def _together(self, name: str, parts: list[Tensor], told: list[str]) -> Tensor:
        for part, who in zip(parts, told, strict=True):
            if part.dim() != parts[0].dim() or part.dim() > 1:
                raise UsageError(
                    f"{name!r} has {parts[0].dim()} dimensions in {told[0]} and {part.dim()} in {who}; "
                    f"pad_collate pads entries of one dimension and stacks numbers; give another collate"
                )
        if parts[0].dim() == 0:
            return torch.stack(parts)
        fill = self.fill_values.get(name, _IGNORED_LABEL if name == "labels" else 0)
        if len({len(part) for part in parts}) > 1:
            _check_fill(name, fill, parts[0].dtype)
        return pad_sequence(parts, batch_first=True, padding_value=fill)


def _check_entries(samples: Sequence[Any], told: list[str]) -> None:
    for sample, who in zip(samples, told, strict=True):
        if not isinstance(sample, Mapping):
            raise UsageError(
                f"{who} is a {type(sample).__name__}, and pad_collate needs dicts; give another collate"
            )
        if set(sample) != set(samples[0]):
            raise UsageError(
                f"{told[0]} has the entries {sorted(samples[0])} and {who} has {sorted(sample)}; let every "
                f"sample have the same"
            )


def _as_tensor(value: Any, name: str, who: str) -> Tensor:
    if isinstance(value, Tensor):
        return value
    try:
        # An array may be read-only, which torch would warn of if it shared its memory.
        return torch.tensor(np.array(value) if isinstance(value, np.ndarray | np.generic) else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"{name!r} of {who} is a {type(value).__name__}, of which pad_collate can make no tensor "
            f"({error}); leave it out of the samples, or give a collate of your own"
        ) from error


def _of_one_dtype(parts: list[Tensor], name: str, told: list[str]) -> list[Tensor]:
    """The parts, of which an empty list takes the dtype of the others."""
    filled = [(part, who) for part, who in zip(parts, told, strict=True) if part.numel()]
    if not filled:
        return parts
    first, first_told = filled[0]
    for part, who in filled:
        if part.dtype != first.dtype:
            raise UsageError(
                f"{name!r} is {first.dtype} in {first_told} and {part.dtype} in {who}; let it be the same "
                f"in every sample, or the update would depend on the split"
            )
    return [part if part.numel() else part.to(first.dtype) for part in parts]


def _check_fill(name: str, fill: float, dtype: torch.dtype) -> None:
    """Refuse padding that would become something else in the tensor, such as 156 for -100 in uint8."""
    try:
        held = torch.full((), fill, dtype=dtype).item()
    except RuntimeError:
        held = None
    if held != fill and fill == fill:
        raise UsageError(
            f"padding of {name!r} is to hold {fill}, which {dtype} can't; give another dtype, or "
            f"pad_collate({name}=...)"
        )


def _mask(samples: Sequence[Mapping[str, Any]]) -> Tensor:
    first = samples[0]
    if "attention_mask" in first:
        raise UsageError(
            "attention_mask=True, and the samples have one already, which is padded with 0; leave one out"
        )
    if "input_ids" not in first:
        raise UsageError(
            f"attention_mask=True marks the tokens of input_ids, and the samples have {sorted(first)}"
        )
    return pad_sequence(
        [torch.ones(len(sample["input_ids"]), dtype=torch.int64) for sample in samples], batch_first=True
    )
