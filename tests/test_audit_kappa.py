"""Kappa is measured from what was delivered and read: by micro-batch, rank and parameter."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from audit_traces import (
    add,
    backward,
    clear,
    clip,
    gradient,
    multiply,
    reduce,
    skip,
    step,
    trace,
    traces,
    unscale,
    update,
)
from wholebatch.audit.judge.windows import assemble
from wholebatch.audit.trace import Event


def kappas(window, *, carried=False):
    """By rank, of the micro-batches of a window in order."""
    return {
        rank: [m.kappa for m in found if m.carried == carried]
        for rank, found in window.micro_batches.items()
    }


def only(evidence):
    (window,) = [window for window in evidence.windows if window.complete]
    return window


KAPPA = st.floats(0.05, 20).map(lambda size: round(size, 4))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_random_kappas_are_recovered(data):
    num_ranks = data.draw(st.integers(1, 3))
    counts = [data.draw(st.integers(1, 4)) for _ in range(num_ranks)]
    truth = [[data.draw(KAPPA) for _ in range(a)] for a in counts]
    noise = data.draw(st.sampled_from([0.0, 1e-6]))
    delivered = [[gradient(100 * r + j, 12) for j in range(a)] for r, a in enumerate(counts)]
    pairs = [(k, d) for ks, ds in zip(truth, delivered, strict=True) for k, d in zip(ks, ds, strict=True)]
    read = add(*pairs, (noise, gradient(9999, 12)))
    made = traces(
        *[[*[backward(5, 0.1, delivers=d) for d in ds], step(reads=read), clear()] for ds in delivered],
        num_parameters=12,
    )
    window = only(assemble(made))
    assert window.unjudged is None
    assert window.ranks_agree is (True if num_ranks > 1 else None)
    largest = max(chain.from_iterable(truth))
    for rank, expected in enumerate(truth):
        assert kappas(window)[rank] == pytest.approx(expected, rel=1e-3, abs=1e-3 * largest)


def test_one_kappa_for_all_is_said():
    window = only(assemble(trace(backward(5), backward(5), multiply(0.5), step())))
    assert window.uniform_kappa == pytest.approx(0.5)
    window = only(assemble(trace(backward(5), multiply(0.5), backward(5), step())))
    assert window.uniform_kappa is None
    assert kappas(window) == {0: pytest.approx([0.5, 1.0])}


@pytest.mark.parametrize(
    "last",
    [
        [unscale(1024.0), clip(0.3), step()],
        [clip(0.3), unscale(1024.0), step()],
        [unscale(1024.0), multiply(1.0), step()],
        [unscale(1024.0), clip(0.3, noise=0.2), step()],
    ],
)
def test_the_loss_scale_is_taken_out_and_clipping_is_not_counted(last):
    window = only(assemble(trace(*[backward(5, 102.4, loss_scale=1024.0)] * 2, *last)))
    assert window.uniform_kappa == pytest.approx(1.0)
    assert window.total == pytest.approx(1.0)
    if window.clip_factor is not None and len(last) == 3 and not last[1].noise:
        assert window.clip_factor == pytest.approx(0.3)


def test_a_loss_scale_that_changed_inside_the_window_shows():
    ops = [backward(5, 51.2, loss_scale=512.0), backward(5, 102.4, loss_scale=1024.0)]
    window = only(assemble(trace(*ops, unscale(1024.0), step())))
    assert kappas(window) == {0: pytest.approx([0.5, 1.0])}


def test_unscaled_twice_and_never():
    ops = [backward(5, 102.4, loss_scale=1024.0), backward(5, 102.4, loss_scale=1024.0)]
    twice = only(assemble(trace(*ops, unscale(1024.0), unscale(1024.0), step())))
    assert twice.total == pytest.approx(1 / 1024)
    assert only(assemble(trace(*ops, step()))).total == pytest.approx(1024.0)


def test_a_clip_between_backwards_makes_kappas_differ():
    window = only(assemble(trace(backward(5), clip(0.5), backward(5), clip(0.5), step())))
    assert kappas(window) == {0: pytest.approx([0.5, 1.0])}
    assert window.clip_factor == pytest.approx(0.5)


def test_what_clips_between_backwards_leave_hardly_anything_of_is_not_lost():
    ops = [
        backward(5),
        clip(0.01, detail="by norm"),
        backward(5),
        clip(0.01, detail="by norm"),
        backward(5),
    ]
    window = only(assemble(trace(*ops, step())))
    assert kappas(window) == {0: pytest.approx([1.0, 1.0, 1.0])}
    assert window.uniform_kappa == pytest.approx(1.0)
    assert not any(m.lost for m in window.micro_batches[0])


def test_parts_that_are_clipped_apart_are_each_read_before_their_clip():
    made = trace(backward(5), backward(5), step(), num_parameters=2)
    events = list(made[0].events)
    read = events[-1].before
    half = {p: v / 2 for p, v in read.items()}
    clips = [
        Event(kind="clip", optimizers=(0,), before={p: read[p]}, after={p: half[p]}, value=1.0)
        for p in (0, 1)
    ]
    events[-1:] = [*clips, replace(events[-1], before=half)]
    window = only(assemble([replace(made[0], events=tuple(events))]))
    assert window.uniform_kappa == pytest.approx(1.0)
    assert window.clip_factor == pytest.approx(0.5)


def test_never_cleared_is_carried():
    evidence = assemble(trace(*[backward(5), backward(5), step()] * 3))
    last = evidence.windows[-1]
    assert kappas(last, carried=True) == {0: pytest.approx([1.0] * 4)}
    assert [m.index for m in last.micro_batches[0]] == [-4, -3, -2, -1, 0, 1]


def test_what_was_cleared_unseen_has_no_kappa():
    first, second = gradient(1), gradient(2)
    window = only(
        assemble(trace(backward(5, delivers=first), backward(5, delivers=second), step(reads=second)))
    )
    assert kappas(window) == {0: pytest.approx([0.0, 1.0])}
    assert window.micro_batches[0][0].lost == "cleared"


def test_what_was_cleared_and_still_is_read_has_its_kappa():
    """As where an engine holds gradients back in a place of its own."""
    first, second = gradient(1), gradient(2)
    ops = [backward(5, delivers=first), clear(), backward(5, delivers=second)]
    window = only(assemble(trace(*ops, step(reads=add((1.0, first), (1.0, second))))))
    assert kappas(window) == {0: pytest.approx([1.0, 1.0])}
    assert [m.lost for m in window.micro_batches[0]] == ["", ""]


def test_gradients_that_survive_a_clear_after_the_step_are_carried():
    first, second = gradient(1), gradient(2)
    ops = [backward(5, delivers=first), step(), clear(), backward(5, delivers=second)]
    evidence = assemble(trace(*ops, step(reads=add((1.0, first), (1.0, second)))))
    assert kappas(evidence.windows[1], carried=True) == {0: pytest.approx([1.0])}


def test_not_reduced():
    ops = [backward(5, 0.1), backward(5, 0.1), step(), clear()]
    window = only(assemble(traces(ops, ops)))
    assert window.ranks_agree is False
    assert kappas(window) == {0: pytest.approx([1.0, 1.0]), 1: [0.0, 0.0]}
    assert {m.lost for m in window.micro_batches[1]} == {"not reduced"}


def test_the_wrong_micro_batch_reduced():
    ops = [backward(5, 0.1, reduces=True), backward(5, 0.1), step(), clear()]
    window = only(assemble(traces(ops, ops)))
    assert window.ranks_agree is False
    assert kappas(window) == {0: pytest.approx([0.5, 1.0]), 1: pytest.approx([0.5, 0.0])}


@pytest.mark.parametrize(("divisor", "kappa"), [(None, 0.5), (1.0, 1.0), (4.0, 0.25)])
def test_what_a_reduction_divides_by(divisor, kappa):
    ops = [backward(5), backward(5), reduce(divisor=divisor, from_python=True), clip(0.1), step()]
    window = only(assemble(traces(ops, ops)))
    assert window.uniform_kappa == pytest.approx(kappa)
    assert window.ranks_agree is True


def test_a_clip_before_the_reduction_is_read_after_it():
    ops = [backward(5), clip(0.5), reduce(from_python=True), step()]
    assert only(assemble(traces(ops, ops))).uniform_kappa == pytest.approx(0.25)


def test_shards_add_up_and_replicas_of_a_shard_count_once():
    ops = update(2, 5, num_ranks=2)
    made = traces(ops, ops, sharded=True)
    window = only(assemble(made))
    assert window.uniform_kappa == pytest.approx(0.5)
    assert window.ranks_agree is None
    # all ranks hold the whole and call it a shard
    whole = [replace(one, sharded=(True,) * 4) for one in traces(ops, ops)]
    assert only(assemble(whole)).uniform_kappa == pytest.approx(0.5)


def test_a_parameter_left_out_of_the_reduction():
    ops = [backward(5, 0.1), backward(5, 0.1), reduce(to=(0, 1, 2)), step()]
    window = only(assemble(traces(ops, ops)))
    assert window.per_parameter_kappa
    assert window.odd_parameters == (3,)
    assert window.uniform_kappa == pytest.approx(0.5)


def test_a_parameter_that_is_scaled_alone():
    window = only(assemble(trace(backward(5), backward(5), multiply(0.1, to=(2,)), step())))
    assert window.per_parameter_kappa
    assert window.odd_parameters == (2,)
    assert window.total == pytest.approx(2.0)


def test_a_parameter_that_was_zeroed():
    window = only(assemble(trace(backward(5), backward(5), multiply(0.0, to=(2,)), step())))
    assert window.odd_parameters == (2,)


def test_one_of_many_parameters_in_low_precision_left_out_of_the_reduction():
    ops = [backward(5, 0.1), reduce(to=range(699)), step()]
    window = only(assemble(traces(ops, ops, num_parameters=700, dtype="bfloat16")))
    assert window.odd_parameters == (699,)


def test_many_kappas():
    """Eight ranks reduce the first of eight micro-batches instead of the last."""
    ops = [*[backward(5, 1 / 40, reduces=i == 0) for i in range(8)], step()]
    window = only(assemble(traces(*[ops] * 8, num_parameters=40)))
    assert kappas(window)[0] == pytest.approx([1 / 8, *[1.0] * 7])
    assert kappas(window)[7] == pytest.approx([1 / 8, *[0.0] * 7])


def test_gradients_from_nowhere_are_not_explained():
    own = gradient(1)
    window = only(
        assemble(trace(backward(5, delivers=own), step(reads=add((1.0, own), (1.0, gradient(3))))))
    )
    assert window.unexplained > 0.1
    assert window.unjudged == "what the optimizer read is not made of what was delivered"
    assert window.total is None


def test_rounding_of_low_precision_is_no_structure():
    parts = [gradient(j, 8) for j in range(4)]
    rng = np.random.default_rng(0)
    read = {p: v * (1 + 4e-3 * rng.standard_normal(16)) for p, v in add(*[(1.0, d) for d in parts]).items()}
    ops = [*[backward(5, delivers=d) for d in parts], step(reads=read)]
    for dtype in ("bfloat16", "float32"):
        window = only(assemble(trace(*ops, num_parameters=8, dtype=dtype)))
        assert window.uniform_kappa == pytest.approx(1.0, rel=1e-2)


def test_a_gradient_that_is_zero_but_for_rounding_changes_nothing():
    made = [{**gradient(j, 4), 4: 1e-8 * gradient(50 + j, 5)[4]} for j in range(2)]
    read = {**add((0.5, made[0]), (0.5, made[1])), 4: 1e-8 * gradient(70, 5)[4]}
    window = only(
        assemble(trace(*[backward(5, delivers=d) for d in made], step(reads=read), num_parameters=5))
    )
    assert window.uniform_kappa == pytest.approx(0.5)


def one_number(value):
    """The gradient of a model of one number."""
    return {0: value * gradient(3, 1)[0]}


def test_a_model_of_one_number_tells_nothing_that_is_not_plain():
    ops = [backward(5, delivers=one_number(v)) for v in (1.0, 3.0)]
    assert only(assemble(trace(*ops, step(), num_parameters=1))).uniform_kappa == pytest.approx(1.0)
    lost = only(assemble(trace(*ops, step(reads=one_number(3.0)), num_parameters=1)))
    assert lost.unjudged is not None
    assert lost.total is None
    assert lost.relative_terms


def test_equal_micro_batches_are_one_to_us():
    same = gradient(1)
    window = only(assemble(trace(*[backward(5, 0.1, delivers=same)] * 2, step())))
    assert window.uniform_kappa == pytest.approx(1.0)


def test_what_is_not_finite_is_not_judged():
    bad = {p: np.full(16, np.nan) for p in range(4)}
    window = only(assemble(trace(backward(5, delivers=bad), step())))
    assert window.unjudged == "gradients are not finite"
    assert window.total is None


def test_without_a_reading_only_ratios_are_known():
    ops = [backward(10, 0.1, delivers={}), backward(2, 0.5, delivers={}), step(reads={})]
    window = only(assemble(trace(*ops)))
    assert window.unjudged == "what the optimizer read was not seen"
    (found,) = window.relative_terms
    assert found.highest / found.lowest == pytest.approx(5.0)


def test_a_step_on_zeros_read_nothing():
    zeros = {p: np.zeros(16) for p in range(4)}
    window = only(assemble(trace(backward(5), backward(5), step(reads=zeros))))
    assert window.total == 0.0


def test_skipped_updates_have_no_weights():
    (window,) = assemble(trace(backward(5), skip(), clear())).windows
    assert window.skipped
    assert window.terms == ()
    assert window.unjudged is None


def test_what_was_clipped_and_then_cleared_is_not_read():
    window = only(assemble(trace(backward(5), backward(5), clip(0.5), clear(), step())))
    assert kappas(window) == {0: [0.0, 0.0]}
    assert window.total == 0.0


def test_micro_batches_that_were_cleared_have_another_kappa_than_the_rest():
    window = only(assemble(trace(backward(5), clear(), backward(5), backward(5), step())))
    assert kappas(window) == {0: pytest.approx([0.0, 1.0, 1.0])}
    assert window.uniform_kappa is None


def test_deliveries_that_cancel_in_one_parameter_are_explained_by_the_others():
    first, second = gradient(1), gradient(2)
    second = {**second, 0: -first[0]}
    rng = np.random.default_rng(0)
    read = {p: v + 1e-6 * rng.standard_normal(16) for p, v in add((0.5, first), (0.5, second)).items()}
    ops = [backward(5, delivers=first), backward(5, delivers=second), step(reads=read)]
    assert only(assemble(trace(*ops))).uniform_kappa == pytest.approx(0.5)
