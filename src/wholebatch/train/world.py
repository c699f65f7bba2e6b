"""The ranks of the job: who they are, what they run on, and what they agree on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from wholebatch.ranks.group import joined_group
from wholebatch.ranks.together import Together


@dataclass(frozen=True, kw_only=True, slots=True)
class World(Together):
    """This process among the ranks of the job, which do together what is done between updates.

    Args:
        device: what this rank computes on.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def parallel(self, model: nn.Module) -> nn.Module:
        """The model, which is on this rank's device already, wrapped where several ranks train it."""
        if self.ranks == 1:
            return model
        on_cpu = self.device.type == "cpu"
        return DistributedDataParallel(model, device_ids=None if on_cpu else [self.device.index])


@contextmanager
def join_world() -> Iterator[World]:
    """Join the ranks that torchrun started; alone where it did not. Leaves the group at the end.

    A process group that exists already is used and left as it is.
    """
    with joined_group() as device:
        yield World.of_all(device=device)
