"""What the ranks of a job say to each other, in torch's own collectives.

A few numbers travel on the host, in a group apart from all other traffic; gradients and buffers in
flat buckets on the model's own group.
"""

from __future__ import annotations

import io
import weakref
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from time import sleep
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.serialization import default_restore_location

from wholebatch.ranks.group import no_core_to_spare

_NAP_S, _NAPS = 1e-4, 50
_BUCKET_BYTES = 25 * 2**20  # as DDP's own buckets


@dataclass(frozen=True, slots=True)
class HostRows:
    """A row of numbers from every rank, on its way to all."""

    rows: Tensor
    work: Any

    def wait(self) -> list[list[float]]:
        """The rows, by rank; blocks until every rank has given its own."""
        if no_core_to_spare():
            # Naps, where every core has a rank: on two an update of 30 ms took 4% less than where it blocks
            # at once (lab/LOG.md).
            for _ in range(_NAPS):
                if self.work.is_completed():
                    break
                sleep(_NAP_S)
        self.work.wait()
        found: list[list[float]] = self.rows.tolist()
        return found


def tell_all(group: dist.ProcessGroup, row: Sequence[float], patience_s: float | None = None) -> HostRows:
    """Begin to tell all ranks of ``group`` a row of numbers, and to hear theirs, in float64.

    Each rank sends its row straight to each other: one hop, where gloo's all-reduce takes several, each of
    which wakes a thread on every rank.

    Args:
        group: of gloo.
        row: this rank's; as long on every rank.
        patience_s: seconds after which it is given up; the group's timeout where None.
    """
    ranks = group.size()
    # three times as fast as a tensor of a list, and on the host whatever the default device is
    given = torch.frombuffer(array("d", row) * ranks, dtype=torch.float64)
    rows = torch.empty(ranks, len(row), dtype=torch.float64, device="cpu")
    options = dist.AllToAllOptions()
    if patience_s is not None:
        # Its own, not a wait's: what is given up and still under way keeps a process from ending.
        options.timeout = timedelta(seconds=patience_s)
    return HostRows(rows, group.alltoall_base(rows, given.view(ranks, -1), [], [], options))


class HostMessages:
    """What the ranks of a job say to each other on the host.

    Args:
        group: the ranks. Held weakly, as torch owns its groups: one that outlives
            ``destroy_process_group()`` can abort the process at its exit.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(host_group(group))

    @property
    def group(self) -> dist.ProcessGroup:
        """The group that the messages travel in.

        Raises:
            RuntimeError: it was destroyed.
        """
        return alive(self._group)

    def tell(self, row: Sequence[float], patience_s: float | None = None) -> HostRows:
        """As :func:`tell_all`."""
        return tell_all(self.group, row, patience_s)

    def gather(self, mine: Any) -> list[Any]:
        """What each rank gave, by rank, on every rank."""
        group = self.group
        given: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(given, mine, group=group)
        return given

    def lend(self, batch: Any, device: torch.device) -> Any:
        """The micro-batch of the first rank that has one, on every rank; None where none has.

        Args:
            batch: this rank's; None without one.
            device: of this rank, which its tensors come to that lie on one of that type.

        Raises:
            RuntimeError: on every rank: it can't be sent.
        """
        having = self.gather(batch is not None)
        if not any(having):
            return None
        source = having.index(True)
        sent: list[Any] = [None]
        if dist.get_rank(self.group) == source:
            try:
                packed = io.BytesIO()
                torch.save(batch, packed)
                sent = [packed.getvalue()]
            except Exception as error:  # the others wait for it
                sent = [f"{type(error).__name__}: {error}"]
        dist.broadcast_object_list(sent, src=dist.get_global_rank(self.group, source), group=self.group)
        restore: Any = default_restore_location
        lent, problem = batch, sent[0] if isinstance(sent[0], str) else ""
        if batch is None and not problem:
            try:
                lent = torch.load(
                    io.BytesIO(sent[0]),  # of a rank of this job
                    map_location=lambda storage, place: restore(storage, own_place(place, device)),
                    weights_only=False,
                )
            except Exception as error:  # the others would go on into a forward that this rank can't join
                problem = f"{type(error).__name__}: {error}"
        if problem := next(filter(None, self.gather(problem)), ""):
            raise RuntimeError(
                f"a rank without micro-batches needs one of rank {source}'s for its collective forwards, "
                f"which can't be sent: {problem}"
            )
        return lent


def own_place(place: str, device: torch.device) -> str:
    """Where a rank of ``device`` keeps what lies at ``place`` on another: on its own of that type."""
    return str(device) if place.partition(":")[0] == device.type else place


def alive(group: weakref.ref[dist.ProcessGroup]) -> dist.ProcessGroup:
    """The process group.

    Raises:
        RuntimeError: it was destroyed.
    """
    found = group()
    if found is None:
        raise RuntimeError("the process group was destroyed")
    return found


# One for each group of a model, however many windows are built over it: a group holds threads and sockets.
_APART: weakref.WeakKeyDictionary[dist.ProcessGroup, weakref.ref[dist.ProcessGroup]]
_APART = weakref.WeakKeyDictionary()


def host_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of the same ranks for messages on the host, apart from all other traffic.

    Apart, because a rank that fails answers its exchange here while others may be inside a
    collective of the model's own group.
    """
    made = _APART.get(group)
    known = made() if made is not None else None
    if known is not None:
        return known
    ranks = dist.get_process_group_ranks(group)
    # With local synchronization torch names a group by how many this rank is in. Others may be in more, and
    # would wait under another name. All ranks can do without.
    apart: dist.ProcessGroup = dist.new_group(
        ranks,
        backend="gloo",
        timeout=_timeout(group),
        use_local_synchronization=len(ranks) < dist.get_world_size(),
    )
    _APART[group] = weakref.ref(apart)
    return apart


def _timeout(group: dist.ProcessGroup) -> Any:
    """The timeout of ``group``, so that a lost rank is noticed here as soon as there."""
    for device in ("cpu", str(torch.accelerator.current_accelerator() or "cpu")):
        try:
            return group._get_backend(torch.device(device)).options._timeout
        except (RuntimeError, AttributeError):
            continue
    return None


Part = list[Tensor]


def _flattened(tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, Part]]:
    """Flat copies of ``tensors`` in buckets of one device and dtype, with the parts of each."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    for group in kinds.values():
        part: Part = []
        held_bytes = 0
        for tensor in group:
            if part and held_bytes + tensor.nbytes > _BUCKET_BYTES:
                yield torch.cat([t.detach().flatten() for t in part]), part
                part, held_bytes = [], 0
            part.append(tensor)
            held_bytes += tensor.nbytes
        yield torch.cat([t.detach().flatten() for t in part]), part


@torch.no_grad()
def _copy_back(flat: Tensor, parts: Part) -> None:
    pieces = torch.split(flat, [tensor.numel() for tensor in parts])
    for tensor, piece in zip(parts, pieces, strict=True):
        tensor.copy_(piece.view_as(tensor))


def sum_over_ranks(gradients: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Add gradients up over the ranks, all buckets under way at once."""
    under_way = [
        (flat, parts, dist.all_reduce(flat, group=group, async_op=True))
        for flat, parts in _flattened(gradients)
    ]
    for flat, parts, work in under_way:
        work.wait()
        _copy_back(flat, parts)


def copy_from_first(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Give every rank the values that the first rank of the group has."""
    for flat, parts in _flattened(tensors):
        dist.broadcast(flat, src=dist.get_global_rank(group, 0), group=group)
        _copy_back(flat, parts)


def held_by_some(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> list[Tensor]:
    """Gradients that some rank has, in one order; zeros in place of those that only this rank lacks.

    Args:
        parameters: in the same order on every rank.
        group: of gloo; each of its ranks calls this.

    Exactness: no arithmetic; the gradients themselves.
    """
    held = torch.tensor(
        [parameter.grad is not None for parameter in parameters], dtype=torch.uint8, device="cpu"
    )
    dist.all_reduce(held, op=dist.ReduceOp.MAX, group=group)
    gradients: list[Tensor] = []
    for parameter, by_some in zip(parameters, held.tolist(), strict=True):
        if not by_some:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype or parameter.dtype)
        gradients.append(parameter.grad)
    return gradients
