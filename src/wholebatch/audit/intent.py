"""How many micro-batches an update should have, from the frameworks in use.

Frameworks keep that number in objects of the running script. They are found among all objects of the
process by the classes of modules that are imported already: nothing is imported here, and nothing is
changed. A default of one micro-batch is believed only where the framework itself runs the loop: whoever
writes their own and never mentions accumulation to the framework hasn't said anything.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from wholebatch.audit.trace import Intent

# live objects by a key of _CLASSES
Found = Mapping[str, Sequence[Any]]

# What is looked for: module and class; a framework's older name for the same module too.
_CLASSES = {
    "trainer": (("transformers.trainer", "Trainer"),),
    "arguments": (("transformers.training_args", "TrainingArguments"),),
    "lightning": (
        ("lightning.pytorch.trainer.trainer", "Trainer"),
        ("pytorch_lightning.trainer.trainer", "Trainer"),
    ),
    "fabric": (("lightning.fabric.fabric", "Fabric"), ("lightning_fabric.fabric", "Fabric")),
    "composer": (("composer.trainer.trainer", "Trainer"),),
    "deepspeed": (("deepspeed.runtime.engine", "DeepSpeedEngine"),),
    "accelerate": (("accelerate.accelerator", "Accelerator"),),
}


def find_intents(flags: Intent | None) -> tuple[Intent, ...]:
    """Read from flags and from the frameworks in use how many micro-batches an update should have.

    Never raises: what an object does not tell is left out.

    Args:
        flags: what the user said on the command line; None where nothing.

    Returns:
        tuple[Intent, ...]: the most reliable first: flags, whoever runs the loop, engines, and last
        arguments that nobody is seen to use. A framework without a known number is among them, with
        ``micro_batches`` None. Empty where no framework is in use.
    """
    found = _objects()
    intents = [] if flags is None else [flags]
    for read in (_trainers, _lightning, _composer, _deepspeed, _accelerate, _fabric, _arguments):
        intents += read(found)
    return tuple(dict.fromkeys(intents))


def _objects() -> Found:
    """Live objects of the classes that are looked for, told by their type: that runs no code of theirs."""
    wanted = {
        id(kind): name
        for name, places in _CLASSES.items()
        for module, attribute in places
        if (kind := _loaded(module, attribute)) is not None
    }
    found: dict[str, list[Any]] = {name: [] for name in _CLASSES}
    names: dict[int, set[str]] = {}  # by id: a class need not be hashable
    for one in gc.get_objects() if wanted else ():
        kind = type(one)
        if id(kind) not in names:
            names[id(kind)] = {wanted[id(base)] for base in kind.__mro__ if id(base) in wanted}
        for name in names[id(kind)]:
            found[name].append(one)
    return found


def _loaded(module: str, attribute: str) -> type | None:
    kind = vars(sys.modules[module]).get(attribute) if sys.modules.get(module) is not None else None
    return kind if isinstance(kind, type) else None


def _asked(thing: Any, path: str) -> Any:
    """What an object says, ``"state.size"`` or ``"size()"``; half-made ones raise anything: then None."""
    try:
        for name in path.split("."):
            if name != "()":
                thing = getattr(thing, name.removesuffix("()"))
            if name.endswith("()"):
                thing = thing()
    except Exception:
        return None
    return thing


def _number(thing: Any, path: str) -> int | None:
    """A whole number of at least one that an object says; None where it says none."""
    value = _asked(thing, path)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return int(value) if is_number and 1 <= value < float("inf") and value == int(value) else None


def _product(*factors: int | None) -> int | None:
    total = 1
    for factor in factors:
        if factor is None:
            return None
        total *= factor
    return total


def _num_ranks() -> int:
    distributed = sys.modules.get("torch.distributed")
    return _number(distributed, "get_world_size()") or 1


def _library(thing: Any) -> str:
    return str(type(thing).__module__).split(".")[0]


def _trainers(found: Found) -> Iterator[Intent]:
    """Trainers of Transformers and TRL, which run the loop by their arguments."""
    for trainer in found["trainer"]:
        arguments = _asked(trainer, "args")
        if arguments is not None:
            intent = _of_arguments(arguments)
            samples = _number(arguments, "train_batch_size")
            yield replace(
                intent,
                framework="trl" if _library(trainer) == "trl" else intent.framework,
                global_batch_samples=_product(samples, intent.micro_batches, _num_ranks()),
            )


def _of_arguments(arguments: Any) -> Intent:
    is_trl = _library(arguments) == "trl"
    name = type(arguments).__name__ if is_trl else "TrainingArguments"
    return Intent(
        micro_batches=_number(arguments, "gradient_accumulation_steps"),
        source=f"{name}.gradient_accumulation_steps",
        framework="trl" if is_trl else "transformers",
    )


def _arguments(found: Found) -> Iterator[Intent]:
    """Arguments without a Trainer: their number is meant where it is no default."""
    used = {id(_asked(trainer, "args")) for trainer in found["trainer"]}
    for arguments in found["arguments"]:
        if id(arguments) not in used:
            yield _unless_one(_of_arguments(arguments))


def _unless_one(intent: Intent) -> Intent:
    return replace(intent, micro_batches=None) if intent.micro_batches == 1 else intent


def _lightning(found: Found) -> Iterator[Intent]:
    for trainer in found["lightning"]:
        by_hand = _asked(trainer, "lightning_module.automatic_optimization") is False
        yield Intent(
            micro_batches=None if by_hand else _number(trainer, "accumulate_grad_batches"),
            source="Trainer.accumulate_grad_batches",
            framework="lightning",
        )


def _composer(found: Found) -> Iterator[Intent]:
    """Composer cuts each batch of its loader into micro-batches of at most so many samples."""
    for trainer in found["composer"]:
        samples = _number(trainer, "state.train_dataloader.batch_size")
        largest = _number(trainer, "state.device_train_microbatch_size")
        yield Intent(
            micro_batches=None if samples is None or largest is None else -(-samples // largest),
            source="Trainer.device_train_microbatch_size",
            framework="composer",
            global_batch_samples=_product(samples, _num_ranks()),
        )


def _deepspeed(found: Found) -> Iterator[Intent]:
    for engine in found["deepspeed"]:
        # A script that sets the boundary, or calls step only there, says itself where an update ends.
        is_own = _asked(engine, "_is_gradient_accumulation_boundary") is not None
        is_own |= _asked(engine, "managed_gradient_accumulation()") is False
        yield Intent(
            micro_batches=None if is_own else _number(engine, "gradient_accumulation_steps()"),
            source="DeepSpeedEngine.gradient_accumulation_steps()",
            framework="deepspeed",
            global_batch_samples=None if is_own else _number(engine, "train_batch_size()"),
        )


def _accelerate(found: Found) -> Iterator[Intent]:
    owned = {id(_asked(trainer, "accelerator")) for trainer in found["trainer"]}
    numbers = [
        _number(one, "gradient_accumulation_steps") for one in found["accelerate"] if id(one) not in owned
    ]
    # The number outlives an Accelerator that was local to a function.
    state = _loaded("accelerate.state", "GradientState")
    if not found["accelerate"] and _asked(state, "_shared_state"):
        numbers = [_number(state, "().num_steps")]
    for micro_batches in numbers:
        intent = Intent(
            micro_batches=micro_batches,
            source="Accelerator.gradient_accumulation_steps",
            framework="accelerate",
        )
        yield _unless_one(intent)


def _fabric(found: Found) -> Iterator[Intent]:
    """Fabric leaves accumulation to the script."""
    return iter([Intent(source="Fabric", framework="fabric")] if found["fabric"] else [])


def said_by_user(
    micro_batches: int | None, global_batch_samples: int | None, *, names: tuple[str, str]
) -> Intent | None:
    """What the user said of an update; None where nothing was.

    Args:
        micro_batches, global_batch_samples: as in ``Intent``.
        names: that these two have where the user gives them.
    """
    if micro_batches is None and global_batch_samples is None:
        return None
    source = names[0] if micro_batches is not None else names[1]
    return Intent(micro_batches=micro_batches, global_batch_samples=global_batch_samples, source=source)
