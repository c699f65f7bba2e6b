"""All ranks do a thing or none: how the ranks of a checkpoint hear of each other's failures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from wholebatch import errors
from wholebatch.errors import CheckpointError
from wholebatch.ranks.collectives import host_group

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Together:
    """The ranks that save or load together.

    Args:
        group: a group for messages on the host; None for one rank.
        rank: number of this rank in it.
        ranks: how many there are.
    """

    group: dist.ProcessGroup | None = None
    rank: int = 0
    ranks: int = 1

    @classmethod
    def of(cls, model: nn.Module, process_group: dist.ProcessGroup | None = None) -> Self:
        """The ranks of ``model``: those of its DDP, of the group given, or all that there are."""
        if not (dist.is_available() and dist.is_initialized()):
            return cls()
        if isinstance(model, DistributedDataParallel):
            process_group = model.process_group
        group = process_group if process_group is not None else dist.group.WORLD
        if group is None or dist.get_world_size(group) == 1:
            return cls()
        return cls(group=host_group(group), rank=dist.get_rank(group), ranks=dist.get_world_size(group))

    @property
    def leads(self) -> bool:
        """True on the one rank that writes what is common to all."""
        return self.rank == 0

    def gather(self, mine: Any) -> list[Any]:
        """What each rank gave, by rank, on every rank.

        Raises:
            CheckpointError: a rank is gone, or did not answer within the group's timeout.
        """
        if self.group is None:
            return [mine]
        given: list[Any] = [None] * self.ranks
        try:
            dist.all_gather_object(given, mine, group=self.group)
        except RuntimeError as error:
            raise CheckpointError(
                f"contact with another rank was lost over a checkpoint: it ended, or did not answer within "
                f"the process group's timeout; the checkpoints before are as they were ({error})"
            ) from None
        return given

    def all_or_none(self, act: Callable[[], T]) -> T:
        """Run ``act`` on every rank; where it fails on some, every rank raises.

        Raises:
            CheckpointError: another rank failed; or the kind of error of ours that it had.
        """
        result: T
        error: BaseException | None = None
        try:
            result = act()
        except BaseException as raised:  # an interrupt too: the others wait for word
            error = raised
        told = self.gather(None if error is None else (type(error).__name__, str(error)))
        if error is not None:
            raise error
        for rank, failure in enumerate(told):
            if failure is None:
                continue
            name, words = failure
            if kind := getattr(errors, name, None):
                raise kind(f"rank {rank}: {words}")
            raise CheckpointError(f"rank {rank} failed over a checkpoint: {name}: {words}")
        return result

    def on_leader(self, act: Callable[[], T]) -> T:
        """Run ``act`` on the leading rank alone; every rank gets what it returned, or raises."""
        result = self.all_or_none(lambda: act() if self.leads else None)
        first: T = self.gather(result)[0]
        return first
