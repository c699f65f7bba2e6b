"""Around each backward: what it is called on, what it delivers, what it left behind."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from wholebatch.audit.trace import Event
from wholebatch.audit.watch.seen import BackwardSeen, Recorded, quietly
from wholebatch.audit.watch.terms import TermReader
from wholebatch.audit.watch.updates import Updates
from wholebatch.audit.watch.watcher import Watch


class Backwards:
    """The backwards of one process.

    Args:
        watch: that records them.
        updates: that look at the gradients between them.
    """

    def __init__(self, watch: Watch, updates: Updates) -> None:
        self.watch = watch
        self._updates = updates
        # that the next loss is multiplied by
        self.loss_scale: Tensor | None = None

    @quietly
    def begins(self, roots: Sequence[Tensor], given: Sequence[Tensor | None]) -> BackwardSeen | None:
        """Look at the gradients as they are, and listen to those to come."""
        watch = self.watch
        if not watch.listening:
            return None
        self._updates.look()
        seen = BackwardSeen(
            site=watch.places(),
            loss=roots[0].detach().clone() if len(roots) == 1 and roots[0].numel() == 1 else None,
            reader=TermReader(roots[0], given[0] if given else None, *roots[1:]),
            loss_scale=self._scale(),
            learning_rates=tuple(watch.learning_rates()),
            num_forwards=watch.num_forwards,
            in_step=bool(watch.stepping),
            holds_reduction=watch.holds_reduction(),
            outputs=tuple(watch.outputs),
        )
        seen.follow(roots[0])
        self._updates.replays.backward_called(roots, given[0] if given else None, self.loss_scale)
        watch.gradients.listen()
        watch.num_forwards = 0
        watch.outputs.clear()
        seen.num_collectives = -_num_collectives()
        return seen

    def _scale(self) -> Tensor | None:
        """What the loss was multiplied by: by a GradScaler, or by an engine."""
        own = next((one.loss_scale() for one in self.watch.engines), 1.0)
        return self.loss_scale if own == 1.0 else torch.tensor(own)

    @quietly
    def ended(self, seen: BackwardSeen) -> None:
        """Take what was delivered."""
        watch = self.watch
        seen.delivered = watch.gradients.unlisten()
        seen.num_collectives += _num_collectives()
        seen.reader.finish()
        if seen.reader.unread:
            self._updates.replays.unread()
        if seen.num_collectives == 0:
            seen.error = watch.gradients.low_precision_error()
        watch.progress += 1
        watch.gradients.remember()
        if not seen.delivered.values and watch.gradients.parameters:
            return  # it brought nothing to any watched parameter: a loss of something else
        self._updates.open.append(seen)
        self._updates.uncleared = True
        watch.record(_event(seen))


def _event(seen: BackwardSeen) -> Recorded:
    place = seen.site[0] if seen.site else None
    return lambda: Event(kind="backward", place=place, backward=seen.settle())


def _num_collectives() -> int:
    """How many collectives the default group has issued: its own sequence number."""
    with contextlib.suppress(Exception):
        group: Any = torch.distributed.group.WORLD
        if torch.distributed.is_initialized() and group is not None:
            return int(group._get_sequence_number_for_group())
    return 0
