"""Writes a run folder as the run goes; ``record`` says what is in it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

from wholebatch.errors import RecordError
from wholebatch.files import sync, write_whole
from wholebatch.record import (
    END_FILE,
    EVALUATIONS_FILE,
    HEADER_FILE,
    LOCK_FILE,
    RECORDS_FILE,
    STOPPED_BY_USER,
    EndReason,
    Evaluation,
    Resumption,
    RunEnd,
    RunHeader,
    UpdateRecord,
    json_text,
)
from wholebatch.run_folder.reader import is_still_empty
from wholebatch.run_folder.resumption import come_back_to, not_written

# What a file system answers that has no such locks.
_NO_LOCKS = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL}


@contextmanager
def only_writer(folder: str | Path) -> Iterator[None]:
    """Be the only program that writes a run folder, from before it is read until the run has ended.

    A lock of the operating system on ``writer.lock``, which ends with its process whatever ends that; the
    file stays. Where the system or the file system has no such locks, nothing is locked.

    Args:
        folder: of the run; made where there is none.

    Raises:
        RecordError: another process holds it, which is named; or the folder can't be written.
    """
    folder = Path(folder)
    try:
        _make_folder(folder)
        file = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise RecordError(f"run folder {folder} can't be written: {error.strerror}") from error
    _held.add(file)
    try:
        _lock(file, folder)
        yield
    finally:
        _held.discard(file)
        os.close(file)


# A lock is held as long as any process has the file open, so those that are forked, which read samples,
# close it: they may outlive a killed run for some seconds.
_held: set[int] = set()


def _let_go_in_a_child() -> None:
    for file in _held:
        os.close(file)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go_in_a_child)


def _lock(file: int, folder: Path) -> None:
    if fcntl is None:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RecordError(
            f"run folder {folder} is being written by {_writer(file)}; wait until it has ended, or end it. "
            f"Two programs would lose each other's records"
        ) from None
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return
        raise RecordError(not_written(folder / LOCK_FILE, error)) from error
    with contextlib.suppress(OSError):  # it tells who it is, and locks without
        os.ftruncate(file, 0)
        os.pwrite(file, json_text({"process": os.getpid(), "host": socket.gethostname()}).encode(), 0)


def _writer(file: int) -> str:
    """Who holds a lock, as its file tells it."""
    try:
        told = json.loads(os.pread(file, 1000, 0))
        return f"process {told['process']} on {told['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


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
        header_text = json_text(header.to_dict(), indent=2) + "\n"
        refusal = used_folder(self.folder)
        if refusal is not None:
            raise RecordError(refusal)
        try:
            _make_folder(self.folder)
            write_whole(self.folder / HEADER_FILE, header_text.encode())
        except OSError as error:
            raise RecordError(f"run folder {self.folder} can't be written: {error.strerror}") from error
        self._open()

    @classmethod
    def resume(cls, folder: str | Path, resumption: Resumption) -> Self:
        """Resume the run of a folder, from the checkpoint that ``resumption`` describes.

        The records and evaluations made after that checkpoint are moved to ``abandoned.jsonl``, so
        that nothing counts twice, and a last line that was cut off goes with them; the end that the
        run had is kept in its line of ``resumptions.jsonl``. Each file is replaced as a whole, and
        after a crash at any point between the same call can be made again.

        Args:
            folder: the folder of the run. Nobody else may be writing to it.
            resumption: where the run is resumed, and how.

        Raises:
            RecordError: no run there or one that can't be read or written; fewer records than the
                checkpoint has updates, or records of other samples.
        """
        come_back_to(Path(folder), resumption)
        log = cls.__new__(cls)  # __init__ begins a new run
        log.folder, log._files = Path(folder), {}
        log._open()
        return log

    def write(self, record: UpdateRecord) -> None:
        """Append one update."""
        self._append(RECORDS_FILE, record.to_dict())

    def write_evaluation(self, evaluation: Evaluation) -> None:
        """Append one evaluation."""
        self._append(EVALUATIONS_FILE, evaluation.to_dict())

    def sync(self) -> None:
        """Have what was written put on the disk itself, so that it outlives a crash of the machine.

        To be called before a checkpoint is written: a checkpoint of more updates than there are
        records can't be resumed from.

        Raises:
            RecordError: a file is closed already, or can't be written.
        """
        if not self._files:
            raise RecordError(f"run folder {self.folder} is closed; nothing more can be written to it")
        for name, file in self._files.items():
            try:
                file.flush()
                os.fsync(file.fileno())
            except OSError as error:
                raise RecordError(not_written(self.folder / name, error)) from error
        try:
            sync(self.folder)  # the files were made since the header was put on the disk
        except OSError as error:
            raise RecordError(not_written(self.folder, error)) from error

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
                refusals.append(not_written(self.folder / name, error))
        self._files.clear()
        if refusals and reason == "done":
            reason, message = "failed", refusals[0]
        try:
            end = json_text(RunEnd(reason=reason, message=message).to_dict(), indent=2) + "\n"
            write_whole(self.folder / END_FILE, end.encode())
        except OSError as error:
            refusals.append(not_written(self.folder / END_FILE, error))
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

    def _open(self) -> None:
        for name in (RECORDS_FILE, EVALUATIONS_FILE):
            try:
                self._files[name] = (self.folder / name).open("a", encoding="utf-8")
            except OSError as error:
                for file in self._files.values():
                    file.close()
                raise RecordError(not_written(self.folder / name, error)) from error

    def _append(self, name: str, data: dict[str, Any]) -> None:
        if name not in self._files:
            raise RecordError(f"run folder {self.folder} is closed; nothing more can be written to {name}")
        line = json_text(data) + "\n"
        try:
            self._files[name].write(line)
            self._files[name].flush()
        except OSError as error:
            raise RecordError(not_written(self.folder / name, error)) from error


def _make_folder(folder: Path) -> None:
    """Make a folder and those above it, and put the name of each on the disk."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for each in missing:
        sync(each.parent)


def used_folder(folder: str | Path) -> str | None:
    """Why no run can be written to a folder: it has files, is one, or is read-only. None where one can."""
    folder = Path(folder)
    there = next(each for each in (folder, *folder.parents, Path()) if each.exists())
    if not there.is_dir():
        return f"run folder {folder} can't be written: {there} is a file, not a folder; give another name"
    if not os.access(there, os.W_OK | os.X_OK):
        return (
            f"run folder {folder} can't be written: {there} takes no new files of this user; make it "
            "writable, or give another folder"
        )
    if there != folder or is_still_empty(folder):
        return None
    return (
        f"run folder {folder} holds files already; a run is never written over another: "
        "give this one a new name, or move the old folder away"
    )
