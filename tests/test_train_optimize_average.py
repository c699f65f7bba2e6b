"""The moving average: its recursion, what it follows, the exchange for an evaluation, its state."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ranks import run_ranks
from wholebatch.errors import UsageError, WindowUsageError
from wholebatch.losses import token_loss
from wholebatch.record import UpdateRecord
from wholebatch.train.average import Average, make_average
from wholebatch.train.optimize import make_optimizer, parameter_groups
from wholebatch.train.settings import AverageConfig, OptimizerConfig
from wholebatch.window import UpdateWindow

DECAY = 0.75
SAMPLES = 8


class Classifier(nn.Module):
    """Tied first and last layers, a norm with buffers, and a frozen layer; float64."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 3, dtype=torch.float64)
        self.frozen = nn.Linear(3, 3, dtype=torch.float64).requires_grad_(False)
        self.norm = nn.BatchNorm1d(3, dtype=torch.float64)
        self.last = nn.Linear(3, 3, dtype=torch.float64)
        self.last.weight = self.first.weight

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.last(self.norm(self.frozen(torch.tanh(self.first(inputs)))))
        return out


def examples(update: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(update)
    inputs = torch.randn(SAMPLES, 3, dtype=torch.float64, generator=generator)
    labels = torch.randint(0, 3, (SAMPLES,), generator=generator)
    labels[0] = -100
    return inputs, labels


def micro_batches(update: int, m: int) -> list[tuple[Tensor, Tensor]]:
    inputs, labels = examples(update)
    return list(zip(inputs.split(m), labels.split(m), strict=True))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Any:
    return token_loss(labels=1)(model(batch[0]), batch)


def make_window(model: nn.Module) -> UpdateWindow:
    chosen = OptimizerConfig(learning_rate=0.05)
    optimizer = make_optimizer(parameter_groups(model, chosen), chosen)
    return UpdateWindow(model, optimizer, token_loss(labels=1))


def record(number: int, outcome: Any = "applied") -> UpdateRecord:
    return UpdateRecord(
        outcome=outcome,
        updates_attempted=number,
        updates_applied=number,
        micro_batches=1,
        samples=1,
        items=1,
        positions=1,
        loss_per_item=1.0,
        gradient_norm=1.0,
        seconds=0.0,
    )


def averages(average: Average) -> dict[str, Tensor]:
    parameters: dict[str, Tensor] = average.state_dict()["parameters"]
    return {name: value.clone() for name, value in parameters.items()}


def test_it_is_the_weighted_sum_of_all_parameters_so_far() -> None:
    model = Classifier()
    window, average = make_window(model), Average(model, decay_per_update=DECAY)
    path = [{name: p.detach().clone() for name, p in model.named_parameters()}]
    for update in range(4):
        average.follow(window.run(micro_batches(update, 4), loss))
        path.append({name: p.detach().clone() for name, p in model.named_parameters()})
    for name, found in averages(average).items():
        expected = DECAY**4 * path[0][name]
        expected += sum((1 - DECAY) * DECAY ** (4 - k) * path[k][name] for k in range(1, 5))
        torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-15)
        assert not torch.equal(path[0][name], path[4][name])


def test_only_what_trains_is_copied_and_each_once() -> None:
    model = Classifier()
    assert list(averages(Average(model, decay_per_update=DECAY))) == [
        "first.weight",
        "first.bias",
        "norm.weight",
        "norm.bias",
        "last.bias",
    ]


def test_a_skipped_update_moves_nothing() -> None:
    model = Classifier()
    window, average = make_window(model), Average(model, decay_per_update=DECAY)
    average.follow(window.run(micro_batches(0, 4), loss))
    before = averages(average)
    broken = micro_batches(1, 4)
    broken[0][0][0] = math.nan
    skipped = window.run(broken, loss)
    assert skipped.outcome == "skipped_nonfinite"
    average.follow(skipped)
    assert all(torch.equal(value, before[name]) for name, value in averages(average).items())
    average.follow(window.run(micro_batches(2, 4), loss))
    assert not torch.equal(averages(average)["first.weight"], before["first.weight"])


def without_norm() -> Classifier:
    """BatchNorm couples samples, so the split matters to it; without it nothing does."""
    model = Classifier()
    model.norm = nn.Identity()  # type: ignore[assignment]
    return model


def average_of_a_run(m: int) -> dict[str, Tensor]:
    model = without_norm()
    window, average = make_window(model), Average(model, decay_per_update=DECAY)
    for update in range(5):
        average.follow(window.run(micro_batches(update, m), loss))
    return averages(average)


def average_on_ranks(rank: int, ranks: int) -> dict[str, Tensor]:
    """The same run with half of each global batch on each rank, the average over the wrapped model."""
    model = nn.parallel.DistributedDataParallel(without_norm())
    window, average = make_window(model), Average(model, decay_per_update=DECAY)
    for update in range(5):
        average.follow(window.run(micro_batches(update, 2)[rank::ranks], loss))
    return averages(average)


def test_the_split_does_not_matter() -> None:
    whole = average_of_a_run(SAMPLES)
    for m in (1, 3, 4):
        for name, found in average_of_a_run(m).items():
            torch.testing.assert_close(found, whole[name], rtol=1e-12, atol=1e-13)


@pytest.mark.slow
def test_the_ranks_do_not_matter() -> None:
    whole = average_of_a_run(SAMPLES)
    first, second = run_ranks(average_on_ranks, 2)
    assert list(first) == list(whole)
    for name, expected in whole.items():
        assert torch.equal(first[name], second[name])
        torch.testing.assert_close(first[name], expected, rtol=1e-12, atol=1e-13)


# The exchange


@pytest.mark.parametrize("wrapped", ["bare", "compiled"])
def test_the_model_is_its_average_inside_and_itself_afterwards(wrapped: str) -> None:
    model = Classifier()
    called = model if wrapped == "bare" else torch.compile(model, backend="eager")
    window, average = make_window(model), Average(called, decay_per_update=DECAY)  # type: ignore[arg-type]
    for update in range(3):
        average.follow(window.run(micro_batches(update, 4), loss))
    model.eval()
    inputs = examples(9)[0]
    before = copy.deepcopy(model.state_dict())
    expected_model = copy.deepcopy(model)
    state = before | averages(average)
    expected_model.load_state_dict(state | {"last.weight": state["first.weight"]})
    with torch.no_grad():
        trained = called(inputs)
        with average.swapped_in():
            found = called(inputs)
            assert model.last.weight is model.first.weight
        assert torch.equal(called(inputs), trained)
    torch.testing.assert_close(found, expected_model(inputs), rtol=1e-14, atol=1e-15)
    assert not torch.allclose(found, trained)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_training_goes_on_as_if_nothing_had_been_evaluated() -> None:
    ends = []
    for evaluates in (False, True):
        model = Classifier()
        window, average = make_window(model), Average(model, decay_per_update=DECAY)
        for update in range(3):
            average.follow(window.run(micro_batches(update, 4), loss))
            if evaluates:
                model.eval()
                with average.swapped_in(), torch.no_grad():
                    model(examples(9)[0])
                model.train()
        ends.append([*model.parameters(), *averages(average).values()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_an_exception_inside_puts_the_model_back() -> None:
    model = Classifier()
    average = Average(model, decay_per_update=DECAY)
    with torch.no_grad():
        model.first.bias.add_(1.0)
    before = model.first.bias.detach().clone()
    with pytest.raises(ZeroDivisionError), average.swapped_in():
        raise ZeroDivisionError
    assert torch.equal(model.first.bias, before)
    with average.swapped_in():
        assert not torch.equal(model.first.bias, before)


# State


def test_it_goes_on_from_its_state() -> None:
    def three(average: Average, window: UpdateWindow, first: int) -> None:
        for update in range(first, first + 3):
            average.follow(window.run(micro_batches(update, 4), loss))

    model = Classifier()
    window, average = make_window(model), Average(model, decay_per_update=DECAY)
    three(average, window, 0)
    saved = copy.deepcopy((model.state_dict(), window.finish.optimizers[0].state_dict()))
    saved_window, saved_average = window.state_dict(), copy.deepcopy(average.state_dict())
    three(average, window, 3)

    other = Classifier()
    with torch.no_grad():
        other.first.bias.add_(1.0)
    other.load_state_dict(saved[0])
    again, resumed = make_window(other), Average(other, decay_per_update=DECAY)
    again.finish.optimizers[0].load_state_dict(saved[1])
    again.load_state_dict(saved_window)
    resumed.load_state_dict(saved_average)
    three(resumed, again, 3)
    expected = averages(average)
    assert all(torch.equal(value, expected[name]) for name, value in averages(resumed).items())


def test_the_state_is_plain_data(tmp_path: Any) -> None:
    average = Average(Classifier(), decay_per_update=DECAY)
    average.follow(record(7))
    torch.save(average.state_dict(), tmp_path / "average.pt")
    state = torch.load(tmp_path / "average.pt", weights_only=True)
    assert state["updates_applied"] == 7
    fresh = Average(Classifier(), decay_per_update=DECAY)
    fresh.load_state_dict(state)
    with pytest.raises(WindowUsageError, match=r"followed 7 applied updates, .* of number 9"):
        fresh.follow(record(9))
    fresh.follow(record(8))


def test_a_state_of_other_parameters_is_refused() -> None:
    average = Average(Classifier(), decay_per_update=DECAY)
    fewer = Average(nn.Linear(3, 3), decay_per_update=DECAY).state_dict()
    with pytest.raises(UsageError, match=r"has 2 parameters and the model trains 5; .* bias, first.bi"):
        average.load_state_dict(fewer)
    wider = Average(nn.Linear(3, 4), decay_per_update=DECAY).state_dict()
    narrow = Average(nn.Linear(3, 3), decay_per_update=DECAY)
    with pytest.raises(UsageError, match=r"they differ in weight, bias, so resume with the same model"):
        narrow.load_state_dict(wider)


# Refusals


def test_none_without_a_decay() -> None:
    assert make_average(Classifier(), AverageConfig()) is None
    assert make_average(Classifier(), AverageConfig(decay_per_update=0.5)) is not None


def test_a_model_that_does_not_train_has_no_average() -> None:
    with pytest.raises(UsageError, match="no parameter of the model trains"):
        Average(nn.Linear(2, 2).requires_grad_(False), decay_per_update=DECAY)


def test_an_update_followed_twice_or_left_out_is_refused() -> None:
    average = Average(Classifier(), decay_per_update=DECAY)
    average.follow(record(4))  # a run may begin in the middle
    for number in (4, 6):
        with pytest.raises(WindowUsageError, match=f"followed 4 applied updates, .* of number {number};"):
            average.follow(record(number))
    average.follow(record(5))


def test_the_exchange_does_not_nest_and_nothing_is_followed_inside() -> None:
    average = Average(Classifier(), decay_per_update=DECAY)
    with average.swapped_in():
        with pytest.raises(WindowUsageError, match=r"swapped_in\(\) does not nest"), average.swapped_in():
            pass
        with pytest.raises(WindowUsageError, match=r"leave swapped_in\(\) before the next one"):
            average.follow(record(1))
    average.follow(record(1))
