"""Memory of this process: its peak, when it ran out, and what an error still holds."""

from __future__ import annotations

import math
import sys
import traceback
from time import monotonic

import torch

try:
    import resource
except ImportError:  # not on this system
    resource = None  # type: ignore[assignment]

ASK_EVERY_S = 1.0


class PeakMemory:
    """The peak so far, asked of the system at most once a second.

    A system call gives way to whoever else waits for the core, and a peak never falls.
    """

    def __init__(self) -> None:
        self._asked_at = -math.inf
        self._bytes: int | None = None

    def read(self) -> int | None:
        """As :func:`peak_memory_bytes`, up to a second ago."""
        now = monotonic()
        if now - self._asked_at >= ASK_EVERY_S:
            self._asked_at, self._bytes = now, peak_memory_bytes()
        return self._bytes


def peak_memory_bytes() -> int | None:
    """The most memory that this process held at one time since it began, in bytes.

    On an accelerator: what torch's allocator gave out on the current device at its peak. Else: the
    high-water mark of the resident set, which includes Python and the libraries, and never falls.

    Returns:
        Bytes; None where the system or the accelerator does not say.

    Exactness: on an accelerator this is exact for torch's own tensors; the resident set is exact to
    a page, and 50 to 110 MiB above what tensors take.
    Source: getrusage(2) counts ru_maxrss in KiB on Linux, in bytes on macOS.
    """
    if torch.accelerator.is_available():
        try:
            return int(torch.accelerator.max_memory_allocated())
        except RuntimeError:  # a backend whose allocator keeps no count
            return None
    if resource is None:
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on the host or on an accelerator."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


def let_go_of_frames(error: BaseException | None) -> None:
    """Clear what the functions held that ``error``, and what it came from, passed through."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
