"""The terms of a loss: what each of its items weighs, read while its backward runs.

At the start of a backward the graph is walked from the loss to its reductions and hooks are put before the
nodes at which an item's weight can be read (``loss_walk.py``). The hooks measure and change nothing. At the
update's edge the numbers, four for each reading, go to the host.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from wholebatch.audit.trace import Level, Term
from wholebatch.audit.watch import unit_weights
from wholebatch.audit.watch.loss_plan import Plan, Probe
from wholebatch.audit.watch.loss_traits import first_parameter
from wholebatch.audit.watch.loss_walk import LossWalk

# so many terms of one kind, of one head, are a list of losses that was added up
_FEWEST_ENTRIES = 3

Unit = Literal["item", "row", "group"]


class TermReader:
    """Reads the terms of one loss, or of several with one backward, while it runs.

    ``weight of an item = sum over roots of d root / d (loss of the item) x gradient given for it``

    Attributes:
        unread: why nothing could be read, in words, or which part of the loss could not (the other terms
            are then given); None where all could, or may yet.
    """

    def __init__(self, root: Tensor, gradient: Tensor | None, *others: Tensor) -> None:
        """Walk the graph and put hooks on it; nothing that goes wrong here reaches the caller.

        Args:
            root: what backward is called on.
            gradient: what backward is given; None stands for 1.
            others: further roots of the same backward.
        """
        self.unread: str | None = None
        self._plans: list[Plan] = []
        self._handles: list[RemovableHandle] = []
        try:
            self._begin((root, *others), gradient)
        except Exception as error:
            self._give_up(str(error) or type(error).__name__)

    def _begin(self, roots: Sequence[Tensor], gradient: Tensor | None) -> None:
        """As ``__init__``; may raise."""
        if any(root.grad_fn is None for root in roots):
            self.unread = "backward was called on a tensor without a graph"
            return
        if any(root.numel() != 1 for root in roots):
            self.unread = (
                "backward was given a gradient" if gradient is not None else "the loss is no number"
            )
            return
        walk = LossWalk()
        for root in roots:
            walk.scalar((root.grad_fn, root.output_nr))
        self._plans = _with_smoothing(_with_lists(walk.plans))
        if not self._plans:
            self.unread = walk.problems[0] if walk.problems else "no reduction was found in the loss"
        elif walk.hidden:
            self.unread = f"a part of the loss was not seen: {walk.hidden[0]}"
        for plan in self._plans:
            self._handles += [probe.attach() for probe in plan.probes()]

    def _give_up(self, reason: str) -> None:
        """Take the hooks away and say why."""
        self.unread = reason
        self.finish()
        self._plans = []

    def finish(self) -> None:
        """Remove the hooks after backward and let go of the graph; what was measured stays on its
        device."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for plan in self._plans:
            plan.forget_graph()

    def terms(self) -> tuple[Term, ...]:
        """What was read, moved to the host.

        Returns:
            A term for each reduction of the loss that gradients came to, in the order of the walk; empty
            where none could be read, and ``unread`` says why.
        """
        try:
            read = _terms(self._plans)
        except Exception as error:
            self._give_up(str(error) or type(error).__name__)
            return ()
        if not read and self.unread is None:
            failures = [p.failure for plan in self._plans for p in plan.probes() if p.failure is not None]
            self.unread = failures[0] if failures else "no gradient came to the reductions of the loss"
        return read


def _with_lists(plans: list[Plan]) -> list[Plan]:
    """Terms of one kind and one head that were added up, as one term with an entry for each."""
    alike: dict[tuple[object, ...], list[Plan]] = defaultdict(list)
    for plan in plans:
        alike[(plan.operation, *sorted(set(plan.leaf_names)), len(plan.groups))].append(plan)
    merged: dict[int, Plan] = {}
    for candidates in alike.values():
        if len(candidates) < _FEWEST_ENTRIES:
            continue
        heads: dict[object, list[Plan]] = defaultdict(list)
        for plan in candidates:
            if plan.root is not None:
                heads[first_parameter(plan.root)].append(plan)
        for entries in heads.values():
            if len(entries) >= _FEWEST_ENTRIES:
                merged |= {id(entry): entries[0] for entry in entries[1:]}
                _merge(entries)
    return [plan for plan in plans if id(plan) not in merged]


def _merge(entries: Sequence[Plan]) -> None:
    """Make the first of several terms all of them, each a group of its own."""
    first = entries[0]
    groups = {0: [Probe(entry.root, unit_weights.elements) for entry in entries]}
    for depth in first.groups:
        groups[depth + 1] = [probe for entry in entries for probe in entry.groups.get(depth, [])]
    first.groups = groups
    first.leaf_depths = [depth + 1 for entry in entries for depth in entry.leaf_depths]
    for entry in entries[1:]:
        first.items += entry.items
        first.weighted += entry.weighted
        first.square = first.square or entry.square
        first.surrogate = first.surrogate or entry.surrogate
        first.quotient = first.quotient or entry.quotient
        if entry.coefficients != "none":
            first.coefficients = entry.coefficients
    first.rows = []
    first.scores = None


def _with_smoothing(plans: list[Plan]) -> list[Plan]:
    """Label smoothing: the sum over all classes belongs to the term of the targets' own."""
    targets = {plan.scores: plan for plan in plans if plan.scores is not None and not plan.smooths}
    rest = []
    for plan in plans:
        owner = targets.get(plan.scores) if plan.smooths and plan.scores is not None else None
        if owner is None:
            rest.append(plan)
        else:
            owner.smoothing = plan
    return rest


def _terms(plans: Sequence[Plan]) -> tuple[Term, ...]:
    """Terms of all plans whose items were measured."""
    numbers = _on_host([probe.numbers for plan in plans for probe in plan.probes()])
    seen: Counter[str] = Counter()
    terms = []
    for plan in plans:
        key = f"{plan.operation}/{seen[plan.operation]}"
        seen[plan.operation] += 1
        if any(probe.numbers is not None for probe in plan.items):
            terms.append(_term(plan, key, numbers))
    return tuple(terms)


def _on_host(tensors: Iterable[Tensor | None]) -> dict[int, list[float]]:
    """By identity of the tensor its numbers; one transfer for each device."""
    by_device: dict[torch.device, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        if tensor is not None:
            by_device[tensor.device].append(tensor)
    values: dict[int, list[float]] = {}
    for some in by_device.values():
        rows = torch.stack([unit_weights.wide(tensor) for tensor in some]).tolist()
        values |= {id(tensor): row for tensor, row in zip(some, rows, strict=True)}
    return values


def _term(plan: Plan, key: str, numbers: dict[int, list[float]]) -> Term:
    """One term, its readings from the coarsest to the finest."""
    item = _level("item", plan.items, numbers)
    assert item is not None
    levels = [_level("group", probes, numbers) for probes in _complete_groups(plan)]
    if plan.weighted and len(plan.weighted) == len(plan.items):
        levels.append(_level("group", plan.weighted, numbers))
    if len(plan.rows) == len(plan.items) == 1 and not any(levels) and plan.rows[0].numbers is not None:
        dense = not plan.items[0].by_element or plan.items[0].positions == round(item.num_units)
        levels.append(_level("row", plan.rows, numbers) if dense else None)
    if plan.smoothing is not None:
        item = _smoothed(item, _level("item", plan.smoothing.items, numbers), plan.num_classes)
    kept = [level for level in levels if level is not None and _differs(level, item)]
    return Term(
        key=key,
        operation=plan.operation,
        levels=(*kept, item),
        coefficients=plan.coefficients,
        square=plan.square,
        surrogate=plan.surrogate,
        quotient=plan.quotient,
        dtype=next(probe.dtype for probe in plan.items if probe.numbers is not None),
        multiplied=tuple(float(value) for divides, value in plan.written if not divides),
        divided=tuple(float(value) for divides, value in plan.written if divides),
    )


def _complete_groups(plan: Plan) -> list[list[Probe]]:
    """Readings that all finest tensors lie below, the outermost first."""
    shallowest = min(plan.leaf_depths, default=0)
    return [plan.groups[depth] for depth in sorted(plan.groups) if depth < shallowest]


def _level(unit: Unit, probes: Sequence[Probe], numbers: dict[int, list[float]]) -> Level | None:
    """All probes of one reading together; the sign is that of a loss that is to fall."""
    read = [_upright(numbers[id(p.numbers)]) for p in probes if p.numbers is not None]
    if not read:
        return None
    some = [one for one in read if one[0]]
    return Level(
        unit=unit,
        num_units=sum(one[0] for one in read),
        total=sum(one[1] for one in read),
        lowest=min((one[2] for one in some), default=0.0),
        highest=max((one[3] for one in some), default=0.0),
        per_unit_shape=probes[0].per_unit_shape if unit == "row" else (),
    )


def _upright(numbers: Sequence[float]) -> tuple[float, float, float, float]:
    """With the sign that makes the total positive: a loss may be written as minus a mean of
    log-likelihoods."""
    number, total, lowest, highest = numbers
    return (number, -total, -highest, -lowest) if total < 0 else (number, total, lowest, highest)


def _differs(level: Level, item: Level) -> bool:
    """Whether a coarser reading says anything else than the finest."""
    return level.num_units != item.num_units or abs(level.total - item.total) > 1e-9 * abs(item.total)


def _smoothed(item: Level, smoothing: Level | None, classes: int) -> Level:
    """What a target weighs together with its share of the uniform targets: ``own + classes x each
    class``."""
    if smoothing is None or not smoothing.num_units:
        return item
    share = classes * smoothing.total / smoothing.num_units
    return Level(
        unit="item",
        num_units=item.num_units,
        total=item.total + share * item.num_units,
        lowest=item.lowest + classes * smoothing.lowest,
        highest=item.highest + classes * smoothing.highest,
    )
