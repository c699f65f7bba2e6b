"""Ctrl-C and SIGTERM: noted when they come, answered on the edge of an update."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic
from types import FrameType

# After SIGTERM an update or an evaluation may go on for so long. torchrun kills 30 s after it.
GRACE_S = 5.0


@dataclass(kw_only=True, slots=True)
class Stop:
    """Whether somebody asked the job to stop, and whether by SIGTERM.

    Args:
        asked: by Ctrl-C or SIGTERM.
        terminated_at: when SIGTERM came, on the clock of ``time.monotonic``; None if it did not.
    """

    asked: bool = False
    terminated_at: float | None = None

    @property
    def terminated(self) -> bool:
        """Whether SIGTERM came; whoever sends that kills soon after."""
        return self.terminated_at is not None

    @property
    def in_a_hurry(self) -> bool:
        """Whether SIGTERM came so long ago that what is under way is better left than finished."""
        return self.terminated_at is not None and monotonic() - self.terminated_at > GRACE_S


@contextmanager
def stop_on_signal() -> Iterator[Stop]:
    """Let the first Ctrl-C or SIGTERM end the run on an edge between updates; a second Ctrl-C at once.

    A second SIGTERM changes nothing: torchrun passes on the one that all processes have had already.
    """
    stop = Stop()

    def ask(number: int, _frame: FrameType | None) -> None:
        if stop.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        if number == signal.SIGTERM and stop.terminated_at is None:
            stop.terminated_at = monotonic()
        stop.asked = True

    found = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in found.items():
            signal.signal(number, handler)
