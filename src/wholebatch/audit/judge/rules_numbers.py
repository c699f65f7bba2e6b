"""Rules on memory, digits, statistics and logs. No torch here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from wholebatch.audit.judge.evidence import Evidence, Finding, MicroBatch, Window
from wholebatch.audit.judge.reading import (
    applied_windows,
    complete_windows,
    events_of,
    finding,
    is_inferred,
    kept,
    loops,
    number,
    optimizers_of,
    place_of,
    plural,
    seen_micro_batches,
    trace_of,
    updates_text,
)
from wholebatch.audit.trace import Event

WORTH_SAYING, WORTH_MENDING = 1e-3, 1e-2
SAME_NUMBER = 1e-4
TOLD_APART = 5e-4


def memory_grows(evidence: Evidence) -> Iterable[Finding]:
    """Graphs or outputs of earlier micro-batches kept until the step, or one backward for them all."""
    for optimizer in optimizers_of(evidence):
        windows = [w for w in complete_windows(evidence, optimizer) if _kept_alive(w)]
        if not windows:
            yield from _one_backward(evidence, optimizer)
            continue
        first = windows[0]
        alive = _kept_alive(first)
        what = "graphs" if any(m.backward.graph_alive for m in alive) else "outputs"
        yield finding(
            evidence,
            "memory_grows",
            windows,
            f"{updates_text([first])}, {what} of {plural(len(alive), 'earlier micro-batch')} were still "
            f"held when the optimizer stepped.",
            place=place_of(alive[0]),
        )


def _kept_alive(window: Window) -> list[MicroBatch]:
    """Return earlier micro-batches of a rank whose graph or outputs are held; the last one's always are."""
    for rank in window.micro_batches:
        early = [m for group in loops(kept(window, rank)) for m in group[:-1]]
        alive = [m for m in early if m.backward.graph_alive or m.backward.outputs_alive]
        if alive:
            return alive
    return []


def _one_backward(evidence: Evidence, optimizer: int) -> Iterable[Finding]:
    """One backward for several forwards that were meant to be micro-batches."""
    said = None if is_inferred(evidence) else evidence.intent.micro_batches
    found = [(w, m) for w in applied_windows(evidence, optimizer) if (m := _many_forwards(w, said))]
    if found:
        window, m = found[0]
        yield finding(
            evidence,
            "memory_grows",
            [w for w, _ in found],
            f"{updates_text([window])}, one backward served {m.backward.num_forwards} forwards: the "
            f"activations of all of them were held at once.",
            place=place_of(m),
        )


def _many_forwards(window: Window, said: int | None) -> MicroBatch | None:
    """Return a backward over the summed losses of several forwards of the same module.

    As many as were said are its micro-batches, unless the window has that many backwards besides.
    """
    said = None if seen_micro_batches(window) == said else said
    for rank in window.micro_batches:
        for m in kept(window, rank):
            num_forwards = m.backward.num_forwards
            groups = {
                level.num_units for t in m.backward.terms for level in t.levels if level.unit == "group"
            }
            distinct = len({f.samples for f in m.forwards}) == num_forwards
            same_module = len({f.module for f in m.forwards}) == 1
            if (
                num_forwards > 1
                and same_module
                and (num_forwards == said or (num_forwards in groups and distinct))
            ):
                return m
    return None


def low_precision_accumulation(evidence: Evidence) -> Iterable[Finding]:
    """Gradients added up in a format of few digits, with the error that was measured."""
    for optimizer in optimizers_of(evidence):
        seen = [
            (error, w, m)
            for w in applied_windows(evidence, optimizer)
            if seen_micro_batches(w) > 1
            for rank in w.micro_batches
            for m in kept(w, rank)
            if (error := m.backward.low_precision_error) is not None and error > WORTH_SAYING
        ]
        if not seen:
            continue
        error, window, m = max(seen, key=lambda entry: entry[0])
        dtype = next((e.gradient_dtype for e in window.edges.values()), "few digits")
        yield finding(
            evidence,
            "low_precision_accumulation",
            [window],
            f"{updates_text([window])}, {plural(seen_micro_batches(window), 'micro-batch')} were added "
            f"up in {dtype} with a relative error of {error:.1e}.",
            severity="cost" if error > WORTH_MENDING else "note",
            place=place_of(m),
        )


def batch_norm_per_micro_batch(evidence: Evidence) -> Iterable[Finding]:
    """BatchNorm in training mode in a window of several micro-batches."""
    for optimizer in optimizers_of(evidence):
        windows = [
            w
            for w in complete_windows(evidence, optimizer)
            if seen_micro_batches(w) > 1 and _batch_norms(w)
        ]
        if windows:
            first = windows[0]
            yield finding(
                evidence,
                "batch_norm_per_micro_batch",
                windows,
                f"{plural(_batch_norms(first), 'BatchNorm module')} normalised each of the "
                f"{seen_micro_batches(first)} micro-batches of an update by itself.",
                place=next((e.place for _, _, e in events_of(first, "forward")), None),
            )


def _batch_norms(window: Window) -> int:
    micro_batches = [m for rank in window.micro_batches for m in kept(window, rank)]
    return max((f.num_batch_norm for m in micro_batches for f in m.forwards), default=0)


def logged_loss_differs(evidence: Evidence) -> Iterable[Finding]:
    """Logged numbers that are a wrong reading of the losses, in every update that logged one."""
    for optimizer in optimizers_of(evidence):
        readings = [
            (w, matches)
            for w in applied_windows(evidence, optimizer)
            if (logged := _logged_once(evidence, w)) is not None
            and (matches := _matches(w, logged.value or 0.0, _half_a_digit(logged))) is not None
        ]
        common = set.intersection(*(set(names) for _, names in readings)) if len(readings) > 1 else set()
        if common and "right" not in common:
            window, matches = readings[0]
            name = sorted(common)[0]
            yield finding(
                evidence,
                "logged_loss_differs",
                [w for w, _ in readings],
                f"{updates_text([window])}, the loss that was logged is {name}: {number(matches[name])} "
                f"where the update's loss per item is {number(matches['truth'])}.",
                place=getattr(_logged_once(evidence, window), "place", None),
            )


def _logged_once(evidence: Evidence, window: Window) -> Event | None:
    """Return the one number that was logged between a window's last backward and the next one's first."""
    rank = min(window.micro_batches, default=0)
    positions = [m.position for m in kept(window, rank)]
    if len(positions) < 2:
        return None
    events = trace_of(evidence, rank).events
    inside = [e for e in events[positions[0] : positions[-1]] if e.kind == "logged"]
    after: list[Event] = []
    for event in events[positions[-1] + 1 :]:
        if event.backward is not None:
            break
        after += [event] if event.kind == "logged" and event.value is not None else []
    return after[0] if len(after) == 1 and not inside else None


def _half_a_digit(event: Event) -> float:
    """Half of the last digit that was written: a number of a log may be off by so much."""
    written = event.detail.rsplit(" ", 1)[-1].lower()
    if not written[-1:].isdigit():
        return 0.0
    mantissa, _, exponent = written.partition("e")
    decimals = len(mantissa.partition(".")[2])
    return 0.5 * 10.0 ** (int(exponent or 0) - decimals)


def _matches(window: Window, logged: float, half_a_digit: float) -> dict[str, float] | None:
    """Return the readings that a logged number is, by name; ``"truth"`` is always there.

    None where the losses could not be told.
    """
    rank = min(window.micro_batches)
    means = list(_means(kept(window, rank)))
    if not means or len(means) != len(kept(window, rank)):
        return None
    truth = sum(n * mean for n, mean, _ in means) / sum(n for n, _, _ in means)
    last = means[-1]
    readings = {
        "right": truth,
        "the last micro-batch's, scaled for its backward": last[2],
        "the last micro-batch's": last[1],
        "divided by the micro-batches once more": truth / len(means),
        "a sum over the micro-batches": sum(mean for _, mean, _ in means),
        "a mean of the micro-batches' means": sum(mean for _, mean, _ in means) / len(means),
        "a mean of the micro-batches' means, divided by the micro-batches once more": sum(
            mean for _, mean, _ in means
        )
        / len(means) ** 2,
    }
    found = {
        name: value
        for name, value in readings.items()
        if abs(logged - value) <= max(SAME_NUMBER * abs(value), half_a_digit)
    }
    if "right" not in found and abs(logged - truth) <= max(TOLD_APART * abs(truth), 4 * half_a_digit):
        return None  # too near to be told from the right one in the digits of a log
    return {**found, "truth": truth} if found else None


def _means(micro_batches: Iterable[MicroBatch]) -> Iterator[tuple[float, float, float]]:
    """Yield items, mean loss of an item and the loss as it was, where there is one term that tells."""
    for m in micro_batches:
        terms, loss = m.backward.terms, m.backward.loss
        if len(terms) != 1 or loss is None or terms[0].coefficients != "none" or terms[0].surrogate:
            return
        item = terms[0].levels[-1]
        if item.num_units and item.total:
            yield item.num_units, loss / item.total, loss
