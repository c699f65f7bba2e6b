"""What is in a window, counted before its first backward and added up over the replicas.

Numbers travel as float64, exact for whole numbers below 2^53; the 64-bit digest of sample ids goes
in four parts of 16 bits.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from wholebatch.errors import ObjectiveError, WindowUsageError
from wholebatch.gradients import read_scalars
from wholebatch.objective import Number, Objective, SummedLoss
from wholebatch.order import format_digest, sample_digest
from wholebatch.ranks.agreement import same_everywhere

_DIGEST_PARTS = 4
_COUNTS = 10
_FIXED = _COUNTS + _DIGEST_PARTS  # numbers of a payload before the terms


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
    """

    micro_batches: int
    samples: int
    positions: int
    digest: int | None
    items: tuple[tuple[float | None, ...], ...]
    settings: int
    needs_reset: bool
    samples_left_out: int

    def payload(self, num_terms: int) -> list[float]:
        """The numbers to add up over the replicas, ``payload_size(num_terms)`` of them."""
        digest = self.digest or 0
        parts = [float(digest >> (16 * part) & 0xFFFF) for part in range(_DIGEST_PARTS)]
        columns = [[row[term] for row in self.items] for term in range(num_terms)]
        return [
            float(self.micro_batches),
            float(self.micro_batches**2),
            float(self.micro_batches == 0),
            float(self.samples),
            float(self.positions),
            float(self.micro_batches > 0 and self.digest is None),
            float(self.settings),
            float(self.settings**2),
            float(self.needs_reset),
            float(self.samples_left_out),
            *parts,
            *(sum(number for number in column if number is not None) for column in columns),
            *(float(any(number is None for number in column)) for column in columns),
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class GlobalTally:
    """The same over all replicas.

    Attributes:
        micro_batches, samples, positions: how many of each, over all replicas.
        uneven: whether the replicas hold different numbers of micro-batches.
        ranks_without: replicas that hold none.
        same_settings: whether every replica has the same.
        reset: whether the engine was left armed on some replica.
        samples_left_out: samples that could not be read, over all replicas.
        digest: 16 hex digits, ``None`` where some sample ids are not known.
        items: N of each term, ``None`` where unknown before the forward.
    """

    micro_batches: int
    samples: int
    positions: int
    uneven: bool
    ranks_without: int
    same_settings: bool
    reset: bool
    samples_left_out: int
    digest: str | None
    items: tuple[float | None, ...]

    def why_empty(self) -> str:
        """Why an update without items has none, in words."""
        if self.samples_left_out and not self.samples:
            return f"none of its {self.samples_left_out} samples could be read"
        return "no micro-batch of any rank has an item to learn from"

    @classmethod
    def from_sums(cls, sums: Sequence[float], *, num_replicas: int, num_terms: int) -> GlobalTally:
        """Read payloads that were added up over ``num_replicas``."""
        micro_batches, squares, without, samples, positions, anonymous, *rest = sums[:_COUNTS]
        *settings, reset, left_out = rest
        parts = sums[_COUNTS:_FIXED]
        digest = sum(round(part) << (16 * place) for place, part in enumerate(parts)) % 2**64
        items = sums[_FIXED : _FIXED + num_terms]
        unknown = sums[_FIXED + num_terms :]
        return cls(
            micro_batches=round(micro_batches),
            samples=round(samples),
            positions=round(positions),
            uneven=not same_everywhere(micro_batches, squares, num_replicas),
            ranks_without=round(without),
            same_settings=same_everywhere(settings[0], settings[1], num_replicas),
            reset=reset > 0,
            samples_left_out=round(left_out),
            digest=None if anonymous else format_digest(digest),
            items=tuple(
                None if unknowable else number for number, unknowable in zip(items, unknown, strict=True)
            ),
        )


def payload_size(num_terms: int) -> int:
    """Numbers in a payload."""
    return _FIXED + 2 * num_terms


def fingerprint(*settings: object) -> int:
    """A number of 20 bits that is the same for the same settings; its square adds up exactly."""
    return zlib.crc32(repr(settings).encode()) & 0xFFFFF


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

    Raises:
        ObjectiveError: a number of items that is negative or not finite.
        WindowUsageError: sample ids that are not one for each sample.
    """
    terms = list(objective.coefficients)
    flat = _items(batches, objective, terms) if counted is None else [c[t] for c in counted for t in terms]
    known = read_scalars([0.0 if number is None else number for number in flat])
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
    return isinstance(batch, Mapping) and batch.get("sample_ids") is not None
