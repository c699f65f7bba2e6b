"""Every error that Wholebatch raises on purpose, in one tree.

::

    WholebatchError                     exit code 3: could not judge, could not go on
    ├── UsageError (ValueError)         exit code 2: something the caller can change
    │   ├── PlanError                   a global batch, layout or schedule that does not fit
    │   ├── ObjectiveError              a loss, its labels or its weights are not what was declared
    │   ├── SplitError                  a batch that can't be cut as asked
    │   ├── UnsupportedError            a wrapper, hook or optimizer that this version can't run exactly
    │   ├── WindowUsageError            a call at the wrong moment of an update
    │   │   └── StaleGradientsError     gradients left behind by somebody else
    │   └── RecordError                 a run folder or record that can't be read or written
    ├── UpdateError (RuntimeError)      one update did not commit; everything was put back
    │   ├── CountMismatchError          what was summed is not what was counted
    │   ├── ChangedInsideWindowError    parameters, loss scale or mode moved inside a window
    │   ├── IncompleteUpdateError       the loop was left before the last micro-batch
    │   ├── NonFiniteUpdateError        a gradient is not finite, and the caller asked to be told
    │   └── OtherRankFailedError        another rank failed; this one rolled back with it
    ├── PoisonedWindowError (RuntimeError)  beyond the point of no return; restart from the last commit
    ├── CheckpointError (RuntimeError)  a checkpoint that can't be written, or is damaged
    └── JudgeError                      a verdict could not be reached, and why

``UpdateError`` means: what the update did to parameters, gradients, buffers, random state and
counters was undone, and it may be run again. (What the loop itself changed inside a window, which is
what ``ChangedInsideWindowError`` is about, is the loop's to undo.) ``PoisonedWindowError`` means that it
was not undone.
"""

from __future__ import annotations


class WholebatchError(Exception):
    """Base class of all errors of this package."""

    exit_code = 3


class UsageError(WholebatchError, ValueError):
    """Something that the caller can change; the message says what."""

    exit_code = 2


class PlanError(UsageError):
    """A global batch, a layout or a schedule that does not fit; names the nearest that do."""


class ObjectiveError(UsageError):
    """A loss, its labels or its weights are not what the objective declared."""


class SplitError(UsageError):
    """A batch that can't be cut into the micro-batches asked for."""


class UnsupportedError(UsageError):
    """A wrapper, communication hook, optimizer or option that can't be run exactly here."""


class WindowUsageError(UsageError):
    """A call at a moment of the update where it can't be answered."""


class StaleGradientsError(WindowUsageError):
    """Gradients were present before the first micro-batch; somebody else left them."""


class RecordError(UsageError):
    """A run folder or a record that can't be read or written."""


class UpdateError(WholebatchError, RuntimeError):
    """One update did not commit. All state is as before it, and it may be run again."""


class CountMismatchError(UpdateError):
    """The items that were summed are not the items that were counted."""


class ChangedInsideWindowError(UpdateError):
    """Parameters, the loss scale or the mode of the model changed inside a window."""


class IncompleteUpdateError(UpdateError):
    """The loop over the micro-batches was left before the last one, or one had no backward."""


class NonFiniteUpdateError(UpdateError):
    """A gradient is NaN or infinite and ``on_nonfinite="raise"`` was asked for."""


class OtherRankFailedError(UpdateError):
    """Another rank failed before the update committed; this rank rolled back with it."""


class PoisonedWindowError(WholebatchError, RuntimeError):
    """A failure beyond the point of no return: restart from the last committed update."""


class CheckpointError(WholebatchError, RuntimeError):
    """A checkpoint that can't be written or read back; those before it are as they were.

    Attributes:
        newest_intact: path of the newest whole one, where a damaged one was to be loaded and there is one.
    """

    newest_intact: str | None = None


class JudgeError(WholebatchError):
    """A verdict could not be reached; the message says what stood in the way."""
