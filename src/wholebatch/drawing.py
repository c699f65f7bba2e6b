"""What ``window.batches`` draws on one rank, and what the ranks' loaders must have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, NamedTuple

from wholebatch.budget import AnyPlan, BudgetPlan
from wholebatch.errors import WindowUsageError
from wholebatch.loading.batches import WindowBatches
from wholebatch.ranks.agreement import name_ranks, unlike_first
from wholebatch.ranks.base import Roles
from wholebatch.tally import fingerprint


class Drawn(NamedTuple):
    """A window of one rank; its samples, and whether more follow, where a tail is dropped."""

    micro_batches: list[Any]
    samples: int = 0
    more: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Stand:
    """Where a loader of whole windows stands.

    Args:
        settings: position, plan and order in words; the same on every rank.
        replica: whose share it gives; another one on every replica.
    """

    settings: str
    replica: int

    @classmethod
    def of(cls, loader: Any) -> Stand | None:
        """That of a loader; None where it yields micro-batches, of which nothing is known."""
        return cls(settings=loader.stand, replica=loader.replica) if yields_windows(loader) else None

    def numbers(self) -> list[float]:
        """What to tell the other ranks."""
        return [fingerprint(self.settings), self.replica]

    def refuse_others(self, told: Sequence[Sequence[float]], roles: Roles) -> None:
        """Refuse loaders of which two replicas have the same share, or that stand at different places.

        Args:
            told: the numbers of every rank, each by rank.
            roles: of the ranks.

        Raises:
            WindowUsageError: on every rank, with what this one has.
        """
        marks, replicas = told
        given = set(zip(roles.replica_of, replicas, strict=True))
        if len(given) != roles.num_replicas or set(replicas) != set(range(roles.num_replicas)):
            raise WindowUsageError(
                f"the loaders of the {roles.num_replicas} replicas do not each have a share of their own; "
                f"this rank's has replica={self.replica}. Give each replica's WindowLoader its own number, "
                f"as replica=torch.distributed.get_rank() where every rank is a replica, or samples would "
                f"be trained twice and others never"
            )
        if others := unlike_first(marks):
            raise WindowUsageError(
                f"the loaders of the ranks stand at different places or have different settings: "
                f"{name_ranks(others)} not as rank 0; this one has {self.settings}. Build them alike on "
                f"every rank, and load the same state, or samples would be trained twice and others never"
            )


def nothing_drawn() -> Drawn:
    """What a rank gets whose data has ended before that of the others."""
    return Drawn(WindowBatches([], sample_ids=()))


def yields_windows(loader: Any) -> bool:
    """Whether a loader yields whole windows, as a ``WindowLoader`` does."""
    return bool(getattr(loader, "yields_windows", False))


def draw(
    loader: Iterable[Any],
    plan: AnyPlan | None,
    *,
    position: int,
    count_samples: Callable[[Any], int],
    drops_tail: bool,
) -> Iterator[Drawn]:
    """Begin to draw the windows of one rank, as far as its loader goes.

    Args:
        loader: yields micro-batches or whole windows.
        plan: of the window.
        position: where the window's counters say that the next update begins.
        count_samples: tells the samples of a micro-batch.
        drops_tail: whether to count samples and to look whether more follow.

    Raises:
        WindowUsageError: micro-batches without a plan that says how many make a window; whole windows of
            another plan; a loader that stands elsewhere than the window.
    """
    if yields_windows(loader):
        theirs = getattr(loader, "plan", None)
        if plan is not None and theirs is not None and theirs != plan:
            raise WindowUsageError(
                f"the loader cuts by another plan than the window's: {_difference(theirs, plan)}; give "
                f"both the same plan"
            )
        begins = getattr(loader, "position_over_all_replicas", None)
        if begins is not None and begins != position:
            raise WindowUsageError(
                f"the loader begins at position {begins}, and the window has "
                f"consumed {position} samples; load the state of both from one checkpoint, or make the "
                f"loader with position=window.counters.position"
            )
        return map(Drawn, loader)
    if isinstance(plan, BudgetPlan):
        raise WindowUsageError(
            f"the plan cuts by tokens_per_micro_batch={plan.tokens_per_micro_batch}, and a "
            f"{type(loader).__name__} yields micro-batches that are cut already; draw from a WindowLoader "
            f"with this plan, or pass lists of micro-batches to window.update yourself"
        )
    if plan is None:
        raise WindowUsageError(
            "window.batches needs to know how many micro-batches make a window; give the window "
            "plan=wholebatch.plan_batch(...), draw from a WindowLoader, or pass lists of micro-batches "
            "to window.update yourself"
        )
    return _cut(iter(loader), plan.micro_batches_per_window, count_samples if drops_tail else None)


def _cut(
    source: Iterator[Any], micro_batches: int, count_samples: Callable[[Any], int] | None
) -> Iterator[Drawn]:
    while drawn := list(islice(source, micro_batches)):
        if count_samples is None:
            yield Drawn(drawn)
            continue
        ahead = list(islice(source, 1))
        source = chain(ahead, source)
        yield Drawn(drawn, sum(map(count_samples, drawn)), len(ahead))


def _difference(theirs: AnyPlan, plan: AnyPlan) -> str:
    """What two plans do not have in common, in words."""
    ours, other = plan.to_dict(), theirs.to_dict()
    return ", ".join(
        f"{name} is {other.get(name)} in the loader and {ours.get(name)} in the window"
        for name in ours | other
        if ours.get(name) != other.get(name)
    )
