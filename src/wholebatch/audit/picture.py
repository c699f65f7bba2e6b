"""A window in characters: a row for each micro-batch and rank with what its items weigh, and what happened
between the rows."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.text import Text

from wholebatch.audit.judge.evidence import Evidence, MicroBatch, TermWeights, Window
from wholebatch.audit.judge.loops import loops_of
from wholebatch.audit.trace import Event, EventKind, Place
from wholebatch.audit.words import clipped, event_words, number_of, place_text, printable, weight_text

# Beyond this many rows a picture leaves out what is like its neighbours.
MOST_ROWS = 24
MOST_EVENTS_IN_A_ROW = 8
# Not a line of the picture: rows of their own, or nothing that happens to an update.
_NOT_SHOWN: frozenset[EventKind] = frozenset({"forward", "backward"})
# Columns of file and line that words leave room for.
MOST_PLACE = 20
# Inside a long window, where something happened that does not happen in most micro-batches.
MOST_RARE = 6
_EVEN = 1e-3
_INDENT = 2

# what happened in one place, in words, and where
Happened = list[tuple[str, Place | None]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """What the picture shows of one micro-batch on one rank.

    Attributes:
        micro_batch: as it was recorded.
        items: units of its term; None where they are not known.
        weights: of one item, lowest and highest, in units of 1/N; None where they are not known.
    """

    micro_batch: MicroBatch
    items: float | None
    weights: tuple[float, float] | None

    @property
    def surprise(self) -> float:
        """How far its weights are from 1, by their logarithm."""
        return max((abs(_log2(w)) for w in self.weights or (1.0,)), default=0.0)


def window_rows(window: Window) -> list[list[Row]]:
    """Return the micro-batches of a window with what their items weigh.

    Args:
        window: one update.

    Returns:
        For each index of a micro-batch the rows of the ranks that have it.
    """
    by_index: dict[int, list[Row]] = {}
    for rank in sorted(window.micro_batches):
        for micro_batch in window.micro_batches[rank]:
            by_index.setdefault(micro_batch.index, []).append(_row(window, micro_batch))
    return [by_index[index] for index in sorted(by_index)]


def main_term(window: Window) -> TermWeights | None:
    """The term whose weights are the window's own; None where nothing was judged."""
    for term in window.terms:
        if term.total == window.total and term.num_units == window.num_items:
            return term
    return window.terms[0] if window.terms else None


def _row(window: Window, micro_batch: MicroBatch) -> Row:
    where = (micro_batch.rank, micro_batch.index)
    main = main_term(window)
    for term in [*([main] if main else []), *window.terms]:
        if where in term.by_micro_batch:
            items, low, high = term.by_micro_batch[where]
            return Row(micro_batch=micro_batch, items=items, weights=(low, high))
    return Row(micro_batch=micro_batch, items=None, weights=None)


def window_picture(window: Window, evidence: Evidence, *, width: int) -> list[Text]:
    """Draw one update.

    Args:
        window: the update.
        evidence: that it belongs to.
        width: columns of the drawing, 72 or more.

    Returns:
        The lines: a title, the scale, rows and events in order, and the total weight.
    """
    rows = window_rows(window)
    canvas = Canvas(
        ranks=len(window.micro_batches) > 1,
        reach=_reach([row for group in rows for row in group]),
        half=8 if width < 96 else 12,
        width=width,
    )
    between = _events_between(window, len(rows))
    shown = _shown(rows, between)
    between = _folded(between, len(rows))
    lines = [Text(window_title(window, evidence), style="bold"), *canvas.head()]
    elided: list[list[Row]] = []
    for index, group in enumerate(rows):
        if index not in shown:
            elided.append(group)
            continue
        if elided:
            lines.append(canvas.gap(elided))
            elided = []
        lines += canvas.events(between.get(index, ()))
        lines += [canvas.row(row) for row in group]
    last = len(rows)
    lines += canvas.events(between.get(last, ()))
    return [*lines, *_footer(window)]


def num_micro_batches(window: Window) -> tuple[int, int]:
    """How many micro-batches a window has on one rank: backwards of its longest loop that are its own.

    Args:
        window: one update.

    Returns:
        Of the rank with the fewest and of that with the most.
    """
    own = [
        [each.backward for each in group if not (each.carried or each.foreign)]
        for group in window.micro_batches.values()
    ]
    loops = loops_of(own)
    numbers = [max(Counter(loops[b.site] for b in group).values(), default=0) for group in own]
    return min(numbers, default=0), max(numbers, default=0)


def window_title(window: Window, evidence: Evidence) -> str:
    """``update 3 of AdamW: 4 micro-batches on each of 2 replicas, N = 1,234 items``."""
    names = [optimizer.name for optimizer in evidence.traces[0].optimizers] if evidence.traces else []
    name = names[window.optimizer] if window.optimizer < len(names) else "the optimizer"
    if names.count(name) > 1:
        name = f"{name} ({window.optimizer + 1})"
    least, most = num_micro_batches(window)
    number = number_of(most, "micro-batch", "micro-batches")
    number = number if least == most else f"{least:,} to {number}"
    replicas = f" on each of {evidence.num_replicas:,} replicas" if evidence.num_replicas > 1 else ""
    items = "" if window.num_items is None else f", N = {window.num_items:,.10g}"
    if not window.complete:
        return f"after the last update of {name}: {number}{replicas} without a step"
    skipped = ", skipped" if window.skipped else ""
    return f"update {window.index:,} of {name}{skipped}: {number}{replicas}{items}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Canvas:
    """The columns of a picture.

    Attributes:
        ranks: whether a column says which rank.
        reach: the weight (and its inverse) at the ends of the bar.
        half: columns of the bar on either side of 1.
        width: columns of everything.
    """

    ranks: bool
    reach: float
    half: int
    width: int

    def head(self) -> list[Text]:
        """The names of the columns and the scale of the bar."""
        rank = "rank " if self.ranks else ""
        end = f"{self.reach:.4g}"
        scale = f"{'1/' + end:<{self.half}}1{end:>{self.half}}"
        return [self._line(f"{'micro-batch':>11} {rank}{'items':>8} {'weight x N':>12}  {scale}", "dim")]

    def row(self, row: Row) -> Text:
        """One micro-batch on one rank."""
        micro_batch = row.micro_batch
        rank = f"{micro_batch.rank:>4} " if self.ranks else ""
        items = "?" if row.items is None else f"{row.items:,.6g}"
        site = micro_batch.backward.site
        line = Text(f"{micro_batch.index + 1:>{_INDENT + 11}} {rank}{items:>8} ", no_wrap=True)
        line.append(f"{_weights_cell(row):>12}", style=_style(row))
        line.append("  ")
        line.append(_bar(row.weights, self.reach, self.half), style=_style(row))
        remark = _remark(micro_batch)
        return self._with_place(line, site[0] if site else None, remark)

    def gap(self, groups: Sequence[Sequence[Row]]) -> Text:
        """What is left out between two rows."""
        number = number_of(len(groups), "more micro-batch", "more micro-batches")
        known = [w for group in groups for row in group for w in row.weights or ()]
        weights = f", weight x N {weight_text(min(known), max(known))}" if known else ""
        return self._line(f"{'...':>11} {number}{weights}", "dim")

    def events(self, happened: Sequence[tuple[str, Place | None]]) -> list[Text]:
        """What happened between two rows, in order."""
        lines = []
        for words, place in happened[:MOST_EVENTS_IN_A_ROW]:
            line = Text(f"{'':{_INDENT}}{'·':>11} ", no_wrap=True)
            line.append(clipped(words, self._columns_left(line, place)))
            lines.append(self._with_place(line, place))
        if len(happened) > MOST_EVENTS_IN_A_ROW:
            more = number_of(len(happened) - MOST_EVENTS_IN_A_ROW, "more event")
            lines.append(self._line(f"{'·':>11} {more}", "dim"))
        return lines

    def _columns_left(self, line: Text, place: Place | None) -> int:
        """Beside file and line; the folders go first."""
        name = "" if place is None else printable(place).rsplit("/", 1)[-1]
        kept = min(len(name), MOST_PLACE) + 2 if name else 0
        return max(self.width - len(line) - kept, 12)

    def _line(self, words: str, style: str) -> Text:
        return Text(f"{'':{_INDENT}}{words}"[: self.width], style=style, no_wrap=True)

    def _with_place(self, line: Text, place: Place | None, remark: str = "") -> Text:
        """Put a remark and the line of code at the right end, as far as there is room."""
        if remark:
            line.append(f"  {clipped(remark, self.width - len(line) - 2)}", style="yellow")
        left = self.width - len(line) - 2
        if place is not None and left >= 6:
            line.append(f"{place_text(place, left):>{left + 2}}", style="cyan")
        return line


def _weights_cell(row: Row) -> str:
    return "?" if row.weights is None else weight_text(*row.weights)


def _remark(micro_batch: MicroBatch) -> str:
    words: list[str] = [micro_batch.lost] if micro_batch.lost else []
    words += ["carried over"] if micro_batch.carried else []
    words += ["another optimizer's"] if micro_batch.foreign else []
    return ", ".join(words)


def _style(row: Row) -> str:
    if row.weights is None:
        return "dim"
    return "green" if all(abs(w - 1.0) <= _EVEN for w in row.weights) else "red"


def _log2(weight: float) -> float:
    return math.log2(weight) if weight > 0.0 and math.isfinite(weight) else 0.0


def _reach(rows: Sequence[Row]) -> float:
    """The power of two, 4 or more, that the bars reach to."""
    most = max((row.surprise for row in rows), default=0.0)
    return float(2 ** min(max(math.ceil(most - 1e-9), 2), 10))


def _bar(weights: tuple[float, float] | None, reach: float, half: int) -> str:
    """From 1, in the middle, to the weights, by their logarithm; lighter between the two of them."""
    if weights is None or min(weights) <= 0.0:
        # Nothing, or what has no logarithm: the number beside it says what.
        return f"{'':{half}}│{'':{half}}"
    ends = [max(-1.0, min(1.0, _log2(w) / _log2(reach))) for w in weights]
    left = _side([-end for end in ends], half, "▐")[::-1]
    return f"{left}│{_side(ends, half, '▌')}"


def _side(ends: Sequence[float], half: int, half_block: str) -> str:
    """One side of a bar, from the middle outward, in half columns."""
    near, far = (max(0, round(2 * half * end)) for end in (min(ends), max(ends)))
    full = "█" * (near // 2)
    if near == far and near % 2:
        full += half_block
    light = "▒" * ((far + 1) // 2 - len(full))
    return f"{full + light:<{half}}"


def _shown(rows: Sequence[Sequence[Row]], between: Mapping[int, Happened]) -> set[int]:
    """Which micro-batches a picture shows: all; or the first, the last, the most unlike and where
    something happened that does not happen in most of them."""
    each = max((len(group) for group in rows), default=1)
    if len(rows) <= max(MOST_ROWS // each, 6):
        return set(range(len(rows)))
    shown = {0, 1, len(rows) - 2, len(rows) - 1}
    weights = {i: [w for row in rows[i] for w in row.weights or ()] for i in range(len(rows))}
    known = [index for index, group in weights.items() if group]
    if known:
        shown |= {max(known, key=lambda i: max(weights[i])), min(known, key=lambda i: min(weights[i]))}
    # By their words without numbers: a loss that is logged is another number each time.
    kinds = {i: {re.sub(r"[\d.]+", "", words) for words, _ in found} for i, found in between.items()}
    seen = Counter(kind for found in kinds.values() for kind in found)
    rare = [i for i, found in kinds.items() if any(2 * seen[kind] < len(rows) for kind in found)]
    return shown | set(sorted(set(rare) & set(range(len(rows))))[:MOST_RARE])


def _events_between(window: Window, num_rows: int) -> Mapping[int, Happened]:
    """For each row what happened before it, those of the step under the last of all.

    What all ranks did is said once; what some did alone says which.
    """
    ranks = sorted(window.events)
    slots: dict[int, dict[tuple[str, str], tuple[Event, list[int]]]] = {}
    for rank in ranks:
        for row, event in _slotted(window, rank, num_rows):
            key = (event_words(event), str(event.place))
            slots.setdefault(row, {}).setdefault(key, (event, []))[1].append(rank)
    return {
        row: [(_by_whom(event, who, ranks), event.place) for event, who in happened.values()]
        for row, happened in slots.items()
    }


def _slotted(window: Window, rank: int, num_rows: int) -> Iterator[tuple[int, Event]]:
    """The events of one rank, each with the row that comes after it; carried micro-batches are rows too."""
    first = min((each.index for group in window.micro_batches.values() for each in group), default=0)
    positions = [(each.position, each.index - first) for each in window.micro_batches.get(rank, ())]
    for position, event in window.events[rank]:
        if event.kind not in _NOT_SHOWN:
            yield next((row for at, row in positions if at > position), num_rows), event


def _by_whom(event: Event, who: Sequence[int], ranks: Sequence[int]) -> str:
    each = [who.count(rank) for rank in ranks]
    words = event_words(event, times=max(each))
    if all(each) or len(ranks) == 1:
        return words
    some = sorted(set(who))
    name = "rank" if len(some) == 1 else "ranks"
    return f"{name} {', '.join(map(str, some))}: {words}"


def _folded(between: Mapping[int, Happened], num_rows: int) -> Mapping[int, Happened]:
    """What happened before, or after, each of three or more rows in the same words is said once."""
    if num_rows < 3:
        return between
    common = {_key(each) for each in between.get(1, ())}
    for row in range(2, num_rows):
        common &= {_key(each) for each in between.get(row, ())}
    before, after = ({_key(each) for each in between.get(row, ())} & common for row in (0, num_rows))
    told: dict[int, Happened] = {}
    for row, happened in between.items():
        kept: Happened = []
        for words, place in happened:
            each = _key((words, place))
            if each not in before | after:
                kept.append((words, place))
            elif row == (0 if each in before else 1):
                where = "before" if each in before else "after"
                kept.append((f"{where} each micro-batch: {words}", place))
        told[row] = kept
    return told


def _key(happened: tuple[str, Place | None]) -> tuple[str, str]:
    return happened[0], str(happened[1])


def _footer(window: Window) -> list[Text]:
    """The total weight, and the other terms where there are several."""
    if window.unjudged is not None:
        return [Text(f"{'':{_INDENT}}weights not known: {window.unjudged}", style="yellow")]
    if window.total is None:
        return []
    right = abs(window.total - 1.0) <= _EVEN
    style = "green" if right else "red"
    total = f"total weight {weight_text(window.total, window.total)}" + ("" if right else ", 1 is right")
    lines = [Text(f"{'':{_INDENT}}{total}", style=style)]
    if len(window.terms) > 1:
        main = main_term(window)
        lines += [_term_line(term, shown=term is main) for term in window.terms]
    return lines


def _term_line(term: TermWeights, *, shown: bool) -> Text:
    words = f"term {term.key}: {number_of(term.num_units, term.unit)}, total weight {term.total:.4g}"
    return Text(f"{'':{2 * _INDENT}}{words}{' (shown above)' if shown else ''}", style="dim")
