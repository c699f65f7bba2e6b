"""A run that was saved and taken up again goes on as if it had not ended; what does not fit is refused."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import wholebatch as wb
from wholebatch.errors import (
    CheckpointError,
    PoisonedWindowError,
    StaleGradientsError,
    UnsupportedError,
    UsageError,
    WindowUsageError,
)
from wholebatch.finish import per_attempted_update, per_sample
from wholebatch.replay import RandomState
from wholebatch.resume import Checkpoints, Found
from wholebatch.resume.randomness import packed, restore

GLOBAL_BATCH_SAMPLES = 12
FEATURES = 5


def tiny_model(hidden: int = 8) -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, hidden), nn.BatchNorm1d(hidden), nn.Dropout(0.4), nn.Linear(hidden, 1)
    )


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, int]:
    rows, targets = batch
    noise = random.random() + float(np.random.rand())  # python's and numpy's states have a say too
    return ((model(rows).squeeze(1) - targets - 0.01 * noise) ** 2).sum(), len(rows)


@dataclass(kw_only=True)
class Run:
    """A run as a user would build it, on one rank of several."""

    window: wb.UpdateWindow
    ema: AveragedModel
    rank: int

    @property
    def model(self) -> nn.Module:
        return self.window.model

    def go(self, num_updates: int) -> list[dict[str, Any]]:
        """Run updates from the window's position; returns their records without what a clock says."""
        return [self._update() for _ in range(num_updates)]

    def _update(self) -> dict[str, Any]:
        plan = self.window.plan
        assert plan is not None
        first = self.window.counters.samples + self.rank * plan.micro_batch_samples * (
            plan.micro_batches_per_window
        )
        ids = range(first, first + plan.micro_batch_samples * plan.micro_batches_per_window)
        rows = torch.stack([torch.sin(torch.arange(FEATURES) * (1.0 + i)) for i in ids])
        batches = list(
            zip(
                rows.split(plan.micro_batch_samples),
                rows.sum(1).split(plan.micro_batch_samples),
                strict=True,
            )
        )
        record = self.window.run(batches, loss, sample_ids=ids).to_dict()
        self.ema.update_parameters(getattr(self.model, "module", self.model))
        return {k: v for k, v in record.items() if k not in ("seconds", "peak_memory_bytes")}

    def state(self) -> dict[str, Any]:
        """All that must be the same, as tensors and plain data."""
        finish = self.window.finish
        found = {
            "model": self.model.state_dict(),
            "optimizers": [one.state_dict() for one in finish.optimizers],
            "schedules": [one.scheduler.state_dict() for one in finish.schedules],
            "scaler": finish.scaler.state_dict() if finish.scaler else None,
            "window": self.window.state_dict(),
            "ema": self.ema.state_dict(),
            "python": random.getstate(),
            "numpy": list(np.random.get_state()),
            "host": torch.get_rng_state(),
        }
        return copy.deepcopy(found)


def build(
    *,
    rank: int = 0,
    ranks: int = 1,
    micro_batch_samples: int = 2,
    global_batch_samples: int = GLOBAL_BATCH_SAMPLES,
    hidden: int = 8,
    make_optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    scaler: torch.amp.GradScaler | None = None,
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model,
    schedule: Any = None,
    seed: int = 3,
    **window_options: Any,
) -> Run:
    torch.manual_seed(seed)
    module = tiny_model(hidden)
    model = wrap(module)
    optimizer = make_optimizer(module.parameters(), lr=0.05)
    halving = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.9**n)
    for give in (random.seed, np.random.seed, torch.manual_seed):
        give(seed + 100 * rank)
    window = wb.UpdateWindow(
        model,
        optimizer,
        plan=wb.plan_batch(
            global_batch_samples=global_batch_samples, micro_batch_samples=micro_batch_samples, ranks=ranks
        ),
        scheduler=schedule(halving) if schedule else wb.per_update(halving),
        scaler=scaler,
        clip_grad_norm=1.0,
        **window_options,
    )
    ema = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    return Run(window=window, ema=ema, rank=rank)


def assert_same(one: Any, other: Any, where: str = "state") -> None:
    """Equal bit for bit, in everything."""
    assert type(one) is type(other), where
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype, where
        assert torch.equal(one, other), where
    elif isinstance(one, np.ndarray):
        assert (one == other).all(), where
    elif isinstance(one, Mapping):
        assert list(one) == list(other), where
        for key in one:
            assert_same(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for index, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_same(a, b, f"{where}.{index}")
    elif not callable(one):
        assert one == other, where


def resumed(folder: Path, **options: Any) -> tuple[Run, Found]:
    """A run built anew, with other weights and random states, and put back."""
    run = build(**{"seed": 77, **options})
    return run, Checkpoints(folder).load(run.window, more={"ema": run.ema})


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"make_optimizer": lambda p, lr: torch.optim.AdamW(p, lr=lr, fused=True)},
        {"make_optimizer": lambda p, lr: torch.optim.AdamW(p, lr=torch.tensor(lr), amsgrad=True)},
        {"make_optimizer": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9)},
        {"schedule": per_sample},
        {"scaler": "new"},
    ],
    ids=["adamw", "fused", "lr tensor", "sgd", "per sample", "scaler"],
)
def test_goes_on_bit_for_bit(tmp_path, options):
    def fresh(**more: Any) -> dict[str, Any]:
        made = {**options, **more}
        if "scaler" in made:
            made["scaler"] = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
        return made

    whole = build(**fresh())
    records = whole.go(6)
    end = whole.state()
    first = build(**fresh())
    assert_same(first.go(3), records[:3])
    before = first.state()
    path = Checkpoints(tmp_path).save(
        first.window, more={"ema": first.ema, "job": {"note": "a", "seen": [1]}}
    )
    assert path == tmp_path / "update-00000003"
    assert_same(first.state(), before)  # saving moved nothing
    second, found = resumed(tmp_path, **fresh())
    assert_same(second.state(), before)
    assert_same(second.go(3), records[3:])
    assert_same(second.state(), end)
    assert (found.updates_attempted, found.samples, found.same_layout) == (3, 36, True)
    assert found.random_state_restored
    assert found.more == {"job": {"note": "a", "seen": [1]}}


LEFT_OUT = {
    "model": lambda run: run.model[0].weight.data.mul_(1.0000001),
    "optimizers": lambda run: run.window.finish.optimizers[0].state[run.model[0].weight]["exp_avg"].neg_(),
    "schedules": lambda run: setattr(run.window.finish.schedules[0].scheduler, "last_epoch", 9),
    "window": lambda run: run.window.counters.advance(
        outcome="applied", micro_batches=1, samples=1, items=1
    ),
    "ema": lambda run: run.ema.n_averaged.add_(1),
    "python": lambda _: random.random(),
    "numpy": lambda _: np.random.rand(),
    "host": lambda _: torch.rand(1),
}


@pytest.mark.parametrize("what", LEFT_OUT)
def test_the_comparison_above_sees_what_is_not_put_back(tmp_path, what):
    first = build()
    first.go(3)
    before = first.state()
    Checkpoints(tmp_path).save(first.window, more={"ema": first.ema})
    second, _ = resumed(tmp_path)
    assert_same(second.state(), before)
    LEFT_OUT[what](second)
    with pytest.raises(AssertionError, match=f"state.{what}"):
        assert_same(second.state(), before)


def test_the_same_global_batches_under_another_split(tmp_path):
    first = build()
    first.go(2)
    Checkpoints(tmp_path).save(first.window, more={"ema": first.ema})
    digests = [record["sample_digest"] for record in first.go(2)]
    second, found = resumed(tmp_path, micro_batch_samples=4)
    assert not found.same_layout
    assert [record["sample_digest"] for record in second.go(2)] == digests


def test_the_model_inside_compile_and_a_window_without_a_plan(tmp_path):
    model = nn.Linear(2, 1)
    compiled = torch.compile(model, backend="eager")
    window = wb.UpdateWindow(compiled, torch.optim.SGD(model.parameters(), lr=0.1))
    Checkpoints(tmp_path).save(window)
    plain = nn.Linear(2, 1)
    found = Checkpoints(tmp_path).load(wb.UpdateWindow(plain, torch.optim.SGD(plain.parameters(), lr=0.1)))
    assert torch.equal(plain.weight, model.weight)
    assert found.same_layout
    assert found.facts.layout["global_batch_samples"] is None
    weights = torch.load(tmp_path / "update-00000000" / "model.pt", weights_only=True)
    assert weights._metadata == model.state_dict()._metadata
    nn.Linear(2, 1).load_state_dict(weights)  # the plain file of weights that the docs promise


class WideMoment(torch.optim.Optimizer):
    """Keeps a float32 average beside bfloat16 parameters, as torch's own load would not."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                average = self.state[p].setdefault("average", torch.zeros_like(p, dtype=torch.float32))
                average.lerp_(p.grad.float(), 0.1)
                p.sub_((group["lr"] * average).to(p.dtype))


def test_state_of_another_dtype_than_its_parameter_keeps_its_digits(tmp_path):
    def make() -> wb.UpdateWindow:
        model = nn.Linear(3, 1, dtype=torch.bfloat16)
        return wb.UpdateWindow(model, WideMoment(model.parameters(), lr=0.1))

    window = make()
    rows = torch.linspace(-1, 1, 6, dtype=torch.bfloat16).view(2, 3)
    window.run([rows], lambda model, batch: ((model(batch).float() ** 2).sum(), 2))
    Checkpoints(tmp_path).save(window)
    other = make()
    Checkpoints(tmp_path).load(other)
    (before,), (after,) = window.finish.optimizers, other.finish.optimizers
    assert_same(after.state_dict(), before.state_dict())
    assert after.state[other.model.weight]["average"].dtype == torch.float32


def test_a_fresh_random_state_follows_from_the_saved_one_the_rank_and_the_update():
    def drawn(states: list[Any], rank: int, updates_attempted: int) -> tuple[float, float, float]:
        assert not restore(states, rank=rank, updates_attempted=updates_attempted)
        return random.random(), float(np.random.rand()), float(torch.rand(1))

    torch.manual_seed(1)
    one = [packed(RandomState.capture())]
    torch.manual_seed(2)
    other = [packed(RandomState.capture())]
    cases = [(one, 1, 0), (one, 2, 0), (one, 1, 1), (other, 1, 0)]
    numbers = [drawn(*case) for case in cases]
    assert [drawn(*case) for case in cases] == numbers
    assert len({number for case in numbers for number in case}) == 12


# Which ones are kept ----------------------------------------------------------------------------------


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_last_and_the_best_are_kept(tmp_path):
    run, checkpoints = build(), Checkpoints(tmp_path, keep_last=2)
    for score in (3.0, 1.0, 2.0, None, 1.0):
        run.go(1)
        checkpoints.save(run.window, score=score)
    assert names(tmp_path) == ["update-00000002", "update-00000004", "update-00000005"]
    assert [(facts.updates_attempted, facts.score) for facts in checkpoints.list()] == [
        (2, 1.0),
        (4, None),
        (5, 1.0),
    ]
    Checkpoints(tmp_path, keep_last=1, keep_best=False).save(run.window)
    assert names(tmp_path) == ["update-00000005-2"]


def test_facts_are_read_without_tensors(tmp_path):
    run = build()
    run.go(2)
    Checkpoints(tmp_path).save(run.window, score=0.5)
    (facts,) = Checkpoints(tmp_path).list()
    for name in ("model.pt", "optimizers.pt", "rest.pt"):
        (facts.path / name).unlink()
    assert Checkpoints(tmp_path).list() == [facts]
    assert (facts.updates_attempted, facts.samples, facts.score) == (2, 24, 0.5)
    assert sum(file["bytes"] for file in facts.files.values()) > 1000
    assert facts.versions["torch"] == torch.__version__
    assert facts.layout == {
        "global_batch_samples": 12,
        "global_batch_items": None,
        "micro_batch_samples": 2,
        "micro_batches_per_window": 6,
        "tokens_per_micro_batch": None,
        "rows": None,
        "replicas": 1,
        "ranks": 1,
    }


def test_going_back_on_purpose_sets_the_later_ones_aside(tmp_path):
    run, checkpoints = build(), Checkpoints(tmp_path, keep_last=3)
    for _ in range(3):
        run.go(1)
        checkpoints.save(run.window, more={"ema": run.ema})
    again = build(seed=5)
    assert checkpoints.load(again.window, more={"ema": again.ema}, which=1).updates_attempted == 1
    again.go(1)
    checkpoints.save(again.window)
    assert [name[:21] for name in names(tmp_path)] == [
        "aside-update-00000003",
        "update-00000001",
        "update-00000002-2",
    ]
    aside = next(tmp_path.glob("aside-*"))
    found = checkpoints.load(run.window, more={"ema": run.ema}, which=aside)
    assert found.updates_attempted == 3  # it is not lost


def test_a_number_a_name_and_a_path_choose_one(tmp_path):
    run, checkpoints = build(), Checkpoints(tmp_path)
    checkpoints.save(run.window)
    run.go(1)
    checkpoints.save(run.window)
    assert checkpoints.load(run.window, which=0).updates_attempted == 0
    assert checkpoints.load(run.window).updates_attempted == 1
    assert checkpoints.load(run.window, which="update-00000000").updates_attempted == 0
    assert Checkpoints("elsewhere").load(run.window, which=tmp_path / "update-00000001").samples == 12
    with pytest.raises(UsageError, match=r"'7' is no checkpoint; in .* update-00000000, update-00000001"):
        checkpoints.load(run.window, which=7)
    for which in (1.0, True):
        with pytest.raises(UsageError, match=f"which={which} names no checkpoint; give the number of an"):
            checkpoints.load(run.window, which=which)
    with pytest.raises(UsageError, match=r"there is no checkpoint in elsewhere; the run has not saved one"):
        Checkpoints("elsewhere").load(run.window)


# Refused ----------------------------------------------------------------------------------------------


def parameter_groups(parameters: Any, lr: float) -> torch.optim.Optimizer:
    first, *others = parameters
    return torch.optim.AdamW([{"params": [first]}, {"params": others}], lr=lr)


MISFITS: dict[str, tuple[dict[str, Any], str]] = {
    "shape": (
        {"hidden": 9},
        r"'0.weight' of the model has the shape \[8, 5\] in the checkpoint and \[9, 5\]",
    ),
    "dtype": (
        {"wrap": lambda model: model.double()},
        r"'0.weight' of the model has the dtype torch.float32 in the checkpoint and torch.float64 here",
    ),
    "more names": (
        {"wrap": lambda model: model.append(nn.Linear(1, 1))},
        r"'4.weight' of the model is here only",
    ),
    "fewer names": (
        {"wrap": lambda model: model[:3]},
        r"'3.weight' of the model is in the checkpoint only",
    ),
    "optimizer": ({"make_optimizer": torch.optim.SGD}, "optimizer 1 was a AdamW and is a SGD"),
    "groups": (
        {"make_optimizer": parameter_groups},
        r"optimizer 1 had groups of \[6\] parameters and has groups of \[1, 5\]",
    ),
    "order": (
        {"make_optimizer": lambda p, lr: torch.optim.AdamW(list(p)[::-1], lr=lr)},
        "parameter 1 of optimizer 1 was '0.weight' and is '3.bias'; give the optimizer its parameters and",
    ),
    "schedule": (
        {"schedule": per_attempted_update},
        "the schedule was a LambdaLR by the applied_update and is a LambdaLR by the attempted_update",
    ),
    "schedules": ({"schedule": lambda _: []}, "it was saved with 1 schedules and 0 are here"),
    "scaler": (
        {"scaler": torch.amp.GradScaler("cpu")},
        "was saved without a GradScaler and one is here",
    ),
    "terms": (
        {"objective": wb.weighted_terms({"a": (wb.token_loss(), 1.0), "b": (wb.token_loss(), 1.0)})},
        r"the terms of the objective were \['.*'\] and are \['a', 'b'\]",
    ),
    "global batch": (
        {"global_batch_samples": 8},
        r"update-00000002 was saved with a global batch of 12 samples and the plan has 8; plan with "
        r"global_batch_samples=12",
    ),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    run = build()
    run.go(2)
    Checkpoints(folder).save(run.window, more={"ema": run.ema})
    return folder


@pytest.mark.parametrize("kind", MISFITS)
def test_what_does_not_fit_is_refused_before_anything_is_loaded(saved, kind):
    options, words = MISFITS[kind]
    run = build(seed=9, **options)
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    states = torch.get_rng_state()
    with pytest.raises(UsageError, match=words):
        Checkpoints(saved).load(run.window, more={"ema": run.ema})
    assert_same(dict(run.model.state_dict()), before)
    assert torch.equal(torch.get_rng_state(), states)
    assert run.window.counters.updates_attempted == 0


def test_a_parameter_outside_the_model_is_compared_by_shape(tmp_path):
    def make(size: int) -> wb.UpdateWindow:
        model = nn.Linear(1, 1)
        outside = nn.Parameter(torch.zeros(size))
        return wb.UpdateWindow(model, torch.optim.SGD([*model.parameters(), outside], lr=0.1))

    Checkpoints(tmp_path).save(make(2))
    Checkpoints(tmp_path).load(make(2))
    with pytest.raises(
        UsageError, match=r"parameter 3 of optimizer 1 \(None\) has the shape \[2\] in the ch"
    ):
        Checkpoints(tmp_path).load(make(3))


def test_a_scaler_that_is_missing_and_optimizers_in_another_number(tmp_path):
    run = build(scaler=torch.amp.GradScaler("cpu"))
    Checkpoints(tmp_path).save(run.window)
    with pytest.raises(UsageError, match="was saved with a GradScaler and none is here"):
        Checkpoints(tmp_path).load(build().window)
    model = tiny_model()
    first, *others = model.parameters()
    window = wb.UpdateWindow(model, [torch.optim.SGD([first], lr=0.1), torch.optim.SGD(others, lr=0.1)])
    with pytest.raises(UsageError, match="it was saved with 1 optimizers and 2 are here"):
        Checkpoints(tmp_path).load(window)


class AdamW(torch.optim.SGD):
    """Of the same name as one of torch."""


def test_optimizers_of_one_name_are_told_apart(saved, tmp_path, monkeypatch):
    run = build(make_optimizer=AdamW)
    words = rf"optimizer 1 was the AdamW of torch\.optim\.adamw and is that of {__name__}"
    with pytest.raises(UsageError, match=words):
        Checkpoints(saved).load(run.window, more={"ema": run.ema})
    Checkpoints(tmp_path).save(run.window)
    monkeypatch.setattr(AdamW, "__module__", "__main__")  # the same class in a script
    Checkpoints(tmp_path).load(build(make_optimizer=AdamW).window)


def test_tensors_without_values_are_refused_both_ways(saved, tmp_path):
    run = build()
    run.model.register_buffer("late", torch.zeros(2, device="meta"))
    with pytest.raises(
        UsageError, match=r"model\.pt\.late is on the meta device and has no values; give it"
    ):
        Checkpoints(tmp_path).save(run.window)
    empty = build(wrap=lambda module: module.to("meta"))
    with pytest.raises(
        UsageError, match=r"'0\.weight' of the model is on the meta device .* on its device"
    ):
        Checkpoints(saved).load(empty.window, more={"ema": run.ema})


def test_a_part_of_a_large_tensor_is_saved_alone(tmp_path):
    window, large = build().window, torch.arange(1_000_000.0)
    path = Checkpoints(tmp_path).save(window, more={"part": large[5:8]})
    assert (path / "rest.pt").stat().st_size < 1_000_000
    assert Checkpoints(tmp_path).load(build().window).more["part"].tolist() == [5.0, 6.0, 7.0]


def test_what_was_saved_in_more_must_be_asked_for(saved):
    run = build()
    with pytest.raises(UsageError, match=r"it holds the state of \['ema'\]; give load the objects, more="):
        Checkpoints(saved).load(run.window)
    with pytest.raises(
        UsageError, match=r"more has 'teacher', whose state was not saved; saved were \['ema'\]"
    ):
        Checkpoints(saved).load(run.window, more={"teacher": run.ema})
    other = AveragedModel(tiny_model(9))
    with pytest.raises(UsageError, match=r"'module.0.weight' of more\['ema'\] has the shape \[8, 5\]"):
        Checkpoints(saved).load(run.window, more={"ema": other})


class Odd:
    """Takes no state back."""

    def state_dict(self) -> dict[str, Any]:
        return {"a": 1}

    def load_state_dict(self, _state: Any) -> None:
        raise KeyError("b")


def test_an_object_of_the_user_that_fails_is_told_of(tmp_path):
    run = build()
    Checkpoints(tmp_path).save(run.window, more={"odd": Odd()})
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    with pytest.raises(
        CheckpointError, match=r"failed half way \(KeyError: 'b'\); this run is neither where it"
    ):
        Checkpoints(tmp_path).load(run.window, more={"odd": Odd()})
    assert_same(dict(run.model.state_dict()), before)  # the user's own objects come first


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (
            np.float64(1.0),
            r"rest.pt.plain.job.a is a numpy.float64; a checkpoint holds tensors and plain data",
        ),
        ([{1: Path("x")}], r"rest.pt.plain.job.a.0.1 is a pathlib\.\w+"),
        ({Path("x"): 1}, r"a key of rest.pt.plain.job.a is a pathlib\.\w+"),
        (
            torch.zeros(2).as_subclass(type("Mine", (torch.Tensor,), {})),
            "Mine",
        ),
    ],
    ids=["numpy", "path", "key", "subclass"],
)
def test_what_can_not_be_read_back_safely_is_not_written(tmp_path, value, words):
    with pytest.raises(UnsupportedError, match=words):
        Checkpoints(tmp_path / "run").save(build().window, more={"job": {"a": value}})
    assert not (tmp_path / "run").exists()


def test_plain_data_comes_back_as_it_was(tmp_path):
    given = {"a": [1, 2.5, None, True, "x", b"y", (3, {4})], "t": torch.arange(3), 7: {"n": 10**30}}
    run = build()
    Checkpoints(tmp_path).save(run.window, more={"job": given})
    assert_same(Checkpoints(tmp_path).load(run.window).more["job"], given)


def test_only_between_updates(tmp_path):
    run, checkpoints = build(), Checkpoints(tmp_path)
    run.go(1)
    checkpoints.save(run.window)
    rows = torch.zeros(2, FEATURES)
    for call, what in ((checkpoints.save, "save"), (checkpoints.load, "load")):
        with (
            pytest.raises(WindowUsageError, match=f"an update is under way; {what} between updates"),
            run.window.update([rows]),
        ):
            call(run.window)
        run.model[0].weight.grad = torch.zeros_like(run.model[0].weight)
        with pytest.raises(
            StaleGradientsError, match="1 of 6 parameters have a gradient, which a checkpoint"
        ):
            call(run.window)
        run.model[0].weight.grad = None
    run.window.finish.optimizers[0].register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(PoisonedWindowError):
        run.go(1)
    for call in (checkpoints.save, checkpoints.load):
        with pytest.raises(PoisonedWindowError, match="restart from the last committed update, number 1"):
            call(run.window)
    assert names(tmp_path) == ["update-00000001"]


@pytest.mark.parametrize("keep_last", [0, -1, True, 1.5])
def test_nothing_kept_is_refused(keep_last):
    with pytest.raises(
        UsageError, match=f"keep_last={keep_last!r} is no number of checkpoints; keep 1 or more"
    ):
        Checkpoints("x", keep_last=keep_last)


@pytest.mark.parametrize("score", [float("nan"), float("inf"), "0.5", True])
def test_a_score_that_can_not_be_compared_is_refused(tmp_path, score):
    with pytest.raises(UsageError, match=f"score={score!r} can't be compared"):
        Checkpoints(tmp_path).save(build().window, score=score)


# Whatever torch brings ----------------------------------------------------------------------------------

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "OneCycleLR": lambda one: torch.optim.lr_scheduler.OneCycleLR(one, max_lr=0.1, total_steps=20),
    "CyclicLR": lambda one: torch.optim.lr_scheduler.CyclicLR(one, 0.01, 0.1, cycle_momentum=False),
    "CosineAnnealingWarmRestarts": lambda one: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(one, 3),
    "MultiStepLR": lambda one: torch.optim.lr_scheduler.MultiStepLR(one, [2, 3]),
    "SequentialLR": lambda one: torch.optim.lr_scheduler.SequentialLR(
        one,
        [
            torch.optim.lr_scheduler.LinearLR(one, 0.1, total_iters=2),
            torch.optim.lr_scheduler.CosineAnnealingLR(one, 5),
        ],
        milestones=[2],
    ),
}
OPTIMIZERS = [
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "Adamax",
    "ASGD",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
]


def window_of(optimizer_name: str, scheduler_name: str, seed: int) -> wb.UpdateWindow:
    torch.manual_seed(seed)
    model = nn.Linear(4, 3)
    optimizer = getattr(torch.optim, optimizer_name)(model.parameters(), lr=0.05)
    return wb.UpdateWindow(model, optimizer, scheduler=wb.per_update(SCHEDULERS[scheduler_name](optimizer)))


@pytest.mark.parametrize(
    ("optimizer", "scheduler"),
    [(name, "MultiStepLR") for name in OPTIMIZERS] + [("AdamW", name) for name in SCHEDULERS],
)
def test_torchs_own_optimizers_and_schedulers_go_on_bit_for_bit(tmp_path, optimizer, scheduler):
    def go(window: wb.UpdateWindow, num_updates: int) -> None:
        for _ in range(num_updates):
            rows = torch.sin(torch.arange(8.0) * (1 + window.counters.updates_attempted)).view(2, 4)
            window.run([rows], lambda model, batch: ((model(batch) ** 2).sum(), 2))

    whole = window_of(optimizer, scheduler, 0)
    go(whole, 3)
    Checkpoints(tmp_path).save(whole)
    other = window_of(optimizer, scheduler, 1)
    Checkpoints(tmp_path).load(other)
    for window in (whole, other):
        go(window, 3)
    assert_same(other.model.state_dict(), whole.model.state_dict())
    assert_same(other.finish.optimizers[0].state_dict(), whole.finish.optimizers[0].state_dict())
