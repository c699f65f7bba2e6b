"""Traces of loops that never ran, written down as one would read them: for tests of the audit's judge.

A rank is a list of operations; what they do to ``.grad`` is followed with random gradients, so that clips,
unscales and steps read what they would read::

    trace(backward(items=5, weight=0.1), backward(items=5, weight=0.1), clip(0.5), step(), clear())
    traces(
        [backward(items=5, weight=0.2, reduces=True), step(), clear()],
        [backward(items=5, weight=0.2, reduces=True), step(), clear()],
    )

``update(...)`` writes a whole right window. Fields of events, backwards and forwards are taken by their own
names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from wholebatch.audit.trace import (
    SKETCH_WIDTH,
    Backward,
    Event,
    Forward,
    Level,
    OptimizerFacts,
    Place,
    RankTrace,
    Sketches,
    Term,
)

DEFAULT_SITE = "train.py:10"
_BACKWARD_FIELDS = set(Backward.__slots__)
_FORWARD_FIELDS = set(Forward.__slots__)


@dataclass(frozen=True, kw_only=True)
class Op:
    """One operation: the event that it leaves, if any, and what it does to ``.grad``.

    ``to``: parameters concerned, None for all. ``waits``: all ranks meet here.
    """

    events: tuple[Event, ...] = ()
    action: str = ""
    to: tuple[int, ...] | None = None
    factor: float = 1.0
    delivers: Sketches | None = None
    reads: Sketches | None = None
    waits: bool = False
    optimizer: int | None = None
    noise: float = 0.0


def gradient(seed: int, parameters: int | Iterable[int] = 4, size: float = 1.0) -> Sketches:
    """Sketches of a random gradient."""
    rng = np.random.default_rng(seed)
    indices = range(parameters) if isinstance(parameters, int) else parameters
    return {p: size * rng.standard_normal(SKETCH_WIDTH) for p in indices}


def add(*parts: tuple[float, Sketches]) -> dict[int, np.ndarray]:
    """Sum of multiples of sketches: ``add((0.5, a), (2.0, b))``; what an optimizer reads, by kappas."""
    total: dict[int, np.ndarray] = {}
    for factor, sketches in parts:
        for p, vector in sketches.items():
            total[p] = total.get(p, np.zeros(SKETCH_WIDTH)) + factor * vector
    return total


def site(*lines: str) -> tuple[Place, ...]:
    """Places from ``"train.py:10"``, innermost first."""
    places = []
    for line in lines:
        file, number = line.rsplit(":", 1)
        places.append(Place(file=file, line=int(number), code="loss.backward()"))
    return tuple(places)


def level(
    num_units: float, weight: float | tuple[float, float], unit: str = "item", shape: tuple[int, ...] = ()
) -> Level:
    """A reading: so many units of so much loss weight; with a pair, one half each (lowest, highest)."""
    low, high = weight if isinstance(weight, tuple) else (weight, weight)
    return Level(
        unit=unit,  # type: ignore[arg-type]
        num_units=num_units,
        total=num_units * (low + high) / 2,
        lowest=low,
        highest=high,
        per_unit_shape=shape,
    )


def term(*levels: Level, key: str = "NllLoss/0", **fields: Any) -> Term:
    """A term of a loss, coarsest reading first."""
    return Term(key=key, operation=key.split("/")[0], levels=levels, **fields)


def backward(
    items: float | None = None,
    weight: float | tuple[float, float] | None = None,
    *,
    at: str | Sequence[str] = DEFAULT_SITE,
    key: str = "NllLoss/0",
    terms: Sequence[Term] | None = None,
    delivers: Sketches | None = None,
    to: Sequence[int] | None = None,
    reduces: bool = False,
    divisor: float | None = None,
    forward: bool = True,
    **fields: Any,
) -> Op:
    """A forward and a backward of ``items`` items, each of loss weight ``weight`` (1/items by default).

    Args:
        items, weight: of its one term; ``terms`` for anything else; neither for terms that can't be read.
        at: line or lines (innermost first) of the backward.
        key: of its one term.
        delivers: sketches; random ones by default, to the parameters ``to`` (all by default).
        reduces: all ranks meet in this backward, ``.grad`` is then the ranks' mean (sum / ``divisor``).
        forward: False leaves the forward's event out.
        fields: of ``Backward`` and ``Forward``.
    """
    if terms is None:
        weight = weight if weight is not None else 1 / items if items else 0.0
        terms = () if items is None else (term(level(items, weight), key=key),)
    inner = {name: value for name, value in fields.items() if name in _BACKWARD_FIELDS}
    outer = {name: value for name, value in fields.items() if name in _FORWARD_FIELDS}
    unknown = fields.keys() - inner.keys() - outer.keys()
    assert not unknown, f"neither Backward nor Forward has {sorted(unknown)}"
    inner.setdefault("loss", 1.0)
    if not terms:
        inner.setdefault("unread", "the loss has no reduction that is known")
    places = site(*((at,) if isinstance(at, str) else at))
    record = Backward(site=places, terms=tuple(terms), **inner)
    events = [Event(kind="forward", place=places[0], forward=Forward(**{"module": "Model", **outer}))]
    return Op(
        events=(*(events if forward else ()), Event(kind="backward", place=places[0], backward=record)),
        action="deliver",
        to=None if to is None else tuple(to),
        delivers=delivers,
        waits=reduces,
        factor=divisor if divisor is not None else 0.0,
    )


def event(kind: str, **fields: Any) -> Op:
    """Any event that leaves ``.grad`` alone: ``event("schedule", value=0.1)``, ``event("average")``."""
    fields.setdefault("place", Place(file="train.py", line=20))
    return Op(events=(Event(kind=kind, **fields),))  # type: ignore[arg-type]


def _changes(kind: str, factor: float, fields: dict[str, Any], noise: float = 0.0) -> Op:
    made = event(kind, **fields)
    return replace(made, action="multiply", factor=factor, noise=noise)


def clip(factor: float = 0.5, max_norm: float = 1.0, *, noise: float = 0.0, **fields: Any) -> Op:
    """A clip that multiplies by ``factor``; with ``noise``, one by value, which turns the gradient too."""
    return _changes("clip", factor, {"value": max_norm, **fields}, noise)


def unscale(scale: float, **fields: Any) -> Op:
    """An unscale of gradients by the loss scale ``scale``."""
    return _changes("unscale", 1 / scale, {"value": scale, **fields})


def multiply(factor: float, *, to: Sequence[int] | None = None, **fields: Any) -> Op:
    """``p.grad *= factor`` by hand, for some parameters or all."""
    made = _changes("gradients_changed", factor, fields)
    return replace(made, to=None if to is None else tuple(to))


def reduce(
    *,
    divisor: float | None = None,
    to: Sequence[int] | None = None,
    from_python: bool = False,
    **fields: Any,
) -> Op:
    """All ranks' ``.grad`` become their mean (sum / ``divisor``); ``from_python``: by a call that shows."""
    made = event("reduce", **fields) if from_python else Op()
    return replace(
        made,
        action="reduce",
        waits=True,
        factor=divisor if divisor is not None else 0.0,
        to=None if to is None else tuple(to),
    )


def clear(*optimizers: int, share: float = 1.0, really: bool = True, **fields: Any) -> Op:
    """The gradients of these optimizers (0 by default) are cleared; ``really=False``: called, ignored."""
    which = optimizers or (0,)
    if not really:
        return event("clear_call", optimizers=which, **fields)
    made = event("clear", optimizers=which, value=share, **fields)
    return replace(made, action="clear")


def step(optimizer: int = 0, *, reads: Sketches | None = None, **fields: Any) -> Op:
    """An optimizer's step on ``.grad``, or on ``reads``."""
    made = event("step", optimizers=(optimizer,), **fields)
    return replace(made, action="read", reads=reads, optimizer=optimizer)


def skip(optimizer: int = 0, **fields: Any) -> Op:
    """A step that the loss scaler held back."""
    return event("skip", optimizers=(optimizer,), **fields)


def pass_begins(**fields: Any) -> Op:
    """A pass over the data begins."""
    return event("pass", value=1.0, **fields)


def pass_ends(**fields: Any) -> Op:
    """A pass over the data ends."""
    return event("pass", value=0.0, **fields)


def update(
    num_micro_batches: int = 2, num_items: float = 5, *, num_ranks: int = 1, clear_first: bool = False
) -> list[Op]:
    """A right update: every item 1/N; reduced with the last micro-batch where there are ranks."""
    weight = 1 / (num_items * num_micro_batches)
    ops = [
        backward(
            items=num_items,
            weight=weight,
            reduces=num_ranks > 1 and i == num_micro_batches - 1,
            holds_reduction=None if num_ranks == 1 else i < num_micro_batches - 1,
        )
        for i in range(num_micro_batches)
    ]
    return [clear(), *ops, step()] if clear_first else [*ops, step(), clear()]


@dataclass
class _Rank:
    """Follows one rank: its ``.grad`` and the events so far."""

    rank: int
    num_parameters: int
    owners: tuple[tuple[int, ...], ...]
    shares: Mapping[int, np.ndarray]
    grad: dict[int, np.ndarray] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)

    def run(self, ops: Iterable[Op]) -> Iterator[Op]:
        for op in ops:
            getattr(self, f"_{op.action or 'nothing'}")(op)
            if op.waits:
                yield op

    def seen(self) -> Sketches:
        """What this rank sees of ``.grad``: its shard where it is sharded."""
        return {p: v * self.shares.get(p, 1.0) for p, v in self.grad.items()}

    def _nothing(self, op: Op) -> None:
        self.events += op.events

    _reduce = _nothing

    def _deliver(self, op: Op) -> None:
        to = range(self.num_parameters) if op.to is None else op.to
        delivered = gradient(1000 * self.rank + len(self.events) + 17, to)
        if op.delivers is not None:
            delivered = op.delivers
        self.grad = add((1.0, self.grad), (1.0, delivered))
        *before, last = op.events
        assert last.backward is not None
        self.events += [*before, replace(last, backward=replace(last.backward, delivered=delivered))]

    def _multiply(self, op: Op) -> None:
        before = self.seen()
        rng = np.random.default_rng(len(self.events))
        for p in self.grad if op.to is None else op.to:
            turn = op.noise * rng.standard_normal(SKETCH_WIDTH)
            self.grad[p] = self.grad[p] * op.factor + turn
        self.events += [replace(e, before=before, after=self.seen()) for e in op.events]

    def _clear(self, op: Op) -> None:
        (cleared,) = op.events
        for optimizer in cleared.optimizers:
            for p in self.owners[optimizer] if cleared.value == 1.0 else ():
                self.grad.pop(p, None)
        self.events.append(cleared)

    def _read(self, op: Op) -> None:
        mine = set(self.owners[op.optimizer or 0])
        read = self.seen() if op.reads is None else op.reads
        read = {p: v for p, v in read.items() if p in mine}
        self.events += [replace(e, before=read) for e in op.events]


def _meet(ranks: Sequence[_Rank], op: Op) -> None:
    """All ranks' gradients become their sum over the divisor (their number where it is 0)."""
    divisor = op.factor or len(ranks)
    keys = {p for rank in ranks for p in rank.grad} if op.to is None or op.action == "deliver" else op.to
    zero = np.zeros(SKETCH_WIDTH)
    for p in sorted(keys):
        total = sum((rank.grad.get(p, zero) for rank in ranks), zero) / divisor
        for rank in ranks:
            rank.grad[p] = total.copy()


def traces(
    *ops: Sequence[Op],
    num_parameters: int = 4,
    optimizers: Sequence[Sequence[int]] | None = None,
    dtype: str = "float32",
    sharded: bool = False,
    replicas: Sequence[int] | None = None,
    **fields: Any,
) -> list[RankTrace]:
    """The traces of all ranks; each list of operations is one rank's.

    Args:
        optimizers: the parameters of each; one optimizer over all by default.
        sharded: clips and steps of each rank see only its shard.
        replicas: of each rank; every rank its own by default.
        fields: of ``RankTrace``, the same for all ranks.
    """
    owners = tuple(tuple(o) for o in optimizers) if optimizers else (tuple(range(num_parameters)),)
    rng = np.random.default_rng(5)
    cuts = rng.dirichlet(np.ones(len(ops)), size=(num_parameters, SKETCH_WIDTH))
    ranks = [
        _Rank(
            r, num_parameters, owners, {p: cuts[p, :, r] for p in range(num_parameters)} if sharded else {}
        )
        for r in range(len(ops))
    ]
    waiting = [(rank, rank.run(rank_ops)) for rank, rank_ops in zip(ranks, ops, strict=True)]
    while waiting:
        met = [(rank, run, op) for rank, run in waiting if (op := next(run, None)) is not None]
        if met:
            _meet([rank for rank, _, _ in met], met[0][2])
        waiting = [(rank, run) for rank, run, _ in met]
    replicas = range(len(ops)) if replicas is None else replicas
    return [
        RankTrace(
            rank=rank.rank,
            num_ranks=len(ops),
            replica=replicas[rank.rank],
            num_replicas=len(set(replicas)),
            parameters=tuple(f"layer.{p}.weight" for p in range(num_parameters)),
            dtypes=(dtype,) * num_parameters,
            optimizers=tuple(OptimizerFacts(name="SGD", parameters=owner) for owner in owners),
            events=tuple(rank.events),
            **({"sharded": (True,) * num_parameters} if sharded else {}),
            **fields,
        )
        for rank in ranks
    ]


def trace(*ops: Op, **fields: Any) -> list[RankTrace]:
    """The one trace of a job of one rank, in a list; fields as ``traces`` takes them."""
    return traces(ops, **fields)
