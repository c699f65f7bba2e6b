"""Whose line is it: the user's own frames on the call stack, and the library that they called."""

from __future__ import annotations

import functools
import linecache
import os
import sys
import sysconfig
from pathlib import Path
from types import FrameType

from wholebatch.audit.trace import Place

_OURS = str(Path(__file__).resolve().parents[2])
# The package whose call it was, by the folder that its files are in; an outer one covers those inside it.
_LIBRARIES = {
    "trl": "trl",
    "transformers": "transformers",
    "lightning": "lightning",
    "pytorch_lightning": "lightning",
    "lightning_fabric": "fabric",
    "deepspeed": "deepspeed",
    "composer": "composer",
    "accelerate": "accelerate",
}
# A stack deeper than this is looked at no further: recursion, not a training loop.
_DEEPEST = 200


def user_places(own_package: str | None = None) -> tuple[Place, ...]:
    """All lines of the user's own code on the call stack, innermost first.

    Args:
        own_package: name of an installed package that is audited itself (``-m PACKAGE``): its files count
            as the user's.
    """
    frames = _frames()
    return tuple(
        _place(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        for frame in frames
        if is_users(frame.f_code.co_filename, own_package)
    )


def library(own_package: str | None = None) -> str:
    """The library that the user's innermost line called into, of those that train; empty where it was
    torch.

    Its scheduler is named where accelerate's moves one: it does so once for each process by design.
    """
    outermost = ""
    for frame in _frames():
        file = frame.f_code.co_filename
        if file.endswith(os.path.join("accelerate", "scheduler.py")):
            return "accelerate"
        if is_users(file, own_package):
            break
        outermost = _library_of(file) or outermost
    return outermost


def _frames() -> list[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    found: list[FrameType] = []
    while frame is not None and len(found) < _DEEPEST:
        found.append(frame)
        frame = frame.f_back
    return found


@functools.cache
def is_users(file: str, own_package: str | None) -> bool:
    """Whether a file is neither Python's, nor an installed package's, nor ours."""
    if file.startswith("<"):
        return file.startswith(("<ipython", "<stdin"))
    full = os.path.realpath(file)
    if full.startswith(_OURS + os.sep):
        return False
    parts = Path(full).parts
    for folder in ("site-packages", "dist-packages"):
        if folder in parts:
            inside = parts[parts.index(folder) + 1 :]
            return bool(own_package and inside and inside[0].removesuffix(".py") == own_package)
    return not full.startswith(sysconfig.get_paths()["stdlib"] + os.sep)


@functools.cache
def _library_of(file: str) -> str:
    parts = Path(file).parts
    for name, called in _LIBRARIES.items():
        if name in parts:
            # lightning carries fabric inside itself, and uses it for its Trainer too
            return "fabric" if called == "lightning" and "fabric" in parts else called
    return ""


@functools.cache
def _place(file: str, line: int, function: str) -> Place:
    full = os.path.realpath(file)
    below = os.path.relpath(full)
    shown = full if below.startswith(os.pardir) else below
    return Place(file=shown, line=line, function=function, code=linecache.getline(file, line).strip())
