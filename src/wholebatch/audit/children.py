"""Ranks that a script starts itself, by ``torch.multiprocessing.spawn`` or ``multiprocessing.Process``.

Each child is watched like a rank of a launcher and leaves what it saw in a folder; the script's own process
judges them together when it is over, unless it trained itself. Workers of data loaders are left alone.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from wholebatch.audit.gather import leave, read
from wholebatch.audit.stall import StallWatch
from wholebatch.audit.trace import RankTrace
from wholebatch.audit.watch.patches import Patches
from wholebatch.audit.watch.places import is_users
from wholebatch.audit.watching import Watching
from wholebatch.whereabouts import told

# What torch's spawn starts in each of its processes.
_SPAWNED = "torch.multiprocessing.spawn"


class Children:
    """The processes that a script starts while it is watched.

    Args:
        options: of their watches.
        stall_s: seconds for which a child may wait for others before it is ended.
    """

    def __init__(self, options: Mapping[str, Any], stall_s: float) -> None:
        self._options, self._stall_s = dict(options), stall_s
        self._folder: Path | None = None
        self._process = os.getpid()
        self._patches = Patches()
        self._patches.wrap(BaseProcess, "__init__", self._making)

    def traces(self) -> list[RankTrace]:
        """Put everything back, and return what children that trained left, in order of their ranks."""
        self._patches.restore()
        if self._folder is None:
            return []
        found = [read(path) for path in sorted(self._folder.glob("*/rank-*.npz"))]
        shutil.rmtree(self._folder, ignore_errors=True)
        trained = [trace for trace in found if any(event.kind == "step" for event in trace.events)]
        of_one_job = {trace.rank: trace for trace in trained}
        return [of_one_job[rank] for rank in sorted(of_one_job)]

    def _making(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def made(
            process: BaseProcess, group: Any = None, target: Any = None, *given: Any, **named: Any
        ) -> None:
            if target is not None and os.getpid() == self._process and _trains(target):
                target = self._watched(target)
            original(process, group, target, *given, **named)

        return made

    def _watched(self, target: Callable[..., Any]) -> WatchedChild:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="wholebatch-audit-"))
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        return WatchedChild(target, folder, self._options, self._stall_s)


class WatchedChild:
    """What a process runs in place of its target: the same, under a watch of its own.

    Args:
        target: what it was to run.
        folder: where to leave what was seen.
        options: of the watch.
        stall_s: as for ``Children``.
    """

    def __init__(
        self, target: Callable[..., Any], folder: Path, options: Mapping[str, Any], stall_s: float
    ) -> None:
        self._target, self._folder, self._options, self._stall_s = target, folder, dict(options), stall_s
        self.__name__ = getattr(target, "__name__", "target")

    def __call__(self, *given: Any, **named: Any) -> Any:
        """Run the target."""
        watching = Watching(**self._options, audited=lambda trace: leave(trace, self._folder))
        stalls = StallWatch(lambda: watching.watch.progress, self._stall_s, lambda: self._stalled(watching))
        try:
            result = self._target(*given, **named)
        except BaseException as error:
            leave(watching.end("failed", told(error)), self._folder)
            raise
        finally:
            stalls.end()
        leave(watching.end(), self._folder)
        return result

    def _stalled(self, watching: Watching) -> None:
        leave(watching.end("stalled", "this rank waited for others that never came"), self._folder)
        os._exit(1)


def _trains(target: Any) -> bool:
    """Whether it is the user's own function, or what torch starts one in."""
    if getattr(target, "__module__", "") == _SPAWNED:
        return True
    code = getattr(target, "__code__", None)
    return code is not None and is_users(code.co_filename, None)
