"""What of a micro-batch a model reads."""

from __future__ import annotations

from torch import Tensor

from wholebatch.errors import UsageError
from wholebatch.rows import RowLayout, row_layout
from wholebatch.split import is_packed
from wholebatch.train.material import Batch


def token_ids(batch: Batch) -> Tensor:
    """The token ids of a micro-batch, of shape (samples, tokens).

    Raises:
        UsageError: there are none, as in a batch of the user's own data set.

    Exactness: no arithmetic; the tensor itself.
    """
    found = batch.get("input_ids")
    if not isinstance(found, Tensor):
        raise UsageError(
            f'the model reads token ids, and the batch has no tensor "input_ids" but {", ".join(batch)}; '
            f"let collate name them so, or set model.source to a function that returns (module, forward)"
        )
    return found


def layout_of(batch: Batch) -> RowLayout | None:
    """Where the samples of a packed row lie, on the row's device; ``None`` of padded samples.

    It is made outside of the module, whose wrapper would move ``sample_lengths`` to the device.
    """
    if not is_packed(batch):
        return None
    return row_layout(batch["sample_lengths"], token_ids(batch).device)
