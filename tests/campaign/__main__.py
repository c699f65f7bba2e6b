"""``python -m campaign``: run the cases, tell what is wrong, write the table."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from multiprocessing import forkserver
from pathlib import Path

from campaign.cases import Case
from campaign.kinds import all_cases, deepspeed_cases, sample_of, shared_cases
from campaign.table import SHARED_BEGIN, SHARED_END, table, write_into
from campaign.trial import Bench, Verdict

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "faults.md"


def chosen(arguments: argparse.Namespace) -> list[Case]:
    """The cases that the command line asks for."""
    cases = [*shared_cases(), *deepspeed_cases()] if arguments.shared else all_cases()
    cases = sample_of(cases, arguments.sample) if arguments.sample else cases
    return [case for case in cases if not arguments.only or arguments.only in case.name]


def run(cases: list[Case], *, quiet: bool) -> list[Verdict]:
    """Judge all cases, and tell of each."""
    verdicts = []
    with tempfile.TemporaryDirectory(prefix="campaign-") as folder:
        bench = Bench(Path(folder))
        for number, case in enumerate(cases, start=1):
            began = time.perf_counter()
            verdict = bench.judge(case, number)
            verdicts.append(verdict)
            took_s = time.perf_counter() - began
            if not quiet or not verdict.good:
                good = "good" if verdict.good else "BAD"
                ended = ", ".join(verdict.ended)
                print(f"{number:4} {good:4} {took_s:5.1f} s  {case.name}: {ended}", flush=True)
            for words in verdict.wrong:
                print(f"       {words}", flush=True)
            if not verdict.good:
                print(
                    f"       {case.faults} {case.later} lost {verdict.lost} twice {verdict.twice}",
                    flush=True,
                )
    return verdicts


def main() -> int:
    """Returns 0 where every case ended well."""
    parser = argparse.ArgumentParser(prog="python -m campaign", description=__doc__)
    parser.add_argument("--all", action="store_true", help="every case; the table goes into docs/faults.md")
    parser.add_argument("--shared", action="store_true", help="those of ranks that share one model")
    parser.add_argument("--sample", type=int, default=0, help="so many cases, evenly spread")
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--quiet", action="store_true", help="tell of bad cases only")
    arguments = parser.parse_args()
    forkserver.set_forkserver_preload(["ranks_preload", "campaign.preload"])
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    forkserver.ensure_running()
    began = time.perf_counter()
    verdicts = run(chosen(arguments), quiet=arguments.quiet)
    text = table(verdicts, by_ranks=arguments.shared)
    print(text)
    bad = sum(not verdict.good for verdict in verdicts)
    print(f"{len(verdicts)} cases in {time.perf_counter() - began:.0f} s, {bad} bad")
    if arguments.all and not arguments.only:
        write_into(DOCUMENT, text, *((SHARED_BEGIN, SHARED_END) if arguments.shared else ()))
    return 1 if bad or not verdicts else 0


if __name__ == "__main__":
    raise SystemExit(main())
