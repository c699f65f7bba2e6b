"""All ranks do a thing or none, and hear of each other's failures in words that say what happened."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch.distributed as dist

from ranks import run_ranks
from wholebatch.errors import CheckpointError, JudgeError, RecordError
from wholebatch.ranks.agreement import why_lost
from wholebatch.ranks.lost import is_lost_contact, last_words, leave_words
from wholebatch.ranks.together import ContactLostError, Together
from wholebatch.report.output import OutputClosedError


class AsksForMoreError(JudgeError):
    """Can't be made again from its words alone."""

    def __init__(self, *, number: int) -> None:
        super().__init__(f"number {number}")


def test_alone_everything_is_as_without_it() -> None:
    alone = Together()
    assert alone.leads
    assert alone.total([1.0, 2.5]) == [1.0, 2.5]
    assert (alone.any(True), alone.any(False)) == (True, False)
    assert alone.gather("mine") == ["mine"]
    assert alone.on_leader(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        alone.all_or_none(lambda: 1 // 0)


def raised_by(act: Any) -> tuple[str, str, Any]:
    """Kind and words of what is raised, and what travels beside the words."""
    try:
        act()
    except Exception as error:
        return type(error).__name__, str(error), getattr(error, "newest_intact", None)
    return "nothing", "", None


def failing(rank: int, _n: int, failing_rank: int) -> list[tuple[str, str, Any]]:
    everybody = Together.of_all()
    damaged = CheckpointError("a file is damaged")
    damaged.newest_intact = "update-1"
    errors = [
        RecordError("no room"),
        OutputClosedError("the output was closed"),
        damaged,
        PermissionError(13, "Permission denied"),
        AsksForMoreError(number=3),
    ]

    def fail(error: Exception) -> None:
        if rank == failing_rank:
            raise error

    found = [raised_by(lambda error=error: everybody.all_or_none(lambda: fail(error))) for error in errors]
    assert everybody.gather(rank) == [0, 1], "the ranks are not at the same place any more"
    return found


def test_what_fails_on_the_leading_rank_all_say_in_the_same_words() -> None:
    leader, other = run_ranks(failing, 2, 0)
    assert leader[:3] == other[:3]
    assert other[2] == ("CheckpointError", "a file is damaged", "update-1")
    assert leader[3:] == [
        ("PermissionError", "[Errno 13] Permission denied", None),
        ("AsksForMoreError", "number 3", None),
    ]
    start = "rank 0 failed between two updates: "
    assert other[3:] == [
        ("JudgeError", f"{start}PermissionError: [Errno 13] Permission denied", None),
        ("JudgeError", f"{start}AsksForMoreError: number 3", None),
    ]


def test_of_another_rank_the_number_is_told() -> None:
    leader, other = run_ranks(failing, 2, 1)
    assert other[0] == ("RecordError", "no room", None)
    assert leader[0] == ("RecordError", "rank 1: no room", None)
    assert leader[2] == ("CheckpointError", "rank 1: a file is damaged", "update-1")
    assert leader[3][:2] == (
        "JudgeError",
        "rank 1 failed between two updates: PermissionError: [Errno 13] Permission denied",
    )


def agreeing(rank: int, _n: int) -> tuple[Any, ...]:
    everybody = Together.of_all()
    total = everybody.total([rank, 2.0**40])
    return (
        total,
        everybody.any(rank == 1),
        everybody.any(False),
        everybody.on_leader(lambda: f"from {rank}"),
    )


def test_two_ranks_agree() -> None:
    assert run_ranks(agreeing, 2) == [([1.0, 2.0**41], True, False, "from 0")] * 2


def a_failed_meeting(rank: int, _n: int) -> tuple[str, list[str]]:
    """Rank 1 fails inside what all do together, and has left before anybody is told."""
    everybody = Together.of_all()
    try:
        with everybody.meeting("in a test"):
            if rank == 1:
                raise ValueError("my own error")
            dist.barrier()
    except Exception as error:
        if rank == 1:
            assert last_words().startswith("rank 1 failed in a test: ValueError: my own error")
            os._exit(0)
        return type(error).__name__, [str(error), why_lost(), str(is_lost_contact(error))]
    return "nothing", []


def test_a_rank_that_leaves_a_meeting_says_why() -> None:
    told, _ = run_ranks(a_failed_meeting, 2, expect="outcomes")
    assert told[0] == "ok", told
    kind, (words, why, again) = told[1]
    assert kind == "ContactLostError"
    assert words.startswith("contact with another rank was lost in a test: rank 1 failed in a test: ValueE")
    assert why in words
    assert again == "False"


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (
            RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed"),
            True,
        ),
        (dist.DistBackendError("NCCL communicator was aborted"), True),
        (RuntimeError("shapes do not match"), False),
        (ConnectionError("Connection closed by peer"), False),
    ],
)
def test_what_says_that_contact_is_lost(error: Exception, lost: bool) -> None:
    assert is_lost_contact(error) is lost
    outer = RuntimeError("failed to run the forward of a stage")
    outer.__cause__ = error
    assert is_lost_contact(outer) is lost


def test_nobody_says_anything_where_there_are_no_ranks() -> None:
    leave_words(0, "in a test", ValueError())
    assert last_words() == ""
    assert why_lost("3 seconds") == "it ended, or did not answer within 3 seconds"


def left_alone(rank: int, _n: int) -> list[str]:
    if rank == 1:
        os._exit(0)
    everybody = Together.of_all()

    def fail() -> None:
        raise ValueError("my own error")

    with pytest.raises(ValueError, match="my own error") as own:
        everybody.all_or_none(fail)
    with pytest.raises(ContactLostError) as lost:
        everybody.gather("mine")
    return [*own.value.__notes__, str(lost.value)]


def test_an_error_is_not_hidden_by_the_loss_of_the_rank_that_should_hear_of_it() -> None:
    told, _ = run_ranks(left_alone, 2, expect="outcomes")
    assert told[0] == "ok", told
    note, lost = told[1]
    assert note.startswith("the other ranks could not be told: contact with another rank was lost between")
    assert lost.startswith("contact with another rank was lost between two updates: it ended, or did not")
