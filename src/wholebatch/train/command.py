"""``wholebatch train``: settings in, an exit code out."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from wholebatch.errors import UsageError
from wholebatch.report.output import OutputConsole, text_stream, write_json
from wholebatch.report.summary import SCHEMA_VERSION, run_summary
from wholebatch.run_folder import read_run
from wholebatch.train.config import config_text, load_config
from wholebatch.train.display import choose_display
from wholebatch.train.resuming import Earlier, earlier_of_restart, find_earlier, settings_of
from wholebatch.train.settings import TrainConfig

if TYPE_CHECKING:  # they load torch, which --print-config does without
    from wholebatch.train.signals import Stop
    from wholebatch.train.world import World


def train(
    config: Path | None = None,
    *,
    changes: Sequence[str] = (),
    resume: Path | str | None = None,
    print_config: bool = False,
    json_target: str | None = None,
) -> int:
    """Run the training job as settings and command line say.

    Args:
        config: a TOML file; None for the embedded default.
        changes: ``section.key=value`` each; they win over the file.
        resume: a run, or a checkpoint in one, to resume.
        print_config: write the settings, with what each means, and do nothing else.
        json_target: a file or "-" for the summary of the run as JSON; None for none.

    Returns:
        0 done, 1 the first batch was not equal, 129 ended by SIGHUP, 130 interrupted, 143 ended by SIGTERM.

    Raises:
        UsageError: settings that do not exist or do not fit; a run folder that holds a run.
        CheckpointError: the run can't be saved, or its checkpoint is damaged.
        JudgeError: the first batch could not be judged, or too many updates in a row were skipped.
        OutputClosedError: nobody reads the output any more.
    """
    earlier = None
    if resume is None:
        settings = load_config(config, changes)
    elif config is not None:
        raise UsageError(
            f"{config} and --resume {resume} both bring settings; a run is resumed with its own, and "
            f"--set changes them"
        )
    elif not str(resume):
        raise UsageError("--resume is empty: give the folder of a run, such as runs/NAME")
    else:
        earlier = find_earlier(Path(resume))
        settings = settings_of(earlier, changes)
    if print_config:
        text_stream(json_target).write(config_text(settings))
        return 0
    yield_idle_cores()
    from wholebatch.train.signals import stop_on_signal
    from wholebatch.train.world import join_world

    # Around all of it, so that a second SIGTERM, to a run that is saved already, changes no exit code.
    with stop_on_signal(on_edges=False) as stop, join_world() as world:
        return _train_in(world, settings, earlier, stop, json_target)


def _train_in(
    world: World, settings: TrainConfig, earlier: Earlier | None, stop: Stop, json_target: str | None
) -> int:
    """Everything between joining the ranks and leaving them; nothing of it outlives their group."""
    from wholebatch.train.job import run_job, unused_folder
    from wholebatch.train.parts import build_job, check_settings

    # The other ranks do all that the leading one does, and show it to nobody.
    console = OutputConsole(file=text_stream(json_target) if world.leads else io.StringIO())
    _refuse_other_settings(settings, world)
    # As the leading rank sees it: what is there may grow between one rank's look and another's.
    earlier = world.on_leader(lambda: earlier_of_restart(settings) if earlier is None else earlier)
    plan = check_settings(settings, world.ranks)
    if earlier is None:
        world.on_leader(lambda: unused_folder(settings))
    job = world.all_or_none(lambda: build_job(settings, world, plan))
    display = choose_display(
        console,
        num_updates=settings.run.num_updates,
        print_every_updates=settings.run.print_every_updates,
    )
    command = ["wholebatch", *sys.argv[1:]]
    result = run_job(job, display, command=command, earlier=earlier, stop=stop)
    world.on_leader(lambda: _write_summary(result.folder, result.exit_code, json_target))
    return result.exit_code


def _refuse_other_settings(settings: TrainConfig, world: World) -> None:
    """Refuse ranks that would part ways, or train different things.

    Raises:
        UsageError: on every rank; names the first setting that differs.
    """
    told = {
        f"{section}.{key}": value
        for section, keys in settings.to_dict().items()
        for key, value in keys.items()
    }
    if words := world.difference(told):
        raise UsageError(
            f"the ranks have different settings: {words}; start all of them with the same file and the "
            f"same --set"
        )


def yield_idle_cores() -> None:
    """Let torch's threads sleep while they wait for each other, unless the user chose otherwise.

    By default they spin, which is a little faster on an idle machine and up to 19 times slower on a
    busy one (measured: 1,000 against 19,000 items/s), where a spinning thread keeps the one that it
    waits for off its core. OpenMP reads the setting when torch is loaded; later it has no effect.
    """
    if "torch" not in sys.modules:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _write_summary(folder: Path | None, exit_code: int, json_target: str | None) -> None:
    if json_target is None:
        return
    nothing_trained = {"schema_version": SCHEMA_VERSION, "folder": None}
    facts = nothing_trained if folder is None else run_summary(read_run(folder))
    write_json({**facts, "command": "train", "exit_code": exit_code}, json_target)
