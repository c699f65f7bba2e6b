"""torch's older ``FullyShardedDataParallel`` (FSDP1), sharded over all ranks or within a group of them.

Facts of FSDP1 that this file rests on (read in torch 2.13 and tested against it):

* Forward and backward gather parameters, so every rank must run as many of them as the others.
* The post-backward hook of each flat parameter reads its module's ``_sync_gradients``. Held back, the whole
  gradient waits in the flat parameter, in the dtype of the forward: bfloat16 under such mixed precision.
* It divides by ``_gradient_predivide_factor`` before and ``_gradient_postdivide_factor`` after the sum.
* Where the reducing backward does not reach a flat parameter that holds a whole gradient, it raises itself.
* After an exception inside a forward or backward its states stay where they were, and it can't go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from wholebatch.errors import StaleGradientsError, UnsupportedError
from wholebatch.ranks.base import Reduce, Roles
from wholebatch.ranks.several import ShardingRanks


class FSDP1Ranks(ShardingRanks):
    """The ranks of one ``FullyShardedDataParallel`` model; each is a replica.

    Args:
        model: the outermost wrapper.
        reduce: ``"per_update"``: held back, and reduced in the last backward; whole gradients are held.
            ``"per_micro_batch"``: each backward reduces to the shards.
        group: all ranks of the job.

    Raises:
        UnsupportedError: a strategy, precision or hook that can't be run exactly.
    """

    engine = "FullyShardedDataParallel"

    def __init__(
        self, model: FullyShardedDataParallel, *, reduce: Reduce, group: dist.ProcessGroup
    ) -> None:
        self._model = model
        self._states: list[Any] = [m for m in model.modules() if isinstance(m, FullyShardedDataParallel)]
        self._handles: list[Any] = [one._handle for one in self._states if one._handle is not None]
        super().__init__(group, self._handles[0].device, reduce=reduce)
        self._found: list[bool] = []
        self._refuse_modes()
        first = self._states[0]
        self.divisor = float(first._gradient_predivide_factor * first._gradient_postdivide_factor)
        self.roles = Roles.one_each(dist.get_rank(group), dist.get_world_size(group))
        if self.divisor != self.roles.num_ranks:
            raise UnsupportedError(
                f"FullyShardedDataParallel takes a mean over {self.divisor:g} ranks and "
                f"{self.roles.num_ranks} are running; give the window the group that it reduces over"
            )
        self.holders = self.roles.num_ranks // first.world_size  # a flat parameter is a plain shard

    def check_parameters(self, parameters: Sequence[nn.Parameter]) -> None:
        ignored = {id(p) for one in self._states for p in one._ignored_params}
        known = {id(parameter) for parameter in self._model.parameters()} - ignored
        outside = [p for p in parameters if p.requires_grad and id(p) not in known]
        if outside:
            raise UnsupportedError(
                f"{len(outside)} of the optimizer's {len(parameters)} parameters are not sharded by "
                f"FullyShardedDataParallel (the first has shape {list(outside[0].shape)}), so nobody "
                f"reduces their gradients; wrap the whole model, without ignored states, and "
                f"build the optimizer afterwards"
            )

    def begin(self) -> None:
        self._refuse_modes()
        self.reductions = 0
        if left := self._whole_gradients():
            self._clear()
            raise StaleGradientsError(
                f"{left} flat parameters hold whole gradients before the first micro-batch of this update; "
                f"a backward outside the window, under no_sync, left them. They are thrown away now; "
                f"run the update again"
            )
        self._found = [one._sync_gradients for one in self._states]

    def end(self, *, committed: bool) -> None:
        if self._found:
            self._put_switches_back()
            self._found = []
        if not committed:
            self._clear()

    def _switch(self) -> None:
        for one in self._states:
            one._sync_gradients = self.synchronises

    def _put_switches_back(self) -> None:
        for one, found in zip(self._states, self._found, strict=True):
            one._sync_gradients = found

    # What is left inside ---------------------------------------------------------------------------

    def _whole_gradients(self) -> int:
        """How many flat parameters hold a gradient of their whole size."""
        return sum(
            handle.flat_param.grad is not None
            and handle.flat_param.grad.numel() > handle.flat_param._sharded_size.numel()
            for handle in self._handles
        )

    def _clear(self) -> None:
        """Take everything of an update that did not commit out of FSDP.

        Raises:
            UnsupportedError: it ended inside a forward or backward, and FSDP stays there.
        """
        idle = all(one.training_state.name == "IDLE" for one in self._states)
        if not idle or any(handle._training_state.name != "IDLE" for handle in self._handles):
            raise UnsupportedError(
                "FullyShardedDataParallel can't be reset after an exception inside its forward or "
                "backward; restart from the last committed update, or use fully_shard, which can"
            )
        for handle in self._handles:
            handle.flat_param.grad = None
            if hasattr(handle.flat_param, "_saved_grad_shard"):
                del handle.flat_param._saved_grad_shard
        for parameter in self._model.parameters():
            parameter.grad = None

    # What can't be run exactly ---------------------------------------------------------------------

    def _refuse_modes(self) -> None:
        strategies = {one.sharding_strategy for one in self._states}
        if len(strategies) > 1 or ShardingStrategy.NO_SHARD in strategies:
            names = ", ".join(sorted(one.name for one in strategies))
            raise UnsupportedError(
                f"the model is wrapped with the strategies {names}; the window knows one of FULL_SHARD, "
                f"SHARD_GRAD_OP and HYBRID_SHARD for all of it. For NO_SHARD use DistributedDataParallel"
            )
        for one in self._states:
            if one._use_orig_params:
                raise UnsupportedError(
                    "FullyShardedDataParallel(use_orig_params=True) hands out other tensors as gradients "
                    "in each forward, so that nobody can tell whether the loop wrote them; build it with "
                    "use_orig_params=False, or use fully_shard"
                )
            if one._comm_hook is not None:
                raise UnsupportedError(
                    "FullyShardedDataParallel has a communication hook, and nobody vouches for what it "
                    "divides by; leave it out, or use fully_shard"
                )
            low = one.mixed_precision.param_dtype
            if low in (torch.bfloat16, torch.float16) and not self._per_micro_batch:
                raise UnsupportedError(
                    f"FullyShardedDataParallel(mixed_precision=MixedPrecision(param_dtype={low})) adds "
                    f'held-back gradients up in {low}; build the window with reduce="per_micro_batch", or '
                    f"use fully_shard, which adds them up in its reduce_dtype"
                )
