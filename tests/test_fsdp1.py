"""The window under FSDP1: the update of the big batch, ways back, and what is refused."""

from __future__ import annotations

import copy
import functools
import itertools
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy

from big_batch import Batch, big_batch
from engines.wire import Wire
from ranks import run_ranks
from test_fsdp import OBJECTIVE, adamw, batches, failing, loss, net, window_over
from wholebatch import UpdateWindow
from wholebatch.errors import (
    ChangedInsideWindowError,
    PoisonedWindowError,
    StaleGradientsError,
    UnsupportedError,
)

pytestmark = pytest.mark.slow


def sharded(strategy: str = "FULL_SHARD", **options: Any) -> Any:
    warnings.filterwarnings("ignore")
    model: Any = net()
    if strategy == "HYBRID_SHARD":
        options["device_mesh"] = init_device_mesh("cpu", (2, 2))
    wrap = functools.partial(
        FullyShardedDataParallel,
        device_id=torch.device("cpu"),
        sharding_strategy=ShardingStrategy[strategy],
        use_orig_params=options.pop("use_orig_params", False),
        **options,
    )
    model.first, model.last = wrap(model.first), wrap(model.last)
    return wrap(model)


def distance(model: Any, wanted: nn.Module) -> float:
    with FullyShardedDataParallel.summon_full_params(model):
        mine = {
            name.replace("_fsdp_wrapped_module.", ""): parameter.detach().clone()
            for name, parameter in model.named_parameters()
        }
    return max(float((mine[name] - p.detach()).abs().max()) for name, p in wanted.named_parameters())


def same_as_big_batch(rank: int, ranks: int, strategy: str) -> list[Any]:
    """Equal and uneven windows, one rank without any, and an update that fails between turns."""
    found = []
    for reduce, originals in itertools.product(("per_update", "per_micro_batch"), (False, True)):
        model, wanted = sharded(strategy, use_orig_params=originals), net()
        window, plain = window_over(model, reduce=reduce), adamw(wanted)
        switches = [one._sync_gradients for one in FullyShardedDataParallel.fsdp_modules(model)]
        for update, held in enumerate([(2, 2, 2, 2), (3, 1, 1, 2), (0, 2, 1, 1), (2, 2, 2, 2)]):
            shares = [batches(100 * update + 10 * one, held[one]) for one in range(ranks)]
            if update == 3:
                with pytest.raises(RuntimeError, match="not today"):
                    failing(window, model, shares[rank], "between")
            with Wire() as seen:
                record = window.run(shares[rank], loss)
            norm = big_batch(wanted, plain, [batch for share in shares for batch in share])
            assert record.gradient_norm == pytest.approx(norm, rel=1e-14)
            predicted = window.traffic(max(held[:ranks]))
            assert record.reductions == predicted.reductions
            if update < 2:  # then a batch is lent, and a failed update leaves something gathered
                assert (seen.reduced, seen.gathered) == (predicted.reduced_bytes, predicted.gathered_bytes)
        assert switches == [one._sync_gradients for one in FullyShardedDataParallel.fsdp_modules(model)]
        found.append((distance(model, wanted), window.counters.updates_applied))
    return found


@pytest.mark.parametrize(
    ("ranks", "strategy"), [(2, "FULL_SHARD"), (2, "SHARD_GRAD_OP"), (4, "HYBRID_SHARD")]
)
def test_the_update_is_that_of_the_big_batch(ranks: int, strategy: str) -> None:
    for found in run_ranks(same_as_big_batch, ranks, strategy):
        for error, applied in found:
            assert error < 1e-14
            assert applied == 4


def cannot_go_back(rank: int, _ranks: int, where: str) -> list[str]:
    """An exception inside a forward or backward, on every rank."""
    model = sharded()
    window = window_over(model)
    told = []
    inner: Any = mock.Mock(wraps=model, norm=model.module.norm)
    with pytest.raises(RuntimeError, match="not today"):
        failing(window, inner, batches(10 * rank, 3), where)
    with pytest.raises(PoisonedWindowError) as caught:
        window.run(batches(10 * rank, 2), loss)
    told.append(str(caught.value))
    return told


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_after_an_exception_inside_fsdp_the_window_says_that_it_cannot_go_on(where: str) -> None:
    for (message,) in run_ranks(cannot_go_back, 2, where):
        assert "can't be reset after an exception inside its forward or backward" in message


def left_outside(rank: int, _ranks: int) -> list[Any]:
    model, wanted = sharded(), net()
    window, plain = window_over(model, on_stale_gradients="clear"), adamw(wanted)
    loss(model, batches(51, 1)[0]).loss_sum.backward()  # a shard, which FSDP puts aside for the next one
    with model.no_sync():
        loss(model, batches(50, 1)[0]).loss_sum.backward()
    with pytest.raises(StaleGradientsError) as caught:
        window.run(batches(10 * rank, 2), loss)
    window.run(batches(10 * rank, 2), loss)
    big_batch(wanted, plain, [*batches(0, 2), *batches(10, 2)])
    return [str(caught.value), distance(model, wanted)]


def test_gradients_held_back_outside_the_window_are_refused() -> None:
    for message, error in run_ranks(left_outside, 2):
        assert "3 flat parameters hold whole gradients" in message
        assert error < 1e-14


def part_skipped(rank: int, _ranks: int) -> str:
    """The last micro-batch goes past a part that the one before it used."""
    model = sharded()
    net, window, turns = model.module, window_over(model), iter(range(4))

    def forward(x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(net.first(x))
        logits: torch.Tensor = net.last(net.norm(hidden)) if next(turns) == 0 else net.norm(hidden)[:, :4]
        return logits

    with mock.patch.object(net, "forward", forward), pytest.raises(PoisonedWindowError) as caught:
        window.run(batches(10 * rank, 2), loss)
    return str(caught.value)


def test_gradients_that_the_last_backward_does_not_reach_are_not_lost_silently() -> None:
    for message in run_ranks(part_skipped, 2):
        assert "_saved_grad_shard" in message  # torch's own words


class Adapted(nn.Module):
    """Layers of which some parameters are frozen and two layers share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4)
        self.again.weight = self.first.weight
        self.first.bias.requires_grad_(False)
        self.last.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.last(torch.tanh(self.again(torch.tanh(self.first(x)))))
        return logits


def adapted(rank: int, ranks: int, reduce: str) -> float:
    """What a flat parameter without originals can't hold; an evaluation before each update."""
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    wanted = Adapted().double()
    model: Any = FullyShardedDataParallel(
        copy.deepcopy(wanted), device_id=torch.device("cpu"), use_orig_params=True
    )
    window, plain = window_over(model, reduce=reduce), adamw(wanted)
    for update in range(3):
        shares = [batches(100 * update + 10 * one, 3 - one) for one in range(ranks)]
        with torch.no_grad():
            model(shares[0][0]["x"])
        record = window.run(shares[rank], loss)
        norm = big_batch(wanted, plain, [batch for share in shares for batch in share])
        assert record.gradient_norm == pytest.approx(norm, rel=1e-14)
    return distance(model, wanted)


class OverFrozen(nn.Module):
    """A layer over a frozen one in bfloat16, in a flat parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(6, 6).bfloat16().requires_grad_(False)
        self.last = nn.Linear(6, 4).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.last(self.frozen(x.bfloat16()).double())
        return logits


def over_frozen(rank: int, ranks: int, reduce: str) -> float:
    """More micro-batches than bfloat16 gradients may be added up over, of which there are none."""
    wanted = OverFrozen()
    model: Any = copy.deepcopy(wanted)
    for name, part in list(model.named_children()):
        setattr(model, name, FullyShardedDataParallel(part, device_id=torch.device("cpu")))
    model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    window, plain = window_over(model, reduce=reduce), adamw(wanted)
    shares = [batches(10 * one, 5) for one in range(ranks)]
    window.run(shares[rank], loss)
    big_batch(wanted, plain, [batch for share in shares for batch in share])
    return distance(model, wanted)


def frozen_parts(rank: int, ranks: int, reduce: str) -> float:
    return max(adapted(rank, ranks, reduce), over_frozen(rank, ranks, reduce))


@pytest.mark.parametrize("reduce", ["per_update", "per_micro_batch"])
def test_frozen_and_tied_parameters(reduce: str) -> None:
    assert max(run_ranks(frozen_parts, 2, reduce)) < 1e-14


def touched(rank: int, ranks: int) -> list[Any]:
    """A loop that writes or clears gradients which FSDP shows anew after each forward."""
    found = []
    for reduce, touch in itertools.product(("per_update", "per_micro_batch"), TOUCHES):
        model, wanted = sharded(use_orig_params=True), net()
        window, plain = window_over(model, reduce=reduce), adamw(wanted)
        shares = [batches(10 * one, 3) for one in range(ranks)]
        with pytest.raises(ChangedInsideWindowError):
            touching(window, model, shares[rank], touch)
        window.run(shares[rank], loss)
        big_batch(wanted, plain, [batch for share in shares for batch in share])
        found.append((reduce, touch, distance(model, wanted)))
    return found


def touching(window: UpdateWindow, model: Any, given: list[Batch], touch: str) -> None:
    with window.update(given) as update:
        for index, batch in enumerate(update):
            summed = loss(model, batch)
            if index == 1 and touch.startswith("before"):
                TOUCHES[touch](model)
            update.backward(summed)
            if index == 1 and touch.startswith("after"):
                TOUCHES[touch](model)


TOUCHES: dict[str, Callable[[Any], Any]] = {
    "before the backward: cleared": lambda model: model.zero_grad(),
    "after it: cleared": lambda model: model.zero_grad(),
    "after it: written": lambda model: next(p for p in model.parameters() if p.grad is not None).grad.mul_(
        2.0
    ),
}


def test_gradients_that_are_shown_anew_are_watched_too() -> None:
    for found in run_ranks(touched, 2):
        assert max(error for *_, error in found) < 1e-14


def refusals(rank: int, _ranks: int) -> list[str]:
    told: list[str] = []

    def refused(make: Callable[[], Any]) -> None:
        with pytest.raises(UnsupportedError) as caught:
            make()
        told.append(str(caught.value))

    refused(lambda: window_over(sharded("NO_SHARD")))
    low = MixedPrecision(param_dtype=torch.bfloat16)
    window = window_over(sharded(mixed_precision=low))
    refused(lambda: window.run(batches(10 * rank, 5), loss))
    window = window_over(sharded().bfloat16(), reduce="per_micro_batch")
    refused(lambda: window.run(batches(10 * rank, 5), loss))
    refused(lambda: window_over(sharded(), reduce="after_agreement"))
    hooked = sharded()
    hooked.register_comm_hook(None, lambda *_: None)
    refused(lambda: window_over(hooked))
    extra = nn.Linear(2, 2)
    model = sharded()
    both = torch.optim.SGD([*model.parameters(), *extra.parameters()], lr=0.1)
    refused(lambda: UpdateWindow(model, both, OBJECTIVE))
    return told


def test_what_cannot_be_run_exactly_is_refused() -> None:
    for told in run_ranks(refusals, 2):
        strategy, held_back, reduced, mode, hook, outside = told
        assert "strategies NO_SHARD" in strategy
        assert "that are held back in the dtype that the forward computes in" in held_back
        assert "adds sharded gradients up in the dtype of the parameters" in reduced
        assert "is a mode of DistributedDataParallel" in mode
        assert "communication hook" in hook
        assert "2 of the optimizer's 5 parameters are not sharded" in outside


def broken(rank: int, ranks: int, slip: str) -> float:
    model, wanted = sharded(), net()
    window, plain = window_over(model), adamw(wanted)
    engine: Any = window._parts.ranks
    if slip == "norm of one rank":
        engine.gradient_norm = lambda gradients: 0.5 * torch.stack([g.norm() for g in gradients]).norm()
    if slip == "divisor":
        engine.divisor = 1.0
    shares = [batches(10 * one, 2) for one in range(ranks)]
    record = window.run(shares[rank], loss)
    norm = big_batch(wanted, plain, [batch for share in shares for batch in share])
    return max(distance(model, wanted), abs(record.gradient_norm - norm))


@pytest.mark.parametrize("slip", ["norm of one rank", "divisor"])
def test_each_of_these_slips_shows(slip: str) -> None:
    outcomes = run_ranks(broken, 2, slip, expect="outcomes")
    assert all(outcome[0] == "error" or outcome[1] > 1e-6 for outcome in outcomes), outcomes
