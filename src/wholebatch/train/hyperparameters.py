"""Settings of the optimizer and the schedule that were changed when a run was resumed.

A checkpoint holds an optimizer's hyperparameters in its groups, as torch saves them, and loading puts
those of then back. What the settings say now is put in their place here, and nothing else: a class of
one's own may keep state in its groups too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim.lr_scheduler import LambdaLR

from wholebatch.train.settings import OptimizerConfig, TrainConfig
from wholebatch.window import UpdateWindow

Groups = Sequence[Mapping[str, Any]]


def settings_to_save(config: TrainConfig) -> dict[str, Any]:
    """The settings that the groups of a checkpoint were made with, as plain data."""
    optimizer = config.to_dict()["optimizer"]
    return {key: optimizer[key] for key in ("weight_decay", "options")}


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
    then, now = saved["options"], settings.options
    changed = {key for key in then.keys() | now.keys() if then.get(key) != now.get(key)}
    return changed | ({"weight_decay"} if saved["weight_decay"] != settings.weight_decay else set())
