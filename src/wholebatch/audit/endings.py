"""How an audited script ended, in words: what failed, and why no update was seen."""

from __future__ import annotations

from wholebatch.audit.judge.evidence import Evidence
from wholebatch.audit.trace import RankTrace
from wholebatch.audit.words import number_of, printable

# how a judgement begins to say that there was nothing to judge
NO_UPDATE = "no update was seen"


def num_applied(evidence: Evidence) -> int:
    """How many updates were seen that the optimizer took."""
    return sum(window.complete and not window.skipped for window in evidence.windows)


def ending_words(trace: RankTrace, evidence: Evidence) -> str:
    """``the script failed: ValueError: no data, at train.py:7``, or how else it ended.

    Args:
        trace: of a rank that did not come to its end.
        evidence: that it belongs to.

    Returns:
        The words, on as many lines as the failure has.
    """
    who = f"rank {trace.rank}" if len(evidence.traces) > 1 else "the script"
    reason = "\n".join(printable(line) for line in (trace.failure or "").splitlines())
    return f"{who} {_how(trace)}" + (f": {reason}" if reason else "")


def failed_words(evidence: Evidence) -> str | None:
    """Where a rank failed or stalled: ``The script failed after 3 updates: ValueError: no data``.

    Args:
        evidence: with the traces of all ranks.

    Returns:
        Of the first such rank, with the first line of its failure and the place; None where every rank came
        to an end of its own.
    """
    failed = [trace for trace in evidence.traces if trace.ended in ("failed", "stalled")]
    if not failed:
        return None
    trace = failed[0]
    who = "The script" if len(failed) == len(evidence.traces) else f"Rank {trace.rank}"
    applied = num_applied(evidence)
    after = f" after {number_of(applied, 'update')}" if applied else ""
    lines = (trace.failure or "").splitlines()
    said = [f": {printable(lines[0]).rstrip()}"] if lines else []
    if len(lines) > 1:
        said.append(f" ... {printable(lines[-1])}" if lines[-1].startswith("at ") else " ...")
    return f"{who} {_how(trace)}{after}{''.join(said)}"


def _how(trace: RankTrace) -> str:
    if trace.ended == "exit":
        return "ended itself"
    if (trace.failure or "").startswith("KeyboardInterrupt"):
        return "was interrupted"
    return "stalled" if trace.ended == "stalled" else "failed"


def why_no_update(evidence: Evidence) -> str:
    """Say why no update was seen: it came to none, or to none that was to be watched.

    Args:
        evidence: without a complete window.

    Returns:
        The reason, with how many backwards were seen.
    """
    backwards = sum(event.kind == "backward" for trace in evidence.traces for event in trace.events)
    passed_over = max((trace.num_skipped_updates for trace in evidence.traces), default=0)
    if passed_over and not backwards:
        updates = number_of(passed_over, "update")
        return f"the script ended before the {updates} that --skip-updates passes over"
    unseen = [reason for trace in evidence.traces for reason in trace.unseen]
    if not backwards and unseen:
        return unseen[0]
    if not backwards:
        return "no optimizer stepped while the script was watched, and nothing ran backward"
    seen = number_of(backwards, "backward was seen", "backwards were seen")
    return f"no optimizer stepped while the script was watched; {seen}"
