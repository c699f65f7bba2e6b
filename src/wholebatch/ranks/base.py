"""The seam between the window and whatever reduces gradients over ranks.

One class for each engine. The window asks it for a handful of things and has no branch on the
number of ranks or on the engine:

* ``roles``: which rank this is, and for what of its replica it speaks;
* ``tell``: a few numbers of each rank to all ranks of the job, on the host;
* ``begin``, ``open_window``, ``end``: around an update; switches are put back as they were found;
* ``micro_batch``: hold the reduction back for one micro-batch, or let it run in the last;
* ``divisor``: what the engine divides by when it reduces;
* ``backward``, ``reduce``: run a backward and make sure that it reduced; or reduce after all of them;
* ``stand_in``: take part with zeros in a reduction that the others go on to;
* ``gradient_norm``, ``careful_norm``, ``share_buffers``: for the finish;
* ``check_parameters``, ``check_forward``, ``check_before_reducing``: refuse in time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import has_torch_function

from wholebatch.accumulation import WideGradients
from wholebatch.budget import AnyPlan
from wholebatch.gradients import careful_norm, total_norm
from wholebatch.ranks.stepper import Stepper

# "per_update": once, in the last backward. "per_micro_batch": in every backward, of engines that shard
# gradients. "after_agreement": once, when all ranks have agreed.
Reduce = Literal["per_update", "per_micro_batch", "after_agreement"]


class PendingRows(Protocol):
    """A row of numbers from every rank that is on its way to all."""

    def wait(self) -> list[list[float]]:
        """The rows, by rank; blocks until every rank has given its own, or until it is given up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Roles:
    """Which rank this is, and for what of its replica it speaks, so that all is counted once.

    Attributes:
        rank: number of this rank among all ranks of the job.
        replica_of: the replica of each rank, by rank. Ranks of one replica (tensor, context and pipeline
            parallel) are given the same samples.
        counts_samples: whether this rank's samples enter the totals: one rank of each replica.
        counts_items: whether the items that it counts do: one rank of each replica, or, where sequences
            are cut over ranks, each for its own part.
        counts_losses: whether the losses that it sums do; the last stage's of a pipeline.
        copies: ranks that hold the same parameters by right, this one among them, and of which the first
            counts losses: tensor-parallel ranks, beside those that are cut over them.
        parts_of_sequences: whether sequences are cut over the ranks of a replica, so that each is given
            other tensors of the same samples.
    """

    rank: int = 0
    replica_of: tuple[int, ...] = (0,)
    counts_samples: bool = True
    counts_items: bool = True
    counts_losses: bool = True
    copies: int = 1
    parts_of_sequences: bool = False

    @property
    def same_tensors(self) -> bool:
        """Whether several ranks are given the very same tensors, those of one replica."""
        return self.num_ranks > self.num_replicas and not self.parts_of_sequences

    @property
    def num_ranks(self) -> int:
        """All ranks of the job."""
        return len(self.replica_of)

    @property
    def num_replicas(self) -> int:
        """D, the data-parallel copies of the model."""
        return max(self.replica_of) + 1

    @classmethod
    def one_each(cls, rank: int, num_ranks: int) -> Roles:
        """Every rank is a replica."""
        return cls(rank=rank, replica_of=tuple(range(num_ranks)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """What one update costs a rank beyond the work itself; bytes as they are handed to collectives.

    Attributes:
        reductions: of gradients.
        reduced_bytes: of gradients that are added up over ranks.
        gathered_bytes: of parameters that are gathered from shards.
        held_bytes: of gradients that the rank holds from one micro-batch to the next.
        exchanges_more: whether forwards and backwards have exchanges of their own, among the ranks of one
            replica, which are not counted.
    """

    reductions: int = 0
    reduced_bytes: int = 0
    gathered_bytes: int = 0
    held_bytes: int = 0
    exchanges_more: bool = field(default=False, compare=False)

    def __str__(self) -> str:
        times = "reduction" if self.reductions == 1 else "reductions"
        more = ", and what forwards and backwards exchange, not counted" if self.exchanges_more else ""
        return (
            f"{self.reductions} {times} of gradients an update, {_size(self.reduced_bytes)} reduced and "
            f"{_size(self.gathered_bytes)} gathered, {_size(self.held_bytes)} of gradients held meanwhile"
            f"{more}"
        )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**10:.1f} KiB" if num_bytes < 2**20 else f"{num_bytes / 2**20:.1f} MiB"


class Ranks(ABC):
    """What the window needs of an engine.

    Attributes:
        roles: this rank among those of the job.
        divisor: what the engine divides gradients by when it reduces; the window multiplies by it.
        reductions: gradient reductions issued in the update under way.
        warming_up: True while the engine wants its first backward synchronised.
        synchronises: True while the backward of the open micro-batch reduces gradients.
        meets: True while all ranks say that they got there before that backward, unless ``stands_in``.
        stands_in: True where a rank that failed takes its part in the update's reduction with zeros, so
            that nobody has to meet before it.
        reduces_at_the_end: True when the whole window is held back and one reduction follows it.
        needs_reset: True when something outside the window left the engine armed on this rank.
        equal_turns: True when forwards, or every backward, are collective. N is then agreed before the
            first forward, and ranks with fewer micro-batches run weightless ones beside the others'.
        patience_s: seconds that a rank which failed waits for the others to hear of it; None as long as
            the process group. Short where they may be inside a collective that it left.
        norm_in_parts: True where norms are of what lies on this rank, each part counted once, so that their
            squares add up over the ranks; else each rank finds that of the whole gradient.
        renews_gradients: True where forwards show the same gradients in new tensors.
        runs_windows: True where the engine runs forwards and backwards by a schedule of its own.
        stepper: the engine itself, where it scales, clips and steps; None where torch's optimizer does.
    """

    roles: Roles = Roles()
    divisor: float = 1.0
    reductions: int = 0
    warming_up: bool = False
    synchronises: bool = False
    reduces_at_the_end: bool = False
    needs_reset: bool = False
    equal_turns: bool = False
    patience_s: float | None = None
    norm_in_parts: bool = False
    renews_gradients: bool = False
    runs_windows: bool = False
    stepper: Stepper | None = None

    @property
    def rank(self) -> int:
        """The number of this rank."""
        return self.roles.rank

    @property
    def num_replicas(self) -> int:
        """D, the data-parallel copies of the model."""
        return self.roles.num_replicas

    @property
    def meets(self) -> bool:
        """Whether all ranks say that they got there before the backward of the open micro-batch."""
        return self.synchronises

    @property
    def stands_in(self) -> bool:
        """Whether a rank that failed takes its part in the reduction of the update under way."""
        return False

    def lend(self, batch: Any, device: torch.device) -> Any:
        """A micro-batch for a rank that has none: that of the first rank that has one.

        Args:
            batch: this rank's first; None without one. Called on every rank of the job at once.
            device: of this rank's parameters.
        """
        raise NotImplementedError(f"{type(self).__name__} lets ranks go without micro-batches")

    @abstractmethod
    def tell(self, row: Sequence[float], patience_s: float | None = None) -> PendingRows:
        """Begin to tell all ranks of the job a row of numbers, and to hear theirs, in float64 on the host.

        Args:
            row: this rank's; as long on every rank.
            patience_s: seconds after which it is given up; the group's timeout where None.
        """

    def check_optimizers(self, optimizers: Sequence[Any]) -> None:
        """Refuse optimizers that don't step on what the engine leaves in ``.grad``."""

    @abstractmethod
    def check_parameters(self, parameters: Sequence[nn.Parameter]) -> None:
        """Refuse parameters of the optimizer whose gradients the engine would not reduce."""

    def check_plan(self, plan: AnyPlan) -> None:
        """Refuse a plan that the engine's own settings contradict."""

    @abstractmethod
    def begin(self) -> None:
        """Note the engine's switches before the first micro-batch of an update."""

    def open_window(self, *, uneven: bool, ranks_without: int, reset: bool) -> None:
        """Take in what the ranks told each other: whether their micro-batches differ in number,
        how many ranks have none, and whether some rank needs a reset."""

    def widens(self, wide: WideGradients, parameters: Sequence[nn.Parameter], micro_batches: int) -> bool:
        """Whether gradients have to be kept wider than the engine would by itself.

        Args:
            wide: knows what is wide enough.
            parameters: of the optimizers.
            micro_batches: the most that any rank has, or will have by the plan.

        Raises:
            UnsupportedError: they have to, and the engine can't; when the window is made, where that is
                known by then.
        """
        return wide.wanted_for(parameters, micro_batches=micro_batches) is not None

    def widen(self, wide: WideGradients, parameters: Sequence[nn.Parameter], micro_batches: int) -> None:
        """Have gradients added up with enough digits, before the first backward of an update."""
        if self.widens(wide, parameters, micro_batches):
            wide.begin(parameters)

    @abstractmethod
    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        """The scope of one forward and backward; holds the reduction back unless it belongs here."""

    def check_before_reducing(self, parameters: Sequence[nn.Parameter]) -> None:
        """Refuse, while it can still be rolled back, what the reduction at the end can't add up."""

    def reduce(self, parameters: Sequence[nn.Parameter]) -> None:
        """Do the one reduction of a window that was held back as a whole."""

    def stand_in(self) -> None:
        """Take this rank's part in the reduction of an update that it has put back, where ``stands_in``."""

    def share_buffers(self) -> None:
        """Give every replica the buffers that the engine would have shared in its forward."""

    @abstractmethod
    def end(self, *, committed: bool) -> None:
        """Put the engine's switches back as :meth:`begin` found them; forget what was under way."""

    def check_forward(self) -> None:
        """Refuse before a backward that would not reduce although it should."""

    def gradients_written(self) -> bool:
        """Whether somebody else wrote gradients where the engine keeps them, other than in ``.grad``, since
        its last backward or the start of the update."""
        return False

    def check_window(
        self, batches: Sequence[Any], wide: WideGradients, parameters: Sequence[nn.Parameter]
    ) -> None:
        """Take in a rank's micro-batches, where ``runs_windows``, before the ranks first meet.

        Args:
            batches: of this rank.
            wide: knows what is wide enough to add their gradients up in.
            parameters: of the optimizers.

        Raises:
            WindowUsageError, UnsupportedError: the schedule can't run them, or would lose digits.
        """

    def run_window(self, loss: Callable[[Any, Any, int], Tensor | None]) -> None:
        """Run what :meth:`check_window` took in forwards and backwards.

        Args:
            loss: ``loss(output, batch, number)``: what is differentiated, by the rank that has the output
                of the micro-batch of that number; None where that failed, which must not stop the rest. The
                last call for a number counts.
        """
        raise NotImplementedError(f"{type(self).__name__} leaves the loop to the user")

    def backward(self, roots: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Run the backward of one micro-batch from its summed losses, each with its own gradient."""
        losses, gradients = zip(*roots, strict=True)
        # A class of its own may change what a backward is; in a transform there is none, and torch says so.
        if has_torch_function(losses) or torch._C._are_functorch_transforms_active():
            torch.autograd.backward(losses, gradients)
            return
        # The engine that this calls, by the name at which the audit listens. What it checks before, such as
        # shapes, costs 1% of a small model's update.
        torch.autograd._engine_run_backward(  # type: ignore[attr-defined]
            losses, gradients, False, False, (), allow_unreachable=True, accumulate_grad=True
        )

    def gradient_norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """The Euclidean norm of the reduced gradient: of all of it, or of a part where ``norm_in_parts``.

        Args:
            gradients: those that lie on this rank; none where it has none.
        """
        return total_norm(gradients) if gradients else torch.zeros(())

    def norm_of_copies(self, gradients: Sequence[Tensor]) -> Tensor | float:
        """The norm of those gradients that ``roles.copies`` ranks must have alike; 0 where it is one."""
        return 0.0

    def as_of_one_rank(self, model: nn.Module, optimizers: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
        """What a checkpoint asks for the state of model and optimizers, and gives it back to.

        Args:
            model: the window's.
            optimizers: those that are stepped.

        Returns:
            The same; or what answers for them where the engine keeps their state in a form of its own.

        Raises:
            UnsupportedError: the engine has a state that a checkpoint can't hold.
        """
        return model, optimizers

    def traffic(
        self, wide: WideGradients, parameters: Sequence[nn.Parameter], micro_batches: int
    ) -> Traffic:
        """What an update costs this rank.

        Args:
            wide: keeps gradients of narrow parameters wide.
            parameters: of the optimizers.
            micro_batches: of this rank.
        """
        return Traffic(held_bytes=wide.bytes_held(parameters, micro_batches) if micro_batches > 1 else 0)

    def careful_norm(self, gradients: Sequence[Tensor]) -> float:
        """The same where its squares overflow, as :func:`wholebatch.gradients.careful_norm`."""
        return careful_norm(gradients)
