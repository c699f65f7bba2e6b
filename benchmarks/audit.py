"""What the audit costs while it watches, and after it has seen enough.

    python benchmarks/audit.py
    python benchmarks/audit.py --model small --rounds 80 --clock cpu --json audit.json

The loop written by hand runs three times, each in a process of its own: bare, bare again, and under the
audit. docs/benchmarks.md says how they are compared.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Literal

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else torch's profiler talks; read when it is imported

import torch
from rich.console import Console
from rich.table import Table

from contestants import Contestant, hand
from counting import PeakTensorBytes
from overhead import versions
from race import CLOCKS, Clock
from wholebatch.audit.trace import RankTrace
from wholebatch.audit.watching import Watching
from work import WORKS, Work, batches_of

_WIDTH = 100
_WARM_ROUNDS = 3
# What the audit of a script looks at unless it is told otherwise, and as many that follow.
AUDITED_UPDATES = 4
Phase = Literal["audited", "after"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ratios:
    """The times of one kind of update over those of the bare loop in the same rounds."""

    name: str
    ratios: tuple[float, ...]

    @property
    def quartiles(self) -> tuple[float, float, float]:
        """Lower quartile, median and upper quartile."""
        low, _, high = quantiles(self.ratios, n=4, method="inclusive")
        return low, median(self.ratios), high

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"quartiles": self.quartiles}


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What came out for one model.

    Args:
        typical_seconds: median of the bare loop's times. For the scale only: compare ratios.
        rows: the bare loop again, the audited updates, the updates after them.
        peak_bytes: of tensors in two updates of the bare loop, and in two that are audited.
        num_audited: updates that the audit has seen.
        same_parameters: whether the loops ended with the same parameters, bit for bit.
    """

    typical_seconds: float
    rows: tuple[Ratios, ...]
    peak_bytes: tuple[int, int]
    num_audited: int
    same_parameters: bool


# One loop, in a process of its own -------------------------------------------------------------------


class Turns:
    """Updates of one loop, of which every so many are audited.

    Args:
        work: what an update is.
        audit: whether there is an audit: ``AUDITED_UPDATES`` updates under it, as many after it, and anew.
        clock: that the updates are timed by.
    """

    def __init__(self, work: Work, audit: bool, clock: Clock) -> None:
        self._work, self._audit, self._now = work, audit, CLOCKS[clock]
        self._loop: Contestant = hand(work)
        self._watching: Watching | None = None
        self._ended: list[RankTrace] = []
        self._left = 0
        self.num_audited = 0

    def timed(self, update: int) -> tuple[float, Phase | None]:
        """Do one update; return its seconds, and where in an audit it was."""
        phase = self._next_phase() if self._audit else None
        batches = batches_of(self._work, update)
        gc.collect(1)  # what the update before left; all generations would take longer than an update
        begun = self._now()
        self._loop.run(batches, nullcontext())
        seconds = self._now() - begun
        self._check(phase)
        return seconds, phase

    def peak_bytes(self, update: int) -> int:
        """The most that tensors take in two updates, from the beginning of an audit where there is one."""
        batches = [batches_of(self._work, update), batches_of(self._work, update + 1)]
        with PeakTensorBytes(self._loop.model, self._loop.optimizer) as peak, ExitStack() as stack:
            if self._audit:
                stack.callback(Watching(updates=AUDITED_UPDATES, replay=False, search=True).end)
            for one in batches:
                self._loop.run(one, nullcontext())
        return peak.counts

    def digest(self) -> str:
        """Of all parameters."""
        found = hashlib.sha256()
        for parameter in self._loop.model.parameters():
            found.update(parameter.detach().contiguous().numpy().tobytes())
        return found.hexdigest()

    def _next_phase(self) -> Phase:
        if not self._left:
            self._left = 2 * AUDITED_UPDATES
            self._ended.clear()
            self._watching = Watching(
                updates=AUDITED_UPDATES, replay=False, search=True, audited=self._ended.append
            )
        self._left -= 1
        return "audited" if self._left >= AUDITED_UPDATES else "after"

    def _check(self, phase: Phase | None) -> None:
        """The audit must have seen what it was measured at, and have ended by itself."""
        if phase != "audited" or self._left > AUDITED_UPDATES:
            return
        (trace,) = self._ended
        kinds: list[str] = [event.kind for event in trace.events]
        wanted = {"step": AUDITED_UPDATES, "clip": AUDITED_UPDATES}
        wanted["backward"] = AUDITED_UPDATES * self._work.micro_batches_per_window
        seen = {kind: kinds.count(kind) for kind in wanted}
        if seen != wanted or trace.unseen:
            raise SystemExit(f"the audit saw {seen} where {wanted} happened; unseen: {trace.unseen}")
        self.num_audited += AUDITED_UPDATES


def serve(work: Work, audit: bool, clock: Clock) -> None:
    """Do as the lines of standard input say, and answer each by a line of JSON."""
    torch.set_num_threads(1)
    turns = Turns(work, audit, clock)
    asked: dict[str, Callable[[int], Any]] = {
        "timed": turns.timed,
        "peak": turns.peak_bytes,
        "end": lambda _: (turns.num_audited, turns.digest()),
    }
    for line in sys.stdin:
        what, update = line.split()
        print(json.dumps(asked[what](int(update))), flush=True)


# All loops -------------------------------------------------------------------------------------------


@dataclass(kw_only=True, slots=True)
class Process:
    """A loop that runs elsewhere, one order at a time."""

    process: subprocess.Popen[str]
    seconds: list[float] = field(default_factory=list)
    phases: list[Phase | None] = field(default_factory=list)

    def ask(self, what: str, update: int) -> Any:
        """Send an order and wait for its answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{what} {update}\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit(f"a loop ended early, with exit code {self.process.wait()}")
        return json.loads(answer)

    def turn(self, update: int, *, kept: bool) -> None:
        """One timed update."""
        seconds, phase = self.ask("timed", update)
        if kept:
            self.seconds.append(seconds)
            self.phases.append(phase)


@contextmanager
def started(work: Work, clock: Clock) -> Iterator[list[Process]]:
    """The bare loop, the bare loop again and the audited one, ended with the block."""
    command = [sys.executable, str(Path(__file__).resolve()), "--model", work.name, "--clock", clock]
    with ExitStack() as stack:
        found = []
        for kind in ("bare", "bare", "audited"):
            process = subprocess.Popen(
                [*command, "--serve", kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            stack.enter_context(process)  # closes its input, at which it ends, and waits
            found.append(Process(process=process))
        yield found


def measure(work: Work, *, rounds: int, clock: Clock, seed: int = 0) -> Measured:
    """One update of each loop in every round, in a random order; the memory of one more at the end."""
    order = random.Random(seed)
    with started(work, clock) as loops:
        for update in range(_WARM_ROUNDS + rounds):
            for loop in order.sample(loops, len(loops)):
                loop.turn(update, kept=update >= _WARM_ROUNDS)
        ends = [loop.ask("end", 0) for loop in loops]
        # an audit that is not over yet would watch them too
        more = range(_WARM_ROUNDS + rounds, _until_idle(_WARM_ROUNDS + rounds))
        for update in more:
            loops[-1].turn(update, kept=False)
        peaks = [loop.ask("peak", len(more) + rounds) for loop in (loops[0], loops[-1])]
    bare, again, audited = loops
    return Measured(
        typical_seconds=median(bare.seconds),
        rows=(
            _ratios("the bare loop again", again, bare),
            _ratios("audited updates", audited, bare, "audited"),
            _ratios("after the audit", audited, bare, "after"),
        ),
        peak_bytes=(peaks[0], peaks[1]),
        num_audited=ends[-1][0],
        same_parameters=len({digest for _, digest in ends}) == 1,
    )


def _until_idle(updates: int) -> int:
    """The number of updates after which a whole audit and what follows it are over."""
    cycle = 2 * AUDITED_UPDATES
    return -(-updates // cycle) * cycle


def _ratios(name: str, loop: Process, bare: Process, phase: Phase | None = None) -> Ratios:
    both = zip(loop.seconds, bare.seconds, loop.phases, strict=True)
    return Ratios(name=name, ratios=tuple(mine / theirs for mine, theirs, when in both if when == phase))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, write the JSON; return the exit code."""
    options = _options(arguments)
    work = WORKS[options.model]
    if options.serve:
        serve(work, options.serve == "audited", options.clock)
        return 0
    rounds = options.rounds or 2 * AUDITED_UPDATES * max(1, work.rounds // AUDITED_UPDATES)
    measured = measure(work, rounds=rounds, clock=options.clock)
    _print(work, measured, rounds=rounds, clock=options.clock)
    if options.json:
        found = asdict(measured) | {"rows": [row.to_dict() for row in measured.rows]}
        found |= {"model": work.name, "rounds": rounds, "clock": options.clock, "versions": versions()}
        options.json.write_text(json.dumps(found, indent=2))
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=[*WORKS], default="large")
    parser.add_argument("--rounds", type=int, help="updates of each loop that are timed")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall", help="cpu: processor time")
    parser.add_argument("--json", type=Path, help="write everything that was measured to this file")
    parser.add_argument("--serve", choices=["bare", "audited"], help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    fewest = 2 * AUDITED_UPDATES
    if options.rounds is not None and options.rounds < fewest:
        parser.error(f"--rounds {options.rounds}: give {fewest} or more, an audit and as many after it")
    return options


def _print(work: Work, measured: Measured, *, rounds: int, clock: str) -> None:
    console = Console(width=_WIDTH, highlight=False)
    per_update_ms = 1000 * measured.typical_seconds
    console.print(
        f"\n{work.name}: {rounds} rounds, {clock} time, about {per_update_ms:.3g} ms an update; "
        f"{measured.num_audited} updates audited",
        soft_wrap=True,
    )
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("loop", no_wrap=True)
    for heading in ("time / bare", "quartiles", "updates"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in measured.rows:
        low, middle, high = row.quartiles
        table.add_row(row.name, f"{middle:.3f}", f"{low:.3f}-{high:.3f}", str(len(row.ratios)))
    console.print(table)
    bare, audited = measured.peak_bytes
    console.print(
        f"peak memory of tensors: {bare / 2**20:.2f} MiB bare, {audited / bare:.4f} times audited"
    )
    console.print(f"parameters at the end: {'the same' if measured.same_parameters else 'NOT the same'}")


if __name__ == "__main__":
    sys.exit(main())
