"""Backwards, clears and steps of all ranks become the windows that they are."""

from __future__ import annotations

import pytest

from audit_traces import (
    backward,
    clear,
    event,
    gradient,
    level,
    multiply,
    pass_ends,
    skip,
    step,
    term,
    trace,
    traces,
    update,
)
from wholebatch.audit.judge.windows import assemble
from wholebatch.audit.trace import Intent


def shape(window, rank=0):
    """(index, lost, carried, foreign) of each micro-batch of a rank."""
    return [(m.index, m.lost, m.carried, m.foreign) for m in window.micro_batches.get(rank, ())]


OWN = [(0, "", False, False), (1, "", False, False)]


@pytest.mark.parametrize("clear_first", [True, False])
def test_a_right_loop(clear_first):
    made = trace(*update(clear_first=clear_first), *update(clear_first=clear_first))
    evidence = assemble(made)
    assert [shape(w) for w in evidence.windows] == [OWN, OWN]
    assert [w.index for w in evidence.windows] == [1, 2]
    assert all(w.complete and not w.skipped for w in evidence.windows)
    # events from the end of the window before to the step
    assert [e.kind for _, e in evidence.windows[1].events[0]] == [
        "clear",
        *["forward", "backward"] * 2,
        "step",
    ]
    position, last = evidence.windows[1].events[0][-1]
    assert last is evidence.windows[1].edges[0] is made[0].events[position]


def test_updates_before_the_watch_are_counted():
    assert [w.index for w in assemble(trace(*update(), *update(), num_skipped_updates=7)).windows] == [8, 9]


def test_a_clear_inside_a_window():
    (window,) = assemble(trace(backward(5), clear(), backward(5), step(), clear())).windows
    assert shape(window) == [(0, "cleared", False, False), (1, "", False, False)]
    assert window.micro_batches[0][0].kappa == 0.0


def test_a_clear_of_some_parameters_leaves_the_rest_to_the_fit():
    (window,) = assemble(trace(backward(5), clear(share=0.5), backward(5), step())).windows
    assert shape(window) == OWN


def test_cleared_by_right():
    probe = [backward(5, at="train.py:3"), clear()]
    (window,) = assemble(trace(*probe, *update())).windows
    assert shape(window) == OWN
    closure = [
        backward(5, in_step=True),
        clear(),
        backward(5, in_step=True),
        clear(),
        backward(5, in_step=True),
    ]
    (window,) = assemble(trace(*closure, step())).windows
    assert shape(window) == OWN[:1]


def test_all_cleared_is_kept():
    (window,) = assemble(trace(backward(5), backward(5), clear(), step())).windows
    assert [m.lost for m in window.micro_batches[0]] == ["cleared", "cleared"]
    assert window.total == 0.0


def test_cleared_on_the_line_before_the_last_micro_batch():
    """The last micro-batch has a line of its own; a clear between loses the others all the same."""
    ops = [*[backward(5, at="train.py:10")] * 3, clear(), backward(5, at="train.py:14"), step()]
    (window,) = assemble(trace(*ops)).windows
    assert [m.lost for m in window.micro_batches[0]] == ["cleared"] * 3 + [""]


def test_skips_end_windows():
    windows = assemble(trace(backward(5), skip(), clear(), *update(1))).windows
    assert [w.skipped for w in windows] == [True, False]
    assert shape(windows[1]) == OWN[:1]


def test_what_is_left_at_the_end():
    *_, last = assemble(trace(*update(), backward(5), pass_ends())).windows
    assert not last.complete
    assert shape(last) == OWN[:1]
    assert last.edges == {}
    assert last.terms == ()
    assert last.unjudged is None


def gan(*, clears):
    """Discriminator 0 (parameters 0, 1), generator 1 (2, 3), whose loss goes through the discriminator."""
    real, fake = (backward(4, to=(0, 1), at=f"train.py:{n}", key="BceWithLogits/0") for n in (10, 12))
    through = backward(4, at="train.py:20", key="BceWithLogits/0")
    once = [*([clear(0)] if clears else []), real, fake, step(0), clear(1), through, step(1)]
    return trace(*once, *once, optimizers=[(0, 1), (2, 3)])


@pytest.mark.parametrize("clears", [True, False])
def test_a_gan_s_discriminator_gets_the_generator_s_gradients(clears):
    windows = assemble(gan(clears=clears)).windows
    assert [(w.optimizer, w.index, w.complete) for w in windows] == [
        (0, 1, True),
        (1, 1, True),
        (0, 2, True),
        (1, 2, True),
    ]
    foreign = [] if clears else [(0, "", False, True)]
    carried = [] if clears else [(-2, "", True, False), (-1, "", True, False)]
    assert shape(windows[2]) == [
        *carried,
        *foreign,
        *[(i + len(foreign), "", False, False) for i in range(2)],
    ]
    assert all(term.total == pytest.approx(1.0) for w in windows for term in w.terms)
    assert [len(w.terms) for w in windows] == [2, 1, 2, 1]


def test_two_optimizers_that_share_a_backward():
    once = [backward(5, 0.1), backward(5, 0.1), step(0), step(1), clear(0, 1)]
    windows = assemble(trace(*once, *once, optimizers=[(0, 1), (2, 3)])).windows
    assert [w.optimizer for w in windows] == [0, 1, 0, 1]
    assert [shape(w) for w in windows] == [OWN] * 4
    assert all(w.total == pytest.approx(1.0) for w in windows)


def test_an_optimizer_that_steps_half_as_often_has_no_foreign_backwards():
    once = [backward(5, 0.1), step(0), clear(0)]
    windows = assemble(trace(*once, *once, step(1), clear(1), optimizers=[(0, 1), (2, 3)])).windows
    assert shape(windows[-1]) == OWN


def test_backwards_of_other_parameters_are_no_micro_batches():
    ops = [backward(5, 0.1, to=(0, 1)), backward(5, to=(2, 3), at="train.py:30")]
    (window,) = assemble(trace(*ops, step(0), optimizers=[(0, 1)])).windows
    assert shape(window) == OWN[:1]


def test_an_unknown_engine_delivers_to_all():
    made = trace(
        backward(5, delivers={}), step(0, reads={}), step(1, reads={}), optimizers=[(0, 1), (2, 3)]
    )
    assert [shape(w) for w in assemble(made).windows] == [OWN[:1], OWN[:1]]


def test_forwards_since_the_backward_before():
    lone = event("forward")
    made = trace(backward(5, samples=(1, 2)), backward(5, samples=(3,)), lone, step())
    (window,) = assemble(made).windows
    assert [[f.samples for f in m.forwards] for m in window.micro_batches[0]] == [[(1, 2)], [(3,)]]
    assert window.terms[0].samples == 3


def test_ranks_are_matched_by_update_and_may_end_earlier():
    evidence = assemble(traces(update(2, num_ranks=1) * 2, update(2, num_ranks=1), ended="exit"))
    first, second = evidence.windows
    assert set(first.edges) == {0, 1}
    assert set(second.edges) == {0}
    assert 1 not in second.micro_batches


def test_a_rank_that_waits_for_the_others_has_its_part_of_the_window():
    evidence = assemble(traces([backward(5), backward(5), step()], [backward(5)]))
    (window,) = evidence.windows
    assert window.complete
    assert set(window.edges) == {0}
    assert len(window.micro_batches[1]) == 1


def test_intent():
    loop = [*update(4), *update(4), *update(1)]
    assert assemble(trace(*loop)).intent == Intent(micro_batches=4, source="inferred from the loop")
    said = (Intent(framework="lightning"), Intent(micro_batches=8, source="--expect-micro-batches"))
    assert assemble(trace(*loop, intents=said)).intent == said[1]
    guess = assemble(trace(*loop, intents=said[:1])).intent
    assert (guess.micro_batches, guess.framework) == (4, "lightning")
    peeled = [*[backward(5, at="a.py:1")] * 3, backward(5, at="a.py:5"), step(), clear()]
    assert assemble(trace(*peeled)).intent.micro_batches == 4
    assert assemble(trace()).intent.micro_batches is None


def test_replicas_of_several_ranks_count_once():
    # tensor-parallel ranks have their replica's gradients
    deliver = [gradient(1), gradient(2), gradient(3), gradient(4)]
    pairs = [[backward(5, 0.1, delivers=d) for d in deliver[2 * r : 2 * r + 2]] for r in (0, 1)]
    read = {p: sum(d[p] for d in deliver) / 2 for p in range(4)}
    made = traces(*[[*pairs[r // 2], step(reads=read)] for r in range(4)], replicas=(0, 0, 1, 1))
    evidence = assemble(made)
    (window,) = evidence.windows
    assert evidence.num_replicas == 2
    assert window.num_items == 20
    assert window.total == pytest.approx(1.0)
    assert window.micro_batches[3][0].kappa == pytest.approx(0.5)


def test_terms_that_can_t_be_read_are_said():
    (window,) = assemble(trace(backward(), step())).windows
    assert (
        window.unjudged
        == "the loss at train.py:10 could not be read: the loss has no reduction that is known"
    )
    surrogate = backward(terms=[term(level(5, 0.2), surrogate=True)], unread=None)
    (window,) = assemble(trace(surrogate, multiply(2.0), step())).windows
    assert window.unjudged == "the loss has no terms whose weights mean anything"
