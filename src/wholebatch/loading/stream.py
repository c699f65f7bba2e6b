"""Windows of a stream: samples in the order in which they arrive, as many as a replica's share.

Each worker reads a copy of the stream, block by block; the blocks take turns, so that the order of arrival
is the same every time. A block ends with the state of the stream, where it has one, so that a run resumes
at any sample: from the state before its block, and with the samples of it that were used passed over.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch.utils.data import get_worker_info

from wholebatch.errors import JudgeError, UsageError
from wholebatch.loading.reading import naming, seed_for
from wholebatch.order import ReplicaShare
from wholebatch.replay import random_state_kept
from wholebatch.whole_numbers import whole_number


class Block(NamedTuple):
    """Samples that follow each other in one copy of a stream.

    Attributes:
        samples: fewer than were asked for at the end of the stream.
        ended: whether the stream ended.
        state: of the stream after them; None where it tells none.
        begin: the state when this reader began; None where it tells none, or was given one.
        passed_over: whether none were asked for.
    """

    samples: list[Any]
    ended: bool
    state: Any = None
    begin: Any = None
    passed_over: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyState:
    """Where one copy of the stream stands between two of its blocks.

    Attributes:
        state: what the stream itself told; None at its begin.
        samples: that were read from it.
        ended: whether there are none left.
    """

    state: Any = None
    samples: int = 0
    ended: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Cursor:
    """A place in the order of arrival.

    Attributes:
        copies: where each worker's copy stands before the block that is in use or comes next.
        turn: the worker whose block that is.
        used: samples of that block that were used.
        samples: samples of this replica before this place.
        tells_state: whether the stream told its state, without which nobody finds this place again.
    """

    copies: tuple[CopyState, ...]
    turn: int = 0
    used: int = 0
    samples: int = 0
    tells_state: bool = True

    @classmethod
    def of_dict(cls, saved: Mapping[str, Any]) -> Cursor:
        """The place that `as_dict` told."""
        return cls(**{**saved, "copies": tuple(CopyState(**one) for one in saved["copies"])})

    def as_dict(self) -> dict[str, Any]:
        """Plain values, but for what the stream itself told, which is kept as it told it."""
        copies = [{"state": one.state, "samples": one.samples, "ended": one.ended} for one in self.copies]
        return {
            "copies": copies,
            "turn": self.turn,
            "used": self.used,
            "samples": self.samples,
            "tells_state": self.tells_state,
        }


class StreamReader:
    """One copy of the stream, in the process that reads it.

    Args:
        dataset: an iterable, or a function without arguments that returns one.
        cursor: where to begin.
        seed: of the run; with the number of a sample in its copy it decides what is drawn for it.
        share: of this replica.
    """

    def __init__(self, dataset: Any, cursor: Cursor, *, seed: int, share: Share) -> None:
        self._dataset = dataset
        self._cursor = cursor
        self._seed = seed
        self._share = share
        self._worker: int | None = None  # which copy this is, once it is asked
        self._iterator: Iterator[Any] | None = None
        self._sources: dict[str, Any] = {}  # what tells the state
        self._samples = 0
        self._ended = False

    def __call__(self, num_samples: int) -> Block:
        """The next samples.

        Args:
            num_samples: of the block, at most; 0 to pass over a worker's turn.

        Raises:
            JudgeError: the stream failed, or can't go on from its state; names the sample.
        """
        if num_samples == 0:
            return Block([], False, passed_over=True)
        with random_state_kept(host_alone=True):
            begin = self._open() if self._worker is None else None
            samples = list(self._read(num_samples))
            state = self._state()
        return Block(samples, self._ended, state, begin)

    def told(self, block: Block) -> str:
        """The samples of the block that was made last, in words."""
        first = self._samples - len(block.samples)
        return f"samples {first} to {self._samples - 1} of the stream{self._where()}"

    def _open(self) -> Any:
        """Begin where this copy is to begin; what the stream tells there, if nobody knew it."""
        info = get_worker_info()
        self._worker = 0 if info is None else info.id
        start = self._cursor.copies[self._worker]
        self._samples, self._ended = start.samples, start.ended
        if self._ended:
            return None
        self._seed_next()
        with naming(f"opening the stream{self._where()} failed"):
            dataset = self._dataset if hasattr(self._dataset, "__iter__") else self._dataset()
            if start.state is not None and "dataset" in start.state:
                dataset.load_state_dict(start.state["dataset"])
            self._iterator = iterator = iter(dataset)
            if start.state is not None and "iterator" in start.state:
                iterator.load_state_dict(start.state["iterator"])
        self._sources = {"dataset": dataset} if has_state(dataset) else {}
        # As StatefulDataLoader does: the iterator may tell a state of its own.
        if iterator is not dataset and has_state(iterator):
            self._sources["iterator"] = iterator
        return self._state() if start.state is None else None

    def _state(self) -> dict[str, Any] | None:
        """What the stream tells of itself now; None where it tells nothing."""
        with naming(f"the state_dict of the stream{self._where()} failed"):
            found = {name: copy.deepcopy(source.state_dict()) for name, source in self._sources.items()}
        return found or None

    def _read(self, num_samples: int) -> Iterator[Any]:
        for _ in range(num_samples):
            if self._ended:
                return
            assert self._iterator is not None
            self._seed_next()
            with naming(f"reading sample {self._samples} of the stream{self._where()} failed"):
                try:
                    sample = next(self._iterator)
                except StopIteration:
                    self._ended = True
                    return
            self._samples += 1
            yield sample

    def _seed_next(self) -> None:
        """Let what is drawn depend on the seed, the sample, the copy and the replica."""
        assert self._worker is not None
        copies = len(self._cursor.copies)
        seed_for(self._seed, 0, self._share.id_of(self._samples * copies + self._worker))

    def _where(self) -> str:
        of = self._share.of
        of_worker = f" in worker {self._worker}" if len(self._cursor.copies) > 1 else ""
        return of_worker + (f" of replica {of.replica}" if of.replicas > 1 else "")


class Arrival(NamedTuple):
    """A sample of the stream, and the place after it."""

    sample: Any
    after: Cursor


def arrivals(blocks: Iterator[Block], cursor: Cursor) -> Iterator[Arrival]:
    """The samples of all copies in their order, from a place on.

    Args:
        blocks: of the copies in turn, from that of ``cursor.turn`` on.
        cursor: the place; samples of its block that were used are passed over.

    Raises:
        JudgeError: the stream ends before that place.
    """
    for block in blocks:
        if block.passed_over:
            continue
        if block.begin is not None:
            cursor = _with_copy(cursor, replace(cursor.copies[cursor.turn], state=block.begin))
        held = len(block.samples)
        if held < cursor.used:
            read = cursor.copies[cursor.turn].samples
            raise JudgeError(
                f"{read + cursor.used} samples of the stream were used before, and now it ends after "
                f"{read + held}; it is not the stream that was saved"
            )
        for used in range(cursor.used + 1, held + 1):
            samples = cursor.samples + 1
            cursor = replace(cursor, used=used, samples=samples, tells_state=block.state is not None)
            yield Arrival(block.samples[used - 1], cursor if used < held else _after(cursor, block))
        cursor = _after(cursor, block)
        if all(one.ended for one in cursor.copies):
            return


def _after(cursor: Cursor, block: Block) -> Cursor:
    """The place behind a block."""
    read = cursor.copies[cursor.turn].samples + len(block.samples)
    after = _with_copy(cursor, CopyState(state=block.state, samples=read, ended=block.ended))
    return replace(after, turn=(cursor.turn + 1) % len(cursor.copies), used=0)


def _with_copy(cursor: Cursor, copy_state: CopyState) -> Cursor:
    """The place with another state of the copy whose turn it is."""
    copies = list(cursor.copies)
    copies[cursor.turn] = copy_state
    return replace(cursor, copies=tuple(copies))


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """How much of a stream one replica takes for a global batch.

    Args:
        of: which replica of how many that is.
        num_samples: at most; None where items bound it.
        num_items: at most, of whole samples; None where samples bound it.
        items_of: items of a sample, where items bound it.
    """

    of: ReplicaShare
    num_samples: int | None = None
    num_items: int | None = None
    items_of: Callable[[Any], int] | None = None

    def windows(self, found: Iterator[Arrival]) -> Iterator[list[Arrival]]:
        """Windows in the order of arrival; the last is what is left, and is smaller.

        Samples without items need no room. So that a stream of such does not fill one window without end,
        none has more samples than its share has items.

        Raises:
            UsageError: one sample has more items than the share.
        """
        window: list[Arrival] = []
        held = 0
        for arrival in found:
            size = 1 if self.items_of is None else self._items(arrival)
            if window and held + size > self._most:
                yield window
                window, held = [], 0
            window.append(arrival)
            held += size
            if self._most in (held, len(window)):
                yield window
                window, held = [], 0
        if window:
            yield window

    @property
    def _most(self) -> int:
        most = self.num_samples if self.num_items is None else self.num_items
        assert most is not None
        return most

    def _items(self, arrival: Arrival) -> int:
        assert self.items_of is not None
        index = self.id_of(arrival.after.samples - 1)
        with naming(f"items(sample) of sample {index} failed"):
            found = self.items_of(arrival.sample)
        size = whole_number(f"items(sample) of sample {index}", found, minimum=0)
        if size > self._most:
            raise UsageError(
                f"sample {index} has {size} items, more than this replica's share of {self._most} of a "
                f"global batch; raise global_batch_items, or shorten the sample"
            )
        return size

    def id_of(self, number: int) -> int:
        """The id of this replica's sample ``number`` (from 0): no two replicas give the same."""
        return number * self.of.replicas + self.of.replica


def has_state(source: Any) -> bool:
    """Whether a stream tells its state and can go on from one."""
    return callable(getattr(source, "state_dict", None)) and callable(
        getattr(source, "load_state_dict", None)
    )
