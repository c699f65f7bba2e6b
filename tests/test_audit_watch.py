"""What the watch sees of a loop, and that the loop does not notice."""

from __future__ import annotations

import contextlib
import gc
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from wholebatch.audit.trace import Event, RankTrace
from wholebatch.audit.watching import Watching

UNSEEN: tuple[str, ...] = ()


def watched(loop: Callable[[], Any], **options: Any) -> RankTrace:
    """What was seen of a loop, with nothing that went wrong inside the watch."""
    watching = Watching(**options)
    try:
        loop()
    finally:
        trace = watching.end()
    assert trace.unseen == UNSEEN
    return trace


def kinds(trace: RankTrace, *, without: tuple[str, ...] = ("forward",)) -> list[str]:
    return [event.kind for event in trace.events if event.kind not in without]


def of_kind(trace: RankTrace, kind: str) -> list[Event]:
    return [event for event in trace.events if event.kind == kind]


def small(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(dropout), nn.Linear(8, 3))


def batch(samples: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(samples, 4, generator=generator), torch.randint(
        0, 3, (samples,), generator=generator
    )


def accumulate(model: nn.Module, micro_batches: int, seed: int = 0) -> None:
    for index in range(micro_batches):
        x, y = batch(2 + index, seed + index)
        (F.cross_entropy(model(x), y) / micro_batches).backward()


def plain_loop(updates: int = 3) -> list[torch.Tensor]:
    model = small(dropout=0.1)
    optimizer = torch.optim.AdamW(model.parameters())
    for update in range(updates):
        accumulate(model, 2, seed=10 * update)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


# -- the loop does not notice ----------------------------------------------------------------------------


def test_the_result_is_bit_for_bit_that_without_a_watch():
    alone = plain_loop()
    results: list[list[torch.Tensor]] = []
    watched(lambda: results.append(plain_loop()))
    assert all(torch.equal(one, other) for one, other in zip(alone, results[0], strict=True))


def patched() -> dict[str, Any]:
    """Everything that the watch replaces, as it is now."""
    owners = [
        torch.autograd,
        torch.optim.Optimizer,
        nn.Module,
        nn.utils,
        sys.modules["torch.nn.utils.clip_grad"],
        torch.amp.GradScaler,
        lr_scheduler.LRScheduler,
        lr_scheduler.ReduceLROnPlateau,
        DataLoader,
        torch.distributed,
    ]
    found = {f"{owner.__name__}.{name}": value for owner in owners for name, value in vars(owner).items()}
    found["call"] = nn.Module.__call__
    optimizers = sys.modules["torch.optim.optimizer"]
    found["steps"] = (
        len(optimizers._global_optimizer_pre_hooks),
        len(optimizers._global_optimizer_post_hooks),
    )
    return {name: value for name, value in found.items() if not name.endswith("__")}


@pytest.mark.parametrize("fails", [False, True])
def test_everything_is_put_back_also_after_an_exception(fails):
    def loop():
        plain_loop(1)
        if fails:
            raise ZeroDivisionError("of the loop's own")

    before = patched()
    watching = Watching()
    during = patched()
    try:
        loop()
    except ZeroDivisionError:
        assert fails
    watching.end()
    after = patched()
    assert during != before
    assert {
        name for name, value in after.items() if before[name] is not value and before[name] != value
    } == set()


def test_everything_is_put_back_as_soon_as_enough_updates_were_seen():
    before = patched()
    seen: list[bool] = []

    def loop():
        plain_loop(2)
        seen.append(patched() == before)

    watching = Watching(updates=2)
    loop()
    assert seen == [True]
    assert watching.end().ended == "audited"


def test_the_watch_holds_nothing_of_the_loop_once_it_is_over():
    model = small()
    held = weakref.ref(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watching = Watching()
    accumulate(model, 2)
    optimizer.step()
    watching.end()
    del model, optimizer
    gc.collect()
    assert held() is None


def test_a_failure_inside_the_watch_is_noted_and_never_reaches_the_loop(monkeypatch):
    from wholebatch.audit.watch import gradients

    def broken(*_: Any) -> Any:
        raise RuntimeError("no sketch today")

    monkeypatch.setattr(gradients.Sketcher, "whole", broken)
    watching = Watching()
    plain_loop(1)
    assert any("no sketch today" in entry for entry in watching.end().unseen)


def test_functions_take_their_arguments_by_name_as_before():
    def loop():
        model = small()
        optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1))
        accumulate(model, 1)
        nn.utils.clip_grad_value_(model.parameters(), clip_value=1.0)
        nn.utils.clip_grad_norm_(parameters=model.parameters(), max_norm=1.0)
        optimizer.step()

    assert [event.value for event in of_kind(watched(loop), "clip")] == [1.0, 1.0]


def test_a_loader_is_not_asked_for_its_length():
    class Endless(torch.utils.data.IterableDataset):
        def __iter__(self):
            yield from [torch.ones(4)] * 3

        def __len__(self):
            raise NotImplementedError

    def loop():
        model = small()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x in DataLoader(Endless(), batch_size=2):
            model(x).sum().backward()
        optimizer.step()

    assert kinds(watched(loop)) == ["pass", "backward", "backward", "pass", "step"]


def test_a_step_that_raises_and_is_tried_again_is_one_step():
    class Failing(torch.optim.SGD):
        failed = False

        def step(self, closure=None):
            if not self.failed:
                self.failed = True
                raise RuntimeError("a device was busy")
            return super().step(closure)

    def loop():
        model = small()
        optimizer = Failing(model.parameters(), lr=0.1)
        for update in range(2):
            accumulate(model, 1, seed=update)
            with contextlib.suppress(RuntimeError):
                optimizer.step()
            if not update:
                optimizer.step()
            optimizer.zero_grad()

    backwards = [event.backward for event in of_kind(watched(loop), "backward")]
    assert [backward.in_step for backward in backwards] == [False, False]


def test_a_long_printed_line_is_read_quickly():
    def loop():
        model = small()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        accumulate(model, 1)
        begun = time.perf_counter()
        print("loss" + "l" * 200_000)
        assert time.perf_counter() - begun < 1.0
        optimizer.step()

    watched(loop)


def test_sketches_do_not_follow_autocast():
    def loop():
        model = small()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            accumulate(model, 2)
            optimizer.step()

    trace = watched(loop)
    read = of_kind(trace, "step")[0].before
    for index, values in read.items():
        delivered = sum(event.backward.delivered[index] for event in of_kind(trace, "backward"))
        assert values == pytest.approx(delivered, rel=1e-4, abs=1e-6)


# -- what backwards deliver ------------------------------------------------------------------------------


def test_a_window_is_seen_in_order():
    trace = watched(lambda: plain_loop(1))
    assert kinds(trace) == ["backward", "backward", "clip", "step", "clear"]
    assert [event.place.code for event in of_kind(trace, "step")] == ["optimizer.step()"]
    backward = of_kind(trace, "backward")[0].backward
    assert backward.site[0].code == "(F.cross_entropy(model(x), y) / micro_batches).backward()"
    assert len(backward.delivered) == 4


def test_what_is_read_is_the_sum_of_what_was_delivered():
    def loop():
        model = small()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        accumulate(model, 3)
        optimizer.step()

    trace = watched(loop)
    read = of_kind(trace, "step")[0].before
    for index, values in read.items():
        delivered = sum(event.backward.delivered[index] for event in of_kind(trace, "backward"))
        assert values == pytest.approx(delivered, rel=1e-4, abs=1e-6)


def test_gradients_asked_for_by_autograd_grad_are_not_delivered():
    def loop():
        model = small()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x, y = batch(4)
        loss = F.cross_entropy(model(x), y)
        torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        loss.backward()
        optimizer.step()

    trace = watched(loop)
    assert kinds(trace) == ["probe", "backward", "step"]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_activations_deliver_once(reentrant):
    def loop():
        model = small()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x, y = batch(4)
        hidden = checkpoint(model[0], x.requires_grad_(), use_reentrant=reentrant)
        F.cross_entropy(model[2](hidden), y).backward()
        optimizer.step()

    trace = watched(loop)
    assert kinds(trace) == ["backward", "step"]
    delivered, read = of_kind(trace, "backward")[0].backward.delivered, of_kind(trace, "step")[0].before
    assert sorted(delivered) == sorted(read) == [0, 1, 2, 3]
    for index in read:
        assert read[index] == pytest.approx(delivered[index])


def test_a_backward_inside_step_is_read_by_that_step():
    def loop():
        model = small()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def closure():
            optimizer.zero_grad()
            x, y = batch(4)
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)

    trace = watched(loop)
    assert kinds(trace) == ["backward", "step"]
    assert of_kind(trace, "backward")[0].backward.in_step
    assert len(of_kind(trace, "step")[0].before) == 4


def test_a_loss_of_another_model_is_no_backward_of_the_watched_one():
    def loop():
        model, other = small(), nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        F.cross_entropy(other(batch(2)[0]), batch(2)[1]).backward()
        accumulate(model, 1)
        optimizer.step()

    assert kinds(watched(loop)) == ["backward", "step"]


# -- who touched the gradients ---------------------------------------------------------------------------


def clears(how: Callable[[nn.Module, torch.optim.Optimizer], None]) -> Callable[[], None]:
    def loop():
        model = small()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        accumulate(model, 1)
        how(model, optimizer)
        accumulate(model, 1)
        optimizer.step()

    return loop


def by_none(model, _):
    for parameter in model.parameters():
        parameter.grad = None


def by_zero(model, _):
    for parameter in model.parameters():
        parameter.grad.zero_()


@pytest.mark.parametrize(
    "how",
    [
        lambda _, optimizer: optimizer.zero_grad(),
        lambda _, optimizer: optimizer.zero_grad(set_to_none=False),
        lambda model, _: model.zero_grad(),
        by_none,
        by_zero,
    ],
    ids=["to none", "to zero", "module", "None by hand", "zero by hand"],
)
def test_a_clear_is_seen_however_it_is_done(how):
    trace = watched(clears(how))
    assert kinds(trace) == ["backward", "clear", "backward", "step"]
    assert of_kind(trace, "clear")[0].optimizers == (0,)
    assert of_kind(trace, "clear")[0].value == pytest.approx(1.0)


def test_a_clear_of_something_else_is_a_call_that_cleared_nothing():
    trace = watched(clears(lambda *_: nn.Linear(2, 2).zero_grad()))
    assert kinds(trace) == ["backward", "clear_call", "backward", "step"]


def test_a_clear_of_a_part_says_how_much():
    trace = watched(clears(lambda model, _: model[0].zero_grad()))
    assert of_kind(trace, "clear")[0].value == pytest.approx(0.5)


def test_gradients_divided_by_hand_are_seen():
    def divide(model, _):
        for parameter in model.parameters():
            parameter.grad /= 4

    trace = watched(clears(divide))
    assert kinds(trace) == ["backward", "gradients_changed", "backward", "step"]


def test_parameters_written_to_between_backwards_are_seen():
    def clamp(model, _):
        for parameter in model.parameters():
            parameter.data.clamp_(-0.01, 0.01)

    trace = watched(clears(clamp))
    assert kinds(trace) == ["backward", "parameters_changed", "backward", "step"]


def test_parameters_that_a_step_moved_have_not_changed_by_themselves():
    assert "parameters_changed" not in kinds(watched(lambda: plain_loop(3)))


# -- the edge --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("overflow", [False, True])
def test_a_scaled_step_and_a_skipped_one(fused, overflow):
    def loop():
        model = small()
        optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        x, y = batch(4)
        loss = F.cross_entropy(model(x), y)
        scaler.scale(loss * (float("inf") if overflow else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()

    trace = watched(loop)
    ends = "skip" if overflow else "step"
    assert [kind for kind in kinds(trace) if kind != "unscale"] == ["backward", ends, "scale_update"]
    assert of_kind(trace, "backward")[0].backward.loss_scale == 1024.0
    assert of_kind(trace, "unscale")[0].value == 1024.0
    if not overflow:
        delivered, read = of_kind(trace, "backward")[0].backward.delivered, of_kind(trace, ends)[0].before
        for index in read:
            assert read[index] * 1024.0 == pytest.approx(delivered[index], rel=1e-4, abs=1e-3)


def test_schedules_are_seen_once_and_not_when_they_are_made():
    def loop():
        model = small()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        first = lr_scheduler.LinearLR(optimizer)
        schedule = lr_scheduler.SequentialLR(
            optimizer, [first, lr_scheduler.CosineAnnealingLR(optimizer, 5)], milestones=[2]
        )
        accumulate(model, 1)
        optimizer.step()
        schedule.step()

    trace = watched(loop)
    assert kinds(trace) == ["backward", "step", "schedule"]
    assert of_kind(trace, "schedule")[0].detail == "SequentialLR"


def averaged(inside: bool, holder: Callable[[nn.Module], Any]) -> Callable[[], None]:
    def loop():
        model = small()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        average = holder(model)
        tensors = list(average.values()) if isinstance(average, dict) else list(average)

        def follow():
            with torch.no_grad():
                for slow, parameter in zip(tensors, model.parameters(), strict=True):
                    slow.data.mul_(0.9).add_(parameter.data, alpha=0.1)

        for _ in range(3):
            for micro_batch in range(2):
                accumulate(model, 1, seed=micro_batch)
                if inside:
                    follow()
            optimizer.step()
            optimizer.zero_grad()
            if not inside:
                follow()

    return loop


@pytest.mark.parametrize(
    "holder",
    [
        lambda model: [parameter.detach().clone() for parameter in model.parameters()],
        lambda model: {name: parameter.detach().clone() for name, parameter in model.named_parameters()},
    ],
    ids=["list", "dict"],
)
def test_an_average_made_by_hand_is_seen_where_it_moves_inside_a_window(holder):
    assert "average" in kinds(watched(averaged(inside=True, holder=holder)))
    assert "average" not in kinds(watched(averaged(inside=False, holder=holder)))


def test_sums_of_gradients_kept_by_hand_are_no_average_of_the_weights():
    def loop():
        model = small()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sums = [torch.zeros_like(parameter) for parameter in model.parameters()]
        for _ in range(3):
            for _ in range(2):
                accumulate(model, 1)
                for total, parameter in zip(sums, model.parameters(), strict=True):
                    total += parameter.grad
            optimizer.step()
            optimizer.zero_grad()

    assert "average" not in kinds(watched(loop))


# -- data, randomness and numbers ------------------------------------------------------------------------


def test_equal_samples_have_equal_numbers_and_others_not():
    def loop():
        model = small()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x, y = batch(5)
        for rows in (x, x[[2, 0, 4]], batch(5, seed=9)[0]):
            F.cross_entropy(model(rows), y[: len(rows)]).backward()
        optimizer.step()

    first, again, others = (event.forward for event in of_kind(watched(loop), "forward"))
    assert [first.samples[i] for i in (2, 0, 4)] == list(again.samples)
    assert not set(first.samples) & set(others.samples)
    assert first.shape == (5, 4)
    assert first.num_distinct_values == 20


def test_random_state_dropout_and_batch_norm_are_noted():
    def loop():
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            torch.manual_seed(5)
            accumulate(model, 1)
        accumulate(model, 1)
        optimizer.step()

    first, again, third = (event.forward for event in of_kind(watched(loop), "forward"))
    assert (first.num_dropout, first.num_batch_norm) == (1, 1)
    assert first.random_state == again.random_state != third.random_state


def test_a_module_that_raises_leaves_the_next_call_an_outermost_one():
    def loop():
        model = small()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(RuntimeError):
            model(torch.zeros(2, 5))
        accumulate(model, 1)
        optimizer.step()

    assert len(of_kind(watched(loop), "forward")) == 1


def test_a_forward_without_gradients_is_none():
    def loop():
        model = small()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with torch.no_grad():
            model(batch(2)[0])
        accumulate(model, 1)
        optimizer.step()

    assert len(of_kind(watched(loop), "forward")) == 1


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_passes_over_a_loader_are_seen_and_its_workers_left_alone(workers):
    def loop():
        model = small()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x, y in DataLoader(TensorDataset(*batch(4)), batch_size=2, num_workers=workers):
            F.cross_entropy(model(x), y).backward()
        optimizer.step()

    trace = watched(loop)
    assert kinds(trace) == ["pass", "backward", "backward", "pass", "step"]
    assert [event.value for event in of_kind(trace, "pass")] == [1.0, 0.0]
    assert of_kind(trace, "pass")[0].detail == "DataLoader 1"


def test_losses_that_are_printed_are_read_along(capsys):
    def loop():
        model = small()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        accumulate(model, 1)
        print("update", 1, "loss", 0.5, {"train_loss": 1.25, "val_loss": 9.0})
        print("val loss: 3.0")
        optimizer.step()

    trace = watched(loop)
    assert [event.value for event in of_kind(trace, "logged")] == [0.5, 1.25]
    assert "train_loss" in capsys.readouterr().out


def test_graphs_and_outputs_that_are_kept_are_alive_at_the_step():
    def keeping(keep: Callable[[list[Any], Any, Any], None]) -> list[tuple[bool, bool]]:
        def loop():
            model, kept = small(), []
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for index in range(3):
                x, y = batch(2, index)
                output = model(x)
                loss = F.cross_entropy(output, y)
                loss.backward()
                keep(kept, loss, output)
            optimizer.step()

        seen = [event.backward for event in of_kind(watched(loop), "backward")]
        return [(backward.graph_alive, backward.outputs_alive) for backward in seen[:-1]]

    assert keeping(lambda kept, loss, _: kept.append(loss.item())) == [(False, False)] * 2
    assert keeping(lambda kept, loss, _: kept.append(loss)) == [(True, False)] * 2
    assert keeping(lambda kept, _, output: kept.append(output.detach())) == [(False, False)] * 2
    # what is below an output is the end of the graph too
    assert keeping(lambda kept, _, output: kept.append(output)) == [(True, True)] * 2


def test_the_error_of_sums_in_bfloat16_is_measured():
    def loop():
        model = small().bfloat16()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for index in range(64):
            x, y = batch(4, index)
            (F.cross_entropy(model(x.bfloat16()), y) / 64).backward()
        optimizer.step()

    errors = [event.backward.low_precision_error for event in of_kind(watched(loop), "backward")]
    assert errors[0] == 0.0
    assert 1e-3 < errors[-1] < 1e-1


def test_updates_to_be_skipped_are_not_looked_at():
    trace = watched(lambda: plain_loop(3), skip_updates=2)
    assert len(of_kind(trace, "step")) == 1
    assert trace.num_skipped_updates == 2


def test_a_wrapped_model_is_not_held(tmp_path):
    dist = torch.distributed
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        watching = Watching()
        outer = nn.Sequential(nn.parallel.DistributedDataParallel(nn.Linear(4, 3)))
        held = [weakref.ref(outer), weakref.ref(outer[0])]
        optimizer = torch.optim.SGD(outer.parameters(), lr=0.1)
        accumulate(outer, 1)
        optimizer.step()
        del outer, optimizer
        gc.collect()
        assert [one() for one in held] == [None, None]
        assert watching.end().unseen == ()
    finally:
        dist.destroy_process_group()
