"""The caller's model and random state, put back whatever the user's own code did to them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from wholebatch.errors import JudgeError
from wholebatch.gradients import copy_gradients
from wholebatch.replay import BufferKeeper, random_state_kept


@contextmanager
def caller_untouched(model: nn.Module) -> Iterator[None]:
    """Put parameters, gradients, buffers and modes of ``model`` and all random state back at the end.

    Copies are what is run; this is for a ``loss_fn`` that reaches the caller's model by another way.

    Args:
        model: the caller's model.

    Exactness: bit for bit.
    """
    if not isinstance(model, nn.Module):
        raise JudgeError(f"model is a {type(model).__name__}, not a torch.nn.Module; nothing can be judged")
    lazy = [name for name, value in (*model.named_parameters(), *model.named_buffers()) if is_lazy(value)]
    if lazy:
        raise JudgeError(
            f"{', '.join(lazy)} of this {type(model).__name__} have no shape yet; run one forward of the "
            f"lazy modules first, as the optimizer needs it too"
        )
    values = [(parameter, parameter.detach().clone()) for parameter in model.parameters()]
    owned = [(parameter, parameter.grad) for parameter in model.parameters()]
    gradients = copy_gradients(model.parameters())
    asked = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    modes = [(module, module.training) for module in model.modules()]
    buffers = BufferKeeper(model)
    buffers.keep()
    with random_state_kept():
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, value in values:
                    if not _same_bits(parameter, value):
                        parameter.copy_(value)
                for (parameter, gradient), (_, value_of) in zip(owned, gradients, strict=True):
                    if gradient is not None and value_of is not None:
                        gradient.copy_(value_of)
                    parameter.grad = gradient
            for parameter, wanted in asked:
                parameter.requires_grad_(wanted)
            for module, training in modes:
                module.training = training
            buffers.put_back()


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool(((one == other) | (one.isnan() & other.isnan())).all())
