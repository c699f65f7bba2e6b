"""Small problems for the window's tests, each with everything the oracle needs.

A problem is a model, an objective, and ragged micro-batches of one global batch. ``observed`` runs
the window on them and returns what the optimizer was given and what it made of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wholebatch.losses import next_token_loss, token_loss
from wholebatch.objective import Objective, weighted_terms
from wholebatch.oracle import OracleUpdate, big_batch_update
from wholebatch.window import UpdateWindow

VOCABULARY = 7
POSITIONS = 5
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class TinyLanguageModel(nn.Module):
    """Embedding, a hidden layer and two heads; ``dtype`` float64 unless asked otherwise."""

    def __init__(self, *, two_heads: bool = False, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.two_heads = two_heads
        self.embedding = nn.Embedding(VOCABULARY, 6, dtype=dtype)
        self.hidden = nn.Linear(6, 6, dtype=dtype)
        self.head = nn.Linear(6, VOCABULARY, dtype=dtype)
        if two_heads:
            self.tags = nn.Linear(6, 3, dtype=dtype)

    def forward(self, ids: Tensor) -> Any:
        hidden = torch.tanh(self.hidden(self.embedding(ids).cumsum(1)))
        if self.two_heads:
            return {"next": self.head(hidden), "tag": self.tags(hidden)}
        return self.head(hidden)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One update: ``counts[r][j]`` lists the supervised positions of each sample of micro-batch j
    of rank r."""

    counts: list[list[list[int]]]
    two_terms: bool = False
    class_weights: bool = False
    clip_grad_norm: float | None = None
    optimizer: str = "sgd"
    seed: int = 0

    def objective(self) -> Objective:
        weights = torch.linspace(0.25, 2.0, VOCABULARY, dtype=torch.float64) if self.class_weights else None
        main = next_token_loss(class_weights=weights, label_smoothing=0.1 if self.class_weights else 0.0)
        if not self.two_terms:
            return main
        return weighted_terms({"next": (main, 1.0), "tag": (token_loss(labels="tags"), 0.3)})

    def model(self, dtype: torch.dtype = torch.float64) -> TinyLanguageModel:
        torch.manual_seed(self.seed)
        return TinyLanguageModel(two_heads=self.two_terms, dtype=dtype)

    def batches(self) -> list[list[dict[str, Tensor]]]:
        """Micro-batches by rank."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        first_id = 0
        ranks = []
        for rank in self.counts:
            held = []
            for samples in rank:
                held.append(_batch(samples, generator, first_id))
                first_id += len(samples)
            ranks.append(held)
        return ranks

    def whole(self) -> dict[str, Tensor]:
        """The global batch in one piece."""
        held = [batch for rank in self.batches() for batch in rank]
        return {key: torch.cat([batch[key] for batch in held]) for key in held[0]}

    def make_optimizer(self) -> MakeOptimizer:
        return OPTIMIZERS[self.optimizer]


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.9),
    "sgd_fused": lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.9, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}


def _batch(samples: Sequence[int], generator: torch.Generator, first_id: int) -> dict[str, Tensor]:
    ids = torch.randint(0, VOCABULARY, (len(samples), POSITIONS), generator=generator)
    supervised = torch.arange(POSITIONS).expand(len(samples), -1) < torch.tensor(samples).unsqueeze(1)
    tags = torch.randint(0, 3, ids.shape, generator=generator)
    return {
        "input_ids": ids,
        "labels": torch.where(supervised, ids, -100),
        # Another number of items than the labels have: every other position of what is supervised.
        "tags": torch.where(supervised & (torch.arange(POSITIONS) % 2 == 0), tags, -100),
        "sample_ids": torch.arange(first_id, first_id + len(samples)),
    }


def loss_with(objective: Objective) -> Callable[[nn.Module, Any], Any]:
    return lambda model, batch: objective(model(batch["input_ids"]), batch)


@dataclass(frozen=True, kw_only=True)
class Observed:
    """What the optimizer was given by name, what it made of it, and the record."""

    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]
    record: Any


def watch_gradients(optimizer: torch.optim.Optimizer, named: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    """A dict that holds, after the step, the gradients that the optimizer stepped on.

    After the step, because a fused kernel writes the gradient times its factor back.
    """
    seen: dict[str, Tensor] = {}

    def look(*_: Any) -> None:
        seen.update({name: p.grad.detach().clone() for name, p in named.items() if p.grad is not None})

    optimizer.register_step_post_hook(look)
    return seen


def observed(
    case: Case,
    *,
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model,
    rank: int = 0,
    dtype: torch.dtype = torch.float64,
    objective: Objective | None = None,
    **window_options: Any,
) -> Observed:
    """One update of ``case`` through the window, on this rank."""
    model = case.model(dtype)
    named = dict(model.named_parameters())
    wrapped = wrap(model)
    optimizer = case.make_optimizer()(list(named.values()))
    seen = watch_gradients(optimizer, named)
    loss = objective or case.objective()
    window = UpdateWindow(wrapped, optimizer, loss, clip_grad_norm=case.clip_grad_norm, **window_options)
    record = window.run(case.batches()[rank], loss_with(loss))
    return Observed(
        gradients=seen,
        parameters={name: p.detach().clone() for name, p in named.items()},
        record=record,
    )


def oracle(case: Case) -> OracleUpdate:
    """The same update as one big batch, in float64."""
    objective = case.objective()
    return big_batch_update(
        case.model(),
        loss_with(objective),
        case.whole(),
        make_optimizer=case.make_optimizer(),
        clip_grad_norm=case.clip_grad_norm,
        coefficients=objective.coefficients,
    )


def gradient_of_whole(model: nn.Module, case: Case) -> dict[str, Tensor]:
    """The gradient of the whole global batch's mean at the weights of ``model``; zeros where there is none.

    Micro-batches run one by one, only because a model may branch by their number of samples.
    """
    sums, count = [], 0.0
    for batch in (batch for of_rank in case.batches() for batch in of_rank):
        total, items = case.objective()(model(batch["input_ids"]), batch)
        sums.append(total)
        count += float(items)
    (torch.stack(sums).sum() / count).backward()
    return {
        name: torch.zeros_like(one) if one.grad is None else one.grad
        for name, one in model.named_parameters()
    }


def total_items(case: Case) -> int:
    """Supervised next-token targets of the whole case: the first label is never one."""
    return sum(max(0, n - 1) for rank in case.counts for batch in rank for n in batch)


def assert_equal_updates(found: Observed, truth: OracleUpdate, *, tolerance: float = 1e-12) -> None:
    """Gradient and updated parameters agree, absolutely, to ``tolerance``."""
    for name, gradient in truth.gradients.items():
        difference = (found.gradients[name] - gradient).abs().max().item()
        assert difference <= tolerance, f"gradient of {name} is off by {difference:.3e}"
    for name, parameter in truth.parameters.items():
        difference = (found.parameters[name] - parameter).abs().max().item()
        assert difference <= tolerance, f"parameter {name} is off by {difference:.3e}"
