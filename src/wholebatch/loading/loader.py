"""The loader of whole windows: this replica's micro-batches of one global batch after the other."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any, Literal, get_args

from wholebatch.budget import AnyPlan
from wholebatch.errors import UsageError
from wholebatch.loading.arguments import Arguments, cut_short_of, replica_of, source_of
from wholebatch.loading.batches import WindowBatches, check_pinning, pinned
from wholebatch.loading.checks import check_plan, check_state
from wholebatch.loading.sources import MapSource, StreamSource
from wholebatch.order import Order
from wholebatch.whole_numbers import one_of, whole_number

OnBadSample = Literal["raise", "skip"]


class WindowLoader:
    """Yields windows: for each update a list of this replica's micro-batches.

    ``for batches in loader`` begins where the loader stands and ends with the data; left early, it goes on
    from there the next time. Micro-batches and what is drawn at random in them do not depend on the
    number of workers; for a map-style data set they follow from (seed, position) alone.

    Args:
        dataset: a map-style data set (a length, samples by index), or a stream: an ``IterableDataset``, any
            other iterable, or a function without arguments that returns one.
        plan: how a global batch is cut; of ``plan_batch`` or ``plan_token_budget``.
        collate: ``collate(samples)`` makes a micro-batch of a list of samples, such as ``pad_collate()``;
            one with parameters named ``ids`` or ``epoch`` is given these too. By default torch's own.
        replica: which of the plan's replicas this is, from 0; needed where there are several.
        lengths: tokens of each sample, by which a token budget cuts: a sequence by sample id, or
            ``lengths(sample)``. With the function every replica reads its own share of the global batch and
            cuts that alone, so that the replicas are not balanced against each other.
        items: items of each sample, where the global batch is given in items: a sequence by sample id, or
            for a stream ``items(sample)``.
        order: which samples come when; by default all in a shuffled order, by the plan's global batch.
        workers: processes that read ahead, over the end of the window; 0 reads when a window is asked for.
        seed: decides the default order, and what the data set draws at random for a sample.
        shuffle: False keeps the samples in the order of their ids.
        num_epochs: passes over the data, from the begin of training; None for no end. A stream ends by
            itself.
        position: where to begin: samples consumed since the start of training, over all replicas.
        truncate: ``truncate(sample, tokens)``, for a plan with ``too_long="truncate"``.
        on_bad_sample: "raise", or "skip" samples that the data set can't give: they are in ``left_out`` of
            the window, whose denominator counts what was read.
        pin_memory: copy micro-batches into pinned memory, from which copies to an accelerator can overlap.

    Attributes:
        yields_windows: True, by which ``window.batches`` knows a loader of whole windows.
        plan, replica: as given.
        samples_left_out: samples of this replica that were skipped so far.

    Raises:
        UsageError: arguments that contradict each other, the plan or the data set.
        PlanError: numbers out of their bounds, or a sample that is longer than the plan allows.

    Exactness: no arithmetic. Every sample of a global batch is in one micro-batch of one replica, or in
    ``left_out``.
    """

    yields_windows = True

    def __init__(
        self,
        dataset: Any,
        *,
        plan: AnyPlan,
        collate: Callable[..., Any] | None = None,
        replica: int | None = None,
        lengths: Sequence[int] | Callable[[Any], int] | None = None,
        items: Sequence[int] | Callable[[Any], int] | None = None,
        order: Order | None = None,
        workers: int = 0,
        seed: int = 0,
        shuffle: bool = True,
        num_epochs: int | None = 1,
        position: int = 0,
        truncate: Callable[[Any, int], Any] | None = None,
        on_bad_sample: OnBadSample = "raise",
        pin_memory: bool = False,
    ) -> None:
        check_plan(plan)
        check_pinning(pin_memory)
        one_of("on_bad_sample", on_bad_sample, get_args(OnBadSample))
        if num_epochs is not None:
            whole_number("num_epochs", num_epochs)
        whole_number("position", position, minimum=0)
        given = Arguments(
            dataset=dataset,
            plan=plan,
            collate=collate,
            replica=replica_of(plan, replica),
            lengths=lengths,
            items=items,
            order=order,
            workers=whole_number("workers", workers, minimum=0),
            seed=whole_number("seed", seed, minimum=0),
            shuffle=shuffle,
            num_epochs=num_epochs,
            cut_short=cut_short_of(plan, truncate),
            skips=on_bad_sample == "skip",
        )
        self.plan = plan
        self.replica = given.replica
        self._num_epochs = num_epochs
        self._source: MapSource | StreamSource = source_of(given)
        self._place: Any = self._source.begin(position)
        self._pin_memory = pin_memory
        self._running: Generator[Any] | None = None
        self._begun = False  # a loop over this loader was begun
        self._ended_here = False  # a loop over this loader has come to the end of the data
        self.samples_left_out = 0

    @property
    def position(self) -> int:
        """Samples before the next window: over all replicas, or where it is a stream, of this replica."""
        return self._place if isinstance(self._place, int) else int(self._place.samples)

    @property
    def position_over_all_replicas(self) -> int | None:
        """`position` where it counts the samples of all replicas; None for a stream."""
        return None if self._is_stream else self.position

    @property
    def state_is_of_one_rank(self) -> bool:
        """Whether `state_dict` is that of this replica alone, as of a stream, and each has to be kept."""
        return self._is_stream

    @property
    def stand(self) -> str:
        """What the loaders of all replicas must have in common before their next window, in words.

        Of streams that is the plan alone: each has a position of its own.
        """
        if isinstance(self._source, StreamSource):
            return f"a stream under {self.plan}"
        order = self._source.parts.order
        told = repr(order) if is_dataclass(order) else type(order).__name__
        return f"position {self.position} of {told} under {self.plan}, num_epochs {self._num_epochs}"

    def __iter__(self) -> Iterator[WindowBatches]:
        """Begin where the loader stands; a loop that was left early is over."""
        self._stop()
        if self._ended_here or self._source.is_at_end(self._place):
            raise UsageError(
                f"this loader has come to the end of its data, at position {self.position}; for more "
                f"passes give it num_epochs=..., for another pass over a stream make a new one"
            )
        if self._begun:
            self._source.check_begun(self._place)
        self._begun = True
        self._running = running = self._source.windows(self._place)
        return self._handed_out(running)

    def _handed_out(self, running: Generator[tuple[WindowBatches, Any]]) -> Iterator[WindowBatches]:
        try:
            while True:
                if self._running is not running:
                    raise UsageError(
                        "this loop over the loader is over: since its last window another was begun, or a "
                        "state was loaded; begin a new loop"
                    )
                try:
                    window, place = next(running)
                except StopIteration:
                    self._ended_here = True
                    return
                if self._pin_memory:
                    window[:] = [pinned(batch) for batch in window]
                self._place = place
                self.samples_left_out += len(window.left_out)
                yield window
        finally:
            running.close()

    def _stop(self) -> None:
        """End what reads ahead."""
        if self._running is not None:
            self._running.close()
        self._running = None

    def state_dict(self) -> dict[str, Any]:
        """Where to go on: after the last window that was handed out, whatever was read ahead of that.

        Returns:
            Plain values, and the state of the stream, if the data set is one.

        Raises:
            UnsupportedError: the data set is a stream that tells no state.
        """
        return {"source": self._source.save(self._place), "samples_left_out": self.samples_left_out}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`; a map-style data set under another split too.

        Raises:
            UsageError: the state is none of a loader, or other samples would come than then.
        """
        check_state(state, self._source.state_names, self._is_stream)
        left_out = whole_number("samples_left_out", state["samples_left_out"], minimum=0)
        place = self._source.restore(state["source"])
        self._stop()
        self._place = place
        self._ended_here = False
        self.samples_left_out = left_out

    @property
    def _is_stream(self) -> bool:
        return isinstance(self._source, StreamSource)
