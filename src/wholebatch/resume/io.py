"""The files of a checkpoint, with what goes wrong in words."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from wholebatch import checkpoint_folder as disk
from wholebatch.checkpoint_folder import DamageError
from wholebatch.errors import CheckpointError

T = TypeVar("T")


def explained(folder: Path, updates_attempted: int, act: Callable[[], T]) -> T:
    """Run ``act``; where the disk refuses, say what to do.

    Args:
        folder: of the checkpoints.
        updates_attempted: of the one that is written.
        act: writes some of it.

    Raises:
        CheckpointError: the disk refused.
    """
    try:
        return act()
    except OSError as error:
        raise CheckpointError(
            disk.write_problem(folder, error, updates_attempted=updates_attempted)
        ) from None


def read_file(path: Path, *, mmap: bool = False) -> Any:
    """What a file of a checkpoint holds; of one that is mapped, read once it is asked for.

    Raises:
        DamageError: it holds something else than tensors and plain data, or can't be read.

    Exactness: bit for bit.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError:
        raise DamageError(
            f"its file {path.name} holds something other than tensors and plain data; it was not executed"
        ) from None
    except Exception as error:
        raise DamageError(f"its file {path.name} can't be read ({type(error).__name__})") from None
