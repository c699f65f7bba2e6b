"""Whole numbers as a user gives them: checked, named in what is said of them, and the nearest that fit."""

from __future__ import annotations

import operator
from collections.abc import Callable
from itertools import islice

from wholebatch.errors import PlanError

# A double holds every whole number up to here, and so does any reader of our JSON.
LARGEST_NUMBER = 2**53
# How many multiples are tried on each side for an alternative; beyond that none is offered.
_TRIES = 1024


def whole_number(name: str, value: object, *, minimum: int = 1) -> int:
    """Check that ``value`` is a whole number between ``minimum`` and 2**53, and return it as an int.

    Args:
        name: the parameter's name, for the message.
        value: what the user gave; a bool, a float or a string is refused even where it looks whole.
        minimum: the least value allowed.

    Raises:
        PlanError: the value is of another type or outside the bounds; the message repeats it.
    """
    if isinstance(value, bool | float | str):
        raise PlanError(f"{name}={value!r} is a {type(value).__name__}; give a whole number such as 4")
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise PlanError(f"{name}={value!r} is a {type(value).__name__}; give a whole number") from None
    if number < minimum:
        raise PlanError(f"{name}={number} is too small; it must be at least {minimum}")
    if number > LARGEST_NUMBER:
        raise PlanError(f"{name}={number} is too large; the bound is 2**53 = {LARGEST_NUMBER}")
    return number


def set_whole_numbers(instance: object, *names: str, minimum: int = 1) -> None:
    """Check these fields of a frozen dataclass and store them as plain ints; for its own __post_init__."""
    for name in names:
        object.__setattr__(instance, name, whole_number(name, getattr(instance, name), minimum=minimum))


def one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Check that ``value`` is one of the ``allowed`` words; PlanError lists them if it is not."""
    if value not in allowed:
        raise PlanError(f"{name}={value!r} is not known; choose one of {', '.join(allowed)}")


def nearest_multiples(around: int, multiple: int, fits: Callable[[int], bool] | None = None) -> list[int]:
    """Return the nearest multiples of ``multiple`` below and above ``around`` that ``fits`` accepts.

    Zero and numbers above 2**53 are never offered, nor is ``around`` itself, so that the list may
    have one number or none.
    """
    accepted: Callable[[int], bool] = fits or (lambda _: True)
    below = range((around - 1) // multiple * multiple, 0, -multiple)
    above = range((around // multiple + 1) * multiple, LARGEST_NUMBER + 1, multiple)
    found: list[int] = []
    for side in (below, above):
        found += islice(filter(accepted, islice(side, _TRIES)), 1)
    return found


def or_list(numbers: list[int]) -> str:
    """Write numbers as ``8 or 12``."""
    return " or ".join(str(number) for number in numbers)


def show_remainder(number: int, factor: int) -> str:
    """Write a division that leaves something over: ``64 = 5 x 12 + 4``."""
    return f"{number} = {number // factor} x {factor} + {number % factor}"
