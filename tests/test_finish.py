"""The finish: unscale, clip, step, loss scale, schedule, each once and in this order."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau, StepLR

from problems import Case, loss_with, observed, oracle
from wholebatch import finish as finish_module
from wholebatch.engine_finish import EngineFinish
from wholebatch.errors import UnsupportedError, UpdateError, WindowUsageError
from wholebatch.finish import per_attempted_update, per_item, per_sample, per_update
from wholebatch.losses import next_token_loss
from wholebatch.window import UpdateWindow

CASE = Case(counts=[[[5, 2], [3], [0, 4, 1]]])
HALF = torch.float16


class Classifier:
    """A small float32 classifier with a scaler, beside the loop written by hand."""

    def __init__(self, make_optimizer: Any, *, scale: float = 1024.0, growth_interval: int = 2) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.optimizer = make_optimizer(self.model.parameters())
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=growth_interval)
        self.inputs = torch.randn(10, 6)
        self.labels = torch.randint(0, 3, (10,))
        self.sizes = [4, 1, 5]

    def micro_batches(self) -> list[tuple[Tensor, Tensor]]:
        return list(zip(self.inputs.split(self.sizes), self.labels.split(self.sizes), strict=True))

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        inputs, labels = batch
        with torch.autocast("cpu", dtype=HALF):
            logits = model(inputs)
        return F.cross_entropy(logits.float(), labels, reduction="sum"), len(labels)

    def by_hand(self, clip: float | None) -> None:
        for batch in self.micro_batches():
            loss_sum, _ = self.loss(self.model, batch)
            self.scaler.scale(loss_sum / 10).backward()
        self.scaler.unscale_(self.optimizer)
        if clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


MAKERS = {
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adam_fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "sgd_fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adagrad_fused": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
}


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("name", sorted(MAKERS))
def test_a_scaler_is_driven_as_by_hand(name: str, clip: float | None) -> None:
    ours, hand = Classifier(MAKERS[name]), Classifier(MAKERS[name])
    window = UpdateWindow(
        ours.model,
        ours.optimizer,
        sums_known(ours),
        clip_grad_norm=clip,
        scaler=ours.scaler,
    )
    for _ in range(5):
        record = window.run(ours.micro_batches(), ours.loss)
        assert record.outcome == "applied"
        hand.by_hand(clip)
    assert ours.scaler.state_dict() == hand.scaler.state_dict()
    for a, b in zip(ours.model.parameters(), hand.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert not hasattr(ours.optimizer, "grad_scale")
    assert not hasattr(ours.optimizer, "found_inf")


def sums_known(of: Classifier) -> Any:
    """Count ahead, so that ours and the loop by hand scale every loss alike."""
    from wholebatch.objective import counted_loss

    return counted_loss(of.loss, count=lambda batch: len(batch[1]))


def test_an_overflow_backs_the_scale_off_and_leaves_everything_else() -> None:
    ours = Classifier(MAKERS["adamw_fused"], scale=2.0**40)
    schedule = LambdaLR(ours.optimizer, lambda n: 1 / (1 + n))
    window = UpdateWindow(
        ours.model, ours.optimizer, scaler=ours.scaler, scheduler=per_update(schedule), clip_grad_norm=1.0
    )
    before = copy.deepcopy((ours.model.state_dict(), ours.optimizer.state_dict()))
    outcomes, scales = [], []
    for _ in range(40):
        record = window.run(ours.micro_batches(), ours.loss)
        outcomes.append(record.outcome)
        scales.append(record.loss_scale)
        if record.outcome == "applied":
            break
        for key, value in before[0].items():
            assert torch.equal(ours.model.state_dict()[key], value)
        assert ours.optimizer.state_dict()["state"] == {}
        assert schedule.last_epoch == 0
    assert outcomes[0] == "skipped_nonfinite"
    assert outcomes[-1] == "applied"
    assert scales[:2] == [2.0**40, 2.0**39]
    assert schedule.last_epoch == 1
    assert record.updates_attempted == len(outcomes)
    assert record.updates_applied == 1


def test_a_scaler_survives_a_raised_overflow_and_an_empty_update() -> None:
    ours = Classifier(MAKERS["adamw"], scale=2.0**40)
    window = UpdateWindow(ours.model, ours.optimizer, scaler=ours.scaler, on_nonfinite="raise")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="rolled back, the loss scale too"):
            window.run(ours.micro_batches(), ours.loss)
    assert ours.scaler.get_scale() == 2.0**40
    ours = Classifier(MAKERS["adamw"])
    window = UpdateWindow(ours.model, ours.optimizer, scaler=ours.scaler)

    def nothing(model: nn.Module, batch: Any) -> Any:
        loss, _ = ours.loss(model, batch)
        return loss * 0, 0

    assert window.run(ours.micro_batches(), nothing).outcome == "skipped_empty"
    assert window.run(ours.micro_batches(), ours.loss).outcome == "applied"


def test_a_scaler_over_half_parameters_and_a_disabled_one() -> None:
    model = nn.Linear(2, 1).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UnsupportedError, match="can't unscale the gradients of float16 parameters"):
        UpdateWindow(model, optimizer, scaler=torch.amp.GradScaler("cpu"))
    ours = Classifier(MAKERS["sgd"])
    off = torch.amp.GradScaler("cpu", enabled=False)
    record = UpdateWindow(ours.model, ours.optimizer, scaler=off).run(ours.micro_batches(), ours.loss)
    assert record.loss_scale is None


def test_autocast_in_bfloat16_needs_no_scaler() -> None:
    ours = Classifier(MAKERS["adamw_fused"])

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(batch[0])
        return F.cross_entropy(logits.float(), batch[1], reduction="sum"), len(batch[1])

    whole = copy.deepcopy(ours.model)
    loss_sum, items = loss(whole, (ours.inputs, ours.labels))
    (loss_sum / items).backward()
    expected = nn.utils.get_total_norm([p.grad for p in whole.parameters()]).item()
    record = UpdateWindow(ours.model, ours.optimizer).run(ours.micro_batches(), loss)
    assert record.gradient_norm == pytest.approx(expected, rel=1e-2)


@pytest.mark.parametrize("name", ["adamw_fused", "adam_fused", "sgd_fused", "adagrad_fused"])
def test_clipping_is_folded_into_a_fused_kernel(name: str) -> None:
    """One pass for the norm and one in the kernel: nobody multiplies the gradient in between."""
    ours = Classifier(MAKERS[name])
    hand = Classifier(MAKERS[name])
    window = UpdateWindow(ours.model, ours.optimizer, clip_grad_norm=0.05)
    with mock.patch.object(finish_module, "scale_gradients") as multiplied:
        record = window.run(ours.micro_batches(), ours.loss)
    multiplied.assert_not_called()
    for batch in hand.micro_batches():
        (hand.loss(hand.model, batch)[0] / 10).backward()
    nn.utils.clip_grad_norm_(hand.model.parameters(), 0.05)
    hand.optimizer.step()
    for a, b in zip(ours.model.parameters(), hand.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert record.gradient_norm_after_clip == pytest.approx(0.05, rel=1e-4)
    assert not hasattr(ours.optimizer, "grad_scale")
    assert not hasattr(ours.optimizer, "found_inf")


def test_float64_is_not_folded_because_grad_scale_is_a_float32() -> None:
    case = Case(counts=CASE.counts, clip_grad_norm=0.05, optimizer="adamw_fused")
    found, truth = observed(case), oracle(case)
    for name, gradient in truth.gradients.items():
        assert (found.gradients[name] - gradient).abs().max() < 1e-15


def test_schedules_advance_in_their_declared_unit() -> None:
    units: dict[str, Any] = {
        "update": per_update,
        "attempt": per_attempted_update,
        "sample": per_sample,
        "item": per_item,
    }
    found = {}
    for name, declare in units.items():
        model = CASE.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        schedule = LambdaLR(optimizer, lambda n: 1.0 / (1 + n))
        objective = next_token_loss()
        window = UpdateWindow(model, optimizer, objective, scheduler=declare(schedule))
        loss = loss_with(objective)
        rates = [window.run(CASE.batches()[0], loss).learning_rates[0]]

        def broken(m: nn.Module, b: Any, loss: Any = loss) -> Any:
            loss_sum, items = loss(m, b)
            return loss_sum * float("nan"), items

        window.run(CASE.batches()[0], broken)
        rates.append(window.run(CASE.batches()[0], loss).learning_rates[0])
        found[name] = [round(1 / rate) - 1 for rate in rates]
    assert found == {"update": [0, 1], "attempt": [0, 2], "sample": [0, 12], "item": [0, 20]}


def test_schedules_without_a_unit_or_of_the_wrong_kind_are_refused() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(WindowUsageError, match=r"a StepLR without a unit; .*per_update\(scheduler\)"):
        UpdateWindow(model, optimizer, scheduler=StepLR(optimizer, 1))
    with pytest.raises(UnsupportedError, match="ReduceLROnPlateau advances by an evaluated metric"):
        per_update(ReduceLROnPlateau(optimizer))
    with pytest.raises(
        UnsupportedError, match=r"a schedule by the sample jumps .* a StepLR can't do exactly"
    ):
        per_sample(StepLR(optimizer, 1))
    with pytest.raises(WindowUsageError, match="a SGD is no torch learning-rate scheduler"):
        per_update(optimizer)
    with pytest.raises(WindowUsageError, match="clip_grad_norm=-1 is not a positive number"):
        UpdateWindow(model, optimizer, clip_grad_norm=-1)


def test_an_optimizer_that_needs_a_closure_is_refused() -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(UnsupportedError, match=r"LBFGS\.step needs a closure"):
        UpdateWindow(model, torch.optim.LBFGS(model.parameters()))


def test_a_fused_kernel_that_moves_nothing_is_refused_where_it_does() -> None:
    """Measured on this torch: the refusal and the fault go together, whichever version runs."""
    for dtype in (torch.bfloat16, torch.float16):
        weight = nn.Parameter(torch.ones(32, dtype=dtype))
        weight.grad = torch.ones_like(weight)
        torch.optim.SGD([weight], lr=0.5, fused=True).step()
        works = bool((weight != 1).all())
        model = nn.Linear(4, 8).to(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        if works:
            UpdateWindow(model, optimizer)
        else:
            with pytest.raises(UnsupportedError, match=r"SGD\(fused=True\) .* does not move"):
                UpdateWindow(model, optimizer)
        UpdateWindow(model, torch.optim.SGD(model.parameters(), lr=0.1))


class Engine:
    """An engine that steps by itself, and that finds an overflow where it is told to."""

    def __init__(self, model: nn.Module, *, overflows: bool, scale: float | None) -> None:
        self.model, self.overflows, self.scale = model, overflows, scale
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.done: list[str] = []

    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def check_optimizers(self, optimizers: Any) -> Any:
        return optimizers[0]

    def check_clip(self, clip_grad_norm: float | None) -> None: ...

    def check_schedules(self, schedules: Any) -> None: ...

    def loss_scale(self) -> float | None:
        return self.scale

    def step(self) -> bool:
        self.done.append("step")
        return not self.overflows

    def drop(self) -> None:
        self.done.append("drop")


def finish_of(engine: Engine, *, scaler: Any = None) -> EngineFinish:
    return EngineFinish(
        engine,  # type: ignore[arg-type]
        optimizers=[engine.optimizer],
        clip_grad_norm=None,
        scaler=scaler,
        schedules=(),
    )


def test_what_an_engine_does_and_the_window_does_not_expect_is_told() -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(WindowUsageError, match="a GradScaler beside an engine that scales its losses"):
        finish_of(Engine(model, overflows=False, scale=None), scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(UpdateError, match="the engine skipped its step because it found an overflow"):
        finish_of(Engine(model, overflows=True, scale=8.0)).apply(1.0)
    with pytest.raises(UpdateError, match="the engine stepped although the gradient is not finite"):
        finish_of(Engine(model, overflows=False, scale=8.0)).skip(gradient_overflowed=True)


@pytest.mark.parametrize(
    ("scale", "gradient_overflowed", "done"),
    [(8.0, True, ["step"]), (8.0, False, ["drop"]), (None, True, ["drop"])],
)
def test_only_an_overflow_of_its_own_scale_is_left_to_an_engine(
    scale: float | None, gradient_overflowed: bool, done: list[str]
) -> None:
    engine = Engine(nn.Linear(2, 1), overflows=True, scale=scale)
    finish_of(engine).skip(gradient_overflowed=gradient_overflowed)
    assert engine.done == done
