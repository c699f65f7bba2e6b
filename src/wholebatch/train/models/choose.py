"""From the settings to the model of a job: which one, with adapters or without, and how it runs.

The order matters. Adapters go on before activation checkpointing and compilation, which act in place,
so that no name of a parameter changes and a checkpoint loads into the model either way.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from wholebatch.errors import UnsupportedError, UsageError
from wholebatch.memory import is_out_of_memory
from wholebatch.train.material import Batch, JobData, JobModel
from wholebatch.train.models.gpt import GPT, Attention, GPTShape, at_last_token, num_parameters
from wholebatch.train.models.huggingface import check_folder, check_shape, load_folder
from wholebatch.train.models.inputs import layout_of, token_ids
from wholebatch.train.models.lora import add_adapters
from wholebatch.train.models.own import call_own, own_function
from wholebatch.train.models.packed import check_packed_settings, probe_packed_rows
from wholebatch.train.settings import ModelConfig, TrainConfig

# Layers, width and heads.
SIZES = {"mini": (3, 96, 4), "small": (6, 384, 6), "medium": (12, 768, 12)}


def source_kind(source: str) -> Literal["gpt", "own", "folder"]:
    """Which of the three kinds ``model.source`` names; a folder wins over a colon in its name."""
    if source == "gpt":
        return "gpt"
    return "own" if ":" in source and not Path(source).expanduser().is_dir() else "folder"


def check_model_settings(config: TrainConfig) -> None:
    """Refuse, before anything is loaded, what no data could make right.

    Args:
        config: all settings.

    Raises:
        JudgeError: importing a model of the user's own failed.
        UsageError: a width that the heads do not divide, an objective or an option that the model
            can't serve, a folder that holds no model or one of another shape, no such function, or a
            setting that would be passed over.
    """
    kind = source_kind(config.model.source)
    if config.batch.rows == "packed":
        check_packed_settings(kind=kind, objective=config.objective.kind, compiled=config.model.compile)
    if kind == "gpt":
        gpt_sizes(config.model)
        if config.objective.kind == "masked_token":
            raise UsageError(
                'objective.kind = "masked_token" needs a model that sees both sides of a token, and the '
                'built-in GPT sees the left one only; set objective.kind = "next_token", or model.source '
                "to a folder with a masked language model"
            )
    if kind == "folder":
        check_folder(config.model)
        check_shape(config)
    if kind == "own":
        own_function(config.model)
    _refuse_passed_over(config, kind)
    if kind != "folder" and config.model.from_scratch:
        raise UsageError(
            f"model.from_scratch is for a Hugging Face folder, and model.source is "
            f"{config.model.source!r}, which starts from random parameters or its own; leave it out"
        )
    if kind != "own" and config.model.options:
        raise UsageError(
            f"model.options {sorted(config.model.options)} are for a function of your own, and "
            f"model.source is {config.model.source!r}; leave them out"
        )
    if kind == "own" and config.model.activation_checkpointing:
        raise UnsupportedError(
            f"model.activation_checkpointing can't reach into {config.model.source}; call "
            f"torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) in its forward, and set "
            f"it to false"
        )


def _refuse_passed_over(config: TrainConfig, kind: str) -> None:
    """Refuse settings that nothing would read: whoever gave them believes that they do something."""
    default = TrainConfig()
    sizes = ("size", "layers", "width", "heads")
    for key in (*sizes, "dropout") if kind == "own" else sizes if kind == "folder" else ():
        if (value := getattr(config.model, key)) != getattr(default.model, key):
            raise UsageError(
                f"model.{key} is {value!r}, and model.source {config.model.source!r} has its own; leave it "
                f"out{', or hand it on in model.options' if kind == 'own' else ''}"
            )
    for key in ("alpha", "dropout", "target_modules"):
        if not config.lora.rank and (value := getattr(config.lora, key)) != getattr(default.lora, key):
            raise UsageError(
                f"lora.{key} is {value!r}, and lora.rank = 0 makes no adapters; give a rank, or leave "
                f"it out"
            )
    masked, own_data = config.objective.masked_share, ":" in config.data.source
    if masked != default.objective.masked_share and (own_data or config.objective.kind != "masked_token"):
        raise UsageError(
            f"objective.masked_share is {masked}, and nothing is masked here, with objective.kind = "
            f"{config.objective.kind!r} and data.source = {config.data.source!r}; leave it out"
        )
    if own_data and kind == "own" and config.objective.kind != default.objective.kind:
        raise UsageError(
            f"objective.kind is {config.objective.kind!r}, and data.source {config.data.source!r} brings "
            f"its own objective; leave it out"
        )


def gpt_sizes(settings: ModelConfig) -> tuple[int, int, int]:
    """Layers, width and heads of the built-in GPT; what is given wins over the size.

    Raises:
        UsageError: the heads do not divide the width.
    """
    given = (settings.layers, settings.width, settings.heads)
    layers, width, heads = (a or b for a, b in zip(given, SIZES[settings.size], strict=True))
    if width % heads:
        fitting = (h for h in range(1, width + 1) if width % h == 0)
        nearest = sorted(sorted(fitting, key=lambda h: abs(h - heads))[:4])
        raise UsageError(
            f"model.width {width} is not divisible by model.heads {heads}; "
            f"heads that divide it: {', '.join(map(str, nearest))}"
        )
    return layers, width, heads


def gpt_in_outline(settings: ModelConfig) -> GPT:
    """The built-in GPT without memory, before the data say how many tokens there are; as if it were one."""
    layers, width, heads = gpt_sizes(settings)
    with torch.device("meta"):
        return GPT(GPTShape(vocabulary=1, max_tokens=1, layers=layers, width=width, heads=heads))


def build_model(config: TrainConfig, *, data: JobData, device: torch.device | str) -> JobModel:
    """The model that the settings ask for, on its device, ready to train.

    New parameters are drawn from torch's global random state: seed it alike on all ranks, and they
    start from the same parameters.

    Args:
        config: all settings, that `check_model_settings` passes.
        data: the samples; their vocabulary, labels and padding are what the model must fit.
        device: where the model is put.

    Returns:
        The module in training mode, or in that which your own function gave it, its forward, and the
        facts ``name``, ``source``, ``parameters``, ``trainable_parameters``, ``dtype`` and what else there
        is to say.

    Raises:
        UsageError: settings that do not fit each other, the data or the folder.

    Exactness: the built-in GPT and what transformers pads with a mask are exact in real arithmetic over
        any split without dropout; of your own model ``verify_window`` tells.
    """
    dtype: torch.dtype = getattr(torch, config.precision.parameters)
    kind = source_kind(config.model.source)
    with _memory_told(config):
        if kind == "gpt":
            built = _gpt(config, data)
        elif kind == "own":
            built = call_own(config.model)
        else:
            built = load_folder(config, data, dtype)
        module = built.module.to(device=device, dtype=dtype)
    facts = {**built.facts, "source": config.model.source}
    if config.lora.rank:
        module, adapter_facts = add_adapters(module, config.lora, facts, objective=config.objective.kind)
        facts |= adapter_facts
    if config.model.activation_checkpointing and kind == "folder":
        _checkpoint_folder_model(module, config.model.source)
    if config.batch.rows == "packed":
        facts |= probe_packed_rows(
            JobModel(module=module, forward=built.forward),
            source=config.model.source,
            vocabulary=data.vocabulary,
            max_tokens=config.data.max_tokens_per_sample,
        )
    if config.model.compile:
        compile_in_place(module, torch.device(device))
    facts |= {
        "parameters": num_parameters(module),
        "trainable_parameters": sum(p.numel() for p in module.parameters() if p.requires_grad),
        "dtype": config.precision.parameters,
        "compiled": config.model.compile,
        "activation_checkpointing": config.model.activation_checkpointing,
    }
    if not facts["trainable_parameters"]:
        raise UsageError(f"model.source {config.model.source} has no parameter that trains")
    if kind != "own":  # whose parts may be in eval mode on purpose, such as a batch norm
        module.train()
    return dataclasses.replace(built, module=module, facts=facts)


@contextmanager
def _memory_told(config: TrainConfig) -> Iterator[None]:
    """Where there is no memory for the parameters, what would make them fewer."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        instead = f"model.source {config.model.source} has; take a smaller one"
        if config.model.source == "gpt":
            layers, width, _ = gpt_sizes(config.model)
            instead = f"model.layers = {layers} of model.width = {width} have; lower them"
        raise UsageError(
            f"memory ran out while the model was built: there is none for the parameters that {instead}"
        ) from error


def compile_in_place(module: nn.Module, device: torch.device) -> None:
    """Run the module's forward through ``torch.compile`` from now on; its names stay as they are.

    Micro-batches have unequal lengths, so shapes are compiled as unknowns.

    Raises:
        UnsupportedError: no C++ compiler for a model on the CPU.

    Exactness: the compiled forward differs from the module's own by rounding.
    """
    compiler = os.environ.get("CXX", "g++")
    if device.type == "cpu" and shutil.which(compiler) is None:
        raise UnsupportedError(
            f"model.compile needs a C++ compiler on the CPU, and there is no {compiler!r} here; install "
            f"one, name it in the environment variable CXX, or set model.compile = false"
        )
    # torch.compile(module) would wrap it, and every name in its state_dict would begin with _orig_mod.
    with warnings.catch_warnings():
        # torch's compiler imports a part of torch that torch itself deprecates.
        warnings.filterwarnings("ignore", r".*torch\.jit\.script_method", DeprecationWarning)
        for layer in module.modules():
            if isinstance(layer, Attention):
                # It is compiled around: each row has lengths of its own, and would be compiled anew.
                whole = torch.compiler.disable(layer.attend_in_rows)  # type: ignore[no-untyped-call]
                layer.attend_in_rows = whole
        module.compile(dynamic=True)


def _gpt(config: TrainConfig, data: JobData) -> JobModel:
    labelled = config.objective.kind == "label"
    if data.vocabulary is None or (labelled and not data.num_labels):
        missing = "vocabulary" if data.vocabulary is None else "num_labels"
        raise UsageError(
            f'model.source = "gpt" has to know the {missing} of data.source {config.data.source!r}, which '
            f"does not say it; let it, or set model.source to a model of your own"
        )
    layers, width, heads = gpt_sizes(config.model)
    shape = GPTShape(
        vocabulary=data.vocabulary,
        max_tokens=config.data.max_tokens_per_sample,
        layers=layers,
        width=width,
        heads=heads,
        dropout=config.model.dropout,
        num_labels=data.num_labels or 0 if labelled else 0,
    )
    module = GPT(shape, activation_checkpointing=config.model.activation_checkpointing)
    facts: dict[str, Any] = {"name": "GPT", "layers": layers, "width": width, "heads": heads}
    if not labelled:
        return JobModel(module=module, forward=_token_forward, facts=facts)
    return JobModel(module=module, forward=_label_forward, read_out=_label_output, facts=facts)


def _token_forward(module: nn.Module, batch: Batch) -> Any:
    return module(token_ids(batch), layout=layout_of(batch))


def _label_forward(module: nn.Module, batch: Batch) -> Any:
    return module(token_ids(batch), batch.get("attention_mask"), layout_of(batch))


def _label_output(output: Tensor, batch: Batch) -> Tensor:
    return at_last_token(output, batch.get("attention_mask"))


def _checkpoint_folder_model(module: nn.Module, source: str) -> None:
    get_base = getattr(module, "get_base_model", None)  # an adapter's wrapper has one
    base: Any = module if get_base is None else get_base()
    if not base.supports_gradient_checkpointing:
        raise UnsupportedError(
            f"model.activation_checkpointing: transformers has none for the {type(base).__name__} in "
            f"{source}; set it to false"
        )
    base.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
