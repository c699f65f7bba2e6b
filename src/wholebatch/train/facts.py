"""A job in words for the terminal, and in facts for the header of its run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from wholebatch.budget import AnyPlan, BudgetPlan
from wholebatch.epochs import EpochLedger
from wholebatch.order import ItemOrder
from wholebatch.record import Resumption, RunHeader
from wholebatch.report.budget_ledger import budget_text
from wholebatch.report.ledger import plan_findings, plan_text
from wholebatch.report.words import number_of
from wholebatch.train.layouts.cut import reduces_each
from wholebatch.train.notes import notes
from wholebatch.train.parts import Job
from wholebatch.train.proof import proof_facts
from wholebatch.train.resuming import launch
from wholebatch.verify.verification import Verification
from wholebatch.window import UpdateWindow


def describe(job: Job) -> str:
    """What will be trained, in the words of the ledger."""
    data, model, run = job.data.facts, job.model.facts, job.config.run
    frozen = model["parameters"] - model["trainable_parameters"]
    told = notes(data, model, strategy=job.config.parallel.strategy, ranks=job.world.ranks)
    return (
        f"{_plan_words(job)}\n"
        f"Data: {number_of(len(job.data.train), 'sample')}{_items(data, 'train_items')} to train on, "
        f"{len(job.data.held_out):,}{_items(data, 'held_out_items')} held out.\n"
        f"Model: {model['name']} of {model['parameters']:,} parameters"
        f"{f', {frozen:,} of them frozen,' if frozen else ''} in {precision(job)}.\n"
        f"Run: {number_of(run.num_updates, 'update')}{_length_words(job)}."
        + "".join(f"\nNote: {note}." for note in (*told, *_never_full(job)))
    )


def _plan_words(job: Job) -> str:
    each = reduces_each(job.config.parallel, job.world.ranks)
    if isinstance(job.plan, BudgetPlan):
        return budget_text(job.plan, reduces_each=each)
    return plan_text(job.plan, ragged=True, reduces_each=each)


def _length_words(job: Job) -> str:
    if isinstance(job.order, ItemOrder):
        return f" of up to {number_of(job.order.global_batch_items, 'item')}"
    return (
        f", {job.samples_of_run:,} samples; an epoch has {number_of(job.order.updates_per_epoch, 'update')}"
    )


def _never_full(job: Job) -> list[str]:
    """The one finding about the data that is true of runs shorter than an epoch too."""
    if isinstance(job.plan, BudgetPlan):
        return []
    epoch = EpochLedger(plan=job.plan, dataset_samples=len(job.data.train))
    found = plan_findings(job.plan, epochs=epoch)
    return [finding["message"] for finding in found if finding["kind"] == "no_full_global_batch"]


def _items(facts: Mapping[str, Any], key: str) -> str:
    return f" with {number_of(facts[key], 'item')}" if facts.get(key) is not None else ""


def precision(job: Job) -> str:
    """What is computed in which precision, in words."""
    settings = job.config.precision
    forward = f", forward in {settings.autocast} autocast" if settings.autocast != "off" else ""
    return f"{settings.parameters}{forward}"


def price(job: Job, window: UpdateWindow) -> str:
    """A line of what an update costs each rank beyond the work itself; empty for one rank."""
    if job.world.ranks == 1:
        return ""
    micro_batches = job.plan.micro_batches_per_window
    of = "" if micro_batches else " (with one micro-batch)"
    return f"\nEach rank: {window.traffic(micro_batches or 1)}{of}."


def layout(job: Job) -> dict[str, int]:
    """The ranks of the job and how they share the model."""
    found = job.plan.layout
    return {
        "ranks": found.ranks,
        "tensor_parallel": found.tensor_parallel,
        "pipeline_parallel": found.pipeline_parallel,
        "context_parallel": found.context_parallel,
    }


def header(job: Job, proof: Verification | None, command: Sequence[str]) -> RunHeader:
    """What is the same for every update of a new run."""
    plan, config = job.plan, job.config
    return RunHeader(
        global_batch_samples=plan.global_batch_samples,
        micro_batch_samples=plan.micro_batch_samples,
        micro_batches_per_window=plan.micro_batches_per_window,
        global_batch_items=plan.global_batch_items,
        **_budget(plan),
        replicas=plan.replicas,
        layout=layout(job),
        tail=plan.tail,
        precision=f"{precision(job)}, on {job.world.device.type}",
        normalisation="sum over items / N, the items of the global batch",
        seeds={"run": config.run.seed},
        command=list(command),
        dataset=job.data.facts,
        model=job.model.facts,
        settings=config.to_dict(),
        proof=proof_facts(proof),
        launch=launch(),
    )


def _budget(plan: AnyPlan) -> dict[str, Any]:
    """What a header and a resumption say of micro-batches that tokens bound."""
    if not isinstance(plan, BudgetPlan):
        return {}
    return {"tokens_per_micro_batch": plan.tokens_per_micro_batch, "rows": plan.rows}


def resumption(
    job: Job, before: Mapping[str, Any], command: Sequence[str], *, updates_attempted: int, samples: int
) -> Resumption:
    """What is other from here on in a run that is resumed.

    Args:
        job: as it is now.
        before: the settings that the run had.
        command: the words of the command line.
        updates_attempted: of the run at the checkpoint.
        samples: consumed by then.
    """
    plan, then, now = job.plan, _flat(before), _flat(job.config.to_dict())
    return Resumption(
        updates_attempted=updates_attempted,
        samples=samples,
        micro_batch_samples=plan.micro_batch_samples,
        micro_batches_per_window=plan.micro_batches_per_window,
        **_budget(plan),
        replicas=plan.replicas,
        layout=layout(job),
        precision=f"{precision(job)}, on {job.world.device.type}",
        command=list(command),
        changed_settings={
            name: [then.get(name), now.get(name)]
            for name in sorted(then.keys() | now.keys())
            if then.get(name) != now.get(name)
        },
    )


def _flat(tables: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{section}.{key}": value for section, table in tables.items() for key, value in table.items()}
