"""The packer beside five other ways to cut the same global batches, on the same draws.

    python benchmarks/packing.py                         # every draw, some minutes
    python benchmarks/packing.py --draws lognormal --replicas 1 8
    python benchmarks/packing.py --markdown              # the table of docs/packing.md

Costs are those of a small GPT (width 128, 4 layers) fitted on one CPU core: a micro-batch by itself costs
as much as 64 positions, and a position 1 + length / 1000. docs/packing.md says what the columns are.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from statistics import mean, median

import numpy as np

from wholebatch.packing import CostModel, Rows, pack
from wholebatch.train.data.rows import pydoc_rows

COST = CostModel(per_micro_batch=64, per_position=1, per_position_and_length=0.001)
MICRO_BATCHES_PER_REPLICA = 4.5
DRAWS_EACH = 5
# Costs of the same samples, grouped differently, differ by the rounding of their sums.
TIE = 1 + 1e-9
_MORE_MICRO_BATCHES = (0, 1, 2, 4, 8, 16)

Shares = list[list[list[int]]]  # replica, micro-batch, index


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """One kind of lengths and the budget they are cut to."""

    name: str
    budget: int
    lengths: Callable[[np.random.Generator, int], np.ndarray]


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One global batch to cut."""

    lengths: list[int]
    budget: int
    replicas: int
    rows: Rows

    def positions(self, micro_batch: Sequence[int]) -> int:
        lengths = [self.lengths[index] for index in micro_batch]
        return sum(lengths) if self.rows == "packed" else max(lengths) * len(lengths)

    def fits(self, shares: Shares) -> bool:
        return all(self.positions(each) <= self.budget for share in shares for each in share)

    def cost(self, micro_batch: Sequence[int]) -> float:
        lengths = [self.lengths[index] for index in micro_batch]
        positions = self.positions(micro_batch)
        product = (
            max(lengths) * positions if self.rows == "padded" else sum(each * each for each in lengths)
        )
        return COST.cost(1, positions, product)

    @property
    def longest_first(self) -> list[int]:
        return sorted(range(len(self.lengths)), key=lambda index: (-self.lengths[index], index))


# The draws


def _paragraphs(cap: int) -> Callable[[np.random.Generator, int], np.ndarray]:
    found = np.array([min(len(row.text.encode()), cap) for row in pydoc_rows()])
    return lambda rng, num_samples: rng.choice(found, num_samples)


def _lognormal(rng: np.random.Generator, num_samples: int) -> np.ndarray:
    """Median 665, sigma 1, at most 4096 tokens."""
    return np.clip(np.exp(rng.normal(np.log(665), 1.0, num_samples)), 1, 4096).astype(np.int64)


def _one_long(rng: np.random.Generator, num_samples: int) -> np.ndarray:
    lengths = rng.integers(20, 61, num_samples)
    lengths[rng.integers(num_samples)] = 1024
    return lengths


def draws() -> list[Draw]:
    return [
        Draw(name="text, capped 256", budget=2048, lengths=_paragraphs(256)),
        Draw(name="text, uncapped", budget=6144, lengths=_paragraphs(10_000)),
        Draw(name="lognormal", budget=8192, lengths=_lognormal),
        Draw(name="one long", budget=1024, lengths=_one_long),
        Draw(name="all equal", budget=4096, lengths=lambda _, num_samples: np.full(num_samples, 500)),
    ]


# The methods; each is given the nearest form in which it keeps the budget


def wholebatch(task: Task) -> Shares:
    packing = pack(task.lengths, task.budget, task.replicas, rows=task.rows, cost=COST)
    return [[list(each) for each in share] for share in packing.replicas]


def sorted_fixed(task: Task) -> Shares:
    """Sort the global batch, cut it every m samples, deal in turn; m the largest that keeps the budget."""
    order = task.longest_first
    for samples in range(max(1, task.budget // max(task.lengths)) * 8, 0, -1):
        cut = [order[start : start + samples] for start in range(0, len(order), samples)]
        shares = [cut[replica :: task.replicas] for replica in range(task.replicas)]
        if task.fits(shares):
            return shares
    raise AssertionError("a sample is over the budget")


def longest_first_greedy(task: Task) -> Shares:
    """Longest sample first to the replica with the fewest tokens (LPT); each cuts its own first-fit."""
    loads = [(0, replica) for replica in range(task.replicas)]
    shares: list[list[int]] = [[] for _ in range(task.replicas)]
    for index in task.longest_first:
        tokens, replica = heappop(loads)
        shares[replica].append(index)
        heappush(loads, (tokens + task.lengths[index], replica))
    return [first_fit(task, share) for share in shares]


def karmarkar_karp(task: Task) -> Shares:
    """Largest differencing over the replicas by tokens; each cuts its own first-fit.

    The two partial assignments that differ most are merged, the fullest replica of one with the emptiest
    of the other, until one is left. Source: Karmarkar and Karp 1982, in its form for k sets.
    """
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for index, length in enumerate(task.lengths):
        sets: list[tuple[int, list[int]]] = [(length, [index])]
        sets += [(0, []) for _ in range(task.replicas - 1)]
        heap.append((-length, index, sets))
    heapify(heap)
    number = len(heap)
    while len(heap) > 1:
        first, second = heappop(heap)[2], heappop(heap)[2]
        merged = [
            (high[0] + low[0], high[1] + low[1]) for high, low in zip(first, reversed(second), strict=True)
        ]
        merged.sort(key=lambda each: -each[0])
        number += 1
        heappush(heap, (merged[-1][0] - merged[0][0], number, merged))
    order = {index: place for place, index in enumerate(task.longest_first)}
    return [first_fit(task, sorted(share, key=order.__getitem__)) for _, share in heap[0][2]]


def multipack(task: Task) -> Shares:
    """First-fit decreasing into D rows at a time, of as many of the samples in order as D rows take.

    What its sampler does for one node after another of an epoch, here inside the global batch; the last
    rows, which it drops, are kept. Source: the multipack sampler of the openchat project, ``allocate``.
    """
    shares: Shares = [[] for _ in range(task.replicas)]
    start, num_samples = 0, len(task.lengths)
    while start < num_samples:
        low, high = start + 1, num_samples + 1
        while high - low > 1:
            middle = (low + high) // 2
            if len(_first_fit_decreasing(task, range(start, middle))) <= task.replicas:
                low = middle
            else:
                high = middle
        for replica, row in enumerate(_first_fit_decreasing(task, range(start, low))):
            shares[replica].append(row)
        start = low
    return shares


def batch_rebalance(task: Task) -> Shares | None:
    """Transformers' own ``BatchRebalanceSampler``, with as many micro-batches as it needs for the budget.

    It has no budget: it moves samples between D x A runs of the sorted samples, from the dearest to the
    cheapest, and deals them so that the micro-batches of one moment cost alike. None where no A tried
    keeps the budget, or where transformers is not installed.
    """
    try:
        from transformers.trainer_pt_utils import BatchRebalanceSampler
    except ImportError:
        return None
    num_samples = len(task.lengths)
    fewest = pack(task.lengths, task.budget, rows=task.rows).lower_bound
    for more in _MORE_MICRO_BATCHES:
        micro_batches = -(-fewest // task.replicas) + more
        if micro_batches * task.replicas > num_samples:
            return None
        sampler = BatchRebalanceSampler(
            task.lengths, num_samples, task.replicas, micro_batches, shuffle=False, drop_last=False
        )
        # One call for all ranks: each of them works out the whole assignment.
        shares: Shares = sampler._assign(list(range(num_samples)), task.lengths)
        if task.fits(shares):
            return shares
    return None


def first_fit(task: Task, order: Sequence[int]) -> list[list[int]]:
    """Each sample into the first micro-batch that takes it; for padded rows, those in the order given."""
    found: list[list[int]] = []
    sizes: list[tuple[int, int]] = []  # longest or tokens, and samples
    for index in order:
        length = task.lengths[index]
        for number, (size, samples) in enumerate(sizes):
            fits = size + length if task.rows == "packed" else max(size, length) * (samples + 1)
            if fits <= task.budget:
                found[number].append(index)
                sizes[number] = (size + length if task.rows == "packed" else max(size, length), samples + 1)
                break
        else:
            found.append([index])
            sizes.append((length, 1))
    return found


def _first_fit_decreasing(task: Task, indices: Sequence[int]) -> list[list[int]]:
    return first_fit(task, sorted(indices, key=lambda index: (-task.lengths[index], index)))


METHODS: dict[str, Callable[[Task], Shares | None]] = {
    "wholebatch": wholebatch,
    "sorted, fixed m": sorted_fixed,
    "longest first": longest_first_greedy,
    "Karmarkar-Karp": karmarkar_karp,
    "multipack": multipack,
    "batch rebalance": batch_rebalance,
}


# What came out


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One method on one global batch."""

    padding_share: float
    imbalance: float
    micro_batches_over_bound: float
    slowest_over_ideal: float
    seconds: float


def measure(task: Task, method: Callable[[Task], Shares | None]) -> Outcome | None:
    """Run a method once, check it, and measure what it made; its time is of the processor."""
    before = time.process_time()
    shares = method(task)
    seconds = time.process_time() - before
    if shares is None:
        return None
    placed = sorted(index for share in shares for each in share for index in each)
    assert placed == list(range(len(task.lengths))), "a sample is missing or there twice"
    assert task.fits(shares), "a micro-batch is over the budget"
    costs = [sum(task.cost(each) for each in share) for share in shares]
    positions = sum(task.positions(each) for share in shares for each in share)
    ideal = COST.cost(0, sum(task.lengths), sum(each * each for each in task.lengths)) / task.replicas
    bound = pack(task.lengths, task.budget, rows=task.rows).lower_bound
    return Outcome(
        padding_share=1 - sum(task.lengths) / positions,
        imbalance=max(costs) / mean(costs),
        micro_batches_over_bound=sum(map(len, shares)) / bound,
        slowest_over_ideal=max(costs) / ideal,
        seconds=seconds,
    )


def tasks(draw: Draw, replicas: int, rows: Rows, how_many: int) -> Iterator[Task]:
    """Yield global batches of some 4.5 micro-batches a replica; 256 samples or more."""
    rng = np.random.default_rng(17)
    typical = float(draw.lengths(np.random.default_rng(1), 1000).mean())
    num_samples = max(256, round(MICRO_BATCHES_PER_REPLICA * replicas * draw.budget / typical))
    for _ in range(how_many):
        lengths = [int(length) for length in draw.lengths(rng, num_samples)]
        yield Task(lengths=lengths, budget=draw.budget, replicas=replicas, rows=rows)


def compare(draw: Draw, replicas: int, rows: Rows, how_many: int) -> dict[str, list[Outcome | None]]:
    found: dict[str, list[Outcome | None]] = {name: [] for name in METHODS}
    for task in tasks(draw, replicas, rows, how_many):
        for name, method in METHODS.items():
            found[name].append(measure(task, method))
    return found


def lines(head: list[str], found: dict[str, list[Outcome | None]]) -> Iterator[list[str]]:
    """Yield one line for each method: medians over the draws, and its time over the packer's."""
    ours = [each for each in found["wholebatch"] if each is not None]
    for name, outcomes in found.items():
        kept = [each for each in outcomes if each is not None]
        if len(kept) < len(outcomes):
            yield [*head, name, *["-"] * 5]
            continue
        times = [each.seconds / own.seconds for each, own in zip(kept, ours, strict=True)]
        own_time = f"{median(each.seconds for each in ours) * 1e3:.1f} ms"
        yield [
            *head,
            name,
            f"{median(each.padding_share for each in kept):.1%}",
            f"{max(each.imbalance for each in kept):.4f}",
            f"{median(each.micro_batches_over_bound for each in kept):.2f}",
            f"{median(each.slowest_over_ideal for each in kept):.4f}",
            own_time if name == "wholebatch" else f"{median(times):.2f} x",
        ]


HEAD = ["draw", "D", "rows", "method", "padding", "imbalance", "over bound", "slowest / ideal", "time"]


def worst_against_others(found: dict[str, list[Outcome | None]]) -> float:
    """The packer's slowest replica over the best other method's, on the draw where that is largest."""
    ratios = []
    for place, ours in enumerate(found["wholebatch"]):
        others = [outcomes[place] for name, outcomes in found.items() if name != "wholebatch"]
        best = min(each.slowest_over_ideal for each in others if each is not None)
        assert ours is not None
        ratios.append(ours.slowest_over_ideal / best)
    return max(ratios)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, print the table; exit code 1 where another method was better on some draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = [draw.name for draw in draws()]
    parser.add_argument("--draws", nargs="+", choices=names, default=names)
    parser.add_argument("--replicas", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--repeat", type=int, default=DRAWS_EACH, help="global batches of each draw")
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args(arguments)
    widths = (17, 3, 7, 16, 8, 10, 11, 16, 9)
    form = (
        (lambda cells: f"| {' | '.join(cells)} |")
        if options.markdown
        else (lambda cells: " ".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)))
    )
    print(form(HEAD))
    if options.markdown:
        print(form(["---"] * len(HEAD)))
    worst = 0.0
    for draw in draws():
        for replicas in options.replicas if draw.name in options.draws else ():
            for rows in ("padded", "packed"):
                found = compare(draw, replicas, rows, options.repeat)
                for line in lines([draw.name, str(replicas), rows], found):
                    print(form(line), flush=True)
                worst = max(worst, worst_against_others(found))
    print(f"\nslowest replica over the best other method's, at worst: {worst:.6f}")
    return int(worst > TIE)


if __name__ == "__main__":
    sys.exit(main())
