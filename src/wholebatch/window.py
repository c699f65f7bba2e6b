"""The window: all micro-batches of one update, run as one exact update. Read this file first.

The loop that it stands for, on one rank and without anything that can go wrong::

    N = sum(objective.count(batch) for batch in batches)        # count first
    for batch in batches:
        loss_sum, num_items = objective(model(batch["input_ids"]), batch)
        (loss_sum / N).backward()                               # divide once
    clip(); optimizer.step(); scheduler.step(); clear()

What is added to it, here and in ``update.py``, makes that true on many ranks and on bad days. The
ranks add N up while the first forward runs. Only the last micro-batch lets the engine reduce. A rank that
failed before that stands in: it takes its part with zeros, so that nobody waits for it; where an engine
has no place for zeros, all ranks say first that they got there. Whatever the engine divides by is
multiplied back in. Then the finish, and one of three ends:

* the update **commits**: applied, or skipped as not finite or empty, and counted once;
* it is **rolled back**: parameters, gradients, buffers, random state and counters are as before,
  on every rank, and it may be run again;
* or, past the point of no return (gradients under way between ranks, or an optimizer at work), the
  window is **poisoned**: every rank ends with an error that says so.

Apart from the reduction itself the ranks meet twice an update, in
:class:`wholebatch.ranks.agreement.Agreement`: to add up what the window holds, and to agree on what came
out; a third time, before the backward that reduces, where a failed rank could not stand in. The stages of a
pipeline wait for each other in the first forward already, and do without it too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from wholebatch.budget import AnyPlan
from wholebatch.drawing import Drawn, Stand, draw, nothing_drawn, yields_windows
from wholebatch.engine_finish import finish_for
from wholebatch.errors import PoisonedWindowError, UnsupportedError, WindowUsageError
from wholebatch.finish import DeclaredSchedule, Finish
from wholebatch.objective import LossFunction, Objective, counted_loss
from wholebatch.ranks import find_ranks
from wholebatch.ranks.agreement import Agreement
from wholebatch.ranks.base import Reduce, Traffic
from wholebatch.record import WEIGHTINGS, Counters, UpdateRecord, Weighting
from wholebatch.snapshot import OnStaleGradients, Snapshot
from wholebatch.split import num_samples
from wholebatch.tally import row_size
from wholebatch.update import Update, WindowParts, planned_micro_batches


class UpdateWindow:
    """Runs one exact optimizer update over the micro-batches of a global batch.

    The gradient that the optimizer steps on is that of ``sum_k c_k * L_k / N_k``, with ``L_k`` the
    summed loss of term k and ``N_k`` its items, both over all micro-batches and replicas.

    Args:
        model: a module on one rank; on several under ``DistributedDataParallel`` or ``fully_shard``, or
            with DTensors over tensor-parallel ranks.
        optimizer: one optimizer or several; each is stepped once an update.
        objective: which items count, their summed loss and N. By default whatever the loop passes to
            ``backward`` as ``(loss_sum, num_items)``, with N known only after the forwards.
        plan: the plan of the global batch, from ``plan_batch`` or ``plan_token_budget``; checked against
            the ranks, and ``batches`` cuts by it.
        clip_grad_norm: largest Euclidean norm of the whole gradient, or ``None``.
        scheduler: a learning-rate schedule with its unit, ``per_update(scheduler)``, or several.
        scaler: a ``GradScaler`` for float16; the window drives it.
        process_group: the ranks of the job; by default the model's own, or all.
        context_parallel: where sequences are cut over ranks, the dimension of the mesh over which they
            are, as ``mesh["cp"]``. Its ranks share one replica, and each counts the items of its part.
        reduce: ``"per_update"``: once, in the last backward. ``"per_micro_batch"``: in every backward,
            of engines that shard gradients: more traffic, and no whole gradient is held.
            ``"after_agreement"``, of DDP: once, after all ranks have agreed, at the price of the
            overlap; an update can then be run again until the step.
        reduction_divisor: what a communication hook of your own divides by.
        accumulate_in: what the gradients of bfloat16 and float16 parameters are added up in: by default
            float32 where some rank has more than 4 micro-batches; ``torch.float32`` always;
            ``torch.bfloat16`` or ``torch.float16`` never.
        weighting: ``"items"``: each item counts 1/N, as in the big batch. ``"micro_batch_means"``, to
            match old runs: the mean over all micro-batches of each one's own mean,
            ``1/M * sum_j sum_k c_k * L_jk / n_jk``, *not equal to the big batch*.
        on_nonfinite: ``"skip"`` an update whose gradient is NaN or infinite, or ``"raise"``.
        on_stale_gradients: ``"raise"``, ``"clear"`` or ``"include"`` gradients found at the start.
            ``"include"`` adds them to the gradient that is stepped on; on one rank, with N known ahead.
        count_samples: ``count_samples(batch) -> int`` for batches whose samples are not dimension 0.

    Raises:
        UnsupportedError: a wrapper, hook or optimizer that can't be run exactly.
        WindowUsageError: arguments that contradict each other or the ranks.

    Exactness: exact in real arithmetic: the update differs from the big batch's by rounding only,
    where the loss is a sum over items that does not couple samples (BatchNorm and in-batch negatives
    do; ``verify_window`` tells). With ``weighting="micro_batch_means"`` not equal: an item of a
        micro-batch with fewer items counts for more.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        objective: Objective | None = None,
        *,
        plan: AnyPlan | None = None,
        clip_grad_norm: float | None = None,
        scheduler: DeclaredSchedule | Sequence[DeclaredSchedule] | None = None,
        scaler: GradScaler | None = None,
        process_group: dist.ProcessGroup | None = None,
        context_parallel: DeviceMesh | None = None,
        reduce: Reduce = "per_update",
        reduction_divisor: float | None = None,
        accumulate_in: torch.dtype | None = None,
        weighting: Weighting = "items",
        on_nonfinite: Literal["skip", "raise"] = "skip",
        on_stale_gradients: OnStaleGradients = "raise",
        count_samples: Callable[[Any], int] = num_samples,
    ) -> None:
        _refuse_odd_arguments(model, objective)
        if on_nonfinite not in ("skip", "raise"):
            raise WindowUsageError(f'on_nonfinite={on_nonfinite!r} is neither "skip" nor "raise"')
        if weighting not in WEIGHTINGS:
            raise WindowUsageError(f"weighting={weighting!r} is none of {', '.join(map(repr, WEIGHTINGS))}")
        objective = objective if objective is not None else counted_loss(lambda given, _: given)
        ranks = find_ranks(
            model,
            process_group=process_group,
            reduce=reduce,
            reduction_divisor=reduction_divisor,
            context_parallel=context_parallel,
        )
        ranks.check_optimizers(_several(optimizer))
        finish = finish_for(
            ranks,
            optimizers=_several(optimizer),
            clip_grad_norm=clip_grad_norm,
            scaler=scaler,
            schedules=_several(scheduler),
            accumulate_in=accumulate_in,
        )
        ranks.check_parameters(finish.parameters)
        if plan is not None:
            ranks.check_plan(plan)
        ranks.widens(finish.wide, finish.parameters, planned_micro_batches(plan) or 1)
        if plan is not None and plan.replicas != ranks.num_replicas:
            all_ranks = ranks.roles.num_ranks
            shared = all_ranks // ranks.num_replicas
            degrees = f" and tensor_parallel x pipeline_parallel x context_parallel = {shared}"
            raise WindowUsageError(
                f"the plan has {plan.replicas} replicas and {ranks.num_replicas} are running; plan with "
                f"ranks={all_ranks}{degrees if shared > 1 else ''}, or start as many as planned"
            )
        if on_stale_gradients == "include" and ranks.roles.num_ranks > 1:
            raise WindowUsageError(
                f'on_stale_gradients="include" adds what lies on this rank, and {ranks.roles.num_ranks} '
                f"ranks would add different gradients; include them on one rank, or clear them"
            )
        terms = tuple(objective.coefficients)
        self.samples_dropped = 0
        self._parts = WindowParts(
            model=model,
            objective=objective,
            plan=plan,
            finish=finish,
            ranks=ranks,
            agreement=Agreement(ranks, row_size(len(terms))),
            terms=terms,
            snapshot=Snapshot(model, on_stale_gradients, renewed=ranks.renews_gradients),
            weighting=weighting,
            on_nonfinite=on_nonfinite,
            count_samples=count_samples,
            settings=(
                f"terms {dict(objective.coefficients)}, clip_grad_norm {clip_grad_norm}, "
                f"reduce {reduce!r}, accumulate_in {accumulate_in}, weighting {weighting!r}, "
                f"on_nonfinite {on_nonfinite!r}, "
                f"plan {plan.to_dict() if plan is not None else None}"
            ),
        )

    @property
    def model(self) -> nn.Module:
        """The model whose forward the loop calls."""
        return self._parts.model

    @property
    def finish(self) -> Finish:
        """The optimizers, the loss scaler and the schedules that the window drives."""
        return self._parts.finish

    @property
    def plan(self) -> AnyPlan | None:
        """The plan of the global batch, where there is one."""
        return self._parts.plan

    @property
    def counters(self) -> Counters:
        """What was consumed so far, over all replicas."""
        return self._parts.counters

    def traffic(self, micro_batches: int) -> Traffic:
        """What an update costs this rank in reductions, in bytes between ranks and in bytes held.

        Args:
            micro_batches: of this rank.

        Returns:
            Predicted from the model's parameters; ``str()`` says it in words.

        Raises:
            WindowUsageError: not a number of micro-batches.
        """
        if isinstance(micro_batches, bool) or not isinstance(micro_batches, int) or micro_batches < 1:
            raise WindowUsageError(f"traffic takes 1 micro-batch or more, not {micro_batches!r}")
        finish = self.finish
        found = self._parts.ranks.traffic(finish.wide, finish.parameters, micro_batches)
        roles = self._parts.ranks.roles
        return replace(found, exchanges_more=roles.num_ranks > roles.num_replicas)

    def batches(self, loader: Iterable[Any]) -> Iterator[list[Any]]:
        """Draw this rank's micro-batches of one global batch after another from ``loader``.

        A tail with fewer micro-batches is a window of its own, divided by its real N, unless the plan
        says ``tail="drop"``; dropped samples are counted in ``samples_dropped``. All ranks go on until
        the last has no more, with empty windows where one ran out before the others.

        Args:
            loader: yields micro-batches, on the host or the device; or a ``WindowLoader``, which yields
                whole windows and sees to the tail itself.

        Yields:
            Lists of micro-batches, for :meth:`update`.

        Raises:
            WindowUsageError: the loader yields micro-batches, and no plan says how many make a window.
        """
        parts, plan = self._parts, self.plan
        # A loader of whole windows sees to the tail itself.
        drops = plan is not None and plan.tail == "drop" and not yields_windows(loader)
        full_samples = plan.global_batch_samples or 0 if plan is not None else 0
        draws: Iterator[Drawn] | None = None
        while True:
            if parts.poisoned:
                raise PoisonedWindowError(parts.poisoned)
            try:
                stand = Stand.of(loader)
                draws = draws or draw(
                    loader,
                    plan,
                    position=self.counters.position,
                    count_samples=parts.count_samples,
                    drops_tail=drops,
                )
                drawn = next(draws, None)
            except BaseException:
                parts.agreement.report_failure()
                raise
            window, samples, more = drawn or nothing_drawn()
            roles = parts.ranks.roles
            told = [float(drawn is not None), float(samples * roles.counts_samples), float(more)]
            try:
                heard = parts.agreement.exchange(
                    [*told, *(stand.numbers() if stand else ())], doing="drawing micro-batches"
                ).wait()
            except PoisonedWindowError as error:
                parts.poisoned = str(error)
                raise
            ranks_with, held_samples, some_more = map(sum, heard[: len(told)])
            if stand is not None:
                stand.refuse_others(heard[len(told) :], roles)
            if ranks_with == 0:
                return
            # Only the end of the data is a tail; a short window before it is not dropped.
            if drops and not some_more and held_samples < full_samples:
                self.samples_dropped += round(held_samples)
                return
            yield window

    def update(self, batches: Iterable[Any], *, sample_ids: Iterable[int] | None = None) -> Update:
        """One update over ``batches``: enter it, iterate it, call ``backward`` once in each turn.

        Args:
            batches: this rank's micro-batches of one global batch, as a list. Where it has ``left_out``,
                ids of samples that could not be read, the record says how many.
            sample_ids: ids of this rank's samples, for the record's digest; by default those that
                ``batches`` has, as a ``WindowLoader``'s do, or under ``"sample_ids"`` in each micro-batch.

        Returns:
            A context manager that commits on exit and rolls back on an exception.
        """
        return Update(self._parts, batches, sample_ids=sample_ids)

    def run(
        self,
        batches: Iterable[Any],
        loss_fn: LossFunction | None = None,
        *,
        sample_ids: Iterable[int] | None = None,
        counting_pass: bool = False,
    ) -> UpdateRecord:
        """Run one whole update.

        Args:
            batches: this rank's micro-batches of one global batch, as a list.
            loss_fn: ``loss_fn(model, batch)`` returns ``(loss_sum, num_items)`` or such by term. Not needed
                for a ``PipelinedModel``: its last stage calls the objective, or ``loss_fn(output, batch)``.
            sample_ids: as for :meth:`update`.
            counting_pass: run every forward once without gradients to count the items first, for
                several terms of which one can't be counted ahead. Random state and buffers are put
                back before the real forwards.

        Returns:
            The record of the update.
        """
        update = Update(
            self._parts, batches, sample_ids=sample_ids, count_with=loss_fn if counting_pass else None
        )
        with update:
            update.run(loss_fn)
        return update.record

    def state_dict(self) -> dict[str, Any]:
        """The counters; ``counters.position`` is where the next update begins."""
        return {
            "counters": self.counters.state_dict(),
            "samples_dropped": self.samples_dropped,
            "provisional_items": self._parts.provisional_items,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a :meth:`state_dict`.

        Raises:
            WindowUsageError: an update is under way, or the state is not one of a window.
        """
        if self._parts.open_update is not None:
            raise WindowUsageError("an update is under way; load a state between updates")
        missing = {"counters", "samples_dropped", "provisional_items"} - set(state)
        if missing:
            raise WindowUsageError(f"the state of a window has {sorted(missing)}; got {sorted(state)}")
        provisional = state["provisional_items"]
        if provisional is not None and not 0.0 < provisional < float("inf"):
            raise WindowUsageError(f"provisional_items={provisional!r} is no number of items")
        self.counters.load_state_dict(state["counters"])
        self.samples_dropped = state["samples_dropped"]
        self._parts.provisional_items = state["provisional_items"]


def _several(given: Any) -> tuple[Any, ...]:
    """``None``, one thing or several, as a tuple."""
    if given is None:
        return ()
    return tuple(given) if isinstance(given, list | tuple) else (given,)


def _refuse_odd_arguments(model: Any, objective: Any) -> None:
    if objective is not None and not hasattr(objective, "coefficients"):
        raise WindowUsageError(
            f"objective is a {type(objective).__name__}, which does not tell its items; use one of "
            f"wholebatch.losses, such as token_loss(), or wholebatch.counted_loss(your_function)"
        )
    if isinstance(model, nn.Module) and any(
        isinstance(p, UninitializedParameter) for p in model.parameters()
    ):
        raise UnsupportedError(
            "the model has lazy parameters without a shape yet; run one forward first, then build the "
            "optimizer and the window"
        )
