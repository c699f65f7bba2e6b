"""All ranks do a thing or none: how ranks hear what the others have, and of each other's failures.

The one place outside an update where ranks agree. A rank that fails alone would leave the others waiting
in their next exchange; here it tells them first, and all end together.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from wholebatch.errors import JudgeError, WholebatchError
from wholebatch.ranks.agreement import name_ranks, unlike_first, why_lost
from wholebatch.ranks.collectives import host_group, tell_all
from wholebatch.ranks.lost import is_lost_contact, leave_words

T = TypeVar("T")


class ContactLostError(JudgeError):
    """Another rank ended, or did not answer in time; no further exchange can succeed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Together:
    """Ranks that do something together.

    Args:
        rank: number of this rank among them.
        ranks: how many there are.
        group: whose collectives carry messages between hosts; None for one rank.
        during: when they do it, for messages: "between two updates".
        failure: raised where another rank failed with an error that is not of this package.
        lost: raised where another rank is gone.
    """

    rank: int = 0
    ranks: int = 1
    group: dist.ProcessGroup | None = None
    during: str = "between two updates"
    failure: type[WholebatchError] = JudgeError
    lost: type[WholebatchError] = ContactLostError

    @classmethod
    def of(cls, model: nn.Module, process_group: dist.ProcessGroup | None = None, **words: Any) -> Self:
        """The ranks of ``model``: those of its DDP, of the group given, or all that there are."""
        if not (dist.is_available() and dist.is_initialized()):
            return cls(**words)
        if isinstance(model, DistributedDataParallel):
            process_group = model.process_group
        group = process_group if process_group is not None else dist.group.WORLD
        if group is None or dist.get_world_size(group) == 1:
            return cls(**words)
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        return cls(group=host_group(group), rank=rank, ranks=ranks, **words)

    @classmethod
    def of_all(cls, **words: Any) -> Self:
        """All ranks of the default process group; this process alone where there is none."""
        if not (dist.is_available() and dist.is_initialized()):
            return cls(**words)
        group = dist.group.WORLD
        return cls(group=group, rank=dist.get_rank(), ranks=dist.get_world_size(), **words)

    @property
    def leads(self) -> bool:
        """True on the one rank that prints, and writes what is common to all."""
        return self.rank == 0

    def total(self, values: Sequence[float]) -> list[float]:
        """``sum over ranks`` of each value, in float64 on the host; the same on every rank.

        Raises:
            WholebatchError: of the kind ``lost``: another rank is gone.

        Exactness: exact for whole numbers below 2^53; else rounded once for every rank.
        """
        if self.ranks == 1:
            return list(map(float, values))
        assert self.group is not None
        with self._told_when_lost():
            rows = tell_all(self.group, values).wait()
        return [sum(of_ranks) for of_ranks in zip(*rows, strict=True)]

    def any(self, flag: bool) -> bool:
        """Whether the flag is up on any rank."""
        return self.total([float(flag)])[0] > 0

    def gather(self, mine: Any) -> list[Any]:
        """What each rank gave, by rank, on every rank.

        Raises:
            WholebatchError: of the kind ``lost``: a rank is gone, or did not answer within the group's
                timeout.
        """
        if self.ranks == 1:
            return [mine]
        given: list[Any] = [None] * self.ranks
        with self._told_when_lost():
            dist.all_gather_object(given, mine, group=self.group)
        return given

    def difference(self, mine: Mapping[str, Any]) -> str | None:
        """The first name whose value is not the first rank's on some rank, in words; None where all agree.

        Args:
            mine: of this rank, under the same names on every rank.

        Raises:
            WholebatchError: as :meth:`gather`.
        """
        told = self.gather(mine)
        if not (others := unlike_first(told)):
            return None
        there, here = told[others[0]], told[0]
        name = next(name for name in here if there[name] != here[name])
        return f"{name} is {there[name]!r} on {name_ranks(others)}, and {here[name]!r} on rank 0"

    def all_or_none(self, act: Callable[[], T]) -> T:
        """Run ``act`` on every rank; where it fails on some, every rank raises.

        What the leading rank says the others say in the same words, so that a command tells it once;
        of another rank the number is told.

        Raises:
            WholebatchError: another rank failed: of the kind that it had, or of the kind ``failure``.
        """
        result: T
        error: BaseException | None = None
        try:
            result = act()
        except BaseException as raised:  # an interrupt too: the others wait for word
            error = raised
        try:
            told = self.gather(_portable(error)) if self.any(error is not None) else []
        except WholebatchError as lost:
            if error is None:
                raise
            error.add_note(f"the other ranks could not be told: {lost}")
            raise error from None
        if error is not None:
            raise error
        for rank, failure in enumerate(told):
            if failure is not None:
                raise self._as_told(rank, failure)
        return result

    def on_leader(self, act: Callable[[], T]) -> T:
        """Run ``act`` on the leading rank alone; every rank gets what it returned, or raises."""
        result = self.all_or_none(lambda: act() if self.leads else None)
        first: T = self.gather(result)[0]
        return first

    def _as_told(self, rank: int, failure: BaseException | str) -> BaseException:
        """The failure of another rank, to be raised on this one."""
        if isinstance(failure, str):
            return self.failure(f"rank {rank} failed {self.during}: {failure}")
        if rank > 0:
            failure.args = (f"rank {rank}: {failure}",)
        return failure

    @contextmanager
    def _told_when_lost(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise self.cut_off(error, self.during) from None

    def cut_off(self, error: BaseException, during: str) -> WholebatchError:
        """What to raise where another rank is gone, of the kind ``lost``."""
        return self.lost(f"contact with another rank was lost {during}: {why_lost()} ({error})")

    @contextmanager
    def meeting(self, during: str) -> Iterator[None]:
        """Around what ranks can do together only, such as a forward of a model in parts.

        Whoever fails in it can't meet the others any more, which hear of it when this rank ends.

        Args:
            during: what they do, for messages: "in an evaluation".

        Raises:
            WholebatchError: of the kind ``lost``: another rank is gone; says why, if that rank did.
        """
        try:
            yield
        except BaseException as error:
            if is_lost_contact(error):
                raise self.cut_off(error, during) from None
            leave_words(self.rank, during, error)
            raise


def _portable(error: BaseException | None) -> BaseException | str | None:
    """An error as the other ranks can have it: one of this package as it is, any other in words.

    By the package of its class and not by its base: that the output was closed is no WholebatchError.
    Tried out here, because what can't be read back would fail the exchange on every rank.
    """
    if error is None:
        return None
    if type(error).__module__.split(".")[0] == __name__.split(".")[0]:
        # Where a part of it can't be sent, or its class asks for more than words, the words go alone.
        with contextlib.suppress(Exception):
            copy: BaseException = pickle.loads(pickle.dumps(error))
            return copy
    return f"{type(error).__name__}: {error}"
