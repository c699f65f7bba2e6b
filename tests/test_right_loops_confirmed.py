"""The right loops are right: their optimizers read the gradient of the big batch, in float64.

Where the loss is not one of ``broken_loops.truth``, the loop itself is run again with one micro-batch of
everything, or it is only seen to train on finite gradients.
"""

from __future__ import annotations

import math
import warnings

import pytest
import torch
import torch.nn.functional as F

from broken_loops.shared import texts
from broken_loops.truth import big_batch_gradient, clipped, compare, samples_of_updates
from broken_loops.witness import Step, witness
from ranks import run_ranks
from right_loops import RIGHT_LOOPS, right_loop


def _steps(rank: int, ranks: int, name: str) -> list[Step]:
    arguments = (rank, ranks) if RIGHT_LOOPS[name].ranks > 1 else ()
    with warnings.catch_warnings(), witness() as steps:
        if name == "compiled":  # the compiler's own imports warn of what is deprecated
            warnings.simplefilter("ignore", DeprecationWarning)
        right_loop(name)(*arguments)
    return steps


def _seen(name: str) -> list[list[Step]]:
    row = RIGHT_LOOPS[name]
    return run_ranks(_steps, row.ranks, name) if row.slow else [_steps(0, 1, name)]


NAMES = [pytest.param(name, marks=[pytest.mark.slow] * row.slow) for name, row in RIGHT_LOOPS.items()]


@pytest.mark.parametrize("name", NAMES)
def test_the_optimizer_reads_the_gradient_of_the_big_batch(name):
    row = RIGHT_LOOPS[name]
    for steps in _seen(name):
        gradients = [gradient for step in steps for gradient in step.gradients]
        assert gradients
        assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients)
        if row.objective is None:
            continue
        by_rank = row.samples if isinstance(row.samples[0], tuple) else (row.samples,) * row.ranks
        updates = list(samples_of_updates(by_rank, row.num_samples))
        assert len(updates) == len(steps)
        for step, indices in zip(steps, updates, strict=True):
            truth = big_batch_gradient(row.objective, step.parameters, indices, row.num_samples * row.ranks)
            times, distance = compare(step.gradients, clipped(truth, row.clip))
            assert math.isclose(times, 1.0, rel_tol=row.tolerance)
            assert distance <= row.tolerance


@pytest.mark.slow
def test_the_trainer_reads_the_mean_over_all_tokens():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=20, **sizes)).double()
    (steps,) = _seen("trainer")
    # The Trainer's optimizer has the norms, which don't decay, in a second group.
    named = sorted(model.named_parameters(), key=lambda item: "norm" in item[0])
    parameters = [parameter for _, parameter in named]
    for k, step in enumerate(steps):
        with torch.no_grad():
            for own, given in zip(parameters, step.parameters, strict=True):
                own.copy_(given)
        sequences = texts()[8 * k : 8 * k + 8]
        loss = sum(
            F.cross_entropy(model(ids[None]).logits[0, :-1], ids[1:], reduction="sum") for ids in sequences
        ) / sum(len(ids) - 1 for ids in sequences)
        times, distance = compare(step.gradients, torch.autograd.grad(loss, parameters))
        assert math.isclose(times, 1.0, rel_tol=1e-4)
        assert distance < 1e-4


def test_a_loop_that_is_not_right_would_be_seen():
    from broken_loops.total_weight import broken

    with witness() as steps:
        broken()
    step = steps[0]
    truth = big_batch_gradient("images", step.parameters, range(16), 48)
    assert compare(step.gradients, truth)[0] == pytest.approx(4.0)
