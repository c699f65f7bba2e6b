"""The text: nothing dropped, nothing twice, nothing on both sides."""

from __future__ import annotations

import pytest
import torch

from wholebatch.errors import UsageError
from wholebatch.train.data import (
    BEGIN,
    IGNORED_LABEL,
    collate,
    encode,
    is_held_out,
    load_text,
    num_items,
    paragraphs,
)


def test_every_byte_of_every_paragraph_is_in_exactly_one_sample() -> None:
    data = load_text(max_tokens_per_sample=64, held_out_one_in=10)
    texts = list(paragraphs())
    assert data.paragraphs == len(texts) > 2000
    for side, held_out in ((data.train, False), (data.held_out, True)):
        joined = b"".join(bytes(sample[1:].tolist()) for sample in side)
        assert joined == "".join(t for t in texts if is_held_out(t, 10) is held_out).encode()
        assert num_items(side) == len(joined)
        assert all(sample[0] == BEGIN and 2 <= len(sample) <= 64 for sample in side)


def test_no_held_out_paragraph_is_also_trained_on() -> None:
    texts = list(paragraphs())
    assert len(set(texts)) < len(texts), "topics do repeat paragraphs, or this test shows nothing"
    held_out = {text for text in texts if is_held_out(text, 10)}
    assert held_out.isdisjoint(text for text in texts if not is_held_out(text, 10))
    assert 0.05 < len(held_out) / len(set(texts)) < 0.15


def test_the_split_is_the_same_on_every_machine() -> None:
    assert [is_held_out(text, 3) for text in ("a", "b", "c", "d", "e")] == [
        False,
        False,
        True,
        False,
        False,
    ]


def test_a_long_text_is_cut_at_the_cap() -> None:
    samples = encode("abcdefg", 4)
    assert [sample.tolist() for sample in samples] == [
        [BEGIN, 97, 98, 99],
        [BEGIN, 100, 101, 102],
        [BEGIN, 103],
    ]


def test_letters_of_several_bytes_may_be_cut() -> None:
    assert b"".join(bytes(s[1:].tolist()) for s in encode("a\u2014b", 3)).decode() == "a\u2014b"


def test_a_cap_without_room_is_refused() -> None:
    with pytest.raises(UsageError, match="max_tokens_per_sample is 1; a begin mark and one byte need 2"):
        load_text(max_tokens_per_sample=1, held_out_one_in=10)


def test_collate_pads_to_the_longest_of_this_micro_batch() -> None:
    samples = [*encode("ab", 9), *encode("c", 9), *encode("defg", 9)]
    batch = collate(samples, [1, 0])
    assert batch["input_ids"].tolist() == [[BEGIN, 99, 0], [BEGIN, 97, 98]]
    assert batch["labels"].tolist() == [[BEGIN, 99, IGNORED_LABEL], [BEGIN, 97, 98]]
    assert batch["sample_ids"].tolist() == [1, 0]
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}


def test_collate_of_no_samples() -> None:
    batch = collate(encode("ab", 9), [])
    assert batch["input_ids"].shape == batch["labels"].shape == (0, 0)
    assert batch["sample_ids"].shape == (0,)


def test_facts_are_the_data_s_own() -> None:
    data = load_text(max_tokens_per_sample=256, held_out_one_in=10)
    facts = data.facts()
    assert facts["train_samples"] == len(data.train)
    assert facts["held_out_items"] == num_items(data.held_out)
    assert "modulo 10" in str(facts["split_rule"])
