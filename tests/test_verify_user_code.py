"""What the user's own code does around the loss: hooks, exits, writes into its batch, prints."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from verify_problems import data, mlp, norm, summed
from wholebatch.errors import JudgeError, UsageError
from wholebatch.losses import token_loss
from wholebatch.oracle import big_batch_update, private_copy
from wholebatch.verify import verify_window
from wholebatch.verify.thirds import Thirds, same_amount_per_call

# Gradient hooks of parameters ------------------------------------------------------------------------


def normalised(gradient: Tensor) -> Tensor:
    return gradient / gradient.norm()


def normalise_sum(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.div_(parameter.grad.norm())


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_gradient_hook_that_normalises_is_not_equal(when: str) -> None:
    model = mlp()
    weight = model[0].weight
    if when == "before":
        handle = weight.register_hook(normalised)
    else:
        handle = weight.register_post_accumulate_grad_hook(normalise_sum)
    found = verify_window(model, summed, data())
    assert (found.equal, found.cause) == (False, "unknown")
    assert "Gradient hooks on parameters (0.weight)" in found.advice
    handle.remove()
    assert verify_window(model, summed, data()).equal


def test_a_gradient_hook_that_is_linear_is_equal() -> None:
    model = mlp()
    model[0].weight.register_hook(lambda gradient: 3 * gradient)
    assert verify_window(model, summed, data()).equal
    tripled = big_batch_update(model, summed, data(), make_optimizer=torch.optim.SGD)
    plain = big_batch_update(mlp(), summed, data(), make_optimizer=torch.optim.SGD)
    assert torch.equal(tripled.gradients["0.weight"], 3 * plain.gradients["0.weight"])
    assert torch.equal(tripled.gradients["0.bias"], plain.gradients["0.bias"])


def test_a_gradient_hook_that_does_not_fit_on_a_copy_is_refused() -> None:
    class Thawing(nn.Linear):
        """Its copies are frozen."""

        def __deepcopy__(self, memo: dict[int, Any]) -> nn.Linear:
            return nn.Linear(5, 3).requires_grad_(False)

    model = Thawing(5, 3)
    model.weight.register_hook(normalised)
    with pytest.raises(JudgeError, match="hooks of parameter weight can't be registered on a copy"):
        private_copy(model, None)


# sys.exit --------------------------------------------------------------------------------------------


def test_a_loss_that_calls_exit_is_no_verdict() -> None:
    def leaves(*_: Any) -> Any:
        sys.exit("out of data")

    def leaves_on_parts(model: nn.Module, batch: Any) -> Any:
        return summed(model, batch) if len(batch["x"]) == 8 else sys.exit()

    with pytest.raises(JudgeError, match=r"whole batch with sys.exit\('out of data'\), at .*, in leaves"):
        verify_window(mlp(), leaves, data())
    with pytest.raises(JudgeError, match=r"of \[4, 4\] samples fail with sys.exit\(\), at"):
        verify_window(mlp(), leaves_on_parts, data(), splits=[[4, 4]])
    with pytest.raises(JudgeError, match=r"collate failed on all 8 samples with sys.exit\(0\)"):
        verify_window(mlp(), summed, list(range(8)), collate=lambda _: sys.exit(0))
    with pytest.raises(JudgeError, match=r"update failed with sys.exit\(0\)"):
        verify_window(mlp(), summed, data(), make_optimizer=lambda _: sys.exit(0))

    class Leaving:
        coefficients: ClassVar = {"loss": 1.0}

        def count(self, _: Any) -> Any:
            sys.exit(7)

        positions = count

    with pytest.raises(JudgeError, match=r"sys.exit\(7\), at .*, in count"):
        verify_window(mlp(), summed, data(), objective=Leaving())


# A loss that writes into its batch -------------------------------------------------------------------


def writing(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    batch["x"].mul_(1.5)
    if "extra" in batch:
        batch["x"].add_(batch.pop("extra").numpy().sum() * 0)
    batch["seen"] = True
    return summed(model, batch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_loss_that_writes_into_its_batch_is_judged_right(dtype: torch.dtype) -> None:
    batch: Any = data() | {"extra": torch.ones(8)}
    batch["x"] = batch["x"].to(dtype)
    before = {name: part.clone() for name, part in batch.items()}
    assert verify_window(mlp(), writing, batch).equal
    assert list(batch) == list(before)
    assert all(torch.equal(batch[name], part) for name, part in before.items())
    wrong = verify_window(mlp(), lambda m, b: (writing(m, b)[0] / len(b["x"]), len(b["x"])), batch)
    assert wrong.cause == "mean_for_sum"
    assert all(torch.equal(batch[name], part) for name, part in before.items())


def test_a_collate_that_writes_into_its_samples_is_judged_right() -> None:
    x, y = data()["x"].double(), data()["y"]
    samples = [{"x": one.clone(), "y": label} for one, label in zip(x, y, strict=True)]

    def stacked(some: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        return {
            "x": torch.stack([one["x"].mul_(2) for one in some]),
            "y": torch.stack([s["y"] for s in some]),
        }

    assert verify_window(mlp(), writing, samples, collate=stacked).equal
    assert all(torch.equal(sample["x"], row) for sample, row in zip(samples, x, strict=True))


# A loss that differentiates by itself ----------------------------------------------------------------


def with_gradient_penalty(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    x = batch["x"].requires_grad_()
    loss_sum, items = summed(model, {"x": x, "y": batch["y"]})
    (slope,) = torch.autograd.grad(loss_sum, x, create_graph=True)
    return loss_sum + 0.1 * slope.square().sum(), items


def test_a_gradient_penalty_inside_the_loss_is_judged() -> None:
    assert verify_window(mlp(), with_gradient_penalty, data()).equal
    coupled = verify_window(mlp(norm()), with_gradient_penalty, data())
    assert coupled.cause == "batch_norm"

    def normed(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        loss_sum, items = with_gradient_penalty(model, batch)
        return loss_sum * batch["x"].square().sum(), items

    found = verify_window(mlp(), normed, data())
    assert found.cause == "coupled_samples"


def test_a_loss_that_adds_nothing_per_call_gets_no_advice_on_a_penalty() -> None:
    assert same_amount_per_call(Thirds(a=1.0, b=2.0, c=3.0, ab=3.0, bc=5.0, abc=6.0), 1e-9) is None
    amount = 0.5
    added = Thirds(a=1.0, b=2.0, c=3.0, ab=3.0 - amount, bc=5.0 - amount, abc=6.0 - 2 * amount)
    assert same_amount_per_call(added, 1e-9) == pytest.approx(amount)


# Batches of a class of their own -----------------------------------------------------------------------


class Attributes(dict[str, Tensor]):
    """A dict whose entries are attributes too."""

    def __getattr__(self, name: str) -> Tensor:
        return self[name]


class Record:
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y


def by_attribute(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    return summed(
        model, {"x": batch.x.double() if model[0].weight.dtype == torch.float64 else batch.x, "y": batch.y}
    )


def test_a_dict_with_attributes_stays_one() -> None:
    assert verify_window(mlp(), by_attribute, Attributes(data())).equal


@pytest.mark.parametrize("several", [False, True])
def test_a_collate_may_make_a_class_of_its_own(several: bool) -> None:
    whole = data()
    samples = list(zip(whole["x"], whole["y"], strict=True))

    def terms(model: nn.Module, batch: Any) -> Any:
        one = by_attribute(model, batch)
        return {"a": one, "b": one} if several else one

    found = verify_window(
        mlp(), terms, samples, collate=lambda some: Record(*map(torch.stack, zip(*some, strict=True)))
    )
    assert (found.equal, found.num_samples) == (True, 8)


# A refusal of the window, and options that do not fit -------------------------------------------------


def test_a_refusal_of_the_window_is_told_and_no_verdict() -> None:
    def changes_mode(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        model.train(not model.training)
        return summed(model, batch)

    with pytest.raises(JudgeError, match=r"the window fails on micro-batches of .*: .*mode") as told:
        verify_window(mlp(), changes_mode, data())
    assert "please report" not in str(told.value).lower()


@pytest.mark.parametrize("seed", [2**63, -(2**63) - 1, 1.5, True, "1"])
def test_seeds_that_are_none(seed: Any) -> None:
    with pytest.raises(UsageError, match=rf"seed={re.escape(repr(seed))} is no whole number from -2\*\*63"):
        verify_window(mlp(), summed, data(), seed=seed)


def test_the_largest_and_smallest_seeds() -> None:
    assert verify_window(mlp(), summed, data(), seed=2**63 - 1).equal
    assert verify_window(mlp(), summed, data(), seed=-(2**63)).equal


def test_objectives_that_are_none() -> None:
    with pytest.raises(UsageError, match="objective=7 is no objective"):
        verify_window(mlp(), summed, data(), objective=7)
    with pytest.raises(
        UsageError, match=r"coefficients=.* and objective=.* were both given.* give one of them"
    ):
        verify_window(mlp(), summed, data(), coefficients={"loss": 2.0}, objective=token_loss(labels="y"))


def test_lazy_modules_need_a_forward_first() -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(
        JudgeError, match=r"0\.weight, 0\.bias of this Sequential have no shape yet; run one"
    ):
        verify_window(model, summed, data())
    model(data()["x"])
    assert verify_window(model, summed, data()).equal


# One rank fails ---------------------------------------------------------------------------------------


def fails_on_rank_1(rank: int, n: int) -> list[str]:
    del n
    told = []

    def failing(when: Callable[[int], bool]) -> Callable[[nn.Module, Any], Any]:
        calls = itertools.count()

        def loss_fn(model: nn.Module, batch: Any) -> Any:
            if rank == 1 and (
                when(len(batch["y"])) if when is whole or when is part else when(next(calls))
            ):
                raise KeyError("gone")
            return summed(model, batch)

        return loss_fn

    def whole(samples: int) -> bool:
        return samples == 8

    def part(samples: int) -> bool:
        return samples < 8

    def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return sys.exit(4) if rank == 1 else torch.optim.SGD(parameters)

    def collate(samples: list[int]) -> Any:
        return sys.exit(4) if rank == 1 else data(len(samples))

    cases: list[dict[str, Any]] = [
        {"loss_fn": failing(whole)},
        {"loss_fn": failing(part)},
        *({"loss_fn": failing(after.__eq__), "clip_grad_norm": 0.1} for after in range(4, 19)),
        {"loss_fn": summed, "make_optimizer": optimizer},
        {"loss_fn": summed, "batch": list(range(8)), "collate": collate},
    ]
    for case in cases:
        options = {"splits": [[4, 4], [1, 3, 4]], "batch": data(), **case}
        try:
            verify_window(mlp(), **options)
        except JudgeError as error:
            told.append(str(error))
        else:
            told.append("judged")
    return told


def test_a_failure_on_one_rank_is_told_on_all() -> None:
    from ranks import run_ranks

    one, other = run_ranks(fails_on_rank_1, 2)
    assert one == other
    for told in (*one[:2], *one[-2:]):
        assert "on rank 1: " in told
        assert "(no failure on rank 0)" in told
    assert "failed on the whole batch on rank 1: KeyError: 'gone', at" in one[0]
    assert "micro-batches of [4, 4] samples fail on rank 1: KeyError: 'gone'" in one[1]
    assert len(one[2:-2]) == 15
    assert all("on rank 1: " in told and "KeyError: 'gone'" in told for told in one[2:-2]), one
    assert "sys.exit(4)" in one[-1]
    assert "sys.exit(4)" in one[-2]
