"""``torch.distributed.pipelining``: the window's micro-batches are those of its schedules.

Facts of torch's pipelining that this file rests on (read in torch 2.13 and tested against it):

* A schedule runs forwards and backwards by itself, so the loss is computed inside, on the last stage. It is
  the objective's summed loss times each term's share: one denominator, which all ranks know before.
* ``scale_grads=True`` is its default and divides what is in ``.grad`` by the micro-batches of a call, also
  what an earlier call left there. The schedules are made here, with ``scale_grads=False``, so that a window
  may be several calls.
* Shapes are agreed between the stages when a schedule is made, and are the same for all micro-batches of a
  call. A schedule of another number or other shapes is a new one.
* Under DistributedDataParallel the first call reduces twice and a second one fails in the reducer, so plain
  stages are reduced here, once an update. Stages under ``fully_shard`` reduce to their shards in every
  call.
* Shapes are tried out with the loss too, on tensors without meaning: a loss is known by its micro-batch.
* An exception inside a call leaves the neighbours waiting in a receive: no update can be run again after
  it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.nn.parallel import DistributedDataParallel

from wholebatch.errors import UnsupportedError, WindowUsageError
from wholebatch.ranks.base import Reduce, Roles, Traffic
from wholebatch.ranks.collectives import held_by_some, sum_over_ranks
from wholebatch.ranks.several import SpreadRanks


class PipelinedModel(nn.Module):
    """The stages of a model that this rank holds, and how micro-batches run through all of them.

    Args:
        stages: one ``PipelineStage`` of torch, or several where the schedule takes several a rank.
        schedule: a class of ``torch.distributed.pipelining``, such as ``Schedule1F1B``.
        inputs: ``inputs(batch)``: what the first stage is called with, a tensor or a tuple of tensors,
            samples in dimension 0.
        micro_batches_per_call: of one run of the schedule; None: all of a window in one.
        data_parallel: the ranks that hold copies of the same stages, one dimension of a mesh; None where
            there is one copy. For plain stages, and for stages under ``fully_shard`` over it.
        pad: ``pad(batches)``: micro-batches of one call brought to one shape; None: they have one already.
        tail_schedule: schedule of the calls with a number of micro-batches that ``schedule`` does not take,
            such as a tail; ``ScheduleGPipe`` and ``ScheduleLoopedBFS`` take any. None: they are refused.

    Raises:
        UnsupportedError: as many stages as the schedule does not take.
    """

    def __init__(
        self,
        stages: PipelineStage | Sequence[PipelineStage],
        *,
        schedule: type,
        inputs: Callable[[Any], Tensor | tuple[Tensor, ...]],
        micro_batches_per_call: int | None = None,
        data_parallel: DeviceMesh | None = None,
        pad: Callable[[Sequence[Any]], Sequence[Any]] | None = None,
        tail_schedule: type | None = None,
    ) -> None:
        super().__init__()
        self.stages = [stages] if isinstance(stages, PipelineStage) else list(stages)
        if issubclass(schedule, PipelineScheduleSingle) and len(self.stages) != 1:
            raise UnsupportedError(
                f"{schedule.__name__} runs one stage a rank, and this rank was given {len(self.stages)}"
            )
        if micro_batches_per_call is not None and micro_batches_per_call < 1:
            raise WindowUsageError(f"micro_batches_per_call={micro_batches_per_call} is no number of them")
        self.parts = nn.ModuleList([stage.submod for stage in self.stages])
        self.schedule = schedule
        self.inputs = inputs
        self.micro_batches_per_call = micro_batches_per_call
        self.data_parallel = data_parallel
        self.pad = pad
        self.tail_schedule = tail_schedule
        self._made: tuple[Any, Any] | None = None
        self._possible: dict[int, type] = {}  # numbers of micro-batches, and the schedule that takes each

    # A stage has the names of the whole model's parameters, and so have all of a rank's: ``parts.0.`` is no
    # part of one. This is what a checkpoint of all stages goes by.

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Those of its stages, by the names that they have there."""
        for part in self.parts:
            yield from part.named_parameters(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """That of its stages, by the names that they have there.

        Raises:
            UnsupportedError: stages of this rank that give one name twice.
        """
        found: dict[str, Any] = {}
        for number, name, value in self._entries(*args, **kwargs):
            if name in found:
                raise UnsupportedError(
                    f"{name!r} is a name in stage {number} and in another one of this rank, so that nobody "
                    f"could tell them apart in a checkpoint; give the modules of each stage the names that "
                    f"they have in the whole model"
                )
            found[name] = value
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Give each stage its part of a :meth:`state_dict`."""
        for part in self.parts:
            own = {name: state_dict[name] for name in part.state_dict() if name in state_dict}
            part.load_state_dict(own, *args, **kwargs)

    def stage_of(self) -> dict[str, int]:
        """The number of the stage that has each entry of :meth:`state_dict`."""
        return {name: number for number, name, _ in self._entries()}

    def _entries(self, *args: Any, **kwargs: Any) -> Iterator[tuple[int, str, Any]]:
        for stage, part in zip(self.stages, self.parts, strict=True):
            for name, value in part.state_dict(*args, **kwargs).items():
                yield stage.stage_index, name, value

    @property
    def is_last(self) -> bool:
        """Whether this rank holds the last stage, where losses are."""
        return any(stage.is_last for stage in self.stages)

    def calls(self, batches: Sequence[Any]) -> list[list[Any]]:
        """The micro-batches of each run of the schedule, brought to one shape where there is a ``pad``."""
        size = self.micro_batches_per_call or max(1, len(batches))
        groups = [list(batches[start : start + size]) for start in range(0, len(batches), size)]
        return [list(self.pad(group)) if self.pad is not None else group for group in groups]

    def check(self, batches: Sequence[Any]) -> None:
        """Refuse, before anything runs, what one run of the schedule can't.

        Raises:
            WindowUsageError: micro-batches of different shapes.
            UnsupportedError: a number of them that the schedule does not take.
        """
        shapes = [_shapes(self._given(batch)) for batch in batches]
        other = next((number for number, shape in enumerate(shapes) if shape != shapes[0]), None)
        if other is not None:
            raise WindowUsageError(
                f"micro-batches 1 and {other + 1} of one run of {self.schedule.__name__} have the "
                f"shapes {list(shapes[0])} and {list(shapes[other])}; its stages exchange tensors of "
                f"one shape. Give PipelinedModel a pad function, or micro_batches_per_call=1"
            )
        self._schedule_of(len(batches))

    def _schedule_of(self, micro_batches: int) -> type:
        """The schedule that takes so many."""
        if micro_batches not in self._possible:
            kind = self.schedule
            try:
                self._make(kind, micro_batches, _never)
            except UnsupportedError:
                if self.tail_schedule is None:
                    raise
                kind = self.tail_schedule
                self._make(kind, micro_batches, _never)
            self._possible[micro_batches] = kind
        return self._possible[micro_batches]

    def evaluate(self, batches: Sequence[Any], loss: Callable[[Tensor, Any, int], Tensor]) -> None:
        """Forwards alone of all ``batches``, under ``torch.no_grad``; all ranks of a pipeline call it.

        Args:
            batches: the same on every rank of the pipeline; brought to one shape where there is a ``pad``.
            loss: ``loss(output, batch, number)``: called on the rank that has the last stage; the last call
                for a number counts, as others may only try shapes out.

        Raises:
            WindowUsageError, UnsupportedError: as ``check``.
        """
        begins = 0
        for call in self.calls(batches):
            self.check(call)
            self.run(call, loss, begins, backward=False)
            begins += len(call)

    def run(
        self,
        batches: Sequence[Any],
        loss: Callable[[Tensor, Any, int], Tensor],
        begins: int,
        *,
        backward: bool = True,
    ) -> None:
        """One run of the schedule: forwards and backwards of all ``batches``, gradients added up.

        Args:
            batches: of one shape; the same on every rank of the pipeline.
            loss: ``loss(output, batch, number)``: what the last stage differentiates.
            begins: number of the first micro-batch in its window.
            backward: False for forwards alone.

        Exactness: the sum of the gradients of each ``loss``; nobody divides.
        """

        def at(output: Tensor, index: Tensor) -> Tensor:
            number = 0 if index.is_meta else int(index)  # to learn shapes, torch may come without data
            return output.sum() if output.is_meta else loss(output, batches[number], begins + number)

        given = [self._given(batch) for batch in batches]
        key = len(batches), _shapes(given[0]), tuple(part.dtype for part in given[0]), backward
        if self._made is None or self._made[0] != key:
            self._made = key, self._make(self._schedule_of(len(batches)), len(batches), at)
        schedule = self._made[1]
        schedule._loss_fn = at
        inputs = [torch.cat(parts) for parts in zip(*given, strict=True)]
        first = any(stage.is_first for stage in self.stages)
        begin = schedule.step if backward else schedule.eval
        begin(
            *(inputs if first else ()),
            target=torch.arange(len(batches)) if self.is_last else None,
            return_outputs=False,
        )

    def _given(self, batch: Any) -> tuple[Tensor, ...]:
        given = self.inputs(batch)
        return (given,) if isinstance(given, Tensor) else tuple(given)

    def _make(self, kind: type, micro_batches: int, loss: Callable[..., Tensor]) -> Any:
        stages: Any = self.stages[0] if issubclass(kind, PipelineScheduleSingle) else self.stages
        try:
            return kind(stages, micro_batches, loss_fn=loss, scale_grads=False)
        except (ValueError, RuntimeError, AssertionError) as error:
            raise UnsupportedError(
                f"{kind.__name__} can't run {micro_batches} micro-batches through "
                f"{self.stages[0].num_stages} stages on {self.stages[0].group_size} ranks: {error}"
            ) from error


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
        self._calls: list[list[Any]] = []
        self._sharded = _are_sharded(model.parts)
        self.divisor = float(self.num_replicas) if self._sharded else 1.0
        self.reduces_at_the_end = not self._sharded and self.num_replicas > 1

    def check_parameters(self, parameters: Sequence[nn.Parameter]) -> None:
        own = {id(parameter) for parameter in self._model.parameters()}
        outside = [parameter for parameter in parameters if id(parameter) not in own]
        if outside:
            raise UnsupportedError(
                f"{len(outside)} of the optimizer's {len(parameters)} parameters are in no stage of this "
                f"rank (the first has shape {list(outside[0].shape)}); build the optimizer from the "
                f"parameters of the PipelinedModel"
            )

    def begin(self) -> None:
        self.reductions = 0

    def open_window(self, *, uneven: bool, ranks_without: int, reset: bool) -> None:  # noqa: ARG002
        if uneven and self._sharded:
            raise WindowUsageError(
                "the replicas of a pipeline under fully_shard hold different numbers of micro-batches, and "
                "its stages gather and reduce together in every run of the schedule; give each as many, or "
                "leave the stages plain, with PipelinedModel(data_parallel=...)"
            )

    def check_window(self, batches: Sequence[Any]) -> None:
        self._calls = self._model.calls(batches)
        for call in self._calls:
            self._model.check(call)

    def run_window(self, loss: Callable[[Tensor, Any, int], Tensor]) -> None:
        begins = 0
        for call in self._calls:
            self._model.run(call, loss, begins)
            begins += len(call)
            self.reductions += self._sharded

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:  # noqa: ARG002
        return nullcontext()

    def reduce(self, parameters: Sequence[nn.Parameter]) -> None:
        assert self._copies is not None
        group = self._copies.get_group()
        present = torch.tensor([float(p.grad is not None) for p in parameters], device=self._device)
        dist.all_reduce(present, group=group)
        sum_over_ranks(held_by_some(parameters, present.tolist()), group)
        self.reductions += 1

    def traffic(self, micro_batches: int) -> Traffic:
        """Reductions only; what the stages send each other depends on the outputs' shapes."""
        own = sum(parameter.nbytes for parameter in self._model.parameters() if parameter.requires_grad)
        calls = -(-micro_batches // (self._model.micro_batches_per_call or micro_batches))
        times = calls if self._sharded else int(self.num_replicas > 1)
        return Traffic(reductions=times, reduced_bytes=times * own)

    def end(self, *, committed: bool) -> None:  # noqa: ARG002
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
        pipeline = tuple(dist.get_process_group_ranks(self._model.stages[0].group or self.group))
        told = self._totals.gather((pipeline, self._model.is_last))
        pipelines = sorted({members for members, _ in told})
        replica_of = tuple(pipelines.index(members) for members, _ in told)
        rank = dist.get_rank(self._totals.group)
        first = replica_of.index(replica_of[rank]) == rank
        return Roles(
            rank=rank,
            replica_of=replica_of,
            counts_samples=first,
            counts_items=first,
            counts_losses=self._model.is_last,
        )


def _are_sharded(parts: nn.ModuleList) -> bool:
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
    return found.pop()


def _shapes(given: Sequence[Tensor]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(part.shape) for part in given)


def _never(*_: Any) -> Tensor:
    raise AssertionError("a schedule that is only tried out runs nothing")
