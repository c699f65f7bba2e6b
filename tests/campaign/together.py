"""The cases of jobs whose ranks share one model, where a rank that leaves leaves others in a collective."""

from __future__ import annotations

from collections.abc import Iterator

from campaign.cases import LEFT_ALONE, Case, Fault, Setup
from campaign.layouts import Turns, on_all

# What each rank writes of a checkpoint that is in parts.
OWN_PART = {
    "fsdp": "sync parts/shard-00002-model-00001-of-00001.safetensors",
    "pipeline": "write parts/stage-00001.pt",
}
# Nobody can say any more what the others have: the run goes on from its last checkpoint.
BEYOND = frozenset({"PoisonedWindowError"})


def layouts(shared: str) -> list[Setup]:
    """Some layouts of ranks that share a model."""
    if shared == "hsdp":
        return [Setup(ranks=4, m=1, shared=shared, every=2), Setup(ranks=4, m=2, shared=shared, rows=20)]
    plain = Setup(ranks=2, shared=shared, every=2)
    if shared == "fsdp":
        return [plain, Setup(ranks=2, shared=shared, noisy=True), Setup(ranks=2, shared=shared, rows=20)]
    return [plain, Setup(ranks=2, shared=shared, m=4), Setup(ranks=2, shared=shared, rows=20, every=2)]


def killed(turns: Turns, shared: str) -> Iterator[Case]:
    """One rank is killed in a forward, a backward, an evaluation, a step or a checkpoint."""
    spots = [("in forward", 3, 1), ("end of backward", 3, 1), ("forward of an evaluation", 4, 1)]
    if shared in OWN_PART:
        spots += [("in forward", 2, 2), ("begin of backward", 4, 1), ("end of backward", 4, 2)]
        spots += [("before the step", 3, 1), ("after the step", 3, 1), ("after record", 3, 1)]
        spots += [("in evaluation", 4, 1), ("before checkpoint", 4, 1), (OWN_PART[shared], 4, 1)]
        spots += [("write unfinished/model.pt", 4, 1), ("after rename to checkpoints/update", 4, 1)]
    for number, (place, update, nth) in enumerate(spots):
        rank = int("unfinished" not in place and "rename" not in place)
        if rank and number % 3 == 0:
            rank = 0
        setup = turns.next(layouts(shared))
        yield Case(
            kind="SIGKILL of one rank of a shared model",
            place=place,
            setup=setup,
            faults=[Fault(what="SIGKILL", place=place, update=update, nth=nth, rank=rank)],
            ends=frozenset({"killed"}),
        )


def stopped(turns: Turns, shared: str) -> Iterator[Case]:
    """Signals that one rank gets, all get, or get at different moments."""
    for what, code in (("SIGTERM", "143"), ("SIGTERM, no grace", "143"), ("SIGINT", "130")):
        places = [("in forward", 3), ("forward of an evaluation", 4)]
        if shared in OWN_PART:
            places += [("end of backward", 3), ("before checkpoint", 2)]
        for place, update in places:
            yield Case(
                kind=what,
                place=f"{place}, one rank alone",
                setup=turns.next(layouts(shared)),
                faults=[Fault(what=what, place=place, update=update, rank=1)],
                ends=frozenset({code}),
                others=frozenset({code}),
                promise="committed",
            )
        if shared in OWN_PART:
            setup = turns.next(layouts(shared))
            yield on_all(what, "in forward", setup, "in forward", 3, 1, ends={code}, promise="committed")
    yield Case(
        kind="SIGINT twice on one rank of two",
        place="in forward",
        setup=turns.next(layouts(shared)),
        faults=[Fault(what="SIGINT twice", place="in forward", update=3, rank=1)],
        ends=frozenset({"KeyboardInterrupt"}),
    )


def mistakes(turns: Turns, shared: str) -> Iterator[Case]:
    """Exceptions and out of memory on one rank, where the others are in a collective or come to it."""
    for what, end in (("exception", "CampaignError"), ("out of memory", "JudgeError")):
        yield Case(
            kind=what,
            place="forward of an evaluation, one rank alone",
            setup=turns.next(layouts(shared)),
            faults=[Fault(what=what, place="forward of an evaluation", update=2, rank=1)],
            ends=frozenset({end}),
        )
        if shared not in OWN_PART:
            continue
        for place in ("in forward", "end of backward", "before the step"):
            yield Case(
                kind=what,
                place=f"{place}, one rank alone",
                setup=turns.next(layouts(shared)),
                faults=[Fault(what=what, place=place, update=3, rank=1)],
                ends=BEYOND | ({end} if place != "before the step" and shared == "fsdp" else set()),
            )
        yield Case(
            kind=what,
            place="between forward and backward, one rank alone",
            setup=turns.next(layouts(shared)),
            # A schedule that is made anew tries shapes out first, where a loss that fails is asked again.
            faults=[Fault(what=what, place="between forward and backward", update=4, nth=2, rank=1)],
            ends=frozenset({end}) if shared == "pipeline" else BEYOND | {end},
            others=frozenset({"OtherRankFailedError"}) if shared == "pipeline" else LEFT_ALONE,
            promise="committed" if shared == "pipeline" else "checkpoint",
        )


def samples_and_disk(turns: Turns, shared: str) -> Iterator[Case]:
    """What one rank alone can't read or write."""
    for rank in (0, 1):
        setup = Setup(ranks=2, shared=shared, every=2, own=True)
        yield Case(
            kind="bad sample",
            place="while an update draws its samples, one rank of two",
            setup=setup,
            faults=[Fault(what="exception", place="reading a sample", update=4, nth=2, rank=rank)],
            ends=frozenset({"JudgeError"}),
            others=frozenset({"OtherRankFailedError"}),
            promise="committed",
            committed=3,
        )
        yield Case(
            kind="exception",
            place="in evaluation, one rank of two",
            setup=setup,
            faults=[Fault(what="exception", place="in evaluation", update=2, nth=2, rank=rank)],
            ends=frozenset({"CampaignError"}),
            others=frozenset({"JudgeError"}),
            promise="committed",
            committed=2,
        )
    for what in ("ENOSPC", "EIO"):
        for place, rank in ((OWN_PART[shared], 1), ("write unfinished/optimizers.pt", 0)):
            yield Case(
                kind=what,
                place=place,
                setup=turns.next(layouts(shared)),
                faults=[Fault(what=what, place=place, update=4, rank=rank)],
                ends=frozenset({"CheckpointError"}),
                others=frozenset({"CheckpointError"}),
            )
        yield Case(
            kind=what,
            place="write run/records.jsonl",
            setup=turns.next(layouts(shared)),
            faults=[Fault(what=what, place="write run/records.jsonl", update=3)],
            ends=frozenset({"RecordError"}),
            others=frozenset({"RecordError"}),
        )


def shared_models(turns: Turns) -> Iterator[Case]:
    """Everything, on ranks that share a model by ``fully_shard`` or in stages; some on the others."""
    for shared in ("fsdp", "pipeline", "hsdp", "tensor parallel", "context parallel"):
        groups = [killed, stopped, mistakes]
        if shared in OWN_PART:
            groups.append(samples_and_disk)
        for group in groups:
            yield from group(turns, shared)


def under_deepspeed(turns: Turns) -> Iterator[Case]:
    """A rank killed under each stage of ZeRO; needs the environment of ``make peers``."""
    for stage in (1, 2, 3):
        yield from killed(turns, f"ZeRO {stage}")
