"""Join the ranks that torchrun started: their process group, this rank's device and its threads."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from wholebatch.memory import let_go_of_frames


@contextmanager
def joined_group(*, timeout: timedelta | None = None) -> Iterator[torch.device]:
    """Join the ranks that torchrun started; alone where it did not. Leaves the group at the end.

    A process group that exists already is used and left as it is.

    Args:
        timeout: how long a rank waits for another; torch's own where None.

    Returns:
        The device of this rank: the accelerator of its number on this machine, else the CPU.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    exists = dist.is_available() and dist.is_initialized()
    device = _device(local_rank)
    if exists or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield device
        return
    found_threads = torch.get_num_threads()
    torch.set_num_threads(threads_per_rank(int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    dist.init_process_group(_backend(device), timeout=timeout, **_store_of_this_start())
    try:
        yield device
    except BaseException as error:
        let_go_of_frames(error)
        raise
    finally:
        # A DDP model that is freed after its group can wait for ever (torch 2.13; lab/LOG.md), so what
        # cycles and the frames of an error still hold goes first.
        gc.collect()
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


def threads_per_rank(ranks_on_this_machine: int) -> int:
    """The cores that this process may use, shared by the ranks beside it; 1 or more each."""
    return max(1, _cores() // ranks_on_this_machine)


@cache
def no_core_to_spare() -> bool:
    """Whether the ranks that torchrun started on this machine take every core that this process may use."""
    return _cores() <= int(os.environ.get("LOCAL_WORLD_SIZE", "0"))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
