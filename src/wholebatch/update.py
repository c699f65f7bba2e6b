"""One update from its first micro-batch to one of its three ends: committed, rolled back, poisoned.

``window.py`` says what that means and what the loop looks like; this file is the loop. In order:
``_begin`` counts, ``_loop`` and ``backward`` run the micro-batches, ``_commit`` reduces, agrees and
steps, ``_end_without_commit`` puts everything back.

Longer than 400 lines because the states of one update and the ways out of them belong together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import reduce
from operator import add
from time import perf_counter
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from wholebatch.budget import AnyPlan
from wholebatch.errors import (
    ChangedInsideWindowError,
    CountMismatchError,
    IncompleteUpdateError,
    NonFiniteUpdateError,
    ObjectiveError,
    OtherRankFailedError,
    PoisonedWindowError,
    UpdateError,
    WindowUsageError,
)
from wholebatch.finish import Finish
from wholebatch.gradients import clear_gradients, gradients_of
from wholebatch.memory import PeakMemory, is_out_of_memory, let_go_of_frames
from wholebatch.objective import (
    CheckedLossSum,
    LossFunction,
    LossSum,
    Number,
    Objective,
    as_loss_sum,
)
from wholebatch.ranks.agreement import Agreement, PendingExchange, name_ranks, unlike_first, why_lost
from wholebatch.ranks.base import Ranks
from wholebatch.ranks.lost import is_lost_contact, leave_words
from wholebatch.record import Counters, Outcome, UpdateRecord, Weighting, finite
from wholebatch.result import (
    GlobalResult,
    Result,
    losses_by_term,
    whole,
    without_graph,
)
from wholebatch.shares import Shares
from wholebatch.snapshot import GRADIENTS_CHANGED, Snapshot
from wholebatch.split import listed_micro_batches
from wholebatch.tally import GlobalTally, fingerprint, tally

_COUNTERS = tuple(one.name for one in fields(Counters))


@dataclass(kw_only=True, slots=True)
class WindowParts:
    """What the updates of one window share.

    Attributes:
        count_samples: tells the samples of a micro-batch.
        settings: what must be the same on every rank, in words.
        terms: names of the objective's terms, in order.
        provisional_items: N of the last update, where N is known only after the forwards.
        poisoned: why no further update can run, or ``None``.
        open_update: the update that is under way, or ``None``.
    """

    model: nn.Module
    objective: Objective
    plan: AnyPlan | None
    finish: Finish
    ranks: Ranks
    agreement: Agreement
    snapshot: Snapshot
    weighting: Weighting
    on_nonfinite: Literal["skip", "raise"]
    count_samples: Callable[[Any], int]
    settings: str
    terms: tuple[str, ...]
    counters: Counters = field(default_factory=Counters)
    peak_memory: PeakMemory = field(default_factory=PeakMemory)
    provisional_items: float | None = None
    poisoned: str | None = None
    open_update: Update | None = None


class Update:
    """One update of a window. Made by ``UpdateWindow.update``."""

    def __init__(
        self,
        window: WindowParts,
        batches: Iterable[Any],
        *,
        sample_ids: Iterable[int] | None = None,
        count_with: LossFunction | None = None,
    ) -> None:
        self._window = window
        self._batches = batches
        self._sample_ids = sample_ids
        self._count_with = count_with
        self._turns: Generator[Any] | None = None
        self._turn = -1  # the micro-batch that is open; negative while a weightless one is
        self._turns_run = 0
        self._weightless: list[Any] = []
        self._waits_for_backward = False
        self._held: list[Any] = []
        self._losses: list[dict[str, LossSum]] = []  # detached, by micro-batch
        self._pending: PendingExchange | None = None
        self._settled: tuple[GlobalTally, Shares] | None = None
        self._entered = False
        self._opened = False  # every rank knows what the others hold, and goes on to reduce
        self._agreed = False  # every rank knows how this update ended
        self._irrevocable = False
        self._unscaled = False
        self._failed_inside: Exception | None = None  # a loss that failed inside a schedule
        self._learning_rates: list[float] = []
        self._record: UpdateRecord | None = None

    @property
    def record(self) -> UpdateRecord:
        """What happened; there once the update has committed."""
        if self._record is None:
            raise WindowUsageError("an update has a record once it has committed, after its with block")
        return self._record

    # Begin ----------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        window = self._window
        if window.poisoned:
            raise PoisonedWindowError(window.poisoned)
        if window.open_update is not None or self._entered:
            raise WindowUsageError(
                "another update of this window is under way, or this one was entered before; leave the "
                "with block first, and make a new update with window.update for each"
            )
        try:
            window.open_update, self._entered = self, True
            self._started = perf_counter()
            self._counters_before = {name: getattr(window.counters, name) for name in _COUNTERS}
            self._begin()
        except BaseException as error:
            self._end_without_commit(error)
            raise
        return self

    def _begin(self) -> None:
        """Count what this rank holds, and begin to add it up over the replicas."""
        window, finish = self._window, self._window.finish
        finish.begin()
        window.ranks.begin()
        window.ranks.check_parameters(finish.parameters)
        window.snapshot.take(finish.parameters)
        self._loss_scale, self._scale_mark = finish.loss_scale(), finish.scale_mark()
        self._settings = ""  # one rank has no other to compare with
        if window.ranks.roles.num_ranks > 1:
            self._settings = (
                f"{window.settings}, {finish.settings()}, counters {self._counters_before}, provisional "
                f"denominator {window.provisional_items}"
            )
        self._rate_marks = finish.rate_marks()
        self._held = listed_micro_batches(self._batches, most=planned_micro_batches(window.plan))
        window.ranks.check_window(self._held, finish.wide, finish.parameters)
        counted = self._counting_pass()
        self._ahead = tally(
            self._held,
            window.objective,
            count_samples=window.count_samples,
            sample_ids=self._ids_of_samples(),
            samples_left_out=len(getattr(self._batches, "left_out", ())),
            counted=counted,
            settings=fingerprint(self._settings),
            needs_reset=window.ranks.needs_reset,
            compares_content=window.ranks.roles.same_tensors,
        )
        self._pending = window.agreement.exchange(
            self._ahead.payload(len(window.terms), window.ranks.roles),
            doing="adding up what the window holds",
        )

    def _ids_of_samples(self) -> Iterable[int] | None:
        given = self._sample_ids
        return getattr(self._batches, "sample_ids", None) if given is None else given

    def _counting_pass(self) -> list[dict[str, Number]] | None:
        if self._count_with is None:
            return None
        window = self._window
        if window.ranks.runs_windows:
            raise WindowUsageError(
                "counting_pass=True runs forwards one by one, which a pipeline does not; give the "
                "objective a count"
            )
        self._refuse_uneven_counting_pass()
        counted: list[dict[str, Number]] = []
        with torch.no_grad():
            for batch in self._held:
                with window.ranks.micro_batch(last=False):
                    found = self._by_term(self._count_with(window.model, batch))
                counted.append({term: loss.num_items for term, loss in found.items()})
        window.snapshot.rewind()
        return counted

    def _refuse_uneven_counting_pass(self) -> None:
        """Where forwards are collective, each rank must run as many of them as the others."""
        window = self._window
        if not window.ranks.equal_turns:
            return
        [held] = window.agreement.exchange(
            [len(self._held)], doing="about to count items in forwards"
        ).wait()
        if others := unlike_first(held):
            raise WindowUsageError(
                f"counting_pass=True runs collective forwards, and {name_ranks(others)} hold another "
                f"number of micro-batches than rank 0's {round(held[0])}; give the objective a count, or "
                f"every rank as many micro-batches"
            )

    def _settle(self) -> tuple[GlobalTally, Shares]:
        """Wait for the totals over the ranks, once, and fix what every summed loss counts for."""
        if self._settled is not None:
            return self._settled
        window, total = self._window, self._hear()
        self._weightless = self._spare_batches(total)
        self._open(total)
        shares = Shares.of(
            total,
            objective=window.objective,
            weighting=window.weighting,
            finish=window.finish,
            divisor=window.ranks.divisor,
            last_items=window.provisional_items,
            includes_stale=window.snapshot.includes_stale,
        )
        self._settled = total, shares
        return self._settled

    def _hear(self) -> GlobalTally:
        """Wait for what all ranks hold. May be called again after it failed or was interrupted."""
        assert self._pending is not None
        window, ranks = self._window, self._window.ranks
        total = GlobalTally.of_ranks(self._pending.wait(), roles=ranks.roles, num_terms=len(window.terms))
        total.refuse_odd(
            settings=self._settings,
            replicas=ranks.num_replicas,
            planned_samples=_planned_samples(window.plan),
        )
        return total

    def _open(self, total: GlobalTally) -> None:
        """Make the engine ready for what the ranks hold, on every rank alike."""
        window, ranks = self._window, self._window.ranks
        ranks.open_window(uneven=total.uneven, ranks_without=total.ranks_without, reset=total.reset)
        ranks.widen(window.finish.wide, window.finish.parameters, max(total.micro_batches_of))
        self._opened = True

    def _spare_batches(self, total: GlobalTally) -> list[Any]:
        """What this rank runs beside the others' micro-batches where it has fewer, and each turn is
        collective: its own first again, or another rank's. They weigh nothing, and can't turn into NaN
        unless the same micro-batch does where it counts."""
        ranks, most = self._window.ranks, max(total.micro_batches_of)
        if not ranks.equal_turns or not total.uneven:
            return []
        spare = self._held[0] if self._held else None
        if total.ranks_without:
            spare = ranks.lend(spare, self._window.finish.parameters[0].device)
        return [spare] * (most - len(self._held))

    # The loop -------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        """This rank's micro-batches, each with its forward and backward inside one scope."""
        if self._window.ranks.runs_windows:
            raise WindowUsageError(
                "the micro-batches of a pipeline run by its schedule, not in a loop; use "
                "window.run(batches)"
            )
        if self._window.open_update is not self or self._turns is not None:
            raise WindowUsageError(
                "iterate an update once, inside its with block: with window.update(batches) as update: "
                "for batch in update: ..."
            )
        self._turns = self._loop()
        return self._turns

    def _loop(self) -> Generator[Any]:
        ranks = self._window.ranks
        if ranks.needs_reset and not self._ahead.needs_reset:
            raise WindowUsageError(
                "a forward of the DDP model with gradients ran between the start of this update and its "
                "loop, and would reduce early; run it inside the loop, before the update, or under no_grad"
            )
        if ranks.equal_turns:
            self._settle()  # a collective forward must know how many there are
        spares = len(self._weightless)
        for index, batch in enumerate([*self._weightless, *self._held]):
            last = index == spares + len(self._held) - 1
            if last or ranks.warming_up or ranks.needs_reset:
                self._settle()  # a forward that may reduce must know whether it will
            if index == spares > 0:
                self._window.snapshot.rewind()  # what weightless forwards did to buffers
            with ranks.micro_batch(last=last):
                self._turn, self._waits_for_backward = index - spares, True
                yield batch
            if self._waits_for_backward:
                raise IncompleteUpdateError(
                    f"{self._where()} had no update.backward(...); every micro-batch needs one, so that "
                    f"its items are in the update. Everything was rolled back"
                )
        if spares and not self._held:
            self._window.snapshot.rewind()

    def run(self, loss_fn: Callable[[Any, Any], Any] | None) -> None:
        """All turns at once.

        Args:
            loss_fn: ``loss_fn(model, batch)``; where the engine runs the forwards by a schedule of its own,
                ``loss_fn(output, batch)`` or None for the objective itself.
        """
        window = self._window
        if window.ranks.runs_windows:
            self._run_by_schedule(loss_fn or window.objective)
            return
        if loss_fn is None:
            raise WindowUsageError(
                "run needs a loss_fn(model, batch) that returns (loss_sum, num_items), such as "
                'lambda model, batch: objective(model(batch["input_ids"]), batch)'
            )
        for batch in self:
            self.backward(loss_fn(window.model, batch))

    def _run_by_schedule(self, loss_of: Callable[[Any, Any], Any]) -> None:
        """The turns of an engine that runs forwards and backwards by itself; it can't be stopped inside."""
        window = self._window
        _, shares = self._settle()
        found: dict[int, dict[str, LossSum]] = {}
        failed: dict[int, Exception] = {}

        def weighed(output: Any, batch: Any, number: int) -> Tensor | None:
            self._turn = number
            failed.pop(number, None)
            try:
                by_term = self._by_term(loss_of(output, batch))
                parts = [one.loss_sum * shares.seed(term, one) for term, one in by_term.items()]
                total = reduce(add, parts)
                if not total.requires_grad:
                    self._refuse_missing_graph(by_term)
            except Exception as error:  # told when the schedule is over, as the other ranks are inside it
                failed[number] = error
                return None
            found[number] = {
                term: LossSum(one.loss_sum.detach(), one.num_items) for term, one in by_term.items()
            }
            return total if total.requires_grad else None

        self._refuse(self._changed())
        self._irrevocable = True  # the stages wait for each other from the first forward on
        window.ranks.run_window(weighed)
        self._irrevocable = False
        self._failed_inside = failed[min(failed)] if failed else None
        self._losses = [found[number] for number in sorted(found)]
        self._turns_run = len(self._held)
        window.snapshot.gradients.mark(whole=True)

    def backward(self, loss: LossSum | tuple[Tensor, Number] | Mapping[str, Any]) -> None:
        """Add the gradient of this micro-batch's *summed* loss; the window divides.

        ``sum_k (c_k * divisor / N_k) * loss_sum_k`` is differentiated, with ``divisor`` what the
        engine divides by when it reduces; where means of micro-batches are averaged, their number times
        the items of this one stands for N_k. Each factor goes in as the gradient of its sum. The loss
        tensors given lose their graph, so that keeping them for a log keeps no memory alive.

        Args:
            loss: ``(loss_sum, num_items)``, or such by term.

        Raises:
            WindowUsageError: not inside the loop, or twice for one micro-batch.
            ObjectiveError: not a sum with its number of items, or without a graph.
        """
        if not self._waits_for_backward:
            raise WindowUsageError(
                "update.backward belongs once into each turn of `for batch in update`; give several terms "
                "at once, as update.backward({name: (loss_sum, num_items), ...})"
            )
        ranks, snapshot = self._window.ranks, self._window.snapshot
        by_term = self._by_term(loss)
        _, shares = self._settled or self._settle()
        # a reduction may put its own tensors in the place of gradients, which covers that trace
        weightless = self._turn < 0
        covers = ranks.synchronises or len(self._losses) == len(self._held) - 1
        if snapshot.gradients.changed(whole=covers) or ranks.gradients_written():
            self._refuse(GRADIENTS_CHANGED)
        roots = [
            (given.loss_sum, _nothing(given) if weightless else shares.seed(term, given))
            for term, given in by_term.items()
            if given.loss_sum.requires_grad
        ]
        if not roots:
            self._refuse_missing_graph(by_term)
        else:
            # A backward that fails half way has added some of its gradients, so it can't be repeated.
            self._waits_for_backward = False
            ranks.check_forward()
            if ranks.meets:
                self._meet_before_reducing()
            ranks.backward(roots)
            self._irrevocable = False
            snapshot.gradients.mark(whole=covers)
        detached = {term: without_graph(given) for term, given in by_term.items()}
        self._turns_run += 1
        if not weightless:
            self._losses.append(detached)
        self._waits_for_backward = False

    def _changed(self) -> str | None:
        """What the loop changed and a window must find as it left it, in words."""
        finish, snapshot = self._window.finish, self._window.snapshot
        if finish.scale_mark() != self._scale_mark:
            return "the loss scale was updated"
        if finish.rate_marks() != self._rate_marks:
            return "a learning rate was changed"
        # parameters first: a step writes them, and may write gradients too
        written = snapshot.gradients.changed() or self._window.ranks.gradients_written()
        return snapshot.changed() or (GRADIENTS_CHANGED if written else None)

    def _refuse(self, changed: str | None) -> None:
        if changed:
            window = self._window
            raise ChangedInsideWindowError(
                f"rank {window.ranks.rank}: {changed} inside the window, so that its micro-batches belong "
                f"to different updates; do that between updates. What the update did was rolled back, what "
                f"the loop itself changed was not"
            )

    def _meet_before_reducing(self) -> None:
        """Wait until every rank is about to reduce; what fails from here on can't be rolled back. Nobody
        waits where a rank that fails before that stands in."""
        if self._window.ranks.stands_in:
            self._irrevocable = True
            return
        self._wait_for_all(self._window.agreement.exchange(doing="about to reduce gradients"))

    def _wait_for_all(self, pending: PendingExchange) -> list[tuple[float, ...]]:
        """Wait for an exchange after which the others go on. An interrupt while waiting comes too
        late for them to hear of it, so it counts as beyond the point of no return."""
        self._irrevocable = True
        try:
            return pending.wait()
        except OtherRankFailedError:
            self._irrevocable = False  # all have heard, and none goes on
            raise

    def _by_term(self, loss: Any) -> dict[str, LossSum]:
        """``loss`` checked, in the order of the objective's terms."""
        terms = self._window.terms
        if len(terms) == 1 and type(loss) is CheckedLossSum:
            return {terms[0]: loss}
        by_term = loss if isinstance(loss, Mapping) else {terms[0]: loss}
        if by_term.keys() != set(terms):
            raise ObjectiveError(
                f"the loss has the terms {sorted(by_term)} and the objective {sorted(terms)}; give "
                f"backward every term of the objective, once"
            )
        return {term: as_loss_sum(by_term[term], name=f"term {term!r}") for term in terms}

    def _refuse_missing_graph(self, by_term: Mapping[str, LossSum]) -> None:
        """Refuse a loss without a graph to run; none is needed where there is no item to learn from."""
        ranks = self._window.ranks
        needed = ranks.synchronises or ranks.equal_turns
        if not needed and not any(float(v.num_items) for v in by_term.values()):
            return
        raise ObjectiveError(
            f"the loss of {self._where()} does not depend on any parameter that requires a gradient; was "
            f"the forward run under no_grad, or the loss detached? A micro-batch without items must keep "
            f"its graph too where gradients are reduced: sum over no items, do not make a new zero"
        )

    # End ------------------------------------------------------------------------------------------

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if self._turns is not None:
                self._turns.close()  # leaves the scope of a micro-batch that was open
            if error is None:
                self._commit()
        except BaseException as raised:
            self._end_without_commit(raised)
            raise
        if error is not None:
            self._end_without_commit(error)

    def _commit(self) -> None:
        window, ranks = self._window, self._window.ranks
        self._refuse_incomplete()
        total, shares = self._settle()
        self._refuse_incomplete()
        self._refuse(self._changed())
        if ranks.reduces_at_the_end:
            ranks.check_before_reducing(window.finish.parameters)
            self._meet_before_reducing()
            ranks.reduce(window.finish.parameters)
            self._irrevocable = False
        gradient_norm, result = self._agree_on_result()
        self._conclude(total, result, gradient_norm, shares)

    def _refuse_incomplete(self) -> None:
        turns = len(self._weightless) + len(self._held)
        if self._turns_run < turns:
            raise IncompleteUpdateError(
                f"the loop was left after {self._turns_run} of {turns} micro-batches; the update was "
                f"rolled back, nothing was counted"
            )

    def _agree_on_result(self) -> tuple[float, GlobalResult]:
        """Read the device once, and agree with the other ranks on what came out."""
        window, ranks = self._window, self._window.ranks
        terms, held = len(window.terms), len(self._losses)
        given = [loss for by_term in self._losses for loss in by_term.values()]
        self._learning_rates = window.finish.learning_rates()
        self._unscaled = True
        window.finish.unscale()
        window.snapshot.add_included()
        reading = window.finish.read(
            ranks, [loss.loss_sum for loss in given] + [loss.num_items for loss in given]
        )
        rows = [tuple(reading.values[n * terms : (n + 1) * terms]) for n in range(2 * held)]
        result = Result(
            nonfinite=not window.finish.can_be_stepped(reading.norm),
            norm=reading.norm,
            norm_of_copies=reading.norm_of_copies,
            num_gradients=len(gradients_of(window.finish.parameters)),
            losses=tuple(rows[:held]),
            items=tuple(rows[held:]),
            peak_memory_bytes=window.peak_memory.read() or 0,
        )
        problem = self._problem(result)
        pending = window.agreement.exchange(
            result.payload(roles=ranks.roles, num_terms=terms),
            doing="agreeing on what came out",
            failed=problem is not None,
        )
        self._agreed = True
        try:
            told = self._wait_for_all(pending)
        except OtherRankFailedError as other:
            raise problem or other from None
        total = GlobalResult.of_ranks(told, num_terms=terms)
        norm = total.norm_of_parts if ranks.norm_in_parts else reading.norm
        steps_itself = ranks.stepper is not None
        if odd := total.why_odd(result, norm, norm_in_parts=ranks.norm_in_parts, steps_itself=steps_itself):
            self._irrevocable = False  # every rank sees it
            raise UpdateError(f"rank {ranks.rank}: {odd}")
        return norm, total

    def _problem(self, result: Result) -> Exception | None:
        """Why this rank can't commit, if so."""
        if self._failed_inside is not None:
            return self._failed_inside
        window = self._window
        if not window.ranks.roles.counts_losses:  # such as the first stages of a pipeline
            return None
        found = result.miscounted(self._ahead.items, window.terms)
        return CountMismatchError(f"{self._where(found[0])}: {found[1]}") if found else None

    def _conclude(self, total: GlobalTally, result: GlobalResult, norm: float, shares: Shares) -> None:
        """Step or skip, count, advance, clear; from here on there is no way back."""
        window, finish, counters = self._window, self._window.finish, self._window.counters
        items = [
            summed if ahead is None else ahead
            for ahead, summed in zip(total.items, result.items, strict=True)
        ]
        correction = shares.correction(items[0])
        norm *= correction
        outcome, reason = self._outcome(total, result, norm, items)
        applied = outcome == "applied"
        clip = finish.clip_factor(norm)
        if applied:
            window.ranks.share_buffers()
            finish.apply(correction * clip)
        else:
            finish.skip(gradient_overflowed=not math.isfinite(norm))
        consumed = whole(items[0])
        counters.advance(
            outcome=outcome,
            micro_batches=total.micro_batches,
            samples=total.samples,
            items=consumed,
            samples_left_out=total.samples_left_out,
        )
        finish.advance(counters, applied=applied)
        clear_gradients(finish.parameters)
        window.finish.wide.forget()
        if not applied:
            window.snapshot.put_back_after_skip()
        window.snapshot.forget()
        window.ranks.end(committed=True)
        if items[0] > 0:
            window.provisional_items = items[0]
        self._record = self._written(total, result, items, outcome, reason, (norm, norm * clip))
        window.open_update = None
        self._held, self._batches = [], ()  # a kept update keeps no data alive
        self._irrevocable = False

    def _outcome(
        self, total: GlobalTally, result: GlobalResult, norm: float, items: list[float]
    ) -> tuple[Outcome, str | None]:
        """Which of the three ends of a committed update this is, and why it is none of the first."""
        if not any(items):
            return "skipped_empty", total.why_empty()
        # the correction of a provisional N may have made the norm too large
        if not result.nonfinite and self._window.finish.can_be_stepped(norm):
            return "applied", None
        reason = result.why_nonfinite()
        if self._window.on_nonfinite == "raise":
            self._irrevocable = False  # every rank raises this
            raise NonFiniteUpdateError(f"{reason}. Everything was rolled back, the loss scale too")
        return "skipped_nonfinite", reason

    def _written(
        self,
        total: GlobalTally,
        result: GlobalResult,
        items: list[float],
        outcome: Outcome,
        reason: str | None,
        norms: tuple[float, float],
    ) -> UpdateRecord:
        """The record of an update that was counted; ``norms`` of the gradient before and after clipping."""
        window, counters = self._window, self._window.counters
        planned = _planned_samples(window.plan)
        by_term, loss_per_item = losses_by_term(window.objective.coefficients, result.losses, items)
        return UpdateRecord(
            outcome=outcome,
            reason=reason,
            updates_attempted=counters.updates_attempted,
            updates_applied=counters.updates_applied,
            micro_batches=total.micro_batches,
            samples=total.samples,
            items=whole(items[0]),
            positions=total.positions,
            sample_digest=total.digest,
            loss_per_item=loss_per_item,
            terms=by_term,
            gradient_norm=finite(norms[0]),
            gradient_norm_after_clip=finite(norms[1]),
            loss_scale=self._loss_scale,
            learning_rates=self._learning_rates,
            reductions=window.ranks.reductions,
            weighting=window.weighting,
            accumulated_in=window.finish.wide.added_up_in,
            partial=planned is not None and total.samples + total.samples_left_out < planned,
            samples_left_out=total.samples_left_out,
            seconds=perf_counter() - self._started,
            peak_memory_bytes=result.peak_memory_bytes,
        )

    def _end_without_commit(self, error: BaseException) -> None:
        """Put everything back and tell the other ranks; or, where that is too late, poison."""
        window = self._window
        window.open_update = None
        self._held, self._batches = [], ()
        if self._irrevocable or isinstance(error, PoisonedWindowError) or is_lost_contact(error):
            self._poison(error)
            return
        all_know = self._agreed or isinstance(error, OtherRankFailedError)
        try:
            try:
                all_know = all_know or self._others_know()
            finally:
                self._or_poison(self._put_back, error)
            if not all_know:
                self._stand_in(error)
                window.agreement.report_failure()
        except OtherRankFailedError:
            pass  # another rank failed too, and all have heard
        except PoisonedWindowError as lost:
            window.poisoned = str(lost)
            error.add_note(str(lost))
            self._leave_words(error)
        except BaseException:
            window.poisoned = (
                "an update that had failed was interrupted before all ranks had heard of it; restart from "
                "the last committed update"
            )
            raise
        finally:
            self._or_poison(lambda: window.ranks.end(committed=False), error)

    def _others_know(self) -> bool:
        """Whether the other ranks have heard of a failure already; if not, see what they go on to.

        Raises:
            PoisonedWindowError: they can't be reached.
        """
        if self._pending is None or self._opened:
            return False
        try:
            self._open(self._hear())
        except OtherRankFailedError:
            return True
        except PoisonedWindowError:
            raise
        except Exception:  # every rank finds what they hold odd, and none goes on
            pass
        return False

    def _or_poison(self, put_back: Callable[[], None], error: BaseException) -> None:
        """Put something back; where that fails, the window can't go on."""
        try:
            put_back()
        except Exception as failed:
            poisoned = f"an update was left half way, because putting its state back failed: {failed}"
            self._window.poisoned = poisoned
            error.add_note(poisoned)

    def _stand_in(self, error: BaseException) -> None:
        """Let ranks that did not fail finish the reduction that they go on to; they hear of it after that.

        Raises:
            PoisonedWindowError: they can't, so that they wait for this rank.
        """
        ranks = self._window.ranks
        if not self._opened or not ranks.stands_in or ranks.reductions:
            return
        if is_out_of_memory(error):
            let_go_of_frames(error)  # they hold what there was no more room for
        try:
            ranks.stand_in()
        except Exception as failed:
            why = f"; contact with another rank was lost: {why_lost()}" if is_lost_contact(failed) else ""
            raise PoisonedWindowError(
                f"the other ranks went on to reduce gradients, and this one, which had failed, could not "
                f"take part with zeros ({type(failed).__name__}: {failed}){why}. Restart from the last "
                f"committed update"
            ) from failed

    def _put_back(self) -> None:
        window = self._window
        window.finish.wide.forget()
        window.snapshot.put_back()
        window.snapshot.forget()
        if self._unscaled:
            window.finish.forget_unscaling()

    def _poison(self, error: BaseException) -> None:
        window = self._window
        window.counters.load_state_dict(self._counters_before)
        with suppress(Exception):  # what is beyond repair anyway must not hide why
            self._put_back()
            window.ranks.end(committed=False)
        why = (
            "an update failed beyond the point of no return, with gradients under way between ranks or an "
            "optimizer at work"
        )
        if not isinstance(error, PoisonedWindowError):
            if is_lost_contact(error):
                why = f"contact with another rank was lost in a collective of the engine: {why_lost()}"
            else:
                self._leave_words(error)
        message = (
            f"{why} ({type(error).__name__}: {error}). This window can't go on; restart from the last "
            f"committed update, number {window.counters.updates_attempted}"
        )
        window.poisoned = message
        if self._irrevocable and self._agreed:
            with suppress(PoisonedWindowError):
                window.agreement.report_poison()
        if isinstance(error, Exception) and not isinstance(error, PoisonedWindowError):
            raise PoisonedWindowError(message) from error

    def _leave_words(self, error: BaseException) -> None:
        """For ranks that wait in a collective which this one left."""
        window = self._window
        leave_words(window.ranks.rank, f"in update {window.counters.updates_attempted + 1}", error)

    def _where(self, index: int | None = None) -> str:
        number = (self._turn if index is None else index) + 1
        if number < 1:
            return f"a weightless turn on rank {self._window.ranks.rank}, beside the others' micro-batches"
        return f"micro-batch {number} of {len(self._held)} on rank {self._window.ranks.rank}"


def _planned_samples(plan: AnyPlan | None) -> int | None:
    """Samples of a full global batch; None where the plan does not say."""
    return None if plan is None else plan.global_batch_samples


def planned_micro_batches(plan: AnyPlan | None) -> int | None:
    """Micro-batches of a full window on one rank; None where the plan does not say."""
    return None if plan is None else plan.micro_batches_per_window


def _nothing(loss: LossSum) -> Tensor:
    """The gradient of the update with respect to a summed loss that does not count."""
    return torch.zeros_like(loss.loss_sum, requires_grad=False)
