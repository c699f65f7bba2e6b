"""Least squares over sketches: with which factors do deliveries stand in what was read?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from wholebatch.audit.trace import SKETCH_WIDTH, Sketches

Array = NDArray[np.float64]
# columns of a hypothesis: deliveries that share one factor; those in no group have the factor 0
Groups = Sequence[Sequence[int]]

LOW_PRECISION = ("bfloat16", "float16", "half")
# relative residual that rounding explains, by what gradients are kept in
TOLERANCE, LOW_TOLERANCE = 1e-3, 4e-2
# a parameter whose gradients are smaller than this share of the largest is weighed as if they were not:
# rounding is all that a gradient whose true value is zero has
_FLOOR, _LOW_FLOOR = 1e-3, 3e-2
# one parameter alone may be off by so many times what all may be, and by no more than this
_ONE_PARAMETER, _ONE_PARAMETER_LIMIT = 30.0, 0.3
# deliveries nearer to linear dependence than this are not told apart
_SINGULAR, _LOW_SINGULAR = 1e-3, 5e-2
# rounding larger than the dtype says (a reduction in bf16): at most this, and more unknowns don't help
_NOISE, _EXPLAINED = 3e-2, 0.5
_TINY = 1e-12
# directions beyond which nobody counts
_ENOUGH = 400


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """Factors that explain a reading.

    Attributes:
        factors: of each delivery.
        residual: relative to what was read.
        accepted: whether that is no more than rounding.
        even: whether no parameter alone is off by more than rounding, or rounding of a lower precision.
        determined: whether the deliveries can be told apart.
    """

    factors: tuple[float, ...]
    residual: float
    even: bool
    accepted: bool
    determined: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Fitting:
    """One reading and the deliveries that may stand in it, with every parameter at its own scale.

    Attributes:
        parameters: their indices.
        deliveries: (parameters, SKETCH_WIDTH, deliveries).
        reading: (parameters, SKETCH_WIDTH).
        scale: of each parameter's gradients in the reading.
        full: of each parameter's gradients, before the floor.
        low: for each parameter, whether its gradients are in low precision.
        equations: (deliveries + 1, deliveries + 1), as good as all equations, with every parameter at its
            own scale and tolerance; the reading is the last column.
    """

    parameters: tuple[int, ...]
    deliveries: Array
    reading: Array
    scale: Array
    full: Array
    low: NDArray[np.bool_]
    equations: Array

    @classmethod
    def of(
        cls,
        deliveries: Sequence[Sketches],
        reading: Sketches,
        parameters: Sequence[int],
        low: Sequence[bool],
    ) -> Self:
        """Lay out sketches; those that are missing are zero.

        Args:
            deliveries: of each micro-batch.
            reading: what is to be explained.
            parameters: of the optimizer; those without any gradient are left out.
            low: of each of these, whether its gradients are in low precision.
        """
        zero = np.zeros(SKETCH_WIDTH)
        chosen = [
            i for i, p in enumerate(parameters) if p in reading or any(p in one for one in deliveries)
        ]
        used = [parameters[i] for i in chosen]
        matrix = np.array([[one.get(p, zero) for one in deliveries] for p in used], dtype=np.float64)
        matrix = matrix.reshape(len(used), len(deliveries), SKETCH_WIDTH).transpose(0, 2, 1)
        read = np.array([reading.get(p, zero) for p in used], dtype=np.float64)
        read = read.reshape(len(used), SKETCH_WIDTH)
        is_low = np.array([low[i] for i in chosen], dtype=np.bool_)
        with np.errstate(all="ignore"):
            per_parameter = np.sqrt((matrix**2).sum((1, 2)))
            ratio = np.sqrt((read**2).sum()) / max(np.sqrt((matrix**2).sum()), _TINY)
            full = np.maximum(np.sqrt((read**2).sum(1)), ratio * per_parameter)
        floor = np.where(is_low, _LOW_FLOOR, _FLOOR) * full.max(initial=0.0)
        larger = np.maximum(full, floor)
        scale = np.where(larger > 0, larger, 1.0)
        return cls(
            parameters=tuple(used),
            deliveries=matrix,
            reading=read,
            scale=scale,
            full=full,
            low=is_low,
            equations=_equations(matrix, read, scale, is_low),
        )

    @property
    def finite(self) -> bool:
        """Whether there is nothing in it but finite numbers."""
        return bool(np.isfinite(self.deliveries).all() and np.isfinite(self.reading).all())

    @property
    def empty(self) -> bool:
        """Whether nothing was read, though something was delivered."""
        return bool(np.abs(self.reading).sum() <= _TINY * np.abs(self.deliveries).sum())

    def only(self, keep: Sequence[int]) -> Fitting:
        """The same for some of the parameters, by place."""
        rows = list(keep)
        return Fitting(
            parameters=tuple(self.parameters[i] for i in rows),
            deliveries=self.deliveries[rows],
            reading=self.reading[rows],
            scale=self.scale[rows],
            full=self.full[rows],
            low=self.low[rows],
            equations=_equations(
                self.deliveries[rows], self.reading[rows], self.scale[rows], self.low[rows]
            ),
        )

    def solve(self, groups: Groups, num_equations: int) -> Fit:
        """Explain the reading with one factor for each group of deliveries.

        Args:
            groups: deliveries that share a factor.
            num_equations: directions that gradients were ever seen to have; as many unknowns would explain
                anything.
        """
        alone, target = self.equations[:, :-1], self.equations[:, -1]
        columns = np.stack([alone[:, list(group)].sum(1) for group in groups], axis=1)
        lengths = np.linalg.norm(columns, axis=0)
        members = [np.linalg.norm(alone[:, list(group)], axis=0).max() for group in groups]
        norms = np.maximum(lengths, np.finfo(np.float64).tiny)
        solved, _, _, singular = np.linalg.lstsq(columns / norms, target, rcond=None)
        limit = _LOW_SINGULAR if self.low.any() else _SINGULAR
        determined = bool(
            singular.size == len(groups)
            and singular.min(initial=1.0) >= limit
            and all(length >= limit * member > 0 for length, member in zip(lengths, members, strict=True))
            and len(groups) < num_equations
        )
        factors = [0.0] * self.deliveries.shape[2]
        for group, factor in zip(groups, solved / norms, strict=True):
            for j in group:
                factors[j] = float(factor)
        residual, worst = self._residuals(np.array(factors))
        return Fit(
            factors=tuple(factors),
            residual=residual,
            even=worst <= 1.0,
            accepted=residual <= TOLERANCE and worst <= 1.0,
            determined=determined,
        )

    def _residuals(self, factors: Array) -> tuple[float, float]:
        """Overall, in units where TOLERANCE is rounding; of the worst parameter, in units of its limit."""
        rest = self.reading - self.deliveries @ factors
        tolerance = np.where(self.low, LOW_TOLERANCE, TOLERANCE)
        off = np.sqrt((rest**2).sum(1)) / self.scale
        whole = np.sqrt(((self.full / self.scale) ** 2).sum())
        overall = TOLERANCE * np.sqrt(((off / tolerance) ** 2).sum()) / max(whole, _TINY)
        limits = np.minimum(_ONE_PARAMETER * tolerance, _ONE_PARAMETER_LIMIT)
        return float(overall), float((off / limits).max(initial=0.0))

    def is_noise(self, few: Fit, many: Fit) -> bool:
        """Whether what ``few`` unknowns leave is rounding: small, and more unknowns don't explain it."""
        return few.even and few.residual <= _NOISE and many.residual > _EXPLAINED * few.residual


def _equations(deliveries: Array, reading: Array, scale: Array, low: NDArray[np.bool_]) -> Array:
    """The same distances in few rows: a square root of all products of two columns, each of length 1.

    Distances are good to 1e-8 of a column, far below every tolerance; a QR decomposition takes 20 times as
    long.
    """
    whole = np.concatenate([deliveries, reading[:, :, None]], axis=2)
    if not np.isfinite(whole).all():
        return np.zeros((0, whole.shape[2]))
    weight = 1 / (scale * np.where(low, LOW_TOLERANCE / TOLERANCE, 1.0))
    rows = (whole * weight[:, None, None]).reshape(-1, whole.shape[2])
    lengths = np.maximum(np.linalg.norm(rows, axis=0), np.finfo(np.float64).tiny)
    rows /= lengths
    values, vectors = np.linalg.eigh(rows.T @ rows)
    root = np.sqrt(np.maximum(values, 0.0))[:, None] * vectors.T * lengths
    return np.asarray(root, dtype=np.float64)


def num_directions(sketches: Sequence[Sketches], parameters: Sequence[int]) -> int:
    """How many directions gradients were seen to have, up to some hundreds; small only for tiny models.

    Args:
        sketches: of gradients, as many as there are.
        parameters: to look at.
    """
    found = 0
    for p in parameters:
        seen = [one[p] for one in sketches if p in one and np.isfinite(one[p]).all() and one[p].any()][:40]
        if seen:
            rows = np.array([row / np.linalg.norm(row) for row in seen])
            rank = int(np.linalg.matrix_rank(rows, tol=1e-5 * np.sqrt(len(rows))))
            # as many directions as gradients: there may be more
            found += SKETCH_WIDTH if rank == len(rows) else rank
        if found >= _ENOUGH:
            break
    return found


def ratio(before: Sketches, after: Sketches, parameters: Sequence[int] | None = None) -> float | None:
    """The one number that ``before`` was multiplied by; None where there is none to see."""
    keys = [p for p in before if p in after and (parameters is None or p in parameters)]
    below = sum(float(before[p] @ before[p]) for p in keys)
    above = sum(float(before[p] @ after[p]) for p in keys)
    return above / below if np.isfinite(above) and np.isfinite(below) and below > 0 else None


def total(parts: Mapping[int, Sketches]) -> Sketches:
    """The sum of sketches, those of the same shard once: replicas of a shard read the same."""
    summed: dict[int, Array] = {}
    for p in {p for part in parts.values() for p in part}:
        different: list[Array] = []
        for vector in (part[p] for part in parts.values() if p in part):
            if not any(np.allclose(vector, other, rtol=1e-4, atol=0) for other in different):
                different.append(vector)
        summed[p] = np.sum(different, axis=0)
    return summed
