"""Settings in: from TOML and the command line, checked. Settings out: as TOML with their meaning.

A file gives only what it changes; the rest is the default in ``settings.py``. A key that does not
exist is refused with the nearest that does, because a misspelt setting that is ignored trains the
wrong thing.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import inspect
import json
import re
import textwrap
import tomllib
from collections.abc import Sequence
from datetime import date, time
from pathlib import Path
from typing import Any, cast, get_args, get_origin, get_type_hints

from wholebatch.errors import UsageError
from wholebatch.train.settings import BatchConfig, TrainConfig, default_warmup_updates
from wholebatch.whole_numbers import LARGEST_NUMBER

Tables = dict[str, Any]
# Keys of [batch] of which one is given: the first has a default, which the other takes the place of.
_ONE_OF = (
    ("global_batch_samples", "global_batch_items"),
    ("micro_batch_samples", "tokens_per_micro_batch"),
)


def load_config(path: str | Path | None = None, changes: Sequence[str] = ()) -> TrainConfig:
    """Read settings from a TOML file and the command line, over the defaults.

    Args:
        path: a TOML file; None for the defaults alone.
        changes: ``section.key=value`` each, with a TOML value or a plain text; they win over the file,
            and later ones over earlier ones.

    Returns:
        The settings, checked.

    Raises:
        UsageError: no such file, not TOML, an unknown key (the nearest is offered), a value of the
            wrong type, or a number outside its range.
    """
    tables: Tables = {}
    source = "the settings"
    if path is not None:
        source = str(path)
        try:
            tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise UsageError(f"{path} can't be read: {error.strerror}") from error
        except ValueError as error:
            raise UsageError(f"{path} is not TOML: {error}") from error
        except RecursionError as error:
            raise UsageError(f"{path} has more lists or tables in each other than can be read") from error
    if changes:
        source += " with --set"
    return config_from_dict(with_changes(tables, changes), source=source)


def with_changes(tables: Tables, changes: Sequence[str]) -> Tables:
    """The tables with every ``section.key=value`` put in.

    Raises:
        UsageError: a change without a section, a key or a value.
    """
    changed = copy.deepcopy(tables)
    for change in changes:
        name, equals, text = change.partition("=")
        path = name.strip().split(".")
        if not equals or len(path) < 2 or not all(path):
            raise UsageError(
                f"--set {change}: write section.key=value, such as batch.micro_batch_samples=8"
            )
        table: Any = changed
        for part in path[:-1]:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise UsageError(f"--set {change}: {part} is no section, it has the value {_shown(table)}")
        table[path[-1]] = _value_of(text.strip())
    _drop_replaced(changed, {change.partition("=")[0].replace(" ", "") for change in changes})
    return changed


def _drop_replaced(tables: Tables, changed: set[str]) -> None:
    """Take out the one of two keys whose other one was changed on the command line."""
    for pair in _ONE_OF:
        for key, other in (pair, pair[::-1]):
            if f"batch.{key}" in changed and f"batch.{other}" not in changed and tables["batch"][key]:
                tables["batch"].pop(other, None)


def _value_of(text: str) -> Any:
    """A TOML value; what is none is a text, so that names need no quotes in the shell."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, KeyError, RecursionError):
        return text


def config_from_dict(tables: Tables, *, source: str = "settings") -> TrainConfig:
    """Build the settings from nested plain data, as ``TrainConfig.to_dict`` gives it.

    Args:
        tables: a section name to a table of its keys.
        source: named in messages.

    Raises:
        UsageError: as for ``load_config``.
    """
    sections = get_type_hints(TrainConfig)
    _refuse_unknown(tables, sections, source, "section")
    built: Tables = {}
    for name, kind in sections.items():
        table = tables.get(name, {})
        if not isinstance(table, dict):
            raise UsageError(f"{source}: {name} is a section, [{name}], not the value {_shown(table)}")
        built[name] = _section(kind, table, name, source)
    # All lengths of a schedule are in one unit, so there is a default for none of them where one is given.
    if not any(key.startswith(("warmup_", "decay_end_")) for key in tables.get("schedule", {})):
        warmup = default_warmup_updates(built["run"].num_updates)
        built["schedule"] = dataclasses.replace(built["schedule"], warmup_updates=warmup)
    built["batch"] = _one_of_each(built["batch"], tables.get("batch", {}), source)
    config = TrainConfig(**built)
    _check_ranges(config, source)
    _check_names(config, source)
    return config


def _one_of_each(batch: BatchConfig, given: Tables, source: str) -> BatchConfig:
    """The batch with one of two keys at 0 where the other is given."""
    for default, other in _ONE_OF:
        one, two = getattr(batch, default), getattr(batch, other)
        if two and default not in given:
            batch = dataclasses.replace(batch, **cast("dict[str, Any]", {default: 0}))
        elif bool(one) == bool(two):
            these = f"both, {one} and {two}" if one else "none of them"
            raise UsageError(
                f"{source}: one of batch.{default} and batch.{other} says what it is, and here are "
                f"{these}; give one and leave the other out, or set it to 0"
            )
    return batch


def config_text(config: TrainConfig) -> str:
    """The settings as TOML, every key with its meaning and unit above it; reads back as the same."""
    lines: list[str] = []
    for name, kind in get_type_hints(TrainConfig).items():
        section = getattr(config, name)
        head, meanings = _meanings(kind)
        lines += ["", *_comment(head), f"[{name}]"]
        for field in dataclasses.fields(section):
            lines += [
                *_comment(meanings[field.name]),
                f"{field.name} = {_toml(getattr(section, field.name))}",
            ]
    return "\n".join(lines[1:]) + "\n"


def _comment(text: str) -> list[str]:
    return [f"# {line}" for line in textwrap.wrap(text, 96)]


def _meanings(kind: type) -> tuple[str, dict[str, str]]:
    """The first line of a section's docstring, and what its ``Args`` say of each key."""
    text = inspect.getdoc(kind) or ""
    head, _, arguments = text.partition("\n\nArgs:\n")
    entries = re.split(r"\n    (?=\w+: )", "\n" + arguments)[1:]
    parted = (entry.partition(": ") for entry in entries)
    return " ".join(head.split()), {name: " ".join(meaning.split()) for name, _, meaning in parted}


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        pairs = ", ".join(f"{_key(key)} = {_toml(one)}" for key, one in value.items())
        return f"{{ {pairs} }}" if pairs else "{}"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, str):
        return _text(value)
    return json.dumps(value) if isinstance(value, bool) else repr(value)


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _text(key)


def _text(text: str) -> str:
    # As JSON writes it, but for two things: TOML has no surrogate pairs, and no bare delete.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _section(kind: Any, table: Tables, name: str, source: str) -> Any:
    types = get_type_hints(kind)
    _refuse_unknown(table, types, source, f"key in [{name}]")
    values = {key: _typed(value, types[key], f"{source}: {name}.{key}") for key, value in table.items()}
    return kind(**values)


def _refuse_unknown(table: Tables, known: Tables, source: str, what: str) -> None:
    for key in table:
        if key in known:
            continue
        nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.4)
        hint = f"did you mean {nearest[0]}?" if nearest else f"there are {', '.join(known)}"
        raise UsageError(f"{source}: no {what} is called {key!r}; {hint}")


def _typed(value: Any, kind: Any, where: str) -> Any:
    family = get_origin(kind) or kind
    if family in (list, dict):
        if not isinstance(value, family):
            raise UsageError(f"{where} is {_shown(value)}; it takes {_TYPE_NAMES[family]}")
        if family is list:
            return [_typed(one, str, where) for one in value]
        _refuse_dates(value, where)
        return dict(value)
    choices = get_args(kind)
    if choices:
        if value not in choices:
            nearest = difflib.get_close_matches(str(value), map(str, choices), n=1)
            meant = f"; did you mean {nearest[0]!r}?" if nearest else ""
            raise UsageError(
                f"{where} is {_shown(value)}; it can be {' or '.join(map(repr, choices))}{meant}"
            )
        return value
    if kind is float and type(value) is int:
        try:
            return float(value)
        except OverflowError:
            raise UsageError(f"{where} is {_shown(value)}, which is above all numbers here") from None
    if type(value) is not kind:  # a bool is not an int here
        raise UsageError(f"{where} is {_shown(value)}; it takes {_TYPE_NAMES[kind]}")
    return value


def _refuse_dates(value: Any, where: str) -> None:
    """The header of a run is JSON, which has none."""
    if isinstance(value, dict | list):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, one in pairs:
            _refuse_dates(one, f"{where}.{key}")
    elif isinstance(value, date | time):
        raise UsageError(f"{where} is the date or time {value}; write it as a text, in quotes")


def _shown(value: Any) -> str:
    """What the file gave; the beginning of what is long."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no number of more than 4300 digits
        return "a number of thousands of digits"
    return text if len(text) <= 60 else f"{text[:40]}... ({len(text)} characters)"


_TYPE_NAMES = {
    int: "a whole number",
    float: "a number",
    str: "a text in quotes",
    bool: "true or false",
    list: 'a list of texts, such as ["a.txt"]',
    dict: "a table, such as { momentum = 0.9 }",
}

# Lowest and highest value, both allowed.
_MANY = 2**40
_RANGES: dict[str, tuple[float, float]] = {
    "run.num_updates": (1, _MANY),
    "run.seed": (0, LARGEST_NUMBER),  # what SampleOrder takes
    "run.evaluate_every_updates": (1, _MANY),
    "run.print_every_updates": (1, _MANY),
    "batch.global_batch_samples": (0, _MANY),
    "batch.global_batch_items": (0, 2**53),
    "batch.micro_batch_samples": (0, _MANY),
    "batch.tokens_per_micro_batch": (0, _MANY),
    "batch.tokens_alone": (0, _MANY),
    "batch.cost_per_micro_batch": (-1, 1e12),
    "batch.cost_per_position": (0, 1e12),
    "batch.cost_per_position_and_length": (0, 1e12),
    "parallel.shards": (0, 2**20),
    "parallel.zero_stage": (0, 3),
    "parallel.tensor_parallel": (1, 2**10),
    "parallel.pipeline_parallel": (1, 2**10),
    "parallel.pipeline_virtual_stages": (1, 2**10),
    "parallel.context_parallel": (1, 2**10),
    "data.held_out_one_in": (2, 10**6),
    "data.max_tokens_per_sample": (2, 2**24),
    "data.workers": (0, 1024),
    "objective.masked_share": (0.001, 0.999),
    "model.layers": (0, 1000),
    "model.width": (0, 2**16),
    "model.heads": (0, 2**12),
    "model.dropout": (0, 0.99),
    "lora.rank": (0, 2**14),
    "lora.alpha": (0, 1e6),
    "lora.dropout": (0, 0.99),
    "optimizer.learning_rate": (0, 1e3),
    "optimizer.weight_decay": (0, 1e3),
    "optimizer.clip_grad_norm": (0, 1e12),
    "schedule.warmup_updates": (0, _MANY),
    "schedule.warmup_samples": (0, 2**53),
    "schedule.warmup_items": (0, 2**53),
    "schedule.decay_end_updates": (0, _MANY),
    "schedule.decay_end_samples": (0, 2**53),
    "schedule.decay_end_items": (0, 2**53),
    "schedule.final_share": (0, 1),
    "precision.initial_loss_scale": (1, 2.0**32),
    "average.decay_per_update": (0, 0.9999999),
    "checkpoints.every_updates": (0, _MANY),
    "checkpoints.keep_last": (1, 10**6),
    "proof.max_samples": (2, _MANY),
}


# Longer ones are refused by every file system there is.
_LONGEST_NAME_BYTES, _LONGEST_PATH_BYTES = 255, 4095
_NAMES = (
    "run.folder",
    "data.source",
    "data.files",
    "data.held_out_files",
    "data.tokenizer",
    "model.source",
    "optimizer.name",
)


def _check_names(config: TrainConfig, source: str) -> None:
    """Refuse what can't name a file, before the system does so in words of its own."""
    for name in _NAMES:
        section, key = name.split(".")
        value = getattr(getattr(config, section), key)
        for one in value if isinstance(value, list) else [value]:
            encoded = one.encode("utf-8", "surrogatepass")
            if "\0" in one:
                raise UsageError(f"{source}: {name} is {_shown(one)}; no file has a NUL in its name")
            if len(encoded) > _LONGEST_PATH_BYTES or any(
                len(part) > _LONGEST_NAME_BYTES for part in encoded.split(b"/")
            ):
                raise UsageError(
                    f"{source}: {name} is {_shown(one)}; a name has {_LONGEST_NAME_BYTES} bytes at most, "
                    f"and a path {_LONGEST_PATH_BYTES}"
                )


def _check_ranges(config: TrainConfig, source: str) -> None:
    for name, (low, high) in _RANGES.items():
        section, key = name.split(".")
        value = getattr(getattr(config, section), key)
        if not low <= value <= high:  # NaN neither
            raise UsageError(f"{source}: {name} is {_shown(value)}; it goes from {low} to {high}")
