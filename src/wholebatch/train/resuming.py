"""The run that ``--resume`` names, or that torchrun's restart belongs to: its folder and settings."""

from __future__ import annotations

import copy
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wholebatch.errors import UsageError
from wholebatch.record import HEADER_FILE
from wholebatch.run_reader import Run, read_run
from wholebatch.run_resumption import number_of_resumption
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
        evaluated_at_start: splits whose loss before the first update it has recorded.
    """

    folder: Path
    settings: Mapping[str, Any]
    latest_settings: Mapping[str, Any]
    checkpoint: str | None
    num_records: int
    evaluated_at_start: frozenset[str] = frozenset()


def find_earlier(named: Path) -> Earlier:
    """The run that ``named`` is the folder of, or the run and the checkpoint in it.

    Raises:
        UsageError: neither, or a run of a version whose settings this one can't read.
        RecordError: a run that can't be read.
    """
    folder, checkpoint = named, None
    if not (folder / HEADER_FILE).is_file() and named.parent.name == CHECKPOINTS:
        folder = named.parent.parent
        # A run that torchrun restarts is further than the checkpoint that it began with.
        checkpoint = None if is_restarted() else named.name
    if not (folder / HEADER_FILE).is_file():
        raise UsageError(
            f"--resume {named}: there is no {HEADER_FILE} in it, so it is no run; give a run's folder, "
            f"such as runs/NAME, or a checkpoint in it, runs/NAME/{CHECKPOINTS}/update-00000050"
        )
    run = read_run(folder)
    return Earlier(
        folder=folder,
        settings=_settings_after(run, number_of_resumption(run) - 1),
        latest_settings=_settings_after(run, len(run.resumptions)),
        checkpoint=checkpoint,
        num_records=len(run.records),
        evaluated_at_start=frozenset(e.split for e in run.evaluations if e.samples_consumed == 0),
    )


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


def refuse_changes(earlier: Earlier, config: TrainConfig) -> None:
    """Refuse what would make it another run, or would do nothing, before anything is built.

    Raises:
        UsageError: another optimizer, or another first loss scale; names both.
    """
    then = config_from_dict(dict(earlier.latest_settings), source=f"the settings of {earlier.folder}")
    before, now = then.optimizer.name, config.optimizer.name
    if before != now:
        raise UsageError(
            f"optimizer.name was {before!r} and is {now!r}: the state of one is none of the other. Leave "
            f"it out to resume {earlier.folder}, or begin a new run"
        )
    scale, new_scale = then.precision.initial_loss_scale, config.precision.initial_loss_scale
    if scale != new_scale:
        raise UsageError(
            f"precision.initial_loss_scale was {scale} and is {new_scale}: a run that is resumed has the "
            f"loss scale of its checkpoint, so the change would do nothing; leave it out"
        )


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
