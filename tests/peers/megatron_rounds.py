"""Updates of models under Megatron-Core's DDP, each beside the float64 truth; runs inside a rank.

Megatron asks CUDA for the current device where it makes its buffers. That one question is answered with
"cpu" here; nothing else of it is replaced.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import environments
from problems import Case, watch_gradients
from wholebatch.window import UpdateWindow

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
}
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}
EPS = {"fp64": 2.0**-50, "fp32": 2.0**-23, "bf16": 2.0**-8}
# How Megatron reduces: of DistributedDataParallelConfig, and of the model's own configuration.
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "overlap": {"overlap_grad_reduce": True, "bucket_size": 20},
    "distributed optimizer": {"use_distributed_optimizer": True},
    "overlap, distributed optimizer": {
        "overlap_grad_reduce": True,
        "use_distributed_optimizer": True,
        "bucket_size": 20,
    },
    "average in collective": {"average_in_collective": True},
    "per token": {"calculate_per_token_loss": True},
}
# For two ranks: the supervised positions of each sample, by rank and micro-batch.
SHAPES: dict[str, list[list[list[int]]]] = {
    "equal, full": [[[5, 2], [3, 4], [2, 2]], [[4, 1], [5, 5], [3, 2]]],
    "ragged, full": [[[5, 2], [3, 2], [0, 4]], [[4, 5], [0, 0], [5, 5]]],
    "equal, tail": [[[5, 3]], [[2, 4]]],
    "ragged, tail": [[[5, 2], [3]], [[4]]],
    "one rank has none": [[[5, 2], [3, 4]], []],
    "many": [[[5, 2]] * 6, [[1, 3]] * 5],
}


def megatron_here(*, tensor: int = 1, context: int = 1, pipeline: int = 1) -> Any:
    """``megatron.core`` from its own environment, over the ranks that are running."""
    sys.path.insert(0, str(environments.folder_of("megatron")))
    warnings.simplefilter("ignore")
    torch.cuda.current_device = lambda: torch.device("cpu")
    from megatron import core
    from megatron.core import distributed, parallel_state, tensor_parallel, transformer  # noqa: F401

    parallel_state.initialize_model_parallel(tensor, pipeline, context_parallel_size=context)
    return core


def wrap(core: Any, module: nn.Module, mode: str = "plain", **more: Any) -> Any:
    wanted = {**MODES[mode], **more}
    per_token = wanted.pop("calculate_per_token_loss", False)
    named = wanted.pop("model", {})
    config = core.transformer.TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=1,
        use_cpu_initialization=True,
        calculate_per_token_loss=per_token,
        **named,
    )
    widest = next(module.parameters()).dtype != torch.float64
    ddp = core.distributed.DistributedDataParallelConfig(**{"grad_reduce_in_fp32": widest, **wanted})
    return core.distributed.DistributedDataParallel(config, ddp, module)


def case_of(shape: str, seed: int = 0) -> Case:
    return Case(counts=SHAPES[shape], seed=seed)


class Truth:
    """One model, its updates, and how far each was from what it should have been."""

    def __init__(self, wrapped: Any, optimizer: torch.optim.Optimizer, name: str = "SGD momentum") -> None:
        self.model = wrapped.module
        named = dict(self.model.named_parameters())
        self.seen = watch_gradients(optimizer, named)
        self.shadow = {key: nn.Parameter(one.detach().clone()) for key, one in named.items()}
        self.optimizer = OPTIMIZERS[name](list(self.shadow.values()))

    def update(self, window: UpdateWindow, case: Case, rank: int, loss: Any) -> dict[str, Any]:
        """Run one update of the window and measure it.

        In float64 the shadow steps on the true gradient all along, else on the one that was seen.
        """
        wide = next(self.model.parameters()).dtype == torch.float64
        true = self.whole_batch(case, self.shadow if wide else dict(self.model.named_parameters()))
        record = window.run(case.batches()[rank], loss)
        norm = torch.stack([value.norm() for value in true.values()]).norm()
        found = {"record": record, "norm": (record.gradient_norm or 0.0) / float(norm) - 1.0}
        if record.outcome != "applied":
            return found
        apart = torch.stack([(self.seen[key].double() - true[key]).norm() for key in true]).norm()
        found["gradient"] = float(apart / norm)
        for key, parameter in self.shadow.items():
            parameter.grad = true[key] if wide else self.seen[key]
        self.optimizer.step()
        moved = dict(self.model.named_parameters())
        found["weights"] = max(
            float((moved[key] - self.shadow[key]).detach().abs().max()) for key in self.shadow
        )
        return found

    def whole_batch(self, case: Case, at: dict[str, nn.Parameter]) -> dict[str, Tensor]:
        """The gradient of the whole global batch's mean, in float64."""
        model = case.model()
        model.load_state_dict({key: value.detach().double() for key, value in at.items()})
        batch = case.whole()
        total, items = case.objective()(model(batch["input_ids"]), batch)
        (total / items).backward()
        return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def means_of_micro_batches(case: Case, model: nn.Module) -> Tensor:
    """The mean over all micro-batches of the mean over the items of each, as Megatron's schedule has it."""
    held: Sequence[Any] = [batch for of_rank in case.batches() for batch in of_rank]
    means = []
    for batch in held:
        total, items = case.objective()(model(batch["input_ids"]), batch)
        means.append(total / max(1, int(items)))
    return torch.stack(means).mean()
