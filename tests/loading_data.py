"""Data sets and streams for the tests of the loader, at the top of a module so that workers find them."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from wholebatch.loading import WindowBatches, WindowLoader


def lengths_of(num_samples: int) -> list[int]:
    """Ragged: 1 to 9 tokens, no two neighbours alike."""
    return [1 + (7 * index) % 9 for index in range(num_samples)]


def ragged_sample(index: int, length: int) -> dict[str, Any]:
    tokens = list(range(100 * index + 1, 100 * index + 1 + length))
    return {"input_ids": tokens, "labels": np.array(tokens), "index": index}


class Ragged:
    """Samples of 1 to 9 tokens: 100 x index + 1, + 2, ..."""

    def __init__(self, num_samples: int) -> None:
        self.lengths = lengths_of(num_samples)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index >= len(self):
            raise IndexError(f"there is no {index}")
        return ragged_sample(index, self.lengths[index])


class Drawing(Ragged):
    """Draws from all three generators of the host."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        numbers = [torch.rand(()).item(), random.random(), float(np.random.random())]
        return super().__getitem__(index) | {"drawn": numbers}


class Bad(Ragged):
    """Some samples can't be read."""

    def __init__(self, num_samples: int, bad: Iterable[int]) -> None:
        super().__init__(num_samples)
        self.bad = set(bad)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index in self.bad:
            raise OSError(f"a broken record, number {index}")
        return super().__getitem__(index)


class Dying(Ragged):
    """A worker that reads sample 6 is killed."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 6 and get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


class WhoReads(Ragged):
    """Tells the process that read."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"pid": os.getpid(), "index": index}


class Marking(Ragged):
    """Leaves a file for each sample that was read."""

    def __init__(self, num_samples: int, folder: Path) -> None:
        super().__init__(num_samples)
        self.folder = folder

    def __getitem__(self, index: int) -> dict[str, Any]:
        (self.folder / str(index)).touch()
        return super().__getitem__(index)


class Stream(IterableDataset[Any]):
    """Ragged samples one after the other; with workers each reads its share, as torch asks of streams."""

    def __init__(self, num_samples: int, *, first: int = 0, every: int = 1) -> None:
        self.numbers = range(first, num_samples, every)

    def _mine(self) -> range:
        info = get_worker_info()
        return self.numbers if info is None else self.numbers[info.id :: info.num_workers]

    def __iter__(self) -> Iterator[Any]:
        for index in self._mine():
            yield ragged_sample(index, 1 + (7 * index) % 9)


class StatefulStream(Stream):
    """The same with StatefulDataLoader's protocol on the data set; it draws too."""

    def __init__(self, num_samples: int, **more: Any) -> None:
        super().__init__(num_samples, **more)
        self.next = 0
        self.states_asked = 0

    def __iter__(self) -> Iterator[Any]:
        mine = self._mine()
        while self.next < len(mine):
            index = mine[self.next]
            self.next += 1
            yield ragged_sample(index, 1 + (7 * index) % 9) | {"drawn": random.random()}

    def state_dict(self) -> dict[str, Any]:
        self.states_asked += 1
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


class StatefulIterator:
    """An iterator that tells a state of its own."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples
        self.next = 0

    def __iter__(self) -> StatefulIterator:
        return self

    def __next__(self) -> Any:
        if self.next >= self.num_samples:
            raise StopIteration
        self.next += 1
        return ragged_sample(self.next - 1, 1 + (7 * (self.next - 1)) % 9)

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


class IteratorStream(IterableDataset[Any]):
    """Whose iterator tells the state, not the data set."""

    def __iter__(self) -> StatefulIterator:
        return StatefulIterator(23)


class FailingStream(Stream):
    """Breaks at its sixth sample."""

    def __iter__(self) -> Iterator[Any]:
        for number, sample in enumerate(super().__iter__()):
            if number == 5:
                raise OSError("the socket closed")
            yield sample


class KilledStream(Stream):
    """The process that reads sample 6 is killed."""

    def __iter__(self) -> Iterator[Any]:
        for sample in super().__iter__():
            if sample["index"] == 6:
                os.kill(os.getpid(), signal.SIGKILL)
            yield sample


def length_of(sample: dict[str, Any]) -> int:
    return len(sample["input_ids"])


def cut(sample: dict[str, Any], tokens: int) -> dict[str, Any]:
    return sample | {"input_ids": sample["input_ids"][:tokens], "labels": sample["labels"][:tokens]}


def plain(batch: Any) -> Any:
    """A micro-batch as plain values, which compare with ==."""
    return {name: part.tolist() if isinstance(part, Tensor) else part for name, part in dict(batch).items()}


def windows(loader: WindowLoader, how_many: int | None = None) -> list[Any]:
    """The next windows as plain values: micro-batches, ids, what was left out, position, epoch."""
    running = iter(loader)
    with contextlib.closing(running):  # type: ignore[type-var]
        return [seen(window) for window in itertools.islice(running, how_many)]


def seen(window: WindowBatches) -> Any:
    batches = [plain(batch) for batch in window]
    return batches, window.sample_ids, window.left_out, window.position, window.epoch


def indices(found: list[Any]) -> list[list[int]]:
    """The samples of each window, by what they hold themselves."""
    return [[number for batch in window[0] for number in batch["index"]] for window in found]


def is_alive(pid: int) -> bool:
    """Whether a process is there and not just waiting to be buried."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
