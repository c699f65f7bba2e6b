"""The arguments of a loader: looked at, and made into where its windows come from."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray
from torch.utils.data import DataLoader, IterableDataset, default_collate

from wholebatch.budget import AnyPlan, BudgetPlan
from wholebatch.errors import UsageError
from wholebatch.loading.bound import Bound
from wholebatch.loading.checks import check_data_set, check_order, check_unused, num_samples_of
from wholebatch.loading.lengths import CutShort, PackAlone, checked_numbers, refuse_too_long
from wholebatch.loading.padding import PadCollate, PadLikeFirst
from wholebatch.loading.parts import Parts, order_of, share_of
from wholebatch.loading.reading import Collate, MapReader, Samples
from wholebatch.loading.sources import MapSource, StreamSource
from wholebatch.loading.stream import Share
from wholebatch.order import Order
from wholebatch.whole_numbers import whole_number

Numbers = Sequence[int] | Callable[[Any], int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Arguments:
    """The arguments of a `WindowLoader` that say where its windows come from; see there."""

    dataset: Any
    plan: AnyPlan
    collate: Callable[..., Any] | None
    replica: int
    lengths: Numbers | None
    items: Numbers | None
    order: Order | None
    workers: int
    seed: int
    shuffle: bool
    num_epochs: int | None
    cut_short: CutShort | None
    skips: bool


def source_of(given: Arguments) -> MapSource | StreamSource:
    """Where the windows come from.

    Raises:
        UsageError: arguments that contradict each other, the plan or the data set.
        PlanError: a sample that is longer than the plan allows, or has more items than an update may.
    """
    plan = given.plan
    check_data_set(given.dataset, given.workers)
    check_unused(plan, shuffle=given.shuffle, items=given.items)
    if isinstance(plan, BudgetPlan):
        _check_budget(given, plan)
    if _is_stream(given.dataset):
        return _stream_source(given)
    return _map_source(given)


def _is_stream(dataset: Any) -> bool:
    """Whether it is read in the order in which its samples arrive."""
    if isinstance(dataset, str | bytes | dict):
        raise UsageError(f"the data set is a {type(dataset).__name__}; give a data set, or an iterable")
    if isinstance(dataset, DataLoader):
        raise UsageError(
            "the data set is a DataLoader, whose place a WindowLoader takes; give its dataset, with "
            "collate=, workers= and pin_memory= as it had them"
        )
    if isinstance(dataset, IterableDataset):  # whose base class has a __getitem__ that refuses
        return True
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        return False
    if isinstance(dataset, Iterable) or callable(dataset):
        return True
    raise UsageError(
        f"the data set is a {type(dataset).__name__} with neither __getitem__ and __len__ nor __iter__; a "
        f"map-style data set has the first two, a stream the last"
    )


def _check_budget(given: Arguments, plan: BudgetPlan) -> None:
    if given.lengths is None:
        raise UsageError(
            f"a plan of tokens_per_micro_batch={plan.tokens_per_micro_batch} cuts by the lengths of the "
            f"samples; give lengths=, the tokens of each by its id or a function of a sample"
        )
    alone = callable(given.lengths)
    if plan.equal_micro_batches and (alone or given.skips):
        why = "a replica that cuts its share alone" if alone else "one that skips samples"
        raise UsageError(
            f"the plan has equal_micro_batches=True, and {why} may have another number of them than the "
            f'others; give lengths by sample id, on_bad_sample="raise" and a map-style data set'
        )


# Samples by index ---------------------------------------------------------------------------------


def _map_source(given: Arguments) -> MapSource:
    plan, samples = given.plan, given.dataset
    num_samples = num_samples_of(samples)
    if given.order is not None:
        check_order(given.order, plan, shuffle=given.shuffle, items=given.items)
    lengths: NDArray[Any] | None = None
    if given.lengths is not None and not callable(given.lengths):
        lengths = checked_numbers("lengths", given.lengths, num_samples)
        if isinstance(plan, BudgetPlan):
            refuse_too_long(lengths, plan)
    cut = None
    if isinstance(plan, BudgetPlan) and callable(given.lengths):
        cut = PackAlone(plan=plan, length_of=given.lengths, cut_short=given.cut_short)
    return MapSource(
        parts=Parts(
            samples=samples,
            order=_order(given, num_samples) if given.order is None else given.order,
            plan=plan,
            replica=given.replica,
            lengths=lengths if isinstance(plan, BudgetPlan) else None,
            num_epochs=given.num_epochs,
        ),
        reader=MapReader(
            samples=samples,
            collate=as_collate(given.collate, samples, seed=given.seed, skips=given.skips),
            seed=given.seed,
            skips=given.skips,
            cut=cut,
            cut_short=given.cut_short,
            bound=Bound(plan=plan).check if isinstance(plan, BudgetPlan) else None,
        ),
        workers=given.workers,
    )


def _order(given: Arguments, num_samples: int) -> Order:
    in_items = isinstance(given.plan, BudgetPlan) and given.plan.global_batch_items is not None
    found = None
    if in_items and given.items is not None and not callable(given.items):
        found = checked_numbers("items", given.items, num_samples)
    return order_of(given.plan, num_samples, items=found, seed=given.seed, shuffle=given.shuffle)


# A stream -----------------------------------------------------------------------------------------


def _stream_source(given: Arguments) -> StreamSource:
    plan = given.plan
    _refuse_for_streams(given)
    pack = None
    if isinstance(plan, BudgetPlan):
        assert callable(given.lengths)
        pack = PackAlone(plan=plan, length_of=given.lengths, cut_short=given.cut_short)
    return StreamSource(
        dataset=given.dataset,
        plan=plan,
        collate=as_collate(given.collate, None, seed=given.seed, skips=False),
        share=_share(given),
        seed=given.seed,
        workers=given.workers,
        pack=pack,
    )


def _refuse_for_streams(given: Arguments) -> None:
    """Say what a stream can't do."""
    what = None
    if given.order is not None or not given.shuffle:
        what = "order= and shuffle=False are of samples by index; samples of a stream come as they arrive"
    elif given.num_epochs != 1:
        what = f"num_epochs={given.num_epochs}: a stream ends when it ends; leave it out"
    elif given.plan.tail == "drop":
        what = (
            "tail='drop': that it ends is known only when it has, on each replica by itself; its tail is a "
            "window of its own. Plan with tail='partial'"
        )
    elif given.skips:
        what = (
            'on_bad_sample="skip": a stream that failed can\'t be asked for the sample after it; leave bad '
            "samples out inside the stream"
        )
    elif given.lengths is not None and not callable(given.lengths):
        what = "lengths by sample id: samples of a stream have none; give lengths(sample), a function"
    elif given.items is not None and not callable(given.items):
        what = "items by sample id: samples of a stream have none; give items(sample), a function"
    if what is not None:
        raise UsageError(f"the data set is a stream ({type(given.dataset).__name__}), and {what}")


def _share(given: Arguments) -> Share:
    plan, share = given.plan, share_of(given.plan, given.replica)
    items = plan.global_batch_items if isinstance(plan, BudgetPlan) else None
    if items is None:
        assert plan.global_batch_samples is not None
        return Share(of=share, num_samples=len(share.places(0, plan.global_batch_samples)))
    if given.items is None or not callable(given.items):
        raise UsageError(f"global_batch_items={items} of a stream needs items(sample), a function")
    return Share(of=share, num_items=len(share.places(0, items)), items_of=given.items)


# One argument by itself ---------------------------------------------------------------------------


def replica_of(plan: AnyPlan, replica: int | None) -> int:
    """Which replica this is.

    Raises:
        UsageError: the plan has no such one, or several and none was named.
    """
    if replica is None:
        if plan.replicas > 1:
            raise UsageError(
                f"the plan has {plan.replicas} replicas; give replica=, which of them this is, from 0"
            )
        return 0
    if whole_number("replica", replica, minimum=0) >= plan.replicas:
        raise UsageError(
            f"replica={replica} does not exist: the plan has {plan.replicas}, from 0; plan with the ranks "
            f"that run"
        )
    return replica


def cut_short_of(plan: AnyPlan, truncate: Callable[[Any, int], Any] | None) -> CutShort | None:
    """What cuts samples that are too long; None where the plan does not truncate.

    Raises:
        UsageError: the plan truncates and nobody said how, or the other way round.
    """
    truncates = isinstance(plan, BudgetPlan) and plan.too_long == "truncate"
    if truncates != (truncate is not None):
        raise UsageError(
            "the plan has too_long='truncate'; give truncate=, a function (sample, tokens) that cuts one"
            if truncates
            else "truncate= is for a plan of a token budget with too_long='truncate'; leave it out"
        )
    if truncate is None:
        return None
    assert isinstance(plan, BudgetPlan)
    return CutShort(truncate=truncate, tokens=plan.tokens_per_micro_batch)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Named:
    """A collation that is given what it has parameters for."""

    collate: Callable[..., Any]
    ids: bool
    epoch: bool

    def __call__(self, samples: Sequence[Any], ids: Sequence[int], epoch: int) -> Any:
        named: dict[str, Any] = {"ids": ids} if self.ids else {}
        if self.epoch:
            named["epoch"] = epoch
        return self.collate(list(samples), **named)


def as_collate(
    collate: Callable[..., Any] | None, samples: Samples | None, *, seed: int, skips: bool
) -> Collate:
    """The user's collation, by default torch's, in the one form that a reader calls.

    Args:
        collate: of the user's own; None for torch's.
        samples, seed, skips: for padding that compares all samples with the first; see `PadLikeFirst`.

    Raises:
        UsageError: it is no function.
    """
    given = default_collate if collate is None else collate
    if isinstance(given, PadCollate) and given.like is None:
        return PadLikeFirst(given, samples, seed=seed, skips=skips)
    if not callable(given):
        raise UsageError(f"collate is a {type(given).__name__}; give a function of a list of samples")
    try:
        parameters = inspect.signature(given).parameters
    except ValueError:  # of some functions that are written in C
        parameters = inspect.signature(lambda samples: None).parameters  # noqa: ARG005
    return _Named(collate=given, ids="ids" in parameters, epoch="epoch" in parameters)
