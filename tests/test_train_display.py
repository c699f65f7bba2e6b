"""What a person sees: the last update's own figures and the pace; lines where no terminal is."""

from __future__ import annotations

import dataclasses
import io

import pytest
from rich.console import Console

from runs import a_record
from wholebatch.plan import plan_batch
from wholebatch.record import Evaluation
from wholebatch.report.ledger import plan_text
from wholebatch.report.words import evaluation_words
from wholebatch.train import display as display_module
from wholebatch.train.display import LiveDisplay, PlainDisplay, Progress, choose_display

AN_EVALUATION = Evaluation(
    split="held_out",
    updates_applied=2,
    samples_consumed=32,
    samples=308,
    items=44111,
    loss_per_item=2.75,
    seconds=1.5,
)


class Clock:
    """A clock that moves only when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(display_module, "perf_counter", clock)
    return clock


def test_a_figure_is_the_update_s_own_and_the_pace_is_that_of_several(clock: Clock) -> None:
    """The record and ``show`` have the same loss per item and padding under the same names."""
    progress = Progress(num_updates=10)
    for update, items, loss in ((1, 2, 1.0), (2, 6, 3.0)):
        clock.now += 2.0
        progress.add(a_record(update, items=items, loss_per_item=loss, positions=10))
    assert progress.facts() == {
        "loss per item": "3.0000",
        "items/s": "2",
        "unsupervised": "40%",
        "norm": "1.25",
        "left": "0:16",
    }


def test_an_evaluation_is_left_out_of_the_pace(clock: Clock) -> None:
    progress = Progress(num_updates=3)
    clock.now += 1.0
    progress.add(a_record(1))
    clock.now += 50.0
    progress.pause()
    clock.now += 1.0
    progress.add(a_record(2))
    assert (progress.facts()["items/s"], progress.facts()["left"]) == ("900", "0:01")


def test_nothing_to_say_yet_or_no_figures() -> None:
    progress = Progress(num_updates=3)
    assert progress.facts() == {}
    assert progress.updates_attempted == 0
    progress.add(a_record(1, loss_per_item=None, gradient_norm=None, positions=0, items=0))
    facts = progress.facts()
    assert (facts["loss per item"], facts["norm"], facts["unsupervised"]) == ("-", "-", "-")


def plain(num_updates: int, every: int) -> tuple[PlainDisplay, io.StringIO]:
    words = io.StringIO()
    display = PlainDisplay(
        Console(file=words, width=40), num_updates=num_updates, print_every_updates=every
    )
    return display, words


def test_plain_lines_come_at_the_interval_and_stay_whole() -> None:
    display, words = plain(7, 3)
    with display:
        for update in range(1, 8):
            display.updated(a_record(update))
    lines = words.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["1/7", "3/7", "6/7", "7/7"]
    assert all("loss per item 2.5000" in line and "unsupervised 25%" in line for line in lines)


def test_a_skip_is_always_said() -> None:
    display, words = plain(7, 3)
    display.updated(a_record(2, outcome="skipped_nonfinite", reason="a gradient is [not] finite"))
    assert words.getvalue() == "update 2 was skipped: a gradient is [not] finite\n"


def test_an_evaluation_in_words() -> None:
    assert evaluation_words(AN_EVALUATION) == (
        "held out after 2 updates: loss per item 2.7500 over 44,111 items in 308 samples (1.5 s)"
    )
    assert "after 1 update: " in evaluation_words(dataclasses.replace(AN_EVALUATION, updates_applied=1))


def test_a_terminal_gets_the_live_panel_and_a_file_gets_lines() -> None:
    options = {"num_updates": 3, "print_every_updates": 1}
    terminal = Console(file=io.StringIO(), force_terminal=True, width=100)
    assert isinstance(choose_display(terminal, **options), LiveDisplay)
    assert isinstance(choose_display(Console(file=io.StringIO()), **options), PlainDisplay)


def test_the_panel_shows_the_figures_and_leaves_evaluations_above() -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=100, legacy_windows=False)
    display = LiveDisplay(console, num_updates=4)
    with display:
        display.updated(a_record(1, loss_per_item=4.0))
        display.updated(a_record(2, loss_per_item=2.0, outcome="skipped_empty", reason="no items"))
        display.evaluated(AN_EVALUATION)
    shown = Console(width=100, record=True, file=io.StringIO())
    shown.print(display.panel())
    panel = shown.export_text()
    assert "update 2/4" in panel
    for name in ("loss per item", "items/s", "unsupervised", "norm", "left"):
        assert name in panel
    assert "2.0000" in panel
    assert "█▁" in panel
    assert "update 2 was skipped: no items" in file.getvalue()
    assert "held out after 2 updates" in file.getvalue()


@pytest.mark.parametrize("kind", [PlainDisplay, LiveDisplay])
def test_both_displays_leave_evaluations_out_of_the_pace(
    clock: Clock, kind: type[PlainDisplay | LiveDisplay]
) -> None:
    console = Console(file=io.StringIO(), width=100)
    options = {"print_every_updates": 1} if kind is PlainDisplay else {}
    display = kind(console, num_updates=3, **options)
    for update in (1, 2):
        clock.now += 50.0
        display.evaluated(AN_EVALUATION)
        clock.now += 1.0
        display.updated(a_record(update))
    assert display._progress.facts()["items/s"] == "900"


@pytest.mark.parametrize("columns", [80, 60])
def test_a_terminal_shows_the_ledger_in_columns(columns: int) -> None:
    plan = plan_batch(global_batch_samples=32, micro_batch_samples=4, ranks=1)
    ledger = plan_text(plan, ragged=True)
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=columns, legacy_windows=False)
    LiveDisplay(console, num_updates=4).say(ledger)
    shown = file.getvalue()
    assert shown.split() == ledger.split()
    lines = shown.splitlines()
    assert max(len(line) for line in lines) <= columns
    assert [line for line in lines if line and not line.startswith("  ")] == ["One update"]
