"""The window beside each engine's own accumulation, written by hand as its documentation has it.

    python benchmarks/engines.py            two ranks, gloo
    python benchmarks/engines.py --rounds 20 --model large

Three loops take turns in one process group, each with a model of its own: the hand-written one twice, whose
distance from itself is the noise, and the window's. Times are of the slower rank, by turns in a random
order; a ratio is to the first loop's time in the same round.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from statistics import quantiles
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_

import wholebatch as wb
from overhead import quiet, start_ranks
from work import CLIP_GRAD_NORM, WORKS, MicroBatch, Work, batches_of, count_items, new_model, sum_loss

RANKS = 2
ENGINES = ("FSDP2, per update", "FSDP2, per micro-batch")
_WARM_ROUNDS = 3
Loop = Callable[[list[MicroBatch]], None]


def main() -> int:
    """Measure, print the table; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--model", choices=sorted(WORKS), default="small")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        return start_ranks(RANKS, sys.argv[1:], __file__)
    torch.set_num_threads(1)
    quiet()
    dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    try:
        if dist.get_rank() == 0:
            print(
                f"{options.model} model, {options.rounds} rounds: ratio to the hand-written loop, quartiles"
            )
        for engine in ENGINES:
            _measure(engine, WORKS[options.model], options.rounds)
    finally:
        gc.collect()
        dist.destroy_process_group()
    return 0


def _measure(engine: str, work: Work, rounds: int) -> None:
    loops = {
        "by hand": _by_hand(engine, work),
        "by hand, again": _by_hand(engine, work),
        "window": _by_window(engine, work),
    }
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    order = random.Random(0)
    for update in range(_WARM_ROUNDS + rounds):
        batches = batches_of(work, update)
        for name in order.sample(list(loops), len(loops)):
            taken = _timed(loops[name][1], batches)
            if update >= _WARM_ROUNDS:
                seconds[name].append(taken)
    first = _whole(loops["by hand"][0])
    for name, (model, _) in loops.items():
        ratios = [mine / theirs for mine, theirs in zip(seconds[name], seconds["by hand"], strict=True)]
        away = float((_whole(model) - first).norm() / first.norm())
        low, middle, high = quantiles(ratios, n=4, method="inclusive")
        if dist.get_rank() == 0:
            print(
                f"{engine:<24} {name:<16} {middle:.3f}  {low:.3f} to {high:.3f}  parameters {away:.1e} away"
            )


def _sharded(work: Work) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = new_model(work)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def _by_hand(engine: str, work: Work) -> tuple[nn.Module, Loop]:
    model, optimizer = _sharded(work)
    held_back = engine.endswith("per update")

    def update(batches: list[MicroBatch]) -> None:
        items = torch.stack([count_items(batch) for batch in batches]).sum()
        dist.all_reduce(items)
        for index, batch in enumerate(batches):
            sharded: Any = model
            sharded.set_requires_gradient_sync(not held_back or index == len(batches) - 1)
            (sum_loss(model(batch["input_ids"]), batch["labels"]) * RANKS / items).backward()
        clip_grad_norm_(model.parameters(), CLIP_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()

    return model, update


def _by_window(engine: str, work: Work) -> tuple[nn.Module, Loop]:
    model, optimizer = _sharded(work)
    objective = wb.next_token_loss()
    reduce: Any = "per_update" if engine.endswith("per update") else "per_micro_batch"
    window = wb.UpdateWindow(model, optimizer, objective, clip_grad_norm=CLIP_GRAD_NORM, reduce=reduce)

    def update(batches: list[MicroBatch]) -> None:
        window.run(batches, lambda model, batch: objective(model(batch["input_ids"]), batch))

    return model, update


def _timed(loop: Loop, batches: list[MicroBatch]) -> float:
    """Seconds of the slower rank."""
    dist.barrier()
    began = time.perf_counter()
    loop(batches)
    taken = torch.tensor(time.perf_counter() - began)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return float(taken)


def _whole(model: nn.Module) -> torch.Tensor:
    parameters: list[Any] = list(model.parameters())
    return torch.cat([parameter.full_tensor().detach().flatten() for parameter in parameters])


if __name__ == "__main__":
    sys.exit(main())
