"""What is refused before a checkpoint is written, and before one is loaded: nothing is changed then."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from wholebatch.checkpoint_folder import CheckpointFacts
from wholebatch.errors import StaleGradientsError, UsageError
from wholebatch.gradients import own_parameters
from wholebatch.ranks.whole import WholeOptimizer
from wholebatch.resume.contents import (
    WITHOUT_VALUES,
    TrainingParts,
    kind_of,
    parameters_of,
    unwrapped,
)
from wholebatch.targets import MODULE_OF_A_FILE

GLOBAL_BATCH = ("global_batch_samples", "global_batch_items")


def refuse_to_save(parts: TrainingParts, score: float | None) -> None:
    """Refuse what a checkpoint would not hold, and a score that can't be compared.

    Raises:
        StaleGradientsError: gradients lie around.
        UsageError: the score is no finite number.
    """
    if score is not None and (isinstance(score, str | bytes | bool) or not math.isfinite(score)):
        raise UsageError(f"score={score!r} can't be compared; give a finite number, or leave it out")
    _refuse_gradients(parts)


def refuse_state_of_one_rank(parts: TrainingParts, ranks: int) -> None:
    """Refuse an object whose state is that of its rank alone.

    Raises:
        UsageError: with what to do.
    """
    for name, one in parts.objects.items():
        if ranks > 1 and getattr(one, "state_is_of_one_rank", False):
            raise UsageError(
                f"more[{name!r}] is a {type(one).__name__} over a stream, whose state on this rank says "
                f"nothing of those on the other {ranks - 1}; gather the states of all ranks "
                f"(torch.distributed.all_gather_object), save their list, more={{{name!r}: states}}, and "
                f"give each rank found.more[{name!r}][rank] back with load_state_dict"
            )


def refuse_to_load(parts: TrainingParts, facts: CheckpointFacts, saved: Mapping[str, Any]) -> None:
    """Refuse to load into a run with gradients, with another global batch, or built in another way.

    Raises:
        StaleGradientsError: gradients lie around, which would be added to the next update.
        UsageError: names the first thing that differs.
    """
    _refuse_gradients(parts)
    for name in GLOBAL_BATCH:
        then, now = facts.layout.get(name), parts.layout.get(name)
        if then is not None and now is not None and then != now:
            raise UsageError(
                f"{facts.path} was saved with a global batch of {then} {name.rpartition('_')[2]} and the "
                f"plan has {now}; plan with {name}={then} (m, A, D may differ), or start a new run from "
                f"its parameters"
            )
    _refuse_misfit(parts, saved)


def _refuse_gradients(parts: TrainingParts) -> None:
    parameters = own_parameters(parts.optimizers)
    stale = sum(parameter.grad is not None for parameter in parameters)
    if stale:
        raise StaleGradientsError(
            f"{stale} of {len(parameters)} parameters have a gradient, which a checkpoint does not hold; "
            f"set them to None, or finish the update first"
        )


def _refuse_misfit(parts: TrainingParts, saved: Mapping[str, Any]) -> None:
    """Compare what a checkpoint holds with what it would be loaded into."""
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
            return (
                f"{name!r} of {what} {WITHOUT_VALUES} to be put back into; make the run on its device first"
            )
        if isinstance(here, Tensor) and (difference := _difference(_described(then), _described(here))):
            return f"{name!r} of {what} {difference}"
    return None


def _optimizer_misfit(given: Any, optimizer: Optimizer, model: nn.Module, what: str) -> str | None:
    if (words := _class_misfit(given, optimizer)) is not None:
        return f"{what} {words}"
    saved, now = given["parameters"], parameters_of(optimizer, model)
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
    name, module = kind_of(optimizer).__name__, kind_of(optimizer).__module__
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
