"""Faults of broken loops that a gradient doesn't show, confirmed by what they do; the twins don't do it."""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from broken_loops import EXPECTED, loop
from broken_loops.observe import FAILING, Pair, observed
from broken_loops.shared import image_loader
from broken_loops.stale_gradients import _gan
from broken_loops.truth import big_batch, compare, samples_of_updates
from broken_loops.witness import Seen, Step, watch
from ranks import run_ranks
from test_broken_loops import slow_ones

OWN_TESTS = ("memory_grows", "low_precision_accumulation", "logged_loss_differs")


def step_inside_window(pair: Pair, name: str) -> None:  # noqa: ARG001
    assert [len(seen.steps) for seen in (pair[0][0], pair[1][0])] == [12, 3]


def stale_gradients(pair: Pair, name: str) -> None:
    if name.endswith("/gan"):
        assert not all(distance < 1e-5 for distance in _distances_of_the_discriminator(pair[0][0]))
        assert all(distance < 1e-5 for distance in _distances_of_the_discriminator(pair[1][0]))


def _distances_of_the_discriminator(seen: Seen) -> list[float]:
    """Of what it read from the gradient of its own loss, with the same noise."""
    generator, discriminator, *_ = _gan()
    networks = (discriminator, generator)  # in the order of their first steps
    steps = [[one for one in seen.steps if one.optimizer == number] for number in (0, 1)]
    found = []
    for (real, _), step_d, step_g in zip(image_loader(), *steps, strict=True):
        for network, step in zip(networks, (step_d, step_g), strict=True):
            _load(network, step)
        fake = generator(torch.randn(4, 3)).detach()
        scores = torch.cat([discriminator(real), discriminator(fake)])
        targets = torch.cat([torch.ones(4, 1), torch.zeros(4, 1)])
        loss = 2 * F.binary_cross_entropy_with_logits(scores, targets)
        truth = torch.autograd.grad(loss, list(discriminator.parameters()))
        times, distance = compare(step_d.gradients, [gradient.double() for gradient in truth])
        found.append(max(distance, abs(times - 1)))
    assert len(found) == 12
    return found


def _load(network: torch.nn.Module, step: Step) -> None:
    with torch.no_grad():
        for own, seen in zip(network.parameters(), step.parameters, strict=True):
            own.copy_(seen)


def _rates(seen: Seen) -> list[float]:
    return [step.learning_rate for step in seen.steps]


def schedule_inside_window(pair: Pair, name: str) -> None:
    halves = [0.1, 0.05, 0.025]
    cosine = [0.05 * (1 + math.cos(math.pi * k / 3)) for k in range(3)]
    planned = pytest.approx(cosine if name.endswith("/by_hand") else halves)
    assert _rates(pair[1][0]) == planned
    assert _rates(pair[0][0]) != planned


def schedule_too_fast(pair: Pair, name: str) -> None:
    assert _rates(pair[1][0]) == pytest.approx([0.1, 0.05, 0.025])
    cosine = [0.05 * (1 + math.cos(math.pi * 4 * k / 12)) for k in range(3)]
    twice = [0.1, 0.025, 0.00625]
    assert _rates(pair[0][0]) == pytest.approx(cosine if "micro_batch" in name else twice)


def schedule_on_skipped_update(pair: Pair, name: str) -> None:  # noqa: ARG001
    broken, right = pair[0][0], pair[1][0]
    assert [len(broken.steps), broken.value] == [2, 3]
    assert [len(right.steps), right.value] == [2, 2]


def average_inside_window(pair: Pair, name: str) -> None:
    def distance(seen: Seen) -> float:
        average: list[Tensor] | None = seen.steps[0].parameters if name.endswith("/teacher") else None
        for step in seen.steps:
            moved = zip(step.parameters, step.gradients, strict=True)
            after = [p - step.learning_rate * g for p, g in moved]
            pairs = zip(average or after, after, strict=True)
            average = [0.9 * slow + 0.1 * fast for slow, fast in pairs]
        pairs = zip(seen.final.values(), average, strict=True)
        return max(float((one - other).abs().max()) for one, other in pairs)

    assert distance(pair[1][0]) < 1e-6
    assert distance(pair[0][0]) > 1e-2


def parameters_changed_inside_window(pair: Pair, name: str) -> None:  # noqa: ARG001
    def changes(seen: Seen) -> int:
        inside = [
            (one, later)
            for one, later in zip(seen.forwards, seen.forwards[1:], strict=False)
            if one.num_steps == later.num_steps
        ]
        return sum(
            any(not torch.equal(p, q) for p, q in zip(one.weights, later.weights, strict=True))
            for one, later in inside
        )

    assert changes(pair[0][0]) == 9
    assert changes(pair[1][0]) == 0


def batch_norm_per_micro_batch(pair: Pair, name: str) -> None:  # noqa: ARG001
    moves = [int(seen.final.get("1.num_batches_tracked", 0)) for seen in (pair[0][0], pair[1][0])]
    assert moves == [12, 0]


def reduced_every_micro_batch(pair: Pair, name: str) -> None:  # noqa: ARG001
    assert [seen.num_reductions for seen in pair[0]] == [12, 12]
    assert [seen.num_reductions for seen in pair[1]] == [3, 3]


def _ranks_part(pair: Pair, name: str) -> None:  # noqa: ARG001
    def alike(seen: list[Seen]) -> bool:
        return all(torch.allclose(seen[0].final[key], seen[1].final[key]) for key in seen[0].final)

    assert not alike(pair[0])
    assert alike(pair[1])


def optimizer_without_gradients(pair: Pair, name: str) -> None:  # noqa: ARG001
    def empty(seen: Seen) -> list[bool]:
        return [all(gradient is None for gradient in step.gradients) for step in seen.steps]

    for broken, right in zip(*pair, strict=True):
        assert empty(broken) == [True, True, True]
        assert empty(right) == [False, False, False]


def duplicate_samples(pair: Pair, name: str) -> None:
    def repeats(seen: list[Seen]) -> int:
        """Micro-batches of one update that another of it, on any rank, already had."""
        by_update: dict[int, list[Tensor]] = {}
        for one in seen:
            for forward in one.forwards:
                by_update.setdefault(forward.num_steps, []).append(forward.samples)
        return sum(len(all_) - len({str(x.tolist()) for x in all_}) for all_ in by_update.values())

    expected = {"": 12, "new_iterator": 9, "outer_loop": 36}
    assert repeats(pair[0]) == expected[name.partition("/")[2]]
    assert repeats(pair[1]) == 0


def tail_dropped(pair: Pair, name: str) -> None:
    """What went through the model and is in no update, in samples; the updates were compared already."""
    expected = EXPECTED[name]
    dropped = [
        sum(len(forward.samples) for forward in seen.forwards) - sum(s for s in sizes if s > 0)
        for seen, sizes in ((pair[0][0], expected.broken_samples), (pair[1][0], expected.samples))
    ]
    assert dropped == [8 if name.endswith("one_pass") else 16, 0]


def same_randomness(pair: Pair, name: str) -> None:
    def equal(seen: list[Seen]) -> list[bool]:
        if len(seen) == 1:  # micro-batches of one window
            masks = [forward.masks[0] for forward in seen[0].forwards]
            return [torch.equal(one, other) for one, other in itertools.pairwise(masks)]
        both = zip(*(one.forwards for one in seen), strict=True)
        return [torch.equal(one.masks[0], other.masks[0]) for one, other in both]

    assert name in EXPECTED
    assert all(equal(pair[0]))
    assert not any(equal(pair[1]))


def nonfinite_gradients(pair: Pair, name: str) -> None:  # noqa: ARG001
    def finite(seen: Seen) -> bool:
        return all(bool(g.isfinite().all()) for step in seen.steps for g in step.gradients)

    assert not finite(pair[0][0])
    assert finite(pair[1][0])


CONFIRM: dict[str, Callable[[Pair, str], None]] = {
    "step_inside_window": step_inside_window,
    "stale_gradients": stale_gradients,
    "schedule_inside_window": schedule_inside_window,
    "schedule_too_fast": schedule_too_fast,
    "schedule_on_skipped_update": schedule_on_skipped_update,
    "average_inside_window": average_inside_window,
    "parameters_changed_inside_window": parameters_changed_inside_window,
    "batch_norm_per_micro_batch": batch_norm_per_micro_batch,
    "reduced_every_micro_batch": reduced_every_micro_batch,
    "forward_outside_scope": reduced_every_micro_batch,
    "reduced_wrong_micro_batch": _ranks_part,
    "not_reduced": _ranks_part,
    "optimizer_without_gradients": optimizer_without_gradients,
    "duplicate_samples": duplicate_samples,
    "tail_dropped": tail_dropped,
    "same_randomness": same_randomness,
    "nonfinite_gradients": nonfinite_gradients,
}


@pytest.mark.parametrize(
    "name", slow_ones([name for name, e in EXPECTED.items() if e.kind in CONFIRM and name not in FAILING])
)
def test_the_broken_loop_does_it_and_its_twin_does_not(name):
    CONFIRM[EXPECTED[name].kind](observed(name), name)


def test_what_a_gradient_does_not_show_is_confirmed_otherwise():
    unseen = {name for name, e in EXPECTED.items() if e.read in (None, "exact")} - set(FAILING)
    assert {EXPECTED[name].kind for name in unseen} <= {*CONFIRM, *OWN_TESTS}


@pytest.mark.parametrize("name", [name for name, e in EXPECTED.items() if e.kind == OWN_TESTS[0]])
def test_graphs_of_earlier_micro_batches_are_alive(name):
    broken, right = (_graph_nodes_at_steps(function) for function in (loop(name).broken, loop(name).right))
    assert all(many >= 3 * few for many, few in zip(broken, right, strict=True)), (broken, right)


def _graph_nodes_at_steps(function: Callable[[], Any]) -> list[int]:
    """Nodes of autograd that some living tensor still refers to, at each step."""
    found = []

    def count(*_: Any) -> None:
        reached: set[Any] = set()
        tensors = [one for one in gc.get_objects() if issubclass(type(one), Tensor)]
        front = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
        while front:
            node = front.pop()
            if node is not None and node not in reached:
                reached.add(node)
                front += [following for following, _ in node.next_functions]
        found.append(sum("AccumulateGrad" not in node.name() for node in reached))

    hook = register_optimizer_step_pre_hook(count)
    try:
        function()
    finally:
        hook.remove()
    return found


@pytest.mark.parametrize("name", [name for name, e in EXPECTED.items() if e.kind == OWN_TESTS[1]])
def test_a_sum_in_bfloat16_loses_what_a_sum_in_float32_keeps(name):
    with _delivered() as errors:
        loop(name).broken()
    assert min(errors) > 2e-3
    with _delivered() as errors:
        loop(name).right()
    assert max(errors) < 1e-5


@contextlib.contextmanager
def _delivered() -> Iterator[list[float]]:
    """At each step the relative error of ``.grad`` against a float64 sum of what came to each parameter."""
    sums: dict[Tensor, Tensor] = {}
    hooks: list[Any] = []
    errors: list[float] = []

    def listen(parameter: Tensor) -> None:
        def add(gradient: Tensor) -> None:
            sums[parameter] = sums.get(parameter, torch.zeros(())) + gradient.double()

        hooks.append(parameter.register_hook(add))

    def before_forward(module: torch.nn.Module, _: Any) -> None:
        if not hooks:
            for parameter in module.parameters():
                listen(parameter)

    def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = optimizer.param_groups[0]["params"]
        truth = [sums[p] for p in parameters]
        apart = torch.cat([(p.grad.double() - t).flatten() for p, t in zip(parameters, truth, strict=True)])
        errors.append(float(apart.norm() / torch.cat([t.flatten() for t in truth]).norm()))
        sums.clear()

    forward = torch.nn.modules.module.register_module_forward_pre_hook(before_forward)
    step = register_optimizer_step_pre_hook(before_step)
    try:
        yield errors
    finally:
        for hook in (*hooks, forward, step):
            hook.remove()


@pytest.mark.parametrize("name", [name for name, e in EXPECTED.items() if e.kind == OWN_TESTS[2]])
def test_the_number_printed_is_not_the_loss_of_the_update(name, capsys):
    expected = EXPECTED[name]
    for function, is_right in ((loop(name).broken, False), (loop(name).right, True)):
        seen = watch(function)
        updates = samples_of_updates((expected.samples,), expected.num_samples)
        truth = [
            big_batch(expected.objective, step.parameters, indices, expected.num_samples)[0]
            for step, indices in zip(seen.steps, updates, strict=True)
        ]
        assert (seen.value == pytest.approx(truth, rel=1e-4)) == is_right
        assert capsys.readouterr().out.count("loss") == 3


# Which samples of each window of 16 reach the gradient, and with which total weight.
READS_ONLY = {
    "clear_inside_window": (12, 16, 0.25),
    "clear_inside_window/by_hand": (12, 16, 0.25),
    "clear_inside_window/off_by_two": (8, 16, 0.5),
    "uncounted_items": (12, 16, 0.25),
    "uncounted_items/running_loss": (12, 16, 0.25),
    "uncounted_items/continue": (0, 12, 0.75),
}


@pytest.mark.parametrize("name", READS_ONLY)
def test_only_a_part_of_each_window_reaches_the_gradient(name):
    first, last, weight = READS_ONLY[name]
    for k, step in enumerate(watch(loop(name).broken).steps):
        _, truth = big_batch("images", step.parameters, range(16 * k + first, 16 * k + last), 48)
        assert compare(step.gradients, truth) == pytest.approx((weight, 0.0), abs=1e-5)


@pytest.mark.parametrize(
    "name", [name for name, e in EXPECTED.items() if e.kind in ("never_cleared", "clear_ignored")][:5]
)
def test_each_update_has_all_earlier_gradients_in_it(name):
    expected = EXPECTED[name]
    assert not expected.library
    assert expected.ranks == 1
    earlier = None
    updates = samples_of_updates((expected.samples,), expected.num_samples)
    for step, indices in zip(watch(loop(name).broken).steps, updates, strict=True):
        _, own = big_batch("images", step.parameters, indices, 48)
        total = own if earlier is None else [a + b for a, b in zip(own, earlier, strict=True)]
        assert compare(step.gradients, total) == pytest.approx((1.0, 0.0), abs=1e-5)
        earlier = total


@pytest.mark.slow
def test_a_rank_with_more_micro_batches_waits_for_one_that_has_ended():
    (name,) = FAILING
    outcomes = run_ranks(_run, 2, name, "broken", timeout_s=20.0, expect="outcomes")
    assert [outcome[0] for outcome in outcomes] == ["error", "ok"]
    assert run_ranks(_run, 2, name, "right", timeout_s=20.0) == [10, 10]


def _run(rank: int, ranks: int, name: str, which: str) -> int:
    return len(watch(getattr(loop(name), which), rank, ranks).steps)
