"""What the tests of orders share: how many values a permutation computes."""

from __future__ import annotations

from typing import Any

import pytest

from wholebatch.order.permutation import Permutation


def values_computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Note from now on how many values pass through the rounds, call by call."""
    seen: list[int] = []
    rounds = Permutation._rounds

    def noted(self: Permutation, values: Any, *, undo: bool) -> Any:
        seen.append(values.size)
        return rounds(self, values, undo=undo)

    monkeypatch.setattr(Permutation, "_rounds", noted)
    return seen
