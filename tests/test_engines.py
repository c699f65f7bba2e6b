"""One table of all engines: dtypes x windows x optimizers, held against the big batch in float64.

Each engine runs its whole column in one launch; ``tests/peers/test_engines_of_peers.py`` has those of other
libraries. ``make engines`` writes what is found into docs/engines.md.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from engines.column import Cell, check_column, column
from engines.page import row, rows_of, table
from engines.work import CASES
from engines.wrapped import ENGINES
from ranks import run_ranks
from wholebatch.ranks.base import Traffic


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
def test_every_update_of_an_engine_is_that_of_the_big_batch(name: str) -> None:
    check_column(ENGINES[name], run_ranks(column, ENGINES[name].ranks, "engines.wrapped", name))


def test_the_page_has_every_engine() -> None:
    of_peers = {f"DeepSpeed, ZeRO {stage}" for stage in range(4)} | {
        "Megatron-Core",
        "Megatron-Core, overlap",
    }
    assert rows_of().keys() == ENGINES.keys() | of_peers


def cells() -> list[Cell]:
    """Of one rank, with the number of each as its error."""
    costs = Traffic(reductions=1, reduced_bytes=2048, gathered_bytes=0, held_bytes=1024)
    return [
        Cell(
            case=case,
            gradient_error=number / 4,
            parameter_error=0.5,
            norm_error=0.5,
            loss_error=0.5,
            own_error=1.0 + number,
            predicted=costs,
            counted=costs,
            exchanged_bytes=7,
            idle=False,
        )
        for number, case in enumerate(CASES)
    ]


def test_a_row_tells_the_worst_of_its_cells() -> None:
    told = row("DDP", ENGINES["DDP"], [cells()])
    assert "| 5.0 | 5.2 | 6.0 (25) | 1 | 2,048, 0, 7 | 1,024 |" in told
    assert table({"DDP": told}).count("\n") == 2


@pytest.mark.parametrize(
    "broken",
    [
        {"gradient_error": 9.0},
        {"parameter_error": 20.0},
        {"norm_error": 9.0},
        {"loss_error": 9.0},
        {"own_error": 0.1},
        {"counted": Traffic(reductions=1, reduced_bytes=2048, gathered_bytes=4, held_bytes=1024)},
        {"idle": True},
    ],
)
def test_one_wrong_number_in_a_column_is_found(broken: dict[str, object]) -> None:
    check_column(ENGINES["DDP"], [cells()])
    with pytest.raises(AssertionError):
        check_column(ENGINES["DDP"], [[*cells()[:-1], replace(cells()[-1], **broken)]])  # type: ignore[arg-type]
