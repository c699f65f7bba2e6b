"""Watching a run that is going: a panel in a terminal, else a line for every update."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from time import monotonic, sleep
from typing import NamedTuple

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from wholebatch.record import UpdateRecord
from wholebatch.report.curves import loss_curve, unsupervised_line
from wholebatch.report.run_view import CURVE_COLUMNS, heading, ledger_line, number, recent_table, title
from wholebatch.report.summary import LAST_UPDATES_SHOWN
from wholebatch.report.words import evaluation_words, number_of, printable, skip_words
from wholebatch.run_folder import Run, RunTail, read_run

POLL_S = 0.5
# The panel fits into a terminal of 24 lines.
PANEL_UPDATES, PANEL_CURVE_LINES = 3, 5
PACE_UPDATES = 20


def follow(folder: Path, console: Console) -> Run:
    """Watch a run until it ends.

    Waits where the folder is empty. A run that was killed has no end: watching it goes on, as it may
    be resumed, until the user stops it.

    Args:
        folder: of the run.
        console: where to show it.

    Returns:
        The run, ended.

    Raises:
        RecordError: no such folder, no run in it, or one that can't be read.
    """
    looks = _growing(RunTail(folder))
    if console.is_terminal:
        _show_panel(folder, looks, console)
    else:
        _print_lines(folder, looks, console)
    return read_run(folder)


class _Look(NamedTuple):
    """The run as it was seen, for how many seconds nothing was new, and what no run does, in words."""

    run: Run | None
    quiet_seconds: float
    cut_short: str | None


def _growing(tail: RunTail) -> Iterator[_Look]:
    """Look at the run again and again until it has ended."""
    last_change = monotonic()
    while True:
        run, changed = tail.poll()
        if changed:
            last_change = monotonic()
        yield _Look(run, monotonic() - last_change, tail.cut_short)
        if run is not None and run.end is not None:
            return
        sleep(POLL_S)


def _show_panel(folder: Path, looks: Iterator[_Look], console: Console) -> None:
    with Live(console=console, auto_refresh=False, transient=True) as live:
        for run, quiet_seconds, cut_short in looks:
            if cut_short is not None:
                live.console.print(Text(printable(cut_short), style="yellow"), soft_wrap=True)
            live.update(waiting(folder) if run is None else panel(run, quiet_seconds), refresh=True)


def waiting(folder: Path) -> Text:
    """What is said before a run has begun."""
    return Text(f"waiting for a run in {printable(folder)}", style="yellow")


def panel(run: Run, quiet_seconds: float) -> RenderableType:
    """A run that is going, on 24 lines of 80 columns.

    Args:
        run: as far as it is written.
        quiet_seconds: for how long nothing was written.
    """
    parts: list[RenderableType] = [title(run), Text(ledger_line(run.header)), _pace(run, quiet_seconds)]
    lines = loss_curve(run.records, width=CURVE_COLUMNS, height=PANEL_CURVE_LINES)
    if lines:
        parts += ["", heading("loss per item, by update")]
        parts += [Text(line, no_wrap=True, overflow="crop") for line in lines]
    if unsupervised := unsupervised_line(run.records[-CURVE_COLUMNS:], width=CURVE_COLUMNS):
        parts.append(Text(f"unsupervised share of the last updates: {unsupervised[0]}"))
    if run.evaluations:
        parts.append(Text(evaluation_words(run.evaluations[-1])))
    if run.records:
        parts += ["", heading("last updates"), recent_table(run.records[-PANEL_UPDATES:])]
    return Group(*parts)


def _pace(run: Run, quiet_seconds: float) -> Text:
    """``items / seconds`` of the last updates, and when the last of them was."""
    last = run.records[-PACE_UPDATES:]
    samples, items = sum(r.samples for r in run.records), sum(r.items for r in run.records)
    seconds = sum(r.seconds for r in last)
    pace = f"; {sum(r.items for r in last) / seconds:,.0f} items/s" if seconds else ""
    quiet = f"; nothing new for {quiet_seconds:,.0f} s" if quiet_seconds >= 10 * POLL_S else ""
    return Text(
        f"{number_of(len(run.records), 'update')}, {number_of(samples, 'sample')}, {items:,} items"
        f"{pace}{quiet}"
    )


def _print_lines(folder: Path, looks: Iterator[_Look], console: Console) -> None:
    """A line for each new update and evaluation; of those before the watching began, the last few."""

    def say(words: Text | str) -> None:
        console.print(Text(words) if isinstance(words, str) else words, soft_wrap=True)

    before: Run | None = None
    told_to_wait = False
    for run, _, cut_short in looks:
        if cut_short is not None:
            say(printable(cut_short))
        if run is None and not told_to_wait:
            told_to_wait = True
            say(waiting(folder))
        if run is not None:
            for line in news(before, run):
                say(line)
            before = run


def news(before: Run | None, run: Run) -> list[str]:
    """What a run wrote since it was last looked at, a line each.

    Args:
        before: as it was then; None where this is the first look.
        run: as it is.
    """
    if before is None:
        lines = [f"{printable(run.folder)}: {ledger_line(run.header)}"]
        updates, evaluations = max(0, len(run.records) - LAST_UPDATES_SHOWN), len(run.evaluations)
    else:
        lines, updates, evaluations = [], len(before.records), len(before.evaluations)
        for again in run.resumptions[len(before.resumptions) :]:
            lines.append(f"resumed after {number_of(again.updates_attempted, 'update')}")
            updates = min(updates, again.updates_attempted)
            evaluations = sum(e.samples_consumed <= again.samples for e in before.evaluations)
    # An evaluation stands below the updates that it came after, and those after it below.
    found = [(record.updates_applied, update_line(record)) for record in run.records[updates:]]
    found += [(each.updates_applied, evaluation_words(each)) for each in run.evaluations[evaluations:]]
    return lines + [line for _, line in sorted(found, key=lambda each: each[0])]


def update_line(record: UpdateRecord) -> str:
    """An update in one line."""
    if record.reason is not None:
        return skip_words(record)
    return (
        f"update {record.updates_attempted:,}  loss per item {number(record.loss_per_item)}  "
        f"{number_of(record.samples, 'sample')}  {record.items:,} items  "
        f"norm {number(record.gradient_norm)}  {record.seconds:.3f} s"
    )
