"""The ranks of a job and the replicas that they make.

    replicas = ranks / (tensor_parallel x pipeline_parallel x context_parallel)

Only the replicas multiply the global batch. Ranks that share the layers, stages or positions of one
replica see the same samples.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import lcm
from typing import Literal, get_args

from wholebatch.errors import PlanError
from wholebatch.whole_numbers import (
    nearest_multiples,
    one_of,
    or_list,
    set_whole_numbers,
    show_remainder,
)

PipelineSchedule = Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How the ranks of a job are divided; only the replicas multiply the global batch.

    ``replicas = ranks / (tensor_parallel x pipeline_parallel x context_parallel)``. Expert
    parallelism spreads experts over ranks that are counted already, so it never changes the
    replicas; it must divide the ranks of one pipeline stage. Shards (FSDP, ZeRO) are replicas: each
    of them has its own samples.

    Args:
        ranks: processes of the job.
        tensor_parallel, pipeline_parallel, context_parallel: ranks that share one replica's layers,
            stages and positions.
        expert_parallel: ranks over which the experts of a layer are spread.
        pipeline_schedule: "gpipe", "1f1b", "interleaved_1f1b" or "zero_bubble".
        pipeline_virtual_stages: model parts on each pipeline rank, v; at least 2 when interleaved.

    Raises:
        PlanError: a number is not a whole positive one, or the ranks do not make whole replicas.
    """

    ranks: int
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    context_parallel: int = 1
    expert_parallel: int = 1
    pipeline_schedule: PipelineSchedule = "1f1b"
    pipeline_virtual_stages: int = 1

    def __post_init__(self) -> None:
        set_whole_numbers(self, *(each.name for each in fields(self) if each.name != "pipeline_schedule"))
        one_of("pipeline_schedule", self.pipeline_schedule, get_args(PipelineSchedule))
        self._check_virtual_stages()
        if self.ranks % self.rank_multiple:
            near = nearest_multiples(self.ranks, self.rank_multiple)
            raise PlanError(f"{rank_misfit(self, self.ranks)}. Nearest that fit: ranks={or_list(near)}.")

    def _check_virtual_stages(self) -> None:
        interleaved = self.pipeline_schedule == "interleaved_1f1b"
        stages, parts = self.pipeline_parallel, self.pipeline_virtual_stages
        if interleaved and (stages < 2 or parts < 2):
            raise PlanError(
                f"interleaved_1f1b needs pipeline_parallel and pipeline_virtual_stages of at least 2, "
                f"not {stages} and {parts}; give both, or use 1f1b"
            )
        if parts > 1 and self.pipeline_schedule in ("gpipe", "1f1b"):
            raise PlanError(
                f"pipeline_virtual_stages={parts} means nothing to {self.pipeline_schedule}, which has one "
                f"stage on each rank; use interleaved_1f1b or leave it at 1"
            )

    @property
    def ranks_per_replica(self) -> int:
        """Ranks that together hold one replica: TP x PP x CP."""
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel

    @property
    def rank_multiple(self) -> int:
        """The ranks must be a multiple of this: whole replicas, and whole expert groups in each stage."""
        return lcm(self.ranks_per_replica, self.pipeline_parallel * self.expert_parallel)

    @property
    def replicas(self) -> int:
        """D, the data-parallel copies of the model: ranks / (TP x PP x CP)."""
        return self.ranks // self.ranks_per_replica

    @property
    def copies(self) -> int:
        """Ranks, or groups of them, that have each parameter and a gradient of it: D x CP."""
        return self.replicas * self.context_parallel

    @property
    def micro_batch_multiple(self) -> int:
        """The micro-batches of a window must be a multiple of this: PP when interleaved, else 1."""
        return self.pipeline_parallel if self.pipeline_schedule == "interleaved_1f1b" else 1

    def pipeline_bubble_fraction(self, micro_batches_per_window: int) -> float | None:
        """Idle time over ideal time of the pipeline, communication left out.

        ``(p - 1) / A`` for gpipe and 1f1b, ``(p - 1) / (v A)`` when interleaved. For zero_bubble 0,
        which holds where forward, input gradient and weight gradient take equal times and A is at
        least 2 p - 1; below that None, not known. The share of the whole time is f / (1 + f).

        Source: Narayanan et al. 2021 (arXiv 2104.04473), section 2.2; Qi et al. 2024
        (arXiv 2401.10241, 2405.15362) for zero_bubble.
        """
        stages, window = self.pipeline_parallel, micro_batches_per_window
        if stages == 1:
            return 0.0
        if self.pipeline_schedule == "zero_bubble":
            return 0.0 if window >= 2 * stages - 1 else None
        return (stages - 1) / (self.pipeline_virtual_stages * window)


def rank_misfit(layout: Layout, ranks: int) -> str:
    """Say how ``ranks`` fail to make whole replicas and expert groups of ``layout``'s degrees."""
    needed = (
        f"{layout.ranks_per_replica} (tensor_parallel {layout.tensor_parallel} x pipeline_parallel "
        f"{layout.pipeline_parallel} x context_parallel {layout.context_parallel})"
    )
    if ranks % layout.ranks_per_replica:
        return (
            f"{ranks} ranks do not make whole replicas of {needed}: they must be a multiple of "
            f"{layout.rank_multiple}, and {show_remainder(ranks, layout.ranks_per_replica)}"
        )
    stage, experts = ranks // layout.pipeline_parallel, layout.expert_parallel
    return (
        f"{ranks} ranks in replicas of {needed} leave {stage} ranks in each pipeline stage, which "
        f"expert_parallel {experts} does not divide: {show_remainder(stage, experts)}"
    )


def pipeline_misfit(layout: Layout, window: int) -> str | None:
    """Say why the pipeline's schedule can't run ``window`` micro-batches, or None if it can."""
    multiple = layout.micro_batch_multiple
    if window % multiple == 0:
        return None
    return (
        f"interleaved_1f1b over pipeline_parallel {multiple} needs micro-batches per window that are a "
        f"multiple of {multiple}, not {window}: {show_remainder(window, multiple)}"
    )
