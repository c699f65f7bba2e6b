"""What of a DeepSpeed configuration is refused, asked of an engine in name only; peers have real ones."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from wholebatch.errors import UnsupportedError
from wholebatch.ranks.deepspeed_config import check_config


def engine(**changed: Any) -> Any:
    """One that can be run exactly, but for what is changed."""
    right: dict[str, Any] = {
        "optimizer": SimpleNamespace(step=None),
        "basic_optimizer": object(),
        "gradient_accumulation_steps": lambda: 1,
        "gradient_predivide_factor": lambda: 1.0,
        "gradient_average": True,
        "enable_backward_allreduce": True,
        "_config": SimpleNamespace(sparse_gradients_enabled=False),
    }
    return SimpleNamespace(**(right | changed))


def says(value: Any) -> Callable[[], Any]:
    return lambda: value


class Muon:
    """By its name."""


def test_an_engine_that_can_be_run_exactly_is_taken() -> None:
    check_config(engine())
    none = SimpleNamespace(device=SimpleNamespace(value="none"))
    check_config(
        engine(
            zero_offload_optimizer=says(none), autotp_size=says(1), managed_gradient_accumulation=says(True)
        )
    )


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"optimizer": None}, "has no optimizer"),
        ({"optimizer": object()}, "has no optimizer"),
        ({"gradient_accumulation_steps": says(4)}, "gradient_accumulation_steps 4 and the window"),
        ({"managed_gradient_accumulation": says(False)}, '"managed_gradient_accumulation": false'),
        ({"gradient_predivide_factor": says(2.0)}, "gradient_predivide_factor 2, which ZeRO 3"),
        ({"gradient_average": False}, 'gradient_allreduce_op "sum"'),
        ({"pipeline_parallelism": True}, r"pipeline parallelism \(PipelineModule\)"),
        ({"has_moe_layers": True}, "mixture-of-experts"),
        ({"mpu": object()}, "an mpu"),
        ({"autotp_size": says(2)}, "tensor parallelism"),
        ({"sequence_parallel_size": 2}, "sequence parallelism"),
        ({"torch_autocast_enabled": says(True)}, "torch_autocast"),
        ({"zenflow": True}, "zenflow"),
        ({"zero_offload_optimizer": says(SimpleNamespace(device="cpu"))}, "optimizer or parameter offload"),
        ({"zero_offload_param": says(SimpleNamespace(device="nvme"))}, "optimizer or parameter offload"),
        ({"_config": SimpleNamespace(sparse_gradients_enabled=True)}, "sparse_gradients"),
        ({"zero_quantized_gradients": says(True)}, "zero_quantized_gradients"),
        ({"zero_hpz_partition_size": says(2)}, "zero_hpz_partition_size"),
        ({"is_deepcompile_enabled": says(True)}, "DeepCompile"),
        ({"random_ltd_enabled": says(True)}, "random layer token drop"),
        ({"basic_optimizer": Muon()}, "Muon"),
        ({"enable_backward_allreduce": False}, "an optimizer that reduces by itself"),
    ],
)
def test_what_nobody_vouches_for_is_refused(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        check_config(engine(**changed))
