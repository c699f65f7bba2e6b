"""The command line: plan, train, measure, verify, audit, show.

Exit codes everywhere: 0 done, 1 a negative verdict, 2 usage, 3 could not judge or go on, 129
ended by SIGHUP, 130 interrupted, 141 the output was closed, 143 ended by SIGTERM; torchrun turns all but
0 into 1. Every command takes ``--json FILE`` or ``--json -``.
Nothing heavy is imported before a command needs it, so that ``wholebatch plan`` answers without torch.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from wholebatch.errors import PlanError, UsageError, WholebatchError
from wholebatch.report.output import (
    OutputClosedError,
    leave_closed_output,
    ready_streams,
    tell_error,
    told_when_not_written,
)

INTERRUPTED = 130

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Split the batch any way you like; the update is the same.",
    epilog="Exit codes: 0 done, 1 a negative verdict, 2 usage, 3 could not judge or go on, 129 ended by "
    "SIGHUP, 130 interrupted, 141 nobody reads the output any more, 143 ended by SIGTERM. torchrun "
    "itself turns all but 0 into 1.",
)

JsonTarget = Annotated[
    str | None,
    typer.Option("--json", metavar="FILE|-", help="Write the result as JSON; - is stdout, text to stderr."),
]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Args:
        arguments: the words after the program's name; those of the process where None.

    Returns:
        0 done, 1 a negative verdict, 2 usage, 3 could not judge or go on, 129 ended by SIGHUP, 130
        interrupted, 141 the output was closed, 143 ended by SIGTERM.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    if not words:
        _run(["--help"])
        return PlanError.exit_code  # nothing was asked for; the help says what can be
    ready_streams()
    try:
        outcome = _run(words)
    except OutputClosedError as closed:
        leave_closed_output()
        with contextlib.suppress(OSError):
            tell_error(f"stopped: {closed}")
        return closed.exit_code
    except WholebatchError as problem:
        tell_error(f"error: {problem}")
        return problem.exit_code
    except (KeyboardInterrupt, typer.Abort):
        tell_error("interrupted")
        return INTERRUPTED
    except Exception as problem:
        # Mistakes in the words themselves; every other exception is ours to fix and keeps its traceback.
        if not hasattr(problem, "exit_code") or not hasattr(problem, "format_message"):
            raise
        at_hand = getattr(getattr(problem, "ctx", None), "command_path", "wholebatch")
        tell_error(f"error: {problem.format_message()}\nTry: {at_hand} --help")
        return int(problem.exit_code)
    return outcome if isinstance(outcome, int) else 0


def _run(words: Sequence[str]) -> Any:
    """Run a command; OutputClosedError where what it writes is not read, or can't be written."""
    # Not through typer's own main, which ends the program on Ctrl-C and on a closed output.
    command = typer.main.get_command(app)
    try:
        with told_when_not_written():
            context = command.make_context("wholebatch", list(words))
        with context:
            outcome = command.invoke(context)
        with told_when_not_written():
            sys.stdout.flush()
    except typer.Exit as end:
        return end.exit_code
    except BrokenPipeError as closed:
        raise OutputClosedError("the output was closed before the end") from closed
    return outcome


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(version("wholebatch"))
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Split the batch any way you like; the update is the same."""


PLAN_EPILOG = """\b
Examples:
  wholebatch plan --global-batch-samples 512 --micro-batch-samples 4 --ranks 16 --tensor-parallel 2
  wholebatch plan --global-batch-items 3145728 --items-per-sample 2048 --micro-batch-samples 2 --ranks 64
  wholebatch plan --micro-batch-samples 2 --micro-batches-per-window 8 --replicas 2 --against 4x4x2
  wholebatch plan --global-batch-samples 32 --micro-batch-samples 4 --dataset-samples 1000 --epochs 3
"""


@app.command(epilog=PLAN_EPILOG)
def plan(
    global_batch_samples: Annotated[int | None, typer.Option(help="Samples of one update.")] = None,
    global_batch_items: Annotated[int | None, typer.Option(help="Items (tokens) of one update.")] = None,
    items_per_sample: Annotated[int | None, typer.Option(help="Items in every sample.")] = None,
    micro_batch_samples: Annotated[int | None, typer.Option(help="m, samples of one forward.")] = None,
    micro_batches_per_window: Annotated[int | None, typer.Option(help="A, on one rank.")] = None,
    ranks: Annotated[int | None, typer.Option(help="Processes of the job.")] = None,
    replicas: Annotated[int | None, typer.Option(help="D, data-parallel copies of the model.")] = None,
    tensor_parallel: Annotated[int, typer.Option(help="Ranks that share a layer.")] = 1,
    pipeline_parallel: Annotated[int, typer.Option(help="Pipeline stages.")] = 1,
    context_parallel: Annotated[int, typer.Option(help="Ranks that share a sample's positions.")] = 1,
    expert_parallel: Annotated[int, typer.Option(help="Ranks that share a layer's experts.")] = 1,
    pipeline_schedule: Annotated[
        str, typer.Option(help="gpipe, 1f1b, interleaved_1f1b or zero_bubble.")
    ] = "1f1b",
    pipeline_virtual_stages: Annotated[int, typer.Option(help="Model parts on each pipeline rank.")] = 1,
    tail: Annotated[str, typer.Option(help="partial or drop: samples left at an epoch's end.")] = "partial",
    dataset_samples: Annotated[int | None, typer.Option(help="Samples of the data set.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the data; 1 if not given.")] = None,
    warmup_updates: Annotated[int | None, typer.Option(help="Warm-up, from the start, in updates.")] = None,
    warmup_samples: Annotated[int | None, typer.Option(help="Warm-up, from the start, in samples.")] = None,
    log_updates: Annotated[int | None, typer.Option(help="Log every so many updates.")] = None,
    log_samples: Annotated[
        int | None, typer.Option(help="Log every so many samples, rounded up to updates.")
    ] = None,
    evaluation_updates: Annotated[int | None, typer.Option(help="Evaluate every so many updates.")] = None,
    evaluation_samples: Annotated[
        int | None, typer.Option(help="Evaluate every so many samples, rounded up to updates.")
    ] = None,
    save_updates: Annotated[int | None, typer.Option(help="Save every so many updates.")] = None,
    save_samples: Annotated[
        int | None, typer.Option(help="Save every so many samples, rounded up to updates.")
    ] = None,
    against: Annotated[
        str | None, typer.Option(metavar="mxAxD", help="Another plan, such as 4x8x2, to compare with.")
    ] = None,
    json_target: JsonTarget = None,
) -> int:
    """Plan a global batch: derive what is missing, refuse a remainder."""
    given = dict(locals())  # the options under their names, which are plan_batch's own
    from wholebatch.report.planned import plan_command

    return plan_command(given)


TRAIN_EPILOG = """\b
Examples:
  wholebatch train
  wholebatch train my_run.toml --set batch.micro_batch_samples=2 --set run.folder=runs/first
  wholebatch train --print-config > my_run.toml
  wholebatch train --resume runs/first
  torchrun --nproc-per-node 2 -m wholebatch train
"""


@app.command(epilog=TRAIN_EPILOG)
def train(
    config: Annotated[
        Path | None,
        typer.Argument(metavar="[CONFIG.toml]", help="Settings; the embedded default if not given."),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change a setting; may be repeated."),
    ] = None,
    resume: Annotated[
        str | None, typer.Option(metavar="RUN", help="Go on with a run, or from a checkpoint in it.")
    ] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Write the settings, each with its meaning, and end.")
    ] = False,
    json_target: JsonTarget = None,
) -> int:
    """Train a model; prove first that its update is right."""
    from wholebatch.train.command import train as run

    return run(
        config,
        changes=changes or (),
        resume=resume,
        print_config=print_config,
        json_target=json_target,
    )


MEASURE_EPILOG = """\b
Examples:
  wholebatch measure --cost
  wholebatch measure my_run.toml --cost --set batch.tokens_per_micro_batch=8192
"""


@app.command(epilog=MEASURE_EPILOG)
def measure(
    config: Annotated[
        Path | None,
        typer.Argument(metavar="[CONFIG.toml]", help="Settings of the training job; else the default."),
    ] = None,
    cost: Annotated[
        bool, typer.Option("--cost", help="Time micro-batches by their size, to balance replicas.")
    ] = False,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change a setting; may be repeated."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often each size is timed.")] = 5,
    json_target: JsonTarget = None,
) -> int:
    """Measure what a micro-batch costs on this machine."""
    if not cost:
        raise UsageError("say what to measure: --cost, what a micro-batch costs by its size")
    from wholebatch.train.command import yield_idle_cores

    yield_idle_cores()  # before torch is loaded
    from wholebatch.train.measure import measure_cost_command

    return measure_cost_command(config, changes=changes or (), rounds=rounds, json_target=json_target)


VERIFY_EPILOG = """\b
Examples:
  wholebatch verify my_module:problem
  wholebatch verify examples/verify_equal.py:problem --splits 6+6,1+4+7
  wholebatch verify my_module:problem --ranks 2 --json verdict.json
\b
The function returns (model, loss_fn, batch); loss_fn(model, batch) returns (loss_sum, num_items).
Exit codes: 0 equal, 1 not equal, 2 usage, 3 could not judge or go on, 130 interrupted.
"""


@app.command(epilog=VERIFY_EPILOG)
def verify(
    target: Annotated[str, typer.Argument(metavar="MODULE:NAME", help="Or FILE.py:NAME.")],
    splits: Annotated[
        str | None, typer.Option(metavar="2+3,1+4", help="Micro-batch sizes; sampled if not given.")
    ] = None,
    ranks: Annotated[int, typer.Option(help="Processes that run the window together.")] = 1,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Decides problem, sampled splits and random state; by default the problem's own or 0."
        ),
    ] = None,
    json_target: JsonTarget = None,
) -> int:
    """Tell whether a split update equals the big batch, or why not."""
    from wholebatch.report.verdict import verify_command

    return verify_command(target, ranks=ranks, splits=splits, seed=seed, json_target=json_target)


AUDIT_EPILOG = """\b
Examples:
  wholebatch audit train.py --lr 0.1
  wholebatch audit --updates 2 --json audit.json -m my_package.train config.yaml
  torchrun --nproc-per-node 2 -m wholebatch audit train.py
  wholebatch audit --list
\b
Options of the audit come before the script; all words after it are the script's own.
Exit codes: 0 nothing wrong, 1 something is, 2 usage, 3 could not judge, 130 interrupted.
"""


@app.command(epilog=AUDIT_EPILOG, context_settings={"allow_interspersed_args": False})
def audit(
    script: Annotated[
        str | None, typer.Argument(metavar="SCRIPT", help="A training script, run as it is.")
    ] = None,
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", help="The script's own words, options too.")
    ] = None,
    module: Annotated[
        bool, typer.Option("-m", "--module", help="SCRIPT is a module's name, as after python -m.")
    ] = False,
    updates: Annotated[
        int, typer.Option(min=1, help="Updates to watch; then the script runs on alone.")
    ] = 4,
    skip_updates: Annotated[int, typer.Option(min=0, help="Updates before the first that is watched.")] = 0,
    expect_micro_batches: Annotated[
        int | None, typer.Option(min=1, metavar="A", help="Micro-batches that an update should have.")
    ] = None,
    expect_global_batch: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Samples of an update, all ranks together."),
    ] = None,
    replay: Annotated[
        bool,
        typer.Option("--replay/--no-replay", help="Run a window again where its loss can't be read."),
    ] = True,
    shared_folder: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="That all ranks see, where they are on several machines."),
    ] = None,
    stall_seconds: Annotated[
        float,
        typer.Option(min=0, metavar="S", help="End a job whose ranks wait for others so long; 0 never."),
    ] = 60.0,
    stop: Annotated[
        bool, typer.Option("--stop", help="End the script after the updates that are watched.")
    ] = False,
    list_kinds: Annotated[
        bool, typer.Option("--list", help="Tell what an audit can find, and end.")
    ] = False,
    json_target: JsonTarget = None,
) -> int:
    """Watch a training script; name what is wrong with its updates."""
    from wholebatch.report.audited import audit_command, list_command

    if list_kinds:
        return list_command(json_target=json_target)
    return audit_command(
        [*([] if script is None else [script]), *(arguments or [])],
        module=module,
        updates=updates,
        skip_updates=skip_updates,
        expect_micro_batches=expect_micro_batches,
        expect_global_batch_samples=expect_global_batch,
        replay=replay,
        shared_folder=shared_folder,
        stall_seconds=stall_seconds,
        stop=stop,
        json_target=json_target,
    )


SHOW_EPILOG = """\b
Examples:
  wholebatch show runs/NAME
  wholebatch show runs/NAME --follow
  wholebatch show runs/A runs/B --by items
  wholebatch show runs
"""


@app.command(epilog=SHOW_EPILOG)
def show(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN", help="Folder of a run, of two to compare, or of runs to list."),
    ],
    by: Annotated[
        str | None,
        typer.Option(
            metavar="samples|items|updates|seconds", help="What two runs are compared over; else what fits."
        ),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Watch the run until it ends.")] = False,
    json_target: JsonTarget = None,
) -> int:
    """Tell what a run did, or where two differ."""
    from wholebatch.report.show import show as show_runs

    return show_runs(runs, by=by, follow_it=follow, json_target=json_target)
