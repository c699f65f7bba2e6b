"""The watch over one process: what happens to its optimizers, their gradients and their modules, in order.

``Watch`` owns the list of events and what is known of the loop; ``backwards.py`` and ``updates.py`` say
when gradients are looked at, the other files of this room tell them what was called. Nothing is changed:
hooks return None, random generators are not drawn from, and whatever goes wrong in here is noted as unseen
and never reaches the loop. Numbers stay on their device until an optimizer's step.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from wholebatch.audit.intent import find_intents
from wholebatch.audit.trace import (
    Event,
    EventKind,
    Forward,
    Intent,
    OptimizerFacts,
    Place,
    RankTrace,
    Replayed,
)
from wholebatch.audit.watch.engines import (
    Engine,
    Piece,
    data_parallel_place,
    engine_of,
    pieces_of_dtensor,
    watched_parameters,
)
from wholebatch.audit.watch.gradients import Gradients, PendingSketches, Receiver
from wholebatch.audit.watch.places import library, user_places
from wholebatch.audit.watch.seen import OptimizerSeen, Recorded, quietly


class Watch:
    """What one process has seen so far.

    Args:
        skip_updates: to let pass before gradients are looked at.
        flags: what the user said of the updates.
        own_package: installed package that is audited itself.
    """

    def __init__(
        self, *, skip_updates: int = 0, flags: Intent | None = None, own_package: str | None = None
    ) -> None:
        self.on = True
        # grows with everything that happens: a watch over hangs looks at it
        self.progress = 0
        self.gradients = Gradients()
        self.gradients.pieces = self._pieces
        self.gradients.receivers = self._receivers
        self.optimizers: list[OptimizerSeen] = []
        # those whose step is running, the outermost first
        self.stepping: list[OptimizerSeen] = []
        self.models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.engines: list[Engine] = []
        # held weakly too: a wrapper that is freed after its process group can hang or abort the process
        self._wrappers: weakref.WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]] = (
            weakref.WeakKeyDictionary()
        )
        self.num_forwards = 0
        self.outputs: list[weakref.ref[Tensor]] = []
        self.skip_updates = skip_updates
        self.replayed: Replayed | None = None
        self._events: list[Recorded] = []
        self._settled = 0
        self._flags, self._own_package = flags, own_package
        self._unseen: dict[str, None] = {}
        self._staged = False
        self._intents: tuple[Intent, ...] | None = None
        self._place: tuple[int, int] | None = None
        self._ranks: tuple[int, int] | None = None
        self._process = os.getpid()

    @property
    def here(self) -> bool:
        """Whether the watch is on, in the process that began it: forked workers are left alone."""
        return self.on and os.getpid() == self._process

    @property
    def num_ranks(self) -> int:
        """Ranks of the job, as far as its process group is known."""
        return 1 if self._ranks is None else self._ranks[1]

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """See nothing meanwhile: what runs is ours."""
        self.on = False
        try:
            yield
        finally:
            self.on = True

    @property
    def listening(self) -> bool:
        """Whether gradients are looked at already: not in the updates to be skipped."""
        attempted = max((seen.updates for seen in self.optimizers), default=0)
        return self.here and attempted >= self.skip_updates

    # -- events -------------------------------------------------------------------------------------------

    def record(self, event: Recorded) -> None:
        """Put an event at the end."""
        if self.listening:
            self._events.append(event)

    @quietly
    def tell(
        self,
        kind: EventKind,
        *,
        before: PendingSketches | None = None,
        after: PendingSketches | None = None,
        value: Any = None,
        **named: Any,
    ) -> None:
        """Record an event with the place and library of whoever calls; its numbers may be on a device.

        Args:
            kind: what happened.
            before: sketches before it.
            after: sketches after it.
            value: a number.
            named: other fields of ``Event``.
        """
        where = self.where()
        self.record(
            lambda: Event(
                kind=kind,
                before=None if before is None else before.settle(),
                after=None if after is None else after.settle(),
                value=None if value is None else float(value),
                **where,
                **named,
            )
        )

    def where(self) -> dict[str, Any]:
        """Place and library of whoever calls, as fields of an event."""
        places = self.places()
        return {"place": places[0] if places else None, "through": library(self._own_package)}

    def places(self) -> tuple[Place, ...]:
        """The user's own lines on the call stack, innermost first."""
        return user_places(self._own_package)

    def cannot_see(self, what: str) -> None:
        """Note something that can't be seen, once."""
        self._unseen[what] = None

    def runs_stages(self) -> None:
        """A pipeline runs: no rank sees a micro-batch as a whole, and what it sees would be misread."""
        self.cannot_see("the model runs in stages of a pipeline, and no rank sees a whole micro-batch")
        self._staged = True

    def settle(self) -> None:
        """Move the numbers of all events so far to the host."""
        for recorded in self._events[self._settled :]:
            made = recorded if isinstance(recorded, Event) else self._made(recorded)
            if made is not None:
                self._events[self._settled] = made
                self._settled += 1
        del self._events[self._settled :]
        self._learn()

    def _made(self, recorded: Callable[[], Event | None]) -> Event | None:
        try:
            return recorded()
        except Exception as error:
            self.cannot_see(f"an event: {type(error).__name__}: {error}")
            return None

    # -- optimizers ---------------------------------------------------------------------------------------

    @quietly
    def optimizer_made(self, optimizer: torch.optim.Optimizer) -> OptimizerSeen | None:
        """Watch an optimizer and all parameters that it has now; the same one again where it is known."""
        indices = tuple(dict.fromkeys(self.gradients.watch(p) for p in watched_parameters(optimizer)))
        for seen in self.optimizers:
            if seen.optimizer() is optimizer:
                seen.parameters = indices
                return seen
        name = type(optimizer).__name__
        made = OptimizerSeen(optimizer=weakref.ref(optimizer), name=name, parameters=indices)
        self.optimizers.append(made)
        return made

    def those_with(self, parameters: Sequence[Tensor]) -> tuple[int, ...]:
        """The optimizers that step any of these parameters, by number."""
        return self.those_stepping({self.gradients.index_of(parameter) for parameter in parameters})

    def those_stepping(self, indices: set[int] | set[int | None]) -> tuple[int, ...]:
        """The optimizers that step any of the parameters with these indices, by number."""
        return tuple(n for n, seen in enumerate(self.optimizers) if indices.intersection(seen.parameters))

    # -- modules ------------------------------------------------------------------------------------------

    @quietly
    def forward_called(
        self, module: nn.Module, make: Callable[[], Forward], outputs: Sequence[Tensor]
    ) -> None:
        """An outermost module that holds watched parameters was called with gradients enabled."""
        self.models.add(module)
        self.num_forwards += 1
        self.outputs.extend(weakref.ref(output) for output in outputs)
        where = self.where()
        self.record(lambda: Event(kind="forward", forward=make(), **where))

    @quietly
    def model_seen(self, module: nn.Module) -> None:
        """Learn the names of its parameters, its wrapper and its engine; once for each model."""
        for name, parameter in module.named_parameters():
            index = self.gradients.index_of(parameter)
            if index is not None:
                self.gradients.names.setdefault(index, _plain(name))
        inside = [part for part in module.modules() if isinstance(part, DistributedDataParallel)]
        if inside and inside[0] is not module:
            self._wrappers[module] = weakref.ref(inside[0])
        engine = engine_of(module)
        if engine is not None:
            self.engines.append(engine)

    def holds_reduction(self, modules: Sequence[nn.Module] | None = None) -> bool | None:
        """Whether the wrapper of these modules (of all models) was told not to reduce; None without one."""
        for module in list(self.models) if modules is None else modules:
            # the wrapper may be inside another library's
            inside = self._wrappers.get(module)
            wrapper = module if inside is None else inside()
            flag = getattr(wrapper, "require_backward_grad_sync", None)
            if isinstance(flag, bool):
                return not flag
        told = [engine.holds_reduction() for engine in self.engines]
        return next((flag for flag in told if flag is not None), None)

    @quietly
    def group_ends(self) -> None:
        """The process group is about to be destroyed: take what is known, and hold no wrapper beyond it."""
        self.settle()
        for what in self._unseen_by_engines():
            self.cannot_see(what)
        self.engines.clear()
        self._wrappers.clear()

    def _receivers(self) -> list[Receiver]:
        return [(p, leaf, engine.own) for engine in self.engines for p, leaf in engine.receivers()]

    def _pieces(self, parameter: Tensor) -> Sequence[Piece] | None:
        for engine in self.engines:
            pieces = engine.pieces(parameter)
            if pieces is not None:
                return pieces
        return pieces_of_dtensor(parameter.grad) if isinstance(parameter.grad, DTensor) else None

    # -- the end ------------------------------------------------------------------------------------------

    def trace(self, ended: Any, failure: str | None = None) -> RankTrace:
        """Everything that was seen, as plain data; the watch is over and holds nothing of the loop.

        Args:
            ended: how the script ended; see ``RankTrace``.
            failure: what ended it.
        """
        self.settle()
        self.on = False
        rank, num_ranks = self._ranks or (0, 1)
        replica, num_replicas = self._place or (rank, num_ranks)
        gradients = self.gradients
        numbers = range(len(gradients.parameters))
        made = RankTrace(
            rank=rank,
            num_ranks=num_ranks,
            replica=replica,
            num_replicas=num_replicas,
            parameters=tuple(gradients.names.get(index, f"parameter {index}") for index in numbers),
            dtypes=tuple(str(p.dtype).removeprefix("torch.") for p in gradients.parameters),
            sharded=tuple(index in gradients.sharded for index in numbers),
            optimizers=tuple(OptimizerFacts(name=s.name, parameters=s.parameters) for s in self.optimizers),
            events=tuple(e for e in self._events if isinstance(e, Event) and not self._staged),
            intents=self._intents if self._intents is not None else find_intents(self._flags),
            replayed=self.replayed,
            num_skipped_updates=self.skip_updates,
            ended=ended,
            failure=failure,
            unseen=tuple(dict.fromkeys([*self._unseen, *gradients.failures, *self._unseen_by_engines()])),
        )
        # a wrapped model kept beyond its process group can abort the process
        self.gradients = Gradients()
        self.engines.clear()
        self.outputs.clear()
        self.models.clear()
        self._wrappers.clear()
        return made

    def _unseen_by_engines(self) -> list[str]:
        found: list[str] = []
        for engine in self.engines:
            with contextlib.suppress(Exception):
                found.extend(engine.unseen())
        return found

    def _learn(self) -> None:
        """What only shows once the loop runs: its ranks, its replicas, what its frameworks were told."""
        distributed = torch.distributed
        if distributed.is_available() and distributed.is_initialized():
            self._ranks = distributed.get_rank(), distributed.get_world_size()
            # not once the group is gone: every rank would then be the only one
            with contextlib.suppress(Exception):
                optimizers = [held for seen in self.optimizers if (held := seen.optimizer()) is not None]
                self._place = data_parallel_place(list(self.models), optimizers)
        if self._intents is None and any(seen.updates for seen in self.optimizers):
            self._intents = find_intents(self._flags)

    def learning_rates(self) -> Iterator[float | Tensor]:
        """Of each optimizer's first parameter group."""
        for seen in self.optimizers:
            optimizer = seen.optimizer()
            if optimizer is not None and optimizer.param_groups:
                rate = optimizer.param_groups[0].get("lr", 0.0)
                yield rate.detach().clone() if isinstance(rate, Tensor) else float(rate)


def _plain(name: str) -> str:
    """A parameter's name without what wrappers put into it."""
    for part in ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module."):
        name = name.replace(part, "")
    return name.removeprefix("module.")
