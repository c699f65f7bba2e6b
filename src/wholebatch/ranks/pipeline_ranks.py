"""The ranks of a pipelined model: which stages each holds, and who reduces over copies of them.

Under DistributedDataParallel the first call of a schedule reduces twice and a second one fails in the
reducer, so plain stages are reduced here, once an update. Stages under ``fully_shard`` reduce to their
shards in every call.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from wholebatch.accumulation import HELD_BACK_FSDP2, SHARDED_FSDP2, WideGradients
from wholebatch.errors import UnsupportedError, WindowUsageError
from wholebatch.gradients import is_sharded
from wholebatch.ranks.agreement import name_ranks, unlike_first
from wholebatch.ranks.base import Reduce, Roles, Traffic
from wholebatch.ranks.collectives import held_by_some, host_group, sum_over_ranks
from wholebatch.ranks.fsdp import groups_of, held_back_in, mesh_size, refuse_own_reductions
from wholebatch.ranks.pipeline import Call, Loss, PipelinedModel
from wholebatch.ranks.several import PATIENCE_S, SpreadRanks, refuse_outside


class PipelineRanks(SpreadRanks):
    """The ranks of one pipelined model; each holds stages, and those of one pipeline are a replica.

    Args:
        model: this rank's stages.
        reduce: ``"per_update"``.
        group: all ranks of the job.

    Raises:
        UnsupportedError: ranks that do not make up whole pipelines; stages wrapped differently.
    """

    runs_windows = True
    patience_s = PATIENCE_S

    def __init__(self, model: PipelinedModel, *, reduce: Reduce, group: dist.ProcessGroup) -> None:
        if reduce != "per_update":
            raise UnsupportedError(
                f"reduce={reduce!r}: a pipeline's gradients are reduced when its schedule is over; leave "
                f"it out"
            )
        self._model = model
        super().__init__(group, torch.device(model.stages[0].device))
        self._copies = self._check_copies()
        self.roles = self._find_roles()
        self.holders = self.num_replicas  # the other ranks hold other stages
        self._calls: list[Call] = []
        self._sharded = _are_sharded(model.parts, self.num_replicas)
        self.divisor = float(self.num_replicas) if self._sharded else 1.0
        self.reduces_at_the_end = not self._sharded and self.num_replicas > 1

    def check_parameters(self, parameters: Sequence[nn.Parameter]) -> None:
        refuse_outside(
            parameters,
            self._model.parameters(),
            "are in no stage of this rank",
            "; build the optimizer from the parameters of the PipelinedModel",
        )

    def begin(self) -> None:
        self.reductions = 0

    def open_window(self, *, uneven: bool, ranks_without: int, reset: bool) -> None:
        if uneven and self._sharded:
            raise WindowUsageError(
                "the replicas of a pipeline under fully_shard hold different numbers of micro-batches, and "
                "its stages gather and reduce together in every run of the schedule; give each as many, or "
                "leave the stages plain, with PipelinedModel(data_parallel=...)"
            )

    def widen(self, wide: WideGradients, parameters: Sequence[nn.Parameter], micro_batches: int) -> None:
        if not self._sharded:
            super().widen(wide, parameters, micro_batches)

    def _refuse_narrow(
        self, wide: WideGradients, parameters: Sequence[nn.Parameter], micro_batches: int
    ) -> None:
        """A call adds up what is held back until its end; several calls add up in the shards."""
        several = micro_batches > (self._model.micro_batches_per_call or micro_batches)
        over_calls = [parameter.dtype for parameter in parameters if several]
        for dtypes, kept in (
            (held_back_in(groups_of(self._model)), HELD_BACK_FSDP2),
            (over_calls, SHARDED_FSDP2),
        ):
            wide.refuse_narrow(dtypes, micro_batches=micro_batches, why=kept)

    def check_window(
        self, batches: Sequence[Any], wide: WideGradients, parameters: Sequence[nn.Parameter]
    ) -> None:
        if not torch.is_grad_enabled():
            raise WindowUsageError(
                "the update of a pipeline was begun under no_grad or inference_mode, where its stages keep "
                "nothing for their backwards; leave that first"
            )
        self._calls = self._model.calls(batches)
        if self._sharded:  # all replicas have as many
            self._refuse_narrow(wide, parameters, len(batches))

    def run_window(self, loss: Loss) -> None:
        for call in self._calls:
            self._model.run(call, loss)
            self.reductions += self._sharded

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def reduce(self, parameters: Sequence[nn.Parameter]) -> None:
        assert self._copies is not None
        group = self._copies.get_group()
        sum_over_ranks(held_by_some(parameters, host_group(group)), group)
        self.reductions += 1

    def traffic(
        self, wide: WideGradients, parameters: Sequence[nn.Parameter], micro_batches: int
    ) -> Traffic:
        """Without what the stages send each other, which depends on the outputs' shapes."""
        own = wide.bytes_held(self._model.parameters(), micro_batches)
        calls = -(-micro_batches // (self._model.micro_batches_per_call or max(1, micro_batches)))
        times = calls if self._sharded else int(self.num_replicas > 1)
        held = super().traffic(wide, parameters, micro_batches)
        return replace(held, reductions=times, reduced_bytes=times * own)

    def end(self, *, committed: bool) -> None:
        self._calls = []  # they hold the batches

    def _check_copies(self) -> DeviceMesh | None:
        ranks, stages = dist.get_world_size(self.group), self._model.stages[0].group_size
        copies = self._model.data_parallel
        number = 1 if copies is None else copies.size()
        if stages * number != ranks:
            raise UnsupportedError(
                f"{ranks} ranks are running, and a pipeline of {stages} ranks with {number} "
                f"{'copy' if number == 1 else 'copies'} takes {stages * number}; give PipelinedModel the "
                f'dimension of the mesh over which stages are copied, as data_parallel=mesh["data"]'
            )
        return copies

    def _find_roles(self) -> Roles:
        told = self._messages.gather(_Place.of(self._model, self.group))
        rank = dist.get_rank(self._messages.group)
        pipelines = sorted({place.pipeline for place in told})
        replica_of = tuple(pipelines.index(place.pipeline) for place in told)
        _refuse_other_places(told)
        first = replica_of.index(replica_of[rank]) == rank
        return Roles(
            rank=rank,
            replica_of=replica_of,
            counts_samples=first,
            counts_items=first,
            counts_losses=self._model.is_last,
        )


@dataclass(frozen=True, slots=True)
class _Place:
    """What a rank tells the others of its place."""

    pipeline: tuple[int, ...]  # the ranks of its pipeline
    copies: tuple[int, ...]  # the ranks that should hold the same stages
    stages: tuple[int, ...]
    run: tuple[str, int, int | None]  # how the schedule is made

    @classmethod
    def of(cls, model: PipelinedModel, group: dist.ProcessGroup) -> _Place:
        copies = model.data_parallel
        return cls(
            pipeline=tuple(dist.get_process_group_ranks(model.stages[0].group or group)),
            copies=tuple(dist.get_process_group_ranks(copies.get_group())) if copies is not None else (),
            stages=tuple(stage.stage_index for stage in model.stages),
            run=(model.schedule.__name__, model.stages[0].num_stages, model.micro_batches_per_call),
        )


def _refuse_other_places(told: Sequence[_Place]) -> None:
    """Refuse, on every rank, stages that do not make up whole pipelines and equal copies."""
    if others := unlike_first([place.run for place in told]):
        raise UnsupportedError(
            f"schedule, number of stages and micro_batches_per_call of {name_ranks(others)} are "
            f"{told[others[0]].run}, and of rank 0 {told[0].run}; make PipelinedModel alike on all ranks"
        )
    for pipeline in {place.pipeline for place in told}:
        held = [place.stages for place in told if place.pipeline == pipeline]
        if sorted(index for one in held for index in one) != list(range(told[0].run[1])):
            raise UnsupportedError(
                f"{name_ranks(pipeline)} of one pipeline hold the stages {list(map(list, held))}; each of "
                f"its {told[0].run[1]} stages lies on one rank, once"
            )
    for copies in {place.copies for place in told if place.copies}:
        held = [place.stages for place in told if place.copies == copies]
        if len(set(held)) > 1:
            raise UnsupportedError(
                f"{name_ranks(copies)} are said to hold copies of the same stages, and hold "
                f"{list(map(list, held))}; data_parallel is the dimension of the mesh over which one stage "
                f"is copied"
            )


def _are_sharded(parts: nn.ModuleList, copies: int) -> bool:
    """Whether the stages of this rank are under ``fully_shard``."""
    for part in parts:
        if isinstance(part, DistributedDataParallel):
            raise UnsupportedError(
                "a stage is under DistributedDataParallel, whose reducer does not stand several runs of a "
                "schedule in one update; leave the stages plain and give PipelinedModel data_parallel=: "
                "they are then reduced once an update"
            )
    found = {isinstance(part, FSDPModule) for part in parts}
    if len(found) > 1:
        raise UnsupportedError("some stages of a rank are under fully_shard and some not; treat all alike")
    sharded = found.pop()
    groups = groups_of(parts) if sharded else []
    refuse_own_reductions(groups)
    known = {id(one.sharded_param) for group in groups for one in group.fsdp_params}
    for name, parameter in parts.named_parameters():
        if id(parameter) not in known and (sharded or is_sharded(parameter)):
            raise UnsupportedError(
                f"{name} of a stage is a {'DTensor' if is_sharded(parameter) else 'plain parameter'} that "
                f"fully_shard of the whole stage does not hold. The window knows stages that are plain, "
                f"and such as are under fully_shard as a whole, not those that are tensor parallel"
            )
    if groups and mesh_size(groups) != copies:
        raise UnsupportedError(
            f"stages are sharded over {mesh_size(groups)} ranks and there are {copies} copies of the "
            f"pipeline; give fully_shard and PipelinedModel(data_parallel=...) the same mesh"
        )
    if any(group.gradient_divide_factor is not None for group in groups):
        raise UnsupportedError(
            "a stage has a factor of its own (set_gradient_divide_factor); leave it out, the window divides"
        )
    return sharded
