"""An exponential moving average of the parameters, moved once for every applied update."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from wholebatch.errors import UsageError, WindowUsageError
from wholebatch.record import UpdateRecord
from wholebatch.resume.contents import unwrapped
from wholebatch.train.settings import AverageConfig


class Average:
    """The average e of the parameters p that train: ``e_0 = p_0``, ``e_u = d e_{u-1} + (1 - d) p_u``.

    u counts applied updates; a skipped one moves nothing. So e_u is the sum of
    ``(1 - d) d^(u-k) p_k`` over k = 1..u, plus ``d^u p_0``: the decay is not warmed up, and after u
    updates the first parameters still count for d^u.

    Frozen parameters are not copied and buffers are those of the model, so that the average of a model
    with adapters is as small as they are. A parameter that several layers share is averaged once.

    Args:
        module: the model, bare, compiled or under DistributedDataParallel, frozen as it will be.
        decay_per_update: d, above 0 and below 1: the share of the average that an applied update keeps.

    Raises:
        UsageError: a model of which nothing trains.

    Exactness: one rounding in the parameters' dtype for each update. It follows parameters alone, so
    it is the same under any split for which they are.
    """

    def __init__(self, module: nn.Module, *, decay_per_update: float) -> None:
        trained = {name: p for name, p in unwrapped(module).named_parameters() if p.requires_grad}
        if not trained:
            raise UsageError("average.decay_per_update is given, and no parameter of the model trains")
        self._names = list(trained)
        # Only those that train: AveragedModel copies the whole module that it is given.
        self._live = nn.ParameterList(trained.values())
        follow = get_ema_multi_avg_fn(decay_per_update)  # type: ignore[no-untyped-call]
        if len({getattr(p, "device_mesh", None) for p in trained.values()}) > 1:
            follow = _one_by_one(follow)  # torch takes together only what lies over the same ranks
        self._averaged = AveragedModel(self._live, multi_avg_fn=follow)
        self._averaged.requires_grad_(False)
        self._averaged.update_parameters(self._live)  # the first call copies: e_0 = p_0
        self._updates_applied: int | None = None
        self._swapped = False

    def follow(self, record: UpdateRecord) -> None:
        """Take in the parameters after an update, if it was applied; call it once after each.

        Args:
            record: the record of the update.

        Raises:
            WindowUsageError: an update was left out or given twice, or the average is swapped in.
        """
        if self._swapped:
            raise WindowUsageError(
                "the average stands in the model now, so it can't follow an update; leave swapped_in() "
                "before the next one"
            )
        if record.outcome != "applied":
            return
        if self._updates_applied is not None and record.updates_applied != self._updates_applied + 1:
            raise WindowUsageError(
                f"the average has followed {self._updates_applied} applied updates, and this is the record "
                f"of number {record.updates_applied}; call follow(record) once after every update"
            )
        self._averaged.update_parameters(self._live)
        self._updates_applied = record.updates_applied

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Let the model be its average inside, for an evaluation; afterwards it is as it was.

        The values are exchanged in place, so wrappers and compiled forwards see them.

        Raises:
            WindowUsageError: it is swapped in already.

        Exactness: bit for bit; the parameters come back as they were, also after an exception.
        """
        if self._swapped:
            raise WindowUsageError("the average stands in the model already; swapped_in() does not nest")
        self._exchange()
        self._swapped = True
        try:
            yield
        finally:
            self._exchange()
            self._swapped = False

    def state_dict(self) -> dict[str, Any]:
        """Plain data: the averages by parameter name, and how many applied updates they followed.

        Exactness: the tensors themselves, not copies; save them before the next update.
        """
        return {
            "updates_applied": self._updates_applied,
            "parameters": {name: e.detach() for name, e in zip(self._names, self._copies(), strict=True)},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a :meth:`state_dict`.

        Raises:
            UsageError: it is of other parameters.
        """
        saved: Mapping[str, Tensor] = state["parameters"]
        pairs = dict(zip(self._names, self._copies(), strict=True))
        odd = sorted(set(saved) ^ set(pairs))
        odd += [name for name in pairs if name in saved and pairs[name].shape != saved[name].shape]
        if odd:
            raise UsageError(
                f"the saved average has {len(saved)} parameters and the model trains {len(pairs)}; they "
                f"differ in {', '.join(odd[:3])}{' and more' if len(odd) > 3 else ''}, so resume with the "
                f"same model, or without the average (average.decay_per_update = 0)"
            )
        with torch.no_grad():
            for name, average in pairs.items():
                average.copy_(_cut_as(saved[name], average))
        self._updates_applied = state["updates_applied"]

    def _copies(self) -> list[Tensor]:
        return list(self._averaged.module.parameters())

    @torch.no_grad()
    def _exchange(self) -> None:
        for live, average in zip(self._live, self._copies(), strict=True):
            kept = live.clone()
            live.copy_(average)
            average.copy_(kept)


def _one_by_one(follow: Callable[..., None]) -> Callable[..., None]:
    def each(averages: Sequence[Tensor], lives: Sequence[Tensor], number: Any) -> None:
        for average, live in zip(averages, lives, strict=True):
            follow([average], [live], number)

    return each


def _cut_as(value: Tensor, other: Tensor) -> Tensor:
    """A whole tensor in parts over the ranks where ``other`` is."""
    if isinstance(other, DTensor) and not isinstance(value, DTensor):
        mesh, placements = other.device_mesh, other.placements
        return distribute_tensor(value.to(other.device), mesh, placements, src_data_rank=None)
    return value


def make_average(module: nn.Module, settings: AverageConfig) -> Average | None:
    """The average that the settings ask for, or ``None`` where they ask for none.

    Args:
        module: as for :class:`Average`.
        settings: the section ``[average]``.

    Raises:
        UsageError: as :class:`Average`.
    """
    if settings.decay_per_update == 0.0:
        return None
    return Average(module, decay_per_update=settings.decay_per_update)
