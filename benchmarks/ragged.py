"""What ragged samples cost: fixed micro-batches, sorted ones, the peers', and those cut by a token budget.

    python benchmarks/ragged.py                                     # capped lengths, 256 samples an update
    python benchmarks/ragged.py --uncapped --global-batch 64
    python benchmarks/ragged.py --ranks 2 --json ragged.json

``--ranks 2`` starts itself under torchrun. docs/benchmarks.md says what each column is.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median, quantiles
from typing import Any

# else torch's profiler and its allocator talk; read when torch is imported
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import ragged_contestants as loops
from contestants import Contestant
from counting import PeakTensorBytes
from overhead import quiet, start_ranks, versions
from race import Result, race
from ragged_contestants import CAPPED_TOKENS, MICRO_BATCH_SAMPLES, Ragged, RaggedContestant
from work import num_replicas, this_rank

_WIDTH = 100
# Updates before the timed ones: one whose gradients are compared, one whose memory is measured.
_WARM_ROUNDS = 1
_UNTIMED = _WARM_ROUNDS + 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """What came out for one loop.

    Args:
        name: of the loop.
        speeds: its supervised items per second over those of the first loop, by round; on several ranks
            by the time of the slowest.
        padding_share: positions of its forwards that hold no token, over all, in the timed rounds.
        peak_memory: the most bytes of tensors at one time in one update, over those of the first loop,
            on the rank where it is most.
        keeps_global_batch: whether its updates have the same samples as the first loop's.
        same_update: whether gradients and parameters differ from the first loop's by no more than rounding.
        difference: the larger of the relative distances of gradients and of parameters.
        rounding: the larger of the same distances of the first loop from float64.
    """

    name: str
    speeds: tuple[float, ...]
    padding_share: float
    peak_memory: float
    keeps_global_batch: bool
    same_update: bool
    difference: float
    rounding: float

    @property
    def quartiles(self) -> tuple[float, float, float]:
        """Lower quartile, median and upper quartile of the speeds."""
        if len(self.speeds) < 2:
            return self.speeds[0], self.speeds[0], self.speeds[0]
        low, _, high = quantiles(self.speeds, n=4, method="inclusive")
        return low, median(self.speeds), high

    def to_dict(self) -> dict[str, Any]:
        names = self.__dataclass_fields__
        return {name: getattr(self, name) for name in names} | {"quartiles": self.quartiles}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, write the JSON; return the exit code."""
    options = _options(arguments)
    if options.ranks > 1 and "RANK" not in os.environ:
        return start_ranks(options.ranks, sys.argv[1:] if arguments is None else arguments, __file__)
    torch.set_num_threads(1)
    quiet()
    if "RANK" in os.environ:
        dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    try:
        rows = measure(options)
        if this_rank() == 0:
            _print(rows, options)
            if options.json:
                options.json.write_text(json.dumps(_to_dict(rows, options), indent=2))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--global-batch", type=int, default=256, help="samples of an update (256)")
    lengths = parser.add_mutually_exclusive_group()
    lengths.add_argument(
        "--capped",
        type=int,
        nargs="?",
        metavar="TOKENS",
        const=CAPPED_TOKENS,
        help="samples of at most so many tokens, 512 if not given (default)",
    )
    lengths.add_argument("--uncapped", action="store_true", help="samples as long as they are")
    parser.add_argument("--tokens-per-micro-batch", type=int, default=2048, help="the budget (2048)")
    parser.add_argument("--width", type=int, default=128, help="of the built-in GPT (128)")
    parser.add_argument("--layers", type=int, default=2, help="of the built-in GPT (2)")
    parser.add_argument("--heads", type=int, default=4, help="of the built-in GPT (4)")
    parser.add_argument("--ranks", type=int, default=1, help="processes, each one replica")
    parser.add_argument("--rounds", type=int, default=5, help="updates of each loop that are timed (5)")
    parser.add_argument("--json", type=Path, help="write everything that was measured to this file")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall", help="cpu: processor time")
    parser.add_argument("--without-peers", action="store_true", help="only plain PyTorch and Wholebatch")
    options = parser.parse_args(arguments)
    options.capped = options.capped or CAPPED_TOKENS  # a default would hide that both were given
    for name in ("ranks", "rounds", "layers", "width", "heads", "global_batch"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)}: give 1 or more")
    if options.width % options.heads:
        parser.error(f"--heads {options.heads} does not divide --width {options.width}")
    together = MICRO_BATCH_SAMPLES * options.ranks
    if options.global_batch % together:
        parser.error(
            f"--global-batch {options.global_batch}: fixed micro-batches need a multiple of "
            f"{MICRO_BATCH_SAMPLES} samples x {options.ranks} ranks = {together}"
        )
    if options.tokens_per_micro_batch < options.capped:
        parser.error(
            f"--tokens-per-micro-batch {options.tokens_per_micro_batch}: give at least {options.capped}, "
            f"the longest of the capped samples"
        )
    return options


def _lengths(options: argparse.Namespace) -> str:
    return "uncapped lengths" if options.uncapped else f"at most {options.capped} tokens"


def measure(options: argparse.Namespace) -> list[Row]:
    """Race the loops."""
    source = loops.ragged(
        capped=not options.uncapped,
        capped_tokens=options.capped,
        global_batch_samples=options.global_batch,
        width=options.width,
        layers=options.layers,
        heads=options.heads,
    )
    entries = contestants(source, options)
    results = race(
        source.work,
        [one.loop for one in entries],
        rounds=options.rounds,
        clock=options.clock,
        given=source.global_batch,
        twin=loops.twin(source),
        warm_rounds=_WARM_ROUNDS,
        observer=peak_memory,
    )
    plain = entries[0], results[0]
    return [row_of(one, result, *plain) for one, result in zip(entries, results, strict=True)]


def contestants(source: Ragged, options: argparse.Namespace) -> list[RaggedContestant]:
    """All loops; the first is what the others are compared with."""
    found = loops.plain(source)
    if not options.without_peers:
        # one more than are run: a loader may fetch ahead
        found += loops.peers(source, updates=_UNTIMED + options.rounds + 1)
    budget = options.tokens_per_micro_batch
    return [
        *found,
        loops.wholebatch(source, rows="padded", tokens_per_micro_batch=budget),
        loops.wholebatch(source, rows="packed", tokens_per_micro_batch=budget),
    ]


def peak_memory(contestant: Contestant) -> PeakTensorBytes:
    """The observer of the race."""
    return PeakTensorBytes(contestant.model, contestant.optimizer)


def row_of(one: RaggedContestant, result: Result, first: RaggedContestant, plain: Result) -> Row:
    """The row of one loop, beside those of the first."""
    timed = slice(_WARM_ROUNDS + 1, -1)
    items, positions, tokens = (_over_ranks(found[timed]) for found in _seen(one))
    first_items, _, first_tokens = (_over_ranks(found[timed]) for found in _seen(first))
    if one.keeps_global_batch:
        # else a loop that lost samples would look fast
        assert tokens == first_tokens, f"{one.loop.name} saw {tokens} tokens, not {first_tokens}"
        items = first_items
    shares = [own / other for own, other in zip(items, first_items, strict=True)]
    return Row(
        name=one.loop.name,
        speeds=tuple(share / ratio for share, ratio in zip(shares, result.ratios, strict=True)),
        padding_share=1 - sum(tokens) / sum(positions),
        peak_memory=max(result.counts) / max(plain.counts),
        keeps_global_batch=one.keeps_global_batch,
        same_update=result.same_update,
        difference=max(result.gradient_difference, result.parameter_difference),
        rounding=max(result.gradient_rounding, result.parameter_rounding),
    )


def _seen(one: RaggedContestant) -> tuple[list[int], list[int], list[int]]:
    """Items, positions and tokens of this rank, by turn. The first token of a sample is no item."""
    seen = one.seen
    items = [tokens - samples for tokens, samples in zip(seen.tokens, seen.samples, strict=True)]
    return items, seen.positions, seen.tokens


def _over_ranks(numbers: list[int]) -> list[int]:
    if num_replicas() == 1:
        return numbers
    total = torch.tensor(numbers)
    dist.all_reduce(total)
    return [int(number) for number in total]


def _print(rows: list[Row], options: argparse.Namespace) -> None:
    console = Console(width=_WIDTH, highlight=False)
    console.print(
        f"\n{_lengths(options)}, {options.global_batch} samples an update, "
        f"D={options.ranks}, width {options.width}, {options.layers} layers, {options.heads} heads, "
        f"{options.tokens_per_micro_batch} tokens a micro-batch where a budget cuts, {MICRO_BATCH_SAMPLES} "
        f"samples elsewhere; {options.rounds} rounds, {options.clock} time",
        soft_wrap=True,
    )
    console.print(table_of(rows))


def table_of(rows: Sequence[Row]) -> Table:
    """The rows, as docs/benchmarks.md shows them."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("loop", no_wrap=True)
    for heading in ("items/s\n/ plain", "quartiles", "padding", "memory\n/ plain"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("same update", no_wrap=True)
    for row in rows:
        low, middle, high = row.quartiles
        table.add_row(
            row.name,
            f"{middle:.2f}",
            f"{low:.2f}-{high:.2f}",
            f"{row.padding_share:.0%}",
            f"{row.peak_memory:.2f}",
            _verdict(row),
        )
    return table


def _verdict(row: Row) -> str:
    if not row.keeps_global_batch:
        return "other samples"
    return f"{'yes' if row.same_update else 'NO'} ({row.difference:.0e})"


def _to_dict(rows: list[Row], options: argparse.Namespace) -> dict[str, Any]:
    settings = {name: value for name, value in vars(options).items() if name != "json"}
    return {"versions": versions(), "settings": settings, "rows": [row.to_dict() for row in rows]}


if __name__ == "__main__":
    sys.exit(main())
