"""torch's DistributedDataParallel: one reduction an update, in the last micro-batch or after it.

Facts of DDP that this file rests on (read in torch 2.13 and tested against it):

* The forward reads ``require_backward_grad_sync``; a backward whose forward ran without it leaves
  its gradients on the rank. So the switch is set around forward *and* backward.
* A synchronised forward sets ``require_forward_param_sync``, and the next forward then broadcasts the
  buffers of rank 0. A collective in a forward would leave ranks waiting whose forward failed, so the
  window keeps it off and shares the buffers itself, once, when all ranks have agreed to commit.
* A synchronised forward arms the reducer. If its backward never comes, the reducer stays armed and
  would reduce in the next backward, held back or not. So an update that was rolled back disarms it, and
  so does one that follows a stray forward; on all ranks, because disarming rebuilds the buckets.
* The reducer knows the parameters that required a gradient when DDP was built, and no others.
* The first forward after the first synchronised backward rebuilds the buckets, which is a collective
  too. The window has that done before, in an order that no start can change: see ``buckets.py``.
* A parameter that the synchronised backward did not reach leaves the reduction unfinished without
  an error until the next forward. The reducer says so when asked.
* ``static_graph=True`` learns the graph in its first backward, which must be synchronised.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from wholebatch.accumulation import WideGradients
from wholebatch.errors import PoisonedWindowError, UnsupportedError, WindowUsageError
from wholebatch.gradients import GradientWatch
from wholebatch.ranks.base import Reduce, Roles, Traffic
from wholebatch.ranks.buckets import (
    AVERAGING_HOOKS,
    is_sparse,
    rebuilds_buckets,
    reduce_zeros,
    settle_buckets,
    takes_zeros,
)
from wholebatch.ranks.collectives import copy_from_first, held_by_some, sum_over_ranks
from wholebatch.ranks.roles import roles_of_mesh
from wholebatch.ranks.several import SeveralRanks, refuse_outside, weakly

_OWN_DTYPE = "give the window accumulate_in=torch.bfloat16 to add up in the parameters' own dtype"


class DDPRanks(SeveralRanks):
    """The ranks of one ``DistributedDataParallel`` model; each is a replica.

    Args:
        model: the DDP model.
        reduce: ``"per_update"``: DDP reduces in the last micro-batch's backward and divides by D.
            ``"after_agreement"``: every micro-batch is held back, all ranks agree, and one reduction
            of our own adds up without dividing.
        reduction_divisor: what a communication hook of your own divides by.
        context_parallel: the ranks that hold parts of the same sequences, among those of DDP.

    Raises:
        UnsupportedError: a hook, mode or parameter that can't be reduced exactly.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        *,
        reduce: Reduce,
        reduction_divisor: float | None,
        context_parallel: DeviceMesh | None = None,
    ) -> None:
        if reduce == "per_micro_batch":
            raise UnsupportedError(
                'reduce="per_micro_batch" is for engines that shard gradients; DDP holds them '
                'whole in any case, and reduces "per_update" or "after_agreement"'
            )
        self._model = model
        self._always_after = reduce == "after_agreement"
        self._declared_divisor = reduction_divisor
        self._num_reducing = dist.get_world_size(model.process_group)
        self.warming_up = bool(model.static_graph) and not self._always_after
        self._found = (True, True)
        self._forwarded = False  # a forward of the open micro-batch ran with the reduction on
        self._in_scope = False
        self._reduced = _trainable(model)
        self._refuse_modes()
        super().__init__(model.process_group)
        rank = dist.get_rank(model.process_group)
        if context_parallel is None:
            self.roles = Roles.one_each(rank, self._num_reducing)
        else:
            self.roles = roles_of_mesh(self._messages, rank, self._num_reducing, context_parallel)
        model.reducer._rebuild_buckets()  # pending where the model was trained before
        self._settles = not self._always_after and rebuilds_buckets(model)
        self._zeros_fit = self._settles and context_parallel is None and takes_zeros(model)
        self._unsettled = False
        if self._settles:
            self._settle()
        # Weakly: it would keep the model, which must not outlive its process group.
        hook = model.register_forward_pre_hook(weakly(self._note_forward))
        weakref.finalize(self, hook.remove)

    @property
    def stands_in(self) -> bool:
        fit = self._zeros_fit and not self.reduces_at_the_end
        return fit and all(hook in AVERAGING_HOOKS for hook, _ in self._model._comm_hooks)

    def check_parameters(self, parameters: Sequence[nn.Parameter]) -> None:
        refuse_outside(
            parameters,
            (parameter for _, parameter in self._reduced),
            "are not in the DDP model",
            ", so nobody reduces their gradients; make them part of the module that DDP wraps",
        )

    def begin(self) -> None:
        model = self._model
        self._found = (model.require_backward_grad_sync, model.require_forward_param_sync)
        self._refuse_other_parameters()
        self.reductions = 0
        self.reduces_at_the_end = self._always_after
        self._averaged_by = self._hook_divisor()

    def open_window(self, *, uneven: bool, ranks_without: int, reset: bool) -> None:
        if reset:
            self._disarm()
        # A rank without a micro-batch has no backward in which DDP could reduce: reduce at the end.
        self.reduces_at_the_end = self._always_after or ranks_without > 0
        self.divisor = 1.0 if self.reduces_at_the_end else self._averaged_by
        if self.warming_up and (uneven or ranks_without):
            raise UnsupportedError(
                "DDP(static_graph=True) needs its first backward reduced on every rank, but in this first "
                "window the ranks have different numbers of micro-batches; begin with a full window, or "
                "leave static_graph off"
            )

    def widens(self, wide: WideGradients, parameters: Sequence[nn.Parameter], micro_batches: int) -> bool:
        if not super().widens(wide, parameters, micro_batches):
            return False
        if self.warming_up:
            raise UnsupportedError(
                f"DDP(static_graph=True) needs its first backward reduced by its own reducer, which takes "
                f"no gradients of another dtype than the parameters'; leave static_graph off, or "
                f"{_OWN_DTYPE}"
            )
        if self._model._comm_hooks and not self._always_after:
            raise UnsupportedError(
                f"gradients of half-precision parameters are added up in float32 and reduced after "
                f"agreement, which goes past DDP's communication hook; leave the hook off, or {_OWN_DTYPE}"
            )
        for name, module in self._model.module.named_modules():
            if is_sparse(module):
                raise UnsupportedError(_sparse(f"{name}.weight", widened=True))
        return True

    def widen(self, wide: WideGradients, parameters: Sequence[nn.Parameter], micro_batches: int) -> None:
        if self.widens(wide, parameters, micro_batches):
            # The reducer refuses gradients of another dtype than the parameters': reduce after agreement.
            self.reduces_at_the_end, self.divisor = True, 1.0
            wide.begin(parameters)

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        self.synchronises = (last or self.warming_up) and not self.reduces_at_the_end
        self._switch(self.synchronises, False)
        self._forwarded, self._in_scope = False, True
        try:
            yield
        finally:
            self._in_scope = False
            self._switch(*self._found)
            self.synchronises = False

    def check_forward(self) -> None:
        if self.synchronises and not self._forwarded:
            raise WindowUsageError(
                "the forward of the last micro-batch did not run through the DDP model with its reduction "
                "on; call the model that the window was given (not model.module), with gradients enabled, "
                "and leave no_sync to the window"
            )

    def backward(self, roots: Sequence[tuple[Tensor, Tensor]]) -> None:
        if not self.synchronises:
            super().backward(roots)
            return
        if self._unsettled:  # since a reset, and all ranks get here
            self._settle()
            self._model.reducer.prepare_for_backward([])  # as the forward left it
        # where DDP needs every parameter, one tells whether any was reached
        watch = GradientWatch(parameter for _, parameter in self._reduced[: 1 if self._settles else None])
        watch.mark()
        super().backward(roots)
        self.reductions += 1
        self._check_reduced(watch)
        self.needs_reset = False  # nothing is armed now; a forward after this arms it again
        self._model.reducer._rebuild_buckets()
        self.warming_up = False

    def stand_in(self) -> None:
        if self._unsettled:
            self._settle()
        reduce_zeros(self._model)

    def check_before_reducing(self, parameters: Sequence[nn.Parameter]) -> None:
        for name, parameter in self._among(parameters):
            if parameter.grad is not None and parameter.grad.is_sparse:
                wide = parameter.grad.dtype != parameter.dtype
                raise UnsupportedError(_sparse(name, widened=wide))

    def reduce(self, parameters: Sequence[nn.Parameter]) -> None:
        gradients = self._present_on_any_rank(parameters)
        sum_over_ranks(gradients, self._model.process_group)
        self.reductions += 1

    def traffic(
        self, wide: WideGradients, parameters: Sequence[nn.Parameter], micro_batches: int
    ) -> Traffic:
        reduced = wide.bytes_held((parameter for _, parameter in self._reduced), micro_batches)
        held = super().traffic(wide, parameters, micro_batches)
        return replace(held, reductions=1, reduced_bytes=reduced)

    def share_buffers(self) -> None:
        if self._model.broadcast_buffers:
            # some may have been replaced
            self._model._assign_modules_buffers()  # type: ignore[no-untyped-call]
            copy_from_first(list(self._model.modules_buffers), self._model.process_group)

    def end(self, *, committed: bool) -> None:
        self._switch(*self._found)
        # A window that was held back as a whole leaves marks of what it used, as a rolled back one does.
        fell_back = self.reduces_at_the_end and not self._always_after
        if not committed or fell_back:
            self._disarm()

    def _switch(self, in_backward: bool, in_forward: bool) -> None:
        """Set what DDP reads; past ``Module.__setattr__``, which takes a hundred times as long."""
        vars(self._model).update(
            require_backward_grad_sync=in_backward, require_forward_param_sync=in_forward
        )

    def _disarm(self) -> None:
        self._model.reducer._reset_state()
        self.needs_reset, self._unsettled = False, self._settles

    def _settle(self) -> None:
        settle_buckets(self._model, [parameter for _, parameter in self._reduced])
        self._unsettled = False

    def _note_forward(self, *_: Any) -> None:
        """Runs before each forward of the DDP model, inside the window and outside."""
        if self._in_scope:
            self._model.require_forward_param_sync = False  # a second forward would broadcast buffers
        if torch.is_grad_enabled() and self._model.require_backward_grad_sync:
            self._forwarded = self.needs_reset = True

    # What can't be run exactly -------------------------------------------------------------------

    def _refuse_modes(self) -> None:
        model = self._model
        if model.mixed_precision is not None:
            raise UnsupportedError(
                "DDP(mixed_precision=...) swaps parameters inside the forward and can't be run exactly; "
                "use torch.autocast, or DDP without it"
            )
        if getattr(model, "_delay_all_reduce_params", None):
            raise UnsupportedError(
                "DDP(delay_all_reduce_named_params=...) reduces outside the backward; leave it off"
            )
        if self._always_after and model.static_graph:
            raise UnsupportedError(
                "DDP(static_graph=True) needs a synchronised first backward, which "
                'reduce="after_agreement" holds back; use reduce="per_update", or leave static_graph off'
            )
        built_over = len(model.reducer.get_backward_stats())  # one for each parameter
        if len(self._reduced) != built_over:
            raise UnsupportedError(
                f"DDP was built over {built_over} trainable parameters and the model now has "
                f"{len(self._reduced)}; freeze, unfreeze or add parameters first, and wrap it afterwards"
            )
        self._hook_divisor()

    def _refuse_other_parameters(self) -> None:
        if _same_parameters(self._model, self._reduced):
            return
        known, now = dict(self._reduced), dict(_trainable(self._model))
        changed = sorted(name for name in known.keys() ^ now.keys())
        changed += [name for name in known.keys() & now.keys() if known[name] is not now[name]]
        if changed:
            raise UnsupportedError(
                f"{len(changed)} parameters were frozen, unfrozen, added or replaced after DDP was built "
                f"({changed[0]}), and its reducer does not know; wrap the model in DDP again, and build a "
                f"window over that"
            )

    def _hook_divisor(self) -> float:
        """What DDP's reduction divides by; refuses a communication hook that nobody vouches for."""
        hooks = [hook for hook, _ in self._model._comm_hooks]
        declared = self._declared_divisor
        if declared is not None:
            if (
                isinstance(declared, bool)
                or not isinstance(declared, int | float)
                or not 0 < declared < 1e9
            ):
                raise UnsupportedError(
                    f"reduction_divisor={declared!r} is no number that a reduction divides by; give "
                    f"{self._num_reducing} for a mean over the ranks, 1 for a sum"
                )
            if not hooks and declared != self._num_reducing:
                raise UnsupportedError(
                    f"reduction_divisor={declared!r} without a communication hook: DDP itself divides by "
                    f"{self._num_reducing}; register the hook before you build the window, or leave it out"
                )
            return float(declared)
        unknown = [hook for hook in hooks if hook not in AVERAGING_HOOKS]
        if unknown and not self._always_after:
            name = getattr(unknown[0], "__qualname__", repr(unknown[0]))
            raise UnsupportedError(
                f"the DDP communication hook {name} is not one of those known to average "
                f"({', '.join(hook.__name__ for hook in AVERAGING_HOOKS)}); a hook that sums makes the "
                f"update {self._num_reducing} times too large. Say what it divides by: "
                f"reduction_divisor={self._num_reducing} for a mean, reduction_divisor=1 for a sum"
            )
        return float(self._num_reducing)

    # Evidence that the reduction happened --------------------------------------------------------

    def _check_reduced(self, watch: GradientWatch) -> None:
        try:
            self._model.reducer._check_reducer_finalized()
        except RuntimeError as error:
            unused = self._named(str(error))
            how = (
                ""
                if self._model.static_graph
                else (
                    " Wrap the model in DDP(find_unused_parameters=True), or build the window with "
                    'reduce="after_agreement";'
                )
            )
            raise PoisonedWindowError(
                f"rank {self.rank}: the gradient reduction did not finish, because the last micro-batch "
                f"did not use {unused}.{how} restart from the last committed update"
            ) from error
        if not watch.changed():
            raise PoisonedWindowError(
                f"rank {self.rank}: the backward of the last micro-batch reached no parameter of the DDP "
                f"model, so nothing was reduced; its loss does not depend on the model's output. Restart "
                f"from the last committed update"
            )

    def _named(self, message: str) -> str:
        """The parameters behind the indices in the reducer's own message."""
        found = re.search(r"did not receive grad for rank \d+: ([\d ]+)", message)
        names = [name for name, _ in self._reduced]
        indices = [int(index) for index in found.group(1).split()] if found else []
        return ", ".join(names[index] for index in indices if index < len(names)) or "some parameters"

    def _among(self, parameters: Sequence[nn.Parameter]) -> list[tuple[str, nn.Parameter]]:
        """Those of the reduced parameters that are among ``parameters``, in one order on every rank."""
        own = {id(parameter) for parameter in parameters}
        return [(name, parameter) for name, parameter in self._reduced if id(parameter) in own]

    # Our own reduction ---------------------------------------------------------------------------

    def _present_on_any_rank(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """Gradients that some rank has, in one order; zeros where only this rank has none."""
        return held_by_some([parameter for _, parameter in self._among(parameters)], self._messages.group)


def _sparse(name: str, *, widened: bool) -> str:
    """What is wrong with a sparse gradient that DDP itself can't reduce, and the way out."""
    way = _OWN_DTYPE if widened else 'reduce="per_update" with a micro-batch on every rank'
    return (
        f"{name} has a sparse gradient, which the reduction after agreement can't add up; use "
        f"sparse=False, or {way}"
    )


def _trainable(model: DistributedDataParallel) -> list[tuple[str, nn.Parameter]]:
    """The parameters that DDP reduces if it is built now, in its reducer's order."""
    return [
        (name, parameter)
        for name, parameter in model.module.named_parameters()
        if parameter.requires_grad and name not in model.parameters_to_ignore
    ]


def _same_parameters(model: DistributedDataParallel, known: Sequence[tuple[str, nn.Parameter]]) -> bool:
    """Whether the trainable parameters are those known, without building their names."""
    if model.parameters_to_ignore:
        return _trainable(model) == known
    now = (parameter for parameter in model.module.parameters() if parameter.requires_grad)
    return [id(parameter) for parameter in now] == [id(parameter) for _, parameter in known]
