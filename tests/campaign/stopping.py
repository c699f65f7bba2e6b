"""The cases in which somebody ends the job: signals that ask it to stop, and those that do not ask."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from campaign.cases import NUM_UPDATES, Case, Fault, Setup
from campaign.layouts import (
    AT_THE_END,
    BEFORE,
    BETWEEN,
    Turns,
    everywhere,
    on_all,
    one_rank,
    places_in_update,
    two_ranks,
)


def stops(turns: Turns) -> Iterator[Case]:
    """Ctrl-C, SIGTERM and SIGHUP, everywhere, on one rank and on two at once.

    In an update after which, with a checkpoint after every second, none would be due at the end.
    """
    codes = {"SIGINT": "130", "SIGTERM": "143", "SIGTERM, no grace": "143", "SIGHUP": "129"}
    for what, code in codes.items():
        update = 4 if what == "SIGTERM, no grace" else 3
        for number, setup in enumerate([*one_rank(), *two_ranks()]):
            words, place, nth = places_in_update(setup, update)[number % 5]
            # Without time it is left before its next micro-batch, if it has one; else it is finished.
            left = what == "SIGTERM, no grace" and nth < setup.window_of(update)
            case = on_all(what, words, setup, place, update, nth, ends={code}, promise="committed")
            yield replace(case, committed=update - left)
        if what == "SIGHUP":
            continue  # beyond its code it is a SIGTERM
        for number, (words, place, update) in enumerate(BETWEEN):
            shared = everywhere(place) and (number + len(what)) % 3
            setup = turns.next(two_ranks() if shared else one_rank())
            yield on_all(what, words, setup, place, update, 1, ends={code}, promise="committed")
        for words, place, update in AT_THE_END:
            yield on_all(
                what, words, turns.next(one_rank()), place, update, 1, ends={"0"}, promise="committed"
            )


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
            yield on_all(what, words, setup, place, 3, nth, ends={end}, promise="checkpoint")
        for words, place, update in [*BEFORE, *BETWEEN, *AT_THE_END]:
            yield on_all(
                what, words, turns.next(one_rank()), place, update, 1, ends={end}, promise="checkpoint"
            )


def one_of_two(turns: Turns) -> Iterator[Case]:
    """One rank of two is killed, or interrupted twice; the other must end by itself."""
    shared = [("in forward", 2, 1), ("begin of backward", 3, 2), ("end of backward", 3, 2)]
    shared += [(place, update, 1) for _, place, update in BETWEEN if everywhere(place)]
    shared += [("before the step", 3, 1), ("after the step", 3, 1)]
    leader = [("write unfinished/model.pt", 4, 1), ("before rename to checkpoints/update", 4, 1)]
    leader += [("after rename to checkpoints/update", 4, 1), ("sync model.part/model.pt", NUM_UPDATES, 1)]
    spots = [(rank, *spot) for rank in (0, 1) for spot in shared] + [(0, *spot) for spot in leader]
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


def in_the_export_after_ctrl_c(turns: Turns) -> Iterator[Case]:
    """The model of an interrupted run is written once that is saved; nothing there costs an update."""
    ways = (("SIGKILL", "killed"), ("SIGINT", "KeyboardInterrupt"), ("ENOSPC", "RecordError"))
    for what, end in ways:
        for place in ("sync model.part/model.pt", "before rename to run/model"):
            first = Fault(what="SIGINT", place="in forward", update=3)
            yield Case(
                kind=f"SIGINT, then {what} in the export",
                place=place,
                setup=turns.next(one_rank()),
                faults=[first, Fault(what=what, place=place, update=3)],
                ends=frozenset({end}),
                promise="committed",
                committed=3,
            )
