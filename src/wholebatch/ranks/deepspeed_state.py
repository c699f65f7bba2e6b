"""The state of a DeepSpeed engine, put together from its ranks and dealt out again, for a checkpoint.

Facts of DeepSpeed that this file rests on (read in 0.19.8 and tested against it):

* ZeRO 1 and 2 keep whole parameters on every rank; ZeRO 3 keeps a part of each and gathers it on request.
* From stage 1 on the torch optimizer moves float32 copies, one flat piece for each group (each sub-group in
  stage 3) on each rank. Between updates they equal the model's own float32 parameters bit for bit.
* What the optimizer keeps element by element has the shape of its piece. All else, such as Adam's number of
  updates, it keeps once for the piece, so that the parameters in it have it in common.
* Its own ``save_checkpoint`` writes pickles, which are executed when they are read. The helpers of
  ``deepspeed.utils`` move one parameter at a time. Of stage 3 ``safe_set_full_optimizer_state`` fails where
  a parameter does not divide by the ranks; the local one takes a padded part.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from wholebatch.errors import StaleGradientsError, UnsupportedError
from wholebatch.ranks.deepspeed_gradients import Held
from wholebatch.ranks.whole import WholeOptimizer


def as_of_one_rank(engine: Any, held: Held) -> tuple[Any, Any]:
    """The engine's model and optimizer, with the state that they would have on one rank.

    Args:
        engine: what ``deepspeed.initialize`` returned first.
        held: its gradients.

    Raises:
        UnsupportedError: parameters that are not float32, or in an order of DeepSpeed's own.
    """
    dtypes = {str(one.dtype).removeprefix("torch.") for one in engine.module.parameters()}
    odd = sorted(dtypes - {"float32"})
    if odd:
        raise UnsupportedError(
            f"Checkpoints holds a DeepSpeed engine in float32, and this one has parameters in "
            f"{', '.join(odd)}; train in float32, or save with engine.save_checkpoint and "
            f"window.state_dict()"
        )
    stage = int(engine.zero_optimization_stage())
    if getattr(engine.optimizer, "round_robin_gradients", False):
        raise UnsupportedError(
            'Checkpoints holds no DeepSpeed engine with "round_robin_gradients", whose pieces lie in an '
            "order of their own; leave it out"
        )
    if stage == 0:
        return engine.module, engine.basic_optimizer
    stand_ins: dict[int, Tensor] = {}
    if stage == 3:
        stand_ins = {id(one): _stand_in(one) for one in engine.module.parameters()}
    leads = dist.get_rank(engine.data_parallel_group) == 0
    model = GatheredModel(engine.module, stand_ins, leads=leads) if stand_ins else engine.module
    return model, PiecedOptimizer(engine, held, stand_ins)


def _stand_in(one: Any) -> Tensor:
    """A tensor of the dtype and shape of ``one``, or of the whole that it is a part of, without memory."""
    return torch.empty((), dtype=one.dtype).expand(getattr(one, "ds_shape", one.shape))


# The parameters of ZeRO 3 -----------------------------------------------------------------------------


class GatheredModel:
    """A module under ZeRO 3, with the state of a whole one.

    Args:
        module: the engine's.
        stand_ins: a tensor of the whole shape for each of its parameters, by ``id``.
        leads: whether this rank is to have the values.
    """

    def __init__(self, module: nn.Module, stand_ins: Mapping[int, Tensor], *, leads: bool) -> None:
        self._module = module
        self._stand_ins = stand_ins
        self._leads = leads

    def named_parameters(self, *, remove_duplicate: bool = True) -> Iterator[tuple[str, Tensor]]:
        """The names, with the stand-ins."""
        for name, one in self._module.named_parameters(remove_duplicate=remove_duplicate):
            yield name, self._stand_ins[id(one)]

    def state_dict(self) -> dict[str, Any]:
        """Whole and on the host, on the leading rank; the others have stand-ins. All ranks call it."""
        found = gathered_state(self._module, keep=self._leads)
        now = self._module.state_dict(keep_vars=True)
        return found or {name: self._stand_ins.get(id(one), one) for name, one in now.items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Deal whole values out; all ranks call it, with the same."""
        for name, value in self._module.state_dict(keep_vars=True).items():
            if _is_pieced(value):
                with _gathered(value, written=True):
                    value.copy_(state[name])
            elif isinstance(value, Tensor):
                value.copy_(state[name])


def holds_pieces(module: nn.Module) -> bool:
    """Whether ZeRO 3 holds the parameters of a module in pieces."""
    return any(map(_is_pieced, module.parameters()))


def gathered_state(module: nn.Module, *, keep: bool) -> dict[str, Any]:
    """The state dict of a module under ZeRO 3, whole and on the host. All ranks call it.

    Args:
        module: the engine's.
        keep: whether this rank wants it; else it takes part, and gets nothing.

    Exactness: the values bit for bit.
    """
    found: dict[str, Any] = {}
    whole: dict[int, Tensor] = {}  # one that several layers share is gathered once
    for name, value in module.state_dict(keep_vars=True).items():
        if _is_pieced(value) and id(value) not in whole:
            with _gathered(value, written=False):
                whole[id(value)] = _copied(value) if keep else torch.empty(0)
        if keep:
            found[name] = whole[id(value)] if _is_pieced(value) else _copied(value)
    return found


def _copied(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else copy.deepcopy(value)


def _is_pieced(value: Any) -> bool:
    return hasattr(value, "ds_id")


def _gathered(parameter: Any, *, written: bool) -> AbstractContextManager[None]:
    """The parameter whole inside; what was ``written`` is taken from the leading rank and cut again."""
    from deepspeed import zero  # type: ignore[import-not-found]

    whole: AbstractContextManager[None] = zero.GatheredParameters(
        [parameter], modifier_rank=0 if written else None
    )
    return whole


# The optimizer of ZeRO 1 to 3 -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Piece:
    """What the optimizer moves as one tensor on this rank.

    Attributes:
        group: number of its group.
        flat: this rank's parts of its parameters, one after the other, padded.
        parameters: the model's own.
    """

    group: int
    flat: Tensor
    parameters: Sequence[nn.Parameter]


class PiecedOptimizer(WholeOptimizer):
    """The optimizer of an engine in stages 1 to 3, with the state of a whole one.

    Args:
        engine: what ``deepspeed.initialize`` returned first.
        held: its gradients.
        stand_ins: a tensor of the whole shape for a parameter, by ``id``; itself where there is none.
    """

    def __init__(self, engine: Any, held: Held, stand_ins: Mapping[int, Tensor]) -> None:
        super().__init__()
        self._zero, self._optimizer, self._held = engine.optimizer, engine.basic_optimizer, held
        self._rank = dist.get_rank(engine.data_parallel_group)
        self._pieces = _pieces_of(engine.optimizer)
        self._names = {id(one): name for name, one in engine.module.named_parameters()}
        self.stands_for = type(self._optimizer)
        self.param_groups = [
            {**group, "params": [stand_ins.get(id(one), one) for one in self._of_group(number)]}
            for number, group in enumerate(self._optimizer.param_groups)
        ]

    def state_dict(self) -> dict[str, Any]:
        """Whole and on the host, on the leading rank; the others have stand-ins. All ranks call it.

        Raises:
            StaleGradientsError: the engine holds a gradient, which a checkpoint does not.

        Exactness: the values bit for bit, but for the sign of a zero in stages 1 and 2.
        """
        if not self._held.is_empty():
            raise StaleGradientsError(
                "the DeepSpeed engine holds a gradient, which a checkpoint does not; save between two "
                "updates, after engine.step() or the window's commit"
            )
        self._link_again()
        states = [self._state_of(one, piece) for piece in self._pieces for one in piece.parameters]
        numbers = itertools.count()
        return {
            "state": {number: state for number, state in enumerate(states) if state},
            "param_groups": [
                {**group, "params": [next(numbers) for _ in self._of_group(number)]}
                for number, group in enumerate(self._optimizer.param_groups)
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Deal a whole state out, and take the float32 copies from the model's parameters.

        Exactness: the values bit for bit.
        """
        self._zero.refresh_fp32_params()
        for group, saved in zip(self._optimizer.param_groups, state["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        self._optimizer.state.clear()
        dealt = [(piece, states) for piece, states in self._by_piece(state) if states[0]]
        for piece, states in dealt:
            cut = _cut_keys(piece, states)
            self._optimizer.state[piece.flat] = {
                key: torch.zeros_like(piece.flat) if key in cut else copy.deepcopy(value)
                for key, value in states[0].items()
            }
        self._link_again()
        for piece, states in dealt:
            for key in _cut_keys(piece, states):
                for one, values in zip(piece.parameters, states, strict=True):
                    self._deal(one, key, values[key])

    def misfit(self, state: Mapping[str, Any]) -> str | None:
        for piece, states in self._by_piece(state):
            cut, (first, *others) = _cut_keys(piece, states), states
            name = self._names[id(piece.parameters[0])]
            for one, values in zip(piece.parameters[1:], others, strict=True):
                other = self._names[id(one)]
                if values.keys() != first.keys():
                    return f"holds {sorted(first)} of {name} and {sorted(values)} of {other}, {_ONE}"
                for key in first.keys() - cut:
                    if not _equal(first[key], values[key]):
                        return (
                            f"holds {key} = {_shown(first[key])} of {name} and {_shown(values[key])} of "
                            f"{other}, {_ONE}"
                        )
        return None

    def _of_group(self, number: int) -> list[nn.Parameter]:
        return [one for piece in self._pieces if piece.group == number for one in piece.parameters]

    def _by_piece(self, state: Mapping[str, Any]) -> list[tuple[_Piece, list[Mapping[str, Any]]]]:
        """The saved state of each parameter, by the pieces that they are in here."""
        numbers = itertools.count()
        return [
            (piece, [state["state"].get(next(numbers), {}) for _ in piece.parameters])
            for piece in self._pieces
        ]

    def _state_of(self, parameter: nn.Parameter, piece: _Piece) -> dict[str, Any]:
        from deepspeed.utils import safe_get_full_optimizer_state  # type: ignore[import-not-found]

        found = {}
        for key, value in self._optimizer.state.get(piece.flat, {}).items():
            if isinstance(value, Tensor) and value.shape == piece.flat.shape:
                whole = safe_get_full_optimizer_state(parameter, key)
                found[key] = _copied(whole) if self._rank == 0 else _stand_in(whole)
            else:
                found[key] = _copied(value)  # its own: torch counts up in place when it is loaded there
        return found

    def _link_again(self) -> None:
        """Let stages 1 and 2 find what the optimizer keeps now.

        They look it up once, after the first update of the first group, when the others have nothing yet.
        """
        if hasattr(self._zero, "_hp_optimizer_states_linked"):
            self._zero._hp_optimizer_states_linked = False
            if self._optimizer.state:
                self._zero._lazy_init_hp_params_optimizer_state()

    def _deal(self, parameter: Any, key: str, value: Tensor) -> None:
        from deepspeed import utils

        value = value.to(parameter.device)
        if not _is_pieced(parameter):
            utils.safe_set_full_optimizer_state(parameter, value, key)
            return
        size = parameter.ds_tensor.numel()
        start = size * self._rank
        part = value.flatten()[start : start + size]
        utils.safe_set_local_optimizer_state(parameter, F.pad(part, (0, size - part.numel())), key)


_ONE = "and the DeepSpeed engine keeps one for both; resume without ZeRO (stage 0)"


def _pieces_of(zero: Any) -> list[_Piece]:
    if hasattr(zero, "fp32_partitioned_groups_flat"):
        groups = [zero.sub_group_to_group_id[number] for number in range(len(zero.fp16_groups))]
        return list(map(_Piece, groups, zero.fp32_partitioned_groups_flat, zero.fp16_groups))
    flats = zero.single_partition_of_fp32_groups
    return list(map(_Piece, range(len(flats)), flats, zero.bit16_groups))


def _cut_keys(piece: _Piece, states: Sequence[Mapping[str, Any]]) -> set[str]:
    """What of a saved state has a value for each element; it may be a placeholder with a shape."""
    return {
        key
        for one, values in zip(piece.parameters, states, strict=True)
        for key, value in values.items()
        # AdamW's count of steps has the shape of a parameter without dimensions
        if (shape := _shape(value)) and shape == list(getattr(one, "ds_shape", one.shape))
    }


def _shape(value: Any) -> list[int] | None:
    if isinstance(value, Mapping):
        return list(value["shape"]) if "shape" in value else None
    return list(value.shape) if isinstance(value, Tensor) else None


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one.cpu(), other.cpu())
    return bool(one == other)


def _shown(value: Any) -> str:
    return f"{value.tolist()}" if isinstance(value, Tensor) and value.numel() == 1 else f"{value}"
