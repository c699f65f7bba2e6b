"""What is in a window, counted before its first backward and added up over the ranks.

Numbers travel as float64, exact for whole numbers below 2^53; the 64-bit digest of sample ids goes
in two halves of 32 bits.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from wholebatch.content import content_marks
from wholebatch.errors import ObjectiveError, WindowUsageError
from wholebatch.gradients import read_scalars
from wholebatch.objective import Number, Objective, SummedLoss
from wholebatch.order import format_digest, sample_digest
from wholebatch.ranks.agreement import name_ranks, unlike_first
from wholebatch.ranks.base import Roles

_DIGEST_PARTS, _PART_BITS = 2, 32
_COUNTS = 7
_COMPARED = 3  # numbers that are looked at rank by rank
_TERMS = 3  # a row has room for so many terms, or a multiple


@dataclass(frozen=True, kw_only=True, slots=True)
class Tally:
    """What one rank holds of a window.

    Attributes:
        micro_batches, samples, positions: how many of each; no positions where they are not known.
        digest: commutative digest of the sample ids, ``None`` where they are not known.
        items: for each micro-batch and term, the items counted ahead; ``None`` where unknowable.
        settings: fingerprint of what must be the same on every rank.
        needs_reset: whether the engine was left armed on this rank.
        samples_left_out: samples that could not be read and are in no micro-batch.
        content: what tells other tensors, where ranks of one replica compare theirs; else empty.
    """

    micro_batches: int
    samples: int
    positions: int
    digest: int | None
    items: tuple[tuple[float | None, ...], ...]
    settings: int
    needs_reset: bool
    samples_left_out: int
    content: tuple[float, ...] = ()

    def payload(self, num_terms: int, roles: Roles) -> list[float]:
        """The numbers to tell the other ranks, ``payload_size(num_terms)`` of them.

        Samples are given by one rank of each replica, items and positions by those that count them.
        """
        digest = self.digest or 0
        parts = [float(digest >> (_PART_BITS * part) & 0xFFFFFFFF) for part in range(_DIGEST_PARTS)]
        columns = [[row[term] for row in self.items] for term in range(num_terms)]
        counted = float(roles.counts_samples)
        items = [sum(number for number in column if number is not None) for column in columns]
        return [
            self.micro_batches,
            self.settings,
            fingerprint(self.micro_batches, self.samples, self.digest, self.content),
            counted * self.micro_batches,
            counted * self.samples,
            roles.counts_items * self.positions,
            float(self.micro_batches > 0 and self.digest is None),
            float(self.needs_reset),
            counted * self.samples_left_out,
            self.micro_batches if roles.counts_items else 0.0,
            *(counted * part for part in parts),
            *(number if roles.counts_items else 0.0 for number in items),
            *(float(any(number is None for number in column)) for column in columns),
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class GlobalTally:
    """The same over all ranks.

    Attributes:
        micro_batches, samples, positions: how many of each, over all replicas.
        micro_batches_of: how many micro-batches each rank holds.
        other_settings: ranks that do not have the first rank's settings.
        other_samples: ranks that do not hold what another rank of their replica does.
        reset: whether the engine was left armed on some rank.
        samples_left_out: samples that could not be read, over all replicas.
        parts: micro-batches whose items are counted on their own; more than ``micro_batches`` where
            sequences are cut over ranks.
        digest: 16 hex digits, ``None`` where some sample ids are not known.
        items: N of each term, ``None`` where unknown before the forward.
    """

    micro_batches: int
    samples: int
    positions: int
    micro_batches_of: tuple[int, ...]
    other_settings: list[int]
    other_samples: list[int]
    reset: bool
    samples_left_out: int
    parts: int
    digest: str | None
    items: tuple[float | None, ...]

    @property
    def uneven(self) -> bool:
        """Whether the ranks hold different numbers of micro-batches."""
        return len(set(self.micro_batches_of)) > 1

    @property
    def ranks_without(self) -> int:
        """How many ranks hold none."""
        return self.micro_batches_of.count(0)

    def refuse_odd(self, *, settings: str, replicas: int, planned_samples: int | None) -> None:
        """Refuse what no update can be made of; every rank sees the same.

        Args:
            settings: of this rank, in words.
            replicas: D.
            planned_samples: of a full global batch; None where nobody planned it.

        Raises:
            WindowUsageError: no micro-batch, more samples than planned, ranks that don't agree.
        """
        if self.micro_batches == 0 and self.samples_left_out == 0:
            raise WindowUsageError("an update needs at least one micro-batch on some rank; got none")
        if self.other_settings:
            raise WindowUsageError(
                f"the ranks do not have the same settings: {name_ranks(self.other_settings)} not as "
                f"rank 0; this one has {settings}. Build the window and load its state alike on "
                f"every rank"
            )
        if self.other_samples:
            raise WindowUsageError(
                f"other micro-batches were given to {name_ranks(self.other_samples)} than to another rank "
                f"of the same replica, by what their tensors hold or by their sample ids; ranks that share "
                f"a replica (tensor, context or pipeline parallel) are given the same samples, in the same "
                f"order: draw them by the replica's number, not by the rank's, and leave out on all what "
                f"one of them can't read"
            )
        if planned_samples is not None and self.samples > planned_samples:
            raise WindowUsageError(
                f"this update holds {self.samples} samples over {replicas} replicas, more than "
                f"the plan's global batch of {planned_samples}"
            )

    def why_empty(self) -> str:
        """Why an update without items has none, in words."""
        if self.samples_left_out and not self.samples:
            return f"none of its {self.samples_left_out} samples could be read"
        return "no micro-batch of any rank has an item to learn from"

    @classmethod
    def of_ranks(cls, told: Sequence[Sequence[float]], *, roles: Roles, num_terms: int) -> GlobalTally:
        """Add up what the ranks told: for each number of a payload that of every rank."""
        held, settings, prints = told[:_COMPARED]
        sums = list(map(sum, told[_COMPARED:]))
        micro_batches, samples, positions, anonymous, reset, left_out, counted = sums[:_COUNTS]
        parts, by_term = sums[_COUNTS:][:_DIGEST_PARTS], sums[_COUNTS + _DIGEST_PARTS :]
        digest = sum(round(part) << (_PART_BITS * place) for place, part in enumerate(parts)) % 2**64
        items, unknown = by_term[:num_terms], by_term[num_terms:]
        return cls(
            micro_batches=round(micro_batches),
            samples=round(samples),
            positions=round(positions),
            micro_batches_of=tuple(map(round, held)),
            other_settings=unlike_first(settings),
            other_samples=_unlike_their_replica(prints, roles.replica_of),
            reset=reset > 0,
            samples_left_out=round(left_out),
            parts=round(counted),
            digest=None if anonymous else format_digest(digest),
            items=tuple(
                None if unknowable else number for number, unknowable in zip(items, unknown, strict=True)
            ),
        )


def _unlike_their_replica(prints: Sequence[float], replica_of: Sequence[int]) -> list[int]:
    firsts = dict(zip(reversed(replica_of), reversed(prints), strict=True))
    return [rank for rank, seen in enumerate(prints) if seen != firsts[replica_of[rank]]]


def payload_size(num_terms: int) -> int:
    """Numbers in a payload."""
    return _COMPARED + _COUNTS + _DIGEST_PARTS + 2 * num_terms


def row_size(num_terms: int) -> int:
    """Numbers that a window tells at once; the same on ranks with other terms, which then hear of it."""
    return payload_size(_TERMS * -(-num_terms // _TERMS))


def fingerprint(*settings: object) -> int:
    """A number of 32 bits that is the same for the same settings, and nearly always another for others."""
    return zlib.crc32(repr(settings).encode())


def tally(
    batches: Sequence[Any],
    objective: Objective,
    *,
    count_samples: Callable[[Any], int],
    sample_ids: Iterable[int] | None,
    counted: Sequence[Mapping[str, Number]] | None,
    settings: int,
    needs_reset: bool,
    samples_left_out: int = 0,
    compares_content: bool = False,
) -> Tally:
    """Count what ``batches`` hold.

    Args:
        batches: this rank's micro-batches of one window.
        objective: counts the items.
        count_samples: tells the samples of a micro-batch.
        sample_ids: ids of this rank's samples; by default each batch's own ``"sample_ids"``.
        counted: items of each micro-batch by term where a counting pass found them.
        settings: fingerprint of what must be the same on every rank.
        needs_reset: whether the engine was left armed on this rank.
        samples_left_out: samples of this rank that could not be read.
        compares_content: whether other ranks are given the very same micro-batches.

    Raises:
        ObjectiveError: a number of items that is negative or not finite.
        WindowUsageError: sample ids that are not one for each sample.
    """
    terms = list(objective.coefficients)
    flat = _items(batches, objective, terms) if counted is None else [c[t] for c in counted for t in terms]
    marks = content_marks(batches) if compares_content else []
    # one read of the device for both
    read = read_scalars([*(0.0 if number is None else number for number in flat), *marks])
    known, content = read[: len(flat)], tuple(read[len(flat) :])
    for place, number in enumerate(known):
        if not 0.0 <= number < float("inf"):
            micro_batch, term = divmod(place, len(terms))
            raise ObjectiveError(
                f"micro-batch {micro_batch + 1} counts {number} items of term {terms[term]!r}; a number of "
                f"items is finite and not negative"
            )
    table = [None if given is None else number for given, number in zip(flat, known, strict=True)]
    rows = [tuple(table[start : start + len(terms)]) for start in range(0, len(table), len(terms))]
    samples = [count_samples(batch) for batch in batches]
    return Tally(
        micro_batches=len(batches),
        samples=sum(samples),
        positions=_total(objective.positions(batch) for batch in batches),
        digest=_digest(batches, sample_ids, sum(samples)),
        items=tuple(rows),
        settings=settings,
        needs_reset=needs_reset,
        samples_left_out=samples_left_out,
        content=content,
    )


def _items(batches: Sequence[Any], objective: Objective, terms: Sequence[str]) -> list[Number | None]:
    """The items of each micro-batch and term, one micro-batch after another."""
    # a class derived from it may count in a way of its own
    if type(objective) is SummedLoss and objective.items_of_each is not None:
        return list(objective.items_of_each(batches))
    counts = [objective.count(batch) for batch in batches]
    return [count[term] for count in counts for term in terms]


def _digest(batches: Sequence[Any], sample_ids: Iterable[int] | None, samples: int) -> int | None:
    if sample_ids is None:
        known = [batch["sample_ids"] for batch in batches if _has_sample_ids(batch)]
        if len(known) < max(1, len(batches)):
            return None
        sample_ids = [int(sample_id) for ids in known for sample_id in _on_host(ids)]
    ids = list(sample_ids)
    if len(ids) != samples:
        raise WindowUsageError(f"{len(ids)} sample ids were given for {samples} samples of this window")
    return sample_digest(ids)


def _total(positions: Iterable[int | None]) -> int:
    """All positions; none where those of some micro-batch are not known."""
    numbers = list(positions)
    return sum(n for n in numbers if n is not None) if None not in numbers else 0


def _on_host(ids: Any) -> Any:
    return ids.tolist() if isinstance(ids, Tensor) else ids  # one read, not one for each


def _has_sample_ids(batch: Any) -> bool:
    return (type(batch) is dict or isinstance(batch, Mapping)) and batch.get("sample_ids") is not None
