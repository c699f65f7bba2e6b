"""Watch somebody's training loop for a few updates: is each update the one its author believes in?

``audit_loop`` runs a function under the watch; ``wholebatch audit SCRIPT`` runs a script. docs/audit.md
says what is seen and how. What is in ``judge/`` and ``trace.py`` needs no torch.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """Import ``audit_loop``, and torch with it, on first use."""
    if name == "audit_loop":
        from wholebatch.audit.loop import audit_loop

        return audit_loop
    raise AttributeError(f"module 'wholebatch.audit' has no attribute {name!r}; it has audit_loop")
