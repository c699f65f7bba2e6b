"""Words of an audit's faces: numbers with their noun, weights, events and places."""

from __future__ import annotations

import re

from wholebatch.audit.trace import Event, EventKind, Place

EVENT_WORDS: dict[EventKind, str] = {
    "forward": "forward",
    "backward": "backward",
    "probe": "gradients asked for, none delivered",
    "clear": "gradients cleared",
    "clear_call": "zero_grad called, gradients still there",
    "clip": "gradients clipped",
    "unscale": "gradients unscaled",
    "scale_update": "loss scale updated",
    "step": "step",
    "skip": "step skipped",
    "schedule": "schedule moved",
    "average": "average of the weights moved",
    "pass": "pass over the data",
    "reduce": "gradients reduced",
    "parameters_changed": "parameters changed",
    "gradients_changed": "gradients changed by hand",
    "logged": "logged",
}
_VALUE_WORDS: dict[EventKind, str] = {
    "clip": "to a norm of {:.4g}",
    "unscale": "by {:.6g}",
    "scale_update": "to {:.6g}",
    "schedule": "to a rate of {:.4g}",
    "logged": "{:.6g}",
}
# Near enough to 1 to be written as 1.
_ONE = 5e-4


def number_of(number: float, one: str, more: str | None = None) -> str:
    """Write ``1 update``, ``1,200 updates`` or, with ``more``, ``2 micro-batches``."""
    return f"{number:,.10g} {one if number == 1 else more or one + 's'}"


def printable(text: object) -> str:
    """A text without what a terminal would obey: ESC, say, becomes ``\\x1b``."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in str(text))


def weight_text(lowest: float, highest: float) -> str:
    """Write what an item weighs, in units of 1/N: ``1``, ``0.42`` or ``0.4 to 4``."""
    low, high = (_weight(weight) for weight in (lowest, highest))
    return low if low == high else f"{low} to {high}"


def _weight(weight: float) -> str:
    return "1" if abs(weight - 1.0) <= _ONE else f"{weight:.3g}"


def clipped(text: str, width: int) -> str:
    """The text, its end left out where it is longer than ``width`` characters."""
    return text if len(text) <= width else f"{text[: width - 3]}..."


def place_text(place: Place, width: int) -> str:
    """File and line in at most ``width`` characters: folders are left out first."""
    text = printable(place)
    if len(text) > width:
        text = text.rsplit("/", 1)[-1]
    return text if len(text) <= width else f"...{text[3 - width :]}"


def event_words(event: Event, times: int = 1) -> str:
    """Write one event in a few words, with how often it happened where that is more than once."""
    words = EVENT_WORDS[event.kind] + (f" {times:,} times" if times > 1 else "")
    if event.kind == "logged" and event.detail:  # which has the number in it
        return f"{words}: {printable(event.detail)}"
    if event.kind == "pass" and event.value is not None:
        words += " begins" if event.value else " ends"
    elif event.value is not None and event.kind in _VALUE_WORDS:
        words += " " + _VALUE_WORDS[event.kind].format(event.value)
    if event.detail and event.detail not in words:
        words += f": {printable(event.detail)}"
    return f"{words} (by {event.through})" if event.through else words


def first_sentence(message: str) -> str:
    """The first sentence of a message; a dot inside a number or a name ends none."""
    return re.split(r"(?<=[.!?])\s+(?=[A-Z])", message.strip(), maxsplit=1)[0]
