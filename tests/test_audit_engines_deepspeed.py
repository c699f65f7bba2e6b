"""Where DeepSpeed delivers gradients and what its optimizers read. Runs where DeepSpeed is installed."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ranks import run_ranks
from test_audit_engines import A, gathered, make_batches, make_model, watching, whole_of
from wholebatch.audit.watch.engines import Piece, data_parallel_place, engine_of, watched_parameters
from wholebatch.audit.watch.engines_deepspeed import update_method, was_applied

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"),
]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def start(rank: int, n: int, stage: int, dtype: str, clip: float, two_groups: bool) -> tuple[Any, Any]:
    """An engine over the tiny model; the first import may build an operation, which takes a minute."""
    os.environ |= {
        "DS_ACCELERATOR": "cpu",
        "LOCAL_RANK": str(rank),
        "RANK": str(rank),
        "WORLD_SIZE": str(n),
    }
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    warnings.simplefilter("ignore")
    import deepspeed

    model = make_model()
    layers = [model[0], nn.ModuleList([model[2], model[4]])]
    groups = [{"params": list(layer.parameters())} for layer in layers]
    optimizer = torch.optim.AdamW(groups if two_groups else model.parameters(), lr=0.1)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": A,
        "gradient_clipping": clip,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if dtype == "bf16":
        config["bf16"] = {"enabled": True}
    if dtype == "fp16":
        # DeepSpeed has it for GPUs alone; the few operations here run on a CPU too
        deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
        config["fp16"] = {"enabled": True, "loss_scale": 64.0}
    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine, optimizer


def means(parameters: list[Tensor], sums: dict[int, Tensor], n: int) -> list[Tensor]:
    """Mean over replicas of what was delivered; DeepSpeed divides the loss by A before."""
    return [sum(gathered(sums[id(one)].reshape(-1), n)) / n for one in parameters]


def read_all(engine: Any, parameters: list[Tensor], n: int) -> list[Tensor | None]:
    """What this moment shows of each whole gradient, put together from all ranks."""
    found: list[Tensor | None] = []
    for one in parameters:
        pieces = engine.pieces(one)
        if pieces is None and one.grad is not None:
            flat = one.grad.flatten()
            pieces = [Piece(tensor=flat, shape=tuple(one.shape), start=0, copy=dist.get_rank())]
        parts = gathered([] if pieces is None else list(pieces), n)
        found.append(whole_of(parts).reshape(-1) if any(parts) else None)
    return found


def distance(read: list[Tensor | None], expected: list[Tensor]) -> float:
    assert all(one is not None for one in read), "a parameter of which nothing was read"
    return max(float((a - b).norm() / b.norm()) for a, b in zip(read, expected, strict=True))


@contextlib.contextmanager
def updating(model: Any, called: Callable[[], None]) -> Iterator[None]:
    """Call a function as each update begins, by the method that the audit wraps."""
    kind, name = update_method()
    original = getattr(kind, name)

    def wrapped(self: Any, *given: Any, **named: Any) -> Any:
        assert self is model
        called()
        return original(self, *given, **named)

    setattr(kind, name, wrapped)
    try:
        yield
    finally:
        setattr(kind, name, original)


def train(
    rank: int, n: int, stage: int, dtype: str, clip: float, two_groups: bool, watched: bool
) -> dict[str, Any]:
    model, optimizer = start(rank, n, stage, dtype, clip, two_groups)
    engine = engine_of(model)
    assert engine is not None
    found: dict[str, Any] = {"held": [], "distances": [], "applied": [], "name": engine.name}
    parameters = watched_parameters(optimizer)
    found["own"] = {id(p) for p in parameters} == {id(p) for p in model.module.parameters()}
    found["place"] = data_parallel_place([model], [optimizer])
    sums: dict[int, Tensor] = {}

    def read() -> None:
        if watched:
            found["distances"].append(distance(read_all(engine, parameters, n), means(parameters, sums, n)))

    with updating(model, read):
        for _ in range(2):
            sums.clear()
            for batch in make_batches(rank):
                loss = model(batch.to(DTYPES[dtype])).float().square().mean()
                found["held"].append(engine.holds_reduction())
                with watching(engine, sums, []) if watched else contextlib.nullcontext():
                    model.backward(loss)
                model.step()
            found["applied"].append(was_applied(model))
    found |= {"unseen": engine.unseen(), "scale": engine.loss_scale(), "values": list(values(model))}
    return found


def twice(rank: int, n: int, *case: Any) -> dict[str, Any]:
    """Watched and not; the parameters must come out the same, bit for bit."""
    found, bare = train(rank, n, *case, True), train(rank, n, *case, False)
    found["same"] = all(torch.equal(a, b) for a, b in zip(found["values"], bare["values"], strict=True))
    return found


def values(model: Any) -> Iterator[Tensor]:
    """This rank's part of each parameter, without what pads it, which is never set."""
    for one in model.module.parameters():
        if hasattr(one, "ds_tensor"):
            left = one.ds_numel - dist.get_rank() * one.ds_tensor.ds_numel
            yield one.ds_tensor.detach()[: max(0, left)].clone()
        else:
            yield one.detach().clone()


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_each_stage_is_read_as_its_update_begins(stage: int, dtype: str) -> None:
    bound = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 3e-3}[dtype]
    for rank, found in enumerate(run_ranks(twice, 2, stage, dtype, 0.05, False, timeout_s=200)):
        assert found["name"] == "DeepSpeedEngine"
        assert found["own"]
        assert found["place"] == (rank, 2)
        assert len(found["distances"]) == 2  # updates
        assert max(found["distances"]) < bound
        assert found["held"] == [stage < 2, stage < 2, False] * 2
        assert found["applied"] == [True, True]
        assert found["scale"] == (64.0 if dtype == "fp16" else 1.0)
        assert found["same"], "watching changed the result"


@pytest.mark.parametrize("stage", [1, 3])
def test_two_groups_are_one_update(stage: int) -> None:
    for found in run_ranks(twice, 2, stage, "fp32", 0.0, True, timeout_s=200):
        assert len(found["distances"]) == 2
        assert max(found["distances"]) < 1e-5
        assert found["same"]
