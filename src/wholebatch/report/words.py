"""Words that several faces share: numbers with their noun, a skip, an evaluation, settings by name."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from typing import Any

from wholebatch.record import Evaluation, UpdateRecord


def number_of(number: float, one: str, more: str | None = None) -> str:
    """Write ``1 update``, ``1,200 updates`` or, with ``more``, ``2 micro-batches``."""
    return f"{number:,} {one if number == 1 else more or one + 's'}"


def printable(text: object) -> str:
    """A name or a path without what a terminal would obey: ESC, say, becomes ``\\x1b``."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in str(text))


def in_columns(text: str, columns: int) -> str:
    """Break lines that a terminal of so many columns can't hold; they go on under their last column.

    A line without columns goes on at the margin, and one that is set in by two more.

    Args:
        text: lines, whose columns are two blanks or more apart.
        columns: of the terminal.
    """
    return "\n".join(piece for line in text.split("\n") for piece in _broken(line, columns))


def _broken(line: str, columns: int) -> list[str]:
    if len(line) <= columns:
        return [line]
    gaps = list(re.finditer(r" {2,}(?=\S)", line))
    under = gaps[-1].end() if gaps else 0
    if len(gaps) == 1 and gaps[0].start() == 0:
        under += 2
    if under > columns // 2:  # too narrow to keep the column
        under = min(4, columns // 4)
    return textwrap.wrap(
        line, columns, subsequent_indent=" " * under, break_long_words=False, break_on_hyphens=False
    )


def skip_words(record: UpdateRecord) -> str:
    """Write a skipped update in one line."""
    return f"update {record.updates_attempted} was skipped: {record.reason}"


def evaluation_words(evaluation: Evaluation) -> str:
    """Write an evaluation in one line."""
    loss, updates = evaluation.loss_per_item, number_of(evaluation.updates_applied, "update")
    return (
        f"{evaluation.split.replace('_', ' ')} after {updates}: "
        f"loss per item {'not finite' if loss is None else f'{loss:.4f}'} "
        f"over {number_of(evaluation.items, 'item')} in {number_of(evaluation.samples, 'sample')} "
        f"({evaluation.seconds:.1f} s)"
    )


def flat(settings: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Settings by dotted name, ``optimizer.options.betas``, without the sections that hold them."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{before}{name}.")
        else:
            found[before + name] = value
    return found
