"""The traces of all ranks of one job, brought together through files: no collective of the loop is joined.

A collective of ours would have to be entered by every rank at the same place of somebody else's loop, and
would hang where the loop itself does. A folder that all ranks can reach needs neither.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
import zlib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np

from wholebatch.audit.trace import SKETCH_WIDTH, RankTrace

_POLL_S = 0.05


def shared_folder(given: Path | None) -> Path:
    """The folder through which the ranks of this job meet.

    Args:
        given: by the user, for ranks on several machines; None for one in the system's own.

    Returns:
        Path: the same on all ranks of one start of a job, another for each start.
    """
    parts = [
        os.environ.get(name, "")
        for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    ]
    # all ranks of a machine are children of one launcher, and no two launchers that live have one number
    parts.append(str(os.getuid() if hasattr(os, "getuid") else 0) if given else str(os.getppid()))
    name = f"wholebatch-audit-{zlib.crc32('/'.join(parts).encode()):08x}"
    folder = (given or Path(tempfile.gettempdir())) / name
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def leave(trace: RankTrace, folder: Path) -> None:
    """Put this rank's trace into the folder, whole or not at all.

    Args:
        trace: of this rank.
        folder: that all ranks know.
    """
    arrays: list[Any] = []
    text = json.dumps(_plain(trace, arrays))
    target = folder / f"rank-{trace.rank}.npz"
    unfinished = target.with_suffix(".part.npz")
    stored = np.array(arrays, dtype=np.float64).reshape(len(arrays), SKETCH_WIDTH)
    np.savez(unfinished, trace=np.array(text), arrays=stored)
    unfinished.replace(target)


def collect(folder: Path, num_ranks: int, wait_s: float) -> dict[int, RankTrace]:
    """The traces that are there, once all are or after a while.

    Args:
        folder: that all ranks know.
        num_ranks: how many there should be.
        wait_s: seconds to wait for those that are missing.
    """
    last = time.monotonic() + wait_s
    wanted = {rank: folder / f"rank-{rank}.npz" for rank in range(num_ranks)}
    while time.monotonic() < last and not all(path.exists() for path in wanted.values()):
        time.sleep(_POLL_S)
    return {rank: read(path) for rank, path in wanted.items() if path.exists()}


def tell_ended(folder: Path, rank: int) -> None:
    """Tell the others that this rank's script is over."""
    (folder / f"ended-{rank}").touch()


def wait_until_ended(folder: Path, num_ranks: int, wait_s: float) -> None:
    """Wait for the scripts of all ranks: a launcher ends them all when one rank ends with an error code.

    Args:
        folder: that all ranks know.
        num_ranks: in the job.
        wait_s: seconds to wait at most.
    """
    last = time.monotonic() + wait_s
    ended = [folder / f"ended-{rank}" for rank in range(num_ranks)]
    while time.monotonic() < last and not all(path.exists() for path in ended):
        time.sleep(_POLL_S)


def clear(folder: Path) -> None:
    """Remove the folder and what this module put into it."""
    for path in [*folder.glob("rank-*.npz"), *folder.glob("ended-*")]:
        path.unlink(missing_ok=True)
    try:
        folder.rmdir()
    except OSError:
        return


def read(path: Path) -> RankTrace:
    """One rank's trace from its file."""
    with np.load(path, allow_pickle=False) as stored:
        trace: RankTrace = _made(RankTrace, json.loads(str(stored["trace"])), stored["arrays"])
    return trace


def _plain(value: Any, arrays: list[Any]) -> Any:
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name), arrays) for field in fields(value)}
    if isinstance(value, Mapping):
        return [[key, _plain(entry, arrays)] for key, entry in value.items()]
    if isinstance(value, np.ndarray):
        arrays.append(value)
        return len(arrays) - 1
    if isinstance(value, tuple | list):
        return [_plain(entry, arrays) for entry in value]
    return value


def _made(kind: Any, plain: Any, arrays: Any) -> Any:
    """The value of a declared type from its plain form."""
    if plain is None or kind is Any:
        return plain
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        return _made(next(one for one in get_args(kind) if one is not NoneType), plain, arrays)
    if origin is Literal:
        return plain
    if origin is tuple:
        return tuple(_made(get_args(kind)[0], entry, arrays) for entry in plain)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {key: _made(get_args(kind)[1], entry, arrays) for key, entry in plain}
    if origin is np.ndarray:
        return arrays[plain]
    if is_dataclass(kind) and isinstance(kind, type):
        hints = get_type_hints(kind)
        return kind(**{name: _made(hints[name], entry, arrays) for name, entry in plain.items()})
    return plain
