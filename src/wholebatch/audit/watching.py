"""One watch with all its hooks: begun before a loop, ended after it, whatever happens in between."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import torch

from wholebatch.audit.trace import Intent, RankTrace
from wholebatch.audit.watch.backwards import Backwards
from wholebatch.audit.watch.calls import Calls
from wholebatch.audit.watch.changes import AveragesBetween, ParametersBetween
from wholebatch.audit.watch.logged import Logged
from wholebatch.audit.watch.modules import Modules
from wholebatch.audit.watch.replays import Replays
from wholebatch.audit.watch.updates import Updates
from wholebatch.audit.watch.watcher import Watch


class AuditedEnough(SystemExit):
    """Raised from the last audited step, to end a script that is to go no further."""


class Watching:
    """Everything that watches one process, from its making until ``end``.

    Args:
        updates: to audit, of each optimizer.
        skip_updates: to let pass before.
        flags: what the user said of the updates.
        replay: whether one window may be captured and run again where weights can't be read.
        own_package: installed package that is audited itself.
        search: whether optimizers may have been made already; those made later are seen in any case.
        stop: end the script when enough updates were seen.
        audited: called once with the trace when enough updates were seen, while the loop goes on.
    """

    def __init__(
        self,
        *,
        updates: int = 4,
        skip_updates: int = 0,
        flags: Intent | None = None,
        replay: bool = True,
        own_package: str | None = None,
        search: bool = False,
        stop: bool = False,
        audited: Callable[[RankTrace], None] = lambda _: None,
    ) -> None:
        self._trace: RankTrace | None = None
        self._told, self._stop = audited, stop
        self._lock = threading.RLock()
        self.watch = Watch(skip_updates=skip_updates, flags=flags, own_package=own_package)
        self._replays = Replays(self.watch, replay)
        self._updates = Updates(self.watch, updates, self._enough, self._replays)
        self._calls = Calls(self.watch, self._updates, Backwards(self.watch, self._updates))
        self._modules = Modules(self.watch, self._replays)
        self._logged = Logged(self.watch)
        self._parameters = parameters = ParametersBetween(self.watch.gradients)
        self._averages = AveragesBetween(self.watch.gradients)
        self._updates.between = [parameters, self._averages]
        self._updates.after_update = [parameters.forget, self._averages.forget, self._averages.search]
        self._updates.after_update.append(self._logged.late)
        for optimizer in _alive(torch.optim.Optimizer) if search else ():
            self.watch.optimizer_made(optimizer)

    def end(self, ended: Any = "finished", failure: str | None = None) -> RankTrace:
        """Take everything away and return what was seen; the same trace however often it is called.

        Args:
            ended: how the loop ended; see ``RankTrace``.
            failure: what ended it, in words.
        """
        with self._lock:
            if self._trace is None:
                try:
                    self._updates.look_back()
                    self._trace = self.watch.trace(ended, failure)
                finally:
                    self._remove()
            return self._trace

    def _enough(self) -> None:
        self._told(self.end("audited"))
        if self._stop:
            raise AuditedEnough(0)

    def _remove(self) -> None:
        self._calls.remove()
        self._modules.remove()
        self._logged.remove()
        self._averages.release()
        self._parameters.release()
        self._updates.release()
        self._replays.release()


def _alive(kind: type) -> list[Any]:
    """Optimizers made before the watch; not those that only wrap another."""
    gc.collect()  # else those of loops that are over turn up too
    # by type: asking some objects for their class runs code of theirs
    found = [held for held in gc.get_objects() if issubclass(type(held), kind)]
    return [held for held in found if not isinstance(getattr(held, "optimizer", None), kind)]
