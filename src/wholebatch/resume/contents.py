"""The state of a run taken out as plain data and tensors, compared with a run, and put back.

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
# What the modules begin with that ``targets`` makes of a file; the rest of the name tells where it lies.
MODULE_OF_A_FILE = "wholebatch_"
_META = "is on the meta device and has no values"
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
                    "class": _kind(one).__name__,
                    "module": _kind(one).__module__,
                    "parameters": _parameters_of(one, model),
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
        raise UsageError(f"{where} {_META}; give it its values before the run is saved")
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


def _parameters_of(optimizer: Optimizer, model: nn.Module) -> list[list[dict[str, Any]]]:
    """Name, shape and dtype of each parameter, by group; the state knows them by number only."""
    names = {id(parameter): name for name, parameter in model.named_parameters(remove_duplicate=False)}
    return [
        [{"name": names.get(id(p)), "shape": list(p.shape), "dtype": p.dtype} for p in group["params"]]
        for group in optimizer.param_groups
    ]


def _kind(optimizer: Any) -> type[Any]:
    return optimizer.stands_for if isinstance(optimizer, WholeOptimizer) else type(optimizer)


def _has_state(one: Any) -> bool:
    return callable(getattr(one, "state_dict", None)) and callable(getattr(one, "load_state_dict", None))


# Compare ----------------------------------------------------------------------------------------------


def refuse_misfit(parts: TrainingParts, saved: Mapping[str, Any]) -> None:
    """Compare what a checkpoint holds with what it would be loaded into, before anything is written.

    Raises:
        UsageError: names the first thing that differs.
    """
    model, rest, steps = unwrapped(parts.model), saved["rest.pt"], saved["optimizers.pt"]
    _refuse(_tensor_misfit(saved["model.pt"], model.state_dict(), "the model"))
    _refuse(_number_misfit(steps["optimizers"], parts.optimizers, "optimizers"))
    for index, (given, optimizer) in enumerate(zip(steps["optimizers"], parts.optimizers, strict=True)):
        _refuse(_optimizer_misfit(given, optimizer, model, f"optimizer {index + 1}"))
    _refuse(_number_misfit(steps["schedules"], parts.schedules, "schedules"))
    for given, schedule in zip(steps["schedules"], parts.schedules, strict=True):
        then = f"{given['class']} by the {given['unit']}"
        now = f"{type(schedule.scheduler).__name__} by the {schedule.unit}"
        _refuse(None if then == now else f"the schedule was a {then} and is a {now}")
    if (steps["scaler"] is None) != (parts.scaler is None):
        with_one = "the run was saved with a GradScaler and none is here"
        without = "the run was saved without a GradScaler and one is here"
        _refuse(with_one if parts.scaler is None else without)
    if list(rest["terms"]) != list(parts.terms):
        _refuse(f"the terms of the objective were {rest['terms']} and are {list(parts.terms)}")
    for name, one in parts.objects.items():
        if name not in rest["objects"]:
            _refuse(f"more has {name!r}, whose state was not saved; saved were {sorted(rest['objects'])}")
        if isinstance(one, nn.Module):
            _refuse(_tensor_misfit(rest["objects"][name], one.state_dict(), f"more[{name!r}]"))
    if missing := sorted(set(rest["objects"]) - set(parts.objects)):
        _refuse(f"it holds the state of {missing}; give load the objects, more={{{missing[0]!r}: ...}}")
    counted, known = set(rest["window"]["counters"]), set(parts.counters.state_dict())
    _refuse(None if counted == known else f"its counters are {sorted(counted)} and here {sorted(known)}")


def _refuse(words: str | None) -> None:
    if words is not None:
        raise UsageError(
            f"{words}. Nothing was loaded; build the run as it was saved, or start a new one (model.pt of "
            f"a checkpoint is a plain state_dict)"
        )


def _number_misfit(saved: Sequence[Any], now: Sequence[Any], what: str) -> str | None:
    return (
        None if len(saved) == len(now) else f"it was saved with {len(saved)} {what} and {len(now)} are here"
    )


def _tensor_misfit(saved: Mapping[str, Any], now: Mapping[str, Any], what: str) -> str | None:
    """The first name, shape or dtype that differs between two states of a module."""
    for name in [*now, *(name for name in saved if name not in now)]:
        if name not in saved or name not in now:
            return f"{name!r} of {what} is {'here' if name in now else 'in the checkpoint'} only"
        then, here = saved[name], now[name]
        if isinstance(here, Tensor) and here.is_meta:
            return f"{name!r} of {what} {_META} to be put back into; make the run on its device first"
        if isinstance(here, Tensor) and (difference := _difference(_described(then), _described(here))):
            return f"{name!r} of {what} {difference}"
    return None


def _optimizer_misfit(given: Any, optimizer: Optimizer, model: nn.Module, what: str) -> str | None:
    if (words := _class_misfit(given, optimizer)) is not None:
        return f"{what} {words}"
    saved, now = given["parameters"], _parameters_of(optimizer, model)
    if [len(group) for group in saved] != [len(group) for group in now]:
        return (
            f"{what} had groups of {[len(group) for group in saved]} parameters and has groups of "
            f"{[len(group) for group in now]}"
        )
    pairs = ((then, here) for a, b in zip(saved, now, strict=True) for then, here in zip(a, b, strict=True))
    for number, (then, here) in enumerate(pairs, start=1):
        if then["name"] != here["name"]:
            return (
                f"parameter {number} of {what} was {then['name']!r} and is {here['name']!r}; give the "
                f"optimizer its parameters and groups in the same order"
            )
        if difference := _difference(then, here):
            return f"parameter {number} of {what} ({then['name']}) {difference}"
    words = optimizer.misfit(given["state"]) if isinstance(optimizer, WholeOptimizer) else None
    return words and f"the state of {what} {words}"


def _class_misfit(given: Any, optimizer: Optimizer) -> str | None:
    """Another class, by name and module; that of a script, or of a file that may move, is not compared."""
    name, module = _kind(optimizer).__name__, _kind(optimizer).__module__
    if given["class"] != name:
        return f"was a {given['class']} and is a {name}"
    then = given.get("module", module)  # not saved by the first versions
    by_file = any(each == "__main__" or each.startswith(MODULE_OF_A_FILE) for each in (then, module))
    return None if then == module or by_file else f"was the {name} of {then} and is that of {module}"


def _described(value: Any) -> dict[str, Any]:
    """Shape and dtype of a tensor or of its placeholder."""
    return (
        {"shape": list(value.shape), "dtype": value.dtype}
        if isinstance(value, Tensor)
        else dict(value or {})
    )


def _difference(then: Mapping[str, Any], here: Mapping[str, Any]) -> str | None:
    for key in ("shape", "dtype"):
        if then.get(key) != here[key]:
            return f"has the {key} {then.get(key)} in the checkpoint and {here[key]} here"
    return None


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
