"""Real text without a download: the paragraphs of Python's own topic pages, and which are held out."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pydoc_data.topics import topics

BEGIN = 256  # stands before the first byte, so that every byte is predicted from something
VOCABULARY = 257  # bytes and the begin mark
IGNORED_LABEL = -100


def paragraphs() -> Iterator[str]:
    """The paragraphs of all topics, in a fixed order; blank lines part them."""
    for name in sorted(topics):
        for text in re.split(r"\n\s*\n", topics[name]):
            if text.strip():
                yield text.strip("\n")


def is_held_out(text: str, held_out_one_in: int) -> bool:
    """Whether this text belongs to the held-out split."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % held_out_one_in == 0
