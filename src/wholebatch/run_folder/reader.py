"""Reads a run folder: what can be trusted, also after a crash; ``record`` says what is in it."""

from __future__ import annotations

import dataclasses
import gc
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

from wholebatch.errors import RecordError
from wholebatch.files import UNFINISHED
from wholebatch.record import (
    END_FILE,
    EVALUATIONS_FILE,
    HEADER_FILE,
    LOCK_FILE,
    RECORDS_FILE,
    RESUMPTIONS_FILE,
    SCHEMA_VERSION,
    Counters,
    Evaluation,
    Resumption,
    RunEnd,
    RunHeader,
    UpdateRecord,
)

T = TypeVar("T", UpdateRecord, Evaluation, RunHeader, RunEnd, Resumption)


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
        resumptions: the times that it was resumed, in order.
        disorder: where the updates of the records do not run 1, 2, 3 and so on, in words; None where
            they do. Totals of such records can't be trusted.
    """

    folder: Path
    header: RunHeader
    records: list[UpdateRecord]
    evaluations: list[Evaluation]
    end: RunEnd | None
    torn_line: bool
    resumptions: list[Resumption] = field(default_factory=list)
    disorder: str | None = None

    def counters(self) -> Counters:
        """The totals of the records, over all replicas."""
        counters = Counters()
        for r in self.records:
            counters.advance(
                outcome=r.outcome,
                micro_batches=r.micro_batches,
                samples=r.samples,
                items=r.items,
                samples_left_out=r.samples_left_out,
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
    header = read_header(folder / HEADER_FILE)
    with _no_garbage_collection():
        records, torn_records = read_all(UpdateRecord, folder / RECORDS_FILE)
    evaluations, torn_evaluations = read_all(Evaluation, folder / EVALUATIONS_FILE)
    resumptions, torn_resumptions = read_all(Resumption, folder / RESUMPTIONS_FILE)
    end, torn_end = read_end(folder / END_FILE)
    return Run(
        folder=folder,
        header=header,
        records=records,
        evaluations=evaluations,
        end=end,
        torn_line=torn_records or torn_evaluations or torn_resumptions or torn_end,
        resumptions=resumptions,
        disorder=broken_order(records),
    )


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Keep the collector from looking at 100,000 new records again and again; they have no cycles."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def broken_order(records: Iterable[UpdateRecord], *, updates_before: int = 0) -> str | None:
    """Where ``updates_attempted`` does not go up by one from record to record, in words; else None.

    Args:
        records: neighbouring records of a run.
        updates_before: attempted updates of the run before the first of them.
    """
    for due, record in enumerate(records, start=updates_before + 1):
        if record.updates_attempted != due:
            return f"record {due} is of update {record.updates_attempted}, where update {due} is due"
    return None


def read_all(kind: type[T], path: Path) -> tuple[list[T], bool]:
    """Read a file of JSON lines that are all of one kind.

    Args:
        kind: the dataclass of a line.
        path: the file; where there is none, nothing was written yet.

    Returns:
        What the lines say, and whether the last was torn and is left out.

    Raises:
        RecordError: a line that is none of this kind; names the file, the line and the key.
    """
    lines = parsed_lines(path, bytes_of(path) if path.is_file() else b"")
    built = [None if data is None else build(kind, data, where) for data, where in lines]
    return [each for each in built if each is not None], None in built


def is_still_empty(folder: Path) -> bool:
    """Whether a folder has nothing in it, but for a lock and a header that a crash has left unfinished."""
    return {each.name for each in folder.iterdir()} <= {f"{HEADER_FILE}{UNFINISHED}", LOCK_FILE}


def read_header(path: Path) -> RunHeader:
    """Read the header of a run; a RecordError that names the file where that can't be done."""
    data = _parse(bytes_of(path))
    if data is None:
        raise RecordError(f"{path} is not a JSON object; it was cut off or changed after it was written")
    return build(RunHeader, data, str(path))


def read_end(path: Path) -> tuple[RunEnd | None, bool]:
    """The end, None where there is none, and whether it was torn; the records can be read without."""
    if not path.is_file():
        return None, False
    data = _parse(bytes_of(path))
    return (None, True) if data is None else (build(RunEnd, data, str(path)), False)


def bytes_of(path: Path) -> bytes:
    """The content of a file; a RecordError with its name where it can't be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise RecordError(f"{path} can't be read: {error.strerror}") from error


Place = str | tuple["Place", str | int]


def parsed_lines(
    path: Path, content: bytes, *, lines_before: int = 0
) -> Iterator[tuple[dict[str, Any] | None, Place]]:
    """Yield the objects of JSON lines, each with its place; None for a last one that was cut off.

    Args:
        path: the file that they are of, for messages.
        content: from the start of a line.
        lines_before: lines of the file before them.

    Raises:
        RecordError: a line other than the last is not a JSON object.
    """
    lines = content.split(b"\n")
    for number, line in enumerate(lines, start=1):
        unfinished = number == len(lines)
        if unfinished and not line:
            return
        data, place = _parse(line), f"{path} line {lines_before + number}"
        if data is None and not unfinished:
            raise RecordError(f"{place} is not a JSON object; only a last line may be cut off")
        yield data, place


def _refuse_constant(word: str) -> None:
    raise ValueError(f"{word} is no JSON")


# Made once: ``json.loads`` with an option of its own makes one for every line.
_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        data = _DECODER.decode(line.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def build(kind: type[T], data: dict[str, Any], where: Place) -> T:
    """One line as what it is.

    Raises:
        RecordError: a schema version, a key or a type that this program can't take, named.
    """
    version = data.get("schema_version")
    # A bool is no version.
    if type(version) is not int or not 1 <= version <= SCHEMA_VERSION:
        raise RecordError(_version_refusal(data, where))
    checks, required = _shape(cast("Any", kind))  # mypy takes the dataclass's own hash for the class's
    known: dict[str, Any] = {}
    for name, (plain, numbers, check) in checks.items():
        if name in data:
            known[name] = value = data[name]
            found = type(value)
            if found not in plain and not (found in numbers and -_NUMBERS_BELOW < value < _NUMBERS_BELOW):
                check(value, (where, name))
    if len(known) < len(checks) and (missing := [name for name in required if name not in known]):
        raise RecordError(f"{_told(where)} lacks {', '.join(missing)}")
    return kind(**known)


def _version_refusal(data: dict[str, Any], where: Place) -> str:
    if "schema_version" not in data:
        return f"{_told(where)} has no schema_version; it was not written by this program"
    version = data["schema_version"]
    if type(version) is not int or version < 1:
        return f"{_told(where)}: schema_version is {_shown(version)}; it takes a whole number from 1 on"
    return (
        f"{_told(where)} has schema version {_shown(version)}; this program reads up to {SCHEMA_VERSION}: "
        "read it with the version that wrote it"
    )


Check = Callable[[Any, Place], None]


@cache
def _shape(kind: Any) -> tuple[dict[str, tuple[set[type], set[type], Check]], list[str]]:
    """By field: types that are right whatever the value, those of numbers, and the whole check.

    The types alone tell of most values that they are right, several times faster than a call. Last,
    the names of the fields that every line has.
    """
    fields = dataclasses.fields(kind)
    required = [f.name for f in fields if f.default is f.default_factory is dataclasses.MISSING]
    checks = {name: (*_types_of(hint), _checker(hint)) for name, hint in get_type_hints(kind).items()}
    return checks, required


def _types_of(annotation: Any) -> tuple[set[type], set[type]]:
    """The types that an annotation allows, without containers: those of no number, and of numbers."""
    parts = set(get_args(annotation)) if get_origin(annotation) is UnionType else {annotation}
    numbers: set[type] = {int, float} if float in parts else parts & {int}
    return parts & {str, bool, NoneType}, numbers


_TYPE_NAMES = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
# Far above all that is counted; a longer number could be read, but not divided or shown.
_NUMBERS_BELOW = 2**64


def _checker(annotation: Any) -> Check:
    """A function that raises RecordError, naming the place, where a value is not what is annotated.

    Made once for every field: a run may have 100,000 lines of twenty.
    """
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is UnionType:
        # Of the unions here only ``int | float`` has two parts, and a float may be whole.
        inner = _checker([part for part in parts if part is not NoneType][-1])
        return _or_none(inner) if NoneType in parts else inner
    if origin is Literal:
        return _one_of(parts)
    if origin is dict:
        return _object_of(_checker(parts[1]))
    if origin in (list, Sequence):
        return _list_of(_checker(parts[0]))
    return _anything if annotation is Any else _scalar(annotation)


def _anything(_value: Any, _place: Place) -> None:
    return None


def _or_none(inner: Check) -> Check:
    def check(value: Any, place: Place) -> None:
        if value is not None:
            inner(value, place)

    return check


def _one_of(words: Sequence[str]) -> Check:
    def check(value: Any, place: Place) -> None:
        if value not in words:
            raise RecordError(f"{_told(place)} is {_shown(value)}; it can be {', '.join(words)}")

    return check


def _object_of(inner: Check) -> Check:
    def check(value: Any, place: Place) -> None:
        if not isinstance(value, dict):
            raise RecordError(f"{_told(place)} is {_shown(value)}; it takes an object")
        for key, entry in value.items():
            inner(entry, (place, f"[{key!r}]"))

    return check


def _list_of(inner: Check) -> Check:
    def check(value: Any, place: Place) -> None:
        if not isinstance(value, list):
            raise RecordError(f"{_told(place)} is {_shown(value)}; it takes a list")
        for number, entry in enumerate(value):
            inner(entry, (place, number))

    return check


def _scalar(kind: type) -> Check:
    kinds: tuple[type, ...] = (int, float) if kind is float else (kind,)

    def check(value: Any, place: Place) -> None:
        if type(value) not in kinds:  # a bool is no number
            raise RecordError(f"{_told(place)} is {_shown(value)}; it takes {_TYPE_NAMES[kind]}")

    def check_number(value: Any, place: Place) -> None:
        # Whole numbers have a bound of their own, and a float that is finite lies within its own.
        if type(value) in kinds and -_NUMBERS_BELOW < value < _NUMBERS_BELOW:
            return
        check(value, place)
        if type(value) is int or math.isinf(value):
            raise RecordError(
                f"{_told(place)} is {_shown(value)}, which is too large for a number of a run"
            )

    return check_number if kind in (int, float) else check


def _told(place: Place) -> str:
    """``FILE line 3: terms['ce']['items']``."""
    if isinstance(place, str):
        return place
    outer, inner = place
    if isinstance(outer, str):
        return f"{outer}: {inner}"
    return f"{_told(outer)}[{inner}]" if isinstance(inner, int) else f"{_told(outer)}{inner}"


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:40]}... ({len(text)} characters)"
