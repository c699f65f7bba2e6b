"""Autocast around the forward and the loss scale of float16, in a window."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wholebatch.errors import UsageError
from wholebatch.losses import token_loss
from wholebatch.train.precision import autocast, check_precision, make_scaler
from wholebatch.train.schedule import make_schedule
from wholebatch.train.settings import PrecisionConfig, RunConfig, ScheduleConfig, TrainConfig
from wholebatch.window import UpdateWindow

CPU = torch.device("cpu")


def build(settings: PrecisionConfig) -> tuple[nn.Module, list[tuple[Tensor, Tensor]], Any, list[Tensor]]:
    """A small classifier, ragged micro-batches, its loss under autocast, and the logits that it made."""
    torch.manual_seed(0)
    dtype = getattr(torch, settings.parameters)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)
    inputs, labels = torch.randn(7, 4, dtype=dtype), torch.randint(0, 3, (7,))
    made: list[Tensor] = []

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Any:
        with autocast(settings, CPU):
            logits = model(batch[0])
        made.append(logits)
        return token_loss(labels=1)(logits, batch)

    return model, list(zip(inputs.split([4, 1, 2]), labels.split([4, 1, 2]), strict=True)), loss, made


def by_hand(model: nn.Module, micro_batches: Any, dtype: torch.dtype, scale: float) -> None:
    for inputs, labels in micro_batches:
        with torch.autocast("cpu", dtype=dtype):
            logits = model(inputs)
        (F.cross_entropy(logits.float(), labels, reduction="sum") * scale / 7).backward()
    for parameter in model.parameters():
        parameter.grad /= scale
    torch.optim.SGD(model.parameters(), lr=0.5).step()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_window_under_autocast_is_the_loop_by_hand(dtype: Any) -> None:
    settings = PrecisionConfig(autocast=dtype, initial_loss_scale=1024.0)
    model, micro_batches, loss, made = build(settings)
    twin = build(settings)[0]
    scaler = make_scaler(settings, CPU)
    assert (scaler is None) == (dtype == "bfloat16")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    window = UpdateWindow(model, optimizer, token_loss(labels=1), scaler=scaler)
    record = window.run(micro_batches, loss)
    assert record.outcome == "applied"
    assert record.loss_scale == (1024.0 if dtype == "float16" else None)
    assert [logits.dtype for logits in made] == [getattr(torch, dtype)] * 3
    by_hand(twin, micro_batches, getattr(torch, dtype), record.loss_scale or 1.0)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_the_loss_is_summed_in_float32() -> None:
    settings = PrecisionConfig(autocast="bfloat16")
    model, micro_batches, loss, made = build(settings)
    loss_sum = loss(model, micro_batches[0]).loss_sum
    assert made[0].dtype == torch.bfloat16
    assert loss_sum.dtype == torch.float32
    expected = F.cross_entropy(made[0].double(), micro_batches[0][1], reduction="sum")
    assert loss_sum.double().item() == pytest.approx(expected.item(), rel=1e-6)
    assert made[0].bfloat16().sum() != expected  # the sum in bfloat16 would be told from it


def test_an_overflow_is_skipped_and_the_scale_halves() -> None:
    settings = PrecisionConfig(autocast="float16", initial_loss_scale=2.0**24)
    model, micro_batches, loss, _ = build(settings)
    config = TrainConfig(run=RunConfig(num_updates=40), schedule=ScheduleConfig(warmup_updates=4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    schedule = make_schedule(optimizer, config, samples_of_run=280)
    scaler = make_scaler(settings, CPU)
    window = UpdateWindow(model, optimizer, token_loss(labels=1), scaler=scaler, scheduler=schedule)
    before = [p.detach().clone() for p in model.parameters()]
    first = window.run(micro_batches, loss)
    assert (first.outcome, first.loss_scale) == ("skipped_nonfinite", 2.0**24)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    records = [first]
    while records[-1].outcome != "applied":
        records.append(window.run(micro_batches, loss))
    assert [record.loss_scale for record in records] == [2.0 ** (24 - k) for k in range(len(records))]
    assert {record.learning_rates[0] for record in records} == {
        0.5 / 5
    }  # a skipped update repeats its rate
    assert window.run(micro_batches, loss).learning_rates == [0.5 * 2 / 5]


def test_off_changes_nothing() -> None:
    settings = PrecisionConfig(parameters="float64")
    model, micro_batches, loss, made = build(settings)
    assert make_scaler(settings, CPU) is None
    loss(model, micro_batches[0])
    assert made[0].dtype == torch.float64
    assert not torch.is_autocast_enabled("cpu")


def test_settings_that_contradict_each_other_are_refused() -> None:
    message = r'precision.parameters = "float64" and precision.autocast = "bfloat16": autocast leaves'
    with pytest.raises(UsageError, match=message):
        check_precision(PrecisionConfig(parameters="float64", autocast="bfloat16"))


@pytest.mark.parametrize("autocast_dtype", ["off", "bfloat16"])
def test_a_loss_scale_where_no_loss_is_scaled_is_refused(autocast_dtype: Any) -> None:
    message = (
        rf'initial_loss_scale is 1024.0, and precision.autocast = "{autocast_dtype}" scales no loss; set'
    )
    with pytest.raises(UsageError, match=message):
        check_precision(PrecisionConfig(autocast=autocast_dtype, initial_loss_scale=1024.0))
    check_precision(PrecisionConfig(autocast="float16", initial_loss_scale=1024.0))
    check_precision(PrecisionConfig(autocast=autocast_dtype))


def test_autocast_does_leave_float64_alone() -> None:
    """What the refusal says; where torch changes it, the refusal goes."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (
            nn.Linear(2, 2, dtype=torch.float64)(torch.ones(1, 2, dtype=torch.float64)).dtype
            == torch.float64
        )


def test_a_device_without_autocast_is_refused() -> None:
    with pytest.raises(UsageError, match=r'autocast = "bfloat16": torch has no autocast for meta'):
        autocast(PrecisionConfig(autocast="bfloat16"), torch.device("meta"))
