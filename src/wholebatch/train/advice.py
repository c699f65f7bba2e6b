"""What a person is told to do next when a run has ended, or can't go further as it is."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from wholebatch.budget import AnyPlan, BudgetPlan
from wholebatch.errors import CheckpointError
from wholebatch.report.words import number_of
from wholebatch.resume import Checkpoints
from wholebatch.run_folder import read_run
from wholebatch.train.resuming import CHECKPOINTS


def how_to_resume(folder: Path) -> str:
    """What to type to resume a run from its newest checkpoint or to begin it again, or why it can't be."""
    saved = Checkpoints(folder / CHECKPOINTS).list()
    if not saved and not read_run(folder).records:
        return f"It has no update yet. To begin it again: {_command(folder)}"
    if not saved:
        return "There is no checkpoint of it, so it can't be resumed; see checkpoints.every_updates."
    updates = number_of(saved[-1].updates_attempted, "update")
    return f"Saved after {updates}. To resume: {_command(folder)}"


def with_the_command(error: CheckpointError) -> CheckpointError:
    """A checkpoint that is damaged, with what to type to resume from the newest whole one."""
    if error.newest_intact is None:
        return error
    told = CheckpointError(f"{error}. To resume from that: {_command(error.newest_intact)}")
    told.newest_intact = error.newest_intact
    return told


def _command(named: Path | str) -> str:
    """What starts the run again on as many ranks as there are, by what torchrun tells each of them."""
    ranks, here = (int(os.environ.get(name, 1)) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    nodes = f"--nnodes {ranks // here} " if ranks > here else ""
    program = f"torchrun {nodes}--nproc-per-node {here} -m wholebatch" if ranks > 1 else "wholebatch"
    return f"{program} train --resume {shlex.quote(str(named))}"


def memory_advice(plan: AnyPlan, *, during: str) -> str:
    """What to set where memory ran out, so that the global batch stays.

    Args:
        plan: whose micro-batch was too large.
        during: "an update" or "an evaluation".
    """
    if isinstance(plan, BudgetPlan):
        key, number = "tokens_per_micro_batch", plan.tokens_per_micro_batch
        size = f"up to {number_of(number, 'token')}"
    else:
        key, number = "micro_batch_samples", plan.micro_batch_samples
        size = number_of(number, "sample")
    smaller = f"set batch.{key} to {number // 2}" if number > 1 else "lower data.max_tokens_per_sample"
    unless = ", which changes neither the global batch nor the update" if number > 1 else ""
    rest = ", or turn model.activation_checkpointing on. The update was rolled back"
    return (
        f"memory ran out in {during} with {size} in a micro-batch; {smaller}{unless}"
        f"{rest if during == 'an update' else ''}"
    )
