"""Writes the table of docs/engines.md from what each engine did; ``make engines``."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "peers")]

from engines.column import Cell, column
from engines.work import DTYPES, PRICED
from engines.wrapped import ENGINES, Engine
from ranks import run_ranks

PAGE = Path(__file__).parents[2] / "docs" / "engines.md"
BEGIN, END = "<!-- written by make engines -->", "<!-- to here -->"
_COLUMNS = (
    "engine",
    "ranks",
    "who divides",
    "when it reduces",
    "float64",
    "float32",
    "bfloat16 (big batch)",
    "reductions",
    "bytes reduced, gathered, exchanged",
    "bytes held",
)


def row(name: str, engine: Engine, of_ranks: Sequence[Sequence[Cell]]) -> str:
    """One engine's line: its worst gradient error by dtype, over all ranks and cases, and its price."""
    found = [cell for cells in of_ranks for cell in cells]
    worst = []
    for dtype in DTYPES:
        errors = [(cell.gradient_error, cell.own_error) for cell in found if cell.case.dtype == dtype]
        own = f" ({_short(max(own for _, own in errors))})" if errors and dtype.itemsize == 2 else ""
        worst.append(f"{_short(max(error for error, _ in errors))}{own}" if errors else "-")
    priced = next(cell for cell in of_ranks[0] if cell.case == PRICED)
    price = priced.counted
    moved = price.reduced_bytes, price.gathered_bytes, priced.exchanged_bytes
    cells = [
        f"[{name}]({engine.page})",
        str(engine.ranks),
        engine.divides,
        engine.reduces,
        *worst,
        str(price.reductions),
        ", ".join(f"{number:,}" for number in moved),
        f"{price.held_bytes:,}",
    ]
    return f"| {' | '.join(cells)} |"


def _short(error: float) -> str:
    return f"{error:.2g}" if error >= 10 else f"{error:.1f}"


def table(rows: Mapping[str, str]) -> str:
    """The whole table."""
    return "\n".join([f"| {' | '.join(_COLUMNS)} |", "|" + "---|" * len(_COLUMNS), *rows.values()])


def rows_of(page: Path = PAGE) -> dict[str, str]:
    """The rows that the page has, by engine."""
    text = page.read_text()
    lines = text[text.index(BEGIN) : text.index(END)].splitlines()
    return {line.split("](")[0].removeprefix("| ["): line for line in lines if line.startswith("| [")}


def main() -> None:
    """Run all engines and write the page."""
    import engines_of_peers

    rows = {}
    for module, engines in (("engines.wrapped", ENGINES), ("engines_of_peers", engines_of_peers.ENGINES)):
        for name, engine in engines.items():
            rows[name] = row(name, engine, run_ranks(column, engine.ranks, module, name, timeout_s=300))
            print(rows[name])
    text = PAGE.read_text()
    before, after = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
    PAGE.write_text(f"{before}\n\n{table(rows)}\n\n{after}")


if __name__ == "__main__":
    main()
