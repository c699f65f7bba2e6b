"""What an exact update costs beside a loop written by hand, and beside the peers.

    python benchmarks/overhead.py --model small
    python benchmarks/overhead.py --model all --ranks 2 --json overhead.json

``--ranks 2`` starts itself under torchrun. docs/benchmarks.md says what each column is.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import warnings
from collections.abc import Sequence
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else torch's profiler talks; read when it is imported

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from contestants import hand, ours, peers, wholebatch_run
from race import FEW_MICRO_BATCHES, IN_A_ROW, MANY_MICRO_BATCHES, MemoryGrowth, Result, memory_growth, race
from work import WORKS, Work, num_replicas, this_rank

_PACKAGES = ("torch", "wholebatch", "accelerate", "lightning", "transformers")
_WIDTH = 100


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the tables, write the JSON; return the exit code."""
    options = _options(arguments)
    if options.ranks > 1 and "RANK" not in os.environ:
        return start_ranks(options.ranks, sys.argv[1:] if arguments is None else arguments, __file__)
    torch.set_num_threads(1)
    quiet()
    if "RANK" in os.environ:
        dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    try:
        measured = [_measure(WORKS[name], options) for name in options.models]
        if this_rank() == 0 and options.json:
            options.json.write_text(json.dumps({"versions": versions(), "measured": measured}, indent=2))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=[*WORKS, "all"], default="small", help="all: small and large")
    parser.add_argument("--ranks", type=int, default=1, help="processes, each one replica")
    parser.add_argument("--rounds", type=int, help=f"turns of each contestant, of {IN_A_ROW} updates each")
    parser.add_argument("--json", type=Path, help="write everything that was measured to this file")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall", help="cpu: processor time")
    parser.add_argument(
        "--without-peers", action="store_true", help="only the hand-written loop and the window"
    )
    parser.add_argument(
        "--without-memory", action="store_true", help="leave out the memory of long windows"
    )
    options = parser.parse_args(arguments)
    if options.ranks < 1:
        parser.error(f"--ranks {options.ranks}: give 1 or more processes")
    if options.rounds is not None and options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: give 1 or more")
    options.models = ("small", "large") if options.model == "all" else (options.model,)
    return options


def start_ranks(ranks: int, arguments: Sequence[str], script: str) -> int:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}  # else torchrun says that it chose so
    command = [sys.executable, *launcher, str(Path(script).resolve()), *arguments]
    return subprocess.run(command, env=environment, check=False).returncode


def quiet() -> None:
    """Say nothing of what the peers and gloo warn about; none of it is about the update."""
    warnings.filterwarnings("ignore", module=r"(accelerate|lightning|megatron|transformers|torch)\b")


def _measure(work: Work, options: argparse.Namespace) -> dict[str, Any]:
    rounds = options.rounds or work.rounds
    contestants = ours(work) + ([] if options.without_peers else peers(work))
    results = race(work, contestants, rounds=rounds, clock=options.clock, in_a_row=IN_A_ROW)
    growths: list[MemoryGrowth] = []
    if num_replicas() == 1 and not options.without_memory:
        growths = [memory_growth(work, one) for one in (hand(work), wholebatch_run(work))]
    if this_rank() == 0:
        _print(work, results, growths, rounds=rounds, clock=options.clock)
    return {
        "model": work.name,
        "ranks": num_replicas(),
        "rounds": rounds,
        "clock": options.clock,
        "results": [result.to_dict() for result in results],
        "memory": [growth.to_dict() for growth in growths],
    }


def _print(
    work: Work, results: list[Result], growths: list[MemoryGrowth], *, rounds: int, clock: str
) -> None:
    console = Console(width=_WIDTH, highlight=False)
    ranks = num_replicas()
    per_update_ms = 1000 * results[0].typical_seconds
    console.print(
        f"\n{work.name}: width {work.shape.width}, {work.shape.layers} layers, "
        f"{work.shape.max_tokens} tokens, m={work.micro_batch_samples}, A={work.micro_batches_per_window}, "
        f"D={ranks}; {rounds} rounds, {clock} time, about {per_update_ms:.3g} ms an update",
        soft_wrap=True,
    )
    console.print(table_of(results, ranks=ranks))
    if growths:
        console.print(memory_table_of(growths))


def table_of(results: Sequence[Result], *, ranks: int) -> Table:
    """The results, a row for each contestant; numbers that differ between ranks stand side by side."""
    table = Table(box=None, padding=(0, 1 if ranks > 1 else 2, 0, 0), pad_edge=False)
    table.add_column("loop", no_wrap=True)
    table.add_column("time\n/ hand", justify="right", no_wrap=True)
    table.add_column("quartiles", justify="right", no_wrap=True)
    for heading in ("grad.\npasses", "device\nreads", "count\nreads"):
        table.add_column(heading, justify="right")
    if ranks > 1:
        for heading in ("reduc-\ntions", "bytes/\nmin.", "other\nbytes"):
            table.add_column(heading, justify="right")
    table.add_column("same update", no_wrap=True)
    for result in results:
        low, middle, high = result.quartiles
        cells = [result.name, f"{middle:.3f}", f"{low:.3f}-{high:.3f}"]
        names = ["gradient_passes", "device_reads", "count_reads"]
        names += ["gradient_reductions", "bytes_over_minimum", "other_bytes"] if ranks > 1 else []
        cells += [_over_ranks(result, name) for name in names]
        table.add_row(*cells, _verdict(result))
    return table


def memory_table_of(growths: Sequence[MemoryGrowth]) -> Table:
    """Peak memory of long windows over short ones."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("peak memory of tensors", no_wrap=True)
    for number in (FEW_MICRO_BATCHES, MANY_MICRO_BATCHES):
        table.add_column(f"A={number}", justify="right")
    table.add_column(f"A={MANY_MICRO_BATCHES} / A={FEW_MICRO_BATCHES}", justify="right")
    for growth in growths:
        sizes = [f"{size / 2**20:.2f} MiB" for size in (growth.few_bytes, growth.many_bytes)]
        table.add_row(growth.name, *sizes, f"{growth.ratio:.4f}")
    return table


def _over_ranks(result: Result, name: str) -> str:
    shown = [f"{getattr(counts, name):.3g}" for counts in result.counts]
    return shown[0] if len(set(shown)) == 1 else " ".join(shown)


def _verdict(result: Result) -> str:
    """The larger of the two differences, and whether rounding explains both."""
    difference = max(result.gradient_difference, result.parameter_difference)
    return f"{'yes' if result.same_update else 'NO'} ({difference:.0e})"


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "processor": platform.machine()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


if __name__ == "__main__":
    sys.exit(main())
