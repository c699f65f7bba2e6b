"""Loops that people write and the audit once misread: each as small as shows it."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from audit_traces import Op, backward, clear, event, level, step, term, trace
from test_audit_terms import SAMPLES, TARGETS, TOKENS, Problem, alike, level_of, read
from test_audit_watch import kinds, watched
from wholebatch.audit.judge.evidence import Judgement
from wholebatch.audit.judge.verdict import judge
from wholebatch.audit.trace import SKETCH_WIDTH, Forward, Intent
from wholebatch.audit.watch.sketch import Sketcher


def test_what_label_smoothing_leaves_unreduced_has_no_ignored_items() -> None:
    losses = F.cross_entropy(Problem().outputs(), TARGETS, reduction="none", label_smoothing=0.1)
    (term,) = read(losses.sum() / TOKENS)
    alike(term.levels[-1], TOKENS, 1 / TOKENS)


def test_labels_are_the_items_of_ctc_and_sequences_a_reading_of_it() -> None:
    lengths = torch.tensor([3, 5])
    scores = nn.Parameter(torch.randn(12, 2, 6))
    labels = torch.randint(1, 6, (2, 5))
    losses = F.ctc_loss(scores.log_softmax(-1), labels, torch.tensor([12, 12]), lengths, reduction="none")
    (term,) = read(losses.sum() / 8)
    alike(term.levels[-1], 8, 1 / 8)
    alike(level_of(term, "group"), 2, 1 / 8)


def test_a_similarity_with_a_teacher_is_no_cached_gradient() -> None:
    p = Problem()
    (term,) = read((2 - 2 * (p.outputs() * p.values).sum(-1)).mean())
    assert not term.surrogate
    assert read((p.outputs() * p.values).sum())[0].surrogate


def test_scores_whose_diagonal_was_filled_are_square() -> None:
    p = Problem()
    scores = p.outputs() @ p.outputs(2).T / 0.5
    scores.fill_diagonal_(-1e9)
    assert read(F.cross_entropy(scores, torch.arange(SAMPLES)))[0].square


def test_similarities_of_all_pairs_are_square() -> None:
    p = Problem()
    one, other = p.outputs(), p.outputs(2)
    similar = F.cosine_similarity(one.unsqueeze(1), other.unsqueeze(0), dim=-1)
    assert read(F.cross_entropy(similar / 0.1, torch.arange(SAMPLES)))[0].square
    paired = F.cosine_similarity(p.outputs(), p.outputs(2), dim=-1)
    assert not read((1 - paired).mean())[0].square


def test_a_quotient_of_two_sums_is_told_from_a_weight() -> None:
    p = Problem()
    scores = p.outputs().sigmoid()
    truth = (p.values > 0).float()
    dice = 1 - (2 * (scores * truth).sum() + 1) / (scores.sum() + truth.sum() + 1)
    assert read(dice)[0].quotient
    weight = nn.Parameter(torch.tensor(2.0))
    assert not read(F.mse_loss(p.outputs(), p.values) / weight**2)[0].quotient
    scores = p.outputs(2).sigmoid()
    by_sample = 1 - 2 * (scores * truth).sum(-1) / (scores.sum(-1) + truth.sum(-1))
    assert not read(by_sample.mean())[0].quotient


def test_quotients_over_micro_batches_are_noted_and_not_weighed() -> None:
    one = backward(terms=[term(level(7, 0.11), key="Sum/0", quotient=True)])
    judgement = judge(trace(*[one, one, step(), clear()] * 3))
    assert [(f.kind, f.severity) for f in judgement.findings] == [("coupled_samples", "note")]


def kinds_of(judgement: Judgement) -> list[str]:
    return [finding.kind for finding in judgement.findings if finding.severity != "note"]


def window(samples: list[int]) -> list[Op]:
    return [backward(items=4, weight=1 / 12, samples=(one,)) for one in samples]


def test_an_attempt_that_begins_again_is_no_dropped_tail() -> None:
    whole = [clear(), *window([1, 2, 3]), step()]
    again = [clear(), *window([4, 5]), clear(), *window([4, 5, 6]), step()]
    assert kinds_of(judge(trace(*whole, *again, *whole))) == []
    others = [clear(), *window([4, 5]), clear(), *window([7, 8, 9]), step()]
    assert "uncounted_items" in kinds_of(judge(trace(*whole, *others, *whole)))
    the_same = [clear(), *window([4]), clear(), *window([4]), clear(), *window([4]), step()]
    assert "clear_inside_window" in kinds_of(judge(trace(*the_same * 3)))


def test_two_encoders_are_no_forward_too_many() -> None:
    image = event("forward", forward=Forward(module="Image"))
    half = [image, backward(items=8, weight=1 / 32, module="Text")]
    assert kinds_of(judge(trace(*[*half * 2, step(), clear()] * 3))) == ["total_weight"]
    lost = [image, event("forward", forward=Forward(module="Text")), *half]
    assert "uncounted_items" in kinds_of(judge(trace(*[*lost * 2, step(), clear()] * 3)))


def test_what_is_scored_everywhere_may_be_divided_by_what_is_found() -> None:
    def update(found: int, scored: int) -> list[Op]:
        terms = [
            term(level(found, 1 / (2 * found)), key="SmoothL1Loss/0"),
            term(level(scored, 1 / (2 * found)), key="Sum/0"),
        ]
        return [backward(terms=terms), backward(terms=terms), step(), clear()]

    def severities(*updates: list[Op]) -> list[str]:
        judgement = judge(trace(*[op for one in updates for op in one]))
        return [f.severity for f in judgement.findings if f.kind == "unequal_item_weights"]

    assert severities(update(8, 50), update(5, 50), update(9, 50), update(7, 50)) == ["note"]
    assert severities(update(8, 3), update(5, 3), update(9, 3), update(7, 3)) == ["wrong"]


@pytest.mark.parametrize("inside", [True, False])
def test_a_teacher_of_a_part_of_the_model_is_an_average(inside: bool) -> None:
    def loop() -> None:
        encoder, head = nn.Linear(5, 4), nn.Linear(4, 3)
        teacher = copy.deepcopy(encoder)
        optimizer = torch.optim.SGD([*encoder.parameters(), *head.parameters()], lr=0.1)
        for number in range(6):
            head(encoder(torch.randn(3, 5))).square().mean().div(2).backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
            if inside or number % 2:
                with torch.no_grad():
                    for slow, fast in zip(teacher.parameters(), encoder.parameters(), strict=True):
                        slow.lerp_(fast + 0.01, 0.1)

    assert ("average" in kinds(watched(loop))) == inside


@pytest.mark.parametrize("divided", [True, False])
def test_a_further_loss_that_is_not_divided_beside_one_that_is(divided: bool) -> None:
    def loop() -> None:
        body, head, other = nn.Linear(8, 6), nn.Linear(6, 3), nn.Linear(6, 1)
        optimizer = torch.optim.SGD([*body.parameters(), *head.parameters(), *other.parameters()], lr=0.1)
        for number in range(8):
            hidden = body(torch.randn(4, 8)).relu()
            main = F.cross_entropy(head(hidden), torch.randint(0, 3, (4,))) / 4
            further = 0.5 * F.mse_loss(other(hidden), torch.randn(4, 1))
            (main + (further / 4 if divided else further)).backward()
            if number % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()

    found = [f for f in judge([watched(loop)]).findings if f.severity == "wrong"]
    assert [(f.kind, f.factor) for f in found] == ([] if divided else [("total_weight", 4.0)])


def test_a_gradient_of_few_rows_keeps_its_directions() -> None:
    sketcher = Sketcher()
    some = torch.stack(
        [sketcher.whole(torch.randn(2, 40, dtype=torch.float64)) for _ in range(SKETCH_WIDTH)]
    )
    assert torch.linalg.matrix_rank(some) == SKETCH_WIDTH


@pytest.mark.parametrize(("later", "expected"), [(1 / 20, []), (1 / 10, [("total_weight", 2.0)])])
def test_a_divisor_that_stays_when_the_number_of_micro_batches_grows(later: float, expected: list) -> None:
    few = [*[backward(5, 1 / 10) for _ in range(2)], step(), clear()] * 3
    many = [*[backward(5, later) for _ in range(4)], step(), clear()] * 5
    found = [f for f in judge(trace(*few, *many)).findings if f.severity == "wrong"]
    assert [(f.kind, f.factor) for f in found] == [
        (kind, pytest.approx(factor)) for kind, factor in expected
    ]


def test_loss_weights_are_told_where_gradients_are_made_of_more() -> None:
    def loop() -> None:
        model = nn.Linear(6, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(8):
            size = 3 + 5 * (number % 2)
            (F.cross_entropy(model(torch.randn(size, 6)), torch.randint(0, 4, (size,))) / 2).backward()
            if number % 2:
                for parameter in model.parameters():
                    parameter.grad += 0.05 * torch.randn_like(parameter)
                optimizer.step()
                optimizer.zero_grad()

    judgement = judge([watched(loop)])
    assert judgement.verdict == "not_judged"
    (found,) = [f for f in judgement.findings if f.kind == "unequal_item_weights"]
    assert (found.severity, found.across, round(found.ratio or 0.0, 3)) == ("note", "micro_batches", 2.667)


class FusedMean(torch.autograd.Function):
    """A fused cross entropy, as kernels have it: one number comes out, and nobody sees of how many."""

    @staticmethod
    def forward(ctx: object, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(logits, targets)  # type: ignore[attr-defined]
        return F.cross_entropy(logits, targets)

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        logits, targets = ctx.saved_tensors  # type: ignore[attr-defined]
        wide = logits.softmax(1) - F.one_hot(targets, logits.shape[1])
        return gradient * wide / len(targets), None


@pytest.mark.parametrize("divided", [True, False])
def test_a_fused_loss_outside_any_module_is_judged_by_a_replay(divided: bool) -> None:
    before = vars(torch.autograd.Function)["apply"]

    def loop() -> None:
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(8):
            loss = FusedMean.apply(model(torch.randn(4, 6)), torch.randint(0, 4, (4,)))
            (loss / 2 if divided else loss).backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()

    judgement = judge([watched(loop)])
    found = [(f.kind, round(f.factor or 0.0, 3)) for f in judgement.findings if f.severity == "wrong"]
    assert found == ([] if divided else [("total_weight", 2.0)])
    assert judgement.verdict == ("clean" if divided else "findings")
    assert vars(torch.autograd.Function)["apply"] is before


@pytest.mark.parametrize(("samples", "due"), [(16, ["step_inside_window"]), (4, []), (18, [])])
def test_a_global_batch_that_is_said_in_samples_says_how_many_micro_batches(
    samples: int, due: list[str]
) -> None:
    def loop() -> None:
        model = nn.Linear(6, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            F.cross_entropy(model(torch.randn(4, 6)), torch.randint(0, 4, (4,))).backward()
            optimizer.step()
            optimizer.zero_grad()

    flags = Intent(global_batch_samples=samples, source="--expect-global-batch")
    judgement = judge([watched(loop, flags=flags)])
    assert [f.kind for f in judgement.findings if f.severity == "wrong"] == due
    assert judgement.evidence.intent.micro_batches == (4 if samples == 16 else 1)
