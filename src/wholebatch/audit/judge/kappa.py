"""Kappa: the factor with which what a micro-batch delivered stands in what the optimizer read.

``read = sum over ranks r and micro-batches j of kappa_rj * delivered_rj / loss scale``: solved over the
sketches of all parameters, with as few different kappas as explain it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from wholebatch.audit.judge.fits import LOW_PRECISION, Fit, Fitting, Groups, ratio, total
from wholebatch.audit.judge.follow import RankWindow, Waiting
from wholebatch.audit.trace import Event, RankTrace, Sketches

# factors smaller than this share of the largest are none
_NOTHING, _LOW_NOTHING = 2e-3, 5e-2
# unknowns that one parameter alone may be explained with
_FEW = 8
# unknowns beyond which it takes too long
_MANY = 160


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A micro-batch that may stand in a reading.

    Attributes:
        kind: where it belongs: to this window, to an earlier one, or cleared from either.
        waiting: its backward.
        clipped: what clips between backwards multiplied it by, by parameter: these are named by themselves
            and are no part of kappa.
    """

    rank: int
    index: int
    kind: str
    waiting: Waiting
    clipped: Mapping[int, float]

    @property
    def delivered(self) -> Sketches:
        """What it delivered, the loss scale taken out, as small as clips between backwards left it."""
        backward = self.waiting.backward
        return {
            p: vector * self.clipped.get(p, 1.0) / backward.loss_scale
            for p, vector in backward.delivered.items()
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Kappas of one window.

    Attributes:
        kappas: by rank and position of the backward; those that could not be measured are missing.
        uniform: the one that all micro-batches of the window have.
        ranks_agree: whether all ranks read the same.
        per_parameter: whether kappa differs between parameters.
        odd_parameters: those that most don't agree with.
        unexplained: relative residual of the best explanation, where none is good enough.
        reason: why kappas are missing.
    """

    kappas: Mapping[tuple[int, int], float]
    uniform: float | None = None
    ranks_agree: bool | None = None
    per_parameter: bool = False
    odd_parameters: tuple[int, ...] = ()
    unexplained: float | None = None
    reason: str | None = None


def candidates(windows: Mapping[int, RankWindow], optimizer: int) -> list[Candidate]:
    """All micro-batches that may stand in what a window's optimizer read, of the ranks given."""
    found = []
    for rank, window in sorted(windows.items()):
        for kind in ("own", "carried", "cleared", "ghosts"):
            found += [
                Candidate(
                    rank=rank,
                    index=i,
                    kind=kind,
                    waiting=waiting,
                    clipped=_clips_between(window, optimizer, waiting.position) if kind == "own" else {},
                )
                for i, waiting in enumerate(getattr(window, kind))
            ]
    return [candidate for candidate in found if candidate.waiting.backward.delivered]


def _tail(window: RankWindow, optimizer: int) -> list[Event]:
    """The events after the window's last backward that concern its optimizer, its step the last."""
    last = max((w.position for w in window.own), default=-1)
    return [event for i, event in window.events if i > last and event.concerns(optimizer)]


def reading(window: RankWindow, optimizer: int, parameters: Sequence[int]) -> Sketches | None:
    """What the optimizer read, without clipping: every parameter as it was before it was clipped.

    The first reading after the last backward, reduction or change by hand, times what the unscales after it
    multiplied by.
    """
    if window.end is None or window.end.before is None:
        return None
    found: dict[int, np.ndarray] = {}
    factors: dict[int, float] = {}
    for event in _tail(window, optimizer):
        if event.kind == "clear":
            found.clear()
        elif event.kind in ("reduce", "gradients_changed"):
            for p in parameters if event.after is None else event.after:
                found.pop(p, None)
        elif event.kind in ("clip", "unscale", "step") and event.before is not None:
            for p in parameters:
                if p in event.before and p not in found:
                    found[p], factors[p] = event.before[p], 1.0
        if event.kind == "unscale":
            factor = _unscaled(event, parameters)
            for p in found:
                factors[p] *= factor
    return {p: vector * factors[p] for p, vector in found.items()}


def _unscaled(event: Event, parameters: Sequence[int]) -> float:
    seen = ratio(event.before, event.after, parameters) if event.before and event.after else None
    return seen if seen is not None else 1 / event.value if event.value else 1.0


def clip_factor(window: RankWindow, optimizer: int, parameters: Sequence[int]) -> float | None:
    """What clipping after the last backward multiplied by; the smallest, where parts are clipped apart."""
    factor: float | None = None
    covered: set[int] = set()
    for event in _tail(window, optimizer):
        if event.kind != "clip" or not event.before or not event.after:
            continue
        seen = ratio(event.before, event.after, parameters)
        if seen is None:
            continue
        again = factor is not None and covered & event.before.keys()
        factor = seen if factor is None else factor * seen if again else min(factor, seen)
        covered |= event.before.keys()
    return factor


def is_low(trace: RankTrace, parameter: int, end: Event | None) -> bool:
    """Whether a parameter's gradient is kept in low precision, or read so by the step ``end``."""
    dtype = trace.dtypes[parameter] if parameter < len(trace.dtypes) else ""
    read = end.gradient_dtype if end is not None else ""
    return dtype in LOW_PRECISION or read in LOW_PRECISION


def measure(
    windows: Mapping[int, RankWindow],
    traces: Mapping[int, RankTrace],
    optimizer: int,
    num_equations: int,
) -> Measured:
    """Measure kappa of every micro-batch of one window.

    Args:
        windows: of each rank that has one.
        traces: of each rank.
        optimizer: its index.
        num_equations: directions that gradients were seen to have.
    """
    first = traces[min(traces)]
    parameters = first.optimizers[optimizer].parameters
    readings = {rank: reading(window, optimizer, parameters) for rank, window in windows.items()}
    read = {rank: one for rank, one in readings.items() if one is not None}
    found = candidates(_one_of_each_replica(windows, traces), optimizer)
    if not read or not (found or any(read.values())):
        return Measured(kappas={}, reason="what the optimizer read was not seen")
    whole = _together(read, first, parameters)
    if _is_finite(whole):
        # what overflowed (in an update that was skipped) is not in a reading that is finite
        found = [candidate for candidate in found if _is_finite(candidate.delivered)]
    lowest = min(read)
    low = [is_low(first, p, windows[lowest].end) for p in parameters]
    fitting = Fitting.of([c.delivered for c in found], whole, parameters, low)
    agree = _ranks_agree(windows, first, parameters, low)
    if not fitting.finite:
        return Measured(kappas={}, ranks_agree=agree, reason="gradients are not finite")
    if not found:
        return Measured(kappas={}, ranks_agree=agree, reason="no backward was seen to bring gradients")
    return _explain(fitting, found, lowest, num_equations, agree)


def _clips_between(window: RankWindow, optimizer: int, position: int) -> dict[int, float]:
    """What clips before the last backward multiplied an earlier one's gradients by, by parameter."""
    last = max((waiting.position for waiting in window.own), default=-1)
    factors: dict[int, float] = {}
    for at, event in window.events:
        if event.kind != "clip" or "norm" not in event.detail or not event.concerns(optimizer):
            continue
        if not position < at < last or not event.before or not event.after:
            continue
        factor = ratio(event.before, event.after, sorted(event.before))
        if factor is not None and factor > 0.0:
            factors |= {p: factors.get(p, 1.0) * factor for p in event.before}
    return factors


def _is_finite(sketches: Sketches) -> bool:
    return all(np.isfinite(values).all() for values in sketches.values())


def _one_of_each_replica(
    windows: Mapping[int, RankWindow], traces: Mapping[int, RankTrace]
) -> dict[int, RankWindow]:
    """Ranks of one replica have the same samples: the lowest stands for all."""
    chosen: dict[int, int] = {}
    for rank in sorted(windows):
        chosen.setdefault(traces[rank].replica, rank)
    return {rank: windows[rank] for rank in chosen.values()}


def _together(read: Mapping[int, Sketches], trace: RankTrace, parameters: Sequence[int]) -> Sketches:
    """The lowest rank's reading; of sharded parameters the sum over the ranks."""
    sharded = {p for p in parameters if p < len(trace.sharded) and trace.sharded[p]}
    parts = {rank: {p: v for p, v in one.items() if p in sharded} for rank, one in read.items()}
    own = {p: v for p, v in read[min(read)].items() if p not in sharded}
    return {**own, **total(parts)}


def _ranks_agree(
    windows: Mapping[int, RankWindow], trace: RankTrace, parameters: Sequence[int], low: Sequence[bool]
) -> bool | None:
    """Whether all ranks' optimizers read the same, of what is not sharded."""
    whole = [(p, one) for p, one in zip(parameters, low, strict=True) if not any(trace.sharded[p : p + 1])]
    keys, lows = [p for p, _ in whole], [one for _, one in whole]
    reads = [w.end.before for w in windows.values() if w.end is not None and w.end.before is not None]
    if len(reads) < 2 or not keys:
        return None
    for other in reads[1:]:
        fitting = Fitting.of([reads[0]], other, keys, lows)
        if not fitting.finite:
            return None
        if not fitting.solve([[0]], 2).accepted or not np.isclose(
            ratio(reads[0], other, keys) or 1.0, 1.0, rtol=4e-2 if any(lows) else 1e-3
        ):
            return False
    return True


def _hypotheses(found: Sequence[Candidate], rank: int) -> Iterator[Groups]:
    """Which micro-batches share a kappa, those with the fewest different ones first."""
    numbers = range(len(found))
    own = [i for i in numbers if found[i].kind == "own"]
    carried = [i for i in numbers if found[i].kind == "carried"]
    ranks = sorted({found[i].rank for i in own})
    by_rank = [[i for i in own if found[i].rank == r] for r in ranks]
    mine = [i for i in own if found[i].rank == rank]
    indices = sorted({found[i].index for i in own})
    by_index = [[i for i in own if found[i].index == j] for j in indices]
    kept = [i for i in numbers if found[i].kind == "cleared"]
    ghosts = [i for i in numbers if found[i].kind == "ghosts"]
    stays = [*own, *carried]
    yield [own]
    yield [stays]
    yield [mine]
    yield [own, carried]
    yield by_rank
    yield by_index
    yield [*by_index, carried]
    yield [[i] for i in mine]
    yield [[i] for i in own]
    yield [[i] for i in stays]
    for extra in (kept, ghosts, [*kept, *ghosts]):
        if extra:
            yield [[*own, *extra]]
            yield [own, extra]
            yield [[i] for i in [*stays, *extra]]


def _explain(
    fitting: Fitting, found: Sequence[Candidate], rank: int, num_equations: int, agree: bool | None
) -> Measured:
    if fitting.empty:
        return _told([0.0] * len(found), fitting, found, agree)
    tried: list[Fit] = []
    num_ranks = len({candidate.rank for candidate in found})
    seen: set[tuple[tuple[int, ...], ...]] = set()
    for groups in _hypotheses(found, rank):
        chosen = tuple(tuple(group) for group in groups if group)
        if not chosen or chosen in seen or len(chosen) > _MANY:
            continue
        seen.add(chosen)
        fit = fitting.solve(chosen, num_equations)
        tried.append(fit)
        if fit.accepted and (fit.determined or _collinear(fitting, fit, chosen, num_ranks)):
            return _told(fit.factors, fitting, found, agree)
    if not tried:
        return Measured(kappas={}, ranks_agree=agree, reason="nothing that it read was delivered in it")
    first, best = tried[0], min(tried, key=lambda fit: fit.residual)
    if best.accepted:
        reason = "the micro-batches' gradients are too much alike to be told apart"
        return Measured(kappas={}, ranks_agree=agree, reason=reason)
    if first.determined and fitting.is_noise(first, best):
        return _told(first.factors, fitting, found, agree)
    return _by_parameter(fitting, found, rank, best, agree)


def _collinear(fitting: Fitting, fit: Fit, groups: Groups, num_ranks: int) -> bool:
    """Whether one common factor may be believed although gradients have one direction only.

    Equal deliveries: it makes no difference which of them stand in the reading. Else the reading explains
    nothing but itself, unless the factor comes out as 1 or 1/D.
    """
    if len(groups) > 1:
        return False
    group = list(groups[0])
    first = fitting.deliveries[:, :, group[:1]]
    if np.allclose(fitting.deliveries[:, :, group], first, rtol=1e-3, atol=1e-9 * np.abs(first).max()):
        return bool(np.abs(first).max() > 0)
    return bool(np.isclose(fit.factors[group[0]], (1.0, 1 / num_ranks), rtol=1e-3).any())


def _told(
    factors: Sequence[float], fitting: Fitting, found: Sequence[Candidate], agree: bool | None
) -> Measured:
    largest = max((abs(factor) for factor in factors), default=0.0)
    limit = (_LOW_NOTHING if fitting.low.any() else _NOTHING) * largest
    clean = [0.0 if abs(factor) <= limit else factor for factor in factors]
    own = [factor for factor, candidate in zip(clean, found, strict=True) if candidate.kind == "own"]
    same = bool(own) and bool(np.allclose(own, own[0], rtol=2e-3))
    cleared = any(candidate.kind == "cleared" for candidate in found)
    return Measured(
        kappas={(c.rank, c.waiting.position): k for c, k in zip(found, clean, strict=True)},
        uniform=own[0] if same and not cleared else None,
        ranks_agree=agree,
    )


def _by_parameter(
    fitting: Fitting, found: Sequence[Candidate], rank: int, best: Fit, agree: bool | None
) -> Measured:
    """Where no kappas explain all parameters: do most have one, and each of the others its own?"""
    own = [i for i, candidate in enumerate(found) if candidate.kind == "own"]
    unexplained = Measured(
        kappas={},
        ranks_agree=agree,
        unexplained=best.residual,
        reason="what the optimizer read is not made of what was delivered",
    )
    if not own:
        return unexplained
    large = [i for i in range(len(fitting.parameters)) if fitting.full[i] >= fitting.scale[i]]
    alone = {i: fitting.only([i]).solve([own], 2) for i in large}
    one = {i: fit.factors[own[0]] for i, fit in alone.items() if fit.accepted}
    if not one:
        return unexplained
    usual = float(np.median(list(one.values())))
    most = [
        i for i, factor in one.items() if np.isclose(factor, usual, rtol=4e-2 if fitting.low[i] else 3e-3)
    ]
    odd = [i for i in large if i not in most]
    explained = all(i in one or _explained(fitting.only([i]), found, rank) for i in odd)
    if not odd or not explained:
        return unexplained
    if 2 * len(most) < len(large):
        reason = "parameters' gradients are multiplied by different factors"
        return Measured(kappas={}, ranks_agree=agree, per_parameter=True, reason=reason)
    factors = fitting.only(most).solve([own], 2).factors
    told = _told(factors, fitting, found, agree)
    return Measured(
        kappas=told.kappas,
        uniform=told.uniform,
        ranks_agree=agree,
        per_parameter=True,
        odd_parameters=tuple(fitting.parameters[i] for i in odd),
    )


def _explained(fitting: Fitting, found: Sequence[Candidate], rank: int) -> bool:
    """Whether a few kappas of its own explain one parameter."""
    if fitting.empty:
        return True
    for groups in _hypotheses(found, rank):
        chosen = [group for group in groups if group]
        if chosen and len(chosen) <= _FEW and fitting.solve(chosen, 16).accepted:
            return True
    return False
