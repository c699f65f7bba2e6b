"""What the training job is made of: its samples with their objective, and its model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from wholebatch.loading.padding import IGNORED_LABEL as IGNORED_LABEL
from wholebatch.loading.reading import Samples as Samples
from wholebatch.objective import Objective
from wholebatch.split import SAMPLE_LENGTHS

_ON_HOST = ("sample_ids", SAMPLE_LENGTHS)
# One micro-batch: tensors by name, and "sample_ids" of shape (samples,).
Batch = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class JobData:
    """The samples and what is learned of them.

    Args:
        train: samples to train on.
        held_out: samples to evaluate on; may be empty.
        objective: which items count, their summed loss and their number.
        collate: ``collate(samples, ids, epoch)`` makes a micro-batch of chosen samples: padded tensors,
            and ``sample_ids``. The epoch matters where something is drawn anew in each, as masks are.
            Evaluations pass epoch 0.
        collate_padded: the same in padded form, for the big batch that packed rows are compared with;
            None where ``collate`` pads.
        vocabulary: token ids that the model must know; None where the source is the user's own.
        num_labels: classes of the objective "label"; None for the others.
        padding_id: token id of padding, masked or not attended to.
        lengths: tokens of each sample to train on, shape (samples,); None where nobody knows them ahead.
        held_out_lengths: the same of the samples to evaluate on.
        items: items of each sample to train on, the same in every epoch, shape (samples,); None where
            nobody knows them ahead.
        length_of: tokens of a sample that was read, for samples whose lengths are not known ahead; None
            where that can't be told either.
        facts: what the run header says about the data.
    """

    train: Samples
    held_out: Samples
    objective: Objective
    collate: Callable[[Sequence[Any], Sequence[int], int], Batch]
    collate_padded: Callable[[Sequence[Any], Sequence[int], int], Batch] | None = None
    vocabulary: int | None = None
    num_labels: int | None = None
    padding_id: int = 0
    lengths: NDArray[np.int64] | None = None
    held_out_lengths: NDArray[np.int64] | None = None
    items: NDArray[np.int64] | None = None
    length_of: Callable[[Any], int] | None = None
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class JobModel:
    """The model and how a micro-batch goes through it.

    Args:
        module: on the host or the device, with its parameters in their final dtype.
        forward: ``forward(module, batch)`` gives what the objective takes, such as logits. The batch
            lies on the module's device.
        read_out: ``read_out(output, batch)``: the same, of what the last stage of a pipeline gives; None
            where that is it already.
        facts: what the run header says about the model: its name, parameters, trainable parameters.
    """

    module: nn.Module
    forward: Callable[[nn.Module, Batch], Any]
    read_out: Callable[[Tensor, Batch], Any] | None = None
    facts: dict[str, Any] = field(default_factory=dict)


def on_device(batch: Batch, device: Any) -> Batch:
    """The batch with its tensors on ``device``; sample ids and lengths stay where they are read."""
    return {
        name: value.to(device, non_blocking=True)
        if isinstance(value, Tensor) and name not in _ON_HOST
        else value
        for name, value in batch.items()
    }
