"""The calls that make or spoil an update, each told to the watch and passed on unchanged.

Functions are replaced where torch itself looks them up at the time of the call, so that a loop which
imported a function by its name beforehand is seen as well.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader
from torch.utils.data import dataloader as loaders

from wholebatch.audit.watch.backwards import Backwards
from wholebatch.audit.watch.engines_deepspeed import update_method, was_applied
from wholebatch.audit.watch.patches import Patches
from wholebatch.audit.watch.seen import quietly
from wholebatch.audit.watch.updates import Updates
from wholebatch.audit.watch.watcher import Watch

Function = Callable[..., Any]
# Collectives that people call on gradients themselves.
_COLLECTIVES = ("all_reduce", "reduce", "reduce_scatter_tensor", "all_gather_into_tensor", "broadcast")


class Calls:
    """Everything of torch that is hooked for one watch; ``remove`` takes all of it away.

    Args:
        watch: that records.
        updates: that look at gradients.
        backwards: that look at backwards.
    """

    def __init__(self, watch: Watch, updates: Updates, backwards: Backwards) -> None:
        self.watch, self._updates, self._backwards = watch, updates, backwards
        self._patches = Patches()
        # steps that have begun: which optimizer's, and what to close when it is over
        self._steps: list[tuple[Any, ExitStack]] = []
        self._loaders: dict[int, int] = {}
        # schedulers that are moving: one may move others
        self._moving = 0
        # an engine steps: its optimizer's own steps are parts of that
        self._engine_steps = False
        self._hooks = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        wrap = self._patches.wrap
        # both backward and grad come through here
        wrap(torch.autograd, "_engine_run_backward", self._backward)
        wrap(torch.optim.Optimizer, "add_param_group", self._add_param_group)
        wrap(torch.optim.Optimizer, "zero_grad", self._zero_grad)
        wrap(nn.Module, "zero_grad", self._zero_grad)
        clipping = sys.modules["torch.nn.utils.clip_grad"]
        wrap(clipping, "_clip_grads_with_norm_", functools.partial(self._clip, "norm"))
        for owner in (clipping, torch.nn.utils):
            wrap(owner, "clip_grad_value_", functools.partial(self._clip, "value"))
        scaler = torch.amp.GradScaler
        wrap(scaler, "scale", self._scale)
        wrap(scaler, "unscale_", self._unscale)
        wrap(scaler, "step", self._scaler_step)
        wrap(scaler, "update", self._scaler_update)
        wrap(DataLoader, "__iter__", self._pass_begins)
        wrap(loaders._BaseDataLoaderIter, "__next__", self._pass_goes_on)
        if torch.distributed.is_available():
            for name in _COLLECTIVES:
                wrap(torch.distributed, name, functools.partial(self._reduce, name))
            wrap(torch.distributed, "destroy_process_group", self._group_ends)
        self.late()

    def remove(self) -> None:
        """Put everything back."""
        for hook in self._hooks:
            hook.remove()
        self._patches.restore()

    @quietly
    def late(self) -> None:
        """Hook what has been imported or defined only since: schedulers of the user's own, libraries."""
        for scheduler in _subclasses(LRScheduler):
            if "step" in vars(scheduler):
                self._patches.wrap(scheduler, "step", self._schedule)
        engine = update_method()
        if engine is not None:
            self._patches.wrap(*engine, self._engine_step)
        stages = sys.modules.get("torch.distributed.pipelining.stage")
        if stages is not None:
            self._patches.wrap(stages._PipelineStageBase, "forward_one_chunk", self._stage)
        averaging = sys.modules.get("torch.optim.swa_utils")
        if averaging is not None:
            self._patches.wrap(averaging.AveragedModel, "update_parameters", self._average)
        accelerated = getattr(sys.modules.get("accelerate.optimizer"), "AcceleratedOptimizer", None)
        if accelerated is not None:
            self._patches.wrap(accelerated, "zero_grad", self._ignorable_zero_grad)

    def _stage(self, original: Function) -> Function:
        def forward(*given: Any, **named: Any) -> Any:
            self.watch.runs_stages()
            return original(*given, **named)

        return forward

    # -- backward -----------------------------------------------------------------------------------------

    def _backward(self, original: Function) -> Function:
        watch = self.watch

        def run(roots: Any, *given: Any, **named: Any) -> Any:
            nested = torch._C._current_graph_task_id() != -1
            if nested or not watch.here:
                return original(roots, *given, **named)
            if not named.get("accumulate_grad"):
                inputs = given[3] if len(given) > 3 else ()
                if any(isinstance(t, Tensor) and watch.gradients.index_of(t) is not None for t in inputs):
                    watch.tell("probe")
                return original(roots, *given, **named)
            self.late()
            seen = self._backwards.begins(tuple(roots), tuple(given[0]) if given else ())
            try:
                return original(roots, *given, **named)
            finally:
                if seen is not None:
                    self._backwards.ended(seen)

        return run

    # -- optimizers ---------------------------------------------------------------------------------------

    def _add_param_group(self, original: Function) -> Function:
        def add_param_group(optimizer: Any, *given: Any, **named: Any) -> Any:
            result = original(optimizer, *given, **named)
            self.watch.optimizer_made(optimizer)
            return result

        return add_param_group

    def _before_step(self, optimizer: Any, given: Any, named: Any) -> Any:
        while self._steps and self._steps[-1][0] is optimizer:
            self._steps.pop()[1].close()  # a step that raised, and is tried again
        seen = self.watch.optimizer_made(optimizer)
        stack = ExitStack()
        self._steps.append((optimizer, stack))
        if seen is None or self._engine_steps:
            return None
        stack.enter_context(self._updates.stepping(seen))
        closure = given[1] if len(given) > 1 else named.get("closure")
        if not callable(closure):
            self._updates.step_begins(optimizer)
            return None

        @functools.wraps(closure)
        def read_after(*inner: Any, **options: Any) -> Any:
            # the last backward of a window may run in here (Lightning); what is read is there after it
            result = closure(*inner, **options)
            self._updates.step_begins(optimizer)
            return result

        if len(given) > 1:
            return (given[0], read_after, *given[2:]), named
        return given, {**named, "closure": read_after}

    def _after_step(self, optimizer: Any, _given: Any, _named: Any) -> None:
        if self._steps:
            self._steps.pop()[1].close()
        if not self._engine_steps:
            self._updates.step_ended(optimizer)

    def _engine_step(self, original: Function) -> Function:
        def step(engine: Any, *given: Any, **named: Any) -> Any:
            optimizer = getattr(engine, "basic_optimizer", None) or engine.optimizer
            if not self.watch.here:
                return original(engine, *given, **named)
            scale = self._engine_scale() or 1.0
            self._updates.step_begins(optimizer, loss_scale=scale, skipped=lambda: not was_applied(engine))
            self._engine_steps = True
            try:
                return original(engine, *given, **named)
            finally:
                self._engine_steps = False
                self._updates.engine_cleared(optimizer)
                self._updates.step_ended(optimizer)

        return step

    @quietly
    def _engine_scale(self) -> float:
        return next((one.loss_scale() for one in self.watch.engines), 1.0)

    def _zero_grad(self, original: Function) -> Function:
        watch = self.watch

        def zero_grad(owner: Any, *given: Any, **named: Any) -> Any:
            if not watch.listening or not watch.gradients.parameters:
                return original(owner, *given, **named)
            self._updates.look_at_gradients()
            before = watch.gradients.present(range(len(watch.gradients.parameters)))
            result = original(owner, *given, **named)
            self._updates.cleared(_parameters_of(owner), before, f"{type(owner).__name__}.zero_grad()")
            return result

        return zero_grad

    def _ignorable_zero_grad(self, original: Function) -> Function:
        watch = self.watch

        def zero_grad(owner: Any, *given: Any, **named: Any) -> Any:
            everything = range(len(watch.gradients.parameters))
            held = watch.gradients.present(everything) if watch.listening else []
            result = original(owner, *given, **named)
            if held and watch.gradients.present(held) == held and watch.gradients.changed() == ([], []):
                watch.tell("clear_call", detail=f"{type(owner).__name__}.zero_grad()")
            return result

        return zero_grad

    # -- the edge -----------------------------------------------------------------------------------------

    def _clip(self, how: str, original: Function) -> Function:
        watch = self.watch

        def clip(parameters: Any, *given: Any, **named: Any) -> Any:
            listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            concerned = watch.those_with(listed) if watch.listening else ()
            if not concerned:
                return original(listed, *given, **named)
            result, before, after = self._updates.touch(listed, lambda: original(listed, *given, **named))
            limit = given[0] if given else named.get("max_norm", named.get("clip_value"))
            watch.tell(
                "clip", optimizers=concerned, before=before, after=after, value=limit, detail=f"by {how}"
            )
            return result

        return clip

    def _scale(self, original: Function) -> Function:
        def scale(owner: Any, outputs: Any) -> Any:
            result = original(owner, outputs)
            if self.watch.here and owner.is_enabled() and owner._scale is not None:
                self._backwards.loss_scale = owner._scale.detach().clone()
            return result

        return scale

    def _unscale(self, original: Function) -> Function:
        watch = self.watch

        def unscale_(owner: Any, optimizer: Any) -> Any:
            if not watch.listening or not owner.is_enabled():
                return original(owner, optimizer)
            parameters = _parameters_of(optimizer)
            result, before, after = self._updates.touch(parameters, lambda: original(owner, optimizer))
            concerned = watch.those_with(parameters)
            factor = owner._scale.detach().clone()
            watch.tell("unscale", optimizers=concerned, before=before, after=after, value=factor)
            return result

        return unscale_

    def _scaler_step(self, original: Function) -> Function:
        watch = self.watch

        def step(owner: Any, optimizer: Any, *given: Any, **named: Any) -> Any:
            if not watch.listening or not owner.is_enabled():
                return original(owner, optimizer, *given, **named)
            seen = watch.optimizer_made(getattr(optimizer, "optimizer", optimizer))
            before = seen.updates if seen is not None else 0
            result = original(owner, optimizer, *given, **named)
            if seen is not None and watch.here and seen.updates == before:
                number = watch.optimizers.index(seen)
                watch.tell("skip", optimizers=(number,), detail="the loss scale overflowed")
                self._updates.update_ended(seen)
            return result

        return step

    def _scaler_update(self, original: Function) -> Function:
        def update(owner: Any, *given: Any, **named: Any) -> Any:
            result = original(owner, *given, **named)
            if self.watch.here and owner.is_enabled() and owner._scale is not None:
                self.watch.tell("scale_update", value=owner._scale.detach().clone())
            return result

        return update

    def _schedule(self, original: Function) -> Function:
        watch = self.watch

        def step(owner: Any, *given: Any, **named: Any) -> Any:
            self._moving += 1
            try:
                result = original(owner, *given, **named)
            finally:
                self._moving -= 1
            # its first move is made by its constructor
            if watch.here and not self._moving and not getattr(owner, "_is_initial", False):
                optimizer = getattr(owner, "optimizer", None)
                groups = getattr(optimizer, "param_groups", None) or [{}]
                concerned = watch.those_with(_parameters_of(optimizer))
                rate = groups[0].get("lr")
                rate = rate.detach().clone() if isinstance(rate, Tensor) else rate
                watch.tell("schedule", optimizers=concerned, value=rate, detail=type(owner).__name__)
            return result

        return step

    def _average(self, original: Function) -> Function:
        def update_parameters(owner: Any, *given: Any, **named: Any) -> Any:
            result = original(owner, *given, **named)
            if self.watch.here:
                self.watch.tell("average", detail=f"{type(owner).__name__}.update_parameters()")
            return result

        return update_parameters

    # -- data and ranks -----------------------------------------------------------------------------------

    def _pass_begins(self, original: Function) -> Function:
        def begin(owner: Any) -> Any:
            if self.watch.here:
                self.watch.tell("pass", value=1.0, detail=self._called(owner))
            return original(owner)

        return begin

    def _called(self, loader: Any) -> str:
        """Class and number of a loader; its length is not asked for, as that may run code or fail."""
        number = self._loaders.setdefault(id(loader), len(self._loaders) + 1)
        return f"{type(loader).__name__} {number}"

    def _pass_goes_on(self, original: Function) -> Function:
        def advance(owner: Any) -> Any:
            try:
                return original(owner)
            except StopIteration:
                if self.watch.here:
                    self.watch.tell("pass", value=0.0)
                raise

        return advance

    def _group_ends(self, original: Function) -> Function:
        def destroy_process_group(*given: Any, **named: Any) -> Any:
            self.watch.group_ends()
            return original(*given, **named)

        return destroy_process_group

    def _reduce(self, name: str, original: Function) -> Function:
        watch = self.watch

        def reduce(*given: Any, **named: Any) -> Any:
            tensors = [value for value in (*given, *named.values()) if isinstance(value, Tensor)]
            concerned = self._updates.those_reduced(tensors) or () if watch.listening else ()
            if not concerned:
                result = original(*given, **named)
                if name == "all_reduce" and watch.listening and self._updates.are_weights(tensors):
                    watch.tell("parameters_changed", detail="torch.distributed.all_reduce of the weights")
                return result
            self._updates.look_at_gradients()
            result = original(*given, **named)
            watch.gradients.remember()
            watch.tell("reduce", optimizers=concerned, detail=f"torch.distributed.{name}")
            return result

        return reduce


def _subclasses(of: type) -> Iterable[type]:
    yield of
    below: list[type] = of.__subclasses__()
    for one in below:
        yield from _subclasses(one)


def _parameters_of(owner: Any) -> list[Tensor]:
    if isinstance(owner, nn.Module):
        return list(owner.parameters())
    return [parameter for group in getattr(owner, "param_groups", ()) for parameter in group["params"]]
