"""What each script is, and what an audit of it has to say.

What the gradient is (``gradient``) follows from the theory in ``why``, and ``confirm.py`` compares it with
the big batch's; what the audit has to find (``finds``) follows from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

SCRIPTS = Path(__file__).resolve().parent / "scripts"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A primary finding that is wrong or costs: its kind, and where the kind has them factor and across."""

    kind: str
    factor: float | None = None
    across: str | None = None


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One script in one environment.

    Attributes:
        script: its file, and its arguments.
        environment: a name of ``environments.py``, or ``"here"``.
        ranks: processes.
        samples: of a global batch.
        gradient: that the optimizer gets, by update of a pass: a factor to the big batch's gradient, or
            ``"other"``, for one that is no multiple of it.
        ranks_agree: whether they get the same one.
        finds: what an audit has to find; nothing else may be wrong or cost.
        as_typed: audited by the command that a user types, and not in forks of one process.
        why: the theory.
    """

    script: str
    environment: str = "here"
    ranks: int = 1
    samples: int = 8
    gradient: tuple[float | Literal["other"], ...] = (1.0, 1.0)
    ranks_agree: bool = True
    finds: tuple[Finding, ...] = ()
    as_typed: bool = False
    why: str

    @property
    def launched(self) -> bool:
        """Whether it wants the variables of a launcher; DeepSpeed does for one rank too."""
        return self.ranks > 1 or self.environment == "deepspeed"

    def __str__(self) -> str:
        words = self.script.replace(".py", "").split()
        return "-".join([*words, self.environment, f"{self.ranks}r"])


OTHER: tuple[Literal["other"], ...] = ("other", "other")
UNEQUAL = (Finding(kind="unequal_item_weights", across="micro_batches"),)
DEVISED = "The mean of each micro-batch, then their mean: right where all have as many targets."
COUNTED = "The sum of the targets' losses over their number in the window."
PEERS = (
    Peer(
        script="trainer_causal_lm.py ragged",
        environment="transformers-4.45",
        gradient=OTHER,
        finds=UNEQUAL,
        why="The model's mean over a micro-batch's labels, and Accelerate's division by the window.",
    ),
    Peer(script="trainer_causal_lm.py equal", environment="transformers-4.45", why=DEVISED),
    Peer(
        script="trainer_classifier_tail.py",
        environment="transformers-4.53",
        gradient=(1.0, 0.25),
        finds=(Finding(kind="tail_weight", factor=0.25),),
        why="A forward without **kwargs takes no number of items, so that the Trainer divides by the 4 "
        "that were configured, also in a window of one.",
    ),
    Peer(
        script="trainer_causal_lm.py ragged",
        environment="transformers-4.53",
        gradient=(77 / 85, 65 / 73),
        finds=(Finding(kind="total_weight", factor=77 / 85),),
        why="Divides by the labels as they stand: the first of each document counts, and is no target.",
    ),
    Peer(script="trainer_causal_lm.py ragged", why=COUNTED),
    Peer(script="trainer_causal_lm.py tail", why=COUNTED),
    Peer(
        script="trainer_causal_lm.py ragged",
        ranks=2,
        samples=16,
        gradient=(1.0,),
        why="The same over both ranks, times D for the reducer's division.",
    ),
    Peer(
        script="trainer_classifier_tail.py",
        gradient=(4.0, 1.0),
        finds=(Finding(kind="total_weight", factor=4.0),),
        why="The classifier's forward has **kwargs now, so that the Trainer leaves the division to it, but "
        "its loss is a mean that leaves the number of items aside.",
    ),
    Peer(
        script="trainer_own_loss.py",
        gradient=(4.0, 4.0),
        finds=(Finding(kind="total_weight", factor=4.0),),
        why="The model takes the number of items, so that the Trainer leaves the division to the loss, "
        "which does not do it.",
    ),
    Peer(
        script="trl_sft.py", environment="trl", why="The Trainer's own division by the items of the window."
    ),
    Peer(script="accelerate_loop.py equal", why=DEVISED),
    Peer(script="accelerate_loop.py ragged", gradient=OTHER, finds=UNEQUAL, as_typed=True, why=DEVISED),
    Peer(
        script="accelerate_loop.py tail",
        gradient=(1.0, 0.5),
        finds=(Finding(kind="tail_weight", factor=0.5),),
        why="accumulate closes the window with the loader, backward divides by 4: 2 of 4.",
    ),
    Peer(
        script="accelerate_plain_backward.py",
        gradient=(4.0, 4.0),
        finds=(Finding(kind="total_weight", factor=4.0),),
        why="Only accelerator.backward divides.",
    ),
    Peer(
        script="accelerate_schedule.py",
        finds=(Finding(kind="schedule_inside_window"),),
        why="The gradients are right; a plain scheduler moves four times as fast.",
    ),
    Peer(
        script="accelerate_token_average.py",
        why="Sums over the targets of the window, times the 4 that backward divides by.",
    ),
    Peer(
        script="accelerate_token_average.py",
        ranks=2,
        why="The same, times the replicas; the prepared scheduler moves once per process, by design.",
    ),
    Peer(script="lightning_automatic.py equal", why=DEVISED),
    Peer(script="lightning_automatic.py ragged", gradient=OTHER, finds=UNEQUAL, why=DEVISED),
    Peer(
        script="lightning_automatic.py tail",
        gradient=(1.0, 0.5),
        finds=(Finding(kind="tail_weight", factor=0.5),),
        why="The last window of an epoch has 2 micro-batches, each divided by 4.",
    ),
    Peer(script="lightning_manual.py", why=DEVISED),
    Peer(
        script="lightning_manual.py undivided",
        gradient=(4.0, 4.0),
        finds=(Finding(kind="total_weight", factor=4.0),),
        why="Nobody divides under manual optimization.",
    ),
    Peer(script="fabric_loop.py", ranks=2, why=DEVISED),
    Peer(
        script="fabric_loop.py scope",
        ranks=2,
        finds=(Finding(kind="forward_outside_scope"),),
        why="DDP reads its flag in the forward: right gradients, reduced four times.",
    ),
    Peer(
        script="ddp_mean.py",
        ranks=2,
        samples=4,
        gradient=("other",) * 4,
        finds=(Finding(kind="unequal_item_weights", across="replicas"),),
        why="The mean over replicas of their own means.",
    ),
    Peer(script="ddp_window.py", ranks=2, as_typed=True, why="Sums x D / N, divided by D in the reducer."),
    Peer(
        script="ddp_window.py undivided",
        ranks=2,
        gradient=(0.5, 0.5),
        finds=(Finding(kind="total_weight", factor=0.5),),
        why="Sums / N, divided by D in the reducer.",
    ),
    Peer(
        script="ddp_window.py first",
        ranks=2,
        gradient=OTHER,
        ranks_agree=False,
        finds=(Finding(kind="reduced_wrong_micro_batch"),),
        why="Each rank keeps its own last three micro-batches, and they count D times.",
    ),
    Peer(script="fsdp2_window.py", ranks=2, why="Sums x D / N, divided by D in the reduction."),
    Peer(
        script="fsdp2_window.py undivided",
        ranks=2,
        gradient=(0.5, 0.5),
        finds=(Finding(kind="total_weight", factor=0.5),),
        why="Sums / N, divided by D in the reduction.",
    ),
    Peer(
        script="fsdp2_window.py held",
        ranks=2,
        gradient=(0.0, 0.0),
        finds=(Finding(kind="not_reduced"),),
        why="All gradients stay held back: the optimizer finds none and moves nothing.",
    ),
    Peer(script="deepspeed_loop.py 0 equal", environment="deepspeed", ranks=2, why=DEVISED),
    Peer(script="deepspeed_loop.py 2 equal", environment="deepspeed", ranks=2, why=DEVISED),
    Peer(
        script="deepspeed_loop.py 0 ragged",
        environment="deepspeed",
        gradient=OTHER,
        finds=UNEQUAL,
        why=DEVISED,
    ),
    Peer(
        script="deepspeed_loop.py 2 ragged",
        environment="deepspeed",
        gradient=OTHER,
        finds=UNEQUAL,
        why=DEVISED,
    ),
    Peer(
        script="deepspeed_loop.py 2 twice",
        environment="deepspeed",
        gradient=(0.25, 0.25),
        finds=(Finding(kind="total_weight", factor=0.25),),
        as_typed=True,
        why="The engine's backward divides by the window itself.",
    ),
)
