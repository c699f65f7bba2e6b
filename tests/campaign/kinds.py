"""The cases of the campaign, made by rules: every kind of fault at its places, layout after layout.

The list is always the same, and nothing of the package or of torch is imported for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from campaign.cases import NUM_UPDATES, Case, Fault, Setup
from campaign.layouts import Turns, on_all, one_rank, two_ranks
from campaign.stopping import apart, in_the_export_after_ctrl_c, one_of_two, stops, sudden
from campaign.together import shared_models, under_deepspeed

DISK_FAULTS = ("ENOSPC", "EACCES", "EIO")


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
            yield on_all(
                what, place, setup, place, 3, 1, ends={"PoisonedWindowError"}, promise="checkpoint"
            )
        # After an update without a checkpoint of its own.
        for setup in (turns.next(one_rank()), turns.next(two_ranks())):
            yield Case(
                kind=what,
                place="in evaluation" if setup.ranks == 1 else "in evaluation, one rank of two",
                setup=replace(setup, every=3),
                faults=[Fault(what=what, place="in evaluation", update=4, rank=setup.ranks - 1)],
                ends=frozenset({end}),
                others=frozenset({"JudgeError"}),
                promise="committed",
                committed=4,
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
        ("write run/header.json.unfinished", 0, "RecordError"),
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
                others=frozenset({end}),
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
    """Every case of ranks that have all of the model, in a fixed order."""
    turns = Turns()
    groups = (stops, apart, sudden, one_of_two, mistakes, data_and_loss, disk, damaged, while_going_on)
    groups += (in_the_export_after_ctrl_c,)
    return [case for group in groups for case in group(turns)]


def shared_cases() -> list[Case]:
    """Every case of ranks that share one model, in a fixed order."""
    return list(shared_models(Turns()))


def sample_of(cases: list[Case], number: int) -> list[Case]:
    """So many of them, spread evenly, always the same."""
    return [cases[(2 * turn + 1) * len(cases) // (2 * number)] for turn in range(number)]


def deepspeed_cases() -> list[Case]:
    """Those under DeepSpeed, which the tests do not run."""
    return list(under_deepspeed(Turns()))
