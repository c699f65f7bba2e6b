"""What a run did, in updates, samples and items: one JSON line for every attempted update.

A run folder holds::

    header.json         the plan, the seeds and the versions: written once, before the first update
    records.jsonl       one UpdateRecord a line, in the order of the updates
    evaluations.jsonl   one Evaluation a line
    end.json            how the run ended; absent when it was killed

Everything here is plain data and imports no torch, so that a log can be read on any machine. Within
one schema version keys may be added, and a reader ignores those that it does not know.

Longer than 400 lines because the fields, their writer and their reader are one format, and a third
of it says what each field means.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from types import NoneType, TracebackType, UnionType
from typing import Any, Literal, Self, TextIO, TypeVar, get_args, get_origin, get_type_hints

from wholebatch.errors import RecordError

# Of the files of a run folder; what ``--json`` writes has versions of its own.
SCHEMA_VERSION = 1
Outcome = Literal["applied", "skipped_nonfinite", "skipped_empty"]
OUTCOMES: tuple[Outcome, ...] = ("applied", "skipped_nonfinite", "skipped_empty")
EndReason = Literal["done", "interrupted", "failed"]
STOPPED_BY_USER = "stopped from the keyboard"

HEADER_FILE = "header.json"
RECORDS_FILE = "records.jsonl"
EVALUATIONS_FILE = "evaluations.jsonl"
END_FILE = "end.json"


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
    partial: bool = False
    peak_memory_bytes: list[int] | None = None

    def __post_init__(self) -> None:
        if self.outcome not in OUTCOMES:
            raise RecordError(f"outcome {self.outcome!r} is not one of {', '.join(OUTCOMES)}")

    @property
    def padding_share(self) -> float | None:
        """See the function ``padding_share``."""
        return padding_share(self.items, self.positions)

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
        global_batch_samples: samples of one update: m x A x D.
        micro_batch_samples: m.
        micro_batches_per_window: A.
        replicas: D.
        layout: ranks and parallel degrees.
        tail: what becomes of the samples that do not fill a global batch: "partial" or "drop".
        precision: the dtype of the parameters and of the forward, in words.
        normalisation: what the summed loss is divided by, in words.
        global_batch_items: items of one update where they are the same for all; else None.
        seeds: by use.
        versions: by package.
        started_at: ISO 8601, UTC.
        command: the words of the command line.
        dataset: facts about the data: its name, samples, split rule.
        model: facts about the model: its name, parameters.
        settings: the configuration of the run.
        proof: the verdict on the first global batch; None when it was not asked for.
    """

    global_batch_samples: int
    micro_batch_samples: int
    micro_batches_per_window: int
    replicas: int
    layout: dict[str, int]
    tail: str
    precision: str
    normalisation: str = "sum over items / N"
    global_batch_items: int | None = None
    seeds: dict[str, int] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=lambda: package_versions())
    started_at: str = field(default_factory=lambda: utc_now())
    command: list[str] = field(default_factory=list)
    dataset: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    proof: dict[str, Any] | None = None

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


@dataclass(kw_only=True, slots=True)
class Counters:
    """Totals of a run, over all replicas.

    ``updates_attempted = updates_applied + updates_skipped_nonfinite + updates_skipped_empty``.
    Micro-batches, samples and items are those of every attempted update: the data of a skipped
    update is consumed. An update that was rolled back counts nowhere. Items are those of the
    objective's first term, as in the records.
    """

    micro_batches: int = 0
    updates_attempted: int = 0
    updates_applied: int = 0
    updates_skipped_nonfinite: int = 0
    updates_skipped_empty: int = 0
    samples: int = 0
    items: int | float = 0

    def advance(self, *, outcome: Outcome, micro_batches: int, samples: int, items: int | float) -> None:
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

    def state_dict(self) -> dict[str, int | float]:
        """All totals by name."""
        return dataclasses.asdict(self)

    def load_state_dict(self, state: Mapping[str, int | float]) -> None:
        """Take over totals that ``state_dict`` gave.

        Raises:
            RecordError: a total is missing or unknown; nothing is changed.
        """
        names = {f.name for f in dataclasses.fields(self)}
        if set(state) != names:
            odd = ", ".join(sorted(names ^ set(state)))
            raise RecordError(f"counters to load: {odd} is missing or unknown; expected {sorted(names)}")
        for name, total in state.items():
            setattr(self, name, total)


class RunLog:
    """Writes a run folder: the header at once, then a line for every update as it happens.

    Each line is handed to the operating system when it is written, so a crash of the program loses
    at most the line it was writing. Only one rank may write.

    Args:
        folder: a folder that does not exist yet, or is empty.
        header: what is the same for every update.

    Raises:
        RecordError: the folder holds something already, or can't be written.
    """

    def __init__(self, folder: str | Path, header: RunHeader) -> None:
        self.folder = Path(folder)
        self._files: dict[str, TextIO] = {}
        header_text = _dump(header.to_dict(), indent=2)
        refusal = used_folder(self.folder)
        if refusal is not None:
            raise RecordError(refusal)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / HEADER_FILE).write_text(header_text + "\n", encoding="utf-8")
            for name in (RECORDS_FILE, EVALUATIONS_FILE):
                self._files[name] = (self.folder / name).open("w", encoding="utf-8")
        except OSError as error:
            raise RecordError(f"run folder {self.folder} can't be written: {error.strerror}") from error

    def write(self, record: UpdateRecord) -> None:
        """Append one update."""
        self._append(RECORDS_FILE, record.to_dict())

    def write_evaluation(self, evaluation: Evaluation) -> None:
        """Append one evaluation."""
        self._append(EVALUATIONS_FILE, evaluation.to_dict())

    def close(self, reason: EndReason = "done", message: str | None = None) -> None:
        """Close the files and write how the run ended; a second call changes nothing.

        Where a file can't be closed, because its last line found no room, a run that was "done" ends
        as "failed": its records are not complete.

        Raises:
            RecordError: a file can't be closed or the end can't be written; all are tried first.
        """
        if not self._files:
            return
        refusals: list[str] = []
        for name, file in self._files.items():
            try:
                file.close()
            except OSError as error:
                refusals.append(_not_written(self.folder / name, error))
        self._files.clear()
        if refusals and reason == "done":
            reason, message = "failed", refusals[0]
        try:
            self._write_end(RunEnd(reason=reason, message=message))
        except OSError as error:
            refusals.append(_not_written(self.folder / END_FILE, error))
        if refusals:
            raise RecordError("; ".join(refusals))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        with contextlib.suppress(RecordError):  # the error under way came first and says more
            if isinstance(error, KeyboardInterrupt):
                self.close("interrupted", str(error) or STOPPED_BY_USER)
            else:
                self.close("failed", f"{type(error).__name__}: {error}")

    def _write_end(self, end: RunEnd) -> None:
        """Under another name first, so that a full disk or a crash leaves no half of an end."""
        unfinished = self.folder / f"{END_FILE}.unfinished"
        try:
            unfinished.write_text(_dump(end.to_dict(), indent=2) + "\n", encoding="utf-8")
            unfinished.replace(self.folder / END_FILE)
        except OSError:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise

    def _append(self, name: str, data: dict[str, Any]) -> None:
        if name not in self._files:
            raise RecordError(f"run folder {self.folder} is closed; nothing more can be written to {name}")
        line = _dump(data) + "\n"
        try:
            self._files[name].write(line)
            self._files[name].flush()
        except OSError as error:
            raise RecordError(_not_written(self.folder / name, error)) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A run folder, read.

    Args:
        folder: where it was read from.
        header: what was the same for every update.
        records: the updates, in order.
        evaluations: the evaluations, in order.
        end: how it ended; None when it was killed or is still going, or its file is torn.
        torn_line: True when the last line of a file, or the end, was cut off in the middle and left
            out.
    """

    folder: Path
    header: RunHeader
    records: list[UpdateRecord]
    evaluations: list[Evaluation]
    end: RunEnd | None
    torn_line: bool

    def counters(self) -> Counters:
        """The totals of the records, over all replicas."""
        counters = Counters()
        for r in self.records:
            counters.advance(
                outcome=r.outcome, micro_batches=r.micro_batches, samples=r.samples, items=r.items
            )
        return counters


def used_folder(folder: str | Path) -> str | None:
    """Why no run can be written to a folder: it holds files, or is one. None where one can."""
    folder = Path(folder)
    there = next(each for each in (folder, *folder.parents, Path()) if each.exists())
    if not there.is_dir():
        return f"run folder {folder} can't be written: {there} is a file, not a folder; give another name"
    if there != folder or not any(folder.iterdir()):
        return None
    return (
        f"run folder {folder} holds files already; a run is never written over another: "
        "give this one a new name, or move the old folder away"
    )


def read_run(folder: str | Path) -> Run:
    """Read a run folder, also that of a run which was killed in the middle of a line.

    Args:
        folder: what a ``RunLog`` wrote.

    Returns:
        The run. ``torn_line`` says whether an unfinished last line or end was left out.

    Raises:
        RecordError: no such run, a file that can't be read, a broken line that is not the last, a
            value of the wrong type (file, line number and key are named), or a schema version newer
            than this one.
    """
    folder = Path(folder)
    if not (folder / HEADER_FILE).is_file():
        raise RecordError(
            f"no run in {folder}: it has no {HEADER_FILE}; give the folder of a run, such as runs/NAME"
        )
    header = _build(RunHeader, *_read_whole(folder / HEADER_FILE))
    lines, torn_records = _read_lines(folder / RECORDS_FILE)
    evaluations, torn_evaluations = _read_lines(folder / EVALUATIONS_FILE)
    end, torn_end = _read_end(folder / END_FILE)
    return Run(
        folder=folder,
        header=header,
        records=[_build(UpdateRecord, data, where) for data, where in lines],
        evaluations=[_build(Evaluation, data, where) for data, where in evaluations],
        end=end,
        torn_line=torn_records or torn_evaluations or torn_end,
    )


def padding_share(items: int | float, positions: int) -> float | None:
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


def _not_written(path: Path, error: OSError) -> str:
    return f"{path} can't be written: {error.strerror}"


T = TypeVar("T", UpdateRecord, Evaluation, RunHeader, RunEnd)


def _versioned(value: UpdateRecord | Evaluation | RunHeader | RunEnd) -> dict[str, Any]:
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


def _dump(data: dict[str, Any], indent: int | None = None) -> str:
    try:
        return json.dumps(data, allow_nan=False, indent=indent)
    except TypeError as error:
        raise RecordError(f"a record holds plain numbers, texts and lists only: {error}") from error


def _read_whole(path: Path) -> tuple[dict[str, Any], str]:
    data = _parse(_bytes_of(path))
    if data is None:
        raise RecordError(f"{path} is not a JSON object; it was cut off or changed after it was written")
    return data, str(path)


def _read_end(path: Path) -> tuple[RunEnd | None, bool]:
    """The end, None where there is none, and whether it was torn; the records can be read without."""
    if not path.is_file():
        return None, False
    data = _parse(_bytes_of(path))
    return (None, True) if data is None else (_build(RunEnd, data, str(path)), False)


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise RecordError(f"{path} can't be read: {error.strerror}") from error


def _read_lines(path: Path) -> tuple[list[tuple[dict[str, Any], str]], bool]:
    """The objects of a file of JSON lines, each with its place, and whether the last was torn."""
    if not path.is_file():
        return [], False
    parsed: list[tuple[dict[str, Any], str]] = []
    lines = _bytes_of(path).split(b"\n")
    for number, line in enumerate(lines, start=1):
        unfinished = number == len(lines)
        if unfinished and not line:
            break
        data = _parse(line)
        if data is None and unfinished:
            return parsed, True
        if data is None:
            raise RecordError(f"{path} line {number} is not a JSON object; only a last line may be cut off")
        parsed.append((data, f"{path} line {number}"))
    return parsed, False


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        data = json.loads(line, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def _refuse_constant(word: str) -> None:
    raise ValueError(f"{word} is no JSON")


def _build(kind: type[T], data: dict[str, Any], where: str) -> T:
    if "schema_version" not in data:
        raise RecordError(f"{where} has no schema_version; it was not written by this program")
    version = data["schema_version"]
    if type(version) is not int or version < 1:  # a bool is no version
        raise RecordError(
            f"{where}: schema_version is {_shown(version)}; it takes a whole number from 1 on"
        )
    if version > SCHEMA_VERSION:
        raise RecordError(
            f"{where} has schema version {_shown(version)}; this program reads up to {SCHEMA_VERSION}: "
            "read it with the version that wrote it"
        )
    known = {f.name: f for f in dataclasses.fields(kind)}
    required = [n for n, f in known.items() if f.default is f.default_factory is dataclasses.MISSING]
    missing = [name for name in required if name not in data]
    if missing:
        raise RecordError(f"{where} lacks {', '.join(missing)}")
    for name, annotation in get_type_hints(kind).items():
        if name in data:
            _check_type(data[name], annotation, f"{where}: {name}")
    return kind(**{name: value for name, value in data.items() if name in known})


_TYPE_NAMES = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
# Far above all that is counted; a longer number could be read, but not divided or shown.
_NUMBERS_BELOW = 2**64


def _check_type(value: Any, annotation: Any, place: str) -> None:
    """Raise RecordError, naming the place, where a value read from JSON is not what is annotated."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is UnionType:
        if value is None and NoneType in parts:
            return
        parts = tuple(part for part in parts if part is not NoneType)
        # Of the unions here only ``int | float`` has two parts, and a float may be whole.
        _check_type(value, parts[-1], place)
    elif origin is Literal:
        if value not in parts:
            raise RecordError(f"{place} is {_shown(value)}; it can be {', '.join(parts)}")
    elif origin is dict:
        if not isinstance(value, dict):
            raise RecordError(f"{place} is {_shown(value)}; it takes an object")
        for key, entry in value.items():
            _check_type(entry, parts[1], f"{place}[{key!r}]")
    elif origin in (list, Sequence):
        if not isinstance(value, list):
            raise RecordError(f"{place} is {_shown(value)}; it takes a list")
        for number, entry in enumerate(value):
            _check_type(entry, parts[0], f"{place}[{number}]")
    elif annotation is not Any:
        _check_scalar(value, annotation, place)


def _check_scalar(value: Any, kind: type, place: str) -> None:
    if type(value) not in ((int, float) if kind is float else (kind,)):  # a bool is no number
        raise RecordError(f"{place} is {_shown(value)}; it takes {_TYPE_NAMES[kind]}")
    if (type(value) is int and abs(value) >= _NUMBERS_BELOW) or value in (math.inf, -math.inf):
        raise RecordError(f"{place} is {_shown(value)}, which is too large for a number of a run")


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:40]}... ({len(text)} characters)"
