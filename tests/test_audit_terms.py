"""What the items of a loss weigh, read from the graph of each loss function, against a formula by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wholebatch.audit.trace import Level, Term
from wholebatch.audit.watch.terms import TermReader

SAMPLES, CLASSES = 6, 5
TARGETS = torch.tensor([0, 1, -100, 2, 3, 4])
CLASS_WEIGHTS = torch.tensor([1.0, 0.5, 2.0, 3.0, 0.25])
MASK = torch.tensor(
    [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 0, 0.0]]
)
MASKED = 18


class Problem:
    """Outputs of a small linear model, with numbers to compare them with."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.weight = nn.Parameter(torch.randn(CLASSES, 4, generator=generator))
        self.inputs = torch.randn(SAMPLES, 4, generator=generator)
        self.values = torch.randn(SAMPLES, CLASSES, generator=generator)
        self.shares = torch.softmax(torch.randn(SAMPLES, CLASSES, generator=generator), dim=1)

    def outputs(self, scale: float = 1.0) -> Tensor:
        """[6, 5]."""
        return scale * (self.inputs @ self.weight.T)

    def squares(self) -> Tensor:
        """A hand-written loss for each element."""
        return (self.outputs() - self.values) ** 2

    def losses(self) -> Tensor:
        """Unreduced cross entropy, zero where the target is ignored."""
        return F.cross_entropy(self.outputs(), TARGETS, reduction="none")

    def log_likelihoods(self) -> Tensor:
        """[6], each of a class of its own."""
        return self.outputs().log_softmax(-1).gather(1, TARGETS.clamp(0)[:, None]).squeeze(1)


def read(loss: Tensor, gradient: Tensor | None = None) -> tuple[Term, ...]:
    reader = TermReader(loss, gradient)
    loss.backward(gradient)
    reader.finish()
    terms = reader.terms()
    assert reader.unread is None, reader.unread
    return terms


def unread(loss: Tensor, gradient: Tensor | None = None) -> str:
    reader = TermReader(loss, gradient)
    loss.backward(gradient)
    reader.finish()
    assert reader.terms() == ()
    assert reader.unread is not None
    return reader.unread


def numbers(level: Level) -> tuple[float, float, float, float]:
    return level.num_units, level.total, level.lowest, level.highest


def level_of(term: Term, unit: str) -> Level:
    (found,) = [level for level in term.levels if level.unit == unit]
    return found


def alike(level: Level, num_units: float, weight: float) -> None:
    """All units of a level weigh the same."""
    assert numbers(level) == pytest.approx((num_units, num_units * weight, weight, weight), rel=1e-5)


TOKENS = 5  # targets that are not ignored
ELEMENTS = SAMPLES * CLASSES

# name: loss, items, weight of each
ALIKE: dict[str, tuple[Callable[[Problem], Tensor], float, float]] = {
    "cross_entropy": (lambda p: F.cross_entropy(p.outputs(), TARGETS), TOKENS, 1 / TOKENS),
    "cross_entropy_sum": (
        lambda p: F.cross_entropy(p.outputs(), TARGETS, reduction="sum") / 7,
        TOKENS,
        1 / 7,
    ),
    "cross_entropy_none_mean": (lambda p: p.losses().mean(), TOKENS, 1 / SAMPLES),
    "cross_entropy_none_over_count": (lambda p: p.losses().sum() / TOKENS, TOKENS, 1 / TOKENS),
    "cross_entropy_images": (
        lambda p: F.cross_entropy(
            p.outputs()[None, :, :, None].expand(2, 6, 5, 3), torch.ones(2, 5, 3).long()
        ),
        30,
        1 / 30,
    ),
    "label_smoothing": (
        lambda p: F.cross_entropy(p.outputs(), TARGETS, label_smoothing=0.1),
        TOKENS,
        1 / TOKENS,
    ),
    "label_smoothing_sum": (
        lambda p: F.cross_entropy(p.outputs(), TARGETS, label_smoothing=0.3, reduction="sum") / 9,
        TOKENS,
        1 / 9,
    ),
    "probabilities": (lambda p: F.cross_entropy(p.outputs(), p.shares), SAMPLES, 1 / SAMPLES),
    "one_hot": (
        lambda p: F.cross_entropy(p.outputs(), F.one_hot(TARGETS.clamp(0), CLASSES).float()),
        SAMPLES,
        1 / SAMPLES,
    ),
    "kl_batchmean": (
        lambda p: F.kl_div(p.outputs().log_softmax(1), p.shares, reduction="batchmean"),
        SAMPLES,
        1 / SAMPLES,
    ),
    "kl_none_mean": (
        lambda p: F.kl_div(p.outputs().log_softmax(1), p.shares, reduction="none").mean(),
        ELEMENTS,
        1 / 30,
    ),
    "kl_log_target": (
        lambda p: F.kl_div(
            p.outputs().log_softmax(1), p.shares.log(), log_target=True, reduction="batchmean"
        ),
        SAMPLES,
        1 / SAMPLES,
    ),
    "mse": (lambda p: F.mse_loss(p.outputs(), p.values), ELEMENTS, 1 / 30),
    "mse_sum": (lambda p: F.mse_loss(p.outputs(), p.values, reduction="sum") / 6, ELEMENTS, 1 / 6),
    "mse_none": (lambda p: F.mse_loss(p.outputs(), p.values, reduction="none").mean(), ELEMENTS, 1 / 30),
    "smooth_l1": (lambda p: F.smooth_l1_loss(p.outputs(), p.values), ELEMENTS, 1 / 30),
    "huber": (lambda p: F.huber_loss(p.outputs(), p.values), ELEMENTS, 1 / 30),
    "l1": (lambda p: F.l1_loss(p.outputs(), p.values), ELEMENTS, 1 / 30),
    "bce": (lambda p: F.binary_cross_entropy(p.outputs().sigmoid(), MASK), ELEMENTS, 1 / 30),
    "bce_logits": (lambda p: F.binary_cross_entropy_with_logits(p.outputs(), MASK), ELEMENTS, 1 / 30),
    "soft_margin": (lambda p: F.soft_margin_loss(p.outputs(), 2 * MASK - 1), ELEMENTS, 1 / 30),
    "poisson": (lambda p: F.poisson_nll_loss(p.outputs(), p.shares), ELEMENTS, 1 / 30),
    "gaussian": (lambda p: F.gaussian_nll_loss(p.outputs(), p.values, p.shares), ELEMENTS, 1 / 30),
    "hinge": (lambda p: F.hinge_embedding_loss(p.outputs(), 2 * MASK - 1), ELEMENTS, 1 / 30),
    "margin_ranking": (
        lambda p: F.margin_ranking_loss(p.outputs(), p.values, 2 * MASK - 1),
        ELEMENTS,
        1 / 30,
    ),
    "multi_margin": (lambda p: F.multi_margin_loss(p.outputs(), TARGETS.clamp(0)), SAMPLES, 1 / 6),
    "multilabel_margin": (lambda p: F.multilabel_margin_loss(p.outputs(), MASK.long()), SAMPLES, 1 / 6),
    "triplet": (lambda p: F.triplet_margin_loss(p.outputs(), p.values, p.values + 1), SAMPLES, 1 / 6),
    "cosine": (lambda p: F.cosine_embedding_loss(p.outputs(), p.values, torch.ones(6)), SAMPLES, 1 / 6),
    "ctc": (
        lambda p: F.ctc_loss(
            p.outputs().log_softmax(1)[:, None].repeat(1, 2, 1),
            torch.tensor([[1, 2], [2, 3]]),
            (6, 6),
            (2, 1),
        ),
        2,
        1 / 2,
    ),
    "by_hand_gather": (lambda p: -p.log_likelihoods().mean(), SAMPLES, 1 / 6),
    "by_hand_index": (
        lambda p: -p.outputs().log_softmax(-1)[torch.arange(6), TARGETS.clamp(0)].mean(),
        SAMPLES,
        1 / 6,
    ),
    "focal": (lambda p: (0.25 * (1 - torch.exp(-p.losses())) ** 2 * p.losses()).mean(), SAMPLES, 1 / 6),
    "dpo": (lambda p: -F.logsigmoid(0.1 * (p.outputs().sum(1) - 1)).mean(), SAMPLES, 1 / 6),
    "half_square": (lambda p: (0.5 * p.squares()).mean(), ELEMENTS, 1 / 30),
    "divided_inside_a_sum": (lambda p: (p.squares() / 4).sum() / 30, ELEMENTS, 1 / 120),
    "masked": (lambda p: (p.squares() * MASK).sum() / MASK.sum(), MASKED, 1 / MASKED),
    "mask_that_sums_to_one": (lambda p: (p.squares() * (MASK / MASK.sum())).sum(), MASKED, 1 / MASKED),
    "masked_mean_over_padding": (lambda p: (p.squares() * MASK).mean(), MASKED, 1 / 30),
    "selected": (lambda p: p.squares()[MASK.bool()].mean(), MASKED, 1 / MASKED),
    "where": (lambda p: torch.where(MASK.bool(), p.squares(), 0.0).sum() / MASK.sum(), MASKED, 1 / MASKED),
    "filled": (lambda p: p.squares().masked_fill(~MASK.bool(), 0.0).sum() / MASK.sum(), MASKED, 1 / MASKED),
    "masked_losses": (lambda p: (p.losses() * MASK[:, 3]).sum() / MASK[:, 3].sum(), 2, 1 / 2),
    "reinforce": (lambda p: -(p.log_likelihoods() * p.values[:, 0]).mean(), SAMPLES, 1 / 6),
    "half_precision": (lambda p: p.squares().bfloat16().float().mean(), ELEMENTS, 1 / 30),
    "loss_scale": (lambda p: 1024 * p.squares().mean() / 4, ELEMENTS, 256 / 30),
    "one_sample": (lambda p: (p.outputs()[0, 0] - 1) ** 2, 1, 1.0),
    "critic": (lambda p: -p.outputs().mean(), ELEMENTS, 1 / 30),
}


@pytest.mark.parametrize("name", ALIKE)
def test_all_items_weigh_what_the_formula_says(name: str) -> None:
    loss, items, weight = ALIKE[name]
    (term,) = read(loss(Problem()))
    alike(term.levels[-1], items, weight)
    assert term.levels[-1].unit == "item"


def ppo(p: Problem) -> Tensor:
    ratio = torch.exp(p.outputs() - p.outputs().detach())
    worst = torch.min(ratio * p.values, ratio.clamp(0.8, 1.2) * p.values)
    return -(worst * MASK).sum() / MASK.sum()


def test_a_clipped_policy_loss_counts_its_unmasked_tokens() -> None:
    (term,) = read(ppo(Problem()))
    alike(term.levels[-1], MASKED, 1 / MASKED)


def grpo(p: Problem) -> Tensor:
    """Per-sequence means, then the mean of these."""
    ratio = torch.exp(p.outputs() - p.outputs().detach())
    advantages = p.values[:, :1]
    tokens = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    tokens = tokens + 0.04 * (torch.exp(p.values - p.outputs()) - (p.values - p.outputs()) - 1)
    return ((tokens * MASK).sum(-1) / MASK.sum(-1)).mean()


@pytest.mark.parametrize("loss", [grpo, lambda p: ((p.squares() * MASK).sum(1) / MASK.sum(1)).mean()])
def test_means_of_sequences_are_groups(loss: Callable[[Problem], Tensor]) -> None:
    (term,) = read(loss(Problem()))
    alike(level_of(term, "group"), SAMPLES, 1 / SAMPLES)
    lengths = MASK.sum(1)
    tokens = (18, 1, float(1 / (6 * lengths.max())), float(1 / (6 * lengths.min())))
    assert numbers(term.levels[-1]) == pytest.approx(tokens)


def test_groups_of_equal_lengths_are_read_like_others() -> None:
    p = Problem()
    (term,) = read((p.squares()[:2].sum(1) / torch.tensor([5.0, 5.0])).mean())
    alike(level_of(term, "group"), 2, 1 / 2)
    alike(term.levels[-1], 10, 1 / 10)


def test_a_sum_over_features_has_a_row_reading() -> None:
    p = Problem()
    (term,) = read(p.squares().sum() / SAMPLES)
    alike(level_of(term, "row"), SAMPLES, CLASSES / SAMPLES)
    assert level_of(term, "row").per_unit_shape == (CLASSES,)
    (term,) = read(F.mse_loss(p.outputs(), p.values))
    alike(level_of(term, "row"), SAMPLES, 1 / SAMPLES)
    (term,) = read(p.squares().sum(1).mean())
    alike(level_of(term, "group"), SAMPLES, 1 / SAMPLES)
    alike(term.levels[-1], ELEMENTS, 1 / SAMPLES)


def test_masked_tensors_have_no_row_reading() -> None:
    (term,) = read((Problem().squares() * MASK).sum() / SAMPLES)
    assert [level.unit for level in term.levels] == ["item"]


def test_a_row_of_several_distributions() -> None:
    p = Problem()
    scores = torch.stack([p.outputs(), p.outputs(2.0)]).log_softmax(-1)
    (term,) = read(F.kl_div(scores, torch.stack([p.shares, p.shares]), reduction="batchmean"))
    alike(level_of(term, "row"), 2, SAMPLES / 2)
    alike(term.levels[-1], 2 * SAMPLES, 1 / 2)
    assert level_of(term, "row").per_unit_shape == (SAMPLES,)


@pytest.mark.parametrize(("reduction", "divisor"), [("mean", 1.0), ("sum", 7.0), ("none", 7.0)])
def test_class_weights_are_what_the_units_are_counted_by(reduction: str, divisor: float) -> None:
    p = Problem()
    loss = F.cross_entropy(p.outputs(), TARGETS, weight=CLASS_WEIGHTS, reduction=reduction).sum() / divisor
    (term,) = read(loss)
    whole = float(CLASS_WEIGHTS[TARGETS[TARGETS >= 0]].sum())
    alike(term.levels[-1], whole, 1 / whole if reduction == "mean" else 1 / divisor)
    assert term.coefficients == "class_weights"


def test_class_weights_with_label_smoothing() -> None:
    p = Problem()
    (term,) = read(F.cross_entropy(p.outputs(), TARGETS, weight=CLASS_WEIGHTS, label_smoothing=0.2))
    whole = float(CLASS_WEIGHTS[TARGETS[TARGETS >= 0]].sum())
    alike(term.levels[-1], whole, 1 / whole)


def test_label_smoothing_by_hand_is_one_term() -> None:
    p = Problem()
    scores = -p.outputs().log_softmax(-1)
    ignored = TARGETS[:, None].eq(-100)
    own = scores.gather(-1, TARGETS[:, None].clamp(min=0)).masked_fill(ignored, 0.0).sum() / TOKENS
    smooth = scores.sum(-1, keepdim=True).masked_fill(ignored, 0.0).sum() / (TOKENS * CLASSES)
    (term,) = read(0.9 * own + 0.1 * smooth)
    alike(term.levels[-1], TOKENS, 1 / TOKENS)


def test_factors_are_taken_out_and_offered_as_counts() -> None:
    p = Problem()
    factors = torch.tensor([1.0, 2, 3, 4, 5, 0])
    (term,) = read((p.squares()[:, 0] * factors).sum() / factors.sum())
    assert term.coefficients == "factors"
    alike(term.levels[-1], 5, 1 / 15)
    alike(level_of(term, "group"), 15, 1 / 15)


def test_lengths_multiplied_into_a_mask() -> None:
    p = Problem()
    (term,) = read((p.squares() * (MASK / MASK.sum(1, keepdim=True))).sum() / SAMPLES)
    alike(level_of(term, "group"), SAMPLES, 1 / SAMPLES)
    alike(term.levels[-1], MASKED, 1 / SAMPLES)


def test_signed_advantages_of_zero_are_items() -> None:
    p = Problem()
    (term,) = read(-(p.log_likelihoods() * torch.tensor([1.0, -1, 0, 0, 2, -2])).mean())
    alike(term.levels[-1], SAMPLES, 1 / SAMPLES)
    assert term.coefficients == "factors"
    assert not term.surrogate
