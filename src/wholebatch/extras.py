"""Packages that only some settings need: imported when they are asked for, and missed in one way."""

from __future__ import annotations

import importlib
from typing import Any

from wholebatch.errors import UsageError


def needed(package: str, *, extra: str, why: str) -> Any:
    """Import a package of an extra.

    Args:
        package: its name.
        extra: what brings it.
        why: what needs it, in words that begin the message.

    Returns:
        The module.

    Raises:
        UsageError: it is not installed.
    """
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise UsageError(
            f"{why} needs the package {package}, which is not installed; "
            f"run: pip install 'wholebatch[{extra}]'"
        ) from error
