"""What an update does, counted from outside, the same way for every contestant.

``UpdateCounter`` sees each operation that reaches torch's dispatcher on the thread of the update, those of
DDP's reducer among them, and is never active while time is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# What brings values to the host below Python, and above it. On CPU the latter never reach the dispatcher.
_READS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal"}
_READING_METHODS = {Tensor.tolist, Tensor.numpy, Tensor.cpu}


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateCounts:
    """What one update did on one rank.

    Args:
        gradient_reductions: collectives that carried gradients, weighted by the share of the gradient that
            they carried: 1.0 where each gradient was reduced once, in however many buckets.
        bytes_over_minimum: bytes of those collectives over the bytes of the gradient; 0.0 on one process.
        other_collectives: collectives that carried anything else, such as N.
        other_bytes: their bytes on this rank.
        gradient_passes: how often the whole gradient was read after the last backward, by norm,
            clipping and step; an operation on half of the gradient adds one half.
        device_reads: how often the host would wait for a device to read values computed from parameters.
            Reads in a row, with nothing computed from parameters in between, are one: after the first the
            device has nothing left to do.
        count_reads: the same for other values, such as numbers of labels, which wait where the labels lie.
    """

    gradient_reductions: float
    bytes_over_minimum: float
    other_collectives: int
    other_bytes: int
    gradient_passes: float
    device_reads: int
    count_reads: int

    def to_dict(self) -> dict[str, float]:
        return asdict(self)


class UpdateCounter:
    """A context manager that counts what happens inside, on this thread.

    Args:
        model: whose parameters and gradients are meant.
        optimizer: whose state lies on the device too.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._parameters = list(model.parameters())
        self._smallest = min(parameter.numel() for parameter in self._parameters)
        self._derived = {_place(t) for t in self._parameters}  # storages of values that parameters reach
        self._derived |= {_place(t) for t in _tensors(optimizer.state.values())}
        self._gradient_bytes = self._other_bytes = self._other = 0
        self._collectives_elements = self._finish_elements = 0
        self._device_reads = self._count_reads = 0
        self._waited = {True: False, False: False}  # by whether values are computed from parameters
        self._operations = _Operations(self)
        self._methods = _Methods(self)

    def __enter__(self) -> UpdateCounter:
        self._operations.__enter__()
        self._methods.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._methods.__exit__(*error)
        self._operations.__exit__(*error)

    @property
    def counts(self) -> UpdateCounts:
        """The result."""
        elements = sum(p.numel() for p in self._parameters)
        minimum = sum(p.numel() * p.element_size() for p in self._parameters)
        return UpdateCounts(
            gradient_reductions=self._collectives_elements / elements,
            bytes_over_minimum=self._gradient_bytes / minimum,
            other_collectives=self._other,
            other_bytes=self._other_bytes,
            gradient_passes=self._finish_elements / elements,
            device_reads=self._device_reads,
            count_reads=self._count_reads,
        )

    def see_read(self, tensor: Tensor) -> None:
        """A value goes to the host."""
        derived = _place(tensor) in self._derived
        if self._waited[derived]:
            return
        self._waited[derived] = True
        if derived:
            self._device_reads += 1
        else:
            self._count_reads += 1

    def see_copy(self, tensor: Tensor) -> None:
        """What was copied to the host can be read there without waiting again."""
        self._derived.discard(_place(tensor))

    def see_operation(self, operation: Any, given: list[Tensor], made: list[Tensor]) -> None:
        """Any operation below autograd."""
        name = operation._schema.name
        if name.startswith("c10d::"):
            self._see_collective(given)
        elif name in _READS:
            self.see_read(given[0])
        elif not operation.is_view and torch._C._current_graph_task_id() == -1:  # not in a backward
            gradients = {_place(p.grad) for p in self._parameters if p.grad is not None}
            self._finish_elements += sum(t.numel() for t in given if _place(t) in gradients)
        # torch.tensor(numbers) arrives as lift_fresh of memory that the dispatcher didn't see being taken
        reached = name != "aten::lift_fresh" and any(_place(t) in self._derived for t in given)
        written = given if operation._schema.is_mutable and reached else []
        if name not in _READS and not operation.is_view:
            self._waited[reached] = False  # there is something new to wait for
        for tensor in [*made, *written]:
            # storage is used again: what is written new forgets what lay there before
            (self._derived.add if reached else self._derived.discard)(_place(tensor))

    def _see_collective(self, given: list[Tensor]) -> None:
        elements = sum(t.numel() for t in given)
        size = sum(t.numel() * t.element_size() for t in given)
        if elements >= self._smallest and given[0].dtype == self._parameters[0].dtype:
            self._collectives_elements += elements
            self._gradient_bytes += size
        else:
            self._other += 1
            self._other_bytes += size


class _Operations(TorchDispatchMode):
    def __init__(self, counter: UpdateCounter) -> None:
        super().__init__()
        self._counter = counter

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        given = _tensors(_sent(func, args)) + _tensors((kwargs or {}).values())
        result = func(*args, **(kwargs or {}))
        self._counter.see_operation(func, given, _tensors([result]))
        return result


class _Methods(TorchFunctionMode):
    def __init__(self, counter: UpdateCounter) -> None:
        super().__init__()
        self._counter = counter

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        if func in _READING_METHODS:
            self._counter.see_read(args[0])
        result = func(*args, **(kwargs or {}))
        if func is Tensor.cpu:
            self._counter.see_copy(result)
        return result


def _sent(operation: Any, args: tuple[Any, ...]) -> Iterable[Any]:
    """What a collective sends, which gathers and scatters name second; all arguments of anything else."""
    name = operation._schema.name
    if name.startswith("c10d::"):
        return args[1:2] if "gather" in name or "scatter" in name else args[:1]
    return args


def _tensors(tree: Iterable[Any]) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(list(tree)) if isinstance(leaf, Tensor)]


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class PeakTensorBytes:
    """A context manager that finds the most bytes that tensors took at one time inside, on this thread.

    Parameters and optimizer state, held before, are added. Numpy's memory, such as micro-batches that
    were collated there, is left out.

    Args:
        model: whose parameters are meant.
        optimizer: whose state is meant.

    Exactness: exact for what torch's CPU allocator gave out.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        held = [*model.parameters(), *_tensors(optimizer.state.values())]
        self._before = sum(t.numel() * t.element_size() for t in held)
        self._profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self.counts = 0

    def __enter__(self) -> PeakTensorBytes:
        self._profiler.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._profiler.__exit__(*error)
        results = self._profiler.profiler.kineto_results
        changes = sorted(
            (event.start_ns(), event.nbytes()) for event in results.events() if event.name() == "[memory]"
        )
        self.counts = self._before + max(accumulate((change for _, change in changes), initial=0))


def peak_tensor_bytes(model: nn.Module, optimizer: Optimizer, update: Callable[[], None]) -> int:
    """The most that tensors took at one time in ``update``, with parameters and optimizer state.

    Exactness: exact for what torch's CPU allocator gave out. The micro-batches, made before, are left out.
    """
    with PeakTensorBytes(model, optimizer) as peak:
        update()
    return peak.counts
