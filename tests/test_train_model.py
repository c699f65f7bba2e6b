"""The model: causal, blind to padding, and no sample sees another."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from wholebatch.errors import UsageError
from wholebatch.rows import pack_rows, row_layout, unpack_rows
from wholebatch.train.data.tokens import bytes_tokenizer
from wholebatch.train.models.gpt import GPT, GPTShape, num_parameters

VOCABULARY = bytes_tokenizer(completions=False, masked=False).vocabulary


@pytest.fixture
def model() -> GPT:
    torch.manual_seed(0)
    shape = GPTShape(vocabulary=VOCABULARY, max_tokens=16, layers=2, width=32, heads=4)
    return GPT(shape).double()


def test_the_future_and_other_samples_do_not_matter(model: GPT) -> None:
    ids = torch.randint(0, 256, (3, 10))
    changed = ids.clone()
    changed[0, 6] += 1
    changed[1] = 0
    before, after = model(ids), model(changed)
    torch.testing.assert_close(after[0, :6], before[0, :6], rtol=0, atol=1e-12)
    torch.testing.assert_close(after[2], before[2], rtol=0, atol=1e-12)
    assert (after[0, 6:] - before[0, 6:]).abs().amax(dim=-1).min() > 1e-6


def test_padding_on_the_right_does_not_matter(model: GPT) -> None:
    ids = torch.randint(1, 256, (2, 14))
    ids[0, 6:] = 0
    torch.testing.assert_close(model(ids)[0, :6], model(ids[:1, :6])[0], rtol=0, atol=1e-12)


def test_it_starts_out_knowing_nothing(model: GPT) -> None:
    ids = torch.randint(0, 256, (8, 16))
    loss = F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert abs(loss.item() - math.log(VOCABULARY)) < 0.1


def test_all_parameters_learn(model: GPT) -> None:
    ids = torch.randint(0, 256, (2, 16))
    F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())
    block = 4 * 32 + 96 * (32 + 1) + 32 * (32 + 1) + 128 * (32 + 1) + 32 * (128 + 1)
    assert num_parameters(model) == (2 * VOCABULARY + 16) * 32 + 2 * block + 2 * 32


def test_dropout_acts_in_training_only() -> None:
    shape = GPTShape(vocabulary=VOCABULARY, max_tokens=16, layers=1, width=32, heads=4, dropout=0.5)
    model = GPT(shape)
    ids = torch.randint(0, 256, (2, 16))
    assert not torch.equal(model(ids), model(ids))
    model.eval()
    assert torch.equal(model(ids), model(ids))


def test_a_micro_batch_without_samples_runs(model: GPT) -> None:
    assert model(torch.zeros(0, 0, dtype=torch.int64)).shape == (0, 0, VOCABULARY)


def test_more_tokens_than_positions_are_refused_with_both_numbers(model: GPT) -> None:
    with pytest.raises(UsageError, match=r"a sample of 17 tokens does not fit a GPT of 16 positions; set"):
        model(torch.zeros(1, 17, dtype=torch.int64))


# Packed rows


def test_a_sample_in_a_row_is_what_it_is_alone(model: GPT) -> None:
    ids = [torch.randint(0, 256, (n,)) for n in (3, 16, 1, 9, 8)]
    row = pack_rows([{"input_ids": sample} for sample in ids])
    logits = model(row["input_ids"], layout=row_layout(row["sample_lengths"]))
    for sample, own in zip(ids, unpack_rows(logits, row["sample_lengths"]), strict=True):
        torch.testing.assert_close(own, model(sample[None])[0], rtol=0, atol=1e-12)


def test_all_parameters_have_a_gradient_from_a_row_without_samples(model: GPT) -> None:
    row = pack_rows([])
    logits = model(row["input_ids"], layout=row_layout(row["sample_lengths"]))
    assert logits.shape == (1, 0, VOCABULARY)
    logits.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_a_row_may_be_longer_than_the_model_and_a_sample_may_not(model: GPT) -> None:
    assert model(torch.zeros(1, 48).long(), layout=row_layout([16, 16, 16])).shape[1] == 48
    with pytest.raises(UsageError, match=r"a sample of 17 tokens does not fit a GPT of 16 positions; set"):
        model(torch.zeros(1, 20).long(), layout=row_layout([17, 3]))


def test_the_layout_of_another_row_is_refused(model: GPT) -> None:
    words = r"samples of 9 tokens together make a row of shape \(1, 9\), and input_ids is \(1, 8\); give"
    with pytest.raises(UsageError, match=words):
        model(torch.zeros(1, 8).long(), layout=row_layout([4, 5]))


# Labels of whole samples


@pytest.fixture
def classifier() -> GPT:
    torch.manual_seed(0)
    shape = GPTShape(vocabulary=9, max_tokens=16, layers=2, width=32, heads=4, num_labels=3)
    return GPT(shape).double()


def test_a_label_is_read_where_the_whole_sample_was_seen(classifier: GPT) -> None:
    ids = torch.randint(0, 9, (2, 7))
    mask = torch.tensor([[1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1]])
    logits = classifier(ids, mask)
    assert logits.shape == (2, 3)
    alone = classifier(ids[:1, :4], mask[:1, :4])
    torch.testing.assert_close(logits[:1], alone, rtol=0, atol=1e-12)
    for position in range(7):
        changed = ids.clone()
        changed[:, position] = (changed[:, position] + 1) % 9
        moved = (classifier(changed, mask) - logits).abs().amax(dim=1) > 1e-9
        assert moved.tolist() == [position < 4, True]


def test_all_parameters_learn_from_labels(classifier: GPT) -> None:
    ids = torch.randint(0, 9, (2, 7))
    F.cross_entropy(classifier(ids, torch.ones_like(ids)), torch.tensor([0, 2])).backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in classifier.parameters())


def test_a_label_without_a_mask_is_refused(classifier: GPT) -> None:
    with pytest.raises(UsageError, match='the batch has no "attention_mask" to tell it from padding; let'):
        classifier(torch.zeros(2, 7, dtype=torch.int64))


def test_labels_of_a_row_are_refused(classifier: GPT) -> None:
    words = r"the built-in GPT of 3 labels reads one for each padded sample, and was given a packed row of"
    with pytest.raises(UsageError, match=words):
        classifier(torch.zeros(1, 7).long(), layout=row_layout([3, 4]))


def test_a_micro_batch_without_samples_has_no_labels(classifier: GPT) -> None:
    empty = torch.zeros(0, 0, dtype=torch.int64)
    logits = classifier(empty, empty)
    assert logits.shape == (0, 3)
    logits.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in classifier.parameters())
