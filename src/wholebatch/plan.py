"""The arithmetic of a global batch: m samples x A micro-batches x D replicas, and nothing floored.

    global_batch_samples = micro_batch_samples x micro_batches_per_window x replicas

Any of the four numbers follows from the other three. Where one does not divide, the plan is refused
with every factor shown and the nearest numbers that fit, each of them planned before it is offered.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import islice
from math import prod
from typing import Any, Literal, get_args

from wholebatch.errors import PlanError
from wholebatch.layout import Layout, PipelineSchedule, pipeline_misfit, rank_misfit
from wholebatch.whole_numbers import (
    nearest_multiples,
    one_of,
    or_list,
    set_whole_numbers,
    show_remainder,
    whole_number,
)

Tail = Literal["partial", "drop"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchPlan:
    """One update: m samples x A micro-batches x D replicas. Made by `plan_batch`.

    Args:
        layout: the ranks, and the D replicas that they make.
        micro_batch_samples: m, samples that one replica passes through one forward.
        micro_batches_per_window: A, micro-batches of one update on one rank; the pipeline's
            micro-batches are these.
        items_per_sample: supervised items in each sample where all have the same number, else None.
        tail: "partial" uses the samples left at the end of an epoch as a smaller global batch,
            divided by its own denominator; "drop" leaves them out.
        assumed: names of the numbers that nobody gave and that did not follow from the others.

    Raises:
        PlanError: a number is not a whole positive one, or the pipeline's schedule can't take A.
    """

    layout: Layout
    micro_batch_samples: int
    micro_batches_per_window: int
    items_per_sample: int | None = None
    tail: Tail = "partial"
    assumed: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        set_whole_numbers(self, "micro_batch_samples", "micro_batches_per_window")
        one_of("tail", self.tail, get_args(Tail))
        whole_number("global_batch_samples", self.global_batch_samples)
        if self.items_per_sample is not None:
            set_whole_numbers(self, "items_per_sample")
            whole_number("global_batch_items", self.global_batch_items)
        if problem := pipeline_misfit(self.layout, self.micro_batches_per_window):
            raise PlanError(f"{problem}.")

    @property
    def replicas(self) -> int:
        """D, the replicas of the layout."""
        return self.layout.replicas

    @property
    def global_batch_samples(self) -> int:
        """Samples of one update over all replicas: m x A x D."""
        return self.micro_batch_samples * self.micro_batches_per_window * self.replicas

    @property
    def global_batch_items(self) -> int | None:
        """Items of one update: global batch x items per sample, or None where samples are ragged."""
        per_sample = self.items_per_sample
        return None if per_sample is None else self.global_batch_samples * per_sample

    @property
    def micro_batches_per_update(self) -> int:
        """Micro-batches of one update over all replicas: A x D."""
        return self.micro_batches_per_window * self.replicas

    @property
    def reductions_per_update(self) -> int:
        """Times that gradients are combined in one update: 1, or 0 where no two ranks have the same."""
        return 1 if self.layout.copies > 1 else 0

    @property
    def naive_reductions_per_update(self) -> int:
        """The same where every micro-batch is reduced: A, or 0."""
        return self.micro_batches_per_window if self.layout.copies > 1 else 0

    @property
    def pipeline_bubble_fraction(self) -> float | None:
        """Idle over ideal time of the pipeline; see `Layout.pipeline_bubble_fraction`."""
        return self.layout.pipeline_bubble_fraction(self.micro_batches_per_window)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain JSON values; the keys are those of ``wholebatch plan --json``."""
        layout, staged = self.layout, self.layout.pipeline_parallel > 1
        return {
            "ranks": layout.ranks,
            "replicas": self.replicas,
            "tensor_parallel": layout.tensor_parallel,
            "pipeline_parallel": layout.pipeline_parallel,
            "context_parallel": layout.context_parallel,
            "expert_parallel": layout.expert_parallel,
            "pipeline_schedule": layout.pipeline_schedule if staged else None,
            "pipeline_virtual_stages": layout.pipeline_virtual_stages if staged else None,
            "pipeline_bubble_fraction": self.pipeline_bubble_fraction if staged else None,
            "micro_batch_samples": self.micro_batch_samples,
            "micro_batches_per_window": self.micro_batches_per_window,
            "micro_batches_per_update": self.micro_batches_per_update,
            "global_batch_samples": self.global_batch_samples,
            "items_per_sample": self.items_per_sample,
            "global_batch_items": self.global_batch_items,
            "reductions_per_update": self.reductions_per_update,
            "naive_reductions_per_update": self.naive_reductions_per_update,
            "tail": self.tail,
            "assumed": list(self.assumed),
        }


class _MisfitError(Exception):
    """A remainder or a contradiction, before the alternatives are known; never leaves this module."""


class _TooFewError(Exception):
    """Open numbers, among the four in `args`, before the fitting ones are known; never leaves either."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Request:
    """What the user gave, checked; None where nothing was said. ``shape`` holds the degrees only."""

    shape: Layout
    tail: Tail
    items_per_sample: int | None
    global_batch_samples: int | None
    global_batch_items: int | None
    micro_batch_samples: int | None
    micro_batches_per_window: int | None
    ranks: int | None
    replicas: int | None


# The numbers that the user may change to make a plan fit, in the order in which they are offered.
_GLOBAL = ("global_batch_samples", "global_batch_items")
_ADJUSTABLE = (*_GLOBAL, "micro_batch_samples", "micro_batches_per_window", "ranks", "replicas")


def plan_batch(
    *,
    global_batch_samples: int | None = None,
    global_batch_items: int | None = None,
    items_per_sample: int | None = None,
    micro_batch_samples: int | None = None,
    micro_batches_per_window: int | None = None,
    ranks: int | None = None,
    replicas: int | None = None,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    context_parallel: int = 1,
    expert_parallel: int = 1,
    pipeline_schedule: PipelineSchedule = "1f1b",
    pipeline_virtual_stages: int = 1,
    tail: Tail = "partial",
) -> BatchPlan:
    """Derive the missing number of a global batch from the others, or refuse.

    ``global_batch_samples = micro_batch_samples x micro_batches_per_window x replicas``, and
    ``global_batch_items = global_batch_samples x items_per_sample``.

    Where neither ranks nor replicas follow, one replica is assumed; where a micro-batch is given and
    no global batch, one micro-batch per window. `BatchPlan.assumed` names them.

    Args:
        global_batch_samples: samples of one update over all replicas.
        global_batch_items: supervised items of one update; needs ``items_per_sample``, or gives it
            where ``global_batch_samples`` is given too.
        items_per_sample: items in each sample, for samples that all have the same number.
        micro_batch_samples: m, samples that one replica passes through one forward.
        micro_batches_per_window: A, micro-batches of one update on one rank.
        ranks: processes of the job; all of them, also those of tensor, pipeline and context groups.
        replicas: D, in place of ranks or as a check on them.
        tensor_parallel, pipeline_parallel, context_parallel, expert_parallel: see `Layout`.
        pipeline_schedule, pipeline_virtual_stages: see `Layout`.
        tail: "partial" or "drop"; see `BatchPlan`.

    Returns:
        The plan; its numbers multiply exactly.

    Raises:
        PlanError: a number is not a whole positive one, two of them contradict each other, too few
            are given, or one does not divide; the message shows the factors and what fits.
    """
    given = locals()
    names = (*_ADJUSTABLE, "items_per_sample")
    checked = {name: None if given[name] is None else whole_number(name, given[name]) for name in names}
    request = _Request(shape=_shape(given), tail=tail, **checked)
    try:
        return _solve(request)
    except _MisfitError as misfit:
        raise PlanError(f"{misfit}. {_advice(request)}") from None
    except _TooFewError as gap:
        raise PlanError(_too_few(request, *gap.args)) from None


def _shape(given: dict[str, Any]) -> Layout:
    """Return the smallest kind of layout with the degrees given; its ranks mean nothing yet."""
    degrees = {each.name: given[each.name] for each in fields(Layout) if each.name != "ranks"}
    sizes = [whole_number(name, size) for name, size in degrees.items() if name.endswith("_parallel")]
    return Layout(ranks=prod(sizes), **degrees)


def _solve(request: _Request) -> BatchPlan:
    """Return the plan that the request determines; _MisfitError or _TooFewError where there is none."""
    shape = request.shape
    numbers = {
        "global_batch_samples": _samples(request),
        "micro_batch_samples": request.micro_batch_samples,
        "micro_batches_per_window": request.micro_batches_per_window,
        "replicas": _replicas(request),
    }
    assumed = _assume(numbers, shape)
    micro_batch, window, replicas = _complete(numbers, request)
    ranks = replicas * shape.ranks_per_replica
    if ranks % shape.rank_multiple:
        raise _MisfitError(rank_misfit(shape, ranks))
    if problem := pipeline_misfit(shape, window):
        raise _MisfitError(problem)
    return BatchPlan(
        layout=replace(shape, ranks=ranks),
        micro_batch_samples=micro_batch,
        micro_batches_per_window=window,
        items_per_sample=_items_per_sample(request),
        tail=request.tail,
        assumed=assumed,
    )


def _replicas(request: _Request) -> int | None:
    """Return D from the ranks, checked against the replicas given, or None where neither is given."""
    shape, ranks = request.shape, request.ranks
    if ranks is None:
        return request.replicas
    if ranks % shape.rank_multiple:
        raise _MisfitError(rank_misfit(shape, ranks))
    replicas = ranks // shape.ranks_per_replica
    if request.replicas not in (None, replicas):
        raise _MisfitError(
            f"{ranks} ranks at {shape.ranks_per_replica} ranks per replica are {replicas} replicas, "
            f"not {request.replicas}"
        )
    return replicas


def _samples(request: _Request) -> int | None:
    """Return the global batch in samples, from the items where it was given in items."""
    samples, per_sample = request.global_batch_samples, request.items_per_sample
    items = request.global_batch_items
    if items is None:
        return samples
    if samples is not None and per_sample is not None and samples * per_sample != items:
        raise _MisfitError(
            f"global_batch_samples {samples} x items_per_sample {per_sample} are {samples * per_sample} "
            f"items, not global_batch_items {items}"
        )
    name, divisor = ("items_per_sample", per_sample) if per_sample else ("global_batch_samples", samples)
    if divisor is None:
        raise PlanError(
            f"global_batch_items={items} says nothing about samples yet: give items_per_sample, such as "
            f"the sequence length; where samples are ragged, plan in global_batch_samples"
        )
    if items % divisor:
        raise _MisfitError(
            f"global_batch_items {items} does not divide by {name} {divisor}: "
            f"{show_remainder(items, divisor)}"
        )
    return items // divisor if samples is None else samples


def _items_per_sample(request: _Request) -> int | None:
    samples, items = request.global_batch_samples, request.global_batch_items
    if request.items_per_sample is None and samples is not None and items is not None:
        return items // samples
    return request.items_per_sample


def _assume(numbers: dict[str, int | None], shape: Layout) -> tuple[str, ...]:
    """Fill in the numbers that have one plain default; return their names."""
    assumed = []
    others = [number for name, number in numbers.items() if name != "replicas"]
    if numbers["replicas"] is None and None in others:
        numbers["replicas"] = shape.rank_multiple // shape.ranks_per_replica
        assumed.append("replicas")
    open_global = numbers["global_batch_samples"] is None and numbers["micro_batch_samples"] is not None
    if open_global and numbers["micro_batches_per_window"] is None:
        numbers["micro_batches_per_window"] = shape.micro_batch_multiple
        assumed.append("micro_batches_per_window")
    return tuple(assumed)


def _complete(numbers: dict[str, int | None], request: _Request) -> tuple[int, int, int]:
    """Return (m, A, D), the one that is missing divided out of the global batch."""
    missing = [name for name, number in numbers.items() if number is None]
    if len(missing) > 1:
        raise _TooFewError(numbers)
    factors = {name: number for name, number in numbers.items() if name != "global_batch_samples"}
    known = {name: number for name, number in factors.items() if number is not None}
    product, samples = prod(known.values()), numbers["global_batch_samples"]
    shown = " x ".join(_show_factor(name, number, request) for name, number in known.items())
    if samples is not None and not missing and product != samples:
        raise _MisfitError(f"{shown} are {product} samples, not {_show_samples(samples, request)}")
    if samples is not None and samples % product:
        remainder = show_remainder(samples, product)
        raise _MisfitError(f"{_show_samples(samples, request)} does not divide by {shown}: {remainder}")
    quotient = 0 if samples is None else samples // product
    micro_batch, window, replicas = (number or quotient for number in factors.values())
    return micro_batch, window, replicas


def _show_factor(name: str, number: int, request: _Request) -> str:
    if name == "replicas" and request.ranks and request.shape.ranks_per_replica > 1:
        return f"replicas {number} ({request.ranks} ranks / {request.shape.ranks_per_replica})"
    return f"{name} {number}"


def _show_samples(samples: int, request: _Request) -> str:
    items = request.global_batch_items
    origin = f" ({items} items / {items // samples})" if items else ""
    return f"global_batch_samples {samples}{origin}"


def _too_few(request: _Request, numbers: dict[str, int | None]) -> str:
    """Say which numbers are open, and where only m and A are, which pairs would do."""
    samples, replicas = numbers["global_batch_samples"], numbers["replicas"]
    missing = [name for name, number in numbers.items() if number is None]
    if samples is None:
        return (
            f"nothing says how large the global batch is: {', '.join(missing)} are open; give "
            f"micro_batch_samples and global_batch_samples, or the items with items_per_sample"
        )
    assert replicas is not None
    share, rest = divmod(samples, replicas)
    problem = f"global_batch_samples {samples} over replicas {replicas} leaves {' and '.join(missing)} open"
    why = f"does not divide by the replicas: {show_remainder(samples, replicas)}"
    if not rest:
        sizes = (size for size in range(1, min(share, 4096) + 1) if share % size == 0)
        fitting = (size for size in sizes if _fits(request, "micro_batches_per_window", share // size))
        if pairs := [f"{size} x {share // size}" for size in islice(fitting, 6)]:
            return f"{problem}; give one of them. Their product is {share}: {', '.join(pairs)} would do"
        why = "no pair of them fits"
    # With the fewest micro-batches that the schedule takes, m is all the rest: no other A fits more.
    fewest = replace(request, micro_batches_per_window=request.shape.micro_batch_multiple)
    return f"{problem}, and {why}. {_advice(fewest)}"


def _fits(request: _Request, name: str, number: int) -> bool:
    try:
        _solve(replace(request, **{name: number}))  # type: ignore[arg-type]
    except (_MisfitError, _TooFewError, PlanError):
        return False
    return True


def _advice(request: _Request) -> str:
    """Write, for each number given, the nearest ones that make the whole plan fit."""
    offers = []
    for name in _ADJUSTABLE:
        value, fits = getattr(request, name), partial(_fits, request, name)
        if value is not None and (near := nearest_multiples(value, _multiple(request, name), fits)):
            offers.append(f"{name}={or_list(near)}")
    if offers:
        return f"Nearest that fit, changing one number: {'; '.join(offers)}."
    return "Changing one number alone does not make it fit; leave one of them out, or change two."


def _multiple(request: _Request, name: str) -> int:
    """Return what any fitting value of ``name`` must be a multiple of, so that few are tried."""
    shape = request.shape
    if name == "ranks":
        return shape.rank_multiple
    if name == "micro_batches_per_window":
        return shape.micro_batch_multiple
    if name not in _GLOBAL:
        return 1
    samples = request.micro_batch_samples or 1
    samples *= request.micro_batches_per_window or shape.micro_batch_multiple
    samples *= request.replicas or (request.ranks or shape.rank_multiple) // shape.ranks_per_replica or 1
    if name == "global_batch_samples":
        return samples
    return (request.items_per_sample or 1) * (request.global_batch_samples or samples)
