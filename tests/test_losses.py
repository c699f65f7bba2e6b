"""Each objective's sum over N is PyTorch's own mean, its count is its sum's, and it refuses the rest."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from wholebatch.errors import ObjectiveError
from wholebatch.losses import binary_loss, next_token_loss, regression_loss, token_loss
from wholebatch.objective import counted_loss, weighted_terms

torch.manual_seed(0)
LOGITS = torch.randn(3, 4, 5, dtype=torch.float64)
LABELS = torch.tensor([[1, 2, -100, 4], [0, -100, -100, 3], [4, 4, 1, 0]])
WEIGHTS = torch.tensor([0.5, 2.0, 1.0, 0.0, 3.0], dtype=torch.float64)


def mean(objective: Any, output: Any, batch: Any) -> float:
    loss_sum, items = objective(output, batch)
    ahead = objective.count(batch)["loss"]
    assert float(items) == pytest.approx(float(ahead)), "what is summed is what is counted"
    return float(loss_sum / items)


@pytest.mark.parametrize("weights", [None, WEIGHTS])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_token_losses_are_the_mean_of_cross_entropy(weights: Tensor | None, smoothing: float) -> None:
    expected = F.cross_entropy(
        LOGITS.flatten(0, 1), LABELS.flatten(), weight=weights, label_smoothing=smoothing
    )
    objective = token_loss(class_weights=weights, label_smoothing=smoothing)
    assert mean(objective, LOGITS, {"labels": LABELS}) == pytest.approx(expected.item())
    shifted = F.cross_entropy(
        LOGITS[:, :-1].flatten(0, 1), LABELS[:, 1:].flatten(), weight=weights, label_smoothing=smoothing
    )
    objective = next_token_loss(class_weights=weights, label_smoothing=smoothing)
    assert mean(objective, LOGITS, {"labels": LABELS}) == pytest.approx(shifted.item())


def test_the_first_label_of_a_shifted_loss_is_no_item() -> None:
    assert int(next_token_loss().count({"labels": LABELS})["loss"]) == 6
    assert int(token_loss().count({"labels": LABELS})["loss"]) == 9
    assert next_token_loss().positions({"labels": LABELS}) == 12


def test_labels_are_found_by_key_index_and_function() -> None:
    expected = mean(token_loss(), LOGITS, {"labels": LABELS})
    assert mean(token_loss(labels=1), LOGITS, (LOGITS, LABELS)) == expected
    assert mean(token_loss(labels=lambda b: b.y), LOGITS, SimpleNamespace(y=LABELS)) == expected
    assert mean(token_loss(ignore_index=-1), LOGITS, {"labels": LABELS.clamp(min=-1)}) == expected
    assert mean(token_loss(), SimpleNamespace(logits=LOGITS), {"labels": LABELS}) == expected


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
def test_narrow_labels_are_not_wrapped_around_the_ignored_one(dtype: torch.dtype) -> None:
    """In uint8 a label of 156 is -100, which would be ignored; bytes as tokens are a common case."""
    logits, labels = torch.zeros(1, 3, 256), torch.tensor([[1, 156, 7]], dtype=dtype)
    loss_sum, items = token_loss()(logits, {"labels": labels})
    assert int(items) == 3
    assert float(loss_sum) == pytest.approx(3 * math.log(256))
    assert int(next_token_loss()(logits, {"labels": labels}).num_items) == 2


def test_classification_is_a_token_loss_without_positions() -> None:
    logits, labels = LOGITS[:, 0], torch.tensor([1, 0, 4])
    expected = F.cross_entropy(logits, labels).item()
    assert mean(token_loss(), logits, {"labels": labels}) == pytest.approx(expected)


def test_half_logits_are_summed_in_float32() -> None:
    logits = torch.zeros(4096, 2, dtype=torch.bfloat16)
    loss_sum, items = token_loss()(logits, {"labels": torch.zeros(4096, dtype=torch.long)})
    assert loss_sum.dtype == torch.float32
    assert float(loss_sum / items) == pytest.approx(0.693147, rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "function"), [("squared", F.mse_loss), ("absolute", F.l1_loss), ("huber", F.huber_loss)]
)
def test_regression_is_the_mean_over_elements(kind: str, function: Any) -> None:
    output, targets = LOGITS[0] * 3, LOGITS[1]
    mask = torch.tensor([[1, 0, 1, 1, 0]] * 4)
    assert mean(regression_loss(kind=kind), output, {"targets": targets}) == pytest.approx(
        function(output, targets).item()
    )
    objective = regression_loss(kind=kind, mask="mask")
    chosen = mask.bool()
    assert mean(objective, output, {"targets": targets, "mask": mask}) == pytest.approx(
        function(output[chosen], targets[chosen]).item()
    )


def test_binary_and_multi_label() -> None:
    logits, labels = LOGITS[0], (LOGITS[1] > 0).double()
    pos_weight = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0], dtype=torch.float64)
    expected = F.binary_cross_entropy_with_logits(logits, labels, pos_weight=pos_weight).item()
    objective = binary_loss(pos_weight=pos_weight)
    assert mean(objective, logits, {"labels": labels}) == pytest.approx(expected)
    assert objective.count({"labels": labels}) == {"loss": 20}
    assert mean(binary_loss(), logits, {"labels": labels.long()}) == pytest.approx(
        F.binary_cross_entropy_with_logits(logits, labels).item()
    )


@pytest.mark.parametrize("make", [regression_loss, binary_loss])
def test_a_nan_in_padding_stays_out_forward_and_backward(make: Any) -> None:
    output = torch.tensor([[1.0, float("nan")], [0.5, 2.0]], requires_grad=True)
    batch = {
        "targets": torch.tensor([[0.0, float("nan")], [1.0, 0.0]]),
        "mask": torch.tensor([[1, 0], [1, 1]]),
    }
    batch["labels"] = batch["targets"]
    loss_sum, items = make(mask="mask")(output, batch)
    loss_sum.backward()
    assert float(items) == 3
    assert torch.isfinite(loss_sum)
    assert torch.isfinite(output.grad).all()
    assert output.grad[0, 1] == 0


def test_terms_have_their_own_items_and_outputs() -> None:
    objective = weighted_terms({"a": (token_loss(), 1.0), "b": (regression_loss(), 0.5)})
    batch = {"labels": LABELS, "targets": LOGITS}
    by_name = objective({"a": LOGITS, "b": LOGITS + 1}, batch)
    assert float(by_name["b"].loss_sum) == pytest.approx(LOGITS.numel())
    both = objective(LOGITS, batch)
    assert float(both["b"].loss_sum) == 0
    assert objective.count(batch) == {"a": 9, "b": 60}
    assert objective.positions(batch) == 60
    assert objective.coefficients == {"a": 1.0, "b": 0.5}


def test_a_loss_of_your_own() -> None:
    objective = counted_loss(lambda output, batch: (output.sum(), len(batch)))
    assert objective.count(LOGITS) == {"loss": None}
    assert objective.positions(LOGITS) is None
    assert objective(LOGITS, LOGITS).num_items == 3
    assert counted_loss(lambda output, _: (output.sum(), 3), count=len).count(LOGITS) == {"loss": 3}


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (
            lambda: token_loss()(LOGITS, {"label": LABELS}),
            r"token_loss found no 'labels' in a batch with keys \['label'\]",
        ),
        (lambda: token_loss()(LOGITS, (LOGITS, LABELS)), "found no 'labels' in a batch with type tuple"),
        (lambda: token_loss()(LOGITS, {"labels": [1]}), "found a list at 'labels'; it needs a tensor"),
        (
            lambda: token_loss()(LOGITS, {"labels": LOGITS}),
            r"takes integer labels, got torch.float64 of shape \[3, 4, 5\]",
        ),
        (
            lambda: token_loss()(LOGITS, {"labels": LABELS[:2]}),
            r"logits of shape \[3, 4, 5\] do not fit labels of shape \[2, 4\]",
        ),
        (lambda: token_loss()("text", {"labels": LABELS}), "a model output of type str has no logits"),
        (
            lambda: next_token_loss()(LOGITS, {"labels": LABELS[0]}),
            r"labels of shape \[samples, positions\], got \[4\]",
        ),
        (
            lambda: token_loss(class_weights=WEIGHTS[:2])(LOGITS, {"labels": LABELS * 0}),
            "2 class weights do not fit logits of 5 classes",
        ),
        (lambda: token_loss(label_smoothing=1.0), r"token_loss\(label_smoothing=1.0\) is not in \[0, 1\)"),
        (lambda: regression_loss(kind="cubic"), "kind='cubic'"),
        (
            lambda: regression_loss()(LOGITS[0, :, :1], {"targets": LOGITS[0, :, 0]}),
            r"\[4, 1\] does not fit targets of shape \[4\]",
        ),
        (
            lambda: regression_loss(mask="m")(LOGITS, {"targets": LOGITS, "m": LABELS}),
            r"a mask of shape \[3, 4\] does not fit",
        ),
        (lambda: weighted_terms({}), "needs at least one term"),
        (lambda: weighted_terms({"a": token_loss()}), r"give \(objective, coefficient\)"),
        (lambda: weighted_terms({"a": (token_loss(), True)}), "the coefficient of term 'a' is True"),
        (lambda: weighted_terms({"a": (token_loss(), float("nan"))}), "the coefficient of term 'a' is nan"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_shapes(act: Any, message: str) -> None:
    with pytest.raises(ObjectiveError, match=message):
        act()


def test_what_the_loss_summed_is_counted_anew_and_not_remembered() -> None:
    objective = next_token_loss()
    for requires_grad in (True, False):
        buffer = np.array([[1, 2, 3, -100]])
        batch = {"labels": torch.from_numpy(buffer)}
        logits = torch.zeros(1, 4, 5, requires_grad=requires_grad)
        assert objective.count(batch) == {"loss": 2}
        assert objective(logits, batch).num_items == 2
        buffer[0, 3] = 4  # a write that torch does not see
        assert objective(logits, batch).num_items == 3


def test_to_ask_for_the_number_runs_no_checkpointed_forward_again() -> None:
    objective, layer, forwards = token_loss(), torch.nn.Linear(2, 5), []

    def part(given: Tensor) -> tuple[Tensor, Any]:
        forwards.append(given)
        return tuple(objective(layer(given), {"labels": LABELS}))

    loss_sum, items = checkpoint(part, torch.ones(3, 4, 2), use_reentrant=False)
    assert (len(forwards), int(items)) == (1, 9)
    loss_sum.backward()
    assert len(forwards) == 2


MANY = [LABELS, LABELS.roll(1, 0), LABELS.clone().fill_(-100)]


@pytest.mark.parametrize(
    "labels",
    [
        MANY,
        [*MANY, LABELS[:2, :3]],
        [LABELS[:, :1], LABELS[:, :0]],
        [LABELS[:0], LABELS[:0]],
        [LABELS.int()],
        [],
    ],
)
@pytest.mark.parametrize("weights", [None, WEIGHTS])
@pytest.mark.parametrize("most", [0, 2**15])
@pytest.mark.parametrize("make", [token_loss, next_token_loss])
def test_micro_batches_are_counted_together_as_one_by_one(
    make: Any, most: int, weights: Tensor | None, labels: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wholebatch.losses._FEW_LABELS", most)
    objective = make(class_weights=weights)
    batches = [{"labels": one} for one in labels]
    one_by_one = [float(objective.count(batch)["loss"]) for batch in batches]
    assert list(map(float, objective.items_of_each(batches))) == one_by_one
    assert one_by_one != [0.0, 0.0, 0.0]


def test_labels_of_one_class_for_each_micro_batch_are_counted_together_too() -> None:
    wanted = [{"labels": torch.tensor(label)} for label in (1, -100)]
    assert token_loss().items_of_each(wanted) == [1, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_summed_cross_entropy_is_torch_s_own(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 5, 7, dtype=dtype, requires_grad=True)
    labels = torch.randint(7, (3, 5))
    labels[1, 2:] = -100
    ours = token_loss()(logits, {"labels": labels})
    (gradient,) = torch.autograd.grad(ours.loss_sum, logits)
    theirs = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    assert torch.equal(ours.loss_sum, theirs)
    assert torch.equal(gradient, torch.autograd.grad(theirs, logits)[0])
    assert ours.num_items == 12


@pytest.mark.parametrize("shape", [(0, 0), (1, 0), (2, 0)])
def test_no_tokens_are_nothing_to_learn(shape: tuple[int, int]) -> None:
    logits = torch.zeros(*shape, 5, requires_grad=True)
    summed, items = next_token_loss()(logits, {"labels": torch.zeros(shape, dtype=torch.int64)})
    summed.backward()
    assert (float(summed.detach()), int(items)) == (0.0, 0)
