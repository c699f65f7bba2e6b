"""Run somebody's script under the watch, as ``python script.py`` would run it, and judge what was seen."""

from __future__ import annotations

import importlib.util
import io
import os
import runpy
import sys
import threading
import tokenize
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from wholebatch.audit.children import Children
from wholebatch.audit.gather import (
    clear,
    collect,
    leave,
    shared_folder,
    tell_ended,
    wait_until_ended,
)
from wholebatch.audit.intent import said_by_user
from wholebatch.audit.judge.evidence import Judgement
from wholebatch.audit.judge.verdict import judge
from wholebatch.audit.stall import StallWatch
from wholebatch.audit.trace import RankTrace
from wholebatch.audit.watching import Watching
from wholebatch.errors import JudgeError, UsageError
from wholebatch.whereabouts import told

# How much longer than for a stall the first rank waits for the others' traces once its own loop is over.
_WAIT_S = 30.0
# How long it waits for the others' scripts to end, so that its own exit code does not end them.
_OTHERS_S = 3600.0

Ended = Literal["finished", "exit", "failed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditedScript:
    """What came of one script.

    Attributes:
        judgement: None on ranks other than the first.
        failure: the exception that ended the script; None where none did.
        exit_code: that the script itself asked for by ``sys.exit``; 0 otherwise.
    """

    judgement: Judgement | None
    failure: BaseException | None
    exit_code: int


def audit_script(
    script: str,
    arguments: Sequence[str],
    *,
    module: bool = False,
    updates: int = 4,
    skip_updates: int = 0,
    expect_micro_batches: int | None = None,
    expect_global_batch_samples: int | None = None,
    replay: bool = True,
    folder: Path | None = None,
    stall_s: float = 60.0,
    stop: bool = False,
    tell: Callable[[Judgement], None] = lambda _: None,
) -> AuditedScript:
    """Run a script to its end, watching its first updates.

    Args:
        script: path of a file, or name of a module.
        arguments: what the script finds in ``sys.argv``.
        module: run it as ``python -m`` does.
        updates: to audit, of each optimizer.
        skip_updates: to let pass before.
        expect_micro_batches: of one update on one replica, as the user has it.
        expect_global_batch_samples: of one update, as the user has it.
        replay: run one window again where its weights can't be read.
        folder: through which the ranks of several machines meet.
        stall_s: seconds for which all ranks may wait for each other before the job is ended as stalled.
        stop: end the script once enough updates were seen.
        tell: called with the judgement as soon as it is reached, on the first rank.

    Returns:
        AuditedScript: with the judgement, and how the script ended.

    Raises:
        UsageError: There is no such script or module.
        Exception: What ``tell`` raised, once the script is over.
    """
    if module:
        _check_module(script)
    if not module and not Path(script).is_file():
        raise UsageError(f"there is no file {script}; give the script to audit, or -m and a module's name")
    names = ("--expect-micro-batches", "--expect-global-batch")
    flags = said_by_user(expect_micro_batches, expect_global_batch_samples, names=names)
    options: dict[str, Any] = {
        "updates": updates,
        "skip_updates": skip_updates,
        "flags": flags,
        "replay": replay,
        "own_package": script.partition(".")[0] if module else None,
        "stop": stop,
    }
    ranks = _Ranks(folder, tell, Children(options, stall_s))
    watching = Watching(audited=ranks.audited, **options)
    ranks.look_for_stalls(watching, stall_s)
    failure, exit_code, ended = _run(script, arguments, module)
    trace = watching.end(ended, None if failure is None else told(failure))
    judgement = ranks.judged(trace)
    ranks.end(failed=failure is not None)
    return AuditedScript(judgement=judgement, failure=failure, exit_code=exit_code)


class _Ranks:
    """The ranks of one job, as its launcher told them: who judges, and when.

    Args:
        folder: of the user's, through which they meet.
        tell: called with the judgement, on the first rank.
        children: that the script itself starts.
    """

    def __init__(self, folder: Path | None, tell: Callable[[Judgement], None], children: Children) -> None:
        self._children = children
        self._rank = int(os.environ.get("RANK", "0"))
        self._num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
        self._folder = shared_folder(folder) if self._num_ranks > 1 else None
        self._tell = tell
        self._lock = threading.Lock()
        self._left = False
        self._judgement: Judgement | None = None
        self._stalls: StallWatch | None = None
        self._problem: Exception | None = None
        self._patience_s = 0.0

    def end(self, *, failed: bool) -> None:
        """This rank's script is over; the first waits for the others', and raises what telling raised.

        Args:
            failed: whether it ended by an exception: the others may then wait for this one.
        """
        if self._folder is not None:
            tell_ended(self._folder, self._rank)
            if not self._rank:
                wait_until_ended(self._folder, self._num_ranks, 0.0 if failed else _OTHERS_S)
                clear(self._folder)
        if self._problem is not None:
            raise self._problem

    def look_for_stalls(self, watching: Watching, patience_s: float) -> None:
        """Let a thread notice when all ranks wait for each other."""
        self._patience_s = patience_s
        if self._num_ranks > 1:
            progress = lambda: watching.watch.progress  # noqa: E731 - a name would say no more
            self._stalls = StallWatch(progress, patience_s, lambda: self._stalled(watching))

    def audited(self, trace: RankTrace) -> None:
        """Enough updates were seen: judge now, while the loop goes on."""
        if self._folder is None:
            self.judged(trace)
            return
        self._leave(trace)
        if not self._rank:
            threading.Thread(
                target=self.judged, args=(trace,), name="wholebatch-audit", daemon=True
            ).start()

    def judged(self, trace: RankTrace) -> Judgement | None:
        """The judgement over all ranks, on the first; the others leave what they saw and go."""
        if self._stalls is not None:
            self._stalls.end()
        self._leave(trace)
        if self._rank:
            return None
        with self._lock:
            if self._judgement is None:
                self._judgement = judge(self._traces(trace))
                try:
                    self._tell(self._judgement)
                except Exception as problem:  # this may be inside the loop, or a thread: not its affair
                    self._problem = problem
        return self._judgement

    def _traces(self, trace: RankTrace) -> list[RankTrace]:
        started = self._children.traces()
        if self._folder is None:
            trained = any(event.kind == "step" for event in trace.events)
            return [trace] if trained or not started else started
        traces = collect(self._folder, self._num_ranks, self._patience_s + _WAIT_S)
        return [traces[rank] for rank in sorted(traces)]

    def _leave(self, trace: RankTrace) -> None:
        if self._folder is None or self._left:
            return
        self._left = True
        if trace.num_ranks == 1:
            # it ended before it joined its group
            rank, ranks = self._rank, self._num_ranks
            trace = replace(trace, rank=rank, num_ranks=ranks, replica=rank, num_replicas=ranks)
        leave(trace, self._folder)

    def _stalled(self, watching: Watching) -> None:
        trace = watching.end("stalled", "this rank waited for others that never came")
        judgement = self.judged(trace)
        if self._rank:
            if self._folder is not None:
                tell_ended(self._folder, self._rank)
            return
        # nothing can be raised into a call that waits for ever
        sys.stdout.flush()
        wrong = judgement is not None and any(finding.severity == "wrong" for finding in judgement.findings)
        os._exit(1 if wrong else JudgeError.exit_code)


def _run(script: str, arguments: Sequence[str], module: bool) -> tuple[BaseException | None, int, Ended]:
    """Run it as Python itself would; what ended it, its exit code, and how it ended."""
    argv, path, main = sys.argv, list(sys.path), sys.modules["__main__"]
    try:
        if module:
            sys.argv = [script, *arguments]
            sys.path.insert(0, os.getcwd())
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            sys.argv = [script, *arguments]
            sys.path[0] = str(Path(script).resolve().parent)
            _run_file(script)
    except SystemExit as leaving:
        return _left(leaving)
    except BaseException as error:
        return error, 1, "failed"
    finally:
        sys.argv, sys.path[:] = argv, path
        sys.modules["__main__"] = main
    return None, 0, "finished"


def _check_module(name: str) -> None:
    path = list(sys.path)
    sys.path.insert(0, os.getcwd())
    try:
        known = importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        known = False
    finally:
        sys.path[:] = path
    if not known:
        raise UsageError(f"there is no module {name}; -m takes a name as after python -m")


def _left(leaving: SystemExit) -> tuple[BaseException | None, int, Ended]:
    code = leaving.code
    if code is None or code == 0:
        return None, 0, "finished"
    if isinstance(code, int):
        return leaving, code, "exit"
    print(code, file=sys.stderr)
    return leaving, 1, "exit"


def _run_file(script: str) -> None:
    """As ``__main__``, in a module that stays alive: what the script made may be pickled by name."""
    with io.open_code(str(Path(script).resolve())) as file:
        source = file.read()
    encoding, _ = tokenize.detect_encoding(io.BytesIO(source).readline)
    made: Any = types.ModuleType("__main__")
    made.__file__ = str(Path(script).resolve())
    made.__builtins__ = __builtins__
    sys.modules["__main__"] = made
    exec(compile(source.decode(encoding), made.__file__, "exec"), made.__dict__)
