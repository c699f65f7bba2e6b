"""The verdicts as a table of Markdown, between two markers of docs/faults.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from campaign.trial import Verdict, exit_code

BEGIN, END = "<!-- the campaign's table begins -->", "<!-- the campaign's table ends -->"


def table(verdicts: Sequence[Verdict]) -> str:
    """One row for each kind of fault, and one for all."""
    kinds: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        kinds.setdefault(verdict.case.kind, []).append(verdict)
    lines = [
        "| kind | places | layouts | runs | lost | twice | hangs | unreadable | exit codes |",
        "|---|---|---|---|---|---|---|---|---|",
        *(_row(kind, of_kind) for kind, of_kind in kinds.items()),
        _row("**all**", verdicts),
    ]
    return "\n".join(lines)


def _row(name: str, verdicts: Sequence[Verdict]) -> str:
    places = {verdict.case.place for verdict in verdicts}
    layouts = {verdict.case.setup.layout for verdict in verdicts}
    sums = [sum(getattr(v, each) for v in verdicts) for each in ("lost", "twice", "hangs", "unreadable")]
    codes = Counter(exit_code(end) for verdict in verdicts for end in verdict.ended)
    shown = ", ".join(f"{code} ({times})" for code, times in sorted(codes.items()))
    cells = [name, len(places), len(layouts), len(verdicts), *sums, shown]
    return f"| {' | '.join(map(str, cells))} |"


def write_into(document: Path, text: str) -> None:
    """Replace what is between the markers of a document."""
    before, rest = document.read_text().split(BEGIN)
    _, after = rest.split(END)
    document.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")
