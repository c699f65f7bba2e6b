"""Numbers that the loop prints or logs as its loss."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor

from wholebatch.audit.watch.patches import Patches
from wholebatch.audit.watch.seen import quietly
from wholebatch.audit.watch.watcher import Watch

# a name with "loss" in it and the number that follows
_LOSS = re.compile(
    r"(?P<name>[\w/.-]{0,40}loss[\w/.-]{0,40})['\"]?\s*[:=]?\s*(?P<number>[-+]?\d+(?:\.\d*)?(?:e[-+]?\d+)?)",
    re.IGNORECASE,
)
# Pieces of one line, before it is read as it is; and its characters that are read.
_LONGEST_LINE = 100
_READ_CHARACTERS = 4_000
_NOT_OF_TRAINING = ("val", "eval", "test", "valid", "dev")


class Logged:
    """Reads along what is written to the terminal and to a TensorBoard writer.

    Args:
        watch: that is told.
    """

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self._patches = Patches()
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "__dict__"):
                self._patches.wrap(stream, "write", self._writing)
        self.late()

    def late(self) -> None:
        """Hook a writer that was imported only since."""
        writers = sys.modules.get("torch.utils.tensorboard.writer")
        if writers is not None:
            self._patches.wrap(writers.SummaryWriter, "add_scalar", self._adding)

    def remove(self) -> None:
        """Put everything back."""
        self._patches.restore()

    def _writing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        line: list[str] = []

        def write(text: Any) -> Any:
            result = original(text)
            # print writes its arguments one by one
            if isinstance(text, str) and self.watch.listening:
                line.append(text)
                if "\n" in text or "\r" in text or len(line) > _LONGEST_LINE:
                    self._read("".join(line))
                    line.clear()
            return result

        return write

    @quietly
    def _read(self, text: str) -> None:
        text = text[:_READ_CHARACTERS]
        for found in _LOSS.finditer(text) if "oss" in text else ():
            # "val loss 0.3": the word before it belongs to the name
            before = text[: found.start()].split()[-1:] if text[: found.start()].endswith(" ") else []
            self._tell(" ".join([*before, found["name"]]), found["number"])

    def _adding(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def add_scalar(owner: Any, tag: Any, scalar_value: Any, *given: Any, **named: Any) -> Any:
            result = original(owner, tag, scalar_value, *given, **named)
            if self.watch.here and "loss" in str(tag).lower():
                value = scalar_value.detach().clone() if isinstance(scalar_value, Tensor) else scalar_value
                self._tell(str(tag), value)
            return result

        return add_scalar

    def _tell(self, name: str, number: Any) -> None:
        words = re.split(r"[\W_]+", name.lower())
        if not any(word.startswith(_NOT_OF_TRAINING) for word in words):
            # the number as it was written, so that the judge knows to how many digits
            self.watch.tell("logged", value=number, detail=f"{name} {number}")
