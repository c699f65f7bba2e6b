"""Tests of the tests: each way that an update goes wrong must turn the exactness test red.

A broken window is made from the real one by one small change, run on a case that the unbroken one
passes, and held against the same oracle with the same comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from problems import Case, Observed, assert_equal_updates, observed, oracle
from ranks import run_ranks
from wholebatch.errors import UpdateError
from wholebatch.finish import Finish
from wholebatch.ranks.base import Ranks
from wholebatch.ranks.ddp import DDPRanks
from wholebatch.shares import Shares
from wholebatch.tally import GlobalTally

CASE = Case(counts=[[[5, 2], [3], [0, 4, 1], [2]], [[1, 1], [5, 5], [4], [3, 2]]], clip_grad_norm=0.5)
ONE_RANK = Case(counts=CASE.counts[:1], clip_grad_norm=0.5)
TOLERANCE = 1e-13


def with_shares(change: Callable[[GlobalTally, float, dict[str, float]], dict[str, float]]) -> Any:
    """Let every summed loss be multiplied by something else."""
    of = Shares.of

    def broken(total: GlobalTally, *, divisor: float, **more: Any) -> Shares:
        shares = of(total, divisor=divisor, **more)
        shares.of_term = change(total, divisor, shares.of_term)
        return shares

    return mock.patch.object(Shares, "of", broken)


def no_division() -> Any:
    return with_shares(lambda _, divisor, shares: dict.fromkeys(shares, divisor))


def tail_over_planned_window() -> Any:
    """A short window divided as though it were full: here, as though each rank had one micro-batch more."""

    def change(total: GlobalTally, _: float, shares: dict[str, float]) -> dict[str, float]:
        held = total.micro_batches_of[0]
        return {term: share * held / (held + 1) for term, share in shares.items()}

    return with_shares(change)


def mean_of_means() -> Any:
    of = Shares.of

    def broken(total: GlobalTally, **more: Any) -> Shares:
        return of(total, **{**more, "weighting": "micro_batch_means"})

    return mock.patch.object(Shares, "of", broken)


def clip_in_every_micro_batch() -> Any:
    backward = Ranks.backward

    def broken(self: Ranks, roots: Any) -> None:
        backward(self, roots)
        torch.nn.utils.clip_grad_norm_(broken.parameters, 0.02)

    apply = Finish.__init__

    def remember(self: Finish, **options: Any) -> None:
        apply(self, **options)
        broken.parameters = self.parameters

    return stacked(
        mock.patch.object(Ranks, "backward", broken), mock.patch.object(Finish, "__init__", remember)
    )


def last_left_out() -> Any:
    backward = Ranks.backward

    def broken(self: Ranks, roots: Any) -> None:
        broken.calls += 1
        left_out = broken.calls % 4 == 0
        backward(self, [(loss, gradient * (not left_out)) for loss, gradient in roots])

    broken.calls = 0
    return mock.patch.object(Ranks, "backward", broken)


def wrong_micro_batch_reduced() -> Any:
    """Reduce in the second instead of the last: the later ones stay on their rank."""
    micro_batch = DDPRanks.micro_batch

    def broken(self: DDPRanks, **_: bool) -> Any:
        broken.calls += 1
        self.open_window(uneven=False, ranks_without=0, reset=False)
        return micro_batch(self, last=broken.calls % 4 == 2)

    broken.calls = 0
    no_check = mock.patch.object(DDPRanks, "check_forward", return_value=None)
    return stacked(mock.patch.object(DDPRanks, "micro_batch", broken), no_check)


def hook_that_sums() -> Any:
    """The user vouches for a mean, and the hook sums."""

    def sum_hook(_, bucket):  # no annotations: DDP reads them as objects
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    init = DistributedDataParallel.__init__

    def with_hook(self: Any, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        self.register_comm_hook(None, sum_hook)

    return mock.patch.object(DistributedDataParallel, "__init__", with_hook)


@contextmanager
def stacked(*patches: Any) -> Iterator[None]:
    with patches[0], patches[1]:
        yield


BROKEN: dict[str, Callable[[], Any]] = {
    breaker.__name__: breaker
    for breaker in (
        no_division,
        tail_over_planned_window,
        mean_of_means,
        clip_in_every_micro_batch,
        last_left_out,
        wrong_micro_batch_reduced,
        hook_that_sums,
    )
}
NEEDS_RANKS = {"wrong_micro_batch_reduced", "hook_that_sums"}


def run_broken(rank: int, n: int, names: list[str]) -> dict[str, Observed]:
    """Every broken window in one launch, and the unbroken one as ``"right"``."""
    assert n == len(CASE.counts)
    found = {"right": observed(CASE, rank=rank, wrap=DistributedDataParallel)}
    for name in names:
        options: dict[str, Any] = {"reduction_divisor": 2} if name == "hook_that_sums" else {}
        with BROKEN[name]():
            try:
                found[name] = observed(CASE, rank=rank, wrap=DistributedDataParallel, **options)
            except UpdateError:
                # the window itself notices gradients that differ over ranks, before anybody steps
                if name != "wrong_micro_batch_reduced":
                    raise
    return found


@pytest.mark.parametrize("name", sorted(set(BROKEN) - NEEDS_RANKS))
def test_a_broken_window_on_one_rank_is_caught(name: str) -> None:
    truth = oracle(ONE_RANK)
    assert_equal_updates(observed(ONE_RANK), truth, tolerance=TOLERANCE)
    with BROKEN[name]():
        found = observed(ONE_RANK)
    with pytest.raises(AssertionError, match="is off by"):
        assert_equal_updates(found, truth, tolerance=TOLERANCE)


@pytest.mark.slow
def test_a_broken_window_on_two_ranks_is_caught() -> None:
    truth = oracle(CASE)
    by_rank = run_ranks(run_broken, 2, sorted(BROKEN), timeout_s=120)
    for found in by_rank:
        assert_equal_updates(found["right"], truth, tolerance=TOLERANCE)
    for name in BROKEN:
        caught = sum(name not in found for found in by_rank)
        for found in by_rank:
            if name not in found:
                continue
            try:
                assert_equal_updates(found[name], truth, tolerance=TOLERANCE)
            except AssertionError:
                caught += 1
        assert caught > 0, f"{name} passed the exactness test on both ranks"
