"""Packed rows in the training job: the same update as padded, and models that mix samples are refused."""

from __future__ import annotations

import random
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ranks import run_ranks
from tiny_models import VOCABULARY, job_data, save_folder, settings
from wholebatch.errors import UnsupportedError, UsageError
from wholebatch.losses import next_token_loss
from wholebatch.oracle import big_batch_update
from wholebatch.rows import attend_in_rows, pack_rows, row_layout, unpack_rows
from wholebatch.split import num_samples
from wholebatch.train.data.collation import Collation
from wholebatch.train.data.masks import make_masks
from wholebatch.train.data.store import TokenSample
from wholebatch.train.data.tokens import bytes_tokenizer
from wholebatch.train.material import JobModel
from wholebatch.train.models import packed
from wholebatch.train.models.choose import build_model
from wholebatch.train.models.gpt import GPT, Attention, GPTShape
from wholebatch.train.models.packed import check_packed_settings, probe_packed_rows
from wholebatch.verify import verify_window
from wholebatch.window import UpdateWindow

LENGTHS = [3, 9, 5, 1, 12, 2, 7]
OBJECTIVE = next_token_loss()


def token_samples(lengths: list[int] = LENGTHS) -> list[TokenSample]:
    """Random tokens; of each sample but short ones the first two are context."""
    numbers = np.random.default_rng(0)
    return [
        TokenSample(
            tokens=numbers.integers(3, VOCABULARY, n).astype(np.int32), learned_from=min(2, n - 1), label=-1
        )
        for n in lengths
    ]


def gpt(**changes: Any) -> JobModel:
    sections = {"model": {"source": "gpt", "layers": 2, "width": 32, "heads": 4, **changes}}
    return build_model(settings(**sections), data=job_data(), device="cpu")


def collated(rows: str, samples: list[TokenSample], **options: Any) -> dict[str, Any]:
    return dict(Collation(rows=rows, **options)(samples, range(len(samples)), 0))


def loss_of(job_model: JobModel):
    return lambda module, batch: OBJECTIVE(job_model.forward(module, batch), batch)


# Collation


def test_a_packed_micro_batch_of_token_samples() -> None:
    samples = [
        TokenSample(np.arange(n, dtype=np.int32) + 10, learned, -1) for n, learned in ((4, 2), (3, 0))
    ]
    batch = Collation(rows="packed", masks_padding=True)(samples, [8, 5], 0)
    assert {name: values.tolist() for name, values in batch.items()} == {
        "input_ids": [[10, 11, 12, 13, 10, 11, 12]],
        "position_ids": [[0, 1, 2, 3, 0, 1, 2]],
        "labels": [[-100, -100, 12, 13, -100, 11, 12]],
        "sample_lengths": [4, 3],
        "sample_ids": [8, 5],
    }


def test_both_forms_count_the_same_items_and_samples() -> None:
    padded, row = (collated(rows, token_samples()) for rows in ("padded", "packed"))
    assert int(OBJECTIVE.count(padded)["loss"]) == int(OBJECTIVE.count(row)["loss"]) > 0
    assert num_samples(padded) == num_samples(row) == len(LENGTHS)
    assert (OBJECTIVE.positions(padded), OBJECTIVE.positions(row)) == (7 * 12, sum(LENGTHS))
    assert num_samples(collated("packed", [])) == 0


def test_masked_labels_lie_at_the_token_that_is_hidden_in_a_row_too() -> None:
    tokenizer = bytes_tokenizer(completions=False, masked=True)
    masks = make_masks(tokenizer, mask_id=tokenizer.mask_id, share=0.5, seed=0)
    padded, row = (collated(rows, token_samples(), masks=masks) for rows in ("padded", "packed"))
    for place, part in enumerate(unpack_rows(row["labels"], row["sample_lengths"])):
        assert part.tolist() == padded["labels"][place, : len(part)].tolist()
    assert any(part[0] != -100 for part in unpack_rows(row["labels"], row["sample_lengths"]))


def test_one_label_for_each_sample_is_refused_by_name() -> None:
    words = r'batch.rows = "packed" joins the samples .* objective.kind = "label" reads one label'
    with pytest.raises(UsageError, match=words):
        Collation(rows="packed", labelled=True)
    with pytest.raises(UsageError, match=words):
        check_packed_settings(kind="gpt", objective="label", compiled=False)


# The update


@pytest.mark.parametrize("changes", [{}, {"activation_checkpointing": True}], ids=["plain", "checkpointed"])
def test_packed_micro_batches_make_the_update_of_the_padded_batch(changes) -> None:
    model = gpt(**changes)
    samples = token_samples()

    def collate(chosen: list[TokenSample]) -> dict[str, Any]:
        return collated("padded" if len(chosen) == len(samples) else "packed", chosen)

    verdict = verify_window(
        model.module,
        loss_of(model),
        samples,
        splits=[[3, 4], [1, 5, 1], [1] * 7],
        collate=collate,
        objective=OBJECTIVE,
        clip_grad_norm=0.5,
    )
    assert verdict.equal, verdict.to_dict()
    assert verdict.judged_in == "float64"
    assert verdict.worst.error < 1e-12


def distance_to_padded(model: JobModel, batches: list[Any], samples: list[TokenSample]) -> float:
    """The update of the window over these micro-batches, against the oracle's of the padded whole."""
    module = model.module.double()
    truth = big_batch_update(
        module,
        loss_of(model),
        collated("padded", samples),
        make_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
    )
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    window = UpdateWindow(module, optimizer, OBJECTIVE)
    record = window.run(batches, loss_of(model))
    assert record.samples == len(samples)
    trained = {name: parameter.detach() for name, parameter in module.named_parameters()}
    return max(float((truth.parameters[name] - trained[name]).abs().max()) for name in trained)


def packed_batches(samples: list[TokenSample]) -> list[dict[str, Any]]:
    return [collated("packed", samples[:4]), collated("packed", samples[4:])]


def test_the_window_over_rows_equals_the_oracle_of_the_padded_batch() -> None:
    samples = token_samples()
    assert distance_to_padded(gpt(), packed_batches(samples), samples) < 1e-12


def test_attention_that_crosses_samples_is_another_update() -> None:
    samples = token_samples()
    model = gpt()
    joined = JobModel(
        module=model.module,
        forward=lambda module, batch: module(
            batch["input_ids"],
            layout=row_as_one(batch) if "sample_lengths" in batch else None,
        ),
    )
    assert distance_to_padded(joined, packed_batches(samples), samples) > 1e-6


def row_as_one(batch: Any) -> Any:
    """The positions of the samples, and attention over the whole row."""
    own, whole = row_layout(batch["sample_lengths"]), row_layout([batch["input_ids"].shape[1]])
    return replace(whole, positions=own.positions, longest=own.longest)


def test_positions_that_run_on_are_another_update() -> None:
    samples = token_samples([2, 3, 4, 3, 2])
    model = gpt()

    def forward(module: nn.Module, batch: Any) -> Any:
        if "sample_lengths" not in batch:
            return module(batch["input_ids"])
        layout = row_layout(batch["sample_lengths"])
        return module(batch["input_ids"], layout=replace(layout, positions=torch.arange(layout.tokens)))

    broken = JobModel(module=model.module, forward=forward)
    assert distance_to_padded(broken, packed_batches(samples), samples) > 1e-6


def test_a_label_that_crosses_is_another_update() -> None:
    samples = token_samples()
    batches = packed_batches(samples)
    crossing = pack_rows([{"input_ids": sample.tokens} for sample in samples[:4]], shifted=False)
    batches[0]["labels"] = crossing["labels"]
    assert distance_to_padded(gpt(), batches, samples) > 1e-3


# Whether a model can


def tried(model: JobModel, *, vocabulary: int | None = VOCABULARY, max_tokens: int = 16) -> dict[str, Any]:
    return probe_packed_rows(model, source="m.py:model", vocabulary=vocabulary, max_tokens=max_tokens)


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 16])
def test_the_built_in_gpt_keeps_the_samples_of_a_row_apart(max_tokens: int) -> None:
    facts = tried(gpt(), max_tokens=max_tokens)
    assert facts["rows"] == "packed"
    assert facts["rows_probe"]["dtype"] == "float64"
    assert facts["rows_probe"]["crossing"] == 0.0
    assert facts["rows_probe"]["apart"] < 1e-14


def test_the_model_and_the_random_state_are_left_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the model itself is run, for want of room for a copy."""
    monkeypatch.setattr(packed, "_COPY_BYTES", 0)
    model = gpt(dropout=0.5)
    model.module.blocks[0].eval()
    model.module.register_buffer("runs", torch.zeros(1))

    def counted(module: nn.Module, _: Any) -> None:
        module.runs += 1

    model.module.register_forward_pre_hook(counted)
    before = {name: value.clone() for name, value in model.module.state_dict().items()}
    modes = [module.training for module in model.module.modules()]
    state = torch.get_rng_state(), random.getstate()
    facts = tried(model)
    assert facts["rows_probe"]["dtype"] == "float32"
    assert facts["rows_probe"]["apart"] < 1e-5
    assert torch.equal(torch.get_rng_state(), state[0])
    assert random.getstate() == state[1]
    assert [module.training for module in model.module.modules()] == modes
    after = model.module.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert all(parameter.grad is None for parameter in model.module.parameters())


def broken(forward: Any, **changes: Any) -> JobModel:
    """The built-in GPT with another forward over rows; padded samples run as they should."""
    model = gpt(**changes)

    def either(module: nn.Module, batch: Any) -> Any:
        if "sample_lengths" not in batch:
            return module(batch["input_ids"])
        return forward(module, batch, row_layout(batch["sample_lengths"]))

    return JobModel(module=model.module, forward=either)


def crossing(module: nn.Module, batch: Any, _: Any) -> Any:
    """A forward in which attention crosses from sample to sample."""
    return module(batch["input_ids"], layout=row_as_one(batch))


@pytest.mark.parametrize("copy_bytes", [2**32, 0], ids=["in float64", "as it is"])
def test_a_model_that_mixes_the_samples_is_refused(
    monkeypatch: pytest.MonkeyPatch, copy_bytes: int
) -> None:
    monkeypatch.setattr(packed, "_COPY_BYTES", copy_bytes)
    model = broken(crossing)
    words = (
        r"model.source m.py:model lets the samples of a packed row see each other .* other tokens in the "
        r"first sample changed the logits of the others by \d\.\de-0\d of the largest, and rounding "
        r'explains \d\.\de-0\d; set batch.rows = "padded", or use a model'
    )
    with pytest.raises(UsageError, match=words):
        tried(model)


def test_a_model_whose_positions_run_on_is_refused() -> None:
    def running(module: nn.Module, batch: Any, layout: Any) -> Any:
        return module(batch["input_ids"], layout=replace(layout, positions=torch.arange(layout.tokens)))

    words = r"computes other logits for a sample in a packed row .* as where positions run on"
    with pytest.raises(UsageError, match=words):
        tried(broken(running))


def test_logits_that_are_no_numbers_are_refused() -> None:
    model = broken(lambda module, batch, layout: module(batch["input_ids"], layout=layout) * torch.nan)
    with pytest.raises(UsageError, match=r"changed the logits of the others by nan of the largest"):
        tried(model)

    def torn(module: nn.Module, batch: Any, layout: Any) -> Any:
        logits = module(batch["input_ids"], layout=layout)
        logits[0, 0] = torch.nan  # in the first sample alone
        return logits

    with pytest.raises(UsageError, match=r"for the same sample alone: nan of the largest apart"):
        tried(broken(torn))


def test_a_model_that_fails_on_a_row_is_refused_with_its_words() -> None:
    def failing(*_: Any) -> Any:
        raise ValueError("rows of one sample only")

    words = (
        r"model.source m.py:model fails on a packed row of 6 samples .* with ValueError: rows of one "
        r"sample only; set batch.rows"
    )
    with pytest.raises(UsageError, match=words):
        tried(broken(failing))


def test_a_model_that_does_not_run_in_float64_is_tried_in_its_own_dtype() -> None:
    def single(module: nn.Module, batch: Any, layout: Any) -> Any:
        if next(module.parameters()).dtype == torch.float64:
            raise RuntimeError("no kernel for float64")
        return module(batch["input_ids"], layout=layout)

    assert tried(broken(single))["rows_probe"]["dtype"] == "float32"


def test_a_model_in_half_precision_that_cannot_be_copied_is_told_from_one_that_mixes() -> None:
    class Stubborn(GPT):
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("no copies")

    shape = GPTShape(vocabulary=VOCABULARY, max_tokens=16, layers=2, width=32, heads=4)
    module = Stubborn(shape).bfloat16()
    good = JobModel(module=module, forward=gpt().forward)
    assert tried(good)["rows_probe"]["dtype"] == "bfloat16"
    mixing = broken(crossing)
    with pytest.raises(UsageError, match=r"see each other"):
        tried(JobModel(module=module, forward=mixing.forward))


@pytest.mark.parametrize("copied", [True, False])
def test_what_starts_at_zero_hides_nothing(monkeypatch: pytest.MonkeyPatch, copied: bool) -> None:
    if not copied:
        monkeypatch.setattr(packed, "_COPY_BYTES", 0)
    model = broken(crossing)
    for block in model.module.blocks:
        nn.init.zeros_(block.attention.to_output.weight)
    hidden = r"can't be seen while blocks.0.attention.to_output.weight, blocks.1.* are zero; start them"
    words = "see each other" if copied else hidden
    with pytest.raises(UsageError, match=words):
        tried(model)


def test_logits_of_another_shape_are_refused() -> None:
    pooled = broken(lambda module, batch, layout: module(batch["input_ids"], layout=layout)[:, -1])
    words = r"gives shape \(1, 50\) for token ids of shape \(1, 16\), so whether it keeps the samples"
    with pytest.raises(UsageError, match=words):
        tried(pooled)
    told = JobModel(module=gpt().module, forward=lambda *_: {"loss": 1})
    with pytest.raises(UsageError, match=r"gives a dict for token ids of shape \(1, 4\), so whether"):
        tried(told)


class Tokenwise(nn.Module):
    """Looks at one token at a time, so that any row is fine."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.Embedding(7, 8), nn.Linear(8, 7))

    def forward(self, input_ids: torch.Tensor) -> Any:
        return self.inside(input_ids)


def test_a_model_of_ones_own_is_tried_through_its_own_forward() -> None:
    module = Tokenwise()
    own = JobModel(module=module, forward=lambda module, batch: module(batch["input_ids"]))
    assert tried(own, vocabulary=None)["rows_probe"]["crossing"] == 0.0

    def summing(module: nn.Module, batch: Any) -> Any:
        return module(batch["input_ids"]).cumsum(1)

    with pytest.raises(UsageError, match="see each other"):
        tried(JobModel(module=module, forward=summing), vocabulary=None)


# Hugging Face


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("folders")
    return {kind: save_folder(kind, root / kind) for kind in ("llama", "gpt2", "bert", "roberta")}


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("rank", [0, 2])
def test_causal_models_of_transformers_train_on_rows(folders, name: str, rank: int) -> None:
    model = build_model(
        settings(model={"source": str(folders[name])}, lora={"rank": rank}), data=job_data(), device="cpu"
    )
    assert tried(model)["rows_probe"]["crossing"] == 0.0
    for parameter_name, parameter in model.module.named_parameters():
        if "lora_B" in parameter_name:  # zero at first, which would leave A without a gradient
            nn.init.normal_(parameter, std=0.1)
    samples = token_samples()

    def collate(chosen: list[TokenSample]) -> dict[str, Any]:
        whole = len(chosen) == len(samples)
        return collated("padded" if whole else "packed", chosen, masks_padding=True)

    verdict = verify_window(
        model.module,
        loss_of(model),
        samples,
        splits=[[3, 4], [1, 5, 1]],
        collate=collate,
        objective=OBJECTIVE,
    )
    assert verdict.equal, verdict.to_dict()
    empty = model.forward(model.module, collated("packed", []))
    assert empty.shape == (1, 0, VOCABULARY)


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_encoders_of_transformers_are_refused(folders, name: str) -> None:
    sections = {"model": {"source": str(folders[name])}, "objective": {"kind": "masked_token"}}
    model = build_model(settings(**sections), data=job_data("masked_token"), device="cpu")
    with pytest.raises(UsageError, match="lets the samples of a packed row see each other"):
        tried(model)


# Compilation


def test_compilation_with_rows_is_for_the_built_in_gpt() -> None:
    check_packed_settings(kind="gpt", objective="next_token", compiled=True)
    check_packed_settings(kind="folder", objective="next_token", compiled=False)
    with pytest.raises(
        UnsupportedError, match=r'model.compile with batch.rows = "packed" is tried for the'
    ):
        check_packed_settings(kind="own", objective="next_token", compiled=True)


def test_attention_in_rows_is_compiled_around(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled with it, each row's lengths would be compiled anew."""
    disabled: list[Any] = []
    monkeypatch.setattr(torch.compiler, "disable", lambda function: disabled.append(function) or function)
    monkeypatch.setattr(nn.Module, "compile", lambda _, **__: None)
    model = gpt(compile=True)
    layers = [layer for layer in model.module.modules() if isinstance(layer, Attention)]
    assert disabled == [attend_in_rows] * len(layers) == [attend_in_rows] * 2


def _rows_through(compiled: bool) -> tuple[list[torch.Tensor], list[int]]:
    """The logits and gradients of rows of other lengths each, and the graphs compiled so far after each."""
    torch.manual_seed(0)
    model = gpt(compile=compiled)
    found, graphs = [], []
    for number in range(6):
        row = collated("packed", token_samples([number + 1, 9, 2 * number + 1][: number % 3 + 1]))
        logits = model.forward(model.module, row)
        OBJECTIVE(logits, row).loss_sum.backward()
        found.append(logits.detach())
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    return [*found, *(parameter.grad for parameter in model.module.parameters())], graphs


def _compiled_rows(*_: int) -> tuple[float, list[int]]:
    # No pool of compiling processes, which would outlive the test.
    with torch._inductor.config.patch(compile_threads=1), warnings.catch_warnings():
        # torch's compiler looks at it, and hides the warning where warnings are no errors.
        warnings.filterwarnings("ignore", r"The \.grad attribute of a Tensor that is not a leaf")
        compiled, graphs = _rows_through(True)
    plain, _ = _rows_through(False)
    return max(float((a - b).abs().max()) for a, b in zip(compiled, plain, strict=True)), graphs


@pytest.mark.slow
def test_a_compiled_gpt_takes_rows_of_any_lengths_without_compiling_anew() -> None:
    # In a process of its own: torch's compiler leaves threads and environment variables behind.
    ((difference, graphs),) = run_ranks(_compiled_rows, 1, timeout_s=240)
    assert 0.0 < difference < 1e-4
    assert 0 < graphs[2] == graphs[-1]
