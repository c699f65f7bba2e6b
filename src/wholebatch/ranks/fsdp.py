"""torch's ``fully_shard`` (FSDP2), also over a mesh of two dimensions (HSDP) and beside tensor parallel.

Facts of FSDP2 that this file rests on (read in torch 2.13 and tested against it):

* Forward and backward gather parameters, so every rank must run as many of them as the others. Ranks
  with fewer micro-batches run weightless ones (``equal_turns``).
* The flags that say whether a backward reduces are read in the backward, by each group of parameters.
  The group's setters for factors act on one module only, the others on all that it holds; here each
  group is set by itself and put back as it was found.
* Held back, gradients wait inside the groups, in ``reduce_dtype`` where there is one, and ``zero_grad``
  does not reach them. Reduced each time, they are added up in the sharded parameters' own dtype.
* A factor of one's own divides by a multiplied sum that gloo does not have. The plain mean over the mesh
  is exact too, since the window multiplies by its divisor, so factors are set aside for the update.
* After an exception inside a forward or backward the groups stay where they were, and a later backward
  trains nothing, without an error. ``reset_iter_state`` puts that right, but not what was held back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from wholebatch.accumulation import HELD_BACK_FSDP2, SHARDED_FSDP2, WideGradients
from wholebatch.errors import PoisonedWindowError, StaleGradientsError, UnsupportedError
from wholebatch.gradients import on_this_rank
from wholebatch.ranks.base import Reduce, Traffic
from wholebatch.ranks.roles import roles_of_mesh
from wholebatch.ranks.several import ShardingRanks, refuse_replaced

# What a window sets in each group for the time of an update.
_SWITCHES = ("reduce_grads", "all_reduce_grads", "gradient_divide_factor")


class FSDPRanks(ShardingRanks):
    """The ranks of one model under ``fully_shard``; each is a replica, unless one is cut over several.

    Args:
        model: the sharded model.
        reduce: ``"per_update"``: held back, and reduced in the last backward; whole gradients are held.
            ``"per_micro_batch"``: each backward reduces to the shards; over a mesh of two dimensions only
            within a shard group, and over the replicas once.
        group: all ranks of the job.
        context_parallel: the ranks that hold parts of the same sequences, among those that shard.

    Raises:
        UnsupportedError: a model that is not sharded as a whole, or a reduction of the user's own.
    """

    engine = "fully_shard"

    def __init__(
        self,
        model: nn.Module,
        *,
        reduce: Reduce,
        group: dist.ProcessGroup,
        context_parallel: DeviceMesh | None = None,
    ) -> None:
        self._model = model
        self._modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._groups = groups_of(model)
        super().__init__(group, self._groups[0].device, reduce=reduce)
        self.divisor = float(mesh_size(self._groups))
        place, size = _place(self._groups[0].mesh_info)
        self.roles = roles_of_mesh(self._messages, place, size, context_parallel)
        self.holders = self.roles.num_ranks
        self.data_shards = max(getattr(group.mesh_info, "shard_mesh_size", 1) for group in self._groups)
        self._refuse_ranks_beside()
        refuse_own_reductions(self._groups)

    def check_parameters(self, parameters: Sequence[nn.Parameter]) -> None:
        known = {id(one.sharded_param) for group in self._groups for one in group.fsdp_params}
        outside = [p for p in parameters if p.requires_grad and id(p) not in known]
        if outside:
            refuse_replaced(parameters, self._model, by="fully_shard")
            names = {id(parameter): name for name, parameter in self._model.named_parameters()}
            raise UnsupportedError(
                f"{len(outside)} of the optimizer's {len(parameters)} parameters are not sharded by "
                f"fully_shard (the first is {names[id(outside[0])]}), so nobody reduces their gradients; "
                f"call fully_shard on the whole model too, and build the optimizer afterwards"
            )

    def begin(self) -> None:
        refuse_own_reductions(self._groups)
        self._refuse_left_gradients()
        contexts = [module._get_fsdp_state()._state_ctx for module in self._modules]
        self._note(
            [(group, name) for group in self._groups for name in _SWITCHES]
            + [(context, "is_last_backward") for context in contexts]
        )
        for context in contexts:
            context.is_last_backward = True  # or what was gathered ahead is used after the step
        for group in self._groups:
            group.gradient_divide_factor = None
            group.reshard()  # a forward without gradients may have left it gathered

    def widens(self, wide: WideGradients, parameters: Sequence[nn.Parameter], micro_batches: int) -> bool:
        kept = SHARDED_FSDP2 if self._per_micro_batch else HELD_BACK_FSDP2
        learning = [parameter.dtype for parameter in parameters if parameter.requires_grad]
        dtypes = learning if self._per_micro_batch else held_back_in(self._groups)
        wide.refuse_narrow(dtypes, micro_batches=micro_batches, why=kept)
        return False

    def backward(self, roots: Sequence[tuple[Tensor, Tensor]]) -> None:
        super().backward(roots)
        if self.synchronises and (left := self._held_back()):
            raise PoisonedWindowError(
                f"rank {self.rank}: the backward that was to reduce left the gradients of {len(left)} "
                f"parameters inside fully_shard's groups ({left[0]}); was its loss computed without the "
                f"sharded model's forward, or a switch of fully_shard set inside the loop? Restart from "
                f"the last committed update"
            )

    def traffic(
        self,
        wide: WideGradients,
        parameters: Sequence[nn.Parameter],
        micro_batches: int,
    ) -> Traffic:
        outermost: list[Any] = []
        if isinstance(self._model, FSDPModule):
            state = self._model._get_fsdp_state()
            # torch keeps it gathered from its forward to its backward, unless told otherwise
            outermost = state._fsdp_param_groups if state._auto_reshard_after_forward else []
        kept = [group in outermost for group in self._groups]
        return _traffic(self._groups, kept, micro_batches, per_micro_batch=self._per_micro_batch)

    def end(self, *, committed: bool) -> None:
        super().end(committed=committed)
        for group in self._groups:
            group.reshard()  # what is gathered still has the parameters from before the step

    def _switch(self) -> None:
        for group in self._groups:
            group.reduce_grads, group.all_reduce_grads = self.synchronises, self._last

    # What is left inside ---------------------------------------------------------------------------

    def _held_back(self) -> list[str]:
        """Names of the parameters whose gradients wait inside the groups."""
        return [
            one._param_fqn or "?"
            for group in self._groups
            for one in group.fsdp_params
            if _waits_inside(one)
        ]

    def _refuse_left_gradients(self) -> None:
        if left := self._held_back():
            self._reset()
            raise StaleGradientsError(
                f"fully_shard held back gradients of {len(left)} parameters before the first micro-batch "
                f"of this update ({left[0]}), which zero_grad does not reach; they would have been "
                f"added to the update and are thrown away now. A backward outside the window, under "
                f"set_requires_gradient_sync(False), left them; run the update again"
            )

    def _reset(self) -> None:
        for module in self._modules:
            state = module._get_fsdp_state()
            if not hasattr(module, "reset_iter_state"):
                raise UnsupportedError(
                    f"fully_shard of torch {torch.__version__} can't be reset after a failed update; torch "
                    f"2.13 can"
                )
            if state._is_root:
                module.reset_iter_state()
        for group in self._groups:
            for one in group.fsdp_params:
                one.unsharded_accumulated_grad = None
                if hasattr(one, "_unsharded_param"):
                    one._unsharded_param.grad = None

    def _refuse_ranks_beside(self) -> None:
        """Refuse ranks over which no mesh extends: they would train models of their own."""
        spread = max(
            one.sharded_param.device_mesh.size() for group in self._groups for one in group.fsdp_params
        )
        if spread < self.roles.num_ranks:
            raise UnsupportedError(
                f"{self.roles.num_ranks} ranks are running and the model is sharded over {spread} of them, "
                f"so that nobody reduces over the others; shard it over a mesh of all ranks, of two "
                f"dimensions for copies (HSDP), or give the window the process group of these {spread}"
            )


# Groups of parameters, of a model or of a stage of one ------------------------------------------------


def mesh_size(groups: Sequence[Any]) -> int:
    """Over how many ranks each group takes its mean."""
    sizes = {_place(group.mesh_info)[1] for group in groups}
    if len(sizes) > 1:
        raise UnsupportedError(
            f"parts of the model are sharded over meshes of {' and '.join(map(str, sorted(sizes)))} "
            f"ranks, so that their gradients are means over different numbers of replicas; shard all "
            f"of it over one mesh"
        )
    (size,) = sizes
    return size


def held_back_in(groups: Sequence[Any]) -> list[torch.dtype]:
    """What gradients are added up in that are held back: the dtype of their reduction.

    What is frozen, such as a base under adapters, adds nothing up.
    """
    return [
        one.mp_policy.reduce_dtype or one.mp_policy.param_dtype or one.sharded_param.dtype
        for group in groups
        for one in group.fsdp_params
        if one.sharded_param.requires_grad
    ]


def refuse_own_reductions(groups: Sequence[Any]) -> None:
    """Refuse what a user put in the place of torch's own collectives."""
    for group in groups:
        if group._all_reduce_hook is not None:
            raise UnsupportedError(
                "fully_shard has an all-reduce hook (set_all_reduce_hook), and nobody vouches for what "
                "it divides by; use a mesh of two dimensions (HSDP) in its place"
            )
        for comm in (group._reduce_scatter_comm, group._all_gather_comm):
            if not type(comm).__module__.startswith("torch."):
                raise UnsupportedError(
                    f"fully_shard has a {type(comm).__qualname__} in place of torch's own collectives, "
                    f"and nobody vouches for what it divides by; leave it out"
                )


def groups_of(model: nn.Module) -> list[Any]:
    """All groups of parameters of a model, each once."""
    found = {
        id(group): group
        for module in model.modules()
        if isinstance(module, FSDPModule)
        for group in module._get_fsdp_state()._fsdp_param_groups
    }
    if not found:
        raise UnsupportedError("fully_shard was called on modules without parameters; call it on the model")
    return list(found.values())


def _traffic(
    groups: Sequence[Any], kept: Sequence[bool], micro_batches: int, *, per_micro_batch: bool
) -> Traffic:
    reductions = micro_batches if per_micro_batch else 1
    reduced = gathered = held = 0
    for group, stays in zip(groups, kept, strict=True):
        shards = getattr(group.mesh_info, "shard_mesh_size", 1)
        copies = getattr(group.mesh_info, "replicate_mesh_size", 1)
        again = group.post_forward_mesh_info is not None and not stays
        gathers = micro_batches * (2 if again else 1)
        for one in group.fsdp_params:
            elements = one.padded_sharded_param_size.numel() * shards
            inside = one.mp_policy.param_dtype or one.sharded_param.dtype
            gathered += gathers * elements * inside.itemsize * (shards > 1)
            if one.sharded_param.requires_grad:
                size = elements * (one.mp_policy.reduce_dtype or inside).itemsize
                reduced += size * reductions * (shards > 1) + size // shards * (copies > 1)
                held += _held(one, per_micro_batch=per_micro_batch, copies=copies) * (micro_batches > 1)
    return Traffic(reductions=reductions, reduced_bytes=reduced, gathered_bytes=gathered, held_bytes=held)


def _held(one: Any, *, per_micro_batch: bool, copies: int) -> int:
    """Bytes of a gradient between micro-batches: of the whole, or of what was reduced to this rank."""
    inside = one.mp_policy.reduce_dtype or one.mp_policy.param_dtype or one.sharded_param.dtype
    if not per_micro_batch:
        return int(one._orig_size.numel() * inside.itemsize)
    if copies > 1:  # still to be added up over them
        return int(one.padded_sharded_param_size.numel() * inside.itemsize)
    return int(on_this_rank(one.sharded_param).nbytes)


def _place(mesh_info: Any) -> tuple[int, int]:
    """This rank's place among the ranks over which a group takes its mean, and how many they are."""
    shards, shard = getattr(mesh_info, "shard_mesh_size", 1), getattr(mesh_info, "shard_mesh_rank", 0)
    copies, copy = (
        getattr(mesh_info, "replicate_mesh_size", 1),
        getattr(mesh_info, "replicate_mesh_rank", 0),
    )
    return copy * shards + shard, copies * shards


def _waits_inside(one: Any) -> bool:
    unsharded = getattr(one, "_unsharded_param", None)
    return one.unsharded_accumulated_grad is not None or (
        unsharded is not None and unsharded.grad is not None
    )
