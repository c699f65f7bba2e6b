"""Checkpoints of models in stages: each stage's part in a file, put together by name when they are read.

What is put together is the state of the whole model, so a run may be resumed on other stages or on none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wholebatch.checkpoint_folder import write_file
from wholebatch.errors import UnsupportedError
from wholebatch.ranks.together import Together
from wholebatch.resume.contents import Contents, TrainingParts, unwrapped
from wholebatch.resume.sharded import FOLDER

# Of the leading rank's rest.pt: the stage of each of its names, and the files of the other stages.
STAGE_OF, FILES_OF_STAGES = "stage_of", "files_of_stages"

Files = dict[str, Any]
# What a checkpoint says of a parameter of an optimizer, and the state of it.
Entry = tuple[dict[str, Any], Any]


def stages_of_all(parts: TrainingParts, together: Together) -> list[dict[str, int]] | None:
    """The stage of each name that a rank has, by rank; None of a model that is not in stages.

    Raises:
        UnsupportedError: stages that call different parameters by one name.
    """
    stage_of = getattr(unwrapped(parts.model), "stage_of", None)
    if stage_of is None:
        return None
    found = together.gather(together.all_or_none(stage_of))
    known: dict[str, int] = {}
    for of_rank in found:
        for name, stage in of_rank.items():
            if known.setdefault(name, stage) != stage:
                raise UnsupportedError(
                    f"stages {known[name]} and {stage} of the pipeline both have {name!r}, so that nobody "
                    f"could tell them apart in a checkpoint; give the modules of each stage the names that "
                    f"they have in the whole model"
                )
    return found


def write_stages(
    unfinished: Path, contents: Contents, stage_of: Sequence[Mapping[str, int]], rank: int
) -> list[str]:
    """Write this rank's stages, unless a rank before it does; the leading rank's are in ``FILES``.

    Args:
        unfinished: the folder of the checkpoint.
        contents: what this rank holds.
        stage_of: the stage of each name, by rank.
        rank: number of this rank.

    Returns:
        The names of the files written, in ``parts``.

    Raises:
        UnsupportedError: stages that are themselves in parts over ranks.
    """
    if contents.apart:
        raise UnsupportedError(
            f"a stage of the pipeline is in parts over ranks ({len(contents.apart)} tensors, such as "
            f"{next(iter(contents.apart))}), and a checkpoint holds stages that are whole; leave the "
            f"stages plain"
        )
    own = set(stage_of[rank].values())
    if rank == 0 or own <= {stage for of_rank in stage_of[:rank] for stage in of_rank.values()}:
        return []
    part = {
        "model.pt": contents.files["model.pt"],
        "optimizers.pt": contents.files["optimizers.pt"],
        "rest.pt": {"objects": contents.files["rest.pt"]["objects"]},
        STAGE_OF: dict(stage_of[rank]),
    }
    (unfinished / FOLDER).mkdir(exist_ok=True)
    name = f"stage-{min(own):05}.pt"
    write_file(unfinished / FOLDER / name, functools.partial(torch.save, part))
    return [name]


def told_of_stages(stage_of: Mapping[str, int], written: Sequence[Sequence[str]]) -> dict[str, Any]:
    """What the leading rank's rest.pt says of its stages, and of the files of the others."""
    return {
        STAGE_OF: dict(stage_of),
        FILES_OF_STAGES: [f"{FOLDER}/{name}" for names in written for name in names],
    }


def joined(files: Files, read: Callable[[str], Files]) -> Files:
    """The state of the whole model, from that of the leading rank and the files of the other stages.

    Args:
        files: what ``FILES`` of a checkpoint hold.
        read: reads another of its files.

    Exactness: the tensors themselves.
    """
    rest = files["rest.pt"]
    if FILES_OF_STAGES not in rest:
        return files
    first = {**files, STAGE_OF: rest[STAGE_OF]}
    others = [read(name) for name in rest[FILES_OF_STAGES]]
    stage_of = {name: stage for part in (first, *others) for name, stage in part[STAGE_OF].items()}
    found = dict(files)
    model = {name: value for part in (first, *others) for name, value in part["model.pt"].items()}
    found["model.pt"] = {name: model[name] for name in sorted(model, key=stage_of.__getitem__)}
    optimizers = zip(*(part["optimizers.pt"]["optimizers"] for part in (first, *others)), strict=True)
    found["optimizers.pt"] = {
        **files["optimizers.pt"],
        "optimizers": [_joined_optimizer(of_parts, stage_of) for of_parts in optimizers],
    }
    objects = rest["objects"]
    for part in others:
        objects = _united(objects, part["rest.pt"]["objects"], "more")
    found["rest.pt"] = {**rest, "objects": objects}
    return found


def _joined_optimizer(of_parts: Sequence[Files], stage_of: Mapping[str, int]) -> Files:
    """One optimizer over the parameters of all stages, in their order, numbered anew."""
    groups = zip(*map(_entries_by_group, of_parts), strict=True)
    entries = [[entry for group in of_stages for entry in group] for of_stages in groups]
    for group in entries:
        group.sort(key=lambda entry: stage_of[entry[0]["name"]])
    return _numbered(of_parts[0], entries)


def _entries_by_group(optimizer: Files) -> list[list[Entry]]:
    state, groups = optimizer["state"]["state"], optimizer["state"]["param_groups"]
    return [
        [(facts, state.get(number)) for facts, number in zip(known, group["params"], strict=True)]
        for known, group in zip(optimizer["parameters"], groups, strict=True)
    ]


def _numbered(optimizer: Files, entries: list[list[Entry]]) -> Files:
    """An optimizer like that one, of these parameters and states."""
    state: dict[int, Any] = {}
    groups, number = [], 0
    for group, own in zip(optimizer["state"]["param_groups"], entries, strict=True):
        numbers = list(range(number, number + len(own)))
        state |= {n: kept for n, (_, kept) in zip(numbers, own, strict=True) if kept is not None}
        groups.append({**group, "params": numbers})
        number += len(own)
    return {
        **optimizer,
        "parameters": [[facts for facts, _ in own] for own in entries],
        "state": {**optimizer["state"], "state": state, "param_groups": groups},
    }


def _united(one: Any, other: Any, where: str) -> Any:
    """What several ranks hold of an object, by its names.

    Raises:
        UnsupportedError: under one name they hold different things.
    """
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        both = {name: _united(one[name], other[name], f"{where}.{name}") for name in one if name in other}
        return {**one, **other, **both}
    same = not isinstance(one, Tensor) and type(one) is type(other) and one == other
    if not same:
        raise UnsupportedError(
            f"{where} is not the same on two stages of the pipeline, and its name does not tell them "
            f"apart; name what belongs to a parameter as the parameter"
        )
    return one


def of_this_rank(files: Files, parts: TrainingParts, names: Sequence[Iterable[str]]) -> Files:
    """Of the state of the whole model what this rank holds; all of it where the model is not in stages.

    Args:
        files: of the whole model.
        parts: the run that they are loaded into.
        names: what each rank holds; what none does stays, to be refused.

    Exactness: the tensors themselves.
    """
    model = unwrapped(parts.model)
    own = set(model.state_dict())
    elsewhere = {name for of_rank in names for name in of_rank} - own
    if not elsewhere:
        return files
    found = dict(files)
    found["model.pt"] = {name: v for name, v in files["model.pt"].items() if name not in elsewhere}
    optimizers = [
        _numbered(
            one,
            [
                [entry for entry in group if entry[0]["name"] not in elsewhere]
                for group in _entries_by_group(one)
            ],
        )
        for one in files["optimizers.pt"]["optimizers"]
    ]
    found["optimizers.pt"] = {**files["optimizers.pt"], "optimizers": optimizers}
    objects = _without(files["rest.pt"]["objects"], elsewhere)
    found["rest.pt"] = {**files["rest.pt"], "objects": objects}
    return found


def _without(value: Any, names: set[str]) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {key: _without(one, names) for key, one in value.items() if key not in names}
