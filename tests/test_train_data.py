"""Python's own topic pages, and which paragraphs are held out: the same on every machine."""

from __future__ import annotations

from wholebatch.train.data.rows import is_held_out, paragraphs


def test_no_held_out_paragraph_is_also_trained_on() -> None:
    texts = list(paragraphs())
    assert len(set(texts)) < len(texts), "topics do repeat paragraphs, or this test shows nothing"
    held_out = {text for text in texts if is_held_out(text, 10)}
    assert held_out.isdisjoint(text for text in texts if not is_held_out(text, 10))
    assert 0.05 < len(held_out) / len(set(texts)) < 0.15


def test_the_split_is_the_same_on_every_machine() -> None:
    assert [is_held_out(text, 3) for text in ("a", "b", "c", "d", "e")] == [
        False,
        False,
        True,
        False,
        False,
    ]


def test_paragraphs_are_parted_by_blank_lines() -> None:
    texts = list(paragraphs())
    assert all(text.strip() and "\n\n" not in text for text in texts)
    assert texts == list(paragraphs())
