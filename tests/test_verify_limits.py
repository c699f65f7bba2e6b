"""What verify says of a window at fault, of problems beyond judging, and on several ranks."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import distribute_module

from verify_problems import (
    Batch,
    Inside,
    LossFn,
    Recurrent,
    averaged,
    collate,
    contrastive,
    count_of_classes,
    count_of_the_whole_batch,
    data,
    losses,
    mlp,
    norm,
    penalised,
    summed,
    summed_over_one,
    tokens,
    two_terms,
)
from wholebatch import window
from wholebatch.errors import JudgeError, SplitError, UsageError
from wholebatch.losses import token_loss
from wholebatch.ranks.pipeline import PipelinedModel
from wholebatch.shares import Shares
from wholebatch.verify import Verification, trial, verify_window
from wholebatch.verify.plain import sampled_splits

# The window at fault ---------------------------------------------------------------------------------


def test_a_window_with_a_wrong_scale_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    of = Shares.of

    def off_by_little(total: Any, **more: Any) -> Shares:
        shares = of(total, **more)
        shares.of_term = {term: share * (1 + 1e-9) for term, share in shares.of_term.items()}
        return shares

    monkeypatch.setattr(Shares, "of", off_by_little)
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


def test_a_window_that_never_applies_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    from wholebatch.finish import Finish, Reading

    read = Finish.read

    def not_finite(self: Any, *given: Any) -> Reading:
        found = read(self, *given)
        return Reading(norm=float("nan"), values=found.values)

    monkeypatch.setattr(Finish, "read", not_finite)
    with pytest.raises(JudgeError, match=r"did not apply the update \(skipped_nonfinite\)"):
        verify_window(mlp(), summed, data())


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
    assert "is 1/8 = 1/A times" in advice(summed_over_one)
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
    with pytest.raises(
        JudgeError, match=r"a batch of 1 sample can't be split over 1 rank into 2 micro-batches"
    ):
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
    for together in ([[4], [4]], [4, 4], [[1, 3], [4]]):
        with pytest.raises(SplitError, match=r"One split into them all is written \[\[.*4\]\], .* \S+\+4$"):
            verify_window(mlp(), summed, data(), splits=together)  # type: ignore[arg-type]
    with pytest.raises(SplitError, match=r"that add up to 8$"):
        verify_window(mlp(), summed, data(), splits=[[4], [5]])
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
    with pytest.raises(JudgeError, match=r"a batch of 3 samples can't be split over 4 ranks into 4 micro"):
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

    class Named(nn.Module):
        """Has an attribute, a method and a constant that a loss may read."""

        buffer_hook = None  # a name that DDP looks for on itself

        def __init__(self) -> None:
            super().__init__()
            self.body, self.temperature = mlp(), 2.0

        def centre(self, out: Tensor) -> Tensor:
            return out - self.body[0].bias.mean()

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x) / self.temperature

    def reads_attributes(model: Any, batch: Batch) -> tuple[Tensor, int]:
        losses = model.centre(model(batch["x"])).square().sum(1) * model.temperature
        return losses.sum() + len(losses) * model.body[0].weight.square().sum(), len(losses)

    def reads_the_module(model: Any, batch: Batch) -> tuple[Tensor, int]:
        plain = getattr(model, "module", model)
        return plain.centre(model(batch["x"])).square().sum(), len(batch["y"])

    def reads_items(model: Any, batch: Batch) -> tuple[Tensor, int]:
        assert len(model) == len(list(model)) == 3
        return summed(model, batch)[0] + len(batch["y"]) * model[0].weight.square().sum(), len(batch["y"])

    def passes_ddp_by(model: Any, batch: Batch) -> tuple[Tensor, int]:
        return model.body(batch["x"]).square().sum(), len(batch["y"])

    def reads_nothing_there(model: Any, batch: Batch) -> tuple[Tensor, int]:
        return model(batch["x"]).sum() + model.encoder.weight.sum(), len(batch["y"])

    def keep(name: str, found: Verification) -> None:
        results[name] = (found.equal, found.cause, found.factor, found.equal_when_replayed, found.ranks)

    keep("right", verify_window(mlp(), summed, data(), ranks=n, clip_grad_norm=0.1))
    keep("mean", verify_window(mlp(), averaged, data()))
    keep("dropout", verify_window(mlp(nn.Dropout(0.5)), summed, data()))
    keep("two terms", verify_window(Recurrent(), two_terms, tokens()))
    with pytest.raises(SplitError, match=r"\[8\] has 1 micro-batch for 2 ranks; give each rank one"):
        verify_window(mlp(), summed, data(), splits=[[8]])
    mesh = init_device_mesh("cpu", (n,))
    stage = PipelineStage(mlp(), dist.get_rank(), n, torch.device("cpu"))
    for spread, engine in (
        (nn.parallel.DistributedDataParallel(mlp()), "DistributedDataParallel"),
        (fully_shard(mlp(), mesh=mesh), "FSDPModule"),
        (distribute_module(mlp(), mesh), "DTensors"),
        (
            PipelinedModel([stage], schedule=ScheduleGPipe, inputs=lambda batch: batch["x"]),
            "PipelinedModel",
        ),
    ):
        with pytest.raises(JudgeError, match=f"model is under .*{engine}, and .*; pass the plain module"):
            verify_window(spread, summed, data())
    keep("unused", verify_window(Unused(), summed, data()))
    keep("attributes", verify_window(Named(), reads_attributes, data()))
    keep("module", verify_window(Named(), reads_the_module, data()))
    keep("items", verify_window(mlp(), reads_items, data()))
    with pytest.raises(
        JudgeError, match=r"AttributeError: 'Named' object has no attribute 'encoder', at .*"
    ):
        verify_window(Named(), reads_nothing_there, data())
    with pytest.raises(JudgeError, match="the forward of the last micro-batch did not run through the DDP"):
        verify_window(Named(), passes_ddp_by, data())
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
    for name in ("attributes", "module", "items"):
        assert one[name] == (True, None, None, None, 2), name


def test_ranks_with_different_batches_are_no_verdict() -> None:
    from ranks import run_ranks

    with pytest.raises(JudgeError, match="the ranks were given different models or batches"):
        run_ranks(different_data, 2)
