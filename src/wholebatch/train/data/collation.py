"""Samples to a micro-batch: padded to the longest of them, or packed into one row without padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from wholebatch.errors import UsageError
from wholebatch.rows import join_samples
from wholebatch.train.data.masks import Masks
from wholebatch.train.data.store import TokenSample
from wholebatch.train.material import IGNORED_LABEL, Batch

LABELS_IN_ROWS = (
    'batch.rows = "packed" joins the samples of a micro-batch, and objective.kind = "label" reads one '
    'label for each of them at its last token; set batch.rows = "padded"'
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Collation:
    """Makes micro-batches of token samples.

    Args:
        padding_id: token id of padding.
        masks_padding: give an attention mask.
        masks: hide tokens, for the objective "masked_token".
        labelled: labels are those of the samples, for the objective "label".
        rows: "padded", or "packed" for one row without padding, in the form of :mod:`wholebatch.rows`.

    Raises:
        UsageError: packed rows of samples that have one label each.
    """

    padding_id: int = 0
    masks_padding: bool = False
    masks: Masks | None = None
    labelled: bool = False
    rows: Literal["padded", "packed"] = "padded"

    def __post_init__(self) -> None:
        if self.rows == "packed" and self.labelled:
            raise UsageError(LABELS_IN_ROWS)

    def __call__(self, samples: Sequence[TokenSample], ids: Sequence[int], epoch: int) -> Batch:
        """Pad or pack the chosen samples.

        Args:
            samples: chosen ones; none for a micro-batch without samples.
            ids: theirs.
            epoch: passes over the data before this one; decides masks.

        Returns:
            ``input_ids`` of shape (samples, tokens); ``labels`` of the same, not shifted, -100 where
            nothing is learned, or of shape (samples,) where each sample has one; ``sample_ids`` of shape
            (samples,); ``attention_mask`` where wanted, 1 for tokens and 0 for padding. Or packed:
            ``input_ids``, ``position_ids`` and ``labels`` of shape (1, tokens), ``sample_lengths`` and
            ``sample_ids`` of shape (samples,).

        Exactness: padding supervises nothing; a model that heeds the mask, or sees only what comes before,
        computes for each sample what it would compute without padding.
        """
        lengths = [len(sample.tokens) for sample in samples]
        inputs, labels = self._unpadded(samples, ids, epoch)
        if self.rows == "packed":
            # Masked labels are not shifted: each lies at the token that is to be found.
            shifted = self.masks is None
            return join_samples(
                [torch.from_numpy(row) for row in inputs],
                [torch.from_numpy(row) for row in labels],
                ids,
                shifted=shifted,
                ignore_index=IGNORED_LABEL,
            )
        batch = {
            "input_ids": _padded(inputs, lengths, self.padding_id),
            "labels": torch.tensor([sample.label for sample in samples], dtype=torch.int64)
            if self.labelled
            else _padded(labels, lengths, IGNORED_LABEL),
            "sample_ids": torch.tensor(ids, dtype=torch.int64),
        }
        if self.masks_padding:
            batch["attention_mask"] = _padded([np.ones(n, dtype=np.int64) for n in lengths], lengths, 0)
        return batch

    def _unpadded(
        self, samples: Sequence[TokenSample], ids: Sequence[int], epoch: int
    ) -> tuple[list[NDArray[np.int64]], list[NDArray[np.int64]]]:
        """The unpadded input and labels of each sample."""
        if self.masks is not None:
            both = [
                self.masks.hidden(sample.tokens, epoch=epoch, sample_id=number)
                for sample, number in zip(samples, ids, strict=True)
            ]
            return [seen for seen, _ in both], [labels for _, labels in both]
        inputs = [sample.tokens.astype(np.int64) for sample in samples]
        labels = [tokens.copy() for tokens in inputs]
        for row, sample in zip(labels, samples, strict=True):
            row[: sample.learned_from] = IGNORED_LABEL
        return inputs, labels


def _padded(rows: Sequence[NDArray[np.int64]], lengths: Sequence[int], filler: int) -> torch.Tensor:
    padded = np.full((len(rows), max(lengths, default=0)), filler, dtype=np.int64)
    for place, row in enumerate(rows):
        padded[place, : len(row)] = row
    return torch.from_numpy(padded)
