"""The trained model in a form that others load: a Hugging Face folder, an adapter, or a state dict."""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from wholebatch.checkpoint_folder import write_file
from wholebatch.errors import RecordError
from wholebatch.files import sync
from wholebatch.train.material import JobModel
from wholebatch.train.models.gpt import GPT
from wholebatch.train.models.huggingface import TOKENIZER_FILES, is_transformers_model, quiet


def export_model(
    job_model: JobModel,
    folder: str | Path,
    *,
    tokenizer: str | Path | None = None,
    state: dict[str, Any] | None = None,
) -> Path:
    """Write what was trained into a folder; whole or not at all.

    A model of transformers is written as it loads there: ``config.json`` and safetensors. With adapters
    it is the adapter, as peft loads it onto the same base. The built-in GPT and a model of your own
    become ``model.pt``, a state dict that loads with ``weights_only=True``; the GPT's sizes are beside it
    in ``shape.json``, and adapters are merged into the weights, because their base is nowhere else.

    Args:
        job_model: the model, not wrapped.
        folder: where it goes; an earlier export there is replaced.
        tokenizer: local folder whose tokenizer is copied beside it; ``None`` for none.
        state: the whole state dict of a model that the ranks hold in parts; ``None`` for its own.

    Returns:
        The folder.

    Raises:
        RecordError: the folder can't be written.

    Exactness: the parameters bit for bit, in their own dtype; merged ones ``W + alpha / rank * B A``.
    """
    folder = Path(folder)
    part = folder.with_name(f"{folder.name}.part")
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        _write(job_model, part, state)
        for name in TOKENIZER_FILES if tokenizer is not None else ():
            if (Path(tokenizer or "") / name).is_file():
                shutil.copyfile(Path(tokenizer or "") / name, part / name)
        for path in (*part.iterdir(), part):
            sync(path)
        _replace(part, folder)
        sync(folder.parent)
    except Exception as error:  # torch, safetensors and transformers word a full disk each in their own way
        shutil.rmtree(part, ignore_errors=True)
        why = getattr(error, "strerror", None) or error
        raise RecordError(f"the trained model can't be written to {folder}: {why}") from error
    return folder


def _write(job_model: JobModel, part: Path, state: dict[str, Any] | None) -> None:
    module: Any = job_model.module
    adapted = "lora" in job_model.facts
    base: Any = module.get_base_model() if adapted else module
    if is_transformers_model(base):
        with quiet(sys.modules["transformers"]):
            # peft would ask a server about the base's embedding unless told not to save it.
            given: dict[str, Any] = {} if state is None else {"state_dict": state}
            module.save_pretrained(part, **given, **({"save_embedding_layers": False} if adapted else {}))
        return
    whole = _on_host(base) if state is None else state
    write_file(part / "model.pt", functools.partial(torch.save, _merged(base) if adapted else whole))
    if isinstance(base, GPT):
        sizes = json.dumps(dataclasses.asdict(base.shape), indent=2)
        (part / "shape.json").write_text(sizes + "\n", encoding="utf-8")


def _on_host(module: nn.Module) -> dict[str, Any]:
    return {
        name: value.detach().cpu() if isinstance(value, torch.Tensor) else value
        for name, value in module.state_dict().items()
    }


def _merged(base: nn.Module) -> dict[str, Any]:
    """The state dict that the base would have without adapters: ``W + alpha / rank * B A`` in their place.

    Not by peft's own merging, which changes the model or copies all of it.
    """
    adapted: dict[str, Any] = {
        name: layer for name, layer in base.named_modules() if hasattr(layer, "get_delta_weight")
    }
    merged: dict[str, Any] = {}
    for name, stored in _on_host(base).items():
        value = stored
        owner = next((owner for owner in adapted if name.startswith(f"{owner}.")), None)
        if owner is None:
            merged[name] = value
            continue
        inner = name.removeprefix(f"{owner}.")
        if not inner.startswith("base_layer."):
            continue
        if inner == "base_layer.weight":
            value = value + adapted[owner].get_delta_weight("default").detach().cpu()
        merged[f"{owner}.{inner.removeprefix('base_layer.')}"] = value
    return merged


def _replace(part: Path, folder: Path) -> None:
    """Put the new folder in the place of the old one, which is there until the new one is whole."""
    old = folder.with_name(f"{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    try:
        part.rename(folder)
    except OSError:
        if old.exists():
            old.rename(folder)
        raise
    shutil.rmtree(old, ignore_errors=True)
