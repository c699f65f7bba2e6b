"""Can a model take packed rows? It is tried: a few small samples in a row, and each alone.

A model that lets the samples of a row see each other would still train, on another loss, and nothing
would say so. Names and settings of models tell too little: so each is run before the first update.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wholebatch.closeness import equality_margin, reduction_terms, unit_roundoff
from wholebatch.errors import JudgeError, UnsupportedError, UsageError
from wholebatch.oracle import private_copy
from wholebatch.replay import BufferKeeper, random_state_kept
from wholebatch.rows import join_samples, unpack_rows
from wholebatch.train.data.collation import LABELS_IN_ROWS
from wholebatch.train.material import Batch, JobModel, on_device

# Tokens of the row that is tried; fewer where the model takes fewer.
_TOKENS = 32
# Tokens of its samples, over and over.
_SHAPE = (4, 1, 5, 3, 2, 3)
# Above this size of a copy in float64 the model is tried as it is.
_COPY_BYTES = 4 * 2**30
# The most of the difference between mixed and separate samples that may pass for rounding.
_SHARE_OF_MIXED = 0.25


def check_packed_settings(*, kind: str, objective: str, compiled: bool) -> None:
    """Refuse, before anything is loaded, what no packed row can serve.

    Args:
        kind: of the model: "gpt", "folder" or "own".
        objective: ``objective.kind``.
        compiled: ``model.compile``.

    Raises:
        UnsupportedError: ``model.compile`` with another model than the built-in GPT.
        UsageError: an objective of one label for each sample.
    """
    if objective == "label":
        raise UsageError(LABELS_IN_ROWS)
    if compiled and kind != "gpt":
        raise UnsupportedError(
            'model.compile with batch.rows = "packed" is tried for the built-in GPT alone: another '
            "model could be compiled anew for each row; set model.compile = false, or batch.rows = "
            '"padded"'
        )


def probe_packed_rows(
    job_model: JobModel, *, source: str, vocabulary: int | None, max_tokens: int
) -> dict[str, Any]:
    """Run a model on a packed row, and refuse it where a sample in the row is not as it is alone.

    Two things must hold of the logits: those of each sample are what they are when it runs alone, and
    those of the other samples stay what they are when the tokens of the first sample change. Both are
    tried in float64, on a copy, where there is room and the model runs in it; else in its own dtype.

    Args:
        job_model: the model on its device, with its adapters, not yet compiled nor wrapped. Afterwards it
            is what it was, and so is all random state.
        source: ``model.source``, for messages.
        vocabulary: token ids that the model knows; ``None`` where the data does not say.
        max_tokens: longest sample, in tokens.

    Returns:
        Facts for the header of the run: ``rows``, and under ``rows_probe`` the dtype and both differences,
        as shares of the largest logit.

    Raises:
        UsageError: the model fails on a row, gives no logits for each token, or mixes the samples.

    Exactness: a difference is refused beyond the rounding of ``equality_margin``, or a quarter of what
        mixing the samples would make, whichever is less.
    """
    lengths = _lengths(min(max_tokens, _TOKENS))
    known = vocabulary or _vocabulary_of(job_model.module)
    tokens = _token_ids(sum(lengths), known)
    other = tokens.clone()
    other[: lengths[0]] = (other[: lengths[0]] + 1) % known
    refused: Exception | None = None
    for module in _copies(job_model.module):
        try:
            with _left_as_it_was(module):
                tried = _Tried.of(job_model, module, (tokens, other), lengths, source)
        except _FailedError as failed:  # in float64, perhaps for lack of a kernel
            refused = failed.error
            continue
        return _judged(tried, module, source)
    raise UsageError(
        f'model.source {source} fails on a packed row of {len(lengths)} samples (batch.rows = "packed") '
        f"with {type(refused).__name__}: {str(refused)[:200]}; {_ADVICE}"
    ) from refused


_ADVICE = (
    'set batch.rows = "padded", or use a model that keeps the samples of a row apart by '
    'batch["position_ids"] or batch["sample_lengths"]'
)


class _FailedError(Exception):
    """The forward failed in this dtype."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tried:
    """How far the logits of the samples lie apart, in units of the largest of them alone.

    Args:
        apart: in a row, and alone.
        crossing: in a row, those after the first sample, and with other tokens in the first.
        apart_mixed: as parts of one long sample, and alone: what a row may not come near.
        crossing_mixed: as parts of one long sample, and with other tokens in the first.
    """

    apart: float
    crossing: float
    apart_mixed: float
    crossing_mixed: float

    @classmethod
    def of(
        cls,
        job_model: JobModel,
        module: nn.Module,
        rows: tuple[Tensor, Tensor],
        lengths: Sequence[int],
        source: str,
    ) -> _Tried:
        def packed(tokens: Tensor) -> tuple[Tensor, ...]:
            samples = torch.split(tokens, list(lengths))
            row = join_samples(samples, samples, range(len(lengths)))
            return unpack_rows(_logits(job_model, module, row, source), lengths)

        def padded(tokens: Tensor) -> Tensor:
            return _logits(job_model, module, _padded(tokens), source)[0]

        tokens, other = rows
        alone = [padded(sample) for sample in torch.split(tokens, list(lengths))]
        together, changed = packed(tokens), packed(other)
        long, long_changed = (torch.split(padded(row), list(lengths)) for row in rows)
        scale = max(float(part.abs().max()) for part in alone) or 1.0
        return cls(
            apart=_largest(together, alone) / scale,
            crossing=_largest(changed[1:], together[1:]) / scale,
            apart_mixed=_largest(long, alone) / scale,
            crossing_mixed=_largest(long_changed[1:], long[1:]) / scale,
        )


def _logits(job_model: JobModel, module: nn.Module, batch: Batch, source: str) -> Tensor:
    """What the model makes of a batch, in float64 on the host."""
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    try:
        made = job_model.forward(module, on_device(batch, device))
    except Exception as error:  # the user's own code among them
        raise _FailedError(error) from error
    made = getattr(made, "logits", made)
    shape = tuple(batch["input_ids"].shape)
    if not isinstance(made, Tensor) or made.ndim < 2 or tuple(made.shape[:2]) != shape:
        got = f"shape {tuple(made.shape)}" if isinstance(made, Tensor) else f"a {type(made).__name__}"
        raise UsageError(
            f"model.source {source} gives {got} for token ids of shape {shape}, so whether it keeps the "
            f'samples of a packed row apart (batch.rows = "packed") can\'t be tried; let its forward give '
            f'logits (1, tokens, ...), or set batch.rows = "padded"'
        )
    return made.to("cpu", torch.float64)


def _judged(tried: _Tried, module: nn.Module, source: str) -> dict[str, Any]:
    dtype = _narrowest(module)
    margin = _margin(module, dtype, tried.crossing_mixed)
    # Where mixing would itself pass for rounding, only no difference at all tells them apart.
    if tried.crossing != 0.0 and not tried.crossing <= margin < tried.crossing_mixed:
        raise UsageError(
            f"model.source {source} lets the samples of a packed row see each other (batch.rows = "
            f'"packed"): other tokens in the first sample changed the logits of the others by '
            f"{tried.crossing:.1e} of the largest, and rounding explains {margin:.1e}; {_ADVICE}"
        )
    margin = _margin(module, dtype, tried.apart_mixed)
    if not tried.apart <= margin:  # nor where it is no number
        raise UsageError(
            f"model.source {source} computes other logits for a sample in a packed row (batch.rows = "
            f'"packed") than for the same sample alone: {tried.apart:.1e} of the largest apart, and '
            f"rounding explains {margin:.1e}, as where positions run on from sample to sample; {_ADVICE}"
        )
    if tried.crossing_mixed == 0.0 and (zeros := _all_zero(module)):
        raise UsageError(
            f"whether model.source {source} keeps the samples of a packed row apart (batch.rows = "
            f'"packed") can\'t be seen while {", ".join(zeros[:3])} are zero; start them with other '
            f'numbers, or set batch.rows = "padded"'
        )
    probe = {"dtype": str(dtype).removeprefix("torch."), "apart": tried.apart, "crossing": tried.crossing}
    return {"rows": "packed", "rows_probe": probe}


def _lengths(tokens: int) -> tuple[int, ...]:
    """Samples of several lengths, one of a single token and two of the same, so many tokens together.

    More than a few, since a model might count no further.
    """
    lengths, left = [], tokens
    for length in (_SHAPE * tokens)[:tokens]:
        if left > 0:
            lengths.append(min(length, left))
            left -= lengths[-1]
    return tuple(lengths)


def _token_ids(tokens: int, vocabulary: int) -> Tensor:
    """Different ids; where there are enough, not the first few, which are often marks."""
    first = 4 if vocabulary >= 2 * _TOKENS else 0
    return first + torch.arange(tokens) * 5 % (vocabulary - first)


def _vocabulary_of(module: nn.Module) -> int:
    """Ids that every embedding of the model has, where the data does not say which there are."""
    sizes = [layer.num_embeddings for layer in module.modules() if isinstance(layer, nn.Embedding)]
    return min(sizes, default=8)


def _padded(sample: Tensor) -> Batch:
    return {
        "input_ids": sample[None],
        "labels": sample[None],
        "attention_mask": torch.ones_like(sample)[None],
        "sample_ids": torch.zeros(1, dtype=torch.int64),
    }


def _copies(module: nn.Module) -> Iterator[nn.Module]:
    """The model in float64, where there is room, and as it is."""
    if 8 * sum(parameter.numel() for parameter in module.parameters()) <= _COPY_BYTES:
        try:
            copied = private_copy(module, torch.float64, hooks=False)
        except (JudgeError, RuntimeError):  # it can't be copied, or memory ran out
            pass
        else:
            _fill_zeros(copied)
            yield copied
    yield module


def _fill_zeros(copied: nn.Module) -> None:
    """Some models start with an output or a gate of zeros, behind which no mixing would be seen."""
    numbers = torch.Generator().manual_seed(0)
    zeros = set(_all_zero(copied))
    with torch.no_grad():
        for name, parameter in copied.named_parameters():
            if name in zeros:
                drawn = torch.randn(parameter.shape, generator=numbers, dtype=torch.float64)
                parameter.copy_(0.02 * drawn)


def _all_zero(module: nn.Module) -> list[str]:
    """Parameters of nothing but zeros; biases, which usually start so, hide nothing."""
    return [
        name
        for name, parameter in module.named_parameters()
        if parameter.numel() and not name.endswith("bias") and not bool(parameter.detach().any())
    ]


@contextmanager
def _left_as_it_was(module: nn.Module) -> Iterator[None]:
    """Run without dropout and gradients; modes, buffers and random state are put back."""
    modes = [(each, each.training) for each in module.modules()]
    buffers = BufferKeeper(module)
    buffers.keep()
    module.eval()
    try:
        with random_state_kept(), torch.no_grad():
            yield
    finally:
        for each, training in modes:
            each.training = training
        buffers.put_back()


def _narrowest(module: nn.Module) -> torch.dtype:
    found = {p.dtype for p in module.parameters() if p.dtype.is_floating_point}
    return max(found, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float64)


def _margin(module: nn.Module, dtype: torch.dtype, mixed: float) -> float:
    """What rounding explains, but for a few roundings never so much that mixed samples would pass."""
    # Norms and softmaxes of transformers compute in float32, also in a float64 model.
    judged_in = torch.float32 if dtype == torch.float64 else dtype
    matrices = sum(parameter.dim() >= 2 for parameter in module.parameters())
    terms = reduction_terms(module, _TOKENS)
    margin = equality_margin(terms, judged_in, num_roundings=2 * matrices)
    return min(margin, max(_SHARE_OF_MIXED * mixed, 4 * unit_roundoff(judged_in)))


def _largest(some: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """The largest absolute difference; NaN where there is one."""
    parts = [(one - other).abs().max() for one, other in zip(some, others, strict=True)]
    return float(torch.stack(parts).max()) if parts else 0.0
