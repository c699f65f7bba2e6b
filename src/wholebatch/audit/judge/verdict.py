"""From the traces of all ranks to a judgement: windows and weights, then the rules, then causes. No torch
here."""

from __future__ import annotations

from collections.abc import Sequence

from wholebatch.audit.judge.causes import GRAVITY, with_causes
from wholebatch.audit.judge.evidence import Evidence, Finding, Judgement, Verdict, Window
from wholebatch.audit.judge.kinds import ALL_KINDS
from wholebatch.audit.judge.reading import Rule, own
from wholebatch.audit.judge.rules_clip import (
    clip_before_reduction,
    clip_before_unscale,
    clip_inside_window,
    clip_to_negative_norm,
    scale_changed_inside_window,
)
from wholebatch.audit.judge.rules_data import (
    coupled_samples,
    duplicate_samples,
    same_randomness,
    unequal_micro_batch_counts,
)
from wholebatch.audit.judge.rules_edge import (
    clear_ignored,
    clear_inside_window,
    never_cleared,
    stale_gradients,
)
from wholebatch.audit.judge.rules_moves import (
    average_inside_window,
    parameters_changed_inside_window,
    schedule_inside_window,
    schedule_on_skipped_update,
    schedule_too_fast,
)
from wholebatch.audit.judge.rules_numbers import (
    batch_norm_per_micro_batch,
    logged_loss_differs,
    low_precision_accumulation,
    memory_grows,
)
from wholebatch.audit.judge.rules_reduction import (
    forward_outside_scope,
    not_reduced,
    reduced_every_micro_batch,
    reduced_wrong_micro_batch,
)
from wholebatch.audit.judge.rules_replay import judged_by_replay, replayed_total, replayed_unequal
from wholebatch.audit.judge.rules_steps import (
    nonfinite_gradients,
    optimizer_without_gradients,
    step_inside_window,
)
from wholebatch.audit.judge.rules_tail import tail_carried_over, tail_dropped, tail_weight
from wholebatch.audit.judge.rules_weights import total_weight, uncounted_items, unequal_item_weights
from wholebatch.audit.judge.windows import assemble
from wholebatch.audit.trace import RankTrace

RULES: tuple[Rule, ...] = (
    nonfinite_gradients,
    optimizer_without_gradients,
    clip_to_negative_norm,
    not_reduced,
    reduced_wrong_micro_batch,
    step_inside_window,
    never_cleared,
    clear_ignored,
    clear_inside_window,
    stale_gradients,
    unequal_item_weights,
    replayed_unequal,
    total_weight,
    replayed_total,
    uncounted_items,
    unequal_micro_batch_counts,
    duplicate_samples,
    tail_weight,
    tail_carried_over,
    tail_dropped,
    clip_inside_window,
    clip_before_reduction,
    clip_before_unscale,
    scale_changed_inside_window,
    parameters_changed_inside_window,
    schedule_inside_window,
    schedule_too_fast,
    schedule_on_skipped_update,
    average_inside_window,
    coupled_samples,
    same_randomness,
    forward_outside_scope,
    reduced_every_micro_batch,
    memory_grows,
    low_precision_accumulation,
    batch_norm_per_micro_batch,
    logged_loss_differs,
)


def judge(traces: Sequence[RankTrace]) -> Judgement:
    """Judge what all ranks saw of a loop.

    Args:
        traces: of all ranks.

    Returns:
        Judgement: findings with their causes, the gravest first; what could not be judged, and why.
    """
    return judge_evidence(assemble(traces))


def judge_evidence(evidence: Evidence) -> Judgement:
    """Judge windows that have been put together.

    Args:
        evidence: windows of all optimizers, their weights worked out where they can be.

    Returns:
        Judgement: as from ``judge``.
    """
    found = [finding for rule in RULES for finding in rule(evidence)]
    findings = tuple(sorted(with_causes(found), key=_place_in_report))
    return Judgement(
        verdict=_verdict(evidence, findings),
        findings=findings,
        evidence=evidence,
        unjudged=tuple(_unjudged(evidence)),
    )


def _place_in_report(finding: Finding) -> tuple[int, bool, int, int]:
    kind = ALL_KINDS.index(finding.kind)
    return GRAVITY[finding.severity], finding.caused_by is not None, kind, finding.optimizer or 0


def _verdict(evidence: Evidence, findings: Sequence[Finding]) -> Verdict:
    if any(finding.severity in ("wrong", "cost") for finding in findings):
        return "findings"
    audited = [w for w in evidence.windows if w.complete and not w.skipped and _has_micro_batches(w)]
    unknown = [w for w in audited if w.unjudged is not None or w.total is None]
    if any(w.optimizer == 0 for w in unknown) and judged_by_replay(evidence):
        unknown = [w for w in unknown if w.optimizer != 0]
    stalled = any(trace.ended == "stalled" for trace in evidence.traces)
    unseen = any(trace.unseen for trace in evidence.traces)
    return "not_judged" if unknown or not audited or stalled or unseen else "clean"


def _has_micro_batches(window: Window) -> bool:
    return any(own(window, rank) for rank in window.micro_batches)


def _unjudged(evidence: Evidence) -> list[str]:
    """Say what could not be judged, each reason once."""
    entries: dict[str, list[int]] = {}
    for window in evidence.windows:
        if window.complete and not window.skipped and _has_micro_batches(window):
            reason = window.unjudged or (
                "what its items weigh is not known" if window.total is None else ""
            )
            if reason:
                entries.setdefault(reason, []).append(window.index)
    found = [f"{_updates(numbers)}: {reason}" for reason, numbers in entries.items()]
    unseen = any(trace.unseen for trace in evidence.traces)
    if not (unseen or any(w.complete for w in evidence.windows)):
        found.append("no update was seen: no optimizer stepped while the loop was watched")
    for trace in evidence.traces:
        found += [f"rank {trace.rank}: {reason}" for reason in trace.unseen]
        if trace.ended == "stalled":
            found.append(f"rank {trace.rank} waited in a collective that others never came to")
        if trace.replayed is not None and trace.replayed.unable is not None and entries:
            found.append(f"rank {trace.rank}: no replay: {trace.replayed.unable}")
    return list(dict.fromkeys(found))


def _updates(numbers: Sequence[int]) -> str:
    unique = sorted(set(numbers))
    if len(unique) == 1:
        return f"update {unique[0]}"
    return f"updates {', '.join(map(str, unique[:-1]))} and {unique[-1]}"
