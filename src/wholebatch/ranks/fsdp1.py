"""torch's older ``FullyShardedDataParallel`` (FSDP1), sharded over all ranks or within a group of them.

Facts of FSDP1 that this file rests on (read in torch 2.13 and tested against it):

* Forward and backward gather parameters, so every rank must run as many of them as the others.
* The post-backward hook of each flat parameter reads its module's ``_sync_gradients``. Held back, the whole
  gradient waits in the flat parameter, in the dtype of the forward: bfloat16 under such mixed precision.
  Reduced each time, shards are added up in the dtype of the parameters.
* With ``use_orig_params=True`` the optimizer's parameters are views of flat ones, and so are their
  gradients, which a forward or backward makes anew. A parameter without elements on a rank has none there.
  Before it gathers, it takes over what somebody wrote, and writes zeros where a gradient is missing: at the
  place that the parameter has in a shard, also into a whole gradient.
* The outermost wrapper stays gathered from its forward to its backward. SHARD_GRAD_OP does everywhere, and
  on to the next forward where the reduction is held back.
* It divides by ``_gradient_predivide_factor`` before and ``_gradient_postdivide_factor`` after the sum.
* Where the reducing backward does not reach a flat parameter that holds a whole gradient, it raises itself.
* After an exception inside a forward or backward its states stay where they were, and it can't go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from wholebatch.accumulation import HELD_BACK_FSDP1, SHARDED_FSDP1, WideGradients
from wholebatch.errors import StaleGradientsError, UnsupportedError
from wholebatch.ranks.base import Reduce, Roles, Traffic
from wholebatch.ranks.several import ShardingRanks, refuse_outside


class FSDP1Ranks(ShardingRanks):
    """The ranks of one ``FullyShardedDataParallel`` model; each is a replica.

    Args:
        model: the outermost wrapper.
        reduce: ``"per_update"``: held back, and reduced in the last backward; whole gradients are held.
            ``"per_micro_batch"``: each backward reduces to the shards.
        group: all ranks of the job.

    Raises:
        UnsupportedError: a strategy or hook that can't be run exactly.
    """

    engine = "FullyShardedDataParallel"

    def __init__(
        self, model: FullyShardedDataParallel, *, reduce: Reduce, group: dist.ProcessGroup
    ) -> None:
        self._model = model
        self._states: list[Any] = [m for m in model.modules() if isinstance(m, FullyShardedDataParallel)]
        self._handles: list[Any] = [one._handle for one in self._states if one._handle is not None]
        self.renews_gradients = any(handle._use_orig_params for handle in self._handles)
        super().__init__(group, self._handles[0].device, reduce=reduce)
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
        flat = [handle.flat_param for handle in self._handles]
        refuse_outside(
            parameters,
            (p for one in flat for p in (one, *(one._params or ()), *(one._shared_params or ()))),
            "are not sharded by FullyShardedDataParallel",
            ", so nobody reduces their gradients; wrap the whole model, without ignored states, and build "
            "the optimizer afterwards",
        )

    def begin(self) -> None:
        self._refuse_modes()
        if left := self._whole_gradients():
            self._reset()
            raise StaleGradientsError(
                f"{left} flat parameters hold whole gradients before the first micro-batch of this update; "
                f"a backward outside the window, under no_sync, left them. They are thrown away now; "
                f"run the update again"
            )
        self._note(
            [(one, "_sync_gradients") for one in self._states]
            + [(handle, "_skip_writeback_check") for handle in self._handles]
        )
        for handle in self._handles:
            if handle._use_orig_params:
                handle._writeback_orig_params()  # what was written between updates; inside, nothing may be
            handle._skip_writeback_check = True

    def widens(self, wide: WideGradients, parameters: Sequence[nn.Parameter], micro_batches: int) -> bool:
        kept = SHARDED_FSDP1 if self._per_micro_batch else HELD_BACK_FSDP1
        dtypes = [
            handle.flat_param.dtype if self._per_micro_batch else handle._fwd_bwd_param_dtype
            for handle in self._handles
            if handle.flat_param.requires_grad
        ]
        wide.refuse_narrow(dtypes, micro_batches=micro_batches, why=kept)
        return False

    def traffic(
        self,
        wide: WideGradients,
        parameters: Sequence[nn.Parameter],
        micro_batches: int,
    ) -> Traffic:
        reductions = micro_batches if self._per_micro_batch else 1
        reduced = gathered = held = 0
        for state in self._states:
            if (handle := state._handle) is None:
                continue
            copies = self.roles.num_ranks // state.world_size
            again = state is not self._states[0]  # the outermost stays gathered
            gathers = micro_batches * (2 if again else 1)
            if state.sharding_strategy == ShardingStrategy.SHARD_GRAD_OP:
                gathers = reductions
            elements = handle.flat_param._padded_unsharded_size.numel()
            inside, over = handle._fwd_bwd_param_dtype.itemsize, handle._reduce_dtype.itemsize
            gathered += gathers * elements * inside
            if handle.flat_param.requires_grad:
                reduced += reductions * over * (elements + elements // state.world_size * (copies > 1))
                # what was reduced lies in the flat parameter's own dtype
                shard = handle.flat_param._sharded_size.numel() * handle.flat_param.itemsize
                kept = shard if self._per_micro_batch else elements * inside
                held += kept * (micro_batches > 1)
        return Traffic(
            reductions=reductions, reduced_bytes=reduced, gathered_bytes=gathered, held_bytes=held
        )

    def end(self, *, committed: bool) -> None:
        super().end(committed=committed)
        for handle in self._handles:
            handle._reset_flat_param_grad_info_if_needed()  # lets go of what no original parameter shows

    def _switch(self) -> None:
        for one in self._states:
            one._sync_gradients = self.synchronises

    # What is left inside ---------------------------------------------------------------------------

    def _whole_gradients(self) -> int:
        """How many flat parameters hold a gradient of their whole size."""
        return sum(
            handle.flat_param.grad is not None
            and handle.flat_param.grad.numel() > handle.flat_param._sharded_size.numel()
            for handle in self._handles
        )

    def _reset(self) -> None:
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
            if one._comm_hook is not None:
                raise UnsupportedError(
                    "FullyShardedDataParallel has a communication hook, and nobody vouches for what it "
                    "divides by; leave it out, or use fully_shard"
                )
