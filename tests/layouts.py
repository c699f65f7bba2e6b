"""The run that every layout trains alike: ten updates of the built-in GPT on embedded text."""

from __future__ import annotations

from collections.abc import Sequence
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor, nn

from wholebatch import SampleOrder, UpdateWindow, next_token_loss, plan_batch
from wholebatch.ranks.pipeline import PipelinedModel
from wholebatch.train.models.gpt import GPT, GPTShape

UPDATES, GLOBAL_BATCH, MICRO_BATCH, TOKENS = 10, 16, 2, 24
CLIP, RATE = 1.0, 1e-2
SHAPE = GPTShape(vocabulary=256, max_tokens=TOKENS, layers=2, width=16, heads=2)
OBJECTIVE = next_token_loss()
Found = tuple[dict[str, Tensor], list[Any]]


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(SHAPE).double()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=RATE)


def samples() -> list[Tensor]:
    """Paragraphs as bytes, of many lengths."""
    paragraphs = [text for topic in sorted(topics) for text in topics[topic].split("\n\n") if len(text) > 3]
    return [torch.tensor(list(text.encode()[:TOKENS])) for text in paragraphs[:200]]


def micro_batch(data: list[Tensor], ids: list[int]) -> dict[str, Tensor]:
    """Padded to one length, which pipelines need."""
    input_ids = torch.zeros(len(ids), TOKENS, dtype=torch.long)
    labels = torch.full((len(ids), TOKENS), -100)
    for row, index in enumerate(ids):
        input_ids[row, : len(data[index])] = labels[row, : len(data[index])] = data[index]
    return {"input_ids": input_ids, "labels": labels}


def trained(model: nn.Module, optimizer: Any, replica: int, replicas: int) -> list[Any]:
    """Ten updates; what the records say of them."""
    data = samples()
    window = UpdateWindow(
        model,
        optimizer,
        OBJECTIVE,
        plan=plan_batch(global_batch_samples=GLOBAL_BATCH, micro_batch_samples=MICRO_BATCH, ranks=replicas),
        clip_grad_norm=CLIP,
    )
    order = SampleOrder(num_samples=len(data), global_batch_samples=GLOBAL_BATCH, seed=0)
    told = []
    for _ in range(UPDATES):
        position = window.counters.samples
        ids = order.window(position, micro_batch_samples=MICRO_BATCH, replicas=replicas, replica=replica)
        batches = [micro_batch(data, one) for one in ids]
        by_schedule = isinstance(model, PipelinedModel)
        record = window.run(batches, None if by_schedule else lambda m, b: OBJECTIVE(m(b["input_ids"]), b))
        told.append((record.samples, record.items))
    return told


def alone() -> Found:
    """The parameters after the run on one rank, and what its records say."""
    model = gpt()
    told = trained(model, make_optimizer(model), 0, 1)
    return {name: p.detach() for name, p in model.named_parameters()}, told


def check_agreement(of_ranks: Sequence[Found], wanted: Found, *, within: float) -> None:
    """Every parameter is on some rank, and on each as in ``wanted``, to an absolute distance."""
    parameters, told = wanted
    seen: set[str] = set()
    for found, told_here in of_ranks:
        assert told_here == told
        for name, value in found.items():
            torch.testing.assert_close(value.double(), parameters[name], rtol=0, atol=within)
        seen |= found.keys()
    assert seen == parameters.keys()
