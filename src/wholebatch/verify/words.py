"""Numbers in words: a factor as people know it (4, 1/12), one rank and two ranks."""

from __future__ import annotations

import math
from fractions import Fraction

# Fractions with such small integers lie far enough apart that rounding hits none by chance.
_LARGEST_INTEGER = 64
_LARGEST_SHARE = 4096
_AS_NEAR_AS = 1e-6


def factor_text(factor: float) -> str:
    """``"4"``, ``"1/12"``, ``"0.123457"``; near 1 the difference, ``"1 + 1e-09"``.

    Args:
        factor: gradient of the split over that of the whole.

    Returns:
        A fraction where its integers are small (both up to 64, or one share of up to 4096), else digits.
    """
    if not math.isfinite(factor):
        return f"{factor}"
    if 0.0 < abs(factor - 1.0) < 1e-5:
        return f"1 {'+' if factor > 1.0 else '-'} {abs(factor - 1.0):.2g}"
    small = Fraction(factor).limit_denominator(_LARGEST_INTEGER)
    share = Fraction(1, round(1.0 / factor)) if 0.0 < factor < 0.5 else small
    for fraction in (small, share):
        fits = fraction.numerator <= _LARGEST_INTEGER and fraction.denominator <= _LARGEST_SHARE
        if fits and fraction and math.isclose(factor, fraction, rel_tol=_AS_NEAR_AS):
            return str(fraction)
    return f"{factor:.6g}"


def factor_sentence(factor: float | None, num_micro_batches: int) -> str:
    """Say over how many micro-batches the gradient is how many times too large, and which number that is.

    Args:
        factor: gradient of the split over that of the whole, or ``None`` for nothing to say.
        num_micro_batches: A of the split.

    Returns:
        One sentence with a blank before it, or nothing.
    """
    if factor is None:
        return ""
    known = {"A": float(num_micro_batches), "1/A": 1.0 / num_micro_batches}
    same = [f" = {name}" for name, value in known.items() if math.isclose(factor, value, rel_tol=1e-6)]
    return (
        f" Over {num_micro_batches} micro-batches the gradient is {factor_text(factor)}{''.join(same[:1])} "
        f"times the big batch's."
    )


def counted_word(number: float, word: str, plural: str | None = None) -> str:
    """``"1 rank"``, ``"2 ranks"``."""
    return f"{number:.15g} {word if number == 1 else plural or word + 's'}"
