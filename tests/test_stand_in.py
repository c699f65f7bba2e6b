"""A rank that failed stands in: the others finish the reduction that they went on to, and hear of it after.

Nobody waits before a reduction that a rank can take part in with zeros, so a failure comes to light only
after it. All the same nothing is counted, nothing moves, and the update may be run again.
"""

from __future__ import annotations

import resource
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from problems import Case, oracle
from ranks import run_ranks
from wholebatch.errors import ObjectiveError, OtherRankFailedError, PoisonedWindowError
from wholebatch.losses import next_token_loss
from wholebatch.objective import counted_loss
from wholebatch.ranks.agreement import PendingExchange
from wholebatch.ranks.ddp import DDPRanks
from wholebatch.window import UpdateWindow

CASE = Case(counts=[[[5, 2], [3], [0, 4, 1]], [[3, 1], [5], [4, 3, 2]], [[2, 6], [1]]])
OBJECTIVE = next_token_loss()

pytestmark = pytest.mark.slow


class Worker:
    """A window on this rank over a part of ``CASE``, and how its attempts ended."""

    def __init__(
        self,
        rank: int,
        n: int,
        *,
        hook: Any = None,
        counts: Any = CASE.counts,
        dtype: torch.dtype = torch.float64,
        **options: Any,
    ) -> None:
        self.case = Case(counts=counts[:n])
        self.rank, self.model = rank, self.case.model(dtype)
        self.ddp = DistributedDataParallel(self.model, **options)
        if hook is not None:
            self.ddp.register_comm_hook(None, hook)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.3, momentum=0.9)
        self.window = UpdateWindow(self.ddp, self.optimizer, OBJECTIVE)
        self.ranks = self.window._parts.ranks
        self.batches = self.case.batches()[rank]
        self.before = [p.detach().clone() for p in self.model.parameters()]

    def attempt(self, *, fails_at: int | None = None) -> str:
        """One update; ``fails_at`` is the micro-batch whose loss fails on this rank."""

        def loss(model: nn.Module, batch: dict[str, Tensor]) -> Any:
            found = OBJECTIVE(model(batch["input_ids"]), batch)
            if fails_at is not None and batch is self.batches[fails_at]:
                raise RuntimeError("out of memory")
            return found

        try:
            self.window.run(self.batches, loss)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    def untouched(self) -> bool:
        same = [torch.equal(p, q) for p, q in zip(self.model.parameters(), self.before, strict=True)]
        clear = all(p.grad is None or not p.grad.any() for p in self.model.parameters())
        return all(same) and clear and not self.optimizer.state

    def distance(self) -> float:
        """How far the parameters are from one right update."""
        truth = oracle(self.case).parameters
        return max((p - truth[name]).abs().max().item() for name, p in self.model.named_parameters())


WRAPPINGS: dict[str, dict[str, Any]] = {
    "one_bucket": {},
    "many_buckets": {"bucket_cap_mb": 1e-4},
    "hook": {"hook": default_hooks.allreduce_hook},
}


def run_wrappings(rank: int, n: int, failing: list[int]) -> Any:
    found = {}
    for name, options in WRAPPINGS.items():
        worker = Worker(rank, n, **options)
        assert worker.ranks.stands_in
        last = len(worker.batches) - 1
        told = []
        for index in (0, last, last):  # after the first the buckets are made anew
            raised = worker.attempt(fails_at=index if rank in failing else None)
            told.append((raised, worker.untouched()))
        found[name] = told, worker.attempt(), worker.window.counters.updates_attempted, worker.distance()
    return found


@pytest.mark.parametrize("failing", [[1], [0, 2], [0, 1, 2]], ids=str)
def test_every_wrapping_is_rolled_back_everywhere_and_may_be_run_again(failing: list[int]) -> None:
    for rank, found in enumerate(run_ranks(run_wrappings, 3, failing, timeout_s=120)):
        for name, (told, again, attempted, distance) in found.items():
            for raised, untouched in told:
                if rank in failing:
                    assert raised == "RuntimeError: out of memory", (name, raised)
                else:
                    names = "rank 1" if failing == [1] else "ranks 0 and 2"
                    assert raised.startswith(f"OtherRankFailedError: {names} failed while"), (name, raised)
                    assert "agreeing on what came out" in raised, (name, raised)
                assert untouched, (name, rank)
            assert (again, attempted) == ("nothing", 1), (name, rank)
            assert distance < 1e-14, (name, rank)


HELD_BACK: dict[str, dict[str, Any]] = {
    # the others have to meet: nobody reduces in a backward
    "one_without": {"counts": [CASE.counts[0], []]},
    "wider_than_the_reducer": {"counts": [[[3]] * 5] * 2, "dtype": torch.bfloat16},
}


def run_held_back(rank: int, n: int) -> Any:
    found = {}
    for name, options in HELD_BACK.items():
        worker = Worker(rank, n, **options)
        raised = worker.attempt(fails_at=1 if rank == 0 else None)
        found[name] = raised, worker.untouched(), worker.ranks.stands_in, worker.attempt()
    return found


def test_where_the_reduction_follows_the_window_the_ranks_meet_before_it() -> None:
    first, second = run_ranks(run_held_back, 2, timeout_s=60)
    for name in HELD_BACK:
        assert first[name] == ("RuntimeError: out of memory", True, False, "nothing"), name
        raised, *rest = second[name]
        assert raised.startswith("OtherRankFailedError: rank 0 failed while this rank was about to"), raised
        assert rest == [True, False, "nothing"], name


def run_failing_count(rank: int, n: int) -> Any:
    """After a good update one fails before the others could go on to reduce."""
    worker = Worker(rank, n)
    first, good = worker.attempt(), worker.batches
    if rank == 0:
        worker.batches = [{name: part for name, part in one.items() if name != "labels"} for one in good]
    raised = worker.attempt()
    worker.batches = good
    return first, raised, worker.attempt(), worker.window.counters.updates_applied


def test_a_rank_that_can_not_count_does_not_stand_in() -> None:
    first, second = run_ranks(run_failing_count, 2, timeout_s=40)
    assert first[1].startswith("ObjectiveError")
    assert second[1].startswith("OtherRankFailedError: rank 0 failed while this rank was adding up")
    assert first[::2] == second[::2] == ("nothing", "nothing")
    assert (first[3], second[3]) == (2, 2)


def run_both_failing(rank: int, n: int) -> Any:
    """One can't count, the other fails before it has heard of that."""
    worker = Worker(rank, n)
    good = worker.batches
    if rank == 1:
        worker.batches = [{name: part for name, part in one.items() if name != "labels"} for one in good]
    raised = worker.attempt(fails_at=0 if rank == 0 else None)
    worker.batches = good
    return raised, worker.untouched(), worker.attempt(), worker.distance()


def test_two_ranks_that_fail_at_different_places_tell_each_other_once() -> None:
    first, second = run_ranks(run_both_failing, 2, timeout_s=40)
    assert first[0] == "RuntimeError: out of memory"
    assert second[0].startswith("ObjectiveError")
    for _, untouched, again, distance in (first, second):
        assert (untouched, again) == (True, "nothing")
        assert distance < 1e-14


def run_failing_beside_another_place(rank: int, n: int) -> Any:
    worker = Worker(rank, n)
    if rank == 0:
        return worker.attempt(fails_at=0), worker.attempt(), worker.untouched()
    with pytest.raises(PoisonedWindowError, match="elsewhere in its loop"):
        worker.window._parts.agreement.exchange(doing="drawing micro-batches").wait()
    return None


def test_a_failed_rank_does_not_wait_for_one_that_is_elsewhere_in_its_loop() -> None:
    raised, again, untouched = run_ranks(run_failing_beside_another_place, 2, timeout_s=40)[0]
    assert raised == "RuntimeError: out of memory"
    assert again.startswith("PoisonedWindowError")
    assert "elsewhere in its loop" in again
    assert untouched


class InterruptError(Exception):
    """Stands for what a signal handler raises."""


def run_interrupted_count(rank: int, n: int) -> Any:
    """A signal arrives just when rank 0 has waited for what all hold, after which the others go on."""
    worker, wait, arrived = Worker(rank, n), PendingExchange.wait, []

    def interrupted(self: PendingExchange) -> list[tuple[float, ...]]:
        found = wait(self)
        if self._doing == "adding up what the window holds" and not arrived:
            arrived.append(True)
            raise InterruptError("Ctrl-C")
        return found

    with mock.patch.object(PendingExchange, "wait", interrupted) if rank == 0 else nullcontext():
        raised = worker.attempt()
    return raised, worker.untouched(), worker.attempt(), worker.distance()


def test_an_interrupt_while_counting_is_rolled_back_everywhere() -> None:
    first, second = run_ranks(run_interrupted_count, 2, timeout_s=40)
    assert first[0] == "InterruptError: Ctrl-C"
    assert second[0].startswith("OtherRankFailedError: rank 0 failed")
    for _, untouched, again, distance in (first, second):
        assert untouched
        assert again == "nothing"
        assert distance < 1e-14


def run_interrupted_twice(rank: int, n: int) -> Any:
    """Ctrl-C in a forward, and again while rank 0 waits for what all hold."""
    worker, wait = Worker(rank, n), PendingExchange.wait

    def interrupted(self: PendingExchange) -> list[tuple[float, ...]]:
        found = wait(self)
        if self._doing == "adding up what the window holds":
            raise KeyboardInterrupt
        return found

    if rank == 1:
        return worker.attempt()
    before = torch.get_rng_state()

    def loss(*_: Any) -> Any:
        torch.rand(3)
        raise KeyboardInterrupt

    with mock.patch.object(PendingExchange, "wait", interrupted), pytest.raises(KeyboardInterrupt):
        worker.window.run(worker.batches, loss)
    return torch.equal(torch.get_rng_state(), before), worker.untouched(), worker.attempt()


def test_who_is_interrupted_twice_has_put_back_and_does_not_go_on() -> None:
    (kind, found), _ = run_ranks(run_interrupted_twice, 2, expect="outcomes", timeout_s=40)
    assert kind == "ok", found
    same_random_state, untouched, again = found
    assert same_random_state
    assert untouched
    assert again.startswith("PoisonedWindowError: an update that had failed was interrupted")


def run_two_windows(rank: int, n: int) -> Any:
    """Over one model: what one window does to DDP's buckets the other has not seen."""
    found = {}
    for name in ("count", "tail"):
        worker = Worker(rank, n)
        other = UpdateWindow(worker.ddp, worker.optimizer, OBJECTIVE)
        worker.attempt()
        if name == "count":
            broken = [{"input_ids": batch["input_ids"]} for batch in worker.batches]
            with pytest.raises((ObjectiveError, OtherRankFailedError)):
                other.run(
                    broken if rank == 0 else worker.batches, lambda m, b: OBJECTIVE(m(b["input_ids"]), b)
                )
        else:  # it commits, reduced at the end, and leaves DDP as new
            held = worker.batches if rank == 0 else []
            other.run(held, lambda m, b: OBJECTIVE(m(b["input_ids"]), b))
        found[name] = worker.attempt(fails_at=1 if rank == 0 else None), worker.attempt()
    return found


def test_two_windows_over_one_model() -> None:
    first, second = run_ranks(run_two_windows, 2, timeout_s=60)
    for name, (raised, again) in first.items():
        assert (raised, again) == ("RuntimeError: out of memory", "nothing"), name
    for name, (raised, again) in second.items():
        assert raised.startswith("OtherRankFailedError: rank 0 failed"), (name, raised)
        assert again == "nothing", name


def run_out_of_memory(rank: int, n: int) -> Any:
    """Room runs out in a forward of rank 0, whose functions hold it all."""
    assert n == 2
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(8)])
    ddp = DistributedDataParallel(model)
    window = UpdateWindow(ddp, torch.optim.SGD(model.parameters(), lr=1e-3), counted_loss(len))
    batches = list(torch.randn(2, 2, 2048))
    found = []
    for fails in (False, rank == 0, False):

        def loss(model: nn.Module, batch: Tensor, fails: bool = fails) -> Any:
            outputs = model(batch)
            if fails and batch is batches[1]:
                limit_memory(more_bytes=200 * 2**20)
                held = []
                while True:
                    held.append(torch.empty(2**22))
            return outputs.square().sum(), len(batch)

        try:
            window.run(batches, loss)
            found.append("nothing")
        except Exception as error:
            found.append(f"{type(error).__name__}: {error} {getattr(error, '__notes__', '')}")
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return found


def limit_memory(*, more_bytes: int) -> None:
    """Let this process have no more than so much beyond what it has."""
    [line] = [one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith("VmSize")]
    held_bytes = int(line.split()[1]) * 1024
    resource.setrlimit(resource.RLIMIT_AS, (held_bytes + more_bytes, resource.RLIM_INFINITY))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks Linux how much memory it has")
def test_a_rank_out_of_memory_makes_room_for_zeros() -> None:
    first, second = run_ranks(run_out_of_memory, 2, timeout_s=60)
    assert "can't allocate memory" in first[1]
    assert "could not take part" not in first[1]
    assert second[1].startswith("OtherRankFailedError: rank 0 failed")
    assert first[::2] == second[::2] == ["nothing", "nothing"]


def run_failing_stand_in(rank: int, n: int) -> Any:
    worker = Worker(rank, n)
    fails = mock.patch.object(DDPRanks, "stand_in", side_effect=MemoryError("no room for zeros"))
    with fails if rank == 0 else nullcontext():
        raised = worker.attempt(fails_at=1 if rank == 0 else None)
    return raised, worker.attempt(), worker.untouched()


def test_a_rank_that_can_not_stand_in_can_not_go_on() -> None:
    """The others are in the reduction, and end when this one has."""
    kind, found = run_ranks(run_failing_stand_in, 2, expect="outcomes", timeout_s=40)[0]
    assert kind == "ok", found
    raised, again, untouched = found
    assert raised == "RuntimeError: out of memory"
    assert again.startswith("PoisonedWindowError: the other ranks went on to reduce gradients")
    assert "no room for zeros" in again
    assert untouched


NOWHERE: dict[str, dict[str, Any]] = {
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "views": {"gradient_as_bucket_view": True},
    "own_collectives": {},
}


def run_where_nobody_stands_in(_: int, n: int) -> Any:
    def ranks_of(ddp: DistributedDataParallel, **options: Any) -> Any:
        return UpdateWindow(
            ddp, torch.optim.SGD(ddp.parameters(), lr=0.3), OBJECTIVE, **options
        )._parts.ranks

    def plain() -> DistributedDataParallel:
        return DistributedDataParallel(CASE.model())

    wrapped = {name: DistributedDataParallel(CASE.model(), **options) for name, options in NOWHERE.items()}
    # after DDP, which takes it on accelerators only
    wrapped["own_collectives"].module.norm = nn.SyncBatchNorm(1, affine=False)
    ranks = {name: ranks_of(ddp) for name, ddp in wrapped.items()}
    hooked, late = plain(), plain()
    hooked.register_comm_hook(None, lambda _, bucket: default_hooks.allreduce_hook(None, bucket))
    ranks["own_hook"] = ranks_of(hooked, reduction_divisor=n)
    late.register_comm_hook(None, default_hooks.allreduce_hook)
    ranks["late_hook"] = ranks_of(late, reduction_divisor=n)
    assert ranks["late_hook"].stands_in
    late._comm_hooks[:] = hooked._comm_hooks
    ranks["after_agreement"] = ranks_of(plain(), reduce="after_agreement")
    mesh = init_device_mesh("cpu", (n,), mesh_dim_names=("cp",))
    ranks["parts_of_sequences"] = ranks_of(plain(), context_parallel=mesh["cp"])
    return {name: one.stands_in for name, one in ranks.items()}


def test_where_zeros_would_not_do_the_ranks_meet_first() -> None:
    """More is exchanged there than buckets, or something else would take the zeros for its own."""
    for found in run_ranks(run_where_nobody_stands_in, 2, timeout_s=60):
        assert found == dict.fromkeys(
            [*NOWHERE, "own_hook", "late_hook", "after_agreement", "parts_of_sequences"], False
        )
