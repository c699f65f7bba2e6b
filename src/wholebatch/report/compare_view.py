"""The comparison of two runs as a person reads it, on 80 columns or more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from wholebatch.report.compare import CURVE_COLUMNS, Comparison, EvaluationPair
from wholebatch.report.curves import MARKS, two_curves
from wholebatch.report.differences import Difference, Kind
from wholebatch.report.run_view import columns, heading, number, pairs, value_words
from wholebatch.report.summary import run_summary
from wholebatch.report.words import number_of, printable

CURVE_LINES = 12
KIND_WORDS: dict[Kind, str] = {
    "losses": "what a loss is per",
    "updates": "the update itself",
    "training": "how it trains",
    "split": "how the same update is split and rounded",
}
AXIS_WORDS = {
    "samples": "samples seen",
    "items": "items seen",
    "updates": "updates attempted",
    "seconds": "seconds spent in updates",
}
DIFFERENCES_SHOWN_OF_A_KIND = 12
VALUE_COLUMNS = 22


def render_comparison(comparison: Comparison) -> RenderableType:
    """Where the updates of two runs differ, then their losses on one axis, then what they came to."""
    return Group(
        _names(comparison),
        "",
        *_verdicts(comparison),
        *_differences(comparison.differences),
        "",
        *_curves(comparison),
        *_held_out(comparison),
        "",
        heading("totals"),
        _totals(comparison),
    )


def _names(comparison: Comparison) -> Table:
    table = pairs()
    for name, run, mark in zip("AB", (comparison.first, comparison.second), MARKS, strict=False):
        table.add_row(f"{name} ({mark})", Text(printable(run.folder)))
        end = "did not end, or is still going" if run.end is None else run.end.reason
        times = number_of(len(run.resumptions), "time")
        resumed = f"; resumed {times}" if run.resumptions else ""
        table.add_row("", f"{number_of(len(run.records), 'update')}, {end}{resumed}")
    return table


def _verdicts(comparison: Comparison) -> list[RenderableType]:
    """What can be compared at all, before anything is."""
    found = []
    if not comparison.losses_comparable:
        found.append("Losses are not comparable: they are per something else, see below.")
    if not comparison.one_to_one:
        found.append("Updates are not comparable one to one: they are of other things, see below.")
    lines: list[RenderableType] = [Text(words, style="yellow") for words in found]
    return [*lines, Text(f"Global batches: {comparison.same_samples}.")]


def _differences(differences: Sequence[Difference]) -> list[RenderableType]:
    if not differences:
        return ["", Text("Nothing in their headers and resumptions differs.")]
    parts: list[RenderableType] = []
    for kind, words in KIND_WORDS.items():
        mine = [d for d in differences if d.kind == kind]
        if not mine:
            continue
        table = Table(box=None, pad_edge=False)
        for name, width in (("", 30), ("A", VALUE_COLUMNS), ("B", VALUE_COLUMNS)):
            table.add_column(name, min_width=width, max_width=width, overflow="fold")
        for d in mine[:DIFFERENCES_SHOWN_OF_A_KIND]:
            table.add_row(Text(d.name), Text(_words(d.first)), Text(_words(d.second)))
        parts += ["", heading(f"different: {words}"), table]
        if len(mine) > DIFFERENCES_SHOWN_OF_A_KIND:
            parts.append(Text(f"and {len(mine) - DIFFERENCES_SHOWN_OF_A_KIND} more; --json has all"))
    return parts


def _words(value: Any) -> str:
    return "-" if value is None else value_words(value)


def _curves(comparison: Comparison) -> list[RenderableType]:
    end = max(comparison.ends)
    lines = two_curves(*comparison.curves, end=end, columns=CURVE_COLUMNS, height=CURVE_LINES)
    if not lines:
        return [Text("No update of either run has a loss to draw.")]
    label_width = lines[0].index("│")
    last = f"{end:,.1f}" if comparison.axis == "seconds" else f"{end:,}"
    return [
        Text.assemble(("loss per item", "bold"), f"   A {MARKS[0]}   B {MARKS[1]}   both {MARKS[2]}"),
        *(Text(line, no_wrap=True, overflow="crop") for line in lines),
        Text(f"{'':>{label_width}} 0{last:>{CURVE_COLUMNS - 1}}", no_wrap=True),
        Text(f"{'':>{label_width}} axis: {AXIS_WORDS[comparison.axis]} ({comparison.why})"),
    ]


def _held_out(comparison: Comparison) -> list[RenderableType]:
    axis = AXIS_WORDS[comparison.axis]
    if not (comparison.first.evaluations and comparison.second.evaluations):
        return []
    if not comparison.evaluations:
        return ["", Text(f"No evaluation of A is beside one of B in {axis}.")]
    table = columns("split|", "A at", "B at", "A", "B", "B - A")
    for pair in comparison.evaluations:
        table.add_row(
            Text(pair.split),
            f"{pair.first_at:,.10g}",
            f"{pair.second_at:,.10g}",
            number(pair.first_loss),
            number(pair.second_loss),
            _gap(pair),
        )
    return ["", heading(f"evaluations beside each other, by {axis}"), table]


def _gap(pair: EvaluationPair) -> str:
    if pair.first_loss is None or pair.second_loss is None:
        return "-"
    gap = pair.second_loss - pair.first_loss
    return f"{gap:{'+.1e' if 0 < abs(gap) < 0.5e-4 else '+.4f'}}"


def _totals(comparison: Comparison) -> Table:
    """What each run came to, and the quotient of what is not a loss."""
    table = columns("|", "A", "B", "B / A")
    facts = run_summary(comparison.first), run_summary(comparison.second)
    counted = [(name, f["counters"][key]) for f in facts for name, key in _COUNTED]
    for (name, a), (_, b) in zip(counted[: len(_COUNTED)], counted[len(_COUNTED) :], strict=True):
        table.add_row(name, f"{a:,}", f"{b:,}", _quotient(a, b))
    for name, key, form in (
        ("seconds in updates", "seconds", ",.1f"),
        ("items/s", "items_per_second", ",.0f"),
        ("unsupervised share", "unsupervised_share", ".1%"),
    ):
        a, b = (f[key] for f in facts)
        texts = ("-" if value is None else f"{value:{form}}" for value in (a, b))
        table.add_row(name, *texts, "" if key == "unsupervised_share" else _quotient(a, b))
    for word in ("last", "lowest"):
        table.add_row(f"{word} loss per item", *(number(f["loss_per_item"][word]) for f in facts), "")
    return table


_COUNTED = (("updates applied", "updates_applied"), ("samples", "samples"), ("items", "items"))


def _quotient(a: float | None, b: float | None) -> str:
    return f"{b / a:.3f}" if a and b is not None else "-"
