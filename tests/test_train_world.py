"""The ranks of the job: they agree, end together, and share the cores of one machine."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from jobs import Listener, built, tiny
from ranks import run_ranks
from wholebatch.errors import RecordError
from wholebatch.ranks import group as group_module
from wholebatch.ranks.group import no_core_to_spare, threads_per_rank
from wholebatch.train.command import train, yield_idle_cores
from wholebatch.train.job import run_job
from wholebatch.train.parts import build_job
from wholebatch.train.world import World, join_world


def test_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    with join_world() as world:
        assert (world.rank, world.ranks, world.leads) == (0, 1, True)
        assert world.total([1.0, 2.5]) == [1.0, 2.5]
        assert world.any(True)
        assert not world.any(False)
        model = nn.Linear(1, 1)
        assert world.parallel(model) is model


class Held:
    """What stands for a DDP model: to be gone before its group is."""


@pytest.fixture
def of_two_ranks(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Ranks that start and leave no real group; whether what ``held`` refers to was alive at the end."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    alive: list[bool] = []
    monkeypatch.setattr(dist, "destroy_process_group", lambda: alive.append(held[0]() is not None))
    return alive


held: list[weakref.ref[Held]] = []


def _train(*, fails: bool) -> None:
    model = Held()
    held[:] = [weakref.ref(model)]
    model.itself = model  # type: ignore[attr-defined]  # as a hook of a model refers to it
    if fails:
        try:
            raise ValueError("first")
        except ValueError as error:
            raise RuntimeError("then") from error


def test_nothing_of_a_run_outlives_its_group(of_two_ranks: list[bool]) -> None:
    with group_module.joined_group():
        _train(fails=False)
    with pytest.raises(RuntimeError, match="then"), group_module.joined_group():
        _train(fails=True)
    assert of_two_ranks == [False, False]


def test_nothing_of_the_training_command_outlives_its_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models: list[weakref.ref[nn.Module]] = []

    def remembered(*given: object) -> object:
        job = build_job(*given)  # type: ignore[arg-type]
        models.append(weakref.ref(job.model.module))
        return job

    @contextmanager
    def left() -> Iterator[World]:
        yield World()
        gc.collect()
        assert [one() for one in models] == [None]

    monkeypatch.setattr("wholebatch.train.parts.build_job", remembered)
    monkeypatch.setattr("wholebatch.train.world.join_world", left)
    monkeypatch.chdir(tmp_path)
    changes = ["run.num_updates=1", "model.size='mini'", "run.folder='runs/one'"]
    assert train(changes=changes) == 0
    assert len(models) == 1


def device_in_a_group(_rank: int, _n: int) -> str:
    group_module._device = lambda local_rank: torch.device("meta", local_rank)
    os.environ["LOCAL_RANK"] = "3"
    with join_world() as world:
        return str(world.device)


def test_ranks_of_a_group_that_exists_have_their_own_device() -> None:
    assert run_ranks(device_in_a_group, 1) == ["meta:3"]


def refused(_rank: int, _n: int, folder: str) -> str:
    with join_world() as world:
        config = tiny(folder)
        with pytest.raises(RecordError, match="holds files already") as caught:
            run_job(built(config, world), Listener(config))
        return str(caught.value)


def test_a_used_folder_ends_every_rank(tmp_path: Path) -> None:
    (tmp_path / "note").write_text("mine")
    first, second = run_ranks(refused, 2, str(tmp_path))
    assert first == second


def test_cores_are_shared_and_nobody_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert [threads_per_rank(ranks) for ranks in (1, 2, 3, 8, 20)] == [8, 4, 2, 1, 1]
    for ranks, taken in (("1", False), ("7", False), ("8", True), ("20", True)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        no_core_to_spare.cache_clear()
        assert no_core_to_spare() is taken
    monkeypatch.delenv("LOCAL_WORLD_SIZE")  # not started by torchrun
    no_core_to_spare.cache_clear()
    assert not no_core_to_spare()
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert threads_per_rank(1) == 1


def test_a_world_is_on_the_cpu_unless_told() -> None:
    assert World().device == torch.device("cpu")


def test_waiting_threads_sleep_unless_the_user_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "")  # so that it is put back as it was found
    monkeypatch.delenv("OMP_WAIT_POLICY")
    yield_idle_cores()
    assert "OMP_WAIT_POLICY" not in os.environ, "torch is loaded, so it would have no effect"
    monkeypatch.delitem(sys.modules, "torch")
    yield_idle_cores()
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    yield_idle_cores()
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"


def test_the_command_is_read_without_torch() -> None:
    """Else the setting would come too late."""
    code = "import sys, wholebatch.train.command; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_only_a_restart_on_one_machine_meets_at_another_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest is shown by ``test_train_processes``, where a rank is killed and torchrun restarts it."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    for restarts, machines in (("0", "1"), ("1", "2")):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
        monkeypatch.setenv("GROUP_WORLD_SIZE", machines)
        assert group_module._store_of_this_start() == {}
