"""Everything that the settings determine, built and not yet run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from wholebatch.budget import AnyPlan, BudgetPlan, plan_token_budget
from wholebatch.errors import UsageError
from wholebatch.loading.parts import order_of
from wholebatch.loading.reading import read_samples
from wholebatch.objective import LossSum
from wholebatch.order import ORDER_RULE, ItemOrder, SampleOrder
from wholebatch.packing import CostModel
from wholebatch.plan import plan_batch
from wholebatch.replay import seed_all
from wholebatch.train.cutting import refuse_too_long
from wholebatch.train.data import load_data
from wholebatch.train.data.store import TokenSamples, content_digest
from wholebatch.train.layouts.check import check_parallel, check_schedule_fits
from wholebatch.train.layouts.cut import forwards_are_meetings, num_stage_ranks, parallel_model
from wholebatch.train.layouts.sequences import in_parts
from wholebatch.train.layouts.zero import runs_deepspeed, start_engine
from wholebatch.train.material import Batch, JobData, JobModel, on_device
from wholebatch.train.models.choose import build_model, check_model_settings, gpt_in_outline
from wholebatch.train.models.gpt import GPT
from wholebatch.train.models.sequences import share_sequences
from wholebatch.train.optimize import (
    check_optimizer,
    is_muon,
    make_optimizer,
    parameter_groups,
    refuse_muon_of_vectors,
)
from wholebatch.train.precision import autocast, check_precision, make_scaler
from wholebatch.train.schedule import check_schedule, make_schedule
from wholebatch.train.settings import BatchConfig, TrainConfig
from wholebatch.train.world import World
from wholebatch.window import UpdateWindow


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The samples, the model, and the plan by which one trains on the other."""

    config: TrainConfig
    world: World
    data: JobData
    plan: AnyPlan
    order: SampleOrder | ItemOrder
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

    def loss_of_output(self, output: Tensor, batch: Batch) -> LossSum | Mapping[str, LossSum]:
        """The same of what the last stage of a pipeline gave; autocast was around each stage."""
        batch = on_device(batch, self.world.device)
        if self.model.read_out is not None:
            output = self.model.read_out(output, batch)
        return self.data.objective(output, batch)

    @property
    def replica(self) -> int:
        """The replica that this rank belongs to; the ranks of one are neighbours."""
        return self.world.rank // self.plan.layout.ranks_per_replica

    @property
    def speaks(self) -> bool:
        """Whether this rank's sums count: each for its part of sequences, else one rank for its replica."""
        return (
            self.plan.layout.context_parallel > 1
            or self.world.rank % self.plan.layout.ranks_per_replica == 0
        )

    @property
    def forwards_together(self) -> bool:
        """Whether a forward is a meeting of ranks, so that each must run as many as the others."""
        return forwards_are_meetings(self.config.parallel, self.world.ranks)

    @property
    def staged(self) -> bool:
        """Whether the ranks of a replica hold stages, and a schedule runs forwards and backwards."""
        return self.plan.layout.pipeline_parallel > 1

    @property
    def samples_of_run(self) -> int | None:
        """Samples that all updates of the run consume; None where the global batch is given in items."""
        if isinstance(self.order, ItemOrder):
            return None
        epochs, rest = divmod(self.config.run.num_updates, self.order.updates_per_epoch)
        return epochs * self.order.samples_per_epoch + rest * self.order.global_batch_samples


def check_settings(config: TrainConfig, ranks: int) -> AnyPlan:
    """Refuse what needs no data to be refused, and plan the global batch over the ranks there are.

    Raises:
        PlanError: the global batch does not divide over micro-batches and ranks.
        UsageError: settings that contradict each other, or name something that there is not.
    """
    check_parallel(config, ranks)
    plan = _plan(config, ranks)
    check_schedule_fits(plan, config.parallel)
    check_precision(config.precision)
    check_schedule(config)
    check_optimizer(config.optimizer)
    check_model_settings(config)
    if config.model.source == "gpt" and not config.lora.rank and is_muon(config.optimizer):
        refuse_muon_of_vectors(config.optimizer, list(gpt_in_outline(config.model).parameters()))
    return plan


def _plan(config: TrainConfig, ranks: int) -> AnyPlan:
    batch, parallel = config.batch, config.parallel
    degrees: dict[str, Any] = {
        "ranks": ranks,
        "tensor_parallel": parallel.tensor_parallel,
        "pipeline_parallel": num_stage_ranks(parallel, ranks),
        "context_parallel": parallel.context_parallel,
    }
    if batch.tokens_per_micro_batch:
        _check_budget(batch)
        return plan_token_budget(
            tokens_per_micro_batch=batch.tokens_per_micro_batch,
            global_batch_samples=batch.global_batch_samples or None,
            global_batch_items=batch.global_batch_items or None,
            **degrees,
            rows=batch.rows,
            tail=batch.tail,
            too_long="alone" if batch.tokens_alone else "refuse",
            tokens_alone=batch.tokens_alone or None,
            cost=CostModel(
                per_micro_batch=batch.cost_per_micro_batch if batch.cost_per_micro_batch >= 0 else None,
                per_position=batch.cost_per_position,
                per_position_and_length=batch.cost_per_position_and_length,
            ),
        )
    default = BatchConfig()
    costs = ("cost_per_micro_batch", "cost_per_position", "cost_per_position_and_length")
    for key in ("global_batch_items", "tokens_alone", "rows", *costs):
        if (value := getattr(batch, key)) != getattr(default, key):
            raise UsageError(
                f"batch.{key} = {value!r} goes with micro-batches that are cut by tokens; set "
                f"batch.tokens_per_micro_batch in place of batch.micro_batch_samples = "
                f"{batch.micro_batch_samples}"
            )
    return plan_batch(
        global_batch_samples=batch.global_batch_samples,
        micro_batch_samples=batch.micro_batch_samples,
        **degrees,
        pipeline_schedule=parallel.pipeline_schedule if degrees["pipeline_parallel"] > 1 else "1f1b",
        pipeline_virtual_stages=parallel.pipeline_virtual_stages,
        tail=batch.tail,
    )


def _check_budget(batch: BatchConfig) -> None:
    bound = batch.tokens_per_micro_batch
    if 0 < batch.tokens_alone <= bound:
        raise UsageError(
            f"batch.tokens_alone = {batch.tokens_alone} is the larger bound for a sample that is alone, "
            f"and batch.tokens_per_micro_batch = {bound} is no smaller; raise it, or set it to 0 to refuse "
            f"samples that do not fit"
        )
    if not batch.cost_per_position and not batch.cost_per_position_and_length:
        raise UsageError(
            "batch.cost_per_position and batch.cost_per_position_and_length are both 0, so no micro-batch "
            "would cost more than another; give one of them a cost, such as cost_per_position = 1"
        )


def _order(config: TrainConfig, plan: AnyPlan, data: JobData) -> SampleOrder | ItemOrder:
    if plan.global_batch_items is not None and isinstance(plan, BudgetPlan):
        if data.items is None:
            raise UsageError(
                f"batch.global_batch_items = {plan.global_batch_items} needs the items of every sample "
                f"ahead, and {config.data.source} does not give them; return items beside train, or set "
                f"batch.global_batch_samples"
            )
        most = int(data.items.argmax())
        if data.items[most] > plan.global_batch_items:
            over = int((data.items > plan.global_batch_items).sum()) - 1
            raise UsageError(
                f"sample {most} has {data.items[most]} items, more than batch.global_batch_items = "
                f"{plan.global_batch_items}{f', and so have {over} others' if over else ''}; set that to "
                f"{data.items[most]} or more, or cut samples with data.max_tokens_per_sample"
            )
    return order_of(plan, len(data.train), items=data.items, seed=config.run.seed)


def build_job(config: TrainConfig, world: World, plan: AnyPlan) -> Job:
    """Read the samples and build the model.

    Args:
        config: all settings.
        world: the ranks of the job.
        plan: what ``check_settings`` made of them.
    """
    data = load_data(config)
    if isinstance(data.train, TokenSamples):
        data = replace(data, facts={**data.facts, "train_digest": content_digest(data.train)})
    order = _order(config, plan, data)
    _check_lengths(plan, data, config)
    # Models and data of a user's own may draw from any generator, and a checkpoint holds them all.
    seed_all(config.run.seed)
    model = build_model(config, data=data, device=world.device)
    # One seed gives every rank the same parameters; dropout must differ between replicas.
    seed_all(config.run.seed + 1 + world.rank // plan.layout.ranks_per_replica)
    return Job(config=config, world=world, data=data, plan=plan, order=order, model=model)


def as_shared(job: Job, sequences: DeviceMesh | None) -> Job:
    """The job as its ranks run it after the proof: each with its part of sequences."""
    if sequences is None:
        return job
    return replace(job, data=in_parts(job.data, sequences.get_local_rank(), sequences.size()))


def make_window(
    job: Job, sequences: DeviceMesh | None = None, *, say: Callable[[str], None] = lambda _: None
) -> UpdateWindow:
    """The window over the job's model, with its optimizer, clipping, schedule and loss scaler.

    Args:
        job: as its ranks run it.
        sequences: the ranks that share this rank's sequences.
        say: tells people what takes long; called on all ranks or none.
    """
    config, model = job.config, job.model.module
    if sequences is not None:
        assert isinstance(model, GPT)
        share_sequences(model, sequences)
    by_deepspeed = runs_deepspeed(config.parallel, job.world.ranks)
    # An optimizer must have the parameters as the ranks then hold them; DeepSpeed sees to that itself.
    if not by_deepspeed:
        model = parallel_model(model, config, job.world, padding_id=job.data.padding_id)
    optimizer = make_optimizer(parameter_groups(job.model.module, config.optimizer), config.optimizer)
    if by_deepspeed:
        model = start_engine(model, optimizer, config, job.world, job.plan, say=say)
    return UpdateWindow(
        model,
        optimizer,
        job.data.objective,
        plan=job.plan,
        clip_grad_norm=config.optimizer.clip_grad_norm or None,
        scheduler=make_schedule(
            optimizer,
            config,
            samples_of_run=job.samples_of_run,
            **_per_update(job),
        ),
        scaler=make_scaler(config.precision, job.world.device),
        context_parallel=sequences,
        reduce=config.parallel.reduce if job.world.ranks > 1 else "per_update",
    )


def _per_update(job: Job) -> dict[str, float]:
    """The mean samples and items of a global batch, for the schedule; those that are known."""
    order, items = job.order, job.data.facts.get("train_items")
    if isinstance(order, ItemOrder):
        per_update = order.global_batch_items * len(job.data.train) / order.items_per_epoch
        return {"samples_per_update": per_update, "items_per_update": float(order.global_batch_items)}
    found = {"samples_per_update": float(min(order.global_batch_samples, order.num_samples))}
    return found | ({"items_per_update": items / order.updates_per_epoch} if items else {})


def _check_lengths(plan: AnyPlan, data: JobData, config: TrainConfig) -> None:
    """Refuse samples that no micro-batch can take before anything is trained on the others."""
    if not isinstance(plan, BudgetPlan):
        return
    for what, lengths in (("sample", data.lengths), ("held-out sample", data.held_out_lengths)):
        if lengths is not None:
            refuse_too_long(plan, lengths, what=what)
    if data.lengths is None and data.length_of is not None and config.data.on_bad_sample == "raise":
        # That the first one tells its tokens is known now, not after the proof.
        (first,) = read_samples(data.train, [0], epoch=0, seed=config.run.seed)
        data.length_of(first)


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
        "global_batch_items": job.config.batch.global_batch_items or None,
        "order": ORDER_RULE,
    }
