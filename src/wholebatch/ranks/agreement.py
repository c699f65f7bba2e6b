"""One small exchange at a time, by which the ranks of an update know how the others fare.

An update makes the same exchanges on every rank: what is in the window, that the last backward may
begin, and what came out. All are of one size. So a rank that fails at any moment before the point
of no return can answer whichever exchange the others make next, and none is left waiting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from wholebatch.errors import OtherRankFailedError, PoisonedWindowError
from wholebatch.ranks.base import PendingTotal, Ranks

# ranks that failed, the sum of their numbers, ranks that are poisoned, and the exchange's place in the
# update with its square, by which ranks that run different code are told apart
_HEADER = 5
Place = Literal[
    "drawing micro-batches",
    "adding up what the window holds",
    "about to reduce gradients",
    "agreeing on what came out",
    "saving or loading a checkpoint",
]
_PLACES: tuple[str, ...] = get_args(Place)


@dataclass(slots=True)
class PendingExchange:
    """An exchange that this rank has begun."""

    _sums: PendingTotal
    _size: int
    _doing: str
    _num_replicas: int

    def wait(self) -> list[float]:
        """The payload, added up over the replicas.

        Raises:
            OtherRankFailedError: some rank failed instead; all roll this update back.
            PoisonedWindowError: some rank is beyond the point of no return, or is gone.
        """
        try:
            sums = self._sums.wait()
        except RuntimeError as error:
            raise PoisonedWindowError(
                f"contact with another rank was lost while {self._doing}: it ended, or did not answer "
                f"within the process group's timeout. Restart from the last committed update ({error})"
            ) from error
        failed, numbers, poisoned, places, squares = (round(value) for value in sums[:_HEADER])
        who = f"rank {numbers}" if failed == 1 else f"{failed} ranks"
        if poisoned:
            raise PoisonedWindowError(
                f"{who} failed beyond the point of no return of an earlier update; "
                f"restart all ranks from the last committed update"
            )
        if failed:
            raise OtherRankFailedError(
                f"{who} failed while this rank was {self._doing}; an update under way was rolled back on "
                f"every rank and may be run again"
            )
        if not same_everywhere(places, squares, self._num_replicas):
            raise PoisonedWindowError(
                f"this rank was {self._doing} while another was elsewhere in its loop; every rank "
                f"must make the same calls of window.batches, update and run. Restart from the last "
                f"committed update"
            )
        return sums[_HEADER : _HEADER + self._size]


class Agreement:
    """The exchanges of one window.

    Args:
        ranks: the seam that adds vectors up.
        size: the largest payload, in numbers.
    """

    def __init__(self, ranks: Ranks, size: int) -> None:
        self._ranks = ranks
        self._size = size

    def exchange(
        self, payload: Sequence[float] = (), *, doing: Place, failed: bool = False
    ) -> PendingExchange:
        """Begin an exchange; ``failed`` tells the others that this rank can't commit."""
        place = float(_PLACES.index(doing))
        mine = [1.0, float(self._ranks.rank), 0.0] if failed else [0.0, 0.0, 0.0]
        return self._begin([*mine, place, place**2], payload, doing)

    def report_failure(self) -> None:
        """Answer the exchange that the others make next, and wait until they have heard."""
        try:
            self._begin(
                [1.0, float(self._ranks.rank), 0.0, 0.0, 0.0], (), "reporting its own failure"
            ).wait()
        except OtherRankFailedError:
            return

    def report_poison(self) -> None:
        """Leave word for the exchange that the others may make later; does not wait."""
        self._begin([1.0, float(self._ranks.rank), 1.0, 0.0, 0.0], (), "reporting poison")

    def _begin(self, header: Sequence[float], payload: Sequence[float], doing: str) -> PendingExchange:
        assert len(payload) <= self._size, (len(payload), self._size)
        vector = [*header, *payload, *[0.0] * (self._size - len(payload))]
        try:
            sums = self._ranks.total(vector)
        except RuntimeError as error:
            raise PoisonedWindowError(
                f"contact with another rank was lost while {doing}; restart from the last committed "
                f"update ({error})"
            ) from error
        return PendingExchange(sums, len(payload), doing, self._ranks.num_replicas)


def same_everywhere(total: float, squares: float, num_replicas: int) -> bool:
    """Whether every replica gave the same number, from its sum and the sum of its squares.

    ``D * sum x^2 = (sum x)^2`` holds only if all x are equal, and every replica sees the same answer.
    """
    return num_replicas * squares == total**2
