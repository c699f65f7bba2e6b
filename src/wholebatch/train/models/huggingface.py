"""A model from a local Hugging Face folder, through transformers (extra "hf").

Never from a network, never from a pickle, never with code that the folder brings along. The model is
not given labels: its own loss would divide by the items of one micro-batch, and the objective's does not.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wholebatch.errors import UsageError
from wholebatch.extras import needed
from wholebatch.train.material import Batch, JobData, JobModel
from wholebatch.train.models.inputs import token_ids
from wholebatch.train.settings import ModelConfig, TrainConfig

_CLASSES = {
    "next_token": "AutoModelForCausalLM",
    "masked_token": "AutoModelForMaskedLM",
    "label": "AutoModelForSequenceClassification",
}
# What of a batch a model may be given; sample_ids and labels are not for it.
_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
)


def check_folder(settings: ModelConfig) -> None:
    """Refuse a folder that holds no model which can be loaded safely; reads names of files only.

    Raises:
        UsageError: no folder, no config.json, or no weights in safetensors.
    """
    folder = Path(settings.source).expanduser()
    if not folder.is_dir():
        raise UsageError(
            f'model.source {settings.source!r} is neither "gpt" nor a folder here nor module:function; '
            f"give one of them (models are not downloaded)"
        )
    if not (folder / "config.json").is_file():
        raise UsageError(
            f"model.source {folder} has no config.json, so it is no Hugging Face model folder; "
            f"save one with model.save_pretrained(folder)"
        )
    if settings.from_scratch or any(folder.glob("*.safetensors")):
        return
    pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if pickles:
        raise UsageError(
            f"model.source {folder} has its weights as {', '.join(pickles[:3])}, a pickle that could run "
            f"any code, and no safetensors; load it where you trust it and save it with "
            f"model.save_pretrained(folder), which writes safetensors"
        )
    raise UsageError(
        f"model.source {folder} has no weights (*.safetensors); "
        f"set model.from_scratch = true to train its shape from random parameters"
    )


def check_shape(config: TrainConfig) -> None:
    """Refuse, before any weight or sample is read, what the folder's config.json shows not to fit.

    Raises:
        UsageError: transformers is not installed, a shape that it does not know or that brings its own
            code, or samples longer than its positions.
    """
    transformers = needed("transformers", extra="hf", why=f"model.source {config.model.source!r}")
    folder = Path(config.model.source).expanduser()
    with quiet(transformers), _told(folder, config.objective.kind):
        positions = _positions_of(_shape(transformers, folder))
    _check_cap(config, folder, positions)


def load_folder(config: TrainConfig, data: JobData, dtype: torch.dtype) -> JobModel:
    """The folder's model with the head that the objective needs.

    Args:
        config: all settings.
        data: what the model has to fit.
        dtype: of the parameters.

    Returns:
        The module on the host; its forward gives logits.

    Raises:
        UsageError: a folder that transformers can't read, or a model that does not fit the objective,
            the vocabulary or the longest sample.
    """
    transformers = needed("transformers", extra="hf", why=f"model.source {config.model.source!r}")
    folder, kind = Path(config.model.source).expanduser(), config.objective.kind
    with quiet(transformers), _told(folder, kind):
        shape = _shape(transformers, folder)
        set_dropout(shape, config.model.dropout)
        shape.use_cache = False
        shape.dtype = dtype  # new parameters are drawn in it, not in the one that was saved
        if kind == "label":
            _set_labels(shape, data, folder)
        make = getattr(transformers, _CLASSES[kind])
        if config.model.from_scratch:
            module, new, unused = make.from_config(shape, trust_remote_code=False), [], []
        else:
            module, info = make.from_pretrained(
                folder,
                config=shape,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
                trust_remote_code=False,
            )
            new, unused = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
    _check_weights(module, folder, new, unused)
    set_dropout_layers(module, config.model.dropout)
    _check_fit(module, folder, config, data)
    if kind == "next_token":
        _check_causal(module, folder)
    if kind == "label" and module.config.pad_token_id is None:
        module.config.pad_token_id = data.padding_id  # where a decoder's head looks for the last token
    facts: dict[str, Any] = {"name": type(module).__name__, "from_scratch": config.model.from_scratch}
    if new:
        facts["new_parameters"] = new
    if unused:
        facts["unexpected_parameters"] = unused
    return JobModel(module=module, forward=folder_forward, facts=facts)


def folder_forward(module: nn.Module, batch: Batch) -> Tensor:
    """Logits of a micro-batch: ``[samples, tokens, vocabulary]``, or ``[samples, labels]``.

    Of a packed row they are ``[1, tokens, vocabulary]``.

    Exactness: padding is masked where the batch has an ``attention_mask``, so a sample's logits do not
        depend on the others. Of a packed row the model is given the ``position_ids``, by which
        transformers tells samples apart; whether a model heeds them, ``probe_packed_rows`` tries.
        Without samples the model runs on one of padding, which is cut off
        again: transformers can't run on none, and every rank must reach every parameter.
    """
    given = {name: batch[name] for name in _INPUTS if isinstance(batch.get(name), Tensor)}
    samples, tokens = ids_shape = token_ids(batch).shape
    empty = 0 in ids_shape
    if empty:
        filled = {name: value.new_zeros(max(samples, 1), max(tokens, 1)) for name, value in given.items()}
        given = filled | {
            name: torch.ones_like(value) for name, value in filled.items() if name == "attention_mask"
        }
    logits: Tensor = module(**given).logits
    if empty:
        return logits[:samples, :tokens] if logits.ndim == 3 else logits[:samples]
    return logits


def set_dropout(shape: Any, dropout: float) -> list[str]:
    """Set every dropout in a transformers configuration and those inside it; layers are never dropped.

    A layer that is dropped at random takes its parameters out of the update, and out of the
    reduction on one rank only.

    Returns:
        The names that were set.
    """
    found = []
    for name, value in list(vars(shape).items()):
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            found += [f"{name}.{inner}" for inner in set_dropout(value, dropout)]
        elif isinstance(value, bool) or not isinstance(value, int | float | None):
            continue
        elif "dropout" in name or name.endswith("pdrop"):
            setattr(shape, name, float(dropout))
            found.append(name)
        elif "layerdrop" in name:
            setattr(shape, name, 0.0)
            found.append(name)
    return found


def set_dropout_layers(module: nn.Module, dropout: float) -> None:
    """Those too that a model makes with a number of its own."""
    for layer in module.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = float(dropout)


def _set_labels(shape: Any, data: JobData, folder: Path) -> None:
    if not data.num_labels:
        raise UsageError(
            'objective.kind = "label" has to know how many labels there are, and data.source does not say '
            "it; let it give num_labels"
        )
    has_head = any("ForSequenceClassification" in name for name in shape.architectures or [])
    if has_head and shape.num_labels != data.num_labels:
        raise UsageError(
            f"model.source {folder} has a head of {shape.num_labels} labels, and the data has "
            f"{data.num_labels}; use the same labels, or the folder of the model without a head"
        )
    _set_label_names(shape, data, folder, has_head=has_head)
    if shape.pad_token_id is not None and shape.pad_token_id != data.padding_id:
        raise UsageError(
            f"model.source {folder} pads with token {shape.pad_token_id}, and the data with "
            f"{data.padding_id}; set data.tokenizer to the tokenizer of the model"
        )


def _set_label_names(shape: Any, data: JobData, folder: Path, *, has_head: bool) -> None:
    """Keep the names with the model; a head that means others by the same numbers is refused."""
    if not has_head:
        shape.num_labels = data.num_labels
    names = data.facts.get("labels") or []
    if not names or (has_head and not isinstance(names[0], str)):
        return  # numbers are taken for the head's own
    before = list(shape.id2label.values())
    if has_head and before != names and not before[0].startswith("LABEL_"):  # as those without a name
        raise UsageError(
            f"model.source {folder} has a head for the labels {', '.join(before)}, in this order, and the "
            f"data has {', '.join(names)}; give the head's numbers as labels, or use the folder of the "
            f"model without a head"
        )
    shape.id2label = {label: str(name) for label, name in enumerate(names)}
    shape.label2id = {name: label for label, name in shape.id2label.items()}


def _shape(transformers: Any, folder: Path) -> Any:
    return transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def _check_weights(module: Any, folder: Path, new: list[str], unused: list[str]) -> None:
    """Refuse weights that belong to another model, or have other names: training would begin at random.

    A head that starts at random, or one of the folder that is not used, is fine, and so is a pooler,
    which is a head inside the base.
    """
    prefix = module.base_model_prefix
    has_base = isinstance(getattr(module, prefix, None), nn.Module)
    base = [name for name in module.state_dict() if not has_base or name.startswith(f"{prefix}.")]
    missing = [name for name in new if name in base and "pooler" not in name]
    if not missing or (not unused and len(missing) < len(base) // 2):
        return
    others = f", and {len(unused)} of its weights fit nothing, such as {unused[0]}" if unused else ""
    raise UsageError(
        f"model.source {folder}: {len(missing)} of the {len(base)} parameters of {type(module).__name__} "
        f"below its head have no weights in the folder, such as {missing[0]}{others}; save the model with "
        f"model.save_pretrained(folder), or set model.from_scratch = true to begin at random"
    )


def _check_fit(module: Any, folder: Path, config: TrainConfig, data: JobData) -> None:
    vocabulary = module.get_input_embeddings().num_embeddings
    if data.vocabulary is not None and data.vocabulary > vocabulary:
        raise UsageError(
            f"data.tokenizer {config.data.tokenizer!r} has {data.vocabulary} tokens, and model.source "
            f"{folder} embeds {vocabulary}; set data.tokenizer to the tokenizer of the model"
        )
    own_tokens = any((folder / name).is_file() for name in TOKENIZER_FILES)
    if (
        own_tokens
        and data.vocabulary is not None
        and config.data.tokenizer == "bytes"
        and not config.model.from_scratch
    ):
        raise UsageError(
            f'data.tokenizer = "bytes" gives the model in {folder} tokens that it was not trained on; '
            f"set data.tokenizer = {str(folder)!r}, or model.from_scratch = true"
        )
    _check_cap(config, folder, _max_positions(module))


def _check_cap(config: TrainConfig, folder: Path, positions: int | None) -> None:
    if positions is not None and config.data.max_tokens_per_sample > positions:
        raise UsageError(
            f"data.max_tokens_per_sample is {config.data.max_tokens_per_sample}, and model.source {folder} "
            f"has {positions} positions; set it to {positions} or less"
        )


def _positions_of(shape: Any) -> int | None:
    """Positions that a configuration tells, ``None`` where it does not."""
    positions = getattr(shape.get_text_config(), "max_position_embeddings", None)
    return positions if isinstance(positions, int) and positions >= 1 else None


def _max_positions(module: Any) -> int | None:
    """Longest sample of a model, in tokens; ``None`` where its configuration does not say."""
    positions = _positions_of(module.config)
    if positions is None:
        return None
    for name, layer in module.named_modules():
        # Some count from behind the padding's own row, and have that much fewer.
        if name.endswith("position_embeddings") and getattr(layer, "padding_idx", None) is not None:
            return positions - int(layer.padding_idx) - 1
    return positions


def _check_causal(module: Any, folder: Path) -> None:
    """Refuse a model that sees the token it is to predict: it would learn to copy it."""
    vocabulary = module.get_input_embeddings().num_embeddings
    ids = torch.arange(8).remainder(vocabulary)[None]
    other = ids.clone()
    other[0, -1] = (int(ids[0, -1]) + 1) % vocabulary
    module.eval()
    with torch.no_grad():
        before, after = (module(input_ids=given).logits[:, :-1].float() for given in (ids, other))
    largest = float((before - after).abs().max())
    if largest > 1e-4 * float(before.abs().max()):  # float32 rounding is near 1e-7 of it
        raise UsageError(
            f"model.source {folder} ({type(module).__name__}) sees the token that it is to predict: "
            f"changing the last token changed the logits before it by {largest:.1e}; set objective.kind = "
            f'"masked_token", or use a causal model'
        )


@contextmanager
def quiet(transformers: Any) -> Iterator[None]:
    """No progress bars and no notes of transformers on standard error; what they say is in the facts."""
    logging = transformers.utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def _told(folder: Path, kind: str) -> Iterator[None]:
    """What transformers and safetensors raise about a folder, as an error of the settings."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:  # they have no common base
        text = str(error).strip()
        first = text.splitlines()[0] if text else "no message"
        if "trust_remote_code" in text:
            raise UsageError(
                f"model.source {folder} is a model with code of its own (auto_map in its config.json), "
                f"which is not run; take a model that transformers itself knows, or write a function that "
                f"makes it and set model.source to module:function"
            ) from error
        raise UsageError(
            f"model.source {folder} can't be loaded as a model for objective.kind = {kind!r}: "
            f"{type(error).__name__}: {first[:300]}"
        ) from error


def is_transformers_model(module: Any) -> bool:
    """Whether a module is one of transformers, which is not imported to find out."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(module, transformers.PreTrainedModel)
