"""One process: nothing to reduce, nobody to wait for."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from torch import nn

from wholebatch.ranks.base import Ranks

_HOLDS_NOTHING_BACK = nullcontext()


@dataclass(frozen=True, slots=True)
class _Known:
    row: list[float]

    def wait(self) -> list[list[float]]:
        return [self.row]


class SingleRank(Ranks):
    """A job of one rank: every question about the others has an answer at once."""

    def tell(self, row: Sequence[float], patience_s: float | None = None) -> _Known:
        return _Known(list(row))

    def check_parameters(self, parameters: Sequence[nn.Parameter]) -> None:
        pass

    def begin(self) -> None:
        pass

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        return _HOLDS_NOTHING_BACK

    def end(self, *, committed: bool) -> None:
        pass
