"""The run that ``--resume`` names, or that torchrun's restart belongs to: its folder and settings."""

from __future__ import annotations

import copy
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wholebatch.checkpoint_folder import checkpoint_paths, update_of
from wholebatch.errors import RecordError, UsageError
from wholebatch.record import HEADER_FILE
from wholebatch.run_folder import Run, read_run
from wholebatch.run_folder.resumption import number_of_resumption
from wholebatch.train.config import config_from_dict, with_changes
from wholebatch.train.settings import TrainConfig

CHECKPOINTS = "checkpoints"


@dataclass(frozen=True, kw_only=True, slots=True)
class Earlier:
    """A run to resume.

    Args:
        folder: of the run.
        settings: that it had before the resumption to come, header and earlier resumptions together.
        latest_settings: the same with what was changed by one that was cut short before its first update.
        checkpoint: name of the one to resume from; None for the newest.
        num_records: updates that it has recorded.
        saved_updates: of the newest checkpoint, or that which is named; 0 where there is none.
        done: whether it ended as done.
        evaluated_at_start: splits whose loss before the first update it has recorded.
        layout: ranks and parallel degrees that it had before the resumption to come.
    """

    folder: Path
    settings: Mapping[str, Any]
    latest_settings: Mapping[str, Any]
    checkpoint: str | None
    num_records: int
    saved_updates: int = 0
    done: bool = False
    evaluated_at_start: frozenset[str] = frozenset()
    layout: Mapping[str, int] = field(default_factory=dict)


def find_earlier(named: Path) -> Earlier:
    """The run that ``named`` is the folder of, or the run and the checkpoint in it.

    Raises:
        UsageError: neither, or a run of a version whose settings this one can't read.
        RecordError: a run that can't be read.
    """
    folder, checkpoint = named, None
    here = named.resolve()  # "." has no name, and "update-00000050" alone no parent
    if (named / HEADER_FILE).is_file():
        folder = named if named.name else here
    elif here.parent.name == CHECKPOINTS:
        folder = named.parent.parent if named.parent.name == CHECKPOINTS else here.parent.parent
        # A run that torchrun restarts is further than the checkpoint that it began with.
        checkpoint = None if is_restarted() else here.name
    if not (folder / HEADER_FILE).is_file():
        raise UsageError(
            f"--resume {named}: there is no {HEADER_FILE} in it, so it is no run; give a run's folder, "
            f"such as runs/NAME, or a checkpoint in it, runs/NAME/{CHECKPOINTS}/update-00000050"
        )
    run = read_run(folder)
    saved = checkpoint_paths(folder / CHECKPOINTS)
    of_it = saved[-1:] if checkpoint is None else [path for path in saved if path.name == checkpoint]
    return Earlier(
        folder=folder,
        settings=_settings_after(run, number_of_resumption(run) - 1),
        latest_settings=_settings_after(run, len(run.resumptions)),
        checkpoint=checkpoint,
        num_records=len(run.records),
        saved_updates=next((update_of(path) or 0 for path in of_it), 0),
        done=run.end is not None and run.end.reason == "done",
        evaluated_at_start=frozenset(e.split for e in run.evaluations if e.samples_consumed == 0),
        layout=_layouts(run)[number_of_resumption(run) - 1],
    )


def _layouts(run: Run) -> list[dict[str, int]]:
    return [run.header.layout, *(each.layout for each in run.resumptions)]


def _settings_after(run: Run, resumptions: int) -> dict[str, Any]:
    """The settings that the run began with, changed as its first few resumptions changed them."""
    settings = copy.deepcopy(dict(run.header.settings))
    for each in run.resumptions[:resumptions]:
        for name, (_, value) in each.changed_settings.items():
            section, key = name.split(".", 1)
            settings.setdefault(section, {})[key] = value
    return settings


def settings_of(earlier: Earlier, changes: Sequence[str]) -> TrainConfig:
    """The settings of the run, with what was changed on the command line.

    Raises:
        UsageError: a change that does not fit, or of where the run is.
    """
    folder = str(earlier.folder)
    config = config_from_dict(
        with_changes(dict(earlier.latest_settings), changes), source=f"the settings of {folder}"
    )
    if any(change.replace(" ", "").startswith("run.folder=") for change in changes):
        raise UsageError(
            f"--set run.folder and --resume {folder} name two folders; a run is resumed where it is. To "
            f"begin another from its settings, use --print-config"
        )
    return config


def settings_before(earlier: Earlier) -> TrainConfig:
    """The settings that the run had."""
    return config_from_dict(dict(earlier.latest_settings), source=f"the settings of {earlier.folder}")


def refuse_changes(earlier: Earlier, config: TrainConfig) -> None:
    """Refuse what would make it another run, or would do nothing, before anything is loaded.

    Raises:
        UsageError: another optimizer or first loss scale, a loss scale or an average on one side only, or
            fewer updates than it has; names both.
    """
    then, folder = settings_before(earlier), earlier.folder
    before, now = then.optimizer.name, config.optimizer.name
    if before != now:
        raise UsageError(
            f"optimizer.name was {before!r} and is {now!r}: the state of one is none of the other. Leave "
            f"it out to resume {folder}, or begin a new run"
        )
    _refuse_a_switch(then, config, folder)
    scale, new_scale = then.precision.initial_loss_scale, config.precision.initial_loss_scale
    if scale != new_scale:
        raise UsageError(
            f"precision.initial_loss_scale was {scale} and is {new_scale}: a run that is resumed has the "
            f"loss scale of its checkpoint, so the change would do nothing; leave it out"
        )
    if config.run.num_updates < earlier.saved_updates:
        raise UsageError(
            f"run.num_updates is {config.run.num_updates}, and {folder} is resumed after "
            f"{earlier.saved_updates} updates; give more, or name an earlier checkpoint of it"
        )


def _refuse_a_switch(then: TrainConfig, now: TrainConfig, folder: Path) -> None:
    """Refuse to begin or to drop what has a state of its own in every checkpoint of the run."""
    before, after = then.precision.autocast, now.precision.autocast
    if (before == "float16") != (after == "float16"):
        raise UsageError(
            f'precision.autocast was "{before}" and is "{after}": float16 alone has a loss scale, which '
            f"the checkpoints of {folder} {'hold' if before == 'float16' else 'do not hold'}. Leave it "
            f"out, or begin a new run"
        )
    share, new_share = then.average.decay_per_update, now.average.decay_per_update
    if (share == 0.0) != (new_share == 0.0):
        raise UsageError(
            f"average.decay_per_update was {share} and is {new_share}: the checkpoints of {folder} "
            f"{'hold an average' if share else 'hold no average'}, and one can't be "
            f"{'dropped' if share else 'begun'} in between. Leave it out, or begin a new run"
        )


def refuse_what_moved_on(earlier: Earlier) -> None:
    """Refuse a run that another program has written since it was read.

    Raises:
        RecordError: it has other records or resumptions now.
    """
    run = read_run(earlier.folder)
    settings = _settings_after(run, len(run.resumptions))
    if (len(run.records), settings) != (earlier.num_records, earlier.latest_settings):
        raise RecordError(
            f"{earlier.folder} had {earlier.num_records} records when this program began and has "
            f"{len(run.records)}: another one resumed it. Give the command again"
        )


def nothing_left(earlier: Earlier, config: TrainConfig) -> bool:
    """Whether the run is done, with all updates that the settings ask for saved and recorded."""
    num_updates = config.run.num_updates
    return earlier.done and earlier.saved_updates == num_updates == earlier.num_records


def earlier_of_restart(config: TrainConfig) -> Earlier | None:
    """The run that torchrun restarts, where it does; None where this is a first start.

    Raises:
        UsageError: torchrun may restart the job, and the settings do not say which run that would be.
    """
    if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) == 0:
        return None
    if not config.run.folder:
        raise UsageError(
            f"torchrun --max-restarts={os.environ['TORCHELASTIC_MAX_RESTARTS']} may start this job again, "
            f"and with run.folder empty nobody would know which run to resume; give --set "
            f"run.folder=runs/NAME"
        )
    folder = Path(config.run.folder).expanduser()
    if not is_restarted() or not (folder / HEADER_FILE).is_file():
        return None
    # A run of somebody else was refused in the first start, and is to be refused in this one.
    return find_earlier(folder) if read_run(folder).header.launch == launch() else None


def is_restarted() -> bool:
    """Whether torchrun has started this job before, and starts it again because a rank failed."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def launch() -> dict[str, str]:
    """What tells this torchrun from all others, the same in each of its starts; empty without one.

    Its run id, or where it was given none the host and number of the process that starts the ranks.
    """
    run_id = os.environ.get("TORCHELASTIC_RUN_ID")
    if run_id is None:
        return {}
    if run_id == "none":  # torchrun's word for it
        return {"host": socket.gethostname(), "process": str(os.getppid())}
    return {"run_id": run_id}
