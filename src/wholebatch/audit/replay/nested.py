"""Tensors inside whatever a module is called with and gives back: found by path, and replaced."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Path = tuple[Any, ...]
Change = Callable[[Path, Any], Any]


class Leaf:
    """Base of dataclasses of our own that stand for a tensor and are not looked into."""

    __slots__ = ()


def leaves(value: Any, path: Path = ()) -> list[tuple[Path, Any]]:
    """Everything inside a value that is no mapping, sequence or dataclass, with the way to it.

    Args:
        value: nested as users nest: dicts, model outputs, tuples, lists, dataclasses.
        path: of the value itself, put before each path.

    Returns:
        Path and leaf, in order.
    """
    inside = _parts(value)
    if inside is None:
        return [(path, value)]
    return [leaf for key, part in inside.items() for leaf in leaves(part, (*path, key))]


def fetched(value: Any, path: Path) -> Any:
    """The leaf at a path.

    Args:
        value: as given to :func:`leaves`, or built alike.
        path: from :func:`leaves`.
    """
    for key in path:
        value = (_parts(value) or {})[key]
    return value


def changed(value: Any, change: Change, path: Path = ()) -> Any:
    """A copy with every leaf replaced by what ``change(path, leaf)`` returns.

    Args:
        value: as for :func:`leaves`.
        change: makes the new leaf.
        path: of the value itself.
    """
    inside = _parts(value)
    if inside is None:
        return change(path, value)
    parts = {key: changed(part, change, (*path, key)) for key, part in inside.items()}
    return _rebuilt(value, parts)


def _parts(value: Any) -> dict[Any, Any] | None:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, tuple | list):
        return dict(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type | Leaf):
        return {one.name: getattr(value, one.name) for one in dataclasses.fields(value) if one.init}
    return None


def _rebuilt(value: Any, parts: Mapping[Any, Any]) -> Any:
    if type(value) is dict:
        return dict(parts)
    if isinstance(value, Mapping):
        try:
            return type(value)(dict(parts))  # type: ignore[call-arg]
        except TypeError:
            return dict(parts)
    if isinstance(value, Sequence):
        named = isinstance(value, tuple) and hasattr(value, "_fields")
        return type(value)(*parts.values()) if named else type(value)(parts.values())  # type: ignore[call-arg]
    return dataclasses.replace(value, **parts)
