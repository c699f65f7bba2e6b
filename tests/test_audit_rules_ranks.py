"""What only several ranks can get wrong: loops that end apart, parameters left out, equal seeds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from audit_traces import backward, clear, clip, event, reduce, step, traces
from wholebatch.audit.gather import leave, read
from wholebatch.audit.judge.evidence import Finding, Judgement
from wholebatch.audit.judge.verdict import judge
from wholebatch.audit.trace import Event, Forward, Intent, RankTrace
from wholebatch.audit.watching import Watching

ONE = [backward(items=4, weight=1 / 4), reduce(), step(), clear()]
HALF = [backward(items=4, weight=1 / 4), reduce(divisor=2.0), step(), clear()]


def found(judgement: Judgement, kind: str) -> Finding:
    (finding,) = [finding for finding in judgement.findings if finding.kind == kind]
    return finding


def test_a_rank_that_ended_before_an_update_had_no_micro_batches_in_it():
    judgement = judge(traces(HALF * 4, HALF * 2))
    assert found(judgement, "unequal_micro_batch_counts").updates == (3, 4)
    assert found(judgement, "total_weight").caused_by == "unequal_micro_batch_counts"
    assert "1 and 0 micro-batches" in found(judgement, "unequal_micro_batch_counts").message


def test_a_rank_that_was_audited_to_the_end_is_not_missed():
    judgement = judge(traces(ONE * 4, ONE * 4, ended="audited"))
    assert judgement.findings == ()


@pytest.mark.parametrize("num_begun", [0, 1])
def test_a_backward_that_waits_for_ever_counts(num_begun):
    """All ranks wait, one of them in a backward that has no event, the others in what follows the loop."""
    first, *others = traces(ONE * 3, ONE * 3, ended="stalled")
    begun = Event(kind="forward", forward=Forward(module="Model"))
    judgement = judge([replace(first, events=(*first.events, *[begun] * num_begun)), *others])
    assert judgement.verdict == ("findings" if num_begun else "not_judged")
    kinds = [finding.kind for finding in judgement.findings if finding.severity == "wrong"]
    assert kinds == ["unequal_micro_batch_counts"] * num_begun
    assert "rank 0 waited in a collective that others never came to" in judgement.unjudged


def begun(trace: RankTrace, **fields: object) -> RankTrace:
    """Begun with a micro-batch whose backward never ended."""
    return replace(trace, events=(*trace.events, Event(kind="forward", forward=Forward(**fields))))


@pytest.mark.parametrize("other", [True, False])
def test_ranks_that_wait_at_different_places_of_an_update_have_unequal_numbers(other):
    one, two = traces(ONE * 2, ONE * 2, ended="stalled")
    ranks = [begun(one, module="Model", holds_reduction=True)]
    ranks += [begun(two, module="Model", holds_reduction=other)]
    assert unequal(ranks) is not other
    # one that ended its backward and can't begin the next forward
    (more,) = traces([*ONE * 2, backward(items=4, holds_reduction=True)], ended="stalled")
    first = replace(one, events=more.events)
    assert unequal([first, ranks[1]]) is not other


def unequal(ranks: list[RankTrace]) -> bool:
    return "unequal_micro_batch_counts" in [finding.kind for finding in judge(ranks).findings]


@pytest.mark.parametrize(("failure", "dry"), [("StopIteration:", True), ("ValueError: bad file", False)])
def test_a_rank_that_has_no_more_data_has_fewer_micro_batches(failure, dry):
    one, two = traces(ONE * 2, ONE * 2, ended="failed")
    waits = begun(replace(one, failure="RuntimeError: Connection closed by peer"), module="Model")
    judgement = judge([waits, replace(two, failure=failure)])
    kinds = [finding.kind for finding in judgement.findings if finding.severity == "wrong"]
    assert kinds == (["unequal_micro_batch_counts"] if dry else [])


def test_a_total_that_clipping_before_the_reduction_makes_is_its_consequence():
    clipped = [backward(items=5, weight=1 / 5), clip(0.5), reduce(from_python=True), step(), clear()]
    other = [backward(items=5, weight=1 / 5), clip(0.2), reduce(from_python=True), step(), clear()]
    judgement = judge(traces(clipped * 3, other * 3))
    assert found(judgement, "clip_before_reduction").caused_by is None
    assert found(judgement, "total_weight").caused_by == "clip_before_reduction"


def test_parameters_left_out_of_the_reduction_are_not_reduced():
    some = [backward(items=5, weight=1 / 5), reduce(to=(0, 1, 2), from_python=True), step(), clear()]
    judgement = judge(traces(some * 3, some * 3))
    kinds = [finding.kind for finding in judgement.findings if finding.severity == "wrong"]
    assert kinds == ["not_reduced"]
    assert "of some parameters" in found(judgement, "not_reduced").message


@pytest.mark.parametrize(("framework", "severity"), [("transformers", "note"), ("accelerate", "wrong")])
def test_seeds_that_a_framework_sets_alike_are_a_note(framework, severity):
    told = (Intent(micro_batches=1, source="arguments", framework=framework),)
    loop = [
        op
        for i in range(3)
        for op in (
            backward(items=4, weight=1 / 4, random_state=i, num_dropout=1),
            reduce(),
            step(),
            clear(),
        )
    ]
    judgement = judge(traces(loop, loop, intents=told))
    assert found(judgement, "same_randomness").severity == severity


def test_a_trace_without_gradients_can_be_passed_on(tmp_path: Path):
    (trace,) = traces([event("pass", value=1.0)])
    leave(trace, tmp_path)
    assert read(tmp_path / "rank-0.npz") == trace


LEAVES = """
import torch, torch.distributed as dist, torch.nn.functional as F
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(5, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank())
for _ in range(2):
    optimizer.zero_grad()
    F.cross_entropy(model(torch.randn(4, 5)), torch.randint(0, 3, (4,))).backward()
    optimizer.step()
del model
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_script_that_leaves_its_group_before_the_watch_ends_still_has_its_replicas(tmp_path: Path):
    (tmp_path / "train.py").write_text(LEAVES)
    words = ["--standalone", "--nproc-per-node", "2", "-m", "wholebatch", "audit", "--json", "audit.json"]
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words, "train.py"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        timeout=120,
        check=True,
    )
    document = json.loads((tmp_path / "audit.json").read_text())
    assert (document["verdict"], document["replicas"]) == ("clean", 2)
    assert [update["total_weight"] for update in document["updates"]] == pytest.approx([1.0, 1.0])


@pytest.mark.parametrize(("late", "severity"), [(True, "note"), (False, "wrong")])
def test_replicas_that_average_their_weights_need_no_reduction(late, severity):
    """Averaged after an update, not only made equal before the first."""
    apart, averaged = [backward(items=5, weight=1 / 5), step(), clear()], [event("parameters_changed")]
    loop = [*apart * 2, *averaged, *apart] if late else [*averaged, *apart * 3]
    judgement = judge(traces(loop, loop))
    assert found(judgement, "not_reduced").severity == severity
    assert found(judgement, "uncounted_items").severity == severity
    assert found(judgement, "uncounted_items").caused_by == "not_reduced"


def averaged(name: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        for parameter in model.parameters():
            getattr(torch.distributed, name)(parameter.data)


@pytest.mark.parametrize(("name", "times"), [("all_reduce", 1), ("broadcast", 0)])
def test_weights_that_are_averaged_over_ranks_are_seen_once(monkeypatch, name, times):
    monkeypatch.setattr(torch.distributed, name, lambda _: None)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watching = Watching(search=True)
    averaged(name, model, optimizer)
    events = [event for event in watching.end().events if event.kind in ("parameters_changed", "step")]
    assert [event.kind for event in events] == ["step", *["parameters_changed"] * times] * 2


def test_tensors_without_numbers_are_no_averages():
    model = nn.Linear(3, 2)
    kept = [torch.empty(2, 3, device="meta"), torch.empty(2, device="meta")]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watching = Watching()
    for _ in range(2):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    assert watching.end().unseen == ()
    assert all(tensor.is_meta for tensor in kept)
