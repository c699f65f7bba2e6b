"""One rank's trace cut into the windows of its optimizers.

A backward waits in the windows of all optimizers that it brought gradients to, until each of these steps.
What a step leaves uncleared stands in the gradients still: the next window carries it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from wholebatch.audit.judge.loops import is_rest_of_loop
from wholebatch.audit.trace import Backward, Event, Forward, RankTrace

# a clear that reached this share of an optimizer's parameters reached all that matter
ALL_CLEARED = 0.99


@dataclass(eq=False, kw_only=True, slots=True)
class Waiting:
    """A backward that waits for steps, with the steps that other windows made on it.

    Attributes:
        position: of its event in the trace.
        backward, forwards: what was recorded.
        stepped: (optimizer, position) of each step that ended a window it stood in.
    """

    position: int
    backward: Backward
    forwards: tuple[Forward, ...]
    stepped: list[tuple[int, int]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankWindow:
    """One rank's part of a window.

    Attributes:
        rank: in the job.
        own: backwards since the step before that were not cleared.
        cleared: backwards since the step before that were.
        carried: backwards of earlier windows that were never cleared.
        ghosts: backwards of the window before that were cleared, as they should be; an engine may have kept
            them all the same.
        foreign: positions of those in ``own`` that another optimizer's loss brought.
        events: position and event, from the step before to this one.
        end: the step or skip; None for what was left at the end.
    """

    rank: int
    own: tuple[Waiting, ...]
    cleared: tuple[Waiting, ...]
    carried: tuple[Waiting, ...]
    ghosts: tuple[Waiting, ...]
    foreign: frozenset[int]
    events: tuple[tuple[int, Event], ...]
    end: Event | None


@dataclass(kw_only=True, slots=True)
class _Open:
    """The window of one optimizer that is still open."""

    optimizer: int
    parameters: frozenset[int]
    begin: int = 0
    own: list[Waiting] = field(default_factory=list)
    cleared: list[Waiting] = field(default_factory=list)
    carried: list[Waiting] = field(default_factory=list)
    latest: list[Waiting] = field(default_factory=list)
    ghosts: list[Waiting] = field(default_factory=list)
    closed: list[RankWindow] = field(default_factory=list)

    def clear(self) -> None:
        self.cleared += self.own
        self.ghosts += [waiting for waiting in self.latest if waiting in self.carried]
        self.own, self.carried = [], []

    def close(self, trace: RankTrace, position: int) -> None:
        end = trace.events[position]
        window = self._window(trace, position + 1, end, self.own)
        self.closed.append(window)
        for waiting in self.own:
            waiting.stepped.append((self.optimizer, position))
        self.carried, self.latest = self.carried + self.own, self.own
        self.own, self.cleared, self.ghosts, self.begin = [], [], [], position + 1

    def leave(self, trace: RankTrace) -> None:
        """What waits at the end, unless it is others' alone: their steps were made on it."""
        left = [waiting for waiting in self.own if not waiting.stepped]
        if left:
            self.closed.append(self._window(trace, len(trace.events), None, self.own))

    def _window(self, trace: RankTrace, stop: int, end: Event | None, own: Sequence[Waiting]) -> RankWindow:
        return RankWindow(
            rank=trace.rank,
            own=tuple(own),
            cleared=tuple(_lost(self.cleared, own)),
            carried=tuple(self.carried),
            ghosts=tuple(self.ghosts),
            foreign=frozenset(_foreign(self.optimizer, own)),
            events=tuple((i, trace.events[i]) for i in range(self.begin, stop)),
            end=end,
        )


def _lost(cleared: Sequence[Waiting], own: Sequence[Waiting]) -> Iterable[Waiting]:
    """Cleared backwards that this window should have had.

    A probe before the loop, the first pass of a two-pass optimizer and the evaluations of a closure are
    cleared by right: no later backward of the window is of their loop. So are those of an attempt that
    failed and began again with the same samples.
    """
    cleared = [] if _is_begun_again(cleared, own) else cleared
    last_in_step = max((w.position for w in [*own, *cleared] if w.backward.in_step), default=-1)
    stays = [w for w in cleared if not (w.backward.in_step and w.position < last_in_step)]
    sites = {w.backward.site for w in own}
    backwards = [w.backward for w in own]
    for waiting in stays:
        alike = [w.backward for w in stays if w.backward.site == waiting.backward.site]
        if not own or waiting.backward.site in sites or is_rest_of_loop(alike, backwards):
            yield waiting


def _is_begun_again(cleared: Sequence[Waiting], own: Sequence[Waiting]) -> bool:
    """Whether a window begins with the very samples, no two micro-batches alike, of what was cleared."""
    before, after = [_samples(w) for w in cleared], [_samples(w) for w in own]
    different = len(set(after)) == len(after) > 1 and all(after)
    return different and bool(before) and after[: len(before)] == before


def _samples(waiting: Waiting) -> tuple[int, ...]:
    return tuple(sample for forward in waiting.forwards for sample in forward.samples)


def _foreign(optimizer: int, own: Sequence[Waiting]) -> Iterable[int]:
    """Positions of backwards that another optimizer stepped on before this window's own loop began."""
    for waiting in own:
        steps = [position for other, position in waiting.stepped if other != optimizer]
        later = [w.backward.site for w in own if steps and w.position > min(steps)]
        if later and waiting.backward.site not in later:
            yield waiting.position


def follow(trace: RankTrace) -> list[list[RankWindow]]:
    """Cut a trace into windows.

    Returns:
        list[list[RankWindow]]: for each optimizer its windows in order; what was left at the end without a
        step is the last, with ``end`` None.
    """
    windows = [
        _Open(optimizer=i, parameters=frozenset(facts.parameters))
        for i, facts in enumerate(trace.optimizers)
    ]
    # where an engine hides which parameters a backward reaches, each may have reached all
    blind = not any(event.backward.delivered for event in trace.events if event.backward is not None)
    forwards: list[Forward] = []
    for position, event in enumerate(trace.events):
        if event.forward is not None:
            forwards.append(event.forward)
        elif event.backward is not None:
            waiting = Waiting(position=position, backward=event.backward, forwards=tuple(forwards))
            forwards = []
            for window in windows:
                if blind or window.parameters & event.backward.delivered.keys():
                    window.own.append(waiting)
        else:
            _apply(event, position, trace, windows)
    for window in windows:
        window.leave(trace)
    return [window.closed for window in windows]


def _apply(event: Event, position: int, trace: RankTrace, windows: Sequence[_Open]) -> None:
    for window in windows:
        if not event.concerns(window.optimizer):
            continue
        if event.kind == "clear" and (event.value is None or event.value >= ALL_CLEARED):
            window.clear()
        elif event.kind in ("step", "skip"):
            window.close(trace, position)
