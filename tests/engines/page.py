"""Writes the table of docs/engines.md from what each engine did; ``make engines``."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from engines.column import Cell, column
from engines.work import CASES
from engines.wrapped import ENGINES
from ranks import run_ranks

PAGE = Path(__file__).parents[2] / "docs" / "engines.md"
BEGIN, END = "<!-- written by make engines -->", "<!-- to here -->"
_DTYPES = (torch.float64, torch.float32, torch.bfloat16)
_COLUMNS = (
    "engine",
    "ranks",
    "who divides",
    "when it reduces",
    *(str(dtype).removeprefix("torch.") for dtype in _DTYPES),
    "reductions",
    "bytes reduced, gathered, held",
)


def row(name: str, of_ranks: Sequence[Sequence[Cell]]) -> str:
    """One engine's line: its worst gradient error by dtype, over all ranks and cases, and its price."""
    engine = ENGINES[name]
    worst = [
        max(
            cell.gradient_error
            for cells in of_ranks
            for case, cell in zip(CASES, cells, strict=True)
            if case.dtype == dtype
        )
        for dtype in _DTYPES
    ]
    full = next(
        cell
        for case, cell in zip(CASES, of_ranks[0], strict=True)
        if case.dtype == torch.float32 and not (case.tail or case.ragged)
    )
    price = full.predicted
    cells = [
        f"[{name}]({engine.page})",
        str(engine.ranks),
        engine.divides,
        engine.reduces,
        *(f"{error:.2g}" if error >= 10 else f"{error:.1f}" for error in worst),
        str(full.reductions),
        f"{price.reduced_bytes:,}, {price.gathered_bytes:,}, {price.held_bytes:,}",
    ]
    return f"| {' | '.join(cells)} |"


def table(found: Mapping[str, Sequence[Sequence[Cell]]]) -> str:
    """The whole table."""
    lines = [f"| {' | '.join(_COLUMNS)} |", "|" + "---|" * len(_COLUMNS)]
    return "\n".join([*lines, *(row(name, of_ranks) for name, of_ranks in found.items())])


def main() -> None:
    """Run all engines and write the page."""
    found = {name: run_ranks(column, engine.ranks, name) for name, engine in ENGINES.items()}
    text = PAGE.read_text()
    before, after = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
    PAGE.write_text(f"{before}\n\n{table(found)}\n\n{after}")


if __name__ == "__main__":
    main()
