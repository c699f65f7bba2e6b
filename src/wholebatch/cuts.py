"""How a batch is cut for a verdict: the splits to try, and the function that cuts."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

from wholebatch.errors import JudgeError, SplitError
from wholebatch.split import num_samples, split_batch

# Sampled splits stop at so many micro-batches: more of the same show nothing new and take long.
_MOST_MICRO_BATCHES = 16

Cut = Callable[[Sequence[int]], list[Any]]


def cutter(batch: Any, collate: Callable[[list[Any]], Any] | None) -> tuple[Cut, Any, int]:
    """How to cut the batch, the whole batch, and its number of samples.

    Args:
        batch: what the user gave.
        collate: makes a batch from a list of samples, or ``None``.

    Returns:
        A function from sizes in samples to micro-batches, the whole batch as ``loss_fn`` takes it, and
        the number of samples.

    Raises:
        SplitError: the batch can't be cut.

    Exactness: no arithmetic; every sample lands in exactly one micro-batch.
    """
    if collate is None:
        return lambda sizes: split_batch(batch, sizes), batch, num_samples(batch)
    if not isinstance(batch, Sequence) or isinstance(batch, str | bytes) or not batch:
        raise SplitError(
            f"collate was given, so batch has to be a list of samples, at least one; got a "
            f"{type(batch).__name__}"
        )
    samples = list(batch)

    def cut(sizes: Sequence[int]) -> list[Any]:
        ends = list(itertools.accumulate(sizes))
        return [collate(samples[end - size : end]) for size, end in zip(sizes, ends, strict=True)]

    return cut, collate(samples), len(samples)


def sampled_splits(samples: int, seed: int, *, ranks: int) -> list[tuple[int, ...]]:
    """A few splits of a batch: single samples, halves, unequal ones; at most 16 micro-batches each.

    Args:
        samples: samples of the whole batch, 2 or more.
        seed: for the unequal ones.
        ranks: each gets one micro-batch at least.

    Returns:
        Different lists of sizes in samples.

    Raises:
        JudgeError: too few samples to split.
    """
    if samples < max(2, ranks):
        raise JudgeError(
            f"a batch of {samples} sample(s) can't be split over {ranks} rank(s) into two micro-batches or "
            f"more; give verify at least {max(2, ranks)} samples"
        )
    draw = random.Random(seed)
    finest = min(samples, _MOST_MICRO_BATCHES)
    counts = {finest, max(2, ranks), min(finest, ranks + 1 if ranks > 1 else 3)}
    found = {_even(samples, count): None for count in sorted(counts, reverse=True)}
    for count in sorted(counts):
        edges = sorted(draw.sample(range(1, samples), count - 1))
        found[tuple(b - a for a, b in zip([0, *edges], [*edges, samples], strict=True))] = None
    return list(found)


def _even(samples: int, count: int) -> tuple[int, ...]:
    low, longer = divmod(samples, count)
    return (low + 1,) * longer + (low,) * (count - longer)


def checked_splits(splits: Sequence[Sequence[int]], samples: int, *, ranks: int) -> list[tuple[int, ...]]:
    """The user's splits as tuples of sizes in samples.

    Args:
        splits: lists of micro-batch sizes in samples.
        samples: samples of the whole batch, which each list has to add up to.
        ranks: each gets one micro-batch at least.

    Returns:
        The same sizes.

    Raises:
        SplitError: a list that does not fit; repeats its numbers.
    """
    if not splits:
        raise SplitError("splits=[] tries nothing; give lists of micro-batch sizes, or None to sample some")
    for sizes in splits:
        whole_numbers = all(isinstance(size, int) and not isinstance(size, bool) for size in sizes)
        if not whole_numbers or min(sizes, default=0) < 1 or sum(sizes) != samples:
            raise SplitError(
                f"micro-batches of {list(sizes)} samples do not make the batch of {samples}; give whole "
                f"numbers, at least 1, that add up to {samples}"
            )
        if len(sizes) < ranks:
            raise SplitError(
                f"{list(sizes)} has {len(sizes)} micro-batch(es) for {ranks} ranks; give each rank one"
            )
    return [tuple(sizes) for sizes in splits]
