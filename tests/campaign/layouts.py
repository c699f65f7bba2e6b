"""Layouts of jobs, and places in them, from which the cases are made."""

from __future__ import annotations

from typing import Any

from campaign.cases import NUM_UPDATES, Case, Fault, Setup


def one_rank() -> list[Setup]:
    """The layouts of one rank, each with checkpoints after every and every second update."""
    return [
        Setup(every=2),
        Setup(m=4),
        Setup(m=8, every=2),
        Setup(rows=20),
        Setup(noisy=True, every=2),
        Setup(workers=1),
        Setup(m=4, rows=20, every=2),
        Setup(noisy=True, m=8),
        Setup(own=True, every=2),
    ]


def two_ranks() -> list[Setup]:
    """The same on two."""
    return [
        Setup(ranks=2, every=2),
        Setup(ranks=2, noisy=True),
        Setup(ranks=2, rows=20, every=2),
        Setup(ranks=2, m=4, noisy=True, every=2),
    ]


class Turns:
    """Gives the layouts one after the other, so that every kind meets each of them."""

    def __init__(self) -> None:
        self._turn = 0

    def next(self, among: list[Setup]) -> Setup:
        self._turn += 1
        return among[self._turn % len(among)]


def places_in_update(setup: Setup, update: int) -> list[tuple[str, str, int]]:
    """Places of an update, in words, as ``places.py`` calls them, and the visit."""
    last = setup.window_of(update)
    return [
        ("micro-batch 1, before its forward", "before forward", 1),
        ("micro-batch 1, end of its backward", "end of backward", 1),
        ("middle micro-batch, after its forward", "between forward and backward", (last + 1) // 2),
        ("last micro-batch, before its backward", "begin of backward", last),
        ("last micro-batch, end of its backward", "end of backward", last),
    ]


# Where it is no run yet, and is begun once more in the same folder.
BEFORE = [
    ("half of the header", "write run/header.json.unfinished", 0),
    ("before the header's rename", "before rename to run/header.json", 0),
]
# In words, as places.py calls them, and after which update. All are visited whatever the layout.
BETWEEN = [
    ("before the first update", "before the first update", 0),
    ("between finish and record", "between finish and record", 3),
    ("half of a record is written", "write run/records.jsonl", 3),
    ("after the record", "after record", 3),
    ("before an evaluation", "before evaluation", 4),
    ("inside an evaluation", "in evaluation", 4),
    ("before a checkpoint", "before checkpoint", 4),
    ("first checkpoint, half of model.pt", "write unfinished/model.pt", 0),
    ("half of optimizers.pt", "write unfinished/optimizers.pt", 4),
    ("sync of rest.pt", "sync unfinished/rest.pt", 4),
    ("half of the manifest", "write unfinished/manifest.json", 4),
    ("before a checkpoint's rename", "before rename to checkpoints/update", 4),
    ("after a checkpoint's rename", "after rename to checkpoints/update", 4),
    ("rotation, before hiding the old one", "before rename to checkpoints/removed", 4),
    ("rotation, old one half removed", "remove removed/model.pt", 4),
    ("after a checkpoint", "after checkpoint", 4),
]
AT_THE_END = [
    ("before the export", "before export", NUM_UPDATES),
    ("export, sync of model.pt", "sync model.part/model.pt", NUM_UPDATES),
    ("export, before its rename", "before rename to run/model", NUM_UPDATES),
    ("half of the end", "write run/end.json.unfinished", NUM_UPDATES),
]


def everywhere(place: str) -> bool:
    """Whether every rank comes to a place; files are the leading one's."""
    return not any(word in place for word in ("write", "sync", "rename", "remove", "export"))


def on_all(
    what: str, words: str, setup: Setup, place: str, update: int, nth: int, *, ends: set[str], promise: Any
) -> Case:
    faults = [Fault(what=what, place=place, update=update, nth=nth, rank=r) for r in range(setup.ranks)]
    where = words if setup.ranks == 1 else f"{words}, both ranks"
    return Case(kind=what, place=where, setup=setup, faults=faults, ends=frozenset(ends), promise=promise)
