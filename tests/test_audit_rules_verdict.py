"""Causes, factors, verdicts, and right loops that look like wrong ones."""

from __future__ import annotations

import pytest

from audit_traces import (
    add,
    backward,
    clear,
    clip,
    event,
    gradient,
    multiply,
    pass_begins,
    pass_ends,
    reduce,
    step,
    trace,
    traces,
    unscale,
    update,
)
from wholebatch.audit.judge.causes import CAUSES, with_causes
from wholebatch.audit.judge.evidence import Finding, Judgement
from wholebatch.audit.judge.kinds import ALL_KINDS, KINDS
from wholebatch.audit.judge.verdict import judge
from wholebatch.audit.trace import Intent, RankTrace, Replayed


def found(judgement: Judgement, kind: str) -> Finding:
    (finding,) = [finding for finding in judgement.findings if finding.kind == kind]
    return finding


def wrong(judgement: Judgement) -> list[str]:
    return [finding.kind for finding in judgement.findings if finding.severity == "wrong"]


def loop(weight: float, *, num_micro_batches: int = 4, **fields: object) -> list[RankTrace]:
    made = [backward(items=5, weight=weight, **fields) for _ in range(num_micro_batches)]
    return trace(*[*made, step(), clear()] * 3)


@pytest.mark.parametrize(
    ("weight", "factor", "meaning"),
    [
        (1 / 5, 4.0, "never divided by 4"),
        (1 / 80, 0.25, "divided by its 4 micro-batches twice"),
        (1.0, 20.0, "a sum over 20 items that nobody divided"),
        (1 / 27, 20 / 27, "divided by 27 where 20 count"),
    ],
)
def test_totals_are_exact_and_explained(weight, factor, meaning):
    total = found(judge(loop(weight)), "total_weight")
    assert total.factor == pytest.approx(factor, rel=1e-6)
    assert meaning in total.message
    assert total.severity == "wrong"


@pytest.mark.parametrize(("divisor", "factor"), [(1.0, 2.0), (4.0, 0.5)])
def test_totals_over_replicas(divisor, factor):
    one = [backward(items=5, weight=1 / 5), reduce(divisor=divisor), step(), clear()]
    assert found(judge(traces(one * 3, one * 3)), "total_weight").factor == pytest.approx(factor)


def test_a_plain_coefficient_is_no_fault():
    assert wrong(judge(loop(0.5 / 20))) == []
    assert found(judge(loop(0.5 / 20)), "total_weight").severity == "note"


def test_a_total_of_one_micro_batch_and_replica_is_a_coefficient():
    assert judge(loop(0.7 / 5, num_micro_batches=1)).verdict == "clean"


@pytest.mark.parametrize(
    ("first", "second", "across", "words"),
    [
        (2, 6, "micro_batches", "shortest micro-batch (2 items) counts 3 times"),
        (6, 2, "micro_batches", "the longest (6 items)"),
    ],
)
def test_means_of_means(first, second, across, words):
    made = [backward(items=n, weight=1 / n / 2) for n in (first, second)]
    unequal = found(judge(trace(*[*made, step(), clear()] * 3)), "unequal_item_weights")
    assert unequal.across == across
    assert words in unequal.message


def test_means_of_replicas():
    one, two = ([backward(items=n), reduce(), step(), clear()] * 3 for n in (2, 6))
    unequal = found(judge(traces(one, two)), "unequal_item_weights")
    assert unequal.across == "replicas"
    assert "rank 0 counts 3 times an item of rank 1" in unequal.message


def test_items_of_a_micro_batch():
    made = [backward(items=4, weight=(0.05, 0.2)), backward(items=4, weight=0.125)]
    assert found(judge(trace(*[*made, step(), clear()] * 3)), "unequal_item_weights").across == "items"


def test_a_clear_explains_what_it_loses():
    made = [backward(items=5, weight=0.1), clear(), backward(items=5, weight=0.1), step(), clear()]
    judgement = judge(trace(*made * 3))
    assert judgement.findings[0].kind == "clear_inside_window"
    assert found(judgement, "uncounted_items").caused_by == "clear_inside_window"
    assert found(judgement, "total_weight").caused_by == "clear_inside_window"
    assert found(judgement, "total_weight").factor == pytest.approx(0.5)


def test_a_tail_explains_its_total():
    rest = [backward(items=5, weight=0.05), step(), clear()]
    full = [*[backward(items=5, weight=0.05)] * 4, step(), clear()]
    judgement = judge(trace(*full, *full, *rest))
    assert found(judgement, "tail_weight").factor == pytest.approx(0.25)
    assert found(judgement, "tail_weight").updates == (3,)
    assert found(judgement, "total_weight").caused_by == "tail_weight"


def test_a_cause_must_be_as_grave_and_show_in_the_same_updates():
    note = Finding(kind="clear_inside_window", severity="note", message="m", updates=(1, 2))
    grave = Finding(kind="clear_inside_window", severity="wrong", message="m", updates=(1, 2))
    effect = Finding(kind="total_weight", severity="wrong", message="m", updates=(1, 2, 3))
    other = Finding(kind="total_weight", severity="wrong", message="m", updates=(3, 4, 5))
    assert with_causes([note, effect])[1].caused_by is None
    assert with_causes([grave, effect])[1].caused_by == "clear_inside_window"
    assert with_causes([grave, other])[1].caused_by is None


def test_consequences_name_the_first_cause():
    chain = [
        Finding(kind=kind, severity="wrong", message="m", updates=(1,))
        for kind in ("clear_ignored", "clear_inside_window", "uncounted_items")
    ]
    assert [f.caused_by for f in with_causes(chain)] == [None, "clear_ignored", "clear_ignored"]


def test_causes_are_kinds_and_make_no_circle():
    def reach(kind: str, seen: tuple[str, ...] = ()) -> None:
        assert kind not in seen, (*seen, kind)
        for cause in CAUSES.get(kind, ()):
            assert cause in ALL_KINDS
            reach(cause, (*seen, kind))

    for kind in CAUSES:
        reach(kind)


def test_a_mend_speaks_the_frameworks_language():
    kind = KINDS["total_weight"]
    assert "accelerator.backward" in kind.mend("accelerate", "ddp")
    assert "DDP averages" in kind.mend("composer", "ddp")
    assert kind.mend("composer") == kind.mends[""]


def test_every_kind_has_words():
    for kind in KINDS.values():
        assert kind.summary.endswith("."), kind.name
        assert kind.effect.endswith("."), kind.name
        assert "" in kind.mends, kind.name


# verdicts


def test_a_right_loop_is_clean():
    assert judge(trace(*update(4, 5) * 3)).verdict == "clean"
    assert judge(traces(update(2, 5) * 3)).findings == ()


def test_what_cannot_be_read_is_not_judged():
    judgement = judge(trace(*[backward(), backward(), step(), clear()] * 3))
    assert judgement.verdict == "not_judged"
    assert "could not be read" in judgement.unjudged[0]


def test_no_update_is_not_judged():
    judgement = judge(trace(backward(items=5)))
    assert judgement.verdict == "not_judged"
    assert "no optimizer stepped" in judgement.unjudged[0]


@pytest.mark.parametrize(
    ("replayed", "verdict", "kind"),
    [
        (Replayed(update=1), "clean", None),
        (Replayed(update=1, factor=2.0), "findings", "total_weight"),
        (Replayed(update=1, difference=0.3), "findings", "unequal_item_weights"),
        (Replayed(update=1, split_difference=0.3), "not_judged", None),
        (Replayed(update=1, unable="a hook"), "not_judged", None),
    ],
)
def test_a_replay_stands_in_for_weights(replayed, verdict, kind):
    judgement = judge(trace(*[backward(), backward(), step(), clear()] * 3, replayed=replayed))
    assert judgement.verdict == verdict
    assert [finding.kind for finding in judgement.findings] == ([] if kind is None else [kind])


# right loops that look like wrong ones


def test_an_own_sum_in_float32_loses_nothing():
    one, two = gradient(1), gradient(2)
    made = [backward(items=5, weight=0.1, delivers=one), clear()]
    made += [backward(items=5, weight=0.1, delivers=two), step(reads=add((1.0, one), (1.0, two))), clear()]
    judgement = judge(trace(*made * 3))
    assert "clear_inside_window" not in wrong(judgement)
    assert "uncounted_items" not in wrong(judgement)


def test_an_update_skipped_by_hand_is_a_note():
    right = update(2, 5)
    lost = [*right[:2], clear()]
    judgement = judge(trace(*right, *lost, *right, *right))
    assert "clear_inside_window" not in wrong(judgement)
    assert found(judgement, "uncounted_items").severity == "note"


def test_clipping_by_hand_is_no_total():
    def clipped(factor: float) -> list:
        made = [backward(items=5, weight=0.1), backward(items=5, weight=0.1)]
        return [*made, multiply(factor), step(gradient_norm=1.0), clear()]

    assert wrong(judge(trace(*clipped(0.3), *clipped(0.7), *clipped(0.9)))) == []


def test_a_cap_that_holds_the_loss_scale_is_right():
    made = [backward(items=5, weight=100.0, loss_scale=1000.0) for _ in range(2)]
    right = trace(*[*made, clip(0.5, 1000.0), unscale(1000.0), step(), clear()] * 3)
    assert "clip_before_unscale" not in wrong(judge(right))
    bad = trace(*[*made, clip(0.5, 1.0), unscale(1000.0), step(), clear()] * 3)
    assert "clip_before_unscale" in wrong(judge(bad))


def test_windows_over_the_edge_of_a_pass_are_right():
    one = backward(items=5, weight=0.1)
    over = [one, pass_ends(), pass_begins(), one, step(), clear()]
    assert judge(trace(*over * 3)).verdict == "clean"


def test_a_small_pass_is_no_early_step():
    told = (Intent(micro_batches=4, source="arguments", framework="transformers"),)
    small = [*update(3, 5)[:-1], pass_ends(), clear(), pass_begins()]
    assert judge(trace(*small * 3, intents=told)).verdict == "clean"
    early = judge(trace(*[backward(items=5, weight=0.05), step(), clear()] * 6, intents=told))
    assert "step_inside_window" in wrong(early)
    assert found(early, "total_weight").caused_by == "step_inside_window"


def test_a_schedule_per_pass_on_a_skipped_update_is_right():
    right = update(2, 5)
    lost = [*right[:2], event("skip", optimizers=(0,)), clear()]
    moved = event("schedule", value=0.1)
    judgement = judge(trace(*right, *lost, pass_ends(), moved, pass_begins(), *right, *right))
    assert wrong(judgement) == []


def test_replicas_with_unequal_counts_and_exact_weights_are_a_note():
    one = [backward(items=5, weight=2 / 25)] * 3
    two = [backward(items=5, weight=2 / 25)] * 2
    rest = [reduce(), step(), clear()]
    judgement = judge(traces([*one, *rest] * 3, [*two, *rest] * 3))
    assert wrong(judgement) == []
    assert found(judgement, "unequal_micro_batch_counts").severity == "note"


def test_toy_samples_agree_by_chance():
    toy = [backward(items=2, weight=0.25, samples=(1, 1), shape=(2, 1), num_distinct_values=2)] * 2
    assert judge(trace(*[*toy, step(), clear()] * 3)).findings == ()


def test_an_own_sum_that_rounding_blurs_loses_nothing():
    one, two = gradient(1), gradient(2)
    read = add((1.0, one), (1.0, two), (0.02, gradient(3)))
    made = [backward(items=5, weight=0.1, delivers=one), clear()]
    made += [backward(items=5, weight=0.1, delivers=two), step(reads=read), clear()]
    assert wrong(judge(trace(*made * 3))) == []


@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_two_modules_of_one_class_are_no_micro_batches_of_one_backward(num_micro_batches):
    """As many forwards for a backward as micro-batches were said, but the window has those besides."""
    one = [backward(items=5, weight=1 / (5 * num_micro_batches), num_forwards=2)] * num_micro_batches
    told = (Intent(micro_batches=2, source="arguments", framework="accelerate"),)
    judgement = judge(trace(*[*one, step(), clear()] * 3, intents=told))
    assert [f.kind for f in judgement.findings if f.kind == "memory_grows"] == (
        ["memory_grows"] if num_micro_batches == 1 else []
    )


def test_a_tail_of_means_that_nobody_divided_is_no_fault_of_its_own():
    rest = [step(), clear(), pass_ends(), pass_begins()]
    one = [backward(items=5)]
    judgement = judge(trace(*[*one * 4, step(), clear(), *one * 2, *rest] * 2))
    assert wrong(judgement) == ["total_weight"]
    assert found(judgement, "total_weight").factor == pytest.approx(4.0)
