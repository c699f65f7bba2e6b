"""Packages that only some models need, imported when they are."""

from __future__ import annotations

import importlib
import sys
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


def is_transformers_model(module: Any) -> bool:
    """Whether a module is one of transformers, which is not imported to find out."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(module, transformers.PreTrainedModel)
