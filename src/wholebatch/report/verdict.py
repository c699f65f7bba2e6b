"""``wholebatch verify``: find the user's problem, judge it (on several ranks where asked), tell it.

With ``--ranks N`` the command starts itself again under ``torch.distributed.run``, N processes on this
machine; their first rank hands the verdict back in a file, and the parent tells it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import AbstractContextManager, redirect_stdout
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console

from wholebatch.errors import JudgeError, UsageError, WholebatchError
from wholebatch.ranks.group import joined_group
from wholebatch.record import finite
from wholebatch.report.output import text_stream, write_json
from wholebatch.report.verdict_text import render
from wholebatch.targets import find_target, guarded
from wholebatch.verify import verify_window
from wholebatch.verify.together import together
from wholebatch.verify.trial import check_seed, seeded

# Where the ranks of ``--ranks N`` leave the verdict for the process that started them.
_HAND_BACK = "WHOLEBATCH_VERDICT_FILE"
_NEEDED = ("model", "loss_fn", "batch")
_OPTIONAL = (
    "make_optimizer",
    "clip_grad_norm",
    "accumulate_in",
    "weighting",
    "coefficients",
    "objective",
    "collate",
    "splits",
    "seed",
)


def verify_command(
    target: str,
    *,
    ranks: int = 1,
    splits: str | None = None,
    seed: int | None = None,
    json_target: str | None = None,
) -> int:
    """Judge the problem at ``target`` and tell the verdict.

    Args:
        target: ``module:name`` or ``file.py:name``, a function without arguments.
        ranks: processes to run the window on.
        splits: ``"2+3,1+1+1+1+1"``, or ``None`` for those of the problem, else sampled ones.
        seed: decides sampled splits and random state; ``None`` for that of the problem, else 0.
        json_target: file for the JSON, ``"-"`` for stdout, or ``None``.

    Returns:
        0 equal, 1 not equal. Errors carry 2 (usage) and 3 (could not judge).

    Raises:
        UsageError: the target, the splits or the number of ranks.
        JudgeError: no verdict could be reached.
    """
    if ranks < 1:
        raise UsageError(f"--ranks {ranks} is not a number of processes; give 1 or more")
    if seed is not None:
        check_seed(seed)
    running = int(os.environ.get("WORLD_SIZE", "1"))
    if running > 1:
        with _prints_beside(json_target):
            verdict = _on_this_rank(target, splits=splits, seed=seed)
        speaks = int(os.environ["RANK"]) == 0 and _HAND_BACK not in os.environ
        if not speaks:  # to torchrun anything but 0 from a rank that hands back would be a crash
            return 0 if _HAND_BACK in os.environ else int(not verdict["equal"])
        return _tell(verdict, target, json_target)
    chosen = None if splits is None else parse_splits(splits)
    if ranks > 1:
        verdict = _on_ranks(target, ranks=ranks, splits=splits, seed=seed)
    else:
        with _prints_beside(json_target):
            verdict = judge(target, splits=chosen, seed=seed)
    return _tell(verdict, target, json_target)


def _prints_beside(json_target: str | None) -> AbstractContextManager[Any]:
    """While the user's code runs: what it prints goes where the words go, never among the JSON."""
    return redirect_stdout(text_stream(json_target))


def judge(target: str, *, splits: list[list[int]] | None, seed: int | None) -> dict[str, Any]:
    """Load the problem, run :func:`wholebatch.verify.verify_window` and return the verdict's JSON keys.

    Args:
        target: as for :func:`verify_command`.
        splits: sizes in samples; ``None`` for the problem's own, else sampled ones.
        seed: from which the problem is built and the splits are sampled; ``None`` for 0 and its own.

    Returns:
        The keys of ``wholebatch verify --json``.
    """
    with seeded(seed or 0):  # every rank builds the same model and batch, also where nobody seeds them
        problem = together(lambda: load_problem(target))
    options = {key: problem[key] for key in _OPTIONAL if key in problem}
    if seed is not None:
        options["seed"] = seed
    if splits is not None:
        options["splits"] = splits
    found = verify_window(problem["model"], problem["loss_fn"], problem["batch"], **options)
    verdict: dict[str, Any] = finite(found.to_dict())
    return verdict


def parse_splits(text: str) -> list[list[int]]:
    """Read ``"2+3,1+1+1+1+1"`` as ``[[2, 3], [1, 1, 1, 1, 1]]``.

    Raises:
        UsageError: anything else; repeats the text.
    """
    try:
        return [[int(size) for size in split.split("+")] for split in text.split(",")]
    except ValueError:
        raise UsageError(
            f"--splits {text!r} is not a list of micro-batch sizes in samples; write them as "
            f"2+3,1+1+1+1+1 (a plus between micro-batches, a comma between splits)"
        ) from None


def load_problem(target: str) -> dict[str, Any]:
    """Import ``module:name`` or ``file.py:name``, call it, and return its parts by name.

    Args:
        target: names a function without arguments that returns ``(model, loss_fn, batch)``, or these
            with a dict of options as a fourth, or one dict of all.

    Returns:
        ``model``, ``loss_fn``, ``batch`` and the options that were given.

    Raises:
        UsageError: nothing of that name.
        JudgeError: importing or calling it failed, or it returned something else.
    """
    found = find_target(target, what="a problem")
    if callable(found):
        found = guarded(found, f"{target}() failed")
    return _parts(found, target)


def _parts(found: Any, target: str) -> dict[str, Any]:
    if isinstance(found, Mapping):
        parts = dict(found)
    elif hasattr(found, "_asdict"):
        parts = dict(found._asdict())
    elif isinstance(found, tuple) and len(found) in (3, 4):
        options = found[3] if len(found) == 4 else {}
        if not isinstance(options, Mapping):
            raise JudgeError(
                f"the fourth part that {target} returned is of type {type(options).__name__}, not dict"
            )
        parts = dict(zip(_NEEDED, found, strict=False)) | dict(options)
    else:
        raise JudgeError(
            f"{target} returned a {type(found).__name__}; it has to return (model, loss_fn, batch), or a "
            f"dict with these and any of {', '.join(_OPTIONAL)}"
        )
    missing = [key for key in _NEEDED if key not in parts]
    unknown = sorted(set(parts) - set(_NEEDED) - set(_OPTIONAL))
    if missing or unknown:
        raise JudgeError(
            f"{target} returned missing {missing} and unknown {unknown}; the keys are "
            f"{', '.join(_NEEDED)} and, where wanted, {', '.join(_OPTIONAL)}"
        )
    return parts


# Several ranks --------------------------------------------------------------------------------------


def _on_ranks(target: str, *, ranks: int, splits: str | None, seed: int | None) -> dict[str, Any]:
    """Start this command again on N processes, and read back what their first rank found."""
    with tempfile.TemporaryDirectory(prefix="verdict-") as folder:
        answer = Path(folder) / "verdict.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [
            "--nproc-per-node",
            str(ranks),
            "-m",
            "wholebatch",
            "verify",
            target,
        ]
        command += [] if seed is None else ["--seed", str(seed)]
        command += [] if splits is None else ["--splits", splits]
        environment = {**os.environ, _HAND_BACK: str(answer)}
        done = subprocess.run(
            command,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        if not answer.is_file():
            last = "\n".join(done.stdout.strip().splitlines()[-15:])
            raise JudgeError(
                f"the {ranks} ranks ended with exit code {done.returncode} and no verdict:\n{last}"
            )
        told: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
    if "error" in told:
        error = JudgeError(told["error"])
        error.exit_code = told["exit_code"]
        raise error
    return told


def _on_this_rank(target: str, *, splits: str | None, seed: int | None) -> dict[str, Any]:
    """Judge as one rank of a job that torchrun started, and hand back where that is asked for."""
    answer = os.environ.get(_HAND_BACK)
    try:
        with joined_group(timeout=timedelta(minutes=10)):
            verdict = judge(target, splits=None if splits is None else parse_splits(splits), seed=seed)
    except WholebatchError as error:
        if answer is None:
            raise
        verdict = {"error": str(error), "exit_code": error.exit_code}
    if answer is not None and int(os.environ["RANK"]) == 0:
        Path(answer).write_text(json.dumps(verdict, allow_nan=False), encoding="utf-8")
    return verdict


# Telling --------------------------------------------------------------------------------------------


def _tell(verdict: Mapping[str, Any], target: str, json_target: str | None) -> int:
    render(verdict, target, Console(file=text_stream(json_target), highlight=False))
    write_json(verdict, json_target)
    return 0 if verdict["equal"] else 1
