"""Right loops that could be mistaken for broken ones: an audit finds nothing wrong in any of them.

``RIGHT_LOOPS`` lists them; ``test_right_loops_confirmed.py`` compares what their optimizers read with the
big batch where there is one.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Right:
    """A right loop.

    Attributes:
        file: in this folder.
        ranks: that it runs on.
        objective: of ``broken_loops.truth`` that its big batch has; None where it has its own.
        num_samples, samples: of the data, and of each update, on each rank or for each.
        clip: of the norm.
        tolerance: relative.
        slow: takes seconds, or a library that does.
    """

    file: str
    ranks: int = 1
    objective: str | None = None
    num_samples: int = 48
    samples: tuple[Any, ...] = (16, 16, 16)
    clip: tuple[str, float] | None = None
    tolerance: float = 1e-5
    slow: bool = False


_EXACT = {"file": "plain", "objective": "images"}
_TEXTS = {"file": "plain", "objective": "texts", "num_samples": 24, "samples": (8, 8, 8)}

RIGHT_LOOPS: dict[str, Right] = {
    "amp_with_skipped_update": Right(**_EXACT, samples=(16, -16, 16), tolerance=2e-2),
    "bfloat16_autocast": Right(**_EXACT, tolerance=3e-2),
    "norms_logged": Right(**_EXACT),
    "no_accumulation": Right(**_EXACT),
    "sums_divided_in_grad": Right(**_TEXTS),
    "mean_times_own_count": Right(**_TEXTS),
    "checkpointing": Right(**_EXACT),
    "reentrant_checkpointing": Right(**_EXACT),
    "zeros_instead_of_none": Right(**_EXACT),
    "none_by_hand": Right(**_EXACT),
    "clipped_by_hand": Right(**_EXACT, clip=("norm", 0.1)),
    "tail_with_its_own_division": Right(**_EXACT, num_samples=40, samples=(16, 16, 8) * 2),
    "evaluation_between_updates": Right(**_EXACT),
    "warmup_by_hand": Right(**_EXACT),
    "lbfgs": Right(file="plain"),
    "nanogpt_style": Right(file="plain"),
    "compiled": Right(**_EXACT, slow=True),
    **{
        name: Right(file="losses")
        for name in (
            "auxiliary_loss",
            "two_heads",
            "label_smoothing",
            "distillation",
            "focal",
            "frozen_body",
            "tied_weights",
            "sequence_means",
            "class_weights",
            "dpo",
            "ppo",
            "grpo",
            "vae",
            "gradient_penalty",
            "truncated_backpropagation",
        )
    },
    **{
        name: Right(file="several_optimizers")
        for name in ("gan", "wgan_gp", "one_backward_two_optimizers", "two_losses_backward_each")
    },
    "ddp_unequal_counts": Right(
        file="ranks_and_libraries",
        objective="images",
        ranks=2,
        samples=((16, 16, 16), (12, 12, 12)),
        slow=True,
    ),
    "fsdp": Right(file="ranks_and_libraries", objective="images", ranks=2, slow=True),
    "fabric": Right(file="ranks_and_libraries", objective="images", slow=True),
    "lightning": Right(file="ranks_and_libraries", objective="images", slow=True),
    "trainer": Right(file="ranks_and_libraries", slow=True),
}


def right_loop(name: str) -> Callable[..., Any]:
    """The function of one row of the table."""
    return getattr(importlib.import_module(f"right_loops.{RIGHT_LOOPS[name].file}"), name)
