"""Keep and put back what a forward moves besides gradients: random state and buffers.

The window keeps both before its first micro-batch, so that an update which does not commit leaves
no trace; verify uses the same pieces to run one forward twice.
"""

from __future__ import annotations

import ctypes
import random
import sys
from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomState:
    """The random state of Python, numpy, torch on the host and the current accelerator."""

    python: tuple[Any, ...]
    numpy: Any
    host: torch.Tensor
    accelerator: torch.Tensor | None

    @classmethod
    def capture(cls, *, host_alone: bool = False) -> RandomState:
        """The state as it is now. Reads no device memory: generators live on the host.

        Args:
            host_alone: leave the accelerator's out; a forked worker may not ask for it.
        """
        there = not host_alone and torch.accelerator.is_available()
        return cls(
            python=_PYTHON.read(),
            numpy=_NUMPY.read(),
            host=torch.get_rng_state(),
            accelerator=_accelerator().get_rng_state() if there else None,
        )

    def restore(self) -> None:
        """Put this state back; the same forward then draws the same numbers."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.host)
        if self.accelerator is not None:
            _accelerator().set_rng_state(self.accelerator)


class _NumpyState:
    """The state of numpy's own generator, read out anew only where it has moved.

    ``get_state`` makes a Python object of each of its 624 numbers. Where the memory of the generator is
    the same as at the last reading, so is the state: a normal number kept for the next call is kept by a
    draw, which moves the generator. A reading that holds such a number is not used again, since the
    next call takes it without a draw.

    Source: ``BitGenerator.ctypes.state_address`` is in numpy's manual; that the memory of an MT19937 is
    its key and its place is not, and is compared with ``get_state`` at every reading.
    """

    def __init__(self) -> None:
        self._memory: tuple[int, bytes] | None = None
        self._state: Any = None

    def read(self) -> Any:
        memory = self._look()
        if memory is None:
            return np.random.get_state()
        if memory != self._memory:
            state: Any = np.random.get_state()
            _, key, place, has_normal, _ = state
            expected = key.tobytes() + int(place).to_bytes(4, sys.byteorder)
            self._memory = memory if memory[1] == expected and not has_normal else None
            self._state = state
        return self._state

    def _look(self) -> tuple[int, bytes] | None:
        generator: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]
        if type(generator) is not np.random.MT19937:
            return None
        address = generator.ctypes.state_address
        return address, ctypes.string_at(address, _MT19937_BYTES)


class _PythonState:
    """The state of Python's own generator, read out anew only where it has moved, as numpy's.

    Source: CPython's ``_randommodule.c``, where a generator is an object's head, its place and its key.
    That is compared with ``getstate`` at every reading; where it is otherwise, every call reads anew.
    """

    def __init__(self) -> None:
        self._memory: tuple[int, bytes] | None = None
        self._state: tuple[Any, ...] = ()

    def read(self) -> tuple[Any, ...]:
        generator: Any = getattr(random.getstate, "__self__", None)
        memory = self._look(generator)
        if memory is None:
            return random.getstate()
        if memory != self._memory or generator.gauss_next != self._state[2]:
            self._state = random.getstate()
            *key, place = self._state[1]
            self._memory = memory if memory[1] == array("I", [place, *key]).tobytes() else None
        return self._state

    def _look(self, generator: Any) -> tuple[int, bytes] | None:
        if type(generator) is not random.Random or not _IS_LAID_OUT:
            return None
        address = id(generator) + object.__basicsize__
        return address, ctypes.string_at(address, _MT19937_BYTES)


_MT19937_BYTES = 624 * 4 + 4
# Whether the memory that is looked at belongs to the generator at all.
_IS_LAID_OUT = (
    sys.implementation.name == "cpython"
    and random.Random.__basicsize__ >= object.__basicsize__ + _MT19937_BYTES
)
_NUMPY = _NumpyState()
_PYTHON = _PythonState()


def _accelerator() -> Any:
    return torch.get_device_module(torch.accelerator.current_accelerator())


@contextmanager
def random_state_kept(*, host_alone: bool = False) -> Iterator[None]:
    """Put all random state back at the end, also after an exception.

    Args:
        host_alone: leave the accelerator's as it comes.
    """
    state = RandomState.capture(host_alone=host_alone)
    try:
        yield
    finally:
        state.restore()


def seed_host(seed: int) -> None:
    """Start the generators of the host from a seed: those of Python, numpy and torch.

    Args:
        seed: from ``-2**63`` up to, not including, ``2**63``.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


def seed_all(seed: int) -> None:
    """Start the generators of the host and of every accelerator from a seed.

    Args:
        seed: as for :func:`seed_host`.
    """
    seed_host(seed)
    torch.manual_seed(seed)


class _Kept(NamedTuple):
    owner: nn.Module
    key: str
    tensor: torch.Tensor | None
    value: torch.Tensor | None


class BufferKeeper:
    """Remembers every buffer of a module, and puts them back.

    The values are copied each time: torch's own count of writes (``Tensor._version``) misses those
    of BatchNorm to its running statistics.

    Args:
        module: the module whose buffers are kept, with all its submodules.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._kept: list[_Kept] = []

    def keep(self, modules: Iterable[nn.Module] | None = None) -> None:
        """Remember the buffers as they are now.

        Args:
            modules: the module and all its submodules, where the caller has walked them already.
        """
        self._kept = [
            _Kept(owner, key, tensor, None if tensor is None else tensor.detach().clone())
            for owner in (self._module.modules() if modules is None else modules)
            if owner._buffers
            for key, tensor in owner._buffers.items()
        ]

    def moved(self) -> list[str]:
        """Names of the buffers whose values differ from those at :meth:`keep`. Reads the device."""
        names = {
            id(owner): f"{prefix}." if prefix else "" for prefix, owner in self._module.named_modules()
        }
        return [
            f"{names[id(kept.owner)]}{kept.key}"
            for kept in self._kept
            if not _same(kept.owner._buffers.get(kept.key), kept.value)
        ]

    @torch.no_grad()
    def put_back(self) -> None:
        """Make every buffer what it was at :meth:`keep`: the same tensor with the same values.

        A buffer whose shape was changed in place, or that can't be written, becomes a new tensor.

        Exactness: bit for bit.
        """
        for kept in self._kept:
            kept.owner._buffers[kept.key] = _with_value(kept.tensor, kept.value)

    def forget(self) -> None:
        """Let go of the copies."""
        self._kept = []


def _with_value(tensor: torch.Tensor | None, value: torch.Tensor | None) -> torch.Tensor | None:
    """``tensor`` with ``value`` written into it; ``value`` itself where it can't be written."""
    if tensor is None or value is None or tensor.shape != value.shape:
        return value
    try:
        return tensor.copy_(value)
    except RuntimeError:  # expanded over one memory, or made under inference_mode
        return value


def _same(now: torch.Tensor | None, then: torch.Tensor | None) -> bool:
    if now is None or then is None:
        return now is then
    return now.shape == then.shape and bool(torch.eq(now, then).all())
