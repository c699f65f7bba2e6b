"""The plans that a loader takes."""

from __future__ import annotations

import importlib
from typing import Any

_HOME = "wholebatch.budget"
BudgetPlan: Any
AnyPlan: Any
try:
    _found = importlib.import_module(_HOME)
    BudgetPlan, AnyPlan = _found.BudgetPlan, _found.AnyPlan
except ModuleNotFoundError:  # until that file is in the tree

    class BudgetPlan:  # type: ignore[no-redef]
        """None."""

    AnyPlan = Any
