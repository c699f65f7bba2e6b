"""What an audit found, for people: the verdict in one line, the window as a picture, then every finding."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from wholebatch.audit.endings import NO_UPDATE, ending_words, failed_words, num_applied, why_no_update
from wholebatch.audit.judge.evidence import Evidence, Finding, Judgement, Severity, Window
from wholebatch.audit.picture import num_micro_batches, window_picture
from wholebatch.audit.trace import Intent, Place
from wholebatch.audit.words import first_sentence, number_of, printable, weight_text

STYLES: dict[Severity, str] = {"wrong": "red", "cost": "yellow", "note": "cyan"}
MOST_UPDATES = 8
_NARROWEST = 72


def report_text(judgement: Judgement, width: int = 100) -> str:
    """Write an audit's report as plain text.

    Args:
        judgement: of the audit.
        width: columns, 72 or more.

    Returns:
        The report, without colour codes, with a line break at its end.
    """
    stream = io.StringIO()
    render_report(judgement, Console(file=stream, width=width, highlight=False, color_system=None))
    return "".join(f"{line.rstrip()}\n" for line in stream.getvalue().splitlines())


def render_report(judgement: Judgement, console: Console) -> None:
    """Print an audit's report.

    Args:
        judgement: of the audit.
        console: where to; its width is the report's.
    """
    width = max(console.width, _NARROWEST)
    console.print(headline(judgement))
    for line in _summary(judgement):
        console.print(line)
    window = pictured_window(judgement)
    if window is not None:
        console.print()
        for line in window_picture(window, judgement.evidence, width=width):
            console.print(line, soft_wrap=True)
        others = _updates(judgement)
        if others is not None:
            console.print()
            console.print(others)
    for finding in judgement.findings:
        console.print()
        for part in _finding(finding):
            console.print(part)


def headline(judgement: Judgement) -> Text:
    """The verdict in one sentence: the gravest finding, or that there is none, or why none was reached.

    Args:
        judgement: of the audit.

    Returns:
        One line. Where the script failed it says so, unless something is wrong in what was seen.
    """
    evidence = judgement.evidence
    gravest = judgement.findings[0] if judgement.findings else None
    if gravest is not None and gravest.severity == "wrong":
        return Text(printable(first_sentence(gravest.message)), style="bold red")
    failed = failed_words(evidence)
    if judgement.verdict == "not_judged" and not (failed and not num_applied(evidence)):
        return Text(f"Not judged: {printable(_why_unjudged(judgement))}", style="bold yellow")
    if gravest is not None and judgement.verdict == "findings":
        right = "These updates are right" if failed else "The updates are right"
        words = f"{right}, at a price. {printable(first_sentence(gravest.message))}"
        return Text(f"{failed}. {words}" if failed else words, style="bold yellow")
    if failed:
        clean = "; nothing was wrong in " if num_applied(evidence) else ""
        clean += {0: "", 1: "this one"}.get(num_applied(evidence), "these")
        return Text(failed + clean, style="bold yellow")
    return Text(_clean_words(evidence), style="bold green")


def pictured_window(judgement: Judgement) -> Window | None:
    """The window that a report draws: the first that shows the gravest finding, else the first of all."""
    windows = judgement.evidence.windows
    gravest = judgement.findings[0] if judgement.findings else None
    if gravest is not None and gravest.update is not None:
        optimizers = (gravest.optimizer,) if gravest.optimizer is not None else None
        for window in windows:
            if window.index == gravest.update and (optimizers is None or window.optimizer in optimizers):
                return window
    return windows[0] if windows else None


def _why_unjudged(judgement: Judgement) -> str:
    evidence = judgement.evidence
    if not any(window.complete for window in evidence.windows):
        return why_no_update(evidence)
    if judgement.unjudged:
        return judgement.unjudged[0]
    return next((w.unjudged for w in evidence.windows if w.unjudged), "what its items weigh is not known")


def _clean_words(evidence: Evidence) -> str:
    weighed = [w for w in evidence.windows if w.lowest is not None and w.highest is not None]
    words = f"Nothing wrong in {number_of(num_applied(evidence), 'update')}"
    if not weighed:
        return words
    low = min(window.lowest for window in weighed if window.lowest is not None)
    high = max(window.highest for window in weighed if window.highest is not None)
    spread = weight_text(low, high)
    if spread == "1":
        return f"{words}: every item counts 1/N, once"
    return f"{words}: an item counts {spread} times 1/N, as the loss means it"


# What was watched ------------------------------------------------------------------------------------


def _summary(judgement: Judgement) -> Iterator[Text]:
    """How many findings of which severity; what was watched; how it ended; what could not be judged."""
    evidence = judgement.evidence
    if judgement.findings:
        yield Text.assemble(*_tally(judgement.findings))
    yield Text(_watched(evidence))
    if (intent := intent_words(evidence.intent)) is not None:
        yield Text(intent)
    for trace in evidence.traces:
        if trace.failure is not None or trace.ended in ("failed", "stalled"):
            words = ending_words(trace, evidence)
            if words.lower() != headline(judgement).plain.lower():
                yield Text(words, style="yellow")
    for reason in _unjudged(judgement):
        yield Text(f"not judged: {printable(reason)}", style="yellow")
    for reason in dict.fromkeys(reason for trace in evidence.traces for reason in trace.unseen):
        if reason not in judgement.unjudged:
            yield Text(f"not seen: {printable(reason)}", style="yellow")


def _unjudged(judgement: Judgement) -> Iterator[str]:
    """What could not be judged, but for what the first line says."""
    first = headline(judgement).plain
    reasons = list(judgement.unjudged)
    if not any(window.complete for window in judgement.evidence.windows):
        # said here with what was seen instead
        reasons = [why_no_update(judgement.evidence), *(r for r in reasons if not r.startswith(NO_UPDATE))]
    for reason in reasons:
        if first != f"Not judged: {printable(reason)}":
            yield reason


def _tally(findings: Sequence[Finding]) -> Iterator[tuple[str, str] | str]:
    """``1 wrong, 2 notes; 1 more follows from them``: each severity in its colour."""
    before = ""
    primary = [finding for finding in findings if finding.caused_by is None]
    for severity, style in STYLES.items():
        number = sum(finding.severity == severity for finding in primary)
        if number:
            plural = "wrong" if severity == "wrong" else f"{severity}s"
            yield before
            yield number_of(number, severity, plural), style
            before = ", "
    more = len(findings) - len(primary)
    if more:
        follow = "follows" if more == 1 else "follow"
        yield f"; {more} more {follow} from {'it' if len(primary) == 1 else 'them'}"


def _watched(evidence: Evidence) -> str:
    complete = [window for window in evidence.windows if window.complete]
    skipped = sum(window.skipped for window in complete)
    words = f"watched {number_of(len(complete), 'update')}"
    names = [o.name for o in evidence.traces[0].optimizers] if evidence.traces else []
    words += f" of {' and '.join(names)}" if names else ""
    words += f", {skipped:,} of them skipped" if skipped else ""
    before = evidence.traces[0].num_skipped_updates if evidence.traces and complete else 0
    words += f", after {before:,} that were not watched" if before else ""
    if len(evidence.traces) > 1:
        ranks = number_of(len(evidence.traces), "rank")
        words += f", on {ranks} ({number_of(evidence.num_replicas, 'replica')})"
    return words


def intent_words(intent: Intent) -> str | None:
    """How many micro-batches an update should have, and who says so; None where nobody does."""
    if intent.micro_batches is None:
        return None
    number = number_of(intent.micro_batches, "micro-batch", "micro-batches")
    return f"meant: {number} an update ({printable(intent.source)})"


def _updates(judgement: Judgement) -> Table | None:
    """One line for each update, where there are several; of many, the first and all with a finding."""
    windows = [window for window in judgement.evidence.windows if window.complete]
    if len(windows) < 2:
        return None
    shown = [i < MOST_UPDATES or _has_finding(w, judgement.findings) for i, w in enumerate(windows)]
    several = len({window.optimizer for window in windows}) > 1
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ["update", *(["optimizer"] if several else []), "micro-batches", "items", "total weight"]:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("weight x N", no_wrap=True)
    for is_shown, group in itertools.groupby(zip(shown, windows, strict=True), key=lambda pair: pair[0]):
        if is_shown:
            for _, window in group:
                table.add_row(*_update_cells(window, several=several))
        else:
            table.add_row("...")
    return table


def _has_finding(window: Window, findings: Sequence[Finding]) -> bool:
    return any(
        window.index in {finding.update, *finding.updates} and finding.optimizer in (None, window.optimizer)
        for finding in findings
    )


def _update_cells(window: Window, *, several: bool) -> list[str]:
    least, most = num_micro_batches(window)
    weights = "-"
    if window.skipped:
        weights = "skipped"
    elif window.lowest is not None and window.highest is not None:
        weights = weight_text(window.lowest, window.highest)
    return [
        f"{window.index:,}",
        *([f"{window.optimizer + 1}"] if several else []),
        f"{most:,}" if least == most else f"{least:,} to {most:,}",
        "-" if window.num_items is None else f"{window.num_items:,.6g}",
        "-" if window.total is None else weight_text(window.total, window.total),
        weights,
    ]


# Findings --------------------------------------------------------------------------------------------


def page_of(kind: str) -> str:
    """The page that explains a kind, from the root of the repository."""
    return f"docs/defects/{kind}.md"


def _finding(finding: Finding) -> Iterator[Text | Padding]:
    """What was seen, where, what it does, how to mend it, and where to read on."""
    title = Text.assemble(
        (finding.severity, f"bold {STYLES[finding.severity]}"), "  ", (finding.kind, "bold")
    )
    if finding.across is not None:
        title.append(f", across {finding.across.replace('_', '-')}")
    if finding.factor is not None:
        title.append(f", factor {finding.factor:.5g}")
    title.append(f"  {_which(finding)}", style="dim")
    yield title
    yield Padding(Text(printable(finding.message)), (0, 0, 0, 2))
    facts = list(_facts(finding))
    if facts:
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(overflow="fold")
        for name, text in facts:
            table.add_row(name, text)
        yield Padding(table, (0, 0, 0, 2))


def _which(finding: Finding) -> str:
    """Which updates show it."""
    if finding.update is None:
        return ""
    shown = sorted({finding.update, *finding.updates})
    return f"{'update' if len(shown) == 1 else 'updates'} {_listed(shown)}"


def _listed(numbers: Sequence[int]) -> str:
    """``2 to 4``, ``3, 5``: runs are written with their ends."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}" if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)


def _facts(finding: Finding) -> Iterable[tuple[str, RenderableType]]:
    if finding.caused_by is not None:
        yield "because", Text(f"it follows from {finding.caused_by}; mend that first")
    if finding.place is not None:
        yield "where", _where(finding.place)
    if finding.effect:
        yield "effect", Text(printable(finding.effect))
    if finding.mend and finding.caused_by is None:
        yield "mend", _code_kept(finding.mend)
    yield "page", Text(page_of(finding.kind))


def _where(place: Place) -> Group:
    line = Text(printable(place), style="cyan")
    if place.function and place.function != "<module>":
        line.append(f" in {printable(place.function)}", style="default")
    return Group(line, *([Padding(Text(printable(place.code)), (0, 0, 0, 2))] if place.code else []))


def _code_kept(text: str) -> Group:
    """Lines with their indentation, which a broken line keeps."""
    lines = [line.rstrip() for line in text.splitlines()]
    return Group(
        *(
            Padding(Text(printable(line.lstrip())), (0, 0, 0, len(line) - len(line.lstrip())))
            for line in lines
        )
    )
