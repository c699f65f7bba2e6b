"""What a loss does on three groups of samples and their unions: is it a mean, or a sum and a constant?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from wholebatch.verify.trial import Problem, terms_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Thirds:
    """One term's loss on three consecutive groups of samples and on their unions."""

    a: float
    b: float
    c: float
    ab: float
    bc: float
    abc: float


def thirds_of(problem: Problem, sizes: Sequence[int], model: nn.Module, term: str) -> Thirds | None:
    """Run loss_fn on the groups, without a backward.

    Args:
        problem: what is judged.
        sizes: any split; adds up to the samples of the batch.
        model: in the mode of the experiment.
        term: whose losses.

    Returns:
        ``None`` for fewer than three samples.

    Exactness: rounding of one forward each.
    """
    samples = sum(sizes)
    a, b = samples // 3, (samples + 1) // 3
    c = samples - a - b
    if samples < 3:
        return None
    cuts = {"a_bc": problem.cut([a, b + c]), "ab_c": problem.cut([a + b, c])}
    batches = {
        "a": cuts["a_bc"][0],
        "b": problem.cut([a, b, c])[1],
        "c": cuts["ab_c"][1],
        "ab": cuts["ab_c"][0],
        "bc": cuts["a_bc"][1],
        "abc": problem.whole,
    }
    found = {name: terms_of(problem, batch, model=model) for name, batch in batches.items()}
    return Thirds(**{name: terms.get(term, (0.0, 0.0))[0] for name, terms in found.items()})


def is_weighted_mean(thirds: Thirds, margin: float) -> bool:
    """Whether the loss is a mean over something, whatever it is a mean over.

    For a mean with weights w of the groups, ``S(ab) = (w_a S(a) + w_b S(b)) / (w_a + w_b)`` gives
    ``w_b / w_a``, and ``S(bc)`` gives ``w_c / w_b``. Together they say what ``S(abc)`` has to be; that
    is compared.

    Args:
        thirds: the losses.
        margin: relative difference that rounding explains.
    """
    if (expected := _mean_of_all(thirds)) is None:
        return False
    # How far rounding of each of the five inputs carries into the prediction.
    reach = margin * abs(thirds.abc)
    for name in ("a", "b", "c", "ab", "bc"):
        value = getattr(thirds, name)
        moved = _mean_of_all(replace(thirds, **{name: value + margin * abs(value)}))
        reach += math.inf if moved is None else abs(moved - expected)
    spread = max(thirds.a, thirds.b, thirds.c) - min(thirds.a, thirds.b, thirds.c)
    return abs(expected - thirds.abc) <= reach < spread


def _mean_of_all(thirds: Thirds) -> float | None:
    """What ``S(abc)`` has to be if S is a weighted mean; ``None`` if it can't be one."""
    if thirds.b == thirds.ab or thirds.c == thirds.bc:
        return None
    b_to_a = (thirds.ab - thirds.a) / (thirds.b - thirds.ab)
    c_to_b = (thirds.bc - thirds.b) / (thirds.c - thirds.bc)
    weights = (1.0, b_to_a, b_to_a * c_to_b)
    if not math.fsum(weights):
        return None
    return (thirds.a + weights[1] * thirds.b + weights[2] * thirds.c) / math.fsum(weights)


def same_amount_per_call(thirds: Thirds, margin: float) -> float | None:
    """What a loss adds once a call whatever its samples; ``None`` where it adds no such amount.

    ``S(a) + S(b) - S(ab)``, if it is also ``S(b) + S(c) - S(bc)`` and half of
    ``S(a) + S(b) + S(c) - S(abc)``, and more than rounding.

    Args:
        thirds: the losses.
        margin: relative difference that rounding explains.
    """
    amounts = (
        thirds.a + thirds.b - thirds.ab,
        thirds.b + thirds.c - thirds.bc,
        (thirds.a + thirds.b + thirds.c - thirds.abc) / 2.0,
    )
    size = sum(map(abs, (thirds.a, thirds.b, thirds.c, thirds.ab, thirds.bc, thirds.abc)))
    alike = max(amounts) - min(amounts) <= margin * size
    return amounts[0] if alike and min(map(abs, amounts)) > margin * size else None
