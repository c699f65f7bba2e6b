"""Samples of the user's own in packed rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wholebatch.errors import UsageError
from wholebatch.objective import Objective
from wholebatch.rows import pack_rows
from wholebatch.train.material import Batch

_IN_ROWS = ("input_ids", "labels", "attention_mask")


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnRows:
    """Makes packed micro-batches of samples with ``input_ids`` and ``labels``.

    Args:
        shifted: whether the objective shifts the labels, and the first of each sample is no target.
    """

    shifted: bool

    def __call__(self, samples: Sequence[Any], ids: Sequence[int], epoch: int) -> Batch:  # noqa: ARG002
        """One row of the samples.

        Args:
            samples: chosen ones.
            ids: theirs.
            epoch: not looked at.

        Raises:
            SplitError: a sample without input_ids, or with another number of labels.

        Exactness: no arithmetic.
        """
        return pack_rows(samples, ids, shifted=self.shifted)


def own_rows(
    objective: Objective,
    padded: Callable[[Sequence[Any], Sequence[int], int], Batch],
    first: Any,
    *,
    own_collate: bool,
    source: str,
) -> OwnRows:
    """How the samples of a source are packed, so that a row has the items of the padded samples.

    Args:
        objective: of the user's own.
        padded: makes the padded form.
        first: sample 0.
        own_collate: whether ``padded`` calls a collate of the user's own.
        source: named in messages.

    Raises:
        UsageError: samples that no row can be made of, or an objective whose items can't be compared.
    """
    if own_collate:
        raise UsageError(
            f'data.source: {source} brings a collate, and batch.rows = "packed" makes rows of input_ids '
            f'and labels itself; leave the collate out, or set batch.rows = "padded"'
        )
    others = sorted(set(first) - set(_IN_ROWS)) if isinstance(first, Mapping) else [type(first).__name__]
    if others or "input_ids" not in first:
        raise UsageError(
            f'data.source: batch.rows = "packed" takes samples that are dicts of input_ids and labels, and '
            f'sample 0 of {source} has {", ".join(others) or "no input_ids"}; set batch.rows = "padded"'
        )
    two = [first, first], [0, 0], 0
    wanted = objective.count(padded(*two))
    for shifted in (True, False):
        found = objective.count(OwnRows(shifted=shifted)(*two))
        if None not in found.values() and all(float(found[t] or 0) == float(wanted[t] or 0) for t in found):
            return OwnRows(shifted=shifted)
    raise UsageError(
        f'data.source: with batch.rows = "packed" sample 0 of {source}, twice in a row, has the items '
        f"{found}, and padded {wanted}, so its objective can't be trusted with rows; count the items ahead "
        f'by the labels, as next_token_loss and token_loss do, or set batch.rows = "padded"'
    )
