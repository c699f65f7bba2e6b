"""The samples of ``wholebatch train`` and what is learned of them."""

from wholebatch.train.data.loaded import load_data
from wholebatch.train.data.pydoc import (
    BEGIN,
    IGNORED_LABEL,
    VOCABULARY,
    is_held_out,
    paragraphs,
)
from wholebatch.train.data.tokens import END, MASK

__all__ = [
    "BEGIN",
    "END",
    "IGNORED_LABEL",
    "MASK",
    "VOCABULARY",
    "is_held_out",
    "load_data",
    "paragraphs",
]
