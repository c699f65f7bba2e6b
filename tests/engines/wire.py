"""Counts the bytes that a rank hands to collectives, by what they are for."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from wholebatch.ranks import collectives

# Which operations of torch.distributed add gradients up and which bring parameters together, and which of
# their arguments is what they are counted by: the whole of what is cut in shards.
_REDUCE = {
    "allreduce_": 0,
    "allreduce_coalesced_": 0,
    "_reduce_scatter_base_": 1,
    "reduce_scatter_tensor_coalesced_": 1,
    "reduce_scatter_": 1,
    "reduce_": 0,
}
_GATHER = {
    "_allgather_base_": 0,
    "allgather_into_tensor_coalesced_": 0,
    "allgather_": 0,
    "broadcast_": 0,
}
_SEND = {"send": 0}


class Wire(TorchDispatchMode):
    """Bytes that this rank hands over while it is active.

    Attributes:
        reduced: of gradients that are added up.
        gathered: of parameters.
        exchanged: of outputs and their gradients, between the ranks of one replica: what DTensors add up or
            gather in a forward and backward, and what stages send.
        paused: counts nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reduced = self.gathered = self.exchanged = 0
        self.paused = False
        self._words = {one.group_name for ref in collectives._APART.values() if (one := ref())}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented  # it asks again for the collectives that it comes to
        if not self.paused and func.namespace in ("c10d", "_c10d_functional"):
            self._count(func.namespace, func.__name__.split(".")[0], args)
        return func(*args, **(kwargs or {}))

    def _count(self, namespace: str, name: str, args: Any) -> None:
        if namespace == "_c10d_functional":
            if name != "wait_tensor":
                self.exchanged += _bytes(args[0])
        elif not self._is_of_words(args):
            if name in _REDUCE and _elements(args[_REDUCE[name]]) > 1:  # one alone is a norm
                self.reduced += _bytes(args[_REDUCE[name]])
            elif name in _GATHER:
                self.gathered += _bytes(args[_GATHER[name]])
            elif name in _SEND:
                self.exchanged += _bytes(args[_SEND[name]])

    def _is_of_words(self, args: Any) -> bool:
        """Whether the ranks talk to each other on the host, or a group has one rank only."""
        for one in args:
            if isinstance(one, torch.ScriptObject) and one._type().name() == "ProcessGroup":
                group = dist.ProcessGroup.unbox(one)
                return group.size() == 1 or group.group_name in self._words
        return False


def _tensors(given: Any) -> list[torch.Tensor]:
    if isinstance(given, torch.Tensor):
        return [given]
    return [tensor for one in given for tensor in _tensors(one)]


def _bytes(given: Any) -> int:
    return sum(tensor.nbytes for tensor in _tensors(given))


def _elements(given: Any) -> int:
    return sum(tensor.numel() for tensor in _tensors(given))
