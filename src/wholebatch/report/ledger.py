"""The ledger of a plan: lines for people, findings for both people and programs, and the JSON.

Floor 6, but it needs no torch: ``wholebatch plan`` answers at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil
from typing import Any

from wholebatch.budget import MICRO_BATCHES_IN_OWN_DTYPE
from wholebatch.epochs import EpochLedger, Interval, IntervalMove, PlanComparison
from wholebatch.plan import BatchPlan
from wholebatch.report.words import number_of

# Of the JSON of ``wholebatch plan``.
SCHEMA_VERSION = 1
# A pipeline that idles more than a quarter of its ideal time is worth a word.
_LARGE_BUBBLE = 0.25
# A tail under a tenth of the global batch makes an update at least three times as noisy.
_SMALL_TAIL = 0.1

Finding = dict[str, str]


def plan_document(
    plan: BatchPlan,
    *,
    epochs: EpochLedger | None = None,
    intervals: Sequence[Interval] = (),
    comparison: PlanComparison | None = None,
) -> dict[str, Any]:
    """Return the JSON of ``wholebatch plan``: the plan's own keys, and what was asked beside it."""
    return {
        "schema_version": SCHEMA_VERSION,
        "command": "plan",
        **plan.to_dict(),
        "epochs": epochs.to_dict() if epochs else None,
        "intervals": {each.name: each.to_dict() for each in intervals},
        "against": comparison.to_dict() if comparison else None,
        "findings": plan_findings(plan, epochs=epochs, intervals=intervals),
    }


def plan_findings(
    plan: BatchPlan, *, epochs: EpochLedger | None = None, intervals: Sequence[Interval] = ()
) -> list[Finding]:
    """Return what is worth knowing about a plan, each as {"kind", "message"}; empty if nothing is."""
    found = [*_layout_findings(plan), *_pipeline_findings(plan)]
    if epochs:
        found += _tail_findings(epochs)
    found += [
        _finding("interval_rounded_up", _rounded_up(each, plan)) for each in intervals if each.rounded_up
    ]
    if epochs:
        found += _reach_findings(epochs, intervals)
    return found


def _finding(kind: str, message: str) -> Finding:
    return {"kind": kind, "message": message}


def _layout_findings(plan: BatchPlan) -> Iterable[Finding]:
    per_replica, ranks = plan.layout.ranks_per_replica, plan.layout.ranks
    micro_batch, window = plan.micro_batch_samples, plan.micro_batches_per_window
    for name in plan.assumed:
        number = getattr(plan, name)
        yield _finding("assumed", f"{name} was not given and does not follow: {number} is assumed")
    if per_replica > 1:
        wrong = micro_batch * window * ranks
        yield _finding(
            "ranks_are_not_replicas",
            f"{per_replica} ranks share one replica and see the same samples: {ranks} ranks make a global "
            f"batch of {plan.global_batch_samples} samples, not {wrong}",
        )
    if window == 1:
        yield _finding(
            "no_accumulation",
            f"one micro-batch per window accumulates nothing: each replica needs memory for all of its "
            f"{micro_batch} samples at once",
        )


def _pipeline_findings(plan: BatchPlan) -> Iterable[Finding]:
    stages, window = plan.layout.pipeline_parallel, plan.micro_batches_per_window
    if stages == 1:
        return
    bubble = plan.pipeline_bubble_fraction
    if plan.layout.pipeline_schedule == "1f1b" and window < stages:
        yield _finding(
            "fewer_micro_batches_than_stages",
            f"{number_of(window, 'micro-batch', 'micro-batches')} cannot fill {stages} stages, and torch's "
            f"own 1F1B schedule refuses fewer micro-batches than stages",
        )
    if bubble is None:
        yield _finding(
            "pipeline_bubble",
            f"zero_bubble fills {stages} stages from {2 * stages - 1} micro-batches per window on; with "
            f"{window} it idles, and how long is not known here",
        )
    elif bubble > _LARGE_BUBBLE:
        multiple = plan.layout.micro_batch_multiple
        enough = ceil(bubble * window / _LARGE_BUBBLE / multiple) * multiple
        yield _finding(
            "pipeline_bubble",
            f"the pipeline idles for {_share(bubble)} its ideal time; {enough} micro-batches per "
            f"window bring that to {_percent(_LARGE_BUBBLE)} or less",
        )


def _tail_findings(epochs: EpochLedger) -> Iterable[Finding]:
    plan, tail = epochs.plan, epochs.tail_samples
    samples = plan.global_batch_samples
    all_tail = epochs.dataset_samples < samples
    if all_tail:
        yield _finding(
            "no_full_global_batch",
            f"the data set has {number_of(epochs.dataset_samples, 'sample')} and a global batch {samples}: "
            f"no update has a full one, each is the tail of an epoch; a global batch of at most "
            f"{epochs.dataset_samples} would be full",
        )
    if plan.tail == "drop" and tail:
        yield _finding(
            "samples_dropped",
            f"every epoch leaves out {number_of(tail, 'sample')} of {epochs.dataset_samples}, "
            f"{tail * epochs.epochs} in all",
        )
        return
    if 0 < tail < samples * _SMALL_TAIL and not all_tail:
        yield _finding(
            "small_tail",
            f"the last update of every epoch has {number_of(tail, 'sample')} where others have {samples}: "
            f"exact, but with about {samples / tail:.3g} times the variance in its gradient; tail 'drop' "
            f"leaves it out",
        )
    if 0 < tail < plan.replicas:
        yield _finding(
            "tail_smaller_than_replicas",
            f"the tail of {number_of(tail, 'sample')} leaves {plan.replicas - tail} of {plan.replicas} "
            f"replicas without any; they take part in the reduction with nothing to add",
        )


def _reach_findings(epochs: EpochLedger, intervals: Sequence[Interval]) -> Iterable[Finding]:
    total = epochs.total_updates
    for each in intervals:
        if each.name == "warmup" and each.updates >= total:
            yield _finding(
                "warmup_never_ends", f"warm-up takes {each.updates} updates of a run that has {total}"
            )
        elif each.updates > total:
            yield _finding(
                "interval_never_reached",
                f"{each.name} every {each.updates} updates never comes in a run that has {total}",
            )


def _rounded_up(each: Interval, plan: BatchPlan) -> str:
    return (
        f"{each.name} of {each.given} samples ends inside an update of {plan.global_batch_samples}: it is "
        f"rounded up to {number_of(each.updates, 'update')}, {each.samples} samples"
    )


def plan_text(
    plan: BatchPlan,
    *,
    epochs: EpochLedger | None = None,
    intervals: Sequence[Interval] = (),
    comparison: PlanComparison | None = None,
    ragged: bool = False,
    reduces_each: bool = False,
) -> str:
    """Return the ledger as text for people, ending in a line break.

    Args:
        plan: what the ledger is of.
        epochs, intervals, comparison: what to show beside it.
        ragged: True where samples are known to have unequal numbers of items, so that there is no
            number of items per sample to ask for.
        reduces_each: True where the engine is known to reduce in every micro-batch.
    """
    sections = [("One update", _update_rows(plan, ragged, reduces_each))]
    if epochs:
        sections.append((f"{number_of(epochs.epochs, 'epoch')} of the data", _epoch_rows(epochs)))
    if intervals:
        sections.append(("Intervals, from the start of training", _interval_rows(intervals, epochs)))
    if comparison:
        sections.append((_comparison_title(comparison), _comparison_rows(comparison)))
    parts = ["\n".join([title, *columns_of(rows)]) for title, rows in sections]
    findings = plan_findings(plan, epochs=epochs, intervals=intervals)
    if findings:
        parts.append(
            "\n".join(["Findings", *(f"  {each['kind']}: {each['message']}" for each in findings)])
        )
    return "\n\n".join(parts) + "\n"


Row = tuple[str, str, str]


def columns_of(rows: list[Row]) -> list[str]:
    """Align (label, number, remark); the numbers to the right."""
    label_width = max(len(label) for label, _, _ in rows)
    number_width = max(len(number) for _, number, _ in rows)
    return [
        f"  {label:<{label_width}}  {number:>{number_width}}  {remark}".rstrip()
        for label, number, remark in rows
    ]


def _update_rows(plan: BatchPlan, ragged: bool, reduces_each: bool) -> list[Row]:
    layout, window, replicas = plan.layout, plan.micro_batches_per_window, plan.replicas
    degrees = f"{layout.tensor_parallel} x {layout.pipeline_parallel} x {layout.context_parallel}"
    factors = f"{plan.micro_batch_samples} x {window} x {replicas}"
    items, per_sample = plan.global_batch_items, plan.items_per_sample
    rows = [
        ("ranks", f"{layout.ranks:,}", "processes of the job"),
        ("micro-batch, m", f"{plan.micro_batch_samples:,}", "samples through one forward of a replica"),
        ("window, A", f"{window:,}", "micro-batches on every rank, one after another"),
        ("replicas, D", f"{replicas:,}", f"ranks / (tensor x pipeline x context = {degrees})"),
        ("global batch", f"{plan.global_batch_samples:,}", f"samples = m x A x D = {factors}"),
    ]
    if items is None and ragged:
        rows.append(("items", "-", "differ from update to update: N is counted in each"))
    elif items is None:
        rows.append(
            ("items", "-", "not known ahead: give the items per sample, if all have the same number")
        )
    else:
        rows.append(("items", f"{items:,}", f"at {per_sample:,} items in every sample"))
    rows.append(("micro-batches", f"{plan.micro_batches_per_update:,}", "over all replicas = A x D"))
    rows.append(_reductions(plan, reduces_each))
    if window > MICRO_BATCHES_IN_OWN_DTYPE:
        rows.append(accumulation("as"))
    if layout.pipeline_parallel > 1:
        rows.append(_pipeline_row(plan))
    return rows


def accumulation(word: str) -> Row:
    """What half-precision gradients are added up in, "as" or "where" A is large enough."""
    most = MICRO_BATCHES_IN_OWN_DTYPE
    return (
        "accumulation",
        "float32",
        f"of bfloat16 and float16 gradients, {word} A > {most}: 4 bytes each, not 2",
    )


def _reductions(plan: BatchPlan, reduces_each: bool) -> Row:
    each = plan.naive_reductions_per_update
    remark = f"at the last micro-batch; {each:,} if every micro-batch were reduced"
    if each == 0:
        remark = "one replica has nobody to reduce with"
    elif each == 1:
        remark = "at the only micro-batch"
    elif reduces_each:
        remark = IN_EACH
    return ("gradient reductions", f"{each if reduces_each else plan.reductions_per_update:,}", remark)


IN_EACH = "in every micro-batch, so that no rank holds a whole gradient"


def _pipeline_row(plan: BatchPlan) -> Row:
    layout, bubble = plan.layout, plan.pipeline_bubble_fraction
    if layout.pipeline_schedule == "zero_bubble":
        formula = "if forward, input gradient and weight gradient take equal times"
    else:
        interleaved = layout.pipeline_schedule == "interleaved_1f1b"
        divisor = "(v x A)" if interleaved else "A"
        window = plan.micro_batches_per_window
        below = f"({layout.pipeline_virtual_stages} x {window})" if interleaved else str(window)
        formula = f"(p - 1) / {divisor} = {layout.pipeline_parallel - 1} / {below}"
    schedule = layout.pipeline_schedule
    if bubble is not None and bubble > 1:
        times = f"idle time is {bubble:.3g} times the ideal time, {schedule}: {formula}"
        return ("pipeline bubble", f"{bubble:.3g} x", times)
    number = "-" if bubble is None else _percent(bubble)
    return ("pipeline bubble", number, f"of the ideal time idle, {schedule}: {formula}")


def _epoch_rows(epochs: EpochLedger) -> list[Row]:
    samples, tail = epochs.plan.global_batch_samples, epochs.tail_samples
    if tail == 0:
        fate = "nothing is left over"
    elif epochs.plan.tail == "drop":
        fate = "samples left over, dropped in every epoch"
    else:
        fate = "samples in the last update of every epoch, with its own denominator"
    whole = f"{epochs.dataset_samples // samples:,} of {samples:,} samples"
    if epochs.dataset_samples < samples:
        whole = f"of the tail alone: no global batch of {samples:,} samples is full"
    elif epochs.updates_per_epoch > epochs.dataset_samples // samples:
        whole += ", and one of the tail"
    rows = [
        ("samples in the data", f"{epochs.dataset_samples:,}", "each once in an epoch"),
        ("updates per epoch", f"{epochs.updates_per_epoch:,}", whole),
        ("tail", f"{tail:,}", fate),
        ("total updates", f"{epochs.total_updates:,}", "in all epochs"),
        ("total samples", f"{epochs.total_samples:,}", "that updates see, in all epochs"),
    ]
    dropped = epochs.samples_dropped_per_epoch * epochs.epochs
    if dropped:
        rows.append(("samples dropped", f"{dropped:,}", "in all epochs"))
    return rows


def _interval_rows(intervals: Sequence[Interval], epochs: EpochLedger | None) -> list[Row]:
    rows = []
    for each in intervals:
        remark = f"updates = {each.samples:,} samples"
        if epochs and each.name != "warmup":
            remark += f"; {number_of(epochs.total_updates // each.updates, 'time')} in the run"
        rows.append(
            (each.name if each.name == "warmup" else f"{each.name} every", f"{each.updates:,}", remark)
        )
    return rows


def _comparison_title(comparison: PlanComparison) -> str:
    first, second = comparison.first, comparison.second
    names = f"{_factors(first)} and {_factors(second)}"
    if comparison.same_update:
        return f"Against another plan: {names} are the same update"
    return (
        f"Against another plan: {names} are different updates, of {first.global_batch_samples:,} and "
        f"{second.global_batch_samples:,} samples"
    )


def _comparison_rows(comparison: PlanComparison) -> list[Row]:
    first, second = comparison.first, comparison.second
    rows = [
        _pair("global batch", first.global_batch_samples, second.global_batch_samples, "samples"),
        _pair(
            "window, A", first.micro_batches_per_window, second.micro_batches_per_window, "micro-batches"
        ),
        _pair(
            "gradient reductions", first.reductions_per_update, second.reductions_per_update, "per update"
        ),
    ]
    mine, other = comparison.first_epochs, comparison.second_epochs
    if mine and other:
        dropped = mine.samples_dropped_per_epoch, other.samples_dropped_per_epoch
        rows.append(
            _pair("updates per epoch", mine.updates_per_epoch, other.updates_per_epoch, "of the data")
        )
        rows.append(_pair("total updates", mine.total_updates, other.total_updates, "in all epochs"))
        if any(dropped):
            rows.append(_pair("samples dropped", *dropped, "per epoch"))
    rows += [_move_row(move) for move in comparison.intervals]
    return rows


def _pair(label: str, first: int, second: int, unit: str) -> Row:
    return (label, f"{first:,} -> {second:,}", unit)


def _move_row(move: IntervalMove) -> Row:
    first = move.first
    if not move.moves:
        return (
            first.name,
            f"{first.updates:,} -> {first.updates:,}",
            f"updates = {first.samples:,} samples",
        )
    return (
        first.name,
        f"{first.updates:,} -> {move.same_samples.updates:,}",
        f"updates for the same {first.samples:,} samples; left at {first.updates:,} it would be "
        f"{move.same_updates.samples:,} samples",
    )


def _factors(plan: BatchPlan) -> str:
    return f"{plan.micro_batch_samples} x {plan.micro_batches_per_window} x {plan.replicas}"


def _share(bubble: float) -> str:
    """``75.0% of`` or, above the whole, ``1.75 times``."""
    return f"{_percent(bubble)} of" if bubble <= 1 else f"{bubble:.3g} times"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"
