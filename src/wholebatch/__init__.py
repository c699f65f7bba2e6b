"""Split the batch any way you like; the update is the same.

The public names. Each is imported when it is first used, so that ``import wholebatch`` and the
plan need no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wholebatch.budget import plan_token_budget as plan_token_budget
    from wholebatch.errors import WholebatchError as WholebatchError
    from wholebatch.finish import per_update as per_update
    from wholebatch.loading import WindowLoader as WindowLoader
    from wholebatch.losses import next_token_loss as next_token_loss
    from wholebatch.losses import token_loss as token_loss
    from wholebatch.objective import counted_loss as counted_loss
    from wholebatch.objective import weighted_terms as weighted_terms
    from wholebatch.order import SampleOrder as SampleOrder
    from wholebatch.plan import plan_batch as plan_batch
    from wholebatch.verify import verify_window as verify_window
    from wholebatch.window import UpdateWindow as UpdateWindow

_HOMES = {
    "SampleOrder": "order",
    "UpdateWindow": "window",
    "WholebatchError": "errors",
    "WindowLoader": "loading",
    "counted_loss": "objective",
    "next_token_loss": "losses",
    "per_update": "finish",
    "plan_batch": "plan",
    "plan_token_budget": "budget",
    "token_loss": "losses",
    "verify_window": "verify",
    "weighted_terms": "objective",
}

__all__ = [
    "SampleOrder",
    "UpdateWindow",
    "WholebatchError",
    "WindowLoader",
    "counted_loss",
    "next_token_loss",
    "per_update",
    "plan_batch",
    "plan_token_budget",
    "token_loss",
    "verify_window",
    "weighted_terms",
]


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'wholebatch' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(importlib.import_module(f"wholebatch.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Show the public names beside what every module has."""
    return sorted({*globals(), *__all__})
