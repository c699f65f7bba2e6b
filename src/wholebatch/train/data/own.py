"""Samples of the user's own: a function that gives a data set and an objective."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset, default_collate

from wholebatch.errors import UsageError
from wholebatch.split import num_samples
from wholebatch.targets import find_target, guarded
from wholebatch.train.data.pydoc import IGNORED_LABEL, is_held_out
from wholebatch.train.material import Batch, JobData, Samples
from wholebatch.train.settings import TrainConfig
from wholebatch.whereabouts import told

_NEEDED = ("train", "objective")
_OPTIONAL = ("held_out", "collate", "vocabulary", "num_labels", "padding_id")


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnCollation:
    """Makes micro-batches of the user's own samples.

    Args:
        collate: ``collate(samples) -> batch`` of the user's own, or None for the one below.
        padding_id: token id of padding.
        first: a sample, of which micro-batches without samples get their shape.
    """

    collate: Callable[[list[Any]], Any] | None
    padding_id: int
    first: Any

    def __call__(self, samples: Sequence[Any], ids: Sequence[int], epoch: int) -> Batch:  # noqa: ARG002
        """A micro-batch of the chosen samples.

        Without a collate of the user's own, one-dimensional entries of samples that are dicts are padded to
        the longest: ``labels`` with -100, ``input_ids`` with the padding id, all others with 0; an
        ``attention_mask`` is added beside ``input_ids`` where there is none. Everything else is stacked.

        Args:
            samples: chosen ones; none for a micro-batch without samples.
            ids: theirs.
            epoch: not looked at.

        Returns:
            Tensors by name, with ``sample_ids`` of shape (samples,).

        Raises:
            UsageError: samples of which no dict of tensors can be made; names them.

        Exactness: padding supervises nothing.
        """
        chosen = list(samples) or [self.first]
        collate = self.collate or (lambda listed: _stacked(listed, ids, self.padding_id))
        made = collate(chosen)
        if not isinstance(made, Mapping):
            raise UsageError(
                f"data.source: a micro-batch is a {type(made).__name__}, and has to be a dict of tensors; "
                f"let samples be dicts, or give a collate that returns one"
            )
        batch = dict(made)
        if not samples:
            batch = {name: value[:0] if _has_samples(value) else value for name, value in batch.items()}
        batch["sample_ids"] = torch.tensor(ids, dtype=torch.int64)
        return batch


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
    function = find_target(data.source, what="a function that returns a data set and its objective")
    if not callable(function):
        raise UsageError(f"data.source: {data.source} is a {type(function).__name__} and no function")
    parts = _parts(guarded(lambda: function(**data.options), f"{data.source}() failed"), data.source)
    _check(parts, data.source)
    train, held_out, rule = _sides(parts, config)
    first = guarded(lambda: train[0], f"{data.source}: reading sample 0 failed")
    collation = OwnCollation(
        collate=parts.get("collate"), padding_id=parts.get("padding_id", 0), first=first
    )
    batch = guarded(lambda: collation([first], [0], 0), f"{data.source}: a micro-batch of sample 0 failed")
    num_samples(batch)  # refuses tensors whose first dimension is not that of the samples
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
        collate=collation,
        vocabulary=parts.get("vocabulary"),
        num_labels=parts.get("num_labels"),
        padding_id=collation.padding_id,
        facts=facts,
    )


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
    objective = parts["objective"]
    if not (callable(objective) and all(hasattr(objective, name) for name in ("count", "coefficients"))):
        raise UsageError(
            f"data.source: the objective of {source} is a {type(objective).__name__}; make one with "
            f"wholebatch.token_loss, next_token_loss or counted_loss"
        )
    if len(parts["train"]) == 0:
        raise UsageError(f"data.source: train of {source} has no samples")


def _sides(parts: Mapping[str, Any], config: TrainConfig) -> tuple[Samples, Samples, str]:
    train = parts["train"]
    if "held_out" in parts:
        return train, parts["held_out"], "held_out of the function"
    one_in = config.data.held_out_one_in
    out = [is_held_out(str(index), one_in) for index in range(len(train))]
    kept = [index for index, is_out in enumerate(out) if not is_out]
    if not kept:
        raise UsageError(
            f"all {len(train)} samples of {config.data.source} are held out and none is left to train on; "
            f"return more, or held_out beside train"
        )
    others = [index for index, is_out in enumerate(out) if is_out]
    rule = f"samples whose index has a BLAKE2b hash that is 0 modulo {one_in}"
    return Subset(train, kept), Subset(train, others), rule


def _has_samples(value: Any) -> bool:
    return isinstance(value, list) or (isinstance(value, Tensor) and value.ndim > 0)


def _stacked(samples: list[Any], ids: Sequence[int], padding_id: int) -> Any:
    """The default collation."""
    first = samples[0]
    if not isinstance(first, Mapping):
        return default_collate(samples)
    for sample in samples:
        if not isinstance(sample, Mapping) or set(sample) != set(first):
            other = sorted(map(str, sample)) if isinstance(sample, Mapping) else type(sample).__name__
            raise UsageError(
                f"data.source: samples {list(ids)} have different keys, {sorted(map(str, first))} and "
                f"{other}; give all the same, or a collate"
            )
    batch: dict[str, Any] = {}
    for key in first:
        values = [_tensor(sample[key]) for sample in samples]
        if all(isinstance(value, Tensor) and value.ndim == 1 for value in values):
            filler = {"labels": IGNORED_LABEL, "input_ids": padding_id}.get(key, 0)
            batch[key] = torch.nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=filler)
        else:
            batch[key] = _collated(values, key, ids)
    inputs = batch.get("input_ids")
    if isinstance(inputs, Tensor) and inputs.ndim == 2 and "attention_mask" not in batch:
        lengths = torch.tensor([len(sample["input_ids"]) for sample in samples])
        batch["attention_mask"] = (torch.arange(inputs.shape[1]) < lengths[:, None]).long()
    return batch


def _tensor(value: Any) -> Any:
    """Lists of numbers as tensors, so that they are padded too."""
    if isinstance(value, list) and value and all(isinstance(part, int | float) for part in value):
        return torch.tensor(value)
    return torch.from_numpy(value) if type(value).__name__ == "ndarray" else value


def _collated(values: list[Any], key: str, ids: Sequence[int]) -> Any:
    try:
        return default_collate(values)
    except (RuntimeError, TypeError) as error:
        raise UsageError(
            f"data.source: {key!r} of samples {list(ids)} can't be stacked ({told(error)}); give them one "
            f"shape, or give a collate"
        ) from error
