"""What a run did, in updates, samples and items: one JSON line for every attempted update.

A run folder holds::

    header.json         the plan, the seeds and the versions: written once, before the first update
    records.jsonl       one UpdateRecord a line, in the order of the updates
    evaluations.jsonl   one Evaluation a line
    end.json            how the run ended; absent when it was killed or goes on
    resumptions.jsonl   one Resumption a line, for every time that the run was resumed
    abandoned.jsonl     what was made after the checkpoint that a resumption came back to

Everything here is plain data and imports no torch, so that a log can be read on any machine. Within
one schema version keys may be added, and a reader ignores those that it does not know.
``wholebatch.run_folder`` writes and reads such a folder.
"""

from __future__ import annotations

import dataclasses
import json
import math
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from typing import Any, Literal

from wholebatch.errors import RecordError

# Of the files of a run folder; what ``--json`` writes has versions of its own.
SCHEMA_VERSION = 1
# What an item of the global batch counts for: 1/N, or 1 / (micro-batches x items of its own micro-batch).
Weighting = Literal["items", "micro_batch_means"]
WEIGHTINGS: tuple[Weighting, ...] = ("items", "micro_batch_means")
Outcome = Literal["applied", "skipped_nonfinite", "skipped_empty"]
OUTCOMES: tuple[Outcome, ...] = ("applied", "skipped_nonfinite", "skipped_empty")
EndReason = Literal["done", "interrupted", "failed"]
STOPPED_BY_USER = "stopped from the keyboard"

HEADER_FILE = "header.json"
RECORDS_FILE = "records.jsonl"
EVALUATIONS_FILE = "evaluations.jsonl"
END_FILE = "end.json"
RESUMPTIONS_FILE = "resumptions.jsonl"
ABANDONED_FILE = "abandoned.jsonl"
LOCK_FILE = "writer.lock"


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateRecord:
    """One attempted update, over all replicas.

    ``loss_per_item = sum_k c_k * L_k / N_k`` over the terms k of the objective, with L_k the summed
    loss and N_k the items of the *whole* global batch, never of one micro-batch or rank.

    Args:
        outcome: whether the update was applied, or why it was skipped.
        reason: plain words for a skip; None when applied.
        updates_attempted: attempted updates of the run so far, this one included.
        updates_applied: applied updates of the run so far, this one included if it was applied.
        micro_batches: micro-batches of this update, over all replicas.
        samples: samples of this update, over all replicas.
        samples_left_out: samples of its global batch that could not be read and are not in it.
        items: supervised items of the objective's first term (``terms`` has those of each); the sum of
            their weights where items have weights.
        positions: positions that went through the forward, padding included; 0 where nobody told
            them, as with an objective that does not know its positions.
        loss_per_item: None when it is not finite or there are no items.
        sample_digest: 16 hex digits that depend on the set of sample ids alone; None when unknown.
        terms: by term, ``{"items": N_k, "loss_per_item": L_k / N_k, "coefficient": c_k}``.
        gradient_norm: global 2-norm before clipping; None when not finite or not computed.
        gradient_norm_after_clip: the same after clipping.
        loss_scale: the scaler's scale in this update; None without a scaler.
        learning_rates: one for every parameter group, in order, as this update used them; None for
            one that is not finite.
        reductions: gradient reductions that this rank issued in this update; 0 on one process.
        weighting: "items": each counts 1/N. "micro_batch_means": the mean over micro-batches of their own
            means was differentiated, which is not equal to the big batch; ``loss_per_item`` is as ever.
        accumulated_in: the narrowest dtype that this rank added the gradients of micro-batches up in, such
            as "float32"; None where nobody told.
        partial: True when the global batch has fewer samples than the plan says.
        seconds: wall time from entering the update, before its items are counted, to the end of the
            finish.
        peak_memory_bytes: one for every rank, in rank order; None when not measured.
    """

    outcome: Outcome
    updates_attempted: int
    updates_applied: int
    micro_batches: int
    samples: int
    items: int | float
    positions: int
    loss_per_item: float | None
    gradient_norm: float | None
    seconds: float
    reason: str | None = None
    sample_digest: str | None = None
    terms: dict[str, dict[str, float | None]] = field(default_factory=dict)
    gradient_norm_after_clip: float | None = None
    loss_scale: float | None = None
    learning_rates: Sequence[float | None] = field(default_factory=list)
    reductions: int = 0
    weighting: Weighting = "items"
    accumulated_in: str | None = None
    partial: bool = False
    samples_left_out: int = 0
    peak_memory_bytes: list[int] | None = None

    def __post_init__(self) -> None:
        if self.outcome not in OUTCOMES:
            raise RecordError(f"outcome {self.outcome!r} is not one of {', '.join(OUTCOMES)}")

    @property
    def unsupervised_share(self) -> float | None:
        """See the function ``unsupervised_share``."""
        return unsupervised_share(self.items, self.positions)

    def to_dict(self) -> dict[str, Any]:
        """The record as JSON-ready data with its schema version; NaN and infinity are None."""
        return _versioned(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """The loss of one data split: ``loss_per_item = L / N`` over the whole split and all ranks.

    Args:
        split: name of the split.
        updates_applied: applied updates of the run when it was evaluated.
        samples_consumed: training samples that the run had consumed by then.
        samples: samples of the split.
        items: N, the supervised items of the split.
        loss_per_item: L / N; None when it is not finite.
        seconds: wall time of the evaluation.
    """

    split: str
    updates_applied: int
    samples_consumed: int
    samples: int
    items: int | float
    loss_per_item: float | None
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """The evaluation as JSON-ready data with its schema version."""
        return _versioned(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunHeader:
    """What was the same for every update of a run.

    Args:
        global_batch_samples: samples of one update: m x A x D; None where it is given in items.
        micro_batch_samples: m; None where tokens bound a micro-batch.
        micro_batches_per_window: A; None where it is not the same for all.
        replicas: D.
        layout: ranks and parallel degrees.
        tail: what becomes of the samples that do not fill a global batch: "partial" or "drop".
        precision: the dtype of the parameters and of the forward, in words.
        normalisation: what the summed loss is divided by, in words.
        global_batch_items: items of one update where they are the same for all, or, where the global
            batch is given in items, the most it may have; else None.
        tokens_per_micro_batch: positions of a micro-batch at most; None where m cuts them.
        rows: "padded", or "packed" where samples follow each other without padding.
        seeds: by use.
        versions: by package.
        started_at: ISO 8601, UTC.
        command: the words of the command line.
        dataset: facts about the data: its name, samples, split rule.
        model: facts about the model: its name, parameters.
        settings: the configuration of the run.
        proof: the verdict on the first global batch; None when it was not asked for.
        launch: by which the run's torchrun is known again when it restarts the job; empty without one.
    """

    global_batch_samples: int | None
    micro_batch_samples: int | None
    micro_batches_per_window: int | None
    replicas: int
    layout: dict[str, int]
    tail: str
    precision: str
    normalisation: str = "sum over items / N"
    global_batch_items: int | None = None
    tokens_per_micro_batch: int | None = None
    rows: str = "padded"
    seeds: dict[str, int] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=lambda: package_versions())
    started_at: str = field(default_factory=lambda: utc_now())
    command: list[str] = field(default_factory=list)
    dataset: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    proof: dict[str, Any] | None = None
    launch: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The header as JSON-ready data with its schema version."""
        return _versioned(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunEnd:
    """How a run ended.

    Args:
        reason: "done", "interrupted" by the user, or "failed".
        message: what there is to say about it; None for nothing.
        ended_at: ISO 8601, UTC.
    """

    reason: EndReason
    message: str | None = None
    ended_at: str = field(default_factory=lambda: utc_now())

    def to_dict(self) -> dict[str, Any]:
        """The end as JSON-ready data with its schema version."""
        return _versioned(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumption:
    """A run was resumed, from the end of an update that a checkpoint holds.

    Args:
        updates_attempted: attempted updates of the run at that checkpoint.
        samples: training samples that the run had consumed by then.
        micro_batch_samples: m from here on; None where tokens bound a micro-batch.
        micro_batches_per_window: A from here on; None where it is not the same for all.
        tokens_per_micro_batch: positions of a micro-batch at most from here on; None where m cuts them.
        rows: "padded" or "packed" from here on.
        replicas: D from here on.
        layout: ranks and parallel degrees from here on.
        precision: as in the header, from here on.
        command: the words of the command line.
        changed_settings: by name, ``[before, after]`` of each setting that is another from here on.
        versions: by package.
        at: ISO 8601, UTC.
        abandoned_updates: updates made after that checkpoint, whose records were moved away;
            ``RunLog.resume`` fills it in.
        previous_end: how the run had ended before; None when it was killed. ``RunLog.resume`` fills
            it in.
    """

    updates_attempted: int
    samples: int
    micro_batch_samples: int | None
    micro_batches_per_window: int | None
    replicas: int
    layout: dict[str, int]
    precision: str
    tokens_per_micro_batch: int | None = None
    rows: str = "padded"
    command: list[str] = field(default_factory=list)
    changed_settings: dict[str, list[Any]] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=lambda: package_versions())
    at: str = field(default_factory=lambda: utc_now())
    abandoned_updates: int = 0
    previous_end: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """The resumption as JSON-ready data with its schema version."""
        return _versioned(self)


@dataclass(kw_only=True, slots=True)
class Counters:
    """Totals of a run, over all replicas.

    ``updates_attempted = updates_applied + updates_skipped_nonfinite + updates_skipped_empty``.
    Micro-batches, samples and items are those of every attempted update: the data of a skipped
    update is consumed. An update that was rolled back counts nowhere. Items are those of the
    objective's first term, as in the records. Samples that could not be read are left out of
    ``samples`` and counted beside them.
    """

    micro_batches: int = 0
    updates_attempted: int = 0
    updates_applied: int = 0
    updates_skipped_nonfinite: int = 0
    updates_skipped_empty: int = 0
    samples: int = 0
    items: int | float = 0
    samples_left_out: int = 0

    @property
    def position(self) -> int:
        """Where in the order of the samples the next update begins: those consumed, read or left out."""
        return self.samples + self.samples_left_out

    def advance(
        self,
        *,
        outcome: Outcome,
        micro_batches: int,
        samples: int,
        items: int | float,
        samples_left_out: int = 0,
    ) -> None:
        """Count one attempted update and what it consumed, over all replicas.

        Raises:
            RecordError: an outcome that there is not.
        """
        if outcome not in OUTCOMES:
            raise RecordError(f"outcome {outcome!r} is not one of {', '.join(OUTCOMES)}")
        self.updates_attempted += 1
        name = f"updates_{outcome}"
        setattr(self, name, getattr(self, name) + 1)
        self.micro_batches += micro_batches
        self.samples += samples
        self.items += items
        self.samples_left_out += samples_left_out

    def state_dict(self) -> dict[str, int | float]:
        """All totals by name."""
        return dataclasses.asdict(self)

    def load_state_dict(self, state: Mapping[str, int | float]) -> None:
        """Take over totals that ``state_dict`` gave.

        Raises:
            RecordError: a total is missing or unknown; nothing is changed.
        """
        state = {"samples_left_out": 0, **state}  # which older checkpoints do not have
        names = {f.name for f in dataclasses.fields(self)}
        if set(state) != names:
            odd = ", ".join(sorted(names ^ set(state)))
            raise RecordError(f"counters to load: {odd} is missing or unknown; expected {sorted(names)}")
        for name, total in state.items():
            setattr(self, name, total)


def unsupervised_share(items: int | float, positions: int) -> float | None:
    """``1 - items / positions``: the share of positions that supervised nothing.

    Args:
        items: of one update or more.
        positions: of the same updates; 0 where they are not known.

    Returns:
        From 0 to 1. None without positions, and where there are more items than positions, as sums
        of weights may be: then the quotient is no share.
    """
    return 1.0 - items / positions if 0 < positions >= items else None


def utc_now() -> str:
    """This moment as ISO 8601 in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def package_versions(names: Iterable[str] = ("torch", "numpy", "wholebatch")) -> dict[str, str]:
    """Versions of Python and of the named packages that are installed, without importing them."""
    versions = {"python": platform.python_version()}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def json_text(data: dict[str, Any], indent: int | None = None) -> str:
    """Plain data as JSON.

    Raises:
        RecordError: something in it is no plain data.
    """
    try:
        return json.dumps(data, allow_nan=False, indent=indent)
    except TypeError as error:
        raise RecordError(f"a record holds plain numbers, texts and lists only: {error}") from error


def _versioned(value: UpdateRecord | Evaluation | RunHeader | RunEnd | Resumption) -> dict[str, Any]:
    return {"schema_version": SCHEMA_VERSION, **finite(dataclasses.asdict(value))}


def finite(value: Any) -> Any:
    """Plain JSON values with None for NaN and infinities, at any depth.

    JSON has neither; other readers would refuse the whole document.
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    return value
