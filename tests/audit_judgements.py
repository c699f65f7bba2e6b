"""Judgements written down by hand, for tests of the faces that tell them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from audit_traces import backward, clear, clip, event, step, traces
from wholebatch.audit.judge.evidence import Evidence, Finding, Judgement, MicroBatch, TermWeights, Window
from wholebatch.audit.trace import Intent, Place, RankTrace

LINE = "src/train.py:27"


def place(line: int, file: str = "src/train.py", **fields: Any) -> Place:
    """A line of the script."""
    return Place(file=file, line=line, **fields)


def rank_traces(items: Sequence[int], *, num_ranks: int = 1, num_updates: int = 1) -> list[RankTrace]:
    """What ranks see of a loop that averages the means of its micro-batches."""
    ops = []
    for _ in range(num_updates):
        ops.append(clear(detail="optimizer.zero_grad()", place=place(20)))
        for number in items:
            ops.append(backward(items=number, weight=1 / number / len(items), at=LINE))
            ops.append(event("logged", value=2.5, place=place(28)))
        ops += [clip(0.4, place=place(30)), step(place=place(31))]
    return traces(*([ops] * num_ranks))


def windows_of(
    seen: Sequence[RankTrace],
    *,
    weights: Sequence[tuple[float, float]] | None = None,
    lost: Sequence[tuple[int, int]] = (),
) -> list[Window]:
    """One window for each step, with what is said of the weights: low and high for each micro-batch."""
    num_updates = sum(e.kind == "step" for e in seen[0].events)
    return [_window(seen, number, weights, lost) for number in range(1, num_updates + 1)]


def _window(
    seen: Sequence[RankTrace],
    number: int,
    weights: Sequence[tuple[float, float]] | None,
    lost: Sequence[tuple[int, int]],
) -> Window:
    micro_batches, events, steps = {}, {}, {}
    by: dict[tuple[int, int], tuple[float, float, float]] = {}
    for trace in seen:
        rank = trace.rank
        ends = [i for i, e in enumerate(trace.events) if e.kind == "step"]
        first, last = ([-1, *ends][number - 1] + 1, ends[number - 1])
        mine = [(i, e) for i, e in enumerate(trace.events) if first <= i <= last]
        events[rank], steps[rank] = tuple(mine), trace.events[last]
        backwards = [(i, e.backward) for i, e in mine if e.backward is not None]
        micro_batches[rank] = tuple(
            MicroBatch(
                rank=rank,
                index=index,
                position=position,
                backward=seen_backward,
                kappa=0.0 if (rank, index) in lost else 1.0,
                lost="cleared" if (rank, index) in lost else "",
            )
            for index, (position, seen_backward) in enumerate(backwards)
        )
        for index, (_, seen_backward) in enumerate(backwards):
            low, high = (1.0, 1.0) if weights is None else weights[index]
            if (rank, index) in lost:
                low = high = 0.0
            by[rank, index] = (seen_backward.terms[0].levels[-1].num_units, low, high)
    num_items = sum(n for n, _, _ in by.values())
    lowest, highest = min(low for _, low, _ in by.values()), max(high for _, _, high in by.values())
    total = sum(n * (low + high) / 2 for n, low, high in by.values()) / num_items
    term = TermWeights(
        key="NllLoss/0",
        unit="item",
        num_units=num_items,
        total=total,
        lowest=lowest,
        highest=highest,
        by_micro_batch=by,
        coefficients="none",
        site=place(27),
    )
    return Window(
        index=number,
        optimizer=0,
        micro_batches=micro_batches,
        events=events,
        edges=steps,
        terms=(term,),
        total=total,
        lowest=lowest,
        highest=highest,
        num_items=num_items,
    )


UNEQUAL = Finding(
    kind="unequal_item_weights",
    severity="wrong",
    across="micro_batches",
    update=2,
    optimizer=0,
    updates=(2, 3, 5),
    message="In update 2, an item of train.py's shortest micro-batch counts 8.3 times one of the longest. "
    "Each loss is a mean over its own items.",
    effect="Short samples are learned more than long ones.",
    mend="Divide sums by the items of the update:\n    loss = sum_of_losses / num_items",
    place=place(27, function="epoch", code="loss = F.cross_entropy(x, y) / A"),
)
TOTAL = Finding(
    kind="total_weight",
    severity="wrong",
    update=2,
    factor=0.25,
    message="The items weigh 0.25 together.",
    mend="Divide once.",
    caused_by="unequal_item_weights",
)
COST = Finding(kind="memory_grows", severity="cost", message="Four graphs are alive at the step.")
NOTE = Finding(kind="coupled_samples", severity="note", message="The scores are a batch against itself.")


def judgement(
    items: Sequence[int] = (512, 64),
    *,
    verdict: str = "clean",
    findings: Sequence[Finding] = (),
    weights: Sequence[tuple[float, float]] | None = None,
    num_ranks: int = 1,
    num_updates: int = 1,
    lost: Sequence[tuple[int, int]] = (),
    intent: Intent | None = None,
    unjudged: Sequence[str] = (),
    **trace_fields: Any,
) -> Judgement:
    """A judgement on a loop of these items by micro-batch; fields of the traces by their names."""
    seen = rank_traces(items, num_ranks=num_ranks, num_updates=num_updates)
    seen = [replace(trace, **trace_fields) for trace in seen]
    evidence = Evidence(
        traces=seen,
        windows=windows_of(seen, weights=weights, lost=lost),
        intent=intent or Intent(),
        num_replicas=num_ranks,
    )
    return Judgement(
        verdict=verdict,  # type: ignore[arg-type]
        findings=tuple(findings),
        evidence=evidence,
        unjudged=tuple(unjudged),
    )
