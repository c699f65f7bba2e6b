"""Which tokens of a sample are hidden, for the objective "masked_token"."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wholebatch.order import random_numbers
from wholebatch.train.data.tokens import Tokenizer
from wholebatch.train.material import IGNORED_LABEL


@dataclass(frozen=True, kw_only=True, slots=True)
class Masks:
    """Hides a share of the tokens of each sample; which ones, (seed, epoch, sample id) alone decide.

    Of n tokens that are no marks, ``max(1, round(share * n))`` are chosen, evenly. Of the chosen ones 8 in
    10 become the mask, 1 in 10 another ordinary token, and 1 in 10 stay, so that a model can't rely on
    seeing the mask; all of them are to be found.

    Args:
        share: of the tokens.
        seed: of the run.
        mask_id: the mask.
        ordinary: ids that may be hidden, and put in the place of others; ascending.
        may_hide: for every id, whether it is one of these; shape (vocabulary,).

    Source: the shares 8, 1 and 1 are those of BERT (Devlin and others 2018, section 3.1).
    """

    share: float
    seed: int
    mask_id: int
    ordinary: NDArray[np.int64]
    may_hide: NDArray[np.bool_]

    def hidden(
        self, tokens: NDArray[np.int32], *, epoch: int, sample_id: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """A sample as the model sees it, and what it is to find.

        Args:
            tokens: ids; shape (tokens,).
            epoch: passes over the data before this one.
            sample_id: which sample this is.

        Returns:
            Input ids, and labels that are -100 where nothing is to be found; both of shape (tokens,). All
            labels are -100 where a sample has nothing but marks.
        """
        seen = tokens.astype(np.int64)
        labels = np.full(len(tokens), IGNORED_LABEL, dtype=np.int64)
        candidates = np.flatnonzero(self.may_hide[tokens])
        n = len(candidates)
        drawn = random_numbers("masks", 3 * n, seed=self.seed, epoch=epoch, sample_id=sample_id)
        drawn = drawn.reshape(3, n)
        chosen = candidates[np.argsort(drawn[0], kind="stable")[: int(self.num_hidden(n))]]
        fate, other = drawn[1, : len(chosen)] % 10, drawn[2, : len(chosen)] % len(self.ordinary)
        labels[chosen] = seen[chosen]
        seen[chosen[fate < 8]] = self.mask_id
        seen[chosen[fate == 8]] = self.ordinary[other[fate == 8]]
        return seen, labels

    def num_hidden(self, num_candidates: int | NDArray[np.int64]) -> NDArray[np.int64]:
        """How many of so many tokens are hidden: their share, rounded; at least 1 where there is one."""
        rounded = np.floor(self.share * np.asarray(num_candidates) + 0.5).astype(np.int64)
        return np.minimum(np.maximum(rounded, 1), num_candidates)


def make_masks(tokenizer: Tokenizer, *, mask_id: int, share: float, seed: int) -> Masks:
    """Masks over the ordinary tokens of a tokenizer.

    Args:
        tokenizer: its special ids are never hidden.
        mask_id: the mask.
        share: of the tokens.
        seed: of the run.
    """
    may_hide = np.ones(tokenizer.vocabulary, dtype=np.bool_)
    may_hide[[token for token in tokenizer.special_ids if token < tokenizer.vocabulary]] = False
    return Masks(
        share=share, seed=seed, mask_id=mask_id, ordinary=np.flatnonzero(may_hide), may_hide=may_hide
    )
