"""The usual losses as objectives: summed, counted, never divided.

What each counts as an item is the first thing its docstring says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from wholebatch.errors import ObjectiveError
from wholebatch.gradients import is_sharded
from wholebatch.objective import CheckedLossSum, Number, SummedLoss, of_all_ranks

Selector = str | int | Callable[[Any], Tensor]

_FEW_LABELS = 2**15  # more of them take longer to copy than to count one micro-batch after another


def next_token_loss(
    *,
    ignore_index: int = -100,
    class_weights: Tensor | None = None,
    label_smoothing: float = 0.0,
    labels: Selector = "labels",
) -> SummedLoss:
    """Cross-entropy of each position's logits against the **next** position's label. It shifts.

    ``sum over samples b and positions t < T-1 with labels[b, t+1] != ignore_index`` of
    ``w[y] * -log softmax(logits[b, t])[y]`` with ``y = labels[b, t+1]``; N is the number of those
    labels, or the sum of their ``class_weights``. The first label of a sample is never a target
    and is not counted. Give it unshifted labels: usually the input ids, with ``ignore_index`` where
    nothing is to be learned.

    Args:
        ignore_index: label value of positions that do not count.
        class_weights: ``[classes]``, what a target of each class counts for, or ``None``.
        label_smoothing: share of the target spread evenly over all classes, in [0, 1).
        labels: key, index or function that finds ``[samples, positions]`` integer labels in a batch.

    Returns:
        An objective for logits ``[samples, positions, classes]`` (or an output with ``.logits``).

    Raises:
        ObjectiveError: labels missing, not integers, or of another shape than the logits.

    Exactness: exact in real arithmetic over any split. Half-precision logits are summed in float32.
    Source: the weighted mean is that of ``torch.nn.functional.cross_entropy``.
    """

    def find(batch: Any) -> Tensor:
        found = _labels(batch, labels, "next_token_loss")
        if found.ndim != 2:
            raise ObjectiveError(
                f"next_token_loss takes labels of shape [samples, positions], got {list(found.shape)}; "
                f"token_loss takes labels that are not shifted, of any shape"
            )
        return found

    return _CrossEntropy(
        name="next_token_loss",
        find=find,
        shift=True,
        ignore_index=ignore_index,
        class_weights=class_weights,
        label_smoothing=label_smoothing,
    ).objective()


def token_loss(
    *,
    ignore_index: int = -100,
    class_weights: Tensor | None = None,
    label_smoothing: float = 0.0,
    labels: Selector = "labels",
) -> SummedLoss:
    """Cross-entropy of each position's logits against the label at the **same** position. No shift.

    ``sum over positions with label y != ignore_index of w[y] * -log softmax(logits)[y]``; N is the
    number of those labels, or the sum of their ``class_weights``. For masked language models,
    tagging, and classification, where logits are ``[samples, classes]`` and labels ``[samples]``.

    Args:
        ignore_index: label value of positions that do not count.
        class_weights: ``[classes]``, what a target of each class counts for, or ``None``.
        label_smoothing: share of the target spread evenly over all classes, in [0, 1).
        labels: key, index or function that finds the integer labels ``[...]`` in a batch.

    Returns:
        An objective for logits ``[..., classes]`` (or an output with ``.logits``).

    Raises:
        ObjectiveError: labels missing, not integers, or of another shape than the logits.

    Exactness: exact in real arithmetic over any split. Half-precision logits are summed in float32.
    Source: the weighted mean is that of ``torch.nn.functional.cross_entropy``.
    """

    def find(batch: Any) -> Tensor:
        return _labels(batch, labels, "token_loss")

    return _CrossEntropy(
        name="token_loss",
        find=find,
        shift=False,
        ignore_index=ignore_index,
        class_weights=class_weights,
        label_smoothing=label_smoothing,
    ).objective()


def regression_loss(
    *,
    kind: str = "squared",
    targets: Selector = "targets",
    mask: Selector | None = None,
) -> SummedLoss:
    """Squared, absolute or Huber error, summed over elements.

    ``sum over elements (with mask 1) of f(output - target)``; N is the number of those elements.

    Args:
        kind: ``"squared"``, ``"absolute"`` or ``"huber"`` (threshold 1).
        targets: finds targets ``[samples, ...]`` in a batch; the output must have the same shape.
        mask: finds a mask of the targets' shape, 1 for elements that count; all count by default.

    Returns:
        An objective for outputs of the targets' shape.

    Raises:
        ObjectiveError: an unknown kind, or shapes that differ. (Torch would broadcast ``[m]``
            against ``[m, 1]`` to ``[m, m]`` and train on pairs that do not exist.)

    Exactness: exact in real arithmetic over any split.
    """
    functions: dict[str, Callable[..., Tensor]] = {
        "squared": F.mse_loss,
        "absolute": F.l1_loss,
        "huber": F.huber_loss,
    }
    if kind not in functions:
        raise ObjectiveError(f"regression_loss(kind={kind!r}) is none of {', '.join(map(repr, functions))}")
    return _elementwise("regression_loss", functions[kind], targets, mask)


def binary_loss(
    *,
    labels: Selector = "labels",
    mask: Selector | None = None,
    pos_weight: Tensor | None = None,
) -> SummedLoss:
    """Binary cross-entropy on logits, one item for each label of each sample; also multi-label.

    ``sum over elements (with mask 1) of -[p y log s(x) + (1 - y) log(1 - s(x))]`` with
    ``s`` the logistic function and ``p = pos_weight``; N is the number of those elements.
    ``pos_weight`` does not change N, as in PyTorch's own mean.

    Args:
        labels: finds labels in [0, 1] of shape ``[samples, ...]`` in a batch.
        mask: finds a mask of the labels' shape, 1 for elements that count; all count by default.
        pos_weight: ``[labels per sample]``, the weight of positive labels, or ``None``.

    Returns:
        An objective for logits of the labels' shape.

    Raises:
        ObjectiveError: labels missing, or of another shape than the logits.

    Exactness: exact in real arithmetic over any split.
    Source: ``torch.nn.functional.binary_cross_entropy_with_logits``.
    """

    def loss(logits: Tensor, wanted: Tensor, reduction: str) -> Tensor:
        weight = None if pos_weight is None else pos_weight.to(logits)
        return F.binary_cross_entropy_with_logits(
            logits, wanted.to(logits.dtype), pos_weight=weight, reduction=reduction
        )

    return _elementwise("binary_loss", loss, labels, mask)


def _labels(batch: Any, selector: Selector, name: str) -> Tensor:
    found = batch.get(selector) if type(batch) is dict else None
    if type(found) is Tensor and found.dtype == torch.int64:
        return found  # what nearly everybody has; asked for three times a micro-batch
    found = _select(batch, selector, name)
    if found.is_floating_point() or found.dtype == torch.bool:
        raise ObjectiveError(f"{name} takes integer labels, got {found.dtype} of shape {list(found.shape)}")
    # in a narrower dtype an ignore_index of -100 would wrap
    return found if found.dtype == torch.int64 else found.long()


def _select(batch: Any, selector: Selector, name: str) -> Tensor:
    if callable(selector):
        found = selector(batch)
    else:
        try:
            found = batch[selector]
        except (KeyError, IndexError, TypeError) as error:
            has = f"keys {list(batch)}" if isinstance(batch, Mapping) else f"type {type(batch).__name__}"
            raise ObjectiveError(
                f"{name} found no {selector!r} in a batch with {has}; say where it is: a key, an index "
                f"for a tuple, or a function of the batch"
            ) from error
    if not isinstance(found, Tensor):
        raise ObjectiveError(f"{name} found a {type(found).__name__} at {selector!r}; it needs a tensor")
    return found


def _logits(output: Any) -> Tensor:
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", output)
    if not isinstance(logits, Tensor):
        raise ObjectiveError(
            f"a model output of type {type(output).__name__} has no logits; give the objective a tensor"
        )
    # A sum of thousands of items in half precision would lose most of them.
    return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits


@dataclass(frozen=True, kw_only=True, slots=True)
class _CrossEntropy:
    """Cross-entropy with whole labels: its sum, and how many it is of.

    Args:
        name: of the objective, for messages.
        find: the integer labels ``[..., positions]`` of a batch, not shifted.
        shift: whether a position's target is the label of the next one.
        ignore_index, class_weights, label_smoothing: as for `next_token_loss`.

    Raises:
        ObjectiveError: a label smoothing outside [0, 1).
    """

    name: str
    find: Callable[[Any], Tensor]
    shift: bool
    ignore_index: int
    class_weights: Tensor | None
    label_smoothing: float

    def __post_init__(self) -> None:
        if not 0.0 <= self.label_smoothing < 1.0:
            raise ObjectiveError(f"{self.name}(label_smoothing={self.label_smoothing!r}) is not in [0, 1)")

    def objective(self) -> SummedLoss:
        """The sum, its count ahead, and that of several micro-batches together."""
        return SummedLoss(
            name=self.name,
            loss=self._loss,
            items=lambda batch: self._number(self._targets(self.find(batch))),
            items_of_each=self._number_of_each,
            forward_positions=lambda batch: self.find(batch).numel(),
        )

    def _targets(self, labels: Tensor) -> Tensor:
        return labels[:, 1:] if self.shift else labels

    def _number(self, targets: Tensor) -> Number:
        counts = targets != self.ignore_index
        if self.class_weights is None:
            return torch.count_nonzero(counts)  # on the host twice as fast as a sum of booleans
        weights = self.class_weights.to(device=targets.device, dtype=torch.float64)
        # No boolean indexing: on an accelerator it would wait for the device.
        return (weights[torch.where(counts, targets, 0)] * counts).sum()

    def _number_of_each(self, batches: Sequence[Any]) -> list[Number]:
        found = [self.find(batch) for batch in batches]
        if self.class_weights is None and _are_few_and_alike(found):
            together = torch.stack(found) != self.ignore_index
            counts = together[:, :, 1:] if self.shift else together
            return cast(list[Number], counts.sum(tuple(range(1, counts.ndim))).tolist())
        return [self._number(self._targets(labels)) for labels in found]

    def _loss(self, output: Any, batch: Any) -> tuple[Tensor, Number]:
        logits, targets = _logits(output), self.find(batch)
        if targets.device != logits.device:
            targets = targets.to(logits.device, non_blocking=True)
        weights = None if self.class_weights is None else self.class_weights.to(logits)
        self._check_shapes(logits, targets, weights)
        if self.shift and targets.shape[-1]:  # of no tokens there is nothing to shift
            # Shift the labels, not the logits: a slice of the logits would copy the largest tensor here.
            targets = torch.constant_pad_nd(targets, (-1, 1), self.ignore_index)
        rows, targets = logits.flatten(0, -2), targets.flatten()
        if is_sharded(rows):
            return self._of_classes_in_parts(rows, targets, weights), self._number(targets)
        summed = F.cross_entropy(
            rows,
            targets,
            weight=weights,
            ignore_index=self.ignore_index,
            reduction="sum",
            label_smoothing=self.label_smoothing,
        )
        if weights is None and self.label_smoothing == 0.0:
            counted = _counted_by_kernel(summed)
            if counted is not None:
                return CheckedLossSum(summed, counted)
        return summed, self._number(targets)

    def _check_shapes(self, logits: Tensor, labels: Tensor, weights: Tensor | None) -> None:
        if logits.shape[:-1] != labels.shape:
            raise ObjectiveError(
                f"{self.name}: logits of shape {list(logits.shape)} do not fit labels of shape "
                f"{list(labels.shape)}; logits are [..., classes] and labels [...]"
            )
        if weights is not None and weights.shape != logits.shape[-1:]:
            raise ObjectiveError(
                f"{self.name}: {weights.numel()} class weights do not fit logits of {logits.shape[-1]} "
                f"classes"
            )

    def _of_classes_in_parts(self, rows: Any, targets: Tensor, weights: Tensor | None) -> Tensor:
        """The sum where classes are cut over ranks, under torch's ``loss_parallel``.

        Whose backward looks class weights up by the ignored labels too (torch 2.13), so they are applied to
        the loss of each position, which all ranks have whole.
        """
        if self.label_smoothing > 0.0:
            raise ObjectiveError(
                f"{self.name}(label_smoothing={self.label_smoothing!r}) needs the logits of all classes, "
                f"and these are cut over ranks, {tuple(rows.placements)}; leave it out, or give the "
                f"objective logits.full_tensor()"
            )
        kind = "sum" if weights is None else "none"
        try:
            found = F.cross_entropy(rows, targets, ignore_index=self.ignore_index, reduction=kind)
        except RuntimeError as error:
            raise ObjectiveError(
                f"{self.name}: the logits are cut over ranks, {tuple(rows.placements)}, and torch can't "
                f"sum their losses ({error}); run the whole update inside `with loss_parallel():`, its "
                f"backward too, or give the objective logits.full_tensor()"
            ) from error
        losses: Tensor = of_all_ranks(found)
        if weights is None:
            return losses
        return (losses * weights[torch.where(targets != self.ignore_index, targets, 0)]).sum()


def _are_few_and_alike(found: Sequence[Tensor]) -> bool:
    """Whether labels of several micro-batches are soonest counted as one tensor: few, on the host."""
    kinds = {(wanted.shape, wanted.is_cpu) for wanted in found}
    if len(kinds) != 1 or not found[0].is_cpu or found[0].ndim == 0:
        return False
    return len(found) * found[0].numel() <= _FEW_LABELS


def _counted_by_kernel(summed: Tensor) -> Tensor | None:
    """The targets that cross-entropy's kernel counted as it summed; ``None`` where it tells nobody.

    It keeps the number for its backward. Without a graph there is none; and where a hook keeps what a
    graph saves, as under activation checkpointing, to ask for it would run the forward again.
    """
    saved: Any = getattr(summed.grad_fn, "_raw_saved_total_weight", None)
    return saved.data if saved is not None and saved.unpack_hook is None else None


def _elementwise(
    name: str, function: Callable[..., Tensor], targets: Selector, mask: Selector | None
) -> SummedLoss:
    def number(batch: Any) -> Number:
        wanted = _select(batch, targets, name)
        return wanted.numel() if mask is None else (_select(batch, mask, name) != 0).sum()

    def loss(output: Any, batch: Any) -> tuple[Tensor, Number]:
        values = _logits(output)
        wanted = _select(batch, targets, name).to(values.device, non_blocking=True)
        if values.shape != wanted.shape:
            raise ObjectiveError(
                f"{name}: an output of shape {list(values.shape)} does not fit targets of shape "
                f"{list(wanted.shape)}; torch would broadcast them against each other, so reshape one, "
                f"for instance output.squeeze(-1)"
            )
        if mask is None:
            return function(values, wanted, reduction="sum"), wanted.numel()
        counts = _select(batch, mask, name).to(values.device, non_blocking=True) != 0
        if counts.shape != wanted.shape:
            raise ObjectiveError(
                f"{name}: a mask of shape {list(counts.shape)} does not fit targets of shape "
                f"{list(wanted.shape)}; give one number for each element of the targets"
            )
        # Masked elements are replaced before and after, not multiplied by zero: a NaN in padding
        # would survive 0 * NaN, forward and backward.
        each = function(torch.where(counts, values, 0), torch.where(counts, wanted, 0), reduction="none")
        return torch.where(counts, each, 0).sum(), counts.sum()

    return SummedLoss(
        name=name,
        loss=loss,
        items=number,
        forward_positions=lambda batch: _select(batch, targets, name).numel(),
    )
