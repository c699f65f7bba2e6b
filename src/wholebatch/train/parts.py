"""Everything that the settings determine, built and not yet run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from wholebatch.epochs import samples_after
from wholebatch.objective import LossSum
from wholebatch.order import SampleOrder
from wholebatch.plan import BatchPlan, plan_batch
from wholebatch.replay import seed_all
from wholebatch.train.data import load_data
from wholebatch.train.data.store import TokenSamples, content_digest
from wholebatch.train.material import Batch, JobData, JobModel, on_device
from wholebatch.train.models.choose import build_model, check_model_settings
from wholebatch.train.optimize import check_optimizer, make_optimizer, parameter_groups
from wholebatch.train.precision import autocast, check_precision, make_scaler
from wholebatch.train.schedule import check_schedule, make_schedule
from wholebatch.train.settings import TrainConfig
from wholebatch.train.world import World
from wholebatch.window import UpdateWindow


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The samples, the model, and the plan by which one trains on the other."""

    config: TrainConfig
    world: World
    data: JobData
    plan: BatchPlan
    order: SampleOrder
    model: JobModel

    def loss(self, model: nn.Module, batch: Batch) -> LossSum | Mapping[str, LossSum]:
        """The summed loss of a micro-batch and its items, by term if there are several; not divided.

        The batch waits on the host until its turn. Autocast is around the forward alone: the loss is
        summed in float32.
        """
        batch = on_device(batch, self.world.device)
        with autocast(self.config.precision, self.world.device):
            output = self.model.forward(model, batch)
        return self.data.objective(output, batch)

    @property
    def samples_of_run(self) -> int:
        """Samples that all updates of the run consume."""
        return samples_after(self.plan, self.config.run.num_updates, dataset_samples=self.order.num_samples)


def check_settings(config: TrainConfig, ranks: int) -> BatchPlan:
    """Refuse what needs no data to be refused, and plan the global batch over the ranks there are.

    Raises:
        PlanError: the global batch does not divide over micro-batches and ranks.
        UsageError: settings that contradict each other, or name something that there is not.
    """
    plan = plan_batch(
        global_batch_samples=config.batch.global_batch_samples,
        micro_batch_samples=config.batch.micro_batch_samples,
        ranks=ranks,
        tail=config.batch.tail,
    )
    check_precision(config.precision)
    check_schedule(config)
    check_optimizer(config.optimizer)
    check_model_settings(config)
    return plan


def build_job(config: TrainConfig, world: World, plan: BatchPlan) -> Job:
    """Read the samples and build the model.

    Args:
        config: all settings.
        world: the ranks of the job.
        plan: what ``check_settings`` made of them.
    """
    data = load_data(config)
    if isinstance(data.train, TokenSamples):
        data = replace(data, facts={**data.facts, "train_digest": content_digest(data.train)})
    order = SampleOrder(
        num_samples=len(data.train),
        global_batch_samples=plan.global_batch_samples,
        seed=config.run.seed,
        tail=config.batch.tail,
    )
    # Models and data of a user's own may draw from any generator, and a checkpoint holds them all.
    seed_all(config.run.seed)
    model = build_model(config, data=data, device=world.device)
    # One seed gives every rank the same parameters; dropout must differ between ranks.
    seed_all(config.run.seed + 1 + world.rank)
    return Job(config=config, world=world, data=data, plan=plan, order=order, model=model)


def make_window(job: Job) -> UpdateWindow:
    """The window over the job's model, with its optimizer, clipping, schedule and loss scaler."""
    config = job.config
    optimizer = make_optimizer(parameter_groups(job.model.module, config.optimizer), config.optimizer)
    items = job.data.facts.get("train_items")
    return UpdateWindow(
        job.world.parallel(job.model.module),
        optimizer,
        job.data.objective,
        plan=job.plan,
        clip_grad_norm=config.optimizer.clip_grad_norm or None,
        scheduler=make_schedule(
            optimizer,
            config,
            samples_of_run=job.samples_of_run,
            items_per_update=items / job.order.updates_per_epoch if items else 1.0,
        ),
        scaler=make_scaler(config.precision, job.world.device),
    )


def data_identity(job: Job) -> dict[str, Any]:
    """What must be the same for a run to be resumed with the same global batches.

    Samples of one's own have no digest: nobody knows what they hold without reading all of them.
    """
    facts = job.data.facts
    return {
        "train_samples": len(job.data.train),
        "train_items": facts.get("train_items"),
        "train_digest": facts.get("train_digest"),
        "seed": job.config.run.seed,
        "tail": job.config.batch.tail,
        "global_batch_samples": job.plan.global_batch_samples,
    }
