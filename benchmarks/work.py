"""The work that every contestant does: a model, the micro-batches of an update, the sum of the loss.

One update, with N the labels that count in the global batch over all micro-batches and replicas:

    gradient of (sum over items of the next-token loss) / N, clipped to a norm of 1.0, fused AdamW
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from wholebatch.train.models.gpt import GPT, GPTShape

CLIP_GRAD_NORM = 1.0
LEARNING_RATE = 1e-3
IGNORED_LABEL = -100

MicroBatch = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """The size of an update.

    Args:
        name: what ``--model`` calls it.
        shape: the built-in GPT.
        micro_batch_samples: samples of one forward, m.
        micro_batches_per_window: micro-batches of an update on one rank, A.
        rounds: updates that are timed for each contestant, unless ``--rounds`` says otherwise.
    """

    name: str
    shape: GPTShape
    micro_batch_samples: int
    micro_batches_per_window: int = 8
    rounds: int


def _shape(*, width: int, layers: int, max_tokens: int) -> GPTShape:
    return GPTShape(vocabulary=256, max_tokens=max_tokens, layers=layers, width=width, heads=width // 16)


WORKS = {
    work.name: work
    for work in (
        # for the tests, and for trying the script: its times say nothing
        Work(name="tiny", shape=_shape(width=16, layers=1, max_tokens=12), micro_batch_samples=2, rounds=3),
        Work(
            name="small", shape=_shape(width=64, layers=2, max_tokens=64), micro_batch_samples=2, rounds=200
        ),
        Work(
            name="large",
            shape=_shape(width=256, layers=4, max_tokens=128),
            micro_batch_samples=4,
            rounds=16,
        ),
    )
}


def num_replicas() -> int:
    """Processes that train together."""
    return dist.get_world_size() if dist.is_initialized() else 1


def this_rank() -> int:
    """The number of this process, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def new_model(work: Work) -> GPT:
    """A model with the same parameters on every call and every rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return GPT(work.shape)


def new_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)


def batches_of(
    work: Work, update: int, *, micro_batches_per_window: int | None = None, replica: int | None = None
) -> list[MicroBatch]:
    """This replica's micro-batches of one global batch: random ids, a random head of each ignored.

    The head is up to three quarters of a sample, so that micro-batches have unequal items, and a loop that
    averages their means computes another update.

    Args:
        work: the sizes.
        update: which update, from 0; the same number gives the same batches.
        micro_batches_per_window: A, where it is not that of ``work``.
        replica: whose micro-batches; by default every rank is one.
    """
    number = this_rank() if replica is None else replica
    generator = torch.Generator().manual_seed(1_000_003 * update + number)
    size = (work.micro_batch_samples, work.shape.max_tokens)
    found = []
    for _ in range(micro_batches_per_window or work.micro_batches_per_window):
        # low ids are frequent, as some words are: it makes some gradients long enough to be clipped
        ids = (work.shape.vocabulary * torch.rand(size, generator=generator) ** 3).long()
        heads = torch.randint(0, 1 + 3 * size[1] // 4, (size[0], 1), generator=generator)
        labels = ids.masked_fill(torch.arange(size[1]) < heads, IGNORED_LABEL)
        found.append({"input_ids": ids, "labels": labels})
    return found


def count_items(batch: MicroBatch) -> Tensor:
    """Labels that count: the first of a sample is nobody's next token."""
    return (batch["labels"][:, 1:] != IGNORED_LABEL).sum()


def sum_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The loss of each position's next token, summed over the items; not divided."""
    return F.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED_LABEL, reduction="sum"
    )
