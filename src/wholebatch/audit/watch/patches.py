"""Attributes of other people's modules and classes, replaced for a while and put back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_ABSENT = object()


class Patches:
    """What was replaced, in order; ``restore`` puts all of it back, the last first."""

    def __init__(self) -> None:
        self._done: list[tuple[Any, str, Any, Any]] = []
        self._known: set[tuple[int, str]] = set()

    def wrap(self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace ``owner.name`` by what ``make`` returns for it; once for each owner and name.

        Args:
            owner: a module, a class or an object.
            name: of the attribute; an owner without it is left alone.
            make: takes the original function and returns the one to put in its place.
        """
        if (id(owner), name) in self._known or not hasattr(owner, name):
            return
        own = vars(owner).get(name, _ABSENT)
        original = getattr(owner, name)
        replaced = functools.wraps(original)(make(original))
        setattr(owner, name, replaced)
        self._known.add((id(owner), name))
        self._done.append((owner, name, own, replaced))

    def restore(self) -> None:
        """Put everything back, but for what somebody else has replaced since: that calls ours."""
        for owner, name, own, replaced in reversed(self._done):
            if vars(owner).get(name) is not replaced:
                continue
            if own is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, own)
        self._done.clear()
        self._known.clear()
