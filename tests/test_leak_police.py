"""The leak police see each kind of leak, put it back, and keep quiet otherwise."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import leaks

TESTS = Path(__file__).parent


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(leaks, "PATIENCE_S", 0.1)


def test_nothing_left_is_nothing_found():
    before = leaks.look()
    thread = threading.Thread(target=lambda: None)
    thread.start()
    subprocess.run([sys.executable, "-c", "pass"], check=True)
    assert leaks.leaks_since(before) == []


def test_an_environment_variable_is_seen_and_put_back():
    os.environ["WHOLEBATCH_KEPT"] = "old"
    before = leaks.look()
    os.environ["WHOLEBATCH_LEAK"] = "1"
    os.environ["WHOLEBATCH_KEPT"] = "new"
    assert leaks.leaks_since(before) == [
        "environment variable WHOLEBATCH_KEPT: was 'old', is 'new'",
        "environment variable WHOLEBATCH_LEAK: was None, is '1'",
    ]
    leaks.put_back(before)
    assert leaks.leaks_since(before) == []
    assert os.environ.pop("WHOLEBATCH_KEPT") == "old"


def test_a_working_directory_is_seen_and_put_back(tmp_path):
    before = leaks.look()
    os.chdir(tmp_path)
    (found,) = leaks.leaks_since(before)
    assert found.endswith(f"is {tmp_path}")
    leaks.put_back(before)
    assert os.getcwd() == before.folder


@pytest.mark.usefixtures("impatient")
def test_a_thread_is_seen():
    before, stop = leaks.look(), threading.Event()
    thread = threading.Thread(target=stop.wait, name="forgotten")
    thread.start()
    assert leaks.leaks_since(before) == ["thread 'forgotten' is still running"]
    stop.set()
    thread.join()
    assert leaks.leaks_since(before) == []


@pytest.mark.usefixtures("impatient")
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="child processes are listed on Linux only")
def test_a_child_process_is_seen():
    before = leaks.look()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert leaks.leaks_since(before) == [f"child process {child.pid} is still running"]
        child.communicate(b"\n")
    assert leaks.leaks_since(before) == []


def test_a_thread_that_ends_while_it_is_looked_at_is_no_problem(monkeypatch, tmp_path):
    monkeypatch.setattr(Path, "glob", lambda *_: iter([tmp_path / "ended" / "children"]))
    assert leaks.leaks_since(leaks.look()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda torch: torch.set_grad_enabled(False), "torch grad mode: was True, is False"),
        (
            lambda torch: torch.set_default_dtype(torch.float64),
            "torch default dtype: was torch.float32, is torch.float64",
        ),
        (lambda torch: torch.set_num_threads(2), "torch threads: was 1, is 2"),
        (
            lambda torch: torch.use_deterministic_algorithms(False),
            "torch deterministic algorithms: was True, is False",
        ),
        (lambda torch: torch.set_default_device("meta"), "torch default device: was 'cpu', is 'meta'"),
    ],
)
def test_a_switch_of_torch_is_seen_and_put_back(change, message):
    import torch

    leaks.calm_torch()
    before = leaks.look()
    change(torch)
    assert leaks.leaks_since(before) == [message]
    leaks.put_back(before)
    assert leaks.leaks_since(before) == []


def test_a_process_group_is_seen_and_ended(tmp_path):
    import torch.distributed as dist

    before = leaks.look()
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    assert "torch process group: was False, is True" in leaks.leaks_since(before)
    leaks.put_back(before)
    assert not dist.is_initialized()
    assert leaks.leaks_since(before) == []


def test_the_same_random_numbers_in_every_test():
    import random

    import numpy
    import torch

    def draw():
        leaks.seed_everything()
        return random.random(), float(numpy.random.rand()), torch.rand(1).item()

    assert draw() == draw()


@pytest.mark.slow
def test_the_fixture_fails_a_leaking_test_only(pytester):
    """As installed: this project's own conftest, in a run of its own."""
    for name in ("conftest.py", "leaks.py"):
        (pytester.path / name).write_text((TESTS / name).read_text())
    pytester.makeini("[pytest]\nmarkers =\n    slow: runs last\n")
    pytester.makepyfile(
        """
        import os, sys, pytest

        @pytest.mark.slow
        def test_slow_is_last():
            assert "WHOLEBATCH_LEAK" not in os.environ

        def test_leaks():
            os.environ["WHOLEBATCH_LEAK"] = "1"

        def test_is_spared():
            assert "WHOLEBATCH_LEAK" not in os.environ
            assert "torch" not in sys.modules
        """
    )
    result = pytester.runpytest_subprocess("-v", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=3, errors=1)
    result.stdout.fnmatch_lines(
        [
            "*test_leaks PASSED*",
            "*test_leaks ERROR*",
            "*test_is_spared PASSED*",
            "*test_slow_is_last PASSED*",
            "*environment variable WHOLEBATCH_LEAK: was None, is '1'*",
        ]
    )
