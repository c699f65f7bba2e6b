"""``wholebatch measure --cost``: what a micro-batch costs, by its size, on the user's model and machine.

    seconds = a + b * positions + c * positions * longest

is fitted to forwards and backwards of micro-batches of many sizes. Packing balances the replicas by it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, cycle, islice
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from wholebatch.budget import BudgetPlan
from wholebatch.errors import JudgeError, UsageError
from wholebatch.loading.reading import read_samples
from wholebatch.packing import CostModel
from wholebatch.report.output import OutputConsole, text_stream, write_json
from wholebatch.train.config import load_config
from wholebatch.train.parts import Job, build_job, check_settings
from wholebatch.train.world import join_world

# Of the JSON of ``wholebatch measure``.
SCHEMA_VERSION = 1
_LENGTH_QUANTILES = (0.1, 0.5, 0.9, 1.0)
_SHARES_OF_BUDGET = (0.125, 0.25, 0.5, 1.0)
_WARM_UPS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """A micro-batch that was timed.

    Args:
        samples: in it.
        longest: tokens of its longest sample.
        positions: that its forward computes, padding included.
        positions_and_length: positions times longest; in packed rows the sum of squared lengths.
        seconds: of the fastest forward and backward.
    """

    samples: int
    longest: int
    positions: int
    positions_and_length: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredCost:
    """What was measured, and the model of it.

    Args:
        cost: in positions' worth: the cost of one position is 1, where it has any.
        seconds_per_cost: seconds of a micro-batch that costs 1.
        timed: what was measured.
    """

    cost: CostModel
    seconds_per_cost: float
    timed: tuple[Timed, ...]

    def fitted_seconds(self, one: Timed) -> float:
        """What the model says of a micro-batch that was timed."""
        terms = (1.0, float(one.positions), float(one.positions_and_length))
        return self.seconds_per_cost * sum(
            c * t for c, t in zip(_coefficients(self.cost), terms, strict=True)
        )

    @property
    def largest_error(self) -> float:
        """The largest distance of the model from what was measured, as a share of that."""
        return max(abs(self.fitted_seconds(one) / one.seconds - 1.0) for one in self.timed)

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        names = ("cost_per_micro_batch", "cost_per_position", "cost_per_position_and_length")
        return {
            "schema_version": SCHEMA_VERSION,
            "command": "measure",
            **dict(zip(names, _coefficients(self.cost), strict=True)),
            "seconds_per_cost": self.seconds_per_cost,
            "largest_error": self.largest_error,
            "micro_batches": [
                {
                    "samples": one.samples,
                    "longest": one.longest,
                    "positions": one.positions,
                    "seconds": one.seconds,
                    "fitted_seconds": self.fitted_seconds(one),
                }
                for one in self.timed
            ],
        }


def measure_cost_command(
    config: Path | None, *, changes: Sequence[str], rounds: int, json_target: str | None
) -> int:
    """Measure, and write the settings to copy.

    Args:
        config: a TOML file of the training job; None for the embedded default.
        changes: ``section.key=value`` each.
        rounds: how often each micro-batch is timed.
        json_target: a file or "-" for the numbers as JSON; None for none.

    Raises:
        UsageError: settings that do not fit.
        JudgeError: lengths are not known ahead, or all are the same and nothing can be told apart.
    """
    settings = load_config(config, changes)
    with join_world() as world:
        if world.ranks > 1:
            raise UsageError(
                f"measure times one rank, and {world.ranks} were started; give the command without torchrun"
            )
        job = build_job(settings, world, check_settings(settings, 1))
        found = measure_cost(job, rounds=rounds)
    OutputConsole(file=text_stream(json_target)).print(cost_text(found), markup=False, highlight=False)
    write_json(found.to_dict(), json_target)
    return 0


def measure_cost(job: Job, *, rounds: int = 5) -> MeasuredCost:
    """Time forwards and backwards of micro-batches of many sizes, and fit the cost model.

    The sizes span the lengths of the data and an eighth of the largest micro-batch of the plan up to all of
    it. Rounds are interleaved, so that a busy moment of the machine does not fall on one size.

    Args:
        job: what ``build_job`` made, on one rank; its gradients are cleared at the end.
        rounds: how often each size is timed; the fastest counts, since others only add to it.

    Raises:
        JudgeError: lengths are not known ahead, or there is one size only.
    """
    chosen = _micro_batches(job)
    data, seed = job.data, job.config.run.seed
    batches = [data.collate(read_samples(data.train, ids, epoch=0, seed=seed), ids, 0) for ids in chosen]
    for batch in batches * _WARM_UPS:
        _seconds_of(job, batch)
    taken = [[_seconds_of(job, batch) for batch in batches] for _ in range(rounds)]
    job.model.module.zero_grad()
    fastest = [min(times) for times in zip(*taken, strict=True)]
    return fit_cost([_timed(job, ids, seconds) for ids, seconds in zip(chosen, fastest, strict=True)])


def _micro_batches(job: Job) -> list[list[int]]:
    """Ids of the samples of every micro-batch to time, each a different shape."""
    lengths = job.data.lengths
    if lengths is None:
        raise JudgeError(
            f"{job.config.data.source} does not tell the lengths of its samples ahead, so there are no "
            f"sizes to choose from; let its function return lengths beside train"
        )
    by_length = np.argsort(lengths, kind="stable")
    ends = sorted({max(1, round(q * len(lengths))) for q in _LENGTH_QUANTILES})
    chosen: dict[tuple[int, int], list[int]] = {}
    for end in ends:
        longest = max(1, int(lengths[by_length[end - 1]]))
        for share in _SHARES_OF_BUDGET:
            samples = max(1, int(share * _largest_positions(job)) // longest)
            # The longest of these first, over again where the data has fewer.
            ids = list(islice(cycle(by_length[:end][::-1].tolist()), samples))
            chosen.setdefault((samples, longest), ids)
    if len(chosen) < 2:
        raise JudgeError(
            f"all micro-batches of {job.config.data.source} have one size, so there is nothing to tell "
            f"apart; raise batch.tokens_per_micro_batch"
        )
    return list(chosen.values())


def _largest_positions(job: Job) -> int:
    plan = job.plan
    if isinstance(plan, BudgetPlan):
        return plan.tokens_per_micro_batch
    assert job.data.lengths is not None
    return plan.micro_batch_samples * int(job.data.lengths.max())


def _seconds_of(job: Job, batch: Mapping[str, Any]) -> float:
    device = job.world.device
    _wait_for(device)
    start = perf_counter()
    loss = job.loss(job.model.module, batch)
    pairs = loss.values() if isinstance(loss, Mapping) else [loss]
    torch.autograd.backward([summed for summed, _ in pairs])
    _wait_for(device)
    return perf_counter() - start


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _timed(job: Job, ids: Sequence[int], seconds: float) -> Timed:
    assert job.data.lengths is not None
    lengths = job.data.lengths[np.asarray(ids)]
    longest, packed = int(lengths.max()), isinstance(job.plan, BudgetPlan) and job.plan.rows == "packed"
    positions = int(lengths.sum()) if packed else longest * len(ids)
    return Timed(
        samples=len(ids),
        longest=longest,
        positions=positions,
        positions_and_length=int((lengths**2).sum()) if packed else positions * longest,
        seconds=seconds,
    )


def fit_cost(timed: Sequence[Timed]) -> MeasuredCost:
    """Fit the three costs, none below 0, with the least sum of squared relative errors.

    Args:
        timed: micro-batches of at least two sizes.

    Of the plain least squares over every subset of the three, the best without a number below 0 is the
    non-negative one.
    """
    seconds = np.array([one.seconds for one in timed])
    terms = np.array([[1.0, one.positions, one.positions_and_length] for one in timed])
    weighted = terms / seconds[:, None]  # each row then says 1
    best, least = np.zeros(3), np.inf
    for columns in (list(some) for size in (1, 2, 3) for some in combinations(range(3), size)):
        found = _least_squares(weighted, columns)
        error = float(((weighted @ found - 1.0) ** 2).sum())
        if (found >= 0).all() and error < least * (1 - 1e-9):
            best, least = found, error
    unit = best[1] or best.max()
    return MeasuredCost(
        cost=CostModel(
            per_micro_batch=float(best[0] / unit),
            per_position=float(best[1] / unit),
            per_position_and_length=float(best[2] / unit),
        ),
        seconds_per_cost=float(unit),
        timed=tuple(timed),
    )


def _least_squares(weighted: NDArray[np.float64], columns: list[int]) -> NDArray[np.float64]:
    scale = weighted[:, columns].max(axis=0)
    found = np.zeros(weighted.shape[1])
    solved, *_ = np.linalg.lstsq(weighted[:, columns] / scale, np.ones(len(weighted)), rcond=None)
    found[columns] = solved / scale
    return found


def _coefficients(cost: CostModel) -> tuple[float, float, float]:
    return cost.per_micro_batch or 0.0, cost.per_position, cost.per_position_and_length


def cost_text(found: MeasuredCost) -> str:
    """The measurement for people, with the settings to copy."""
    lines = ["samples  longest  positions  milliseconds  model says"]
    lines += [
        f"{one.samples:7,}  {one.longest:7,}  {one.positions:9,}  {1e3 * one.seconds:12.2f}"
        f"  {1e3 * found.fitted_seconds(one):10.2f}"
        for one in found.timed
    ]
    per_micro_batch, per_position, per_both = _coefficients(found.cost)
    return "\n".join(
        [
            "Forward and backward of a micro-batch, by its size",
            *lines,
            f"The model is {found.largest_error:.0%} off at most.",
            "",
            "To cut and to balance by it, set these three in the section [batch]:",
            f"cost_per_micro_batch = {per_micro_batch:.4g}",
            f"cost_per_position = {per_position:.4g}",
            f"cost_per_position_and_length = {per_both:.4g}",
        ]
    )
