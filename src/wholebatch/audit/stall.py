"""Ranks that wait for each other for ever: noticed from the side, because the loop itself can't say it."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable

_LOOK_EVERY_S = 0.5
# Frames of the main thread, innermost first, in which a rank can wait for others.
_WAITING_IN = (os.path.join("torch", "distributed"), os.path.join("torch", "autograd"))
_FRAMES = 3


class StallWatch:
    """A thread that looks whether the loop still moves.

    Args:
        progress: a number that grows while the loop does anything that is watched.
        patience_s: seconds without progress, in a call that can wait for others, that count as a stall;
            0 never.
        stalled: called once, on the thread, when it does.
    """

    def __init__(self, progress: Callable[[], int], patience_s: float, stalled: Callable[[], None]) -> None:
        self._progress, self._patience_s, self._stalled = progress, patience_s, stalled
        self._over = threading.Event()
        self._main = threading.main_thread().ident
        if patience_s > 0.0:
            threading.Thread(target=self._look, name="wholebatch-audit-stall", daemon=True).start()

    def end(self) -> None:
        """Look no longer."""
        self._over.set()

    def _look(self) -> None:
        seen, since = self._progress(), time.monotonic()
        while not self._over.wait(_LOOK_EVERY_S):
            now = self._progress()
            if now != seen or not self._waits():
                seen, since = now, time.monotonic()
            elif time.monotonic() - since > self._patience_s:
                self._over.set()
                self._stalled()

    def _waits(self) -> bool:
        """Whether the main thread is in a backward or a collective."""
        frame = sys._current_frames().get(self._main or -1)
        for _ in range(_FRAMES):
            if frame is None:
                return False
            if any(part in frame.f_code.co_filename for part in _WAITING_IN):
                return True
            frame = frame.f_back
        return False
