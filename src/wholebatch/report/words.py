"""Words that several faces share: numbers with their noun, and why an update was skipped."""

from __future__ import annotations

from wholebatch.record import UpdateRecord


def number_of(number: int, one: str, more: str | None = None) -> str:
    """Write ``1 update``, ``1,200 updates`` or, with ``more``, ``2 micro-batches``."""
    return f"{number:,} {one if number == 1 else more or one + 's'}"


def skip_words(record: UpdateRecord) -> str:
    """Write a skipped update in one line."""
    return f"update {record.updates_attempted} was skipped: {record.reason}"
