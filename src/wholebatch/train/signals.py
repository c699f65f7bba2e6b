"""Ctrl-C, SIGTERM and a closed terminal: noted when they come, answered on the edge of an update."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic
from types import FrameType
from typing import Any

# After SIGTERM an update or an evaluation may go on for so long. torchrun kills 30 s after it.
GRACE_S = 5.0
SIGHUP = 1  # Windows has none


@dataclass(kw_only=True, slots=True)
class Stop:
    """Whether somebody asked the job to stop, and whether by SIGTERM or SIGHUP.

    Args:
        asked: by Ctrl-C, SIGTERM or SIGHUP.
        terminated_at: when SIGTERM or SIGHUP came, on the clock of ``time.monotonic``; None if none did.
        hung_up: whether it was SIGHUP that came first.
        on_edges: whether there are edges between updates to answer on. Before, a signal ends the
            program at once.
    """

    asked: bool = False
    terminated_at: float | None = None
    hung_up: bool = False
    on_edges: bool = True

    @property
    def terminated(self) -> bool:
        """Whether SIGTERM or SIGHUP came; whoever sends that kills soon after."""
        return self.terminated_at is not None

    @property
    def in_a_hurry(self) -> bool:
        """Whether SIGTERM came so long ago that what is under way is better left than finished."""
        return self.terminated_at is not None and monotonic() - self.terminated_at > GRACE_S


@contextmanager
def stop_on_signal(*, on_edges: bool = True) -> Iterator[Stop]:
    """Let the first Ctrl-C, SIGTERM or SIGHUP end the run on an edge; a second Ctrl-C ends it at once.

    A second SIGTERM changes nothing: torchrun passes on the one that all processes have had already.
    SIGHUP stays ignored where it is, as under ``nohup``.

    Args:
        on_edges: False where no update is run yet; to be set in what is returned when one is.
    """
    stop = Stop(on_edges=on_edges)

    def ask(number: int, frame: FrameType | None) -> None:
        if not stop.on_edges:
            _end_at_once(number, frame, found[number])
            return
        if stop.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        if number != signal.SIGINT and stop.terminated_at is None:
            stop.terminated_at = monotonic()
            stop.hung_up = number == SIGHUP
        stop.asked = True

    numbers = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    found: dict[int, Any] = {}
    for number in numbers:
        found[number] = signal.getsignal(number)  # before ours may ask for it
        signal.signal(number, ask)
    try:
        yield stop
    finally:
        for caught, handler in found.items():
            signal.signal(caught, handler)


def _end_at_once(number: int, frame: FrameType | None, before: object) -> None:
    """What a signal does that nobody handles, or what the handler before does."""
    if callable(before):
        before(number, frame)
    elif before != signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
