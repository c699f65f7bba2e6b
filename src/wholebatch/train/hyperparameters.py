"""Settings of the optimizer and the schedule that were changed when a run was resumed.

A checkpoint holds an optimizer's hyperparameters in its groups, as torch saves them, and loading puts
those of then back. What the settings say now is put in their place here, and nothing else: a class of
one's own may keep state in its groups too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from wholebatch.errors import UsageError
from wholebatch.train.optimize import parameter_groups, probed_state
from wholebatch.train.settings import OptimizerConfig, TrainConfig
from wholebatch.window import UpdateWindow

Groups = Sequence[Mapping[str, Any]]


def settings_to_save(config: TrainConfig) -> dict[str, Any]:
    """The settings that the groups of a checkpoint were made with, as plain data."""
    optimizer = config.to_dict()["optimizer"]
    return {key: optimizer[key] for key in ("weight_decay", "options")}


def refuse_other_state(module: nn.Module, then: OptimizerConfig, now: OptimizerConfig) -> None:
    """Refuse settings with which the optimizer has other groups, or state that no checkpoint of it holds.

    Args:
        module: the model.
        then: the section ``[optimizer]`` that the run had.
        now: the one that it is resumed with, of the same class.

    Raises:
        UsageError: names the key and both values.
    """
    if _group_sizes(module, then) != _group_sizes(module, now):
        key = "weight_decay" if then.decayed == now.decayed else "decayed"
        raise UsageError(
            f"optimizer.{key} was {getattr(then, key)!r} and is {getattr(now, key)!r}: the parameters "
            f"would be in other groups than those of the checkpoint. Leave it out, or begin a new run"
        )
    if then.options != now.options and (new := _state_keys(now) - _state_keys(then)):
        raise UsageError(
            f"optimizer.options was {then.options} and is {now.options}: {now.name} would need "
            f"{', '.join(sorted(new))}, which no checkpoint of the run holds. Leave it out, or "
            f"begin a new run"
        )


def _group_sizes(module: nn.Module, settings: OptimizerConfig) -> list[int]:
    return [len(group["params"]) for group in parameter_groups(module, settings)]


def _state_keys(settings: OptimizerConfig) -> set[str]:
    """What an optimizer of torch keeps of a parameter; nothing is known of a class of one's own."""
    return {key for key, value in probed_state(settings).items() if value is not None}


def groups_as_built(window: UpdateWindow) -> list[dict[str, Any]]:
    """The hyperparameters of each group of the first optimizer as the settings gave them.

    To be taken before a checkpoint is loaded.
    """
    (optimizer,) = window.finish.optimizers
    return [
        {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]


def apply_settings(
    window: UpdateWindow, built: Groups, *, saved: Mapping[str, Any], settings: OptimizerConfig
) -> None:
    """Give a loaded optimizer and its schedule what the settings say now.

    The highest learning rate is that of the settings, and the rate of the next update follows from it
    and from what was consumed: ``rate = highest x share(consumed)``, with the schedule as it is now.

    Args:
        window: whose optimizer and schedule were loaded from a checkpoint.
        built: what :func:`groups_as_built` returned before.
        saved: what :func:`settings_to_save` returned when the checkpoint was made.
        settings: the section ``[optimizer]`` as it is now.

    Exactness: bit for bit what was loaded, where nothing was changed.
    """
    (optimizer,) = window.finish.optimizers
    changed = _changed(saved, settings)
    for group, fresh in zip(optimizer.param_groups, built, strict=True):
        group |= {key: fresh[key] for key in changed & fresh.keys() & group.keys()}
        group["initial_lr"] = fresh["initial_lr"]
    for declared in window.finish.schedules:
        scheduler = declared.scheduler
        assert isinstance(scheduler, LambdaLR), "make_schedule makes no other"
        scheduler.base_lrs = [group["initial_lr"] for group in optimizer.param_groups]
        rates = [
            highest * share(scheduler.last_epoch)
            for highest, share in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
        ]
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        scheduler._last_lr = rates


def _changed(saved: Mapping[str, Any], settings: OptimizerConfig) -> set[str]:
    """The keys of a group whose settings are others than they were."""
    # Settings that an older version did not save are taken for those of now.
    then, now = saved.get("options", settings.options), settings.options
    changed = {key for key in then.keys() | now.keys() if then.get(key) != now.get(key)}
    decay = saved.get("weight_decay", settings.weight_decay)
    return changed | ({"weight_decay"} if decay != settings.weight_decay else set())
