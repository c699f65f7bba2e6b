"""Samples of the user's own: a function that gives a data set and an objective."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Subset, default_collate

from wholebatch.errors import UsageError
from wholebatch.loading.padding import PadCollate
from wholebatch.report.words import number_of
from wholebatch.split import num_samples
from wholebatch.targets import check_options, find_target, guarded
from wholebatch.train.data.own_rows import OwnRows, own_rows
from wholebatch.train.data.rows import is_held_out
from wholebatch.train.material import Batch, JobData, Samples
from wholebatch.train.settings import TrainConfig

_WHAT = "a function that returns a data set and its objective"
_NEEDED = ("train", "objective")
# Of each sample of train, by its index: tokens, and what the objective counts in it.
_BY_SAMPLE = ("lengths", "items")
_OPTIONAL = ("held_out", "collate", "vocabulary", "num_labels", "padding_id", *_BY_SAMPLE)


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnCollation:
    """Makes micro-batches of the user's own samples.

    Args:
        collate: ``collate(samples) -> batch`` of the user's own, or None for the one below.
        padding_id: token id of padding.
        first: sample 0 to train on. Micro-batches without samples get their shape from it, and the
            default collation its keys and kinds of numbers.
        vocabulary: token ids end below it; None where that is not known.

    Attributes:
        pad: collates without a collate of the user's own; None where samples are no dicts.

    Raises:
        UsageError: sample 0 does not say what all others have to be like.
    """

    collate: Callable[[list[Any]], Any] | None
    padding_id: int
    first: Any
    vocabulary: int | None = None
    pad: PadCollate | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        first = self.first
        if self.collate is not None or not isinstance(first, Mapping):
            return
        tokens = first.get("input_ids")
        pad = PadCollate(
            attention_mask=tokens is not None and np.ndim(tokens) == 1 and "attention_mask" not in first,
            fill_values={} if tokens is None else {"input_ids": self.padding_id},
            like=first,
            like_told="sample 0 to train on",
        )
        object.__setattr__(self, "pad", pad)

    def __call__(self, samples: Sequence[Any], ids: Sequence[int], epoch: int) -> Batch:  # noqa: ARG002
        """A micro-batch of the chosen samples.

        Without a collate of the user's own, samples that are dicts are padded by `PadCollate`, with
        ``input_ids`` filled with the padding id, and an ``attention_mask`` added beside them where there is
        none. Every sample has to have the keys, dtypes and dimensions of sample 0.

        Args:
            samples: chosen ones; none for a micro-batch without samples.
            ids: theirs.
            epoch: not looked at.

        Returns:
            Tensors by name, with ``sample_ids`` of shape (samples,).

        Raises:
            UsageError: samples of which no dict of tensors can be made, a batch of another number of
                samples, or a token id outside the vocabulary; names them.

        Exactness: padding supervises nothing, and the dtypes do not depend on the split.
        """
        chosen = list(samples) or [self.first]
        if self.collate is not None:
            made = self.collate(chosen)
        else:
            made = default_collate(chosen) if self.pad is None else self.pad(chosen, ids or None)
        if not isinstance(made, Mapping):
            raise UsageError(
                f"data.source: a micro-batch is a {type(made).__name__}, and has to be a dict of tensors; "
                f"let samples be dicts, or give a collate that returns one"
            )
        batch = dict(made)
        batch.pop("sample_ids", None)
        if (found := num_samples(batch)) != len(chosen):
            raise UsageError(
                f"data.source: collate made a batch of {found} of the {len(chosen)} samples {list(ids)}; "
                f"let every tensor and list in it have one entry a sample in its first dimension"
            )
        self._refuse_strange_ids(batch, ids)
        if not samples:
            batch = {name: value[:0] if _has_samples(value) else value for name, value in batch.items()}
        batch["sample_ids"] = torch.tensor(ids, dtype=torch.int64)
        return batch

    def _refuse_strange_ids(self, batch: Mapping[str, Any], ids: Sequence[int]) -> None:
        """Before an embedding fails on one without saying which."""
        tokens = batch.get("input_ids")
        if self.vocabulary is None or not isinstance(tokens, Tensor) or tokens.is_floating_point():
            return
        outside = (tokens < 0) | (tokens >= self.vocabulary)
        for row, sample_id, where in zip(tokens, ids, outside, strict=False) if outside.any() else ():
            strange = row[where]
            if strange.numel():
                raise UsageError(
                    f"data.source: input_ids of sample {sample_id} has the token id "
                    f"{int(strange.flatten()[0])}, and vocabulary is {self.vocabulary}; ids go from 0 to "
                    f"{self.vocabulary - 1}"
                )


def load_own(config: TrainConfig) -> JobData:
    """Call the function that ``data.source`` names, with ``data.options``.

    Args:
        config: the section data.

    Raises:
        UsageError: no such function, or it returns something else than it should.
        SplitError: a micro-batch whose parts do not have samples in their first dimension.
        JudgeError: importing or calling it failed.
    """
    data = config.data
    _refuse_files(config)
    function = find_target(data.source, what=_WHAT, key="data.source")
    if not callable(function):
        raise UsageError(f"data.source: {data.source} is a {type(function).__name__} and no function")
    check_options(function, data.options, what=f"data.options for {data.source}")
    parts = _parts(guarded(lambda: function(**data.options), f"{data.source}() failed"), data.source)
    _check(parts, data.source)
    train, held_out, rule = _sides(parts, config)
    first = guarded(lambda: train[0], f"{data.source}: reading sample 0 failed")
    collation = OwnCollation(
        collate=parts.get("collate"),
        padding_id=parts.get("padding_id", 0),
        first=first,
        vocabulary=parts.get("vocabulary"),
    )
    batch = guarded(lambda: collation([first], [0], 0), f"{data.source}: a micro-batch of sample 0 failed")
    _check_counts(parts["objective"], batch, data.source)
    if len(held_out):  # evaluated first when training begins, which may be long after this
        guarded(
            lambda: collation([held_out[0]], [0], 0),
            f"{data.source}: reading held-out sample 0 and collating it failed",
        )
    facts = {
        "name": data.source,
        "options": dict(data.options),
        "split_rule": rule,
        "train_samples": len(train),
        "held_out_samples": len(held_out),
    }
    return JobData(
        train=train,
        held_out=held_out,
        objective=parts["objective"],
        collate=_in_rows(parts, collation, data.source) if config.batch.rows == "packed" else collation,
        collate_padded=collation,
        vocabulary=parts.get("vocabulary"),
        num_labels=parts.get("num_labels"),
        padding_id=collation.padding_id,
        lengths=_by_sample(parts, "lengths", train),
        held_out_lengths=None if "held_out" in parts else _by_sample(parts, "lengths", held_out),
        items=_by_sample(parts, "items", train),
        length_of=_tokens_of,
        facts=facts,
    )


def _in_rows(parts: Mapping[str, Any], collation: OwnCollation, source: str) -> OwnRows:
    own_collate = collation.collate is not None
    return own_rows(parts["objective"], collation, collation.first, own_collate=own_collate, source=source)


def _refuse_files(config: TrainConfig) -> None:
    data = config.data
    for key, value, default in (
        ("files", data.files, []),
        ("held_out_files", data.held_out_files, []),
        ("tokenizer", data.tokenizer, "bytes"),
    ):
        if value != default:
            raise UsageError(
                f"data.{key} is {value!r}, and a function of your own, {data.source}, reads its data "
                f"itself; hand it on in data.options"
            )


def _parts(found: Any, source: str) -> dict[str, Any]:
    """``train``, ``objective`` and the parts that may stand beside them, by name."""
    if isinstance(found, tuple) and len(found) == 2:
        found = dict(zip(_NEEDED, found, strict=True))
    if not isinstance(found, Mapping):
        raise UsageError(
            f"data.source: {source} returned a {type(found).__name__}; it has to return (train, "
            f"objective), or a dict with these and any of {', '.join(_OPTIONAL)}"
        )
    missing = [key for key in _NEEDED if key not in found]
    unknown = [str(key) for key in found if key not in (*_NEEDED, *_OPTIONAL)]
    if missing or unknown:
        raise UsageError(
            f"data.source: {source} returned a dict without {missing} and with unknown {unknown}; its keys "
            f"are {', '.join(_NEEDED)} and, where wanted, {', '.join(_OPTIONAL)}"
        )
    return {key: value for key, value in found.items() if value is not None}


def _check(parts: Mapping[str, Any], source: str) -> None:
    for side in ("train", "held_out"):
        if side in parts and not all(hasattr(parts[side], name) for name in ("__len__", "__getitem__")):
            raise UsageError(
                f"data.source: {side} of {source} is a {type(parts[side]).__name__}; it has to be a "
                f"map-style data set, with a length and samples by their index, so that runs can resume"
            )
        if side in parts:
            guarded(partial(len, parts[side]), f"{source}: len({side}) failed")
    for key, least in (("vocabulary", 1), ("num_labels", 1), ("padding_id", 0)):
        value = parts.get(key, least)
        if type(value) is not int or value < least:
            raise UsageError(
                f"data.source: {key} of {source} is {value!r}; it has to be a whole number, {least} or more"
            )
    objective = parts["objective"]
    if not (callable(objective) and all(hasattr(objective, name) for name in ("count", "coefficients"))):
        raise UsageError(
            f"data.source: the objective of {source} is a {type(objective).__name__}; make one with "
            f"wholebatch.token_loss, next_token_loss or counted_loss"
        )
    if len(parts["train"]) == 0:
        raise UsageError(f"data.source: train of {source} has no samples")
    _check_by_sample(parts, source)


def _check_by_sample(parts: Mapping[str, Any], source: str) -> None:
    for key in _BY_SAMPLE:
        if key not in parts:
            continue
        numbers = guarded(partial(np.asarray, parts[key]), f"{source}: reading {key} failed")
        if numbers.dtype.kind not in "iu" or numbers.shape != (len(parts["train"]),):
            raise UsageError(
                f"data.source: {key} of {source} is an array of {numbers.dtype} of shape "
                f"{list(numbers.shape)}; it has to hold a whole number for each of the "
                f"{len(parts['train'])} samples of train"
            )
        if len(negative := np.flatnonzero(numbers < 0)):
            raise UsageError(
                f"data.source: {key} of {source} is {numbers[negative[0]]} for sample {negative[0]}; "
                f"none is below 0"
            )


def _by_sample(parts: Mapping[str, Any], key: str, side: Samples) -> NDArray[np.int64] | None:
    """These numbers of the samples of a side; None where the function gave none."""
    if key not in parts:
        return None
    numbers = np.asarray(parts[key]).astype(np.int64)
    # Some were held out of what the function gave.
    return numbers if side is parts["train"] else numbers[cast("Subset[Any]", side).indices]


def _tokens_of(sample: Any) -> int:
    """The tokens of a sample whose length nobody gave.

    Raises:
        UsageError: it has no "input_ids".
    """
    if isinstance(sample, Mapping) and hasattr(sample.get("input_ids"), "__len__"):
        return len(sample["input_ids"])
    raise UsageError(
        f"data.source: a sample is a {type(sample).__name__} without input_ids, so its tokens can't be "
        f"told, and batch.tokens_per_micro_batch needs them; return lengths beside train, or set "
        f"batch.micro_batch_samples"
    )


def _check_counts(objective: Any, batch: Batch, source: str) -> None:
    """Refuse several terms of which one does not say its items ahead: a job runs no pass to count them."""
    if len(objective.coefficients) == 1:
        return
    counts = guarded(lambda: objective.count(batch), f"{source}: counting the items of sample 0 failed")
    unknown = [repr(term) for term, items in counts.items() if items is None]
    if unknown:
        raise UsageError(
            f"data.source: the objective of {source} has {len(counts)} terms, and {', '.join(unknown)} "
            f"can't count its items ahead of the forward; give each of several terms a count, such as "
            f"counted_loss(loss, count=...)"
        )


def _sides(parts: Mapping[str, Any], config: TrainConfig) -> tuple[Samples, Samples, str]:
    train = parts["train"]
    if "held_out" in parts:
        return train, parts["held_out"], "held_out of the function"
    one_in = config.data.held_out_one_in
    out = [is_held_out(str(index), one_in) for index in range(len(train))]
    kept = [index for index, is_out in enumerate(out) if not is_out]
    if not kept:
        raise UsageError(
            f"all of {config.data.source}, {number_of(len(train), 'sample')}, is held out and none is left "
            f"to train on; return more, or held_out beside train"
        )
    others = [index for index, is_out in enumerate(out) if is_out]
    rule = f"samples whose index has a BLAKE2b hash that is 0 modulo {one_in}"
    return Subset(train, kept), Subset(train, others), rule


def _has_samples(value: Any) -> bool:
    return isinstance(value, list) or (isinstance(value, Tensor) and value.ndim > 0)
