"""The table of ``tests/test_engines.py`` for engines of other libraries."""

from __future__ import annotations

import pytest

import environments
from engines.column import check_column, column
from engines_of_peers import ENGINES
from ranks import run_ranks

pytestmark = [pytest.mark.peers, pytest.mark.slow]


@pytest.mark.parametrize("name", ENGINES)
def test_every_update_of_an_engine_is_that_of_the_big_batch(name: str) -> None:
    library = "deepspeed" if name.startswith("DeepSpeed") else "megatron"
    if not environments.is_ready(library):
        pytest.skip("needs `make peers`")
    engine = ENGINES[name]
    check_column(engine, run_ranks(column, engine.ranks, "engines_of_peers", name, timeout_s=150))
