"""Rows of files: what becomes of each form, and how a bad row is named."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from wholebatch.errors import UsageError
from wholebatch.train.data import load_data
from wholebatch.train.data.rows import is_held_out, paragraphs
from wholebatch.train.data.store import TokenSamples
from wholebatch.train.data.tokens import BEGIN, END
from wholebatch.train.material import JobData
from wholebatch.train.settings import DataConfig, ObjectiveConfig, TrainConfig


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def load(kind: str = "next_token", **data: Any) -> JobData:
    objective = ObjectiveConfig(kind=kind)  # type: ignore[arg-type]
    return load_data(TrainConfig(data=DataConfig(**data), objective=objective))


def jsonl(*rows: Mapping[str, Any] | str, name: str = "rows.jsonl") -> str:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    Path(name).write_text("".join(f"{line}\n" for line in lines))
    return name


def load_rows(*rows: Mapping[str, Any] | str, kind: str = "next_token", **data: Any) -> JobData:
    # No row is held out unless a test says so.
    settings = {"held_out_one_in": 10**6} | data
    return load(kind, source="jsonl", files=[jsonl(*rows)], **settings)


def tokens(samples: Any) -> list[list[int]]:
    return [samples[index].tokens.tolist() for index in range(len(samples))]


def texts(samples: Any) -> list[str]:
    return [bytes(token for token in sample if token < 256).decode() for sample in tokens(samples)]


# pydoc -----------------------------------------------------------------------------------------------


def test_pydoc_is_every_byte_of_every_paragraph_once() -> None:
    """Real text: longer paragraphs are cut, and each side is whole paragraphs in their order."""
    found = load_data(TrainConfig())
    texts = list(paragraphs())
    assert found.facts["paragraphs"] == len(texts) > 2000
    for samples, held_out in ((found.train, False), (found.held_out, True)):
        side = tokens(samples)
        joined = b"".join(bytes(sample[1:]) for sample in side)
        assert joined == "".join(text for text in texts if is_held_out(text, 10) is held_out).encode()
        assert {sample[0] for sample in side} == {BEGIN}
        assert max(map(len, side)) == 256
        name = "held_out" if held_out else "train"
        assert found.facts[f"{name}_samples"] == len(side)
        assert found.facts[f"{name}_items"] == len(joined)
    assert (found.vocabulary, found.padding_id, found.num_labels) == (257, 0, None)


def test_settings_that_would_be_passed_over_are_refused() -> None:
    with pytest.raises(UsageError, match=r'data.files is a.txt, and data.source = "pydoc" reads no files'):
        load(files=["a.txt"])
    with pytest.raises(
        UsageError, match=r"data.options are for a function of your own; data.source is 'text'"
    ):
        load(source="text", files=["a.txt"], options={"a": 1})
    with pytest.raises(UsageError, match=r"data.source is 'csv'; it is one of pydoc, text and jsonl"):
        load(source="csv")
    with pytest.raises(
        UsageError, match=r'objective.kind = "label" needs rows with text and label, and .* \'text\''
    ):
        load("label", source="text", files=["a.txt"])


# files -----------------------------------------------------------------------------------------------


def test_files_are_expanded_in_order_and_each_read_once() -> None:
    Path("deep/er").mkdir(parents=True)
    for name in ("b.txt", "a.txt", "deep/er/c.txt", "odd[1].txt"):
        Path(name).write_text(f"text of {name}\n")
    found = load(
        source="text", files=["deep/**/*.txt", "?.txt", "a.txt", "odd[1].txt"], held_out_one_in=10**6
    )
    assert texts(found.train) == [
        f"text of {name}" for name in ("deep/er/c.txt", "a.txt", "b.txt", "odd[1].txt")
    ]
    assert found.facts["name"] == "text: deep/**/*.txt, ?.txt, a.txt and 1 more"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], r"data.files is empty; name one or more files"),
        (["gone*.txt"], r"data.files has 'gone\*.txt', and no file matches it"),
        (["folder"], r"data.files has 'folder', which is a folder; name its files: folder/\*"),
        (["blank.txt"], r"data.files has no rows: blank.txt hold nothing but blank lines"),
        (["locked.txt"], r"the data file locked.txt can't be read: Is a directory|Permission denied"),
    ],
)
def test_files_that_give_nothing(files: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("folder").mkdir()
    Path("blank.txt").write_text("\n  \n\n")
    Path("locked.txt").write_text("x")

    def refuse(name: Any, *_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied", name)

    if files == ["locked.txt"]:
        monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(UsageError, match=message):
        load(source="text", files=files)


def test_what_is_no_utf_8_is_named_by_line_and_byte() -> None:
    Path("latin.txt").write_bytes(b"one\n\ntwo caf\xe9\n")
    with pytest.raises(UsageError, match=r"latin.txt:3: byte 12 of the file, 0xe9, is not UTF-8"):
        load(source="text", files=["latin.txt"])


def test_a_byte_order_mark_is_no_text() -> None:
    Path("marked.txt").write_bytes(b"\xef\xbb\xbfone\n")
    assert texts(load(source="text", files=["marked.txt"], held_out_one_in=10**6).train) == ["one"]
    Path("marked.txt").write_bytes(b"\xef\xbb\xbf\xff\n")
    with pytest.raises(UsageError, match=r"marked.txt:1: byte 3 of the file, 0xff"):
        load(source="text", files=["marked.txt"])


def test_blank_lines_part_paragraphs_under_any_line_end() -> None:
    Path("unix.txt").write_bytes(b"\n\n a\nb  \n\n \t\n\nc\x0cd\n\n")
    Path("dos.txt").write_bytes(b"a\r\nb\r\n\r\nc")
    assert texts(load(source="text", files=["unix.txt"], held_out_one_in=10**6).train) == [
        " a\nb  ",
        "c\x0cd",
    ]
    assert texts(load(source="text", files=["dos.txt"], held_out_one_in=10**6).train) == ["a\nb", "c"]


# forms of rows ---------------------------------------------------------------------------------------


def test_text_rows_are_learned_whole() -> None:
    found = load_rows({"text": "ab", "id": 7, "label": "ignored here"}, "", {"text": "\u2028c"})
    assert tokens(found.train) == [[BEGIN, 97, 98], [BEGIN, *"\u2028c".encode()]]
    batch = found.collate([found.train[0], found.train[1]], [0, 1], 0)
    assert batch["labels"].tolist() == [[BEGIN, 97, 98, -100, -100], [BEGIN, *"\u2028c".encode()]]
    assert batch["input_ids"].tolist()[0] == [BEGIN, 97, 98, 0, 0]
    assert set(batch) == {"input_ids", "labels", "sample_ids"}
    assert found.vocabulary == 257
    assert found.facts["train_items"] == int(found.objective.count(batch)["loss"]) == 6
    assert found.facts["split_rule"].startswith("rows by text whose BLAKE2b hash")


def test_of_a_prompt_and_its_completion_only_the_completion_and_its_end_are_learned() -> None:
    found = load_rows(
        {"prompt": "ab", "completion": "cd", "source": "x"}, {"prompt": "a", "completion": "b"}
    )
    batch = found.collate([found.train[0], found.train[1]], [0, 1], 0)
    assert batch["input_ids"].tolist() == [[BEGIN, 97, 98, 99, 100, END], [BEGIN, 97, 98, END, 0, 0]]
    assert batch["labels"].tolist() == [[-100, -100, -100, 99, 100, END], [-100, -100, 98, END, -100, -100]]
    assert found.vocabulary == 258
    assert found.facts["train_items"] == int(found.objective.count(batch)["loss"]) == 5
    assert found.objective.positions(batch) == 12


@pytest.mark.parametrize(("labels", "names"), [(["b", "a", "b"], ["a", "b"]), ([10, 9, 10], [9, 10])])
def test_labels_are_classes_in_sorted_order(labels: list[Any], names: list[Any]) -> None:
    found = load_rows(*({"text": f"t{i}", "label": label} for i, label in enumerate(labels)), kind="label")
    batch = found.collate([found.train[i] for i in range(3)], [0, 1, 2], 0)
    assert batch["labels"].tolist() == [1, 0, 1]
    assert batch["attention_mask"].tolist() == [[1, 1, 1]] * 3
    assert (found.num_labels, found.facts["labels"]) == (2, names)
    assert int(found.objective.count(batch)["loss"]) == found.facts["train_items"] == 3


def test_a_held_out_label_means_the_same_class() -> None:
    train = jsonl(*({"text": "x", "label": name} for name in "bca"))
    other = jsonl({"text": "y", "label": "c"}, {"text": "y", "label": "b"}, name="other.jsonl")
    found = load("label", source="jsonl", files=[train], held_out_files=[other])
    assert [found.train[i].label for i in range(3)] == [1, 2, 0]
    assert [found.held_out[i].label for i in range(2)] == [2, 1]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["{"], r"rows.jsonl:1: not JSON \(Expecting property name.*; a row is one object on one line"),
        (["[" * 100_000], r"rows.jsonl:1: not JSON \("),
        (["[1]"], r"rows.jsonl:1: a list; a row is an object such as"),
        (['"a"'], r"rows.jsonl:1: a text; a row is an object"),
        (["1.5"], r"rows.jsonl:1: a number; a row"),
        (
            [{"text": "a"}, {}],
            r'rows.jsonl:2: a row has either "text", or "prompt" and "completion"; it has no keys',
        ),
        ([{"prompt": "a"}], r"rows.jsonl:1: a row has either .*; it has 'prompt'"),
        ([{"text": "a", "prompt": "a"}], r"rows.jsonl:1: a row has either .*; it has 'text', 'prompt'"),
        ([{"text": 5}], r'rows.jsonl:1: "text" is a number; it has to be a text'),
        ([{"text": None}], r'rows.jsonl:1: "text" is a null; it has to be a text'),
        ([{"text": " \n"}], r'rows.jsonl:1: "text" is empty; leave the row out'),
        ([{"prompt": "a", "completion": ""}], r'rows.jsonl:1: "completion" is empty'),
        (['{"text": "a\\ud800"}'], r'rows.jsonl:1: "text" has \\ud800 at 1, half of a pair'),
        (
            [{"text": "a"}, {"prompt": "a", "completion": "b"}],
            r'rows.jsonl:2: a row with "prompt" and "completion", while the first at .*:1 has "text"',
        ),
    ],
)
def test_bad_rows_are_named(rows: list[Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_rows(*rows)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [{"text": "a"}],
            r'rows.jsonl:1: objective.kind = "label" needs "text" and "label" in a row; it has \'text\'',
        ),
        (
            [{"text": "a", "label": True}],
            r'rows.jsonl:1: "label" is a boolean; it has to be a whole number or a name',
        ),
        ([{"text": "a", "label": 1.0}], r'rows.jsonl:1: "label" is a number; it has to be a whole'),
        ([{"text": "a", "label": ""}], r'rows.jsonl:1: "label" is an empty text'),
        (
            [{"text": "a", "label": 1}, {"text": "a", "label": "1"}],
            r"rows.jsonl:2: the label '1' is no number as 1 at rows.jsonl:1 is; write all labels as one",
        ),
        (
            [{"text": "a", "label": 1}] * 2,
            r"all training rows have the label 1; there is nothing to tell apart",
        ),
    ],
)
def test_bad_labels_are_named(rows: list[Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_rows(*rows, kind="label")


def test_masks_need_texts() -> None:
    with pytest.raises(
        UsageError, match=r'rows.jsonl:1: objective.kind = "masked_token" needs rows with "text"'
    ):
        load_rows({"prompt": "a", "completion": "b"}, kind="masked_token")


# longer rows -----------------------------------------------------------------------------------------


def test_a_longer_text_is_cut_truncated_or_refused() -> None:
    row, cap = {"text": "abcdefg"}, {"max_tokens_per_sample": 4}
    cut = load_rows(row, {"text": "ab"}, too_long="cut", **cap)
    assert tokens(cut.train) == [[BEGIN, 97, 98, 99], [BEGIN, 100, 101, 102], [BEGIN, 103], [BEGIN, 97, 98]]
    assert (cut.facts["rows"], cut.facts["longer_rows"]) == (2, 1)
    assert tokens(load_rows(row, too_long="truncate", **cap).train) == [[BEGIN, 97, 98, 99]]
    message = (
        r"rows.jsonl:1: 8 tokens, more than data.max_tokens_per_sample = 4, and data.too_long is \"refuse\""
    )
    with pytest.raises(UsageError, match=message):
        load_rows(row, too_long="refuse", **cap)
    assert len(load_rows(row, too_long="refuse", max_tokens_per_sample=8).train) == 1


def test_a_paragraph_is_named_by_its_first_line() -> None:
    Path("two.txt").write_text("a\n\nbcd\nefg\n\nh\n")
    with pytest.raises(UsageError, match=r"two.txt:3: 8 tokens, more than"):
        load(source="text", files=["two.txt"], too_long="refuse", max_tokens_per_sample=5)


def test_a_longer_completion_loses_its_end() -> None:
    row, cap = {"prompt": "ab", "completion": "cdef"}, {"max_tokens_per_sample": 5}
    found = load_rows(row, too_long="truncate", **cap)
    assert tokens(found.train) == [[BEGIN, 97, 98, 99, 100]]
    assert found.facts["train_items"] == 2
    with pytest.raises(
        UsageError, match=r"rows.jsonl:1: 8 tokens.* can't cut a prompt with its completion; set"
    ):
        load_rows(row, too_long="cut", **cap)
    with pytest.raises(
        UsageError, match=r"rows.jsonl:1: the prompt alone has 3 tokens, and .* = 3 leaves none"
    ):
        load_rows(row, too_long="truncate", max_tokens_per_sample=3)


@pytest.mark.parametrize("kind", ["label", "masked_token"])
def test_a_longer_sample_to_be_seen_whole_is_truncated_and_not_cut(kind: str) -> None:
    rows = [{"text": "abcd", "label": 0}, {"text": "e", "label": 1}]
    found = load_rows(*rows, kind=kind, too_long="truncate", max_tokens_per_sample=3)
    assert tokens(found.train) == [[BEGIN, 97, 98], [BEGIN, 101]]
    with pytest.raises(
        UsageError, match=r"rows.jsonl:1: 5 tokens.* can't cut a sample to be seen whole; set"
    ):
        load_rows(*rows, kind=kind, max_tokens_per_sample=3)


def test_a_cap_without_room_is_refused() -> None:
    message = r"data.max_tokens_per_sample is 2; the begin and end marks of the tokenizer bytes take 2"
    with pytest.raises(UsageError, match=message):
        load_rows({"prompt": "a", "completion": "b"}, max_tokens_per_sample=2)


@pytest.mark.parametrize("kind", ["next_token", "label", "masked_token"])
def test_texts_of_bytes_have_no_end_mark_that_a_cap_had_to_leave_room_for(kind: str) -> None:
    rows = [{"text": "a", "label": 0}, {"text": "b", "label": 1}]
    assert tokens(load_rows(*rows, kind=kind, max_tokens_per_sample=2).train) == [[BEGIN, 97], [BEGIN, 98]]


# the split -------------------------------------------------------------------------------------------


def test_a_prompt_is_never_on_both_sides() -> None:
    rows = [{"prompt": f"question {i % 40}", "completion": f"answer {i}"} for i in range(200)]
    found = load_rows(*rows, held_out_one_in=4)
    sides = [{text.split("answer")[0] for text in texts(side)} for side in (found.train, found.held_out)]
    assert not sides[0] & sides[1]
    assert sides[1] == {f"question {i}" for i in range(40) if is_held_out(f"question {i}", 4)}
    assert found.facts["train_samples"] + found.facts["held_out_samples"] == 200
    assert found.facts["split_rule"] == "rows by prompt whose BLAKE2b hash is 0 modulo 4"


def test_held_out_files_are_the_split() -> None:
    one = jsonl({"text": "a"}, {"text": "g"}, name="one.jsonl")
    two = jsonl({"text": "c"}, {"text": "a"}, name="two.jsonl")
    assert is_held_out("g", 2), "or nothing is shown: the hash does not count"
    found = load(source="jsonl", files=[one], held_out_files=[two], held_out_one_in=2)
    assert (texts(found.train), texts(found.held_out)) == (["a", "g"], ["c", "a"])
    assert found.facts["split_rule"] == "the rows of two.jsonl"
    texts_of = load(source="text", files=["one.jsonl"], held_out_files=["two.jsonl"])
    assert (len(texts_of.train), len(texts_of.held_out)) == (1, 1)


def test_what_is_trained_on_can_not_be_held_out() -> None:
    one = jsonl({"text": "a"})
    with pytest.raises(UsageError, match=r"rows.jsonl is in data.files and in data.held_out_files"):
        load(source="jsonl", files=[one], held_out_files=["./rows.*"])


def test_a_held_out_file_of_another_form_is_refused() -> None:
    one = jsonl({"text": "a"})
    two = jsonl({"prompt": "a", "completion": "b"}, name="two.jsonl")
    with pytest.raises(UsageError, match=r"two.jsonl:1: a row with .*, while the first at rows.jsonl:1"):
        load(source="jsonl", files=[one], held_out_files=[two])


def test_a_held_out_label_that_training_lacks_is_named() -> None:
    one = jsonl({"text": "a", "label": 0}, {"text": "a", "label": 1})
    two = jsonl({"text": "a", "label": 0}, {"text": "a", "label": 2}, name="two.jsonl")
    with pytest.raises(UsageError, match=r"two.jsonl:2: the held-out label 2 is in no training row"):
        load("label", source="jsonl", files=[one], held_out_files=[two])


def test_all_rows_held_out_is_refused() -> None:
    text = next(str(i) for i in range(99) if is_held_out(str(i), 2))
    with pytest.raises(
        UsageError,
        match=r"all of the data, 3 rows, is held out and none is left .* data.held_out_one_in = 2",
    ):
        load_rows(*[{"text": text}] * 3, held_out_one_in=2)


# the store -------------------------------------------------------------------------------------------


def test_samples_share_one_array() -> None:
    found = load_rows({"text": "ab"}, {"text": "cde"}).train
    assert isinstance(found, TokenSamples)
    assert found.tokens.dtype == np.int32
    assert found.lengths.tolist() == [3, 4]
    assert np.shares_memory(found[1].tokens, found.tokens)
    for index in (-1, 2):
        with pytest.raises(IndexError, match=f"sample {index} of 2"):
            found[index]


def test_a_micro_batch_without_samples() -> None:
    for kind in ("next_token", "label"):
        found = load_rows({"text": "a", "label": 0}, {"text": "a", "label": 1}, kind=kind)
        batch = found.collate([], [], 0)
        assert batch["input_ids"].shape == (0, 0)
        assert batch["labels"].shape == ((0,) if kind == "label" else (0, 0))
        assert {value.dtype for value in batch.values()} == {torch.int64}
        assert int(found.objective.count(batch)["loss"]) == 0
