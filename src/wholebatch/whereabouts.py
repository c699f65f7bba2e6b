"""Where in the user's own code something failed: what a traceback would have said, in one line."""

from __future__ import annotations

import os
import site
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

_OUR_FOLDER = Path(__file__).resolve().parent


def told(error: BaseException) -> str:
    """The error in words, with the last place in the user's own code that it went through.

    Args:
        error: as it was caught.

    Returns:
        ``"KeyError: 'labelz', at problem.py:7, in loss_fn"``; without a place where it went through no
        file of the user's.
    """
    said = str(error).rstrip()
    words = f"{type(error).__name__}: {said}" if said else type(error).__name__
    if isinstance(error, SystemExit | UserExitError):
        words = f"sys.exit({error.args[0]!r})" if error.args else "sys.exit()"
    place = place_of(error)
    if not place:
        return words
    return f"{words}\n{place}" if "\n" in words else f"{words}, {place}"


class UserExitError(RuntimeError):
    """The user's code called ``sys.exit``, which must not become the exit code of a verdict."""


def kept_running(call: Callable[..., Any]) -> Callable[..., Any]:
    """The user's function, its ``sys.exit`` turned into an error like any other.

    Args:
        call: what the user gave.
    """

    def guarded(*given: Any, **named: Any) -> Any:
        try:
            return call(*given, **named)
        except SystemExit as error:
            raise UserExitError(*error.args).with_traceback(error.__traceback__) from error

    return guarded


def place_of(error: BaseException) -> str:
    """``"at FILE:LINE, in FUNCTION"``, or nothing where no file of the user's took part.

    FILE is relative to the working directory where it lies below it. A file that could not be parsed is
    itself the place.

    Args:
        error: as it was caught.
    """
    if isinstance(error, SyntaxError) and error.filename and _is_users(error.filename):
        return f"at {_as_known(error.filename)}:{error.lineno}"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if _is_users(frame.filename):
            inside = "" if frame.name == "<module>" else f", in {frame.name}"
            return f"at {_as_known(frame.filename)}:{frame.lineno}{inside}"
    return ""


def _is_users(filename: str) -> bool:
    """Whether a file is neither ours nor installed (the standard library, torch)."""
    if filename.startswith("<"):  # <frozen importlib>, <string>
        return False
    path = Path(os.path.abspath(filename))
    if {"site-packages", "dist-packages"} & set(path.parts):
        return False
    return not any(
        form.is_relative_to(folder) for form in {path, path.resolve()} for folder in _installed()
    )


def _installed() -> list[Path]:
    paths = sysconfig.get_paths()
    standard = [Path(paths[name]) for name in ("stdlib", "platstdlib")]
    return [_OUR_FOLDER, Path(site.getusersitepackages()), *standard, *(p.resolve() for p in standard)]


def _as_known(filename: str) -> str:
    path, here = Path(os.path.abspath(filename)), Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
