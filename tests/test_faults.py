"""Bad days on two ranks: nothing is half-counted, and no rank is left waiting.

Each worker runs one update that fails somewhere, says what it raised and what state it was left in,
and then, where the update may be run again, runs it again and says what came out.
"""

from __future__ import annotations

import os
import signal
import time
import warnings
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from problems import Case, oracle
from ranks import run_ranks
from wholebatch.finish import Finish
from wholebatch.losses import next_token_loss
from wholebatch.plan import plan_batch
from wholebatch.ranks.agreement import PendingExchange
from wholebatch.window import UpdateWindow

CASE = Case(counts=[[[5, 2], [3], [0, 4, 1]], [[3, 1], [5], [4, 3, 2]]])
OBJECTIVE = next_token_loss()

pytestmark = pytest.mark.slow


class Worker:
    """A window on this rank, and what its failed update left behind."""

    def __init__(self, rank: int, **options: Any) -> None:
        self.rank = rank
        self.model = CASE.model()
        self.ddp = DistributedDataParallel(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.3, momentum=0.9)
        self.window = UpdateWindow(self.ddp, self.optimizer, OBJECTIVE, **options)
        self.batches = CASE.batches()[rank]
        self.before = [p.detach().clone() for p in self.model.parameters()]

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Any:
        return OBJECTIVE(model(batch["input_ids"]), batch)

    def attempt(self, loss: Any, batches: Any = None) -> tuple[str, str]:
        try:
            self.window.run(self.batches if batches is None else batches, loss)
        except Exception as error:
            return type(error).__name__, str(error)
        return "nothing", ""

    def untouched(self) -> bool:
        return (
            all(torch.equal(p, q) for p, q in zip(self.model.parameters(), self.before, strict=True))
            and all(p.grad is None for p in self.model.parameters())
            and self.window.counters.updates_attempted == 0
            and not self.optimizer.state
        )

    def distance(self) -> float:
        """How far the parameters are from one right update."""
        truth = oracle(CASE).parameters
        return max((p - truth[name]).abs().max().item() for name, p in self.model.named_parameters())


PLACES = [
    "before_forward",
    "after_forward",
    "labels_missing",
    "nothing_to_reduce",
    "miscount",
    "break",
    "in_held_back_backward",
]


def fail_at(worker: Worker, place: str, index: int) -> tuple[str, str]:
    """Run an update that fails at ``place`` of micro-batch ``index`` on this rank."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Any:
        here = batch is worker.batches[index]
        if here and place == "before_forward":
            raise RuntimeError("out of memory")
        loss_sum, items = worker.loss(model, batch)
        if here and place == "after_forward":
            raise RuntimeError("out of memory")
        if here and place == "nothing_to_reduce":
            return loss_sum.detach(), items
        if here and place == "miscount":
            return loss_sum, items + 1
        if here and place == "in_held_back_backward":
            loss_sum.register_hook(_fail)
        return loss_sum, items

    if place == "labels_missing":
        broken = [{k: v for k, v in b.items() if k != "labels"} for b in worker.batches]
        return worker.attempt(loss, broken)
    if place == "break":
        try:
            with worker.window.update(worker.batches) as update:
                for position, batch in enumerate(update):
                    if position == index:
                        break
                    update.backward(worker.loss(worker.ddp, batch))
        except Exception as error:
            return type(error).__name__, str(error)
    return worker.attempt(loss)


def _fail(_: Tensor) -> None:
    raise RuntimeError("in a hook")


def run_failures(rank: int, n: int, reduce: str, failing: list[int]) -> dict[Any, Any]:
    assert n == 2
    found = {}
    for place in PLACES:
        for index in range(3):
            # a backward that reduces is beyond the point of no return
            if place == "in_held_back_backward" and index == 2 and reduce == "per_update":
                continue
            worker = Worker(rank, reduce=reduce)
            raised = fail_at(worker, place, index) if rank in failing else worker.attempt(worker.loss)
            untouched = worker.untouched()
            again = worker.attempt(worker.loss)
            counted = worker.window.counters.updates_applied
            found[place, index] = (raised, untouched, again, counted, worker.distance())
    return found


@pytest.mark.parametrize("failing", [[1], [0, 1]], ids=["one_rank", "both_ranks"])
@pytest.mark.parametrize("reduce", ["per_update", "after_agreement"])
def test_a_failure_before_the_reduction_is_rolled_back_everywhere_and_may_be_run_again(
    reduce: str, failing: list[int]
) -> None:
    kinds = {
        "before_forward": "RuntimeError",
        "after_forward": "RuntimeError",
        "labels_missing": "ObjectiveError",
        "nothing_to_reduce": "ObjectiveError",
        "miscount": "CountMismatchError",
        "break": "IncompleteUpdateError",
        "in_held_back_backward": "RuntimeError",
    }
    results = run_ranks(run_failures, 2, reduce, failing, timeout_s=120)
    assert len(results[0]) >= 20
    for rank, found in enumerate(results):
        for (place, index), (raised, untouched, again, counted, distance) in found.items():
            what = (place, index, rank, raised)
            if rank in failing:
                assert raised[0] == kinds[place], what
            else:
                assert raised[0] == "OtherRankFailedError", what
                assert "rank 1 failed while this rank was" in raised[1], what
            assert untouched, what
            assert again == ("nothing", ""), what
            assert counted == 1, what
            assert distance < 1e-14, what


def run_nan(rank: int, n: int, reduce: str) -> list[Any]:
    found = []
    for index in range(3):
        worker = Worker(rank, reduce=reduce)

        def loss(model: nn.Module, batch: Any, worker: Any = worker, index: int = index) -> Any:
            loss_sum, items = worker.loss(model, batch)
            if rank < n - 1 or batch is not worker.batches[index]:
                return loss_sum, items
            # of the second the gradient is finite all the same
            return (loss_sum + float("inf") if index == 1 else loss_sum * float("nan")), items

        record = worker.window.run(worker.batches, loss)
        same = all(torch.equal(p, q) for p, q in zip(worker.model.parameters(), worker.before, strict=True))
        found.append((record.outcome, record.reason, same and not worker.optimizer.state))
        worker.attempt(worker.loss)
        found.append(worker.distance())
    return found


@pytest.mark.parametrize("reduce", ["per_update", "after_agreement"])
def test_a_nan_on_one_rank_is_skipped_on_all_together(reduce: str) -> None:
    for found in run_ranks(run_nan, 2, reduce):
        for index in range(3):
            outcome, reason, untouched = found[2 * index]
            assert outcome == "skipped_nonfinite"
            assert reason == f"the loss of micro-batch {index + 1} on rank 1 is not finite"
            assert untouched
            assert found[2 * index + 1] < 1e-14


def run_loader_failure(rank: int, n: int) -> tuple[str, str]:
    worker = Worker(rank, plan=plan_batch(global_batch_samples=12, micro_batch_samples=2, ranks=n))

    def loader() -> Any:
        yield worker.batches[0]
        if rank == 1:
            raise OSError("a damaged file")
        yield from worker.batches[1:]

    try:
        for batches in worker.window.batches(loader()):
            worker.window.run(batches, worker.loss)
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def test_a_loader_that_fails_on_one_rank_stops_all() -> None:
    first, second = run_ranks(run_loader_failure, 2)
    assert second == ("OSError", "a damaged file")
    assert first[0] == "OtherRankFailedError"
    assert "rank 1 failed while this rank was drawing micro-batches" in first[1]


# Beyond the point of no return --------------------------------------------------------------------


def run_reduced_backward(rank: int, n: int) -> Any:
    """Rank 1 fails inside the backward that reduces; afterwards its process ends."""
    assert n == 2
    worker = Worker(rank)
    if rank == 1:
        raised = fail_at(worker, "in_held_back_backward", 2)
        again = worker.attempt(worker.loss)
        return raised, again
    return worker.attempt(worker.loss), worker.attempt(worker.loss)


def test_a_failure_in_the_reducing_backward_poisons_every_rank() -> None:
    begun = time.monotonic()
    first, second = run_ranks(run_reduced_backward, 2, timeout_s=60)
    assert time.monotonic() - begun < 45
    for raised, again in (first, second):
        assert raised[0] == "PoisonedWindowError", raised
        assert again[0] == "PoisonedWindowError", again
        assert "restart from the last committed update, number 0" in again[1]
    assert "in a hook" in second[0][1]


def run_failing_step(rank: int, n: int) -> Any:
    """Rank 1's optimizer fails in its step; rank 0 goes on to the next update."""
    assert n == 2
    worker = Worker(rank)
    if rank == 1:

        def fail(*_: Any) -> None:
            raise RuntimeError("in the second group")

        worker.optimizer.register_step_pre_hook(fail)
    found = [worker.attempt(worker.loss), worker.attempt(worker.loss)]
    if rank == 1:
        time.sleep(2.0)  # stays alive, so that the others hear it from the window and not from a socket
    return found


def test_a_failure_in_the_step_is_heard_by_the_others_at_their_next_update() -> None:
    first, second = run_ranks(run_failing_step, 2)
    assert first[0] == ("nothing", "")
    assert first[1][0] == "PoisonedWindowError"
    assert "rank 1 failed beyond the point of no return of an earlier update" in first[1][1]
    assert [kind for kind, _ in second] == ["PoisonedWindowError"] * 2


def run_killed(rank: int, n: int, index: int, engine: str) -> Any:
    assert n == 3
    worker = Worker(rank % 2, reduce="after_agreement" if engine == "after_agreement" else "per_update")
    if engine == "fully_shard":
        warnings.filterwarnings("ignore", message="FSDP2-wrapped")  # its output is a view
        model = fully_shard(CASE.model())
        worker.window = UpdateWindow(model, torch.optim.SGD(model.parameters(), lr=0.3), OBJECTIVE)

    def loss(model: nn.Module, batch: Any) -> Any:
        if rank == 1 and batch is worker.batches[index]:
            os.kill(os.getpid(), signal.SIGKILL)
        return worker.loss(model, batch)

    begun = time.monotonic()
    raised = worker.attempt(loss)
    return raised, time.monotonic() - begun, worker.untouched()


@pytest.mark.parametrize(
    ("engine", "index"), [("ddp", 0), ("ddp", 2), ("after_agreement", 2), ("fully_shard", 2)]
)
def test_a_rank_killed_in_mid_window_is_named_by_the_others(engine: str, index: int) -> None:
    outcomes = run_ranks(run_killed, 3, index, engine, expect="outcomes", timeout_s=60)
    assert outcomes[1][0] == "died"
    named = set()
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome[0] == "ok", outcome
        (kind, message), seconds, untouched = outcome[1]
        assert kind == "PoisonedWindowError"
        assert "contact with another rank was lost" in message
        assert "restart from the last committed update" in message.lower()
        assert seconds < 30
        assert untouched
        named.add(message.partition("; no sign of ")[2].partition(" within")[0])
    # whoever waits for a rank that is left notices only when that one ends, and may not be heard before
    assert "rank 1" in named
    assert named <= {"rank 1", "ranks 1 and 2", "ranks 0 and 1"}


class InterruptError(Exception):
    """Stands for what a signal handler raises."""


def run_interrupted_wait(rank: int, n: int, doing: str, reduce: str) -> Any:
    """A signal arrives on rank 0 just when it has waited for an exchange after which others go on."""
    assert n == 2
    worker = Worker(rank, reduce=reduce)
    if rank == 0:
        wait = PendingExchange.wait

        def interrupted(self: PendingExchange) -> list[tuple[float, ...]]:
            found = wait(self)
            if self._doing == doing:
                raise InterruptError
            return found

        with mock.patch.object(PendingExchange, "wait", interrupted):
            raised = worker.attempt(worker.loss)
        return raised, worker.attempt(worker.loss)
    return worker.attempt(worker.loss), worker.attempt(worker.loss)


@pytest.mark.parametrize(
    ("doing", "reduce"),
    [
        ("about to reduce gradients", "after_agreement"),  # where nobody could stand in
        ("agreeing on what came out", "after_agreement"),
        ("agreeing on what came out", "per_update"),
    ],
)
def test_an_interrupt_after_the_others_went_on_poisons(doing: str, reduce: str) -> None:
    """Rolled back alone, the rank would go on with other parameters than the rest."""
    outcomes = run_ranks(run_interrupted_wait, 2, doing, reduce, expect="outcomes", timeout_s=40)
    (first, second) = (outcome[1] for outcome in outcomes)
    assert [kind for kind, _ in first] == ["PoisonedWindowError"] * 2
    assert second[-1][0] == "PoisonedWindowError"


def run_finish_failure(rank: int, n: int) -> Any:
    """What can fail in the finish fails before the vote, so that nobody steps."""
    assert n == 2
    worker = Worker(rank)
    fails = mock.patch.object(Finish, "read", side_effect=TypeError("in the finish"))
    with fails if rank == 0 else nullcontext():
        raised = worker.attempt(worker.loss)
    return raised, worker.untouched(), worker.attempt(worker.loss), worker.distance()


def test_a_failure_in_the_finish_before_the_vote_is_rolled_back_everywhere() -> None:
    first, second = run_ranks(run_finish_failure, 2)
    assert first[0][0] == "TypeError"
    assert second[0][0] == "OtherRankFailedError"
    for _, untouched, again, distance in (first, second):
        assert untouched
        assert again == ("nothing", "")
        assert distance < 1e-14


def run_elsewhere(rank: int, n: int) -> Any:
    worker = Worker(rank, plan=plan_batch(global_batch_samples=12, micro_batch_samples=2, ranks=n))
    if rank == 0:
        return worker.attempt(worker.loss)
    try:
        next(worker.window.batches(worker.batches))
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def test_ranks_at_different_places_of_their_loops_are_told() -> None:
    for kind, message in run_ranks(run_elsewhere, 2):
        assert kind == "PoisonedWindowError"
        assert "while another was elsewhere in its loop" in message


def run_poison_in_batches(rank: int, n: int) -> Any:
    """Poison heard while drawing is remembered."""
    worker = Worker(rank, plan=plan_batch(global_batch_samples=24, micro_batch_samples=4, ranks=n))
    if rank == 1:

        def fail(*_: Any) -> None:
            raise RuntimeError("in the second group")

        worker.optimizer.register_step_pre_hook(fail)
    found = [worker.attempt(worker.loss)]
    for _ in range(2):
        try:
            next(worker.window.batches(worker.batches))
            found.append(("nothing", ""))
        except Exception as error:
            found.append((type(error).__name__, str(error)))
    if rank == 1:
        time.sleep(1.0)
    return found


def test_poison_heard_while_drawing_is_remembered() -> None:
    first, second = run_ranks(run_poison_in_batches, 2)
    assert [kind for kind, _ in first] == ["nothing", "PoisonedWindowError", "PoisonedWindowError"]
    assert [kind for kind, _ in second] == ["PoisonedWindowError"] * 3


def run_sparse_and_empty(rank: int, n: int) -> Any:
    assert n == 2
    model = nn.Embedding(5, 3, sparse=True)
    window = UpdateWindow(DistributedDataParallel(model), torch.optim.SGD(model.parameters(), lr=1.0))
    batches = [torch.tensor([0, 1])] if rank == 0 else []
    try:
        window.run(batches, lambda m, b: (m(b).square().sum(), len(b)))
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def test_a_sparse_gradient_beside_an_empty_rank_is_refused_while_it_can_be_undone() -> None:
    first, second = run_ranks(run_sparse_and_empty, 2)
    assert first[0] == "UnsupportedError"
    assert "weight has a sparse gradient" in first[1]
    assert second[0] == "OtherRankFailedError"
