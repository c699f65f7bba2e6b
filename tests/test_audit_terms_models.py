"""Losses that models compute in their forward."""

from __future__ import annotations

import pytest
import torch

from test_audit_terms import alike, read

transformers = pytest.importorskip("transformers")


@pytest.mark.slow
def test_a_llama_counts_its_shifted_labels() -> None:
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config)
    tokens = torch.arange(18).reshape(2, 9)
    labels = tokens.clone()
    labels[0, :4] = -100
    (term,) = read(model(input_ids=tokens, labels=labels).loss)
    alike(term.levels[-1], 13, 1 / 13)
    assert term.key == "NllLoss/0"
    (term,) = read(model(input_ids=tokens, labels=labels, num_items_in_batch=40).loss / 2)
    alike(term.levels[-1], 13, 1 / 80)


def test_question_answering_has_two_heads() -> None:
    config = transformers.BertConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    model = transformers.BertForQuestionAnswering(config)
    tokens = torch.arange(18).reshape(2, 9)
    positions = torch.tensor([1, 3]), torch.tensor([2, 40])  # the last lies outside, so it is ignored
    loss = model(input_ids=tokens, start_positions=positions[0], end_positions=positions[1]).loss
    start, end = read(loss)
    alike(start.levels[-1], 2, 1 / 4)
    alike(end.levels[-1], 1, 1 / 2)
    assert not start.square


def test_a_mixture_of_experts_has_an_auxiliary_term() -> None:
    config = transformers.MixtralConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=2,
        output_router_logits=True,
    )
    model = transformers.MixtralForCausalLM(config)
    tokens = torch.arange(18).reshape(2, 9)
    terms = read(model(input_ids=tokens, labels=tokens).loss)
    alike(terms[0].levels[-1], 16, 1 / 16)
    assert len(terms) > 1
