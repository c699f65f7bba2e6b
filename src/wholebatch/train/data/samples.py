"""Rows to samples: tokens with their marks, none longer than the cap, on the side where they belong."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from wholebatch.errors import UsageError
from wholebatch.train.data.labels import SeenLabels, first_sight_number
from wholebatch.train.data.rows import Form, Row
from wholebatch.train.data.store import Growing
from wholebatch.train.data.tokens import Tokenizer
from wholebatch.train.settings import TrainConfig

# Rows that are tokenised together: a Hugging Face tokenizer is several times faster so.
_BLOCK_ROWS = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """The samples of one side of the split while they are read.

    Args:
        samples: so far; a label in them is its number in ``labels``.
        labels: those seen so far.
    """

    samples: Growing = field(default_factory=Growing)
    labels: SeenLabels = field(default_factory=dict)


@dataclass(kw_only=True, slots=True)
class Reading:
    """What became of the rows.

    Args:
        train: samples to train on.
        held_out: samples to evaluate on.
        rows: read so far.
        longer_rows: of these, longer than the cap: cut or without their end.
    """

    train: Side = field(default_factory=Side)
    held_out: Side = field(default_factory=Side)
    rows: int = 0
    longer_rows: int = 0


def read_rows(
    rows: Iterable[Row],
    reading: Reading,
    *,
    tokenizer: Tokenizer,
    config: TrainConfig,
    is_held_out: Callable[[Row], bool],
) -> None:
    """Add the samples of the rows to a reading.

    Args:
        rows: of one form.
        reading: grows.
        tokenizer: for their texts.
        config: the cap, and what becomes of longer rows.
        is_held_out: on which side a row belongs.

    Raises:
        UsageError: a row without a token, or one longer than the cap that may not be cut; names it.
    """
    iterator = iter(rows)
    while block := list(islice(iterator, _BLOCK_ROWS)):
        texts = _encoded(block, lambda row: row.text, tokenizer)
        # All rows have one form: none has a completion, or all have.
        completions = _encoded(
            [row for row in block if row.completion], lambda row: row.completion, tokenizer
        )
        for number, (row, tokens) in enumerate(zip(block, texts, strict=True)):
            side = reading.held_out if is_held_out(row) else reading.train
            if row.form == "completion":
                longer = _add_completion(row, tokens, completions[number], side, tokenizer, config)
            elif config.objective.kind == "next_token":
                longer = _add_text(row, tokens, side, tokenizer, config)
            else:
                longer = _add_whole(row, tokens, side, tokenizer, config)
            reading.rows += 1
            reading.longer_rows += longer


def _encoded(
    rows: Sequence[Row], text_of: Callable[[Row], str], tokenizer: Tokenizer
) -> Sequence[Sequence[int]]:
    """The tokens of a text of each row; where the tokenizer fails, the first row where it does is named."""
    try:
        return tokenizer.encode([text_of(row) for row in rows])
    except Exception as error:  # a tokenizer's own errors are of no common class
        for row in rows if len(rows) > 1 else ():
            _encoded([row], text_of, tokenizer)
        raise UsageError(
            f"{rows[0].place}: the tokenizer {tokenizer.name} fails on this text ({error}); leave the row "
            f"out, or take a tokenizer that knows every text"
        ) from error


def check_cap(tokenizer: Tokenizer, cap: int, *, form: Form) -> None:
    """Refuse a cap under which the marks around rows of this form leave no room.

    Raises:
        UsageError: with the room that is needed.
    """
    end = tokenizer.completion_end if form == "completion" else tokenizer.end
    marks = len(tokenizer.begin) + len(end)
    if cap < marks + 1:
        raise UsageError(
            f"data.max_tokens_per_sample is {cap}; the begin and end marks of the tokenizer "
            f"{tokenizer.name} take {marks}, and a token beside them needs {marks + 1} or more"
        )


def _add_text(
    row: Row, tokens: Sequence[int], side: Side, tokenizer: Tokenizer, config: TrainConfig
) -> bool:
    """Samples of which every token but the first is learned; the end mark is where the text ends."""
    content = [*_some(tokens, row), *tokenizer.end] if tokenizer.end else _some(tokens, row)
    room = config.data.max_tokens_per_sample - len(tokenizer.begin)
    longer = len(content) > room
    if longer:
        _may_be_longer(row, len(content) + len(tokenizer.begin), config, may_cut=True)
    last = room if longer and config.data.too_long == "truncate" else len(content)
    for start in range(0, last, room):
        side.samples.add(tokenizer.begin, content[start : start + room])
    return longer


def _add_whole(
    row: Row, tokens: Sequence[int], side: Side, tokenizer: Tokenizer, config: TrainConfig
) -> bool:
    """One sample with both marks, for a model that sees all of it; with its label where it has one."""
    room = config.data.max_tokens_per_sample - len(tokenizer.begin) - len(tokenizer.end)
    longer = len(_some(tokens, row)) > room
    if longer:
        total = len(tokens) + len(tokenizer.begin) + len(tokenizer.end)
        _may_be_longer(row, total, config, may_cut=False)
    label = -1 if row.label is None else first_sight_number(row.label, row.place, side.labels)
    side.samples.add(tokenizer.begin, tokens[:room], tokenizer.end, label=label)
    return longer


def _add_completion(
    row: Row,
    prompt: Sequence[int],
    completion: Sequence[int],
    side: Side,
    tokenizer: Tokenizer,
    config: TrainConfig,
) -> bool:
    """One sample of which the completion and its end mark are learned.

    Prompt and completion become tokens apart from each other: that is how a model meets a prompt, and
    a token across the border would have to be learned in half.
    """
    cap = config.data.max_tokens_per_sample
    context = len(tokenizer.begin) + len(prompt)
    learned = [*_some(completion, row), *tokenizer.completion_end]
    longer = context + len(learned) > cap
    if longer:
        _may_be_longer(row, context + len(learned), config, may_cut=False)
        if context >= cap:
            raise UsageError(
                f"{row.place}: the prompt alone has {context} tokens, and "
                f"data.max_tokens_per_sample = {cap} leaves none of the completion to learn; raise it, or "
                f"leave the row out"
            )
    side.samples.add(tokenizer.begin, prompt, learned[: cap - context], learned_from=context)
    return longer


def _some(tokens: Sequence[int], row: Row) -> Sequence[int]:
    if not tokens:
        raise UsageError(f"{row.place}: the tokenizer makes no token of this text; leave the row out")
    return tokens


def _may_be_longer(row: Row, length: int, config: TrainConfig, *, may_cut: bool) -> None:
    """Refuse a row that is longer than the cap and may not be made shorter."""
    rule = config.data.too_long
    if rule == "truncate" or (rule == "cut" and may_cut):
        return
    why = 'data.too_long is "refuse"'
    if rule == "cut":
        what = "a prompt with its completion" if row.form == "completion" else "a sample to be seen whole"
        why = f'data.too_long = "cut" can\'t cut {what}'
    raise UsageError(
        f"{row.place}: {length} tokens, more than data.max_tokens_per_sample = "
        f'{config.data.max_tokens_per_sample}, and {why}; set data.too_long = "truncate" to drop the end '
        f"of such rows, or raise the cap"
    )
