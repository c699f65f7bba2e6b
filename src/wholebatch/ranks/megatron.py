"""Megatron-Core's ``DistributedDataParallel``, with a torch optimizer over the model's own parameters.

Facts of megatron-core 0.16 that this file rests on (read there and tested against it):

* A hook of each parameter adds its gradient to ``main_grad``, a view of a flat buffer that may have a wider
  dtype, and leaves no ``.grad``. ``zero_grad_buffer`` clears; an optimizer's ``zero_grad`` reaches nothing.
* With ``overlap_grad_reduce`` a bucket is reduced as soon as the backward of the last micro-batch, the one
  outside ``no_sync``, has reached all its parameters. In the first update, and without it,
  ``finalize_model_grads`` reduces all, and adds up over tensor-parallel ranks what those share.
* Gradients are multiplied by ``gradient_scaling_factor`` before the sum, or averaged by the collective:
  both divide by the data and context parallel ranks; ``calculate_per_token_loss`` divides by nothing.
* With ``use_distributed_optimizer`` each rank is given its shard alone, unless ``force_all_reduce`` is on.
* Losses beside the main one (experts' balance, multi-token prediction) are scaled by its own schedule,
  which the window does not run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from wholebatch.accumulation import WideGradients
from wholebatch.errors import PoisonedWindowError, UnsupportedError
from wholebatch.ranks.base import Reduce, Roles, Traffic
from wholebatch.ranks.norms import careful_norm_of_parts, norm_of_parts
from wholebatch.ranks.several import PATIENCE_S, SeveralRanks, refuse_outside

_NARROW = (
    "Megatron's DistributedDataParallel adds gradients up in the dtype of the parameters; build it with "
    "DistributedDataParallelConfig(grad_reduce_in_fp32=True)"
)
# Switches of DistributedDataParallelConfig that must be off, and why.
_REFUSED_IN_DDP = {
    "overlap_param_gather": "gathers shards in the forward for Megatron's distributed optimizer",
    "reuse_grad_buf_for_mxfp8_param_ag": "keeps parameters where gradients are added up",
    "fp8_param_gather": "keeps parameters in fp8 for Megatron's distributed optimizer",
    "delay_wgrad_compute": "computes gradients of weights after the backward",
    "check_for_nan_in_grad": "ends the one rank that finds a NaN while the others reduce; the window "
    "looks for it on all ranks, and skips the update",
    "check_for_large_grads": "may end one rank while the others reduce",
}
# Parts of a model whose own losses Megatron's schedule scales.
_REFUSED_IN_MODEL = {
    "num_moe_experts": "the balance of experts",
    "mtp_num_layers": "multi-token prediction",
}


class MegatronRanks(SeveralRanks):
    """The ranks of one model under Megatron's data parallelism, cut over tensor or context parallel ranks.

    Args:
        model: the ``megatron.core.distributed.DistributedDataParallel``.
        reduce: ``"per_update"``: in the last backward where ``overlap_grad_reduce`` is on, else after it.
            ``"after_agreement"``: after all ranks have agreed.
        group: all ranks of the job.

    Raises:
        UnsupportedError: a mode that can't be run exactly.
    """

    def __init__(self, model: Any, *, reduce: Reduce, group: dist.ProcessGroup) -> None:
        if reduce == "per_micro_batch":
            raise UnsupportedError(
                'reduce="per_micro_batch" is for engines that shard gradients; Megatron\'s '
                'DistributedDataParallel reduces "per_update" or "after_agreement"'
            )
        self._model = model
        self._refuse_modes()
        self._agrees_first = reduce == "after_agreement"
        self._overlaps = model.ddp_config.overlap_grad_reduce and not self._agrees_first
        # A torch optimizer steps on whole gradients.
        self._whole = bool(model.ddp_config.use_distributed_optimizer)
        self._found_force = False
        self._stepped: list[nn.Parameter] = []
        self._wide: WideGradients | None = None
        self._mark: list[int] = []
        self.divisor = self._divides_by()
        self.patience_s = PATIENCE_S if model.tp_group.size() > 1 or self._context_ranks() > 1 else None
        super().__init__(group)
        self.roles = self._roles()

    def check_optimizers(self, optimizers: Sequence[Any]) -> None:
        for one in optimizers:
            if any(base.__module__.startswith("megatron.") for base in type(one).__mro__):
                raise UnsupportedError(
                    f"{type(one).__name__} is an optimizer of Megatron's own, which scales, clips and "
                    f"steps on copies that the window does not know, and is made for one vendor's devices; "
                    f"give a torch optimizer over model.parameters()"
                )

    def check_parameters(self, parameters: Sequence[nn.Parameter]) -> None:
        self._stepped = [parameter for parameter in parameters if parameter.requires_grad]
        refuse_outside(
            parameters,
            self._model.params_with_grad,
            "have no place in the buffers of Megatron's DistributedDataParallel",
            ", so nobody reduces their gradients; make them part of the module that it wraps, trainable "
            "before it does",
        )

    def begin(self) -> None:
        self._found_force = bool(self._model.force_all_reduce)
        self._refuse_modes()
        self.reductions = 0
        self._model.force_all_reduce = self._whole
        self._forget_reached()
        self._model.zero_grad_buffer()
        self._note()

    def open_window(self, *, uneven: bool, ranks_without: int, reset: bool) -> None:
        # A rank without a micro-batch has no backward in which it could reduce.
        self.reduces_at_the_end = not self._overlaps or ranks_without > 0

    def widens(self, wide: WideGradients, parameters: Sequence[nn.Parameter], micro_batches: int) -> bool:
        kept = [_sums_of(parameter).dtype for parameter in parameters if parameter.requires_grad]
        wide.refuse_narrow(kept, micro_batches=micro_batches, why=_NARROW)
        return False

    def widen(self, wide: WideGradients, parameters: Sequence[nn.Parameter], micro_batches: int) -> None:
        self._wide = wide
        self.widens(wide, parameters, micro_batches)

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        self.synchronises = last and not self.reduces_at_the_end
        try:
            with nullcontext() if self.synchronises else self._model.no_sync():
                yield
        finally:
            self.synchronises = False

    def gradients_written(self) -> bool:
        return self._versions() != self._mark

    def backward(self, roots: Sequence[tuple[Tensor, Tensor]]) -> None:
        super().backward(roots)
        if self.synchronises:
            self._refuse_not_reached()
            self._finalize()
            self._show()
        self._note()

    def reduce(self, parameters: Sequence[nn.Parameter]) -> None:
        self._add_up()
        self._show()

    @property
    def stands_in(self) -> bool:
        # Buckets that are reduced as they fill up go in the order of a backward, which a failed rank lacks.
        whole = self.roles.num_ranks == self.roles.num_replicas
        return whole and self.reduces_at_the_end and not self._agrees_first

    def stand_in(self) -> None:
        self._add_up()  # whatever is there: nobody steps on it

    def end(self, *, committed: bool) -> None:
        self._model.force_all_reduce = self._found_force
        if not committed:
            self._model.zero_grad_buffer()

    def gradient_norm(self, gradients: Sequence[Tensor]) -> Tensor:
        if self._model.tp_group.size() == 1 or not gradients:
            return super().gradient_norm(gradients)
        parts, device = self._by_copies(gradients), gradients[0].device
        return norm_of_parts(parts, group=self._model.tp_group, device=device)

    def careful_norm(self, gradients: Sequence[Tensor]) -> float:
        if self._model.tp_group.size() == 1:
            return super().careful_norm(gradients)
        parts, device = self._by_copies(gradients), gradients[0].device
        return careful_norm_of_parts(parts, group=self._model.tp_group, device=device)

    def traffic(
        self,
        wide: WideGradients,
        parameters: Sequence[nn.Parameter],
        micro_batches: int,
    ) -> Traffic:
        held = sum(buffer.grad_data.nbytes for buffer in self._model.buffers)
        reduced = held if self._model.dp_cp_group.size() > 1 else 0
        return Traffic(reductions=1, reduced_bytes=reduced, held_bytes=held)

    # The reduction ---------------------------------------------------------------------------------

    def _add_up(self) -> None:
        """Have Megatron begin and finish the sums over all ranks."""
        if self._model.ddp_config.overlap_grad_reduce:
            for group in self._model.bucket_groups:
                group.start_grad_sync(force_all_reduce=self._whole)
        self._finalize()

    def _finalize(self) -> None:
        from megatron.core.distributed import finalize_model_grads  # type: ignore[import-not-found]

        finalize_model_grads([self._model], None, force_all_reduce=self._whole)
        self.reductions += 1

    def _show(self) -> None:
        """Put the sums where an optimizer looks."""
        if self._wide is not None:
            self._wide.begin(p for p in self._stepped if _sums_of(p).dtype != p.dtype)
        for parameter in self._stepped:
            sums, takes = _sums_of(parameter), parameter.grad_dtype
            parameter.grad = sums if takes is None else sums.to(takes)

    def _refuse_not_reached(self) -> None:
        """A bucket waits for all its parameters; one that the last backward left out is not reduced."""
        for group in self._model.bucket_groups:
            reached = group.per_param_grad_ready_counts
            missing = {id(parameter) for parameter in group.params if parameter not in reached}
            if missing:
                names = [name for name, p in self._model.module.named_parameters() if id(p) in missing]
                raise PoisonedWindowError(
                    f"rank {self.rank}: the gradient reduction did not finish, because the last "
                    f"micro-batch did not use {', '.join(names)}. Build the window with "
                    f'reduce="after_agreement", or DistributedDataParallelConfig with '
                    f"overlap_grad_reduce=False; restart from the last committed update"
                )

    def _forget_reached(self) -> None:
        """Megatron learns from its first update how often each parameter is reached; not from a part."""
        for group in self._model.bucket_groups:
            if len(group.per_param_grad_ready_counts) < len(group.params):
                group.per_param_grad_ready_counts = {}

    def _versions(self) -> list[int]:
        return [buffer.grad_data._version for buffer in self._model.buffers]

    def _note(self) -> None:
        self._mark = self._versions()

    # Who is who ------------------------------------------------------------------------------------

    def _context_ranks(self) -> int:
        ranks: int = self._model.dp_cp_group.size() // self._model.dp_group.size()
        return ranks

    def _roles(self) -> Roles:
        """From the groups that the model was built over."""
        from megatron.core import parallel_state  # type: ignore[import-not-found]

        model, context = self._model, self._context_ranks()
        tensor_place = model.tp_group.rank()
        context_place = parallel_state.get_context_parallel_rank() if context > 1 else 0
        replica_of = tuple(self._messages.gather(model.dp_group.rank()))
        ranks_of_each = model.tp_group.size() * context
        if any(replica_of.count(one) != ranks_of_each for one in range(model.dp_group.size())):
            raise UnsupportedError(
                f"Megatron has {model.dp_group.size()} replicas of {ranks_of_each} ranks each (tensor x "
                f"context parallel = {model.tp_group.size()} x {context}), and the {len(replica_of)} ranks "
                f"of the window's group belong to the replicas {list(replica_of)}; give the window the "
                f"process group of the ranks that train this model"
            )
        return Roles(
            rank=dist.get_rank(self._messages.group),
            replica_of=replica_of,
            counts_samples=tensor_place == context_place == 0,
            counts_items=tensor_place == 0,
            counts_losses=tensor_place == 0,
            parts_of_sequences=context > 1,
        )

    def _by_copies(self, gradients: Sequence[Tensor]) -> dict[float, list[Tensor]]:
        """Gradients by what their squares count for: less where all tensor-parallel ranks hold the same."""
        cut = {id(p.grad) for p in self._stepped if getattr(p, "tensor_model_parallel", False)}
        copies = 1.0 / self._model.tp_group.size()
        parts: dict[float, list[Tensor]] = {}
        for gradient in gradients:
            parts.setdefault(1.0 if id(gradient) in cut else copies, []).append(gradient)
        return parts

    def _divides_by(self) -> float:
        """What the reduction divides by, the same for all parameters but those of experts."""
        model = self._model
        if not model.buffers:
            raise UnsupportedError(
                "no parameter was trainable when Megatron's DistributedDataParallel wrapped the model, so "
                "there is no gradient to reduce; wrap one that has some"
            )
        averaged = model.dp_cp_group.size() if model.ddp_config.average_in_collective else 1
        factor: float = model.buffers[0].gradient_scaling_factor
        return float(round(averaged / factor))

    # What can't be run exactly ---------------------------------------------------------------------

    def _refuse_modes(self) -> None:
        model = self._model
        for name, why in _REFUSED_IN_DDP.items():
            if getattr(model.ddp_config, name, False):
                raise UnsupportedError(f"DistributedDataParallelConfig({name}=True) {why}; leave it off")
        instances = model.ddp_config.num_distributed_optimizer_instances
        if instances > 1:
            raise UnsupportedError(
                f"DistributedDataParallelConfig(num_distributed_optimizer_instances={instances}) reduces "
                f"shards for Megatron's distributed optimizer; leave it at 1"
            )
        for name, what in _REFUSED_IN_MODEL.items():
            if getattr(model.config, name, None):
                raise UnsupportedError(
                    f"the model's configuration has {name}={getattr(model.config, name)}: the loss of "
                    f"{what} is scaled by Megatron's own schedule, which the window does not run"
                )
        if model.expert_parallel_bucket_groups:
            raise UnsupportedError("the model has expert-parallel parameters, reduced over other ranks")
        stages = model.pp_group.size()
        if stages > 1:
            raise UnsupportedError(
                f"the model is cut into {stages} pipeline stages, which Megatron's own schedule runs; use "
                f"pipeline_model_parallel_size=1, or a PipelinedModel of wholebatch.ranks.pipeline"
            )


def _sums_of(parameter: Any) -> Tensor:
    """Where Megatron adds a parameter's gradients up: a part of its flat buffer."""
    sums: Tensor = parameter.main_grad
    return sums
