"""What is one of transformers, without importing it."""

from __future__ import annotations

import sys
from typing import Any


def is_transformers_model(module: Any) -> bool:
    """Whether a module is one of transformers, which is not imported to find out."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(module, transformers.PreTrainedModel)
