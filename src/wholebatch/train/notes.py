"""What of the data, the model and the ranks a person would not expect, told before training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wholebatch.report.words import number_of


def several_ranks(ranks: int) -> str:
    """What to type for more than one rank."""
    return f"torchrun --nproc-per-node {ranks} -m wholebatch train starts {ranks}"


def notes(data: Mapping[str, Any], model: Mapping[str, Any], *, strategy: str, ranks: int) -> list[str]:
    """Sentences about samples without items, weights in other places, a wait, and a rank alone.

    Args:
        data: facts of the data.
        model: facts of the model.
        strategy: how several ranks would hold the model.
        ranks: processes of the job.

    Returns:
        One sentence each, without a full stop; none where there is nothing to tell.
    """
    told = []
    if empty := data.get("train_samples_without_items", 0):
        samples, have = number_of(data["train_samples"], "sample"), "has" if empty == 1 else "have"
        told.append(f"{empty:,} of {samples} to train on {have} no item to learn and only fill batches")
    new, unused = model.get("new_parameters", []), model.get("unexpected_parameters", [])
    if new:
        many, are = number_of(len(new), "parameter"), "is" if len(new) == 1 else "are"
        told.append(f"{many} of the model, such as {new[0]}, {are} not in its folder and random at first")
    if unused:
        many, are = number_of(len(unused), "weight"), "is" if len(unused) == 1 else "are"
        told.append(f"{many} of the folder, such as {unused[0]}, {are} not used")
    if model.get("compiled"):
        told.append("model.compile = true: the first forwards wait for the compiler, for a minute or more")
    if ranks == 1 and strategy != "ddp":
        told.append(f'parallel.strategy = "{strategy}" does nothing on one rank; {several_ranks(2)}')
    return told
