"""Contestants side by side: the same updates in turn, measured, counted and compared.

Every contestant does every update. Within each round they come in a random order, the same on all ranks,
and what a round took is compared with what the first contestant took in the same round, so that a machine
that is slow for a while is slow for all. A turn may be several updates in a row, of which the first is not
timed: in training an update follows one of the same loop, and finds what it reads in the processor's
caches.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from statistics import median, quantiles
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from contestants import Contestant, hand
from counting import UpdateCounter, peak_tensor_bytes
from work import Work, batches_of, num_replicas

Clock = Literal["wall", "cpu"]
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
_WARM_ROUNDS = 3
IN_A_ROW = 3
# Two loops that are both right may each lie the hand-written loop's distance from the exact numbers away,
# in opposite directions, which is 2; another 2 because one such distance is one draw of many. The wrong
# loops of the tests are at more than 1000.
ROUNDING_MARGIN = 4.0
MANY_MICRO_BATCHES, FEW_MICRO_BATCHES = 64, 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What came out for one contestant.

    Args:
        name: of the contestant.
        ratios: its time over that of the first contestant, by round; on several ranks of the slowest.
        typical_seconds: median of its own times, of one update. For the scale only: compare ratios.
        gradient_difference: distance of what it stepped on in the first and the last update from what
            the first contestant stepped on, relative to the length of that (Euclidean, after clipping).
        gradient_rounding: the distance of the first contestant's from the same in float64.
        parameter_difference: distance of its parameters at the end from the first contestant's, relative
            to the distance that those have moved.
        parameter_rounding: as ``gradient_rounding``.
        counts: what was observed in one update, by rank; an ``UpdateCounts`` unless ``race`` was given
            another observer.
    """

    name: str
    ratios: tuple[float, ...]
    typical_seconds: float
    gradient_difference: float
    gradient_rounding: float
    parameter_difference: float
    parameter_rounding: float
    counts: tuple[Any, ...]

    @property
    def same_update(self) -> bool:
        """Whether it differs from the first contestant by no more than rounding explains."""
        return (
            self.gradient_difference <= ROUNDING_MARGIN * self.gradient_rounding
            and self.parameter_difference <= ROUNDING_MARGIN * self.parameter_rounding
        )

    @property
    def quartiles(self) -> tuple[float, float, float]:
        """Lower quartile, median and upper quartile of the ratios."""
        if len(self.ratios) < 2:
            return self.ratios[0], self.ratios[0], self.ratios[0]
        low, _, high = quantiles(self.ratios, n=4, method="inclusive")
        return low, median(self.ratios), high

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"same_update": self.same_update, "quartiles": self.quartiles}


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryGrowth:
    """Peak bytes of tensors in an update of few and of many micro-batches of the same size."""

    name: str
    few_bytes: int
    many_bytes: int

    @property
    def ratio(self) -> float:
        return self.many_bytes / self.few_bytes

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"ratio": self.ratio}


class _Stopwatch:
    def __init__(self, clock: Clock) -> None:
        self._now = CLOCKS[clock]
        self.seconds = 0.0  # of all that it was entered for

    def __enter__(self) -> None:
        self._started = self._now()

    def __exit__(self, *_: object) -> None:
        self.seconds += self._now() - self._started


class _Gradients:
    """Takes down the gradients that an optimizer steps on, from each ``listen`` to its next step."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._taken: list[Tensor] = []

    def listen(self) -> None:
        self._hook = self._optimizer.register_step_pre_hook(self._take)

    def together(self) -> Tensor:
        """All that were taken down, end to end."""
        return torch.cat(self._taken).double()

    def _take(self, optimizer: Optimizer, *_: object) -> None:
        self._hook.remove()
        # a fused optimizer may have been told to divide by a factor as it reads
        factor = getattr(optimizer, "grad_scale", None)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        flat = torch.cat([p.grad.detach().flatten() for p in parameters if p.grad is not None])
        self._taken.append(flat if factor is None else (flat.double() / factor.double()).to(flat.dtype))


def count_update(contestant: Contestant) -> Any:
    """The observer that counts what an update does."""
    return UpdateCounter(contestant.model, contestant.optimizer)


def race(
    work: Work,
    contestants: Sequence[Contestant],
    *,
    rounds: int,
    seed: int = 0,
    clock: Clock = "wall",
    given: Callable[[Work, int], Any] = batches_of,
    twin: Contestant | None = None,
    warm_rounds: int = _WARM_ROUNDS,
    in_a_row: int = 1,
    observer: Callable[[Contestant], Any] = count_update,
) -> list[Result]:
    """Let every contestant do the same updates in turn.

    Args:
        work: what an update is.
        contestants: the first is what the others are compared with. They are closed at the end.
        rounds: turns of each that are timed.
        seed: of the order within each round.
        clock: ``"wall"``, or ``"cpu"`` for the processor time of this process, which other programs disturb
            less and which leaves out waiting for other ranks.
        given: ``given(work, update)`` is what every contestant's ``run`` gets for an update, on this rank.
        twin: the same loop in float64, from which rounding is told; the hand-written one by default.
        warm_rounds: updates before the one that is observed; that one is followed by the timed ones.
        in_a_row: updates of a turn; of several the first is not timed.
        observer: ``observer(contestant)`` is entered around one update; its ``counts`` are kept.
    """
    order, twin = random.Random(seed), twin or hand(work, "float64", torch.float64)
    everybody = [*contestants, twin]
    start, gradients = _parameters(twin), [_Gradients(one.optimizer) for one in everybody]
    _everybody(everybody, gradients, given(work, 0))
    for update in range(1, warm_rounds):
        for one in everybody:
            one.run(given(work, update), nullcontext())
    counts = []
    for one in everybody:
        observing = observer(one)
        one.run(given(work, warm_rounds), observing)
        counts.append(_from_all_ranks(observing.counts))
    seconds: list[list[float]] = [[] for _ in contestants]
    last = warm_rounds + 1 + rounds * in_a_row
    for first in range(warm_rounds + 1, last, in_a_row):
        updates = [given(work, first + number) for number in range(in_a_row)]
        gc.collect()
        for index in order.sample(range(len(contestants)), len(contestants)):
            seconds[index].append(time_turn(contestants[index].run, updates, clock))
        for batches in updates:
            twin.run(batches, nullcontext())
    _everybody(everybody, gradients, given(work, last))
    for one in contestants:
        one.close()
    moved = _parameters(twin) - start
    by_first, exact = gradients[0].together(), gradients[-1].together()
    first_end, exact_end = _parameters(contestants[0]), _parameters(twin)
    return [
        Result(
            name=one.name,
            ratios=tuple(a / b for a, b in zip(seconds[index], seconds[0], strict=True)),
            typical_seconds=median(seconds[index]) / max(1, in_a_row - 1),
            gradient_difference=_distance(gradients[index].together(), by_first, length=exact),
            gradient_rounding=_distance(by_first, exact, length=exact),
            parameter_difference=_distance(_parameters(one), first_end, length=moved),
            parameter_rounding=_distance(first_end, exact_end, length=moved),
            counts=tuple(counts[index]),
        )
        for index, one in enumerate(contestants)
    ]


def _everybody(everybody: Sequence[Contestant], gradients: Sequence[_Gradients], batches: Any) -> None:
    """One update of each, of which the gradients are taken down."""
    for one, taken in zip(everybody, gradients, strict=True):
        taken.listen()
        one.run(batches, nullcontext())


def memory_growth(work: Work, contestant: Contestant) -> MemoryGrowth:
    """Measure an update of few and one of many micro-batches, after one that makes optimizer state."""
    few, many = (
        batches_of(work, 0, micro_batches_per_window=number)
        for number in (FEW_MICRO_BATCHES, MANY_MICRO_BATCHES)
    )
    contestant.run(few, nullcontext())

    def peak(batches: list[dict[str, Tensor]]) -> int:
        return peak_tensor_bytes(
            contestant.model, contestant.optimizer, lambda: contestant.run(batches, nullcontext())
        )

    return MemoryGrowth(name=contestant.name, few_bytes=peak(few), many_bytes=peak(many))


def time_turn(
    run: Callable[[Any, AbstractContextManager[Any]], None], updates: Sequence[Any], clock: Clock = "wall"
) -> float:
    """Seconds of one turn, of several updates without the first; on several ranks those of the slowest.

    Args:
        run: as a contestant's.
        updates: what it gets for each. The ranks start what is timed together.
        clock: that it is timed by.
    """
    watch, timed = _Stopwatch(clock), updates
    if len(updates) > 1:
        run(updates[0], nullcontext())
        timed = updates[1:]
    if num_replicas() > 1:
        dist.barrier()
    for batches in timed:
        run(batches, watch)
    if num_replicas() == 1:
        return watch.seconds
    slowest = torch.tensor(watch.seconds, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


def _from_all_ranks(counts: Any) -> list[Any]:
    if num_replicas() == 1:
        return [counts]
    found: list[Any] = [None] * num_replicas()
    dist.all_gather_object(found, counts)
    return found


def _parameters(contestant: Contestant) -> Tensor:
    return torch.cat([p.detach().flatten().double() for p in contestant.model.parameters()])


def _distance(one: Tensor, other: Tensor, *, length: Tensor) -> float:
    return float((one - other).norm() / length.norm())
