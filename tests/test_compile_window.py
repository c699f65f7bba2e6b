"""Compiled models in the window: the same update, nothing compiled anew for its sake, and the way back."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from big_batch import Batch, big_batch
from ranks import run_ranks
from test_pipeline import batches as pipeline_batches
from test_pipeline import layers, pipelined
from wholebatch import UpdateWindow, token_loss
from wholebatch.errors import UnsupportedError

pytestmark = pytest.mark.slow

OBJECTIVE = token_loss()
# Each way of compiling, and by how many ranks it is run.
WAYS = [
    ("whole", 1),
    ("whole in DDP", 2),
    ("in place in DDP", 2),
    ("blocks in DDP", 2),
    ("blocks under fully_shard", 2),
    ("whole under fully_shard", 2),
    ("whole over tensor-parallel ranks", 2),
]


class Block(nn.Module):
    """A hidden layer that keeps a running mean of what passes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x + torch.tanh(self.inner(x))
        if self.training:
            self.mean.mul_(0.9).add_(hidden.detach().mean(0), alpha=0.1)
        return hidden


class Net(nn.Module):
    """Two blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.blocks(x))
        return logits


def net(dtype: torch.dtype = torch.float64) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def compiled(way: str, module: Net, backend: str = "aot_eager") -> nn.Module:
    """``module`` compiled and wrapped; a break of its graph is an error but at hooks of fully_shard."""
    how: dict[str, Any] = {"backend": backend, "fullgraph": way != "whole under fully_shard"}
    model: Any = module
    if way.endswith("tensor-parallel ranks"):
        columns = ColwiseParallel(output_layouts=Replicate())
        parallelize_module(module, init_device_mesh("cpu", (2,)), {"blocks.*.inner": columns})
    if way.startswith("whole"):
        model = torch.compile(module, **how)
    elif way.startswith("in place"):
        module.compile(**how)
    else:
        for block in module.blocks:
            block.compile(**how)
    if way.endswith("fully_shard"):
        for block in module.blocks:
            fully_shard(block)
        fully_shard(module)
    return DistributedDataParallel(model) if way.endswith("DDP") else model


def batches(start: int, number: int, dtype: torch.dtype = torch.float64) -> list[Batch]:
    """Micro-batches of 3 samples, some of which are not supervised."""
    made = []
    for index in range(start, start + number):
        generator = torch.Generator().manual_seed(index)
        labels = torch.randint(0, 4, (3,), generator=generator)
        labels[: index % 3] = -100
        made.append({"x": torch.randn(3, 6, generator=generator, dtype=dtype), "labels": labels})
    return made


def loss(model: nn.Module, batch: Batch) -> Any:
    return OBJECTIVE(model(batch["x"]), batch)


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def window_over(model: nn.Module) -> UpdateWindow:
    return UpdateWindow(model, adamw(model), OBJECTIVE, clip_grad_norm=0.1)


def distance(model: nn.Module, wanted: nn.Module) -> float:
    pairs = zip(model.parameters(), wanted.parameters(), strict=True)
    return max(
        float((getattr(mine, "full_tensor", lambda m=mine: m)() - theirs).abs().max().detach())
        for mine, theirs in pairs
    )


def fail_in_the_second(window: UpdateWindow, given: list[Batch]) -> None:
    with window.update(given) as update:
        for index, batch in enumerate(update):
            if index == 1:
                raise RuntimeError("not today")
            update.backward(loss(window.model, batch))


def quiet_compiler() -> None:
    """torch's compiler imports what torch deprecates, and asks inputs of a block for their gradients."""
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")


def updates(rank: int, ranks: int, way: str) -> list[Any]:
    """Two updates that compile, then one that fails and three more that may not compile anything."""
    quiet_compiler()
    module, wanted = net(), net()
    model = compiled(way, module)
    window, plain = window_over(model), adamw(wanted)
    reductions, replicas = [], 1 if "tensor-parallel" in way else ranks
    for update in range(5):
        if update == 2:
            torch.compiler.set_stance("fail_on_recompile")
            before = [buffer.clone() for buffer in module.buffers()]
            with pytest.raises(RuntimeError, match="not today"):
                fail_in_the_second(window, batches(900, 3))
            kept = all(map(torch.equal, before, module.buffers()))
        shares = [batches(100 * update + 10 * one, 3) for one in range(replicas)]
        reductions.append(window.run(shares[rank % replicas], loss).reductions)
        big_batch(wanted, plain, [batch for share in shares for batch in share], clip=0.1)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return [distance(module, wanted), reductions, kept, graphs, window.counters.updates_applied]


@pytest.mark.parametrize(("way", "ranks"), WAYS)
def test_the_update_is_that_of_the_big_batch_and_nothing_is_compiled_anew(way: str, ranks: int) -> None:
    for error, reductions, kept, graphs, applied in run_ranks(updates, ranks, way, timeout_s=120):
        assert error < 1e-13
        assert reductions == [int(ranks > 1 and "tensor-parallel" not in way)] * 5
        assert kept
        assert graphs >= 1  # a model that is not compiled would pass all else
        assert applied == 5


def inductor(_rank: int, _ranks: int) -> float:
    warnings.filterwarnings("ignore")
    module, wanted = net(torch.float32), net(torch.float64)
    window, plain = window_over(compiled("whole", module, "inductor")), adamw(wanted)
    window.run(batches(0, 3, torch.float32), loss)
    big_batch(wanted, plain, [{**b, "x": b["x"].double()} for b in batches(0, 3, torch.float32)], clip=0.1)
    return distance(module, wanted)


def test_kernels_of_inductor_give_the_same_update_within_float32() -> None:
    assert run_ranks(inductor, 1, timeout_s=180)[0] < 1e-5


def stages(rank: int, ranks: int) -> tuple[float, str]:
    """Two calls of a schedule through compiled stages; one that cuts backwards in two takes none."""
    quiet_compiler()

    def wrap(part: nn.Module) -> nn.Module:
        made: Any = torch.compile(part, backend="aot_eager", fullgraph=True)
        return made

    parts, wanted = layers(), nn.Sequential(*layers())
    model, own = pipelined(parts, "1F1B", rank, ranks, wrap=wrap, micro_batches_per_call=4)
    window, plain = window_over(model), adamw(wanted)
    window.run(pipeline_batches(0, 8))
    big_batch(wanted, plain, pipeline_batches(0, 8), clip=0.1)
    error = max(distance(part, wanted[parts.index(part)]) for part in own)
    split, _ = pipelined(layers(), "InterleavedZeroBubble", rank, ranks, wrap=wrap)
    with pytest.raises(UnsupportedError) as caught:
        window_over(split).run(pipeline_batches(0, 4))
    return error, str(caught.value)


def test_compiled_stages_of_a_pipeline() -> None:
    for error, message in run_ranks(stages, 2, timeout_s=120):
        assert error < 1e-14
        assert message.startswith("ScheduleInterleavedZeroBubble can't run 4 micro-batches through 4 st")
        assert "not supported with stage modules that have used torch.compile" in message
        assert "Give PipelinedModel a schedule that takes them" in message


def outside(_rank: int, _ranks: int) -> str:
    model = torch.compile(DistributedDataParallel(net()), backend="aot_eager")
    with pytest.raises(UnsupportedError) as caught:
        UpdateWindow(model, adamw(model), OBJECTIVE)
    return str(caught.value)


def test_compiling_the_wrapper_itself_is_refused() -> None:
    for message in run_ranks(outside, 2):
        assert "_orig_mod inside the model is a DistributedDataParallel" in message
        assert "compile or nest what is inside DistributedDataParallel" in message


class Broken(Net):
    """A forward that the compiler can't take in as a whole."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return super().forward(x)


def broken(_rank: int, _ranks: int) -> list[str]:
    """What the tests above would see of a mode that changes, and of a graph that breaks."""
    quiet_compiler()
    told = []
    for module in (net(), Broken().double()):
        window = window_over(compiled("in place", module))
        try:
            window.run(batches(0, 3), loss)
            torch.compiler.set_stance("fail_on_recompile")
            module.eval()
            window.run(batches(0, 3), loss)
            told.append("nothing seen")
        except Exception as error:
            told.append(str(error))
        finally:
            torch.compiler.set_stance("default")
    return told


def test_a_recompilation_and_a_broken_graph_would_show() -> None:
    ((mode, graph_break),) = run_ranks(broken, 1)
    assert "Detected recompile" in mode
    assert "torch._dynamo.graph_break()" in graph_break
