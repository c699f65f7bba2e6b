"""Samples of different lengths to one micro-batch, padded to the longest of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import default_collate

from wholebatch.errors import UsageError
from wholebatch.loading.reading import Samples, read_samples
from wholebatch.whereabouts import told

# A label of what nothing is learned of, which objectives ignore wherever nothing else was said.
IGNORED_LABEL = -100


def pad_collate(*, attention_mask: bool = False, like: Any = None, **fill_values: float) -> PadCollate:
    """A collation of samples that are dicts: padded to the longest of the micro-batch.

    Args:
        attention_mask: add one beside ``input_ids``: 1 for tokens, 0 for padding.
        like: a sample whose keys, dtypes and numbers of dimensions all others have to have, such as
            ``dataset[0]``. Without it a `WindowLoader` reads sample 0 of its data set for that, or takes
            the first one of a stream; any other loader compares the samples of each micro-batch alone,
            and does not see that whole micro-batches differ.
        **fill_values: what padding holds, by the name of the entry; -100 in ``labels`` and 0 in all others
            by default. ``pad_collate(input_ids=tokenizer.pad_token_id)``.

    Returns:
        ``collate(samples)``, for `WindowLoader` or any other loader. Entries of one dimension become
        tensors of shape (samples, longest), numbers tensors of shape (samples,); tensors of more dimensions
        are stacked, and what is no number is collated as torch does. A `WindowLoader` finds
        ``sample_ids`` of shape (samples,) in them too.

    Exactness: no arithmetic. Padding supervises nothing; a model that heeds the mask, or sees only what
    comes before, computes for each sample what it would compute without padding.
    """
    return PadCollate(attention_mask=attention_mask, fill_values=dict(fill_values), like=like)


@dataclass(frozen=True, kw_only=True, slots=True)
class PadCollate:
    """What `pad_collate` returns; its arguments are those of that function.

    Args:
        attention_mask, fill_values, like: as for `pad_collate`.
        like_told: how messages name the sample ``like``.
    """

    attention_mask: bool = False
    fill_values: Mapping[str, float] = field(default_factory=dict)
    like: Any = None
    like_told: str = "the sample like="

    def __post_init__(self) -> None:
        if isinstance(self.like, Mapping):
            # Once, since with short micro-batches it would cost as much as the samples themselves.
            tensors = {name: self._form(name, value) for name, value in self.like.items()}
            object.__setattr__(self, "like", tensors)

    def _form(self, name: str, value: Any) -> Any:
        if isinstance(value, list | tuple) and not value:
            raise UsageError(
                f"{name!r} of {self.like_told} is an empty list, which does not say whether it holds whole "
                f"numbers, and all samples have to be like it; give a tensor of a dtype, or another collate"
            )
        return _as_tensor(value, name, self.like_told)

    def __call__(self, samples: Sequence[Any], ids: Sequence[int] | None = None) -> dict[str, Any]:
        """A micro-batch of the samples.

        Args:
            samples: dicts of tensors, arrays, lists or numbers; at least one.
            ids: theirs; without them there are no ``sample_ids``.

        Returns:
            Tensors by name.

        Raises:
            UsageError: samples of which no such batch can be made, or that are not like the others; names
                the sample and the entry.

        Exactness: as for `pad_collate`. With ``like`` the dtypes do not depend on which samples are in the
        micro-batch: torch would give it the dtype of the one that comes first.
        """
        _check_samples(samples, ids)
        numbers = range(len(samples)) if ids is None else ids
        named = [(f"sample {number}", sample) for number, sample in zip(numbers, samples, strict=True)]
        form_told, form = named[0] if self.like is None else (self.like_told, self.like)
        _check_entries(named, form_told, form)
        self._check_names(form_told, form, adds_ids=ids is not None)
        batch: dict[str, Any] = {}
        for name in form:
            entries = [(who, _as_tensor(sample[name], name, who)) for who, sample in named]
            batch[name] = self._together(name, _alike(name, entries, *self._form_of(name, entries)))
        if self.attention_mask:
            batch["attention_mask"] = _mask(samples)
        if ids is not None:
            batch["sample_ids"] = torch.tensor(ids, dtype=torch.int64)
        return batch

    def _check_names(self, form_told: str, form: Mapping[Any, Any], *, adds_ids: bool) -> None:
        """A name that no sample has would fill nothing, and one that is added would hide the sample's."""
        strange = [name for name in self.fill_values if name not in form]
        if strange:
            raise UsageError(
                f"pad_collate({strange[0]}=...) fills an entry that {form_told} does not have, which has "
                f"{sorted(map(str, form))}; mend the name, or leave it out"
            )
        if adds_ids and "sample_ids" in form:
            raise UsageError(
                f"{form_told} has an entry 'sample_ids', where a loader gives the ids of its own; name the "
                f"entry otherwise, or give another collate"
            )

    def _form_of(self, name: str, entries: list[_Entry]) -> _Entry:
        """What all entries of a name have to be like."""
        if self.like is not None:
            return self.like_told, self.like[name]
        # Of a micro-batch by itself the first that says what it holds.
        return next((entry for entry in entries if not _is_empty(entry[1])), entries[0])

    def _together(self, name: str, values: list[Any]) -> Any:
        first = values[0]
        if isinstance(first, Tensor) and first.dim() == 1:
            fill = self.fill_values.get(name, IGNORED_LABEL if name == "labels" else 0)
            if len({len(value) for value in values}) > 1:
                _check_fill(name, fill, first.dtype)
            return pad_sequence(values, batch_first=True, padding_value=fill)
        try:
            return torch.stack(values) if isinstance(first, Tensor) else default_collate(values)
        except (RuntimeError, TypeError) as error:
            raise UsageError(
                f"{name!r} of {len(values)} samples can't be stacked ({told(error)}); give them one shape, "
                f"leave it out of the samples, or give another collate"
            ) from error


# How messages name a sample, and one entry of it.
_Entry = tuple[str, Any]


class PadLikeFirst:
    """Padding in a loader: every sample is compared with the first one of the data set.

    Args:
        pad: a collation without a sample to compare with.
        samples: the data set, whose first sample is read when a process collates for the first time; None
            for a stream, whose first sample `see` tells.
        seed: of the run.
        skips: whether samples that can't be read are left out; then the first that can be is meant.
    """

    def __init__(self, pad: PadCollate, samples: Samples | None, *, seed: int, skips: bool) -> None:
        self._pad = pad
        self._samples = samples
        self._seed = seed
        self._skips = skips

    def __call__(self, samples: Sequence[Any], ids: Sequence[int], epoch: int) -> dict[str, Any]:  # noqa: ARG002
        """A micro-batch of the samples; see `PadCollate`."""
        if self._pad.like is None and self._samples is not None:
            self._read_first(self._samples)
        return self._pad(samples, ids)

    def see(self, sample_id: int, sample: Any) -> None:
        """Compare all samples with this one; only the first call decides."""
        if self._pad.like is None:
            self._pad = replace(self._pad, like=sample, like_told=f"sample {sample_id}")

    def _read_first(self, samples: Samples) -> None:
        for sample_id in range(len(samples)):
            try:
                (sample,) = read_samples(samples, [sample_id], epoch=0, seed=self._seed)
            except Exception:
                if not self._skips:
                    raise
                continue
            self.see(sample_id, sample)
            return


def _check_samples(samples: Any, ids: Any) -> None:
    if not isinstance(samples, Sequence) or isinstance(samples, str | bytes):
        raise UsageError(f"padding takes a list of samples, and this is a {type(samples).__name__}")
    if not samples:
        raise UsageError("padding of no samples has no shape; give at least one, or another collate")
    if ids is not None and len(ids) != len(samples):
        raise UsageError(f"{len(ids)} ids were given for {len(samples)} samples; give each its own")


def _check_entries(named: list[_Entry], form_told: str, form: Any) -> None:
    for who, sample in [(form_told, form), *named]:
        if not isinstance(sample, Mapping):
            raise UsageError(
                f"{who} is a {type(sample).__name__}, and padding by name needs dicts; give another collate"
            )
        if set(sample) != set(form):
            raise UsageError(
                f"{who} has the entries {sorted(map(str, sample))} and {form_told} has "
                f"{sorted(map(str, form))}; let every sample have the same, or give another collate"
            )


def _as_tensor(value: Any, name: str, who: str) -> Any:
    """Numbers as a tensor; what is none, such as a text, as it is."""
    if not isinstance(value, np.ndarray | np.generic | list | tuple | int | float | complex):
        return value
    try:
        if isinstance(value, np.ndarray | np.generic):
            # An array may be read-only, which torch would warn of if it shared its memory.
            return torch.from_numpy(np.array(value))
        return torch.tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"{name!r} of {who} is a {type(value).__name__}, of which no tensor can be made ({error}); "
            f"leave it out of the samples, or give another collate"
        ) from error


def _is_empty(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 1 and len(value) == 0


def _alike(name: str, entries: list[_Entry], form_told: str, form: Any) -> list[Any]:
    """The values of the entries, of which an empty list takes the dtype of the form."""
    values: list[Any] = []
    for who, value in entries:
        if _is_empty(value) and isinstance(form, Tensor) and form.dim() == 1:
            values.append(form.new_empty(0))
            continue
        if not _is_like(value, form):
            raise UsageError(
                f"{name!r} is {_kind(value)} in {who} and {_kind(form)} in {form_told}, and the dtype of a "
                f"micro-batch may not depend on which samples are in it; write the numbers alike, such as "
                f"1.0 for 1, give tensors of one dtype, or give another collate"
            )
        values.append(value)
    return values


def _is_like(value: Any, form: Any) -> bool:
    if isinstance(value, Tensor) and isinstance(form, Tensor):
        return value.dtype == form.dtype and value.dim() == form.dim()
    return _kind(value) == _kind(form)


def _kind(value: Any) -> str:
    """What collation makes of a value, in words: dtype and dimensions, or the types."""
    if isinstance(value, Tensor):
        return (
            f"{str(value.dtype).removeprefix('torch.')} of {value.ndim} dimension{'s' * (value.ndim != 1)}"
        )
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_kind(part)}' for key, part in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_kind, value))}]"
    return f"one {type(value).__name__}"


def _check_fill(name: str, fill: float, dtype: torch.dtype) -> None:
    """Refuse padding that would become something else in the tensor, such as 156 for -100 in uint8."""
    if not isinstance(fill, int | float | complex):
        raise UsageError(
            f"padding of {name!r} is to hold {fill!r}, which is no number; give pad_collate({name}=...) one"
        )
    try:
        held: Any = torch.full((), fill, dtype=dtype).item()
    except (RuntimeError, TypeError, OverflowError):
        held = None
    # Of the numbers with a point the nearest that the dtype has, and no infinity in its place.
    rounds = (dtype.is_floating_point or dtype.is_complex) and held is not None
    is_held = held == fill or (rounds and (fill != fill or abs(held) != float("inf")))
    if not is_held:
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
    for number, sample in enumerate(samples):
        if np.ndim(sample["input_ids"]) != 1:
            raise UsageError(
                f"attention_mask=True marks the tokens of input_ids, which in sample {number} of the "
                f"micro-batch have {np.ndim(sample['input_ids'])} dimensions; give a row of tokens"
            )
    return pad_sequence(
        [torch.ones(len(sample["input_ids"]), dtype=torch.int64) for sample in samples], batch_first=True
    )
