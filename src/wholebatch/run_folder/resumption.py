"""Brings a run folder back to the update that a checkpoint holds, so that a run can be resumed.

Every file is written under another name, put on the disk and renamed, in an order in which a crash
loses nothing: first what is moved away is added to ``abandoned.jsonl``, then it is taken out of the
records and evaluations, then the resumption is written down, and the old end goes last.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from wholebatch.errors import RecordError
from wholebatch.files import sync, write_whole
from wholebatch.record import (
    ABANDONED_FILE,
    END_FILE,
    EVALUATIONS_FILE,
    RECORDS_FILE,
    RESUMPTIONS_FILE,
    SCHEMA_VERSION,
    Resumption,
    json_text,
)
from wholebatch.run_folder.reader import Run, broken_order, bytes_of, parsed_lines, read_run


def come_back_to(folder: Path, resumption: Resumption) -> None:
    """Move away what a run wrote after the update that it comes back to, and write the resumption down.

    Args:
        folder: of a run that nobody is writing.
        resumption: where the run is resumed.

    Raises:
        RecordError: see ``RunLog.resume``.
    """
    run = read_run(folder)
    _refuse_other_records(run, resumption)
    number = number_of_resumption(run)
    kept_records, left = _divided(
        folder / RECORDS_FILE, [r.updates_attempted <= resumption.updates_attempted for r in run.records]
    )
    kept_evaluations, more_left = _divided(
        folder / EVALUATIONS_FILE, [e.samples_consumed <= resumption.samples for e in run.evaluations]
    )
    abandoned = _abandoned(folder, number, left + more_left)
    told = replace(
        resumption,
        abandoned_updates=sum(
            each.get("resumption") == number and each.get("file") == RECORDS_FILE and "line" in each
            for each in abandoned
        ),
        previous_end=None if run.end is None else run.end.to_dict(),
    )
    resumptions = [*(each.to_dict() for each in run.resumptions[: number - 1]), told.to_dict()]
    if abandoned:
        _replace_file(folder / ABANDONED_FILE, _lines(abandoned))
    _replace_file(folder / RECORDS_FILE, kept_records)
    _replace_file(folder / EVALUATIONS_FILE, kept_evaluations)
    _replace_file(folder / RESUMPTIONS_FILE, _lines(resumptions))
    _remove_end(folder)


def not_written(path: Path, error: OSError) -> str:
    """Why a file has not been written, in words."""
    return f"{path} can't be written: {error.strerror}"


def _refuse_other_records(run: Run, resumption: Resumption) -> None:
    """Refuse records that are not those of the run that the checkpoint is from."""
    updates = resumption.updates_attempted
    if len(run.records) < updates:
        raise RecordError(
            f"{run.folder} has the records of {len(run.records)} updates, and the checkpoint to resume "
            f"from was made after update {updates}: resume from one of at most {len(run.records)} updates"
        )
    kept = run.records[:updates]
    if problem := broken_order(kept):
        raise RecordError(f"{run.folder / RECORDS_FILE} can't be resumed: {problem}")
    samples = sum(r.samples for r in kept)
    if samples != resumption.samples:
        raise RecordError(
            f"the records of the first {updates} updates in {run.folder} have {samples} samples, and the "
            f"checkpoint {resumption.samples}: it is of another run; give the folder that it belongs to"
        )


def number_of_resumption(run: Run) -> int:
    """The number of the next resumption, from 1; that of the last one if it was cut short.

    One that still has beside it the end that it has written down never got to its first update.
    """
    last = run.resumptions[-1] if run.resumptions else None
    cut_short = last is not None and run.end is not None and last.previous_end == run.end.to_dict()
    return len(run.resumptions) + (not cut_short)


def _divided(path: Path, keep: list[bool]) -> tuple[bytes, list[dict[str, Any]]]:
    """The lines of a file that stay, and those that don't as entries of the abandoned.

    Args:
        path: a file of JSON lines, or none.
        keep: for every line that can be read; what follows those was cut off.
    """
    lines = bytes_of(path).split(b"\n") if path.is_file() else []
    kept = [line + b"\n" for line, stays in zip(lines, keep, strict=False) if stays]
    entry = {"schema_version": SCHEMA_VERSION, "file": path.name}
    left = [
        {**entry, "line": json.loads(line)} for line, stays in zip(lines, keep, strict=False) if not stays
    ]
    if torn := b"\n".join(lines[len(keep) :]):
        left.append({**entry, "torn": torn.decode("utf-8", errors="backslashreplace")})
    return b"".join(kept), left


def _abandoned(folder: Path, number: int, left: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was abandoned before, and by this resumption; a try that was cut short wrote some of that."""
    path = folder / ABANDONED_FILE
    lines = parsed_lines(path, bytes_of(path) if path.is_file() else b"")
    before = [data for data, _ in lines if data is not None]
    written = [entry for entry in before if entry.get("resumption") == number]
    entries = [{"resumption": number, **each} for each in left]
    return before + [entry for entry in entries if entry not in written]


def _lines(entries: list[dict[str, Any]]) -> bytes:
    return "".join(json_text(entry) + "\n" for entry in entries).encode()


def _replace_file(path: Path, content: bytes) -> None:
    try:
        write_whole(path, content)
    except OSError as error:
        raise RecordError(not_written(path, error)) from error


def _remove_end(folder: Path) -> None:
    try:
        (folder / END_FILE).unlink(missing_ok=True)
        sync(folder)
    except OSError as error:
        raise RecordError(f"{folder / END_FILE} can't be removed: {error.strerror}") from error
