"""Every rule on a synthetic loop that has its fault, and on a similar one that is right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from audit_traces import (
    Op,
    backward,
    clear,
    clip,
    event,
    level,
    pass_begins,
    pass_ends,
    reduce,
    skip,
    step,
    term,
    trace,
    traces,
    unscale,
)
from wholebatch.audit.judge.evidence import Judgement
from wholebatch.audit.judge.kinds import ALL_KINDS, KINDS
from wholebatch.audit.judge.verdict import judge
from wholebatch.audit.trace import RankTrace

Traces = list[RankTrace]


def window(
    *items: float, weight: float | None = None, end: Sequence[Op] = (), **fields: object
) -> list[Op]:
    """One update: a backward for each number of items, 1/N each or ``weight``, step, clear."""
    total = sum(items)
    each = weight if weight is not None else 1 / total
    ops = [backward(items=n, weight=each, **fields) for n in items]
    return [*ops, *end, step(num_parameters=4), clear()]


def repeated(*ops: Op, times: int = 3) -> Traces:
    return trace(*list(ops) * times)


def between(made: Op, **fields: object) -> Traces:
    """Something between the two backwards of each window."""
    first, second = (backward(items=5, weight=0.1, **fields) for _ in range(2))
    return repeated(first, made, second, step(num_parameters=4), clear())


def at_edge(made: Op, **fields: object) -> Traces:
    """The same after the step."""
    first, second = (backward(items=5, weight=0.1, **fields) for _ in range(2))
    return repeated(first, second, step(num_parameters=4), made, clear())


def samples(*numbers: int, **fields: object) -> Op:
    return backward(items=4, weight=1 / 8, samples=numbers, shape=(4, 8), **fields)


def on_ranks(
    first: Sequence[Op], second: Sequence[Op] | None = None, times: int = 3, **fields: object
) -> Traces:
    return traces(list(first) * times, list(first if second is None else second) * times, **fields)


def ddp(early: dict[str, object], last: dict[str, object], weight: float = 0.2) -> Traces:
    """Two replicas, two micro-batches, DDP's mean: each item 1/20 when right."""
    ops = [
        backward(items=5, weight=weight / 2, **early),
        backward(items=5, weight=weight / 2, **last),
        step(num_parameters=4),
        clear(),
    ]
    return on_ranks(ops)


HELD = {"holds_reduction": True}
SYNCED = {"holds_reduction": False, "reduces": True, "num_collectives": 1}
RIGHT_DDP = ddp(HELD, SYNCED)
TAIL = [*window(5, 5), *window(5, 5), *window(5, weight=0.1)]
SCALED = {"loss_scale": 128.0}


def scaled(*ops: Op) -> Traces:
    made = [backward(items=5, weight=12.8, **SCALED) for _ in range(2)]
    return repeated(*made, *ops, step(num_parameters=4), clear())


def skipped(moves: bool) -> Traces:
    move = event("schedule", value=0.1, optimizers=(0,), detail="LambdaLR.step()")
    good = [
        backward(items=5, weight=0.1),
        backward(items=5, weight=0.1),
        step(num_parameters=4),
        move,
        clear(),
    ]
    bad = [backward(items=5, weight=0.1), backward(items=5, weight=0.1), skip(), clear()]
    return trace(*good, *bad, *([move] if moves else []), *good, *good)


def logged(value: float) -> Traces:
    ops = [
        backward(items=2, weight=1 / 8, loss=0.25),
        backward(items=6, weight=1 / 8, loss=2.25),
        step(num_parameters=4),
        event("logged", value=value),
        clear(),
    ]
    return repeated(*ops)


def coupled(num_micro_batches: int) -> Traces:
    square = term(level(4, 1 / 4 / num_micro_batches), square=True)
    made = [backward(terms=[square]) for _ in range(num_micro_batches)]
    return repeated(*made, step(num_parameters=4), clear())


def carried_over() -> list[Op]:
    rest = [backward(items=5, weight=0.1)]
    first = [pass_begins(), *window(5, 5), *rest, pass_ends(), pass_begins()]
    return [*first, *window(5, 5, weight=0.1), *rest, pass_ends(), pass_begins(), *window(5, 5, weight=0.1)]


def dropped(steps_on_rest: bool) -> Traces:
    rest = window(5) if steps_on_rest else [backward(items=5, weight=0.1)]
    return trace(pass_begins(), *window(5, 5), *window(5, 5), *rest, pass_ends(), ended="finished")


def early_steps() -> Traces:
    one = [backward(items=5, weight=0.1), step(num_parameters=4)]
    return repeated(*one, *one, clear())


def gan(clears: bool) -> Traces:
    """Two optimizers; the generator's loss also reaches the discriminator's parameters 2 and 3."""
    one = [
        *([clear(1)] if clears else []),
        backward(items=5, at="gan.py:5", to=[2, 3]),
        step(1, num_parameters=2),
    ]
    two = [clear(0), backward(items=5, at="gan.py:9"), step(0, num_parameters=2)]
    return trace(*[*one, *two] * 3, optimizers=[(0, 1), (2, 3)])


CASES: dict[str, tuple[Callable[[], Traces], Callable[[], Traces]]] = {
    "nonfinite_gradients": (
        lambda: repeated(backward(items=5), step(gradient_norm=float("nan")), clear()),
        lambda: repeated(backward(items=5), step(gradient_norm=1.0), clear()),
    ),
    "optimizer_without_gradients": (
        lambda: repeated(backward(items=5), clear(), step(num_parameters=4, num_without_gradient=4)),
        lambda: repeated(backward(items=5), step(num_parameters=4, num_without_gradient=1), clear()),
    ),
    "clip_to_negative_norm": (
        lambda: repeated(*window(5, 5, end=[clip(-0.5, -1.0)])),
        lambda: repeated(*window(5, 5, end=[clip(0.5, 1.0)])),
    ),
    "not_reduced": (lambda: ddp(HELD, HELD), lambda: RIGHT_DDP),
    "reduced_wrong_micro_batch": (lambda: ddp(SYNCED, HELD), lambda: RIGHT_DDP),
    "step_inside_window": (early_steps, lambda: repeated(*window(5, 5))),
    "never_cleared": (
        lambda: repeated(*window(5, 5)[:-1]),
        lambda: repeated(clear(), *window(5, 5)[:-1]),
    ),
    "clear_ignored": (
        lambda: repeated(*window(5, 5)[:-1], clear(really=False)),
        lambda: repeated(clear(really=False), *window(5, 5)),
    ),
    "clear_inside_window": (lambda: between(clear()), lambda: at_edge(clear())),
    "stale_gradients": (lambda: gan(False), lambda: gan(True)),
    "unequal_item_weights": (
        lambda: repeated(backward(items=2, weight=1 / 4), backward(items=6, weight=1 / 12), *window(5)[1:]),
        lambda: repeated(*window(2, 6)),
    ),
    "total_weight": (lambda: repeated(*window(5, 5, weight=0.2)), lambda: repeated(*window(5, 5))),
    "uncounted_items": (lambda: between(clear()), lambda: repeated(*window(5, 5))),
    "unequal_micro_batch_counts": (
        lambda: on_ranks(
            [*window(5, 5, 5, weight=1 / 15)[:3], reduce(), step(), clear()],
            [*window(5, 5, weight=1 / 10)[:2], reduce(), step(), clear()],
        ),
        lambda: RIGHT_DDP,
    ),
    "duplicate_samples": (
        lambda: on_ranks([samples(1, 2, 3, 4), samples(5, 6, 7, 8, reduces=True), step(), clear()]),
        lambda: on_ranks(
            [samples(1, 2, 3, 4), samples(5, 6, 7, 8, reduces=True), step(), clear()],
            [samples(11, 12, 13, 14), samples(15, 16, 17, 18, reduces=True), step(), clear()],
        ),
    ),
    "tail_weight": (lambda: trace(*TAIL), lambda: trace(*window(5, 5), *window(5, 5), *window(5))),
    "tail_carried_over": (lambda: trace(*carried_over()), lambda: trace(*window(5, 5), *window(5, 5, 5))),
    "tail_dropped": (lambda: dropped(False), lambda: dropped(True)),
    "clip_inside_window": (lambda: between(clip(0.5)), lambda: between(clip(1.0, float("inf")))),
    "clip_before_reduction": (
        lambda: on_ranks([backward(items=5), clip(0.5), reduce(from_python=True), step(), clear()]),
        lambda: on_ranks([backward(items=5), reduce(from_python=True), clip(0.5), step(), clear()]),
    ),
    "clip_before_unscale": (
        lambda: scaled(clip(0.5), unscale(128.0)),
        lambda: scaled(unscale(128.0), clip(0.5)),
    ),
    "scale_changed_inside_window": (
        lambda: between(event("scale_update", value=256.0)),
        lambda: at_edge(event("scale_update", value=256.0)),
    ),
    "parameters_changed_inside_window": (
        lambda: between(event("parameters_changed")),
        lambda: at_edge(event("parameters_changed")),
    ),
    "schedule_inside_window": (
        lambda: between(event("schedule", value=0.1)),
        lambda: at_edge(event("schedule", value=0.1)),
    ),
    "schedule_too_fast": (
        lambda: repeated(*window(5, 5), *[event("schedule", value=0.1, detail="StepLR.step()")] * 2),
        lambda: repeated(
            *window(5, 5),
            event("schedule", detail="StepLR.step()"),
            event("schedule", detail="Warmup.step()"),
        ),
    ),
    "schedule_on_skipped_update": (lambda: skipped(True), lambda: skipped(False)),
    "average_inside_window": (lambda: between(event("average")), lambda: at_edge(event("average"))),
    "coupled_samples": (lambda: coupled(2), lambda: coupled(1)),
    "same_randomness": (
        lambda: repeated(*window(5, 5, num_dropout=1, random_state=7)),
        lambda: repeated(*window(5, 5, num_dropout=0, random_state=7)),
    ),
    "forward_outside_scope": (
        lambda: _outside({"holds_reduction": True, "num_collectives": 2}),
        lambda: _outside({"holds_reduction": True, "num_collectives": 0}),
    ),
    "reduced_every_micro_batch": (
        lambda: ddp({**SYNCED, "divisor": 2.0}, SYNCED),
        lambda: RIGHT_DDP,
    ),
    "memory_grows": (
        lambda: repeated(*window(5, 5, graph_alive=True)),
        lambda: repeated(
            *[*window(5)[:0], backward(items=5, weight=0.1)], *window(5, weight=0.1, graph_alive=True)
        ),
    ),
    "low_precision_accumulation": (
        lambda: repeated(*window(5, 5, low_precision_error=5e-3)),
        lambda: repeated(*window(5, 5, low_precision_error=1e-6)),
    ),
    "batch_norm_per_micro_batch": (
        lambda: repeated(*window(5, 5, num_batch_norm=2)),
        lambda: repeated(*window(5, num_batch_norm=2)),
    ),
    "logged_loss_differs": (lambda: logged(2.25), lambda: logged(2.5)),
}


def _outside(early: dict[str, object]) -> Traces:
    """DDP whose scope held the reduction back in backward alone: the flags of forwards say so."""
    found = ddp(early, SYNCED)
    changed = []
    for one in found:
        events = [
            replace(e, forward=replace(e.forward, holds_reduction=early["num_collectives"] == 0))
            if e.forward is not None
            else e
            for e in one.events
        ]
        changed.append(replace(one, events=tuple(events)))
    return changed


def kinds(judgement: Judgement) -> dict[str, str]:
    return {finding.kind: finding.severity for finding in judgement.findings}


def test_every_kind_has_a_case():
    assert set(CASES) == set(ALL_KINDS)


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_rule_sees_its_fault(kind):
    judgement = judge(CASES[kind][0]())
    found = [finding for finding in judgement.findings if finding.kind == kind]
    assert len(found) == 1, judgement.findings
    assert found[0].message.endswith(".")
    assert found[0].effect == KINDS[kind].effect
    assert found[0].mend


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_rule_is_silent_on_the_right_twin(kind):
    found = kinds(judge(CASES[kind][1]()))
    assert kind not in found
    assert "wrong" not in found.values(), found


def test_a_forward_outside_explains_the_reductions():
    judgement = judge(CASES["forward_outside_scope"][0]())
    (each,) = [f for f in judgement.findings if f.kind == "reduced_every_micro_batch"]
    assert each.caused_by == "forward_outside_scope"
