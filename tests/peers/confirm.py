"""What gradient do the optimizers of the peers' scripts get? Compared with the big batch, without an audit.

Updates are of SGD without momentum, so that what the optimizer got is how far the parameters moved, by the
learning rate: whatever holds the gradients in between. Clipping is left out for that.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import language
from expected import SCRIPTS, Peer

Tensors = dict[str, torch.Tensor]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of it in float64, on every rank; a copy."""
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach().double().clone()


class Movements:
    """How far parameters moved in each update, by the learning rate, and where they had been."""

    def __init__(self) -> None:
        self.before: dict[int, torch.Tensor] = {}
        self.updates: list[dict[int, tuple[torch.Tensor, torch.Tensor]]] = []

    def begin(self, parameters: Sequence[torch.Tensor]) -> None:
        self.before = {id(parameter): whole(parameter) for parameter in parameters}

    def end(self, parameters: Sequence[torch.Tensor], learning_rate: float) -> None:
        moved = {}
        for parameter in parameters:
            old = self.before[id(parameter)]
            moved[id(parameter)] = (old, (old - whole(parameter)) / learning_rate)
        self.updates.append(moved)

    def watch_optimizers(self) -> None:
        def parameters(optimizer: Any) -> list[torch.Tensor]:
            return [parameter for group in optimizer.param_groups for parameter in group["params"]]

        def before(optimizer: Any, *_: Any) -> None:
            assert type(optimizer) is torch.optim.SGD
            assert not optimizer.param_groups[0]["momentum"]
            self.learning_rate = optimizer.param_groups[0]["lr"]
            self.begin(parameters(optimizer))

        def after(optimizer: Any, *_: Any) -> None:
            self.end(parameters(optimizer), self.learning_rate)

        register_optimizer_step_pre_hook(before)
        register_optimizer_step_post_hook(after)

    def watch_engine(self) -> None:
        """DeepSpeed's optimizers may step on flat copies of parameters; the engine's step moves them."""
        from deepspeed.runtime.engine import DeepSpeedEngine

        step = DeepSpeedEngine.step

        def watched(engine: Any, *args: Any, **kwargs: Any) -> Any:
            if not engine.is_gradient_accumulation_boundary():
                return step(engine, *args, **kwargs)
            parameters = list(engine.module.parameters())
            self.begin(parameters)
            learning_rate = engine.optimizer.param_groups[0]["lr"]
            result = step(engine, *args, **kwargs)
            self.end(parameters, learning_rate)
            return result

        DeepSpeedEngine.step = watched


def big_batch_gradient(model: nn.Module, at: Tensors, samples: Sequence[Tensors]) -> Tensors:
    """The gradient of the mean over all items of one padded batch, in float64."""
    model = model.double()
    model.load_state_dict(at, strict=False)
    if samples[0]["labels"].dim() == 0:
        ids = torch.stack([sample["input_ids"] for sample in samples])
        labels = torch.stack([sample["labels"] for sample in samples])
        loss = nn.functional.cross_entropy(model(input_ids=ids).logits, labels)
    else:
        batch = language.pad(samples)
        if isinstance(model, language.TinyLM):
            scores = model(batch["input_ids"])
        else:
            scores = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        targets = language.num_targets(batch["labels"])
        loss = language.next_word_loss(scores, batch["labels"], "sum") / targets
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def fresh(names: set[str]) -> nn.Module:
    """A model of the kind whose parameters have these names."""
    makers: list[Callable[[], nn.Module]] = [language.TinyLM]
    if "embed.weight" not in names:
        makers = [language.tiny_llama, language.tiny_bert]
    for make in makers:
        model = make()
        if {name for name, _ in model.named_parameters()} == names:
            return model
    raise ValueError(f"no model of language.py has the parameters {sorted(names)}")


def compare(peer: Peer, model: nn.Module, data: Sequence[Tensors], movements: Movements) -> list[Any]:
    """Each update beside the big batch at the parameters where it was taken."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    per_pass = -(-len(data) // peer.samples)
    told = []
    for index, moved in enumerate(movements.updates):
        start = index % per_pass * peer.samples
        at = {names[key]: old for key, (old, _) in moved.items()}
        truth = big_batch_gradient(fresh(set(names.values())), at, data[start : start + peer.samples])
        right = torch.cat([truth[names[key]].flatten() for key in moved])
        got = torch.cat([delta.flatten() for _, delta in moved.values()])
        factor = float(got @ right / (right @ right))
        distance = float((got - factor * right).norm() / right.norm())
        told.append({"factor": factor, "distance": distance, "first": got[:64].tolist()})
    return told


def confirm(peer: Peer) -> list[Any]:
    """What the optimizers of a script got on this rank; patches torch, and is for a process of its own.

    Returns:
        For each update the factor to the big batch's gradient (the projection on it), the distance from
        that multiple relative to the big batch's norm, and the gradient's first numbers.
    """
    script, *arguments = peer.script.split()
    movements = Movements()
    movements.watch_engine() if peer.environment == "deepspeed" else movements.watch_optimizers()
    torch.nn.utils.clip_grad_norm_ = lambda *_, **__: torch.tensor(0.0)
    sys.argv = [script, *arguments]
    left = runpy.run_path(str(SCRIPTS / script), run_name="__main__")
    return compare(peer, left["model"], left["data"], movements)
