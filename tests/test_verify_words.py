"""What verify says: the place of a mistake, numbers, the table at 80 columns; and padding by experiment."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

from verify_problems import Recurrent, averaged, collate, contrastive, data, mlp, ragged, summed, tokens
from wholebatch.errors import JudgeError, SplitError
from wholebatch.losses import next_token_loss
from wholebatch.report.verdict_text import render, shortened
from wholebatch.verify import Verification, trial, verify_window
from wholebatch.verify.words import counted_word, factor_text
from wholebatch.whereabouts import place_of, told

Batch = dict[str, Tensor]
HERE = Path(__file__)

# Places ---------------------------------------------------------------------------------------------


def caught(call: Any) -> Exception:
    with pytest.raises(Exception) as raised:  # noqa: PT011
        call()
    return raised.value


def test_a_place_is_the_last_frame_of_the_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_torch() -> None:
        torch.nn.Linear(2, 2)(torch.ones(3))

    monkeypatch.chdir(HERE.parent)
    line = in_torch.__code__.co_firstlineno + 1
    error = caught(in_torch)
    assert place_of(error) == f"at {HERE.name}:{line}, in in_torch"
    monkeypatch.chdir(tmp_path)
    assert place_of(error) == f"at {HERE}:{line}, in in_torch"
    assert place_of(ValueError("never raised")) == ""
    assert told(ValueError("never raised")) == "ValueError: never raised"
    assert told(error).endswith(f", at {HERE}:{line}, in in_torch")


@pytest.mark.parametrize(
    ("file", "is_users"),
    [
        (str(HERE), True),
        ("my_problem.py", True),
        (trial.__file__, False),
        (json.__file__, False),
        (torch.__file__, False),
        ("/opt/python/lib/dist-packages/somebody/layers.py", False),
        ("<string>", False),
    ],
)
def test_whose_file_is_it(file: str, is_users: bool) -> None:
    namespace: dict[str, Any] = {}
    exec(compile("def fails():\n    raise ValueError\n", file, "exec"), namespace)
    place = place_of(caught(namespace["fails"]))
    assert place.endswith(":2, in fails") == is_users


def test_a_message_of_several_lines_has_its_place_on_a_line_of_its_own() -> None:
    def fails() -> None:
        raise ValueError("first\nsecond\n")

    assert told(caught(fails)).startswith("ValueError: first\nsecond\nat ")


def test_an_experiment_that_fails_in_the_users_code_is_no_verdict() -> None:
    def loss_fn(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        if not model.training:
            raise RuntimeError("not made for eval mode")
        return summed(model, batch)

    with pytest.raises(
        JudgeError, match=r"verify failed with RuntimeError: not made for eval mode, at .*loss_fn"
    ):
        verify_window(mlp(nn.Dropout(0.5)), loss_fn, data())


def test_our_own_mistakes_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("wholebatch.verify.judge.place_of", lambda _: "")
    monkeypatch.setattr("wholebatch.verify.judge._checked", broken)
    with pytest.raises(ZeroDivisionError):
        verify_window(mlp(), summed, data())


def test_the_window_and_a_split_name_the_place_too() -> None:
    def small_only(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        if len(batch["y"]) == 4:
            raise ValueError("four is too many")
        return summed(model, batch)

    with pytest.raises(
        JudgeError, match=r"\[4, 4\] samples fail with ValueError: four is .*, in small_only"
    ):
        verify_window(mlp(), small_only, data(), splits=[[4, 4]])


def test_attributes_of_a_wrapper_that_is_not_there() -> None:
    def loss_fn(model: Any, batch: Batch) -> tuple[Tensor, int]:
        return summed(model, batch)[0] + model.module[0].weight.sum(), 1

    with pytest.raises(
        JudgeError, match=r"(?s)in loss_fn\. The model is not wrapped here.*getattr\(model, 'mod"
    ):
        verify_window(mlp(), loss_fn, data())


# Lists of samples -----------------------------------------------------------------------------------


def test_a_list_of_samples_asks_for_collate() -> None:
    pairs = list(zip(*data().values(), strict=True))
    with pytest.raises(
        JudgeError, match=r"^the batch is a list of samples; give collate.* these 8 \(loss_fn"
    ):
        verify_window(mlp(), summed, pairs)
    with pytest.raises(
        SplitError, match=r"^the batch is a list of samples; give collate.* these 5\. .* has 3"
    ):
        verify_window(Recurrent(), summed, ragged())

    def own_collate(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        x, y = (torch.stack(part) for part in zip(*batch, strict=True))
        return summed(model, {"x": x, "y": y})

    assert verify_window(mlp(), own_collate, pairs).equal  # a loss_fn that takes lists is left in peace


# Padding --------------------------------------------------------------------------------------------


def position_losses(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["ids"]).transpose(1, 2), batch["ids"], reduction="none")


def over_padded_length(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    """A mean by sample over the padded length, of which padding adds nothing."""
    each = (position_losses(model, batch) * batch["counts"]).mean(1)
    return each.sum(), len(each)


def over_shifted_length(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    each = (position_losses(model, batch) * batch["counts"])[:, 1:].mean(1)
    return each.sum(), len(each)


def own_length(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    each = (position_losses(model, batch) * batch["counts"]).sum(1) / batch["counts"].sum(1)
    return each.sum(), len(each)


def padding_summed_and_counted(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    return position_losses(model, batch).sum(), batch["ids"].numel()


def padding_summed(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    return position_losses(model, batch).sum(), batch["counts"].sum()


def mean_over_padding(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    return (position_losses(model, batch) * batch["counts"]).mean(), batch["counts"].sum()


def contrast(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    """Samples are compared with each other, whatever the padding."""
    out = (model(batch["ids"]) * batch["counts"][:, :, None]).sum(1)
    return (out - out.mean(0)).square().sum(), len(out)


@pytest.mark.parametrize(
    ("loss_fn", "cause", "words"),
    [
        (over_padded_length, "wrong_count", "Does the loss divide by the padded length"),
        (over_shifted_length, "wrong_count", "Does the loss divide by the padded length"),
        (padding_summed_and_counted, "wrong_count", "Padding is summed and counted"),
        (
            padding_summed,
            "coupled_samples",
            "Does the loss divide by the padded length, or sum over padding",
        ),
        (mean_over_padding, "mean_for_sum", "reduction='sum'"),
        (contrast, "coupled_samples", "samples are compared with each other"),
    ],
)
def test_padding_is_told_from_coupling(loss_fn: Any, cause: str, words: str) -> None:
    found = verify_window(Recurrent(), loss_fn, ragged(), collate=collate)
    assert (found.equal, found.cause) == (False, cause)
    assert words in found.advice


def test_padding_that_changes_nothing_is_equal() -> None:
    assert verify_window(Recurrent(), own_length, ragged(), collate=collate).equal


def test_padding_that_could_not_be_tried_is_asked_about() -> None:
    def packed(samples: list[Tensor]) -> Batch:
        return {name: part[None] for name, part in collate(samples).items()}  # one row holds all samples

    def loss_fn(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        return over_padded_length(model, {name: part[0] for name, part in batch.items()})

    found = verify_window(Recurrent(), loss_fn, ragged(), collate=packed)
    assert found.cause == "coupled_samples"
    assert "could not be tried" in found.advice


# Numbers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("factor", "text"),
    [
        (8.0, "8"),
        (1 / 12, "1/12"),
        (3 / 8 + 1e-15, "3/8"),
        (1 / 1000, "1/1000"),
        (0.123456789, "0.123457"),
        (1 + 1e-9, "1 + 1e-09"),
        (1 - 1e-7, "1 - 1e-07"),
        (1.0, "1"),
        (0.0, "0"),
        (-2.0, "-2"),
        (1234.5678, "1234.57"),
        (100000.0, "100000"),
        (1e-9, "1e-09"),
        (float("inf"), "inf"),
    ],
)
def test_factors_are_written_as_people_know_them(factor: float, text: str) -> None:
    assert factor_text(factor) == text


def test_one_of_a_thing_and_more() -> None:
    assert [counted_word(n, "rank") for n in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]
    assert counted_word(1, "item of loss", "items of loss") == "1 item of loss"
    assert counted_word(1234567.0, "item of loss", "items of loss") == "1234567 items of loss"


def test_numpy_numbers_of_items_are_judged() -> None:
    def loss_fn(model: nn.Module, batch: Batch) -> tuple[Tensor, Any]:
        loss_sum, items = summed(model, batch)
        return loss_sum, torch.tensor(items).numpy()[()]  # numpy.int64

    found = verify_window(mlp(), loss_fn, data())
    assert (found.equal, found.num_items) == (True, {"loss": 8.0})


# The table ------------------------------------------------------------------------------------------


def shown(found: Verification, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    render(found.to_dict(), "my_problem:problem", console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert isinstance(text, str)
    return text


def rows(text: str) -> list[str]:
    """The table: from its headings to the last split, by its first sizes."""
    lines = [line.rstrip() for line in text.splitlines()]
    start = next(i for i, line in enumerate(lines) if line.startswith("split (samples)"))
    return [lines[start], *(line for line in lines[start + 1 :] if " equal " in line)]


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transformer_blocks = nn.ModuleDict({"attention_projections": nn.ModuleDict({"out": mlp()})})

    def forward(self, x: Tensor) -> Tensor:
        return self.transformer_blocks["attention_projections"]["out"](x)


@pytest.mark.parametrize("clip", [None, 0.1])
def test_a_row_stays_on_its_line_at_80_columns(clip: float | None) -> None:
    found = verify_window(
        Deep(), averaged, data(), clip_grad_norm=clip, splits=[[1] * 8, [1, 2, 1, 3, 1], [8]]
    )
    heading, *splits = rows(shown(found))
    assert len(splits) == 3
    assert heading.split() == ["split", "(samples)", "verdict", "worst", "error", "bound", "factor"]
    for line in splits:
        assert len(line) <= 80
        name = re.search(r"(?:gradient|parameter) (\S+)", line)
        assert name is not None
        assert re.fullmatch(r"tran\S*\.\.\.\S*(weight|bias)", name[1]), line


def test_the_factor_column_is_left_out_where_it_is_empty() -> None:
    for loss_fn, last in ((summed, "bound"), (averaged, "factor"), (contrastive, "bound")):
        assert rows(shown(verify_window(mlp(), loss_fn, data())))[0].split()[-1] == last


def test_error_and_bound_are_aligned() -> None:
    heading, *splits = rows(shown(verify_window(mlp(), contrastive, data())))
    for name, at in (("error", -2), ("bound", -1)):
        end = heading.index(name) + len(name)
        assert {line.index(line.split()[at], end - 8) + len(line.split()[at]) for line in splits} == {end}


def test_a_split_without_any_gradient_has_no_factor_but_a_note() -> None:
    found = verify_window(mlp(), contrastive, data(), splits=[[1] * 8])
    assert (found.splits[0].factor, found.splits[0].worst.bound) == (None, 0.0)  # type: ignore[union-attr]
    assert "[1, 1, 1, 1, 1, 1, 1, 1] samples every gradient is exactly zero" in found.notes[0]


def test_long_splits_and_refusals_do_not_break_the_table() -> None:
    objective = next_token_loss()

    def loss_fn(model: nn.Module, batch: Batch) -> Any:
        loss_sum, items = objective(model(batch["input_ids"]), batch)
        return loss_sum, 2 * items

    found = verify_window(Recurrent(), loss_fn, tokens(), objective=objective, splits=[[1] * 6])
    text = shown(found)
    assert "refused, see below" in rows(text)[1]
    assert f"on 1+1+1+1+1+1: {found.splits[0].refused}" in text
    long = verify_window(mlp(), summed, data(30), splits=[[2, 1] * 10])
    assert rows(shown(long))[1].startswith("2+1+2+...+1 (20)  equal")


def test_names_lose_their_middle() -> None:
    assert shortened("short.weight", 12) == "short.weight"
    assert shortened("a_very_long_name.weight", 14) == "a_ver...weight"
    assert len(shortened("x" * 50, 3)) == 5


def test_a_terminal_gets_lines_broken_between_words() -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True, highlight=False, color_system=None)
    render(verify_window(mlp(), averaged, data()).to_dict(), "my_problem:problem", console)
    assert max(map(len, console.file.getvalue().splitlines())) <= 80  # type: ignore[attr-defined]
