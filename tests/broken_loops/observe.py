"""Run the loops of the table and keep what was seen of them; those on ranks all in one group."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable

import torch

from broken_loops import EXPECTED, Loop, loop
from broken_loops.witness import Seen, watch
from ranks import run_ranks

# A loop that leaves a rank waiting can't share a process group with others.
FAILING = ("unequal_micro_batch_counts/one_waits",)
COUNTED = ("reduced_every_micro_batch", "forward_outside_scope")
# What was seen of the broken loop and of the right twin, by rank.
Pair = tuple[list[Seen], list[Seen]]


def _observe(rank: int, ranks: int, names: Iterable[str]) -> dict[str, tuple[Seen, Seen]]:
    """One worker: all these loops after each other."""
    found = {}
    for name in names:
        one = loop(name)
        arguments = (rank, ranks) if one.expected.ranks > 1 else ()
        counted = one.expected.kind in COUNTED
        pair = (one.broken, one.right)
        found[name] = tuple(watch(function, *arguments, count_reductions=counted) for function in pair)
    return found


@functools.cache
def _observed(ranks: int, library: str) -> dict[str, Pair]:
    names = [
        name
        for name, expected in EXPECTED.items()
        if (expected.ranks, expected.library) == (ranks, library) and name not in FAILING
    ]
    by_rank = run_ranks(_observe, ranks, names, timeout_s=120.0)
    return {name: ([one[name][0] for one in by_rank], [one[name][1] for one in by_rank]) for name in names}


def observed(name: str) -> Pair:
    """What was seen of the broken loop and its right twin, by rank."""
    one: Loop = loop(name)
    if one.expected.ranks > 1 or one.expected.library:
        return _observed(one.expected.ranks, one.expected.library)[name]
    with warnings.catch_warnings():
        torch.manual_seed(0)
        return [watch(one.broken)], [watch(one.right)]
