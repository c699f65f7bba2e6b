"""The samples of ``wholebatch train`` and what is learned of them."""

from wholebatch.train.data.loaded import load_data
from wholebatch.train.data.pydoc import (
    BEGIN,
    IGNORED_LABEL,
    VOCABULARY,
    TextData,
    collate,
    encode,
    is_held_out,
    load_text,
    num_items,
    paragraphs,
)
from wholebatch.train.data.tokens import END, MASK

__all__ = [
    "BEGIN",
    "END",
    "IGNORED_LABEL",
    "MASK",
    "VOCABULARY",
    "TextData",
    "collate",
    "encode",
    "is_held_out",
    "load_data",
    "load_text",
    "num_items",
    "paragraphs",
]
