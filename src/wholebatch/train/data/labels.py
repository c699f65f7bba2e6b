"""Labels as users write them, and the class numbers that a model predicts."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wholebatch.errors import UsageError


class SeenLabel(NamedTuple):
    """A label, by the order in which labels were seen first.

    Attributes:
        number: 0 for the first.
        place: of its first row, ``file:line``.
    """

    number: int
    place: str


Label = int | str
SeenLabels = dict[Label, SeenLabel]


def first_sight_number(label: Label, place: str, seen: SeenLabels) -> int:
    """The number of a label among those seen, which it joins where it is new."""
    found = seen.get(label)
    if found is None:
        found = seen[label] = SeenLabel(number=len(seen), place=place)
    return found.number


def class_names(train: SeenLabels, held_out: SeenLabels) -> list[Label]:
    """The labels in the order of their classes: sorted, as numbers or as texts.

    Args:
        train: labels of the samples to train on.
        held_out: labels of the others.

    Raises:
        UsageError: numbers and names together, fewer than two labels, or a held-out label that training
            never sees.
    """
    both = [*train.items(), *held_out.items()]
    first = both[0]
    for label, seen in both:
        if type(label) is not type(first[0]):
            kind = "name" if isinstance(first[0], str) else "number"
            raise UsageError(
                f"{seen.place}: the label {label!r} is no {kind} as {first[0]!r} at {first[1].place} is; "
                f"write all labels as one or the other"
            )
    for label, seen in held_out.items():
        if label not in train:
            raise UsageError(
                f"{seen.place}: the held-out label {label!r} is in no training row, so it can't be "
                f"learned; add rows with it, or change data.held_out_one_in or data.held_out_files"
            )
    if len(train) < 2:
        raise UsageError(
            f"all training rows have the label {first[0]!r}; there is nothing to tell apart with fewer "
            f"than two labels"
        )
    return sorted(train)  # all of one type, as was seen to above


def as_classes(numbers: NDArray[np.int64], seen: SeenLabels, names: list[Label]) -> NDArray[np.int64]:
    """Class numbers in place of the numbers of first sight.

    Args:
        numbers: of first sight; shape (samples,).
        seen: what they mean.
        names: the labels in the order of their classes.

    Returns:
        Shape (samples,).
    """
    place = {label: number for number, label in enumerate(names)}
    return np.array([place[label] for label in seen], dtype=np.int64)[numbers]
