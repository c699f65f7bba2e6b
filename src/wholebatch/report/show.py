"""``wholebatch show``: one run, two runs beside each other, a run that is going, or a folder of runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from wholebatch.errors import RecordError, UsageError
from wholebatch.record import HEADER_FILE
from wholebatch.report.compare import AXES, compare_runs
from wholebatch.report.compare_view import render_comparison
from wholebatch.report.follow import follow
from wholebatch.report.output import OutputConsole, text_stream, write_json
from wholebatch.report.run_view import columns, number, render_run
from wholebatch.report.summary import SCHEMA_VERSION, run_summary
from wholebatch.report.words import number_of, printable
from wholebatch.run_folder import read_run


def show(
    runs: Sequence[Path],
    *,
    by: str | None = None,
    follow_it: bool = False,
    json_target: str | None = None,
) -> int:
    """Print what a run did, compare two, or list the runs of a folder; also write it as JSON if asked.

    Args:
        runs: the folder of a run, of two runs to compare, or one with runs in it.
        by: the axis of a comparison, one of ``AXES``; None for the one that fits.
        follow_it: whether to watch one run until it ends.
        json_target: a file, "-" for standard output (people's text then goes to standard error), or
            None for no JSON.

    Returns:
        0, the exit code.

    Raises:
        UsageError: options that do not go together.
        RecordError: no run there, or one that can't be read.
    """
    _refuse_what_does_not_go_together(runs, by, follow_it)
    console = OutputConsole(file=text_stream(json_target))
    if len(runs) == 2:
        comparison = compare_runs(read_run(runs[0]), read_run(runs[1]), by=by)
        console.print(render_comparison(comparison))
        write_json(comparison.to_dict(), json_target)
    elif not follow_it and (folders := run_folders(runs[0])):
        _show_list(runs[0], folders, console, json_target)
    else:
        run = follow(runs[0], console) if follow_it else read_run(runs[0])
        console.print(render_run(run))
        write_json(run_summary(run), json_target)
    return 0


def run_folders(folder: Path) -> list[Path]:
    """The runs directly in a folder, by name; none where the folder is itself a run."""
    if not folder.is_dir() or (folder / HEADER_FILE).is_file():
        return []
    return sorted(each for each in folder.iterdir() if (each / HEADER_FILE).is_file())


def _refuse_what_does_not_go_together(runs: Sequence[Path], by: str | None, follow_it: bool) -> None:
    if len(runs) not in (1, 2):
        raise UsageError(f"show takes one run, or two to compare; {len(runs)} were given")
    if by is not None and by not in AXES:
        raise UsageError(f"--by {by!r} is no axis; it can be {', '.join(AXES)}")
    if by is not None and len(runs) == 1:
        raise UsageError(f"--by {by} is the axis of a comparison: give a second run")
    if follow_it and len(runs) == 2:
        raise UsageError("--follow watches one run; two were given")


def _show_list(
    folder: Path, folders: Sequence[Path], console: OutputConsole, json_target: str | None
) -> None:
    rows = [_list_entry(each) for each in folders]
    console.print(Text(f"{printable(folder)}: {number_of(len(rows), 'run')}"), _runs_table(rows), sep="\n")
    for row in rows:
        if "problem" in row:
            console.print(Text(printable(row["problem"]), style="red"), soft_wrap=True)
    write_json({"schema_version": SCHEMA_VERSION, "folder": str(folder), "runs": rows}, json_target)


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
    table = columns("run|", "began (UTC)|", "end|", "updates\napplied", "items", "last loss\nper item")
    for column in table.columns[:2]:  # where not all has room, these are broken, and no number is cut
        column.no_wrap, column.overflow = False, "fold"
    for row in rows:
        run = Text(printable(Path(row["folder"]).name))
        if "problem" in row:
            table.add_row(run, "can't be read")
            continue
        table.add_row(
            run,
            row["started_at"][:16].replace("T", " "),
            row["end"] or "none yet",
            f"{row['updates_applied']:,}",
            f"{row['items']:,}",
            number(row["loss_per_item"]["last"]),
        )
    return table
