"""The settings of the training job: a tree of frozen dataclasses, read from TOML.

A file gives only what it changes; the rest is the default below. A key that does not exist is
refused with the nearest that does, because a misspelt setting that is ignored trains the wrong thing.
"""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

from wholebatch.errors import UsageError
from wholebatch.layout import LARGEST_NUMBER


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """How long to train, and what to write when.

    Args:
        num_updates: length of the run, in updates to attempt; the learning-rate schedule ends with
            the last of them.
        seed: of the first parameters, the order of the samples and dropout.
        evaluate_every_updates: held-out evaluations come before the first update, at this
            interval, and after the last.
        print_every_updates: lines of progress where the output is not a terminal.
        folder: where the header and the records go; empty for ``runs/`` and the date and time.
    """

    num_updates: int = 150
    seed: int = 0
    evaluate_every_updates: int = 50
    print_every_updates: int = 10
    folder: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchConfig:
    """The global batch. Ranks do not appear: they share it, and it stays the same.

    Args:
        global_batch_samples: samples of one update, over all replicas.
        micro_batch_samples: samples of one forward on one replica.
        tail: "partial" uses the samples at the end of an epoch that do not fill a global batch, with
            their own denominator; "drop" leaves them out and records how many.
    """

    global_batch_samples: int = 32
    micro_batch_samples: int = 4
    tail: Literal["partial", "drop"] = "partial"


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """The text.

    Args:
        max_tokens_per_sample: longer paragraphs are cut into pieces; the begin mark counts.
        held_out_one_in: about one paragraph in so many is held out, chosen by a hash of its text.
    """

    max_tokens_per_sample: int = 256
    held_out_one_in: int = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """A small GPT.

    Args:
        layers: transformer blocks.
        width: features of a position.
        heads: attention heads; divides the width.
        dropout: probability that a feature is dropped. With dropout the update depends on the random
            numbers that each micro-batch draws, and so on the split.
        dtype: of parameters and forward.
    """

    layers: int = 3
    width: int = 96
    heads: int = 4
    dropout: float = 0.0
    dtype: Literal["float32", "float64"] = "float32"


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """AdamW, warmed up linearly and then lowered along a cosine, per update.

    Args:
        learning_rate: the highest.
        final_learning_rate_share: share of it that is left at the last update.
        warmup_updates: updates until it is reached.
        beta1: decay of the mean of gradients.
        beta2: decay of the mean of squared gradients.
        weight_decay: on matrices only.
        clip_grad_norm: highest global gradient norm; 0 is off, the window's None, which TOML can't say.
    """

    learning_rate: float = 3e-3
    final_learning_rate_share: float = 0.1
    warmup_updates: int = 20
    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.1
    clip_grad_norm: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ProofConfig:
    """What is shown on the first global batch, before training.

    Args:
        check_first_batch: compare the accumulated update with that of the big batch.
        train_if_not_equal: go on although they differ (as they do with dropout).
    """

    check_first_batch: bool = True
    train_if_not_equal: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """All settings, in the sections of the TOML file."""

    run: RunConfig = field(default_factory=RunConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    proof: ProofConfig = field(default_factory=ProofConfig)

    def to_dict(self) -> dict[str, Any]:
        """The settings as nested plain data."""
        return dataclasses.asdict(self)


def load_config(path: str | Path | None = None, **run_changes: Any) -> TrainConfig:
    """Read settings from a TOML file over the defaults.

    Args:
        path: a TOML file; None for the defaults alone.
        **run_changes: keys of the section ``run`` that win over the file; None changes nothing.

    Returns:
        The settings, checked.

    Raises:
        UsageError: no such file, not TOML, an unknown key (the nearest is offered), a value of the
            wrong type, or a number outside its range.
    """
    tables: dict[str, Any] = {}
    source = "the default settings"
    if path is not None:
        source = str(path)
        try:
            tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise UsageError(f"{path} can't be read: {error.strerror}") from error
        except ValueError as error:
            raise UsageError(f"{path} is not TOML: {error}") from error
    changes = {key: value for key, value in run_changes.items() if value is not None}
    run = tables.get("run", {})
    if changes and isinstance(run, dict):  # config_from_dict refuses what is no section
        tables = {**tables, "run": {**run, **changes}}
    return config_from_dict(tables, source=source)


def config_from_dict(tables: dict[str, Any], *, source: str = "settings") -> TrainConfig:
    """Build the settings from nested plain data, as ``TrainConfig.to_dict`` gives it.

    Args:
        tables: a section name to a table of its keys.
        source: named in messages.

    Raises:
        UsageError: as for ``load_config``.
    """
    sections = get_type_hints(TrainConfig)
    _refuse_unknown(tables, sections, source, "section")
    built: dict[str, Any] = {}
    for name, kind in sections.items():
        table = tables.get(name, {})
        if not isinstance(table, dict):
            raise UsageError(f"{source}: {name} is a section, [{name}], not the value {_shown(table)}")
        built[name] = _section(kind, table, name, source)
    config = TrainConfig(**built)
    _check_ranges(config, source)
    return config


def _section(kind: Any, table: dict[str, Any], name: str, source: str) -> Any:
    types = get_type_hints(kind)
    _refuse_unknown(table, types, source, f"key in [{name}]")
    return kind(
        **{key: _typed(value, types[key], f"{source}: {name}.{key}") for key, value in table.items()}
    )


def _refuse_unknown(table: dict[str, Any], known: dict[str, Any], source: str, what: str) -> None:
    for key in table:
        if key in known:
            continue
        nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.4)
        hint = f"did you mean {nearest[0]}?" if nearest else f"there are {', '.join(known)}"
        raise UsageError(f"{source}: no {what} is called {key!r}; {hint}")


def _typed(value: Any, kind: Any, where: str) -> Any:
    choices = get_args(kind)
    if choices:
        if value not in choices:
            raise UsageError(f"{where} is {_shown(value)}; it can be {' or '.join(map(repr, choices))}")
        return value
    if kind is float and type(value) is int:
        try:
            return float(value)
        except OverflowError:
            raise UsageError(f"{where} is {_shown(value)}, which is above all numbers here") from None
    if type(value) is not kind:  # a bool is not an int here
        raise UsageError(f"{where} is {_shown(value)}; it takes {_TYPE_NAMES[kind]}")
    return value


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
}

# Lowest and highest value, both allowed.
_RANGES: dict[str, tuple[float, float]] = {
    "run.num_updates": (1, 2**40),
    "run.seed": (0, LARGEST_NUMBER),  # what SampleOrder takes
    "run.evaluate_every_updates": (1, 2**40),
    "run.print_every_updates": (1, 2**40),
    "batch.global_batch_samples": (1, 2**40),
    "batch.micro_batch_samples": (1, 2**40),
    "data.max_tokens_per_sample": (2, 2**16),
    "data.held_out_one_in": (2, 1000),
    "model.layers": (1, 1000),
    "model.width": (1, 2**16),
    "model.heads": (1, 2**12),
    "model.dropout": (0, 0.99),
    "optimizer.learning_rate": (0, 1e3),
    "optimizer.final_learning_rate_share": (0, 1),
    "optimizer.warmup_updates": (0, 2**40),
    "optimizer.beta1": (0, 0.999999),
    "optimizer.beta2": (0, 0.999999),
    "optimizer.weight_decay": (0, 1e3),
    "optimizer.clip_grad_norm": (0, 1e12),
}


def _check_ranges(config: TrainConfig, source: str) -> None:
    for name, (low, high) in _RANGES.items():
        section, key = name.split(".")
        value = getattr(getattr(config, section), key)
        if not low <= value <= high:  # NaN neither
            raise UsageError(f"{source}: {name} is {_shown(value)}; it goes from {low} to {high}")
    width, heads = config.model.width, config.model.heads
    if width % heads:
        nearest = sorted((h for h in range(1, width + 1) if width % h == 0), key=lambda h: abs(h - heads))
        raise UsageError(
            f"{source}: model.width {width} is not divisible by model.heads {heads}; "
            f"heads that divide it: {', '.join(map(str, sorted(nearest[:4])))}"
        )
