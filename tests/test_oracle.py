"""The oracle is what it says: one plain forward, division, backward, clip, step; and it leaves no trace."""

from __future__ import annotations

import random
from collections import namedtuple
from threading import Lock
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wholebatch.errors import JudgeError, UsageError
from wholebatch.objective import as_loss_sum
from wholebatch.oracle import batch_in, big_batch_update, private_copy, trainable

Batch = dict[str, Tensor]


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5)


def summed(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum"), len(batch["y"])


def mlp(*middle: nn.Module) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 8), *middle, nn.Tanh(), nn.Linear(8, 3))


def data(samples: int = 6) -> Batch:
    torch.manual_seed(2)
    return {"x": torch.randn(samples, 5), "y": torch.randint(0, 3, (samples,))}


def test_it_is_the_gradient_of_the_mean_by_hand() -> None:
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(2.0)
    batch = {"x": torch.tensor([[1.0], [2.0], [3.0]]), "y": torch.tensor([[1.0], [1.0], [1.0]])}

    def squares(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        return (model(batch["x"]) - batch["y"]).square().sum(), 3

    update = big_batch_update(model, squares, batch, make_optimizer=sgd, dtype=torch.float64)
    # errors 1, 3, 5; gradient 2 * (1*1 + 3*2 + 5*3) / 3 = 44/3; loss (1 + 9 + 25) / 3
    assert update.gradients["weight"].item() == pytest.approx(44 / 3, rel=1e-15)
    assert update.parameters["weight"].item() == pytest.approx(2 - 22 / 3, rel=1e-15)
    assert update.loss_per_item == pytest.approx(35 / 3, rel=1e-15)
    assert update.gradient_norm == pytest.approx(44 / 3, rel=1e-15)
    assert (update.num_items, update.loss_sums) == ({"loss": 3.0}, {"loss": 35.0})


@pytest.mark.parametrize("items", [np.int64(6), np.uint8(6), np.float32(6), torch.tensor([6]), 6.0])
def test_numbers_of_items_are_read_as_the_window_reads_them(items: Any) -> None:
    def loss_fn(model: nn.Module, batch: Batch) -> tuple[Tensor, Any]:
        return summed(model, batch)[0], items

    assert as_loss_sum((torch.ones(()), items)).num_items == 6
    update = big_batch_update(mlp(), loss_fn, data(), make_optimizer=sgd)
    assert update.num_items == {"loss": 6.0}
    plain = big_batch_update(mlp(), summed, data(), make_optimizer=sgd)
    assert torch.equal(update.gradients["0.weight"], plain.gradients["0.weight"])


def test_terms_have_their_own_items_and_coefficients() -> None:
    model = nn.Linear(2, 1, bias=False).double()
    x = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)

    def terms(model: nn.Module, batch: Tensor) -> dict[str, tuple[Tensor, Any]]:
        out = model(batch).squeeze(1)
        return {"a": (out[0], 4), "b": (out[1], torch.tensor(8.0)), "none": (out.sum() * 0, 0)}

    update = big_batch_update(model, terms, x, make_optimizer=sgd, coefficients={"a": 2.0})
    assert update.gradients["weight"].tolist() == [[2 / 4, 1 / 8]]
    assert update.num_items == {"a": 4.0, "b": 8.0, "none": 0.0}


@pytest.mark.parametrize("clip", [0.01, 1e6])
def test_clipping_is_torchs_own(clip: float) -> None:
    model, batch = mlp(), data()
    update = big_batch_update(model, summed, batch, make_optimizer=sgd, clip_grad_norm=clip)
    loss_sum, items = summed(model, batch)
    (loss_sum / items).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
    assert update.gradient_norm == norm.item()
    for name, parameter in model.named_parameters():
        assert torch.equal(update.gradients[name], parameter.grad)


def test_float64_leaves_little_rounding() -> None:
    model, batch = mlp(), data()
    near = big_batch_update(model, summed, batch, make_optimizer=sgd)
    true = big_batch_update(model, summed, batch, make_optimizer=sgd, dtype=torch.float64)
    again = big_batch_update(model.double(), summed, batch_in(batch, torch.float64), make_optimizer=sgd)
    for name, gradient in true.gradients.items():
        assert torch.equal(gradient, again.gradients[name])
        assert 0 < (near.gradients[name].double() - gradient).abs().max() < 1e-6


def test_the_caller_sees_nothing_of_it() -> None:
    model, batch = mlp(nn.BatchNorm1d(8), nn.Dropout(0.5)), data()
    model[3].eval()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(3), random.seed(3), np.random.seed(3)

    def noisy(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        random.random(), np.random.rand()
        return summed(model, batch)

    big_batch_update(model, noisy, batch, make_optimizer=sgd)
    after = (torch.rand(1).item(), random.random(), np.random.rand())
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    assert after == (torch.rand(1).item(), random.random(), np.random.rand())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert [module.training for module in model] == [True, True, True, False, True]
    assert torch.equal(model[0].weight.grad, torch.ones_like(model[0].weight))
    assert model[0].bias.grad is None


def test_random_state_is_put_back_after_an_exception() -> None:
    def fails(*_: Any) -> tuple[Tensor, int]:
        torch.rand(7)
        raise RuntimeError("out of data")

    model, batch = mlp(), data()
    state = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="out of data"):
        big_batch_update(model, fails, batch, make_optimizer=sgd)
    assert torch.equal(torch.get_rng_state(), state)


def test_frozen_tied_and_unreached_parameters() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(3, 3)
            self.out = nn.Linear(3, 3, bias=False)
            self.out.weight = self.embed.weight
            self.frozen = nn.Linear(3, 3).requires_grad_(False)
            self.unused = nn.Linear(3, 3)

        def forward(self, ids: Tensor) -> Tensor:
            return self.out(self.frozen(self.embed(ids)))

    def loss(model: nn.Module, ids: Tensor) -> tuple[Tensor, int]:
        return model(ids).square().sum(), len(ids)

    model = Tied()
    copied = private_copy(model, torch.float64)
    assert copied.out.weight is copied.embed.weight
    update = big_batch_update(model, loss, torch.tensor([0, 1, 2]), make_optimizer=sgd)
    assert set(update.gradients) == {"embed.weight"}
    assert set(update.parameters) == {"embed.weight", "unused.weight", "unused.bias"}
    assert torch.equal(update.parameters["unused.bias"], model.unused.bias)
    loss_sum, items = loss(model, torch.tensor([0, 1, 2]))
    (loss_sum / items).backward()
    assert torch.equal(update.gradients["embed.weight"], model.embed.weight.grad)


def test_a_model_from_outside_is_refused_and_gets_no_gradient() -> None:
    other = mlp()
    with pytest.raises(JudgeError, match="must call its own first argument"):
        big_batch_update(mlp(), lambda _, batch: summed(other, batch), data(), make_optimizer=sgd)
    assert all(parameter.grad is None for parameter in other.parameters())


def test_a_constant_loss_is_refused() -> None:
    with pytest.raises(JudgeError, match="does not depend on any trainable parameter"):
        big_batch_update(mlp(), lambda *_: (torch.tensor(1.0), 1), data(), make_optimizer=sgd)


one = torch.ones((), requires_grad=True)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (one, r"returned a Tensor of shape \[\] for term 'loss'; it must return \(loss_sum, num_items\)"),
        (None, "returned a NoneType for term 'loss'"),
        ((one, 2, 3), "returned a tuple for term 'loss'"),
        ({}, "returned an empty dict"),
        ((one.expand(2), 2), r"a loss of shape \[2\] for term 'loss'; sum it to a scalar"),
        ((one * 1j, 2), "a loss of torch.complex64 for term 'loss'; a loss is one real number"),
        ((one, "many"), "num_items='many' for term 'loss'; give one number"),
        ((one, "3"), "num_items='3' for term 'loss'; give one number"),
        ((one, True), "num_items=True for term 'loss'; give one number"),
        ((one, torch.ones(2)), r"num_items=tensor\(\[1., 1.\]\) for term 'loss'; give one number"),
        ((one * float("nan"), 2), "loss_sum=nan and num_items=2.0"),
        ((one, float("inf")), "loss_sum=1.0 and num_items=inf"),
        ({"a": (one, 0), "b": (one, 0)}, r"counted 0 items in the whole batch \(terms: a, b\)"),
    ],
)
def test_answers_that_are_no_sum_with_its_items(answer: Any, message: str) -> None:
    with pytest.raises(JudgeError, match=message):
        big_batch_update(mlp(), lambda *_: answer, data(), make_optimizer=sgd)


def test_other_refusals() -> None:
    with pytest.raises(JudgeError, match=r"coefficients name \['aux'\], but loss_fn returned the terms"):
        big_batch_update(mlp(), summed, data(), make_optimizer=sgd, coefficients={"aux": 1.0})
    with pytest.raises(JudgeError, match="no parameter of this Sequential requires a gradient"):
        big_batch_update(mlp().requires_grad_(False), summed, data(), make_optimizer=sgd)
    with pytest.raises(UsageError, match=r"dtype=torch\.int8 is none of torch\.float64"):
        big_batch_update(mlp(), summed, data(), make_optimizer=sgd, dtype=torch.int8)

    class Unique(nn.Linear):
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("one of a kind")

    with pytest.raises(JudgeError, match="a Unique that can't be deep-copied can't be tried out: one"):
        big_batch_update(Unique(5, 3), summed, data(), make_optimizer=sgd)


def test_a_batch_keeps_its_form_when_it_is_widened() -> None:
    pair = namedtuple("pair", "x n")
    batch = {
        "pair": pair(torch.ones(2), 3),
        "list": [torch.ones(1, dtype=torch.bfloat16), "text"],
        "ids": torch.ones(2, dtype=torch.long),
        "array": np.ones(2, dtype=np.float32),
        "whole": np.ones(2, dtype=np.int32),
    }
    wide = batch_in(batch, torch.float64)
    assert type(wide["pair"]) is pair
    assert wide["pair"].x.dtype == torch.float64
    assert wide["pair"].n == 3
    assert wide["list"][0].dtype == torch.float64
    assert wide["list"][1] == "text"
    assert wide["ids"].dtype == torch.long
    assert wide["array"].dtype == np.float64
    assert wide["whole"].dtype == np.int32
    alike = batch_in(batch | {"again": batch["ids"], "lock": Lock()}, None)
    alike["ids"].zero_()
    alike["pair"].x.zero_()
    alike["array"][:] = 0
    assert alike["again"] is alike["ids"], "one object in two places stays one"
    assert (batch["ids"].tolist(), batch["pair"].x.tolist(), batch["array"].tolist()) == (
        [1, 1],
        [1, 1],
        [1, 1],
    )
    asking = torch.ones(2, requires_grad=True)
    assert batch_in(asking, None).requires_grad
    assert batch_in(asking, torch.float64).is_leaf


def test_complex_parameters_stay_complex() -> None:
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, dtype=torch.complex64))

    assert private_copy(Complex(), torch.float64).weight.dtype == torch.complex128
    assert private_copy(Complex(), torch.bfloat16).weight.dtype == torch.complex64
    assert list(trainable(Complex())) == ["weight"]
