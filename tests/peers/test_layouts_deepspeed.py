"""The run of ``tests/test_layouts.py`` under ZeRO 0 to 3, which compute and step in float32."""

from __future__ import annotations

import pytest

import environments
from deepspeed_rounds import config_of, deepspeed_here, weights
from layouts import CLIP, Found, alone, check_agreement, gpt, make_optimizer, trained
from ranks import run_ranks

pytestmark = [
    pytest.mark.peers,
    pytest.mark.slow,
    pytest.mark.skipif(not environments.is_ready("deepspeed"), reason="needs `make peers`"),
]
# Parameters lie within 1.5, where float32 rounds by 2^-23, and ten updates moved them by up to 0.1.
WITHIN = 2.0**-15


def under_zero(rank: int, n: int) -> list[Found]:
    """The run under each stage, one after another."""
    deepspeed, found = deepspeed_here(rank, n), []
    for stage in range(4):
        model = gpt().float()
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=make_optimizer(model), config=config_of(stage, clip=CLIP)
        )
        told = trained(engine, engine.optimizer, rank, n)
        found.append((weights(deepspeed, engine), told))
    return found


def test_ten_updates_are_the_same_under_each_stage() -> None:
    wanted = alone()
    for of_stage in zip(*run_ranks(under_zero, 2, timeout_s=150), strict=True):
        check_agreement(of_stage, wanted, within=WITHIN)
