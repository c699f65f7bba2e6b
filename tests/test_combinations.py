"""Engines over one another, and beside loss parallelism, loss scaling and steps that torch can't make."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from big_batch import Batch
from ranks import run_ranks
from wholebatch import UpdateWindow, counted_loss, token_loss, weighted_terms
from wholebatch.errors import ObjectiveError, UnsupportedError, WholebatchError

pytestmark = pytest.mark.slow

VOCABULARY, WIDTH = 12, 8
WEIGHTS = torch.linspace(0.5, 2.0, VOCABULARY, dtype=torch.float64)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Linear(2 * WIDTH, WIDTH),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return added


class Model(nn.Module):
    """Of tokens, each by itself, so that sequences can be cut anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.block = nn.Embedding(VOCABULARY, WIDTH), Block()
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.norm(self.block(self.embedding(tokens))))
        return logits


def model_of_tokens() -> Model:
    torch.manual_seed(0)
    return Model().double()


def batches(start: int, number: int) -> list[Batch]:
    """Ragged micro-batches whose sequences can be cut in four; a third of the labels is ignored."""
    made = []
    for index in range(start, start + number):
        generator = torch.Generator().manual_seed(index)
        shape = 1 + index % 3, 4 + 4 * (index % 2)
        labels = torch.randint(VOCABULARY, shape, generator=generator)
        labels[torch.rand(shape, generator=generator) < 0.3] = -100
        made.append({"x": torch.randint(VOCABULARY, shape, generator=generator), "labels": labels})
    return made


# In parts of matrices alone; and with sequences in parts between them, and classes in parts at the end.
MATRICES: dict[str, Any] = {"block.up": ColwiseParallel(), "block.down": RowwiseParallel()}
SEQUENCES: dict[str, Any] = {
    "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "block.norm": SequenceParallel(),
    "block.up": ColwiseParallel(input_layouts=Shard(1)),
    "block.down": RowwiseParallel(output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
}


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05, **options)


def loss_of(objective: Any) -> Any:
    return lambda model, batch: objective(model(batch["x"]), batch)


def distance(model: nn.Module, wanted: nn.Module) -> float:
    pairs = zip(model.parameters(), wanted.parameters(), strict=True)
    return max(
        float(((p.full_tensor() if isinstance(p, DTensor) else p) - q).detach().abs().max())
        for p, q in pairs
    )


def plain_update(model: nn.Module, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> float:
    optimizer.zero_grad()
    loss.backward()
    norm = float(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
    optimizer.step()
    return norm


def mean_of_items(model: nn.Module, given: Sequence[Batch], weights: torch.Tensor | None) -> torch.Tensor:
    logits = torch.cat([model(batch["x"]).flatten(0, 1) for batch in given])
    return F.cross_entropy(logits, torch.cat([batch["labels"].flatten() for batch in given]), weights)


def mean_of_means(model: nn.Module, given: Sequence[Batch]) -> torch.Tensor:
    return torch.stack([mean_of_items(model, [batch], None) for batch in given]).mean()


def squares(logits: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, int]:
    """A second term, in parts: of logits that are cut, a sum that is still to be added up."""
    return logits.square().sum(), batch["labels"].numel()


def two_terms() -> Any:
    second = counted_loss(squares, count=lambda batch: batch["labels"].numel())
    return weighted_terms({"tokens": (token_loss(), 1.0), "squares": (second, 0.1)})


def mean_of_two_terms(model: nn.Module, given: Sequence[Batch]) -> torch.Tensor:
    second = torch.stack([squares(model(batch["x"]), batch)[0] for batch in given]).sum()
    positions = sum(batch["labels"].numel() for batch in given)
    return mean_of_items(model, given, None) + 0.1 * second / positions


# Classes in parts over two ranks --------------------------------------------------


CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "items": (token_loss, lambda m, b: mean_of_items(m, b, None), {}),
    "weights": (
        lambda: token_loss(class_weights=WEIGHTS),
        lambda m, b: mean_of_items(m, b, WEIGHTS),
        {},
    ),
    "means": (token_loss, mean_of_means, {"weighting": "micro_batch_means"}),
    "terms": (two_terms, mean_of_two_terms, {}),
}


def classes_in_parts(_rank: int, ranks: int) -> dict[str, Any]:
    mesh, found = init_device_mesh("cpu", (ranks,)), {}
    for name, (make, whole_loss, options) in CASES.items():
        model, wanted = parallelize_module(model_of_tokens(), mesh, SEQUENCES), model_of_tokens()
        window = UpdateWindow(model, adamw(model), make(), clip_grad_norm=0.5, **options)
        plain, norms = adamw(wanted), []
        for update in range(2):
            with loss_parallel():
                record = window.run(batches(10 * update, 3), loss_of(window._parts.objective))
            norm = plain_update(wanted, plain, whole_loss(wanted, batches(10 * update, 3)))
            norms.append(abs(record.gradient_norm / norm - 1))
        found[name] = max(distance(model, wanted), *norms)
    model = parallelize_module(model_of_tokens(), mesh, SEQUENCES)
    found["refused"] = []
    for objective in (token_loss(label_smoothing=0.1), token_loss()):
        window = UpdateWindow(model, adamw(model), objective)
        with pytest.raises(ObjectiveError) as caught:
            window.run(batches(0, 1), loss_of(objective))
        found["refused"].append(str(caught.value))
    return found


def test_classes_in_parts_make_the_update_of_the_big_batch() -> None:
    for found in run_ranks(classes_in_parts, 2, timeout_s=150):
        smoothing, outside = found.pop("refused")
        assert max(found.values()) < 1e-14, found
        assert "token_loss(label_smoothing=0.1) needs the logits of all classes" in smoothing
        assert "run the whole update inside `with loss_parallel():`, its backward too" in outside


# Several cuts of one model over four ranks --------------------------------------------------


def cut_three_ways(_rank: int, _ranks: int) -> dict[str, float]:
    """Data or context parallel, sharded, over tensor parallel with sequences and classes in parts."""
    warnings.filterwarnings("ignore", message="FSDP2-wrapped")
    mesh, found = init_device_mesh("cpu", (2, 2), mesh_dim_names=("other", "tensor")), {}
    place = mesh.get_local_rank("other")
    for other in ("data", "context"):
        for reduce in ("per_update", "per_micro_batch"):
            model, wanted = model_of_tokens(), model_of_tokens()
            parallelize_module(model, mesh["tensor"], SEQUENCES)
            for part in (model.block, model):
                fully_shard(part, mesh=mesh["other"])
            objective = token_loss(class_weights=WEIGHTS)
            window = UpdateWindow(
                model,
                adamw(model),
                objective,
                clip_grad_norm=0.5,
                reduce=reduce,
                context_parallel=mesh["other"] if other == "context" else None,
            )
            plain, errors = adamw(wanted), []
            for update in range(2):
                shares = [batches(100 * update, 2), batches(100 * update + 10, 3)]
                mine = shares[place]
                if other == "context":
                    shares = shares[1:]
                    mine = [{k: v.chunk(2, dim=1)[place] for k, v in b.items()} for b in shares[0]]
                with loss_parallel():
                    record = window.run(mine, loss_of(objective))
                given = [batch for share in shares for batch in share]
                norm = plain_update(wanted, plain, mean_of_items(wanted, given, WEIGHTS))
                errors.append(abs(record.gradient_norm / norm - 1))
                assert record.samples == sum(len(batch["x"]) for batch in given)
            found[f"{other}, {reduce}"] = max(distance(model, wanted), *errors)
    return found


def test_a_model_that_is_cut_three_ways_makes_the_update_of_the_big_batch() -> None:
    for found in run_ranks(cut_three_ways, 4, timeout_s=150):
        assert max(found.values()) < 1e-14, found


# What torch's kernels take --------------------------------------------------


def overflow_on_one_rank(rank: int, ranks: int) -> list[Any]:
    """Loss scaling over DTensors beside plain parameters; one rank's part overflows once."""
    model, wanted = model_of_tokens(), model_of_tokens()
    parallelize_module(model, init_device_mesh("cpu", (ranks,)), MATRICES)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    window = UpdateWindow(model, adamw(model), token_loss(), clip_grad_norm=0.5, scaler=scaler)
    plain, found = adamw(wanted), []
    weight: Any = model.block.up.weight

    def overflow(_: Any) -> None:
        if rank == 1:
            weight.grad._local_tensor[0] = float("inf")

    for overflows in (False, True, False):
        handle = weight.register_post_accumulate_grad_hook(overflow if overflows else lambda _: None)
        record = window.run(batches(0, 2), loss_of(token_loss()))
        handle.remove()
        found.append((record.outcome, record.loss_scale))
        if not overflows:
            plain_update(wanted, plain, mean_of_items(wanted, batches(0, 2), None))
    return [distance(model, wanted), found]


def test_loss_scaling_over_matrices_in_parts_moves_the_scale_of_all() -> None:
    for error, found in run_ranks(overflow_on_one_rank, 2, timeout_s=150):
        assert error < 1e-14
        assert found == [("applied", 1024.0), ("skipped_nonfinite", 1024.0), ("applied", 512.0)]


def steps_that_fail(_rank: int, ranks: int) -> dict[str, str]:
    """What is said of each optimizer over whole shards, and over DTensors beside plain parameters."""
    warnings.filterwarnings("ignore", message="FSDP2-wrapped")
    mesh, told = init_device_mesh("cpu", (ranks,)), {}
    models = {
        "sharded": fully_shard(model_of_tokens(), mesh=mesh),
        "mixed": parallelize_module(model_of_tokens(), mesh, MATRICES),
    }
    optimizers: dict[str, tuple[Any, dict[str, Any]]] = {
        "fused SGD": (torch.optim.SGD, {"fused": True}),
        "foreach AdamW": (torch.optim.AdamW, {"foreach": True}),
        "fused AdamW": (torch.optim.AdamW, {"fused": True}),
        "Adafactor": (torch.optim.Adafactor, {}),
        "NAdam": (torch.optim.NAdam, {}),
    }
    for kind, model in models.items():
        for name, (make, options) in optimizers.items():
            try:
                window = UpdateWindow(
                    model, make(model.parameters(), lr=0.01, **options), token_loss(), clip_grad_norm=0.5
                )
                told[f"{kind}, {name}"] = window.run(batches(0, 2), loss_of(token_loss())).outcome
            except UnsupportedError as error:
                told[f"{kind}, {name}"] = f"refused: {error}"
            except WholebatchError as error:
                told[f"{kind}, {name}"] = f"too late: {error}"
    return told


def test_a_step_that_torch_cannot_make_is_refused_before_the_first_update() -> None:
    for told in run_ranks(steps_that_fail, 2, timeout_s=150):
        refused = {name for name, said in told.items() if said.startswith("refused: ")}
        assert refused == {
            "sharded, fused SGD",
            "sharded, Adafactor",
            "mixed, fused SGD",
            "mixed, foreach AdamW",
            "mixed, fused AdamW",
            "mixed, Adafactor",
        }
        assert {told[name] for name in told.keys() - refused} == {"applied"}, told
        mixed = told["mixed, foreach AdamW"]
        assert "AdamW(foreach=True) of torch" in mixed
        assert "a group of 4 DTensors and 6 plain parameters; leave foreach out, or give plain" in mixed
        assert "0 plain parameters; use another optimizer" in told["sharded, Adafactor"]
