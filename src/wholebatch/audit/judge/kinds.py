"""The kinds of finding: names, how grave, what they do to training and how to mend them. No torch here.

Longer than 400 lines because it is one table that people read from top to bottom; ``ALL_KINDS`` is its
order, which is the order of a report.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from wholebatch.audit.judge.evidence import Severity


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """One kind of finding.

    Attributes:
        name: what other programs read.
        severity: the gravest that this kind has; a rule may call a mild case less.
        summary: what it is, in one line.
        effect: what it does to training.
        mends: how to mend it, by framework: ``""`` for plain PyTorch, ``"accelerate"``,
            ``"transformers"``, ``"lightning"``, ``"fabric"``, ``"deepspeed"``, ``"ddp"``, ``"fsdp"``.
    """

    name: str
    severity: Severity
    summary: str
    effect: str
    mends: Mapping[str, str] = field(default_factory=dict)

    def mend(self, *frameworks: str) -> str:
        """Return how to mend it in the first of these frameworks that has its own way, else in PyTorch.

        Args:
            *frameworks: names as in ``mends``, the most telling first; unknown ones are passed over.

        Returns:
            One or two sentences.
        """
        known = [name for name in frameworks if name in self.mends]
        return self.mends[known[0] if known else ""]


_TABLE = (
    Kind(
        name="nonfinite_gradients",
        severity="wrong",
        summary="The optimizer stepped on gradients that are NaN or infinite.",
        effect="Weights and the optimizer's state become NaN, and no later update repairs them.",
        mends={
            "": (
                "Before the step, look at the norm that clip_grad_norm_ returns (error_if_nonfinite=True "
                "raises), or use torch.amp.GradScaler, whose step leaves the optimizer alone. A mean over"
                " no items is NaN: divide a sum by max(num_items, 1)."
            ),
            "lightning": (
                "Set Trainer(detect_anomaly=True) to find the first NaN; return None from training_step "
                "for a batch without items."
            ),
            "deepspeed": (
                "Enable fp16 loss scaling, or for bf16 check the loss before engine.backward(loss)."
            ),
        },
    ),
    Kind(
        name="optimizer_without_gradients",
        severity="wrong",
        summary="The optimizer stepped although none of its parameters had a gradient.",
        effect="Nothing is learned: the parameters that this optimizer holds stay where they are.",
        mends={
            "": (
                "Build the optimizer from the parameters of the model that runs forward (after moving, "
                "wrapping or copying it), and clear gradients after the step, not between backward and "
                "step."
            ),
            "accelerate": (
                "Pass model and optimizer to the same accelerator.prepare call, and use what it returns."
            ),
            "fsdp": (
                "Build the optimizer after fully_shard or the FSDP wrapper, from the wrapped model's "
                "parameters."
            ),
            "lightning": "Return an optimizer over self.parameters() from configure_optimizers.",
        },
    ),
    Kind(
        name="clip_to_negative_norm",
        severity="wrong",
        summary="Gradients were clipped to a negative norm, which flips their sign.",
        effect="Each clipped update climbs the loss instead of going down.",
        mends={
            "": (
                "Skip the call where clipping is off: if max_norm > 0: clip_grad_norm_(parameters, "
                "max_norm); float('inf') measures the norm without clipping."
            ),
            "transformers": "Set max_grad_norm=0 (or None) in TrainingArguments to switch clipping off.",
            "lightning": "Set gradient_clip_val=None to switch clipping off.",
        },
    ),
    Kind(
        name="not_reduced",
        severity="wrong",
        summary="The replicas stepped on gradients that were never combined.",
        effect="Each rank trains its own model on its own share of the data, and the copies drift apart.",
        mends={
            "": (
                "Reduce once per update, after the last backward: wrap the model in "
                "DistributedDataParallel, or all_reduce each .grad and divide by the number of replicas "
                "before clip and step."
            ),
            "ddp": (
                "Call the wrapped model, not model.module, and leave no_sync() before the last micro-"
                "batch's forward: its forward and its backward both belong outside."
            ),
            "fsdp": "Call model.set_requires_gradient_sync(True) before the last micro-batch's forward.",
            "accelerate": (
                "Let accelerator.prepare wrap the model and run each micro-batch under "
                "accelerator.accumulate(model)."
            ),
            "fabric": (
                "Use the model that fabric.setup returns, and fabric.no_backward_sync(model, "
                "enabled=is_accumulating) around forward and backward."
            ),
        },
    ),
    Kind(
        name="reduced_wrong_micro_batch",
        severity="wrong",
        summary="Gradients were combined over replicas before the last micro-batch was added.",
        effect=(
            "What the later micro-batches bring stays on its own rank: replicas step on different "
            "gradients, without an error."
        ),
        mends={
            "": "Reduce after the last backward of the window, once.",
            "ddp": (
                "Hold the reduction back for every micro-batch but the last one: with model.no_sync() if "
                "i < A - 1 else nullcontext(): forward and backward."
            ),
            "fsdp": "model.set_requires_gradient_sync(i == A - 1) before each forward.",
            "accelerate": (
                "Use accelerator.accumulate(model), or accelerator.no_sync(model) for all micro-batches "
                "but the last."
            ),
            "fabric": (
                "with fabric.no_backward_sync(model, enabled=i < A - 1): forward and fabric.backward."
            ),
        },
    ),
    Kind(
        name="step_inside_window",
        severity="wrong",
        summary="The optimizer stepped before all micro-batches of the update had been added.",
        effect=(
            "There are more and noisier updates than meant, each on a part of the batch, and every "
            "schedule and average that counts updates runs too fast."
        ),
        mends={
            "": (
                "Step, then clear, only when the window is full: if (i + 1) % A == 0 or it is the last "
                "micro-batch."
            ),
            "accelerate": (
                "Pass the optimizer to accelerator.prepare and work under accelerator.accumulate(model): "
                "the prepared optimizer's step does nothing until the last micro-batch."
            ),
            "transformers": (
                "Let Trainer step; set gradient_accumulation_steps to the micro-batches you want."
            ),
            "lightning": (
                "With automatic optimization set accumulate_grad_batches; with manual optimization call "
                "optimizer.step() only when (batch_idx + 1) % A == 0."
            ),
            "deepspeed": (
                "Call engine.step() after every engine.backward(loss): the engine steps at its boundary."
            ),
        },
    ),
    Kind(
        name="never_cleared",
        severity="wrong",
        summary="Gradients were never cleared between two steps.",
        effect=(
            "Each update is the sum of all micro-batches since training began: it grows, lags behind, and"
            " acts like a momentum of 1."
        ),
        mends={
            "": "Call optimizer.zero_grad() right after optimizer.step().",
            "lightning": "With manual optimization call optimizer.zero_grad() after optimizer.step().",
            "accelerate": "Call optimizer.zero_grad() of the prepared optimizer after its step.",
        },
    ),
    Kind(
        name="clear_ignored",
        severity="wrong",
        summary=(
            "zero_grad was called, but gradients of an earlier part of training were still there, or it "
            "was heeded at the wrong micro-batch only."
        ),
        effect=(
            "Updates contain gradients of other windows, or lose the micro-batches before the call that "
            "was heeded."
        ),
        mends={
            "": (
                "Call zero_grad() of the optimizer that steps, right after its step, and check that it "
                "covers all parameters that this optimizer holds."
            ),
            "accelerate": (
                "Call optimizer.zero_grad() after optimizer.step(), at the end of the accumulate block. "
                "Before the backward it is ignored except at the last micro-batch, where it deletes the "
                "others."
            ),
            "fsdp": (
                "End a window with a backward that reduces: zero_grad() does not reach gradients that "
                "set_requires_gradient_sync(False) holds back."
            ),
            "deepspeed": "Leave clearing to engine.step().",
        },
    ),
    Kind(
        name="clear_inside_window",
        severity="wrong",
        summary="Gradients were cleared between backwards of one update, or between backward and step.",
        effect=(
            "The micro-batches before the clear are computed and thrown away: most of the batch never "
            "trains."
        ),
        mends={
            "": (
                "Move optimizer.zero_grad() out of the loop over micro-batches: right after "
                "optimizer.step()."
            ),
            "accelerate": (
                "Call optimizer.zero_grad() after optimizer.step(), at the end of the accumulate block."
            ),
            "lightning": "With manual optimization call optimizer.zero_grad() only after optimizer.step().",
            "fabric": "Call optimizer.zero_grad() only after optimizer.step().",
        },
    ),
    Kind(
        name="stale_gradients",
        severity="wrong",
        summary=(
            "The optimizer read gradients that another loss, or a probe before training, had left behind."
        ),
        effect=(
            "The update contains a gradient that its own loss knows nothing of, often of the opposite sign."
        ),
        mends={
            "": (
                "Call optimizer.zero_grad() right before this window's first backward, or detach what the"
                " other loss passes through; for probes use torch.autograd.grad, which leaves .grad alone."
            ),
            "lightning": (
                "Use self.toggle_optimizer(optimizer) and optimizer.zero_grad() before "
                "self.manual_backward."
            ),
        },
    ),
    Kind(
        name="unequal_item_weights",
        severity="wrong",
        summary=(
            "Items of one update count differently because of how they were cut into micro-batches or "
            "replicas."
        ),
        effect=(
            "Items of short or sparse micro-batches pull harder than others; the update depends on how "
            "the batch was split, and is not that of the big batch."
        ),
        mends={
            "": (
                "Sum the loss (reduction='sum') in each micro-batch and divide by the items of the whole "
                "window, counted before its first backward; with D replicas count over all of them and "
                "multiply by D where the wrapper averages."
            ),
            "accelerate": (
                "Sum the loss, divide by the items of the window over all processes (accelerator.gather "
                "of the counts), and multiply by accelerator.num_processes and "
                "gradient_accumulation_steps, which accelerator.backward divides by."
            ),
            "transformers": (
                "Use a Transformers release whose Trainer passes num_items_in_batch (4.46 or later) and a"
                " model or compute_loss that uses it: sum divided by num_items_in_batch."
            ),
            "lightning": (
                "Use manual optimization: summed losses divided by the items of the whole window; "
                "accumulate_grad_batches averages micro-batches whatever their items."
            ),
            "fabric": (
                "Sum the loss and divide by the window's items over all processes (fabric.all_reduce of "
                "the count), times fabric.world_size, which the reduction divides by."
            ),
            "deepspeed": (
                "Sum the loss, divide by the window's items over all ranks, multiply by the number of "
                "ranks, and call engine.backward(loss, scale_wrt_gas=False)."
            ),
            "ddp": (
                "Sum the loss, all_reduce the number of items of the window over the ranks, and scale by "
                "D / items: DDP divides by D."
            ),
            "fsdp": (
                "Sum the loss, all_reduce the number of items, and scale by D / items, or divide by the "
                "items and call set_gradient_divide_factor(1.0)."
            ),
        },
    ),
    Kind(
        name="total_weight",
        severity="wrong",
        summary="All items together count for more or less than 1.",
        effect=(
            "The gradient is so many times the whole batch's: with SGD the learning rate is scaled, with "
            "clipping the threshold, with Adam the balance against epsilon and weight decay."
        ),
        mends={
            "": (
                "Divide once: mean losses by the number of micro-batches, or summed losses by the items "
                "of the window; with D replicas mind that DDP and FSDP divide by D already."
            ),
            "accelerate": (
                "Call accelerator.backward(loss), which divides by gradient_accumulation_steps, in place "
                "of loss.backward(); do not divide yourself."
            ),
            "transformers": (
                "Return an undivided mean, or the sum over num_items_in_batch, from compute_loss: Trainer"
                " divides by the micro-batches where the model does not take num_items_in_batch."
            ),
            "lightning": (
                "Do not divide by accumulate_grad_batches: Lightning does. With manual optimization "
                "divide yourself."
            ),
            "fabric": (
                "Divide the mean loss by the number of micro-batches before fabric.backward: Fabric does "
                "not."
            ),
            "deepspeed": "Do not divide by gradient_accumulation_steps: engine.backward does.",
            "ddp": (
                "DDP averages over D replicas: scale sums over the global count by D, and do not divide "
                "means by D."
            ),
            "fsdp": (
                "FSDP averages over replicas: scale sums over the global count by D, or "
                "set_gradient_divide_factor(1.0)."
            ),
        },
    ),
    Kind(
        name="uncounted_items",
        severity="wrong",
        summary="Items went through forward and backward, and are not in the gradient that was stepped on.",
        effect="Data and compute are spent on items that never train.",
        mends={
            "": (
                "Let every backward of a window reach the step: no clear, and no replaced .grad, in "
                "between."
            ),
            "ddp": "Include every micro-batch in the reduction: it happens once, with the last backward.",
        },
    ),
    Kind(
        name="unequal_micro_batch_counts",
        severity="wrong",
        summary="Ranks have different numbers of micro-batches in one update.",
        effect=(
            "A rank that reduces more often than another waits for ever; or items of ranks with fewer "
            "micro-batches count more."
        ),
        mends={
            "": (
                "Give every rank the same number of micro-batches in each window (agree on the smallest, "
                "or add micro-batches without items), and divide by the items of all ranks."
            ),
            "ddp": (
                "Give every rank the same number of micro-batches, or train under "
                "torch.distributed.algorithms.Join, and divide by the items of all ranks."
            ),
            "accelerate": (
                "Prepare the dataloader with even_batches=True, or use accelerator.join_uneven_inputs."
            ),
        },
    ),
    Kind(
        name="duplicate_samples",
        severity="wrong",
        summary="The same samples were in one update more than once.",
        effect=(
            "The global batch is smaller than it looks: replicas or micro-batches repeat each other's work."
        ),
        mends={
            "": (
                "Give each replica its own share: DistributedSampler(dataset, num_replicas=D, "
                "rank=replica), set_epoch each pass; fetch each micro-batch from the iterator once."
            ),
            "accelerate": (
                "Pass the dataloader to accelerator.prepare, which gives each process its own share."
            ),
            "fabric": "Pass the dataloader to fabric.setup_dataloaders, which adds a distributed sampler.",
            "lightning": (
                "Leave Trainer(use_distributed_sampler=True), or add a DistributedSampler yourself."
            ),
        },
    ),
    Kind(
        name="tail_weight",
        severity="wrong",
        summary="The last window of a pass has fewer micro-batches and was divided as if it were full.",
        effect="The last update of each pass is too small, by the share of micro-batches that it lacks.",
        mends={
            "": (
                "Divide by the micro-batches (or items) that the window really has, or drop the tail on "
                "purpose."
            ),
            "accelerate": (
                "Scale the last window's loss by gradient_accumulation_steps / micro-batches in it, or "
                "sum the loss and divide by the window's items."
            ),
            "transformers": (
                "Upgrade Transformers: 4.53.3 still divides the last window by gradient_accumulation_steps."
            ),
            "lightning": (
                "Use a dataset or limit_train_batches that accumulate_grad_batches divides, or scale the "
                "loss of the last window by accumulate_grad_batches / micro-batches in it."
            ),
        },
    ),
    Kind(
        name="tail_carried_over",
        severity="wrong",
        summary=(
            "The rest of one pass over the data was left in .grad and stepped with the next pass's first "
            "window."
        ),
        effect=(
            "One update of each pass has more micro-batches than the others and too large a gradient, "
            "some of it from weights of an earlier time."
        ),
        mends={
            "": (
                "At the end of a pass step on the rest with its own denominator, or clear it; or count "
                "micro-batches across passes."
            ),
            "accelerate": "Prepare the dataloader: accelerator.accumulate then steps at its end.",
            "fabric": "Step at the last batch as well: (i + 1) % A == 0 or i + 1 == len(loader).",
        },
    ),
    Kind(
        name="tail_dropped",
        severity="wrong",
        summary="Micro-batches at the end of a pass went through backward and were never stepped on.",
        effect="The last samples of each pass are computed and thrown away.",
        mends={
            "": (
                "Step on the rest with its own denominator at the end of the pass, or leave it out of the"
                " loader (drop_last, a multiple of A)."
            ),
            "accelerate": "Prepare the dataloader: accelerator.accumulate then steps at its end.",
            "deepspeed": "Make the number of batches of a pass a multiple of gradient_accumulation_steps.",
            "fabric": "Step at the last batch as well: (i + 1) % A == 0 or i + 1 == len(loader).",
        },
    ),
    Kind(
        name="clip_inside_window",
        severity="wrong",
        summary="Gradients were clipped between backwards of one update.",
        effect=(
            "Earlier micro-batches are shrunk again and again, later ones less: the clipped sum is not "
            "the clipped gradient of the batch."
        ),
        mends={
            "": (
                "Clip once, after the last backward and right before optimizer.step(); to log norms pass "
                "max_norm=float('inf')."
            ),
            "accelerate": "Clip under if accelerator.sync_gradients: accelerator.clip_grad_norm_(...).",
            "lightning": (
                "Set gradient_clip_val, or with manual optimization call self.clip_gradients only before "
                "the step."
            ),
        },
    ),
    Kind(
        name="clip_before_reduction",
        severity="wrong",
        summary="Each rank clipped its own gradient before the gradients were combined.",
        effect=(
            "Ranks are scaled by different factors: items of ranks with large gradients count less, and "
            "the combined norm isn't the one that was asked for."
        ),
        mends={
            "": "Reduce first, then clip, then step.",
        },
    ),
    Kind(
        name="clip_before_unscale",
        severity="wrong",
        summary="Gradients were clipped while they still held the loss scale.",
        effect=(
            "The threshold is compared with a norm that is thousands of times too large: nearly every "
            "update is clipped, to a length that depends on the loss scale."
        ),
        mends={
            "": "Call scaler.unscale_(optimizer) after the last backward and before clip_grad_norm_.",
            "accelerate": "Use accelerator.clip_grad_norm_, which unscales first.",
            "fabric": "Use fabric.clip_gradients(model, optimizer, max_norm=...), which unscales first.",
            "lightning": "Use gradient_clip_val or self.clip_gradients, which come after unscaling.",
        },
    ),
    Kind(
        name="scale_changed_inside_window",
        severity="wrong",
        summary="The loss scale changed between backwards of one update.",
        effect=(
            "Micro-batches stand in the sum with different scales, and one division can't take out both."
        ),
        mends={
            "": "Call scaler.update() once per update, right after scaler.step(optimizer).",
        },
    ),
    Kind(
        name="parameters_changed_inside_window",
        severity="wrong",
        summary="Parameters changed between backwards of one update.",
        effect="The micro-batches of one update are gradients at different weights.",
        mends={
            "": (
                "Change weights (clamping, re-initialising, loading, averaging back) after the step, when"
                " no gradient is pending."
            ),
        },
    ),
    Kind(
        name="schedule_inside_window",
        severity="wrong",
        summary="The learning rate moved between backwards of one update.",
        effect="The schedule runs on micro-batches: warm-up and decay end A times too early.",
        mends={
            "": "Call scheduler.step() once per update, right after optimizer.step().",
            "accelerate": (
                "Pass the scheduler to accelerator.prepare, or call it only if accelerator.sync_gradients."
            ),
            "lightning": (
                "Return {'scheduler': scheduler, 'interval': 'step'} from configure_optimizers; with "
                "manual optimization call it after the step."
            ),
            "deepspeed": "Give the scheduler to deepspeed.initialize, which moves it at the boundary.",
        },
    ),
    Kind(
        name="schedule_too_fast",
        severity="wrong",
        summary="The schedule moved more than once per update.",
        effect="Warm-up and decay end too early, by the number of moves per update.",
        mends={
            "": "Call scheduler.step() in one place, once per update.",
            "lightning": (
                "Either return the scheduler from configure_optimizers or call it yourself, not both."
            ),
            "deepspeed": "Either give the scheduler to deepspeed.initialize or call it yourself, not both.",
        },
    ),
    Kind(
        name="schedule_on_skipped_update",
        severity="wrong",
        summary="The schedule moved although the update was skipped.",
        effect=(
            "Warm-up passes while nothing is learned: at the start of mixed-precision training several "
            "updates are skipped in a row."
        ),
        mends={
            "": (
                "Move the schedule only when the scale did not fall: scale = scaler.get_scale(); "
                "scaler.update(); if scaler.get_scale() >= scale: scheduler.step()."
            ),
            "accelerate": (
                "Pass the scheduler to accelerator.prepare, which waits for updates that were skipped."
            ),
        },
    ),
    Kind(
        name="average_inside_window",
        severity="wrong",
        summary="An average of the weights (EMA, teacher) moved between backwards of one update.",
        effect=(
            "The average moves A times per update towards weights that stand still: its memory is A times"
            " shorter than its decay says."
        ),
        mends={
            "": "Update the average once per update, right after optimizer.step().",
            "accelerate": "Update the average only if accelerator.sync_gradients.",
            "lightning": (
                "Update the average in on_before_zero_grad or after the step, not in on_train_batch_end."
            ),
        },
    ),
    Kind(
        name="coupled_samples",
        severity="wrong",
        summary="The loss compares the samples of one micro-batch with each other.",
        effect=(
            "Each sample sees only the negatives of its own micro-batch: accumulation adds samples, no "
            "negatives, and the update is not the big batch's."
        ),
        mends={
            "": (
                "Cache the embeddings of the whole batch, take the loss over all of them, and send its "
                "gradient through the model micro-batch by micro-batch (wholebatch.coupled does this); or"
                " call the negatives per micro-batch what they are."
            ),
        },
    ),
    Kind(
        name="same_randomness",
        severity="wrong",
        summary=(
            "Dropout drew the same masks on several replicas, or in several micro-batches of one update."
        ),
        effect="The noise that dropout adds does not average out over the batch.",
        mends={
            "": (
                "Seed each replica by its own number (torch.manual_seed(seed + rank), after the weights "
                "are made), and don't seed inside the loop."
            ),
            "accelerate": "Call set_seed(seed, device_specific=True).",
            "transformers": "Let Trainer seed; don't call set_seed again inside the loop.",
        },
    ),
    Kind(
        name="forward_outside_scope",
        severity="cost",
        summary=(
            "Only backward ran under no_sync: the wrapper decides in forward, so every micro-batch was "
            "reduced."
        ),
        effect=(
            "The reduction that no_sync should save is paid for at every micro-batch; the update is right."
        ),
        mends={
            "": (
                "Put the forward under no_sync() as well: with model.no_sync(): loss = ...(model(x)); "
                "loss.backward()."
            ),
            "fabric": "Put the forward under fabric.no_backward_sync(model) as well.",
            "accelerate": "Put the forward under accelerator.accumulate(model) as well.",
        },
    ),
    Kind(
        name="reduced_every_micro_batch",
        severity="cost",
        summary="Gradients were combined over replicas at every micro-batch instead of once per update.",
        effect="A times the communication; the update is right.",
        mends={
            "": "Reduce once per update, after the last backward.",
            "ddp": "Run all micro-batches but the last, forward and backward, under model.no_sync().",
            "fsdp": (
                "model.set_requires_gradient_sync(i == A - 1) saves it where whole gradients fit in memory."
            ),
            "accelerate": "Run each micro-batch under accelerator.accumulate(model).",
            "fabric": (
                "with fabric.no_backward_sync(model, enabled=i < A - 1): forward and fabric.backward."
            ),
        },
    ),
    Kind(
        name="memory_grows",
        severity="cost",
        summary="Graphs or outputs of earlier micro-batches were kept until the step.",
        effect="Memory grows with the number of micro-batches, which accumulation should keep flat.",
        mends={
            "": (
                "Call backward on each micro-batch's loss at once, and keep loss.detach() or loss.item() "
                "for logs, not the loss; don't keep outputs."
            ),
            "lightning": "Log detached values, and append output.detach() if outputs have to be kept.",
        },
    ),
    Kind(
        name="low_precision_accumulation",
        severity="cost",
        summary="Gradients were added up in a format of few digits.",
        effect=(
            "Small contributions of late micro-batches are rounded away; the error grows with their number."
        ),
        mends={
            "": (
                "Keep the parameters, and with them .grad, in float32 and compute under torch.autocast, "
                "or add up in a float32 buffer."
            ),
            "fsdp": "MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32).",
            "deepspeed": "Set data_types.grad_accum_dtype to fp32.",
        },
    ),
    Kind(
        name="batch_norm_per_micro_batch",
        severity="note",
        summary="BatchNorm normalises each micro-batch by itself and moves its statistics once for each.",
        effect="The forward isn't the big batch's, and running statistics have a memory A times shorter.",
        mends={
            "": (
                "Use GroupNorm or LayerNorm, freeze the statistics (eval mode), or set momentum to 1 - (1"
                " - m) ** (1 / A)."
            ),
        },
    ),
    Kind(
        name="logged_loss_differs",
        severity="note",
        summary="The loss that was logged isn't the loss per item of the update.",
        effect="Curves of runs with other splits can't be compared; training itself is not touched.",
        mends={
            "": "Log the sum of the items' losses over the window, divided by its items, once per update.",
        },
    ),
)

KINDS: Mapping[str, Kind] = {kind.name: kind for kind in _TABLE}
ALL_KINDS: tuple[str, ...] = tuple(KINDS)
