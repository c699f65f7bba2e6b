"""Updates of models under Megatron-Core's DDP, each beside the float64 truth; runs inside a rank.

Megatron asks CUDA for the current device where it makes its buffers. That one question is answered with
"cpu" here; nothing else of it is replaced.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import environments
from problems import VOCABULARY, Case, TinyLanguageModel, gradient_of_whole, watch_gradients
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


@cache
def megatron_here(*, tensor: int = 1, context: int = 1, pipeline: int = 1) -> Any:
    """``megatron.core`` from its own environment, over the ranks that are running."""
    sys.path.insert(0, str(environments.folder_of("megatron")))
    warnings.simplefilter("ignore")
    torch.cuda.current_device = lambda: torch.device("cpu")
    from megatron import core
    from megatron.core import distributed, parallel_state, tensor_parallel, transformer  # noqa: F401

    parallel_state.initialize_model_parallel(tensor, pipeline, context_parallel_size=context)
    return core


def config_of(core: Any, **more: Any) -> Any:
    return core.transformer.TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=2, use_cpu_initialization=True, **more
    )


def wrap(core: Any, module: nn.Module, mode: str = "plain", **more: Any) -> Any:
    wanted = {**MODES[mode], **more}
    per_token = wanted.pop("calculate_per_token_loss", False)
    named = wanted.pop("model", {})
    config = config_of(core, calculate_per_token_loss=per_token, **named)
    widest = next(module.parameters()).dtype != torch.float64
    ddp = core.distributed.DistributedDataParallelConfig(**{"grad_reduce_in_fp32": widest, **wanted})
    return core.distributed.DistributedDataParallel(config, ddp, module)


class Branching(TinyLanguageModel):
    """A language model whose second head only some micro-batches use: those of one sample."""

    def __init__(self, *, dtype: torch.dtype = torch.float64) -> None:
        super().__init__(dtype=dtype)
        self.seldom = nn.Linear(6, VOCABULARY, dtype=dtype)

    def forward(self, ids: Tensor) -> Any:
        hidden = self.embedding(ids).cumsum(1)
        scores = self.head(torch.tanh(self.hidden(hidden)))
        return scores + self.seldom(hidden) if len(ids) == 1 else scores


class OnCPU(TorchFunctionMode):
    """Answers "cpu" wherever a tensor is asked for on CUDA: for Megatron's own schedule, as an oracle."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


class Scheduled(TinyLanguageModel):
    """As Megatron's schedule wants a model."""

    model_type = None

    def set_input_tensor(self, _: Any) -> None:
        pass


def gradients_of_own_loop(core: Any, wrapped: Any, case: Case, rank: int) -> dict[str, Tensor]:
    """What Megatron's own schedule leaves in ``main_grad``, of one update."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    batches = case.batches()[rank]

    def forward(held: Any, model: Any) -> Any:
        batch = next(held)

        def loss(output: Tensor) -> Any:
            total, items = case.objective()(output, batch)
            return total, torch.as_tensor(int(items), dtype=torch.int), {"loss": total.detach()}

        return model(batch["input_ids"]), loss

    wrapped.zero_grad_buffer()
    wrapped.config.no_sync_func = wrapped.no_sync
    wrapped.config.finalize_model_grads_func = core.distributed.finalize_model_grads
    with OnCPU():
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(batches),
            model=wrapped,
            num_microbatches=len(batches),
            seq_length=5,
            micro_batch_size=2,
        )
    return {name: one.main_grad.detach().clone() for name, one in wrapped.module.named_parameters()}


class Cut(nn.Module):
    """A language model of which two layers are cut over tensor-parallel ranks."""

    def __init__(self, core: Any) -> None:
        super().__init__()
        config = config_of(core, params_dtype=torch.float64, tensor_model_parallel_size=2)
        parallel, named = core.tensor_parallel, {"config": config, "init_method": nn.init.xavier_normal_}
        self.embedding = nn.Embedding(VOCABULARY, 6, dtype=torch.float64)
        self.up = parallel.ColumnParallelLinear(6, 8, bias=True, gather_output=False, **named)
        self.down = parallel.RowParallelLinear(
            8, 6, bias=True, input_is_parallel=True, skip_bias_add=False, **named
        )
        self.head = nn.Linear(6, VOCABULARY, dtype=torch.float64)

    def forward(self, ids: Tensor) -> Tensor:
        hidden, _ = self.up(self.embedding(ids).cumsum(1))
        hidden, _ = self.down(torch.tanh(hidden))
        scores: Tensor = self.head(hidden)
        return scores


class Uncut(nn.Module):
    """The same in one piece."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 6, dtype=torch.float64)
        self.up = nn.Linear(6, 8, dtype=torch.float64)
        self.down = nn.Linear(8, 6, dtype=torch.float64)
        self.head = nn.Linear(6, VOCABULARY, dtype=torch.float64)

    def forward(self, ids: Tensor) -> Tensor:
        scores: Tensor = self.head(self.down(torch.tanh(self.up(self.embedding(ids).cumsum(1)))))
        return scores


def pieced_together(group: Any, mine: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a whole model from those of its tensor-parallel ranks."""
    parts: list[Any] = [None] * group.size()
    dist.all_gather_object(parts, mine, group=group)
    cut = {"up.weight": 0, "up.bias": 0, "down.weight": 1}
    return {
        name: torch.cat([part[name] for part in parts], cut[name]) if name in cut else parts[0][name]
        for name in mine
    }


class Pointwise(nn.Module):
    """A model of positions that do not look at each other, as context-parallel ranks can run it alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 6, dtype=torch.float64)
        self.head = nn.Linear(6, VOCABULARY, dtype=torch.float64)

    def forward(self, ids: Tensor) -> Tensor:
        scores: Tensor = self.head(torch.tanh(self.embedding(ids)))
        return scores


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
        model = type(self.model)(dtype=torch.float64)
        model.load_state_dict({key: value.detach().double() for key, value in at.items()})
        return gradient_of_whole(model, case)
