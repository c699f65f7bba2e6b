"""The audit on every broken loop and its right twin, and on right loops that look like mistakes.

What each loop is expected to show is in the tables of ``broken_loops`` and ``right_loops``; that its defect
is one is confirmed without the audit by other tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import broken_loops
import right_loops
from ranks import run_ranks
from wholebatch.audit.judge.evidence import Finding, Judgement
from wholebatch.audit.judge.kinds import ALL_KINDS
from wholebatch.audit.judge.verdict import judge
from wholebatch.audit.trace import Intent, RankTrace
from wholebatch.audit.watching import Watching

# More than any loop makes, so that tails and ends are seen.
UPDATES = 16
FACTOR = 0.01


def watched(rank: int, num_ranks: int, table: str, name: str, which: str) -> RankTrace:
    """What one rank saw of one loop; also where the loop failed."""
    torch.manual_seed(0)
    flags = None
    if table == "broken":
        loop = broken_loops.loop(name)
        run: Any = getattr(loop, which)
        if loop.expected.expect_micro_batches:
            flags = Intent(
                micro_batches=loop.expected.expect_micro_batches, source="--expect-micro-batches"
            )
    else:
        run = right_loops.right_loop(name)
    watching = Watching(updates=UPDATES, flags=flags)
    try:
        run(rank, num_ranks) if num_ranks > 1 else run()
    except Exception as error:
        return watching.end("failed", repr(error))
    return watching.end()


def audited(ranks: int, table: str, name: str, which: str = "right") -> Judgement:
    if ranks == 1:
        traces = [watched(0, 1, table, name, which)]
    else:
        traces = run_ranks(watched, ranks, table, name, which, timeout_s=120)
    assert [trace.unseen for trace in traces] == [()] * ranks
    return judge(traces)


def loops() -> Iterator[Any]:
    for name, expected in broken_loops.EXPECTED.items():
        slow = expected.ranks > 1 or bool(expected.library)
        for which in ("broken", "right"):
            marks = [pytest.mark.slow] if slow else []
            yield pytest.param(name, which, marks=marks, id=f"{name}-{which}")


def told(judgement: Judgement) -> str:
    return "; ".join(f"{f.severity} {f.kind}: {f.message}" for f in judgement.findings)


def is_due(finding: Finding, expected: broken_loops.Expected) -> bool:
    return (
        finding.kind == expected.kind
        and finding.severity == expected.severity
        and (expected.across is None or finding.across == expected.across)
        and (expected.factor is None or finding.factor == pytest.approx(expected.factor, rel=FACTOR))
    )


@pytest.mark.parametrize(("name", "which"), list(loops()))
def test_a_broken_loop_is_named_and_its_twin_is_not(name, which):
    expected = broken_loops.EXPECTED[name]
    judgement = audited(expected.ranks, "broken", name, which)
    if which == "broken":
        due = [finding for finding in judgement.findings if is_due(finding, expected)]
        assert due, told(judgement)
        assert due[0].place is not None
        wrong = [f for f in judgement.findings if f.severity == "wrong" and f.caused_by is None]
        assert expected.severity != "wrong" or expected.kind in {f.kind for f in wrong} or due[0].caused_by
    else:
        assert expected.kind not in {finding.kind for finding in judgement.findings}, told(judgement)
        assert "wrong" not in {finding.severity for finding in judgement.findings}, told(judgement)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if loop.slow or loop.ranks > 1 else [])
        for name, loop in right_loops.RIGHT_LOOPS.items()
    ],
)
def test_nothing_is_wrong_with_a_right_loop(name, monkeypatch):
    # torch.compile shows progress by it: no thread left
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)
    judgement = audited(right_loops.RIGHT_LOOPS[name].ranks, "right", name)
    assert "wrong" not in {finding.severity for finding in judgement.findings}, told(judgement)
    assert judgement.verdict != "not_judged", judgement.unjudged


def test_every_kind_has_a_broken_loop_and_a_twin():
    assert {expected.kind for expected in broken_loops.EXPECTED.values()} == set(ALL_KINDS)
    for loop in broken_loops.all_loops():
        assert loop.broken is not loop.right
