"""Contact with another rank that is lost in the middle of a collective, and why.

A rank that fails alone inside one can't tell the others, who wait in it until this rank's process ends. So
it leaves its last words in the store by which the ranks found each other, and ends; the others read them
once they are cut off.
"""

from __future__ import annotations

from contextlib import suppress

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from wholebatch.whereabouts import told

_KEY = "wholebatch/last_words"


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


def why_lost(waited: str = "the process group's timeout") -> str:
    """Why contact was lost, as far as it is known, for a message.

    Args:
        waited: how long the other rank had to answer.
    """
    return last_words() or f"it ended, or did not answer within {waited}"
