"""Puts files on the disk so that a crash of the program or the machine leaves all of one or nothing."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

# What a name ends in until the file is whole.
UNFINISHED = ".unfinished"


def write_whole(path: Path, content: bytes) -> None:
    """Write a file aside, put it on the disk, and give it its name; another of that name is replaced.

    Args:
        path: in a folder that is there.
        content: all of it.

    Raises:
        OSError: as the system has it; under the name is the old content or the new one, whole.
    """
    unfinished = path.with_name(f"{path.name}{UNFINISHED}")
    try:
        with unfinished.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """Put a file on the disk, or the names in a folder: a rename alone may be lost with the machine.

    Raises:
        OSError: as the system has it.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
