"""Checkpoints as folders on disk: written aside, synced, renamed; checked before they are used.

A checkpoint is a folder ``update-00000050`` with a ``manifest.json`` that lists every file with its
bytes and its digest. Until the rename it is called ``.unfinished-...``, so whatever ends a run at
whatever moment leaves whole checkpoints and at most one unfinished folder, which the next save clears.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import uuid
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from wholebatch.files import sync

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
UNFINISHED, REMOVED, ASIDE = ".unfinished-", ".removed-", "aside-"
# A second checkpoint of the same update gets -2: so that no rename ever has to replace a folder.
_NAME = re.compile(r"update-(\d{8,})(?:-(\d+))?")
_READ_BYTES = 2**22


class DamageError(Exception):
    """A checkpoint that can't be used, and why; becomes a CheckpointError where it is offered to a user."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointFacts:
    """What a manifest says of a checkpoint, without reading any tensor.

    Args:
        path: its folder.
        created_at: when it was written, ISO 8601 in UTC.
        counters: totals of the run over all replicas, as in :class:`wholebatch.record.Counters`.
        layout: of the plan ``global_batch_samples``, ``global_batch_items``, ``micro_batch_samples``,
            ``micro_batches_per_window``, ``tokens_per_micro_batch``, ``rows`` and ``replicas``, each None
            where it has none; and ``ranks``.
        score: what it was saved with; lower is better.
        versions: of torch and wholebatch.
        files: bytes and digest by name of file, relative to the folder.
    """

    path: Path
    created_at: str
    counters: Mapping[str, int | float]
    layout: Mapping[str, int | str | None]
    score: float | None
    versions: Mapping[str, str]
    files: Mapping[str, Mapping[str, Any]]

    @property
    def updates_attempted(self) -> int:
        """Updates of the run up to here, skipped ones included."""
        return int(self.counters["updates_attempted"])

    @property
    def samples(self) -> int:
        """Samples consumed up to here, over all replicas; where the next update begins."""
        return int(self.counters["samples"])


class DigestingFile:
    """A file that adds up its bytes and their digest as they are written.

    torch hides what went wrong in a write behind an error of its own, so it is kept in ``failed``.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = hashlib.blake2b()
        self._written_bytes = 0
        self.failed: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            self._file.write(data)
        except OSError as error:
            self.failed = error
            raise
        self._digest.update(data)
        self._written_bytes += len(data)
        return len(data)

    def flush(self) -> None:
        self._file.flush()

    def facts(self) -> dict[str, Any]:
        return {"bytes": self._written_bytes, "blake2b": self._digest.hexdigest()}


# Write ------------------------------------------------------------------------------------------------


def begin_folder(folder: Path) -> Path:
    """Make an unfinished folder, after clearing what earlier, killed saves left."""
    folder.mkdir(parents=True, exist_ok=True)
    for left in [*folder.glob(f"{UNFINISHED}*"), *folder.glob(f"{REMOVED}*")]:
        shutil.rmtree(left, ignore_errors=True)
    unfinished = folder / f"{UNFINISHED}{uuid.uuid4().hex[:12]}"
    unfinished.mkdir()
    return unfinished


def write_file(path: Path, write: Callable[[DigestingFile], object]) -> dict[str, Any]:
    """Write one file through ``write``, down to the disk; returns its bytes and digest."""
    with path.open("wb") as file:
        digesting = DigestingFile(file)
        try:
            write(digesting)
            file.flush()
        except Exception as error:
            raise digesting.failed or error from None
        os.fsync(file.fileno())
    return digesting.facts()


def finish_folder(unfinished: Path, manifest: Mapping[str, Any], *, updates_attempted: int) -> Path:
    """Write the manifest, sync, and give the folder its name: from here on it is a checkpoint."""
    body = {"schema_version": SCHEMA_VERSION, **manifest}
    text = json.dumps({**body, "manifest_blake2b": _digest_of(body)}, indent=1)
    write_file(unfinished / MANIFEST, lambda file: file.write(text.encode()))
    for inside in sorted(path for path in unfinished.rglob("*") if path.is_dir()):
        sync(inside)
    sync(unfinished)
    path = _free_name(unfinished.parent, updates_attempted)
    os.rename(unfinished, path)
    try:
        sync(path.parent)
    except OSError:
        remove_folder(path)  # nobody knows whether the rename would survive a loss of power
        raise
    return path


def remove_folder(path: Path) -> None:
    """Remove a folder so that it is never seen half removed under a checkpoint's name."""
    hidden = path.with_name(f"{REMOVED}{uuid.uuid4().hex[:12]}")
    os.rename(path, hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def rotate(folder: Path, newest: Path, *, keep_last: int, keep_best: bool) -> None:
    """Remove what is neither among the last nor the best, and set aside what the run did not resume from.

    The newest is on disk already, so a removal that fails is a warning and no error.
    """
    paths = checkpoint_paths(folder)
    later = paths[paths.index(newest) + 1 :]
    before = [path for path in paths[: paths.index(newest)] if update_of(path) != update_of(newest)]
    kept = {newest, *[*before, newest][-keep_last:]}
    if keep_best:
        kept.add(best_of([*before, newest]) or newest)
    try:
        for path in later:
            os.rename(path, path.with_name(f"{ASIDE}{path.name}-{uuid.uuid4().hex[:6]}"))
        for path in paths:
            if path not in kept and path not in later:
                remove_folder(path)
    except OSError as error:
        warnings.warn(
            f"{newest} is written, but an older checkpoint could not be removed: {error}", stacklevel=2
        )


# Read -------------------------------------------------------------------------------------------------


def checkpoint_paths(folder: Path) -> list[Path]:
    """The checkpoints of a folder, damaged ones too, from the first update to the last."""
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if _NAME.fullmatch(path.name)), key=_place)


def facts_in(folder: Path) -> list[CheckpointFacts]:
    """What the manifests in a folder say, in the same order; those that can't be read are left out."""
    found = []
    for path in checkpoint_paths(folder):
        with suppress(DamageError):
            found.append(read_facts(path))
    return found


def damage_in(folder: Path) -> list[tuple[Path, str]]:
    """The checkpoints that ``facts_in`` leaves out, and why."""
    found = []
    for path in checkpoint_paths(folder):
        try:
            read_facts(path)
        except DamageError as damage:
            found.append((path, str(damage)))
    return found


def update_of(path: Path) -> int | None:
    """The update that a checkpoint's name tells; None where the folder was renamed."""
    match = _NAME.fullmatch(path.name)
    return int(match.group(1)) if match else None


def read_facts(path: Path) -> CheckpointFacts:
    """The manifest of a checkpoint.

    Raises:
        DamageError: there is none, it was changed, or it is of a newer version.
    """
    try:
        body = json.loads((path / MANIFEST).read_bytes())
        version = body["schema_version"]
        if isinstance(version, int) and version > SCHEMA_VERSION:
            raise DamageError(
                f"it has schema version {version} and this version of wholebatch reads up to "
                f"{SCHEMA_VERSION}; install a newer wholebatch"
            )
        if body.pop("manifest_blake2b") != _digest_of(body):
            raise DamageError(f"its {MANIFEST} was changed after it was written")
        names = ("created_at", "counters", "layout", "score", "versions", "files")
        return CheckpointFacts(path=path, **{name: body[name] for name in names})
    except OSError as error:
        raise DamageError(f"its {MANIFEST} can't be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise DamageError(f"its {MANIFEST} is damaged") from None


def check_files(facts: CheckpointFacts) -> None:
    """Compare every file with the manifest, and refuse files that it does not list.

    Raises:
        DamageError: names the first file that differs.
    """
    path = facts.path
    found = {file.relative_to(path).as_posix() for file in path.rglob("*") if not file.is_dir()}
    if odd := sorted((found - {MANIFEST}) ^ set(facts.files)):
        raise DamageError(f"its file {odd[0]} is {'not in the manifest' if odd[0] in found else 'missing'}")
    for name, wanted in facts.files.items():
        try:
            seen = file_facts(path / name)
        except OSError as error:
            raise DamageError(f"its file {name} can't be read ({error.strerror})") from None
        if seen["bytes"] != wanted["bytes"]:
            raise DamageError(
                f"its file {name} has {seen['bytes']} bytes and was written with {wanted['bytes']}"
            )
        if seen["blake2b"] != wanted["blake2b"]:
            raise DamageError(f"its file {name} was changed after it was written (its digest differs)")


def file_facts(path: Path) -> dict[str, Any]:
    """Bytes and digest of a file, as a manifest lists them."""
    digest, read_bytes = hashlib.blake2b(), 0
    with path.open("rb") as file:
        while data := file.read(_READ_BYTES):
            digest.update(data)
            read_bytes += len(data)
    return {"bytes": read_bytes, "blake2b": digest.hexdigest()}


def newest_intact(folder: Path, *, but: Path) -> CheckpointFacts | None:
    """The newest checkpoint that reads back whole, other than ``but``."""
    for path in reversed(checkpoint_paths(folder)):
        if path != but:
            with suppress(DamageError):
                facts = read_facts(path)
                check_files(facts)
                return facts
    return None


def best_of(paths: list[Path]) -> Path | None:
    """The one with the lowest score, the earliest where several have it; None without scores."""
    scores: list[tuple[float, tuple[int, int], Path]] = []
    for path in paths:
        with suppress(DamageError):
            score = read_facts(path).score
            if score is not None:
                scores.append((score, _place(path), path))
    return min(scores)[2] if scores else None


def write_problem(folder: Path, error: OSError, *, updates_attempted: int) -> str:
    """Why a checkpoint could not be written, and what to do, in words."""
    todo = "look at the disk and save again"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        todo = "free some space, or keep fewer checkpoints"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        todo = "make the folder writable, or give another one"
    elif error.errno in (errno.ENOTDIR, errno.EEXIST):
        todo = "give a folder, not a file"
    before = checkpoint_paths(folder) if os.access(folder, os.R_OK) else []
    intact = f"{before[-1]} and those before it are as they were" if before else "There is none before it"
    return (
        f"the checkpoint of update {updates_attempted} could not be written to {folder}: "
        f"{error.strerror or error}; {todo}. {intact}"
    )


def _place(path: Path) -> tuple[int, int]:
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match.group(1)), int(match.group(2) or 1)


def _free_name(folder: Path, updates_attempted: int) -> Path:
    same = [_place(path)[1] for path in checkpoint_paths(folder) if update_of(path) == updates_attempted]
    return folder / f"update-{updates_attempted:08}{f'-{max(same) + 1}' if same else ''}"


def _digest_of(body: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(body, sort_keys=True).encode()).hexdigest()
