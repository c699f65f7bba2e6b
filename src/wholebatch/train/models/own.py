"""A model of the user's own: ``module:function`` or ``file.py:function``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from wholebatch.errors import UsageError
from wholebatch.targets import check_options, find_target, guarded
from wholebatch.train.material import Batch, JobModel
from wholebatch.train.models.inputs import token_ids
from wholebatch.train.settings import ModelConfig


def call_own(settings: ModelConfig) -> JobModel:
    """Call the function that ``model.source`` names and check what it gives.

    Args:
        settings: its ``options`` are the keyword arguments.

    Returns:
        Its module and forward; ``module(batch["input_ids"])`` where it gives a module alone.

    Raises:
        UsageError: no such function, or it gives something else than a module.
        JudgeError: importing or calling it failed.
    """
    source, function = settings.source, own_function(settings)
    found = guarded(
        lambda: function(**settings.options),
        f"{source}, called with model.options {settings.options}, failed",
    )
    pair = found if isinstance(found, tuple) and len(found) == 2 else (found, _input_ids_forward)
    module, forward = pair
    if not isinstance(module, nn.Module) or not callable(forward):
        raise UsageError(
            f"model.source: {source} returned a {_kind(found)}; it has to return a torch module, or "
            f"(module, forward) with forward(module, batch)"
        )
    return JobModel(module=module, forward=forward, facts={"name": type(module).__name__})


def own_function(settings: ModelConfig) -> Callable[..., Any]:
    """The function that ``model.source`` names, which takes ``model.options``; it is not called.

    Raises:
        UsageError: no such function, or one that does not take these options.
        JudgeError: importing it failed.
    """
    source = settings.source
    function: Callable[..., Any] = find_target(source, what="a model", key="model.source")
    if not callable(function):
        raise UsageError(
            f"model.source {source} is a {type(function).__name__}; it has to be a function that returns "
            f"a torch module"
        )
    check_options(function, settings.options, what=f"model.options for {source}")
    return function


def _kind(found: Any) -> str:
    if isinstance(found, tuple):
        return f"tuple of {', '.join(type(part).__name__ for part in found)}"
    return type(found).__name__


def _input_ids_forward(module: nn.Module, batch: Batch) -> Any:
    return module(token_ids(batch))
