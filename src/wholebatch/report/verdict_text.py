"""A verdict for people: a headline, a table of the splits, what was found, what to do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from wholebatch.verify.words import counted_word, factor_text

# Blanks between columns, and what a name keeps however narrow the terminal is.
_GAP = 2
_NARROWEST = 12


def render(verdict: Mapping[str, Any], target: str, console: Console) -> None:
    """Print a verdict for people.

    Args:
        verdict: the keys of ``wholebatch verify --json``.
        target: what was judged.
        console: where to; lines are broken for terminals only.
    """

    def tell(text: str) -> None:
        console.print(text, soft_wrap=not console.is_terminal)

    tell(f"[bold]{escape(target)}[/]: {_headline(verdict)}")
    items = ", ".join(
        counted_word(number, f"item of {term}", f"items of {term}")
        for term, number in verdict["num_items"].items()
    )
    tell(
        f"whole batch: {counted_word(verdict['num_samples'], 'sample')}, {escape(items)}; "
        f"{counted_word(verdict['ranks'], 'rank')}; judged in {verdict['judged_in']}"
    )
    console.print(_splits_table(verdict["splits"], console.width))
    for line in _lines(verdict):
        tell(escape(line))


def _headline(verdict: Mapping[str, Any]) -> str:
    if verdict["equal"]:
        return "[green]equal[/]: the split update is the big batch's update"
    factor = verdict["factor"]
    times = "" if factor is None else f", the gradient is {factor_text(factor)} times the big batch's"
    return f"[red]not equal[/]: {verdict['cause']}{times}"


def _splits_table(splits: list[Mapping[str, Any]], width: int) -> Table:
    """One line a split, without a break in any cell at a width of 80 and more."""
    cells = [
        (
            _sizes(split["micro_batch_samples"]),
            "equal" if split["equal"] else "not equal",
            _number((split["worst"] or {}).get("error")),
            _number((split["worst"] or {}).get("bound")),
            "" if split["factor"] is None else factor_text(split["factor"]),
        )
        for split in splits
    ]
    headings = ("split (samples)", "verdict", "error", "bound", "factor")
    shown = [any(column) for column in zip(*cells, strict=True)]
    wide = [
        max(map(len, (heading, *column)), default=0)
        for heading, column in zip(headings, zip(*cells, strict=True), strict=True)
    ]
    left = width - sum(_GAP + one for one, is_shown in zip(wide, shown, strict=True) if is_shown)
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0))
    table.add_column(headings[0], no_wrap=True, min_width=wide[0])
    table.add_column(headings[1], no_wrap=True, min_width=wide[1])
    table.add_column("worst", no_wrap=True)
    for heading, is_shown, size in zip(headings[2:], shown[2:], wide[2:], strict=True):
        if is_shown:
            table.add_column(heading, no_wrap=True, justify="right", min_width=size)
    for split, (sizes, equal, *numbers) in zip(splits, cells, strict=True):
        numbers = [number for number, is_shown in zip(numbers, shown[2:], strict=True) if is_shown]
        table.add_row(sizes, equal, escape(_worst(split, max(left, _NARROWEST))), *numbers)
    return table


def _worst(split: Mapping[str, Any], width: int) -> str:
    worst = split["worst"]
    if worst is None:
        return "refused, see below"
    quantity = f"{worst['quantity']} "
    return quantity + shortened(worst["parameter"], max(width - len(quantity), _NARROWEST))


def shortened(name: str, width: int) -> str:
    """The name, its middle left out where it is longer than ``width`` characters."""
    if len(name) <= width:
        return name
    kept = max(width - 3, 2)
    return f"{name[: kept // 2]}...{name[len(name) - (kept - kept // 2) :]}"


def _sizes(sizes: list[int]) -> str:
    """``2+4``; ``16 x 1`` for many alike; many others with their middle left out and their number."""
    if len(sizes) > 8 and len(set(sizes)) == 1:
        return f"{len(sizes)} x {sizes[0]}"
    text = "+".join(map(str, sizes))
    if len(text) <= 20:
        return text
    return f"{'+'.join(map(str, sizes[:3]))}+...+{sizes[-1]} ({len(sizes)})"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}" if value else "0"


def _lines(verdict: Mapping[str, Any]) -> Iterator[str]:
    for split in verdict["splits"]:
        if split["refused"]:
            yield f"on {_sizes(split['micro_batch_samples'])}: {split['refused']}"
    rounding = verdict["rounding"]
    if rounding is not None:
        worst = rounding["worst"]
        yield (
            f"rounding in {rounding['dtype']} over {_sizes(rounding['micro_batch_samples'])}: "
            f"{'within' if rounding['within'] else 'beyond'} what is allowed; {worst['parameter']} is "
            f"{_number(worst['error'])} from the float64 truth, allowed {_number(worst['bound'])}, the "
            f"whole batch itself {_number(rounding['whole_error'])}"
        )
    if verdict["equal_when_replayed"] is not None:
        same = "equals" if verdict["equal_when_replayed"] else "does not equal"
        yield f"with the same random numbers the window {same} the plain sum of its micro-batches"
    if verdict["also"]:
        yield f"also seen: {', '.join(verdict['also'])}"
    if verdict["ruled_out"]:
        yield f"ruled out: {'; '.join(verdict['ruled_out'])}"
    yield from (f"note: {note}" for note in verdict["notes"])
    if not verdict["equal"]:  # equal is said in the first line
        yield verdict["advice"]
