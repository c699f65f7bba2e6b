"""The leak police: what a test must leave as it found it, and how that is seen and put back.

Looks at the environment, the working directory, threads, child processes and, only where somebody
has imported torch already, its process group and its global switches. Tests that must not import
torch are policed without it.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

# A thread or process that is ending anyway is not a leak; one that is there after this is.
PATIENCE_S = 2.0

# Set by pytest for each test, and by torch when the first optimizer of a process is made.
NOT_THE_TESTS_OWN = {
    "PYTEST_CURRENT_TEST",
    "TORCHINDUCTOR_CACHE_DIR",
    "PYTORCH_NVML_BASED_CUDA_CHECK",  # set by lightning when it is imported
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Surroundings:
    """What is compared before and after a test."""

    environment: dict[str, str]
    folder: str
    threads: frozenset[threading.Thread]
    children: frozenset[int]
    switches: dict[str, Any]


def look() -> Surroundings:
    """See how things are now."""
    return Surroundings(
        environment={name: value for name, value in os.environ.items() if name not in NOT_THE_TESTS_OWN},
        folder=os.getcwd(),
        threads=frozenset(threading.enumerate()),
        children=_children(),
        switches={name: read() for name, (read, _) in _switches().items()},
    )


def leaks_since(before: Surroundings) -> list[str]:
    """Return what differs from ``before``, one line each."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        after = look()
        alive = [thread.name for thread in after.threads - before.threads if thread.is_alive()]
        born = sorted(after.children - before.children)
        if not (alive or born) or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    found = [f"thread {name!r} is still running" for name in sorted(alive)]
    found += [f"child process {pid} is still running" for pid in born]
    found += _changes("environment variable", before.environment, after.environment)
    if after.folder != before.folder:
        found.append(f"the working directory was {before.folder}, is {after.folder}")
    wanted = _wanted_switches(before)
    return found + _changes("torch", wanted, {name: after.switches[name] for name in wanted})


def put_back(before: Surroundings) -> None:
    """Undo what can be undone, so that one leak does not fail all tests that follow."""
    for name in set(os.environ) - set(before.environment) - NOT_THE_TESTS_OWN:
        del os.environ[name]
    os.environ.update(before.environment)
    os.chdir(before.folder)
    switches = _switches()
    for name, value in _wanted_switches(before).items():
        read, write = switches[name]
        if read() != value:
            write(value)


def seed_everything() -> None:
    """Give each test the same random numbers, whatever ran before it."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


def calm_torch() -> None:
    """Switch deterministic algorithms on and use one thread, where torch has been imported."""
    torch = sys.modules.get("torch")
    if torch is not None and not torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(True)
        torch.set_num_threads(1)


def _changes(what: str, before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    missing = object()
    return [
        f"{what} {name}: was {before.get(name)!r}, is {after.get(name)!r}"
        for name in sorted(before | after)
        if before.get(name, missing) != after.get(name, missing)
    ]


def _children() -> frozenset[int]:
    """Child processes, but for the fork server and the resource tracker, which serve all tests."""
    servants = {forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid}
    found = {child.pid for child in multiprocessing.active_children()}
    for children in Path("/proc/self/task").glob("*/children"):  # Linux only; elsewhere the line above
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread ended meanwhile, with no child
            found |= {int(pid) for pid in children.read_text().split()}
    return frozenset(pid for pid in found - servants if pid is not None)


def _wanted_switches(before: Surroundings) -> dict[str, Any]:
    """Where the test itself brought torch in, only the switches whose first value is no choice of ours."""
    if before.switches or not _switches():
        return before.switches
    return {"process group": False, "grad mode": True, "inference mode": False}


def _switches() -> dict[str, tuple[Callable[[], Any], Callable[[Any], object]]]:
    """Each global switch of torch, how to read it and how to set it; none without torch."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "get_default_dtype"):
        return {}
    return {
        "process group": (
            lambda: _group_exists(torch),
            lambda _: torch.distributed.destroy_process_group(),
        ),
        "grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
        "inference mode": (torch.is_inference_mode_enabled, lambda _: None),
        "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
        "default device": (
            lambda: str(torch.get_default_device()),
            # "cpu" asked for by name would itself be a switch: it outlives a later change.
            lambda name: torch.set_default_device(None if name == "cpu" else name),
        ),
        "threads": (torch.get_num_threads, torch.set_num_threads),
        "deterministic algorithms": (
            torch.are_deterministic_algorithms_enabled,
            torch.use_deterministic_algorithms,
        ),
    }


def _group_exists(torch: Any) -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
