"""Reads a run folder: what can be trusted, also after a crash; ``record`` says what is in it."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from wholebatch.errors import RecordError
from wholebatch.record import (
    END_FILE,
    EVALUATIONS_FILE,
    HEADER_FILE,
    RECORDS_FILE,
    SCHEMA_VERSION,
    Counters,
    Evaluation,
    RunEnd,
    RunHeader,
    UpdateRecord,
)

T = TypeVar("T", UpdateRecord, Evaluation, RunHeader, RunEnd)


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
