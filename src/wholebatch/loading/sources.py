"""Where windows come from: samples by index, or a stream. Each gives windows and where it goes on."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any, ClassVar

from wholebatch.budget import AnyPlan, BudgetPlan
from wholebatch.errors import UnsupportedError, UsageError
from wholebatch.loading.ahead import made_in_order
from wholebatch.loading.batches import WindowBatches
from wholebatch.loading.bound import Bound
from wholebatch.loading.lengths import PackAlone
from wholebatch.loading.padding import PadLikeFirst
from wholebatch.loading.parts import Parts
from wholebatch.loading.reading import Chosen, Collate, MapReader, Part, collated
from wholebatch.loading.stream import Arrival, Block, CopyState, Cursor, Share, StreamReader, arrivals
from wholebatch.loading.twins import refusing_twins
from wholebatch.loading.unread import Unread
from wholebatch.order import format_digest, sample_digest
from wholebatch.replay import random_state_kept
from wholebatch.whole_numbers import whole_number

# Samples that a worker reads from its copy of a stream before the next worker has its turn.
_BLOCK_SAMPLES = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class MapSource:
    """Windows of a map-style data set, from any position on.

    Args:
        parts: which samples come when.
        reader: makes micro-batches of them.
        workers: processes that read ahead.
    """

    parts: Parts
    reader: MapReader
    workers: int

    state_names: ClassVar = ("position", "num_samples", "seed", "next_global_batch")

    def begin(self, position: int) -> int:
        """A place to begin at: the position itself."""
        self.parts.order.next_position(position)
        return position

    def is_at_end(self, position: int) -> bool:
        """Whether no window is left."""
        last = self.parts.num_epochs
        return last is not None and self.parts.order.epoch(position) >= last

    def check_begun(self, position: int) -> None:
        """Any position can be begun at again."""

    def windows(self, position: int) -> Generator[tuple[WindowBatches, int]]:
        """Windows, each with the position after it."""
        parts = self.parts.begin_at(position)
        # So many results for each worker that the next window is read while this one runs.
        first = _first_window(parts) if self.workers else []
        made = made_in_order(
            self.reader,
            itertools.chain(first, parts),
            told=self.reader.told,
            workers=self.workers,
            ahead=max(2, -(-len(first) // max(1, self.workers))),
            seed=self.reader.seed + position,
        )
        unread = Unread(samples=self.parts.samples, seed=self.reader.seed, any_read=position > 0)
        with closing(made):
            batches: list[Any] = []
            sample_ids: list[int] = []
            left_out: list[int] = []
            for one in made:
                batches += one.batches
                sample_ids += one.sample_ids
                left_out += one.left_out
                part = one.part
                if part.ends_window:
                    window = WindowBatches(
                        batches,
                        sample_ids=sample_ids,
                        left_out=left_out,
                        position=part.position,
                        epoch=part.epoch,
                    )
                    batches, sample_ids, left_out = [], [], []
                    unread.see(window, ends_epoch=self.parts.order.epoch(part.next_position) > part.epoch)
                    yield window, part.next_position

    def save(self, position: int) -> dict[str, Any]:
        """Plain values that say where to go on, and with what."""
        return {
            "position": position,
            "num_samples": len(self.parts.samples),
            "seed": self.reader.seed,
            "next_global_batch": format_digest(sample_digest(self.parts.order.global_batch(position))),
        }

    def restore(self, state: Mapping[str, Any]) -> int:
        """The position of a state.

        Raises:
            UsageError: the state is of another data set, seed or order.
        """
        position = whole_number("position", state["position"], minimum=0)
        self.begin(position)
        for name, now in self.save(position).items():
            if state[name] != now:
                raise UsageError(
                    f"the state was saved with {name} {state[name]!r}, and it is {now!r} now, so that "
                    f"other samples would come; give the loader the data set, order and seed that it had"
                )
        return position


def _first_window(parts: Iterator[Part]) -> list[Part]:
    """Take the parts up to the first that ends a window; none where there are no more."""
    taken: list[Part] = []
    for part in parts:
        taken.append(part)
        if part.ends_window:
            break
    return taken


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamSource:
    """Windows of a stream, from where it was saved on.

    Args:
        dataset: an iterable, or a function without arguments that returns one.
        plan: how much of it makes a global batch, and how that is cut.
        collate: makes a micro-batch of chosen samples, in this process.
        share: how much of a global batch this replica takes.
        seed: of the run.
        workers: processes that read copies of the stream.
        pack: cuts a window's samples under a token budget; None where m cuts them.
    """

    dataset: Any
    plan: AnyPlan
    collate: Collate
    share: Share
    seed: int
    workers: int
    pack: PackAlone | None = None

    state_names: ClassVar = ("cursor", "seed", "replicas", "replica", "copies", "block_samples")

    def begin(self, position: int) -> Cursor:
        """The place at the begin of the stream."""
        if position:
            raise UsageError(
                f"position={position} of a stream can't be found without reading all before it; use "
                f"load_state_dict"
            )
        return Cursor(copies=(CopyState(),) * max(1, self.workers))

    def is_at_end(self, cursor: Cursor) -> bool:
        """Whether every copy has ended, and no other replica can have more, for which this one waits."""
        return self.plan.replicas == 1 and all(one.ended for one in cursor.copies)

    def check_begun(self, cursor: Cursor) -> None:
        """Refuse a place of a stream that was begun, where nobody can take back what was read of it.

        Raises:
            UnsupportedError: the stream tells no state, or failed before it did.
        """
        # Workers have copies of their own, and this process's stream is as it was.
        if not (cursor.tells_state if cursor.samples else self.workers):
            raise UnsupportedError(
                f"this {type(self.dataset).__name__} was begun, and what was read of it can't be taken "
                f"back without its state; make a new loader over a new stream, or give it state_dict() and "
                f"load_state_dict(state)"
            )

    def windows(self, cursor: Cursor) -> Generator[tuple[WindowBatches, Cursor]]:
        """Windows, each with the place after it."""
        reader = StreamReader(self.dataset, cursor, seed=self.seed, share=self.share)
        in_share = self.share.num_samples or _BLOCK_SAMPLES
        ahead = max(2, 1 + -(-in_share // (self._block_samples * max(1, self.workers))))
        made = made_in_order(
            reader,
            self._asks(cursor),
            told=reader.told,
            workers=self.workers,
            ahead=ahead,
            seed=self.seed + self.share.of.replica,
        )
        with closing(made):
            blocks: Iterator[Block] = made
            if self.workers > 1 and not cursor.copies[0].samples and not cursor.used:
                blocks = refusing_twins(made, self.workers)
            found = arrivals(blocks, cursor)
            for window in self.share.windows(found):
                first = window[0].after.samples - 1
                yield self._collated(window, first), window[-1].after

    @property
    def _block_samples(self) -> int:
        """Samples of a block: in this process exactly a share where that is known, to wait for no more."""
        share = self.share.num_samples
        if share is None:
            return _BLOCK_SAMPLES
        return share if self.workers == 0 else min(share, _BLOCK_SAMPLES)

    def _asks(self, cursor: Cursor) -> Iterator[int]:
        # Whoever asks first gets worker 0; where another is in turn, those before it are passed over.
        passed_over = [0] * cursor.turn
        first = max(self._block_samples, cursor.used)
        return itertools.chain(passed_over, [first], itertools.repeat(self._block_samples))

    def _collated(self, window: list[Arrival], first: int) -> WindowBatches:
        chosen: Chosen = [
            (self.share.id_of(first + number), arrival.sample) for number, arrival in enumerate(window)
        ]
        if isinstance(self.collate, PadLikeFirst):
            self.collate.see(*chosen[0])
        with random_state_kept(host_alone=True):
            groups = [group for group in self._cut(chosen) if group]
            batches = [collated(None, self.collate, group, epoch=0, seed=self.seed) for group in groups]
        if isinstance(self.plan, BudgetPlan):
            for batch, group in zip(batches, groups, strict=True):
                Bound(plan=self.plan).check(batch, [index for index, _ in group])
        return WindowBatches(
            batches, sample_ids=[index for group in groups for index, _ in group], position=first
        )

    def _cut(self, chosen: Chosen) -> list[Chosen]:
        if self.pack is not None:
            return self.pack(chosen)
        assert not isinstance(self.plan, BudgetPlan)
        m = self.plan.micro_batch_samples
        return [chosen[start : start + m] for start in range(0, len(chosen), m)]

    def save(self, cursor: Cursor) -> dict[str, Any]:
        """Plain values that say where to go on, and with what.

        Raises:
            UnsupportedError: the stream tells no state.
        """
        if cursor.samples and not cursor.tells_state:
            raise UnsupportedError(
                f"a run over this {type(self.dataset).__name__} can't be resumed exactly: it has no "
                f"state_dict() and load_state_dict(state), as torchdata's StatefulDataLoader asks for; "
                f"give the stream both, or use a map-style data set, which resumes by position"
            )
        return {
            "cursor": cursor.as_dict(),
            "seed": self.seed,
            "replicas": self.share.of.replicas,
            "replica": self.share.of.replica,
            "copies": len(cursor.copies),
            # With one copy the order of arrival does not depend on its blocks.
            "block_samples": self._block_samples if self.workers > 1 else None,
        }

    def restore(self, state: Mapping[str, Any]) -> Cursor:
        """The place of a state.

        Raises:
            UsageError: the state is of another replica, seed or number of workers.
        """
        for name, now in self.save(self.begin(0)).items():
            if name != "cursor" and state[name] != now:
                raise UsageError(
                    f"the state of the stream was saved with {name} {state[name]!r}, and it is {now!r} "
                    f"now, so that other samples would come; give the loader the replica, replicas, seed, "
                    f"global batch and workers that it had"
                )
        try:
            return Cursor.of_dict(state["cursor"])
        except (TypeError, KeyError, ValueError) as error:
            raise UsageError(
                f"the cursor of the state is none that a loader saved ({type(error).__name__}: {error}); "
                f"give what state_dict() returned"
            ) from error
