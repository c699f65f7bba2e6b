"""A stage of ``torch.distributed.pipelining`` made fit for exact updates.

Facts of torch's stages that this file rests on (read in torch 2.13 and tested against it):

* Before the first run of a schedule each stage is run once to learn shapes, in the mode of training: the
  first on real data, the others on memory that nobody has written. Batch statistics would keep what they
  saw there, and an embedding may fail on it.
* Zero-bubble schedules take the gradients of a stage's inputs first and those of its weights later, in the
  part of the graph that both share. Weights of an output that does not depend on the inputs (behind a
  frozen stage, or a detached input) are left out without an error. A ``dw_builder`` makes a stage do all
  of it at once. The sums are torch's own, in what a weight's gradients are kept in.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.func import functional_call


def learn_shapes_without_trace(stage: PipelineStage, learnt: Callable[[], None]) -> None:
    """Let torch learn the shapes of a stage with zeros for data, and on copies of its buffers.

    Also finds out there whether the backward of the stage can be run in two parts.

    Args:
        stage: not run yet.
        learnt: called whenever a schedule learns the shapes, and others must learn them again.
    """
    of_stage = weakref.ref(stage)

    def learn(*given: Tensor, module: Any, **named: Any) -> Any:
        stage = of_stage()
        assert stage is not None  # whose method this is
        learnt()
        if not stage.is_first:
            with torch.no_grad():
                for part in given:
                    part.zero_()
        # on copies, since a backward follows that must find what its forward left
        buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
        outputs = functional_call(module, buffers, given, named)
        # torch itself runs the whole backward of the first stage at once
        if not stage.is_first and not all(_depends(one, given) for one in tensors_of(outputs)):
            # have autograd run the whole backward where a schedule asks for its first part
            stage.dw_builder = stage.dw_builder or _nothing_later
        return outputs

    stage._compute_outputs = learn  # type: ignore[method-assign]


def tensors_of(output: Any) -> list[Tensor]:
    """What a stage gives: a tensor, or several in a tuple or list.

    Exactness: no arithmetic; the tensors themselves.
    """
    parts: Iterable[Any] = output if isinstance(output, tuple | list) else (output,)
    return [part for part in parts if isinstance(part, Tensor)]


def _nothing_later() -> Callable[[], None]:
    return lambda: None


def _depends(output: Tensor, inputs: Iterable[Tensor]) -> bool:
    """Whether an output's graph, if it has one, reaches an input that takes a gradient."""
    wanted = {id(one) for one in inputs if one.requires_grad}
    waiting, seen = [output.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if id(getattr(node, "variable", None)) in wanted:
            return True
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
    return output.grad_fn is None
