"""What a person sees while the job trains: a live panel in a terminal, else a line now and then."""

from __future__ import annotations

from collections import deque
from time import perf_counter
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from wholebatch.record import Evaluation, UpdateRecord
from wholebatch.report.curves import sparkline
from wholebatch.report.words import evaluation_words, in_columns, skip_words

# The pace is shown over this many updates: one is too noisy, all too slow to follow.
PACE_UPDATES = 20


class Display(Protocol):
    """Takes what happens and shows it."""

    def say(self, text: str) -> None:
        """Show some words, to stay."""

    def evaluated(self, evaluation: Evaluation) -> None:
        """Show an evaluation, to stay."""

    def updated(self, record: UpdateRecord) -> None:
        """Show an update."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def choose_display(console: Console, *, num_updates: int, print_every_updates: int) -> Display:
    """A live panel where the console is a terminal, else plain lines."""
    if console.is_terminal:
        return LiveDisplay(console, num_updates=num_updates)
    return PlainDisplay(console, num_updates=num_updates, print_every_updates=print_every_updates)


class Progress:
    """What the last updates came to.

    Loss per item, unsupervised share and norm are those of the last update alone, as its record has
    them. The pace is that of the recent updates: ``items/s = items / wall time``, and the time left.
    """

    def __init__(self, *, num_updates: int) -> None:
        self.num_updates = num_updates
        self.records: deque[UpdateRecord] = deque(maxlen=PACE_UPDATES)
        self.losses: deque[float | None] = deque(maxlen=60)
        self._ends: deque[float] = deque([perf_counter()], maxlen=PACE_UPDATES + 1)

    def add(self, record: UpdateRecord) -> None:
        """Take in one update that has just ended."""
        self.records.append(record)
        self.losses.append(record.loss_per_item)
        self._ends.append(perf_counter())

    def pause(self) -> None:
        """Leave out of the pace what happened since the last update, such as an evaluation."""
        shift = perf_counter() - self._ends[-1]
        self._ends = deque((end + shift for end in self._ends), maxlen=self._ends.maxlen)

    @property
    def updates_attempted(self) -> int:
        """Attempted updates of the run so far."""
        return self.records[-1].updates_attempted if self.records else 0

    def facts(self) -> dict[str, str]:
        """The same in words, by name."""
        if not self.records:
            return {}
        last = self.records[-1]
        items = sum(r.items for r in self.records)
        seconds = max(self._ends[-1] - self._ends[0], 1e-9)
        left = seconds / len(self.records) * (self.num_updates - self.updates_attempted)
        unsupervised = last.unsupervised_share
        return {
            "loss per item": "-" if last.loss_per_item is None else f"{last.loss_per_item:.4f}",
            "items/s": f"{items / seconds:,.0f}",
            "unsupervised": "-" if unsupervised is None else f"{unsupervised:.0%}",
            "norm": "-" if last.gradient_norm is None else f"{last.gradient_norm:.2f}",
            "left": f"{int(left) // 60}:{int(left) % 60:02d}",
        }


class PlainDisplay:
    """A line every few updates, for files and pipes.

    Args:
        console: where the lines go.
        num_updates: updates of the run.
        print_every_updates: how many updates apart; the first and the last are shown too.
    """

    def __init__(self, console: Console, *, num_updates: int, print_every_updates: int) -> None:
        self._console = console
        self._every = print_every_updates
        self._progress = Progress(num_updates=num_updates)

    def say(self, text: str) -> None:
        """Print some words."""
        self._console.print(Text(text), soft_wrap=True)

    def evaluated(self, evaluation: Evaluation) -> None:
        """Print an evaluation."""
        self.say(evaluation_words(evaluation))
        self._progress.pause()

    def updated(self, record: UpdateRecord) -> None:
        """Print the update if its turn has come, and every skip."""
        self._progress.add(record)
        number = record.updates_attempted
        if record.reason is not None:
            self.say(skip_words(record))
        if number % self._every == 0 or number in (1, self._progress.num_updates):
            facts = "  ".join(f"{name} {value}" for name, value in self._progress.facts().items())
            self.say(f"update {number:>4}/{self._progress.num_updates}  {facts}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


class LiveDisplay:
    """A panel at the foot of the terminal; evaluations and skips stay above it.

    Args:
        console: the terminal.
        num_updates: updates of the run.
    """

    def __init__(self, console: Console, *, num_updates: int) -> None:
        self._console = console
        self._progress = Progress(num_updates=num_updates)
        self._live = Live(console=console, refresh_per_second=4, get_renderable=self.panel)

    def say(self, text: str) -> None:
        """Print some words above the panel."""
        self._console.print(Text(in_columns(text, self._console.width)))

    def evaluated(self, evaluation: Evaluation) -> None:
        """Print an evaluation above the panel."""
        self.say(evaluation_words(evaluation))
        self._progress.pause()

    def updated(self, record: UpdateRecord) -> None:
        """Take an update into the panel; a skip is also printed above it."""
        self._progress.add(record)
        if record.reason is not None:
            self.say(skip_words(record))

    def panel(self) -> RenderableType:
        """The panel as it is now."""
        progress = self._progress
        bar = Table.grid(padding=(0, 1))
        done = progress.updates_attempted
        bar.add_row(
            f"update {done}/{progress.num_updates}",
            ProgressBar(total=progress.num_updates, completed=done, width=40),
        )
        facts = Table.grid(padding=(0, 3))
        known = progress.facts()
        facts.add_row(*(Text(name, style="dim") for name in known))
        facts.add_row(*(Text(value, style="bold") for value in known.values()))
        return Group(bar, facts, Text(sparkline(list(progress.losses)), style="cyan"))

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()
