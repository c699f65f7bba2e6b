"""What the engines of several ranks share: words on the host, norms of what lies in parts, shards.

From the bottom: :class:`SeveralRanks` talk to each other; :class:`SpreadRanks` hold parts or copies of a
gradient; :class:`ShardingRanks` gather parameters in forwards and reduce in backwards.
"""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from wholebatch.errors import UnsupportedError
from wholebatch.gradients import on_this_rank, total_norm
from wholebatch.ranks.base import Ranks, Reduce
from wholebatch.ranks.collectives import HostMessages, HostRows, alive
from wholebatch.ranks.norms import careful_norm_on_this_rank, norm_on_this_rank, num_shards

# How long a rank that failed waits for others that may be inside a collective which it left.
PATIENCE_S = 60.0


class SeveralRanks(Ranks):
    """The ranks of a job. An engine that reduces by itself has nothing more to check, reduce or share.

    Args:
        group: all of them.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._messages = HostMessages(group)
        self._weak_group = weakref.ref(group)  # as HostMessages

    @property
    def group(self) -> dist.ProcessGroup:
        """All ranks of the job.

        Raises:
            RuntimeError: their process group was destroyed.
        """
        return alive(self._weak_group)

    def tell(self, row: Sequence[float], patience_s: float | None = None) -> HostRows:
        return self._messages.tell(row, patience_s)

    def lend(self, batch: Any, device: torch.device) -> Any:
        return self._messages.lend(batch, device)


class SpreadRanks(SeveralRanks):
    """Ranks over which one gradient is spread, cut in shards or copied.

    Args:
        group: all ranks of the job.
        device: of the gradients.

    Attributes:
        holders: over how many ranks the parameters of this rank are spread; see ``norm_on_this_rank``.
        data_shards: into how many shards data parallelism cuts; what is cut into more is tensor parallel.
    """

    norm_in_parts = True
    holders: int
    data_shards: int = 1

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group)
        self._device = device

    def gradient_norm(self, gradients: Sequence[Tensor]) -> Tensor:
        return norm_on_this_rank(gradients, holders=self.holders, device=self._device)

    def careful_norm(self, gradients: Sequence[Tensor]) -> float:
        return careful_norm_on_this_rank(gradients, holders=self.holders)

    def norm_of_copies(self, gradients: Sequence[Tensor]) -> Tensor | float:
        if self.roles.copies == 1:
            return 0.0
        alike = [on_this_rank(one) for one in gradients if num_shards(one) <= self.data_shards]
        return total_norm(alike) if alike else 0.0


class ShardingRanks(SpreadRanks):
    """Ranks whose forwards gather parameters, and whose backwards reduce gradients to shards.

    Args:
        group: all ranks of the job.
        device: of the gradients.
        reduce: ``"per_update"``: held back, and reduced in the last backward; whole gradients are held.
            ``"per_micro_batch"``: each backward reduces to the shards.

    Raises:
        UnsupportedError: ``"after_agreement"``, which is DDP's.
    """

    equal_turns = True
    patience_s = PATIENCE_S
    engine: str  # its name, for messages

    def __init__(self, group: dist.ProcessGroup, device: torch.device, *, reduce: Reduce) -> None:
        if reduce == "after_agreement":
            raise UnsupportedError(
                f'reduce="after_agreement" is a mode of DistributedDataParallel; {self.engine} reduces '
                f'"per_update" (holds whole gradients) or "per_micro_batch" (more traffic)'
            )
        super().__init__(group, device)
        self._per_micro_batch = reduce == "per_micro_batch"
        self._last = False
        self._found: list[tuple[Any, str, Any]] = []  # the engine's switches as they were before the update

    @property
    def meets(self) -> bool:
        # Every forward is a meeting already; what a last one adds is that all may still turn back.
        return self._last

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        self.synchronises, self._last = last or self._per_micro_batch, last
        self._switch()
        try:
            yield
        finally:
            self.synchronises = self._last = False

    def backward(self, roots: Sequence[tuple[Tensor, Tensor]]) -> None:
        super().backward(roots)
        self.reductions += self.synchronises

    def end(self, *, committed: bool) -> None:
        for owner, name, value in self._found:
            setattr(owner, name, value)
        self._found = []
        if not committed:
            self._reset()

    def _note(self, switches: Iterable[tuple[Any, str]]) -> None:
        """Remember switches that the window sets, by owner and name, until the end of the update."""
        self.reductions = 0
        self._found = [(owner, name, getattr(owner, name)) for owner, name in switches]

    @abstractmethod
    def _switch(self) -> None:
        """Set the engine's switches for the open micro-batch."""

    @abstractmethod
    def _reset(self) -> None:
        """Take everything of an update that did not commit out of the engine.

        Raises:
            UnsupportedError: it can't be; the window can't go on.
        """


def refuse_replaced(parameters: Sequence[nn.Parameter], model: nn.Module, *, by: str) -> None:
    """Refuse an optimizer that was built before an engine gave the model other parameters.

    Args:
        parameters: of the optimizer.
        model: as it is now.
        by: the function that put them there.

    Raises:
        UnsupportedError: with how many they are.
    """
    refuse_outside(
        parameters,
        model.parameters(),
        "are not the model's",
        f": {by} puts new ones in their place, and who moves the old ones does not move the model; build "
        f"the optimizer after {by}",
    )


def refuse_outside(
    parameters: Sequence[nn.Parameter], known: Iterable[nn.Parameter], where: str, mend: str
) -> None:
    """Refuse trainable parameters of the optimizer that an engine does not know.

    Args:
        parameters: of the optimizer.
        known: those of the engine.
        where: where the others are, or are not, as a part of the sentence.
        mend: its end: what follows from that, and what to change.

    Raises:
        UnsupportedError: with how many they are, and the shape of the first.
    """
    own = set(map(id, known))
    outside = [one for one in parameters if one.requires_grad and id(one) not in own]
    if outside:
        raise UnsupportedError(
            f"{len(outside)} of the optimizer's {len(parameters)} parameters {where} (the first has shape "
            f"{list(outside[0].shape)}){mend}"
        )


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """A hook that does not keep the object of its method alive."""
    reference = weakref.WeakMethod(method)

    def call(*arguments: Any) -> None:
        bound = reference()
        if bound is not None:
            bound(*arguments)

    return call
