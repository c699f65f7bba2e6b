"""What a case of the campaign is: what happens, where, in a job of which layout, and what is promised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

NUM_UPDATES = 6
# The settings by which ranks share a model, and how many of them a replica has; by name.
SHARED: dict[str, tuple[dict[str, Any], int]] = {
    "fsdp": ({"strategy": "fsdp"}, 1),
    "hsdp": ({"strategy": "hsdp", "shards": 2}, 1),
    "pipeline": ({"strategy": "pipeline"}, 2),
    "tensor parallel": ({"strategy": "ddp", "tensor_parallel": 2}, 2),
    "context parallel": ({"strategy": "ddp", "context_parallel": 2}, 2),
    **{f"ZeRO {stage}": ({"strategy": "deepspeed", "zero_stage": stage}, 1) for stage in (1, 2, 3)},
}
# What a rank may end with when another one was lost.
LEFT_ALONE = frozenset(
    {
        "CheckpointError",
        "ContactLostError",
        "JudgeError",
        "OtherRankFailedError",
        "PoisonedWindowError",
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One thing that happens on one rank.

    Args:
        what: happens.
        place: where; see ``places.py``.
        update: the update under way, or the last before it; None for any.
        nth: at which visit of that place in that update, from 1.
        rank: on which rank.
    """

    what: str
    place: str
    update: int | None = None
    nth: int = 1
    rank: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """A job that can be broken.

    Args:
        m: samples of a micro-batch.
        ranks: processes.
        shared: how they share the model, by a name of ``SHARED``; empty where each has all of it.
        every: updates between two checkpoints.
        rows: samples to train on; 200 never end within the run, 20 end in its third update.
        noisy: with dropout, and with an average of the parameters.
        workers: that read samples.
        own: a data set of the user's own, whose samples draw at random.
    """

    m: int = 2
    ranks: int = 1
    shared: str = ""
    every: int = 1
    rows: int = 200
    noisy: bool = False
    workers: int = 0
    own: bool = False

    @property
    def window(self) -> int:
        """A, micro-batches of an update on a rank."""
        return 8 // (self.m * self.replicas)

    @property
    def replicas(self) -> int:
        """D."""
        return self.ranks // (SHARED[self.shared][1] if self.shared else 1)

    @property
    def strategy(self) -> str:
        """How many ranks there are and how they share the model, for the table."""
        return f"{self.shared or 'ddp'} on {self.ranks}" if self.ranks > 1 else "one rank"

    def window_of(self, update: int) -> int:
        """Micro-batches of one update on a rank; the third has the 4 samples of an epoch's tail."""
        return -(-4 // (self.m * self.replicas)) if update == 3 and self.rows == 20 else self.window

    @property
    def layout(self) -> str:
        """In words, for names and the table."""
        more = [
            ", tail" * (self.rows < 100),
            ", dropout and average" * self.noisy,
            ", worker" * self.workers,
        ]
        more += [", own data" * self.own, f", {self.shared} on {self.ranks}" * bool(self.shared)]
        return f"m={self.m} A={self.window} D={self.replicas}{''.join(more)}, checkpoint every {self.every}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One trial.

    Args:
        kind: of fault, for the table.
        place: for the table.
        setup: of the job.
        faults: in the run that is begun.
        later: in the run that is gone on with; then it is gone on with once more.
        damage: what becomes of the newest checkpoint in between.
        ends: how the ranks with a fault may end: an exit code, the name of an error, or "killed".
        others: how the other ranks may end.
        promise: from where a run goes on: the last update that was "committed", or the last
            "checkpoint" that was due.
        later_ends: as ``ends``, of the run with ``later``.
        committed: updates that the broken run commits; None where that depends on the moment.
    """

    kind: str
    place: str
    setup: Setup
    faults: Sequence[Fault] = ()
    later: Sequence[Fault] = ()
    damage: str | None = None
    ends: frozenset[str]
    others: frozenset[str] = LEFT_ALONE
    promise: Literal["committed", "checkpoint"] = "checkpoint"
    later_ends: frozenset[str] = field(default_factory=frozenset)
    committed: int | None = None

    @property
    def name(self) -> str:
        return f"{self.kind}: {self.place} [{self.setup.layout}]"

    @property
    def leaves_evaluation_out(self) -> bool:
        """Whether it ends on an edge with a checkpoint and without the evaluation that was due."""
        failed = self.kind in ("exception", "out of memory") and self.place.startswith("in evaluation")
        return failed or self.kind in ("SIGTERM, no grace", "NaN loss for good")

    def settings(self, folder: str, rows: str) -> dict[str, Any]:
        """The tables of the job's settings."""
        setup = self.setup
        return {
            "run": {"num_updates": NUM_UPDATES, "evaluate_every_updates": 2, "folder": folder},
            "batch": {"global_batch_samples": 8, "micro_batch_samples": setup.m},
            "data": self._own_data(rows) if setup.own else self._files(rows),
            "parallel": SHARED[setup.shared][0] if setup.shared else {},
            "model": {
                "layers": 2 if setup.shared == "pipeline" else 1,
                "width": 16,
                "heads": 2,
                "dropout": 0.2 if setup.noisy else 0.0,
            },
            "average": {"decay_per_update": 0.9 if setup.noisy else 0.0},
            "schedule": {"warmup_updates": 2},
            "checkpoints": {"every_updates": setup.every},
            "proof": {"check_first_batch": False},
        }

    def _files(self, rows: str) -> dict[str, Any]:
        return {
            "source": "jsonl",
            "files": [f"{rows}/{self.setup.rows}.jsonl"],
            "held_out_files": [f"{rows}/held_out.jsonl"],
            "max_tokens_per_sample": 24,
            "workers": self.setup.workers,
        }

    def _own_data(self, rows: str) -> dict[str, Any]:
        files = {"train": f"{rows}/{self.setup.rows}.jsonl", "held_out": f"{rows}/held_out.jsonl"}
        return {"source": "campaign.rows:texts", "options": files, "workers": self.setup.workers}
