"""Calls of the modules that are trained: with which samples, what randomness, through which wrapper."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parallel import DistributedDataParallel

from wholebatch.audit.trace import Forward
from wholebatch.audit.watch.patches import Patches
from wholebatch.audit.watch.replays import Replays
from wholebatch.audit.watch.seen import quietly
from wholebatch.audit.watch.watcher import Watch
from wholebatch.content import tensors_in

# Elements of a sample that make up its number; of longer ones so many, evenly spread.
_HASHED_ELEMENTS = 16_384
_DISTINCT_ELEMENTS = 4_096
_DISTINCT_VALUES = 256
_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "DeepSpeedEngine", "FSDPModule")


class Modules:
    """Around the calls of all modules, of which only outermost ones matter.

    Args:
        watch: that is told.
        replays: that capture calls.
    """

    def __init__(self, watch: Watch, replays: Replays) -> None:
        self.watch, self._replays = watch, replays
        self._depth = 0
        self._began: tuple[int, Callable[[], Forward]] | None = None
        self._trained: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()
        self._wrapped: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._multipliers: dict[tuple[int, torch.device], Tensor] = {}
        # not by global hooks: with these a compiled module warns at each call
        self._patches = Patches()
        self._patches.wrap(nn.Module, "__call__", self._calling)

    def remove(self) -> None:
        """Put the call of modules back."""
        self._patches.restore()

    def _calling(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(module: nn.Module, *given: Any, **named: Any) -> Any:
            if torch.compiler.is_compiling() or not self.watch.here:
                return original(module, *given, **named)
            if self._depth:
                return original(module, *given, **named)
            self._begins(module, given)
            self._depth = self._replays.inside = 1
            try:
                output = original(module, *given, **named)
            finally:
                self._depth = self._replays.inside = 0
            self._ends(module, given, named, output)
            return output

        return call

    @quietly
    def _begins(self, module: nn.Module, given: Any) -> None:
        self._began = None
        if not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
            return
        self._replays.forward_begins(module, given)
        if self._trains(module):
            self._began = (id(module), self._facts(module, given))

    @quietly
    def _ends(self, module: nn.Module, given: Any, named: Any, output: Any) -> None:
        watch = self.watch
        watch.progress += 1
        if torch.is_grad_enabled():
            self._replays.forward_called(module, given, named, output)
        if self._began is None or self._began[0] != id(module):
            return
        facts = self._began[1]
        self._began = None
        outputs = list(tensors_in(output))
        if outputs and any(tensor.requires_grad for tensor in outputs):
            # samples are hashed after the call: what it did to its inputs in place is its own affair
            inputs = [*tensors_in(given), *tensors_in(named)]
            samples = self._samples(inputs) if watch.listening else _NOTHING
            watch.forward_called(module, lambda: samples.fill(facts()), outputs)

    def _trains(self, module: nn.Module) -> bool:
        known = self._trained.get(module)
        if not known:
            index_of = self.watch.gradients.index_of
            known = any(index_of(parameter) is not None for parameter in module.parameters())
            known = known or bool(self.watch.those_with(list(module.parameters())))
            self._trained[module] = known
            if known:
                self.watch.model_seen(module)
                for part in module.modules():
                    if isinstance(part, DistributedDataParallel):
                        self._wrapped[part.module] = type(part).__name__
        return known

    def _facts(self, module: nn.Module, given: Any) -> Callable[[], Forward]:
        state = hashlib.blake2b(torch.get_rng_state().numpy().tobytes(), digest_size=8).digest()
        if torch.accelerator.is_available():
            device = torch.accelerator.current_accelerator()
            generator = getattr(torch, device.type, None) if device is not None else None
            if generator is not None and hasattr(generator, "get_rng_state"):
                state += generator.get_rng_state().numpy().tobytes()
        random_state = int.from_bytes(hashlib.blake2b(state, digest_size=8).digest(), "big")
        holds = self.watch.holds_reduction([module])
        wrapper = _wrapper_of(module)
        past = self._wrapped.get(module, "")
        dropout, norm = _noisy_parts(module)
        asks = any(
            t.requires_grad and t.is_leaf and not isinstance(t, nn.Parameter) for t in tensors_in(given)
        )
        return lambda: Forward(
            module=type(module).__name__,
            random_state=random_state,
            num_dropout=dropout,
            num_batch_norm=norm,
            holds_reduction=holds,
            wrapper=wrapper or past,
            inside_wrapper=not past,
            input_needs_gradient=asks,
        )

    def _samples(self, tensors: list[Tensor]) -> _Samples:
        dense = [t for t in tensors if t.layout == torch.strided and t.dim() >= 1 and t.numel()]
        if not dense or any(t.shape[0] != dense[0].shape[0] for t in dense):
            first = dense[0] if dense else None
            return _Samples(None, tuple(first.shape) if first is not None else (), None)
        with torch.no_grad():
            numbers = sum((self._hashed(t) * (place + 1) for place, t in enumerate(dense)), start=0)
            some = dense[0].detach().reshape(-1)[:_DISTINCT_ELEMENTS].clone()
        return _Samples(numbers, tuple(dense[0].shape), some)

    def _hashed(self, tensor: Tensor) -> Any:
        """One 64-bit number for each sample: integer sums, so that no order of adding matters."""
        rows = tensor.detach().reshape(tensor.shape[0], -1)
        if rows.shape[1] > _HASHED_ELEMENTS:
            rows = rows[:, :: rows.shape[1] // _HASHED_ELEMENTS + 1]
        if rows.is_complex():
            rows = torch.view_as_real(rows.contiguous()).reshape(rows.shape[0], -1)
        if rows.is_floating_point():
            rows = rows.double().contiguous().view(torch.int64)
        return (rows.long() * self._multiplier(rows.shape[1], rows.device)).sum(1)

    def _multiplier(self, length: int, device: torch.device) -> Tensor:
        known = self._multipliers.get((length, device))
        if known is None:
            generator = torch.Generator("cpu").manual_seed(90_003)
            known = torch.randint(1, 2**62, (length,), generator=generator, device="cpu").to(device) | 1
            self._multipliers[length, device] = known
        return known


class _Samples:
    """What tells samples apart, still on the device."""

    def __init__(self, numbers: Any, shape: tuple[int, ...], some: Tensor | None) -> None:
        self._numbers, self._shape, self._some = numbers, shape, some

    def fill(self, forward: Forward) -> Forward:
        """The record of the call with its samples in it."""
        distinct = 0 if self._some is None else min(_DISTINCT_VALUES, len(set(self._some.tolist())))
        numbers = () if self._numbers is None else tuple(int(number) for number in self._numbers.tolist())
        return replace(forward, samples=numbers, shape=self._shape, num_distinct_values=distinct)


_NOTHING = _Samples(None, (), None)


def _noisy_parts(module: nn.Module) -> tuple[int, int]:
    """Dropout modules that drop, and modules that normalise by the batch and keep statistics."""
    dropout = norm = 0
    for part in module.modules():
        if not part.training:
            continue
        dropout += isinstance(part, _DropoutNd) and part.p > 0
        # attention drops by a number of its own, without a module
        dropout += isinstance(part, nn.MultiheadAttention) and part.dropout > 0
        dropout += bool(getattr(getattr(part, "config", None), "attention_dropout", 0.0) or 0.0)
        norm += isinstance(part, _BatchNorm) and part.track_running_stats
    return dropout, norm


def _wrapper_of(module: nn.Module) -> str:
    for kind in type(module).__mro__:
        if kind.__name__ in _WRAPPERS:
            return kind.__name__
    return ""
