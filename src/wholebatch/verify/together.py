"""What one rank finds out, all ranks know: values of every rank, and failures of any."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from wholebatch.errors import JudgeError, OtherRankFailedError, WholebatchError
from wholebatch.ranks.together import Together
from wholebatch.whereabouts import told

T = TypeVar("T")


class SomeRanksFailedError(JudgeError):
    """Ranks failed in different ways (``everywhere``), or some of them did not fail by themselves."""

    everywhere = False


def group_rank_and_size() -> tuple[int, int]:
    """This process's rank and the number of ranks; ``(0, 1)`` outside a process group."""
    everybody = Together.of_all()
    return everybody.rank, everybody.ranks


def gathered(value: Any) -> list[Any]:
    """``value`` of every rank, in order of rank.

    Raises:
        ContactLostError: another rank is gone.
    """
    return Together.of_all(during="during an experiment").gather(value)


def together(call: Callable[[], T]) -> T:
    """Run ``call`` on every rank, and fail on all of them where it fails on any.

    Without this a rank that goes on would wait for one that has failed.

    Args:
        call: the same experiment on every rank.

    Returns:
        What ``call`` returned on this rank.

    Raises:
        SomeRanksFailedError: some ranks failed, or in different ways; tells each failure on every rank.
        Exception: this rank's own, where every rank failed alike.

    Exactness: no arithmetic.
    """
    failure: Exception | None = None
    try:
        result = call()
    except Exception as error:
        failure = error
    failures = gathered(None if failure is None else in_words(failure))
    if not any(failures):
        return result
    if failure is not None and all(one == failures[0] for one in failures):
        raise failure
    some = SomeRanksFailedError(failures_told(failures))
    some.everywhere = all(one is not None and not one[1] for one in failures)
    raise some from failure


def in_words(failure: Exception) -> tuple[str, bool]:
    """The failure in words, and whether it says no more than that another rank failed."""
    ours = isinstance(failure, WholebatchError)
    return str(failure) if ours else told(failure), isinstance(failure, OtherRankFailedError)


def failures_told(failures: list[tuple[str, bool] | None]) -> str:
    """Every failure of its own, with its rank where the ranks did not all fail alike.

    Args:
        failures: of every rank what :func:`in_words` gave, or ``None`` where it did not fail.
    """
    if len(failures) == 1 or all(one is not None and one == failures[0] for one in failures):
        assert failures[0] is not None
        return failures[0][0]
    found = [(rank, one) for rank, one in enumerate(failures) if one is not None]
    own = [(rank, words) for rank, (words, secondary) in found if not secondary]
    shown = own or [(rank, words) for rank, (words, _) in found]
    fine = [str(rank) for rank, one in enumerate(failures) if one is None]
    rest = f" (no failure on rank {', '.join(fine)})" if fine else ""
    return "; ".join(f"on rank {rank}: {words}" for rank, words in shown) + rest
