"""Losses of several terms, lists of losses, models' own losses, and what can't be read."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from test_audit_terms import SAMPLES, TARGETS, TOKENS, Problem, alike, level_of, numbers, read, unread
from wholebatch.audit.watch import unit_weights
from wholebatch.audit.watch.terms import TermReader

PIECES = ((0, 1), (1, 2), (3, 3))


def pieces_of(p: Problem, reduction: str = "mean") -> list[Tensor]:
    """Cross entropies of one, one (of two) and three targets."""
    return [
        F.cross_entropy(p.inputs[i : i + n] @ p.weight.T, TARGETS[i : i + n], reduction=reduction)
        for i, n in PIECES
    ]


def written_into(losses: list[Tensor]) -> Tensor:
    out = torch.zeros(len(losses))
    for index, loss in enumerate(losses):
        out[index] = loss
    return out


@pytest.mark.parametrize(
    "loss",
    [
        lambda p: sum(pieces_of(p)) / 3,
        lambda p: torch.stack(pieces_of(p)).mean(),
        lambda p: torch.stack(pieces_of(p)).sum() / 3,
        lambda p: torch.cat([one.reshape(1) for one in pieces_of(p)]).mean(),
        lambda p: written_into(pieces_of(p)).mean(),
    ],
    ids=["added", "stacked", "stacked_sum", "concatenated", "written"],
)
def test_a_list_of_losses_is_one_term(loss) -> None:
    (term,) = read(loss(Problem()))
    if any(level.unit == "group" for level in term.levels):
        alike(level_of(term, "group"), 3, 1 / 3)
    assert numbers(term.levels[-1]) == pytest.approx((TOKENS, 1.0, 1 / 9, 1 / 3))


def test_a_list_of_sums_is_right_by_item() -> None:
    (term,) = read(sum(pieces_of(Problem(), "sum")) / TOKENS)
    alike(term.levels[-1], TOKENS, 1 / TOKENS)


def test_single_losses_that_were_stacked_are_items() -> None:
    p = Problem()
    (term,) = read(torch.stack([-F.logsigmoid(p.outputs()[i].sum()) for i in range(4)]).mean())
    alike(term.levels[-1], 4, 1 / 4)


def test_two_heads_are_two_terms() -> None:
    p = Problem()
    start, end = read((F.cross_entropy(p.outputs(), TARGETS) + F.cross_entropy(p.outputs(2), TARGETS)) / 2)
    assert (start.key, end.key) == ("NllLoss/0", "NllLoss/1")
    alike(start.levels[-1], TOKENS, 0.5 / TOKENS)
    alike(end.levels[-1], TOKENS, 0.5 / TOKENS)


def test_terms_of_several_kinds_keep_their_keys() -> None:
    p = Problem()
    terms = read(
        F.cross_entropy(p.outputs(), TARGETS) + 0.1 * p.squares().mean() - 0.5 * p.outputs().mean()
    )
    assert [term.key for term in terms] == ["NllLoss/0", "Mean/0", "Mean/1"]
    assert [term.levels[-1].total for term in terms] == pytest.approx([1, 0.1, 0.5])


def test_three_heads_of_their_own_are_no_list() -> None:
    p = Problem()
    heads = [nn.Parameter(torch.randn(5, 5)) for _ in range(3)]
    terms = read(sum(F.cross_entropy(p.outputs() @ head, TARGETS) for head in heads))
    assert [term.key for term in terms] == ["NllLoss/0", "NllLoss/1", "NllLoss/2"]


def test_regularisers_are_no_terms() -> None:
    p = Problem()
    penalty = 0.1 * p.weight.pow(2).sum() + 0.01 * p.weight.norm() + p.weight.abs().mean()
    (term,) = read(F.mse_loss(p.outputs(), p.values) + penalty)
    assert term.key == "MseLoss/0"


def test_a_learned_weight_of_a_loss_is_a_coefficient() -> None:
    p = Problem()
    log_scale = nn.Parameter(torch.tensor(0.7))
    (term,) = read((-log_scale).exp() * F.mse_loss(p.outputs(), p.values) + log_scale)
    alike(term.levels[-1], 30, 0.4965853 / 30)


def test_scores_of_a_batch_against_itself_are_square() -> None:
    p = Problem()
    targets = torch.arange(SAMPLES)
    scores = p.outputs() @ p.outputs(2).T
    assert read(F.cross_entropy(scores / 0.1, targets))[0].square
    scores = p.outputs() @ p.outputs(2).T
    both = F.cross_entropy(scores, targets) + F.cross_entropy(scores.T, targets)
    assert [term.square for term in read(both / 2)] == [True, True]
    scores = p.outputs() @ p.outputs(2).T
    assert read((scores.logsumexp(1) - scores.diagonal()).mean())[0].square
    head = nn.Parameter(torch.randn(SAMPLES, 5))
    assert not read(F.cross_entropy(p.outputs() @ head.T, targets))[0].square
    attended = (p.outputs() @ p.outputs().T).softmax(-1) @ p.values @ torch.randn(5, SAMPLES)
    assert not read(F.cross_entropy(attended @ nn.Parameter(torch.randn(6, 6)), targets))[0].square


def test_products_with_a_cached_gradient_are_surrogates() -> None:
    p = Problem()
    assert read((p.outputs() * p.values).sum())[0].surrogate
    assert read(torch.dot(p.outputs().flatten(), p.values.flatten()))[0].surrogate
    assert not read((p.outputs().log_softmax(-1) * p.values).mean())[0].surrogate
    assert unread(p.outputs(), p.values) == "backward was given a gradient"


def test_a_gradient_given_for_one_number_counts() -> None:
    p = Problem()
    (term,) = read(F.mse_loss(p.outputs(), p.values), torch.tensor(0.25))
    alike(term.levels[-1], 30, 0.25 / 30)


class Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, outputs):
        ctx.shape = outputs.shape
        return outputs.sum()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.expand(ctx.shape)


class HandedOn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, loss):  # noqa: ARG004
        return loss.clone()

    @staticmethod
    def backward(ctx, gradient):  # noqa: ARG004
        return gradient


def test_what_reduces_out_of_sight_is_named() -> None:
    p = Problem()
    assert "FusedBackward" in unread(Fused.apply(p.outputs()))
    assert "SqrtBackward0" in unread(F.mse_loss(p.outputs(), p.values).sqrt())
    assert "LinalgVectorNorm" in unread(torch.linalg.vector_norm(p.outputs() - p.values))
    reader = TermReader(loss := Fused.apply(p.outputs()) + F.mse_loss(p.outputs(), p.values), None)
    loss.backward()
    reader.finish()
    assert [term.key for term in reader.terms()] == ["MseLoss/0"]
    assert reader.unread is not None
    assert "FusedBackward" in reader.unread
    alike(read(HandedOn.apply(F.mse_loss(p.outputs(), p.values)))[0].levels[-1], 30, 1 / 30)


def test_a_checkpointed_loss_is_read_without_running_it_again() -> None:
    p = Problem()
    runs = []

    def loss(outputs: Tensor) -> Tensor:
        runs.append(1)
        return F.cross_entropy(outputs, TARGETS)

    (term,) = read(checkpoint(loss, p.outputs(), use_reentrant=False))
    alike(term.levels[-1], TOKENS, 1 / TOKENS)
    assert len(runs) == 2
    assert "CheckpointFunction" in unread(checkpoint(loss, p.outputs(), use_reentrant=True))


def test_saved_tensors_on_the_host_and_a_second_backward() -> None:
    p = Problem()
    with torch.autograd.graph.save_on_cpu():
        loss = F.cross_entropy(p.outputs(), TARGETS)
    found = []
    for retain in (True, False):
        reader = TermReader(loss, None)
        loss.backward(retain_graph=retain)
        reader.finish()
        found.append(reader.terms())
    assert found[0] == found[1]
    alike(found[0][0].levels[-1], TOKENS, 1 / TOKENS)
    reader = TermReader(loss, None)  # its graph is freed by now
    reader.finish()
    assert reader.terms() == ()
    assert reader.unread is not None


def test_an_empty_mean_has_no_items() -> None:
    (term,) = read(F.cross_entropy(Problem().outputs(), torch.full((SAMPLES,), -100)))
    assert numbers(term.levels[-1]) == (0, 0, 0, 0)


def test_a_gradient_penalty_is_another_term() -> None:
    p = Problem()
    inputs = p.inputs.clone().requires_grad_()
    outputs = (inputs @ p.weight.T).tanh()
    (slope,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
    critic, penalty = read(outputs.mean() + 10 * ((slope.norm(dim=1) - 1) ** 2).mean())
    alike(critic.levels[-1], 30, 1 / 30)
    alike(penalty.levels[-1], SAMPLES, 10 / SAMPLES)


def test_a_tensor_with_other_uses_is_read_for_each() -> None:
    p = Problem()
    outputs = p.outputs()
    main, mean, other = read(F.cross_entropy(outputs, TARGETS) + 0.5 * outputs.mean() + outputs.sum() / 3)
    alike(main.levels[-1], TOKENS, 1 / TOKENS)
    alike(mean.levels[-1], 30, 0.5 / 30)
    alike(other.levels[-1], 30, 1 / 3)


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_gradients_are_untouched_and_nothing_is_held() -> None:
    p = Problem()
    F.cross_entropy(p.outputs(), TARGETS, label_smoothing=0.1).backward()
    bare, p.weight.grad = p.weight.grad, None
    outputs = p.outputs()
    loss = F.cross_entropy(outputs, TARGETS, label_smoothing=0.1)
    reader = TermReader(loss, None)
    loss.backward(create_graph=True)
    reader.finish()
    assert p.weight.grad is not None
    assert bare is not None
    assert torch.equal(p.weight.grad, bare)
    alike(reader.terms()[0].levels[-1], TOKENS, 1 / TOKENS)
    p.weight.grad = None
    held = weakref.ref(outputs)
    del outputs, loss
    gc.collect()
    assert held() is None


def test_one_backward_of_several_losses() -> None:
    p = Problem()
    outputs = p.outputs()
    losses = F.cross_entropy(outputs, TARGETS), F.mse_loss(outputs, p.values)
    reader = TermReader(losses[0], torch.tensor(0.5), losses[1])
    torch.autograd.backward(losses, [torch.tensor(0.5), torch.tensor(3.0)])
    reader.finish()
    nll, squares = reader.terms()
    alike(nll.levels[-1], TOKENS, 0.5 / TOKENS)
    alike(squares.levels[-1], p.values.numel(), 3 / p.values.numel())
    assert reader.unread is None


def test_a_failing_backward_leaves_no_hooks() -> None:
    p = Problem()
    outputs = p.outputs()
    outputs.register_hook(lambda _: 1 / 0)
    loss = F.cross_entropy(outputs, TARGETS)
    reader = TermReader(loss, None)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    reader.finish()
    assert reader._handles == []


def test_strange_gradients_do_not_reach_the_loop() -> None:
    p = Problem()
    read(torch.vmap(F.mse_loss)(p.outputs(), p.values).mean())
    read((p.outputs() * (1 + 1j)).abs().mean())
    embedded = nn.Embedding(4, 3, sparse=True)
    read(embedded(torch.tensor([0, 1, 1])).mean())
    reader = TermReader((p.outputs() * (1 + 1j)).mean().real, None)
    assert reader.unread is None or isinstance(reader.unread, str)
    reader.finish()
    for odd in (p.weight.detach().sum(), p.weight.sum()):
        reader = TermReader(odd, None)
        reader.finish()
        assert reader.terms() == ()
        assert reader.unread is not None


def test_a_measurement_that_fails_is_a_reason_not_an_exception(monkeypatch) -> None:
    def broken(*_, **__):
        raise RuntimeError("no such device")

    monkeypatch.setattr(unit_weights, "wide", broken)
    p = Problem()
    loss = p.squares().mean()
    reader = TermReader(loss, None)
    loss.backward()
    reader.finish()
    assert reader.terms() == ()
    assert reader.unread == "no such device"


def test_large_gradients_are_read_in_pieces() -> None:
    weight = nn.Parameter(torch.ones(()))
    mask = (torch.arange(3 * (1 << 20)) % 3 == 0).float()
    (term,) = read(((weight * torch.ones_like(mask)).exp() * mask).sum() / mask.sum())
    alike(term.levels[-1], 1 << 20, 1 / (1 << 20))


def test_autocast_losses_are_read_in_float32() -> None:
    p = Problem()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = p.inputs @ p.weight.T
        loss = F.cross_entropy(outputs, TARGETS) + F.mse_loss(outputs, p.values)
    for term in read(loss):
        assert term.dtype == "float32"
        assert term.levels[-1].total == pytest.approx(1, rel=1e-5)
    low = p.outputs().bfloat16()
    assert read((low**2).mean())[0].dtype == "bfloat16"


@pytest.mark.slow
def test_a_compiled_model_with_an_eager_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # torch shows progress by it: no thread left
    model = torch.compile(nn.Linear(4, 5), backend="aot_eager")
    p = Problem()
    (term,) = read(F.cross_entropy(model(p.inputs), TARGETS))
    alike(term.levels[-1], TOKENS, 1 / TOKENS)
    whole = torch.compile(lambda x, w: F.cross_entropy(x @ w.T, TARGETS), backend="aot_eager")
    assert "Compiled" in unread(whole(p.inputs, p.weight))
