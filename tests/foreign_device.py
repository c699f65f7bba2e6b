"""A device that torch does not know by name, in pure Python: each operation runs on the host's memory.

It stands for backends that register themselves as torch's ``privateuse1``, as Ascend's does.
``install()`` can't be undone, so it belongs in a process of its own.

A tensor of the device has no memory that torch could read. What it holds is kept by its storage, which
detached copies share: saved tensors and gradients come back as other objects. To torch it is contiguous
whatever its values' strides are, so every operation, also those that torch makes of others by way of
strides, is run as a whole on the values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import backend_registration
from torch.utils._pytree import tree_map

NAME = "foreign"
# How often each operation ran; reads of the host are under READS.
CALLS: Counter[str] = Counter()
READS = ("aten::_local_scalar_dense", "tolist", "to the host")
_COMPOSITE = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
_VALUES: dict[int, tuple[Any, torch.Tensor]] = {}  # with the storage, so that its address is not used again
_LIBRARIES: list[torch.library.Library] = []


class Backend(backend_registration._DummyBackendModule):
    """What torch asks of ``torch.foreign``."""

    def get_rng_state(self, *_: Any) -> torch.Tensor:
        return torch.zeros(8, dtype=torch.uint8)

    def set_rng_state(self, *_: Any) -> None:
        pass

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


class ForeignTensor(torch.Tensor):
    """A tensor of the device."""

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> ForeignTensor:
        made: Any = torch._C._acc.create_empty_tensor(values.shape, values.dtype)
        made.__class__ = cls
        storage = made.untyped_storage()
        _VALUES[storage._cdata] = storage, values
        return made

    def __init__(self, values: torch.Tensor) -> None:
        pass

    def tolist(self) -> Any:
        CALLS["tolist"] += 1
        return values_of(self).tolist()


def values_of(given: Any) -> Any:
    """The values of a tensor of the device, the host for the device, and anything else as it is."""
    if isinstance(given, torch.Tensor) and given.device.type == NAME:
        return _VALUES[given.untyped_storage()._cdata][1]
    return torch.device("cpu") if isinstance(given, torch.device) and given.type == NAME else given


def run(operation: Any, *given: Any, **named: Any) -> Any:
    """Run an operation on the values."""
    schema = operation._schema
    CALLS[schema.name] += 1
    if schema.name == "aten::_copy_from":
        source, target = given[:2]
        CALLS["to the host"] += target.device.type != NAME
        values_of(target).copy_(values_of(source))
        return target
    found = operation(*tree_map(values_of, given), **tree_map(values_of, named))
    written = [one.name for one in schema.arguments if one.alias_info and one.alias_info.is_write]
    if not written:
        return tree_map(lambda one: ForeignTensor(one) if isinstance(one, torch.Tensor) else one, found)
    by_name = {**{one.name: value for one, value in zip(schema.arguments, given, strict=False)}, **named}
    targets = [by_name[name] for name in written]
    return None if not schema.returns else targets[0] if len(schema.returns) == 1 else tuple(targets)


def reads() -> int:
    """How often the host has read the device since ``CALLS`` was cleared."""
    return sum(CALLS[name] for name in READS)


def install() -> torch.device:
    """Make the device known to torch, for the rest of this process."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=Backend())
    fallback, own = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    fallback.fallback(run, "PrivateUse1")
    for name in torch._C._dispatch_get_all_op_names():
        # torch would make these of others, by way of strides
        composite = any(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in _COMPOSITE)
        found = _operation(name) if composite else None
        if found is not None:
            own.impl(name.removeprefix("aten::"), _on_values(found), "PrivateUse1")
    _LIBRARIES.extend([fallback, own])
    return torch.device(NAME, 0)


def _operation(name: str) -> Any:
    base, _, overload = name.removeprefix("aten::").partition(".")
    packet = getattr(torch.ops.aten, base, None) if name.startswith("aten::") else None
    return getattr(packet, overload or "default", None)


def _on_values(operation: Any) -> Callable[..., Any]:
    return lambda *given, **named: run(operation, *given, **named)
