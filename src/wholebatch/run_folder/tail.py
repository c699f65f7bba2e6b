"""Reads a run folder that somebody is writing, again and again: only what is new is read."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Generic

from wholebatch.errors import RecordError
from wholebatch.record import (
    END_FILE,
    EVALUATIONS_FILE,
    HEADER_FILE,
    RECORDS_FILE,
    RESUMPTIONS_FILE,
    Evaluation,
    Resumption,
    UpdateRecord,
)
from wholebatch.run_folder.reader import (
    Run,
    T,
    broken_order,
    build,
    is_still_empty,
    parsed_lines,
    read_end,
    read_header,
)


class RunTail:
    """What a run has written so far.

    A run that is resumed replaces its files; then they are read again from their start.

    Args:
        folder: of the run; it may still be empty.

    Raises:
        RecordError: no such folder, or one that holds something else.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._records = _LineTail(folder / RECORDS_FILE, UpdateRecord)
        self._evaluations = _LineTail(folder / EVALUATIONS_FILE, Evaluation)
        self._resumptions = _LineTail(folder / RESUMPTIONS_FILE, Resumption)
        self._run: Run | None = None
        self._refuse_no_run()

    @property
    def cut_short(self) -> str | None:
        """That the last call of ``poll`` found fewer records, which no resumption took out, in words."""
        tail = self._records
        if tail.entries_before_cut is None:
            return None
        return (
            f"{tail.path} was cut short while it was watched, and no resumption did that: it had "
            f"{tail.entries_before_cut} records and has {len(tail.entries)}"
        )

    def poll(self) -> tuple[Run | None, bool]:
        """Read what is new.

        Returns:
            The run as far as it is written, None while it has no header yet; and whether anything is
            new since the last call.

        Raises:
            RecordError: a file that can't be read or trusted, named; or the folder is gone, or is no run
                any more.
        """
        self._refuse_no_run()
        before = self._run or self._begun()
        if before is None:
            return None, False
        end, _ = read_end(self.folder / END_FILE)  # first: it is written after the last record
        new = [tail.read() for tail in (self._resumptions, self._records, self._evaluations)]
        if self._run is not None and not any(new) and end == before.end:
            return self._run, False
        begin, records = self._records.new_from, self._records.entries
        known_disorder = before.disorder if begin else None
        self._run = replace(
            before,
            records=list(records),
            evaluations=list(self._evaluations.entries),
            resumptions=list(self._resumptions.entries),
            end=end,
            disorder=known_disorder or broken_order(records[begin:], updates_before=begin),
        )
        return self._run, True

    def _refuse_no_run(self) -> None:
        try:
            begun = self._run is not None or not is_still_empty(self.folder)
            there = self.folder.is_dir()
        except OSError:
            begun = there = False
        if not there:
            raise RecordError(f"no folder {self.folder} to follow a run in; start the run first")
        if begun and not (self.folder / HEADER_FILE).is_file():
            raise RecordError(f"no run in {self.folder}: it has no {HEADER_FILE}; give the folder of a run")

    def _begun(self) -> Run | None:
        path = self.folder / HEADER_FILE
        if not path.is_file():  # about to be written
            return None
        return Run(
            folder=self.folder,
            header=read_header(path),
            records=[],
            evaluations=[],
            end=None,
            torn_line=False,
        )


class _LineTail(Generic[T]):
    """The complete lines of one file so far.

    ``new_from`` is the index of the first entry that the last call of ``read`` brought, and
    ``entries_before_cut`` how many there were where it found the same file shorter; a resumption makes
    another file.
    """

    def __init__(self, path: Path, kind: type[T]) -> None:
        self.path = path
        self.entries: list[T] = []
        self.new_from = 0
        self.entries_before_cut: int | None = None
        self._kind: type[T] = kind
        self._identity: tuple[int, int] | None = None
        self._offset = 0

    def read(self) -> bool:
        """Read the lines added since the last call, or all where the file is another; say if any was."""
        self.new_from = len(self.entries)
        self.entries_before_cut = None
        if not self.path.is_file():
            return False
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                same = (status.st_dev, status.st_ino) == self._identity
                another = not same or status.st_size < self._offset
                if another:
                    self.entries_before_cut = len(self.entries) if same else None
                    self.entries, self.new_from, self._offset = [], 0, 0
                    self._identity = status.st_dev, status.st_ino
                file.seek(self._offset)
                content = file.read()
        except OSError as error:
            raise RecordError(f"{self.path} can't be read: {error.strerror}") from error
        content = content[: content.rfind(b"\n") + 1]  # what follows is being written
        for data, place in parsed_lines(self.path, content, lines_before=self.new_from):
            if data is not None:
                self.entries.append(build(self._kind, data, place))
        self._offset += len(content)
        return bool(content) or another
