"""``wholebatch plan``: an update, a run and another plan beside it, from the command line's options."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from inspect import signature
from shutil import get_terminal_size
from typing import Any, get_args

from wholebatch.epochs import EpochLedger, IntervalName, Unit, compare_plans, resolve_interval
from wholebatch.errors import PlanError
from wholebatch.plan import BatchPlan, plan_batch
from wholebatch.report.ledger import plan_document, plan_text
from wholebatch.report.output import text_stream, write_json
from wholebatch.report.words import in_columns


def plan_command(given: Mapping[str, Any]) -> int:
    """Plan a global batch and tell its ledger.

    Args:
        given: the options by name: those of ``plan_batch``; ``dataset_samples`` and ``epochs``;
            ``warmup_updates`` or ``warmup_samples``, and so on for every interval; ``against``;
            ``json_target``. None for one that is not given.

    Returns:
        0.

    Raises:
        PlanError: a remainder, a contradiction, or an option that says nothing without another.
    """
    intervals = _intervals(given)
    made = plan_batch(**{name: given[name] for name in signature(plan_batch).parameters})
    data, epochs, against = given["dataset_samples"], given["epochs"], given["against"]
    if epochs is not None and data is None:
        raise PlanError(f"--epochs {epochs} needs --dataset-samples: how many samples make an epoch?")
    passes = 1 if epochs is None else epochs
    extras: dict[str, Any] = {
        "epochs": None if data is None else EpochLedger(plan=made, dataset_samples=data, epochs=passes),
        "intervals": [
            resolve_interval(made, name, number, unit, dataset_samples=data)
            for name, (number, unit) in intervals.items()
        ],
    }
    if against is not None:
        other = _other_plan(against, made)
        extras["comparison"] = compare_plans(
            made, other, dataset_samples=data, epochs=passes, intervals=intervals
        )
    stream, text = text_stream(given["json_target"]), plan_text(made, **extras)
    if stream.isatty():
        text = in_columns(text, get_terminal_size().columns)
    stream.write(text)
    write_json(plan_document(made, **extras), given["json_target"])
    return 0


def _intervals(given: Mapping[str, Any]) -> dict[IntervalName, tuple[int, Unit]]:
    """Gather ``--log-updates 10`` and its like; PlanError where one is given in both units."""
    found: dict[IntervalName, tuple[int, Unit]] = {}
    names: tuple[IntervalName, ...] = get_args(IntervalName)
    for name in names:
        updates, samples = given[f"{name}_updates"], given[f"{name}_samples"]
        if updates is not None and samples is not None:
            raise PlanError(
                f"--{name}-updates {updates} and --{name}-samples {samples} set one thing twice; give one"
            )
        if updates is not None:
            found[name] = (updates, "updates")
        elif samples is not None:
            found[name] = (samples, "samples")
    return found


def _other_plan(against: str, made: BatchPlan) -> BatchPlan:
    """Read ``mxAxD`` as a plan with the same degrees, items per sample and tail as ``made``."""
    if not re.fullmatch(r"[0-9]{1,99}x[0-9]{1,99}x[0-9]{1,99}", against):
        raise PlanError(
            f"--against {against!r} is not micro-batch samples x micro-batches x replicas, such as 4x8x2"
        )
    micro_batch, window, replicas = (int(number) for number in against.split("x"))
    layout = replace(made.layout, ranks=replicas * made.layout.ranks_per_replica)
    return replace(
        made, layout=layout, micro_batch_samples=micro_batch, micro_batches_per_window=window, assumed=()
    )
