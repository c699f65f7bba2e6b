"""What the sections data and objective of the settings determine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wholebatch.errors import UsageError
from wholebatch.losses import next_token_loss, token_loss
from wholebatch.objective import SummedLoss
from wholebatch.report.words import number_of
from wholebatch.train.data.collation import Collation
from wholebatch.train.data.labels import as_classes, class_names
from wholebatch.train.data.masks import Masks, make_masks
from wholebatch.train.data.own import load_own
from wholebatch.train.data.rows import (
    Form,
    Row,
    expand,
    is_held_out,
    jsonl_rows,
    of_one_form,
    pydoc_rows,
    text_rows,
)
from wholebatch.train.data.samples import Reading, check_cap, read_rows
from wholebatch.train.data.store import TokenSample, TokenSamples
from wholebatch.train.data.tokens import Tokenizer, bytes_tokenizer, folder_tokenizer
from wholebatch.train.material import JobData
from wholebatch.train.settings import TrainConfig


def load_data(config: TrainConfig) -> JobData:
    """Read the samples, and hold some of them out.

    Args:
        config: its sections data and objective, and the seed of the run.

    Returns:
        Samples, objective and collation; the same on every rank and every machine.

    Raises:
        UsageError: a setting or a row that the user can change; names the key, or file and line.
        JudgeError: a function of the user's own failed.
    """
    source = config.data.source
    if source not in ("pydoc", "text", "jsonl"):
        if ":" not in source:
            raise UsageError(
                f"data.source is {source!r}; it is one of pydoc, text and jsonl, or names a function of "
                f"your own as module:function or file.py:function"
            )
        return load_own(config)
    _check_source(config)
    train_rows, held_out_rows = _rows(config)
    first = next(train_rows, None)
    if first is None:
        raise UsageError(f"data.files has no rows: {_few(config.data.files)} hold nothing but blank lines")
    tokenizer = _tokenizer(config, first.form)
    check_cap(tokenizer, config.data.max_tokens_per_sample, form=first.form)
    reading = Reading()
    choose = _choice(config)
    for rows, is_other in ((chain([first], train_rows), choose), (held_out_rows, lambda _: True)):
        read_rows(rows, reading, tokenizer=tokenizer, config=config, is_held_out=is_other)
    if not len(reading.train.samples):
        raise UsageError(
            f"all of the data, {number_of(reading.rows, 'row')}, is held out and none is left to train on; "
            f"add rows, or raise data.held_out_one_in = {config.data.held_out_one_in}"
        )
    return _job_data(config, reading, tokenizer, first.form)


def _check_source(config: TrainConfig) -> None:
    """Refuse settings that would be passed over."""
    data = config.data
    if data.options:
        raise UsageError(
            f"data.options are for a function of your own; data.source is {data.source!r} and takes none"
        )
    if data.source == "pydoc":
        for key, files in (("data.files", data.files), ("data.held_out_files", data.held_out_files)):
            if files:
                raise UsageError(
                    f'{key} is {_few(files)}, and data.source = "pydoc" reads no files; set data.source to '
                    f'"text" or "jsonl"'
                )
    if data.source != "jsonl" and config.objective.kind == "label":
        raise UsageError(
            f'objective.kind = "label" needs rows with text and label, and data.source is {data.source!r}; '
            f'set it to "jsonl"'
        )


def _rows(config: TrainConfig) -> tuple[Iterator[Row], Iterator[Row]]:
    """The rows of files, and those of held-out files; all of one form."""
    data = config.data
    if data.source == "pydoc":
        return pydoc_rows(), iter(())
    files = expand(data.files, "data.files")
    held_out_files = expand(data.held_out_files, "data.held_out_files") if data.held_out_files else []
    known = {Path(name).resolve() for name in files}
    for name in held_out_files:
        if Path(name).resolve() in known:
            raise UsageError(
                f"{name} is in data.files and in data.held_out_files; what is trained on can't be held out"
            )
    if data.source == "text":
        return text_rows(files), text_rows(held_out_files)
    labelled = config.objective.kind == "label"
    # One stream, so that the rows of both are seen to have one form.
    rows = of_one_form(jsonl_rows([*files, *held_out_files], labelled=labelled), _fit(config))
    return _parted(rows, set(held_out_files))


def _parted(rows: Iterator[Row], held_out_files: set[str]) -> tuple[Iterator[Row], Iterator[Row]]:
    """The rows up to the first of a held-out file, and after that the others; to be read in this order."""
    kept: list[Row] = []

    def train() -> Iterator[Row]:
        for row in rows:
            if row.file in held_out_files:
                kept.append(row)
                return
            yield row

    def held_out() -> Iterator[Row]:
        yield from kept
        yield from rows

    return train(), held_out()


def _fit(config: TrainConfig) -> Callable[[Row], str | None]:
    def wrong(row: Row) -> str | None:
        if config.objective.kind == "masked_token" and row.form == "completion":
            return (
                'objective.kind = "masked_token" needs rows with "text", and this one has "prompt" and '
                '"completion"; set it to "next_token"'
            )
        return None

    return wrong


def _tokenizer(config: TrainConfig, form: Form) -> Tokenizer:
    masked = config.objective.kind == "masked_token"
    if config.data.tokenizer == "bytes":
        return bytes_tokenizer(completions=form == "completion", masked=masked)
    found = folder_tokenizer(config.data.tokenizer)
    if masked and found.mask_id is None:
        raise UsageError(
            f'objective.kind = "masked_token" needs a mask token, and the tokenizer in '
            f"{config.data.tokenizer} has none; take the tokenizer of a masked language model"
        )
    return found


def _choice(config: TrainConfig) -> Callable[[Row], bool]:
    """Whether a row of the training files is held out: by its text or prompt alone."""
    if config.data.held_out_files:
        return lambda _: False
    one_in = config.data.held_out_one_in
    return lambda row: is_held_out(row.text, one_in)


def _job_data(config: TrainConfig, reading: Reading, tokenizer: Tokenizer, form: Form) -> JobData:
    kind = config.objective.kind
    train, held_out = reading.train.samples.finished(), reading.held_out.samples.finished()
    names: list[Any] = []
    if kind == "label":
        names = class_names(reading.train.labels, reading.held_out.labels)
        train = replace(train, labels=as_classes(train.labels, reading.train.labels, names))
        held_out = replace(held_out, labels=as_classes(held_out.labels, reading.held_out.labels, names))
    masks = None
    if kind == "masked_token" and tokenizer.mask_id is not None:
        share, seed = config.objective.masked_share, config.run.seed
        masks = make_masks(tokenizer, mask_id=tokenizer.mask_id, share=share, seed=seed)
    collation = Collation(
        padding_id=tokenizer.padding_id,
        masks_padding=tokenizer.masks_padding or kind != "next_token",
        masks=masks,
        labelled=kind == "label",
        rows=config.batch.rows,
    )
    items = _items_of_samples(train, kind, masks)
    if not items.any():
        raise UsageError(
            f"none of the {len(train)} samples to train on has an item to learn, with objective.kind = "
            f"{kind!r}: their texts are too short; give longer ones"
        )
    facts = _facts(config, reading, tokenizer, form) | {
        "train_samples": len(train),
        "held_out_samples": len(held_out),
        "train_tokens": len(train.tokens),
        "held_out_tokens": len(held_out.tokens),
        "train_items": int(items.sum()),
        "train_samples_without_items": int((items == 0).sum()),
        "held_out_items": int(_items_of_samples(held_out, kind, masks).sum()),
    }
    return JobData(
        train=train,
        held_out=held_out,
        objective=_objective(kind),
        collate=collation,
        collate_padded=replace(collation, rows="padded"),
        vocabulary=tokenizer.vocabulary,
        num_labels=len(names) if kind == "label" else None,
        padding_id=tokenizer.padding_id,
        lengths=train.lengths,
        held_out_lengths=held_out.lengths,
        items=items,
        length_of=_tokens_of,
        facts=facts | ({"labels": names} if kind == "label" else {}),
    )


def _objective(kind: str) -> SummedLoss:
    if kind == "next_token":
        return next_token_loss()
    if kind == "label":  # a label for each sample, and a forward over all of its tokens
        return replace(token_loss(), forward_positions=lambda batch: int(batch["input_ids"].numel()))
    return token_loss()


def _facts(config: TrainConfig, reading: Reading, tokenizer: Tokenizer, form: Form) -> dict[str, Any]:
    """What the run header says about the rows."""
    data = config.data
    paragraphs = data.source in ("pydoc", "text")
    whose = "paragraphs" if paragraphs else "rows by prompt" if form == "completion" else "rows by text"
    rule = f"{whose} whose BLAKE2b hash is 0 modulo {data.held_out_one_in}"
    if data.held_out_files:
        rule = f"the rows of {_few(data.held_out_files)}"
    return {
        "name": "pydoc_data.topics" if data.source == "pydoc" else f"{data.source}: {_few(data.files)}",
        "paragraphs" if paragraphs else "rows": reading.rows,
        "row_form": form,
        "longer_rows": reading.longer_rows,
        "too_long": data.too_long,
        "split_rule": rule,
        "tokenizer": tokenizer.name,
        "vocabulary": tokenizer.vocabulary,
    }


def _items_of_samples(samples: TokenSamples, kind: str, masks: Masks | None) -> NDArray[np.int64]:
    """What the objective counts in each sample, in one epoch."""
    if kind == "label":
        return np.ones(len(samples), dtype=np.int64)
    if masks is not None:
        candidates = np.diff(np.concatenate([[0], np.cumsum(masks.may_hide[samples.tokens])])[samples.ends])
        return masks.num_hidden(candidates)
    return np.asarray(samples.lengths - np.maximum(samples.learned_from, 1), dtype=np.int64)


def _tokens_of(sample: TokenSample) -> int:
    return len(sample.tokens)


def _few(files: Sequence[str]) -> str:
    """Some names, and how many more there are."""
    shown = ", ".join(files[:3])
    return shown if len(files) <= 3 else f"{shown} and {len(files) - 3} more"
