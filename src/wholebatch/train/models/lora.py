"""Low-rank adapters on a model, through peft (extra "lora").

The base is frozen: it has no gradient, no optimizer state and no share in the update. Only the adapters
learn, and the parameters that were not in the folder, such as a new head: frozen, it would stay random.
"""

from __future__ import annotations

import re
import warnings
from typing import Any

from torch import nn

from wholebatch.errors import UsageError
from wholebatch.extras import needed
from wholebatch.train.models.huggingface import is_transformers_model
from wholebatch.train.settings import LoraConfig

_TASKS = {"next_token": "CAUSAL_LM", "label": "SEQ_CLS"}


def add_adapters(
    module: nn.Module, settings: LoraConfig, facts: dict[str, Any], *, objective: str
) -> tuple[nn.Module, dict[str, Any]]:
    """Freeze a model and put adapters on its linear layers: ``W x + alpha / rank * B A x``.

    Args:
        module: the base; changed in place.
        settings: rank, alpha, dropout and the layers.
        facts: of the base; its ``new_parameters`` stay trainable.
        objective: ``objective.kind``, which tells readers of the adapter what it is for.

    Returns:
        The module with adapters, and facts about them.

    Raises:
        UsageError: peft is not installed, or a name in ``lora.target_modules`` is no linear layer, or
            no layer is left to adapt.

    Exactness: B starts at zero, so the first logits are those of the base; exact over any split where the
        base is, without dropout.
    """
    peft = needed("peft", extra="lora", why=f"lora.rank = {settings.rank}")
    trained = _owners(module, facts.get("new_parameters", []))
    targets = [
        name for name in target_layers(module, settings.target_modules) if not _within(name, trained)
    ]
    if not targets:
        raise UsageError(
            f"lora.target_modules {settings.target_modules} names layers alone that start at random and "
            f"are trained in full ({', '.join(trained)}), so there is nothing to adapt; name others, or "
            f"none for all linear layers"
        )
    layers = dict(module.named_modules())
    adapters = peft.LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=_as_peft_finds(targets, layers),
        modules_to_save=trained or None,
        fan_in_fan_out=all(_is_transposed(layers[name]) for name in targets),
        task_type=_TASKS.get(objective) if is_transformers_model(module) else None,
    )
    with warnings.catch_warnings():
        # peft 0.21 asks transformers 5 by an old name.
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
        wrapped = peft.get_peft_model(module, adapters)
    return wrapped, {
        "lora": {
            "rank": settings.rank,
            "alpha": settings.alpha,
            "layers": len(targets),
            # peft adds the head of a classifier, also where the folder has one.
            "trained_in_full": [
                name
                for name, layer in wrapped.get_base_model().named_modules()
                if hasattr(layer, "modules_to_save")
            ],
        }
    }


def target_layers(module: nn.Module, wanted: list[str]) -> list[str]:
    """The linear layers that get an adapter, by full name.

    Args:
        module: the base.
        wanted: full names or ends of names; none for all linear layers but the output's.

    Raises:
        UsageError: a name that no linear layer has, or no linear layer at all.
    """
    linear = [name for name, layer in module.named_modules() if _is_linear(layer)]
    for name in wanted:
        if not any(_matches(layer, name) for layer in linear):
            raise UsageError(
                f"lora.target_modules: no linear layer is called {name!r}; there are "
                f"{', '.join(_ends(linear)) or 'none'}"
            )
    if wanted:
        return [layer for layer in linear if any(_matches(layer, name) for name in wanted)]
    head = _head(module, linear)
    found = [name for name in linear if name != head]
    if not found:
        raise UsageError(
            f"lora.rank is not 0, and {type(module).__name__} has no linear layer"
            f"{' but its output, ' + linear[0] if linear else ''}; set lora.rank = 0"
            f"{', or name it in lora.target_modules' if linear else ''}"
        )
    return found


def _head(module: Any, linear: list[str]) -> str | None:
    """The layer that makes the logits: what transformers calls so, else the last."""
    output = module.get_output_embeddings() if is_transformers_model(module) else None
    for name, layer in module.named_modules():
        if output is not None and layer is output:
            return str(name)
    return linear[-1] if linear else None


def _is_linear(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Linear) or _is_transposed(layer)


def _is_transposed(layer: nn.Module) -> bool:
    """Whether it is the linear layer of GPT-2 in transformers, which keeps its weight transposed."""
    return type(layer).__name__ == "Conv1D" and type(layer).__module__.startswith("transformers.")


def _matches(layer: str, wanted: str) -> bool:
    return layer == wanted or layer.endswith(f".{wanted}")


def _ends(names: list[str]) -> list[str]:
    """The last parts of names that are no numbers, each once."""
    ends = []
    for name in names:
        parts = name.split(".")
        end = parts[-1] if not parts[-1].isdigit() else ".".join(parts[-2:])
        ends.append(end)
    return sorted(set(ends))


def _owners(module: nn.Module, new: list[str]) -> list[str]:
    """The outermost modules that hold these parameters directly and nothing but such.

    A module that holds others too, such as an output tied to the embedding, stays frozen: training a
    copy of it would part what is tied. Of a new head that leaves out a bias at most, which is zero.
    """
    owners: list[str] = []
    for name, layer in module.named_modules():
        own = [f"{name}.{parameter}" for parameter, _ in layer.named_parameters()]
        directly = any(
            f"{name}.{parameter}" in new for parameter, _ in layer.named_parameters(recurse=False)
        )
        if name and directly and set(own) <= set(new) and not _within(name, owners):
            owners.append(name)
    return owners


def _as_peft_finds(targets: list[str], layers: dict[str, nn.Module]) -> list[str] | str:
    """The names, or a pattern where peft, which takes a name for the end of one too, would find more."""
    more = {layer for layer in layers for name in targets if _matches(layer, name)} - set(targets)
    return "|".join(map(re.escape, targets)) if more else targets


def _within(name: str, owners: list[str]) -> bool:
    return any(name == owner or name.startswith(f"{owner}.") for owner in owners)
