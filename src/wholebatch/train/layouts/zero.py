"""The job under DeepSpeed: what goes with it, its configuration, its engine around model and optimizer."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from wholebatch.budget import AnyPlan
from wholebatch.errors import UnsupportedError, UsageError
from wholebatch.extras import needed
from wholebatch.ranks.deepspeed_builds import missing_builds
from wholebatch.train.precision import autocast
from wholebatch.train.settings import ParallelConfig, TrainConfig
from wholebatch.train.world import World

_NOT_IN_PIECES = {
    "Adafactor": "which moves elements by others of their matrix, and ZeRO gives it flat pieces",
    "Adagrad": "which DeepSpeed makes anew, with one weight decay for all parameters",
}
# Elements that DeepSpeed reduces together; its own default, in which it sets aside a buffer of that size.
_BUCKET_ELEMENTS = 500_000_000
_DEPRECATED = r".torch\.distributed\.(all_gather_into|reduce_scatter)_tensor. is deprecated"


def runs_deepspeed(settings: ParallelConfig, ranks: int) -> bool:
    """Whether the model is trained by a DeepSpeed engine; one rank needs none."""
    return ranks > 1 and settings.strategy == "deepspeed"


def check_zero(config: TrainConfig, ranks: int) -> None:
    """Refuse what does not go with DeepSpeed, and a stage without it.

    Args:
        config: all settings.
        ranks: processes of the job.

    Raises:
        UnsupportedError: another setting that this job does not have with it.
        UsageError: a setting that would do nothing.
    """
    settings = config.parallel
    if settings.strategy != "deepspeed":
        if settings.zero_stage:
            raise UsageError(
                f'parallel.zero_stage = {settings.zero_stage} is for parallel.strategy = "deepspeed", and '
                f'it is "{settings.strategy}"; leave it out'
            )
        return
    if settings.reduce != "per_update":
        raise UsageError(
            f'parallel.reduce = "{settings.reduce}" and parallel.strategy = "deepspeed": the stage says '
            f"when gradients are reduced: 0 and 1 once an update, 2 and 3 in each micro-batch; leave it out"
        )
    if ranks > 1:
        _check_other_settings(config)


def _check_other_settings(config: TrainConfig) -> None:
    stage = config.parallel.zero_stage
    for words in _refused(config):
        raise UnsupportedError(
            f'parallel.strategy = "deepspeed" with zero_stage = {stage} does not go with {words}; change '
            f"that, or take another strategy"
        )


def _refused(config: TrainConfig) -> Iterator[str]:
    """What of the settings has to be changed, in words."""
    parallel, precision, optimizer = config.parallel, config.precision, config.optimizer.name
    if parallel.tensor_parallel > 1:
        yield f"tensor_parallel = {parallel.tensor_parallel}"
    if precision.parameters != "float32":
        yield f'precision.parameters = "{precision.parameters}", because DeepSpeed reduces in float32'
    if precision.autocast == "float16":
        yield 'precision.autocast = "float16", whose loss scale this job keeps with "ddp" alone'
    if config.model.compile:
        yield "model.compile = true"
    if config.lora.rank:
        yield f"lora.rank = {config.lora.rank}"
    if parallel.zero_stage == 3 and config.average.decay_per_update:
        yield f"average.decay_per_update = {config.average.decay_per_update}, of parameters in pieces"
    if optimizer == "Muon":
        yield 'optimizer.name = "Muon"'
    if parallel.zero_stage and optimizer in _NOT_IN_PIECES:
        yield f'optimizer.name = "{optimizer}", {_NOT_IN_PIECES[optimizer]}'
    if parallel.zero_stage and ":" in optimizer:
        yield f"optimizer.name = {optimizer!r}: it may not know how to move flat pieces"


def need_deepspeed(config: TrainConfig, ranks: int) -> None:
    """Import DeepSpeed, where it is used.

    Raises:
        UsageError: it is not installed.
    """
    if runs_deepspeed(config.parallel, ranks):
        with _quiet_output():
            needed("deepspeed", extra="deepspeed", why='parallel.strategy = "deepspeed"')


# The engine ---------------------------------------------------------------------------------------------


def zero_config(config: TrainConfig, plan: AnyPlan, *, num_elements: int) -> dict[str, Any]:
    """What DeepSpeed is configured with: the window accumulates and divides, and the norm is said once.

    Args:
        config: all settings, checked.
        plan: of the global batch.
        num_elements: of all parameters.
    """
    return {
        "train_micro_batch_size_per_gpu": getattr(plan, "micro_batch_samples", None) or 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.optimizer.clip_grad_norm or 0.0,
        "zero_optimization": {
            "stage": config.parallel.zero_stage,
            "reduce_bucket_size": min(num_elements, _BUCKET_ELEMENTS),
        },
        "zero_allow_untested_optimizer": True,
    }


def start_engine(
    module: nn.Module,
    optimizer: Optimizer,
    config: TrainConfig,
    world: World,
    plan: AnyPlan,
    *,
    say: Callable[[str], None],
) -> nn.Module:
    """The engine around a whole model and its optimizer, which it takes apart as its stage says.

    Args:
        module: the model, with the same values on every rank.
        optimizer: over its parameters.
        config: all settings, checked.
        world: the ranks.
        plan: of the global batch.
        say: tells people what takes long.
    """
    import deepspeed  # type: ignore[import-not-found]

    builds = world.on_leader(missing_builds)
    for name, folder in builds.items():
        say(
            f"DeepSpeed compiles {name} now, once on this machine; it takes about a minute. If it never "
            f"ends, an earlier one was cut short and left a lock: delete {folder / 'lock'}"
        )
    _autocast_inside(module, config, world.device)
    # DeepSpeed 0.19 uses in every update what torch 2.13 calls by another name.
    warnings.filterwarnings("ignore", _DEPRECATED, FutureWarning)
    num_elements = sum(one.numel() for one in module.parameters())
    with _quiet_output():
        engine: nn.Module
        engine, *_ = deepspeed.initialize(
            model=module,
            optimizer=optimizer,
            config=zero_config(config, plan, num_elements=num_elements),
        )
    if builds:
        say(f"DeepSpeed has compiled {', '.join(builds)}; later starts find it.")
    return engine


@contextlib.contextmanager
def _quiet_output() -> Iterator[None]:
    """Send what DeepSpeed prints to the error stream, since the output may be JSON; only warnings."""
    with contextlib.redirect_stdout(sys.stderr):
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        yield


def _autocast_inside(module: nn.Module, config: TrainConfig, device: torch.device) -> None:
    """Let autocast begin in the model's own forward: an engine turns off what was begun around it."""
    if config.precision.autocast == "off":
        return
    forward = module.forward

    @functools.wraps(forward)
    def inside(*args: Any, **named: Any) -> Any:
        with autocast(config.precision, device):
            return forward(*args, **named)

    module.forward = inside
