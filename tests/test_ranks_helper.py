"""The helper that starts ranks: what comes back, what goes wrong, and what is left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import threading
import time
import warnings
from pathlib import Path

import pytest

import ranks
from ranks import RankDiedError, RanksTimeoutError, RankTracebackError, run_ranks


class TwoWordsError(Exception):
    """Takes two arguments, so that it can't be unpickled from its message."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


def total(rank, n, start):
    import torch
    import torch.distributed as dist

    value = torch.tensor([start + rank], dtype=torch.float64)
    dist.all_reduce(value)
    return {"total": value, "rank": rank, "size": dist.get_world_size(), "members": n}


def add_on_server(rank, n, tensor):
    assert n == 1
    return (tensor + rank).requires_grad_() * 2


def ddp_gradient(rank, _n):
    import torch
    from torch.nn.parallel import DistributedDataParallel

    model = torch.nn.Linear(1, 1, bias=False)
    wrapped = DistributedDataParallel(model)
    wrapped(torch.tensor([[float(rank + 1)]])).sum().backward()
    return model.weight.grad


def surroundings(_rank, _n):
    import torch

    first = torch.rand(1).item()
    return {
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "pid": os.getpid(),
        "variable": os.environ.get("WHOLEBATCH_TEST_VARIABLE"),
        "interface": os.environ["GLOO_SOCKET_IFNAME"],
        "random": first,
    }


def fail_on(rank, _n, culprit):
    if rank == culprit:
        raise ValueError(f"rank {rank} does not like 3 samples")
    return rank


def fail_and_leave_peers_waiting(rank, _n, culprit):
    import torch
    import torch.distributed as dist

    if rank == culprit:
        raise ValueError("the first failure")
    dist.all_reduce(torch.ones(1))


def warn(_rank, _n):
    warnings.warn("this worker warns", UserWarning, stacklevel=1)


def raise_odd_error(_rank, _n):
    raise TwoWordsError("two", "words")


def return_a_function(_rank, _n):
    return lambda: 1


def die(rank, _n, how):
    import torch
    import torch.distributed as dist

    if rank == 1:
        if how == "exit":
            os._exit(7)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def sleep_if(rank, _n, sleeper, seconds):
    if rank == sleeper:
        time.sleep(seconds)
    return rank


def wait_alone(rank, _n):
    import torch
    import torch.distributed as dist

    if rank == 0:
        dist.all_reduce(torch.ones(1))
    else:
        time.sleep(30)


def look_back(rank, _n):
    """Rank 0 is done at once; rank 1 looks for it later."""
    import torch
    import torch.distributed as dist

    pid = torch.tensor([os.getpid()])
    dist.broadcast(pid, src=0)
    if rank == 0:
        return "done"
    time.sleep(0.5)
    try:
        os.kill(int(pid.item()), 0)
    except ProcessLookupError:
        return "gone"
    return "still there"


@pytest.mark.parametrize("n", [1, 2, 3])
def test_results_come_back_by_value_in_order_of_rank(n):
    results = run_ranks(total, n, 10.0)
    assert [result["rank"] for result in results] == list(range(n))
    assert all(result["size"] == result["members"] == n for result in results)
    assert all(result["total"].item() == sum(10.0 + rank for rank in range(n)) for result in results)


def test_tensors_travel_both_ways_without_a_thread_left_here():
    import torch

    before = set(threading.enumerate())
    (result,) = run_ranks(add_on_server, 1, torch.ones(3, 2))
    assert torch.equal(result, torch.full((3, 2), 2.0))
    assert set(threading.enumerate()) == before


def test_ranks_are_a_process_group_that_averages():
    gradients = run_ranks(ddp_gradient, 2)
    assert [gradient.item() for gradient in gradients] == [1.5, 1.5]


def test_a_worker_is_calm_and_sees_the_environment_of_the_call(monkeypatch):
    import torch

    monkeypatch.setenv("WHOLEBATCH_TEST_VARIABLE", "set after the server began")
    first, second = run_ranks(surroundings, 2)
    (third,) = run_ranks(surroundings, 1)
    assert first["threads"] == 1
    assert first["deterministic"] is True
    assert first["variable"] == "set after the server began"
    assert first["interface"] in ("lo", "lo0")
    torch.manual_seed(0)
    assert first["random"] == second["random"] == third["random"] == torch.rand(1).item()
    assert len({first["pid"], second["pid"], third["pid"], os.getpid()}) == 4


def test_the_worker_also_runs_in_this_process():
    assert fail_on(0, 1, culprit=5) == 0


@pytest.mark.parametrize("culprit", [0, 1])
def test_an_exception_is_raised_here_with_rank_and_traceback(culprit):
    with pytest.raises(ValueError, match=f"rank {culprit} does not like 3 samples") as caught:
        run_ranks(fail_on, 2, culprit)
    cause = caught.value.__cause__
    assert isinstance(cause, RankTracebackError)
    assert f"on rank {culprit} of 2" in str(cause)
    assert "in fail_on" in str(cause)


@pytest.mark.parametrize("culprit", [0, 1])
def test_the_first_failure_is_raised_and_not_its_echo(culprit):
    with pytest.raises(ValueError, match="the first failure"):
        run_ranks(fail_and_leave_peers_waiting, 3, culprit)


def test_warnings_are_errors_in_a_worker():
    with pytest.raises(UserWarning, match="this worker warns"):
        run_ranks(warn, 1)


def test_an_exception_that_can_not_travel_is_quoted():
    with pytest.raises(RuntimeError, match="TwoWordsError: two words"):
        run_ranks(raise_odd_error, 1)


def test_a_result_that_can_not_travel_is_an_error():
    with pytest.raises((AttributeError, TypeError), match="lambda"):
        run_ranks(return_a_function, 1)


def test_a_function_that_can_not_travel_is_refused():
    with pytest.raises(TypeError, match="function at the top of a module"):
        run_ranks(lambda _rank, _n: 1, 1)


def test_no_ranks_are_refused():
    with pytest.raises(ValueError, match="1 rank or more, not 0"):
        run_ranks(total, 0, 1.0)


@pytest.mark.parametrize(("how", "exit_code"), [("exit", 7), ("kill", -signal.SIGKILL)])
def test_a_dead_rank_is_told_from_those_it_left_alone(how, exit_code):
    outcomes = run_ranks(die, 2, how, expect="outcomes", timeout_s=20)
    assert outcomes[1] == ("died", exit_code)
    assert outcomes[0][0] == "error"
    with pytest.raises(RankDiedError, match=f"rank 1 of 2 died with exit code {exit_code}"):
        run_ranks(die, 2, how, timeout_s=20)


def test_outcomes_name_each_rank():
    assert run_ranks(fail_on, 3, 1, expect="outcomes") == [
        ("ok", 0),
        ("error", "ValueError", "rank 1 does not like 3 samples"),
        ("ok", 2),
    ]


@pytest.mark.parametrize("expect", ["results", "outcomes"])
def test_the_time_limit_kills_and_says_where_a_rank_stood(expect):
    began = time.monotonic()
    late = r"after 1.0 s, rank\(s\) 1 of 2 were still running"
    with pytest.raises(RanksTimeoutError, match=late) as caught:
        run_ranks(sleep_if, 2, 1, 60.0, timeout_s=1.0, expect=expect)
    assert time.monotonic() - began < 10
    assert "in sleep_if" in str(caught.value)
    assert "rank 0: ok" in str(caught.value)


def test_a_rank_left_alone_in_a_collective_gives_up_before_the_limit():
    with pytest.raises(RuntimeError, match=r"(?i)timed out"):
        run_ranks(wait_alone, 2, timeout_s=2.0)


def test_a_rank_that_is_done_stays_until_its_peers_have_read():
    assert run_ranks(look_back, 2) == ["done", "still there"]


def test_nothing_is_left_behind(monkeypatch, tmp_path):
    run_ranks(sleep_if, 1, 0, 0.0)  # the server runs from here on
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    environment, threads = dict(os.environ), set(threading.enumerate())
    run_ranks(sleep_if, 2, 1, 0.0)
    with pytest.raises(ValueError, match="does not like"):
        run_ranks(fail_on, 2, 0)
    with pytest.raises(RanksTimeoutError):
        run_ranks(sleep_if, 2, 0, 60.0, timeout_s=0.5)
    assert list(tmp_path.iterdir()) == []
    assert dict(os.environ) == environment
    assert set(threading.enumerate()) == threads
    assert multiprocessing.active_children() == []


def test_a_worker_ends_with_a_parent_that_vanished():
    """Without an answer from anybody: the end of the pipe is enough."""
    here, there = multiprocessing.Pipe()
    watcher = multiprocessing.get_context("fork").Process(
        target=_watch_until_end, args=(there, here), daemon=True
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a fork beside threads, which this one allows
        watcher.start()
    there.close()
    here.close()
    watcher.join(10)
    assert watcher.exitcode == 1


def _watch_until_end(pipe, parents_end):
    parents_end.close()
    ranks._watch_parent(pipe, threading.Event(), threading.Event())


def test_no_other_file_starts_processes_for_ranks():
    """One helper; a second one would leak in its own way."""
    here = Path(__file__).parent
    words = ("import multiprocessing", "from multiprocessing", "torch.multiprocessing", "mp.spawn")
    # Those of the loader look at the processes that it starts itself, which read samples.
    # That of the audit holds a script that starts ranks itself, as users' scripts do.
    allowed = {"ranks.py", "leaks.py", "test_loading.py", "test_loading_ranks.py", Path(__file__).name}
    allowed.add("test_audit_script.py")
    found = [
        path.name
        for path in sorted(here.glob("*.py"))
        if path.name not in allowed and any(word in path.read_text() for word in words)
    ]
    assert found == []
