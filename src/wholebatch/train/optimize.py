"""The optimizer: which parameters it takes in which groups, and its class by name.

Any class that steps on gradients will do. Where torch has a fused kernel for it, that is used: it
moves parameters and state in one pass, and takes the window's clipping along.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from wholebatch.errors import UnsupportedError, UsageError
from wholebatch.optimizers import needs_closure
from wholebatch.targets import find_target
from wholebatch.train.settings import OptimizerConfig

ParameterGroup = dict[str, Any]
# Settings of their own, so options may not say them a second time.
OWN_KEYS = {"lr": "optimizer.learning_rate", "weight_decay": "optimizer.weight_decay"}
# Options that choose a kernel themselves.
KERNEL_OPTIONS = {"fused", "foreach", "differentiable"}
# Whose fused kernels torch 2.13 runs on parameters that are parts of tensors over ranks.
FUSED_IN_PARTS = ("Adam", "AdamW")


def parameter_groups(module: nn.Module, settings: OptimizerConfig) -> list[ParameterGroup]:
    """The parameters that train, those that decay apart from those that do not.

    Frozen parameters are left out, and one that several layers share is there once. With ``decayed =
    "matrices"`` parameters of fewer than two dimensions (biases, norms) have a weight decay of 0.

    Args:
        module: the model, wrapped or not, with its parameters frozen as they will be.
        settings: the section ``[optimizer]``.

    Returns:
        One or two groups with ``params`` and ``weight_decay``, none of them empty.

    Raises:
        UsageError: no parameter trains.
    """
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not trained:
        frozen = sum(1 for _ in module.parameters())
        raise UsageError(
            f"none of the model's {frozen} parameters requires a gradient, so there is nothing to train; "
            f"unfreeze some, or train adapters with lora.rank"
        )
    if settings.decayed == "all" or settings.weight_decay == 0.0:
        return [{"params": trained, "weight_decay": settings.weight_decay}]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def make_optimizer(
    parameters: Iterable[nn.Parameter] | Iterable[ParameterGroup], settings: OptimizerConfig
) -> Optimizer:
    """The optimizer of that name over parameters or groups of them.

    Args:
        parameters: parameters, or what :func:`parameter_groups` returns, on their device.
        settings: the section ``[optimizer]``.

    Raises:
        UnsupportedError: a class whose step needs a closure.
        UsageError: no such class, an option that it does not have, or something that it refused.

    Exactness: fused and plain kernels of one class differ by rounding.
    """
    kind = optimizer_class(settings.name)
    options = _checked_options(kind, settings)
    given: list[Any] = list(parameters)
    grouped = bool(given) and isinstance(given[0], Mapping)
    groups: list[ParameterGroup] = [dict(group) for group in given] if grouped else [{"params": given}]
    if "weight_decay" in _known(kind) or settings.weight_decay:
        options["weight_decay"] = settings.weight_decay
    else:
        for group in groups:
            group.pop("weight_decay", None)
    everything = [parameter for group in groups for parameter in group["params"]]
    refuse_muon_of_vectors(settings, everything)
    if _fuses(kind, everything) and not KERNEL_OPTIONS & set(options):
        options["fused"] = True
    try:
        optimizer: Optimizer = kind(groups, lr=settings.learning_rate, **options)
    except Exception as error:  # a class of the user's own may raise anything, and torch's do an IndexError
        raise UsageError(
            f"optimizer.name = {settings.name!r} does not take these settings: {error} "
            f"(optimizer.learning_rate = {settings.learning_rate}, optimizer.options = {settings.options})"
        ) from error
    return optimizer


def check_optimizer(settings: OptimizerConfig) -> None:
    """Refuse settings with which no update could be made; needs no data and no model.

    A class of torch is made and steps once, on a matrix of its own.

    Raises:
        JudgeError: importing a class of the user's own failed.
        UnsupportedError: a class whose step needs a closure.
        UsageError: no such class, an option that it does not have, or something that it refused.
    """
    _checked_options(optimizer_class(settings.name), settings)
    probed_state(settings)


def probed_state(settings: OptimizerConfig) -> Mapping[str, Any]:
    """What a class of torch keeps of a parameter after a step on a matrix of its own, by name.

    Nothing is known of a class of one's own, and so of its state.

    Raises:
        UsageError: it can't make an update with these settings.
    """
    if vars(torch.optim).get(settings.name) is None:
        return {}
    # Whether a device can capture a step is known where its parameters are.
    options = {key: value for key, value in settings.options.items() if key != "capturable"}
    probe = nn.Parameter(torch.ones(2, 2))
    optimizer = make_optimizer([probe], replace(settings, options=options))
    probe.grad = torch.ones_like(probe)
    try:
        optimizer.step()
    except Exception as error:
        raise UsageError(
            f"optimizer.name = {settings.name!r} with optimizer.options = {settings.options} can't make an "
            f'update: {error}; change the options, or take another class, such as "AdamW"'
        ) from error
    return dict(optimizer.state[probe])


def optimizer_class(name: str) -> type[Any]:
    """The class of ``torch.optim`` of that name, or that of ``module:Class`` or ``file.py:Class``.

    Raises:
        JudgeError: importing the module or the file failed.
        UnsupportedError: its step needs a closure.
        UsageError: there is no such class, or it is no optimizer.
    """
    found = (
        find_target(name, what="an optimizer", key="optimizer.name")
        if ":" in name
        else vars(torch.optim).get(name)
    )
    if not _is_optimizer(found):
        known = [key for key, value in vars(torch.optim).items() if _is_optimizer(value)]
        instead = "; it is no subclass of torch.optim.Optimizer" if ":" in name else _nearest(name, known)
        raise UsageError(f"optimizer.name = {name!r} is no optimizer{instead}")
    if needs_closure(found.step):
        raise UnsupportedError(
            f"optimizer.name = {name!r}: its step needs a closure that computes the loss again, and one "
            f"update would be several passes over the global batch; take one that steps on gradients, "
            f'such as "AdamW"'
        )
    return found


def _is_optimizer(value: object) -> TypeGuard[type[Any]]:
    return inspect.isclass(value) and issubclass(value, Optimizer) and value is not Optimizer


def _nearest(word: str, known: Iterable[str]) -> str:
    """The nearest known words, case aside, or all of them, as the end of a message."""
    by_lower = {key.lower(): key for key in sorted(known)}
    near = difflib.get_close_matches(word.lower(), by_lower, n=3, cutoff=0.5)
    if near:
        return f"; did you mean {' or '.join(by_lower[key] for key in near)}?"
    return f"; it has {', '.join(by_lower.values()) or 'none'}"


def _known(kind: type[Any]) -> dict[str, inspect.Parameter]:
    """What the class takes beside its parameters, by name."""
    return dict(list(inspect.signature(kind).parameters.items())[1:])


def _checked_options(kind: type[Any], settings: OptimizerConfig) -> dict[str, Any]:
    """The options as the class takes them; refuses what it does not know or what is said twice."""
    known = _known(kind)
    open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values())
    for option, value in settings.options.items():
        if option in OWN_KEYS:
            raise UsageError(
                f"optimizer.options.{option} = {value!r} would be given twice; set {OWN_KEYS[option]} "
                f"instead"
            )
        if option not in known and not open_ended:
            raise UsageError(
                f"optimizer.options.{option} = {value!r}: {settings.name} has no such option"
                f"{_nearest(option, set(known) - set(OWN_KEYS))}"
            )
    if "weight_decay" not in known and not open_ended and settings.weight_decay:
        raise UsageError(
            f"optimizer.weight_decay = {settings.weight_decay}, and {settings.name} has no weight decay; "
            f"set it to 0, or take an optimizer that has one"
        )
    if "lr" not in known and not open_ended:
        raise UsageError(
            f"optimizer.name = {settings.name!r}: its class takes no lr, so optimizer.learning_rate = "
            f"{settings.learning_rate} and the schedule would do nothing"
        )
    return {name: _as_wanted(known.get(name), value) for name, value in settings.options.items()}


def _as_wanted(parameter: inspect.Parameter | None, value: Any) -> Any:
    """A list of the settings as a tuple where the class has a tuple there; all else as it is."""
    if isinstance(value, list) and parameter is not None and isinstance(parameter.default, tuple):
        return tuple(value)
    return value


def is_muon(settings: OptimizerConfig) -> bool:
    """Whether the optimizer takes matrices alone."""
    return issubclass(optimizer_class(settings.name), torch.optim.Muon)


def refuse_muon_of_vectors(settings: OptimizerConfig, parameters: Sequence[Tensor]) -> None:
    """Refuse Muon where it would be given something else than matrices.

    Args:
        settings: the section ``[optimizer]``.
        parameters: all that are trained; a meta device is enough.

    Raises:
        UsageError: says how many are no matrices, and the shape of the first.
    """
    if not is_muon(settings):
        return
    others = [parameter for parameter in parameters if parameter.dim() != 2]
    if others:
        raise UsageError(
            f"optimizer.name = {settings.name!r} moves matrices only, and {len(others)} of "
            f"{len(parameters)} parameters are not of two dimensions, such as one of shape "
            f'{tuple(others[0].shape)}; take "AdamW", or train matrices alone, as lora.rank does'
        )


def _fuses(kind: type[Any], parameters: Sequence[Tensor]) -> bool:
    """Whether torch's own class has a fused kernel that works for all of these parameters."""
    if vars(torch.optim).get(kind.__name__) is not kind or "fused" not in _known(kind):
        return False
    meshes = {getattr(parameter, "device_mesh", None) for parameter in parameters}
    if len(meshes) > 1:
        return False  # one kernel takes no parameters that lie over different ranks
    if meshes != {None} and kind.__name__ not in FUSED_IN_PARTS:
        return False
    kinds = {(parameter.dtype, parameter.device.type) for parameter in parameters}
    return all(_fused_moves(kind, dtype, device_type) for dtype, device_type in kinds)


@functools.cache
def _fused_moves(kind: type[Any], dtype: torch.dtype, device_type: str) -> bool:
    """Try it: which class is fused for which dtype on which device is in no table, and one that is said
    to be leaves parameters where they are (SGD in half precision on CPU, pytorch issue 191763)."""
    probe = nn.Parameter(torch.ones(32, dtype=dtype, device=device_type))
    probe.grad = torch.ones_like(probe)
    try:
        kind([probe], lr=0.5, fused=True).step()
    except (RuntimeError, ValueError):
        return False
    return bool((probe != 1).all())
