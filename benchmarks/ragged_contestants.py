"""Loops over ragged samples. Each gets the sample ids of a global batch, and reads, cuts and collates them.

What a loop does with its micro-batches is in ``contestants.py``; here is how it gets them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

import contestants as loops
import wholebatch as wb
from contestants import Around, Contestant
from wholebatch.order import SampleOrder
from wholebatch.packing import CostModel
from wholebatch.rows import row_layout
from wholebatch.train.data import load_data
from wholebatch.train.material import JobData
from wholebatch.train.models.gpt import GPTShape
from wholebatch.train.settings import DataConfig, TrainConfig
from work import CLIP_GRAD_NORM, MicroBatch, Work, new_model, new_optimizer, num_replicas, this_rank

MICRO_BATCH_SAMPLES = 8
CAPPED_TOKENS = 512
UNCAPPED_TOKENS = 8192  # more than the longest paragraph has

# In positions. Fitted to forwards and backwards of the GPT of width 128 and 2 layers, on the processor of
# docs/benchmarks.md: what a micro-batch takes by itself, and what attention adds for its length.
COST = CostModel(per_micro_batch=60.0, per_position_and_length=0.0012)

Rows = Literal["padded", "packed"]
Cut = Callable[[Sequence[int]], list[list[int]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ragged:
    """The samples and their global batches, the same for every loop.

    Args:
        data: paragraphs as bytes.
        lengths: tokens of each sample.
        order: which samples make which global batch.
        work: the model and the micro-batches of the loops that have fixed ones.
    """

    data: JobData
    lengths: NDArray[np.int64]
    order: SampleOrder
    work: Work

    def global_batch(self, work: Work, update: int) -> list[int]:
        """Ids of one update, over all replicas."""
        del work
        epoch, number = divmod(update, self.order.updates_per_epoch)
        size = self.order.global_batch_samples
        return self.order.global_batch(epoch * self.order.samples_per_epoch + number * size)

    def collated(self, ids: Sequence[int]) -> MicroBatch:
        """A padded micro-batch."""
        return dict(self.data.collate([self.data.train[index] for index in ids], ids, 0))


def ragged(
    *,
    capped: bool,
    global_batch_samples: int,
    capped_tokens: int = CAPPED_TOKENS,
    width: int = 128,
    layers: int = 2,
    heads: int = 4,
) -> Ragged:
    """The embedded topic paragraphs, their ends dropped where they are longer than the cap."""
    cap = capped_tokens if capped else UNCAPPED_TOKENS
    settings = DataConfig(source="pydoc", max_tokens_per_sample=cap, too_long="truncate")
    data = load_data(TrainConfig(data=settings))
    lengths: NDArray[np.int64] = data.train.lengths  # type: ignore[attr-defined]  # TokenSamples
    assert data.vocabulary is not None
    shape = GPTShape(
        vocabulary=data.vocabulary, max_tokens=int(lengths.max()), layers=layers, width=width, heads=heads
    )
    work = Work(
        name="capped" if capped else "uncapped",
        shape=shape,
        micro_batch_samples=MICRO_BATCH_SAMPLES,
        micro_batches_per_window=global_batch_samples // (MICRO_BATCH_SAMPLES * num_replicas()),
        rounds=5,
    )
    order = SampleOrder(num_samples=len(lengths), global_batch_samples=global_batch_samples, tail="drop")
    return Ragged(data=data, lengths=lengths, order=order, work=work)


def in_turn(ids: Sequence[int]) -> list[list[int]]:
    """This replica's micro-batches of neighbours, as a plain loader hands them out."""
    share = len(ids) // num_replicas()
    mine = ids[this_rank() * share : (this_rank() + 1) * share]
    return [list(mine[at : at + MICRO_BATCH_SAMPLES]) for at in range(0, share, MICRO_BATCH_SAMPLES)]


def sorted_by_length(source: Ragged) -> Cut:
    """Micro-batches of the same size, after sorting the global batch; dealt out over the replicas."""

    def cut(ids: Sequence[int]) -> list[list[int]]:
        by_length = sorted(ids, key=lambda index: -source.lengths[index])
        starts = range(0, len(ids), MICRO_BATCH_SAMPLES)
        every = [by_length[at : at + MICRO_BATCH_SAMPLES] for at in starts]
        return every[this_rank() :: num_replicas()]

    return cut


class Seen:
    """What goes through the model of a contestant, seen from outside: by turn, on this rank."""

    def __init__(self, model: nn.Module, padding_id: int) -> None:
        self.positions: list[int] = []
        self.tokens: list[int] = []
        self.samples: list[int] = []
        self._padding_id = padding_id
        model.register_forward_pre_hook(self._look, with_kwargs=True)

    def begin_turn(self) -> None:
        for kept in (self.positions, self.tokens, self.samples):
            kept.append(0)

    def _look(self, _: nn.Module, args: Any, named: dict[str, Any]) -> None:
        ids = args[0] if args else named["input_ids"]
        self.positions[-1] += ids.numel()
        self.tokens[-1] += int((ids != self._padding_id).sum())
        self.samples[-1] += len(ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class RaggedContestant:
    """One loop and what is said about it.

    Args:
        loop: the contestant; its ``run`` takes the ids of a global batch.
        seen: what its model sees.
        keeps_global_batch: whether its updates have the samples that the others' have.
    """

    loop: Contestant
    seen: Seen
    keeps_global_batch: bool = True


def _watched(loop: Contestant, source: Ragged, **facts: Any) -> RaggedContestant:
    seen = Seen(loop.model, source.data.padding_id)

    def run(ids: Any, around: Around) -> None:
        seen.begin_turn()
        loop.run(ids, around)

    return RaggedContestant(loop=replace(loop, run=run), seen=seen, **facts)


def cut_first(loop: Contestant, source: Ragged, cut: Cut, name: str | None = None) -> RaggedContestant:
    """A loop that cuts and collates the global batch before it does its update."""

    def run(ids: Any, around: Around) -> None:
        with around:
            loop.run([source.collated(chosen) for chosen in cut(ids)], nullcontext())

    return _watched(replace(loop, name=name or loop.name, run=run), source)


def plain(source: Ragged) -> list[RaggedContestant]:
    """Plain PyTorch: fixed micro-batches, twice, and after sorting. The first is what all compare with."""
    hand = loops.hand
    by_length = sorted_by_length(source)
    return [
        cut_first(hand(source.work), source, in_turn, "plain PyTorch"),
        cut_first(hand(source.work), source, in_turn, "the same again"),
        cut_first(hand(source.work), source, by_length, "sorted within the global batch"),
    ]


def twin(source: Ragged) -> Contestant:
    """The plain loop in float64."""
    by_length = sorted_by_length(source)
    return cut_first(loops.hand(source.work, "float64", torch.float64), source, by_length).loop


def trainer(source: Ragged, *, strategy: str, updates: int) -> RaggedContestant:
    """Transformers' Trainer with a loader of its own, over the samples in the order of the global batches.

    Its default draws an order of its own; ``sequential`` takes the one that it is given.
    """
    from trainer_turns import TrainerTurns

    ids = [index for update in range(updates) for index in source.global_batch(source.work, update)]
    samples = [{"input_ids": source.data.train[index].tokens, "id": index} for index in ids]

    def collate(chosen: list[Any]) -> MicroBatch:
        batch = source.collated([sample["id"] for sample in chosen])
        return {name: batch[name] for name in ("input_ids", "labels")}

    turns = TrainerTurns(source.work, samples=samples, collate=collate, strategy=strategy)
    state = loops.OwnGradientState()

    def run(batches: Any, around: AbstractContextManager[Any]) -> None:
        with state:
            turns.run(batches, around)

    loop = Contestant(
        name=f"Trainer, {strategy}", model=turns.gpt, optimizer=turns.optimizer, run=run, close=turns.close
    )
    return _watched(loop, source, keeps_global_batch=strategy != "group_by_length")


def peers(source: Ragged, *, updates: int) -> list[RaggedContestant]:
    """Those peers that are installed."""
    found = []
    if find_spec("accelerate"):
        accumulate = loops.accelerate(source.work, accumulate=True)
        found.append(cut_first(accumulate, source, in_turn, "Accelerate"))
    if find_spec("lightning"):
        found.append(cut_first(loops.fabric(source.work), source, in_turn))
    if find_spec("transformers") and find_spec("accelerate"):
        strategies = ("sequential", "batch_rebalance", "group_by_length")
        found += [trainer(source, strategy=strategy, updates=updates) for strategy in strategies]
    return found


def wholebatch(source: Ragged, *, rows: Rows, tokens_per_micro_batch: int) -> RaggedContestant:
    """``window.run`` over the windows of a ``WindowLoader``, which are cut by a token budget.

    A sample that is longer than the budget is alone. The loader reads when a window is asked for.
    """
    bare = new_model(source.work)
    model, optimizer, objective = loops.wrapped(bare), new_optimizer(bare), wb.next_token_loss()
    longest = int(source.lengths.max())
    longer = longest > tokens_per_micro_batch
    plan = wb.plan_token_budget(
        tokens_per_micro_batch=tokens_per_micro_batch,
        global_batch_samples=source.order.global_batch_samples,
        ranks=num_replicas(),
        rows=rows,
        tail=source.order.tail,
        too_long="alone" if longer else "refuse",
        tokens_alone=longest if longer else None,
        cost=COST,
    )
    window = wb.UpdateWindow(model, optimizer, objective, plan=plan, clip_grad_norm=CLIP_GRAD_NORM)
    loader = wb.WindowLoader(
        source.data.train,
        plan=plan,
        collate=replace(source.data.collate, rows=rows),  # type: ignore[type-var]  # it is a Collation
        lengths=source.lengths,
        order=source.order,
        replica=this_rank(),
        num_epochs=None,
    )
    windows = iter(loader)

    def loss_fn(model: nn.Module, batch: Any) -> Any:
        if rows == "padded":
            return objective(model(batch["input_ids"]), batch)
        return objective(model(batch["input_ids"], layout=row_layout(batch["sample_lengths"])), batch)

    def update(ids: Any) -> None:
        batches = next(windows)
        # every loop does the updates in their order, so the loader stands where the others do
        assert set(batches.sample_ids) <= set(ids)
        window.run(batches, loss_fn, sample_ids=batches.sample_ids)

    loop = Contestant(name=f"Wholebatch, {rows}", model=bare, optimizer=optimizer, run=loops.inside(update))
    return _watched(loop, source)
