"""What of a DeepSpeed configuration the window can vouch for; the rest is refused before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from wholebatch.errors import UnsupportedError

# What is refused where it is on: what it is in words, and how to ask the engine. A method or an attribute
# that this version of DeepSpeed does not have is off.
_NOT_VOUCHED_FOR: tuple[tuple[str, Callable[[Any], Any]], ...] = (
    ("pipeline parallelism (PipelineModule)", lambda e: getattr(e, "pipeline_parallelism", False)),
    ("mixture-of-experts layers", lambda e: getattr(e, "has_moe_layers", False)),
    ("an mpu (model parallelism)", lambda e: getattr(e, "mpu", None) is not None),
    ("tensor parallelism (tensor_parallel.autotp_size)", lambda e: _asked(e, "autotp_size", 0) > 1),
    ("sequence parallelism", lambda e: getattr(e, "sequence_parallel_size", 1) > 1),
    ("torch_autocast in its configuration", lambda e: _asked(e, "torch_autocast_enabled", False)),
    ("zenflow", lambda e: bool(getattr(e, "zenflow", False))),
    ("optimizer or parameter offload", lambda e: _offloads(e)),
    ("sparse_gradients", lambda e: getattr(e._config, "sparse_gradients_enabled", False)),
    ("zero_quantized_gradients", lambda e: _asked(e, "zero_quantized_gradients", False)),
    ("zero_hpz_partition_size", lambda e: _asked(e, "zero_hpz_partition_size", 1) > 1),
    ("DeepCompile", lambda e: _asked(e, "is_deepcompile_enabled", False)),
    ("random layer token drop", lambda e: _asked(e, "random_ltd_enabled", False)),
    ("Muon, which turns the gradient before it is clipped", lambda e: "Muon" in _base_optimizer(e)),
    ("an optimizer that reduces by itself", lambda e: not e.enable_backward_allreduce),
)


def check_config(engine: Any) -> None:
    """Refuse an engine whose update can't be run exactly.

    Raises:
        UnsupportedError: with the setting, its value and what to write instead.
    """
    if engine.optimizer is None or not hasattr(engine.optimizer, "step"):
        raise UnsupportedError(
            "the DeepSpeed engine has no optimizer; give deepspeed.initialize one, or an optimizer section "
            "in its configuration"
        )
    accumulation = engine.gradient_accumulation_steps()
    if accumulation != 1:
        raise UnsupportedError(
            f"the DeepSpeed configuration has gradient_accumulation_steps {accumulation} and the window "
            f"accumulates itself: with both, DeepSpeed would divide every loss by {accumulation}. Write "
            f'"gradient_accumulation_steps": 1 and leave "train_batch_size" out'
        )
    if not getattr(engine, "managed_gradient_accumulation", lambda: True)():
        raise UnsupportedError(
            'the DeepSpeed configuration has "managed_gradient_accumulation": false, with which it reduces '
            "inside its step, after the window has to know the norm; leave it out"
        )
    predivide = engine.gradient_predivide_factor()
    if predivide != 1.0:
        raise UnsupportedError(
            f"the DeepSpeed configuration has gradient_predivide_factor {predivide:g}, which ZeRO 3 takes "
            f"in otherwise than the other stages; write 1.0 or leave it out"
        )
    if not engine.gradient_average:
        raise UnsupportedError(
            'the DeepSpeed configuration has gradient_allreduce_op "sum", which ZeRO 3 does not heed; the '
            "window divides, so leave it out"
        )
    for words, is_on in _NOT_VOUCHED_FOR:
        if is_on(engine):
            raise UnsupportedError(
                f"the DeepSpeed engine runs with {words}, with which the window was not shown to be exact; "
                f"turn it off"
            )


def _asked(engine: Any, name: str, default: Any) -> Any:
    method = getattr(engine, name, None)
    return default if method is None else method()


def _offloads(engine: Any) -> bool:
    for name in ("zero_offload_optimizer", "zero_offload_param"):
        config = _asked(engine, name, None)
        device = getattr(config, "device", None)
        if device is not None and getattr(device, "value", device) != "none":
            return True
    return False


def _base_optimizer(engine: Any) -> str:
    return type(getattr(engine, "basic_optimizer", None)).__name__
