"""Samples of token ids in a few flat arrays: some 4 bytes a token, however many samples there are."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray


class TokenSample(NamedTuple):
    """One sample.

    Attributes:
        tokens: ids, int32 of shape (tokens,), with the marks.
        learned_from: index of the first token that is learned; those before it are context.
        label: class of the sample; -1 where it has none.
    """

    tokens: NDArray[np.int32]
    learned_from: int
    label: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenSamples:
    """Samples by their index, as a map-style dataset.

    Args:
        tokens: ids of all samples, one after the other; shape (tokens,).
        ends: where each sample ends in them, after a 0; shape (samples + 1,).
        learned_from: for each sample, as in TokenSample; shape (samples,).
        labels: for each sample, as in TokenSample; shape (samples,).
    """

    tokens: NDArray[np.int32]
    ends: NDArray[np.int64]
    learned_from: NDArray[np.int32]
    labels: NDArray[np.int64]
    draws_nothing: ClassVar[bool] = True  # for the loader, which then sets no random state

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> TokenSample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        begin, end = self.ends[index : index + 2]
        return TokenSample(
            tokens=self.tokens[begin:end],
            learned_from=int(self.learned_from[index]),
            label=int(self.labels[index]),
        )

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each sample; shape (samples,)."""
        return np.diff(self.ends)


def content_digest(samples: TokenSamples) -> str:
    """BLAKE2b of what all samples hold, as 16 hex digits; reads each token once.

    Exactness: another order or another token gives another digest.
    """
    digest = hashlib.blake2b(digest_size=8)
    for part in (samples.tokens, samples.ends, samples.learned_from, samples.labels):
        digest.update(np.ascontiguousarray(part).data)
    return digest.hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class Growing:
    """Samples while they are read."""

    tokens: array[int] = field(default_factory=lambda: array("i"))
    ends: array[int] = field(default_factory=lambda: array("q", [0]))
    learned_from: array[int] = field(default_factory=lambda: array("i"))
    labels: array[int] = field(default_factory=lambda: array("q"))

    def add(self, *parts: Sequence[int], learned_from: int = 0, label: int = -1) -> None:
        """Append a sample, whose tokens are those of all parts."""
        for part in parts:
            if isinstance(part, bytes):  # several times faster than number by number
                self.tokens.frombytes(np.frombuffer(part, dtype=np.uint8).astype(np.int32).tobytes())
            else:
                self.tokens.extend(part)
        self.ends.append(len(self.tokens))
        self.learned_from.append(learned_from)
        self.labels.append(label)

    def __len__(self) -> int:
        return len(self.labels)

    def finished(self) -> TokenSamples:
        """The samples, which share the memory of what was grown."""
        return TokenSamples(
            tokens=_view(self.tokens, np.int32),
            ends=_view(self.ends, np.int64),
            learned_from=_view(self.learned_from, np.int32),
            labels=_view(self.labels, np.int64),
        )


def _view(grown: array[int], dtype: Any) -> NDArray[Any]:
    view = np.frombuffer(grown, dtype=dtype) if len(grown) else np.empty(0, dtype=dtype)
    view.setflags(write=False)
    return view
