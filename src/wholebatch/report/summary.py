"""The facts of a run as a program reads them, and of the checkpoints that lie beside its records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wholebatch.checkpoint_folder import damage_in, facts_in
from wholebatch.record import UpdateRecord, unsupervised_share
from wholebatch.run_folder import Run

LAST_UPDATES_SHOWN = 5
# Of the JSON of ``wholebatch show`` and ``wholebatch train``.
SCHEMA_VERSION = 1
CHECKPOINTS_FOLDER = "checkpoints"


def run_summary(run: Run) -> dict[str, Any]:
    """The facts of a run as JSON-ready data; its keys are promised within a schema version.

    ``unsupervised_share = 1 - items / positions`` and ``items_per_second = items / seconds`` over all
    updates; ``positions`` is 0, and the share None, where those of some update are not known.
    ``loss_per_item`` gives that of the first and last update, and the lowest; ``accumulated_in`` how many
    updates added gradients up in each dtype.
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
        "unsupervised_share": unsupervised_share(counters.items, positions),
        "reductions": sum(r.reductions for r in run.records),
        "accumulated_in": Counter(r.accumulated_in for r in run.records if r.accumulated_in is not None),
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
        "checkpoints": found_checkpoints(run.folder),
        "damaged_checkpoints": damaged_checkpoints(run.folder),
        "resumptions": [each.to_dict() for each in run.resumptions],
        "end": run.end.to_dict() if run.end else None,
        "torn_line": run.torn_line,
        "disorder": run.disorder,
    }


def found_checkpoints(folder: Path) -> list[dict[str, Any]]:
    """The checkpoints in a run's folder by update, as their manifests tell of them.

    Whether the files of one are whole is found out when it is loaded; one whose manifest can't be trusted
    is left to ``damaged_checkpoints``.

    Args:
        folder: of the run.

    Returns:
        Of each ``name``, ``created_at``, ``updates_attempted`` and ``samples`` (of its counters) and
        ``score``, None where it has none.
    """
    return [
        {
            "name": facts.path.name,
            "created_at": facts.created_at,
            "updates_attempted": facts.updates_attempted,
            "samples": facts.samples,
            "score": facts.score,
        }
        for facts in facts_in(folder / CHECKPOINTS_FOLDER)
    ]


def damaged_checkpoints(folder: Path) -> list[dict[str, str]]:
    """The checkpoints in a run's folder whose manifest can't be trusted, with ``name`` and ``problem``."""
    found = damage_in(folder / CHECKPOINTS_FOLDER)
    return [{"name": path.name, "problem": problem} for path, problem in found]


def _peak_memory(records: Sequence[UpdateRecord]) -> int | None:
    return max((max(r.peak_memory_bytes) for r in records if r.peak_memory_bytes), default=None)
