"""The buckets in which DistributedDataParallel reduces: made in one order, in every process alike.

DDP begins with one bucket of all gradients and makes others after its first reduction, in the order in
which they came. From 3 ranks on a bucket decides in which order the ranks' gradients are added up, because
each rank of a ring begins with another part of it. So an update would have other last digits right after
a start than it has in a run that started earlier, and a resumed run would not be the one that never ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from wholebatch.gradients import LOOKUPS

# Hooks that divide by the number of ranks, as DDP itself does. Any other hook may do anything.
AVERAGING_HOOKS = (
    default_hooks.allreduce_hook,
    default_hooks.fp16_compress_hook,
    default_hooks.bf16_compress_hook,
)


def is_sparse(module: nn.Module) -> bool:
    """Whether the module's gradient is a sparse tensor."""
    return isinstance(module, LOOKUPS) and module.sparse and module.weight.requires_grad


def rebuilds_buckets(model: DistributedDataParallel) -> bool:
    """Whether DDP makes other buckets after its first reduction, and one of zeros may come before that.

    It makes none with ``find_unused_parameters``. With ``static_graph`` it learns more in its first
    backward, a hook of the user's own may keep what it is given, and a sparse gradient has to be there.
    """
    settled = model.find_unused_parameters or model.static_graph
    strange = any(hook not in AVERAGING_HOOKS for hook, _ in model._comm_hooks)
    return not (settled or strange or any(is_sparse(module) for module in model.modules()))


def takes_zeros(model: DistributedDataParallel) -> bool:
    """Whether a rank that failed may reduce zeros while others are in an update's last backward.

    Not where forwards have collectives of their own, in which others could be. Nor where gradients are
    views of buckets: who saves that memory may have no room for zeros, and gradients that were set aside
    would be overwritten.
    """
    talks_in_forwards = any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())
    return not (talks_in_forwards or model.gradient_as_bucket_view)


def reduce_zeros(model: DistributedDataParallel) -> None:
    """Take part in a reduction of DDP without a backward of one's own, as its join for uneven inputs does.

    Needs room for zeros as large as all gradients.

    Args:
        model: one that ``rebuilds_buckets``; its gradients stay as they are.
    """
    reducer: Any = model.reducer
    zeros = reducer._get_zeros_like_grad_buckets()  # in the order in which the others reduce theirs
    for under_way in [reducer._run_comm_hook(bucket) for bucket in zeros]:
        under_way.wait()
    # what the others do after their first reduction since a reset, together
    reducer._push_all_rebuilt_params()
    reducer._rebuild_buckets()


def settle_buckets(model: DistributedDataParallel, parameters: Sequence[nn.Parameter]) -> None:
    """Have DDP make its buckets now, in the reverse order of its parameters, as most backwards go.

    Its reducer makes them after a reduction, in the order in which its hooks were called. So they are
    called in a backward that has nothing else in it, and zeros are reduced. All ranks at once.

    Args:
        model: one that ``rebuilds_buckets``; it is as before any forward afterwards.
        parameters: all that it reduces, in its order. Their gradients stay as they are.

    Exactness: no parameter, gradient, buffer or random state changes.
    """
    reducer: Any = model.reducer

    def call_all(_: Tensor) -> None:
        for index in reversed(range(len(parameters))):
            reducer._autograd_hook(index)

    found = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    reducer._reset_state()  # or it would keep the buckets of a training before
    reducer.prepare_for_backward([])
    nothing = torch.zeros((), requires_grad=True, device=parameters[0].device)
    nothing.register_hook(call_all)  # type: ignore[no-untyped-call]
    torch.autograd.backward([nothing])
    reducer._rebuild_buckets()
    for parameter, gradient in zip(parameters, found, strict=True):
        parameter.grad = gradient
