"""What the ranks of a training job can't do together is refused here, before anything is loaded."""

from __future__ import annotations

from wholebatch.errors import UnsupportedError, UsageError
from wholebatch.train.layouts.cut import CUT, is_cut
from wholebatch.train.settings import ParallelConfig, TrainConfig

_IN_LOOPS_OF_YOUR_OWN = {
    "deepspeed": "its engine owns the optimizer, which this job saves and resumes",
    "pipeline": "each stage runs a part of the model, which this job evaluates and writes as a whole",
}
# What moves one element by the others of its matrix, which is cut in three where heads are shared.
_BY_MATRICES = ("Muon", "Adafactor")


def check_parallel(config: TrainConfig, ranks: int) -> None:
    """Refuse, before anything is loaded, what the ranks can't do together.

    Args:
        config: all settings.
        ranks: processes of the job.

    Raises:
        UnsupportedError: a strategy or a degree that this job does not have, or one that does not go with
            another setting; says where it does work.
        UsageError: numbers that do not fit the ranks or the model, or a setting that would do nothing.
    """
    settings = config.parallel
    if reason := _IN_LOOPS_OF_YOUR_OWN.get(settings.strategy):
        raise UnsupportedError(
            f'parallel.strategy = "{settings.strategy}": {reason}. UpdateWindow trains such models '
            f'in a loop of your own (docs/engines.md); here take "ddp", "fsdp" or "hsdp"'
        )
    for key, what in (("pipeline_parallel", "stages"), ("context_parallel", "parts of sequences")):
        if (degree := getattr(settings, key)) > 1:
            raise UnsupportedError(
                f"parallel.{key} = {degree}: this job cuts no model into {what}; UpdateWindow trains one "
                f"that is, in a loop of your own (docs/engines.md). Set it to 1"
            )
    _check_reduce(settings, ranks)
    _check_shards(settings, ranks)
    if settings.tensor_parallel > 1:
        _check_tensor_parallel(config, ranks)
    if is_cut(settings, ranks):
        _check_what_is_cut(config)


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

    degree, model = config.parallel.tensor_parallel, config.model
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
    if ranks % degree:
        raise UsageError(f"{where}: {ranks} ranks do not divide by it; start a multiple of {degree}")
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
    for key, given in (("lora.rank", config.lora.rank), ("batch.rows", config.batch.rows == "packed")):
        if given:
            raise UnsupportedError(f"{where} does not go with {key} yet; leave one of them out")
    if config.optimizer.name in _BY_MATRICES:
        raise UnsupportedError(
            f"{where}: {config.optimizer.name} moves matrices as a whole, and attention has its own in "
            f'three parts here; take an optimizer that moves each element by itself, such as "AdamW"'
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
