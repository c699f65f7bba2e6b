"""What gradients of bfloat16 parameters are added up in, by the window, on one rank and on two."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from ranks import run_ranks
from wholebatch import UpdateWindow, token_loss
from wholebatch.errors import UnsupportedError, WindowUsageError
from wholebatch.plan import plan_batch

OBJECTIVE = token_loss()
Batch = dict[str, torch.Tensor]


def net(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(torch.bfloat16).to(dtype)


def batches(number: int, dtype: torch.dtype = torch.bfloat16) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(number, 2, 8, generator=generator).to(torch.bfloat16).to(dtype)
    labels = torch.randint(0, 4, (number, 2), generator=generator)
    return [{"x": one, "labels": of_one} for one, of_one in zip(x, labels, strict=True)]


def loss(model: nn.Module, batch: Batch) -> Any:
    return OBJECTIVE(model(batch["x"]).float(), batch)


def moved(model: nn.Module, held: list[Batch], **options: Any) -> tuple[torch.Tensor, Any]:
    """The gradient as SGD with a rate of 1 reads it, in float64, and the record."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    seen: list[torch.Tensor] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(gradient_of(model)))
    record = UpdateWindow(model, optimizer, OBJECTIVE, **options).run(held, loss)
    assert all(p.grad is None and p.grad_dtype in (None, p.dtype) for p in model.parameters())
    return seen[0], record


def gradient_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])


def truth(held: list[Batch]) -> tuple[torch.Tensor, float]:
    """The gradient in float64, and how far the bfloat16 gradient of the one big batch is from it."""
    found = []
    for dtype in (torch.float64, torch.bfloat16):
        model = net(dtype)
        x = torch.cat([batch["x"] for batch in held]).to(dtype)
        labels = torch.cat([batch["labels"] for batch in held])
        logits = model(x)
        logits = logits if dtype == torch.float64 else logits.float()
        nn.functional.cross_entropy(logits, labels).backward()
        found.append(gradient_of(model))
    return found[0], float((found[1] - found[0]).norm() / found[0].norm())


@pytest.mark.parametrize("micro_batches", [8, 64, 512])
def test_the_error_is_that_of_the_big_batch(micro_batches: int) -> None:
    held = batches(micro_batches)
    wanted, of_big_batch = truth(held)
    wide, _ = moved(net(), held)
    narrow, _ = moved(net(), held, accumulate_in=torch.bfloat16)
    error, narrow_error = (float((one - wanted).norm() / wanted.norm()) for one in (wide, narrow))
    assert error < 2 * max(of_big_batch, torch.finfo(torch.bfloat16).eps)
    assert narrow_error > (1.5 if micro_batches > 8 else 1.1) * error


def test_a_few_micro_batches_are_added_up_as_they_are_unless_asked() -> None:
    held = batches(4)
    left, few = moved(net(), held)
    narrow, _ = moved(net(), held, accumulate_in=torch.bfloat16)
    assert few.accumulated_in == "bfloat16"
    wide, record = moved(net(), held, accumulate_in=torch.float32, clip_grad_norm=0.01)
    assert torch.equal(left, narrow)
    assert record.accumulated_in == record.to_dict()["accumulated_in"] == "float32"
    assert record.gradient_norm_after_clip == pytest.approx(0.01, rel=1e-3)
    assert float(wide.norm()) == pytest.approx(0.01, rel=1e-2)


def test_to_ask_for_the_price_inside_an_update_changes_nothing_in_its_record() -> None:
    model = net()
    wider_last = [*model.parameters(), nn.Parameter(torch.zeros(1))]
    window = UpdateWindow(model, torch.optim.SGD(wider_last, lr=0.1), OBJECTIVE)
    with window.update(batches(2)) as update:
        for batch in update:
            update.backward(loss(model, batch))
            window.traffic(2)
    assert update.record.accumulated_in == "bfloat16"


def test_a_failed_update_leaves_gradients_as_they_were_kept() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    window = UpdateWindow(model, optimizer, OBJECTIVE, accumulate_in=torch.float32)
    held = batches(6)
    turns = iter(range(6))

    def failing(model: nn.Module, batch: Batch) -> Any:
        if next(turns) == 4:
            assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
            raise RuntimeError("mine")
        return loss(model, batch)

    with pytest.raises(RuntimeError, match="mine"):
        window.run(held, failing)
    assert all(p.grad is None and p.grad_dtype in (None, p.dtype) for p in model.parameters())
    bad = batches(6)
    bad[2]["x"][:] = float("nan")
    assert window.run(bad, loss).outcome == "skipped_nonfinite"
    assert window.run(held, loss).outcome == "applied"
    assert all(state["exp_avg"].dtype == torch.bfloat16 for state in optimizer.state.values())


def test_another_dtype_is_refused() -> None:
    model = net()
    with pytest.raises(
        WindowUsageError, match=r"accumulate_in=torch\.int8 is nothing to add gradients up in"
    ):
        UpdateWindow(
            model, torch.optim.SGD(model.parameters(), lr=1.0), OBJECTIVE, accumulate_in=torch.int8
        )


def on_two_ranks(rank: int, ranks: int) -> list[Any]:
    held = batches(32)
    wanted, of_big_batch = truth(held)
    model = nn.parallel.DistributedDataParallel(net())
    wide, record = moved(model, held[rank::ranks])
    error = float((wide - wanted).norm() / wanted.norm())
    # what one rank has too many of, all add up wide
    _, few_record = moved(nn.parallel.DistributedDataParallel(net()), held[rank : rank + 1])
    _, uneven = moved(nn.parallel.DistributedDataParallel(net()), held[: 6 - 4 * rank])
    return [
        error / max(of_big_batch, torch.finfo(torch.bfloat16).eps),
        [one.reductions for one in (record, few_record, uneven)],
        [one.accumulated_in for one in (record, few_record, uneven)],
    ]


def refused_when_made(rank: int, ranks: int) -> dict[str, str]:
    """What DDP's own reducer or a hook can't do with wide gradients, told before an update runs."""
    plan = plan_batch(global_batch_samples=24, micro_batch_samples=2, ranks=ranks)
    told = {}

    def made(name: str, model: nn.Module, **options: Any) -> UpdateWindow | None:
        try:
            return UpdateWindow(
                model, torch.optim.SGD(model.parameters(), lr=1.0), OBJECTIVE, plan=plan, **options
            )
        except UnsupportedError as error:
            told[name] = str(error)
            return None

    def ddp(model: nn.Module, *, hook: bool = False, **options: Any) -> nn.Module:
        wrapped = nn.parallel.DistributedDataParallel(model, **options)
        if hook:
            wrapped.register_comm_hook(None, default_hooks.allreduce_hook)
        return wrapped

    sparse = nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 4)).bfloat16()
    made("hook", ddp(net(), hook=True))
    made("static", ddp(net(), static_graph=True))
    made("sparse", ddp(sparse))
    held = batches(12)[rank::ranks]
    narrow = made("narrow hook", ddp(net(), hook=True), accumulate_in=torch.bfloat16)
    assert narrow is not None
    assert narrow.run(held, loss).outcome == "applied"
    # what is frozen adds nothing up, so nothing has to go past DDP's own reduction
    model = nn.Sequential(nn.Linear(8, 8).bfloat16().requires_grad_(False), Wider(), nn.Linear(8, 4))
    adapters = made("adapters", ddp(model, hook=True))
    assert adapters is not None
    assert adapters.run(held, loss).accumulated_in == "float32"
    return told


class Wider(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.float()


@pytest.mark.slow
def test_what_wide_gradients_would_go_past_is_refused_when_the_window_is_made() -> None:
    for told in run_ranks(refused_when_made, 2):
        assert told.keys() == {"hook", "static", "sparse"}
        assert "goes past DDP's communication hook" in told["hook"]
        assert "needs its first backward reduced by its own reducer" in told["static"]
        assert "0.weight has a sparse gradient" in told["sparse"]
        assert all("accumulate_in=torch.bfloat16 to add up in" in words for words in told.values())


@pytest.mark.slow
def test_two_ranks_add_up_wide_and_reduce_once() -> None:
    for error, reductions, added_up_in in run_ranks(on_two_ranks, 2):
        assert error < 2
        assert reductions == [1, 1, 1]
        assert added_up_in == ["float32", "bfloat16", "float32"]


def sharded(rank: int, ranks: int) -> list[Any]:
    held = batches(16)
    told = []

    def over(policy: MixedPrecisionPolicy, dtype: torch.dtype, **options: Any) -> Any:
        model = net(dtype)
        fully_shard(model, mp_policy=policy)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        record = UpdateWindow(model, optimizer, OBJECTIVE, **options).run(held[rank::ranks], loss)
        return record.outcome, record.accumulated_in

    narrow = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    wide = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for policy, dtype, reduce in [
        (narrow, torch.float32, "per_update"),
        (wide, torch.bfloat16, "per_micro_batch"),
    ]:
        with pytest.raises(UnsupportedError) as caught:
            over(policy, dtype, reduce=reduce)
        told.append(str(caught.value))
    told += [
        over(wide, torch.float32, reduce="per_update"),
        over(wide, torch.float32, reduce="per_micro_batch"),
        over(narrow, torch.float32, reduce="per_update", accumulate_in=torch.bfloat16),
    ]
    return told


@pytest.mark.slow
def test_shards_that_would_add_up_narrow_are_refused() -> None:
    for held_back, shards, *outcomes in run_ranks(sharded, 2):
        assert "would be added up in bfloat16" in held_back
        assert "reduce_dtype=torch.float32" in held_back
        assert "adds sharded gradients up in the dtype of the parameters" in shards
        assert outcomes == [("applied", dtype) for dtype in ("float32", "float32", "bfloat16")]
