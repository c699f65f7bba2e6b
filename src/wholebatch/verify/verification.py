"""What verify found, as plain data: each split, the two verdicts, the cause, and their JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from wholebatch.closeness import ParameterError
from wholebatch.record import finite

SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitResult:
    """One split against the whole batch.

    Attributes:
        micro_batch_samples: samples of each micro-batch.
        equal: whether gradients and updated parameters agree within their bounds.
        worst: the worst parameter in units of its bound; ``None`` where the window refused.
        factor: gradient of the split over that of the whole, where this is one number.
        refused: how the counts of items did not match, so that the window refused the update; or ``None``.
    """

    micro_batch_samples: tuple[int, ...]
    equal: bool
    worst: ParameterError | None
    factor: float | None = None
    refused: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON keys; numbers that are not finite become ``None``."""
        return {
            "micro_batch_samples": list(self.micro_batch_samples),
            "equal": self.equal,
            "worst": _error_dict(self.worst),
            "factor": finite(self.factor),
            "refused": self.refused,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Rounding:
    """The second verdict: the working dtype against the float64 truth.

    Attributes:
        dtype: the working dtype.
        within: whether the window stays within what the whole batch and a float32 sum explain.
        worst: the worst gradient; its bound is the allowance.
        whole_error: the whole batch's own distance from the truth, for that parameter.
        micro_batch_samples: the split, the one with most micro-batches.
        cured_when_wide: where not within: whether adding up in float64 brings it back.
    """

    dtype: str
    within: bool
    worst: ParameterError
    whole_error: float
    micro_batch_samples: tuple[int, ...]
    cured_when_wide: bool | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON keys; numbers that are not finite become ``None``."""
        return {
            "dtype": self.dtype,
            "within": self.within,
            "worst": _error_dict(self.worst),
            "whole_error": finite(self.whole_error),
            "micro_batch_samples": list(self.micro_batch_samples),
            "cured_when_wide": self.cured_when_wide,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    """The verdict, with its evidence.

    Attributes:
        equal: every split equals the whole batch, and the working dtype only rounds.
        cause: ``None`` when equal, else a cause of :mod:`wholebatch.verify.diagnosis`.
        factor: how many times too large the gradient is, where this is one number.
        worst: the worst parameter over all splits.
        splits: each split that was tried.
        judged_in: dtype whose rounding the bounds allow for.
        rounding: the second verdict; ``None`` where there is nothing to judge.
        advice: what to do.
        also: further causes seen.
        equal_when_replayed: with randomness, whether the window equals the plain sum of its
            micro-batches under the same random states.
        ruled_out: what does not explain the difference.
        notes: what could not be tried, and why.
        num_samples: of the whole batch.
        num_items: N of the whole batch by term.
        ranks: processes that ran the window.
    """

    equal: bool
    cause: str | None
    factor: float | None
    worst: ParameterError | None
    splits: tuple[SplitResult, ...]
    judged_in: str
    rounding: Rounding | None
    advice: str
    num_samples: int
    num_items: Mapping[str, float]
    ranks: int
    also: tuple[str, ...] = ()
    equal_when_replayed: bool | None = None
    ruled_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """JSON keys, a promise with a schema version; numbers that are not finite become ``None``."""
        return {
            "schema_version": SCHEMA_VERSION,
            "equal": self.equal,
            "cause": self.cause,
            "factor": finite(self.factor),
            "worst": _error_dict(self.worst),
            "judged_in": self.judged_in,
            "num_samples": self.num_samples,
            "num_items": dict(self.num_items),
            "ranks": self.ranks,
            "splits": [split.to_dict() for split in self.splits],
            "rounding": None if self.rounding is None else self.rounding.to_dict(),
            "equal_when_replayed": self.equal_when_replayed,
            "also": list(self.also),
            "ruled_out": list(self.ruled_out),
            "notes": list(self.notes),
            "advice": self.advice,
        }


def _error_dict(error: ParameterError | None) -> dict[str, Any] | None:
    if error is None:
        return None
    return {
        "parameter": error.parameter,
        "quantity": error.quantity,
        "error": finite(error.error),
        "bound": finite(error.bound),
    }
