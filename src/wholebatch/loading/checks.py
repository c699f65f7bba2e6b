"""What is said of a loader's arguments before anything is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MappingView, Sequence, Set
from typing import Any

from torch.utils.data import IterableDataset

from wholebatch.budget import AnyPlan, BudgetPlan
from wholebatch.errors import UsageError
from wholebatch.plan import BatchPlan

# Of an order; see `wholebatch.order.Order`.
_METHODS = ("epoch", "global_batch", "next_position", "window")


def check_plan(plan: Any) -> None:
    """Raise UsageError where this is no plan."""
    if not isinstance(plan, BatchPlan | BudgetPlan):
        raise UsageError(
            f"plan is a {type(plan).__name__}; give what plan_batch or plan_token_budget returns"
        )


def check_data_set(dataset: Any, workers: int) -> None:
    """Look at the data set alone.

    Args:
        dataset: as for `WindowLoader`.
        workers: processes that would read it.

    Raises:
        UsageError: it is a class, or one that several workers would each read whole.
    """
    if isinstance(dataset, type):
        raise UsageError(
            f"the data set is the class {dataset.__name__}; give an instance of it, {dataset.__name__}(...)"
        )
    # An IterableDataset may ask torch which worker it is in; of these nothing can.
    whole = isinstance(dataset, Iterator | Set | MappingView) and not isinstance(dataset, IterableDataset)
    if workers > 1 and whole:
        raise UsageError(
            f"the data set is a {type(dataset).__name__}, which each of {workers} workers would read "
            f"whole, so that every sample came {workers} times; set workers to 0 or 1, or give an "
            f"IterableDataset that divides its samples by get_worker_info()"
        )


def num_samples_of(samples: Any) -> int:
    """The length of a map-style data set.

    Raises:
        UsageError: it has none, or no samples.
    """
    try:
        num_samples = len(samples)
    except Exception as error:
        raise UsageError(
            f"len() of the data set, a {type(samples).__name__}, failed with {type(error).__name__}: "
            f"{error}; let __len__ return a whole number of samples, or give a stream, which has no __len__"
        ) from error
    if num_samples == 0:
        raise UsageError("the data set has no samples")
    return num_samples


def check_unused(plan: AnyPlan, *, shuffle: Any, items: Any) -> None:
    """Raise UsageError for a shuffle that is no bool, and for items that the plan has no use for."""
    if not isinstance(shuffle, bool):
        raise UsageError(f"shuffle is {shuffle!r}; give True or False")
    in_items = isinstance(plan, BudgetPlan) and plan.global_batch_items is not None
    if items is not None and not in_items:
        raise UsageError(
            f"items= is for a plan of global_batch_items, and this plan has "
            f"global_batch_samples={plan.global_batch_samples}; leave it out, or plan in items"
        )


def check_order(order: Any, plan: AnyPlan, *, shuffle: bool, items: Any) -> None:
    """Look at an order of the caller's own.

    Args:
        order, plan, shuffle, items: as for `WindowLoader`.

    Raises:
        UsageError: it is none, or contradicts the plan or the other arguments.
    """
    missing = [name for name in _METHODS if not callable(getattr(order, name, None))]
    if missing:
        raise UsageError(
            f"order is a {type(order).__name__} without {', '.join(missing)}; give a SampleOrder, another "
            f"order of this package, or a class with the methods of Order"
        )
    if not shuffle or items is not None:
        given = "shuffle=False" if not shuffle else "items="
        raise UsageError(
            f"{given} is of the default order, and an order= was given, which decides alone; leave one out"
        )
    # An order need not tell its global batch; if it does, it is the plan's.
    for name in ("global_batch_samples", "global_batch_items"):
        of_order, of_plan = getattr(order, name, None), getattr(plan, name, None)
        if of_order is not None and of_order != of_plan:
            raise UsageError(
                f"the order has {name}={of_order} and the plan {name}={of_plan}; make both of the same "
                f"global batch"
            )


def check_state(state: Any, names: Sequence[str], is_stream: bool) -> None:
    """Raise UsageError where this is no state of a loader, or one of the other kind of data set.

    Args:
        state: what was given to ``load_state_dict``.
        names: entries of its ``source`` where the data set is what it is here.
        is_stream: whether that is a stream.
    """
    if isinstance(state, Mapping) and set(state) == {"source", "samples_left_out"}:
        source = state["source"]
        if isinstance(source, Mapping) and set(source) == set(names):
            return
        found = f"its source has {_keys(source)}"
    else:
        found = f"it has {_keys(state)}"
    raise UsageError(
        f"this is no state of a loader of {'a stream' if is_stream else 'samples by index'}: {found}; give "
        f"what state_dict() of a loader of the same kind returned"
    )


def _keys(state: Any) -> str:
    return str(sorted(map(str, state))) if isinstance(state, Mapping) else f"a {type(state).__name__}"
