"""Contact with another rank that is lost in the middle of a collective, and why.

A rank that fails alone inside one can't tell the others, who wait in it until this rank's process ends. So
it leaves its last words in the store by which the ranks found each other, and ends; the others read them
once they are cut off.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from time import monotonic, sleep
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from wholebatch.whereabouts import told

# How long a rank that lost contact waits for the others to say that they did.
ANSWER_S = 1.0

_KEY = "wholebatch/last_words"
_CUT_OFF = "wholebatch/cut_off/"


def is_lost_contact(error: BaseException | None) -> bool:
    """Whether an error says that another rank ended or did not answer, or comes from one that does.

    On gloo torch has no class for it; the message begins with a place in gloo's source.
    """
    while error is not None:
        of_backend = isinstance(error, dist.DistError)
        if of_backend or (isinstance(error, RuntimeError) and "/gloo/" in str(error)):
            return True
        error = error.__cause__
    return False


def leave_words(rank: int, during: str, error: BaseException) -> None:
    """Say why this rank leaves others in a collective, for them to read; it must end soon after.

    Args:
        rank: number of this rank.
        during: what all were doing: "in an evaluation".
        error: of this rank's own. The first rank's words stay: what follows from them is no news.
    """
    if dist.is_initialized():
        with suppress(Exception):  # the error under way came first and says more
            _get_default_store().compare_set(_KEY, "", f"rank {rank} failed {during}: {told(error)}")


def last_words() -> str:
    """What a rank said that left the others in a collective; empty where none did, or it had no time."""
    if not dist.is_available() or not dist.is_initialized():
        return ""
    with suppress(Exception):  # whoever kept the words may be gone too
        store = _get_default_store()
        return store.get(_KEY).decode() if store.check([_KEY]) else ""
    return ""


def silent_ranks() -> list[int]:
    """The ranks of the job that do not say, within ANSWER_S, that they lost contact too.

    A rank that was killed left no words, and a collective of the ranks that are left can't ask for it: the
    first to notice cuts off the next. So each says in the store that it is there.

    Returns:
        Numbers of ranks: those that are gone, or hang, or have not noticed yet; none where nobody can be
        asked. The last rank to notice names those alone that are gone or hang.
    """
    if not dist.is_available() or not dist.is_initialized():
        return []
    with suppress(Exception):  # whoever kept the words may be gone too
        store = _get_default_store()
        store.set(f"{_CUT_OFF}{dist.get_rank()}", "1")
        ranks, until = range(dist.get_world_size()), monotonic() + ANSWER_S
        while (silent := _unsaid(store, ranks)) and monotonic() < until:
            sleep(0.05)  # a wait of the store's own tells of its timeout on the console
        return silent
    return []


def _unsaid(store: Any, ranks: Sequence[int]) -> list[int]:
    """Those of ``ranks`` that left no sign, by halves: few questions where there are few of many."""
    if store.check([f"{_CUT_OFF}{rank}" for rank in ranks]):
        return []
    if len(ranks) == 1:
        return [*ranks]
    half = len(ranks) // 2
    return _unsaid(store, ranks[:half]) + _unsaid(store, ranks[half:])
