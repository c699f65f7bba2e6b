"""Curves of a run in characters: its loss and its unsupervised share by update, two runs on one axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from wholebatch.record import UpdateRecord, unsupervised_share

BARS = "▁▂▃▄▅▆▇█"
# Of the first curve, of the second, and of a place where both are.
MARKS = ("o", "x", "*")
Point = tuple[float, float]


def loss_curve(records: Sequence[UpdateRecord], *, width: int, height: int) -> list[str]:
    """The loss per item over the updates, drawn with block characters.

    Where there are more updates than columns, a column is ``sum of losses / sum of items`` of its
    updates. Updates without a loss leave a gap.

    Args:
        records: the updates, in order.
        width: columns of the drawing, labels left out.
        height: lines of the drawing.

    Returns:
        The lines, with the highest and the lowest value at the left and the updates below; empty
        when fewer than two columns have a loss.
    """
    columns = _by_column(records, width, loss_of)
    values = [value for value in columns if value is not None]
    if len(values) < 2:
        return []
    low, high = min(values), max(values)
    labels = [_label(high), *[""] * (height - 2), _label(low)]
    label_width = max(map(len, labels))
    lines = [
        f"{label:>{label_width}} │{''.join(_bar(v, low, high, height, height - 1 - row) for v in columns)}"
        for row, label in enumerate(labels)
    ]
    first, last = f"update {records[0].updates_attempted:,}", f"{records[-1].updates_attempted:,}"
    gap = max(1 + len(last), len(columns) - len(first))
    return [*lines, f"{'':>{label_width}}  {first}{last:>{gap}}"]


def unsupervised_line(records: Sequence[UpdateRecord], *, width: int) -> tuple[str, str] | None:
    """The unsupervised share over the updates, in one line; ``1 - items / positions`` of each column.

    Args:
        records: the updates, in order.
        width: the most columns.

    Returns:
        What the line goes from and to, in words, and the line; None where no share is known.
    """
    columns = _by_column(records, width, unsupervised_of)
    known = [share for share in columns if share is not None]
    if not known:
        return None
    low, high = min(known), max(known)
    words = f"{low:.1%}" if f"{low:.1%}" == f"{high:.1%}" else f"{low:.1%} to {high:.1%}"
    return words, sparkline(columns)


def sparkline(values: Sequence[float | None]) -> str:
    """Values as one line of block characters, from the lowest to the highest of them."""
    known = [value for value in values if value is not None]
    if not known:
        return ""
    return "".join(_bar(value, min(known), max(known), 1, 0) for value in values)


def loss_of(group: Sequence[UpdateRecord]) -> float | None:
    """``sum of losses / sum of items`` of the updates that have a loss; None where none has."""
    known = [(r.loss_per_item, r.items) for r in group if r.loss_per_item is not None]
    items = sum(n for _, n in known)
    # Divided first: a loss near the largest float is shown too.
    return sum(loss * (n / items) for loss, n in known) if items else None


def unsupervised_of(group: Sequence[UpdateRecord]) -> float | None:
    """The unsupervised share of some updates together; None where that of one is not known."""
    if not all(r.positions for r in group if r.items):
        return None
    return unsupervised_share(sum(r.items for r in group), sum(r.positions for r in group))


def points_of(
    records: Sequence[UpdateRecord], axis_values: Sequence[float], *, end: float, columns: int
) -> list[Point]:
    """The losses of a run by columns of an axis from 0 to ``end``.

    Args:
        records: the updates, in order.
        axis_values: of each update, where on the axis it ended.
        end: of the axis.
        columns: how many columns it has.

    Returns:
        Of every column in which an update with a loss ended: where the last of its updates ended, and
        ``sum of losses / sum of items`` of all of them.
    """
    groups: dict[int, list[int]] = {}
    for index, value in enumerate(axis_values):
        groups.setdefault(column_of(value, end, columns), []).append(index)
    losses = {column: loss_of([records[i] for i in group]) for column, group in groups.items()}
    return [(axis_values[groups[column][-1]], loss) for column, loss in losses.items() if loss is not None]


def two_curves(
    first: Sequence[Point], second: Sequence[Point], *, end: float, columns: int, height: int
) -> list[str]:
    """Two curves on one axis and one scale, drawn with ``MARKS``.

    Args:
        first, second: (place on the axis, loss per item).
        end: of the axis, which begins at 0.
        columns: of the drawing, labels left out.
        height: lines of the drawing.

    Returns:
        The lines, with the highest and the lowest value at the left; empty where there is no point.
    """
    losses = [loss for _, loss in (*first, *second)]
    if not losses:
        return []
    low, high = min(losses), max(losses)
    grid = [[" "] * columns for _ in range(height)]
    for points, mark in zip((first, second), MARKS, strict=False):
        for value, loss in points:
            row = round((1.0 - _share(loss, low, high)) * (height - 1))
            column = column_of(value, end, columns)
            taken = grid[row][column]
            grid[row][column] = mark if taken in (" ", mark) else MARKS[2]
    labels = [_label(high), *[""] * (height - 2), _label(low)]
    label_width = max(map(len, labels))
    lines = [
        f"{label:>{label_width}} │{''.join(cells).rstrip()}"
        for label, cells in zip(labels, grid, strict=True)
    ]
    return [*lines, f"{'':>{label_width}} └{'─' * columns}"]


def column_of(value: float, end: float, columns: int) -> int:
    """The column, from 0, that holds a place on an axis from 0 to ``end``; its last holds the end."""
    return min(columns - 1, int(value / end * columns)) if end > 0 else 0


def _by_column(
    records: Sequence[UpdateRecord],
    width: int,
    value_of: Callable[[Sequence[UpdateRecord]], float | None],
) -> list[float | None]:
    """A value of each of at most ``width`` groups of neighbouring updates."""
    number = min(width, len(records))
    bounds = [column * len(records) // number for column in range(number + 1)] if number else []
    return [value_of(records[begin:end]) for begin, end in pairwise(bounds)]


def _share(value: float, low: float, high: float) -> float:
    """How far a value is from ``low`` to ``high``; in halves, so that their distance is a float."""
    return (value / 2 - low / 2) / (high / 2 - low / 2) if high > low else 0.0


def _label(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 1e5 else f"{value:.3e}"


def _bar(value: float | None, low: float, high: float, height: int, row: int) -> str:
    """One character: what a bar from ``low`` up to ``value`` fills of this row, 0 at the bottom."""
    if value is None:
        return " "
    share = _share(value, low, high)
    eighths = 1 + round(share * (8 * height - 1)) - 8 * row
    return " " if eighths <= 0 else BARS[min(eighths, 8) - 1]
