"""The window beside each engine's own accumulation, written by hand as its documentation has it.

    python benchmarks/engines.py                                     every engine that is installed
    python benchmarks/engines.py --engine pipeline --model large     those with "pipeline" in their name

Three loops take turns in one process group, each with a model of its own: the hand-written one twice, whose
distance from itself is the noise, and the window's. Times are of the slowest rank, by turns in a random
order, each of a few updates in a row of which the first is not timed; a ratio is to the first loop's time
in the same round. Starts itself under torchrun.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import sys
from collections.abc import Sequence
from datetime import timedelta
from statistics import quantiles

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from contestants import inside
from engine_loops import ENGINES, Engine
from overhead import quiet, start_ranks
from race import IN_A_ROW, time_turn
from work import WORKS, Work, batches_of

_WARM_ROUNDS = 3


def main() -> int:
    """Measure, print the table; return the exit code."""
    options = _options()
    chosen = [engine for engine in ENGINES if options.engine.lower() in engine.name.lower()]
    if not chosen:
        names = ", ".join(engine.name for engine in ENGINES)
        print(f"--engine {options.engine!r} is in none of the names: {names}", file=sys.stderr)
        return 2
    if "RANK" not in os.environ:
        for engine in chosen:
            if not engine.is_here:
                print(f"{engine.name}: not measured, {engine.package} is not installed")
        numbers = sorted({engine.ranks for engine in chosen if engine.is_here})
        return max((start_ranks(number, sys.argv[1:], __file__) for number in numbers), default=0)
    torch.set_num_threads(1)
    quiet()
    dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    try:
        for engine in chosen:
            if engine.is_here and engine.ranks == dist.get_world_size():
                _measure(engine, WORKS[options.model], options.rounds)
                gc.collect()  # an engine has to go before its process group
    finally:
        dist.destroy_process_group()
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--rounds", type=int, default=30, help=f"turns of each loop, of {IN_A_ROW} updates each"
    )
    parser.add_argument("--model", choices=sorted(WORKS), default="small")
    parser.add_argument("--engine", default="", help="only engines with this in their name")
    return parser.parse_args()


def _measure(engine: Engine, work: Work, rounds: int) -> None:
    loops = {
        "by hand": engine.by_hand(work),
        "by hand, again": engine.by_hand(work),
        "window": engine.by_window(work),
    }
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    order = random.Random(0)
    replica = dist.get_rank() * engine.replicas // engine.ranks
    for number in range(_WARM_ROUNDS + rounds):
        turn = [batches_of(work, number * IN_A_ROW + one, replica=replica) for one in range(IN_A_ROW)]
        for name in order.sample(list(loops), len(loops)):
            taken = time_turn(inside(loops[name].update), turn)
            if number >= _WARM_ROUNDS:
                seconds[name].append(taken)
    first = _parameters(loops["by hand"].model)
    for name, loop in loops.items():
        ratios = [mine / theirs for mine, theirs in zip(seconds[name], seconds["by hand"], strict=True)]
        away = _farthest(_parameters(loop.model), first)
        if dist.get_rank() == 0:
            _print(f"{work.name}, {engine.name}", name, ratios, away)


def _print(what: str, loop: str, ratios: Sequence[float], away: float) -> None:
    low, middle, high = quantiles(ratios, n=4, method="inclusive")
    spread = f"{low:.3f} to {high:.3f}"
    print(f"{what:<34} {loop:<15} {middle:.3f}  {spread}  parameters {away:.1e} away", flush=True)


def _parameters(model: nn.Module) -> torch.Tensor:
    """Those of this rank, one after the other; of DTensors the whole, under ZeRO 3 the part here."""
    held = [getattr(parameter, "ds_tensor", parameter) for parameter in model.parameters()]
    found = [one.full_tensor() if isinstance(one, DTensor) else one for one in held]
    return torch.cat([parameter.detach().flatten() for parameter in found])


def _farthest(found: torch.Tensor, other: torch.Tensor) -> float:
    """``|found - other| / |other|``, the largest of all ranks."""
    away = (found - other).norm() / other.norm()
    dist.all_reduce(away, op=dist.ReduceOp.MAX)
    return float(away)


if __name__ == "__main__":
    sys.exit(main())
