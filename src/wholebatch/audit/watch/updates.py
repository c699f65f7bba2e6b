"""The edges of an update: steps and skips, clears, and what was done to the gradients in between."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from wholebatch.audit.trace import Event
from wholebatch.audit.watch.gradients import PendingSketches, all_zero
from wholebatch.audit.watch.replays import Replays
from wholebatch.audit.watch.seen import BackwardSeen, OptimizerSeen, Recorded, quietly
from wholebatch.audit.watch.watcher import Watch

# One optimizer that steps far more often than the others ends the watch after so many times their updates.
_FASTEST = 4
# A clear of less than this share of an optimizer's gradients leaves its window open.
_ALL = 0.99


class Updates:
    """The updates of one process.

    Args:
        watch: that records them.
        updates: to audit, of each optimizer.
        enough: called once, when so many were seen.
        replays: that run a window again.
    """

    def __init__(self, watch: Watch, updates: int, enough: Callable[[], None], replays: Replays) -> None:
        self.watch = watch
        self.replays = replays
        # the backwards since the last step, as far as they are still on the device
        self.open: list[BackwardSeen] = []
        # backwards came since the last step or clear, wherever an engine holds what they brought
        self.uncleared = False
        # did something move, that nobody called? asked before each backward and each step
        self.between: list[Callable[[], Callable[[], Event | None] | None]] = []
        self.after_update: list[Callable[[], None]] = []
        self._updates, self._enough = updates, enough

    # -- steps --------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def stepping(self, seen: OptimizerSeen) -> Iterator[None]:
        """Around a step, so that backwards and steps inside it are known as such."""
        self.watch.stepping.append(seen)
        try:
            yield
        finally:
            self.watch.stepping.remove(seen)

    @quietly
    def step_begins(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        loss_scale: float = 1.0,
        skipped: Callable[[], bool] = lambda: False,
    ) -> None:
        """Read what an optimizer is about to read.

        Args:
            optimizer: that steps.
            loss_scale: that an engine takes out itself, later.
            skipped: asked afterwards whether the engine left the parameters alone.
        """
        watch = self.watch
        seen = watch.optimizer_made(optimizer)
        if seen is None or not watch.listening or any(seen.shares_with(o) for o in watch.stepping):
            return
        self.look()
        self.look_back()
        self.replays.gradients_read()
        watch.record(self._stepped(optimizer, seen, loss_scale, skipped))

    def release(self) -> None:
        """Hold nothing any longer."""
        self.open.clear()
        self.between.clear()
        self.after_update.clear()

    def look_back(self) -> None:
        """Note which graphs and outputs of this window's backwards are still alive."""
        for backward in self.open:
            backward.look_back()

    def _stepped(
        self,
        optimizer: torch.optim.Optimizer,
        seen: OptimizerSeen,
        loss_scale: float,
        skipped: Callable[[], bool],
    ) -> Recorded:
        gradients, where = self.watch.gradients, self.watch.where()
        number = (self.watch.optimizers.index(seen),)
        read, norm = gradients.read(seen.parameters), gradients.norm(seen.parameters)
        scale, overflow = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
        if isinstance(scale, Tensor) or loss_scale != 1.0:
            # a fused optimizer takes the loss scale out itself, while it reads
            scale = torch.tensor(loss_scale) if scale is None else scale.detach().clone()
            scaled, read = read, read.over(scale)
            norm = None if norm is None else norm / scale
            self.watch.tell("unscale", optimizers=number, value=scale, before=scaled, after=read)
        parameters = [gradients.parameters[index] for index in seen.parameters]
        needing = [index for index in seen.parameters if gradients.parameters[index].requires_grad]
        without = sum(index not in read.values for index in needing)
        dtypes = sorted(
            {str(p.grad.dtype).removeprefix("torch.") for p in parameters if p.grad is not None}
        )

        def stepped() -> Event:
            settled = read.settle()
            left_alone = skipped() or (isinstance(overflow, Tensor) and bool(overflow.any()))
            return Event(
                kind="skip" if left_alone else "step",
                optimizers=number,
                before=settled,
                num_parameters=len(needing),
                num_without_gradient=len(needing) if all_zero(settled) else without,
                gradient_norm=None if norm is None else float(norm),
                gradient_dtype=dtypes[0] if dtypes else "float32",
                **where,
            )

        return stepped

    @quietly
    def engine_cleared(self, optimizer: torch.optim.Optimizer) -> None:
        """An engine has cleared the gradients that it holds, as it does after each update."""
        seen = self.watch.optimizer_made(optimizer)
        if seen is not None:
            self._clear(self.watch.optimizers.index(seen), 1.0, "cleared by the engine")

    @quietly
    def step_ended(self, optimizer: torch.optim.Optimizer) -> None:
        """Count a step that is over, but for one inside that of an optimizer of the same parameters."""
        seen = self.watch.optimizer_made(optimizer)
        if seen is not None and not any(seen.shares_with(outer) for outer in self.watch.stepping):
            self.update_ended(seen)

    @quietly
    def update_ended(self, seen: OptimizerSeen) -> None:
        """Settle the window that an attempted update closed, and end the watch where enough was seen."""
        watch = self.watch
        seen.updates += 1
        watch.progress += 1
        watch.settle()
        self.open.clear()
        self.uncleared = False
        watch.outputs.clear()
        watch.gradients.remember()
        for action in self.after_update:
            action()
        self.replays.update_ended(seen)
        stepped = [other.updates - watch.skip_updates for other in watch.optimizers if other.updates]
        if min(stepped) >= self._updates or max(stepped) >= _FASTEST * self._updates:
            self._enough()

    # -- gradients touched between backwards --------------------------------------------------------------

    @quietly
    def look(self) -> None:
        """Was anything cleared, changed or moved by hand since the last look?"""
        if not self.watch.listening:
            return
        self.look_at_gradients()
        for moved in self.between:
            found = moved()
            if found is not None:
                self.watch.record(_placed(found, self.watch.where()))

    @quietly
    def look_at_gradients(self) -> None:
        """Were gradients cleared or changed by hand since they were last looked at?"""
        gradients = self.watch.gradients
        gone, others = gradients.changed()
        gradients.remember()
        for number in self.watch.those_stepping(set(gone)):
            mine = self.watch.optimizers[number].parameters
            lost = len(set(gone).intersection(mine))
            self._clear(
                number, lost / (lost + len(gradients.present(mine))), "gradients set to None by hand"
            )
        if others:
            self.watch.record(self._changed(others))

    def _changed(self, indices: Sequence[int]) -> Recorded:
        gradients, where = self.watch.gradients, self.watch.where()
        now = gradients.read(indices)
        concerned = self.watch.those_stepping(set(indices))
        shares = []
        for number in concerned:
            present = gradients.present(self.watch.optimizers[number].parameters)
            shares.append(len(set(indices).intersection(present)) / max(1, len(present)))

        def changed() -> Event:
            settled = now.settle()
            zeroed = all_zero(settled)
            return Event(
                kind="clear" if zeroed else "gradients_changed",
                optimizers=concerned,
                after=settled,
                value=min(shares, default=0.0) if zeroed else None,
                detail="gradients zeroed by hand" if zeroed else "gradients changed by hand",
                **where,
            )

        return changed

    @quietly
    def cleared(self, parameters: Sequence[Tensor], before: Sequence[int], called: str) -> None:
        """After a call of zero_grad: what did it clear?

        Args:
            parameters: that it was for.
            before: watched parameters that had a gradient.
            called: in words.
        """
        watch = self.watch
        gone, others = watch.gradients.changed()
        meant = {watch.gradients.index_of(parameter) for parameter in parameters}
        clean = {*gone, *(index for index in others if index in meant)}
        watch.gradients.remember()
        if not before and not self.uncleared:
            return
        concerned = watch.those_stepping(clean)
        for number in concerned:
            had = [index for index in before if index in watch.optimizers[number].parameters]
            self._clear(number, len(clean.intersection(had)) / max(1, len(had)), called)
        if not concerned:
            watch.tell("clear_call", optimizers=watch.those_with(parameters), detail=called)

    def _clear(self, number: int, share: float, called: str) -> None:
        self.watch.tell("clear", optimizers=(number,), value=share, detail=called)
        self.uncleared = False
        if share > _ALL:
            self.watch.gradients.forget_low_precision()

    @quietly
    def those_reduced(self, tensors: Sequence[Tensor]) -> tuple[int, ...]:
        """The optimizers whose gradients these tensors are, or are a flat copy of."""
        watched = self.watch.gradients.parameters
        held = {
            p.grad.data_ptr(): index
            for index, p in enumerate(watched)
            if p.grad is not None and p.grad.layout == torch.strided
        }
        found = {held[t.data_ptr()] for t in tensors if t.layout == torch.strided and t.data_ptr() in held}
        sizes = {t.numel() for t in tensors if t.is_floating_point()}
        return tuple(
            number
            for number, seen in enumerate(self.watch.optimizers)
            if found.intersection(seen.parameters)
            or sum(watched[index].numel() for index in seen.parameters) in sizes
        )

    @quietly
    def are_weights(self, tensors: Sequence[Tensor]) -> bool:
        """Whether one of these tensors is the first watched parameter itself: its replicas are averaged."""
        first = self.watch.gradients.parameters[:1]
        return any(t.data_ptr() == p.data_ptr() for p in first for t in tensors)

    @quietly
    def read(self, parameters: Sequence[Tensor]) -> PendingSketches | None:
        """Sketches of what ``.grad`` of these parameters holds now; None where that failed."""
        indices = [index for p in parameters if (index := self.watch.gradients.index_of(p)) is not None]
        return self.watch.gradients.read(indices)

    def touch(self, parameters: Sequence[Tensor], action: Callable[[], Any]) -> tuple[Any, Any, Any]:
        """Run what changes gradients knowingly.

        Args:
            parameters: whose gradients it changes.
            action: that does.

        Returns:
            Its result, and sketches before and after it.
        """
        self.look_at_gradients()
        self.replays.gradients_read()
        before = self.read(parameters)
        result = action()
        after = self.read(parameters)
        self.watch.gradients.remember()
        return result, before, after


def _placed(found: Callable[[], Event | None], where: Mapping[str, Any]) -> Recorded:
    """An event that was found later, at the line before which it must have happened."""

    def made() -> Event | None:
        event = found()
        return None if event is None else replace(event, **where)

    return made
