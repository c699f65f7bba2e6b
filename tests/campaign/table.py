"""The verdicts as a table of Markdown, between two markers of docs/faults.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from campaign.trial import Verdict, exit_code

BEGIN, END = "<!-- the campaign's table begins -->", "<!-- the campaign's table ends -->"
SHARED_BEGIN, SHARED_END = (f"<!-- the table of shared models {word} -->" for word in ("begins", "ends"))


def table(verdicts: Sequence[Verdict], *, by_ranks: bool = False) -> str:
    """One row for each kind of fault, or of ranks, and one for all."""
    rows: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        rows.setdefault(verdict.case.setup.strategy if by_ranks else verdict.case.kind, []).append(verdict)
    first = "ranks" if by_ranks else "kind"
    lines = [
        f"| {first} | places | layouts | runs | lost | twice | hangs | unreadable | exit codes |",
        "|---|---|---|---|---|---|---|---|---|",
        *(_row(name, of_row) for name, of_row in rows.items()),
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


def write_into(document: Path, text: str, begin: str = BEGIN, end: str = END) -> None:
    """Replace what is between two markers of a document."""
    before, rest = document.read_text().split(begin)
    _, after = rest.split(end)
    document.write_text(f"{before}{begin}\n{text}\n{end}{after}")
