"""The ranks of the job: who they are, what they run on, and three small things they agree on."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from wholebatch.errors import JudgeError, RecordError


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """This process among the ranks of the job.

    Args:
        rank: number of this rank.
        ranks: processes of the job.
        device: what this rank computes on.
    """

    rank: int = 0
    ranks: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def leads(self) -> bool:
        """True on the one rank that prints and writes."""
        return self.rank == 0

    def total(self, values: Sequence[float]) -> list[float]:
        """``sum over ranks`` of each value, in float64 on the host; the same on every rank.

        Raises:
            JudgeError: another rank is gone.

        Exactness: exact for whole numbers below 2^53; else rounded once for every rank.
        """
        sums = torch.tensor(list(values), dtype=torch.float64)
        if self.ranks > 1:
            with _told_when_lost():
                dist.all_reduce(sums)
        return sums.tolist()

    def any(self, flag: bool) -> bool:
        """Whether the flag is up on any rank."""
        return self.total([float(flag)])[0] > 0

    def raise_together(self, refusal: str | None) -> None:
        """End on every rank when the leading one can't write, so that no other waits for it.

        Raises:
            JudgeError: another rank is gone.
            RecordError: with the words of the leading rank.
        """
        words: list[Any] = [refusal]
        if self.ranks > 1:
            with _told_when_lost():
                dist.broadcast_object_list(words, src=0)
        if words[0] is not None:
            raise RecordError(words[0])

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
    if dist.is_available() and dist.is_initialized():
        yield World(rank=dist.get_rank(), ranks=dist.get_world_size(), device=_device(_local_rank()))
        return
    device = _device(_local_rank())
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield World(device=device)
        return
    found_threads = torch.get_num_threads()
    torch.set_num_threads(threads_per_rank(int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    dist.init_process_group(_backend(device), **_store_of_this_start())
    try:
        yield World(rank=dist.get_rank(), ranks=dist.get_world_size(), device=device)
    finally:
        dist.destroy_process_group()
        torch.set_num_threads(found_threads)


def _store_of_this_start() -> dict[str, Any]:
    """Where the ranks meet, apart from where they met before torchrun restarted them.

    torch 2.13 gives a restart the store of the start before, with the addresses of processes that are
    gone in it (pytorch issue 135712). Of several machines each counts its own restarts (pytorch issue
    108158), so nothing can be done here for those; TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 does it there.
    """
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if restarts == "0" or not shared or os.environ.get("GROUP_WORLD_SIZE") != "1":
        return {}
    ranks = int(os.environ["WORLD_SIZE"])
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    found = TCPStore(*place, ranks, is_master=False)
    return {
        "store": PrefixStore(f"restart-{restarts}", found),
        "rank": int(os.environ["RANK"]),
        "world_size": ranks,
    }


@contextmanager
def _told_when_lost() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise JudgeError(
            f"contact with another rank was lost between two updates: it ended, or did not answer within "
            f"the process group's timeout ({error})"
        ) from error


def threads_per_rank(ranks_on_this_machine: int) -> int:
    """The cores that this process may use, shared by the ranks beside it; 1 or more each."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return max(1, cores // ranks_on_this_machine)


def _local_rank() -> int:
    """The number of this process on its machine, as torchrun gives it; 0 where nobody does."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def _device(local_rank: int) -> torch.device:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    device = torch.device(accelerator.type, local_rank)
    torch.accelerator.set_device_index(local_rank)
    return device


def _backend(device: torch.device) -> str:
    """Gloo for what lies on the host, and the accelerator's own beside it."""
    if device.type == "cpu":
        return "gloo"
    return f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
