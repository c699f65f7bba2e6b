"""What runs in the processes of a trial: one job, begun or gone on with, whole or broken."""

from __future__ import annotations

import importlib
import io
import multiprocessing
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

from rich.console import Console

from campaign.cases import Fault
from campaign.places import broken
from wholebatch.ranks import deepspeed
from wholebatch.ranks.pipeline_ranks import PipelineRanks
from wholebatch.ranks.several import ShardingRanks
from wholebatch.train.config import config_from_dict
from wholebatch.train.display import PlainDisplay
from wholebatch.train.job import run_job, unused_folder
from wholebatch.train.parts import build_job, check_settings
from wholebatch.train.resuming import find_earlier, settings_of
from wholebatch.train.signals import stop_on_signal
from wholebatch.train.world import join_world


def run_one(
    rank: int, n: int, tables: dict[str, Any] | None, resume: str | None, faults: list[Fault], witness: str
) -> int:
    """Begin the run that ``tables`` set up, or go on with one, as ``wholebatch train`` does.

    Returns:
        The exit code of the job.
    """
    # As in a job of its own: there may be data workers, and they are forked, which takes the faults along.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    multiprocessing.set_start_method("fork", force=True)
    # As in a terminal, even where the campaign itself runs under nohup or in the background.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    warnings.filterwarnings("ignore", message=".*an older checkpoint could not be removed")
    # A rank that failed beside others in a collective gives them up sooner than in earnest.
    ShardingRanks.patience_s = PipelineRanks.patience_s = deepspeed.PATIENCE_S = 3.0
    earlier = None
    if resume is not None:
        earlier = find_earlier(Path(resume))
        config = settings_of(earlier, [])
    else:
        assert tables is not None
        config = config_from_dict(tables)
    if config.parallel.strategy == "deepspeed":
        sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "peers"))
        importlib.import_module("deepspeed_rounds").deepspeed_here(rank, n)
    mine = [fault for fault in faults if fault.rank == rank]
    # As the command line does: around all of it, and the rest of it in the same order.
    with stop_on_signal(on_edges=False) as stop, join_world() as world:
        plan = check_settings(config, world.ranks)
        if earlier is None:
            world.on_leader(lambda: unused_folder(config))
        job = world.all_or_none(lambda: build_job(config, world, plan))
        display = PlainDisplay(
            Console(file=io.StringIO(), width=200),
            num_updates=config.run.num_updates,
            print_every_updates=1,
        )
        with broken(mine, Path(config.run.folder), Path(f"{witness}-{rank}")):
            return run_job(
                job, display, command=["wholebatch", "train"], earlier=earlier, stop=stop
            ).exit_code
