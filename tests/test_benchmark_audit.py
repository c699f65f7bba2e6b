"""The audit's benchmark measures audited updates as such, pairs its times, and sees another result."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "audit.py"
if str(SCRIPT.parent) not in sys.path:
    sys.path.insert(0, str(SCRIPT.parent))

import audit  # noqa: E402
from work import WORKS  # noqa: E402

TINY = WORKS["tiny"]
ROUNDS = 2 * audit.AUDITED_UPDATES


def test_updates_are_audited_by_turns_and_nothing_of_it_stays():
    turns, backward = audit.Turns(TINY, True, "cpu"), torch.autograd._engine_run_backward
    phases, replaced = [], []
    half = audit.AUDITED_UPDATES
    for update in range(3 * half):
        phases.append(turns.timed(update)[1])
        replaced.append(torch.autograd._engine_run_backward is not backward)
    assert phases == ["audited"] * half + ["after"] * half + ["audited"] * half
    # the last audited update ends the audit
    assert replaced == [True] * (half - 1) + [False] * (half + 1) + [True] * (half - 1) + [False]
    assert turns.num_audited == 2 * half


def digest_after(audited: bool, first: int = 0) -> str:
    turns = audit.Turns(TINY, audited, "cpu")
    for update in range(first, first + audit.AUDITED_UPDATES):
        turns.timed(update)
    return turns.digest()


def test_parameters_are_compared_bit_for_bit():
    assert digest_after(False) == digest_after(True) != digest_after(False, first=1)


def test_an_audit_that_saw_too_little_stops_the_benchmark():
    turns = audit.Turns(TINY, True, "cpu")
    run = turns._loop.run

    def half_unseen(batches, around):
        with turns._watching.watch.paused():
            run(batches[:4], around)
        run(batches[4:], around)

    object.__setattr__(turns._loop, "run", half_unseen)
    for update in range(audit.AUDITED_UPDATES - 1):
        turns.timed(update)
    with pytest.raises(SystemExit, match=r"the audit saw .*'backward': 16.* where .*'backward': 32"):
        turns.timed(update + 1)


def test_times_are_paired_by_round_and_phase():
    bare = audit.Process(process=None, seconds=[1.0, 2.0, 4.0, 1.0], phases=[None] * 4)
    other = audit.Process(
        process=None, seconds=[2.0, 3.0, 4.0, 3.0], phases=["audited", "audited", "after", "after"]
    )
    assert audit._ratios("a", other, bare, "audited").ratios == (2.0, 1.5)
    assert audit._ratios("a", other, bare, "after").ratios == (1.0, 3.0)
    assert audit._ratios("a", bare, bare).quartiles == (1.0, 1.0, 1.0)


def peak_of(audited: bool) -> int:
    turns = audit.Turns(TINY, audited, "cpu")
    turns._loop.run(audit.batches_of(TINY, 0), audit.nullcontext())  # makes the optimizer's state
    return turns.peak_bytes(1)


def test_peak_memory_sees_what_an_audit_would_hold(monkeypatch):
    bare = peak_of(False)
    assert bare <= peak_of(True) < 5 * bare  # the audit's fixed random numbers are larger than this model
    held = []
    seen = audit.Watching

    def hoards(**given):
        watching = seen(**given)
        record = watching.watch.record

        def hoard(event):
            held.append(torch.ones(bare // 4))
            record(event)

        watching.watch.record = hoard
        return watching

    monkeypatch.setattr(audit, "Watching", hoards)
    assert peak_of(True) > 10 * bare


def test_too_few_rounds_for_an_audit_are_refused(capsys):
    with pytest.raises(SystemExit):
        audit.main(["--rounds", "7"])
    assert "--rounds 7: give 8 or more, an audit and as many after it" in capsys.readouterr().err


@pytest.mark.slow
def test_the_script_from_end_to_end(tmp_path):
    file = tmp_path / "measured.json"
    arguments = ["--model", "tiny", "--rounds", str(2 * ROUNDS), "--json", str(file)]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 100
    measured = json.loads(file.read_text())
    assert measured["same_parameters"] is True
    assert measured["num_audited"] == ROUNDS
    assert [(row["name"], len(row["ratios"])) for row in measured["rows"]] == [
        ("the bare loop again", 2 * ROUNDS),
        ("audited updates", ROUNDS),
        ("after the audit", ROUNDS),
    ]
