"""Named places of a training job, and what can happen there; used in the broken process alone.

The product has no hooks. Functions of it, and of ``os``, are wrapped; each wrapper tells ``Places`` where
the job is, and where a fault is due it happens there. A witness file beside the run tells which updates
were committed, which checkpoints got their name and that the fault did happen.
"""

from __future__ import annotations

import errno
import functools
import json
import math
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from campaign.cases import Fault
from campaign.rows import Texts
from wholebatch.checkpoint_folder import DigestingFile
from wholebatch.files import UNFINISHED
from wholebatch.finish import Finish
from wholebatch.resume.checkpoints import Checkpoints
from wholebatch.run_folder import RunLog
from wholebatch.train import evaluate, job, signals, training
from wholebatch.train.data.store import TokenSamples
from wholebatch.train.models.gpt import GPT
from wholebatch.train.models.stages import GPTStage
from wholebatch.train.parts import Job
from wholebatch.train.settings import ParallelConfig
from wholebatch.train.training import Training
from wholebatch.update import Update

ERRNOS = {"ENOSPC": errno.ENOSPC, "EACCES": errno.EACCES, "EIO": errno.EIO}


class CampaignError(Exception):
    """Stands for any mistake in a user's code."""


class Places:
    """Where the job of this process is, and what is to happen where.

    Args:
        faults: those of this rank.
        run: the folder of the run.
        witness: the file to tell it to.
    """

    def __init__(self, faults: list[Fault], run: Path, witness: Path) -> None:
        self.faults = faults
        self.run = run
        self.update_number = 0  # of the update under way, or else of the last; 0 before the first
        self.in_update = False
        self.shared = False  # whether the model is one of all ranks
        self.renamed: str | None = None  # the checkpoint that got its name last
        self._seen: dict[tuple[str, int | None], int] = {}
        self._witness = os.open(witness, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def tell(self, **words: Any) -> None:
        """Leave word for the judge; a line is there even if the process is killed at once."""
        os.write(self._witness, (json.dumps(words) + "\n").encode())

    def at(self, place: str) -> None:
        """The job is at a place; a fault that is due there happens."""
        for update_number in (None, self.update_number):
            key = (place, update_number)
            self._seen[key] = self._seen.get(key, 0) + 1
            for fault in self.faults:
                if (fault.place, fault.update) == key and fault.nth == self._seen[key]:
                    self.tell(fault=place)
                    act(fault.what)

    def nan_is_due(self) -> bool:
        """Whether the loss of this update is to be NaN."""
        due = [f for f in self.faults if f.what == "nan" and f.update in (None, self.update_number)]
        for fault in due:
            self.tell(fault=fault.place)
        return bool(due)

    def label(self, path: Any) -> str | None:
        """A path of the run by what it is: ``run/records.jsonl``, ``checkpoint/model.pt``; else None."""
        if not isinstance(path, str | Path):
            return None
        path = Path(os.path.abspath(path))
        if path == self.run:
            return "run"
        if not path.is_relative_to(self.run):
            return None
        parts = ["run", *path.relative_to(self.run).parts]
        return "/".join(_kind_of(part) for part in parts[-2:])


def act(what: str) -> None:
    """Let one thing happen."""
    if what in ERRNOS:
        raise OSError(ERRNOS[what], os.strerror(ERRNOS[what]))
    if what == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "SIGINT":
        signal.raise_signal(signal.SIGINT)
    elif what == "SIGINT twice":
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    elif what == "SIGHUP":
        signal.raise_signal(signal.SIGHUP)
    elif what in ("SIGTERM", "SIGTERM, no grace"):
        signal.raise_signal(signal.SIGTERM)
    elif what == "exception":
        raise CampaignError("a mistake in the user's code")
    elif what == "out of memory":
        raise torch.OutOfMemoryError("tried to allocate more than there is")
    else:
        assert what == "nan", what


def _kind_of(part: str) -> str:
    if part.startswith(".unfinished-"):
        return "unfinished"
    if part.startswith(".removed-"):
        return "removed"
    return "update" if re.fullmatch(r"update-\d{8,}(-\d+)?", part) else part


@contextmanager
def broken(faults: list[Fault], run: Path, witness: Path) -> Iterator[Places]:
    """Wrap what the job calls, until the end of the block or of the process."""
    places = Places(faults, run, witness)
    with ExitStack() as stack:

        def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
            original = getattr(owner, name)
            wrapper = functools.wraps(original)(functools.partial(around, places, original))

            def method(*args: Any, **named: Any) -> Any:
                return wrapper(*args, **named)

            stack.enter_context(mock.patch.object(owner, name, method))

        for owner, name, around in WRAPPED:
            wrap(owner, name, around)
        if any(fault.place == "loss, for good" for fault in faults):
            stack.enter_context(mock.patch.object(training, "MOST_SKIPS_IN_A_ROW", 3))
        if any(fault.what == "SIGTERM, no grace" for fault in faults):
            stack.enter_context(mock.patch.object(signals, "GRACE_S", -1.0))
        yield places


def _told(before: str | None = None, after: str | None = None) -> Callable[..., Any]:
    """Around a function: places of these names before and after it."""

    def around(places: Places, original: Callable[..., Any], *args: Any, **named: Any) -> Any:
        if before:
            places.at(before)
        result = original(*args, **named)
        if after:
            places.at(after)
        return result

    return around


# The job -----------------------------------------------------------------------------------------------


def _run(places: Places, original: Callable[..., Any], self: Training, *args: Any) -> Any:
    places.update_number = self.updates_attempted
    places.shared = self.job.config.parallel != ParallelConfig()
    if not places.shared:
        first = next(p for p in self.job.model.module.parameters() if p.requires_grad)
        first.register_hook(lambda _: places.at("end of backward"))  # the last to get its gradient
    places.at("before the first update")
    return original(self, *args)


def _one_update(places: Places, original: Callable[..., Any], self: Training, *args: Any) -> Any:
    places.update_number, places.in_update = self.updates_attempted + 1, True
    try:
        return original(self, *args)
    finally:
        places.in_update = False


def _loss(places: Places, original: Callable[..., Any], *args: Any) -> Any:
    if not places.in_update:
        return original(*args)
    places.at("before forward")
    loss = original(*args)
    if places.nan_is_due():
        loss = loss._replace(loss_sum=loss.loss_sum * math.nan)
    return loss


def _forward(places: Places, original: Callable[..., Any], *args: Any, **named: Any) -> Any:
    result = original(*args, **named)
    places.at("in forward" if places.in_update else "forward of an evaluation")
    return result


def _stage(places: Places, original: Callable[..., Any], self: GPTStage, given: Any) -> Any:
    if given.requires_grad and places.in_update:
        given.register_hook(lambda _: places.at("end of backward"))
    return _forward(places, original, self, given)


def _embedded(places: Places, original: Callable[..., Any], *args: Any) -> Any:
    result = original(*args)
    if places.shared and result.requires_grad and places.in_update:
        # A parameter that is in parts is none that autograd knows.
        result.register_hook(lambda _: places.at("end of backward"))
    return result


def _loss_of_stages(places: Places, original: Callable[..., Any], *args: Any) -> Any:
    loss = original(*args)
    if places.in_update:
        places.at("between forward and backward")
        if loss.loss_sum.requires_grad:
            loss.loss_sum.register_hook(lambda _: places.at("begin of backward"))
        if places.nan_is_due():
            loss = loss._replace(loss_sum=loss.loss_sum * math.nan)
    return loss


def _backward(places: Places, original: Callable[..., Any], self: Update, loss: Any) -> None:
    places.at("between forward and backward")
    loss.loss_sum.register_hook(lambda _: places.at("begin of backward"))
    original(self, loss)


def _conclude(places: Places, original: Callable[..., Any], self: Update, *args: Any) -> None:
    original(self, *args)
    record = self.record
    places.tell(committed=record.updates_attempted, digest=record.sample_digest)


def _sample(places: Places, original: Callable[..., Any], *args: Any) -> Any:
    # A worker has a copy of this from the moment it was started, which is inside the first update.
    if places.in_update:
        places.at("reading a sample")
    return original(*args)


# Files -------------------------------------------------------------------------------------------------


class _HalfWritten:
    """Stands for a file of lines; when something happens, half of the line is on the disk."""

    def __init__(self, file: Any, at: Callable[[], None]) -> None:
        self._file, self._at = file, at

    def write(self, line: str) -> None:
        self._file.write(line[: len(line) // 2])
        self._file.flush()
        self._at()
        self._file.write(line[len(line) // 2 :])

    def flush(self) -> None:
        self._file.flush()


def _append(places: Places, original: Callable[..., Any], self: RunLog, name: str, data: Any) -> None:
    file = self._files[name]
    self._files[name] = _HalfWritten(file, lambda: places.at(f"write run/{name}"))  # type: ignore[assignment]
    try:
        original(self, name, data)
    finally:
        self._files[name] = file


class _HalfOfBytes:
    """Stands for a file that is written whole and renamed; the same of its bytes."""

    def __init__(self, file: Any, at: Callable[[], None]) -> None:
        self._file, self._at = file, at

    def __enter__(self) -> _HalfOfBytes:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, content: bytes) -> None:
        self._file.write(content[: len(content) // 2])
        self._file.flush()
        self._at()
        self._file.write(content[len(content) // 2 :])

    def flush(self) -> None:
        self._file.flush()

    def fileno(self) -> int:
        return int(self._file.fileno())


def _opened(places: Places, original: Callable[..., Any], self: Path, *args: Any, **named: Any) -> Any:
    file = original(self, *args, **named)
    label = places.label(self)
    if label is None or not label.endswith(UNFINISHED) or args != ("wb",):
        return file
    return _HalfOfBytes(file, lambda: places.at(f"write {label}"))


def _digesting(places: Places, original: Callable[..., Any], self: DigestingFile, data: Any) -> int:
    file = self._file

    class Half:
        def write(self, data: Any) -> None:
            view = memoryview(data).cast("B")
            file.write(view[: len(view) // 2])
            file.flush()
            places.at(f"write {places.label(file.name)}")
            file.write(view[len(view) // 2 :])

    self._file = Half()  # type: ignore[assignment]
    try:
        return int(original(self, data))
    finally:
        self._file = file


def _fsync(places: Places, original: Callable[..., Any], descriptor: Any) -> None:
    number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
    label = places.label(os.readlink(f"/proc/self/fd/{number}"))
    if label is not None:
        places.at(f"sync {label}")
    original(descriptor)
    if label == "run/checkpoints" and places.renamed:
        places.tell(saved=int(re.findall(r"\d{8,}", places.renamed)[0]))


def _renamed(places: Places, original: Callable[..., Any], source: Any, target: Any, **named: Any) -> None:
    label = places.label(target)
    if label is not None:
        places.at(f"before rename to {label}")
    original(source, target, **named)
    if label is not None:
        if label == "checkpoints/update":
            places.renamed = Path(target).name
        places.at(f"after rename to {label}")


def _removed(places: Places, original: Callable[..., Any], path: Any, **named: Any) -> None:
    folder = named.get("dir_fd")
    whole = path if folder is None else os.path.join(os.readlink(f"/proc/self/fd/{folder}"), path)
    label = places.label(whole)
    if label is not None:
        places.at(f"remove {label}")
    original(path, **named)


def _made(places: Places, original: Callable[..., Any], path: Any, *args: Any, **named: Any) -> None:
    label = places.label(path)
    if label is not None:
        places.at(f"make {label}")
    original(path, *args, **named)


WRAPPED: list[tuple[Any, str, Callable[..., Any]]] = [
    (Training, "run", _run),
    (Training, "_update", _one_update),
    (Training, "_take_in", _told(before="between finish and record", after="after record")),
    (Job, "loss", _loss),
    (Job, "loss_of_output", _loss_of_stages),
    (GPT, "forward", _forward),
    (GPT, "embedded", _embedded),
    (GPTStage, "forward", _stage),
    (Update, "backward", _backward),
    (Update, "_conclude", _conclude),
    (Finish, "apply", _told(before="before the step", after="after the step")),
    (TokenSamples, "__getitem__", _sample),
    (Texts, "__getitem__", _sample),
    (evaluate, "micro_batch", _told(before="in evaluation")),
    (training, "evaluate_held_out", _told(before="before evaluation")),
    (Checkpoints, "save", _told(before="before checkpoint", after="after checkpoint")),
    (Checkpoints, "load", _told(before="before loading", after="after loading")),
    (job, "export_model", _told(before="before export", after="after export")),
    (RunLog, "_append", _append),
    (Path, "open", _opened),
    (DigestingFile, "write", _digesting),
    (os, "fsync", _fsync),
    (os, "rename", _renamed),
    (os, "replace", _renamed),
    (os, "unlink", _removed),
    (os, "mkdir", _made),
]
