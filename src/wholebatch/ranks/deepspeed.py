"""A DeepSpeed engine, ZeRO 0 to 3: the window divides and says when, DeepSpeed partitions and steps.

Facts of DeepSpeed that this file rests on (read in 0.19.8 and tested against it):

* Its configuration must say ``"gradient_accumulation_steps": 1``; the window calls ``engine.backward`` for
  each micro-batch and ``engine.step`` once. Between, "the boundary" is what DeepSpeed calls the micro-batch
  that its step follows; ``set_gradient_accumulation_boundary`` says which.
* Stages 0 and 1 reduce after the last backward, not during it. So nothing is lost where the window holds
  every micro-batch back and has it reduce once all ranks have agreed, and a rank may have fewer
  micro-batches than another, or none.
* Stages 2 and 3 reduce in every backward, because no rank keeps a whole gradient. Stage 3 gathers
  parameters in every forward besides. Ranks must then have the same number of micro-batches.
* Every stage divides by the replicas as it reduces. Without ``gradient_clipping`` it clips at norm 1.0.
* ``engine.backward`` multiplies by the loss scale in stages 1 to 3. In stage 0 it does not, but its fp16
  optimizer divides by it; the window then multiplies.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from wholebatch.accumulation import DEEPSPEED, WideGradients
from wholebatch.errors import StaleGradientsError, UnsupportedError, WindowUsageError
from wholebatch.gradients import scale_gradients
from wholebatch.ranks.base import Reduce, Roles, Traffic
from wholebatch.ranks.deepspeed_config import check_config
from wholebatch.ranks.deepspeed_gradients import Held, InWholeBuffer, held_by, trainable
from wholebatch.ranks.deepspeed_state import as_of_one_rank
from wholebatch.ranks.several import PATIENCE_S, SeveralRanks, refuse_outside, weakly


class DeepSpeedRanks(SeveralRanks):
    """The ranks of one ``DeepSpeedEngine``; each is a replica.

    Args:
        engine: what ``deepspeed.initialize`` returned first.
        reduce: ``"per_update"``: as the stage does it, once an update in stages 0 and 1, in every
            micro-batch in stages 2 and 3. ``"after_agreement"`` is the same in stages 0 and 1, and
            ``"per_micro_batch"`` in stages 2 and 3; each is refused where the stage has no such way.

    Raises:
        UnsupportedError: a configuration that can't be run exactly.
    """

    def __init__(self, engine: Any, *, reduce: Reduce) -> None:
        check_config(engine)
        self._engine = engine
        self.stage: int = int(engine.zero_optimization_stage())
        self._refuse_reduction(reduce)
        group: dist.ProcessGroup = engine.data_parallel_group
        super().__init__(group)
        self.roles = Roles.one_each(dist.get_rank(group), dist.get_world_size(group))
        self.divisor = float(self.num_replicas)
        self.held: Held = held_by(engine.optimizer)
        self.norm_in_parts = self.held.partitioned
        self.stepper = self._stepper = EngineStepper(engine, self.held)
        self._per_micro_batch = self.stage >= 2
        self.equal_turns = self._per_micro_batch
        self.patience_s = PATIENCE_S if self._per_micro_batch else None  # others may be in a collective
        self.reduces_at_the_end = not self._per_micro_batch
        self._found: bool | None = None
        self._forwarded = self._last = False
        self._mark: list[tuple[int, int]] = []
        self._known = {name: id(one) for name, one in trainable(engine.module)}
        self._refuse_untrained()
        hook = engine.register_forward_pre_hook(weakly(self._note_forward))
        weakref.finalize(self, hook.remove)

    @property
    def meets(self) -> bool:
        # As under fully_shard: the backward before the last may find others gone, and says so.
        return self.synchronises and self._last

    def check_parameters(self, parameters: Sequence[nn.Parameter]) -> None:
        refuse_outside(
            parameters,
            self._engine.module.parameters(),
            "are not in the module of the DeepSpeed engine",
            ", so nobody reduces their gradients in stage 0; make them part of the module that "
            "deepspeed.initialize is given",
        )

    def check_plan(self, plan: Any) -> None:
        """Refuse a plan whose micro-batch is not that of DeepSpeed's configuration.

        Raises:
            WindowUsageError: with both numbers.
        """
        planned = getattr(plan, "micro_batch_samples", None)
        configured = self._engine.train_micro_batch_size_per_gpu()
        if planned is not None and planned != configured:
            raise WindowUsageError(
                f"the plan has micro-batches of {planned} samples and the DeepSpeed configuration "
                f'"train_micro_batch_size_per_gpu": {configured} (its train_batch_size is '
                f"{self._engine.train_batch_size()}); write {planned} there, or plan with {configured}"
            )

    # One update ---------------------------------------------------------------------------------------

    def begin(self) -> None:
        self._found = self._engine._is_gradient_accumulation_boundary
        check_config(self._engine)
        self._refuse_destroyed()
        self._refuse_other_parameters()
        if not self.held.is_empty():
            raise StaleGradientsError(
                "the DeepSpeed engine holds gradients of a backward outside the window, which would be "
                "added to this update and are thrown away now; step on them first, or leave it out"
            )
        self.reductions = 0
        self.held.begin()
        self._mark = self.held.mark()

    def widens(self, wide: WideGradients, parameters: Sequence[nn.Parameter], micro_batches: int) -> bool:
        _, added_up_in = self._engine.get_data_types()
        wide.refuse_narrow([added_up_in], micro_batches=micro_batches, why=DEEPSPEED)
        return False

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        self._forwarded, self._last = False, last
        self.synchronises = self._per_micro_batch
        # Told in the backward alone, so that a step of the loop's own does nothing.
        self._engine.set_gradient_accumulation_boundary(False)
        try:
            yield
        finally:
            self.synchronises = False

    def check_forward(self) -> None:
        if self._engine.inside_no_sync_ctxt:
            raise WindowUsageError("leave engine.no_sync() to the window, which says itself when to reduce")
        if not self._forwarded:
            raise WindowUsageError(
                "the forward of this micro-batch did not run through the DeepSpeed engine; call the engine "
                "that the window was given (not engine.module), with gradients enabled"
            )

    def backward(self, roots: Sequence[tuple[Tensor, Tensor]]) -> None:
        # The engine takes one scalar; of float32 or wider, as a window takes no other losses.
        terms = [loss * seed for loss, seed in roots]
        scalar = len(terms) == 1 and terms[0].ndim == 0
        total = terms[0] if scalar else torch.stack([term.sum() for term in terms]).sum()
        self._engine.set_gradient_accumulation_boundary(self._per_micro_batch and self._last)
        self._engine.backward(total, scale_wrt_gas=False)
        self._engine.set_gradient_accumulation_boundary(False)
        self.reductions += self._per_micro_batch
        self._mark = self.held.mark()

    def gradients_written(self) -> bool:
        return self.held.mark() != self._mark

    def check_before_reducing(self, parameters: Sequence[nn.Parameter]) -> None:
        if any(one.grad is not None and one.grad.is_sparse for one in parameters):
            raise UnsupportedError(
                "a parameter has a sparse gradient, which the window does not have DeepSpeed reduce; use "
                "sparse=False"
            )

    def reduce(self, parameters: Sequence[nn.Parameter]) -> None:
        self._engine.set_gradient_accumulation_boundary(True)
        self.held.prepare()
        self._engine.allreduce_gradients()
        self.reductions += 1

    def as_of_one_rank(self, model: nn.Module, optimizers: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
        whole, optimizer = as_of_one_rank(self._engine, self.held)
        return whole, [optimizer]

    def traffic(
        self,
        wide: WideGradients,
        parameters: Sequence[nn.Parameter],
        micro_batches: int,
    ) -> Traffic:
        """By DeepSpeed's own rules; stage 3 may gather less, for small and just used parameters stay."""
        times = micro_batches if self._per_micro_batch else 1
        sizes = [(getattr(one, "ds_numel", one.numel()), one.itemsize) for one in self.held.parameters()]
        elements, whole = sum(n for n, _ in sizes), sum(n * size for n, size in sizes)
        gathers = {0: 0, 1: 1, 2: 1, 3: 2 * micro_batches}[self.stage]
        _, added_up_in = self._engine.get_data_types()
        held = elements * added_up_in.itemsize // (self.num_replicas if self._per_micro_batch else 1)
        if isinstance(self.held, InWholeBuffer):  # and what backwards leave, beside the sums
            held += whole
        return Traffic(
            reductions=times,
            reduced_bytes=times * elements * self._engine.communication_data_type.itemsize,
            gathered_bytes=gathers * whole,
            held_bytes=held if micro_batches > 1 else 0,
        )

    def end(self, *, committed: bool) -> None:
        self._engine._is_gradient_accumulation_boundary = self._found
        if not committed:
            self.held.clear()

    # The norm -----------------------------------------------------------------------------------------

    @torch.no_grad()
    def gradient_norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """The Euclidean norm of what this rank holds of the reduced gradient, without the loss scale.

        Args:
            gradients: not asked; DeepSpeed holds them elsewhere.

        Exactness: as :func:`wholebatch.gradients.total_norm`.
        """
        return super().gradient_norm(self.held.pieces()) / (self._stepper.loss_scale() or 1.0)

    @torch.no_grad()
    def careful_norm(self, gradients: Sequence[Tensor]) -> float:
        # With a loss scale the norm is infinite by now: the squares of float16 do not leave float32.
        return super().careful_norm(self.held.pieces())

    # What can't be run exactly ------------------------------------------------------------------------

    def _refuse_reduction(self, reduce: Reduce) -> None:
        whole = self.stage < 2
        if reduce == "per_micro_batch" and whole:
            raise UnsupportedError(
                f'reduce="per_micro_batch" with ZeRO {self.stage}, which has every rank keep the whole '
                f'gradient and reduces it once an update; use reduce="per_update"'
            )
        if reduce == "after_agreement" and not whole:
            raise UnsupportedError(
                f'reduce="after_agreement" with ZeRO {self.stage}, which reduces in every micro-batch '
                f'because no rank keeps a whole gradient; use ZeRO 0 or 1, or reduce="per_micro_batch"'
            )

    def _refuse_untrained(self) -> None:
        own = {id(one) for one in self.held.parameters()}
        without = [name for name, one in trainable(self._engine.module) if id(one) not in own]
        if without:
            raise UnsupportedError(
                f"{len(without)} trainable parameters are in no group of the DeepSpeed engine's optimizer "
                f"({', '.join(without[:3])}); freeze them with requires_grad=False before "
                f"deepspeed.initialize, or give them to the optimizer"
            )

    def _refuse_destroyed(self) -> None:
        hooks = getattr(self._engine.optimizer, "_grad_acc_hooks", ())
        if any(hook.id not in (hook.hooks_dict_ref() or ()) for hook in hooks):
            raise WindowUsageError(
                "the DeepSpeed engine was destroyed (engine.destroy()), and no longer hears of gradients; "
                "initialise another, and build a window over that"
            )

    def _refuse_other_parameters(self) -> None:
        now = {name: id(one) for name, one in trainable(self._engine.module)}
        changed = sorted(dict(now.items() ^ self._known.items()))
        if changed:
            raise UnsupportedError(
                f"{len(changed)} parameters were frozen, unfrozen, added or replaced after deepspeed."
                f"initialize ({changed[0]}), and the engine does not know; initialise it again, and "
                f"build a window over that"
            )

    def _note_forward(self, *_: Any) -> None:
        if torch.is_grad_enabled():
            self._forwarded = True


class EngineStepper:
    """How a DeepSpeed engine scales, clips and steps; see :class:`wholebatch.ranks.stepper.Stepper`."""

    def __init__(self, engine: Any, held: Held) -> None:
        self._engine = engine
        self._held = held
        # One that has ZeROOptimizer's own way of scaling a loss is asked by engine.backward.
        names = {base.__name__ for base in type(engine.optimizer).__mro__}
        self._scales_itself = "ZeROOptimizer" in names

    def parameters(self) -> list[nn.Parameter]:
        return self._held.parameters()

    def param_groups(self) -> list[dict[str, Any]]:
        return list(self._engine.optimizer.param_groups)

    def check_optimizers(self, optimizers: Sequence[Any]) -> Any:
        known = (self._engine.optimizer, self._engine.basic_optimizer)
        if len(optimizers) != 1 or not any(optimizers[0] is one for one in known):
            raise WindowUsageError(
                f"the window was given {len(optimizers)} optimizers ({_names(optimizers)}) and a DeepSpeed "
                f"engine steps its own, a {type(self._engine.optimizer).__name__}; give the window "
                f"engine.optimizer"
            )
        return self._engine.basic_optimizer

    def check_clip(self, clip_grad_norm: float | None) -> None:
        configured = float(self._engine.gradient_clipping())
        if configured == (clip_grad_norm or 0.0):
            return
        absent = " (1.0 is its default where the configuration does not say)" if configured == 1.0 else ""
        raise WindowUsageError(
            f"the window has clip_grad_norm={clip_grad_norm} and the DeepSpeed configuration "
            f'"gradient_clipping": {configured}{absent}, by which DeepSpeed clips; give both the '
            f"same number, or 0.0 there and None here"
        )

    def check_schedules(self, schedules: Sequence[Any]) -> None:
        own = self._engine.lr_scheduler
        if own is not None and schedules:
            raise WindowUsageError(
                f"the window was given {len(schedules)} schedules and the DeepSpeed engine moves its own "
                f"{type(own).__name__} with each applied update; leave out one of them"
            )

    def loss_scale(self) -> float | None:
        if not self._engine.fp16_enabled():
            return None
        return float(self._engine.optimizer.loss_scale)

    def scaled(self, seed: Tensor) -> Tensor:
        """``seed`` times the loss scale, where ``engine.backward`` does not multiply by it."""
        scale = self.loss_scale()
        return seed if scale is None or self._scales_itself else seed * scale

    def correct(self, factor: float) -> None:
        """Multiply the reduced gradient in place.

        Exactness: one rounding in the dtype in which DeepSpeed holds it.
        """
        scale_gradients(self._held.pieces(), factor)

    def step(self) -> bool:
        """One step of the engine, and of its own schedule.

        Returns:
            False where the engine itself found an overflow: it skipped, and backed its loss scale off.
        """
        self._engine.set_gradient_accumulation_boundary(True)
        self._engine.step()
        return bool(self._engine.was_step_applied())

    def drop(self) -> None:
        """Forget the gradient; no parameter, no state of the optimizer, no counter of the engine moves."""
        self._held.clear()


def _names(optimizers: Sequence[Any]) -> str:
    return ", ".join(type(one).__name__ for one in optimizers) or "none"
