"""Sequences that neighbouring ranks share: which part of a micro-batch each takes, with which labels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from wholebatch.losses import token_loss
from wholebatch.train.material import IGNORED_LABEL, Batch, JobData
from wholebatch.train.models.inputs import token_ids
from wholebatch.train.settings import ParallelConfig
from wholebatch.train.world import World


def sequence_mesh(settings: ParallelConfig, world: World) -> DeviceMesh | None:
    """The ranks that share this rank's sequences; None where each has whole ones. All ranks call it."""
    parts = settings.context_parallel
    if parts == 1:
        return None
    mesh = init_device_mesh(
        world.device.type, (world.ranks // parts, parts), mesh_dim_names=("replicas", "sequence")
    )
    return mesh["sequence"]


def in_parts(data: JobData, part: int, parts: int) -> JobData:
    """The samples as a rank sees them that has a part of each.

    Args:
        data: whole samples of the objective "next_token".
        part: number of this rank's part.
        parts: of each sequence.

    Exactness: the parts have the items of the whole, each once: labels are shifted before the cut, so that
    the last position of a part learns the first token of the next.
    """
    collate = PartOfSequences(collate=data.collate, part=part, parts=parts, padding_id=data.padding_id)
    return replace(data, collate=collate, objective=token_loss(ignore_index=IGNORED_LABEL))


@dataclass(frozen=True, kw_only=True, slots=True)
class PartOfSequences:
    """A collation that keeps a part of every sequence.

    Args:
        collate: makes micro-batches of whole samples.
        part, parts, padding_id: as for ``in_parts``.
    """

    collate: Callable[[Sequence[Any], Sequence[int], int], Batch]
    part: int
    parts: int
    padding_id: int

    def __call__(self, samples: Sequence[Any], ids: Sequence[int], epoch: int) -> Batch:
        """A micro-batch of these samples, cut; padded to parts of one length."""
        batch = self.collate(samples, ids, epoch)
        tokens = token_ids(batch).shape[1]
        fill = {"input_ids": self.padding_id, "labels": IGNORED_LABEL}
        here = {}
        for name, value in batch.items():
            over_tokens = isinstance(value, Tensor) and value.dim() == 2 and value.shape[1] == tokens
            here[name] = self._part_of(value, name, fill.get(name, 0)) if over_tokens else value
        return here

    def _part_of(self, value: Tensor, name: str, fill: int) -> Tensor:
        if name == "labels":
            value = F.pad(value[:, 1:], (0, 1), value=fill)
        length = -(-value.shape[1] // self.parts)
        whole = F.pad(value, (0, length * self.parts - value.shape[1]), value=fill)
        return whole[:, self.part * length : (self.part + 1) * length].contiguous()
