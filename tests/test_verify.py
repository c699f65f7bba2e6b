"""Each cause is found on a problem that has it, and verify is silent on the right twin."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from wholebatch import window
from wholebatch.errors import JudgeError, SplitError, UsageError
from wholebatch.losses import next_token_loss, regression_loss, token_loss
from wholebatch.objective import sample_loss, weighted_terms
from wholebatch.verify import Verification, trial, verify_window
from wholebatch.verify.plain import sampled_splits

Batch = dict[str, Tensor]
LossFn = Callable[[nn.Module, Any], Any]


def mlp(*middle: nn.Module) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 8), *middle, nn.Tanh(), nn.Linear(8, 3))


def data(samples: int = 8) -> Batch:
    torch.manual_seed(2)
    return {"x": torch.randn(samples, 5), "y": torch.randint(0, 3, (samples,))}


def losses(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def summed(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    each = losses(model, batch)
    return each.sum(), len(each)


def averaged(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    each = losses(model, batch)
    return each.mean(), len(each)


def averaged_over_one(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    return losses(model, batch).mean(), 1


def summed_over_one(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    return losses(model, batch).sum(), 1


def count_of_the_whole_batch(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    return losses(model, batch).sum(), 8


def count_of_classes(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    return losses(model, batch).sum(), batch["y"].unique().numel()


def contrastive(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    z = F.normalize(model(batch["x"]), dim=1)
    return F.cross_entropy(z @ z.T / 0.1, torch.arange(len(z)), reduction="sum"), len(z)


def contrastive_mean(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    loss_sum, items = contrastive(model, batch)
    return loss_sum / items, items


def against_the_batch_mean(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    out = model(batch["x"])
    return (out - out.mean(0)).square().sum(), len(out)


def penalised(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    loss_sum, items = summed(model, batch)
    return loss_sum + 0.1 * sum(p.square().sum() for p in model.parameters()), items


class StochasticDepth(nn.Module):
    """Skips a layer by Python's and numpy's random numbers, whatever the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        if random.random() < 0.5:
            x = self.first(x) * float(np.random.rand())
        return self.second(x)


class RunningCentre(nn.Module):
    """Subtracts a buffer that each forward in training mode moves."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)
        self.register_buffer("centre", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.centre = self.centre + 0.1
        return self.linear(x - self.centre)


def spectral() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(spectral_norm(nn.Linear(5, 8)), nn.Tanh(), nn.Linear(8, 3))


@dataclass
class Case:
    """A broken problem, what verify has to say of it, and a right twin."""

    model: Callable[[], nn.Module]
    loss_fn: LossFn
    cause: str
    twin_model: Callable[[], nn.Module] | None = None
    twin_loss_fn: LossFn | None = None
    factor: float | None = None
    also: tuple[str, ...] = ()
    replayed: bool | None = None


def norm() -> nn.Module:
    return nn.BatchNorm1d(8)


CASES = {
    "dropout": Case(
        lambda: mlp(nn.Dropout(0.5)), summed, "dropout", lambda: mlp(nn.Dropout(0.5)).eval(), replayed=True
    ),
    "stochastic depth": Case(StochasticDepth, summed, "dropout", mlp, replayed=True),
    "batch norm": Case(lambda: mlp(norm()), summed, "batch_norm", lambda: mlp(norm()).eval()),
    "group norm": Case(lambda: mlp(norm()), summed, "batch_norm", lambda: mlp(nn.GroupNorm(2, 8))),
    "spectral norm": Case(spectral, summed, "buffers", lambda: spectral().eval()),
    "own buffer": Case(RunningCentre, summed, "buffers", lambda: RunningCentre().eval()),
    "contrastive": Case(mlp, contrastive, "coupled_samples", twin_loss_fn=summed),
    "contrastive mean": Case(mlp, contrastive_mean, "coupled_samples", twin_loss_fn=summed),
    "batch mean": Case(mlp, against_the_batch_mean, "coupled_samples", twin_loss_fn=summed),
    "mean": Case(mlp, averaged, "mean_for_sum", twin_loss_fn=summed, factor=8.0),
    "mean over one": Case(mlp, averaged_over_one, "mean_for_sum", twin_loss_fn=summed),
    "sum over one": Case(mlp, summed_over_one, "sum_for_mean", twin_loss_fn=summed, factor=1 / 8),
    "count of the whole": Case(
        mlp, count_of_the_whole_batch, "wrong_count", twin_loss_fn=summed, factor=1 / 8
    ),
    "count of classes": Case(mlp, count_of_classes, "wrong_count", twin_loss_fn=summed, factor=3 / 8),
    "mean under dropout": Case(
        lambda: mlp(nn.Dropout(0.5)),
        averaged,
        "mean_for_sum",
        mlp,
        summed,
        also=("dropout",),
        replayed=True,
    ),
    "mean under batch norm": Case(
        lambda: mlp(norm()), averaged, "mean_for_sum", mlp, summed, also=("batch_norm",)
    ),
    "dropout and batch norm": Case(
        lambda: mlp(norm(), nn.Dropout(0.5)), summed, "dropout", mlp, also=("batch_norm",), replayed=True
    ),
    "dropout and spectral norm": Case(
        lambda: nn.Sequential(spectral(), nn.Dropout(0.5)),
        summed,
        "dropout",
        also=("buffers",),
        replayed=True,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_cause_is_found(name: str) -> None:
    case = CASES[name]
    found = verify_window(case.model(), case.loss_fn, data())
    assert (found.equal, found.cause, found.also) == (False, case.cause, case.also)
    assert found.equal_when_replayed == case.replayed
    assert found.worst is not None
    assert found.worst.ratio > 1e3
    if case.factor is None:
        assert found.factor is None
    else:
        assert found.factor == pytest.approx(case.factor, rel=1e-9)


@pytest.mark.parametrize(
    "name", [name for name, case in CASES.items() if case.twin_model or case.twin_loss_fn]
)
def test_the_right_twin_is_equal(name: str) -> None:
    case = CASES[name]
    found = verify_window((case.twin_model or case.model)(), case.twin_loss_fn or case.loss_fn, data())
    assert (found.equal, found.cause, found.factor) == (True, None, None)
    assert found.worst is not None
    assert found.worst.ratio <= 1.0
    assert found.rounding is not None
    assert found.rounding.within


# Other shapes of right problems ---------------------------------------------------------------------


def tokens(samples: int = 6) -> Batch:
    torch.manual_seed(4)
    ids = torch.randint(0, 11, (samples, 9))
    labels = ids.clone()
    for row, cut in enumerate([2, 9, 5, 1, 7, 3][:samples]):
        labels[row, cut:] = -100  # row 3 keeps one label, which is never a target: no items
    return {"input_ids": ids, "labels": labels}


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn, self.out = (
            nn.Embedding(11, 6),
            nn.GRU(6, 7, batch_first=True),
            nn.Linear(7, 11),
        )

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.rnn(self.embed(ids))[0])


def test_next_tokens_with_ragged_labels_counted_ahead_and_not() -> None:
    objective = next_token_loss()

    def loss_fn(model: nn.Module, batch: Batch) -> Any:
        return objective(model(batch["input_ids"]), batch)

    for chosen in (objective, None):
        found = verify_window(Recurrent(), loss_fn, tokens(), objective=chosen)
        assert found.equal, found
        assert found.num_items == {"loss": 1 + 8 + 4 + 0 + 6 + 2}


def two_terms(model: nn.Module, batch: Batch) -> dict[str, tuple[Tensor, Any]]:
    logits = model(batch["input_ids"])
    counted = batch["labels"] != -100
    loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
    return {"ce": (loss, counted.sum()), "size": (logits.square().sum(), len(logits))}


@pytest.mark.parametrize("clip", [None, 0.05])
def test_two_terms_with_clipping_and_adamw(clip: float | None) -> None:
    found = verify_window(
        Recurrent(),
        two_terms,
        tokens(),
        coefficients={"size": 0.01},
        clip_grad_norm=clip,
        make_optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    )
    assert found.equal, found
    assert set(found.num_items) == {"ce", "size"}


def test_a_broken_second_term_is_found() -> None:
    def broken(model: nn.Module, batch: Batch) -> dict[str, tuple[Tensor, Any]]:
        terms = two_terms(model, batch)
        return {**terms, "size": (terms["size"][0], 1)}

    assert verify_window(Recurrent(), broken, tokens()).cause == "sum_for_mean"


def test_weighted_terms_objective() -> None:
    objective = weighted_terms(
        {"ce": (token_loss(labels="y"), 1.0), "aux": (regression_loss(targets="x"), 0.1)}
    )

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ce, self.aux = nn.Linear(5, 3), nn.Linear(5, 5)

        def forward(self, x: Tensor) -> Batch:
            return {"ce": self.ce(x), "aux": self.aux(x)}

    found = verify_window(Both(), lambda m, b: objective(m(b["x"]), b), data(), objective=objective)
    assert found.equal, found
    assert found.num_items == {"ce": 8.0, "aux": 40.0}


def test_an_objective_that_counts_another_thing_than_the_loss() -> None:
    objective = sample_loss(lambda output, _: output.sum(1))

    def loss_fn(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        return losses(model, batch).sum(), 2 * len(batch["y"])

    found = verify_window(mlp(), loss_fn, data(), objective=objective)
    assert (found.equal, found.cause) == (False, "wrong_count")
    assert found.splits[0].refused is not None
    assert "the window refused" in found.advice


def collate(samples: list[Tensor]) -> Batch:
    longest = max(map(len, samples))
    ids = torch.stack([F.pad(sample, (0, longest - len(sample)), value=0) for sample in samples])
    return {"ids": ids, "counts": torch.stack([torch.arange(longest) < len(sample) for sample in samples])}


def ragged() -> list[Tensor]:
    torch.manual_seed(5)
    return [torch.randint(1, 11, (length,)) for length in (3, 9, 2, 5, 7)]


def ragged_losses(model: nn.Module, batch: Batch) -> Tensor:
    each = F.cross_entropy(model(batch["ids"]).transpose(1, 2), batch["ids"], reduction="none")
    return each[batch["counts"]].sum()


def test_a_list_of_samples_with_collate() -> None:
    def right(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        return ragged_losses(model, batch), batch["counts"].sum()

    def padded(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        return ragged_losses(model, batch), batch["ids"].numel()

    found = verify_window(Recurrent(), right, ragged(), collate=collate)
    assert found.equal, found
    assert (found.num_samples, found.num_items) == (5, {"loss": 26.0})
    assert verify_window(Recurrent(), padded, ragged(), collate=collate).cause == "wrong_count"


def test_a_micro_batch_without_items_may_return_a_constant() -> None:
    def loss_fn(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        kept = batch["y"] > 0
        if not kept.any():
            return torch.zeros(()), 0
        return losses(model, batch)[kept].sum(), int(kept.sum())

    found = verify_window(mlp(), loss_fn, data())
    assert found.equal, found
    assert 0 < found.num_items["loss"] < 8


def test_frozen_tied_and_sometimes_unused_parameters() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)
            self.b.weight = self.a.weight
            self.rare, self.never = nn.Linear(5, 5), nn.Linear(5, 5)
            self.a.bias.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            h = self.b(torch.tanh(self.a(x)))
            big = x[:, 0] > 1.0
            if big.any():
                h = h + torch.where(big[:, None], self.rare(x), torch.zeros_like(h))
            return self.c(h)

    torch.manual_seed(0)
    found = verify_window(Model(), summed, data())
    assert found.equal, found


def test_sparse_gradients_and_complex_parameters() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(7, 3, sparse=True)
            self.turn = nn.Parameter(torch.randn(3, dtype=torch.complex64))

        def forward(self, ids: Tensor) -> Tensor:
            turned = self.embed(ids) * self.turn
            return torch.view_as_real(turned).square().sum((1, 2))

    def loss_fn(model: nn.Module, ids: Tensor) -> tuple[Tensor, int]:
        return model(ids).sum(), len(ids)

    def right(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    ids = torch.tensor([0, 3, 3, 1, 6])
    found = verify_window(Model(), loss_fn, ids, make_optimizer=right)
    assert found.equal, found
    wrong = verify_window(Model(), lambda m, b: (loss_fn(m, b)[0], 1), ids, make_optimizer=right)
    assert wrong.cause == "sum_for_mean"
    assert wrong.factor == pytest.approx(1 / 5)


# Dtypes ---------------------------------------------------------------------------------------------


class Inside(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.net, self.dtype = mlp(), dtype

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).to(self.dtype).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_computes_narrower_inside_is_judged_by_that(dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    right = verify_window(Inside(dtype), summed, data())
    assert (right.equal, right.judged_in) == (True, name)
    assert f"computes in {name} inside" in right.notes[0]
    wrong = verify_window(Inside(dtype), averaged, data())
    assert (wrong.equal, wrong.cause, wrong.judged_in) == (False, "mean_for_sum", name)


def test_a_model_that_can_not_run_in_float64_is_judged_in_its_own_dtype() -> None:
    matrix = torch.eye(5)  # float32, and float64 times float32 is refused by torch

    def right(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        return F.cross_entropy(model(batch["x"] @ matrix), batch["y"], reduction="sum"), len(batch["y"])

    found = verify_window(mlp(), right, data())
    assert (found.equal, found.judged_in, found.rounding) == (True, "float32", None)
    assert "could not run in float64 (RuntimeError" in found.notes[0]
    wrong = verify_window(mlp(), lambda m, b: (right(m, b)[0], 1), data())
    assert (wrong.cause, wrong.judged_in) == ("sum_for_mean", "float32")


def test_factors_inside_a_fused_optimizer_are_seen() -> None:
    matrix = torch.eye(5)  # keeps the runs in float32, where the window folds factors into the kernel

    def loss_fn(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        return F.cross_entropy(model(batch["x"] @ matrix), batch["y"], reduction="sum"), len(batch["y"])

    def fused(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, fused=True)

    found = verify_window(mlp(), loss_fn, data(), make_optimizer=fused, clip_grad_norm=0.01)
    assert (found.equal, found.judged_in) == (True, "float32")


def squares(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    out = model(batch[0].to(model.weight.dtype))
    wide = out.float() if out.dtype == torch.bfloat16 else out
    return (wide.squeeze(1) - batch[1]).square().sum(), len(wide)


@pytest.mark.parametrize("num_micro_batches", [8, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_small_gradients_added_up_in_bfloat16(dtype: torch.dtype, num_micro_batches: int) -> None:
    torch.manual_seed(0)
    model, batch = nn.Linear(16, 1).to(dtype), (torch.randn(512, 16), torch.randn(512))
    sizes = [512 // num_micro_batches] * num_micro_batches
    found = verify_window(model, squares, batch, splits=[sizes])
    assert found.splits[0].equal
    assert found.rounding is not None
    lost = dtype == torch.bfloat16 and num_micro_batches == 512
    assert (found.equal, found.cause) == ((False, "low_precision") if lost else (True, None))
    assert found.rounding.cured_when_wide is (True if lost else None)
    if lost:
        assert found.worst == found.rounding.worst
        assert "added up in a dtype with too few digits" in found.advice


@pytest.mark.parametrize("name", ["Adafactor", "Adagrad", "NAdam", "RAdam", "RMSprop", "Rprop", "Adamax"])
def test_other_optimizers_are_carried_too(name: str) -> None:
    found = verify_window(mlp(), summed, data(), make_optimizer=getattr(torch.optim, name))
    assert found.equal, found


def test_autocast_only_rounds() -> None:
    def loss_fn(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        with torch.autocast("cpu", torch.bfloat16):
            out = model(batch["x"])
        wide = out.float() if out.dtype == torch.bfloat16 else out
        return F.cross_entropy(wide, batch["y"], reduction="sum"), len(wide)

    found = verify_window(mlp(), loss_fn, data(64), splits=[[1] * 64])
    assert found.equal, found
    assert found.rounding is not None
    assert found.rounding.whole_error > 1e-5  # bfloat16 did round


def test_rounding_that_the_window_refuses_to_judge_is_a_note() -> None:
    def loss_fn(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        return F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum"), len(batch["y"])

    batch = {**data(), "x": data()["x"].bfloat16()}
    found = verify_window(mlp().bfloat16(), loss_fn, batch)
    assert (found.equal, found.rounding) == (True, None)
    assert "was not judged" in found.notes[0]
    assert "summed in torch.bfloat16" in found.notes[0]


def test_a_model_that_amplifies_rounding_is_given_its_due() -> None:
    class Offset(nn.Module):
        def __init__(self, offset: float) -> None:
            super().__init__()
            self.a, self.norm, self.out = nn.Linear(5, 16), nn.LayerNorm(16, eps=1e-12), nn.Linear(16, 3)
            self.offset = offset

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.norm(self.a(x) * 1e-3 + self.offset))

    torch.manual_seed(0)
    found = verify_window(Offset(1e3), summed, data(12))
    assert found.equal, found
    assert "amplifies rounding" in found.notes[0]
    assert verify_window(Offset(1e3), averaged, data(12)).cause == "mean_for_sum"


def test_a_model_beyond_judging() -> None:
    torch.manual_seed(0)
    rnn = nn.RNN(4, 32, batch_first=True)
    with torch.no_grad():
        for parameter in rnn.parameters():
            parameter.mul_(10)

    def loss_fn(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
        return model(x)[0][:, -1].sum(), len(x)

    with pytest.raises(JudgeError, match=r"amplified .* times by this model, explains differences of"):
        verify_window(rnn, loss_fn, torch.randn(12, 200, 4), splits=[[6, 6]])


# The window at fault ---------------------------------------------------------------------------------


def test_a_window_with_a_wrong_scale_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    settle = window.Update._settle

    def off_by_little(self: Any) -> Any:
        first = self._tally is None
        total = settle(self)
        if first:
            self._shares = {term: share * (1 + 1e-9) for term, share in self._shares.items()}
        return total

    monkeypatch.setattr(window.Update, "_settle", off_by_little)
    objective = token_loss(labels="y")
    found = verify_window(mlp(), lambda m, b: objective(m(b["x"]), b), data(), objective=objective)
    assert (found.equal, found.cause) == (False, "unknown")
    assert "the window is at fault" in found.advice
    assert found.factor is not None
    assert found.factor - 1 == pytest.approx(1e-9, rel=1e-4)


@pytest.mark.parametrize("drop", [0, -1])
def test_a_window_that_leaves_a_micro_batch_out_is_found(
    drop: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = window.UpdateWindow.run

    def shortened(self: Any, batches: list[Any], loss_fn: LossFn, **options: Any) -> Any:
        batches = list(batches)
        del batches[drop]
        return run(self, batches, loss_fn, **options)

    monkeypatch.setattr(trial.UpdateWindow, "run", shortened)
    found = verify_window(mlp(), summed, data())
    assert (found.equal, found.cause) == (False, "unknown")
    noisy = verify_window(mlp(nn.Dropout(0.5)), summed, data())
    assert (noisy.cause, noisy.equal_when_replayed) == ("dropout", False)


def test_a_window_that_never_applies_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from wholebatch.finish import Finish, Reading

    read = Finish.read

    def not_finite(self: Any, *given: Any) -> Reading:
        found = read(self, *given)
        return Reading(norm=float("nan"), values=found.values)

    monkeypatch.setattr(Finish, "read", not_finite)
    found = verify_window(mlp(), summed, data())
    assert (found.equal, found.cause, found.worst) == (False, "unknown", None)
    assert "did not apply the update (skipped_nonfinite)" in str(found.splits[0].refused)


def test_clipping_hides_no_factor() -> None:
    found = verify_window(mlp(), averaged, data(), clip_grad_norm=1e-3)
    assert (found.cause, found.factor) == ("mean_for_sum", pytest.approx(8.0))


def test_wrong_clipping_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from wholebatch.finish import Finish

    factor = Finish.clip_factor
    monkeypatch.setattr(Finish, "clip_factor", lambda self, norm: factor(self, norm * 1.001))
    found = verify_window(mlp(), summed, data(), clip_grad_norm=0.01)
    assert (found.equal, found.cause) == (False, "unknown")
    assert found.worst is not None
    assert found.worst.quantity in ("clipped gradient", "parameter")
    monkeypatch.undo()
    assert verify_window(mlp(), summed, data(), clip_grad_norm=0.01).equal


def test_a_parameter_update_that_goes_astray_is_found() -> None:
    class TwiceOnSecondUse(torch.optim.SGD):
        """Moves twice as far where the gradient was built from several micro-batches."""

        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                group["lr"] = 2.0 if window_runs else 1.0
            return super().step(closure)

    window_runs: list[int] = []
    run = window.UpdateWindow.run

    def noted(self: Any, *given: Any, **options: Any) -> Any:
        window_runs.append(1)
        try:
            return run(self, *given, **options)
        finally:
            window_runs.pop()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial.UpdateWindow, "run", noted)
        found = verify_window(
            mlp(), summed, data(), make_optimizer=lambda parameters: TwiceOnSecondUse(parameters, lr=1.0)
        )
    assert (found.equal, found.cause) == (False, "unknown")
    assert found.worst is not None
    assert found.worst.quantity == "parameter"


# Advice ---------------------------------------------------------------------------------------------


def advice(loss_fn: LossFn, model: nn.Module | None = None) -> str:
    return verify_window(model or mlp(), loss_fn, data()).advice


def test_advice_names_the_numbers() -> None:
    assert "Over 8 micro-batches the gradient is 8 = A times the big batch's." in advice(averaged)
    assert "is 0.125 = 1/A times" in advice(summed_over_one)
    assert "8 in the whole batch, 8 + 8 + 8 + 8 + 8 + 8 + 8 + 8 = 64 in its parts" in advice(
        count_of_the_whole_batch
    )
    assert "(1): micro-batches have other statistics" in advice(summed, mlp(norm()))
    assert "samples are compared with each other" in advice(contrastive)


class Centring(nn.Module):
    """Subtracts the batch's mean; no buffers to give it away, and in eval mode too."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


def test_advice_names_the_place_where_samples_meet() -> None:
    assert "), in the loss or between modules. Splitting" in advice(contrastive)

    class Between(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x - x.mean(0))

    assert "), in the loss or between modules. Splitting" in advice(summed, Between(nn.Linear(5, 3)))
    assert "), first in module 1 (Centring). Splitting" in advice(summed, mlp(Centring()))
    unsaid = nn.BatchNorm1d(8, track_running_stats=False)
    assert "), first in module 1 (BatchNorm1d). Splitting" in advice(summed, mlp(unsaid))


def test_gradients_that_do_not_add_up_although_the_losses_do() -> None:
    def loss_fn(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        out = model(batch["x"])
        nothing = (out - out.detach()).sum() * out.detach().mean()  # 0, with a gradient
        return out.square().sum() + nothing, len(out)

    found = verify_window(mlp(), loss_fn, data())
    assert (found.equal, found.cause) == (False, "unknown")
    assert "but their gradients do not" in found.advice


def test_two_samples_are_enough_for_a_cause() -> None:
    assert verify_window(mlp(), contrastive, data(2)).cause == "coupled_samples"
    assert verify_window(mlp(), averaged, data(2)).cause == "mean_for_sum"
    assert verify_window(mlp(), summed, data(2)).equal


def test_counts_of_one_that_are_not_one_for_the_whole_are_a_wrong_count() -> None:
    assert verify_window(mlp(), count_of_classes, data(), splits=[[1] * 8]).cause == "wrong_count"


def test_a_penalty_that_is_added_once_a_call_is_named() -> None:
    found = verify_window(mlp(), penalised, data())
    amount = 0.1 * sum(p.detach().square().sum().item() for p in mlp().parameters())
    assert found.cause == "coupled_samples"
    assert f"adds the same {amount:.6g}"[:24] in found.advice


def test_randomness_that_can_not_be_replayed() -> None:
    own = torch.Generator().manual_seed(0)

    def loss_fn(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        kept = torch.rand(len(batch["y"]), generator=own) < 0.5
        return (losses(model, batch) * kept).sum(), len(batch["y"])

    found = verify_window(mlp(), loss_fn, data())
    assert (found.equal, found.cause, found.equal_when_replayed) == (False, "unknown", False)
    assert "draws from a generator of its own" in found.advice


def test_noise_that_missed_the_compared_runs_is_still_noise() -> None:
    def loss_fn(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        # Python's first numbers after seeds 0 and 1, those of the oracle and the window, are below 0.9
        each = losses(model, batch) * (2.0 if random.random() > 0.9 else 1.0)
        return each.sum(), len(each)

    found = verify_window(mlp(), loss_fn, data())
    assert all(split.equal for split in found.splits)
    assert (found.equal, found.cause) == (False, "dropout")


def test_rare_noise_is_not_taken_for_another_fault() -> None:
    def loss_fn(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        # Python's first numbers after seeds 0 to 3 are not between 0.7 and 0.8, the third after 1 is
        each = losses(model, batch) * (2.0 if 0.7 < random.random() < 0.8 else 1.0)
        return each.sum(), len(each)

    found = verify_window(mlp(), loss_fn, data())
    assert (found.cause, found.equal_when_replayed) == ("dropout", True)


# What can't be judged -------------------------------------------------------------------------------


def no_items(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    return losses(model, batch).sum() * 0, 0


def not_a_number(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    return losses(model, batch).sum() * float("nan"), 1


def fails(*_: Any) -> Any:
    raise KeyError("labels")


def flat(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    return losses(model, batch).sum() * 0.0, 3


def infinite_gradient(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    return (model(batch["x"]) * 0).abs().pow(0.5).sum(), 1


OUTSIDE = mlp()


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (no_items, "counted 0 items in the whole batch"),
        (not_a_number, "loss_sum=nan"),
        (fails, "loss_fn failed on the whole batch with KeyError: 'labels'"),
        (flat, "every gradient of the whole batch is exactly zero"),
        (infinite_gradient, r"the whole batch's own gradient of 0\.weight is not finite"),
        (lambda _, batch: summed(OUTSIDE, batch), "must call its own first argument"),
        (losses, r"returned a Tensor of shape \[8\]"),
    ],
)
def test_losses_that_can_not_be_judged(loss_fn: LossFn, message: str) -> None:
    with pytest.raises(JudgeError, match=message):
        verify_window(mlp(), loss_fn, data())
    assert all(parameter.grad is None for parameter in OUTSIDE.parameters())


def test_models_and_batches_that_can_not_be_judged() -> None:
    with pytest.raises(JudgeError, match=r"model is a function, not a torch\.nn\.Module"):
        verify_window(summed, summed, data())  # type: ignore[arg-type]
    with pytest.raises(JudgeError, match="no parameter of this Sequential requires a gradient"):
        verify_window(mlp().requires_grad_(False), summed, data())
    with pytest.raises(JudgeError, match=r"a batch of 1 sample\(s\) can't be split over 1 rank\(s\)"):
        verify_window(mlp(), summed, data(1))
    with pytest.raises(JudgeError, match=r"micro-batches of \[1, 7\] samples fail with ValueError"):
        verify_window(mlp(norm()), summed, data(), splits=[[1, 7]])
    with pytest.raises(JudgeError, match=r"no split could be run: micro-batches of \[1, 1\]"):
        verify_window(mlp(norm()), summed, data(2))
    with pytest.raises(SplitError, match="collate was given, so batch has to be a list of samples"):
        verify_window(mlp(), summed, data(), collate=collate)
    with pytest.raises(JudgeError, match=r"collate failed on all 2 samples with TypeError"):
        verify_window(mlp(), summed, [1, 2], collate=collate)
    with pytest.raises(JudgeError, match=r"the whole batch's update failed with TypeError: LBFGS\.step"):
        verify_window(mlp(), summed, data(), make_optimizer=torch.optim.LBFGS)
    with pytest.raises(
        JudgeError, match=r"the whole batch's update failed with ValueError: Invalid learning"
    ):
        verify_window(mlp(), summed, data(), make_optimizer=lambda p: torch.optim.SGD(p, lr=-1.0))
    with pytest.raises(SplitError, match=r"splits=\[\] tries nothing"):
        verify_window(mlp(), summed, data(), splits=[])
    for sizes in ([3, 4], [8, 0], [4.0, 4.0], [True] * 8, []):
        with pytest.raises(SplitError, match="do not make the batch of 8"):
            verify_window(mlp(), summed, data(), splits=[sizes])  # type: ignore[list-item]
    with pytest.raises(UsageError, match=r"(?s)ranks=4 was asked for and 1 is running.*--nproc-per-node 4"):
        verify_window(mlp(), summed, data(), ranks=4)


def test_a_margin_that_would_excuse_anything_is_no_verdict() -> None:
    deep = nn.Sequential(Inside(torch.bfloat16), *[nn.Linear(3, 3) for _ in range(60)])
    with pytest.raises(JudgeError, match="rounding of bfloat16 explains differences of"):
        verify_window(deep, summed, data())


# What is left behind --------------------------------------------------------------------------------


@pytest.mark.parametrize("good", [True, False])
def test_the_caller_finds_everything_as_it_was(good: bool) -> None:
    model, batch = mlp(norm(), nn.Dropout(0.5)), data()
    model[0].weight.grad = torch.full_like(model[0].weight, 3.0)
    model[4].eval()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    owned = model[0].weight.grad
    assert owned is not None

    def meddling(copied: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        model.eval()
        with torch.no_grad():
            model[0].bias.add_(1.0)
            owned.zero_()
            model[1].running_mean.add_(1.0)
        model[0].bias.grad = torch.ones_like(model[0].bias)
        torch.rand(3), random.random(), np.random.rand()
        if not good:
            model.requires_grad_(False)
            raise RuntimeError("in the middle")
        return summed(copied, batch)

    torch.manual_seed(6), random.seed(6), np.random.seed(6)
    expected = torch.rand(1).item(), random.random(), np.random.rand()
    torch.manual_seed(6), random.seed(6), np.random.seed(6)
    if good:
        assert not verify_window(model, meddling, batch).equal  # it is another model each time
    else:
        with pytest.raises(JudgeError, match="RuntimeError: in the middle"):
            verify_window(model, meddling, batch)
    assert (torch.rand(1).item(), random.random(), np.random.rand()) == expected
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name
    assert [module.training for module in model] == [True, True, True, True, False]
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert model[0].weight.grad is owned
    assert torch.equal(owned, torch.full_like(owned, 3.0))
    assert model[0].bias.grad is None


# The result -----------------------------------------------------------------------------------------


def test_sampled_splits_are_a_few_different_ones() -> None:
    for samples in (2, 3, 7, 16, 100):
        splits = sampled_splits(samples, 0, ranks=1)
        assert all(sum(sizes) == samples and min(sizes) >= 1 for sizes in splits)
        assert max(map(len, splits)) == min(samples, 16)
        assert len(set(splits)) == len(splits)
        assert samples < 4 or any(len(set(sizes)) > 2 or max(sizes) > 2 * min(sizes) for sizes in splits)
    for sizes in sampled_splits(9, 0, ranks=4):
        assert len(sizes) >= 4
    assert any(len(sizes) % 4 for sizes in sampled_splits(9, 0, ranks=4))
    with pytest.raises(JudgeError, match=r"a batch of 3 sample\(s\) can't be split over 4 rank\(s\)"):
        sampled_splits(3, 0, ranks=4)


def test_json_keys_and_numbers() -> None:
    good, bad = (
        verify_window(mlp(), f, data(), splits=[[8], [3, 5]]).to_dict() for f in (summed, averaged)
    )
    assert set(good) == set(bad)
    assert good["schema_version"] == 1
    assert (good["equal"], good["cause"], good["factor"]) == (True, None, None)
    assert set(bad["worst"]) == {"parameter", "quantity", "error", "bound"}
    assert [split["micro_batch_samples"] for split in bad["splits"]] == [[8], [3, 5]]
    assert [split["equal"] for split in bad["splits"]] == [True, False]
    assert bad["rounding"] is None
    assert good["rounding"]["dtype"] == "float32"


def test_infinite_errors_become_null() -> None:
    found = verify_window(mlp(), contrastive, data(), splits=[[1] * 8])
    assert found.worst is not None
    assert found.worst.ratio == float("inf")  # single samples have a loss of 0 and a bound of 0
    from wholebatch.closeness import ParameterError
    from wholebatch.verify.verification import SplitResult

    broken = ParameterError(parameter="w", quantity="gradient", error=float("nan"), bound=float("inf"))
    told = SplitResult(micro_batch_samples=(1,), equal=False, worst=broken, factor=float("inf")).to_dict()
    assert (told["worst"]["error"], told["worst"]["bound"], told["factor"]) == (None, None, None)


def test_the_seed_decides_the_sampled_splits() -> None:
    one, same, other = (verify_window(mlp(), summed, data(), seed=seed).splits for seed in (0, 0, 1))
    assert one == same
    assert [s.micro_batch_samples for s in one] != [s.micro_batch_samples for s in other]


# Ranks ----------------------------------------------------------------------------------------------


def on_a_rank(rank: int, n: int) -> dict[str, Any]:
    del rank
    results: dict[str, Any] = {}

    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.usual, self.rare = mlp(), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            rare = (x[:, :1] > 0.5).to(x.dtype)
            return self.usual(x) + (self.rare(x) * rare if rare.any() else 0.0)

    def needs_the_plain_model(model: Any, batch: Batch) -> tuple[Tensor, int]:
        return summed(model, batch)[0] + 0 * model[0].weight.sum(), len(batch["y"])

    def keep(name: str, found: Verification) -> None:
        results[name] = (found.equal, found.cause, found.factor, found.equal_when_replayed, found.ranks)

    keep("right", verify_window(mlp(), summed, data(), ranks=n, clip_grad_norm=0.1))
    keep("mean", verify_window(mlp(), averaged, data()))
    keep("dropout", verify_window(mlp(nn.Dropout(0.5)), summed, data()))
    keep("two terms", verify_window(Recurrent(), two_terms, tokens()))
    with pytest.raises(SplitError, match=r"\[8\] has 1 micro-batch\(es\) for 2 ranks"):
        verify_window(mlp(), summed, data(), splits=[[8]])
    wrapped = nn.parallel.DistributedDataParallel(mlp())
    with pytest.raises(JudgeError, match="wrapped in DistributedDataParallel; pass the plain module"):
        verify_window(wrapped, summed, data())
    keep("unused", verify_window(Unused(), summed, data()))
    with pytest.raises(JudgeError, match=r"the window failed on .*TypeError: 'DistributedDataParallel'"):
        verify_window(mlp(), needs_the_plain_model, data())
    return results


def different_data(rank: int, n: int) -> None:
    del n
    batch = data()
    batch["x"] = batch["x"] + rank
    verify_window(mlp(), summed, batch)


def test_on_two_ranks_the_window_reduces_and_all_agree() -> None:
    from ranks import run_ranks

    one, other = run_ranks(on_a_rank, 2)
    assert one == other
    assert one["right"] == (True, None, None, None, 2)
    assert one["mean"] == (False, "mean_for_sum", pytest.approx(8.0), None, 2)
    assert one["dropout"] == (False, "dropout", None, True, 2)
    assert one["two terms"] == (True, None, None, None, 2)
    assert one["unused"] == (True, None, None, None, 2)


def test_ranks_with_different_batches_are_no_verdict() -> None:
    from ranks import run_ranks

    with pytest.raises(JudgeError, match="the ranks were given different models or batches"):
        run_ranks(different_data, 2)
