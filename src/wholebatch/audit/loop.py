"""The Python face of the audit: a training function under the watch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from wholebatch.audit.intent import said_by_user
from wholebatch.audit.judge.evidence import Judgement
from wholebatch.audit.judge.verdict import judge
from wholebatch.audit.watching import Watching
from wholebatch.whereabouts import told


def audit_loop(
    train: Callable[[], Any],
    *,
    updates: int = 4,
    skip_updates: int = 0,
    expect_micro_batches: int | None = None,
    expect_global_batch_samples: int | None = None,
    replay: bool = True,
) -> Judgement:
    """Run a training function and judge its first updates: what does every item weigh?

    An update is right where every item of its global batch weighs 1/N, summed to 1: item weight = loss
    weight x kappa, the gradient that flows back to the item's loss times the factor with which what its
    backward delivered stands in what the optimizer read.

    Args:
        train: runs the loop; takes nothing. It is run to its end, and its result is dropped.
        updates: to audit, of each optimizer.
        skip_updates: to let pass before.
        expect_micro_batches: of one update on one replica, as you have it.
        expect_global_batch_samples: of one update, as you have it.
        replay: run one window again where its weights can't be read.

    Returns:
        Judgement: with its findings. On several ranks, of this rank alone; for all of them together, run
        the script under ``wholebatch audit``.

    Raises:
        Exception: What ``train`` raises, once nothing is watched any more.

    Exactness: the loop's own results are bit for bit those without the audit.
    """
    names = ("expect_micro_batches", "expect_global_batch_samples")
    flags = said_by_user(expect_micro_batches, expect_global_batch_samples, names=names)
    watching = Watching(updates=updates, skip_updates=skip_updates, flags=flags, replay=replay, search=True)
    try:
        train()
    except BaseException as error:
        watching.end("failed", told(error))
        raise
    return judge([watching.end()])
