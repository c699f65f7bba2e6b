"""Does padding couple the samples? With ``collate``, cut the collated whole batch instead and look again.

A ``collate`` that pads to the longest sample gives a sample other neighbours *and* another length in each
split. Cut after collating, every sample keeps the length that it has in the whole batch: what then adds up
was coupled by padding only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from wholebatch.errors import WholebatchError
from wholebatch.split import split_batch
from wholebatch.verify.plain import PlainSum
from wholebatch.verify.trial import Problem

PADDED_LENGTH_ADVICE = (
    "Each loss is divided by the padded length of its micro-batch, and that depends on how the batch is "
    "cut: collated once and cut afterwards, the losses add up. Does the loss divide by the padded length "
    "(a mean over positions)? Divide by the sample's own number of items, or return the sum and the number "
    "of all items."
)
PADDING_COUNTED_ADVICE = (
    "Padding is summed and counted, and how much of it there is depends on how the batch is cut: collated "
    "once and cut afterwards, losses and items add up. Leave padded positions out of the loss and out of "
    "num_items."
)
PADDING_ADVICE = (
    "Padding changes what is computed, and it depends on how the batch is cut: collated once and cut "
    "afterwards, the losses add up. Does the loss divide by the padded length, or sum over padding? Do "
    "attention, pooling, a norm or a backward recurrence see it? Mask it, or pad to a fixed length."
)
PADDING_NOT_TRIED = (
    " Whether padding does it could not be tried; if collate pads to the longest sample, ask first: does "
    "the loss divide by the padded length?"
)


def cut_after_collating(problem: Problem, sizes: Sequence[int]) -> Problem | None:
    """The same problem, collated once as a whole and cut afterwards.

    Args:
        problem: what is judged.
        sizes: a split, to try.

    Returns:
        ``None`` where there is no ``collate``, or what it makes can't be cut in dimension 0.

    Exactness: no arithmetic.
    """
    if not problem.collated:
        return None
    try:
        split_batch(problem.whole, sizes)
    except WholebatchError:
        return None
    return replace(problem, cut=lambda sizes: split_batch(problem.whole, sizes), collated=False)


def divides_by_length(
    own: PlainSum, padded: PlainSum, *, term: str, lengths: Sequence[set[tuple[int, int]]], margin: float
) -> bool:
    """Whether a loss is a sum that does not see padding, over the padded length.

    Then ``S_own * P_own = S_padded * P_whole`` in each micro-batch, for some dimension of length P; or for
    P - 1, where labels are shifted by one.

    Args:
        own: the plain sum of micro-batches collated by themselves.
        padded: that of the collated whole, cut.
        term: whose losses.
        lengths: from :func:`padded_lengths`, by micro-batch.
        margin: relative difference that rounding explains.
    """
    losses = [
        (one.get(term, 0.0), other.get(term, 0.0))
        for one, other in zip(own.loss_sums, padded.loss_sums, strict=True)
    ]

    def explained(shift: int) -> bool:
        return all(
            any(
                abs(one * (short - shift) - other * (long - shift)) <= margin * abs(other * (long - shift))
                for short, long in (found or {(2, 2)})
            )
            for (one, other), found in zip(losses, lengths, strict=True)
        )

    return any(lengths) and (explained(0) or explained(1))


def padded_lengths(own: Any, padded: Any) -> set[tuple[int, int]]:
    """Lengths, other than of dimension 0, in which two collations of the same samples differ.

    Args:
        own: a micro-batch collated by itself.
        padded: the same samples out of the collated whole.

    Returns:
        Pairs of the length of one and of the other.
    """
    return {
        (short, long)
        for one, other in zip(_shapes(own), _shapes(padded), strict=False)
        for short, long in zip(one[1:], other[1:], strict=False)
        if short != long
    }


def _shapes(batch: Any) -> Iterator[tuple[int, ...]]:
    if isinstance(batch, Mapping):
        for part in batch.values():
            yield from _shapes(part)
    elif isinstance(batch, (tuple, list)):
        for part in batch:
            yield from _shapes(part)
    elif hasattr(batch, "shape"):
        yield tuple(batch.shape)
