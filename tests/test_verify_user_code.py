"""What the user's own code does around the loss: hooks, exits, writes into its batch, prints."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from verify_problems import data, mlp, summed
from wholebatch.errors import JudgeError
from wholebatch.oracle import big_batch_update, private_copy
from wholebatch.verify import verify_window

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
