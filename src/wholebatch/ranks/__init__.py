"""Which engine reduces the gradients of a model, and what the window needs of it."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from wholebatch.errors import UnsupportedError
from wholebatch.ranks.base import Ranks
from wholebatch.ranks.ddp import DDPRanks, Reduce
from wholebatch.ranks.single import SingleRank

_KNOWN = "a plain module on one rank, or torch.nn.parallel.DistributedDataParallel on several"
# By name, so that no engine is imported to say that it is not one of ours.
_FOREIGN = {"FSDPModule", "FullyShardedDataParallel", "DeepSpeedEngine", "PipelineEngine", "DataParallel"}


def find_ranks(
    model: nn.Module,
    *,
    process_group: dist.ProcessGroup | None,
    reduce: Reduce,
    reduction_divisor: float | None,
) -> Ranks:
    """The seam for ``model``'s engine.

    Args:
        model: the module whose forward the loop calls.
        process_group: the ranks of the job; by default the model's own, or all ranks.
        reduce: how DDP reduces; see :class:`wholebatch.ranks.ddp.DDPRanks`.
        reduction_divisor: what a communication hook divides by.

    Raises:
        UnsupportedError: a wrapper that this version does not know, or several ranks without one.
    """
    if reduce not in ("overlapped", "after_agreement"):
        raise UnsupportedError(f'reduce={reduce!r} is neither "overlapped" nor "after_agreement"')
    if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
        raise UnsupportedError(f"process_group={process_group!r} is no torch.distributed process group")
    _refuse_unknown(model)
    if isinstance(model, DistributedDataParallel):
        if process_group is not None and process_group is not model.process_group:
            raise UnsupportedError(
                f"the window's process group has {dist.get_world_size(process_group)} ranks and DDP's "
                f"another one of {dist.get_world_size(model.process_group)}; give both the same group"
            )
        return DDPRanks(model, reduce=reduce, reduction_divisor=reduction_divisor)
    ranks = dist.get_world_size(process_group) if dist.is_available() and dist.is_initialized() else 1
    if ranks > 1:
        raise UnsupportedError(
            f"{ranks} ranks are running and the model is a plain {type(model).__name__}, whose gradients "
            f"nobody reduces; wrap it in torch.nn.parallel.DistributedDataParallel"
        )
    if reduction_divisor is not None:
        raise UnsupportedError(
            f"reduction_divisor={reduction_divisor!r} tells what a communication hook of "
            f"DistributedDataParallel divides by, and one rank reduces nothing; leave it out"
        )
    return SingleRank()


def _refuse_unknown(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise UnsupportedError(f"the model is a {type(model).__name__}; the window knows {_KNOWN}")
    for name, module in model.named_modules():
        engine = _engine(module)
        if engine in _FOREIGN or (engine and name):
            where = f"{name} inside the model" if name else "the model"
            raise UnsupportedError(
                f"{where} is a {engine}, which the window does not know there. It knows {_KNOWN}; "
                f"compile or nest what is inside DistributedDataParallel, not the wrapper itself"
            )
    if any(type(parameter).__name__ == "DTensor" for parameter in model.parameters()):
        raise UnsupportedError(
            f"the model has parameters that are DTensors (sharded over ranks); the window knows {_KNOWN}"
        )


def _engine(module: nn.Module) -> str | None:
    """The name of the engine that ``module`` is, or None for a plain module."""
    names = {base.__name__ for base in type(module).__mro__}
    found = names & (_FOREIGN | {"DistributedDataParallel"})
    return min(found) if found else None
