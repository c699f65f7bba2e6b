"""Where DeepSpeed's optimizers hold a reduced gradient, and how they forget one.

Facts that this file rests on (read in DeepSpeed 0.19.8 and tested against it), most of them private there:

* Stage 0, fp16 and bf16 without ZeRO: in ``.grad`` of the model's own parameters, on every rank.
* ``BF16_Optimizer`` (stage 1, bf16, accumulating in fp32): in one flat buffer of the whole model, on every
  rank. A parameter that no backward of this rank reached is left out of the norm by which *this* rank
  clips, so that ranks would clip differently: it has to be marked as reached.
* ZeRO 1 and 2: this rank's part in ``averaged_gradients``, a list by group with tensors that only pad it.
  Stage 1 reduces the parameters that have a gradient on this rank; where ranks differ in that, they would
  add up different things. So those without one get zeros first.
* ZeRO 3: this rank's part of each parameter, in slices of one buffer. The first micro-batch of an update
  overwrites them and the others add to them, so that a parameter which the first one does not use keeps the
  gradient of the *last* update, and is stepped by it again. So the buffer is cleared before each update.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class Held(ABC):
    """The gradient of one update in one of DeepSpeed's optimizers.

    Attributes:
        partitioned: each rank holds another part; else every rank holds the whole.
    """

    partitioned = False

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    @abstractmethod
    def groups(self) -> Sequence[Sequence[nn.Parameter]]:
        """The model's own parameters that the optimizer moves, by its groups."""

    @abstractmethod
    def pieces(self) -> list[Tensor]:
        """What this rank holds of the reduced gradient, as it will be stepped on, times the loss scale."""

    @abstractmethod
    def waiting(self) -> list[Tensor]:
        """Where gradients wait between two backwards, other than in ``.grad``."""

    def mark(self) -> list[tuple[int, int]]:
        """Changes whenever somebody writes what waits; reads no value."""
        return [(id(one), one._version) for one in self.waiting()]

    @abstractmethod
    def is_empty(self) -> bool:
        """Whether nothing is left of a backward outside the window."""

    @abstractmethod
    def clear(self) -> None:
        """Forget every gradient, also of a backward that was left half way."""

    def begin(self) -> None:
        """Before the first micro-batch of an update."""

    def prepare(self) -> None:
        """Before the one reduction of a window that was held back as a whole."""

    def parameters(self) -> list[nn.Parameter]:
        return [one for group in self.groups() for one in group if one.requires_grad]


class InGrad(Held):
    """Whole gradients in ``.grad``: a torch optimizer, or DeepSpeed's for fp16 and bf16 without ZeRO."""

    def groups(self) -> Sequence[Sequence[nn.Parameter]]:
        own = getattr(self._optimizer, "fp16_groups", None)  # whatever their dtype is
        if own is not None:
            return list(own)
        return [group["params"] for group in self._optimizer.param_groups]

    def pieces(self) -> list[Tensor]:
        return [one.grad for one in self.parameters() if one.grad is not None]

    def waiting(self) -> list[Tensor]:
        return []

    def is_empty(self) -> bool:
        return True  # the window itself looks there

    def clear(self) -> None:
        for one in self.parameters():
            one.grad = None


class InWholeBuffer(Held):
    """``BF16_Optimizer``: whole gradients in one flat buffer for each group."""

    def groups(self) -> Sequence[Sequence[nn.Parameter]]:
        return list(self._optimizer.bf16_groups)

    def pieces(self) -> list[Tensor]:
        has = self._optimizer.fp32_groups_has_gradients  # the others it leaves out of its own norm
        return [
            gradient
            for i, group in enumerate(self._optimizer.fp32_groups_gradients)
            for j, gradient in enumerate(group)
            if has[i][j]
        ]

    def waiting(self) -> list[Tensor]:
        return list(self._optimizer.fp32_groups_gradients_flat)

    def is_empty(self) -> bool:
        return not any(map(any, self._optimizer.fp32_groups_has_gradients))

    def clear(self) -> None:
        _leave_backward(self._optimizer)
        self._optimizer.zero_grad(set_to_none=True)

    def prepare(self) -> None:
        has = self._optimizer.fp32_groups_has_gradients
        for i, group in enumerate(self._optimizer.bf16_groups):
            has[i] = [True] * len(group)


class InPartition(Held):
    """ZeRO 1 and 2: a part of the flat gradient of each group."""

    partitioned = True

    def groups(self) -> Sequence[Sequence[nn.Parameter]]:
        return list(self._optimizer.bit16_groups)

    def pieces(self) -> list[Tensor]:
        groups = [group for group in self._optimizer.averaged_gradients.values() if group is not None]
        return [one for group in groups for one in group]

    def waiting(self) -> list[Tensor]:
        optimizer: Any = self._optimizer
        groups = [*optimizer.averaged_gradients.values(), *optimizer.all_grad_tensors.values()]
        found = [one for group in groups if group is not None for one in group]
        if optimizer.use_grad_accum_attribute:
            found += _accumulated(self.parameters())
        return found

    def is_empty(self) -> bool:
        optimizer: Any = self._optimizer
        groups = [*optimizer.averaged_gradients.values(), *optimizer.all_grad_tensors.values()]
        return all(one is None for one in groups) and not _accumulated(self.parameters())

    def clear(self) -> None:
        optimizer: Any = self._optimizer
        _leave_backward(optimizer)
        optimizer.zero_grad(set_to_none=True)
        for held in (optimizer.averaged_gradients, optimizer.all_grad_tensors):
            for group in held:
                held[group] = None
        for bucket in optimizer.ipg_buckets.values():
            bucket.clear()
        optimizer.extra_large_param_to_reduce.clear()
        optimizer.params_already_reduced[:] = [False] * len(optimizer.params_already_reduced)
        optimizer._release_ipg_buffers()

    def prepare(self) -> None:
        optimizer: Any = self._optimizer
        optimizer.setup_buckets()  # a rank without a micro-batch has had no backward that does it
        for parameter in self.parameters():
            if optimizer.get_gradient_for_reduction(parameter) is None:
                _give_zeros(optimizer, parameter)
        if optimizer.overlap_comm:  # it then counts on the hooks of the last backward, which were held back
            for i, group in enumerate(optimizer.bit16_groups):
                for parameter in group:
                    if parameter.requires_grad:
                        optimizer.reduce_ready_partitions_and_remove_grads(parameter, i)


class InShards(Held):
    """ZeRO 3: a part of each parameter."""

    partitioned = True

    def groups(self) -> Sequence[Sequence[nn.Parameter]]:
        return list(self._optimizer.fp16_groups)

    def pieces(self) -> list[Tensor]:
        groups = [group for group in self._optimizer.averaged_gradients.values() if group is not None]
        return [one for group in groups for one in group]

    def waiting(self) -> list[Tensor]:
        return [self._optimizer.grad_partitions_flat_buffer]

    def mark(self) -> list[tuple[int, int]]:
        # A zero_grad writes nothing and has the next backward overwrite what waits: by a number that each
        # forward after a backward moves on.
        optimizer: Any = self._optimizer
        return [*super().mark(), (optimizer.micro_step_id + optimizer._epilogue_ran_this_backward, 0)]

    def is_empty(self) -> bool:
        return all(group is None for group in self._optimizer.averaged_gradients.values())

    def begin(self) -> None:
        self._optimizer.grad_partitions_flat_buffer.zero_()

    def clear(self) -> None:
        optimizer: Any = self._optimizer
        _leave_backward(optimizer)
        optimizer.zero_grad(set_to_none=True)  # and the next backward overwrites again
        optimizer.averaged_gradients = {}
        for bucket in optimizer.ipg_buckets.values():
            bucket.clear_params()
        optimizer._partition_all_parameters()


def held_by(optimizer: Any) -> Held:
    """Where ``optimizer``, that of an engine, holds its gradients."""
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        return InShards(optimizer)
    if hasattr(optimizer, "averaged_gradients"):
        return InPartition(optimizer)
    if hasattr(optimizer, "fp32_groups_gradients_flat"):
        return InWholeBuffer(optimizer)
    return InGrad(optimizer)


def trainable(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, one) for name, one in module.named_parameters() if one.requires_grad)


def _accumulated(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    found = [getattr(one, "grad_accum", None) for one in parameters]
    return [one for one in found if one is not None]


def _leave_backward(optimizer: Any) -> None:
    """Let a backward that an exception left count as over, or ``loss.backward()`` no longer reduces."""
    optimizer._backward_hook_state.backward_active_depth = 0


@torch.no_grad()
def _give_zeros(optimizer: Any, parameter: Any) -> None:
    if optimizer.use_grad_accum_attribute:
        parameter.grad_accum = torch.zeros_like(parameter, dtype=optimizer.gradient_accumulation_dtype)
    else:
        parameter.grad = torch.zeros_like(parameter)
