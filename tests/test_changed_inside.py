"""What a loop can do behind the window's back, on one rank: noticed, or made harmless."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import wholebatch as wb
from wholebatch.errors import (
    ChangedInsideWindowError,
    CountMismatchError,
    IncompleteUpdateError,
    ObjectiveError,
    PoisonedWindowError,
    UnsupportedError,
    WindowUsageError,
)
from wholebatch.gradients import careful_norm
from wholebatch.objective import SummedLoss, counted_loss, sample_loss
from wholebatch.snapshot import CLOSE_UPDATES
from wholebatch.window import UpdateWindow

X = torch.arange(8, dtype=torch.float64).reshape(2, 4) / 8


def linear(seed: int = 0, inputs: int = 4) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(inputs, 3, dtype=torch.float64)


def squares(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
    return model(batch).square().sum(), len(batch)


class Meddler:
    """One update of three micro-batches with something done after the first backward."""

    def __init__(self, **options: Any) -> None:
        self.model = nn.Sequential(linear(), linear(1, 3))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        self.window = UpdateWindow(self.model, self.optimizer, **options)
        self.window.run([X], squares)

    def run(self, meddle: Callable[[Any], Any], *, after: int = 1) -> None:
        with self.window.update([X, X, X]) as update:
            for number, batch in enumerate(update, start=1):
                update.backward(squares(self.model, batch))
                if number == after:
                    meddle(self)

    def other_backward(self) -> None:
        squares(self.model, X)[0].backward()


MEDDLING: dict[str, tuple[Callable[[Any], Any], str]] = {
    "zero_grad": (lambda m: m.optimizer.zero_grad(), "gradients were written or cleared"),
    "zero_in_place": (
        lambda m: m.optimizer.zero_grad(set_to_none=False),
        "gradients were written or cleared",
    ),
    "clip": (
        lambda m: nn.utils.clip_grad_norm_(m.model.parameters(), 0.01),
        "gradients were written or cleared",
    ),
    "one_cleared": (
        lambda m: setattr(m.model[1].bias, "grad", None),
        "gradients were written or cleared",
    ),
    "backward": (lambda m: m.other_backward(), "gradients were written or cleared"),
    "step": (lambda m: m.optimizer.step(), r"the parameter 0\.weight was written"),
    "freeze": (lambda m: m.model[1].weight.requires_grad_(False), r"1\.weight was frozen or unfrozen"),
    "schedule": (lambda m: m.schedule.step(), "a learning rate was changed"),
    "mode": (lambda m: m.model.eval(), "switched between train"),
}


TURNS = 4
WATCHED = "gradients were written or cleared"


class Writer:
    """Updates of four micro-batches in which chosen gradients are written after a chosen turn."""

    def __init__(self, *, updates_before: int) -> None:
        self.model = nn.Sequential(*(linear(seed, 4 if seed == 0 else 3) for seed in range(3)))
        self.window = UpdateWindow(self.model, torch.optim.SGD(self.model.parameters(), lr=1e-4))
        self.turns_run = 0
        for _ in range(updates_before):
            self.run(slice(0), after=1)

    def run(self, written: slice, *, after: int) -> None:
        with self.window.update([X] * TURNS) as update:
            for self.turns_run, batch in enumerate(update, start=1):
                update.backward(squares(self.model, batch))
                if self.turns_run == after:
                    for parameter in list(self.model.parameters())[written]:
                        parameter.grad *= 2


@pytest.mark.parametrize("after", range(1, TURNS + 1))
@pytest.mark.parametrize("updates_before", [0, CLOSE_UPDATES - 1, CLOSE_UPDATES, 3 * CLOSE_UPDATES])
def test_a_write_to_one_gradient_is_seen_in_the_next_turn_of_a_close_update(
    updates_before: int, after: int
) -> None:
    for one in range(6):
        writer = Writer(updates_before=updates_before)
        with pytest.raises(ChangedInsideWindowError, match=WATCHED):
            writer.run(slice(one, one + 1), after=after)
        assert writer.turns_run == min(after + 1, TURNS)


@pytest.mark.parametrize("after", range(1, TURNS + 1))
def test_a_write_to_all_gradients_is_seen_in_the_next_turn_of_every_update(after: int) -> None:
    writer = Writer(updates_before=CLOSE_UPDATES + 1)
    for _ in range(CLOSE_UPDATES + 2):
        with pytest.raises(ChangedInsideWindowError, match=WATCHED):
            writer.run(slice(None), after=after)
        assert writer.turns_run == min(after + 1, TURNS)


def test_a_write_to_one_gradient_after_the_last_backward_is_seen_in_every_update() -> None:
    for one in range(6):
        writer = Writer(updates_before=CLOSE_UPDATES + 1)
        with pytest.raises(ChangedInsideWindowError, match=WATCHED):
            writer.run(slice(one, one + 1), after=TURNS)


def test_a_write_to_one_gradient_between_two_turns_is_seen_in_one_update_of_several() -> None:
    """The rule of docs/window.md as it is, so that a change of it shows."""
    seen = []
    writer = Writer(updates_before=CLOSE_UPDATES + 1)
    numbers = range(CLOSE_UPDATES + 1, 2 * CLOSE_UPDATES + 1)
    for number in numbers:
        try:
            writer.run(slice(0, 1), after=1)
        except ChangedInsideWindowError:
            seen.append(number)
    its_turn = [number for number in numbers if number % 6 == 0]  # there are six gradients
    assert seen == [*its_turn, 2 * CLOSE_UPDATES]


@pytest.mark.parametrize("after", [1, 3])
@pytest.mark.parametrize("name", MEDDLING)
def test_meddling_inside_the_loop_is_noticed(name: str, after: int) -> None:
    meddle, message = MEDDLING[name]
    meddler = Meddler()
    with pytest.raises(ChangedInsideWindowError, match=message):
        meddler.run(meddle, after=after)
    assert meddler.window.counters.updates_attempted == 1
    assert all(parameter.grad is None for parameter in meddler.model.parameters())
    assert meddler.model.training, "the mode is put back"


def test_looking_at_gradients_inside_the_loop_is_no_meddling() -> None:
    meddler = Meddler()
    seen: list[float] = []

    def look(m: Meddler) -> None:
        seen.append(float(nn.utils.get_total_norm([p.grad for p in m.model.parameters()])))
        weights = m.model[0].weight
        seen.append(float(torch.autograd.grad(squares(m.model, X)[0], weights)[0].norm()))

    meddler.run(look)
    assert len(seen) == 2
    assert meddler.window.counters.updates_applied == 2


def test_a_backward_that_failed_half_way_is_not_run_a_second_time() -> None:
    """The loop catches an out-of-memory error and tries again: part of the gradient is there already."""
    fails = [True]

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, value: Tensor) -> Tensor:
            return value.clone()

        @staticmethod
        def backward(_: Any, gradient: Tensor) -> Tensor:
            if fails.pop() if fails else False:
                raise RuntimeError("out of memory")
            return gradient

    model = nn.Sequential(linear(), linear(1, 3))
    window = UpdateWindow(model, torch.optim.SGD(model.parameters(), lr=1.0))

    def loss(batch: Tensor) -> tuple[Tensor, int]:
        return model[1](Fails.apply(model[0](batch))).square().sum(), len(batch)

    def retry() -> None:
        with window.update([X]) as update:
            for batch in update:
                try:
                    update.backward(loss(batch))
                except RuntimeError:
                    update.backward(loss(batch))

    with pytest.raises(WindowUsageError, match="belongs once into each turn"):
        retry()
    fails.append(True)

    def go_on() -> None:
        with window.update([X, X]) as update:
            for batch in update:
                try:
                    update.backward(loss(batch))
                except RuntimeError:
                    continue

    with pytest.raises(IncompleteUpdateError, match="rolled back"):
        go_on()
    assert window.counters.updates_attempted == 0


def test_a_parameter_group_added_later_is_cleared_clipped_and_watched_too() -> None:
    model = nn.Sequential(linear(), linear(1, 3))
    model[1].requires_grad_(False)
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    window = UpdateWindow(model, optimizer, clip_grad_norm=0.1)
    window.run([X], squares)
    model[1].requires_grad_(True)
    optimizer.add_param_group({"params": list(model[1].parameters())})
    for _ in range(2):
        record = window.run([X], squares)
        assert model[1].weight.grad is None
    assert record.gradient_norm_after_clip == pytest.approx(0.1, rel=1e-4)
    assert len(record.learning_rates) == 2


def test_a_parameter_that_is_itself_a_loss_keeps_learning() -> None:
    model = nn.Module()
    model.inner, model.log_scale = linear(), nn.Parameter(torch.ones((), dtype=torch.float64))
    objective = wb.weighted_terms(
        {
            "fit": (sample_loss(lambda output, _: output.square().sum(1)), 1.0),
            "scale": (counted_loss(lambda *_: (model.log_scale, 1), count=lambda _: 1), 1.0),
        }
    )
    window = UpdateWindow(model, torch.optim.SGD(model.parameters(), lr=0.1), objective)
    found = []
    for _ in range(3):
        window.run([X, X], lambda model, batch: objective(model.inner(batch), batch))
        found.append(model.log_scale.item())
    assert found == pytest.approx([0.9, 0.8, 0.7])


def test_default_collation_is_counted_in_samples() -> None:
    data = TensorDataset(torch.randn(32, 4, dtype=torch.float64), torch.randint(3, (32,)))
    model, objective = linear(), wb.token_loss(labels=1)
    plan = wb.plan_batch(global_batch_samples=16, micro_batch_samples=8, ranks=1, tail="drop")
    window = UpdateWindow(model, torch.optim.SGD(model.parameters(), lr=0.1), objective, plan=plan)
    records = [
        window.run(batches, lambda model, batch: objective(model(batch[0]), batch))
        for batches in window.batches(DataLoader(data, batch_size=8))
    ]
    assert [record.samples for record in records] == [16, 16]
    assert window.samples_dropped == 0


def test_only_the_end_of_the_data_is_a_tail() -> None:
    model = linear()
    plan = wb.plan_batch(global_batch_samples=4, micro_batch_samples=2, ranks=1, tail="drop")
    window = UpdateWindow(model, torch.optim.SGD(model.parameters(), lr=0.1), plan=plan)
    loader = [X, X, X, X[:1], X, X, X, X[:1]]
    sizes = [sum(len(batch) for batch in batches) for batches in window.batches(loader)]
    assert sizes == [4, 3, 4]
    assert window.samples_dropped == 3


def test_stale_gradients_are_included_as_they_are_whatever_scales_the_rest() -> None:
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=1024.0)):
        model = linear().float()
        objective = counted_loss(squares, count=len)
        window = UpdateWindow(
            model,
            torch.optim.SGD(model.parameters(), lr=1.0),
            objective,
            scaler=scaler,
            on_stale_gradients="include",
        )
        before = model.weight.detach().clone()
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 10.0)
        window.run([X.float()], lambda model, batch: (squares(model, batch)[0] * 0, 2))
        assert torch.equal(before - model.weight, torch.full_like(before, 10.0))

        def bad(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
            return squares(model, batch)[0] * float("nan"), 2

        model.weight.grad = torch.ones_like(before)
        assert window.run([X.float()], bad).outcome == "skipped_nonfinite"
        assert torch.equal(model.weight.grad, torch.ones_like(before)), "it still waits"
    model = linear()
    unknown = UpdateWindow(model, torch.optim.SGD(model.parameters(), lr=1.0), on_stale_gradients="include")
    with pytest.raises(ObjectiveError, match="needs the number of items ahead of the forward"):
        unknown.run([X], squares)


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([7, -5], "says that it summed -5 items"),
        ([float("inf"), 1.0], "give a number of items"),
        ([torch.tensor(float("nan")), 1.0], "says that it summed nan items"),
        ([10**400, 1], "give a number of items"),
    ],
)
def test_numbers_of_items_that_are_none_are_refused(items: list[Any], message: str) -> None:
    model = linear()
    window = UpdateWindow(model, torch.optim.SGD(model.parameters(), lr=0.1))
    given = iter(items)
    with pytest.raises((CountMismatchError, ObjectiveError), match=message):
        window.run([X, X], lambda model, batch: (squares(model, batch)[0], next(given)))
    assert window.run([X], lambda m, b: (squares(m, b)[0], np.int64(2))).items == 2


@pytest.mark.parametrize("alike", [True, False])
def test_labels_written_between_their_count_and_their_sum_are_noticed(alike: bool) -> None:
    model = linear().float()
    window = UpdateWindow(model, torch.optim.SGD(model.parameters(), lr=0.1), wb.token_loss())
    before, buffer = model.weight.detach().clone(), np.array([0, 1])
    labels = torch.from_numpy(buffer)
    batches = [{"x": X.float(), "labels": labels.clone()}, {"x": X.float(), "labels": labels}]
    if not alike:
        batches[0] = {"x": X[:1].float(), "labels": labels[:1].clone()}

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Any:
        buffer[1] = -100  # as a loader that fills its buffer again; torch does not see it
        return wb.token_loss()(model(batch["x"]), batch)

    with pytest.raises(CountMismatchError, match=r"micro-batch 2 of 2 .* summed 1 items and the objective"):
        window.run(batches, loss)
    assert torch.equal(model.weight, before)


def test_a_count_of_a_class_of_your_own_is_heeded() -> None:
    class Twice(SummedLoss):
        def count(self, batch: Any) -> dict[str, float]:
            return {"loss": 2.0 * float(SummedLoss.count(self, batch)["loss"])}

    plain, model = wb.token_loss(), linear().float()
    own = Twice(name="twice", loss=plain.loss, items=plain.items, items_of_each=plain.items_of_each)
    window = UpdateWindow(model, torch.optim.SGD(model.parameters(), lr=0.1), own)
    with pytest.raises(CountMismatchError, match="summed 2 items and the objective counted 4"):
        window.run([{"x": X.float(), "labels": torch.tensor([0, 1])}], lambda m, b: plain(m(b["x"]), b))


def test_tiny_weights_are_compared_to_their_own_size() -> None:
    model = linear()
    objective = counted_loss(squares, count=lambda _: 1e-8)
    window = UpdateWindow(model, torch.optim.SGD(model.parameters(), lr=0.1), objective)
    with pytest.raises(CountMismatchError, match="summed 7e-08 items and the objective counted 1e-08"):
        window.run([X], lambda model, batch: (squares(model, batch)[0], 7e-8))


def test_a_window_of_no_samples_is_not_divided_by_zero() -> None:
    model = linear()
    window = UpdateWindow(model, torch.optim.SGD(model.parameters(), lr=1.0))
    before = model.weight.detach().clone()
    window.run([[], []], lambda model, _: (model(X).square().sum(), 2))
    reference = linear()
    (reference(X).square().sum() * 2 / 4).backward()
    torch.testing.assert_close(before - model.weight, reference.weight.grad)


def test_an_unknown_denominator_is_learned_from_a_skipped_update_too() -> None:
    model = linear()
    window = UpdateWindow(model, torch.optim.SGD(model.parameters(), lr=0.1))
    window.run([X], lambda model, batch: (squares(model, batch)[0] * float("inf"), 4096))
    assert window.state_dict()["provisional_items"] == 4096
    with pytest.raises(WindowUsageError, match="provisional_items=nan is no number of items"):
        window.load_state_dict({**window.state_dict(), "provisional_items": float("nan")})


def test_norms_that_overflow_are_summed_with_care() -> None:
    assert careful_norm([torch.full((4,), 1e200, dtype=torch.float64)]) == pytest.approx(2e200)
    assert careful_norm([torch.tensor([1.0, float("inf")])]) == float("inf")
    assert np.isnan(careful_norm([torch.tensor([1.0, float("nan")]), torch.tensor([1e200])]))
    assert careful_norm([torch.tensor([3.0 + 4.0j])]) == pytest.approx(5.0)
    assert careful_norm([torch.zeros(2), torch.zeros(0)]) == 0.0


def test_a_clip_far_from_the_norm_does_not_leave_a_float32_factor() -> None:
    weight = nn.Parameter(torch.zeros(1))
    model = nn.Module()
    model.weight = weight
    window = UpdateWindow(model, torch.optim.SGD([weight], lr=1.0, fused=True), clip_grad_norm=1e-20)
    window.run([torch.ones(1)], lambda _, batch: (weight.sum() * 1e20 * batch.sum(), 1))
    assert weight.item() == pytest.approx(-1e-20)


def test_one_autocast_around_several_updates_sees_each_of_them() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    window = UpdateWindow(model, torch.optim.SGD(model.parameters(), lr=1.0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = [
            window.run([X.float()], lambda m, b: (m(b).float().square().sum(), 2)).loss_per_item
            for _ in range(3)
        ]
    assert len(set(losses)) == 3


class GrowingCache(nn.Module):
    """Changes the shape of a buffer in its forward, and makes one that was not there."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()
        self.register_buffer("cache", torch.zeros(2))
        self.register_buffer("late", None)
        self.register_buffer("wide", torch.ones(1, 4).expand(2, 4))

    def forward(self, batch: Tensor) -> Tensor:
        self.cache.data = torch.zeros(len(self.cache) + 1)
        self.late = torch.ones(1)
        return self.inner(batch)


def test_odd_buffers_are_put_back() -> None:
    model = GrowingCache()
    window = UpdateWindow(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def fail(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
        squares(model, batch)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        window.run([X, X], fail)
    assert model.cache.shape == (2,)
    assert model.late is None
    record = window.run([X], lambda m, b: (squares(m, b)[0] * float("nan"), 2))
    assert record.outcome == "skipped_nonfinite"
    assert model.cache.shape == (2,)
    assert window.run([X], squares).outcome == "applied"


def test_a_window_poisoned_by_its_schedule_does_not_count_the_update() -> None:
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 if n < 2 else 1 / 0)
    window = UpdateWindow(model, optimizer, scheduler=wb.per_update(schedule))
    window.run([X], squares)
    with pytest.raises(PoisonedWindowError, match="the last committed update, number 1"):
        window.run([X], squares)
    assert window.counters.updates_attempted == 1


def test_losses_that_are_infinite_do_not_grow_the_loss_scale() -> None:
    model = linear().float()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    window = UpdateWindow(model, torch.optim.SGD(model.parameters(), lr=0.1), scaler=scaler)
    record = window.run([X.float()], lambda m, b: (squares(m, b)[0] + torch.tensor(float("inf")), 2))
    assert record.outcome == "skipped_nonfinite"
    assert scaler.get_scale() == 8.0


def test_a_scaler_before_its_first_scale() -> None:
    model = linear().float()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    window = UpdateWindow(model, torch.optim.SGD(model.parameters(), lr=0.1), scaler=scaler)
    assert window.run([X.float()], lambda *_: (torch.zeros(()), 0)).outcome == "skipped_empty"

    def meddle(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
        scaler.update(new_scale=1024.0)
        return squares(model, batch)

    with pytest.raises(ChangedInsideWindowError, match="the loss scale was updated"):
        window.run([X.float(), X.float()], meddle)


def test_an_update_runs_once() -> None:
    model = linear()
    window = UpdateWindow(model, torch.optim.SGD(model.parameters(), lr=0.1))
    update = window.update([X])
    with update:
        for batch in update:
            update.backward(squares(model, batch))
    with pytest.raises(WindowUsageError, match=r"make a new update with window\.update for each"), update:
        pass


def test_views_keep_their_graph_and_counts_do_not() -> None:
    model = linear()
    window = UpdateWindow(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with window.update([X]) as update:
        for batch in update:
            loss_sum, _ = squares(model, batch)
            view = loss_sum.reshape(1)[0]
            items = loss_sum * 0 + 2
            update.backward((view, items))
    assert view.grad_fn is not None
    assert update.record.items == 2
    assert all(not given.num_items.requires_grad for row in update._losses for given in row.values())


def test_batches_without_a_dimension_of_samples_bring_their_own_count() -> None:
    model = linear()
    packed = {"rows": torch.zeros(5, 4, dtype=torch.float64), "starts": torch.tensor([0, 2, 4])}
    options: dict[str, Any] = {"count_samples": lambda batch: len(batch["starts"])}
    window = UpdateWindow(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)
    record = window.run([packed], lambda model, batch: (model(batch["rows"]).sum(), 5))
    assert (record.samples, record.items) == (3, 5)
    plain = UpdateWindow(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match=r"batch\['starts'\] has 3; .*count_samples="):
        plain.run([packed], lambda model, batch: (model(batch["rows"]).sum(), 5))


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"objective": nn.CrossEntropyLoss()}, WindowUsageError, "objective is a CrossEntropyLoss"),
        ({"optimizer": {"a": 1}}, WindowUsageError, "optimizer is a dict"),
        ({"optimizer": []}, WindowUsageError, "needs at least one optimizer"),
        ({"clip_grad_norm": "1"}, WindowUsageError, "clip_grad_norm='1' is not a positive number"),
        ({"clip_grad_norm": True}, WindowUsageError, "clip_grad_norm=True is not a positive number"),
        ({"reduction_divisor": 7}, UnsupportedError, "reduction_divisor=7 tells what a communication hook"),
        ({"process_group": 3}, UnsupportedError, "process_group=3 is no torch.distributed process group"),
    ],
)
def test_odd_arguments_are_refused_at_the_start(
    arguments: dict[str, Any], kind: type[Exception], message: str
) -> None:
    model = linear()
    given = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1), **arguments}
    with pytest.raises(kind, match=message):
        UpdateWindow(model, **given)


def test_optimizers_that_would_not_be_exact_are_refused() -> None:
    model = linear()
    one = torch.optim.SGD(model.parameters(), lr=0.1)
    two = torch.optim.SGD([model.bias], lr=0.1)
    with pytest.raises(UnsupportedError, match="hold 3 parameters of which 2 are different"):
        UpdateWindow(model, [one, two])
    with pytest.raises(UnsupportedError, match=r"SGD\(differentiable=True\) keeps the graph"):
        UpdateWindow(model, torch.optim.SGD(model.parameters(), lr=0.1, differentiable=True))
    schedule = torch.optim.lr_scheduler.StepLR(two, 1)
    with pytest.raises(WindowUsageError, match="the StepLR belongs to an optimizer that this window"):
        UpdateWindow(model, one, scheduler=wb.per_update(schedule))
    with pytest.raises(UnsupportedError, match="the model has lazy parameters without a shape"):
        UpdateWindow(nn.LazyLinear(2), one)


def test_an_embedding_that_shortens_its_own_weights_is_no_meddling() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 3, max_norm=0.5), nn.Linear(3, 1))
    window = UpdateWindow(model, torch.optim.SGD(model.parameters(), lr=0.1))
    ids = torch.tensor([0, 1, 2, 3])
    assert window.run([ids, ids], lambda m, b: (m(b).square().sum(), len(b))).outcome == "applied"


def test_a_teacher_inside_the_model_may_keep_itself_in_eval() -> None:
    class Taught(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student = linear()
            with torch.inference_mode():
                self.teacher = linear(1)
            self.teacher.requires_grad_(False)

        def forward(self, batch: Tensor) -> Tensor:
            self.teacher.eval()
            return self.student(batch)

    model = Taught()
    window = UpdateWindow(model, torch.optim.SGD(model.student.parameters(), lr=0.1))
    for _ in range(2):
        model.train()
        assert window.run([X, X], squares).outcome == "applied"


def test_a_kept_update_keeps_no_data_alive() -> None:
    class Batch(list[int]):
        """A list that can be watched."""

    model = linear()
    window = UpdateWindow(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for fails in (False, True):
        batch = Batch([1, 2])
        watched = weakref.ref(batch)
        update = window.update([batch])
        try:
            with update:
                for _ in update:
                    if fails:
                        raise KeyError("here")
                    update.backward(squares(model, X))
        except KeyError:
            pass
        del batch, _
        assert watched() is None
