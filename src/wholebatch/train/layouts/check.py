"""What the ranks of a training job can't do together is refused here, before anything is loaded."""

from __future__ import annotations

from wholebatch.budget import AnyPlan
from wholebatch.errors import UnsupportedError, UsageError
from wholebatch.layout import Layout
from wholebatch.train.layouts.cut import CUT, STAGED, is_cut, num_stage_ranks
from wholebatch.train.layouts.zero import check_zero, need_deepspeed
from wholebatch.train.notes import several_ranks
from wholebatch.train.optimize import FUSED_IN_PARTS
from wholebatch.train.settings import ParallelConfig, TrainConfig

# What moves one element by the others of its matrix, which is cut in three where heads are shared.
_BY_MATRICES = ("Muon", "Adafactor")
# Of torch 2.13, on tensors that lie in parts over ranks.
_NOT_IN_PARTS = {
    "Adafactor": "takes norms of rows and columns in place, which lie on several ranks",
    "Rprop": "writes single elements, of which torch does not know on which rank they lie",
}


def check_parallel(config: TrainConfig, ranks: int) -> None:
    """Refuse, before anything is loaded, what the ranks can't do together.

    Args:
        config: all settings.
        ranks: processes of the job.

    Raises:
        UnsupportedError: a degree that this job does not have, or a strategy or degree that does not go
            with another setting; says where it does work.
        UsageError: numbers that do not fit the ranks or the model, or a setting that would do nothing.
    """
    settings = config.parallel
    check_zero(config, ranks)
    _check_reduce(settings, ranks)
    _check_shards(settings, ranks)
    if settings.tensor_parallel > 1:
        _check_tensor_parallel(config, ranks)
    if settings.context_parallel > 1:
        _check_context_parallel(config, ranks)
    if settings.strategy == STAGED:
        _check_pipeline(config, ranks)
    else:
        _refuse_stages_of_none(settings)
    if is_cut(settings, ranks):
        _check_what_is_cut(config)
        if settings.strategy in CUT:
            _check_optimizer_of_parts(config)
    need_deepspeed(config, ranks)


def _check_divides(where: str, ranks: int, degree: int) -> None:
    if ranks % degree == 0:
        return
    if ranks == 1:
        raise UsageError(f"{where}, and one rank is running; {several_ranks(degree)}")
    raise UsageError(f"{where}: {ranks} ranks do not divide by it; start a multiple of {degree}")


def _check_reduce(settings: ParallelConfig, ranks: int) -> None:
    cut = settings.strategy in CUT
    other = "after_agreement" if cut else "per_micro_batch"
    if settings.reduce == other:
        right = '"fsdp" or "hsdp"' if other == "per_micro_batch" else '"ddp"'
        raise UsageError(
            f'parallel.reduce = "{other}" goes with parallel.strategy {right}, and it is '
            f'"{settings.strategy}"; set one of them'
        )
    if ranks == settings.tensor_parallel > 1 and settings.reduce != "per_update":
        raise UsageError(
            f'parallel.reduce = "{settings.reduce}": {ranks} tensor-parallel ranks are one replica, and '
            f'there is nothing to reduce over others; set it to "per_update"'
        )


def _check_shards(settings: ParallelConfig, ranks: int) -> None:
    if settings.strategy != "hsdp":
        if settings.shards:
            raise UsageError(
                f'parallel.shards = {settings.shards} is for parallel.strategy = "hsdp", and it is '
                f'"{settings.strategy}"; leave it out'
            )
        return
    replicas = ranks // settings.tensor_parallel
    if ranks == 1:
        return
    fitting = [n for n in range(2, replicas) if replicas % n == 0]
    if settings.shards not in fitting:
        which = f"numbers that do: {', '.join(map(str, fitting))}" if fitting else "none does; take fsdp"
        raise UsageError(
            f"parallel.shards = {settings.shards} has to divide the {replicas} replicas of {ranks} ranks "
            f'into several groups of several for parallel.strategy = "hsdp"; {which}'
        )


def _check_tensor_parallel(config: TrainConfig, ranks: int) -> None:
    """What the built-in GPT can share over ranks."""
    from wholebatch.train.models.choose import gpt_sizes

    degree, model, options = config.parallel.tensor_parallel, config.model, config.optimizer.options
    where = f"parallel.tensor_parallel = {degree}"
    if model.source != "gpt":
        raise UnsupportedError(
            f"{where} knows the matrices of the built-in GPT, and model.source is {model.source!r}; cut "
            f'your own with parallelize_module in a loop of your own, or take parallel.strategy = "fsdp"'
        )
    _, _, heads = gpt_sizes(model)
    if heads % degree:
        raise UsageError(
            f"{where}: {heads} attention heads (model.heads) do not divide by it; degrees that do: "
            f"{', '.join(str(n) for n in range(1, heads + 1) if heads % n == 0)}"
        )
    _check_divides(where, ranks, degree)
    if ranks > degree and config.parallel.strategy == "ddp":
        raise UnsupportedError(
            f'{where} makes {ranks // degree} replicas of {ranks} ranks, and parallel.strategy = "ddp" '
            f'reduces no parameters in parts; set it to "fsdp", or start {degree} ranks'
        )
    if model.dropout:
        raise UnsupportedError(
            f"{where} and model.dropout = {model.dropout}: the ranks of a replica would drop the same "
            f"features of different heads; set it to 0"
        )
    for key, given in (
        ("lora.rank", config.lora.rank),
        ("batch.rows", config.batch.rows == "packed"),
        *((f"optimizer.options.{one} = true", options.get(one)) for one in ("fused", "foreach")),
        ('optimizer.name = "Rprop"', config.optimizer.name == "Rprop"),
    ):
        if given:
            raise UnsupportedError(f"{where} does not go with {key} yet; leave one of them out")
    if config.optimizer.name in _BY_MATRICES:
        raise UnsupportedError(
            f"{where}: {config.optimizer.name} moves matrices as a whole, and attention has its own in "
            f'three parts here; take an optimizer that moves each element by itself, such as "AdamW"'
        )


def _check_context_parallel(config: TrainConfig, ranks: int) -> None:
    """What sequences of the built-in GPT can be shared over ranks."""
    settings, model = config.parallel, config.model
    where = f"parallel.context_parallel = {settings.context_parallel}"
    _check_divides(where, ranks, settings.context_parallel)
    if model.source != "gpt" or ":" in config.data.source or config.objective.kind != "next_token":
        raise UnsupportedError(
            f'{where} knows the attention of the built-in GPT and the objective "next_token", and here are '
            f"model.source {model.source!r}, data.source {config.data.source!r} and objective.kind "
            f"{config.objective.kind!r}; cut sequences in a loop of your own (docs/engines.md), or set it "
            f"to 1"
        )
    for key, given in (
        (f"parallel.tensor_parallel = {settings.tensor_parallel}", settings.tensor_parallel > 1),
        (f'parallel.strategy = "{settings.strategy}"', settings.strategy not in ("ddp", *CUT)),
        (f"lora.rank = {config.lora.rank}", config.lora.rank),
        ('batch.rows = "packed"', config.batch.rows == "packed"),
        ("model.compile", model.compile),
    ):
        if given:
            raise UnsupportedError(f"{where} does not go with {key}; leave one of them out")
    if model.dropout:
        raise UnsupportedError(
            f"{where} and model.dropout = {model.dropout}: the ranks that share a sequence would drop the "
            f"same features of different positions; set it to 0"
        )


def _refuse_stages_of_none(settings: ParallelConfig) -> None:
    default = ParallelConfig()
    for key in ("pipeline_parallel", "pipeline_schedule", "pipeline_virtual_stages"):
        if (value := getattr(settings, key)) != getattr(default, key):
            raise UsageError(
                f'parallel.{key} = {value!r} goes with parallel.strategy = "pipeline", whose copies are '
                f'reduced as "ddp" reduces them, and it is "{settings.strategy}"; set one of them'
            )


def _check_pipeline(config: TrainConfig, ranks: int) -> None:
    """What the built-in GPT can be cut into, and which micro-batches its schedule takes."""
    from wholebatch.train.models.choose import gpt_sizes

    settings, model = config.parallel, config.model
    stage_ranks = num_stage_ranks(settings, ranks)
    where = f'parallel.strategy = "pipeline" over {stage_ranks} ranks'
    _check_divides(f"parallel.pipeline_parallel = {stage_ranks}", ranks, stage_ranks)
    if stage_ranks == 1:
        return
    if model.source != "gpt":
        raise UnsupportedError(
            f"{where} knows the layers of the built-in GPT, and model.source is {model.source!r}; cut your "
            f"own into stages in a loop of your own (docs/engines/pipeline.md), or take "
            f'parallel.strategy = "fsdp"'
        )
    if settings.reduce != "per_update":
        raise UsageError(
            f'parallel.reduce = "{settings.reduce}": {where} reduces once, when the schedule is over and '
            f'all ranks have agreed; set it to "per_update"'
        )
    Layout(  # for what it refuses; a plan by tokens has no schedule
        ranks=ranks,
        pipeline_parallel=stage_ranks,
        pipeline_schedule=settings.pipeline_schedule,
        pipeline_virtual_stages=settings.pipeline_virtual_stages,
    )
    layers, stages = gpt_sizes(model)[0], stage_ranks * settings.pipeline_virtual_stages
    if layers < stages:
        raise UsageError(
            f"{where} has {stages} stages, and {layers} layers (model.layers) leave some without one; take "
            f"more layers, or parallel.pipeline_parallel with fewer ranks"
        )
    for key, given in (
        (f"parallel.tensor_parallel = {settings.tensor_parallel}", settings.tensor_parallel > 1),
        (f"lora.rank = {config.lora.rank}", config.lora.rank),
        ('batch.rows = "packed"', config.batch.rows == "packed"),
    ):
        if given:
            raise UnsupportedError(f"{where} does not go with {key}; leave one of them out")
    if model.dropout:
        raise UnsupportedError(
            f"{where} and model.dropout = {model.dropout}: the ranks of a pipeline would drop the same "
            f"features of different layers; set it to 0"
        )


def check_schedule_fits(plan: AnyPlan, settings: ParallelConfig) -> None:
    """Refuse a window that the pipeline's schedule does not take; another one runs tails alone.

    Args:
        plan: of the global batch.
        settings: the section ``[parallel]``, checked.

    Raises:
        UsageError: with both numbers.
    """
    stage_ranks, window = plan.layout.pipeline_parallel, plan.micro_batches_per_window
    if stage_ranks == 1:
        return
    schedule, several = settings.pipeline_schedule, settings.pipeline_virtual_stages
    if schedule == "zero_bubble" and several < 2:
        raise UsageError(
            f'parallel.pipeline_schedule = "zero_bubble" has several stages on each rank, and '
            f"parallel.pipeline_virtual_stages = {several}; set it to 2 or more"
        )
    if window is None:
        return
    if schedule == "1f1b" and window < stage_ranks:
        raise UsageError(
            f'parallel.pipeline_schedule = "1f1b" takes {stage_ranks} micro-batches or more, as many as '
            f"there are stages, and a window has {window}; lower batch.micro_batch_samples = "
            f'{plan.micro_batch_samples}, or set it to "gpipe"'
        )
    if schedule == "zero_bubble" and window > stage_ranks and window % (window // stage_ranks):
        raise UsageError(
            f'parallel.pipeline_schedule = "zero_bubble" runs the {window} micro-batches of a window in '
            f"{window // stage_ranks} equal rounds over {stage_ranks} ranks, which do not divide them; "
            f"take a multiple of {stage_ranks}"
        )


def _check_what_is_cut(config: TrainConfig) -> None:
    from wholebatch.train.models.choose import source_kind

    if config.lora.rank and source_kind(config.model.source) != "folder":
        raise UnsupportedError(
            f"lora.rank = {config.lora.rank}: adapters of model.source {config.model.source!r} are merged "
            f"into its weights at the end, which {config.parallel.strategy} leaves in parts; take a "
            f'Hugging Face folder, or parallel.strategy = "ddp"'
        )
    if config.model.compile:
        raise UnsupportedError(
            f'model.compile goes with parallel.strategy = "ddp" without tensor_parallel here, and it is '
            f'"{config.parallel.strategy}" with tensor_parallel = {config.parallel.tensor_parallel}; set '
            f"model.compile = false"
        )
    if config.precision.autocast == "float16":
        raise UnsupportedError(
            f'precision.autocast = "float16" needs a loss scale, which this job keeps with '
            f'parallel.strategy = "ddp" alone, and it is "{config.parallel.strategy}"; set it to "bfloat16"'
        )


def _check_optimizer_of_parts(config: TrainConfig) -> None:
    name, where = config.optimizer.name, f'parallel.strategy = "{config.parallel.strategy}"'
    if name in _NOT_IN_PARTS:
        raise UnsupportedError(
            f"{where}: {name} {_NOT_IN_PARTS[name]}; take another optimizer, such as "
            f'"AdamW", or parallel.strategy = "ddp"'
        )
    if config.optimizer.options.get("fused") and name not in FUSED_IN_PARTS:
        raise UnsupportedError(
            f"{where}: torch has no fused {name} for parameters in parts; leave optimizer.options.fused out"
        )
