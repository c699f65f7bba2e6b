"""Accumulation precision: gradients of bfloat16 and float16 parameters, added up in float32.

A sum of A gradients in bfloat16 loses what lies eight bits below its largest partial sum, more with
every micro-batch. Torch can keep ``parameter.grad`` in another dtype than the parameter
(``Tensor.grad_dtype``), and then autograd adds up in that. What an optimizer is given, and so the dtype
of its state, stays what it was: the finished sum is scaled and clipped first, and rounded once.

One way for all engines that leave gradients in ``parameter.grad``. Hooks that add into buffers beside
it did the same at twice the cost, and nobody else could see what they held (lab/LOG.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from operator import attrgetter

import torch
from torch import nn

from wholebatch.budget import MICRO_BATCHES_IN_OWN_DTYPE
from wholebatch.errors import UnsupportedError, WindowUsageError
from wholebatch.gradients import gradients_of, on_this_rank, scale_gradients

_HALF = frozenset({torch.bfloat16, torch.float16})
# What is narrower than each dtype to add up in. The dtypes of parameters themselves widen nothing.
_NARROWER: dict[torch.dtype, frozenset[torch.dtype]] = {
    torch.float64: _HALF | {torch.float32},
    torch.float32: _HALF,
    torch.bfloat16: frozenset(),
    torch.float16: frozenset(),
}
_DTYPE = attrgetter("dtype")


class WideGradients:
    """Keeps the gradients of narrow parameters in a wider dtype from the first backward to the step.

    ``p.grad = round(factor * sum over micro-batches j of g_j(p))`` with the sum, its norm and the
    factor in ``dtype``, and one rounding to the dtype of p. Each ``g_j`` is what the backward of one
    micro-batch computed, in p's own dtype. Only parameters that are narrower than ``dtype`` take part.

    Args:
        accumulate_in: ``torch.float32`` or ``torch.float64``, always; ``torch.bfloat16`` or
            ``torch.float16``, never; ``None``, in float32 where more than 4 micro-batches are added up.

    Attributes:
        dtype: what gradients are added up in, where they are kept wide.
        added_up_in: the name of the narrowest dtype that a gradient of this update is added up in, kept
            wide or not; None where nobody told.

    Raises:
        WindowUsageError: another dtype.

    Exactness: exact in real arithmetic; rounding of a sum of A terms in ``dtype``, then one rounding.
    """

    def __init__(self, accumulate_in: torch.dtype | None = None) -> None:
        if accumulate_in is not None and accumulate_in not in _NARROWER:
            raise WindowUsageError(
                f"accumulate_in={accumulate_in!r} is nothing to add gradients up in; give torch.float32 or "
                f"torch.float64, torch.bfloat16 to leave bfloat16 parameters with gradients of their own "
                f"dtype, or None for float32 where a window has more than {MICRO_BATCHES_IN_OWN_DTYPE} "
                f"micro-batches"
            )
        self._asked = accumulate_in is not None
        self.dtype = accumulate_in or torch.float32
        self._narrower = _NARROWER[self.dtype]
        self.added_up_in: str | None = None
        self._found: list[tuple[nn.Parameter, torch.dtype | None]] = []

    @property
    def active(self) -> bool:
        """Whether some gradient is kept wide now."""
        return bool(self._found)

    @property
    def largest_delivered(self) -> float:
        """The largest finite number that every parameter now kept wide can be given as a gradient."""
        return min((torch.finfo(parameter.dtype).max for parameter, _ in self._found), default=math.inf)

    def wanted(self, dtypes: Iterable[torch.dtype], *, micro_batches: float) -> torch.dtype | None:
        """The narrowest of ``dtypes`` where it is too narrow to add up in, else None.

        Args:
            dtypes: what gradients would be added up in otherwise.
            micro_batches: the most that any rank has in one window.
        """
        narrowest = self._note(dtypes)
        return narrowest if self._is_too_narrow(narrowest, micro_batches) else None

    def _is_too_narrow(self, dtype: torch.dtype | None, micro_batches: float) -> bool:
        counts = self._asked or micro_batches > MICRO_BATCHES_IN_OWN_DTYPE
        return counts and dtype in self._narrower

    def _note(self, dtypes: Iterable[torch.dtype]) -> torch.dtype | None:
        """The narrowest of ``dtypes``, which is told as what is added up in."""
        narrowest = max(set(dtypes), key=_eps, default=None)
        self.added_up_in = None if narrowest is None else _name(narrowest)
        return narrowest

    def wanted_for(self, parameters: Iterable[nn.Parameter], *, micro_batches: float) -> torch.dtype | None:
        """The same for gradients that are added up in the dtype of their parameter."""
        # What is frozen, such as a base under adapters, adds nothing up.
        learning = [p for p in parameters if p.requires_grad]
        narrow = self.wanted(map(_DTYPE, learning), micro_batches=micro_batches)
        self._note(p.grad_dtype or p.dtype for p in learning)  # some may be kept wide by their user
        return narrow

    def refuse_narrow(self, dtypes: Iterable[torch.dtype], *, micro_batches: float, why: str) -> None:
        """Refuse what is too narrow where the engine adds up by itself.

        Args:
            dtypes: what it adds gradients up in.
            micro_batches: the most that any rank has in one window.
            why: what makes it do so, and what to build instead, as a part of the sentence: one of the
                sentences below, or the engine's own.

        Raises:
            UnsupportedError: one of ``dtypes`` has too few digits.
        """
        if narrow := self.wanted(dtypes, micro_batches=micro_batches):
            raise UnsupportedError(
                f"gradients of one micro-batch after another would be added up in {_name(narrow)}, which "
                f"loses digits with each (relative error 4e-3 at 8 micro-batches, 1e-2 and more at 512): "
                f"{why}. To have it so all the same, give the window accumulate_in=torch.{_name(narrow)}"
            )

    def bytes_held(self, parameters: Iterable[nn.Parameter], micro_batches: int) -> int:
        """Bytes of the gradients of ``parameters`` that this rank adds up in ``parameter.grad``."""
        held = 0
        for parameter in (one for one in parameters if one.requires_grad):
            wide = self._is_too_narrow(parameter.dtype, micro_batches)
            dtype = self.dtype if wide else parameter.dtype
            held += on_this_rank(parameter).numel() * dtype.itemsize
        return held

    def begin(self, parameters: Iterable[nn.Parameter]) -> None:
        """Have autograd keep the gradients of ``parameters`` wide from the next backward on.

        One that has a gradient already, or that is kept as wide by somebody else, is left as it is.
        """
        for parameter in parameters:
            if parameter.dtype not in self._narrower or parameter.grad is not None:
                continue
            found = parameter.grad_dtype
            if parameter.requires_grad and (found is None or found in self._narrower):
                self._found.append((parameter, found))
                parameter.grad_dtype = self.dtype
        if self._found:
            self.added_up_in = _name(self.dtype)

    @torch.no_grad()
    def deliver(self, parameters: Sequence[nn.Parameter], factor: float) -> float:
        """Hand the sums of ``parameters`` times ``factor`` to their optimizer, in their own dtype.

        Args:
            parameters: those of one optimizer.
            factor: of clipping, and of a denominator that was provisional.

        Returns:
            The factor that is left to apply: ``factor`` itself where nothing is kept wide, else 1.

        Exactness: the product is rounded in ``dtype``, then once to the dtype of its parameter.
        """
        if not self._found:
            return factor
        scale_gradients(gradients_of(parameters), factor)
        own = set(map(id, parameters))
        for parameter, found in self._found:
            gradient = parameter.grad
            if gradient is not None and id(parameter) in own:
                # An optimizer would add the parts of a sparse gradient up in the narrow dtype.
                whole = gradient.coalesce() if gradient.is_sparse else gradient
                parameter.grad = None
                parameter.grad_dtype = found
                parameter.grad = whole.to(parameter.dtype)
        return 1.0

    def forget(self) -> None:
        """Let go of sums that were not delivered, and keep gradients as they were kept before."""
        for parameter, found in self._found:
            if parameter.grad is not None and parameter.grad.dtype == self.dtype:
                parameter.grad = None
            parameter.grad_dtype = found
        self._found = []


HELD_BACK_FSDP2 = (
    "fully_shard keeps gradients that are held back in the reduce_dtype of its MixedPrecisionPolicy, "
    "or else its param_dtype; build it with mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, "
    "reduce_dtype=torch.float32)"
)
SHARDED_FSDP2 = (
    "fully_shard adds sharded gradients up in the dtype of the parameters; keep those in float32 and "
    "compute in bfloat16, with mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, "
    'reduce_dtype=torch.float32), or hold reductions back with reduce="per_update"'
)
HELD_BACK_FSDP1 = (
    "FullyShardedDataParallel keeps gradients that are held back in the dtype that the forward computes "
    'in, whatever its reduce_dtype; reduce each micro-batch with reduce="per_micro_batch", or use '
    "fully_shard with a MixedPrecisionPolicy"
)
SHARDED_FSDP1 = (
    "FullyShardedDataParallel adds sharded gradients up in the dtype of the parameters; keep those in "
    "float32 and compute in bfloat16, with mixed_precision=MixedPrecision(param_dtype=torch.bfloat16)"
)
DEEPSPEED = (
    "DeepSpeed adds gradients up in the dtype of its model; say "
    '"data_types": {"grad_accum_dtype": "fp32"} in its configuration'
)


def _eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
