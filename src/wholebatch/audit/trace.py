"""What one rank saw of somebody's training loop: plain data that the judge reads. No torch here.

A *backward* is a call that brought gradients to watched parameters, those that some optimizer steps.
Between two steps of an optimizer the backwards are its window. Nothing here is a judgement: who divided by
what is worked out in ``judge/``, from all ranks together.

Gradients are recorded as *sketches*: a fixed linear map from a tensor to ``SKETCH_WIDTH`` numbers, the
same on every rank and for a shard as for its rows of the whole, so that sums and multiples of gradients
are the same sums and multiples of their sketches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

SKETCH_WIDTH = 16

# sketches of all watched parameters that have a gradient: index of the parameter -> SKETCH_WIDTH float64
# numbers
Sketches = Mapping[int, NDArray[np.float64]]

EventKind = Literal[
    "forward",  # an outermost call of a module that holds watched parameters, with gradients enabled
    "backward",
    "probe",  # gradients to watched parameters asked for by autograd.grad: delivered nothing
    "clear",  # gradients are gone: by zero_grad, or found None or zero by whoever looked next
    "clear_call",  # zero_grad was called and the gradients are still there
    "clip",
    "unscale",
    "scale_update",
    "step",
    "skip",  # GradScaler.step that left the optimizer alone; or an engine's own skip
    "schedule",
    "average",  # an average of the weights (EMA, teacher) moved
    "pass",  # an iterator over a DataLoader began or ended
    "reduce",  # a collective from Python on gradients of watched parameters (or on all of them flattened)
    "parameters_changed",  # found changed without a step
    "gradients_changed",  # gradients found multiplied or replaced between backwards, by hand
    "logged",  # a number that was printed or logged as a loss
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A line of the user's own code.

    Attributes:
        file: as the user would write it, relative to the working directory where it lies below it.
        line: from 1.
        function: that it is in; ``"<module>"`` at the top of the script.
        code: the line itself, stripped; empty where it can't be read.
    """

    file: str
    line: int
    function: str = "<module>"
    code: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Level:
    """One reading of what a term averages: its units, and what each of them weighs.

    The *loss weight* of a unit is the gradient of what ``backward`` was called on with respect to that
    unit's own loss, times the gradient that ``backward`` was given (1 by default): with a mean over n
    items and an upstream gradient g each weighs g/n, with a sum g, unreduced the gradient elementwise.
    Units with weight zero because they were masked, ignored or selected away are not units.

    Attributes:
        unit: ``"item"`` the finest, what the loss gives one number for; ``"row"`` the entries of the first
            dimension of a dense tensor that was reduced in one go (an implicit reading, which is good for
            nothing but telling a sum over features from a missing division); ``"group"`` means or sums
            that the user's code itself took first (per sequence, per sample, per micro-batch) and then
            reduced again.
        num_units: units in this backward.
        total: summed loss weight of all units (or, with coefficients, of ``coefficient x unit``).
        lowest, highest: the smallest and largest loss weight of one unit, its coefficient taken out.
        per_unit_shape: of one unit of kind ``"row"``; the reading holds over a window only where it is the
            same in all its backwards.
    """

    unit: Literal["item", "row", "group"]
    num_units: float
    total: float
    lowest: float
    highest: float
    per_unit_shape: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Term:
    """One reduction of per-item losses to a number, in one backward.

    Attributes:
        key: the same for the same term of the loss in every micro-batch, whatever their sizes:
            operation and how it is reached from the root, ``"NllLoss/0"``.
        operation: ``"NllLoss"``, ``"MseLoss"``, ``"Mean"``, ``"Sum"``, ...
        levels: readings, the coarsest (outermost reduction) first, the item level last.
        coefficients: ``"none"``, every item counts alike; ``"class_weights"``: items have weights of their
            own (num_units is then their sum); ``"factors"``: the items were multiplied by numbers that are
            no mask (advantages, importance weights), which may be meant.
        square: the scores that were reduced are a batch against itself (``rows == columns``, both from the
            model), as in contrastive losses with in-batch negatives.
        surrogate: a product with a tensor of both signs that was itself computed from a gradient, as cached
            contrastive losses have: nobody's loss, so its weights say nothing.
        quotient: it lies in a quotient of two reductions over the samples (a Dice loss over a batch), which
            is no sum over micro-batches.
        multiplied, divided: numbers that the whole term was multiplied and divided by in the loss's own
            arithmetic, the outermost first; a loss scale is among them.
        dtype: of the gradients that the weights were read from: in bfloat16 they are rounded to 4e-3.
    """

    key: str
    operation: str
    levels: tuple[Level, ...]
    coefficients: Literal["none", "class_weights", "factors"] = "none"
    square: bool = False
    surrogate: bool = False
    quotient: bool = False
    multiplied: tuple[float, ...] = ()
    divided: tuple[float, ...] = ()
    dtype: str = "float32"


@dataclass(frozen=True, kw_only=True, slots=True)
class Forward:
    """An outermost call of a module that holds watched parameters.

    Attributes:
        module: its class.
        samples: one 64-bit number for each sample, equal for equal samples; empty where inputs have no
            first dimension in common.
        shape: of the first tensor among the inputs.
        num_distinct_values: of that tensor, counted up to 256: tells toy inputs, whose samples repeat by
            chance.
        random_state: a hash of the state of the default generators when it began.
        num_dropout: dropout modules in training mode with p > 0 (and attention dropout where it shows).
        num_batch_norm: modules in training mode that normalise by the batch and keep running statistics.
        holds_reduction: the wrapper was told before this forward not to reduce; None without a wrapper.
        wrapper: ``"DistributedDataParallel"``, ``"FSDPModule"``, ``"FullyShardedDataParallel"``,
            ``"DeepSpeedEngine"`` or ``""``.
        input_needs_gradient: an input that nothing computed asks for its gradient, as a saliency map does.
        inside_wrapper: False where a module that is wrapped was called past its wrapper
            (``model.module(x)``).
    """

    module: str
    samples: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()
    num_distinct_values: int = 256
    random_state: int = 0
    num_dropout: int = 0
    num_batch_norm: int = 0
    holds_reduction: bool | None = None
    wrapper: str = ""
    inside_wrapper: bool = True
    input_needs_gradient: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Backward:
    """What one backward brought.

    Attributes:
        site: all lines of the user's own code on the call stack, innermost first: backwards of the same
            micro-batch loop have the same site, the two losses of a GAN have two.
        loss: value of what backward was called on; None where that was not one number.
        terms: what the loss is made of; empty where it could not be read, and ``unread`` says why.
        unread: why the terms could not be read; None where they could.
        delivered: sketches of what this backward alone delivers to each parameter, before any reduction.
        num_collectives: collectives that the default process group issued meanwhile.
        holds_reduction: as a wrapper was told while backward ran; None without a wrapper.
        loss_scale: that the loss was multiplied by through a GradScaler; 1.0 without.
        graph_alive, outputs_alive: whether the graph of this loss, the model's outputs, were still
            referred to when the window's step began.
        learning_rates: of each optimizer's first parameter group.
        num_forwards: outermost forwards since the backward before.
        in_step: ran inside ``optimizer.step(closure)``.
        low_precision_error: relative error of the accumulated gradient on sampled rows against a float64
            sum of what was delivered, where gradients are bf16 or fp16, as of this backward; None
            elsewhere.
    """

    site: tuple[Place, ...]
    loss: float | None
    terms: tuple[Term, ...]
    unread: str | None = None
    delivered: Sketches = field(default_factory=dict)
    num_collectives: int = 0
    holds_reduction: bool | None = None
    loss_scale: float = 1.0
    graph_alive: bool = False
    outputs_alive: bool = False
    learning_rates: tuple[float, ...] = ()
    num_forwards: int = 1
    in_step: bool = False
    low_precision_error: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One thing that happened, in the order in which it did.

    Attributes:
        kind: what.
        place: the innermost line of the user's own code that led to it; None where there is none.
        through: the library that did it for the user: ``"accelerate"``, ``"transformers"``,
            ``"lightning"``, ``"fabric"``, ``"deepspeed"``, ``"composer"``, ``"trl"`` or ``""``.
        optimizers: indices of the optimizers concerned; empty where it concerns none or all.
        forward, backward: for those kinds.
        before, after: sketches of ``.grad`` around a clip or an unscale, around a change by hand; of a step
            only ``before``: what the optimizer read.
        value: of a clip the largest norm allowed; of an unscale or a scale update the scale (the new one);
            of a logged number that number; of a schedule the learning rate after it; of a clear the share
            of the optimizer's parameters that it cleared; of a pass 1.0 where it begins and 0.0 where it
            ends.
        detail: in words, for reports: what was called, with what.
        num_parameters: of a step: parameters of the optimizer that need gradients.
        num_without_gradient: of a step: how many of these had none (or only zeros).
        gradient_norm: of a step: the norm that was read, on this rank; None where it was not taken.
        gradient_dtype: of a step: ``"float32"``, ``"bfloat16"``, ...
    """

    kind: EventKind
    place: Place | None = None
    through: str = ""
    optimizers: tuple[int, ...] = ()
    forward: Forward | None = None
    backward: Backward | None = None
    before: Sketches | None = None
    after: Sketches | None = None
    value: float | None = None
    detail: str = ""
    num_parameters: int = 0
    num_without_gradient: int = 0
    gradient_norm: float | None = None
    gradient_dtype: str = "float32"

    def concerns(self, optimizer: int) -> bool:
        """Whether it is this optimizer's, or everybody's.

        Args:
            optimizer: its index.
        """
        return not self.optimizers or optimizer in self.optimizers


@dataclass(frozen=True, kw_only=True, slots=True)
class Intent:
    """How many micro-batches an update should have, as a framework or the user said it.

    Attributes:
        micro_batches: of one update on one replica.
        source: who says so, in words: ``"TrainingArguments.gradient_accumulation_steps"``,
            ``"--expect-micro-batches"``.
        framework: ``"transformers"``, ``"accelerate"``, ``"lightning"``, ``"fabric"``, ``"deepspeed"``,
            ``"composer"``, ``"trl"`` or ``""``.
        global_batch_samples: of one update, where somebody said it.
    """

    micro_batches: int | None = None
    source: str = ""
    framework: str = ""
    global_batch_samples: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Replayed:
    """What a replay of one captured window found, on this rank.

    Attributes:
        update: index of the update of the first optimizer that was captured, from 1.
        factor: how many times the gradient of the one big batch the optimizer read (least squares over all
            elements).
        difference: relative distance of what it read from that multiple of the big batch's gradient.
        rounding: the distance that rounding explains.
        split_difference: relative distance of what it read from the sum over the replayed micro-batches,
            each as the loop had it: large where the replay itself did not come out.
        dtype: that it ran in.
        unable: why there was no replay; None where there was.
        compared: ``"read"``: factor and difference are of what the optimizer read; ``"split"``: of the
            sum over the replayed micro-batches, where what was read holds more than this rank's share, or
            dropout that no big batch can repeat (factor and difference are then without dropout).
            ``split_difference`` is still of what was read; on several ranks of the losses' values.
        split_from_big: relative distance of the replayed micro-batches' sum from the nearest multiple of
            the big batch's gradient: both in ``dtype``, so that in float64 nothing but rounding of
            float64 is left where all items weigh alike.
        replay_rounding: what rounding explains of ``split_from_big``.
        additive: the loss of the big batch is the sum of the micro-batches' losses, and the modules were
            given no number of items: a sum, ``factor`` is what each summand weighs, and right is 1/N (in
            units of what the loss divides by itself, where that is fixed). Equal weights can be judged
            then, the total only by who knows N.
        num_samples: of this rank's window.
        joined: ``"inputs"``: one forward over the samples of all micro-batches; ``"last call"``: the model
            ran by micro-batch and the last module, the loss, over all of its outputs at once.
    """

    update: int = 0
    factor: float = 1.0
    difference: float = 0.0
    rounding: float = 0.0
    split_difference: float = 0.0
    dtype: str = "float64"
    unable: str | None = None
    compared: Literal["read", "split"] = "read"
    split_from_big: float = 0.0
    replay_rounding: float = 0.0
    additive: bool = False
    num_samples: int = 0
    joined: Literal["inputs", "last call"] = "inputs"


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerFacts:
    """One optimizer: its class, which parameters it steps, and what steps it."""

    name: str
    parameters: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTrace:
    """Everything that one rank saw.

    Attributes:
        rank, num_ranks: in the job.
        replica, num_replicas: which of the data-parallel copies of the model this rank belongs to; ranks
            that share a replica (tensor or pipeline parallel) have the same samples by right.
        parameters: name of each watched parameter; where no module names it, ``"parameter 3"``.
        dtypes: of each watched parameter's gradient.
        optimizers: in the order in which they were first seen.
        events: in order.
        intents: what frameworks and flags say, the most reliable first.
        replayed: what the replay found; None where none was tried.
        num_skipped_updates: updates before the first that was watched.
        ended: ``"finished"``, ``"audited"`` (enough updates were seen and the watch ended), ``"exit"``,
            ``"failed"`` or ``"stalled"``.
        failure: what ended it, in words; None where nothing failed.
        unseen: what this watch could not see, in words, one entry each: an engine whose gradients it can't
            reach, ...
        sharded: for each watched parameter, whether this rank's readings of ``.grad`` are of its shard
            only: those of all ranks add up to the whole. Empty where none is.
    """

    rank: int
    num_ranks: int
    replica: int
    num_replicas: int
    parameters: tuple[str, ...]
    dtypes: tuple[str, ...]
    optimizers: tuple[OptimizerFacts, ...]
    events: tuple[Event, ...]
    intents: tuple[Intent, ...] = ()
    replayed: Replayed | None = None
    num_skipped_updates: int = 0
    ended: Literal["finished", "audited", "exit", "failed", "stalled"] = "finished"
    failure: str | None = None
    unseen: tuple[str, ...] = ()
    sharded: tuple[bool, ...] = ()
