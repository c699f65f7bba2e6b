"""A run as a person reads it, on one screen of 80 columns or more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from wholebatch.record import Resumption, RunHeader, UpdateRecord
from wholebatch.report.curves import loss_curve, unsupervised_line
from wholebatch.report.summary import LAST_UPDATES_SHOWN, run_summary
from wholebatch.report.words import number_of, printable, skip_words
from wholebatch.run_folder import Run

CURVE_COLUMNS, CURVE_LINES = 64, 6
EVALUATIONS_SHOWN = 8
OUTCOME_WORDS = {"applied": "applied", "skipped_nonfinite": "not finite", "skipped_empty": "empty"}


def render_run(run: Run) -> RenderableType:
    """Everything about a run: what was the same for all updates, totals, curves, the last updates."""
    facts = run_summary(run)
    parts: list[RenderableType] = [title(run), "", header_table(run), "", totals_table(run, facts)]
    parts += warnings_of(run)
    parts += curves(run.records)
    if run.resumptions:
        parts += ["", _resumptions(run)]
    if facts["checkpoints"]:
        parts += ["", _checkpoints(facts["checkpoints"])]
    for each in facts["damaged_checkpoints"]:
        words = f"checkpoint {each['name']} can't be used: {each['problem']}"
        parts.append(Text(words, style="yellow"))
    if run.evaluations:
        parts += ["", _evaluations(run)]
    if run.records:
        parts += ["", heading("last updates"), recent_table(run.records[-LAST_UPDATES_SHOWN:])]
    skipped = [r for r in run.records if r.reason is not None][-LAST_UPDATES_SHOWN:]
    parts += [Text(skip_words(r), style="yellow") for r in skipped]
    return Group(*parts)


def ledger_line(header: RunHeader | Resumption) -> str:
    """The global batch as a product, ``m x A x D``; or what bounds its micro-batches."""
    m, window, replicas = header.micro_batch_samples, header.micro_batches_per_window, header.replicas
    if m is None or window is None:
        each = f"up to {header.tokens_per_micro_batch or 0:,} tokens, {header.rows},"
        return f"{_global_batch(header)}micro-batches of {each} x {number_of(replicas, 'replica')}"
    return (
        f"{number_of(m, 'sample')} x {number_of(window, 'micro-batch', 'micro-batches')} x "
        f"{number_of(replicas, 'replica')} = {number_of(m * window * replicas, 'sample')} an update"
    )


def _global_batch(header: RunHeader | Resumption) -> str:
    if isinstance(header, Resumption):
        return ""
    if header.global_batch_samples is None:
        return f"up to {number_of(header.global_batch_items or 0, 'item')} an update in "
    return f"{number_of(header.global_batch_samples, 'sample')} an update in "


def title(run: Run) -> Text:
    """The folder, and when the run began and ended."""
    text = Text.assemble((printable(run.folder), "bold"), f"\nbegan {run.header.started_at}")
    if run.end is None:
        text.append(", did not end, or is still going", style="yellow")
    else:
        style = "green" if run.end.reason == "done" else "red"
        text.append(f", {run.end.reason} {run.end.ended_at}", style=style)
    if run.resumptions:
        times = number_of(len(run.resumptions), "time")
        text.append(f"\nresumed {times}, last {run.resumptions[-1].at}")
    if run.end is not None and run.end.message:
        text.append("\n" + "\n".join(map(printable, run.end.message.splitlines())), style="red")
    return text


def warnings_of(run: Run) -> list[RenderableType]:
    """What makes the facts of a run less than whole, or its updates inexact; empty where nothing does."""
    found: list[RenderableType] = []
    means = sum(r.weighting == "micro_batch_means" for r in run.records)
    if means:
        found.append(
            Text(
                f"Not equal to the big batch: {number_of(means, 'update')} averaged the means of "
                f'micro-batches (weighting="micro_batch_means"); an item of one with fewer items counted '
                f"for more."
            )
        )
    if run.torn_line:
        found.append(Text("The last line of a file was cut off in the middle and is left out."))
    if run.disorder:
        found.append(Text(f"The totals can't be trusted: {run.disorder}."))
    for warning in found:
        if isinstance(warning, Text):
            warning.stylize("yellow")
    return ["", *found] if found else []


def curves(records: Sequence[UpdateRecord]) -> list[RenderableType]:
    """The loss, and the unsupervised share beneath it, over the updates."""
    parts: list[RenderableType] = []
    if lines := loss_curve(records, width=CURVE_COLUMNS, height=CURVE_LINES):
        parts += ["", heading("loss per item, by update"), *map(_line, lines)]
    unsupervised = unsupervised_line(records, width=CURVE_COLUMNS)
    if unsupervised and len(records) > 1:
        label_width = len(lines[0].split("│")[0]) if lines else 0
        parts += [
            Text.assemble(("unsupervised share, by update", "bold"), f": {unsupervised[0]}"),
            _line(f"{'':>{label_width}}│{unsupervised[1]}"),
        ]
    return parts


def header_table(run: Run) -> Table:
    """What was the same for every update, as the run began."""
    header = run.header
    table = pairs()
    table.add_row("ledger", Text(ledger_line(header)))
    table.add_row("layout", Text(joined(header.layout)))
    table.add_row("divided by", Text(header.normalisation))
    table.add_row("tail", Text(header.tail))
    table.add_row("precision", Text(header.precision))
    for name, facts in (("data", header.dataset), ("model", header.model)):
        if facts:
            table.add_row(name, Text(joined(facts)))
    if header.seeds:
        table.add_row("seeds", Text(joined(header.seeds)))
    table.add_row("versions", Text(joined(header.versions)))
    if header.proof is not None:
        table.add_row("first batch", Text(joined(header.proof)))
    return table


def totals_table(run: Run, facts: dict[str, Any]) -> Table:
    """What the updates came to.

    Args:
        run: the run.
        facts: what ``run_summary`` says of it.
    """
    counters = run.counters()
    skipped = counters.updates_attempted - counters.updates_applied
    skips = f"; not finite {counters.updates_skipped_nonfinite:,}, empty {counters.updates_skipped_empty:,}"
    table = pairs()
    table.add_row(
        "updates",
        f"{counters.updates_attempted:,} attempted, {counters.updates_applied:,} applied"
        + (skips if skipped else ""),
    )
    micro_batches = number_of(counters.micro_batches, "micro-batch", "micro-batches")
    table.add_row("samples", f"{counters.samples:,} in {micro_batches}")
    if counters.samples_left_out:
        table.add_row(
            "left out", f"{number_of(counters.samples_left_out, 'sample')} that could not be read"
        )
    positions = number_of(facts["positions"], "position") if facts["positions"] else "- positions"
    table.add_row("items", f"{counters.items:,} in {positions}")
    share = facts["unsupervised_share"]
    table.add_row("unsupervised", "-" if share is None else f"{share:.1%} of positions")
    table.add_row("reductions", f"{facts['reductions']:,} of gradients, by one rank")
    if known := facts["accumulated_in"]:
        each = [f"{dtype} in {number_of(updates, 'update')}" for dtype, updates in known.items()]
        table.add_row("added up in", Text(", ".join(each if len(each) > 1 else known)))
    speed = facts["items_per_second"]
    table.add_row("seconds", f"{facts['seconds']:,.1f}" + (f"; {speed:,.0f} items/s" if speed else ""))
    if facts["peak_memory_bytes"] is not None:
        table.add_row("memory", f"{facts['peak_memory_bytes'] / 2**20:,.0f} MiB at the peak of a rank")
    loss = facts["loss_per_item"]
    table.add_row(
        "loss per item",
        f"first {number(loss['first'])}, last {number(loss['last'])}, lowest {number(loss['lowest'])}",
    )
    return table


def recent_table(records: Sequence[UpdateRecord]) -> Table:
    """Some updates, one a line; one that was applied to a smaller global batch is "partial"."""
    table = columns("update", "outcome|", "samples", "items", "loss per\nitem", "norm")
    for name in ("learning\nrate", "seconds"):
        table.add_column(name, justify="right", no_wrap=True)
    for r in records:
        table.add_row(
            f"{r.updates_attempted:,}",
            "partial" if r.partial and r.outcome == "applied" else OUTCOME_WORDS[r.outcome],
            f"{r.samples:,}",
            f"{r.items:,}",
            number(r.loss_per_item),
            number(r.gradient_norm),
            "-" if not r.learning_rates or r.learning_rates[0] is None else f"{r.learning_rates[0]:.3g}",
            f"{r.seconds:.3f}",
        )
    return table


def pairs() -> Table:
    """A table of names and what they are."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    return table


def heading(words: str) -> Text:
    """The line above a table; a title of the table itself would be broken to its width."""
    return Text(words, style="bold")


def columns(*names: str) -> Table:
    """A table with a head; a name that ends in "|" is of a column set to the left."""
    table = Table(box=None, pad_edge=False)
    for name in names:
        table.add_column(
            name.removesuffix("|"), justify="left" if name.endswith("|") else "right", no_wrap=True
        )
    return table


def joined(facts: dict[str, Any]) -> str:
    """Names and values in one line."""
    known = {name: value for name, value in facts.items() if value is not None}
    return ", ".join(f"{name.replace('_', ' ')} {value_words(value)}" for name, value in known.items())


def value_words(value: Any) -> str:
    """A value of a header or of settings in words."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, dict):
        return f"({joined(value)})" if value else "none"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(value_words, value))}]" if value else "none"
    if isinstance(value, float):  # one that was typed is short, and rounded it would be another
        typed = repr(value).removesuffix(".0")
        return typed if len(typed) <= 10 else f"{value:.3g}"
    return printable(value)


def number(value: float | None) -> str:
    """A loss or a norm; "-" for one that is not known."""
    if value is None:
        return "-"
    return f"{value:.4f}" if abs(value) < 1e6 else f"{value:.3e}"


def _line(text: str) -> Text:
    return Text(text, no_wrap=True, overflow="crop")


def _resumptions(run: Run) -> RenderableType:
    """Where the run was resumed, and what was another from there on."""
    table = columns("at|", "after\nupdate", "updates\ngiven up", "m x A x D", "end\nbefore|")
    lines: list[RenderableType] = []
    layouts = [run.header.layout, *(each.layout for each in run.resumptions)]
    for layout_before, r in zip(layouts, run.resumptions, strict=False):
        if r.micro_batch_samples is None:
            product = f"{r.tokens_per_micro_batch or 0:,} tokens x {r.replicas:,}"
        else:
            product = f"{r.micro_batch_samples:,} x {r.micro_batches_per_window:,} x {r.replicas:,}"
        before = "killed" if r.previous_end is None else str(r.previous_end.get("reason", "?"))
        table.add_row(r.at, f"{r.updates_attempted:,}", f"{r.abandoned_updates:,}", product, before)
        if words := changes_words(layout_before, r):
            lines.append(Text(f"after update {r.updates_attempted:,}: {words}"))
    return Group(heading("resumed"), table, *lines)


def changes_words(layout_before: Mapping[str, int], resumption: Resumption) -> str:
    """What a resumption changed, ranks and settings, each with the value before and after it."""
    ranks = [layout_before.get("ranks", 1), resumption.layout.get("ranks", 1)]
    changed: dict[str, Sequence[Any]] = {"ranks": ranks} if ranks[0] != ranks[1] else {}
    changed |= resumption.changed_settings
    return ", ".join(f"{name} {' -> '.join(map(value_words, pair))}" for name, pair in changed.items())


def _checkpoints(checkpoints: Sequence[dict[str, Any]]) -> RenderableType:
    table = columns("name|", "after\nupdate", "samples", "score", "made|")
    for each in checkpoints:
        table.add_row(
            Text(each["name"]),
            f"{each['updates_attempted']:,}",
            f"{each['samples']:,}",
            number(each["score"]),
            each["created_at"],
        )
    return Group(heading("checkpoints"), table)


def _evaluations(run: Run) -> RenderableType:
    shown = run.evaluations[-EVALUATIONS_SHOWN:]
    left_out = len(run.evaluations) - len(shown)
    words = f"evaluations, the last {len(shown)} of {len(run.evaluations)}" if left_out else "evaluations"
    table = columns("split|", "after\nupdates", "samples\nseen", "items", "loss per\nitem")
    for e in shown:
        table.add_row(
            Text(e.split),
            f"{e.updates_applied:,}",
            f"{e.samples_consumed:,}",
            f"{e.items:,}",
            number(e.loss_per_item),
        )
    return Group(heading(words), table)
