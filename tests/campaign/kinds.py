"""The cases of the campaign, made by rules: every kind of fault at its places, layout after layout.

The list is always the same, and nothing of the package or of torch is imported for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from campaign.cases import NUM_UPDATES, Case, Fault, Setup

DISK_FAULTS = ("ENOSPC", "EACCES", "EIO")


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


def stops(turns: Turns) -> Iterator[Case]:
    """Ctrl-C and SIGTERM, everywhere, on one rank and on two at once.

    In an update after which, with a checkpoint after every second, none would be due at the end.
    """
    codes = {"SIGINT": "130", "SIGTERM": "143", "SIGTERM, no grace": "143"}
    for what, code in codes.items():
        update = 4 if what == "SIGTERM, no grace" else 3
        for number, setup in enumerate([*one_rank(), *two_ranks()]):
            words, place, nth = places_in_update(setup, update)[number % 5]
            # Without time it is left before its next micro-batch, if it has one; else it is finished.
            left = what == "SIGTERM, no grace" and nth < setup.window_of(update)
            case = _on_all(what, words, setup, place, update, nth, ends={code}, promise="committed")
            yield replace(case, committed=update - left)
        for number, (words, place, update) in enumerate(BETWEEN):
            shared = _everywhere(place) and (number + len(what)) % 3
            setup = turns.next(two_ranks() if shared else one_rank())
            yield _on_all(what, words, setup, place, update, 1, ends={code}, promise="committed")
        for words, place, update in AT_THE_END[:3]:
            yield _on_all(
                what, words, turns.next(one_rank()), place, update, 1, ends={"0"}, promise="committed"
            )


def _everywhere(place: str) -> bool:
    """Whether every rank comes to a place; files are the leading one's."""
    return not any(word in place for word in ("write", "sync", "rename", "remove", "export"))


def _on_all(
    what: str, words: str, setup: Setup, place: str, update: int, nth: int, *, ends: set[str], promise: Any
) -> Case:
    faults = [Fault(what=what, place=place, update=update, nth=nth, rank=r) for r in range(setup.ranks)]
    where = words if setup.ranks == 1 else f"{words}, both ranks"
    return Case(kind=what, place=where, setup=setup, faults=faults, ends=frozenset(ends), promise=promise)


def apart(turns: Turns) -> Iterator[Case]:
    """Signals that two ranks get at different moments, or only one of them gets."""
    moments = [
        (("before forward", 3, 1), ("between finish and record", 3, 1)),
        (("end of backward", 3, 1), ("before evaluation", 4, 1)),
        (("after record", 3, 1), ("before forward", 4, 1)),
        (("before checkpoint", 2, 1), ("before forward", 3, 2)),
    ]
    for what, code in (("SIGTERM", "143"), ("SIGTERM, no grace", "143"), ("SIGINT", "130")):
        for first, then in moments:
            faults = [
                Fault(what=what, place=place, update=update, nth=nth, rank=rank)
                for rank, (place, update, nth) in enumerate((first, then))
            ]
            yield Case(
                kind=what,
                place="two ranks at different moments",
                setup=Setup(ranks=2, every=2, noisy=what == "SIGTERM"),
                faults=faults,
                ends=frozenset({code}),
                promise="committed",
            )
        for place, update in (("in forward", 3), ("in evaluation", 2)):
            yield Case(
                kind=what,
                place="one rank of two alone",
                setup=turns.next(two_ranks()),
                faults=[Fault(what=what, place=place, update=update, rank=1)],
                ends=frozenset({code}),
                others=frozenset({code}),
                promise="committed",
            )


def sudden(turns: Turns) -> Iterator[Case]:
    """SIGKILL and a second Ctrl-C, everywhere, on one rank."""
    for what, end in (("SIGKILL", "killed"), ("SIGINT twice", "KeyboardInterrupt")):
        for number, setup in enumerate(one_rank()):
            words, place, nth = places_in_update(setup, 3)[number % 5]
            yield _on_all(what, words, setup, place, 3, nth, ends={end}, promise="checkpoint")
        for words, place, update in [*BETWEEN, *AT_THE_END]:
            if what == "SIGINT twice" and place == "write run/end.json.unfinished":
                continue  # the job has left its handler by then
            yield _on_all(
                what, words, turns.next(one_rank()), place, update, 1, ends={end}, promise="checkpoint"
            )


def one_of_two(turns: Turns) -> Iterator[Case]:
    """One rank of two is killed, or interrupted twice; the other must end by itself."""
    everywhere = [("in forward", 2, 1), ("begin of backward", 3, 2), ("end of backward", 3, 2)]
    everywhere += [(place, update, 1) for _, place, update in BETWEEN if _everywhere(place)]
    everywhere += [("before the step", 3, 1), ("after the step", 3, 1)]
    leader = [("write unfinished/model.pt", 4, 1), ("before rename to checkpoints/update", 4, 1)]
    leader += [("after rename to checkpoints/update", 4, 1), ("sync model.part/model.pt", NUM_UPDATES, 1)]
    spots = [(rank, *spot) for rank in (0, 1) for spot in everywhere] + [(0, *spot) for spot in leader]
    for rank, place, update, nth in spots:
        setup = turns.next(two_ranks())
        fault = Fault(
            what="SIGKILL", place=place, update=update, nth=min(nth, setup.window_of(update)), rank=rank
        )
        yield Case(
            kind="SIGKILL of one rank of two",
            place=place,
            setup=setup,
            faults=[fault],
            ends=frozenset({"killed"}),
        )
    for place, update in (("in forward", 3), ("in evaluation", 4), ("before checkpoint", 4)):
        setup = turns.next(two_ranks())
        yield Case(
            kind="SIGINT twice on one rank of two",
            place=place,
            setup=setup,
            faults=[Fault(what="SIGINT twice", place=place, update=update, rank=1)],
            ends=frozenset({"KeyboardInterrupt"}),
        )


def mistakes(turns: Turns) -> Iterator[Case]:
    """Exceptions of the user's code and out of memory, in an update and beyond its point of no return."""
    for what, end in (("exception", "CampaignError"), ("out of memory", "JudgeError")):
        for place, update, nth in (
            ("before forward", 1, 1),
            ("in forward", 4, 1),
            ("between forward and backward", 4, 1),
            ("begin of backward", 4, 1),
            ("end of backward", 4, 2),
        ):
            setup = turns.next(one_rank())
            nth = min(nth, setup.window_of(update))
            faults = [Fault(what=what, place=place, update=update, nth=nth)]
            yield Case(
                kind=what,
                place=place,
                setup=setup,
                faults=faults,
                ends=frozenset({end}),
                promise="committed",
                committed=update - 1,
            )
        for place, nth in (("in forward", 1), ("between forward and backward", 2), ("end of backward", 1)):
            setup = Setup(ranks=2, every=2, noisy=nth == 2)
            yield Case(
                kind=what,
                place=f"{place}, one rank of two",
                setup=setup,
                faults=[Fault(what=what, place=place, update=4, nth=nth, rank=1)],
                ends=frozenset({end}),
                others=frozenset({"OtherRankFailedError"}),
                promise="committed",
                committed=3,
            )
        yield Case(
            kind=what,
            place="last synchronised backward, one rank of two",
            setup=Setup(ranks=2, every=2),
            faults=[Fault(what=what, place="end of backward", update=3, nth=2, rank=1)],
            ends=frozenset({"PoisonedWindowError"}),
        )
        for place in ("before the step", "after the step"):
            setup = turns.next([*one_rank(), *two_ranks()])
            yield _on_all(
                what, place, setup, place, 3, 1, ends={"PoisonedWindowError"}, promise="checkpoint"
            )
        raised = {"CampaignError"} if what == "exception" else {"OutOfMemoryError"}
        setup = turns.next(one_rank())
        yield _on_all(
            what, "in evaluation", setup, "in evaluation", 4, 1, ends=raised, promise="checkpoint"
        )


def data_and_loss(_turns: Turns) -> Iterator[Case]:
    """A sample that can't be read, a worker that is killed, a loss that is NaN."""
    where = "while an update draws its samples"
    for update, setup in (
        (1, Setup(own=True)),
        (4, Setup(own=True, m=4, every=2)),
        (4, Setup(own=True, rows=20, every=2)),
    ):
        yield Case(
            kind="bad sample",
            place=where,
            setup=setup,
            faults=[Fault(what="exception", place="reading a sample", update=update, nth=5)],
            ends=frozenset({"JudgeError"}),
            promise="committed",
            committed=update - 1,
        )
    for rank in (0, 1):
        yield Case(
            kind="bad sample",
            place=f"{where}, one rank of two",
            setup=Setup(ranks=2, every=2, noisy=rank == 1, own=True),
            faults=[Fault(what="exception", place="reading a sample", update=4, nth=2, rank=rank)],
            ends=frozenset({"JudgeError"}),
            others=frozenset({"OtherRankFailedError"}),
            promise="committed",
        )
    for what, kind in (("exception", "bad sample"), ("SIGKILL", "data worker is killed")):
        for nth in (3, 28, 36):
            yield Case(
                kind=kind,
                place="in a worker, ahead of the update",
                setup=Setup(workers=1, every=2, noisy=nth == 28, own=True, rows=20 if nth == 36 else 200),
                faults=[Fault(what=what, place="reading a sample", nth=nth)],
                ends=frozenset({"JudgeError"}),
                promise="committed",
            )
    nan = Fault(what="nan", place="loss", update=2)
    for setup in (Setup(every=2), Setup(noisy=True), Setup(m=8, every=2, rows=20)):
        killed = Fault(what="SIGKILL", place="between finish and record", update=4)
        yield Case(
            kind="NaN loss for one update",
            place="then killed later",
            setup=setup,
            faults=[nan, killed],
            ends=frozenset({"killed"}),
        )
        yield Case(
            kind="NaN loss for one update",
            place="to the end",
            setup=setup,
            faults=[nan],
            ends=frozenset({"0"}),
        )
    for setup in (Setup(every=2), Setup(noisy=True, rows=20), Setup(ranks=2, noisy=True, every=2)):
        yield Case(
            kind="NaN loss for good",
            place="until the job gives up",
            setup=setup,
            faults=[
                Fault(what="nan", place="loss, for good", update=update, rank=rank)
                for update in (2, 3, 4)
                for rank in range(setup.ranks)
            ],
            ends=frozenset({"JudgeError"}),
            promise="committed",
        )


def disk(turns: Turns) -> Iterator[Case]:
    """A full disk, a folder that may not be written, a disk that fails."""
    spots: list[tuple[str, int, str]] = [
        ("write run/header.json", 0, "RecordError"),
        ("write run/records.jsonl", 3, "RecordError"),
        ("write run/evaluations.jsonl", 2, "RecordError"),
        ("sync run/records.jsonl", 2, "RecordError"),
        ("make run/checkpoints", 0, "CheckpointError"),
        ("make checkpoints/unfinished", 4, "CheckpointError"),
        ("write unfinished/model.pt", 0, "CheckpointError"),
        ("write unfinished/optimizers.pt", 4, "CheckpointError"),
        ("write unfinished/rest.pt", 4, "CheckpointError"),
        ("write unfinished/manifest.json", 4, "CheckpointError"),
        ("sync unfinished/model.pt", 4, "CheckpointError"),
        ("sync unfinished/manifest.json", 4, "CheckpointError"),
        ("sync checkpoints/unfinished", 4, "CheckpointError"),
        ("before rename to checkpoints/update", 4, "CheckpointError"),
        ("sync run/checkpoints", 4, "CheckpointError"),
        ("before rename to checkpoints/removed", 4, "0"),
        ("make run/model.part", NUM_UPDATES, "RecordError"),
        ("sync model.part/model.pt", NUM_UPDATES, "RecordError"),
        ("before rename to run/model", NUM_UPDATES, "RecordError"),
        ("write run/end.json.unfinished", NUM_UPDATES, "RecordError"),
    ]
    for number, (place, update, end) in enumerate(spots):
        for what in DISK_FAULTS:
            if DISK_FAULTS.index(what) == number % 3:
                continue  # two of three at each place
            setup = turns.next(one_rank())
            fault = Fault(what=what, place=place, update=update)
            yield Case(kind=what, place=place, setup=setup, faults=[fault], ends=frozenset({end}))
        if number % 2 and end != "0":
            fault = Fault(what="ENOSPC", place=place, update=update)
            yield Case(
                kind="ENOSPC",
                place=f"{place}, two ranks",
                setup=turns.next(two_ranks()),
                faults=[fault],
                ends=frozenset({end}),
                # The end is written after the ranks have left each other.
                others=frozenset({"0"} if "end.json" in place else {end}),
            )


DAMAGES = (
    "cut short",
    "one byte changed",
    "file missing",
    "manifest damaged",
    "file too many",
    "empty folder",
)


def damaged(turns: Turns) -> Iterator[Case]:
    """The newest checkpoint is damaged between the end of a run and its going on."""
    for what in DAMAGES:
        for setups in (one_rank(), one_rank(), two_ranks()):
            setup = turns.next(setups)
            faults = [
                Fault(what="SIGINT", place="after record", update=4, rank=rank)
                for rank in range(setup.ranks)
            ]
            yield Case(
                kind="damaged checkpoint",
                place=what,
                setup=setup,
                faults=faults,
                damage=what,
                ends=frozenset({"130"}),
                promise="committed",
            )


def while_going_on(turns: Turns) -> Iterator[Case]:
    """A run that is gone on with is killed, or meets a full disk, while it moves its records."""
    spots = [
        ("before loading", "killed"),
        ("after loading", "killed"),
        ("sync run/abandoned.jsonl.unfinished", "RecordError"),
        ("before rename to run/abandoned.jsonl", "RecordError"),
        ("after rename to run/abandoned.jsonl", "RecordError"),
        ("before rename to run/records.jsonl", "RecordError"),
        ("after rename to run/records.jsonl", "RecordError"),
        ("before rename to run/evaluations.jsonl", "RecordError"),
        ("before rename to run/resumptions.jsonl", "RecordError"),
        ("after rename to run/resumptions.jsonl", "RecordError"),
        ("remove run/end.json", "RecordError"),
    ]
    for place, refusal in spots:
        for what, end in (("SIGKILL", "killed"), ("ENOSPC", refusal)):
            if end == "killed" and what != "SIGKILL":
                continue
            setup = Setup(every=3, noisy=turns.next(one_rank()).noisy, rows=turns.next(one_rank()).rows)
            # The second Ctrl-C leaves an end to be removed, and a record to be moved away.
            first = Fault(what="SIGINT twice", place="after record", update=4)
            yield Case(
                kind=f"{what} while going on",
                place=place,
                setup=setup,
                faults=[first],
                ends=frozenset({"KeyboardInterrupt"}),
                later=[Fault(what=what, place=place)],
                later_ends=frozenset({end}),
            )
    for rank in (0, 1):
        yield Case(
            kind="SIGKILL while going on",
            place="after loading, one rank of two",
            setup=Setup(ranks=2, every=3, noisy=True),
            faults=[Fault(what="SIGKILL", place="after record", update=4, rank=rank)],
            ends=frozenset({"killed"}),
            later=[Fault(what="SIGKILL", place="after loading", rank=rank)],
            later_ends=frozenset({"killed"}),
        )
    for what, end in (("SIGKILL", "killed"), ("SIGTERM", "143"), ("SIGINT twice", "KeyboardInterrupt")):
        yield Case(
            kind=f"{what}, and again later",
            place="in an update, and again in a later one",
            setup=Setup(every=2, noisy=True),
            faults=[Fault(what=what, place="in forward", update=3)],
            ends=frozenset({end}),
            later=[Fault(what=what, place="end of backward", update=4, nth=4)],
            later_ends=frozenset({end}),
        )


def all_cases() -> list[Case]:
    """Every case, in a fixed order."""
    turns = Turns()
    groups = (stops, apart, sudden, one_of_two, mistakes, data_and_loss, disk, damaged, while_going_on)
    return [case for group in groups for case in group(turns)]


def sample_of_cases(number: int) -> list[Case]:
    """So many cases, spread evenly over all, always the same."""
    cases = all_cases()
    return [cases[(2 * turn + 1) * len(cases) // (2 * number)] for turn in range(number)]
