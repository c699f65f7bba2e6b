"""Real text without a download: the paragraphs of Python's own topic pages, as bytes.

A sample is a paragraph, or a piece of one that is longer than the cap: a begin mark and then its
bytes. Lengths are ragged, as real text is, so that the items of two micro-batches differ and an
average of averages would be wrong.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pydoc_data.topics import topics

import torch
from torch import Tensor

from wholebatch.errors import UsageError

BEGIN = 256  # stands before the first byte, so that every byte is predicted from something
VOCABULARY = 257
IGNORED_LABEL = -100


@dataclass(frozen=True, kw_only=True, slots=True)
class TextData:
    """The samples, train and held out.

    Args:
        train: one int64 tensor of token ids for every sample; shape (tokens,).
        held_out: the same, from other paragraphs.
        paragraphs: paragraphs of both together.
        split_rule: how it was decided which paragraphs are held out, in words.
    """

    train: list[Tensor]
    held_out: list[Tensor]
    paragraphs: int
    split_rule: str

    def facts(self) -> dict[str, int | str]:
        """What the run header says about the data."""
        return {
            "name": "pydoc_data.topics",
            "paragraphs": self.paragraphs,
            "split_rule": self.split_rule,
            "train_samples": len(self.train),
            "held_out_samples": len(self.held_out),
            "train_items": num_items(self.train),
            "held_out_items": num_items(self.held_out),
        }


def load_text(*, max_tokens_per_sample: int, held_out_one_in: int) -> TextData:
    """Cut the paragraphs into samples and hold some paragraphs out.

    Whether a paragraph is held out depends on its text alone, so a paragraph that several topics
    repeat is never on both sides, and the split is the same on every machine. Every byte of every
    paragraph is in exactly one sample.

    Args:
        max_tokens_per_sample: cap on the tokens of a sample, the begin mark included.
        held_out_one_in: about one paragraph in so many is held out.

    Raises:
        UsageError: a cap that leaves no room for a byte.
    """
    if max_tokens_per_sample < 2:
        raise UsageError(
            f"max_tokens_per_sample is {max_tokens_per_sample}; a begin mark and one byte need 2 or more"
        )
    train: list[Tensor] = []
    held_out: list[Tensor] = []
    texts = list(paragraphs())
    for text in texts:
        side = held_out if is_held_out(text, held_out_one_in) else train
        side += encode(text, max_tokens_per_sample)
    rule = f"paragraphs whose BLAKE2b hash is 0 modulo {held_out_one_in}"
    return TextData(train=train, held_out=held_out, paragraphs=len(texts), split_rule=rule)


def paragraphs() -> Iterator[str]:
    """The paragraphs of all topics, in a fixed order; blank lines part them."""
    for name in sorted(topics):
        for text in re.split(r"\n\s*\n", topics[name]):
            if text.strip():
                yield text.strip("\n")


def is_held_out(text: str, held_out_one_in: int) -> bool:
    """Whether this text belongs to the held-out split."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % held_out_one_in == 0


def encode(text: str, max_tokens_per_sample: int) -> list[Tensor]:
    """The bytes of a text as samples of at most so many tokens, each with its begin mark.

    Returns:
        int64 tensors of shape (tokens,).

    Exactness: the bytes of the samples, joined, are the bytes of the text.
    """
    data = text.encode()
    room = max_tokens_per_sample - 1
    pieces = [data[start : start + room] for start in range(0, len(data), room)]
    return [torch.tensor([BEGIN, *piece]) for piece in pieces]


def num_items(samples: Sequence[Tensor]) -> int:
    """Bytes to predict: every token but the begin mark of each sample."""
    return sum(len(sample) - 1 for sample in samples)


def collate(samples: Sequence[Tensor], ids: Sequence[int]) -> dict[str, Tensor]:
    """Pad the samples of one micro-batch to the longest of them.

    Args:
        samples: all samples of the split.
        ids: which of them make this micro-batch; empty for one without samples.

    Returns:
        ``input_ids`` and ``labels`` of shape (samples, tokens), ``sample_ids`` of shape (samples,).
        Labels are the input, not shifted, with -100 on padding: the objective shifts them.

    Exactness: padding supervises nothing, and under causal attention nothing before it sees it.
    """
    chosen = [samples[i] for i in ids]
    longest = max((len(sample) for sample in chosen), default=0)
    input_ids = torch.zeros(len(chosen), longest, dtype=torch.int64)
    labels = torch.full((len(chosen), longest), IGNORED_LABEL)
    for row, sample in enumerate(chosen):
        input_ids[row, : len(sample)] = sample
        labels[row, : len(sample)] = sample
    return {"input_ids": input_ids, "labels": labels, "sample_ids": torch.tensor(ids, dtype=torch.int64)}
