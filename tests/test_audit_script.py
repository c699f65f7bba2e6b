"""A script under the watch runs as Python would run it, on one rank and on several."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from wholebatch.audit.gather import clear, collect, leave, read, shared_folder
from wholebatch.audit.script import audit_script
from wholebatch.audit.stall import StallWatch
from wholebatch.audit.trace import RankTrace
from wholebatch.audit.watching import Watching
from wholebatch.errors import UsageError

LOOP = """
import torch, torch.nn.functional as F
torch.manual_seed(0)
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for update in range(2):
    for size in (2, 3):
        loss = F.cross_entropy(model(torch.randn(size, 3)), torch.zeros(size, dtype=torch.long))
        (loss / 2).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(text: str, name: str = "train.py") -> str:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(textwrap.dedent(text))
        return name

    return write


def test_a_script_is_main_with_its_own_words_and_folder(script, capsys):
    script("answer = 42", "helper.py")
    name = script(
        """
        import pickle, sys
        import helper
        class Own: pass
        print(__name__, sys.argv, __file__, helper.answer, type(pickle.loads(pickle.dumps(Own()))).__name__)
        """
    )
    before = list(sys.argv), list(sys.path), sys.modules["__main__"]
    audited = audit_script(name, ["--lr", "0.1"])
    assert capsys.readouterr().out == (
        f"__main__ ['train.py', '--lr', '0.1'] {Path('train.py').resolve()} 42 Own\n"
    )
    assert (list(sys.argv), list(sys.path), sys.modules["__main__"]) == before
    assert (audited.failure, audited.exit_code) == (None, 0)
    assert audited.judgement.verdict == "not_judged"
    sys.modules.pop("helper")


def test_a_module_is_run_by_its_name_and_its_lines_are_the_users(script):
    script("", "package/__init__.py")
    script(LOOP, "package/train.py")
    audited = audit_script("package.train", [], module=True)
    found = audited.judgement.findings[0]
    assert (found.kind, found.across) == ("unequal_item_weights", "micro_batches")
    assert found.place.file == os.path.join("package", "train.py")
    for name in [name for name in sys.modules if name.partition(".")[0] == "package"]:
        sys.modules.pop(name)


def test_a_failure_is_handed_on_with_what_was_seen(script):
    audited = audit_script(script(LOOP + "\nraise KeyError('labels')\n"), [])
    assert isinstance(audited.failure, KeyError)
    trace = audited.judgement.evidence.traces[0]
    assert trace.ended == "failed"
    assert "KeyError: 'labels', at train.py:13" in trace.failure
    assert [finding.kind for finding in audited.judgement.findings] == ["unequal_item_weights"]


@pytest.mark.parametrize(("code", "ended"), [("0", "finished"), ("None", "finished"), ("3", "exit")])
def test_the_exit_code_of_the_script_is_told(script, code, ended):
    audited = audit_script(script(f"{LOOP}\nimport sys\nsys.exit({code})\n"), [])
    assert audited.exit_code == (3 if code == "3" else 0)
    assert audited.judgement.evidence.traces[0].ended == ended


def test_the_judgement_is_told_as_soon_as_enough_updates_were_seen(script, capsys):
    audited = audit_script(
        script(LOOP + "\nprint('the end')\n"),
        [],
        updates=1,
        tell=lambda judgement: print(judgement.verdict),
    )
    assert capsys.readouterr().out == "findings\nthe end\n"
    assert len(audited.judgement.evidence.windows) == 1


def test_a_script_that_is_not_there_is_refused():
    with pytest.raises(UsageError, match=r"there is no file absent.py; give the script to audit"):
        audit_script("absent.py", [])


@pytest.mark.slow
def test_the_script_computes_what_it_computes_alone(script):
    name = script(LOOP + "\nprint([p.tolist() for p in model.parameters()])\n")
    alone = subprocess.run([sys.executable, name], capture_output=True, text=True, check=True).stdout
    command = [sys.executable, "-m", "wholebatch", "audit", "--json", "seen.json", name]
    audited = subprocess.run(command, capture_output=True, text=True)
    assert audited.returncode == 1
    assert audited.stdout.startswith(alone)
    assert json.loads(Path("seen.json").read_text())["findings"][0]["kind"] == "unequal_item_weights"


# -- several ranks -----------------------------------------------------------------------------------------


def seen_of_a_loop() -> RankTrace:
    watching = Watching()
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        F.cross_entropy(model(torch.randn(4, 3)), torch.zeros(4, dtype=torch.long)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return watching.end()


def test_a_trace_comes_back_from_its_file_as_it_was(tmp_path):
    trace = seen_of_a_loop()
    leave(trace, tmp_path)
    again = read(tmp_path / "rank-0.npz")
    assert repr(again) == repr(trace)
    assert type(again.events[0]) is type(trace.events[0])


def test_traces_are_collected_when_all_are_there_or_after_a_while(tmp_path):
    trace = replace(seen_of_a_loop(), num_ranks=2)
    for rank in (0, 1):
        leave(replace(trace, rank=rank), tmp_path)
    assert sorted(collect(tmp_path, 2, wait_s=5.0)) == [0, 1]
    assert sorted(collect(tmp_path, 3, wait_s=0.1)) == [0, 1]
    clear(tmp_path)
    assert not tmp_path.exists()


def test_each_start_of_a_job_has_a_folder_of_its_own(monkeypatch, tmp_path):
    monkeypatch.setenv("MASTER_PORT", "29500")
    one = shared_folder(tmp_path)
    assert shared_folder(tmp_path) == one
    monkeypatch.setenv("MASTER_PORT", "29501")
    assert shared_folder(tmp_path) != one
    assert one.stat().st_mode & 0o077 == 0


def torchrun(script: str, *options: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*launch, "-m", "wholebatch", "audit", *options, script],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=environment,
    )


RANKS = """
import torch, torch.distributed as dist, torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(3, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(rank)
"""


@pytest.mark.slow
def test_one_report_for_all_ranks(script):
    name = script(
        RANKS
        + """
for update in range(3):
    size = 2 + 2 * rank
    F.cross_entropy(model(torch.randn(size, 3)), torch.zeros(size, dtype=torch.long)).backward()
    optimizer.step()
    optimizer.zero_grad()
del model
dist.destroy_process_group()
"""
    )
    done = torchrun(name, "--json", "seen.json")
    document = json.loads(Path("seen.json").read_text())
    assert (document["ranks"], document["replicas"]) == (2, 2)
    finding = document["findings"][0]
    assert (finding["kind"], finding["across"]) == ("unequal_item_weights", "replicas")
    assert done.stdout.count("micro-batch rank") == 1


@pytest.mark.slow
def test_ranks_that_wait_for_each_other_are_ended_and_named(script):
    name = script(
        RANKS
        + """
for update in range(3):
    for micro_batch in range(3 - rank * (update == 1)):
        F.cross_entropy(model(torch.randn(2, 3)), torch.zeros(2, dtype=torch.long)).backward()
    optimizer.step()
    optimizer.zero_grad()
dist.barrier()
import time
time.sleep(600)
"""
    )
    torchrun(name, "--json", "seen.json", "--stall-seconds", "4")
    kinds = {finding["kind"]: finding for finding in json.loads(Path("seen.json").read_text())["findings"]}
    assert kinds["unequal_micro_batch_counts"]["severity"] == "wrong"


class Waiting:
    """Something whose progress a test decides."""

    def __init__(self) -> None:
        self.progress = 0
        self.stalls = 0


def test_only_a_wait_for_others_counts_as_a_stall(monkeypatch):
    import threading

    waiting, over = Waiting(), threading.Event()

    def stalled() -> None:
        waiting.stalls += 1
        over.set()

    def watch(waits: bool) -> Any:
        monkeypatch.setattr(StallWatch, "_waits", lambda _: waits)
        return StallWatch(lambda: waiting.progress, 0.2, stalled)

    busy = watch(waits=False)
    assert not over.wait(1.2)
    busy.end()
    stuck = watch(waits=True)
    assert over.wait(5.0)
    assert waiting.stalls == 1
    stuck.end()


SPAWNING = """
import os, sys
import torch, torch.distributed as dist, torch.nn.functional as F
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

def train(rank, store):
    dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
    model = DistributedDataParallel(torch.nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(rank)
    for update in range(3):
        size = 2 + 2 * rank
        F.cross_entropy(model(torch.randn(size, 3)), torch.zeros(size, dtype=torch.long)).backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    del model  # freed after its group, DDP can wait for ever (torch 2.13, without an audit)
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(train, args=(os.path.abspath("store"),), nprocs=2)
"""


@pytest.mark.slow
def test_ranks_that_the_script_starts_itself_are_judged_together(script):
    name = script(SPAWNING)
    command = [sys.executable, "-m", "wholebatch", "audit", "--json", "seen.json", name]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 1, done.stderr
    document = json.loads(Path("seen.json").read_text())
    assert (document["ranks"], document["replicas"]) == (2, 2)
    finding = document["findings"][0]
    assert (finding["kind"], finding["across"]) == ("unequal_item_weights", "replicas")
    assert finding["file"] == "train.py"


@pytest.mark.slow
def test_the_first_rank_waits_for_what_the_others_still_do(script):
    name = script(
        RANKS
        + """
for update in range(2):
    size = 2 + 2 * rank
    F.cross_entropy(model(torch.randn(size, 3)), torch.zeros(size, dtype=torch.long)).backward()
    optimizer.step()
    optimizer.zero_grad()
del model
dist.destroy_process_group()
if rank:
    import time
    time.sleep(3)
    open("written", "w").close()
"""
    )
    torchrun(name)
    assert Path("written").exists()


def test_a_script_can_be_ended_with_the_audit(script, capsys):
    audited = audit_script(script(LOOP + "\nprint('the end')\n"), [], updates=1, stop=True)
    assert (audited.failure, audited.exit_code) == (None, 0)
    assert capsys.readouterr().out == ""
    assert len(audited.judgement.evidence.windows) == 1


def test_what_went_wrong_in_telling_is_raised_when_the_script_is_over(script, capsys):
    def tell(_: Any) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        audit_script(script(LOOP + "\nprint('the end')\n"), [], updates=1, tell=tell)
    assert capsys.readouterr().out == "the end\n"


def test_a_module_that_is_not_there_is_refused():
    with pytest.raises(UsageError, match=r"there is no module nosuch.mod; -m takes a name"):
        audit_script("nosuch.mod", [], module=True)
