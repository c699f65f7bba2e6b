"""Words that several faces share: numbers with their noun, a skip, an evaluation, settings by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wholebatch.record import Evaluation, UpdateRecord


def number_of(number: int, one: str, more: str | None = None) -> str:
    """Write ``1 update``, ``1,200 updates`` or, with ``more``, ``2 micro-batches``."""
    return f"{number:,} {one if number == 1 else more or one + 's'}"


def printable(text: object) -> str:
    """A name or a path without what a terminal would obey: ESC, say, becomes ``\\x1b``."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in str(text))


def skip_words(record: UpdateRecord) -> str:
    """Write a skipped update in one line."""
    return f"update {record.updates_attempted} was skipped: {record.reason}"


def evaluation_words(evaluation: Evaluation) -> str:
    """Write an evaluation in one line."""
    loss, updates = evaluation.loss_per_item, number_of(evaluation.updates_applied, "update")
    return (
        f"{evaluation.split.replace('_', ' ')} after {updates}: "
        f"loss per item {'not finite' if loss is None else f'{loss:.4f}'} "
        f"over {evaluation.items:,} items in {evaluation.samples:,} samples ({evaluation.seconds:.1f} s)"
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
