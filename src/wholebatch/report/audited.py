"""``wholebatch audit``: run somebody's script under the watch, then tell what was seen.

What the script prints stays as it is; the report comes after it. With ``--json -`` stdout carries the JSON
alone, and what the script prints goes to stderr, that of its subprocesses included.
"""

from __future__ import annotations

import contextlib
import os
import sys
import textwrap
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from wholebatch.audit.judge.evidence import Judgement
from wholebatch.audit.report import STYLES, page_of, render_report, report_text
from wholebatch.audit.schema import SCHEMA_VERSION, judgement_document
from wholebatch.errors import UsageError
from wholebatch.report.output import STDOUT, text_stream, write_json

if TYPE_CHECKING:
    from wholebatch.audit.script import AuditedScript

CLEAN, WRONG, NOT_JUDGED = 0, 1, 3
_PACKAGE = Path(__file__).resolve().parents[1]


def audit_command(
    words: Sequence[str],
    *,
    module: bool = False,
    updates: int = 4,
    skip_updates: int = 0,
    expect_micro_batches: int | None = None,
    expect_global_batch_samples: int | None = None,
    replay: bool = True,
    shared_folder: Path | None = None,
    stall_seconds: float = 60.0,
    stop: bool = False,
    json_target: str | None = None,
) -> int:
    """Audit a script and tell the result, on the first rank.

    Args:
        words: the script, or the module, and its own arguments.
        module: whether the first word is a module's name.
        updates, skip_updates: how many are watched, and how many before them are not.
        expect_micro_batches: A that is meant.
        expect_global_batch_samples: samples of one update over all replicas that are meant.
        replay: whether a window whose loss can't be read is run again.
        shared_folder: seen by all ranks; ``None`` for one of this machine.
        stop: whether the script ends after the updates that are watched.
        stall_seconds: for which all ranks may wait for each other before the job is ended; 0 for ever.
        json_target: file for the JSON, ``"-"`` for stdout, or ``None``.

    Returns:
        0 nothing wrong, 1 something is, 3 could not judge; 0 on all ranks but the first.

    Raises:
        UsageError: no script is named, or there is no such file.
    """
    if not words:
        raise UsageError("say which script to audit: wholebatch audit [OPTIONS] SCRIPT [ARGS]")
    script, *arguments = words
    _check_script(script, module=module)
    _check_target(json_target)
    from wholebatch.audit.script import audit_script

    command = [*(["-m"] if module else []), *words]
    told: list[Judgement] = []

    def tell(judgement: Judgement) -> None:
        told.append(judgement)
        _tell(judgement, json_target)
        write_json(judgement_document(judgement, command=command), json_target)

    with script_prints_beside(json_target):
        audited = audit_script(
            script,
            arguments,
            module=module,
            updates=updates,
            skip_updates=skip_updates,
            expect_micro_batches=expect_micro_batches,
            expect_global_batch_samples=expect_global_batch_samples,
            replay=replay,
            folder=shared_folder,
            stall_s=stall_seconds,
            stop=stop,
            # as soon as it is known, while the script goes on; stdout is the JSON's only when that is over
            tell=tell if json_target != STDOUT else told.append,
        )
    if audited.failure is not None:
        _tell_failure(audited.failure)
    if audited.judgement is None:
        # The first rank tells it for all. 0 even where it failed here: else torchrun would end that rank.
        return CLEAN
    if json_target == STDOUT:
        tell(audited.judgement)
    if isinstance(audited.failure, KeyboardInterrupt):
        raise audited.failure
    return exit_code_of(audited.judgement) or _own_exit_code(audited)


def _own_exit_code(audited: AuditedScript) -> int:
    """Where nothing is wrong: the script's own code, 3 where it failed."""
    if audited.failure is None:
        return CLEAN
    return audited.exit_code if isinstance(audited.failure, SystemExit) else NOT_JUDGED


def _check_target(json_target: str | None) -> None:
    """Refuse a file that can't be written before the script runs, not when its result is lost."""
    if json_target in (None, STDOUT):
        return
    target = Path(str(json_target))
    if target.is_dir() or not target.parent.is_dir():
        what = "is a folder" if target.is_dir() else f"lies in {target.parent}, which is no folder"
        raise UsageError(f"--json {json_target} {what}; name a file in a folder that is there")


def _tell_failure(failure: BaseException) -> None:
    """Write the script's own traceback to stderr, as Python would, without the frames that ran it."""
    if isinstance(failure, SystemExit | KeyboardInterrupt):
        return
    frames = failure.__traceback__
    while frames is not None and _is_ours(frames):
        frames = frames.tb_next
    sys.stdout.flush()
    traceback.print_exception(type(failure), failure, frames or failure.__traceback__)


def _is_ours(frame: TracebackType) -> bool:
    file = frame.tb_frame.f_code.co_filename
    return file.startswith("<frozen runpy") or Path(file).is_relative_to(_PACKAGE)


def _check_script(script: str, *, module: bool) -> None:
    if not module and not Path(script).is_file():
        known = "; options of the audit come before the script" if script.startswith("-") else ""
        name = script.removesuffix("/")
        hint = "; for a module write -m before its name" if "." in name and not name.endswith(".py") else ""
        raise UsageError(f"there is no script {script!r} to audit{known or hint}")


def exit_code_of(judgement: Judgement) -> int:
    """The exit code for a judgement: 1 where a finding is wrong, 3 where there is none and no verdict.

    Args:
        judgement: of the audit.

    Returns:
        0, 1 or 3; a script's own failure is added by the caller.
    """
    if any(finding.severity == "wrong" for finding in judgement.findings):
        return WRONG
    evidence = judgement.evidence
    failed = any(trace.ended in ("failed", "stalled") for trace in evidence.traces)
    nothing_seen = not any(window.complete for window in evidence.windows)
    if judgement.verdict == "not_judged" or (failed and nothing_seen):
        return NOT_JUDGED
    return CLEAN


def _tell(judgement: Judgement, json_target: str | None) -> None:
    """Colours and broken lines for a terminal; elsewhere plain text of the same width."""
    stream = text_stream(json_target)
    sys.stdout.flush()
    console = Console(file=stream, highlight=False)
    if console.is_terminal:
        render_report(judgement, console)
    else:
        stream.write(report_text(judgement, console.width))
        stream.flush()


@contextlib.contextmanager
def script_prints_beside(json_target: str | None) -> Iterator[None]:
    """While a script runs: where stdout is the JSON's, what is printed goes to stderr.

    Args:
        json_target: the argument of ``--json``.
    """
    if json_target != STDOUT:
        yield
        return
    with contextlib.redirect_stdout(sys.stderr), _descriptor_beside():
        yield


@contextlib.contextmanager
def _descriptor_beside() -> Iterator[None]:
    """Let file descriptor 1 be stderr's for a while: subprocesses and C code write there."""
    if sys.__stdout__ is not None:
        sys.__stdout__.flush()
    try:
        kept = os.dup(1)
    except OSError:  # closed from the start: nothing can go there
        yield
        return
    try:
        os.dup2(2, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def list_command(*, json_target: str | None = None) -> int:
    """Tell what an audit can find: every kind with its severity and one line.

    Args:
        json_target: file for the JSON, ``"-"`` for stdout, or ``None``.

    Returns:
        0.
    """
    from wholebatch.audit.judge.kinds import KINDS

    console = Console(file=text_stream(json_target), highlight=False)
    for kind in KINDS.values():
        style = STYLES[kind.severity]
        console.print(Text.assemble((f"{kind.name:<33}", "bold"), (kind.severity, style)))
        for line in textwrap.wrap(kind.summary, max(console.width - 2, 20), break_on_hyphens=False):
            console.print(f"  {line}", markup=False)
    kinds = [
        {"kind": kind.name, "severity": kind.severity, "summary": kind.summary, "page": page_of(kind.name)}
        for kind in KINDS.values()
    ]
    write_json({"schema_version": SCHEMA_VERSION, "kinds": kinds}, json_target)
    return CLEAN
