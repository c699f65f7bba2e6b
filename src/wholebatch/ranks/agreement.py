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
from wholebatch.ranks.base import PendingRows, Ranks
from wholebatch.ranks.lost import ANSWER_S, last_words, silent_ranks

# What each rank tells first: its number of the exchange from 1 on, by which ranks that run different code
# are told apart, or one of these.
_FAILED = -1.0
_POISONED = -2.0
Place = Literal[
    "drawing micro-batches",
    "about to count items in forwards",
    "adding up what the window holds",
    "about to reduce gradients",
    "agreeing on what came out",
    "saving or loading a checkpoint",
]
_PLACES: tuple[str, ...] = get_args(Place)


@dataclass(slots=True)
class PendingExchange:
    """An exchange that this rank has begun."""

    _told: PendingRows
    _size: int
    _doing: str
    _patience_s: float | None = None

    def wait(self) -> list[tuple[float, ...]]:
        """For each number of the payload what every rank gave, by rank.

        Raises:
            OtherRankFailedError: some rank failed instead; all roll this update back.
            PoisonedWindowError: some rank is beyond the point of no return, or is gone.
        """
        try:
            rows = self._told.wait()
        except RuntimeError as error:
            raise PoisonedWindowError(
                f"contact with another rank was lost while {self._doing}: "
                f"{why_lost(_patience(self._patience_s))}. Restart from the last committed update ({error})"
            ) from error
        told = list(zip(*rows, strict=True))
        states = [round(state) for state in told[0]]
        if _POISONED in states:
            raise PoisonedWindowError(
                f"{_ranks_at(states, _POISONED)} failed beyond the point of no return of an earlier "
                f"update; restart all ranks from the last committed update"
            )
        if _FAILED in states:
            raise OtherRankFailedError(
                f"{_ranks_at(states, _FAILED)} failed while this rank was {self._doing}; an update under "
                f"way was rolled back on every rank and may be run again"
            )
        if len(set(states)) > 1:
            where = "; ".join(
                f"{_ranks_at(states, place)} {_PLACES[place - 1]}" for place in sorted(set(states))
            )
            raise PoisonedWindowError(
                f"this rank was {self._doing} while another was elsewhere in its loop ({where}); every "
                f"rank must make the same calls of window.batches, update and run. Restart from the last "
                f"committed update"
            )
        return told[1 : 1 + self._size]


class Agreement:
    """The exchanges of one window.

    Args:
        ranks: the seam by which they tell each other.
        size: the largest payload, in numbers.
    """

    def __init__(self, ranks: Ranks, size: int) -> None:
        self._ranks = ranks
        self._size = size

    def exchange(
        self, payload: Sequence[float] = (), *, doing: Place, failed: bool = False
    ) -> PendingExchange:
        """Begin an exchange; ``failed`` tells the others that this rank can't commit."""
        return self._begin(_FAILED if failed else 1.0 + _PLACES.index(doing), payload, doing)

    def report_failure(self) -> None:
        """Answer the exchange that the others make next, and wait until they have heard.

        Raises:
            PoisonedWindowError: they don't: they ended, or are inside a collective that this rank left.
        """
        try:
            self._begin(_FAILED, (), "reporting its own failure", self._ranks.patience_s).wait()
        except OtherRankFailedError:
            return

    def report_poison(self) -> None:
        """Leave word for the exchange that the others may make later; does not wait."""
        self._begin(_POISONED, (), "reporting poison")

    def _begin(
        self, state: float, payload: Sequence[float], doing: str, patience_s: float | None = None
    ) -> PendingExchange:
        assert len(payload) <= self._size, (len(payload), self._size)
        row = [state, *payload, *[0.0] * (self._size - len(payload))]
        try:
            told = self._ranks.tell(row, patience_s)
        except RuntimeError as error:
            raise PoisonedWindowError(
                f"contact with another rank was lost while {doing}: {why_lost()}. Restart from the last "
                f"committed update ({error})"
            ) from error
        return PendingExchange(told, len(payload), doing, patience_s)


def _ranks_at(states: Sequence[float], wanted: float) -> str:
    return name_ranks([rank for rank, state in enumerate(states) if state == wanted])


def _patience(patience_s: float | None) -> str:
    return "the process group's timeout" if patience_s is None else f"{patience_s:g} seconds"


def why_lost(waited: str = "the process group's timeout") -> str:
    """Why contact was lost, as far as it is known, for a message.

    Args:
        waited: how long the other rank had to answer.
    """
    if words := last_words():
        return words
    silent = silent_ranks()
    named = f"; no sign of {name_ranks(silent)} within {ANSWER_S:g} s when asked for one" if silent else ""
    return f"it ended, or did not answer within {waited}{named}"


def unlike_first(values: Sequence[object]) -> list[int]:
    """The ranks whose value is not the first rank's."""
    return [rank for rank, value in enumerate(values) if value != values[0]]


def name_ranks(ranks: Sequence[int]) -> str:
    """Ranks by number, the first few of many: "rank 3", "ranks 1 and 5", "ranks 0, 1, 2 and 9 more"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) <= 4:
        return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks[:3]))} and {len(ranks) - 3} more"
