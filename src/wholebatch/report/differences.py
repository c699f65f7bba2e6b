"""Where two runs differ: what their losses mean, their updates, how they train, how an update is split.

A resumption may change some of it; then a run's own value is told with the updates from which it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from wholebatch.record import Resumption, RunHeader
from wholebatch.report.words import flat
from wholebatch.run_folder import Run

# How much a difference matters, the most first.
Kind = Literal["losses", "updates", "training", "split"]
# Told as what they are, or of no consequence.
_SETTINGS_TOLD_ELSEWHERE = {
    "run.folder",
    "run.seed",
    "batch.global_batch_samples",
    "batch.global_batch_items",
    "batch.micro_batch_samples",
    "batch.tokens_per_micro_batch",
    "batch.tokens_alone",
    "batch.rows",
    "batch.cost_per_micro_batch",
    "batch.cost_per_position",
    "batch.cost_per_position_and_length",
    "batch.tail",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Something that is not the same in two runs.

    Args:
        kind: what it makes different: the meaning of the losses, the updates, how they train, or only
            how an update is split and rounded.
        name: what it is.
        first, second: what it is in each run, as plain data.
    """

    kind: Kind
    name: str
    first: Any
    second: Any


def differences_of(first: Run, second: Run) -> Iterator[Difference]:
    """Where two runs differ, what matters most first."""
    pair = _Pair(first, second)
    yield from _in_losses(pair)
    yield from _in_updates(pair)
    yield from _in_training(pair)
    yield from _in_split(pair)


class _Pair:
    """Two runs, and what is looked up in both."""

    def __init__(self, first: Run, second: Run) -> None:
        self.runs = first, second
        self.headers = first.header, second.header
        self.parts = _parts(first), _parts(second)
        settings = _settings(self.parts[0]), _settings(self.parts[1])
        told = self._told_as_facts(settings)
        one, other = (
            {name: value for name, value in each.items() if name not in told} for each in settings
        )
        self.settings = one, other

    def _told_as_facts(self, settings: tuple[dict[str, Any], dict[str, Any]]) -> set[str]:
        """The settings that are among what the headers know of model and data, with the same values."""
        facts = [
            {f"model.{key}": value for key, value in header.model.items()}
            | {f"data.{key}": value for key, value in header.dataset.items()}
            for header in self.headers
        ]
        return {
            name
            for name in facts[0].keys() & facts[1].keys()
            if all(each.get(name) == known[name] for each, known in zip(settings, facts, strict=True))
        }


def _of_both(kind: Kind, name: str, first: Any, second: Any) -> Iterator[Difference]:
    if first != second:
        yield Difference(kind=kind, name=name, first=first, second=second)


def _of_each_key(
    kind: Kind,
    name: str,
    both: tuple[Mapping[str, Any], Mapping[str, Any]],
    wanted: Callable[[str], bool] = lambda _key: True,
) -> Iterator[Difference]:
    """The differences of two mappings, key by key, called after ``name`` where they have one."""
    first, second = both
    for key in dict.fromkeys([*first, *second]):
        if wanted(key):
            words = f"{name}{key.replace('_', ' ')}" if name else key
            yield from _of_both(kind, words, first.get(key), second.get(key))


def _in_losses(pair: _Pair) -> Iterator[Difference]:
    a, b = pair.headers
    yield from _of_both("losses", "divided by", a.normalisation, b.normalisation)
    moved = _other_name_alone(a.dataset, b.dataset)
    yield from _of_each_key("training" if moved else "losses", "data: ", (a.dataset, b.dataset))
    yield from _of_each_key("losses", "model: ", (a.model, b.model), _is_vocabulary)
    yield from _of_each_key("losses", "", pair.settings, _is_vocabulary)


def _in_updates(pair: _Pair) -> Iterator[Difference]:
    (a, b), runs = pair.headers, pair.runs
    yield from _of_both("updates", "global batch, samples", a.global_batch_samples, b.global_batch_samples)
    yield from _of_both(
        "updates", "global batch, items at most", a.global_batch_items, b.global_batch_items
    )
    yield from _of_both("updates", "tail", a.tail, b.tail)
    yield from _of_both("updates", "weighting", *map(_weighting, runs))
    yield from _other_items(*runs)


def _in_training(pair: _Pair) -> Iterator[Difference]:
    a, b = pair.headers

    def wanted(key: str) -> bool:
        return not _is_vocabulary(key) and key.partition(".")[0] not in ("rows", "rows_probe")

    yield from _of_each_key("training", "seed: ", (a.seeds, b.seeds))
    yield from _of_each_key("training", "model: ", (a.model, b.model), wanted)
    yield from _of_each_key(
        "training", "", pair.settings, lambda key: wanted(key) and key not in _SETTINGS_TOLD_ELSEWHERE
    )


def _in_split(pair: _Pair) -> Iterator[Difference]:
    a, b = pair.headers

    def in_parts(name: str, attribute: str) -> Iterator[Difference]:
        told = (_told([(p.begins, getattr(p.facts, attribute)) for p in each]) for each in pair.parts)
        yield from _of_both("split", name, *told)

    yield from in_parts("precision", "precision")
    if all(wide := [_added_up_in(run) for run in pair.runs]):
        yield from _of_both("split", "added up in", *wide)
    yield from in_parts("m, samples of a micro-batch", "micro_batch_samples")
    yield from in_parts("A, micro-batches of a window", "micro_batches_per_window")
    yield from in_parts("tokens of a micro-batch at most", "tokens_per_micro_batch")
    yield from in_parts("rows", "rows")
    yield from in_parts("D, replicas", "replicas")
    yield from _of_each_key("split", "", pair.settings, lambda key: key.startswith("batch.cost_"))
    yield from _of_each_key("split", "layout: ", (_layout(pair.parts[0]), _layout(pair.parts[1])))
    yield from _of_each_key("split", "version: ", (a.versions, b.versions))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """A run from one start to the next: its beginning, or a resumption.

    Args:
        begins: attempted updates before it.
        facts: the split, layout and precision that it had.
        settings: that it had, by dotted name.
    """

    begins: int
    facts: RunHeader | Resumption
    settings: dict[str, Any]


def _parts(run: Run) -> list[_Part]:
    """The parts of a run of which updates are left: what a resumption abandoned is none."""
    parts = [_Part(begins=0, facts=run.header, settings=flat(run.header.settings))]
    settings = parts[0].settings
    for each in run.resumptions:
        changed = {name: pair[-1] for name, pair in each.changed_settings.items()}
        dropped = {name for name in settings for key in changed if name.startswith(f"{key}.")}
        settings = {name: settings[name] for name in settings if name not in dropped} | flat(changed)
        parts = [part for part in parts if part.begins < each.updates_attempted]
        parts.append(_Part(begins=each.updates_attempted, facts=each, settings=settings))
    return parts


def _settings(parts: Sequence[_Part]) -> dict[str, Any]:
    names = dict.fromkeys(name for part in parts for name in part.settings)
    return {name: _told([(part.begins, part.settings.get(name)) for part in parts]) for name in names}


def _layout(parts: Sequence[_Part]) -> dict[str, Any]:
    names = dict.fromkeys(name for part in parts for name in part.facts.layout)
    return {name: _told([(part.begins, part.facts.layout.get(name)) for part in parts]) for name in names}


def _told(values: Sequence[tuple[int, Any]]) -> Any:
    """A value that stayed the same as it is; one that a resumption changed in words, with the updates."""
    changes = [pair for index, pair in enumerate(values) if not index or pair[1] != values[index - 1][1]]
    first, *others = changes
    if not others:
        return first[1]
    return ", ".join([str(first[1]), *(f"{value} after update {begins:,}" for begins, value in others)])


def _other_name_alone(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two data sets have another name, such as a path, and the same of everything counted."""
    counted = ("train_items", "held_out_items")
    rest = [{key: value for key, value in each.items() if key != "name"} for each in (one, other)]
    return rest[0] == rest[1] and all(one.get(key) is not None for key in counted) and one != other


def _is_vocabulary(key: str) -> bool:
    return "vocab" in key or "tokenizer" in key


def _weighting(run: Run) -> str:
    means = any(r.weighting == "micro_batch_means" for r in run.records)
    return "micro_batch_means, not equal to the big batch" if means else "items"


def _added_up_in(run: Run) -> str:
    return ", ".join(dict.fromkeys(r.accumulated_in for r in run.records if r.accumulated_in))


def _other_items(first: Run, second: Run) -> Iterator[Difference]:
    """N of the first update in which it differs though its samples are the same."""
    for a, b in zip(first.records, second.records, strict=False):
        if a.sample_digest and a.sample_digest == b.sample_digest and a.items != b.items:
            name = f"items of update {a.updates_attempted:,}"
            yield Difference(kind="losses", name=name, first=a.items, second=b.items)
            return
