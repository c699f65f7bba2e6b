"""Which ranks make up one replica, and which of them speaks for it."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from wholebatch.errors import UnsupportedError
from wholebatch.ranks.base import Roles
from wholebatch.ranks.collectives import HostMessages


def roles_of_mesh(
    messages: HostMessages, place: int, size: int, context_parallel: DeviceMesh | None = None
) -> Roles:
    """The roles of ranks that take a mean over ``size`` places.

    Ranks with the same place share one replica (tensor parallel). Ranks of one context-parallel group have
    places of their own, and hold parts of the same samples.

    Args:
        messages: all ranks of the job; each calls this.
        place: this rank's among those over which gradients are reduced.
        size: how many places there are.
        context_parallel: one dimension of a mesh: the ranks that hold parts of the same sequences.

    Raises:
        UnsupportedError: ranks that are not so many at each place.
    """
    sequence = tuple(_members(context_parallel)) if context_parallel is not None else ()
    told = messages.gather((place, sequence))
    places = [of_rank for of_rank, _ in told]
    if any(places.count(one) * size != len(places) for one in range(size)):
        raise UnsupportedError(
            f"{len(places)} ranks are running and gradients are reduced over {size} places, of which each "
            f"needs as many ranks as the others; the ranks stand at {places}. Give the window the process "
            f"group of the ranks that train this model"
        )
    numbers = dict(zip(_members_of(messages), places, strict=True))
    # Context-parallel ranks of one replica go by the first place among them.
    keys = [min((numbers[member] for member in of_rank), default=own) for own, of_rank in told]
    replicas = {key: number for number, key in enumerate(sorted(set(keys)))}
    replica_of = tuple(replicas[key] for key in keys)
    rank = dist.get_rank(messages.group)
    return Roles(
        rank=rank,
        replica_of=replica_of,
        counts_samples=replica_of.index(replica_of[rank]) == rank,
        counts_items=places.index(place) == rank,
        counts_losses=places.index(place) == rank,
        copies=places.count(place),
        parts_of_sequences=context_parallel is not None,
    )


def _members(mesh: DeviceMesh) -> list[int]:
    if mesh.ndim != 1:
        raise UnsupportedError(
            f"context_parallel is a mesh of {mesh.ndim} dimensions; give the one over which sequences are "
            f'cut, such as mesh["cp"]'
        )
    return dist.get_process_group_ranks(mesh.get_group())


def _members_of(messages: HostMessages) -> list[int]:
    return dist.get_process_group_ranks(messages.group)
