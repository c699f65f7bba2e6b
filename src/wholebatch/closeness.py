"""How near is equal: bounds from the dtype and the number of terms summed, never picked by hand.

Two sums of the same terms in another order differ by rounding only. This module says by how much at
most; docs/exactness.md derives each formula. The words used here:

* *unit roundoff* ``u``: half the distance from 1 to the next number of the dtype.
* *scale*: the total absolute gradient, ``max over parameters of sum over micro-batches j of
  max|g_j|``. Rounding is relative to what is added up, not to what is left after cancellation, so a
  parameter whose true gradient is zero (a key bias under softmax) is measured by the terms too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

# Chance that any of the sums behind one verdict leaves the statistical bound though nothing is wrong.
_FALSE_ALARM = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterError:
    """How far one parameter is from where it should be, and how far rounding could take it.

    Attributes:
        parameter: its name in ``model.named_parameters()``.
        quantity: ``"gradient"``, ``"clipped gradient"`` or ``"parameter"``.
        error: largest absolute difference over the elements; NaN or infinite where either side is.
        bound: largest difference that rounding explains.
    """

    parameter: str
    quantity: str
    error: float
    bound: float

    @property
    def ratio(self) -> float:
        """Error in units of its bound; infinite where either is not a number."""
        if self.error == 0.0:
            return 0.0
        ratio = self.error / self.bound if self.bound > 0.0 else math.inf
        return math.inf if math.isnan(ratio) else ratio

    @property
    def within(self) -> bool:
        """Whether rounding alone can explain the error."""
        return self.ratio <= 1.0


def as_wide(tensor: Tensor) -> Tensor:
    """The tensor dense, without graph, in float64 (complex128 where it is complex).

    Exactness: bit for bit; nothing is wider.
    """
    dense = tensor.to_dense() if tensor.layout != torch.strided else tensor
    return dense.detach().to(torch.complex128 if dense.is_complex() else torch.float64)


def unit_roundoff(dtype: torch.dtype) -> float:
    """``u = eps / 2``: the largest relative error of one rounding in ``dtype``."""
    return torch.finfo(dtype).eps / 2


def distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> dict[str, float]:
    """Largest absolute difference by parameter; a missing gradient counts as zeros.

    ``max over elements of |one - other|``, subtracted in float64 (complex128 for complex parameters).

    Args:
        one: tensors by name.
        other: tensors by name, of the same shapes where both have one.

    Returns:
        For each name of either, the distance; NaN where an element of either side is NaN.

    Exactness: one rounding in float64.
    """
    names = dict.fromkeys([*one, *other])
    return {name: _largest(_difference(one.get(name), other.get(name))) for name in names}


def magnitude(tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """Largest absolute value by parameter, ``max|g(p)|``."""
    return {name: _largest(tensor) for name, tensor in tensors.items()}


def reduction_terms(model: nn.Module, batch_elements: int) -> int:
    """The number of terms summed along the deepest path of a gradient.

    ``batch_elements + sum over weight matrices of (fan in + fan out)``: the forward sums over a
    matrix's inputs, the backward over its outputs, and a weight's gradient over the batch.

    Args:
        model: its parameters of two dimensions and more are the matrices.
        batch_elements: elements of the largest tensor of the whole batch.

    Returns:
        A number of terms, at least 1.

    Source: docs/exactness.md, "The number of terms".
    """
    matrices = [p for p in model.parameters() if p.dim() >= 2 and p.numel()]
    return max(1, batch_elements + sum(p.shape[0] + p.numel() // p.shape[0] for p in matrices))


def largest_tensor_elements(batch: Any) -> int:
    """Elements of the largest tensor inside a nested batch; for a list, of all its entries together."""
    if isinstance(batch, Tensor):
        return batch.numel()
    if isinstance(batch, Mapping):
        return max((largest_tensor_elements(part) for part in batch.values()), default=0)
    if isinstance(batch, tuple):
        return max((largest_tensor_elements(part) for part in batch), default=0)
    if isinstance(batch, list):
        return sum(largest_tensor_elements(part) for part in batch)
    size = getattr(batch, "size", 1)
    return size if isinstance(size, int) else 1


def equality_margin(num_terms: int, dtype: torch.dtype, *, num_roundings: int = 0) -> float:
    """Relative difference that two orders of one sum can have, to be multiplied by the scale.

    * float64: ``2 * n * u``, twice the worst case of a sum of n terms, for there are two sums.
    * float32: ``2 * lambda * sqrt(n) * u``, the statistical bound, since the worst case would
      excuse a wrong denominator; ``lambda = sqrt(2 ln(2n / 1e-6))``.
    * narrower: the same in float32, in which kernels add up, and ``2 * lambda * sqrt(r) * u`` for
      the r tensors that are rounded to the dtype on the way.

    Args:
        num_terms: n, from :func:`reduction_terms`.
        dtype: what the forward computes in.
        num_roundings: r, for dtypes narrower than float32.

    Returns:
        A number without a unit.

    Source: Higham and Mary, "A new approach to probabilistic rounding error analysis" (2019),
        theorem 3.1; docs/exactness.md.
    """
    if dtype == torch.float64:
        return 2.0 * num_terms * unit_roundoff(dtype)
    deviations = math.sqrt(2.0 * math.log(2.0 * num_terms / _FALSE_ALARM))
    margin = 2.0 * deviations * math.sqrt(num_terms) * unit_roundoff(torch.float32)
    if dtype != torch.float32:
        margin += 2.0 * deviations * math.sqrt(max(1, num_roundings)) * unit_roundoff(dtype)
    return margin


def clipped_bound(bound: float, *, norm: float, max_norm: float, elements: int, largest: float) -> float:
    """Carry a bound on gradients through clipping by the global norm.

    With ``c = min(1, max_norm / norm)`` and all elements within ``bound``, the norm moves by at most
    ``sqrt(elements) * bound``, and so ``|c g - c' g'|`` is at most
    ``c * bound * (1 + sqrt(elements) * max|g| / norm)``.

    Args:
        bound: largest error of an element before clipping.
        norm: Euclidean norm of the whole gradient.
        max_norm: what it is clipped to.
        elements: number of elements of the whole gradient.
        largest: ``max|g|`` over it.

    Returns:
        Largest error of an element after clipping.
    """
    if norm <= 0.0:
        return bound
    return min(1.0, max_norm / norm) * bound * (1.0 + math.sqrt(elements) * largest / norm)


def rounding_allowance(
    free_of_sum: float, *, num_micro_batches: int, dtype: torch.dtype, scale: float, largest: float
) -> float:
    """How far a split may be from the float64 truth in a working dtype.

    ``2 * d + sqrt(A) * u_acc * scale + u * max|g|`` with ``u_acc = min(u, u of float32)``: twice what
    the dtype costs without any adding up, then A gradients added up in float32, then one rounding of
    the sum to the dtype. Accumulation in a narrower dtype leaves this as A grows.

    Args:
        free_of_sum: d, the larger of two distances from the truth that no accumulation in the dtype
            takes part in: of the whole batch, and of the micro-batches added up in float64.
        num_micro_batches: A of the window.
        dtype: dtype of the parameter and its gradient.
        scale: the total absolute gradient.
        largest: ``max|g|`` of this parameter's true gradient.

    Returns:
        A distance in the unit of the gradient.

    Source: docs/exactness.md, "The second verdict".
    """
    working = unit_roundoff(dtype)
    accumulated = min(working, unit_roundoff(torch.float32))
    return 2.0 * free_of_sum + math.sqrt(num_micro_batches) * accumulated * scale + working * largest


def worst_first(errors: Iterable[ParameterError]) -> list[ParameterError]:
    """Sort by error in units of its bound, the worst first."""
    return sorted(errors, key=lambda one: one.ratio, reverse=True)


class NarrowingWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees whether a float64 computation is cut to a narrower float inside.

    Some models compute parts in float32 whatever their dtype (norms, rotary tables, losses). Such a
    model differs between splits by float32's rounding even as a float64 model, and has to be judged
    by that. Found by experiment, not by names: a float64 tensor goes into an operation and a narrower
    one comes out, with values that are not all whole numbers. (A mask cast to float32 loses nothing.)

    Use as a context manager around the forward, then read :attr:`narrowest`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.narrowest: torch.dtype = torch.float64

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, then compare what went in with what came out."""
        result = func(*args, **(kwargs or {}))
        # new_zeros, zeros_like and their kind take a float64 tensor for its shape only.
        name = getattr(func, "overloadpacket", func).__name__
        if not name.startswith("new_") and not name.endswith("_like"):
            self._note(args, result)
        return result

    def _note(self, args: Any, result: Any) -> None:
        if not isinstance(result, Tensor) or not _narrower(result.dtype, self.narrowest):
            return
        if any(isinstance(arg, Tensor) and arg.dtype == torch.float64 for arg in args):
            self._note_values(result)

    def _note_values(self, result: Tensor) -> None:
        if bool(((result != result.round()) & ~result.isnan()).any()):
            self.narrowest = result.dtype


class RoundingTremor(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Moves the result of every operation by a relative ``size``, up or down by chance.

    Rounding does the same at the size of u. What a gradient moves by under a tremor, over the tremor's
    size, is how much the model amplifies rounding: about 1 for the networks that people train, 1e6 for
    a LayerNorm over values with a large common offset, and more than can be judged for an exploding
    recurrence. Forward and backward both have to run inside.

    Args:
        size: relative size of the tremor; far above u, far below 1.
        seed: of the signs; the global generators are left alone.

    Source: Monte Carlo arithmetic, Parker (1997); docs/exactness.md, "Models that amplify rounding".
    """

    def __init__(self, size: float, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._size = size
        self._signs = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, then move what it computed; views and writes in place stay."""
        result = func(*args, **(kwargs or {}))
        if getattr(func, "is_view", False) or func._schema.is_mutable:
            return result
        if isinstance(result, (tuple, list)):
            return type(result)(self._moved(part) for part in result)
        return self._moved(result)

    def _moved(self, result: Any) -> Any:
        if not (isinstance(result, Tensor) and result.is_floating_point()):
            return result
        signs = torch.randint(0, 2, result.shape, generator=self._signs).to(result) * 2 - 1
        return result * (1.0 + self._size * signs)


def narrower_of(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    """The dtype with the larger unit roundoff."""
    return one if _narrower(one, other) else other


def _narrower(one: torch.dtype, other: torch.dtype) -> bool:
    return one.is_floating_point and torch.finfo(one).eps > torch.finfo(other).eps


def _difference(one: Tensor | None, other: Tensor | None) -> Tensor:
    present = [as_wide(tensor) for tensor in (one, other) if tensor is not None]
    return present[0] - present[1] if len(present) == 2 else present[0]


def _largest(tensor: Tensor) -> float:
    wide = as_wide(tensor)
    return float(wide.abs().max()) if wide.numel() else 0.0
