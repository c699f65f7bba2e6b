"""Gradients of bfloat16 parameters added up in float32: the error, what an optimizer gets, the ways out."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from wholebatch.accumulation import HELD_BACK_FSDP2, WideGradients
from wholebatch.errors import UnsupportedError, WindowUsageError
from wholebatch.objective import sample_loss
from wholebatch.window import UpdateWindow

Batch = tuple[Tensor, Tensor]


def regression(micro_batches: int) -> list[Batch]:
    """Micro-batches of two samples each, with residuals of one sign, so that their sum grows."""
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(2 * micro_batches, 16, generator=generator)
    return list(zip(features.split(2), (features.sum(1) / 4 + 1).split(2), strict=True))


def network(dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 1)).to(torch.bfloat16).to(dtype)


def squares(model: nn.Module, batch: Batch) -> Tensor:
    outputs = model(batch[0].to(next(model.parameters()).dtype))
    wide = outputs.float() if outputs.dtype == torch.bfloat16 else outputs
    return (wide.squeeze(1) - batch[1]).square().sum()


def whole(batches: Sequence[Batch]) -> Batch:
    return torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])


def gradients(model: nn.Module, batches: Sequence[Batch]) -> list[Tensor]:
    """The gradient of the mean over ``batches`` as an optimizer of ``model`` would get it."""
    for batch in batches:
        (squares(model, batch) / sum(len(y) for _, y in batches)).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def relative_error(found: Sequence[Tensor], truth: Sequence[Tensor]) -> float:
    off = sum(float((one.double() - true).square().sum()) for one, true in zip(found, truth, strict=True))
    return math.sqrt(off / sum(float(true.square().sum()) for true in truth))


@pytest.mark.parametrize("micro_batches", [8, 64, 512])
def test_a_wide_sum_is_as_near_the_truth_as_the_whole_batch_and_a_narrow_one_is_not(
    micro_batches: int,
) -> None:
    batches = regression(micro_batches)
    truth = gradients(network(torch.float64), [tuple(part.double() for part in whole(batches))])  # type: ignore[list-item]
    of_whole = relative_error(gradients(network(), [whole(batches)]), truth)
    narrow = relative_error(gradients(network(), batches), truth)

    model, wide = network(), WideGradients()
    parameters = list(model.parameters())
    wide.begin(parameters)
    gradients(model, batches)
    assert wide.deliver(parameters, 1.0) == 1.0
    found = [parameter.grad for parameter in parameters if parameter.grad is not None]
    assert {gradient.dtype for gradient in found} == {torch.bfloat16}
    assert relative_error(found, truth) <= 2.0 * of_whole
    assert (narrow > 2.0 * of_whole) is (micro_batches > 8)


def test_the_factor_is_applied_before_the_one_rounding() -> None:
    parameter = nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16))
    values, factor = torch.linspace(0.1, 1.0, 1000), 0.3
    wide = WideGradients(torch.float32)
    wide.begin([parameter])
    parameter.grad = values.clone()
    wide.deliver([parameter], factor)
    assert parameter.grad is not None
    assert torch.equal(parameter.grad, (values * factor).bfloat16())
    assert not torch.equal(parameter.grad, values.bfloat16() * factor)


def test_only_what_is_narrower_and_trained_is_kept_wide_and_all_is_put_back() -> None:
    kinds = [torch.float16, torch.float32, *[torch.bfloat16] * 4]
    parameters = [nn.Parameter(torch.zeros(2, 2, dtype=dtype)) for dtype in kinds]
    half, own, anything, already, left, frozen = parameters
    frozen.requires_grad_(False)
    anything.grad_dtype, already.grad_dtype = None, torch.float64
    left.grad = torch.ones_like(left)
    found = [parameter.grad_dtype for parameter in parameters]
    wide = WideGradients(torch.float32)
    wide.begin(parameters)
    assert wide.active
    assert [p.grad_dtype for p in (half, own, anything)] == [torch.float32] * 3
    assert [p.grad_dtype for p in (already, left, frozen)] == [
        torch.float64,
        torch.bfloat16,
        torch.bfloat16,
    ]
    assert wide.largest_delivered == torch.finfo(torch.float16).max
    half.grad = torch.ones(2, 2)  # a sum that is not delivered
    own.grad = torch.ones(2, 2)
    wide.forget()
    assert [parameter.grad_dtype for parameter in parameters] == found
    assert half.grad is None
    assert own.grad is not None
    assert not wide.active
    assert wide.largest_delivered == math.inf
    assert wide.deliver(parameters, 0.5) == 0.5


def test_a_tied_weight_is_added_up_once_and_one_without_a_gradient_gets_none() -> None:
    embedding = nn.Embedding(5, 3, dtype=torch.bfloat16)
    unused = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    wide = WideGradients()
    wide.begin([embedding.weight, unused])
    for _ in range(3):
        (embedding(torch.tensor([1, 2])) @ embedding.weight.T).sum().backward()
    twin = copy.deepcopy(embedding).double()
    for _ in range(3):
        (twin(torch.tensor([1, 2])) @ twin.weight.T).sum().backward()
    wide.deliver([embedding.weight, unused], 1.0)
    assert embedding.weight.grad is not None
    torch.testing.assert_close(embedding.weight.grad.double(), twin.weight.grad, rtol=0.01, atol=0.01)
    assert unused.grad is None
    wide.forget()
    assert unused.grad_dtype == torch.bfloat16


def test_the_parts_of_a_sparse_gradient_are_added_up_wide_too() -> None:
    embedding = nn.Embedding(4, 2, sparse=True, dtype=torch.bfloat16)
    wide = WideGradients(torch.float32)
    wide.begin([embedding.weight])
    shares = torch.tensor([[1.0, 1.0], *[[2.0**-9] * 2] * 256], dtype=torch.bfloat16)
    embedding(torch.ones(257, dtype=torch.long)).backward(shares)
    wide.deliver([embedding.weight], 1.0)
    gradient = embedding.weight.grad
    assert gradient is not None
    assert gradient.is_sparse
    assert gradient.dtype == torch.bfloat16
    assert gradient.to_dense()[1].tolist() == [1.5, 1.5]  # 1 + 2^-9 is 1 in bfloat16


@pytest.mark.parametrize("fused", [False, True])
def test_the_state_of_an_optimizer_keeps_its_dtype(fused: bool) -> None:
    """Momentum of a float32 gradient would be float32, twice as large, and cut when it is loaded."""
    parameter = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizers = [
        torch.optim.AdamW([parameter], fused=fused),
        torch.optim.SGD([parameter], lr=0.1, momentum=0.9),
    ]
    for optimizer in optimizers:
        wide = WideGradients(torch.float32)
        wide.begin([parameter])
        parameter.sum().backward()
        wide.deliver([parameter], 1.0)
        optimizer.step()
        parameter.grad = None
        wide.forget()
        state = optimizer.state[parameter]
        assert {value.dtype for name, value in state.items() if name != "step"} == {torch.bfloat16}


def test_when_it_is_wanted() -> None:
    def wanted(asked: torch.dtype | None, own: torch.dtype, most: int) -> torch.dtype | None:
        return WideGradients(asked).wanted_for(
            [nn.Parameter(torch.zeros(1, dtype=own))], micro_batches=most
        )

    assert wanted(None, torch.bfloat16, 4) is None
    assert wanted(None, torch.bfloat16, 5) == torch.bfloat16
    assert wanted(None, torch.float16, 5) == torch.float16
    assert wanted(None, torch.float32, 512) is None
    assert wanted(torch.float32, torch.bfloat16, 1) == torch.bfloat16
    assert wanted(torch.float64, torch.float32, 1) == torch.float32
    for off in (torch.bfloat16, torch.float16):
        for own in (torch.bfloat16, torch.float16, torch.float32):
            assert wanted(off, own, 512) is None


def test_the_bytes_held_are_of_what_learns_in_the_dtype_that_it_is_added_up_in() -> None:
    parameters = [nn.Parameter(torch.zeros(3, dtype=dtype)) for dtype in (torch.bfloat16, torch.float64)]
    parameters.append(nn.Parameter(torch.zeros(100), requires_grad=False))
    assert WideGradients().bytes_held(parameters, 4) == 3 * 2 + 3 * 8
    assert WideGradients().bytes_held(parameters, 5) == 3 * 4 + 3 * 8


def test_a_dtype_to_add_up_in_that_is_none() -> None:
    for odd in (torch.int32, torch.complex64, "float32"):
        with pytest.raises(WindowUsageError, match=re.escape(f"accumulate_in={odd!r} is nothing to add")):
            WideGradients(odd)  # type: ignore[arg-type]


def test_an_engine_that_adds_up_in_too_few_digits_is_told_what_to_build() -> None:
    WideGradients().refuse_narrow([torch.bfloat16], micro_batches=4, why=HELD_BACK_FSDP2)
    with pytest.raises(UnsupportedError) as error:
        WideGradients().refuse_narrow([torch.bfloat16], micro_batches=5, why=HELD_BACK_FSDP2)
    assert "would be added up in bfloat16" in str(error.value)
    assert "reduce_dtype=torch.float32" in str(error.value)
    assert str(error.value).endswith("give the window accumulate_in=torch.bfloat16")


def test_stale_gradients_are_included_in_the_wide_sum() -> None:
    model = network()
    unused = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    model.register_parameter("unused", unused)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    given: list[Tensor] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: given.extend(p.grad for p in model.parameters()))
    objective = sample_loss(lambda loss, _: loss)
    window = UpdateWindow(model, optimizer, objective, on_stale_gradients="include")
    batches = regression(6)
    record = window.run(batches, lambda model, batch: (squares(model, batch), len(batch[1])))
    assert record.outcome == "applied"
    for one, alone in zip(given, [torch.zeros(2), *gradients(network(), batches)], strict=True):
        assert one.dtype == torch.bfloat16
        torch.testing.assert_close(one.float(), alone.float() + 1.0, rtol=2**-7, atol=2**-6)


@pytest.mark.parametrize("provisional", [2.0, 1.0])
def test_a_sum_beyond_float16_is_skipped_and_not_rounded_to_infinity(provisional: float) -> None:
    """Finite in float32, also where only the correction of a provisional denominator makes it too large."""
    model = nn.Linear(1, 1, bias=False, dtype=torch.float16)
    before = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    window = UpdateWindow(model, optimizer, accumulate_in=torch.float32)
    window.load_state_dict(window.state_dict() | {"provisional_items": provisional})
    batches = [torch.full((1, 1), 40000.0, dtype=torch.float16)] * 2
    record = window.run(batches, lambda model, batch: (model(batch).float().sum(), 0.5))
    assert (record.outcome, record.gradient_norm) == ("skipped_nonfinite", pytest.approx(80000.0))
    assert torch.equal(model.weight, before)
