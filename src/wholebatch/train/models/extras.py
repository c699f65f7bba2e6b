"""Packages that only some models need, imported when they are."""

from __future__ import annotations

import importlib
from typing import Any

from wholebatch.errors import UsageError


def needed(package: str, *, extra: str, key: str) -> Any:
    """Import a package of an extra.

    Args:
        package: its name.
        extra: what brings it.
        key: the setting that asks for it.

    Raises:
        UsageError: it is not installed.
    """
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise UsageError(
            f"{key} needs the package {package}, which is not installed; "
            f"run: pip install 'wholebatch[{extra}]'"
        ) from error
