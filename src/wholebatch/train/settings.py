"""The settings of the training job: one frozen dataclass for each section of the TOML file.

What stands behind a name in an ``Args`` list is also the comment that ``--print-config`` writes above
the key, so the meaning and the unit of every value are said once, here.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

# The warm-up of a schedule that gives no length in any unit, in runs that are long enough for it.
WARMUP_UPDATES = 20


def default_warmup_updates(num_updates: int) -> int:
    """The warm-up of a schedule that gives no length: 20 updates, and a fifth of the run at most."""
    return min(WARMUP_UPDATES, num_updates // 5)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """How long to train, and what to write when.

    Args:
        num_updates: length of the run, in updates to attempt; the learning rate reaches its end there.
        seed: of the first parameters, the order of the samples and dropout.
        evaluate_every_updates: held-out evaluations come before the first update, at this interval
            and after the last.
        print_every_updates: lines of progress where the output is not a terminal.
        folder: where header, records and checkpoints go; empty for runs/ and the date and time.
    """

    num_updates: int = 150
    seed: int = 0
    evaluate_every_updates: int = 50
    print_every_updates: int = 10
    folder: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchConfig:
    """The global batch. Ranks do not appear: they share it, and it stays the same.

    Args:
        global_batch_samples: samples of one update, over all replicas; 0 where it is given in items.
        global_batch_items: items of one update at most, in whole samples; 0 where it is given in samples.
        micro_batch_samples: samples of one forward on one replica; 0 where tokens bound it.
        tokens_per_micro_batch: positions of one forward at most, padding included. The samples of the
            global batch are then cut by their lengths, for less padding and even replicas, into as many
            micro-batches as that takes; 0 where micro_batch_samples cuts them.
        tokens_alone: a larger bound for a sample that does not fit and has a micro-batch of its own; 0
            refuses such a sample.
        rows: "padded" to the longest sample of the micro-batch, or "packed" one after the other without
            padding, for a model that keeps them apart; with tokens_per_micro_batch.
        cost_per_micro_batch: what a forward and backward costs whatever is in it, in the unit of
            cost_per_position; -1 where it is not known, for 1/32 of what tokens_per_micro_batch positions
            cost. Costs decide how many micro-batches there are, and balance the replicas; "wholebatch
            measure --cost" measures them.
        cost_per_position: for each position, padding included.
        cost_per_position_and_length: for each position, times the length of the longest sample (of its
            own sample in packed rows).
        tail: "partial" uses the samples at the end of an epoch that do not fill a global batch, with
            their own denominator; "drop" leaves them out and records how many.
    """

    global_batch_samples: int = 32
    global_batch_items: int = 0
    micro_batch_samples: int = 4
    tokens_per_micro_batch: int = 0
    tokens_alone: int = 0
    rows: Literal["padded", "packed"] = "padded"
    cost_per_micro_batch: float = -1.0
    cost_per_position: float = 1.0
    cost_per_position_and_length: float = 0.0
    tail: Literal["partial", "drop"] = "partial"


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """How the ranks that torchrun starts share the model; one rank needs none of it.

    Args:
        strategy: "ddp" keeps the whole model on every rank; "fsdp" cuts parameters, gradients and optimizer
            state over all replicas; "hsdp" cuts them over groups of ranks, and the groups are copies;
            "pipeline" gives each rank some of the built-in GPT's layers; "deepspeed" has DeepSpeed do
            what zero_stage says (extra "deepspeed").
        shards: ranks that hold the model between them, for "hsdp".
        zero_stage: what "deepspeed" cuts over all ranks: 0 nothing, 1 optimizer state, 2 gradients too, 3
            parameters too.
        reduce: when gradients are combined over replicas: "per_update" in the last backward (whole
            gradients are held until then); "per_micro_batch" in each, for "fsdp" and "hsdp" (more traffic,
            and less held); "after_agreement" after all of them, for "ddp".
        tensor_parallel: ranks that share each matrix of the built-in GPT; they share one replica.
        pipeline_parallel: ranks that hold the layers of one replica between them, for "pipeline"; 1 stands
            for all ranks.
        pipeline_schedule: in which order they run forwards and backwards: "1f1b" holds the activations of
            few micro-batches, "gpipe" those of all; "interleaved_1f1b" and "zero_bubble" wait less, with
            several stages on a rank.
        pipeline_virtual_stages: stages on each rank, for those two; at least 2.
        context_parallel: ranks that share each sequence, for the built-in GPT and "next_token"; they share
            one replica, with "ddp", "fsdp" or "hsdp".
    """

    strategy: Literal["ddp", "fsdp", "hsdp", "deepspeed", "pipeline"] = "ddp"
    shards: int = 0
    zero_stage: int = 0
    reduce: Literal["per_update", "per_micro_batch", "after_agreement"] = "per_update"
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    pipeline_schedule: Literal["1f1b", "gpipe", "interleaved_1f1b", "zero_bubble"] = "1f1b"
    pipeline_virtual_stages: int = 1
    context_parallel: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """The samples.

    Args:
        source: "pydoc" (real text that comes with Python), "text" (files; blank lines part their
            paragraphs), "jsonl" (files; a row has text, or prompt and completion, or text and label),
            or "module:function" or "file.py:function" of your own.
        files: of a "text" or "jsonl" source; * and ** are expanded.
        held_out_files: rows to evaluate on; none for a share of files.
        held_out_one_in: without held_out_files, about one row in so many is held out, chosen by a
            hash of its text.
        tokenizer: "bytes", or a local folder with a Hugging Face tokenizer (extra "hf").
        max_tokens_per_sample: cap on the tokens of a sample, begin and end marks included.
        too_long: what becomes of a longer row: "cut" makes several samples of a text, "truncate"
            drops its end, "refuse" names it and stops.
        workers: processes that read samples beside the training, ahead of it; 0 reads them in between.
        on_bad_sample: "raise" ends the run at a sample that can't be read; "skip" leaves it out of its
            update, which has a denominator without it, and records it.
        options: given to your own function as keyword arguments.
    """

    source: str = "pydoc"
    files: list[str] = field(default_factory=list)
    held_out_files: list[str] = field(default_factory=list)
    held_out_one_in: int = 10
    tokenizer: str = "bytes"
    max_tokens_per_sample: int = 256
    too_long: Literal["cut", "truncate", "refuse"] = "cut"
    workers: int = 0
    on_bad_sample: Literal["raise", "skip"] = "raise"
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectiveConfig:
    """What is learned. A source of your own brings its objective and leaves this section alone.

    Args:
        kind: "next_token" (of a completion only, where a row has one), "masked_token", or "label".
        masked_share: of the tokens of a sample, for "masked_token". Which ones is decided by seed,
            epoch and sample, so that the split does not matter.
    """

    kind: Literal["next_token", "masked_token", "label"] = "next_token"
    masked_share: float = 0.15


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The model.

    Args:
        source: "gpt" (built in), a local folder with a Hugging Face model (extra "hf"), or
            "module:function" or "file.py:function" of your own.
        size: of the built-in GPT: "mini" (0.4 M parameters without embeddings of a large vocabulary),
            "small" (11 M), "medium" (85 M).
        layers: transformer blocks; 0 for those of the size.
        width: features of a position; 0 for that of the size.
        heads: attention heads, a divisor of the width; 0 for those of the size.
        dropout: probability that a feature is dropped; with it the update depends on the random
            numbers that each micro-batch draws, and so on the split. Every dropout in the
            configuration of a Hugging Face folder is set to it.
        from_scratch: take only the shape from a Hugging Face folder, with new random parameters.
        activation_checkpointing: compute the activations of a block again in the backward.
        compile: run the forward through torch.compile.
        options: given to your own function as keyword arguments.
    """

    source: str = "gpt"
    size: Literal["mini", "small", "medium"] = "mini"
    layers: int = 0
    width: int = 0
    heads: int = 0
    dropout: float = 0.0
    from_scratch: bool = False
    activation_checkpointing: bool = False
    compile: bool = False
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraConfig:
    """Low-rank adapters instead of full fine-tuning (extra "lora").

    Args:
        rank: inner features of an adapter; 0 trains all parameters.
        alpha: adapters count alpha / rank.
        dropout: probability that a feature into an adapter is dropped.
        target_modules: names of the layers that get one, as peft takes them; none for all linear
            layers but the last.
    """

    rank: int = 0
    alpha: float = 16.0
    dropout: float = 0.0
    target_modules: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """The optimizer.

    Args:
        name: a class of torch.optim such as "AdamW" or "SGD", or "module:Class" or "file.py:Class" of
            your own.
        learning_rate: the highest.
        weight_decay: given to the groups that decay.
        decayed: "matrices" decays parameters of two dimensions and more, "all" decays every one.
        clip_grad_norm: highest Euclidean norm of the whole gradient; 0 is off.
        options: given to the optimizer as they are, such as betas = [0.9, 0.99].
    """

    name: str = "AdamW"
    learning_rate: float = 3e-3
    weight_decay: float = 0.1
    decayed: Literal["matrices", "all"] = "matrices"
    clip_grad_norm: float = 1.0
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleConfig:
    """The learning rate over the run. Give its lengths in one unit: updates, samples or items.

    A length of 0 is not given. Two lengths in different units are refused. Where no length is given at
    all, the warm-up has 20 updates, or a fifth of the run where that is less.

    Args:
        warmup_updates: applied updates until the highest rate is reached, along a line; 0 for none.
        warmup_samples: the same in samples.
        warmup_items: the same in items.
        decay: the way down after that: "cosine", "linear", or "constant" for none.
        decay_end_updates: where the way down ends, in applied updates; 0 for the end of the run.
        decay_end_samples: the same in samples.
        decay_end_items: the same in items; to be given where the unit is items, because nobody knows
            how many a run will have.
        final_share: of the highest rate that is left at the end.
    """

    warmup_updates: int = 0
    warmup_samples: int = 0
    warmup_items: int = 0
    decay: Literal["cosine", "linear", "constant"] = "cosine"
    decay_end_updates: int = 0
    decay_end_samples: int = 0
    decay_end_items: int = 0
    final_share: float = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionConfig:
    """What is computed in which precision.

    Args:
        parameters: dtype of the parameters, gradients and optimizer state.
        autocast: dtype of matrix products in the forward; "off" for that of the parameters.
        initial_loss_scale: for autocast = "float16", where gradients would underflow without one.
    """

    parameters: Literal["float32", "float64"] = "float32"
    autocast: Literal["off", "bfloat16", "float16"] = "off"
    initial_loss_scale: float = 65536.0


@dataclass(frozen=True, kw_only=True, slots=True)
class AverageConfig:
    """An exponential moving average of the parameters, evaluated beside them.

    Args:
        decay_per_update: share of the average that an applied update keeps; 0 is off.
    """

    decay_per_update: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """When the run is saved; always on the edge between two updates.

    Args:
        every_updates: attempted updates between two checkpoints; one more comes at the end and after
            Ctrl-C or SIGTERM. 0 saves none.
        keep_last: newest ones that are kept.
        keep_best: keep that with the lowest held-out loss too, of those made right after an evaluation.
    """

    every_updates: int = 50
    keep_last: int = 2
    keep_best: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class ProofConfig:
    """What is shown on the first global batch, before training.

    Args:
        check_first_batch: compare the accumulated update with that of the big batch.
        max_samples: of the first global batch that are compared; the big batch must fit into memory.
        train_if_not_equal: go on although they differ (as they do with dropout).
    """

    check_first_batch: bool = True
    max_samples: int = 32
    train_if_not_equal: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """All settings, in the sections of the TOML file."""

    run: RunConfig = field(default_factory=RunConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=lambda: ScheduleConfig(warmup_updates=WARMUP_UPDATES))
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    average: AverageConfig = field(default_factory=AverageConfig)
    checkpoints: CheckpointConfig = field(default_factory=CheckpointConfig)
    proof: ProofConfig = field(default_factory=ProofConfig)

    def to_dict(self) -> dict[str, Any]:
        """The settings as nested plain data."""
        return dataclasses.asdict(self)
