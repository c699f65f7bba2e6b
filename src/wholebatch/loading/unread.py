"""Samples that are left out because they can't be read: some are bad luck, all are a mistake."""

from __future__ import annotations

from dataclasses import dataclass

from wholebatch.errors import JudgeError, WholebatchError
from wholebatch.loading.batches import WindowBatches
from wholebatch.loading.reading import Samples, read_samples

# Samples in a row that can't be read, at which none of the data set is expected to be readable.
MOST_IN_A_ROW = 1000


@dataclass(kw_only=True, slots=True)
class Unread:
    """Counts what could not be read, and ends a run that reads nothing.

    Args:
        samples: the data set.
        seed: of the run.
        any_read: whether a sample of this epoch was read, or may have been before this loop.
    """

    samples: Samples
    seed: int
    any_read: bool
    in_a_row: int = 0

    def see(self, window: WindowBatches, *, ends_epoch: bool) -> None:
        """Count one window.

        Args:
            window: of this replica.
            ends_epoch: whether it is the last of its epoch.

        Raises:
            JudgeError: MOST_IN_A_ROW samples in a row could not be read, or none in a whole epoch, nor any
                other of the data set. Its cause is that of the last of them.
        """
        if window.sample_ids:
            self.any_read, self.in_a_row = True, 0
        else:
            self.in_a_row += len(window.left_out)
        if window.left_out and self.in_a_row >= MOST_IN_A_ROW:
            self._refuse(window, f"{self.in_a_row} samples in a row could not be read")
        if ends_epoch:
            # A replica's share may be a few bad samples of a data set that is fine.
            if self.in_a_row and not self.any_read and not self._any_readable(window.epoch):
                self._refuse(
                    window, f"none of {self.in_a_row} samples in epoch {window.epoch} could be read"
                )
            self.any_read = False

    def _any_readable(self, epoch: int) -> bool:
        tried = range(min(len(self.samples), MOST_IN_A_ROW))
        return any(self._error(index, epoch) is None for index in tried)

    def _refuse(self, window: WindowBatches, what: str) -> None:
        # A worker may not be able to send the error; here it comes up again.
        last = window.left_out[-1] if window.left_out else 0
        error = self._error(last, window.epoch)
        told = "" if error is None else f": {error}"
        raise JudgeError(
            f'{what}, and on_bad_sample="skip" would leave out all{told}; mend the data set, or give '
            f'on_bad_sample="raise" to see the first of them'
        ) from (None if error is None else error.__cause__)

    def _error(self, index: int, epoch: int) -> WholebatchError | None:
        try:
            read_samples(self.samples, [index], epoch=epoch, seed=self.seed)
        except WholebatchError as error:
            return error
        return None
