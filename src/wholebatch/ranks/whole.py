"""An optimizer whose state the ranks hold in pieces, saved and loaded as that of one rank would be."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping
from typing import Any


class WholeOptimizer(ABC):
    """What a checkpoint asks of a torch optimizer, answered for one that an engine took apart.

    Attributes:
        stands_for: the class of the optimizer that was taken apart.
        param_groups: its groups, with the model's parameters, or stand-ins of their shape, as ``"params"``.
        state: by parameter; nothing here, for the engine has it.
    """

    stands_for: type[Any]
    param_groups: list[dict[str, Any]]

    def __init__(self) -> None:
        self.state: Mapping[Any, dict[str, Any]] = defaultdict(dict)

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """As ``torch.optim.Optimizer.state_dict``, with values on the leading rank; all ranks call it."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Deal a whole state out; all ranks call it, after the model has its parameters."""

    @abstractmethod
    def misfit(self, state: Mapping[str, Any]) -> str | None:
        """Why the engine could not hold such a state, in words after "its state"; else None."""
