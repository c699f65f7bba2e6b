"""Real libraries, in other versions too: an audit names what is wrong with their updates, and nothing else.

Two tests of each script in ``expected.py``. That its gradient is what the table has, by the big batch and
with no audit near it; and that an audit of the very same script finds what follows from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

import environments
from expected import PEERS, Finding, Peer
from jobs_of_peers import Outcome, audit_complaints, gradient_complaints, run_all

pytestmark = [pytest.mark.peers, pytest.mark.timeout(1500)]
BY_PEER = pytest.mark.parametrize("peer", PEERS, ids=str)


def skipped_because(peer: Peer) -> str:
    if peer.environment == "here" or environments.is_ready(peer.environment):
        return ""
    reason = environments.why_not(peer.environment)
    return reason or f"no environment {peer.environment}: make peers"


@pytest.fixture(scope="session")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Mapping[str, Outcome]:
    """All that the selected tests need, run before the first of them."""
    wanted: dict[str, list[Peer]] = {}
    for item in request.session.items:
        peer = getattr(item, "callspec", None) and item.callspec.params.get("peer")
        if peer and not skipped_because(peer):
            wanted.setdefault(item.originalname, []).append(peer)
    folder = tmp_path_factory.mktemp("peers")
    audited = wanted.get("test_an_audit_finds_what_is_wrong", [])
    return run_all(audited, wanted.get("test_the_gradient_is_what_the_table_has", []), folder)


@BY_PEER
def test_the_gradient_is_what_the_table_has(peer: Peer, outcomes: Mapping[str, Outcome]) -> None:
    require(peer)
    outcome = outcomes[f"confirm:{peer}"]
    complaints = gradient_complaints(peer, outcome.document)
    assert not complaints, "\n".join([peer.why, *complaints, outcome.printed[-3000:]])


@BY_PEER
def test_an_audit_finds_what_is_wrong(peer: Peer, outcomes: Mapping[str, Outcome]) -> None:
    require(peer)
    outcome = outcomes[f"audit:{peer}"]
    complaints = audit_complaints(peer, outcome)
    assert not complaints, "\n".join([peer.why, *complaints, outcome.printed[-6000:]])


def require(peer: Peer) -> None:
    """Skip where a machine can't have the environment; an environment that was not made is a failure."""
    if reason := environments.why_not(peer.environment):
        pytest.skip(reason)
    assert not skipped_because(peer), skipped_because(peer)


DIVIDED_TWICE = Peer(
    script="x.py", gradient=(0.25,), finds=(Finding(kind="total_weight", factor=0.25),), why=""
)


def report(*findings: tuple[str, float | None], code: int = 1, verdict: str = "findings") -> Outcome:
    told = [
        {"kind": kind, "factor": factor, "severity": "wrong", "caused_by": None, "message": ""}
        for kind, factor in findings
    ]
    return Outcome(code=code, printed="", document={"verdict": verdict, "updates": [1], "findings": told})


@pytest.mark.parametrize(
    ("outcome", "complaint"),
    [
        (report(("total_weight", 0.2501)), None),
        (report(("total_weight", 0.26)), "is missing among"),
        (report(("total_weight", None)), "is missing among"),
        (report(("never_cleared", 0.25)), "is missing among"),
        (report(("total_weight", 0.25), ("never_cleared", None)), "not due: never_cleared"),
        (report(("total_weight", 0.25), code=0), "exit code 0"),
        (report(code=0, verdict="clean"), "verdict clean"),
        (Outcome(code=2, printed="", document=None), "no JSON"),
    ],
)
def test_another_report_is_seen(outcome: Outcome, complaint: str | None) -> None:
    found = "\n".join(audit_complaints(DIVIDED_TWICE, outcome))
    assert complaint in found if complaint else not found


def update(factor: float = 0.25, distance: float = 0.0, first: float = 1.0) -> dict[str, Any]:
    return {"factor": factor, "distance": distance, "first": [first]}


@pytest.mark.parametrize(
    ("ranks", "complaint"),
    [
        ([[update()], [update()]], None),
        ([[update(factor=0.2502)], [update()]], "rank 0, update 1: 0.25020"),
        ([[update(distance=0.1)], [update()]], "1.0e-01 beside it"),
        ([[update()], [update(first=2.0)]], "the ranks do not agree"),
        ([[], []], "too few updates"),
        ([[update()]], "nothing was confirmed"),
        (["Traceback", [update()]], "Traceback"),
    ],
)
def test_another_gradient_is_seen(ranks: Any, complaint: str | None) -> None:
    found = "\n".join(gradient_complaints(replace(DIVIDED_TWICE, ranks=2), ranks))
    assert complaint in found if complaint else not found
