"""DistributedDataParallel that also answers for the module inside, so that one loss_fn fits both runs.

The whole batch runs on the plain model and the window, on several ranks, on a wrapped one. A loss_fn that
reads ``model.encoder`` would need ``model.module.encoder`` there; here it reads the same from both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

# What Python looks up on the type, past __getattr__: those of nn.Sequential, ModuleList and ModuleDict.
_SPECIAL = ("__getitem__", "__len__", "__iter__", "__contains__")
# DDP asks itself whether it has these, and a model's own must not answer.
_DDPS_OWN = ("module", "buffer_hook")


class _Answering(DistributedDataParallel):
    """Forward, hooks and reduction are DDP's; only names that DDP does not have come from the module."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in _DDPS_OWN:
                raise
        return getattr(self.module, name)


def wrapped_answering(model: nn.Module, *, find_unused_parameters: bool) -> DistributedDataParallel:
    """Wrap ``model`` in DDP over all ranks, with the attributes and items of ``model``.

    Args:
        model: a plain module, the same on every rank.
        find_unused_parameters: as DDP has it.

    Returns:
        A wrapper whose forward is DDP's.

    Exactness: no arithmetic of its own; DDP's reduction.
    """
    special = {name: _passed_on(name) for name in _SPECIAL if hasattr(type(model), name)}
    wrapper: type[_Answering] = type("DistributedDataParallel", (_Answering,), special)
    return wrapper(model, find_unused_parameters=find_unused_parameters)


def _passed_on(name: str) -> Callable[..., Any]:
    def method(wrapper: _Answering, *given: Any) -> Any:
        return getattr(wrapper.module, name)(*given)

    return method
