"""What an audit found, for programs: one JSON document with a version; docs/audit-schema.md tells it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any, get_args

from wholebatch.audit.judge.evidence import (
    Evidence,
    Finding,
    Judgement,
    MicroBatch,
    Severity,
    TermWeights,
    Window,
)
from wholebatch.audit.picture import Row, num_micro_batches, window_rows
from wholebatch.audit.report import page_of
from wholebatch.audit.trace import Event, Intent, Place, RankTrace
from wholebatch.record import finite

SCHEMA_VERSION = 1


def judgement_document(judgement: Judgement, *, command: Sequence[str] = ()) -> dict[str, Any]:
    """Return an audit's result as plain JSON values.

    Args:
        judgement: of the audit.
        command: the script or module and its arguments, as they were given; empty for a function.

    Returns:
        The document of ``wholebatch audit --json``; what is not known or not finite is None.
    """
    evidence = judgement.evidence
    document: dict[str, Any] = finite(
        {
            "schema_version": SCHEMA_VERSION,
            "wholebatch": version("wholebatch"),
            "command": list(command),
            "verdict": judgement.verdict,
            "severities": {
                severity: sum(finding.severity == severity for finding in judgement.findings)
                for severity in get_args(Severity)
            },
            "ranks": len(evidence.traces),
            "replicas": evidence.num_replicas,
            "intent": _intent(evidence.intent),
            "optimizers": [o.name for o in evidence.traces[0].optimizers] if evidence.traces else [],
            "ended": [_ended(trace) for trace in evidence.traces],
            "updates": [
                _update(window, evidence.num_replicas) for window in evidence.windows if window.complete
            ],
            "left_over": [
                _update(window, evidence.num_replicas) for window in evidence.windows if not window.complete
            ],
            "findings": [_finding(finding) for finding in judgement.findings],
            "unjudged": list(judgement.unjudged),
            "unseen": _unseen(evidence),
        }
    )
    return document


def _intent(intent: Intent) -> dict[str, Any]:
    return {
        "micro_batches": intent.micro_batches,
        "global_batch_samples": intent.global_batch_samples,
        "source": intent.source or None,
        "framework": intent.framework or None,
    }


def _ended(trace: RankTrace) -> dict[str, Any]:
    return {"rank": trace.rank, "how": trace.ended, "failure": trace.failure}


def _unseen(evidence: Evidence) -> list[str]:
    return list(dict.fromkeys(reason for trace in evidence.traces for reason in trace.unseen))


def _update(window: Window, num_replicas: int) -> dict[str, Any]:
    return {
        "index": window.index,
        "optimizer": window.optimizer,
        "skipped": window.skipped,
        "micro_batches": num_micro_batches(window)[1],
        "replicas": num_replicas,
        "items": _whole(window.num_items),
        "total_weight": window.total,
        "min_weight": window.lowest,
        "max_weight": window.highest,
        "clip_factor": window.clip_factor,
        "unjudged": window.unjudged,
        "terms": [_term(term) for term in window.terms],
        "weights": [_weights(row) for rows in window_rows(window) for row in rows],
        "events": _events(window),
    }


def _term(term: TermWeights) -> dict[str, Any]:
    return {
        "key": term.key,
        "unit": term.unit,
        "items": _whole(term.num_units),
        "total_weight": term.total,
        "min_weight": term.lowest,
        "max_weight": term.highest,
        "coefficients": term.coefficients,
        "samples": term.samples,
        **_place(term.site),
    }


def _weights(row: Row) -> dict[str, Any]:
    micro_batch = row.micro_batch
    low, high = row.weights or (None, None)
    site = micro_batch.backward.site
    return {
        "rank": micro_batch.rank,
        "micro_batch": micro_batch.index + 1,
        "items": _whole(row.items),
        "min_weight": low,
        "max_weight": high,
        "kappa": micro_batch.kappa,
        "loss": micro_batch.backward.loss,
        "lost": micro_batch.lost or None,
        "carried": micro_batch.carried,
        "foreign": micro_batch.foreign,
        **_place(site[0] if site else None),
    }


def _events(window: Window) -> list[dict[str, Any]]:
    """All events of all ranks, each rank's in order; a backward says which micro-batch it was."""
    found = []
    for rank in sorted(window.events):
        at = {each.position: each for each in window.micro_batches.get(rank, ())}
        found += [
            _event(rank, event, at.get(position))
            for position, event in window.events[rank]
            if event.kind != "forward"
        ]
    return found


def _event(rank: int, event: Event, micro_batch: MicroBatch | None) -> dict[str, Any]:
    return {
        "kind": event.kind,
        "rank": rank,
        "micro_batch": None if micro_batch is None else micro_batch.index + 1,
        "value": event.value,
        "detail": event.detail or None,
        "through": event.through or None,
        **_place(event.place),
    }


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        "kind": finding.kind,
        "severity": finding.severity,
        "update": finding.update,
        "updates": list(finding.updates),
        "optimizer": finding.optimizer,
        "factor": finding.factor,
        "ratio": finding.ratio,
        "across": finding.across,
        "message": finding.message,
        "effect": finding.effect or None,
        "mend": finding.mend or None,
        **_place(finding.place),
        "caused_by": finding.caused_by,
        "page": page_of(finding.kind),
    }


def _whole(number: float | None) -> float | None:
    """A number of items, an integer where it is whole: a sum of class weights need not be."""
    return int(number) if number is not None and float(number).is_integer() else number


def _place(place: Place | None) -> Mapping[str, Any]:
    if place is None:
        return {"file": None, "line": None}
    return {"file": place.file, "line": place.line}
