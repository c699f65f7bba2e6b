"""The seam between the window and whatever reduces gradients over ranks.

One class for each engine. The window asks it for a handful of things and has no branch on the
number of ranks or on the engine:

* ``total``: add a small host vector up over the replicas;
* ``begin``, ``open_window``, ``end``: around an update; switches are put back as they were found;
* ``micro_batch``: hold the reduction back for one micro-batch, or let it run in the last;
* ``divisor``: what the engine divides by when it reduces;
* ``backward``, ``reduce``: run a backward and make sure that it reduced; or reduce after all of them;
* ``gradient_norm``, ``careful_norm``, ``share_buffers``: for the finish;
* ``check_parameters``, ``check_forward``, ``check_before_reducing``: refuse in time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor, nn

from wholebatch.gradients import careful_norm, total_norm


class PendingTotal(Protocol):
    """A sum over replicas that is on its way."""

    def wait(self) -> list[float]:
        """The sums; blocks until every replica has given its part."""


class Ranks(ABC):
    """What the window needs of an engine. One gradient reduction an update, over all replicas.

    Attributes:
        rank: the number of this rank.
        num_replicas: D, the data-parallel copies of the model.
        divisor: what the engine divides gradients by when it reduces; the window multiplies by it.
        reductions: gradient reductions issued in the update under way.
        warming_up: True while the engine wants its first backward synchronised.
        synchronises: True while the backward of the open micro-batch reduces gradients.
        reduces_at_the_end: True when the whole window is held back and one reduction follows it.
        needs_reset: True when something outside the window left the engine armed on this rank.
    """

    rank: int = 0
    num_replicas: int = 1
    divisor: float = 1.0
    reductions: int = 0
    warming_up: bool = False
    synchronises: bool = False
    reduces_at_the_end: bool = False
    needs_reset: bool = False

    @abstractmethod
    def total(self, vector: Sequence[float]) -> PendingTotal:
        """Begin to add ``vector`` up over the replicas, in float64 on the host."""

    @abstractmethod
    def check_parameters(self, parameters: Sequence[nn.Parameter]) -> None:
        """Refuse parameters of the optimizer whose gradients the engine would not reduce."""

    @abstractmethod
    def begin(self) -> None:
        """Note the engine's switches before the first micro-batch of an update."""

    @abstractmethod
    def open_window(self, *, uneven: bool, ranks_without: int, reset: bool) -> None:
        """Take in what the ranks told each other: whether their micro-batches differ in number,
        how many ranks have none, and whether some rank needs a reset."""

    @abstractmethod
    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        """The scope of one forward and backward; holds the reduction back unless it belongs here."""

    @abstractmethod
    def check_before_reducing(self, parameters: Sequence[nn.Parameter]) -> None:
        """Refuse, while it can still be rolled back, what the reduction at the end can't add up."""

    @abstractmethod
    def reduce(self, parameters: Sequence[nn.Parameter]) -> None:
        """Do the one reduction of a window that was held back as a whole."""

    @abstractmethod
    def share_buffers(self) -> None:
        """Give every replica the buffers that the engine would have shared in its forward."""

    @abstractmethod
    def end(self, *, committed: bool) -> None:
        """Put the engine's switches back as :meth:`begin` found them; forget what was under way."""

    @abstractmethod
    def check_forward(self) -> None:
        """Refuse before a backward that would not reduce although it should."""

    def backward(self, roots: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Run the backward of one micro-batch from its summed losses, each with its own gradient."""
        torch.autograd.backward([loss for loss, _ in roots], [gradient for _, gradient in roots])

    def gradient_norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """The Euclidean norm of the reduced gradient, as :func:`wholebatch.gradients.total_norm`."""
        return total_norm(gradients)

    def careful_norm(self, gradients: Sequence[Tensor]) -> float:
        """The same where its squares overflow, as :func:`wholebatch.gradients.careful_norm`."""
        return careful_norm(gradients)
