"""The learning rate over a run: the curve, its three units, and what does not fit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from wholebatch.errors import UsageError
from wholebatch.losses import token_loss
from wholebatch.record import Counters
from wholebatch.train.schedule import check_schedule, make_schedule, rate_curve, schedule_unit
from wholebatch.train.settings import BatchConfig, RunConfig, ScheduleConfig, TrainConfig
from wholebatch.window import UpdateWindow

GLOBAL_BATCH_SAMPLES = 8


def config(num_updates: int = 12, **schedule: Any) -> TrainConfig:
    return TrainConfig(
        run=RunConfig(num_updates=num_updates),
        batch=BatchConfig(global_batch_samples=GLOBAL_BATCH_SAMPLES, micro_batch_samples=2),
        schedule=ScheduleConfig(**schedule),
    )


def shares(chosen: TrainConfig, *, per_update: int = 1, updates: int | None = None) -> list[float]:
    n = updates or chosen.run.num_updates
    curve = rate_curve(
        chosen, samples_of_run=chosen.run.num_updates * GLOBAL_BATCH_SAMPLES, items_per_update=per_update
    )
    return [curve.share(update * per_update) for update in range(n)]


# The curve


def test_a_line_up_and_a_cosine_down_to_the_last_update() -> None:
    found = shares(config(9, warmup_updates=3, final_share=0.1))
    assert found[:4] == [0.25, 0.5, 0.75, 1.0]
    assert found[3:] == pytest.approx(
        [0.1 + 0.9 * (1 + math.cos(math.pi * t / 5)) / 2 for t in range(6)], abs=1e-15
    )
    assert found[-1] == pytest.approx(0.1, abs=1e-15)


def test_a_line_down() -> None:
    assert shares(config(5, decay="linear", final_share=0.0)) == [1.0, 0.75, 0.5, 0.25, 0.0]


def test_constant_after_the_warm_up() -> None:
    assert shares(config(5, warmup_updates=1, decay="constant")) == [0.5, 1.0, 1.0, 1.0, 1.0]


def test_the_end_may_come_before_that_of_the_run() -> None:
    found = shares(config(8, decay_end_updates=4, decay="linear", final_share=0.25))
    assert found == [1.0, 0.75, 0.5, 0.25, 0.25, 0.25, 0.25, 0.25]


def test_a_run_shorter_than_its_warm_up_never_reaches_the_highest_rate() -> None:
    assert shares(config(2, warmup_updates=20)) == [1 / 21, 2 / 21]


@pytest.mark.parametrize("decay", ["cosine", "linear"])
def test_no_room_between_warm_up_and_end(decay: Any) -> None:
    assert shares(config(1)) == [1.0]
    chosen = config(9, warmup_updates=2, decay_end_updates=3, decay=decay, final_share=0.5)
    assert shares(chosen)[:5] == pytest.approx([1 / 3, 2 / 3, 1.0, 0.5, 0.5])


@pytest.mark.parametrize("decay", ["cosine", "linear", "constant"])
@pytest.mark.parametrize("end", [0, 9])
def test_full_batches_have_the_same_rates_in_all_units(decay: Any, end: int) -> None:
    end = 0 if decay == "constant" else end
    by_update = shares(config(12, warmup_updates=3, decay=decay, decay_end_updates=end))
    b = GLOBAL_BATCH_SAMPLES
    by_sample = config(12, warmup_samples=3 * b, decay=decay, decay_end_samples=end * b)
    assert shares(by_sample, per_update=b) == pytest.approx(by_update, abs=1e-14)
    end = 0 if decay == "constant" else end or 12
    by_item = config(12, warmup_items=300, decay=decay, decay_end_items=end * 100)
    assert shares(by_item, per_update=100) == pytest.approx(by_update, abs=1e-14)


def test_the_first_update_of_a_warm_up_in_samples_moves() -> None:
    first = shares(config(12, warmup_samples=24), per_update=GLOBAL_BATCH_SAMPLES)[0]
    assert first == 8 / (24 + 8)


def test_a_short_tail_ends_on_the_final_share_too() -> None:
    curve = rate_curve(config(3, final_share=0.2), samples_of_run=19)  # 8 + 8 + 3, in updates
    assert curve.share(2) == pytest.approx(0.2)
    chosen = config(3, warmup_samples=8, final_share=0.2)
    curve = rate_curve(chosen, samples_of_run=19)
    assert curve.share(16) == pytest.approx(0.2)


def test_a_run_smaller_than_the_global_batch_starts_below_the_top() -> None:
    curve = rate_curve(config(1, warmup_samples=5), samples_of_run=5)
    assert curve.share(0) == 0.5


# In a window


class Examples:
    """Ragged samples for a small classifier of positions, in float64; label -100 is no item."""

    def __init__(self, samples: int = 40) -> None:
        generator = torch.Generator().manual_seed(3)
        self.inputs = torch.randn(samples, 4, 3, dtype=torch.float64, generator=generator)
        self.labels = torch.randint(0, 3, (samples, 4), generator=generator)
        for row in range(samples):
            self.labels[row, 1 + row % 4 :] = -100

    def micro_batches(self, update: int, m: int, samples: int) -> list[tuple[Tensor, Tensor]]:
        rows = range(update * GLOBAL_BATCH_SAMPLES, update * GLOBAL_BATCH_SAMPLES + samples)
        inputs, labels = self.inputs[rows.start : rows.stop], self.labels[rows.start : rows.stop]
        return list(zip(inputs.split(m), labels.split(m), strict=True))

    def items(self, start: int, stop: int) -> int:
        return int((self.labels[start:stop] != -100).sum())


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Any:
    return token_loss(labels=1)(model(batch[0]), batch)


def rates_of_a_run(chosen: TrainConfig, m: int, *, tail: int = GLOBAL_BATCH_SAMPLES) -> list[float]:
    """Five updates, of which the third has ``tail`` samples, in micro-batches of m samples."""
    model = nn.Linear(3, 3, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = make_schedule(optimizer, chosen, samples_of_run=40, items_per_update=20)
    window = UpdateWindow(model, optimizer, token_loss(labels=1), scheduler=schedule)
    found = []
    for update in range(5):
        samples = tail if update == 2 else GLOBAL_BATCH_SAMPLES
        record = window.run(Examples().micro_batches(update, m, samples), loss)
        found.append(record.learning_rates[0])
    return [rate for rate in found if rate is not None]


@pytest.mark.parametrize("m", [1, 2, 8])
@pytest.mark.parametrize("unit", ["updates", "samples", "items"])
def test_the_window_uses_the_rate_of_what_was_consumed_before(unit: str, m: int) -> None:
    chosen = {
        "updates": config(5, warmup_updates=2),
        "samples": config(5, warmup_samples=10),
        "items": config(5, warmup_items=41, decay_end_items=90),
    }[unit]
    examples = Examples()
    consumed = {
        "updates": [0, 1, 2, 3, 4],
        "samples": [0, 8, 16, 19, 27],
        "items": [0, *(examples.items(0, stop) for stop in (8, 16, 19))],
    }[unit]
    if unit == "items":
        consumed.append(consumed[-1] + examples.items(24, 32))
    curve = rate_curve(chosen, samples_of_run=40, items_per_update=20)
    assert rates_of_a_run(chosen, m, tail=3) == [curve.share(x) for x in consumed]


@pytest.mark.parametrize("unit", ["updates", "samples"])
def test_a_skipped_update_repeats_its_rate_in_updates_and_not_in_samples(unit: str) -> None:
    chosen = config(5, **{f"warmup_{unit}": 4 if unit == "updates" else 32})
    model = nn.Linear(3, 3, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = make_schedule(optimizer, chosen, samples_of_run=40)
    window = UpdateWindow(model, optimizer, token_loss(labels=1), scheduler=schedule)
    broken = Examples().micro_batches(0, 2, 8)
    broken[1][0][0] = math.nan
    assert window.run(broken, loss).outcome == "skipped_nonfinite"
    record = window.run(Examples().micro_batches(1, 2, 8), loss)
    assert record.learning_rates == [1 / 5 if unit == "updates" else 2 / 5]


def test_a_schedule_goes_on_from_its_state() -> None:
    chosen = config(5, warmup_samples=16)

    def build() -> Any:
        optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.5)
        return make_schedule(optimizer, chosen, samples_of_run=40)

    first, second = build(), build()
    first.advance(Counters(samples=24), applied=True)
    state = first.scheduler.state_dict()
    assert state["lr_lambdas"] == [None]  # a plain function: nothing of ours in a checkpoint
    second.scheduler.load_state_dict(state)
    assert second.scheduler.last_epoch == 24
    assert second.scheduler.get_last_lr() == first.scheduler.get_last_lr() != [0.5]
    second.advance(Counters(samples=32), applied=True)
    assert second.scheduler.get_last_lr() == [0.5 * 0.1]


# Refusals


def test_the_unit_is_the_one_that_is_given() -> None:
    assert schedule_unit(ScheduleConfig()) == "updates"
    assert schedule_unit(ScheduleConfig(decay_end_updates=5)) == "updates"
    assert schedule_unit(ScheduleConfig(decay_end_samples=5)) == "samples"
    assert schedule_unit(ScheduleConfig(warmup_items=5, decay="constant")) == "items"


REFUSED = [
    (
        {"warmup_updates": 20, "warmup_samples": 64},
        r"schedule.warmup_updates = 20 and schedule.warmup_samples = 64: .* all in samples",
    ),
    (
        {"warmup_samples": 64, "decay_end_items": 1000},
        r"schedule.warmup_samples = 64 and schedule.decay_end_items = 1000: .* need one unit",
    ),
    (
        {"warmup_items": 500},
        r'warmup_items = 500 and schedule.decay = "cosine": nobody knows ahead .*; give schedule.decay_end',
    ),
    (
        {"warmup_updates": 9, "decay_end_updates": 9},
        r"decay_end_updates = 9 is not after schedule.warmup_updates = 9; .* later end or a shorter",
    ),
    (
        {"warmup_items": 9, "decay_end_items": 8},
        r"decay_end_items = 8 is not after schedule.warmup_items = 9",
    ),
    (
        {"decay_end_samples": 9, "decay": "constant"},
        r'decay_end_samples = 9 and schedule.decay = "constant": nothing decays, so nothing ends',
    ),
]


@pytest.mark.parametrize(("given", "message"), REFUSED)
def test_lengths_that_do_not_fit_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        schedule_unit(ScheduleConfig(**given))
    with pytest.raises(UsageError, match=message):
        rate_curve(config(**given), samples_of_run=96)


@pytest.mark.parametrize("decay", ["cosine", "linear"])
def test_a_warm_up_as_long_as_the_run_is_refused(decay: Any) -> None:
    with pytest.raises(
        UsageError,
        match=r"schedule.warmup_updates = 12, and the run ends after 12 updates \(run.num_updates = 12\), "
        rf'so schedule.decay = "{decay}" would never begin; give a shorter warm-up',
    ):
        check_schedule(config(12, warmup_updates=12, decay=decay))
    check_schedule(config(12, warmup_updates=11, decay=decay))
    check_schedule(config(12, warmup_updates=12, decay="constant"))
    with pytest.raises(UsageError, match=r"warmup_samples = 96, and the run ends after 96 samples"):
        check_schedule(config(12, warmup_samples=96, decay=decay))
    check_schedule(config(12, warmup_samples=95, decay=decay))
    check_schedule(config(12, warmup_items=10**9, decay_end_items=10**10, decay=decay))
    check_schedule(config(1, decay=decay))
