"""The state of a run taken out as plain data and tensors, and put back.

Everything that is written is a tensor or plain data (numbers, text, lists, dictionaries), so that
``torch.load(weights_only=True)`` reads it without executing anything. Tensors that the ranks hold in
parts leave a placeholder behind and are written apart, by ``sharded.py``.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from wholebatch.errors import UnsupportedError, UsageError
from wholebatch.finish import DeclaredSchedule
from wholebatch.ranks.whole import WholeOptimizer
from wholebatch.record import Counters

# The key of a placeholder; its value is the name under which the tensor was written apart.
APART = "wholebatch.apart"
WITHOUT_VALUES = "is on the meta device and has no values"
_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingParts:
    """What a checkpoint takes the state from and gives it back to; for a window, made of the window.

    Args:
        model: the module; DDP and ``torch.compile`` around it are looked through.
        optimizers: all that are stepped.
        schedules: all that are advanced, each with its unit.
        scaler: a GradScaler, or None.
        counters: totals of the run.
        position: how to read and set what else a window knows; by default the counters alone.
        terms: names of the objective's terms.
        more: objects with ``state_dict`` and ``load_state_dict``, or plain data, by name.
        layout: the numbers that ``CheckpointFacts.layout`` lists.
    """

    model: nn.Module
    optimizers: Sequence[Optimizer]
    schedules: Sequence[DeclaredSchedule] = ()
    scaler: GradScaler | None = None
    counters: Counters
    position: Any = None
    terms: Sequence[str] = ()
    more: Mapping[str, Any] = field(default_factory=dict)
    layout: Mapping[str, int | str | None] = field(default_factory=dict)

    @property
    def objects(self) -> dict[str, Any]:
        """Those of ``more`` that have a state to load."""
        return {name: one for name, one in self.more.items() if _has_state(one)}


@dataclass(frozen=True, slots=True)
class Contents:
    """What goes into the files, by name; and the tensors that are written apart, by theirs."""

    files: dict[str, Any]
    apart: dict[str, Tensor]


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside ``DistributedDataParallel`` and ``torch.compile``."""
    while isinstance(model, DistributedDataParallel) or hasattr(model, "_orig_mod"):
        inner: Any = model.module if isinstance(model, DistributedDataParallel) else model._orig_mod
        model = inner
    return model


# Take out ---------------------------------------------------------------------------------------------


def take(parts: TrainingParts) -> Contents:
    """The state of a run, without the random states.

    Raises:
        UnsupportedError: something that is neither tensor nor plain data.
        UsageError: a tensor without values, on the meta device.

    Exactness: the tensors themselves, copied only where they are part of a larger storage.
    """
    apart: dict[str, Tensor] = {}
    model = unwrapped(parts.model)
    state = parts.position.state_dict() if parts.position is not None else None
    files = {
        "model.pt": model.state_dict(),
        "optimizers.pt": {
            "optimizers": [
                {
                    "class": kind_of(one).__name__,
                    "module": kind_of(one).__module__,
                    "parameters": parameters_of(one, model),
                    "state": one.state_dict(),
                }
                for one in parts.optimizers
            ],
            "schedules": [
                {"class": type(s.scheduler).__name__, "unit": s.unit, "state": s.scheduler.state_dict()}
                for s in parts.schedules
            ],
            "scaler": None if parts.scaler is None else parts.scaler.state_dict(),
        },
        "rest.pt": {
            "window": state if state is not None else {"counters": parts.counters.state_dict()},
            "terms": list(parts.terms),
            "objects": {name: one.state_dict() for name, one in parts.objects.items()},
            "plain": {name: one for name, one in parts.more.items() if name not in parts.objects},
        },
    }
    return Contents({name: _plain(value, name, apart) for name, value in files.items()}, apart)


def _plain(value: Any, where: str, apart: dict[str, Tensor]) -> Any:
    """``value`` with placeholders for tensors in parts; refuses what could not be read back safely."""
    if isinstance(value, Tensor) and value.is_meta:
        raise UsageError(f"{where} {WITHOUT_VALUES}; give it its values before the run is saved")
    if isinstance(value, DTensor):
        apart[where] = value
        return {APART: where, "shape": list(value.shape), "dtype": value.dtype}
    if isinstance(value, Tensor):
        if type(value) not in (Tensor, nn.Parameter):
            raise UnsupportedError(_not_plain(where, value))
        return _without_the_rest(value)
    if type(value) in _PLAIN:
        return value
    if type(value) in (dict, OrderedDict, Counter):
        same = type(value)()
        for key, one in value.items():
            if type(key) not in (str, int, float, bool, type(None), tuple):
                raise UnsupportedError(_not_plain(f"a key of {where}", key))
            same[key] = _plain(one, f"{where}.{key}", apart)
        if hasattr(value, "_metadata"):
            same._metadata = value._metadata  # versions of the modules, in a module's own state
        return same
    if type(value) in (list, tuple, set):
        return type(value)([_plain(one, f"{where}.{index}", apart) for index, one in enumerate(value)])
    raise UnsupportedError(_not_plain(where, value))


def _without_the_rest(value: Tensor) -> Tensor:
    """A tensor that is part of a larger storage, apart from it: torch saves the storage as a whole."""
    if value.layout != torch.strided or value.untyped_storage().nbytes() <= value.nbytes:
        return value
    return value.detach().clone()


def _not_plain(where: str, value: Any) -> str:
    return (
        f"{where} is a {type(value).__module__}.{type(value).__name__}; a checkpoint holds tensors and "
        f"plain data (numbers, text, lists, dictionaries), because anything else would have to be "
        f"executed to be read back. Convert it"
    )


def parameters_of(optimizer: Optimizer, model: nn.Module) -> list[list[dict[str, Any]]]:
    """Name, shape and dtype of each parameter, by group; the state knows them by number only."""
    names = {id(parameter): name for name, parameter in model.named_parameters(remove_duplicate=False)}
    return [
        [{"name": names.get(id(p)), "shape": list(p.shape), "dtype": p.dtype} for p in group["params"]]
        for group in optimizer.param_groups
    ]


def kind_of(optimizer: Any) -> type[Any]:
    """The class of an optimizer, or of the one that a whole optimizer stands for."""
    return optimizer.stands_for if isinstance(optimizer, WholeOptimizer) else type(optimizer)


def _has_state(one: Any) -> bool:
    return callable(getattr(one, "state_dict", None)) and callable(getattr(one, "load_state_dict", None))


# Put back ---------------------------------------------------------------------------------------------


def targets_apart(parts: TrainingParts, saved: Mapping[str, Any]) -> dict[str, Tensor]:
    """Empty tensors to read those into that were written apart, in parts as they lie in this run.

    A tensor of an optimizer's state lies as its parameter does where both have one shape.

    Exactness: holds no values yet.
    """
    placeholders = _placeholders(saved)
    if not placeholders:
        return {}
    now = take(parts)
    like = {f"model.pt.{name}": one for name, one in now.files["model.pt"].items()} | now.apart
    for index, optimizer in enumerate(parts.optimizers):
        ordered = [p for group in optimizer.param_groups for p in group["params"]]
        for number, state in saved["optimizers.pt"]["optimizers"][index]["state"]["state"].items():
            for key in state:
                like[f"optimizers.pt.optimizers.{index}.state.state.{number}.{key}"] = ordered[number]
    found: dict[str, Tensor] = {}
    for given in placeholders:
        name, shape = given[APART], torch.Size(given["shape"])
        same = like.get(name)
        if isinstance(same, Tensor) and same.shape == shape:
            found[name] = torch.empty_like(same, dtype=given["dtype"], requires_grad=False)
        else:
            found[name] = torch.empty(shape, dtype=given["dtype"])
    return found


def filled(value: Any, apart: Mapping[str, Tensor]) -> Any:
    """``value`` with the tensors in place of their placeholders; changes its containers.

    Exactness: the tensors themselves.
    """
    if isinstance(value, dict) and APART in value:
        return apart[value[APART]]
    if isinstance(value, dict):
        for key, one in value.items():
            value[key] = filled(one, apart)
    elif isinstance(value, list | tuple):
        return type(value)([filled(one, apart) for one in value]) if type(value) in (list, tuple) else value
    return value


def _placeholders(value: Any) -> list[Mapping[str, Any]]:
    if isinstance(value, Mapping) and APART in value:
        return [value]
    inside = (
        value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    )
    return [found for one in inside for found in _placeholders(one)]


def put_back(parts: TrainingParts, saved: Mapping[str, Any]) -> None:
    """Load everything but the random states. First what belongs to the user and may fail.

    Exactness: bit for bit.
    """
    for name, one in parts.objects.items():
        state = saved["rest.pt"]["objects"][name]
        one.load_state_dict(_laid_out(state, one.state_dict()) if isinstance(one, nn.Module) else state)
    model = unwrapped(parts.model)
    model.load_state_dict(_laid_out(saved["model.pt"], model.state_dict()))
    steps = saved["optimizers.pt"]
    for given, optimizer in zip(steps["optimizers"], parts.optimizers, strict=True):
        _load_optimizer(optimizer, given["state"])
    for given, schedule in zip(steps["schedules"], parts.schedules, strict=True):
        schedule.scheduler.load_state_dict(given["state"])
    if parts.scaler is not None:
        parts.scaler.load_state_dict(steps["scaler"])
    if parts.position is not None:
        parts.position.load_state_dict(saved["rest.pt"]["window"])
    else:
        parts.counters.load_state_dict(saved["rest.pt"]["window"]["counters"])


def _load_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, values in state["state"].items():
        state["state"][number] = {key: _like(one, parameters[number]) for key, one in values.items()}
    optimizer.load_state_dict(state)
    for number, values in state["state"].items():
        # torch gives state the dtype of its parameter; what was kept in another stays in it
        for key, one in values.items():
            loaded = optimizer.state[parameters[number]].get(key)
            if isinstance(one, Tensor) and isinstance(loaded, Tensor) and loaded.dtype != one.dtype:
                optimizer.state[parameters[number]][key] = one.to(loaded.device, copy=True)


def _laid_out(state: Any, now: Mapping[str, Any]) -> Any:
    """A module's saved state, with whole tensors cut as the module holds them."""
    for name, value in state.items():
        state[name] = _like(value, now.get(name))
    return state


def _like(value: Any, other: Any) -> Any:
    """``value`` in parts over the ranks where ``other``, of the same shape, is."""
    whole = isinstance(value, Tensor) and not isinstance(value, DTensor)
    if whole and isinstance(other, DTensor) and value.shape == other.shape:
        on_device = value.to(other.device)
        return distribute_tensor(on_device, other.device_mesh, other.placements, src_data_rank=None)
    return value
