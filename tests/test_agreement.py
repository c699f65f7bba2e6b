"""What a rank hears of the others in an exchange: who failed, who is elsewhere, who differs."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from ranks import run_ranks
from wholebatch.errors import OtherRankFailedError, PoisonedWindowError, UnsupportedError
from wholebatch.ranks import collectives
from wholebatch.ranks.agreement import Agreement, PendingExchange, name_ranks, unlike_first
from wholebatch.ranks.base import Roles, Traffic
from wholebatch.ranks.ddp import DDPRanks
from wholebatch.ranks.roles import roles_of_mesh
from wholebatch.ranks.single import SingleRank
from wholebatch.result import GlobalResult, Result
from wholebatch.tally import GlobalTally, Tally, payload_size


class Told:
    """Rows that have come in."""

    def __init__(self, rows: Sequence[Sequence[float]]) -> None:
        self.rows = list(map(list, rows))

    def wait(self) -> list[list[float]]:
        return self.rows


def exchange(states: Sequence[float], *payload: Sequence[float]) -> PendingExchange:
    """What is pending where the ranks are in these states, with the numbers of each, and one of padding."""
    rows = [(*row, 0.0) for row in zip(states, *payload, strict=True)]
    return PendingExchange(Told(rows), len(payload), "adding up what the window holds")


def test_all_are_there() -> None:
    told = exchange([3.0, 3.0, 3.0], [5.0, 6.0, 7.0], [1.0, 2.0, 4.0]).wait()
    assert told == [(5.0, 6.0, 7.0), (1.0, 2.0, 4.0)]


def test_those_that_failed_are_named() -> None:
    with pytest.raises(OtherRankFailedError, match=r"^rank 2 failed while this rank was adding up"):
        exchange([3.0, 3.0, -1.0]).wait()
    with pytest.raises(OtherRankFailedError, match=r"^ranks 0 and 2 failed"):
        exchange([-1.0, 3.0, -1.0]).wait()
    with pytest.raises(PoisonedWindowError, match=r"^rank 1 failed beyond the point of no return"):
        exchange([-1.0, -2.0, 3.0]).wait()


def test_those_that_are_elsewhere_are_named() -> None:
    with pytest.raises(PoisonedWindowError) as caught:
        exchange([3.0, 1.0, 3.0, 3.0]).wait()
    assert "(rank 1 drawing micro-batches; ranks 0, 2 and 3 adding up what the window holds)" in str(
        caught.value
    )


def gives_up(rank: int, _n: int) -> tuple[str, float, bool]:
    """Rank 1 reports a failure, of which rank 0 does not hear."""
    ranks = DDPRanks(
        DistributedDataParallel(torch.nn.Linear(1, 1)), reduce="per_update", reduction_divisor=None
    )
    if rank == 0:
        return "", 0.0, True
    ranks.patience_s = 0.5
    agreement, begun = Agreement(ranks, 2), []
    tell = ranks.tell
    ranks.tell = lambda *given: begun.append(tell(*given)) or begun[-1]  # type: ignore[method-assign]
    began = time.monotonic()
    with pytest.raises(PoisonedWindowError) as caught:
        agreement.report_failure()
    return str(caught.value), time.monotonic() - began, begun[0].work.is_completed()


@pytest.mark.slow
def test_who_gives_up_after_a_short_patience_leaves_nothing_under_way() -> None:
    said, took, ended = run_ranks(gives_up, 2)[1]
    assert "lost while reporting its own failure: it ended, or did not answer within 0.5 seconds" in said
    assert took < 1.9  # then rank 0 ends, and cuts it off
    assert ended  # a process waits at its end for what is still under way


class Slow:
    """An exchange that is there when it was asked for so many times."""

    def __init__(self, asked: float) -> None:
        self.left, self.waited = asked, 0

    def is_completed(self) -> bool:
        self.left -= 1
        return self.left < 0

    def wait(self) -> None:
        self.waited += 1
        if self.left == -2:
            raise RuntimeError("timed out")


@pytest.mark.parametrize(("taken", "asked", "naps"), [(True, 3, 3), (True, 1e9, 50), (False, 3, 0)])
def test_a_rank_naps_only_where_no_core_is_to_spare_and_not_for_ever(
    monkeypatch: pytest.MonkeyPatch, taken: bool, asked: float, naps: int
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(collectives, "no_core_to_spare", lambda: taken)
    monkeypatch.setattr(collectives, "sleep", slept.append)
    work = Slow(asked)
    assert collectives.HostRows(torch.ones(2, 1), work).wait() == [[1.0], [1.0]]
    assert slept == [1e-4] * naps
    assert work.waited == 1


def test_a_rank_that_naps_hears_of_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "no_core_to_spare", lambda: True)
    with pytest.raises(RuntimeError, match="timed out"):
        collectives.HostRows(torch.ones(2, 1), Slow(-1)).wait()


def test_a_rank_alone_hears_itself() -> None:
    agreement = Agreement(SingleRank(), 2)
    assert agreement.exchange([1.0], doing="agreeing on what came out").wait() == [(1.0,)]
    with pytest.raises(OtherRankFailedError, match="rank 0"):
        agreement.exchange(doing="agreeing on what came out", failed=True).wait()
    agreement.report_failure()


class Gone(SingleRank):
    """Ranks that another one has left."""

    def tell(self, row: Sequence[float], patience_s: float | None = None) -> Told:  # noqa: ARG002
        raise RuntimeError("connection closed by peer")


def test_a_rank_that_is_gone_before_an_exchange_begins_is_told() -> None:
    with pytest.raises(PoisonedWindowError, match=r"lost while about to reduce .* \(connection closed"):
        Agreement(Gone(), 2).exchange(doing="about to reduce gradients")


class Standing:
    """Ranks that tell each other at which place they stand."""

    def __init__(self, *places: int) -> None:
        self.told = [(place, ()) for place in places]

    def gather(self, _: object) -> list[tuple[int, tuple[int, ...]]]:
        return self.told


def test_places_with_different_numbers_of_ranks_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"3 ranks .* over 2 places.*stand at \[0, 1, 0\]"):
        roles_of_mesh(Standing(0, 1, 0), 0, 2)  # type: ignore[arg-type]


def test_names_of_ranks() -> None:
    assert name_ranks([4]) == "rank 4"
    assert name_ranks([1, 5]) == "ranks 1 and 5"
    assert name_ranks([0, 1, 2, 3]) == "ranks 0, 1, 2 and 3"
    assert name_ranks(list(range(12))) == "ranks 0, 1, 2 and 9 more"
    assert unlike_first([2.0, 2.0, 3.0]) == [2]


# Two replicas of two ranks each; the first of each speaks for its samples.
REPLICAS = (0, 0, 1, 1)


def roles(rank: int, *, parts: bool = False) -> Roles:
    """Ranks that share a replica; with ``parts``, each counts the items of its part of the sequences."""
    speaks = rank % 2 == 0
    return Roles(rank=rank, replica_of=REPLICAS, counts_samples=speaks, counts_items=speaks or parts)


def held(samples: int, items: float | None, *, digest: int = 7, settings: int = 1) -> Tally:
    return Tally(
        micro_batches=1,
        samples=samples,
        positions=10,
        digest=digest,
        items=((items,),),
        settings=settings,
        needs_reset=False,
        samples_left_out=0,
    )


def added_up(tallies: Sequence[Tally], *, parts: bool = False) -> GlobalTally:
    payloads = [tally.payload(1, roles(rank, parts=parts)) for rank, tally in enumerate(tallies)]
    assert {len(payload) for payload in payloads} == {payload_size(1)}
    told = list(zip(*payloads, strict=True))
    return GlobalTally.of_ranks(told, roles=roles(0, parts=parts), num_terms=1)


def test_a_replica_of_two_ranks_is_counted_once() -> None:
    total = added_up([held(3, 30.0), held(3, 30.0), held(4, 50.0), held(4, 50.0)])
    assert (total.micro_batches, total.samples, total.items) == (2, 7, (80.0,))
    assert total.digest == f"{14:016x}"
    assert (total.other_samples, total.other_settings, total.uneven) == ([], [], False)


def test_items_of_parts_of_sequences_add_up() -> None:
    total = added_up([held(3, 30.0), held(3, 10.0), held(4, 50.0), held(4, 5.0)], parts=True)
    assert (total.samples, total.items) == (7, (95.0,))


def test_ranks_that_differ_are_named() -> None:
    assert added_up([held(3, 1.0), held(3, 1.0), held(4, 1.0), held(5, 1.0)]).other_samples == [3]
    assert added_up([held(3, 1.0), held(3, 1.0, digest=8), held(4, 1.0), held(4, 1.0)]).other_samples == [1]
    assert added_up([held(3, 1.0, settings=9), *[held(3, 1.0)] * 3]).other_settings == [1, 2, 3]


def found(**changed: Any) -> Result:
    """What came out of two micro-batches, of 3 and 4 items, on one rank."""
    same: dict[str, Any] = {
        "nonfinite": False,
        "norm": 3.0,
        "norm_of_copies": 0.0,
        "num_gradients": 2,
        "losses": ((1.5,), (2.0,)),
        "items": ((3.0,), (4.0,)),
        "peak_memory_bytes": 100,
    }
    return Result(**{**same, **changed})


def of_two(one: Result, other: Result) -> GlobalResult:
    payloads = [
        result.payload(roles=Roles.one_each(rank, 2), num_terms=1)
        for rank, result in enumerate((one, other))
    ]
    assert {len(payload) for payload in payloads} == {7 + 2 * 1}
    assert payload_size(1) >= 7 + 2 * 1  # it fits in a row
    return GlobalResult.of_ranks(list(zip(*payloads, strict=True)), num_terms=1)


def test_what_came_out_on_two_ranks_is_added_up_and_compared() -> None:
    both = of_two(found(), found(norm=3.0 + 1e-7, peak_memory_bytes=300))
    assert (both.losses, both.items) == ((7.0,), (14.0,))
    assert both.norm_of_parts == pytest.approx(math.sqrt(18.0))
    assert (both.nonfinite, both.bad, both.peak_memory_bytes) == (False, (0, 0), [100, 300])
    assert both.same_gradient
    assert both.some_gradient
    assert of_two(found(), found(norm=3.0 * (1 + 9e-5))).same_gradient
    assert not of_two(found(), found(norm=3.0 * (1 + 1.2e-4))).same_gradient
    assert of_two(found(num_gradients=0), found()).some_gradient
    assert of_two(found(), found(peak_memory_bytes=0)).peak_memory_bytes is None


def test_what_is_not_finite_on_one_rank_is_so_for_all() -> None:
    loss = of_two(found(), found(losses=((1.5,), (math.inf,))))
    assert (loss.nonfinite, loss.bad) == (True, (0, 2))
    gradient = of_two(found(), found(nonfinite=True, norm=math.nan))
    assert (gradient.nonfinite, gradient.bad, gradient.same_gradient) == (True, (0, 0), True)


def test_the_price_is_told_in_words() -> None:
    told = str(Traffic(reductions=2, reduced_bytes=3 * 2**20, gathered_bytes=512, held_bytes=0))
    assert told == (
        "2 reductions of gradients an update, 3.0 MiB reduced and 0.5 KiB gathered, "
        "0.0 KiB of gradients held meanwhile"
    )
    in_parts = str(Traffic(exchanges_more=True))
    assert in_parts.endswith("held meanwhile, and what forwards and backwards exchange, not counted")
