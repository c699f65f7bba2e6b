"""What the rules read: windows put together from the traces of all ranks, and what they find. No torch
here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from wholebatch.audit.trace import Backward, Event, Forward, Intent, Place, RankTrace, Term

Severity = Literal["wrong", "cost", "note"]
Verdict = Literal["clean", "findings", "not_judged"]
# source of an intent that nobody stated
INFERRED = "inferred from the loop"


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """One backward of one rank, seen from one optimizer's window.

    Attributes:
        rank: that ran it.
        index: within the window on that rank, from 0; carried ones count down from -1, the latest.
        position: of its event in that rank's trace.
        backward: what was recorded.
        forwards: the outermost forwards since the backward before.
        kappa: factor with which what it delivered stands in what the optimizer read (loss scale taken out,
            clipping not counted); 0 where it was cleared or never reduced; None where that could not be
            measured.
        lost: how it was lost where kappa is 0: ``"cleared"``, ``"not reduced"``; empty else.
        carried: it belongs to an earlier window of the same optimizer, and was not cleared since.
        foreign: another optimizer's loss brought it here, and that optimizer stepped on it before this
            window's own first backward (a generator's gradients left in its discriminator).
    """

    rank: int
    index: int
    position: int
    backward: Backward
    forwards: tuple[Forward, ...] = ()
    kappa: float | None = None
    lost: Literal["", "cleared", "not reduced"] = ""
    carried: bool = False
    foreign: bool = False

    def __repr__(self) -> str:
        """In one short line; what it recorded is in its fields."""
        return f"MicroBatch(rank={self.rank}, index={self.index}, kappa={self.kappa}, lost={self.lost!r})"


@dataclass(frozen=True, kw_only=True, slots=True)
class TermWeights:
    """What the items of one term weigh in one update: item weight = loss weight x kappa.

    Attributes:
        key: of the term; backwards that the loop runs from different lines are different terms, unless one
            is only the last micro-batch of the other's loop.
        unit: the reading that was taken: the coarsest explicit one at which all is right, else the item
            level.
        num_units: N, over the window and all ranks, units that were lost included.
        total: summed weight of all units; 1 when right.
        lowest, highest: weight of one unit, in units of 1/N.
        by_micro_batch: for each micro-batch (rank, index): number of units, weight of one unit in units of
            1/N (lowest, highest).
        coefficients: as in ``Term``.
        site: line of the backward.
        samples: how many samples there were, where forwards tell; None else.
    """

    key: str
    unit: Literal["item", "row", "group"]
    num_units: float
    total: float
    lowest: float
    highest: float
    by_micro_batch: Mapping[tuple[int, int], tuple[float, float, float]]
    coefficients: Literal["none", "class_weights", "factors"]
    site: Place | None
    samples: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """One update of one optimizer over all ranks.

    Attributes:
        index: of this update, from 1, counted per optimizer, those before the watch included.
        optimizer: its index in the traces.
        micro_batches: by rank, those lost and carried included.
        events: by rank: position in the trace and event, from the end of the window before to the step,
            that included.
        edges: by rank, the step or skip event; a rank that never came to it has none.
        skipped: whether the optimizer was left alone (loss scale overflow).
        terms: what the items weigh; empty where it could not be worked out, and ``unjudged`` says why.
        unjudged: why not; None where it could.
        total, lowest, highest: of the main term, as in ``TermWeights``; None where not judged.
        num_items: of the main term.
        ranks_agree: whether all ranks read the same gradient (None with one rank, or where it could not be
            told).
        uniform_kappa: the one kappa that all micro-batches have; None where they differ or it is not known.
        per_parameter_kappa: kappa differs between parameters.
        clip_factor: what clipping multiplied by; None without a clip.
        complete: False for what was left at the end without a step.
        relative_terms: where kappa could not be measured but the loss weights are known: weights as if
            every kappa were 1 (0 where a micro-batch was cleared); only their ratios within one rank mean
            something.
        odd_parameters: where ``per_parameter_kappa``: parameters that have another kappa than most, as when
            they were left out of the reduction; the weights are those that most parameters give.
        unexplained: relative size of what the optimizer read that no micro-batch delivered; None where all
            of it is explained or that could not be told.
    """

    index: int
    optimizer: int
    micro_batches: Mapping[int, tuple[MicroBatch, ...]]
    events: Mapping[int, tuple[tuple[int, Event], ...]]
    edges: Mapping[int, Event]
    skipped: bool = False
    terms: tuple[TermWeights, ...] = ()
    unjudged: str | None = None
    total: float | None = None
    lowest: float | None = None
    highest: float | None = None
    num_items: float | None = None
    ranks_agree: bool | None = None
    uniform_kappa: float | None = None
    per_parameter_kappa: bool = False
    clip_factor: float | None = None
    complete: bool = True
    relative_terms: tuple[TermWeights, ...] = ()
    odd_parameters: tuple[int, ...] = ()
    unexplained: float | None = None

    def __repr__(self) -> str:
        """In one line: which update, how many micro-batches and items, and what they weigh together."""
        number = max(map(len, self.micro_batches.values()), default=0)
        return (
            f"Window(index={self.index}, optimizer={self.optimizer}, micro_batches={number}, "
            f"num_items={self.num_items}, total={self.total})"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """All that the rules may look at.

    Attributes:
        traces: of all ranks, in order.
        windows: of all optimizers, in the order of their steps on rank 0; incomplete ones last.
        intent: the one that is taken; its ``source`` says whether it is an inference.
        num_replicas: D.
    """

    traces: Sequence[RankTrace]
    windows: Sequence[Window]
    intent: Intent
    num_replicas: int

    def __repr__(self) -> str:
        """In one line: how many windows of how many ranks."""
        return (
            f"Evidence(windows={len(self.windows)}, ranks={len(self.traces)}, "
            f"num_replicas={self.num_replicas})"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Something that the audit saw, with the evidence.

    Attributes:
        kind: name of the rule; one of ``KINDS``.
        severity: ``"wrong"``: the update is not the one its author believes in; ``"cost"``: it is, at a
            price; ``"note"``: worth knowing.
        update: index of the first update that shows it.
        optimizer: index of the optimizer.
        factor: for kinds that have one, 1 when right.
        ratio: for ``unequal_item_weights``: how many times the lightest item the heaviest counts.
        across: for ``unequal_item_weights``: ``"items"``, ``"micro_batches"`` or ``"replicas"``.
        message: what was seen, with numbers, in one or two sentences.
        effect: what it does to training.
        mend: how to mend it, in the idiom of the framework found.
        place: the line of the user's code.
        caused_by: kind of the finding that this follows from; None for a primary one.
        updates: all updates that show it.
    """

    kind: str
    severity: Severity
    message: str
    update: int | None = None
    optimizer: int | None = None
    factor: float | None = None
    ratio: float | None = None
    across: Literal["items", "micro_batches", "replicas"] | None = None
    effect: str = ""
    mend: str = ""
    place: Place | None = None
    caused_by: str | None = None
    updates: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """The end of an audit.

    Attributes:
        verdict: ``"findings"`` where any finding is wrong or costs; ``"not_judged"`` where none is and the
            weights of some audited update could not be worked out; else ``"clean"``.
        findings: the gravest first, primary ones before what they cause.
        evidence: what was judged.
        unjudged: what could not be judged, and why; one entry each.
    """

    verdict: Verdict
    findings: tuple[Finding, ...]
    evidence: Evidence
    unjudged: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """In one line: the verdict, and the findings by severity and kind."""
        found = (
            ", ".join(f"{finding.severity} {finding.kind}" for finding in self.findings) or "no findings"
        )
        unjudged = f"; {len(self.unjudged)} not judged" if self.unjudged else ""
        return f"Judgement({self.verdict}: {found}{unjudged})"


__all__ = [
    "Evidence",
    "Finding",
    "Judgement",
    "MicroBatch",
    "Severity",
    "Term",
    "TermWeights",
    "Verdict",
    "Window",
]
