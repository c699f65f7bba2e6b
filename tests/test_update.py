"""What one update does on one rank besides arithmetic: its order, its ends, and what it refuses."""

from __future__ import annotations

import copy
import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from problems import Case, TinyLanguageModel, loss_with
from wholebatch.errors import (
    CountMismatchError,
    IncompleteUpdateError,
    NonFiniteUpdateError,
    ObjectiveError,
    PoisonedWindowError,
    StaleGradientsError,
    UnsupportedError,
    UpdateError,
    WindowUsageError,
)
from wholebatch.losses import next_token_loss, token_loss
from wholebatch.objective import counted_loss, sample_loss, weighted_terms
from wholebatch.plan import plan_batch
from wholebatch.window import UpdateWindow

CASE = Case(counts=[[[5, 2], [3], [0, 4, 1]]], clip_grad_norm=0.5, optimizer="adamw")


class Setup:
    """A model with buffers and dropout, an optimizer with state, and a window over both."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        self.language_model = TinyLanguageModel()
        self.norm = nn.BatchNorm1d(5, dtype=torch.float64)
        self.model = nn.ModuleDict({"lm": self.language_model, "norm": self.norm})
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.objective = next_token_loss()
        self.window = UpdateWindow(self.model, self.optimizer, self.objective, **options)
        self.batches = CASE.batches()[0]
        self.window.run(self.batches, self.loss)  # so that the optimizer has state to lose

    def loss(self, _: nn.Module, batch: dict[str, Tensor]) -> Any:
        hidden = nn.functional.dropout(self.language_model(batch["input_ids"]), 0.1)
        return self.objective(self.norm(hidden), batch)

    def state(self) -> dict[str, Any]:
        return {
            "model": copy.deepcopy(self.model.state_dict()),
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            "gradients": [None if p.grad is None else p.grad.clone() for p in self.model.parameters()],
            "counters": self.window.counters.state_dict(),
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
            "numpy": np.random.get_state()[1],
        }


def assert_same(one: Any, other: Any, path: str = "state") -> None:
    if isinstance(one, Tensor):
        assert torch.equal(one, other), path
    elif isinstance(one, np.ndarray):
        assert np.array_equal(one, other), path
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), path
        for key in one:
            assert_same(one[key], other[key], f"{path}.{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), path
        for index, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_same(a, b, f"{path}[{index}]")
    else:
        assert one == other, path


def fails_in_forward(setup: Setup, at: int) -> None:
    with setup.window.update(setup.batches) as update:
        for index, batch in enumerate(update):
            random.random(), np.random.rand()
            loss = setup.loss(setup.model, batch)
            if index == at:
                raise RuntimeError("out of memory")
            update.backward(loss)


def breaks(setup: Setup, at: int) -> None:
    with setup.window.update(setup.batches) as update:
        for index, batch in enumerate(update):
            loss = setup.loss(setup.model, batch)
            if index == at:
                break
            update.backward(loss)


def forgets_a_backward(setup: Setup, at: int) -> None:
    with setup.window.update(setup.batches) as update:
        for index, batch in enumerate(update):
            loss = setup.loss(setup.model, batch)
            if index != at:
                update.backward(loss)


def interrupts(setup: Setup, at: int) -> None:
    with setup.window.update(setup.batches) as update:
        for index, batch in enumerate(update):
            if index == at:
                raise KeyboardInterrupt("from the keyboard")
            update.backward(setup.loss(setup.model, batch))


def miscounts(setup: Setup, at: int) -> None:
    with setup.window.update(setup.batches) as update:
        for index, batch in enumerate(update):
            loss_sum, items = setup.loss(setup.model, batch)
            update.backward((loss_sum, items + (index == at)))


def fails_in_backward(setup: Setup, at: int) -> None:
    def fail(_: Tensor) -> None:
        raise RuntimeError("in a hook")

    with setup.window.update(setup.batches) as update:
        for index, batch in enumerate(update):
            loss_sum, items = setup.loss(setup.model, batch)
            if index == at:
                loss_sum.register_hook(fail)
            update.backward((loss_sum, items))


FAILURES: dict[Callable[[Setup, int], None], tuple[type[BaseException], str]] = {
    fails_in_forward: (RuntimeError, "out of memory"),
    fails_in_backward: (RuntimeError, "in a hook"),
    breaks: (IncompleteUpdateError, r"left after {at} of 3 micro-batches"),
    forgets_a_backward: (
        IncompleteUpdateError,
        r"micro-batch {number} of 3 on rank 0 had no update.backward",
    ),
    interrupts: (KeyboardInterrupt, "from the keyboard"),
    miscounts: (CountMismatchError, r"micro-batch {number} of 3 on rank 0: the loss of term 'loss' summed"),
}


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("failure", FAILURES, ids=lambda f: f.__name__)
def test_an_update_that_fails_leaves_no_trace_and_may_be_run_again(
    failure: Callable[[Setup, int], None], at: int
) -> None:
    setup, untouched = Setup(), Setup()
    torch.manual_seed(5)
    before = setup.state()
    kind, message = FAILURES[failure]
    with pytest.raises(kind, match=message.format(at=at, number=at + 1)):
        failure(setup, at)
    assert_same(setup.state(), before)
    setup.window.run(setup.batches, setup.loss)
    torch.manual_seed(5)
    untouched.window.run(untouched.batches, untouched.loss)
    assert_same(setup.state()["model"], untouched.state()["model"])
    assert setup.window.counters.updates_applied == 2


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_nan_anywhere_skips_the_update_and_names_the_micro_batch(at: int, where: str) -> None:
    setup = Setup()
    before = setup.state()

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Any:
        loss_sum, items = setup.loss(model, batch)
        if batch is setup.batches[at]:
            if where == "loss":
                return loss_sum * float("nan"), items
            loss_sum.register_hook(lambda gradient: gradient * float("inf"))
        return loss_sum, items

    record = setup.window.run(setup.batches, loss)
    assert record.outcome == "skipped_nonfinite"
    if where == "loss":
        assert record.reason is not None
        assert f"micro-batch {at + 1} on rank 0 is not finite" in record.reason
        assert record.loss_per_item is None
    else:
        assert record.reason == "the gradient is NaN or infinite although every summed loss is finite"
    assert record.gradient_norm is None
    assert (record.updates_attempted, record.updates_applied) == (2, 1)
    after = setup.state()
    for part in ("model", "optimizer", "gradients"):
        assert_same(after[part], before[part])
    assert setup.window.counters.updates_skipped_nonfinite == 1


def test_a_mean_over_nothing_is_named() -> None:
    setup = Setup()

    def mean_times_items(_: nn.Module, batch: dict[str, Tensor]) -> Any:
        labels = batch["labels"][:, 1:].flatten()
        logits = setup.language_model(batch["input_ids"])[:, :-1].flatten(0, 1)
        items = (labels != -100).sum()
        return nn.functional.cross_entropy(logits, labels) * items, items

    empty = Case(counts=[[[5], [0, 1], [3]]]).batches()[0]
    record = setup.window.run(empty, mean_times_items)
    assert record.reason is not None
    assert "micro-batch 2 on rank 0 is not finite, which has no items: a mean over nothing" in record.reason
    assert record.outcome == "skipped_nonfinite"  # although its gradient happens to be finite


def test_a_nan_can_be_raised_instead() -> None:
    setup = Setup(on_nonfinite="raise")
    before = setup.state()
    with pytest.raises(NonFiniteUpdateError, match="micro-batch 1 on rank 0 is not finite"):
        setup.window.run(
            setup.batches, lambda m, b: (setup.loss(m, b)[0] * float("nan"), setup.loss(m, b)[1])
        )
    assert_same(setup.state(), before)


def test_a_global_batch_without_items_is_skipped_as_empty() -> None:
    setup = Setup()
    before = setup.state()
    empty = Case(counts=[[[0, 1], [1]]]).batches()[0]
    record = setup.window.run(empty, setup.loss)
    assert record.outcome == "skipped_empty"
    assert record.loss_per_item is None
    assert record.items == 0
    after = setup.state()
    for part in ("model", "optimizer", "gradients"):
        assert_same(after[part], before[part])
    assert setup.window.counters.updates_skipped_empty == 1


def test_a_gradient_too_large_for_its_own_norm_is_not_called_infinite() -> None:
    weight = nn.Parameter(torch.ones(4, dtype=torch.float32))
    model = nn.Module()
    model.weight = weight
    window = UpdateWindow(model, torch.optim.SGD([weight], lr=1e-30), clip_grad_norm=1e30)
    record = window.run([torch.ones(1)], lambda _, batch: ((weight * 1e25).sum() * batch.sum(), 1))
    assert record.outcome == "applied"
    assert record.gradient_norm == pytest.approx(2e25)


def test_stale_gradients_are_raised_cleared_or_included() -> None:
    def leave_one(setup: Setup) -> Tensor:
        for parameter in setup.model.parameters():
            parameter.grad = torch.full_like(parameter, 0.25)
        return next(setup.model.parameters())

    setup = Setup()
    leave_one(setup)
    with pytest.raises(StaleGradientsError, match=r"7 of 7 parameters have a gradient .*lm\.embedding"):
        setup.window.run(setup.batches, setup.loss)
    assert all(torch.all(p.grad == 0.25) for p in setup.model.parameters())

    clean = Setup()
    torch.manual_seed(3)
    expected = clean.window.run(clean.batches, clean.loss).gradient_norm
    cleared = Setup(on_stale_gradients="clear")
    leave_one(cleared)
    torch.manual_seed(3)
    assert cleared.window.run(cleared.batches, cleared.loss).gradient_norm == expected

    included = Setup(on_stale_gradients="include")
    leave_one(included)
    torch.manual_seed(3)
    assert included.window.run(included.batches, included.loss).gradient_norm != expected
    leave_one(included)
    with pytest.raises(IncompleteUpdateError):
        breaks(included, 1)
    assert all(torch.all(p.grad == 0.25) for p in included.model.parameters())
    with pytest.raises(WindowUsageError, match="on_stale_gradients='keep' is none of"):
        Setup(on_stale_gradients="keep")


def test_two_windows_of_an_adversarial_pair_do_not_disturb_each_other() -> None:
    torch.manual_seed(0)
    generator, critic = nn.Linear(3, 2).double(), nn.Linear(2, 1).double()
    samples = torch.randn(6, 3, dtype=torch.float64)
    real = torch.randn(6, 2, dtype=torch.float64)

    def windows(stale: Any) -> tuple[UpdateWindow, UpdateWindow]:
        return (
            UpdateWindow(generator, torch.optim.SGD(generator.parameters(), lr=0.1)),
            UpdateWindow(critic, torch.optim.SGD(critic.parameters(), lr=0.1), on_stale_gradients=stale),
        )

    def generate(model: nn.Module, batch: Tensor) -> Any:
        return -critic(model(batch)).sum(), len(batch)

    def criticise(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Any:
        noise, truth = batch
        return (model(generator(noise).detach()) - model(truth)).sum(), len(noise)

    of_generator, of_critic = windows("raise")
    of_generator.run([samples[:2], samples[2:]], generate)
    pairs = [(samples[:4], real[:4]), (samples[4:], real[4:])]
    with pytest.raises(StaleGradientsError, match="a generator's through its discriminator"):
        of_critic.run(pairs, criticise)
    _, of_critic = windows("clear")
    record = of_critic.run(pairs, criticise)
    expected = (generator(samples).detach() - real).mean(0).norm()
    assert record.gradient_norm == pytest.approx(expected.item())


def test_several_optimizers_are_each_stepped_once() -> None:
    case = Case(counts=CASE.counts)
    one, two = case.model(), case.model()
    objective = case.objective()
    together = UpdateWindow(one, torch.optim.SGD(one.parameters(), lr=0.1), objective)
    first, *rest = list(two.parameters())
    apart = UpdateWindow(two, [torch.optim.SGD([first], lr=0.1), torch.optim.SGD(rest, lr=0.1)], objective)
    for window in (together, apart):
        window.run(case.batches()[0], loss_with(objective))
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b)


def test_calls_at_the_wrong_moment_are_refused() -> None:
    setup = Setup()
    update = setup.window.update(setup.batches)
    with pytest.raises(WindowUsageError, match="iterate an update once, inside its with block"):
        iter(update)
    with pytest.raises(WindowUsageError, match="belongs once into each turn"):
        update.backward((torch.ones(()), 1))
    with pytest.raises(WindowUsageError, match="once it has committed"):
        _ = update.record
    with (
        pytest.raises(WindowUsageError, match="another update of this window is under way"),
        setup.window.update(setup.batches),
        setup.window.update(setup.batches),
    ):
        pass

    def twice() -> None:
        with setup.window.update(setup.batches) as update:
            for batch in update:
                update.backward(setup.loss(setup.model, batch))
                update.backward(setup.loss(setup.model, batch))

    with pytest.raises(WindowUsageError, match="belongs once into each turn"):
        twice()
    with pytest.raises(WindowUsageError, match="at least one micro-batch"):
        setup.window.run([], setup.loss)
    with pytest.raises(WindowUsageError, match="takes a list of micro-batches, got one dict"):
        setup.window.run(setup.batches[0], setup.loss)
    with pytest.raises(
        WindowUsageError, match=r"tuple of 2 tensors \(\[2, 3\] and \[2\]\).*; pass \[batch\]"
    ):
        setup.window.run((torch.ones(2, 3), torch.ones(2)), setup.loss)
    with pytest.raises(WindowUsageError, match="4 sample ids were given for 6 samples"):
        setup.window.run(setup.batches, setup.loss, sample_ids=[1, 2, 3, 4])
    with pytest.raises(WindowUsageError, match=r"run needs a loss_fn\(model, batch\) that returns"):
        setup.window.run(setup.batches)
    with pytest.raises(WindowUsageError, match='on_nonfinite=\'stop\' is neither "skip" nor "raise"'):
        Setup(on_nonfinite="stop")
    assert setup.window.counters.updates_attempted == 1


def test_losses_that_are_no_sums_are_refused() -> None:
    setup = Setup()
    for wrong, message in [
        (lambda loss: loss[0], r"gave a Tensor; it must give \(loss_sum, num_items\)"),
        (lambda loss: (loss[0].expand(3), 3), r"loss of shape \[3\]; sum it over its items"),
        (lambda loss: (loss[0].bfloat16(), 3), "was summed in torch.bfloat16"),
        (lambda loss: (loss[0] * 1j, 3), "is of torch.complex128, and a loss is one real number"),
        (lambda loss: (loss[0], torch.ones(2)), r"num_items of shape \[2\]; give one number"),
        (lambda loss: (loss[0], "3"), "num_items='3'; give a number"),
        (lambda loss: (loss[0], True), "num_items=True; give a number"),
        (lambda loss: {"ce": loss}, r"the loss has the terms \['ce'\] and the objective \['loss'\]"),
        (lambda loss: (loss[0].detach(), loss[1]), "does not depend on any parameter"),
    ]:
        with pytest.raises(ObjectiveError, match=message):
            setup.window.run(setup.batches, lambda m, b, wrong=wrong: wrong(setup.loss(m, b)))
    assert setup.window.counters.updates_attempted == 1


@pytest.mark.parametrize("number", [-1, float("nan"), float("inf")])
def test_a_count_that_is_no_number_of_items_is_refused(number: float) -> None:
    model = CASE.model()
    objective = counted_loss(loss_with(next_token_loss()), count=lambda _: number)
    window = UpdateWindow(model, torch.optim.SGD(model.parameters(), lr=0.1), objective)
    with pytest.raises(ObjectiveError, match=r"micro-batch 1 counts \S+ items of term 'loss'"):
        window.run(CASE.batches()[0], loss_with(next_token_loss()))


def test_an_optimizer_that_moves_nothing_of_the_model_is_noticed() -> None:
    model, other = nn.Linear(2, 1), nn.Linear(2, 1)
    window = UpdateWindow(model, torch.optim.SGD(other.parameters(), lr=0.1))
    with pytest.raises(UpdateError, match="no parameter of the optimizer received a gradient"):
        window.run([torch.ones(3, 2)], lambda m, b: (m(b).sum(), 3))


def test_a_micro_batch_without_items_may_return_a_new_zero() -> None:
    setup = Setup()
    batches = Case(counts=[[[5], [0], [3]]]).batches()[0]

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Any:
        found = setup.loss(model, batch)
        return found if found.num_items else (torch.zeros(()), 0)

    assert setup.window.run(batches, loss).outcome == "applied"


def test_several_unknown_denominators_need_a_counting_pass() -> None:
    tags = token_loss(labels="tags")
    case = Case(counts=CASE.counts, two_terms=True)
    model = case.model()
    objective = weighted_terms(
        {
            "next": (counted_loss(lambda o, b: next_token_loss()(o, b)), 1.0),
            "tag": (counted_loss(lambda o, b: tags(o, b)), 0.3),
        }
    )
    window = UpdateWindow(model, case.make_optimizer()(list(model.parameters())), objective)
    with pytest.raises(ObjectiveError, match="can't mend one of 2 denominators"):
        window.run(case.batches()[0], loss_with(objective))
    record = window.run(case.batches()[0], loss_with(objective), counting_pass=True)
    other = case.model()
    known = UpdateWindow(other, case.make_optimizer()(list(other.parameters())), case.objective())
    assert known.run(case.batches()[0], loss_with(case.objective())).terms == record.terms
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_counting_pass_moves_neither_random_state_nor_buffers() -> None:
    one, two = Setup(), Setup()
    torch.manual_seed(1)
    one.window.run(one.batches, one.loss)
    torch.manual_seed(1)
    two.window.run(two.batches, two.loss, counting_pass=True)
    assert_same(one.state()["model"], two.state()["model"])


def test_batches_come_by_the_window_and_the_tail_is_a_window_of_its_own() -> None:
    samples = Case(counts=[[[5], [2], [3], [0], [4], [1], [5]]]).batches()[0]

    def run(tail: str) -> tuple[list[Any], UpdateWindow]:
        model = CASE.model()
        plan = plan_batch(global_batch_samples=3, micro_batch_samples=1, ranks=1, tail=tail)
        objective = next_token_loss()
        window = UpdateWindow(model, torch.optim.SGD(model.parameters(), lr=0.1), objective, plan=plan)
        return [window.run(b, loss_with(objective)) for b in window.batches(samples)], window

    records, window = run("partial")
    assert [r.samples for r in records] == [3, 3, 1]
    assert [r.partial for r in records] == [False, False, True]
    assert [r.items for r in records] == [4 + 1 + 2, 0 + 3 + 0, 4]
    assert window.counters.samples == 7
    records, window = run("drop")
    assert [r.samples for r in records] == [3, 3]
    assert window.samples_dropped == 1
    assert window.state_dict()["samples_dropped"] == 1


def test_batches_needs_a_plan_and_updates_keep_to_it() -> None:
    setup = Setup()
    with pytest.raises(WindowUsageError, match=r"window.batches needs to know .*plan_batch"):
        next(setup.window.batches(setup.batches))
    with pytest.raises(WindowUsageError, match=r"2 replicas and 1 are running; plan with ranks=1, or"):
        Setup(plan=plan_batch(global_batch_samples=4, micro_batch_samples=2, ranks=2))
    with pytest.raises(WindowUsageError, match=r"3 micro-batches on this rank, more than the plan's 1"):
        Setup(plan=plan_batch(global_batch_samples=6, micro_batch_samples=6, ranks=1))
    with pytest.raises(WindowUsageError, match=r"holds 6 samples over 1 replicas, more than .* of 3"):
        Setup(plan=plan_batch(global_batch_samples=3, micro_batch_samples=1, ranks=1))


def test_an_optimizer_that_fails_in_its_step_poisons_the_window() -> None:
    setup = Setup()

    def fail(*_: Any) -> None:
        raise RuntimeError("second group")

    handle = setup.optimizer.register_step_pre_hook(fail)
    with pytest.raises(PoisonedWindowError, match=r"beyond the point of no return.*second group.*number 1"):
        setup.window.run(setup.batches, setup.loss)
    handle.remove()
    with pytest.raises(PoisonedWindowError, match="restart from the last committed update, number 1"):
        setup.window.run(setup.batches, setup.loss)


def test_an_interrupt_in_the_step_stays_an_interrupt() -> None:
    setup = Setup()

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    setup.optimizer.register_step_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        setup.window.run(setup.batches, setup.loss)
    with pytest.raises(PoisonedWindowError):
        setup.window.run(setup.batches, setup.loss)


def test_losses_that_are_kept_hold_no_graph() -> None:
    setup = Setup()
    kept, freed = [], []
    with setup.window.update(setup.batches) as update:
        for batch in update:
            loss = setup.loss(setup.model, batch)
            marker = torch.nn.Identity()
            node = loss.loss_sum.grad_fn
            node.metadata["marker"] = marker
            freed.append(weakref.ref(marker))
            del node, marker
            update.backward(loss)
            kept.append(loss.loss_sum)
    assert len(kept) == 3
    assert all(loss.grad_fn is None for loss in kept)
    assert all(reference() is None for reference in freed)


class _Reads(TorchDispatchMode):
    """Counts reads of a tensor's value by the host."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.reads += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_nothing_is_read_by_the_host_between_the_first_forward_and_the_finish() -> None:
    setup = Setup(clip_grad_norm=0.1)
    with setup.window.update(setup.batches) as update:
        with _Reads() as inside:
            for batch in update:
                update.backward(setup.loss(setup.model, batch))
        assert inside.reads == 0
        with _Reads() as witness:
            float(torch.ones(()))
        assert witness.reads == 1


def test_a_window_goes_on_from_its_state() -> None:
    setup = Setup()
    state = setup.window.state_dict()
    other = Setup()
    other.window.load_state_dict({**state, "samples_dropped": 4})
    assert other.window.counters.samples == 6
    assert other.window.samples_dropped == 4
    with pytest.raises(WindowUsageError, match=r"the state of a window has \['counters'\]"):
        other.window.load_state_dict({"samples_dropped": 0, "provisional_items": None})
    with (
        pytest.raises(WindowUsageError, match="load a state between updates"),
        other.window.update(other.batches),
    ):
        other.window.load_state_dict(state)


def test_the_record_says_what_happened() -> None:
    case = Case(counts=CASE.counts, two_terms=True, clip_grad_norm=0.05)
    model, objective = case.model(), case.objective()
    optimizer = torch.optim.SGD(
        [{"params": list(model.parameters())[:1], "lr": 0.5}, {"params": list(model.parameters())[1:]}],
        lr=0.25,
    )
    window = UpdateWindow(model, optimizer, objective, clip_grad_norm=0.05)
    record = window.run(case.batches()[0], loss_with(objective))
    assert record.outcome == "applied"
    assert (record.micro_batches, record.samples, record.items, record.positions) == (3, 6, 10, 30)
    assert record.terms["tag"]["items"] == 3 + 1 + 2 + 0 + 2 + 1
    assert record.terms["tag"]["coefficient"] == 0.3
    assert record.learning_rates == [0.5, 0.25]
    assert record.gradient_norm > 0.05
    assert record.gradient_norm_after_clip == pytest.approx(0.05, rel=1e-4)
    assert record.loss_per_item == pytest.approx(
        record.terms["next"]["loss_per_item"] + 0.3 * record.terms["tag"]["loss_per_item"]
    )
    assert record.loss_scale is None
    assert record.reductions == 0
    assert record.seconds > 0
    assert len(record.peak_memory_bytes) == 1
    assert len(record.sample_digest) == 16


def test_per_sample_losses_are_items() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 1).double()
    batch = torch.randn(5, 3, dtype=torch.float64)
    objective = sample_loss(lambda output, _: output.squeeze(-1) ** 2)
    window = UpdateWindow(model, torch.optim.SGD(model.parameters(), lr=0.1), objective)
    expected = model(batch).square().mean().item()
    record = window.run([batch[:2], batch[2:]], lambda m, b: objective(m(b), b))
    assert record.items == 5
    assert record.loss_per_item == pytest.approx(expected)
    with pytest.raises(ObjectiveError, match=r"one loss for each of 5 samples, shape \[5\], got \[5, 1\]"):
        sample_loss(lambda output, _: output)(model(batch), batch)


def test_wrappers_that_it_does_not_know_are_refused_by_name() -> None:
    inner = nn.Linear(2, 2)
    for model, message in [
        (nn.DataParallel(inner), "the model is a DataParallel, which the window does not know"),
        (nn.Sequential(nn.DataParallel(inner)), "0 inside the model is a DataParallel"),
        ("model", "the model is a str; the window knows a plain module"),
    ]:
        with pytest.raises(UnsupportedError, match=message):
            UpdateWindow(model, torch.optim.SGD(inner.parameters(), lr=0.1))

    with pytest.raises(UnsupportedError, match="one rank reduces nothing; leave it out"):
        UpdateWindow(inner, torch.optim.SGD(inner.parameters(), lr=0.1), reduce="per_micro_batch")
    with pytest.raises(UnsupportedError, match="reduce='each' is none of"):
        UpdateWindow(inner, torch.optim.SGD(inner.parameters(), lr=0.1), reduce="each")


class LoudLoss(Tensor):
    """A loss of a class of its own, that is asked what each function of torch does to it."""

    heard: list[Any] = []  # noqa: RUF012 - of the class

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        cls.heard.append(function)
        return super().__torch_function__(function, types, arguments, options or {})


def test_a_loss_of_a_class_of_its_own_is_asked_for_its_backward() -> None:
    plain, loud = Setup(), Setup()

    def loud_loss(model: nn.Module, batch: dict[str, Tensor]) -> Any:
        loss_sum, num_items = loud.loss(model, batch)
        return loss_sum.as_subclass(LoudLoss), num_items

    LoudLoss.heard.clear()
    for one, loss in ((plain, plain.loss), (loud, loud_loss)):
        torch.manual_seed(1)
        assert one.window.run(one.batches, loss).outcome == "applied"
    assert_same(plain.state(), loud.state())
    assert LoudLoss.heard.count(torch.autograd.backward) == len(loud.batches)


def test_an_update_inside_a_transform_is_refused_in_torchs_words() -> None:
    setup = Setup()

    def inside(x: Tensor) -> Tensor:
        def loss(_: nn.Module, batch: dict[str, Tensor]) -> Any:
            loss_sum, num_items = setup.objective(setup.language_model(batch["input_ids"]), batch)
            return loss_sum + 0.0 * x, num_items

        setup.window.run(setup.batches, loss)
        return x.sum()

    with pytest.raises(RuntimeError, match=r"backward\(\) called inside a functorch transform"):
        torch.func.grad(inside)(torch.tensor(1.0))
    assert setup.window.counters.updates_applied == 1
