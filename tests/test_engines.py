"""One table: engines x {float64, float32, bfloat16} x {equal, ragged} x {full, tail} x {AdamW, SGD}.

Each engine runs its whole column in one launch; gradients and parameters are gathered and held against the
big batch in float64. ``make engines`` writes what is found into docs/engines.md.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engines.column import Cell, column
from engines.page import BEGIN, END, row, table
from engines.work import CASES
from engines.wrapped import ENGINES
from ranks import run_ranks

PAGE = Path(__file__).parents[1] / "docs" / "engines.md"
# What the forward and backward of four layers may lose, in units of the dtype's rounding. AdamW divides by
# the size of a gradient, so in bfloat16 a small one that was rounded moves its parameter by a whole rate.
GRADIENT = 8.0
PARAMETER = {torch.float64: 4.0, torch.float32: 4.0, torch.bfloat16: 16.0}


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
def test_every_update_of_an_engine_is_that_of_the_big_batch(name: str) -> None:
    for of_rank in run_ranks(column, ENGINES[name].ranks, name):
        for case, cell in zip(CASES, of_rank, strict=True):
            assert cell.gradient_error < GRADIENT, case
            assert cell.parameter_error < PARAMETER[case.dtype], case
            assert max(cell.norm_error, cell.loss_error) < GRADIENT, case  # a common factor hides in a clip
            assert cell.reductions == cell.predicted.reductions, case
            if name.startswith("FSDP2"):
                assert cell.reduced_bytes == cell.predicted.reduced_bytes, case
                assert cell.gathered_bytes == cell.predicted.gathered_bytes, case


def test_the_page_has_every_engine() -> None:
    text = PAGE.read_text()
    lines = text[text.index(BEGIN) : text.index(END)].splitlines()
    found = [line.split("|")[1].strip() for line in lines if line.startswith("| ")]
    assert found == ["engine", *(f"[{name}]({engine.page})" for name, engine in ENGINES.items())]


def test_a_row_tells_the_worst_of_its_cells() -> None:
    from wholebatch.ranks.base import Traffic

    cells = [
        Cell(
            gradient_error=float(number),
            parameter_error=0.5,
            norm_error=0.5,
            loss_error=0.5,
            reductions=1,
            items=5,
            predicted=Traffic(reductions=1, reduced_bytes=2048, gathered_bytes=0, held_bytes=1024),
            reduced_bytes=0,
            gathered_bytes=0,
        )
        for number in range(len(CASES))
    ]
    told = row("DDP", [cells])
    assert "| 7.0 | 15 | 23 |" in told
    assert table({"DDP": [cells]}).count("\n") == 2
