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

from verify_problems import (
    Batch,
    Inside,
    LossFn,
    Recurrent,
    against_the_batch_mean,
    averaged,
    averaged_over_one,
    collate,
    contrastive,
    contrastive_mean,
    count_of_classes,
    count_of_the_whole_batch,
    data,
    losses,
    mlp,
    norm,
    ragged,
    ragged_losses,
    summed,
    summed_over_one,
    tokens,
    two_terms,
)
from wholebatch.errors import JudgeError
from wholebatch.losses import next_token_loss, regression_loss, token_loss
from wholebatch.objective import sample_loss, weighted_terms
from wholebatch.verify import verify_window


class StochasticDepth(nn.Module):
    """Skips a layer by Python's and numpy's random numbers, whatever the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        if random.random() < 0.5:
            x = self.first(x) * float(np.random.rand())
        return self.second(x)


class Adapted(nn.Module):
    """Dropout before a layer of zeros, as a new adapter has it: only the gradient sees the noise."""

    def __init__(self, *, chance: float = 0.5, always: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.base, self.down, self.up = nn.Linear(5, 3), nn.Linear(5, 2), nn.Linear(2, 3)
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)
        self.chance, self.always = chance, always

    def forward(self, x: Tensor) -> Tensor:
        dropped = F.dropout(x, self.chance, training=self.training or self.always)
        return self.base(x) + self.up(self.down(dropped))


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


CASES = {
    "dropout": Case(
        lambda: mlp(nn.Dropout(0.5)), summed, "dropout", lambda: mlp(nn.Dropout(0.5)).eval(), replayed=True
    ),
    "dropout before a layer of zeros": Case(
        Adapted, summed, "dropout", lambda: Adapted().eval(), replayed=True
    ),
    "dropout that eval mode leaves on, before a layer of zeros": Case(
        lambda: Adapted(always=True), summed, "dropout", lambda: Adapted(chance=0.0), replayed=True
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


def test_next_tokens_with_ragged_labels_counted_ahead_and_not() -> None:
    objective = next_token_loss()

    def loss_fn(model: nn.Module, batch: Batch) -> Any:
        return objective(model(batch["input_ids"]), batch)

    for chosen in (objective, None):
        found = verify_window(Recurrent(), loss_fn, tokens(), objective=chosen)
        assert found.equal, found
        assert found.num_items == {"loss": 1 + 8 + 4 + 0 + 6 + 2}


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
    default = verify_window(model, squares, batch, splits=[sizes])
    assert (default.equal, default.cause) == (True, None), "the window adds up in float32"
    narrow = torch.bfloat16 if dtype == torch.bfloat16 else None
    found = verify_window(model, squares, batch, splits=[sizes], accumulate_in=narrow)
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
