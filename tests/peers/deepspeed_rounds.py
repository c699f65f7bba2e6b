"""Updates of a DeepSpeed engine under the window, each beside the float64 truth; runs inside a rank.

The truth has two halves. The gradient that the engine is about to step on, gathered by DeepSpeed's own
means, against that of the whole global batch in float64 at the very weights that the forwards used. And the
weights after its step against a torch optimizer in float64 that steps on that gradient.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import environments
from problems import VOCABULARY, Case, gradient_of_whole, loss_with
from wholebatch.window import UpdateWindow

CLIP = 0.05
MODES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "bf16, fp32 gradients": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 6, "hysteresis": 1}},
}
MODES["fp16, fp32 gradients"] = MODES["fp16"] | {"data_types": {"grad_accum_dtype": "fp32"}}
EPS = {"fp32": 2.0**-23, "bf16": 2.0**-7, "bf16, fp32 gradients": 2.0**-7, "fp16": 2.0**-10}
EPS["fp16, fp32 gradients"] = EPS["fp16"]
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
}
# For two ranks: the supervised positions of each sample, by rank and micro-batch.
SHAPES: dict[str, list[list[list[int]]]] = {
    "equal, full": [[[5, 2], [3, 4], [2, 2]], [[4, 1], [5, 5], [3, 2]]],
    "ragged, full": [[[5, 2], [3, 2], [0, 4]], [[4, 5], [0, 0], [5, 5]]],
    "equal, tail": [[[5, 3]], [[2, 4]]],
    "ragged, tail": [[[5, 2], [3]], [[4]]],
    "one rank has none": [[[5, 2], [3, 4]], []],
}


class Branching(nn.Module):
    """A language model whose second head only some micro-batches use."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 6)
        self.head = nn.Linear(6, VOCABULARY)
        self.seldom = nn.Linear(6, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids).cumsum(1)
        logits: Tensor = self.head(hidden)
        return logits + self.seldom(hidden) if int(ids.shape[0]) == 1 else logits


@cache
def deepspeed_here(rank: int, n: int) -> Any:
    """DeepSpeed from its own environment, which lies over that of the tests."""
    sys.path.insert(0, str(environments.folder_of("deepspeed")))
    wanted = environments.variables("deepspeed")
    os.environ |= {name: wanted[name] for name in ("PATH", "DS_ACCELERATOR", "TORCH_EXTENSIONS_DIR")}
    os.environ |= {"LOCAL_RANK": str(rank), "RANK": str(rank), "WORLD_SIZE": str(n)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    warnings.simplefilter("ignore")
    import deepspeed

    # its own collectives for a CPU, which its first start would compile; gloo's do as well here
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # it has fp16 for accelerators alone; the few operations here run on a CPU too
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    return deepspeed


def config_of(stage: int, mode: str = "fp32", clip: float | None = None, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": clip or 0.0,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 10000, **more.pop("zero", {})},
        "zero_allow_untested_optimizer": True,
        **MODES[mode],
        **more,
    }


def start(
    deepspeed: Any,
    config: dict[str, Any],
    *,
    optimizer: str = "SGD momentum",
    model: nn.Module | None = None,
    beside: Sequence[nn.Parameter] = (),
) -> Any:
    torch.manual_seed(0)
    model = Case(counts=[]).model().float() if model is None else model
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=OPTIMIZERS[optimizer]([*model.parameters(), *beside]), config=config
    )
    return engine


@contextmanager
def whole(deepspeed: Any, parameter: nn.Parameter) -> Iterator[Tensor]:
    if hasattr(parameter, "ds_id"):
        with deepspeed.zero.GatheredParameters([parameter]):
            yield parameter.detach().double()
    else:
        yield parameter.detach().double()


def weights(deepspeed: Any, engine: Any, *, master: bool = False) -> dict[str, Tensor]:
    """The model's weights in float64, as forwards use them, or those that the optimizer moves."""
    found = {}
    copies = iter([one for group in getattr(engine.optimizer, "fp32_groups", []) for one in group])
    for name, parameter in engine.module.named_parameters():
        with whole(deepspeed, parameter) as value:
            found[name] = value.clone()
        if master and hasattr(engine.optimizer, "fp32_groups"):  # fp16 or bf16 without ZeRO
            found[name] = next(copies).detach().double()
        elif master and engine.zero_optimization_stage() > 0:
            found[name] = deepspeed.utils.safe_get_full_fp32_param(parameter).double().reshape(value.shape)
    return found


def gradients(deepspeed: Any, engine: Any) -> dict[str, Tensor]:
    """What the engine is about to step on, whole, in float64, without its loss scale."""
    scale = float(engine.optimizer.loss_scale) if engine.fp16_enabled() else 1.0
    found = {}
    for name, parameter in engine.module.named_parameters():
        partitioned = engine.zero_optimization_stage() > 0
        got = deepspeed.utils.safe_get_full_grad(parameter) if partitioned else parameter.grad
        found[name] = got.detach().double().clone() / scale
    return found


class Truth:
    """One engine, its updates, and how far each was from what it should have been."""

    def __init__(
        self, deepspeed: Any, engine: Any, *, optimizer: str = "SGD momentum", clip: float | None = None
    ) -> None:
        self.deepspeed, self.engine, self.clip = deepspeed, engine, clip
        self._make = OPTIMIZERS[optimizer]
        self._shadow: dict[str, nn.Parameter] = {}
        self._optimizer: torch.optim.Optimizer | None = None

    def update(
        self, window: UpdateWindow, case: Case, rank: int, loss: Any = None, **named: Any
    ) -> dict[str, Any]:
        """Run one update of the window and measure it."""
        loss = loss or loss_with(case.objective())
        true = self._whole_batch(case)
        if self._optimizer is None:
            before = weights(self.deepspeed, self.engine, master=True)
            self._shadow = {name: nn.Parameter(value.clone()) for name, value in before.items()}
            self._optimizer = self._make(list(self._shadow.values()))
            if hasattr(self.engine.optimizer, "fp32_groups"):
                self._step_on_zeros(before)
        seen: dict[str, Tensor] = {}
        taken = self.engine._take_model_step

        def look(*given: Any) -> Any:
            seen.update(gradients(self.deepspeed, self.engine))
            return taken(*given)

        self.engine._take_model_step = look
        try:
            record = window.run(case.batches()[rank], loss, **named)
        finally:
            self.engine._take_model_step = taken
        norm = torch.stack([value.norm() for value in true.values()]).norm()
        found: dict[str, Any] = {"record": record, "norm": record.gradient_norm / float(norm) - 1.0}
        if record.outcome != "applied":
            return found
        apart = torch.stack([(seen[name] - true[name]).norm() for name in true]).norm()
        found["gradient"] = float(apart / norm)
        for name, parameter in self._shadow.items():
            parameter.grad = seen[name].reshape(parameter.shape)
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self._shadow.values(), self.clip)
        self._optimizer.step()
        now = weights(self.deepspeed, self.engine, master=True)
        found["weights"] = max(float((now[name] - self._shadow[name]).abs().max()) for name in now)
        return found

    def _step_on_zeros(self, before: dict[str, Tensor]) -> None:
        """As DeepSpeed does to make the state of an optimizer in half precision without ZeRO: Adam counts
        it, so that its corrections begin with the second step."""
        assert self._optimizer is not None
        for name, parameter in self._shadow.items():
            parameter.grad = torch.zeros_like(before[name])
        self._optimizer.step()
        with torch.no_grad():
            for name, parameter in self._shadow.items():
                parameter.copy_(before[name])

    def _whole_batch(self, case: Case) -> dict[str, Tensor]:
        """The gradient of the whole global batch's mean, in float64, at the weights of the forwards."""
        model = type(self.engine.module)()
        model.double().load_state_dict(weights(self.deepspeed, self.engine))
        return gradient_of_whole(model, case)


def case_of(shape: str, seed: int = 0) -> Case:
    return Case(counts=SHAPES[shape], seed=seed)
