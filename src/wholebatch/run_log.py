"""Writes a run folder as the run goes; ``record`` says what is in it."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from wholebatch.errors import RecordError
from wholebatch.record import (
    END_FILE,
    EVALUATIONS_FILE,
    HEADER_FILE,
    RECORDS_FILE,
    STOPPED_BY_USER,
    EndReason,
    Evaluation,
    RunEnd,
    RunHeader,
    UpdateRecord,
)


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


def _not_written(path: Path, error: OSError) -> str:
    return f"{path} can't be written: {error.strerror}"


def _dump(data: dict[str, Any], indent: int | None = None) -> str:
    try:
        return json.dumps(data, allow_nan=False, indent=indent)
    except TypeError as error:
        raise RecordError(f"a record holds plain numbers, texts and lists only: {error}") from error
