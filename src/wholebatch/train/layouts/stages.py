"""The built-in GPT as a pipeline: which stages a rank holds, and how micro-batches run through them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
)

from wholebatch.errors import UsageError
from wholebatch.loading.padding import IGNORED_LABEL
from wholebatch.ranks.pipeline import PipelinedModel
from wholebatch.split import SAMPLE_LENGTHS
from wholebatch.train.material import Batch
from wholebatch.train.models.gpt import GPT
from wholebatch.train.models.inputs import token_ids
from wholebatch.train.models.stages import GPTStage, keep_stages
from wholebatch.train.precision import autocast
from wholebatch.train.settings import TrainConfig
from wholebatch.train.world import World

# The schedule, and what runs a tail that it does not take.
_SCHEDULES: dict[str, tuple[type, type]] = {
    "1f1b": (Schedule1F1B, ScheduleGPipe),
    "gpipe": (ScheduleGPipe, ScheduleGPipe),
    "interleaved_1f1b": (ScheduleInterleaved1F1B, ScheduleLoopedBFS),
    "zero_bubble": (ScheduleInterleavedZeroBubble, ScheduleLoopedBFS),
}
_NOT_PADDED = ("sample_ids", SAMPLE_LENGTHS)


def pipelined(
    gpt: GPT, config: TrainConfig, world: World, *, stage_ranks: int, padding_id: int
) -> PipelinedModel:
    """Cut a GPT, in place, to the stages that this rank holds.

    Args:
        gpt: the whole model, with the same values on every rank; keeps what is this rank's.
        config: all settings, checked.
        world: the ranks; neighbours make up a pipeline.
        stage_ranks: ranks of one pipeline.
        padding_id: token id of padding.

    Exactness: no number is changed, only where it lies.
    """
    settings = config.parallel
    mesh = init_device_mesh(
        world.device.type, (world.ranks // stage_ranks, stage_ranks), mesh_dim_names=("replicas", "stages")
    )
    stages = stage_ranks * settings.pipeline_virtual_stages
    parts = {
        number: GPTStage(gpt, number, stages, autocast=lambda: autocast(config.precision, world.device))
        for number in range(mesh.get_local_rank("stages"), stages, stage_ranks)
    }
    keep_stages(gpt, list(parts.values()))
    group = mesh["stages"].get_group()
    schedule, of_tails = _SCHEDULES[settings.pipeline_schedule]

    def inputs(batch: Batch) -> Tensor:
        ids = token_ids(batch)
        gpt.check_length(ids.shape[1])
        return ids.to(world.device, non_blocking=True)

    return PipelinedModel(
        [PipelineStage(part, number, stages, world.device, group=group) for number, part in parts.items()],
        schedule=schedule,
        tail_schedule=of_tails,
        inputs=inputs,
        data_parallel=mesh["replicas"] if world.ranks > stage_ranks else None,
        pad=lambda batches: to_one_shape(batches, padding_id),
    )


def to_one_shape(batches: Sequence[Batch], padding_id: int) -> list[Batch]:
    """Micro-batches with as many samples and tokens as the largest: stages exchange one shape.

    Args:
        batches: each with ``input_ids`` of shape (samples, tokens), and what else goes with them.
        padding_id: token id of padding.

    Raises:
        UsageError: something other than what is known to be padded by 0 would have to be.

    Exactness: padding has the label that nothing is learned of.
    """
    shapes = [token_ids(batch).shape for batch in batches]
    samples, tokens = (max(sizes) for sizes in zip(*shapes, strict=True))
    fill = {"input_ids": padding_id, "labels": IGNORED_LABEL, "attention_mask": 0}
    return [
        {name: _padded(name, value, batch, samples, tokens, fill) for name, value in batch.items()}
        for batch in batches
    ]


def _padded(name: str, value: Any, batch: Batch, samples: int, tokens: int, fill: dict[str, int]) -> Any:
    own = token_ids(batch).shape
    if not isinstance(value, Tensor) or name in _NOT_PADDED or own == (samples, tokens):
        return value
    if name not in fill:
        raise UsageError(
            f"a micro-batch of {own[0]} samples of {own[1]} tokens runs through a pipeline beside one of "
            f"{samples} of {tokens}, and nobody knows what {name!r} holds in padding (known are "
            f"{', '.join(fill)}); let collate leave it out, or make all micro-batches of one shape"
        )
    more = [tokens - own[1], samples - own[0]] if value.dim() > 1 else [samples - own[0]]
    edges = [edge for number in more for edge in (0, number)]
    return F.pad(value, edges, value=fill[name])
