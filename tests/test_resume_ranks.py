"""Checkpoints of several ranks: bit for bit, on more or fewer ranks, and never a rank left waiting."""

from __future__ import annotations

import random
import resource
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ranks import run_ranks
from test_resume import Run, assert_same, build, names
from wholebatch.errors import CheckpointError, StaleGradientsError, UsageError
from wholebatch.resume import Checkpoints

pytestmark = pytest.mark.slow


def built(rank: int, n: int, **options: Any) -> Run:
    """DDP where there are several ranks; another seed than the run that is resumed, if asked."""
    wrap = DistributedDataParallel if n > 1 else lambda model: model
    return build(rank=rank, ranks=n, wrap=wrap, **options)


def go(rank: int, n: int, where: str, before: int, after: int, seed: int = 3) -> dict[str, Any]:
    """Load what is there, run, save, run on; all that there is to compare."""
    run = built(rank, n, seed=seed)
    checkpoints = Checkpoints(where)
    found = None
    if checkpoints.list():
        found = checkpoints.load(run.window, more={"ema": run.ema})
    records = run.go(before)
    checkpoints.save(run.window, more={"ema": run.ema})
    records += run.go(after)
    state = run.state()
    state["model"] = {name.removeprefix("module."): value for name, value in state["model"].items()}
    told = None
    if found is not None:
        told = (found.updates_attempted, found.samples, found.same_layout, found.random_state_restored)
    return {"records": records, "state": state, "found": told}


def test_two_ranks_go_on_bit_for_bit_in_new_processes(tmp_path):
    whole = run_ranks(go, 2, str(tmp_path / "whole"), 6, 0)
    run_ranks(go, 2, str(tmp_path / "split"), 3, 0)
    second = run_ranks(go, 2, str(tmp_path / "split"), 3, 0, 55)
    for one, other in zip(whole, second, strict=True):
        assert_same(other["state"], one["state"])
        assert_same(other["records"], one["records"][3:])
        assert other["found"] == (3, 36, True, True)
    assert not torch.equal(whole[0]["state"]["host"], whole[1]["state"]["host"])


def test_one_rank_goes_on_bit_for_bit_in_a_new_process(tmp_path):
    ((whole),) = run_ranks(go, 1, str(tmp_path / "whole"), 6, 0)
    run_ranks(go, 1, str(tmp_path / "split"), 3, 0)
    ((second),) = run_ranks(go, 1, str(tmp_path / "split"), 3, 0, 55)
    assert_same(second["state"], whole["state"])
    assert_same(second["records"], whole["records"][3:])


def test_two_ranks_then_one_then_two(tmp_path):
    two = run_ranks(go, 2, str(tmp_path), 2, 4)
    ((one),) = run_ranks(go, 1, str(tmp_path), 2, 0, 55)
    assert one["found"] == (2, 24, False, True)
    again = run_ranks(go, 2, str(tmp_path), 2, 0, 56)
    # The second rank has no random state in a checkpoint of one rank: a fresh one, the same each time.
    assert [rank["found"] for rank in again] == [(4, 48, False, True), (4, 48, False, False)]
    assert_same(again[0]["state"]["model"]["0.weight"], again[1]["state"]["model"]["0.weight"])
    digests = [record["sample_digest"] for record in two[0]["records"]]
    found = [record["sample_digest"] for record in one["records"] + again[0]["records"]]
    assert found == digests[2:]
    shutil.rmtree(tmp_path / "update-00000006")
    once_more = run_ranks(go, 2, str(tmp_path), 2, 0, 57)
    for a, b in zip(again, once_more, strict=True):
        assert_same(a["state"], b["state"])


def fresh_states(rank: int, n: int, where: str, seed: int) -> tuple[Any, Any, Any]:
    run = built(rank, n, seed=seed)
    Checkpoints(where).load(run.window)
    return random.random(), float(np.random.rand()), float(torch.rand(1))


def save_alone(rank: int, n: int, where: str, updates: int) -> None:
    run = built(rank, n)
    run.go(updates)
    Checkpoints(where).save(run.window)


def test_a_fresh_random_state_is_another_for_every_rank_and_update(tmp_path):
    run_ranks(save_alone, 1, str(tmp_path), 0)
    three = run_ranks(fresh_states, 3, str(tmp_path), 5)
    assert run_ranks(fresh_states, 3, str(tmp_path), 6) == three
    run_ranks(save_alone, 1, str(tmp_path), 1)
    numbers = [number for rank in three[1:] for number in rank]
    later = run_ranks(fresh_states, 3, str(tmp_path), 5)
    numbers += [number for rank in later[1:] for number in rank]
    assert len(set(numbers)) == len(numbers) == 12


# One rank fails --------------------------------------------------------------------------------------


def full_disk_on_the_leader(rank: int, n: int, where: str) -> tuple[list[str], float]:
    """The kernel refuses what goes beyond a size of file, as it does on a full disk."""
    run = built(rank, n)
    checkpoints = Checkpoints(where)
    run.go(1)
    checkpoints.save(run.window)
    run.go(1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (9000, limits[1]))
    started = time.perf_counter()
    with pytest.raises(CheckpointError) as raised:
        checkpoints.save(run.window)
    seconds = time.perf_counter() - started
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    words = [str(raised.value), *names(Path(where))]
    run.go(1)  # the run itself goes on
    checkpoints.save(run.window)
    return words, seconds


def test_a_full_disk_ends_on_both_ranks_and_leaves_the_one_before(tmp_path):
    outcome = run_ranks(full_disk_on_the_leader, 2, str(tmp_path))
    for words, seconds in outcome:
        said = f"the checkpoint of update 2 could not be written to {tmp_path}: File too large; free some"
        assert words[0].startswith(said)
        assert words[1:] == ["update-00000001"]
        assert seconds < 10.0
    assert names(tmp_path) == ["update-00000001", "update-00000003"]


def load_where_one_rank_sees_nothing(rank: int, n: int, where: str) -> str:
    run = built(rank, n)
    checkpoints = Checkpoints(where)
    checkpoints.save(run.window)
    dist.barrier()
    if rank == 1:
        folder = Path(where, "update-00000000")
        real = Path.read_bytes

        def unseen(path: Path) -> bytes:
            if folder in path.parents:
                raise FileNotFoundError(2, "No such file or directory")
            return real(path)

        Path.read_bytes = unseen  # type: ignore[method-assign]
    with pytest.raises(CheckpointError) as raised:
        checkpoints.load(run.window)
    return str(raised.value)


def test_a_rank_that_does_not_see_the_folder_ends_all(tmp_path):
    first, second = run_ranks(load_where_one_rank_sees_nothing, 2, str(tmp_path))
    said = "update-00000000 can't be loaded: its manifest.json can't be read (No such file or directory)"
    assert said in second
    assert first == f"rank 1: {second}"


def load_other_files(rank: int, n: int, where: str) -> str:
    """Each rank has a whole checkpoint of its own at the same path, as on disks that are not shared."""
    run = built(rank, n)
    for mine in range(n):
        Checkpoints(f"{where}/{mine}").save(run.window, more={"mine": mine})
    checkpoints = Checkpoints(f"{where}/{rank}")
    checkpoints._choose = lambda _: Path(f"{where}/0/update-00000000")  # type: ignore[method-assign]
    if rank == 1:
        read = checkpoints._read
        checkpoints._read = lambda _: read(Path(f"{where}/1/update-00000000"))  # type: ignore[method-assign]
    with pytest.raises(CheckpointError) as raised:
        checkpoints.load(run.window)
    return str(raised.value)


def test_ranks_that_see_different_files_end_together(tmp_path):
    for words in run_ranks(load_other_files, 2, str(tmp_path)):
        assert "the ranks see different files at" in words
        assert "give a folder that all share" in words


def load_into_another_model(rank: int, n: int, where: str) -> str:
    run = built(rank, n)
    checkpoints = Checkpoints(where)
    checkpoints.save(run.window)
    if rank == 1:
        run.window.finish.optimizers[0].param_groups.append(
            {**run.window.finish.optimizers[0].param_groups[0], "params": []}
        )
    before = run.state()
    with pytest.raises(UsageError) as raised:
        checkpoints.load(run.window)
    assert_same(run.state(), before)
    return str(raised.value)


def test_what_does_not_fit_on_one_rank_is_loaded_on_none(tmp_path):
    first, second = run_ranks(load_into_another_model, 2, str(tmp_path))
    assert "optimizer 1 had groups of [6] parameters and has groups of [6, 0]" in second
    assert first == f"rank 1: {second}"


def gradients_on_one_rank(rank: int, n: int, where: str) -> list[str]:
    run = built(rank, n)
    checkpoints = Checkpoints(where)
    checkpoints.save(run.window)
    if rank == 1:
        run.model.module[0].weight.grad = torch.zeros(8, 5)
    said = []
    for call in (checkpoints.save, checkpoints.load):
        with pytest.raises(StaleGradientsError) as raised:
            call(run.window)
        said.append(str(raised.value))
    run.model.module[0].weight.grad = None
    with pytest.raises(UsageError, match="score=nan can't be compared"):
        checkpoints.save(run.window, score=float("nan") if rank == 1 else 0.5)
    return said


def test_gradients_and_a_score_on_one_rank_are_refused_on_all(tmp_path):
    first, second = run_ranks(gradients_on_one_rank, 2, str(tmp_path))
    assert all("1 of 6 parameters have a gradient" in words for words in second)
    assert first == [f"rank 1: {words}" for words in second]


def unexpected_failure(rank: int, n: int, where: str) -> None:
    class Broken:
        def state_dict(self) -> Any:
            if rank == 1:
                raise ZeroDivisionError("mine")
            return {}

        def load_state_dict(self, _: Any) -> None: ...

    Checkpoints(where).save(built(rank, n).window, more={"broken": Broken()})


def test_a_failure_of_the_users_own_is_told_to_the_others(tmp_path):
    first, second = run_ranks(unexpected_failure, 2, str(tmp_path), expect="outcomes")
    assert second == ("error", "ZeroDivisionError", "mine")
    assert first == ("error", "CheckpointError", "rank 1 failed over a checkpoint: ZeroDivisionError: mine")
    assert not list(tmp_path.iterdir())


def gone(rank: int, n: int, where: str) -> None:
    run = built(rank, n)
    if rank == 0:
        import os

        os.fsync = lambda _: os._exit(9)  # type: ignore[assignment]
    Checkpoints(where).save(run.window)


def test_a_rank_that_is_gone_is_noticed(tmp_path):
    first, second = run_ranks(gone, 2, str(tmp_path), expect="outcomes")
    assert first == ("died", 9)
    assert second[:2] == ("error", "CheckpointError")
    assert "contact with another rank was lost over a checkpoint" in second[2]
    assert names(tmp_path) == []  # the rank that is left cleared what the other began


def poisoned_elsewhere(rank: int, n: int, where: str) -> None:
    run = built(rank, n)
    if rank == 1:
        run.window.finish.optimizers[0].register_step_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(Exception, match="beyond the point of no return"):
            run.go(1)
        time.sleep(2.0)
        return
    run.go(1)
    Checkpoints(where).save(run.window)


def test_a_window_that_is_poisoned_on_another_rank_is_not_saved(tmp_path):
    first, _ = run_ranks(poisoned_elsewhere, 2, str(tmp_path), expect="outcomes")
    assert first[:2] == ("error", "PoisonedWindowError")
    assert "rank 1 failed beyond the point of no return of an earlier update" in first[2]
    assert not list(tmp_path.iterdir())
