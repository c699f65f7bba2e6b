"""The oracle: the whole batch, done the plain way. The second file to read.

One forward over the whole batch, one division, one backward, torch's own clipping, one optimizer
step. Nothing is split and nothing of the window is used here: a judge that shares the code it judges
proves nothing. Whatever the window does in micro-batches and over replicas must come out as this
does, up to rounding, and in float64 (``dtype=torch.float64``) little is left of rounding.

    L = sum over terms k of c_k * (summed loss of term k) / (items of term k)
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from wholebatch.errors import JudgeError, UsageError
from wholebatch.objective import LossFunction
from wholebatch.replay import random_state_kept
from wholebatch.split import like_mapping

MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]

_DTYPES = (torch.float64, torch.float32, torch.bfloat16)


@dataclass(frozen=True, kw_only=True, slots=True)
class OracleUpdate:
    """What one update of the whole batch came to.

    Attributes:
        gradients: what the optimizer was given, by parameter name: the gradient of the loss, after
            clipping where asked. Parameters that the loss does not reach have none.
        parameters: every trainable parameter after the optimizer's step, by name.
        gradient_norm: Euclidean norm over all gradients, before clipping.
        loss_per_item: ``sum_k c_k * L_k / N_k``.
        num_items: N of each term, by name.
        loss_sums: L of each term, by name.
    """

    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]
    gradient_norm: float
    loss_per_item: float
    num_items: dict[str, float]
    loss_sums: dict[str, float]


def big_batch_update(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    *,
    make_optimizer: MakeOptimizer,
    clip_grad_norm: float | None = None,
    coefficients: Mapping[str, float] | None = None,
    dtype: torch.dtype | None = None,
) -> OracleUpdate:
    """Run one update over the whole batch at once, on a copy of the model.

    The gradient of ``sum_k c_k * L_k / N_k``, where ``(L_k, N_k)`` is what ``loss_fn`` returned for
    term k over the whole batch; then the optimizer's step.

    Args:
        model: the model as it is, in whatever mode it is; the caller's copy is not touched.
        loss_fn: ``loss_fn(model, batch)`` returns ``(loss_sum, num_items)``, or a dict of those by
            term. It must use the model it is given.
        batch: the whole batch, as ``loss_fn`` takes it.
        make_optimizer: makes the optimizer from the list of trainable parameters.
        clip_grad_norm: largest global norm of the gradient, or ``None``.
        coefficients: ``c_k`` by term; 1 for a term that is not named.
        dtype: runs model and batch in this precision; ``None`` leaves both as they are.

    Returns:
        Gradients, updated parameters, norm, loss and counts of the whole batch.

    Raises:
        JudgeError: the loss is not of the form above, does not depend on the model, is not finite,
            or counts no items; or the model can't be copied.

    Exactness: the definition that everything else is measured against; rounding in ``dtype``. The
        model, its buffers and gradients, and all random state are afterwards what they were before.
    """
    with random_state_kept(), torch.enable_grad():
        copied = private_copy(model, dtype)
        parameters = trainable(copied)
        if not parameters:
            raise JudgeError(no_trainable(model))
        optimizer = make_optimizer(list(parameters.values()))

        terms = loss_terms(loss_fn, copied, batch_in(batch, dtype))
        loss = divided(terms, coefficients)
        if not loss.requires_grad:
            raise JudgeError(_IGNORED)
        # "inputs" keeps gradients off any other model that a careless loss_fn may have used.
        loss.backward(inputs=list(parameters.values()))  # type: ignore[no-untyped-call]

        reached = [parameter for parameter in parameters.values() if parameter.grad is not None]
        norm = euclidean_norm(gradients_by_name(parameters))
        if clip_grad_norm is not None:
            norm = float(nn.utils.clip_grad_norm_(reached, clip_grad_norm))
        gradients = gradients_by_name(parameters)
        optimizer.step()

    if not reached:
        raise JudgeError(_IGNORED)
    return OracleUpdate(
        gradients=gradients,
        parameters={name: parameter.detach() for name, parameter in parameters.items()},
        gradient_norm=norm,
        loss_per_item=float(loss.detach()),
        num_items={name: float(items) for name, (_, items) in terms.items()},
        loss_sums={name: float(loss_sum.detach()) for name, (loss_sum, _) in terms.items()},
    )


_IGNORED = (
    "the loss does not depend on any trainable parameter of the model that loss_fn was given; "
    "loss_fn(model, batch) must call its own first argument, not a model from outside"
)


def no_trainable(model: nn.Module) -> str:
    """The message for a model in which nothing is trained."""
    return (
        f"no parameter of this {type(model).__name__} requires a gradient, so there is no update to "
        f"compare; unfreeze what you train"
    )


Terms = dict[str, tuple[Tensor, float]]


def loss_terms(loss_fn: LossFunction, model: nn.Module, batch: Any) -> Terms:
    """Call ``loss_fn`` and read its answer as ``(loss_sum, num_items)`` by term.

    Args:
        loss_fn: the user's function.
        model: passed on.
        batch: passed on.

    Returns:
        ``{"loss": (L, N)}``, or one entry per term where ``loss_fn`` returned a dict.

    Raises:
        JudgeError: another form, a loss that is no scalar, a loss or number that is not finite.

    Exactness: no arithmetic.
    """
    found = loss_fn(model, batch)
    named = found if isinstance(found, Mapping) else {"loss": found}
    if not named:
        raise JudgeError("loss_fn returned an empty dict; give (loss_sum, num_items) for each term")
    return {str(name): _loss_and_items(str(name), term) for name, term in named.items()}


def divided(terms: Terms, coefficients: Mapping[str, float] | None) -> Tensor:
    """The loss of the whole batch, ``sum_k c_k * L_k / N_k``. A term without items adds nothing.

    Args:
        terms: ``(L_k, N_k)`` by term.
        coefficients: ``c_k`` by term; 1 for a term that is not named.

    Returns:
        A scalar tensor.

    Raises:
        JudgeError: no term has any item, or a coefficient names no term.

    Exactness: one division a term, in the loss's own dtype.
    """
    unknown = sorted(set(coefficients or {}) - set(terms))
    if unknown:
        raise JudgeError(f"coefficients name {unknown}, but loss_fn returned the terms {sorted(terms)}")
    shares = [
        (coefficients or {}).get(name, 1.0) * loss_sum / items
        for name, (loss_sum, items) in terms.items()
        if items != 0
    ]
    if not shares:
        raise JudgeError(
            f"loss_fn counted 0 items in the whole batch (terms: {', '.join(terms)}), so there is no "
            f"update to compare; pass a batch in which something is supervised"
        )
    return torch.stack(shares).sum()


def private_copy(model: nn.Module, dtype: torch.dtype | None, *, hooks: bool = True) -> nn.Module:
    """A deep copy of the model without gradients, its floating tensors in ``dtype`` where given.

    Args:
        model: any module that can be deep-copied.
        dtype: float64, float32 or bfloat16; ``None`` keeps every dtype.
        hooks: whether the gradient hooks of parameters come along.

    Returns:
        The copy; tied weights stay tied, modes and buffers are those of the model.

    Raises:
        JudgeError: the model, or a gradient hook of a parameter, can't be copied.
        UsageError: another dtype.

    Exactness: bit for bit where ``dtype`` is not narrower than the model's.
    """
    if dtype is not None and dtype not in _DTYPES:
        raise UsageError(f"dtype={dtype} is none of {', '.join(map(str, _DTYPES))}")
    try:
        copied = copy.deepcopy(model)
    except Exception as error:
        raise JudgeError(
            f"a {type(model).__name__} that can't be deep-copied can't be tried out: {error}. A model that "
            f"is sharded over ranks is verified before it is sharded"
        ) from error
    copied.zero_grad(set_to_none=True)
    # Module.to(dtype) would turn complex parameters into real ones.
    if dtype is not None:
        copied._apply(lambda tensor: _converted(tensor, dtype))  # type: ignore[no-untyped-call]
    if hooks:
        _hook_alike(model, copied)
    return copied


def hooked(model: nn.Module) -> list[str]:
    """The names of trainable parameters with gradient hooks of their own."""
    return [name for name, parameter in trainable(model).items() if any(_gradient_hooks(parameter))]


def _gradient_hooks(parameter: nn.Parameter) -> tuple[list[Any], list[Any]]:
    """Its hooks before and after accumulation. torch has no public way to list them."""
    before = getattr(parameter, "_backward_hooks", None) or {}
    after = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    return list(before.values()), list(after.values())


def _hook_alike(model: nn.Module, copied: nn.Module) -> None:
    """Register the gradient hooks of parameters on the copy: a deep copy of a parameter has none."""
    parameters = trainable(copied)
    for name, parameter in trainable(model).items():
        before, after = _gradient_hooks(parameter)
        if not before and not after:
            continue
        try:
            for hook in before:
                parameters[name].register_hook(hook)  # type: ignore[no-untyped-call]
            for hook in after:
                add = parameters[name].register_post_accumulate_grad_hook
                add(hook)  # type: ignore[no-untyped-call]
        except (KeyError, RuntimeError) as error:
            raise JudgeError(
                f"the gradient hooks of parameter {name} can't be registered on a copy of the model, "
                f"and without them another update would be judged: {error}"
            ) from error


def batch_in(batch: Any, dtype: torch.dtype | None) -> Any:
    """A copy of the batch, its floating tensors (and numpy arrays) in ``dtype``; integers stay as they are.

    Every call of a ``loss_fn`` gets a copy of its own: one that writes into its batch changes neither
    the caller's nor what the next call sees.

    Args:
        batch: tensor, array, or dict, tuple or list of these; anything else is deep-copied, or passed on
            where that can't be done.
        dtype: target, or ``None`` for no change.

    Returns:
        A batch of the same structure that shares no memory with the given one. What was one object in
        two places is one again.

    Exactness: bit for bit where ``dtype`` is not narrower.
    """
    return _copied_part(batch, dtype, {})


def _copied_part(part: Any, dtype: torch.dtype | None, known: dict[int, tuple[Any, Any]]) -> Any:
    # The original is kept beside its copy, so that no other object gets its id meanwhile.
    if id(part) not in known:
        known[id(part)] = part, _copy_of_part(part, dtype, known)
    return known[id(part)][1]


def _copy_of_part(part: Any, dtype: torch.dtype | None, known: dict[int, tuple[Any, Any]]) -> Any:
    if isinstance(part, Tensor):
        copied = part.detach().clone()
        copied = copied if dtype is None else _converted(copied, dtype)
        return copied.requires_grad_(part.requires_grad)
    if isinstance(part, Mapping):
        return like_mapping(part, {key: _copied_part(value, dtype, known) for key, value in part.items()})
    if isinstance(part, tuple) and hasattr(part, "_fields"):
        return type(part)(*(_copied_part(value, dtype, known) for value in part))
    if isinstance(part, (tuple, list)):
        return type(part)(_copied_part(value, dtype, known) for value in part)
    if getattr(getattr(part, "dtype", None), "kind", "") == "f" and dtype is torch.float64:
        return part.astype("float64")
    try:
        return copy.deepcopy(part)
    except Exception:  # an open file, a lock: nothing that a loss writes into
        return part


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that ask for gradients, by name, tied ones once."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def gradients_by_name(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """A dense copy of each gradient that is present.

    Exactness: bit for bit.
    """
    present = {name: p.grad.detach() for name, p in parameters.items() if p.grad is not None}
    return {name: g.to_dense() if g.is_sparse else g.clone() for name, g in present.items()}


def euclidean_norm(gradients: Mapping[str, Tensor]) -> float:
    """``sqrt(sum over gradients and elements of |g|^2)``.

    Exactness: rounding of a sum in the gradients' dtype.
    """
    return math.hypot(*(float(torch.linalg.vector_norm(gradient)) for gradient in gradients.values()))


def _converted(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if tensor.is_complex():
        return tensor.to(torch.complex128 if dtype == torch.float64 else torch.complex64)
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _loss_and_items(name: str, term: Any) -> tuple[Tensor, float]:
    if not (isinstance(term, tuple) and len(term) == 2 and isinstance(term[0], Tensor)):
        shape = f" of shape {list(term.shape)}" if isinstance(term, Tensor) else ""
        raise JudgeError(
            f"loss_fn returned a {type(term).__name__}{shape} for term {name!r}; it must return "
            f"(loss_sum, num_items): the loss summed over items, and how many items those are"
        )
    loss_sum, items = term
    if loss_sum.numel() != 1:
        raise JudgeError(
            f"loss_fn returned a loss of shape {list(loss_sum.shape)} for term {name!r}; sum it to a scalar"
        )
    if loss_sum.is_complex():
        raise JudgeError(
            f"loss_fn returned a loss of {loss_sum.dtype} for term {name!r}; a loss is one real number, "
            f"such as loss.abs() or loss.real"
        )
    # numpy's integers and floats are Real too; a text that float() could read is no number of items.
    is_number = isinstance(items, Real) and not isinstance(items, bool)
    if not (items.numel() == 1 if isinstance(items, Tensor) else is_number):
        raise JudgeError(f"loss_fn returned num_items={items!r} for term {name!r}; give one number")
    number = float(items.detach() if isinstance(items, Tensor) else items)
    value = float(loss_sum.detach())
    if not (math.isfinite(number) and math.isfinite(value)):
        raise JudgeError(
            f"loss_fn returned loss_sum={value} and num_items={number} for term {name!r}; "
            f"nothing can be compared with a number that is not finite; look for where it begins in the "
            f"batch, the parameters, the forward and the loss"
        )
    return loss_sum.reshape(()), number
