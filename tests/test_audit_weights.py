"""What every item weighs: 1/N in right loops of many layouts, the exact factor in wrong ones."""

from __future__ import annotations

import pytest

from audit_traces import (
    backward,
    clear,
    level,
    multiply,
    reduce,
    step,
    term,
    trace,
    traces,
    unscale,
    update,
)
from wholebatch.audit.judge.windows import assemble

FINISH = [step(), clear()]


def windows_of(*ranks, **fields):
    """The windows of ranks' operations; each rank ends each window itself."""
    return assemble(traces(*ranks, **fields)).windows


def ragged(counts, weight, *, reduces=False):
    """A window of micro-batches of so many items of this weight, or of what ``weight(n)`` says."""
    weigh = weight if callable(weight) else lambda _: weight
    return [
        *[backward(n, weigh(n), reduces=reduces and i == len(counts) - 1) for i, n in enumerate(counts)],
        *FINISH,
    ]


def all_right(windows):
    for window in windows:
        assert window.unjudged is None
        assert window.total == pytest.approx(1.0)
        assert window.lowest == pytest.approx(1.0)
        assert window.highest == pytest.approx(1.0)
    return True


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("num_micro_batches", [1, 2, 5])
def test_right_layouts(num_ranks, num_micro_batches):
    ops = update(num_micro_batches, 6, num_ranks=num_ranks) * 2
    windows = windows_of(*[ops] * num_ranks)
    assert all_right(windows)
    assert {window.num_items for window in windows} == {6 * num_ranks * num_micro_batches}


def test_right_ragged_with_exact_division():
    assert all_right(windows_of(ragged([7, 2, 30], 1 / 39)))
    two = [ragged([7, 2], 2 / 20, reduces=True), ragged([1, 10], 2 / 20, reduces=True)]
    assert all_right(windows_of(*two))


def test_right_sums_divided_in_the_gradients():
    ops = [backward(7, 1.0), backward(2, 1.0), multiply(1 / 9), *FINISH]
    assert all_right(windows_of(ops))


def test_right_with_a_loss_scale():
    ops = [backward(5, 102.4, loss_scale=1024.0), backward(5, 102.4, loss_scale=1024.0)]
    assert all_right(windows_of([*ops, unscale(1024.0), *FINISH]))


def test_right_counts_that_differ_between_ranks():
    one = [backward(5, 2 / 15), backward(5, 2 / 15), reduce(), *FINISH]
    other = [backward(5, 2 / 15), reduce(), *FINISH]
    assert all_right(windows_of(one, other))


def test_right_with_a_micro_batch_without_items():
    ops = [backward(0, 0.0), backward(10, 0.1), *FINISH]
    assert all_right(windows_of(ops))


def test_right_tail_with_its_own_division():
    assert all_right(windows_of([*update(4), *update(4), *update(2)]))


def test_right_last_micro_batch_on_a_line_of_its_own():
    loop = [backward(5, 0.05, at="a.py:10", holds_reduction=True)] * 3
    last = backward(5, 0.05, at="a.py:14", holds_reduction=False, reduces=True)
    once = [*[backward(5, 0.05, at="a.py:10", holds_reduction=True) for _ in loop], last, *FINISH]
    windows = windows_of(once, once)
    assert all_right(windows)
    assert [len(window.terms) for window in windows] == [1]
    closure = [backward(5, 0.1, at="a.py:10"), backward(5, 0.1, at="lib.py:3", in_step=True), *FINISH]
    (window,) = windows_of(closure)
    assert len(window.terms) == 1
    assert window.total == pytest.approx(1.0)


def test_undivided_on_two_lines_is_no_pair_of_losses():
    ops = [*[backward(5, 0.2, at="a.py:10")] * 3, backward(5, 0.2, at="a.py:14"), *FINISH]
    (window,) = windows_of(ops)
    assert window.total == pytest.approx(4.0)


def test_two_losses_from_two_lines_each_mean_over_their_own():
    ops = [backward(8, at="a.py:10"), backward(4, at="a.py:12"), *FINISH]
    (window,) = windows_of(ops)
    assert [term.total for term in window.terms] == pytest.approx([1.0, 1.0])
    assert [term.num_units for term in window.terms] == [8, 4]


def two_terms(*weights, keys=("NllLoss/0", "NllLoss/1"), num_items=4):
    return backward(
        terms=[term(level(num_items, w / num_items), key=key) for w, key in zip(weights, keys, strict=True)]
    )


def test_heads_and_coefficients_are_told_apart_by_their_totals():
    (window,) = windows_of([two_terms(0.5, 0.5), *FINISH])
    assert sum(term.total for term in window.terms) == pytest.approx(1.0)
    (window,) = windows_of([two_terms(0.5, 0.05), two_terms(0.5, 0.05), *FINISH])
    assert [term.total for term in window.terms] == pytest.approx([1.0, 0.1])
    assert window.total == pytest.approx(1.0)
    (window,) = windows_of([two_terms(1.0, 5.0), *FINISH])
    assert window.total == pytest.approx(1.0)


def test_class_weights():
    made = [backward(terms=[term(level(n, 1 / 11.5), coefficients="class_weights")]) for n in (4.5, 7.0)]
    (window,) = windows_of([*made, *FINISH])
    assert all_right([window])
    assert window.num_items == 11.5
    assert window.terms[0].coefficients == "class_weights"


def sequences(lengths, weight):
    """Means over each sequence, then ``weight`` for each of them."""
    num_items = sum(lengths)
    items = level(num_items, (weight / max(lengths), weight / min(lengths)))
    return backward(terms=[term(level(len(lengths), weight, "group"), items)])


def test_means_by_sequence_are_right_where_each_sequence_weighs_the_same():
    (window,) = windows_of([sequences([2, 8], 0.25), sequences([3, 5], 0.25), *FINISH])
    assert all_right([window])
    assert window.terms[0].unit == "group"
    assert window.num_items == 4
    (window,) = windows_of([sequences([2, 8], 0.5), sequences([3, 5], 0.5), *FINISH])
    assert window.terms[0].unit == "group"
    assert window.total == pytest.approx(2.0)
    (window,) = windows_of([sequences([2, 8], 0.25), sequences([3, 3, 5], 1 / 6), *FINISH])
    assert window.terms[0].unit == "item"
    assert window.highest > window.lowest


def rows(num_rows, per_row, weight, operation="MseLoss"):
    """A dense loss over rows whose elements weigh ``weight`` each."""
    by_row = level(num_rows, weight * per_row, "row", (per_row,))
    return backward(terms=[term(by_row, level(num_rows * per_row, weight), key=f"{operation}/0")])


@pytest.mark.parametrize(
    ("per_row", "weight", "operation", "unit", "total"),
    [
        (100, 1 / 8, "MseLoss", "row", 1.0),  # sum / rows / A
        (100, 1 / 4, "MseLoss", "row", 2.0),  # sum / rows
        (100, 1 / 800, "MseLoss", "item", 1.0),  # mean / A
        (100, 1 / 400, "MseLoss", "item", 2.0),  # mean
        # as many features as micro-batches: a mean that isn't divided and a right sum have the same weights
        (2, 1 / 8, "Mean", "item", 2.0),
        (2, 1 / 8, "MseLoss", "item", 2.0),
        (2, 1 / 8, "Sum", "row", 1.0),
    ],
)
def test_a_sum_over_features_is_not_a_missing_division(per_row, weight, operation, unit, total):
    (window,) = windows_of([*[rows(4, per_row, weight, operation)] * 2, *FINISH])
    assert (window.terms[0].unit, window.total) == (unit, pytest.approx(total))


def test_the_tail_of_sums_over_features_is_read_as_the_windows_before():
    once = [*[rows(4, 8, 1 / 16)] * 4, *FINISH]
    windows = windows_of([*once, *once, rows(4, 8, 1 / 16), *FINISH])
    assert [(w.terms[0].unit, w.total) for w in windows] == [
        ("row", pytest.approx(1.0)),
        ("row", pytest.approx(1.0)),
        ("row", pytest.approx(0.25)),
    ]


def test_rows_of_different_shapes_are_no_units():
    (window,) = windows_of([rows(4, 100, 1 / 8), rows(4, 50, 1 / 8), *FINISH])
    assert window.terms[0].unit == "item"


# -- faults ------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_mean_of_means_over_micro_batches(num_ranks):
    ops = ragged([10, 2], lambda n: 1 / (2 * n), reduces=num_ranks > 1)
    (window,) = windows_of(*[ops] * num_ranks)
    assert window.total == pytest.approx(1.0)
    assert window.highest / window.lowest == pytest.approx(5.0)
    assert window.lowest == pytest.approx(0.6)
    units, low, high = window.terms[0].by_micro_batch[0, 1]
    assert (units, low, high) == (2, pytest.approx(3.0), pytest.approx(3.0))


def test_mean_of_means_over_replicas():
    (window,) = windows_of(ragged([10, 10], 1 / 20, reduces=True), ragged([5, 3], 1 / 8, reduces=True))
    assert window.ranks_agree is True
    assert window.total == pytest.approx(1.0)
    assert window.highest / window.lowest == pytest.approx(20 / 8)


def test_unequal_within_a_micro_batch():
    (window,) = windows_of([backward(4, (0.05, 0.2)), backward(4, 0.125), *FINISH])
    assert (window.lowest, window.highest) == (pytest.approx(0.4), pytest.approx(1.6))


@pytest.mark.parametrize(
    ("weight", "factor"), [(1 / 5, 3.0), (1 / 45, 1 / 3), (1.0, 15.0), (1 / 30, 0.5), (1 / 15, 1.0)]
)
def test_divided_by_something_else(weight, factor):
    (window,) = windows_of([backward(5, weight), backward(5, weight), backward(5, weight), *FINISH])
    assert window.total == pytest.approx(factor)
    assert window.lowest == window.highest == pytest.approx(factor)


@pytest.mark.parametrize(("divisor", "factor"), [(None, 1.0), (1.0, 2.0), (4.0, 0.5)])
def test_divided_by_replicas_too_often_or_not_at_all(divisor, factor):
    ops = [backward(5, 0.1), backward(5, 0.1), reduce(divisor=divisor), *FINISH]
    assert windows_of(ops, ops)[0].total == pytest.approx(factor)


def test_sums_over_the_global_number_without_times_d():
    ops = ragged([7, 3], 1 / 20, reduces=True)
    assert windows_of(ops, ops)[0].total == pytest.approx(0.5)


def test_tail_divided_by_the_whole_window():
    windows = windows_of([*update(4), backward(5, 0.05), *FINISH])
    assert [window.total for window in windows] == pytest.approx([1.0, 0.25])


def test_clear_inside_a_window():
    (window,) = windows_of([backward(5, 0.1), clear(), backward(5, 0.1), *FINISH])
    assert (window.total, window.lowest) == (pytest.approx(0.5), 0.0)
    assert window.num_items == 10


def test_not_reduced_and_the_wrong_one_reduced():
    ops = [backward(5, 0.1), backward(5, 0.1), *FINISH]
    (window,) = windows_of(ops, ops)
    assert (window.lowest, window.highest) == (0.0, pytest.approx(2.0))
    ops = [backward(5, 0.1, reduces=True), backward(5, 0.1), *FINISH]
    (window,) = windows_of(ops, ops)
    assert (window.lowest, window.highest) == (0.0, pytest.approx(2.0))
    assert window.ranks_agree is False


def test_stepped_inside_the_window():
    windows = windows_of([backward(5, 0.1), step(), backward(5, 0.1), step(), clear()])
    assert [window.total for window in windows] == pytest.approx([0.5, 0.5])


def test_weighting_by_samples_where_items_are_tokens():
    # two of four samples in each micro-batch, 30 and 10 tokens
    (window,) = windows_of([backward(30, 0.5 / 30), backward(10, 0.5 / 10), *FINISH])
    assert window.highest / window.lowest == pytest.approx(3.0)


def test_the_loss_of_one_term_unread_leaves_the_other_and_says_so():
    (window,) = windows_of([backward(5), backward(at="a.py:20", unread="a fused kernel"), *FINISH])
    assert window.total == pytest.approx(1.0)
    assert window.unjudged == "the loss at a.py:20 could not be read: a fused kernel"


def test_low_precision_is_right_within_its_rounding():
    made = trace(backward(5, 0.1), backward(5, 0.1), multiply(1.01), *FINISH, dtype="bfloat16")
    (window,) = assemble(made).windows
    (found,) = window.terms
    assert found.total == pytest.approx(1.01)
