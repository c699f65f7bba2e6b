"""Run scripts of peers in forks of this process, one a rank, so that what they import is imported once.

    python tests/peers/forks.py OUT WORK:PEER [WORK:PEER ...]       (``str`` of entries of ``expected.py``)

WORK is ``confirm``, the gradient beside the big batch's, or ``audit``, what the command does. OUT is JSON:
for each word what each rank returned, or its traceback, and what all of them printed.

An audit begins in the fork, when the libraries are there already; those of ``expected.py`` that are
``as_typed`` run by the command itself, which begins before them.
"""

from __future__ import annotations

import ast
import contextlib
import json
import multiprocessing
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from expected import PEERS, SCRIPTS

LIMIT_S = 120.0


def imports_of(script: str) -> list[ast.Import | ast.ImportFrom]:
    """The import statements of a script, those inside of its functions too."""
    tree = ast.parse((SCRIPTS / script).read_text())
    return [one for one in ast.walk(tree) if isinstance(one, ast.Import | ast.ImportFrom)]


def libraries_of(script: str) -> frozenset[str]:
    """What a script imports that is not Python's own: ``{"torch", "accelerate", "language"}``."""
    names: set[str] = set()
    for one in imports_of(script):
        named = [alias.name for alias in one.names]
        modules = [one.module or ""] if isinstance(one, ast.ImportFrom) else named
        names |= {module.partition(".")[0] for module in modules}
    return frozenset(names - sys.stdlib_module_names)


def preload(scripts: set[str]) -> None:
    """Import what the scripts do, by their own statements: some libraries load a name when asked for it."""
    wanted = [one for script in sorted(scripts) for one in imports_of(script)]
    # only some models of it are of a library that has to be there
    if any("transformers" in libraries_of(script) for script in scripts):
        wanted += imports_of("language.py")
    for one in wanted:
        exec(compile(ast.Module([one], []), "<imports>", "exec"), {})
    import wholebatch.audit.script
    import wholebatch.report.audited  # noqa: F401


def audit(script: str, folder: Path) -> int:
    """What ``python -m wholebatch audit`` does; its exit code."""
    from wholebatch.cli import main

    path, *arguments = script.split()
    return main(["audit", "--json", str(folder / "out.json"), str(SCRIPTS / path), *arguments])


def variables_of_launcher(rank: int, ranks: int, port: int) -> dict[str, str]:
    """As ``torch.distributed.run`` sets them, but for its store."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "ROLE_RANK": rank, "GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1}
    numbers |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), ranks)
    numbers |= {"MASTER_PORT": port, "TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0}
    return {
        **{name: str(number) for name, number in numbers.items()},
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_RUN_ID": f"peers-{port}",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }


def in_rank(work: Callable[[], Any], variables: dict[str, str], folder: Path, out: Any) -> None:
    os.environ.update(variables)
    os.chdir(folder)
    printed = os.open("printed.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(printed, stream)
    try:
        out.send(work())
    except BaseException:
        out.send(traceback.format_exc())


@contextlib.contextmanager
def _killed_at_the_end(processes: list[Any]) -> Iterator[None]:
    try:
        yield
    finally:
        for process in processes:
            process.join(5.0)
            process.kill()


def run(work: Callable[[], Any], ranks: int, folder: Path, *, launched: bool) -> tuple[list[Any], str]:
    """What each rank returned or raised, and what they printed."""
    forks = multiprocessing.get_context("fork")
    folder.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    processes: list[Any] = []
    with _killed_at_the_end(processes):
        pipes = []
        for rank in range(ranks):
            variables = variables_of_launcher(rank, ranks, port) if launched else {}
            receiver, sender = forks.Pipe(duplex=False)
            processes.append(forks.Process(target=in_rank, args=(work, variables, folder, sender)))
            processes[-1].start()
            sender.close()
            pipes.append(receiver)
        last = time.monotonic() + LIMIT_S
        told = [_received(pipe, last) for pipe in pipes]
    return told, (folder / "printed.txt").read_text(errors="replace")


def _received(pipe: Any, last: float) -> Any:
    try:
        return pipe.recv() if pipe.poll(max(0.0, last - time.monotonic())) else "said nothing in time"
    except EOFError:
        return "ended without a word"


def main(out: str, *wanted: str) -> None:
    sys.path.insert(0, str(SCRIPTS))
    from confirm import confirm

    by_name = {str(peer): peer for peer in PEERS}
    preload({by_name[word.partition(":")[2]].script.split()[0] for word in wanted})
    assert threading.active_count() == 1, "a fork would lack the other threads"
    found = {}
    for word in wanted:
        kind, _, name = word.partition(":")
        peer, folder = by_name[name], Path(out).parent / word.replace(":", "-")
        work = partial(audit, peer.script, folder) if kind == "audit" else partial(confirm, peer)
        found[word] = run(work, peer.ranks, folder, launched=peer.launched)
        Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
