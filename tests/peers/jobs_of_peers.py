"""Run the peers' scripts under ``confirm.py`` and under ``wholebatch audit``.

Those with the same imports share a process that forks; two such processes, or commands, at a time.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import environments
from expected import SCRIPTS, Peer
from forks import libraries_of

HERE = Path(__file__).resolve().parent
LIMIT_S = 240.0
AT_A_TIME = 2
LAUNCHER = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a command ended: its exit code, what it printed, and the JSON that it wrote, if it did."""

    code: int
    printed: str
    document: Any


def run(words: Sequence[str], environment: str, folder: Path, *, limit_s: float = LIMIT_S) -> Outcome:
    """Run Python with these words in a folder of its own; ``OUT`` among them is the JSON's file."""
    folder.mkdir(parents=True)
    out = folder / "out.json"
    command = [sys.executable, *(str(out) if word == "OUT" else word for word in words)]
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environments.variables(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        printed, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        # A launcher asked to end takes its ranks with it, which have sessions of their own.
        for how in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, how)
                process.wait(20.0)
        printed = process.communicate()[0] + f"\n[killed after {limit_s:.0f} s]"
    document = json.loads(out.read_text()) if out.exists() else None
    return Outcome(code=process.returncode, printed=printed, document=document)


def audit(peer: Peer, folder: Path) -> Outcome:
    """``wholebatch audit`` of a script, as a user calls it."""
    script, *arguments = peer.script.split()
    launcher = [*LAUNCHER, str(peer.ranks)] if peer.launched else []
    module = ["-m", "wholebatch", "audit", "--json", "OUT", str(SCRIPTS / script), *arguments]
    return run([*launcher, *module], peer.environment, folder)


def in_forks(words: Sequence[str], environment: str, folder: Path) -> Mapping[str, Outcome]:
    """What ``forks.py`` found, by word: a confirmation's document has what each rank returned."""
    forks = run([str(HERE / "forks.py"), "OUT", *words], environment, folder, limit_s=LIMIT_S * len(words))
    outcomes = {}
    for word in words:
        ranks, printed = (forks.document or {}).get(word, (None, forks.printed))
        written = folder / word.replace(":", "-") / "out.json"
        code, document = forks.code, ranks
        if word.startswith("audit:"):
            # each rank's exit code, or a traceback, with which Python ends in 1
            code = max((1 if isinstance(rank, str) else rank for rank in ranks or ()), default=1)
            document = json.loads(written.read_text()) if written.exists() else None
            printed += "".join(rank for rank in ranks or () if isinstance(rank, str))
        outcomes[word] = Outcome(code=code, printed=printed, document=document)
    return outcomes


def run_all(audited: Sequence[Peer], confirmed: Sequence[Peer], folder: Path) -> Mapping[str, Outcome]:
    """Every outcome by its word: ``audit:`` or ``confirm:``, and the name of the peer."""
    together: dict[tuple[str, frozenset[str]], list[str]] = {}
    jobs: list[Callable[[], Mapping[str, Outcome]]] = []
    works = [("confirm", peer) for peer in confirmed] + [("audit", peer) for peer in audited]
    for work, peer in works:
        word = f"{work}:{peer}"
        if work == "audit" and peer.as_typed:
            where = folder / word.replace(":", "-")
            jobs.append(lambda word=word, peer=peer, where=where: {word: audit(peer, where)})
        else:
            libraries = libraries_of(peer.script.split()[0])
            together.setdefault((peer.environment, libraries), []).append(word)
    for index, ((environment, _), words) in enumerate(together.items()):
        jobs.append(partial(in_forks, words, environment, folder / f"forks-{index}"))
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        return {word: one for found in pool.map(lambda job: job(), jobs) for word, one in found.items()}


def gradient_complaints(peer: Peer, ranks: Any) -> list[str]:
    """What ``confirm.py`` found otherwise than the table has it."""
    if not isinstance(ranks, list) or len(ranks) != peer.ranks:
        return [f"nothing was confirmed: {ranks}"]
    if failed := [rank for rank in ranks if isinstance(rank, str)]:
        return failed
    found = [] if all(len(rank) >= len(peer.gradient) for rank in ranks) else ["too few updates"]
    for rank, updates in enumerate(ranks):
        for index, update in enumerate(updates):
            wanted = peer.gradient[index % len(peer.gradient)]
            factor, distance = update["factor"], update["distance"]
            other = distance > 0.02
            if other != (wanted == "other") or not (other or abs(factor - wanted) < 1e-4):
                told = f"{factor:.5f} of the big batch's, and {distance:.1e} beside it"
                found.append(f"rank {rank}, update {index + 1}: {told}, where {wanted} is due")
    agree = all(
        abs(one - other) < 1e-4
        for rank in ranks
        for mine, first in zip(rank, ranks[0], strict=True)
        for one, other in zip(mine["first"], first["first"], strict=True)
    )
    return (
        found if agree == peer.ranks_agree else [*found, f"the ranks {'do' if agree else 'do not'} agree"]
    )


def audit_complaints(peer: Peer, outcome: Outcome) -> list[str]:
    """What an audit said otherwise than the table has it: too little, too much, or another factor."""
    document = outcome.document
    if document is None:
        return [f"the audit wrote no JSON; exit code {outcome.code}"]
    told = [f for f in document["findings"] if f["severity"] != "note"]
    primary = [f for f in told if f["caused_by"] is None]
    found = [] if document["updates"] else ["no update was audited"]
    verdict = "findings" if peer.finds else "clean"
    if document["verdict"] != verdict:
        found.append(f"verdict {document['verdict']}, where {verdict} is due: {document.get('unjudged')}")
    code = 1 if any(f["severity"] == "wrong" for f in told) else 0
    if outcome.code != code:
        found.append(f"exit code {outcome.code}, where {code} is due")
    for due in peer.finds:
        matching = [f for f in primary if f["kind"] == due.kind]
        if not any(is_due(due, f) for f in matching):
            seen = [(f["kind"], f.get("factor"), f.get("across")) for f in told]
            found.append(f"{due} is missing among {seen}")
    kinds = {due.kind for due in peer.finds}
    found += [f"not due: {f['kind']}: {f['message']}" for f in primary if f["kind"] not in kinds]
    return found


def is_due(due: Any, finding: Mapping[str, Any]) -> bool:
    """Whether a finding has the factor, within a hundredth, and the direction that are due."""
    factor = finding.get("factor")
    right = due.factor is None or (factor is not None and abs(factor / due.factor - 1.0) <= 0.01)
    return right and due.across in (None, finding.get("across"))
