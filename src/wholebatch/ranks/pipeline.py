"""``torch.distributed.pipelining``: the window's micro-batches are those of its schedules.

Facts of torch's schedules that this file rests on (read in torch 2.13 and tested against it):

* A schedule runs forwards and backwards by itself, so the loss is computed inside, on the last stage. It is
  the objective's summed loss times each term's share: one denominator, which all ranks know before.
* ``scale_grads=True`` is its default and divides what is in ``.grad`` by the micro-batches of a call, also
  what an earlier call left there. The schedules are made here, with ``scale_grads=False``, so that a window
  may be several calls.
* Shapes are agreed between the stages when a schedule is made, and are the same for all micro-batches of a
  call. A schedule of another number or other shapes is a new one.
* Shapes are tried out with the loss too, on tensors without meaning: a loss is known by its micro-batch.
* An exception inside a stage leaves the neighbours waiting in a receive: no update can be run again after
  it. After one in the loss the schedule is run to its end, with a loss of zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from wholebatch.errors import UnsupportedError, WindowUsageError
from wholebatch.ranks.pipeline_stage import learn_shapes_without_trace, tensors_of
from wholebatch.ranks.several import weakly

Given = tuple[Tensor, ...]
# What is differentiated of a micro-batch: loss(output, batch, number); None where it failed.
Loss = Callable[[Any, Any, int], Tensor | None]


@dataclass(frozen=True, slots=True)
class Call:
    """The micro-batches of one run of a schedule, and what the first stage is called with for each.

    Attributes:
        begins: number of the first one in its window.
    """

    begins: int
    batches: list[Any]
    given: list[Given]


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
        WindowUsageError: arguments that are none of these.
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
        self.stages = _stages(stages)
        for kind in (schedule, tail_schedule or schedule):
            _refuse_odd_schedule(kind, len(self.stages))
        _refuse_odd_arguments(inputs, micro_batches_per_call, data_parallel, pad)
        for stage in self.stages:
            learn_shapes_without_trace(stage, weakly(self._forget_schedule))
        self.parts = nn.ModuleList([stage.submod for stage in self.stages])
        self.schedule = schedule
        self.inputs = inputs
        self.micro_batches_per_call = micro_batches_per_call
        self.data_parallel = data_parallel
        self.pad = pad
        self.tail_schedule = tail_schedule
        self._made: tuple[Any, Any] = None, None  # what a schedule was made for, and the schedule
        self._possible: dict[int, type] = {}  # numbers of micro-batches, and the schedule that takes each

    # A stage has the names of the whole model's parameters, and so have all of a rank's: ``parts.0.`` is no
    # part of one. This is what a checkpoint of all stages goes by.

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Those of its stages, by the names that they have there."""
        seen: set[int] = set()  # a weight that two of them share is one
        for part in self.parts:
            for name, parameter in part.named_parameters(*args, **kwargs):
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield name, parameter

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

    def calls(self, batches: Sequence[Any]) -> list[Call]:
        """The micro-batches of each run of the schedule, brought to one shape where there is a ``pad``.

        Raises:
            WindowUsageError: micro-batches of different shapes, or without a sample.
            UnsupportedError: a number of them that the schedule does not take.
        """
        size = self.micro_batches_per_call or max(1, len(batches))
        pad, calls = self.pad or list, []
        for begins in range(0, len(batches), size):
            group = list(pad(batches[begins : begins + size]))
            calls.append(Call(begins, group, [self._given(batch) for batch in group]))
        for call in calls:
            self._check(call)
        return calls

    def _check(self, call: Call) -> None:
        kinds = [_kinds(given) for given in call.given]
        other = next((number for number, kind in enumerate(kinds) if kind != kinds[0]), None)
        if other is not None:
            raise WindowUsageError(
                f"micro-batches 1 and {other + 1} of one run of {self.schedule.__name__} are "
                f"{_told(call.given[0])} and {_told(call.given[other])}; its stages exchange tensors of "
                f"one shape. Give PipelinedModel a pad function, or micro_batches_per_call=1"
            )
        self._schedule_of(len(call.batches))

    def _schedule_of(self, micro_batches: int) -> type:
        """The schedule that takes so many."""
        if micro_batches not in self._possible:
            kind = self.schedule
            try:
                self._make(kind, micro_batches)
            except UnsupportedError:
                if self.tail_schedule is None:
                    raise
                kind = self.tail_schedule
                self._make(kind, micro_batches)
            self._possible[micro_batches] = kind
        return self._possible[micro_batches]

    def evaluate(self, batches: Sequence[Any], loss: Callable[[Any, Any, int], Tensor]) -> None:
        """Forwards alone of all ``batches``, under ``torch.no_grad``; all ranks of a pipeline call it.

        Args:
            batches: the same on every rank of the pipeline; brought to one shape where there is a ``pad``.
            loss: ``loss(output, batch, number)``: called on the rank that has the last stage; the last call
                for a number counts, as others may only try shapes out.

        Raises:
            WindowUsageError, UnsupportedError: as :meth:`calls`.
        """
        for call in self.calls(batches):
            self.run(call, loss, backward=False)

    def run(self, call: Call, loss: Loss, *, backward: bool = True) -> None:
        """One run of the schedule: forwards and backwards of all micro-batches, gradients added up.

        Args:
            call: micro-batches of one shape; the same on every rank of the pipeline.
            loss: what the last stage differentiates; nothing of a micro-batch where it is None.
            backward: False for forwards alone.

        Exactness: the sum of the gradients of each ``loss``; nobody divides.
        """

        def at(output: Any, index: Tensor) -> Tensor:
            number = int(index)
            found = loss(output, call.batches[number], call.begins + number)
            return _zero(output) if found is None else found

        key = len(call.batches), _kinds(call.given[0]), backward
        made, schedule = self._made
        if made != key:
            schedule = self._make(self._schedule_of(len(call.batches)), len(call.batches))
        schedule._loss_fn = at
        first = any(stage.is_first for stage in self.stages)
        begin = schedule.step if backward else schedule.eval
        begin(
            *([torch.cat(parts) for parts in zip(*call.given, strict=True)] if first else ()),
            target=torch.arange(len(call.batches)) if self.is_last else None,
            return_outputs=False,
        )
        schedule._loss_fn = _never  # which holds no batches
        self._made = key, schedule

    def _forget_schedule(self) -> None:
        """Stages hold what that schedule needs which learnt their shapes last, maybe one of the user's."""
        self._made = None, None

    def _given(self, batch: Any) -> Given:
        given = self.inputs(batch)
        parts = (given,) if isinstance(given, Tensor) else given
        if (
            not isinstance(parts, tuple | list)
            or not parts
            or not all(isinstance(part, Tensor) and part.ndim and len(part) for part in parts)
        ):
            raise WindowUsageError(
                f"inputs(batch) gave {_told(parts)}; the first stage is called with a tensor or a tuple of "
                f"tensors, one or more samples in dimension 0"
            )
        return tuple(parts)

    def _make(self, kind: type, micro_batches: int) -> Any:
        stages: Any = self.stages[0] if issubclass(kind, PipelineScheduleSingle) else self.stages
        try:
            made = kind(stages, micro_batches, loss_fn=_never, scale_grads=False)
        except (ValueError, RuntimeError, AssertionError) as error:
            raise UnsupportedError(
                f"{kind.__name__} can't run {micro_batches} micro-batches through "
                f"{self.stages[0].num_stages} stages on {self.stages[0].group_size} ranks: {error} Give "
                f"PipelinedModel a schedule that takes them, or for their number a tail_schedule, such as "
                f"ScheduleGPipe, or ScheduleLoopedBFS for several stages a rank"
            ) from error
        for stage in self.stages:
            place = stage.stage_index_to_group_rank[stage.stage_index]
            if place != stage.group_rank:
                raise UnsupportedError(
                    f"stage {stage.stage_index} is on rank {stage.group_rank} of its pipeline, and "
                    f"{kind.__name__} looks for it on rank {place}"
                )
        return made


def _stages(given: Any) -> list[PipelineStage]:
    stages = [given] if isinstance(given, PipelineStage) else given
    if (
        not isinstance(stages, list | tuple)
        or not stages
        or not all(isinstance(stage, PipelineStage) for stage in stages)
    ):
        raise WindowUsageError(
            f"stages={given!r} is no torch.distributed.pipelining.PipelineStage, nor a list of them"
        )
    return list(stages)


def _refuse_odd_schedule(schedule: Any, stages: int) -> None:
    known = (PipelineScheduleSingle, PipelineScheduleMulti)
    if not isinstance(schedule, type) or not issubclass(schedule, known):
        raise WindowUsageError(
            f"schedule={schedule!r} is no class of torch.distributed.pipelining, such as Schedule1F1B; "
            f"give the class itself, as it is made anew for each number of micro-batches"
        )
    if issubclass(schedule, PipelineScheduleSingle) and stages != 1:
        raise UnsupportedError(
            f"{schedule.__name__} runs one stage a rank, and this rank was given {stages}"
        )


def _refuse_odd_arguments(inputs: Any, per_call: Any, copies: Any, pad: Any) -> None:
    if not callable(inputs) or not (pad is None or callable(pad)):
        raise WindowUsageError(
            f"inputs={inputs!r} and pad={pad!r}: the first is a function of a micro-batch, the other a "
            f"function of a list of them, or None"
        )
    if per_call is not None and (
        isinstance(per_call, bool) or not isinstance(per_call, int) or per_call < 1
    ):
        raise WindowUsageError(f"micro_batches_per_call={per_call!r} is no number of them")
    if copies is not None and (not isinstance(copies, DeviceMesh) or copies.ndim != 1):
        raise WindowUsageError(
            f'data_parallel={copies!r} is no dimension of a mesh; give one, such as mesh["data"]'
        )


def _kinds(given: Given) -> tuple[tuple[torch.Size, torch.dtype], ...]:
    return tuple((part.shape, part.dtype) for part in given)


def _told(given: Any) -> str:
    """What a first stage would be called with, in words: "float32 [3, 6] and int64 [3]"."""
    parts = given if isinstance(given, tuple | list) else [given]
    return " and ".join(
        f"{str(part.dtype).removeprefix('torch.')} {list(part.shape)}"
        if isinstance(part, Tensor)
        else f"a {type(part).__name__}"
        for part in parts
    )


def _zero(output: Any) -> Tensor:
    """A loss from which every gradient is zero."""
    return torch.stack([part.sum() * 0.0 for part in tensors_of(output) if part.requires_grad]).sum()


def _never(*_: Any) -> Tensor:
    raise AssertionError("a schedule that is only tried out runs nothing")
