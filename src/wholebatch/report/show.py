"""A run folder as a person reads it, and as another program does: in updates, samples and items."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from wholebatch.errors import RecordError
from wholebatch.record import HEADER_FILE, RunHeader, UpdateRecord, padding_share
from wholebatch.report.output import OutputConsole, text_stream, write_json
from wholebatch.report.words import number_of, skip_words
from wholebatch.run_reader import Run, read_run

BARS = "▁▂▃▄▅▆▇█"
LAST_UPDATES_SHOWN = 5
# Of the JSON of ``wholebatch show`` and ``wholebatch train``.
SCHEMA_VERSION = 1


def show(run: Path, *, json_target: str | None = None) -> int:
    """Print what a run did, or list the runs of a folder; also write it as JSON where asked.

    Args:
        run: the run's folder, or one with runs in it.
        json_target: a file, "-" for standard output (people's text then goes to standard error), or
            None for no JSON.

    Returns:
        0, the exit code.

    Raises:
        RecordError: no run there, or one that can't be read.
    """
    console = OutputConsole(file=text_stream(json_target))
    if folders := run_folders(run):
        rows = [_list_entry(folder) for folder in folders]
        console.print(Text(f"{run}: {number_of(len(rows), 'run')}"), _runs_table(rows), sep="\n")
        for row in rows:
            if "problem" in row:
                console.print(Text(row["problem"], style="red"), soft_wrap=True)
        write_json({"schema_version": SCHEMA_VERSION, "folder": str(run), "runs": rows}, json_target)
        return 0
    read = read_run(run)
    console.print(render_run(read))
    write_json(run_summary(read), json_target)
    return 0


def run_folders(folder: Path) -> list[Path]:
    """The runs directly in a folder, by name; none where the folder is itself a run."""
    if not folder.is_dir() or (folder / HEADER_FILE).is_file():
        return []
    return sorted(each for each in folder.iterdir() if (each / HEADER_FILE).is_file())


def _list_entry(folder: Path) -> dict[str, Any]:
    """What a list says of a run; where it can't be read, why, so that the others are still listed."""
    try:
        facts = run_summary(read_run(folder))
    except RecordError as error:
        return {"folder": str(folder), "problem": str(error)}
    return {
        "folder": str(folder),
        "started_at": facts["header"]["started_at"],
        "end": facts["end"] and facts["end"]["reason"],
        "updates_applied": facts["counters"]["updates_applied"],
        "samples": facts["counters"]["samples"],
        "items": facts["counters"]["items"],
        "loss_per_item": facts["loss_per_item"],
    }


def _runs_table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("run", "began", "end", "updates applied", "items", "last loss per item"):
        table.add_column(name, justify="left" if name in ("run", "began", "end") else "right")
    table.columns[0].overflow = "fold"
    table.columns[1].no_wrap = True
    for row in rows:
        run = Text(Path(row["folder"]).name)
        if "problem" in row:
            table.add_row(run, "can't be read")
            continue
        table.add_row(
            run,
            row["started_at"],
            row["end"] or "none yet",
            f"{row['updates_applied']:,}",
            f"{row['items']:,}",
            _number(row["loss_per_item"]["last"]),
        )
    return table


def run_summary(run: Run) -> dict[str, Any]:
    """The facts of a run as JSON-ready data; its keys are promised within a schema version.

    ``padding_share = 1 - items / positions`` and ``items_per_second = items / seconds`` over all
    updates; ``positions`` is 0, and the share None, where those of some update are not known.
    ``loss_per_item`` gives that of the first and last update, and the lowest.
    """
    counters = run.counters()
    known = all(r.positions for r in run.records if r.items)
    positions = sum(r.positions for r in run.records) if known else 0
    seconds = sum(r.seconds for r in run.records)
    losses = [r.loss_per_item for r in run.records if r.loss_per_item is not None]
    return {
        "schema_version": SCHEMA_VERSION,
        "folder": str(run.folder),
        "header": run.header.to_dict(),
        "counters": counters.state_dict(),
        "positions": positions,
        "padding_share": padding_share(counters.items, positions),
        "reductions": sum(r.reductions for r in run.records),
        "seconds": seconds,
        "items_per_second": counters.items / seconds if seconds else None,
        "loss_per_item": {
            "first": losses[0] if losses else None,
            "last": losses[-1] if losses else None,
            "lowest": min(losses, default=None),
        },
        "peak_memory_bytes": _peak_memory(run.records),
        "evaluations": [e.to_dict() for e in run.evaluations],
        "last_records": [r.to_dict() for r in run.records[-LAST_UPDATES_SHOWN:]],
        "end": run.end.to_dict() if run.end else None,
        "torn_line": run.torn_line,
    }


def render_run(run: Run) -> RenderableType:
    """Everything about a run that fits on one screen."""
    parts: list[RenderableType] = [_title(run), "", _facts(run), "", _totals(run)]
    if run.torn_line:
        parts += [
            "",
            Text("The last line of a file was cut off in the middle and is left out.", style="yellow"),
        ]
    curve = loss_curve(run.records, width=72, height=6)
    if curve:
        parts += ["", Text("loss per item, by update", style="bold"), *map(Text, curve)]
    if run.evaluations:
        parts += ["", _evaluations(run)]
    if run.records:
        parts += ["", _recent(run.records[-LAST_UPDATES_SHOWN:])]
    skipped = [r for r in run.records if r.reason is not None][-LAST_UPDATES_SHOWN:]
    parts += [Text(skip_words(r), style="yellow") for r in skipped]
    return Group(*parts)


def ledger_line(header: RunHeader) -> str:
    """The global batch as a product: ``m x A x D``."""
    return (
        f"{header.micro_batch_samples} samples a micro-batch x "
        f"{number_of(header.micro_batches_per_window, 'micro-batch', 'micro-batches')} x "
        f"{number_of(header.replicas, 'replica')} = {header.global_batch_samples} samples an update"
    )


def loss_curve(records: Sequence[UpdateRecord], *, width: int, height: int) -> list[str]:
    """The loss per item over the updates, drawn with block characters.

    Where there are more updates than columns, a column is ``sum of losses / sum of items`` of its
    updates. Updates without a loss leave a gap.

    Args:
        records: the updates, in order.
        width: columns of the drawing, labels left out.
        height: lines of the drawing.

    Returns:
        The lines, with the highest and the lowest value at the left and the updates below; empty
        when fewer than two columns have a loss.
    """
    columns = _columns(records, width)
    values = [value for value in columns if value is not None]
    if len(values) < 2:
        return []
    low, high = min(values), max(values)
    labels = [f"{high:.3f}", *[""] * (height - 2), f"{low:.3f}"]
    label_width = max(map(len, labels))
    lines = [
        f"{label:>{label_width}} │{''.join(_bar(v, low, high, height, height - 1 - row) for v in columns)}"
        for row, label in enumerate(labels)
    ]
    first, last = f"update {records[0].updates_attempted}", f"{records[-1].updates_attempted}"
    gap = max(1 + len(last), len(columns) - len(first))
    return [*lines, f"{'':>{label_width}}  {first}{last:>{gap}}"]


def sparkline(values: Sequence[float | None]) -> str:
    """Values as one line of block characters, from the lowest to the highest of them."""
    known = [value for value in values if value is not None]
    if not known:
        return ""
    return "".join(_bar(value, min(known), max(known), 1, 0) for value in values)


def _columns(records: Sequence[UpdateRecord], width: int) -> list[float | None]:
    """Losses per item in at most ``width`` groups of neighbouring updates, weighted by items."""
    number = min(width, len(records))
    columns: list[float | None] = []
    for column in range(number):
        group = records[column * len(records) // number : (column + 1) * len(records) // number]
        known = [(r.loss_per_item, r.items) for r in group if r.loss_per_item is not None]
        items = sum(n for _, n in known)
        columns.append(sum(loss * n for loss, n in known) / items if items else None)
    return columns


def _bar(value: float | None, low: float, high: float, height: int, row: int) -> str:
    """One character: what a bar from ``low`` up to ``value`` fills of this row, 0 at the bottom."""
    if value is None:
        return " "
    share = (value - low) / (high - low) if high > low else 0.0
    eighths = 1 + round(share * (8 * height - 1)) - 8 * row
    return " " if eighths <= 0 else BARS[min(eighths, 8) - 1]


def _title(run: Run) -> Text:
    text = Text.assemble((str(run.folder), "bold"), f"\nbegan {run.header.started_at}")
    if run.end is None:
        text.append(", did not end, or is still going", style="yellow")
        return text
    text.append(
        f", {run.end.reason} {run.end.ended_at}", style="green" if run.end.reason == "done" else "red"
    )
    if run.end.message:
        text.append(f"\n{run.end.message}", style="red")
    return text


def _facts(run: Run) -> Table:
    header = run.header
    table = _pairs()
    table.add_row("ledger", Text(ledger_line(header)))
    table.add_row("layout", Text(_joined(header.layout)))
    table.add_row("divided by", Text(f"{header.normalisation}; tail: {header.tail}"))
    table.add_row("precision", Text(header.precision))
    for name, facts in (("data", header.dataset), ("model", header.model)):
        if facts:
            table.add_row(name, Text(_joined(facts)))
    if header.seeds:
        table.add_row("seeds", Text(_joined(header.seeds)))
    table.add_row("versions", Text(_joined(header.versions)))
    if header.proof is not None:
        table.add_row("first batch", Text(_joined(header.proof)))
    return table


def _totals(run: Run) -> Table:
    facts = run_summary(run)
    counters = run.counters()
    skips = f"{counters.updates_skipped_nonfinite:,} not finite, {counters.updates_skipped_empty:,} empty"
    table = _pairs()
    table.add_row(
        "updates",
        f"{counters.updates_attempted:,} attempted, {counters.updates_applied:,} applied; skipped: {skips}",
    )
    table.add_row("samples", f"{counters.samples:,} in {counters.micro_batches:,} micro-batches")
    positions = f"{facts['positions']:,}" if facts["positions"] else "-"
    padding = "-" if facts["padding_share"] is None else f"{facts['padding_share']:.1%}"
    table.add_row("items", f"{counters.items:,} in {positions} positions; padding {padding}")
    table.add_row("reductions", f"{facts['reductions']:,} of gradients, by one rank")
    speed = facts["items_per_second"]
    table.add_row("seconds", f"{facts['seconds']:,.1f}" + (f"; {speed:,.0f} items/s" if speed else ""))
    if facts["peak_memory_bytes"] is not None:
        table.add_row("memory", f"{facts['peak_memory_bytes'] / 2**20:,.0f} MiB at the peak of a rank")
    loss = facts["loss_per_item"]
    table.add_row(
        "loss per item",
        f"first {_number(loss['first'])}, last {_number(loss['last'])}, lowest {_number(loss['lowest'])}",
    )
    return table


def _evaluations(run: Run) -> Table:
    table = Table(box=None, pad_edge=False, title="evaluations", title_justify="left")
    for name in ("split", "after updates", "samples seen", "items", "loss per item"):
        table.add_column(name, justify="left" if name == "split" else "right")
    for e in run.evaluations:
        table.add_row(
            Text(e.split),
            f"{e.updates_applied:,}",
            f"{e.samples_consumed:,}",
            f"{e.items:,}",
            _number(e.loss_per_item),
        )
    return table


def _recent(records: Sequence[UpdateRecord]) -> Table:
    table = Table(box=None, pad_edge=False, title="last updates", title_justify="left")
    names = ("update", "outcome", "samples", "items", "loss per item", "norm", "learning rate", "seconds")
    for name in names:
        table.add_column(name, justify="left" if name == "outcome" else "right")
    for r in records:
        table.add_row(
            f"{r.updates_attempted:,}",
            r.outcome + (" (partial)" if r.partial else ""),
            f"{r.samples:,}",
            f"{r.items:,}",
            _number(r.loss_per_item),
            _number(r.gradient_norm),
            "-" if not r.learning_rates or r.learning_rates[0] is None else f"{r.learning_rates[0]:.3g}",
            f"{r.seconds:.3f}",
        )
    return table


def _pairs() -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    return table


def _peak_memory(records: Sequence[UpdateRecord]) -> int | None:
    return max((max(r.peak_memory_bytes) for r in records if r.peak_memory_bytes), default=None)


def _joined(facts: dict[str, Any]) -> str:
    known = {name: value for name, value in facts.items() if value is not None}
    return ", ".join(f"{name.replace('_', ' ')} {_value(value)}" for name, value in known.items())


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
