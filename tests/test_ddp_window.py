"""The window over DistributedDataParallel: one reduction, its evidence, and what is refused."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from problems import Case, assert_equal_updates, loss_with, observed, oracle
from ranks import run_ranks
from wholebatch.losses import next_token_loss
from wholebatch.objective import weighted_terms
from wholebatch.plan import plan_batch
from wholebatch.record import Counters
from wholebatch.window import UpdateWindow

CASE = Case(counts=[[[5, 2], [3], [0, 4, 1]], [[1, 1], [5], [4, 3, 2]]], clip_grad_norm=0.5)
UNEVEN = Case(counts=[[[5, 2], [3], [0, 4, 1]], [[4]]], clip_grad_norm=0.5)
ONE_EMPTY = Case(counts=[[[5, 2], [3]], []], clip_grad_norm=0.5)
Caught = tuple[str, str]

pytestmark = pytest.mark.slow


def caught(act: Callable[[], Any]) -> Caught:
    try:
        act()
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


# Exactness under every way to wrap ----------------------------------------------------------------

WRAPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bucket_view": {"gradient_as_bucket_view": True},
    "small_buckets": {"bucket_cap_mb": 0.0001},
    "find_unused": {"find_unused_parameters": True},
    "static_graph": {"static_graph": True},
}


def run_wraps(rank: int, n: int) -> dict[tuple[str, str, str], Any]:
    found = {}
    for name, options in WRAPS.items():
        for reduce in ("per_update", "after_agreement"):
            if name == "static_graph" and reduce == "after_agreement":
                continue
            for kind, case in (("even", CASE), ("uneven", UNEVEN), ("one_empty", ONE_EMPTY)):
                if name == "static_graph" and kind != "even":
                    continue
                found[name, reduce, kind] = observed(
                    case,
                    rank=rank,
                    wrap=lambda model, options=options: DistributedDataParallel(model, **options),
                    reduce=reduce,
                )
    assert n == 2
    return found


def test_every_wrapping_and_every_distribution_is_exact() -> None:
    by_rank = run_ranks(run_wraps, 2)
    truths = {"even": oracle(CASE), "uneven": oracle(UNEVEN), "one_empty": oracle(ONE_EMPTY)}
    assert len(by_rank[0]) == 4 * 2 * 3 + 1
    for found in by_rank:
        for (name, _, kind), update in found.items():
            assert_equal_updates(update, truths[kind], tolerance=1e-13)
            # a static graph learns in its first backward, which must be reduced too
            assert update.record.reductions == (2 if name == "static_graph" else 1)


def run_several_updates(rank: int, n: int) -> tuple[list[int], list[Tensor]]:
    model = CASE.model()
    ddp = DistributedDataParallel(model, static_graph=True)
    objective = next_token_loss()
    window = UpdateWindow(ddp, torch.optim.SGD(model.parameters(), lr=0.3), objective)
    counts = [window.run(CASE.batches()[rank], loss_with(objective)).reductions for _ in range(n + 1)]
    return counts, [p.detach() for p in model.parameters()]


def test_a_static_graph_reduces_once_after_its_first_update() -> None:
    both = run_ranks(run_several_updates, 2)
    assert [counts for counts, _ in both] == [[2, 1, 1]] * 2
    model = CASE.model()
    objective = next_token_loss()
    window = UpdateWindow(model, torch.optim.SGD(model.parameters(), lr=0.3), objective)
    for _ in range(3):
        window.run([batch for rank in CASE.batches() for batch in rank], loss_with(objective))
    for a, b in zip(both[0][1], model.parameters(), strict=True):
        assert (a - b).abs().max() < 1e-13


# Parameters that only some micro-batches use ------------------------------------------------------


class TwoRoads(nn.Module):
    """Adds a second layer only where the batch says so."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.always = nn.Linear(3, 1, dtype=torch.float64)
        self.sometimes = nn.Linear(3, 1, dtype=torch.float64)

    def forward(self, inputs: Tensor, use: bool) -> Tensor:
        return self.always(inputs) + (self.sometimes(inputs) if use else 0)


def two_roads(rank: int, order: list[bool], options: dict[str, Any], reduce: str) -> list[Tensor]:
    model = TwoRoads()
    ddp = DistributedDataParallel(model, **options)
    window = UpdateWindow(ddp, torch.optim.SGD(model.parameters(), lr=1.0), reduce=reduce)
    inputs = torch.arange(18, dtype=torch.float64).reshape(2, 3, 3)[rank] / 18
    batches = [(row.unsqueeze(0), use) for row, use in zip(inputs, order, strict=True)]
    window.run(batches, lambda m, b: (m(*b).square().sum(), 1))
    return [p.detach() for p in model.parameters()]


def run_two_roads(rank: int, n: int) -> dict[str, Any]:
    last_unused, one_rank_only = [True, True, False], [[False, False, True], [False] * 3][rank]
    found: dict[str, Any] = {
        "unused_last": two_roads(rank, last_unused, {"find_unused_parameters": True}, "per_update"),
        "after": two_roads(rank, last_unused, {}, "after_agreement"),
        "one_rank": two_roads(rank, one_rank_only, {"find_unused_parameters": True}, "per_update"),
        "one_rank_after": two_roads(rank, one_rank_only, {}, "after_agreement"),
    }
    # last, because nothing can be reduced with this model afterwards
    found["refused"] = caught(lambda: two_roads(rank, last_unused, {}, "per_update"))
    assert n == 2
    return found


def test_parameters_that_the_last_micro_batch_does_not_use() -> None:
    by_rank = run_ranks(run_two_roads, 2)
    inputs = torch.arange(18, dtype=torch.float64).reshape(2, 3, 3) / 18

    def truth(orders: list[list[bool]]) -> list[Tensor]:
        model = TwoRoads()
        total = sum(
            model(inputs[rank][j : j + 1], use).square().sum()
            for rank, order in enumerate(orders)
            for j, use in enumerate(order)
        )
        (total / 6).backward()
        return [p.detach() - p.grad for p in model.parameters()]

    last_unused = truth([[True, True, False]] * 2)
    one_rank = truth([[False, False, True], [False] * 3])
    for found in by_rank:
        for name, expected in [
            ("unused_last", last_unused),
            ("after", last_unused),
            ("one_rank", one_rank),
            ("one_rank_after", one_rank),
        ]:
            for a, b in zip(found[name], expected, strict=True):
                assert (a - b).abs().max() < 1e-15, name
        kind, message = found["refused"]
        assert kind == "PoisonedWindowError"
        assert "did not use sometimes.weight, sometimes.bias" in message
        assert "DDP(find_unused_parameters=True)" in message


# Communication hooks and counting -----------------------------------------------------------------


def counting_hook(state, bucket):  # no annotations: DDP reads them as objects
    """Averages, and counts how often it is called."""
    state.append(bucket.index())
    return default_hooks.allreduce_hook(None, bucket)


def sum_hook(_, bucket):
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def run_hooks(rank: int, n: int) -> dict[str, Any]:
    def with_hook(state: Any, hook: Any) -> Callable[[nn.Module], nn.Module]:
        def wrap(model: nn.Module) -> nn.Module:
            ddp = DistributedDataParallel(model)
            ddp.register_comm_hook(state, hook)
            return ddp

        return wrap

    calls: list[int] = []
    found = {
        "counted": observed(CASE, rank=rank, wrap=with_hook(calls, counting_hook), reduction_divisor=n),
        "sum": observed(CASE, rank=rank, wrap=with_hook(None, sum_hook), reduction_divisor=1),
        "known": observed(CASE, rank=rank, wrap=with_hook(None, default_hooks.allreduce_hook)),
        "fp16": observed(CASE, rank=rank, wrap=with_hook(None, default_hooks.fp16_compress_hook)),
        "after": observed(CASE, rank=rank, wrap=with_hook(None, sum_hook), reduce="after_agreement"),
        "refused": caught(lambda: observed(CASE, rank=rank, wrap=with_hook(None, sum_hook))),
    }
    found["calls"] = len(calls)
    return found


def test_communication_hooks_are_known_declared_or_refused() -> None:
    truth = oracle(CASE)
    for found in run_ranks(run_hooks, 2):
        for name in ("counted", "sum", "known", "after"):
            assert_equal_updates(found[name], truth, tolerance=1e-13)
        assert_equal_updates(found["fp16"], truth, tolerance=2e-3)
        assert found["calls"] == 1, "three micro-batches, one bucket, one reduction"
        kind, message = found["refused"]
        assert kind == "UnsupportedError"
        assert "communication hook sum_hook" in message
        assert "2 times too large" in message
        assert "reduction_divisor=1 for a sum" in message


# Refusals and evidence ----------------------------------------------------------------------------


def run_refusals(rank: int, n: int) -> dict[str, Caught]:
    assert n == 2
    objective = next_token_loss()
    inner = CASE.model()
    ddp = DistributedDataParallel(inner)
    window = UpdateWindow(ddp, torch.optim.SGD(inner.parameters(), lr=0.1), objective)
    batches = CASE.batches()[rank]

    def without_sync(_: nn.Module, batch: dict[str, Tensor]) -> Any:
        with ddp.no_sync():
            return objective(ddp(batch["input_ids"]), batch)

    other = nn.Linear(1, 1)
    static = DistributedDataParallel(CASE.model(), static_graph=True)
    uneven = UpdateWindow(static, torch.optim.SGD(static.parameters(), lr=0.1), objective)
    over_mixed = DistributedDataParallel(CASE.model())
    over_mixed.mixed_precision = object()  # torch's own wants an accelerator
    late = CASE.model()
    named = dict(late.named_parameters())
    delayed = DistributedDataParallel(
        late, delay_all_reduce_named_params=[named.popitem()], param_to_hook_all_reduce=named.popitem()[1]
    )

    def window_of(model: nn.Module, **options: Any) -> UpdateWindow:
        return UpdateWindow(model, torch.optim.SGD(model.parameters(), lr=0.1), objective, **options)

    found = {
        "module": caught(lambda: window.run(batches, lambda _, b: objective(inner(b["input_ids"]), b))),
        "no_sync": caught(lambda: window.run(batches, without_sync)),
        "plain": caught(lambda: UpdateWindow(inner, torch.optim.SGD(inner.parameters(), lr=0.1))),
        "outside": caught(lambda: UpdateWindow(ddp, torch.optim.SGD(other.parameters(), lr=0.1))),
        "nested": caught(
            lambda: UpdateWindow(nn.Sequential(ddp), torch.optim.SGD(inner.parameters(), lr=0.1))
        ),
        "static": caught(
            lambda: UpdateWindow(
                static, torch.optim.SGD(static.parameters(), lr=0.1), reduce="after_agreement"
            )
        ),
        "static_uneven": caught(lambda: uneven.run(UNEVEN.batches()[rank], loss_with(objective))),
        "group": caught(
            lambda: UpdateWindow(
                ddp, torch.optim.SGD(inner.parameters(), lr=0.1), process_group=dist.new_group([0, 1])
            )
        ),
        "plan": caught(
            lambda: UpdateWindow(
                ddp,
                torch.optim.SGD(inner.parameters(), lr=0.1),
                plan=plan_batch(global_batch_samples=12, micro_batch_samples=3, ranks=4),
            )
        ),
        "nobody": caught(lambda: window.run([], loss_with(objective))),
        "each": caught(lambda: window_of(ddp, reduce="per_micro_batch")),
        "include": caught(lambda: window_of(ddp, on_stale_gradients="include")),
        "mixed": caught(lambda: window_of(over_mixed)),
        "delayed": caught(lambda: window_of(delayed)),
        # and after all of these the same window still works
        "works": caught(lambda: window.run(batches, loss_with(objective))),
    }
    sparse = nn.Embedding(7, 7, sparse=True, dtype=torch.float64)
    over_sparse = UpdateWindow(
        DistributedDataParallel(sparse),
        torch.optim.SGD(sparse.parameters(), lr=0.1),
        objective,
        reduce="after_agreement",
    )
    found["sparse"] = caught(lambda: over_sparse.run(batches, loss_with(objective)))
    # a loss that the model's output has no part in: nothing would be reduced
    beside = window_of(DistributedDataParallel(CASE.model()))

    def of_another(model: nn.Module, batch: dict[str, Tensor]) -> Any:
        return other(torch.ones(1)).sum(), objective(model(batch["input_ids"]), batch).num_items

    found["unreached"] = caught(lambda: beside.run(batches, of_another))
    return found


def test_what_could_not_be_exact_is_refused_by_name() -> None:
    expected = {
        "module": ("WindowUsageError", "did not run through the DDP model"),
        "no_sync": ("WindowUsageError", "leave no_sync to the window"),
        "plain": ("UnsupportedError", "2 ranks are running and the model is a plain TinyLanguageModel"),
        "outside": ("UnsupportedError", "2 of the optimizer's 2 parameters are not in the DDP model"),
        "nested": ("UnsupportedError", "0 inside the model is a DistributedDataParallel"),
        "static": ("UnsupportedError", "needs a synchronised first backward"),
        "static_uneven": ("UnsupportedError", "the ranks have different numbers of micro-batches"),
        "group": ("UnsupportedError", "give both the same group"),
        "plan": ("WindowUsageError", "the plan has 4 replicas and 2 are running"),
        "nobody": ("WindowUsageError", "at least one micro-batch on some rank"),
        "each": ("UnsupportedError", "is for engines that shard gradients; DDP holds them whole"),
        "include": ("WindowUsageError", "adds what lies on this rank, and 2 ranks would add different"),
        "mixed": ("UnsupportedError", "DDP(mixed_precision=...) swaps parameters"),
        "delayed": ("UnsupportedError", "delay_all_reduce_named_params=...) reduces outside the backward"),
        "works": ("nothing", ""),
        "sparse": ("UnsupportedError", "has a sparse gradient"),
        "unreached": ("PoisonedWindowError", "reached no parameter of the DDP model"),
    }
    for found in run_ranks(run_refusals, 2):
        assert set(found) == set(expected)
        for name, (kind, message) in expected.items():
            assert found[name][0] == kind, (name, found[name])
            assert message in found[name][1], (name, found[name])


def run_switches(rank: int, n: int) -> list[tuple[bool, bool]]:
    """DDP's switches after a commit and after an exception, from an odd state."""
    assert n == 2
    model = CASE.model()
    ddp = DistributedDataParallel(model)
    objective = next_token_loss()
    window = UpdateWindow(ddp, torch.optim.SGD(model.parameters(), lr=0.1), objective)
    found = []
    for odd in (False, True):
        for fails in (False, True):
            ddp.require_backward_grad_sync, ddp.require_forward_param_sync = odd, not odd

            def loss(model: nn.Module, batch: Any, fails: bool = fails) -> Any:
                if fails and len(batch["input_ids"]) == 3:
                    raise RuntimeError("here")
                return objective(model(batch["input_ids"]), batch)

            caught(lambda loss=loss: window.run(CASE.batches()[rank], loss))
            found.append((ddp.require_backward_grad_sync, ddp.require_forward_param_sync))
    return found


def test_the_switches_of_ddp_are_put_back_as_they_were_found() -> None:
    assert run_ranks(run_switches, 2) == [[(False, True)] * 2 + [(True, False)] * 2] * 2


# Buffers and loaders ------------------------------------------------------------------------------


def run_buffers(rank: int, n: int) -> dict[str, Tensor]:
    assert n == 2
    torch.manual_seed(rank)
    inputs = [torch.randn(4, 3) for _ in range(2)]
    found = {}
    for reduce in ("per_update", "after_agreement"):
        torch.manual_seed(9)
        model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
        ddp = DistributedDataParallel(model)
        window = UpdateWindow(ddp, torch.optim.SGD(model.parameters(), lr=0.1), reduce=reduce)
        window.run(inputs, lambda m, b: (m(b).square().sum(), len(b)))
        found[reduce] = model[0].running_mean.clone()
    return found


def test_buffers_are_those_of_rank_zero_after_an_update_as_ddp_has_it() -> None:
    first, second = run_ranks(run_buffers, 2)
    torch.manual_seed(0)
    inputs = [torch.randn(4, 3) for _ in range(2)]
    norm = nn.BatchNorm1d(3)
    for batch in inputs:
        norm(batch)
    for reduce in ("per_update", "after_agreement"):
        torch.testing.assert_close(first[reduce], norm.running_mean)
        assert torch.equal(first[reduce], second[reduce])


def run_loaders(rank: int, n: int) -> tuple[list[tuple[int, int, bool]], int]:
    """Loaders that end at different times: 5 micro-batches on rank 0, 2 on rank 1."""
    model = CASE.model()
    objective = next_token_loss()
    plan = plan_batch(global_batch_samples=4, micro_batch_samples=1, ranks=n)
    window = UpdateWindow(
        DistributedDataParallel(model), torch.optim.SGD(model.parameters(), lr=0.1), objective, plan=plan
    )
    counts = [[[5], [2], [3], [4], [1]], [[3], [5]]]
    loader = Case(counts=counts).batches()[rank]
    records = [window.run(batches, loss_with(objective)) for batches in window.batches(loader)]
    return [(r.samples, r.items, r.partial) for r in records], window.counters.micro_batches


def test_loaders_that_end_at_different_times_end_together() -> None:
    expected = ([(4, 4 + 1 + 2 + 4, False), (2, 2 + 3, True), (1, 0, True)], 7)
    assert run_ranks(run_loaders, 2) == [expected, expected]


# What happens to the model between updates --------------------------------------------------------


def distance_over_ranks(model: nn.Module) -> float:
    """How far this rank's parameters are from the mean over ranks."""
    farthest = 0.0
    for parameter in model.parameters():
        mean = parameter.detach().clone()
        dist.all_reduce(mean)
        farthest = max(farthest, (mean / dist.get_world_size() - parameter.detach()).abs().max().item())
    return farthest


def run_other_parameters(rank: int, n: int) -> dict[str, Caught]:
    assert n == 2

    def build() -> tuple[nn.Module, DistributedDataParallel]:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
        model[0].requires_grad_(False)
        return model, DistributedDataParallel(model)

    def loss(model: nn.Module, batch: Tensor) -> Any:
        return model(batch).square().sum(), len(batch)

    batches = [torch.randn(2, 3) + rank for _ in range(2)]
    model, ddp = build()
    model[0].requires_grad_(True)
    found = {"before": caught(lambda: UpdateWindow(ddp, torch.optim.SGD(model.parameters(), lr=0.1)))}
    model, ddp = build()
    window = UpdateWindow(ddp, torch.optim.SGD(model.parameters(), lr=0.1))
    window.run(batches, loss)
    model[0].requires_grad_(True)
    found["after"] = caught(lambda: window.run(batches, loss))
    model[0].requires_grad_(False)
    found["again"] = caught(lambda: window.run(batches, loss))
    assert distance_over_ranks(model) == 0
    return found


def test_parameters_that_ddp_never_heard_of_are_refused() -> None:
    for found in run_ranks(run_other_parameters, 2):
        assert found["before"][0] == "UnsupportedError"
        assert "DDP was built over 2 trainable parameters and the model now has 4" in found["before"][1]
        assert found["after"][0] == "UnsupportedError"
        assert (
            "2 parameters were frozen, unfrozen, added or replaced after DDP was built" in found["after"][1]
        )
        assert found["again"] == ("nothing", "")


def run_stray_forward(rank: int, n: int) -> list[tuple[Caught, float]]:
    """A forward with gradients and without a backward, between updates, on one rank only."""
    assert n == 2
    found = []
    for reduce in ("per_update", "after_agreement"):
        model = CASE.model()
        ddp = DistributedDataParallel(model)
        objective = next_token_loss()
        window = UpdateWindow(ddp, torch.optim.SGD(model.parameters(), lr=0.3), objective, reduce=reduce)
        for _ in range(3):
            if rank == 0:
                ddp(CASE.batches()[0][0]["input_ids"])
            raised = caught(lambda w=window, o=objective: w.run(CASE.batches()[rank], loss_with(o)))
            found.append((raised, distance_over_ranks(model)))
        assert window.counters.updates_applied == 3
    return found


def test_a_stray_forward_on_one_rank_does_not_reduce_early() -> None:
    for found in run_ranks(run_stray_forward, 2):
        assert found == [(("nothing", ""), 0.0)] * 6


def run_no_grad_forward_last(rank: int, n: int) -> Caught:
    assert n == 2
    model = CASE.model()
    ddp = DistributedDataParallel(model)
    objective = next_token_loss()
    window = UpdateWindow(ddp, torch.optim.SGD(model.parameters(), lr=0.3), objective)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Any:
        found = objective(model(batch["input_ids"]), batch)
        with torch.no_grad():
            model(batch["input_ids"])
        return found

    return caught(lambda: window.run(CASE.batches()[rank], loss))


def test_a_forward_without_gradients_after_the_one_that_trains() -> None:
    assert run_ranks(run_no_grad_forward_last, 2) == [("nothing", "")] * 2


def run_different_settings(rank: int, n: int) -> dict[str, Caught]:
    assert n == 2
    one_term = next_token_loss()
    terms = {f"term {number}": (one_term, 1.0) for number in range(3)}

    def attempt(**options: Any) -> Caught:
        model = CASE.model(torch.float32)
        state, objective = options.pop("state", None), options.pop("objective", one_term)
        window = UpdateWindow(
            DistributedDataParallel(model),
            torch.optim.SGD(model.parameters(), lr=0.1),
            objective,
            **options,
        )
        if state:
            window.load_state_dict({**window.state_dict(), **state})
        return caught(lambda: window.run(CASE.batches()[rank], loss_with(objective)))

    return {
        "clip": attempt(clip_grad_norm=1.0 + rank),
        "nonfinite": attempt(on_nonfinite=["skip", "raise"][rank]),
        "state": attempt(state={"provisional_items": 100.0} if rank == 0 else {}),
        "counters": attempt(state={"counters": {**Counters().state_dict(), "samples": 12 * rank}}),
        "scale": attempt(scaler=torch.amp.GradScaler("cpu", init_scale=[1024.0, 8.0][rank])),
        "terms": attempt(objective=weighted_terms(terms) if rank else one_term),
        "same": attempt(clip_grad_norm=1.0, scaler=torch.amp.GradScaler("cpu", init_scale=8.0)),
    }


def test_ranks_with_different_settings_are_told() -> None:
    for rank, found in enumerate(run_ranks(run_different_settings, 2)):
        assert found.pop("same") == ("nothing", "")
        for name, (kind, message) in found.items():
            assert kind == "WindowUsageError"
            assert "the ranks do not have the same settings: rank 1 not as rank 0; this one has" in message
            own = "'term 2': 1.0" if (rank, name) == (1, "terms") else "terms {'loss': 1.0}"
            assert own in message, name


def run_divisors(rank: int, n: int) -> list[Caught]:
    model = CASE.model()
    ddp = DistributedDataParallel(model)
    assert rank < n
    return [
        caught(
            lambda d=divisor: UpdateWindow(
                ddp, torch.optim.SGD(model.parameters(), lr=0.1), reduction_divisor=d
            )
        )
        for divisor in (1, 0, -2, "x", True)
    ]


def test_a_divisor_without_a_hook_or_of_no_size_is_refused() -> None:
    for found in run_ranks(run_divisors, 2):
        assert {kind for kind, _ in found} == {"UnsupportedError"}
        assert "reduction_divisor=1 without a communication hook: DDP itself divides by 2" in found[0][1]
        assert all("is no number that a reduction divides by" in message for _, message in found[1:])


def run_empty_first(rank: int, n: int) -> str:
    """A scaler, and one rank without a micro-batch in the very first window."""
    assert n == 2
    model = CASE.model(torch.float32)
    objective = next_token_loss()
    window = UpdateWindow(
        DistributedDataParallel(model),
        torch.optim.SGD(model.parameters(), lr=0.1),
        objective,
        scaler=torch.amp.GradScaler("cpu", init_scale=8.0),
    )
    return window.run(ONE_EMPTY.batches()[rank], loss_with(objective)).outcome


def test_a_scaler_with_a_rank_that_has_nothing_at_first() -> None:
    assert run_ranks(run_empty_first, 2) == ["applied", "applied"]


class ReplacedBuffer(nn.Module):
    """Replaces its buffer in the forward instead of writing it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 1)
        self.register_buffer("average", torch.zeros(3))

    def forward(self, batch: Tensor) -> Tensor:
        self.average = self.average * 0.9 + batch.mean(0) * 0.1
        return self.linear(batch)


def run_replaced_buffer(rank: int, n: int) -> Tensor:
    assert n == 2
    model = ReplacedBuffer()
    window = UpdateWindow(DistributedDataParallel(model), torch.optim.SGD(model.parameters(), lr=0.1))
    window.run([torch.full((2, 3), 1.0 + rank)], lambda m, b: (m(b).sum(), len(b)))
    return model.average


def test_buffers_that_the_forward_replaces_are_shared_too() -> None:
    first, second = run_ranks(run_replaced_buffer, 2)
    assert torch.equal(first, second)
    assert torch.allclose(first, torch.full((3,), 0.1))


# Found by attacking it ----------------------------------------------------------------------------


def run_extra_reduction(rank: int, n: int) -> tuple[Caught, float]:
    """autograd.grad through DDP spends the one reduction that a static graph has in its first backward."""
    assert n == 2
    model = CASE.model()
    ddp = DistributedDataParallel(model, static_graph=True)
    objective = next_token_loss()
    window = UpdateWindow(ddp, torch.optim.SGD(model.parameters(), lr=0.3), objective)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Any:
        found = objective(model(batch["input_ids"]), batch)
        torch.autograd.grad(found.loss_sum, list(model.parameters()), retain_graph=True)
        return found

    raised = caught(lambda: window.run(CASE.batches()[rank], loss))
    return raised, distance_over_ranks(model)


def test_ranks_never_step_on_different_gradients() -> None:
    for (kind, message), distance in run_ranks(run_extra_reduction, 2):
        assert kind == "UpdateError"
        assert "were not reduced as a whole" in message
        assert distance == 0


def run_late_forwards(rank: int, n: int) -> dict[str, Any]:
    """Forwards with gradients at odd moments of an update, on one rank only."""
    assert n == 2
    objective = next_token_loss()

    def window_of() -> tuple[DistributedDataParallel, UpdateWindow]:
        ddp = DistributedDataParallel(CASE.model())
        return ddp, UpdateWindow(ddp, torch.optim.SGD(ddp.parameters(), lr=0.3), objective)

    def after_the_last_backward() -> None:
        for _ in range(2):
            with window.update(CASE.batches()[rank]) as update:
                for batch in update:
                    update.backward(objective(ddp(batch["input_ids"]), batch))
                    if rank == 0:
                        ddp(batch["input_ids"])

    def before_the_loop() -> None:
        with window.update(CASE.batches()[rank]) as update:
            if rank == 0:
                ddp(CASE.batches()[0][0]["input_ids"])
            for batch in update:
                update.backward(objective(ddp(batch["input_ids"]), batch))

    ddp, window = window_of()
    found: dict[str, Any] = {"after": caught(after_the_last_backward)}
    found["distance"] = distance_over_ranks(ddp)
    ddp, window = window_of()
    found["before"] = caught(before_the_loop)
    found["again"] = caught(lambda: window.run(CASE.batches()[rank], loss_with(objective)))
    return found


def test_forwards_at_odd_moments_of_an_update() -> None:
    first, second = run_ranks(run_late_forwards, 2)
    for found in (first, second):
        assert found["after"] == found["again"] == ("nothing", "")
        assert found["distance"] == 0
    assert "between the start of this update and its loop" in first["before"][1]
    assert second["before"][0] == "OtherRankFailedError"


def run_own_backward(rank: int, n: int) -> tuple[Caught, Caught]:
    """A warm-up of the user's own leaves a rebuild of the buckets for the next forward; then one fails."""
    assert n == 2
    model = CASE.model()
    ddp = DistributedDataParallel(model)
    objective = next_token_loss()
    window = UpdateWindow(ddp, torch.optim.SGD(model.parameters(), lr=0.3), objective)
    loss_with(objective)(ddp, CASE.batches()[rank][0]).loss_sum.backward()
    model.zero_grad()

    def fails(model: nn.Module, batch: dict[str, Tensor]) -> Any:
        if rank == 1:
            raise RuntimeError("here")
        return loss_with(objective)(model, batch)

    raised = caught(lambda: window.run(CASE.batches()[rank], fails))
    return raised, caught(lambda: window.run(CASE.batches()[rank], loss_with(objective)))


def test_a_backward_of_the_users_own_and_then_a_failure() -> None:
    first, second = run_ranks(run_own_backward, 2)
    assert first[0][0] == "OtherRankFailedError"
    assert second[0] == ("RuntimeError", "here")
    assert first[1] == second[1] == ("nothing", "")


def run_two_forwards(rank: int, n: int) -> tuple[Caught, Caught]:
    """Two forwards in a turn of a model with buffers, and a failure between them."""
    assert n == 2
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
    window = UpdateWindow(DistributedDataParallel(model), torch.optim.SGD(model.parameters(), lr=0.1))
    fails = [rank == 1]

    def loss(model: nn.Module, batch: Tensor) -> Any:
        first = model(batch)
        if fails and fails.pop():
            raise RuntimeError("here")
        return (first - model(batch * 2)).square().sum(), len(batch)

    batches = [torch.randn(4, 3)]
    return caught(lambda: window.run(batches, loss)), caught(lambda: window.run(batches, loss))


def test_a_second_forward_in_a_turn_broadcasts_nothing() -> None:
    first, second = run_ranks(run_two_forwards, 2)
    assert first[0][0] == "OtherRankFailedError"
    assert second[0] == ("RuntimeError", "here")
    assert first[1] == second[1] == ("nothing", "")


def run_unused_after_a_tail(rank: int, n: int) -> tuple[Caught, float]:
    """A tail that one rank has no part in, then an update that does not use one layer."""
    assert n == 2
    model = TwoRoads()
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    window = UpdateWindow(ddp, torch.optim.SGD(model.parameters(), lr=0.1))
    inputs = torch.ones(1, 3, dtype=torch.float64) + rank

    def run(batches: list[Any]) -> None:
        window.run(batches, lambda m, b: (m(*b).square().sum(), 1))

    def all_three() -> None:
        run([(inputs, True)])
        run([(inputs, True)] if rank == 0 else [])
        run([(inputs, False), (inputs, False)])

    return caught(all_three), distance_over_ranks(model)


def test_a_tail_reduced_at_the_end_leaves_no_marks() -> None:
    assert run_ranks(run_unused_after_a_tail, 2) == [(("nothing", ""), 0.0)] * 2


def run_many_windows(rank: int, n: int) -> tuple[int, int]:
    assert rank < n
    ddp = DistributedDataParallel(CASE.model())
    groups = []
    for _ in range(5):
        UpdateWindow(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1))
        groups.append(len(dist.distributed_c10d._world.pg_map))
    gc.collect()
    return groups[-1] - groups[0], len(ddp._forward_pre_hooks)


def test_many_windows_over_one_model_share_a_group_and_leave_no_hooks() -> None:
    assert run_ranks(run_many_windows, 2) == [(0, 0)] * 2


def run_among_other_groups(rank: int, _n: int) -> tuple[str, str]:
    """Ranks of which some are in a group more, and then one whose tensors are made elsewhere by default."""
    dist.new_group([0, 1])
    model = CASE.model(torch.float32)
    window = UpdateWindow(
        DistributedDataParallel(model), torch.optim.SGD(model.parameters(), lr=0.1), next_token_loss()
    )
    batches = CASE.batches()[rank % 2]
    plain = window.run(batches, loss_with(next_token_loss())).outcome
    with torch.device("meta"):
        return plain, window.run(batches, loss_with(next_token_loss())).outcome


def test_ranks_in_different_numbers_of_groups_and_another_default_device() -> None:
    for found in run_ranks(run_among_other_groups, 3, timeout_s=60):
        assert found == ("applied", "applied")
