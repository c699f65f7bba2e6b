"""What the replay of one window says of weights that the loss itself does not tell. No torch here."""

from __future__ import annotations

from collections.abc import Iterable

from wholebatch.audit.judge.evidence import Evidence, Finding, Window
from wholebatch.audit.judge.reading import finding, number, seen_micro_batches
from wholebatch.audit.trace import RankTrace, Replayed

LEAST_TOLERANCE = 1e-3
MARGIN = 10.0  # a replay's distance that rounding explains, times this, is still rounding


def unreadable_window(evidence: Evidence, trace: RankTrace) -> Window | None:
    """Return the replayed window of the first optimizer, where its weights are not known otherwise."""
    if trace.replayed is None or trace.replayed.unable is not None:
        return None
    for window in evidence.windows:
        if window.optimizer == 0 and window.index == trace.replayed.update and window.complete:
            return window if window.total is None or window.unjudged is not None else None
    return None


def _tolerance(replayed: Replayed) -> float:
    return max(LEAST_TOLERANCE, MARGIN * replayed.rounding)


def is_faithful(replayed: Replayed) -> bool:
    """Whether the replay, micro-batch by micro-batch, came out as the loop did."""
    return replayed.split_difference <= _tolerance(replayed)


def judged_by_replay(evidence: Evidence) -> bool:
    """Whether a replay stands in for weights that could not be read from the loss.

    Returns:
        True where one replica was replayed faithfully and a total can be told from it: for a sum only
        where samples are its items.
    """
    if evidence.num_replicas > 1:
        return False
    for trace in evidence.traces:
        if unreadable_window(evidence, trace) is not None and trace.replayed is not None:
            replayed = trace.replayed
            by_samples = abs(replayed.factor * replayed.num_samples - 1) <= _tolerance(replayed)
            return is_faithful(replayed) and (not replayed.additive or by_samples)
    return False


def replayed_unequal(evidence: Evidence) -> Iterable[Finding]:
    """No multiple of the big batch's gradient is what the loop's micro-batches add up to."""
    for trace in evidence.traces:
        window = unreadable_window(evidence, trace)
        replayed = trace.replayed
        if window is None or replayed is None or not is_faithful(replayed):
            continue
        several = seen_micro_batches(window) > 1 and not _has_quotient(window)
        limit = 10 * _tolerance(replayed)
        if several and replayed.difference > limit:
            yield finding(
                evidence,
                "unequal_item_weights",
                [window],
                f"In update {window.index}, replayed as one big batch, the gradient is "
                f"{replayed.difference:.0%} away from every multiple of the big batch's: micro-batches do "
                f"not count by their items.",
                across="micro_batches",
            )
            return


def _has_quotient(window: Window) -> bool:
    backwards = [m.backward for group in window.micro_batches.values() for m in group]
    return any(term.quotient for backward in backwards for term in backward.terms)


def replayed_total(evidence: Evidence) -> Iterable[Finding]:
    """What was read is a multiple of the big batch's gradient, and not 1."""
    for trace in evidence.traces if evidence.num_replicas == 1 else ():
        window = unreadable_window(evidence, trace)
        replayed = trace.replayed
        if window is None or replayed is None or not is_faithful(replayed) or replayed.additive:
            continue
        factor = replayed.factor
        near = abs(factor - 1) <= _tolerance(replayed)
        if not near and replayed.difference <= 10 * _tolerance(replayed) and seen_micro_batches(window) > 1:
            yield finding(
                evidence,
                "total_weight",
                [window],
                f"In update {window.index}, replayed as one big batch, the optimizer read "
                f"{number(factor)} times the big batch's gradient.",
                factor=factor,
            )
            return
