"""Which model the settings choose, how it runs, and what they are refused for."""

from __future__ import annotations

import textwrap

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ranks import run_ranks
from tiny_models import LENGTHS, VOCABULARY, job_data, ragged, settings
from wholebatch.errors import JudgeError, UnsupportedError, UsageError
from wholebatch.plan import plan_batch
from wholebatch.split import split_batch
from wholebatch.train.models.choose import (
    build_model,
    check_model_settings,
    compile_in_place,
    gpt_sizes,
    source_kind,
)
from wholebatch.train.models.gpt import GPT, GPTShape
from wholebatch.train.settings import ModelConfig, TrainConfig
from wholebatch.verify import verify_window
from wholebatch.window import UpdateWindow

SMALL = {"layers": 2, "width": 16, "heads": 2}


def build(kind="next_token", data=None, **sections):
    config = settings(objective={"kind": kind}, **sections)
    check_model_settings(config)
    return build_model(config, data=job_data(kind, **(data or {})), device="cpu")


def test_the_default_is_the_gpt_that_it_always_was():
    config = TrainConfig()
    model = build_model(config, data=job_data(vocabulary=257), device="cpu")
    assert model.facts == {
        "name": "GPT",
        "source": "gpt",
        "layers": 3,
        "width": 96,
        "heads": 4,
        "parameters": 409_632,
        "trainable_parameters": 409_632,
        "dtype": "float32",
        "compiled": False,
        "activation_checkpointing": False,
    }
    assert model.module.training
    longest = {"input_ids": torch.zeros(1, 256, dtype=torch.int64)}
    assert model.forward(model.module, longest).shape == (1, 256, 257)


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        ({}, (3, 96, 4)),
        ({"size": "small"}, (6, 384, 6)),
        ({"size": "medium"}, (12, 768, 12)),
        ({"size": "small", "layers": 1, "heads": 8}, (1, 384, 8)),
        ({"width": 32}, (3, 32, 4)),
    ],
)
def test_what_is_given_wins_over_the_size(given, sizes):
    assert gpt_sizes(ModelConfig(**given)) == sizes


def test_heads_that_do_not_divide_the_width_are_refused_with_those_that_do():
    message = r"model\.width 96 is not divisible by model\.heads 5; heads that divide it: 2, 3, 4, 6"
    with pytest.raises(UsageError, match=message):
        check_model_settings(settings(model={"heads": 5}))


def test_the_kind_of_a_source(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a:b").mkdir()
    kinds = [source_kind(source) for source in ("gpt", "module:function", "a:b", "folder")]
    assert kinds == ["gpt", "own", "folder", "folder"]


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"objective": {"kind": "masked_token"}},
            r"sees the left one only; set objective\.kind",
        ),
        ({"model": {"from_scratch": True}}, r"from_scratch is for a Hugging Face folder, .* 'gpt', which"),
        ({"model": {"options": {"a": 1}}}, r"model\.options \['a'\] are for a function of your own"),
    ],
)
def test_settings_that_do_not_fit_the_gpt(sections, message):
    with pytest.raises(UsageError, match=message):
        check_model_settings(settings(**sections))


def test_data_that_does_not_say_its_sizes():
    with pytest.raises(UsageError, match=r"has to know the vocabulary of data.source 'pydoc'"):
        build(data={"vocabulary": None})
    with pytest.raises(UsageError, match=r"has to know the num_labels of data.source 'pydoc'"):
        build("label", data={"num_labels": None})


@pytest.mark.parametrize("kind", ["next_token", "label"])
@pytest.mark.parametrize("lora", [0, 2])
def test_the_update_of_the_gpt_is_that_of_the_big_batch(kind, lora):
    model = build(kind, model=SMALL, lora={"rank": lora})
    for name, parameter in model.module.named_parameters():
        if "lora_B" in name:  # zero at first, which would leave A without a gradient
            nn.init.normal_(parameter, std=0.1)
    objective = job_data(kind).objective
    verdict = verify_window(
        model.module,
        lambda module, batch: objective(model.forward(module, batch), batch),
        ragged(kind),
        objective=objective,
    )
    assert verdict.equal, verdict.to_dict()
    assert verdict.judged_in == "float64"


def test_float64_parameters():
    model = build(precision={"parameters": "float64"}, model=SMALL, lora={"rank": 2})
    assert {parameter.dtype for parameter in model.module.parameters()} == {torch.float64}
    assert model.facts["dtype"] == "float64"


# Adapters


def test_only_adapters_train_and_the_first_logits_are_those_of_the_base():
    torch.manual_seed(0)
    base = build(model=SMALL)
    torch.manual_seed(0)
    model = build(model=SMALL, lora={"rank": 3, "alpha": 6.0})
    batch = ragged()
    assert torch.equal(model.forward(model.module, batch), base.forward(base.module, batch))
    # Four layers in each of two blocks, and none on the output.
    widths = (16 + 48) + (16 + 16) + (16 + 64) + (64 + 16)
    assert model.facts["trainable_parameters"] == 2 * 3 * widths
    assert model.facts["parameters"] == base.facts["parameters"] + 2 * 3 * widths
    assert model.facts["lora"] == {"rank": 3, "alpha": 6.0, "layers": 8, "trained_in_full": []}
    model.forward(model.module, batch).sum().backward()
    frozen = [n for n, p in model.module.named_parameters() if p.grad is None]
    assert frozen == [n for n, p in model.module.named_parameters() if not p.requires_grad]


def test_dropout_before_new_adapters_is_named_and_not_the_window():
    """Their output is zero, so that the loss does not show the noise; their gradient does."""
    model = build(lora={"rank": 2, "dropout": 0.5})
    objective = job_data().objective
    found = verify_window(
        model.module,
        lambda module, batch: objective(model.forward(module, batch), batch),
        ragged(),
        objective=objective,
    )
    assert (found.equal, found.cause, found.equal_when_replayed) == (False, "dropout", True)
    assert "report" not in found.advice


def test_layers_that_are_named_get_the_adapters():
    lora = {"rank": 1, "target_modules": ["to_output", "blocks.0.network.0"]}
    model = build(model=SMALL, lora=lora)
    owners = {
        n.split(".lora_")[0].removeprefix("base_model.model.")
        for n, p in model.module.named_parameters()
        if p.requires_grad
    }
    assert owners == {"blocks.0.attention.to_output", "blocks.1.attention.to_output", "blocks.0.network.0"}


def test_the_name_of_a_layer_is_not_taken_for_the_end_of_another(tmp_path):
    body = """
    inner = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.ReLU())
    linear = torch.nn.Linear(8, 8)
    return torch.nn.Sequential(torch.nn.Embedding(50, 8), linear, inner, torch.nn.Linear(8, 50))
    """
    model = build(model={"source": own(tmp_path, textwrap.dedent(body))}, lora={"rank": 2})
    assert (model.facts["lora"]["layers"], model.facts["trainable_parameters"]) == (1, 2 * 16)


def test_a_layer_that_there_is_not_is_refused_with_those_that_there_are():
    message = r"called 'q_proj'; there are network\.0, network\.2, to_logits, to_output, to_query_key_value"
    with pytest.raises(UsageError, match=message):
        build(model=SMALL, lora={"rank": 1, "target_modules": ["to_output", "q_proj"]})


def test_a_model_without_layers_to_adapt(tmp_path):
    source = own(tmp_path, "return torch.nn.Embedding(50, 50)")
    with pytest.raises(UsageError, match=r"Embedding has no linear layer; set lora\.rank = 0"):
        build(model={"source": source}, lora={"rank": 1})
    source = own(tmp_path, "return torch.nn.Sequential(torch.nn.Embedding(50, 8), torch.nn.Linear(8, 50))")
    with pytest.raises(UsageError, match=r"has no linear layer but its output, 1; set .* or name it"):
        build(model={"source": source}, lora={"rank": 1})
    assert build(model={"source": source}, lora={"rank": 1, "target_modules": ["1"]}).facts["lora"]


# Activation checkpointing


def test_checkpointed_activations_give_the_same_gradient_also_with_dropout():
    gradients = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = build(model={**SMALL, "dropout": 0.3, "activation_checkpointing": checkpointing})
        torch.manual_seed(1)
        objective = job_data().objective
        objective(model.forward(model.module, ragged()), ragged()).loss_sum.backward()
        gradients.append([parameter.grad for parameter in model.module.parameters()])
        gradients[-1].append(torch.rand(3))  # the random state is where it would be
    for plain, checkpointed in zip(*gradients, strict=True):
        assert torch.equal(plain, checkpointed)


def saved_bytes(model: GPT, ids: torch.Tensor) -> int:
    """Bytes that the forward keeps for the backward, parameters left out, each storage once."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model(ids)
    assert out.requires_grad
    return sum(kept.values())


def test_checkpointed_activations_take_less_memory():
    shape = GPTShape(vocabulary=257, max_tokens=128, layers=6, width=64, heads=4)
    ids = torch.zeros(4, 128, dtype=torch.int64)
    plain = saved_bytes(GPT(shape), ids)
    checkpointed = saved_bytes(GPT(shape, activation_checkpointing=True), ids)
    assert checkpointed < plain / 8, (plain, checkpointed)


# torch.compile


def test_compiling_needs_a_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UnsupportedError, match=r"needs a C\+\+ compiler .* no 'no-such-compiler' here"):
        build(model={**SMALL, "compile": True})


def test_compiling_renames_nothing():
    model = GPT(GPTShape(vocabulary=5, max_tokens=4, layers=1, width=4, heads=1))
    names = list(model.state_dict())
    compile_in_place(model, torch.device("cpu"))
    assert list(model.state_dict()) == names
    assert model._compiled_call_impl is not None


def _train_compiled(compiled: bool) -> list[torch.Tensor]:
    """Two updates of a tiny GPT on ragged micro-batches; the parameters afterwards."""
    torch.manual_seed(0)
    model = build(model={**SMALL, "layers": 1, "compile": compiled}, precision={"parameters": "float64"})
    ranks, rank = dist.get_world_size(), dist.get_rank()
    module = nn.parallel.DistributedDataParallel(model.module) if ranks > 1 else model.module
    objective = job_data().objective
    window = UpdateWindow(
        module,
        torch.optim.SGD(model.module.parameters(), lr=0.1),
        objective,
        plan=plan_batch(global_batch_samples=6, micro_batch_samples=1, ranks=ranks),
    )
    samples = split_batch(ragged(), [1] * 6)
    mine = [
        {name: value[:, :length] if value.ndim == 2 else value for name, value in sample.items()}
        for sample, length in list(zip(samples, LENGTHS, strict=True))[rank::ranks]
    ]
    for _ in range(2):
        window.run(mine, lambda module, batch: objective(model.forward(module, batch), batch))
    return [parameter.detach() for parameter in model.module.parameters()]


def _compiled_against_eager(*_: int) -> float:
    # No pool of compiling processes, which would outlive the test.
    with torch._inductor.config.patch(compile_threads=1):
        pairs = zip(_train_compiled(True), _train_compiled(False), strict=True)
        return max(float((a - b).abs().max()) for a, b in pairs)


@pytest.mark.slow
def test_compiled_updates_are_those_of_the_module_up_to_rounding():
    # In processes of their own: torch's compiler leaves threads and environment variables behind.
    for ranks in (1, 2):
        assert 0.0 < max(run_ranks(_compiled_against_eager, ranks, timeout_s=240)) < 1e-13


# A model of one's own


def own(tmp_path, body):
    path = tmp_path / "mine.py"
    path.write_text(f"import torch\n\n\ndef make(**options):\n{textwrap.indent(body, '    ')}\n")
    return f"{path}:make"


def test_a_module_of_ones_own_gets_the_options_and_the_token_ids(tmp_path):
    body = """
    return torch.nn.Sequential(
        torch.nn.Embedding(50, options["width"]), torch.nn.Linear(options["width"], 50)
    )
    """
    source = own(tmp_path, textwrap.dedent(body))
    model = build(model={"source": source, "options": {"width": 8}}, precision={"parameters": "float64"})
    assert model.forward(model.module, ragged()).shape == (6, 12, VOCABULARY)
    assert model.forward(model.module, ragged()).dtype == torch.float64
    assert (model.facts["name"], model.facts["parameters"]) == ("Sequential", 2 * 50 * 8 + 50)


def test_a_forward_of_ones_own(tmp_path):
    source = own(
        tmp_path,
        "module = torch.nn.Embedding(50, 50)\n"
        "return module, lambda module, batch: 2 * module(batch['input_ids'])",
    )
    model = build(model={"source": source})
    batch = ragged()
    assert torch.equal(model.forward(model.module, batch), 2 * model.module(batch["input_ids"]))


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        ("return 3", UsageError, r"mine\.py:make returned a int; it has to return a torch module, or"),
        (
            "return torch.nn.Linear(1, 1), 3",
            UsageError,
            "returned a tuple of Linear, int; it has to",
        ),
        ("return options['width']", JudgeError, r"called with model\.options \{\}, failed with KeyError"),
        ("return torch.nn.ReLU()", UsageError, r"mine\.py:make has no parameter that trains"),
    ],
)
def test_what_is_no_model(tmp_path, body, error, message):
    with pytest.raises(error, match=message):
        build(model={"source": own(tmp_path, body)})


def test_what_is_no_function(tmp_path):
    (tmp_path / "mine.py").write_text("make = 3\n")
    with pytest.raises(UsageError, match=r"mine\.py:make is a int; it has to be a function that returns"):
        build(model={"source": f"{tmp_path / 'mine.py'}:make"})


def test_checkpointing_a_model_of_ones_own_is_refused_with_the_way_to_do_it(tmp_path):
    source = own(tmp_path, "return torch.nn.Linear(1, 1)")
    with pytest.raises(UnsupportedError, match=r"can't reach into .*mine\.py:make; call torch\.utils\."):
        build(model={"source": source, "activation_checkpointing": True})
    with pytest.raises(UsageError, match=r"which starts from random parameters or its own; leave it out"):
        build(model={"source": source, "from_scratch": True})
