"""Where a command's words and its JSON go: one of them to stdout, never both mixed.

With ``--json -`` stdout carries the JSON alone and people's text goes to stderr; with
``--json FILE`` the JSON goes to the file and the text to stdout.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from wholebatch.errors import RecordError

STDOUT = "-"


def text_stream(json_target: str | None) -> TextIO:
    """Return the stream for people's text: stderr where stdout is the JSON's, else stdout."""
    return sys.stderr if json_target == STDOUT else sys.stdout


def finite(value: Any) -> Any:
    """Return plain JSON values with NaN and infinities replaced by None, which JSON can say."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return value


def write_json(payload: Mapping[str, Any], target: str | None) -> None:
    """Write a command's result as one JSON document to a file, to stdout for "-", or nowhere for None.

    Args:
        payload: plain JSON values; floats that are not finite are written as null.
        target: the argument of ``--json``.

    Raises:
        RecordError: the file can't be written; the message repeats its path.
    """
    if target is None:
        return
    document = json.dumps(finite(payload), indent=2, allow_nan=False) + "\n"
    if target == STDOUT:
        sys.stdout.write(document)
        sys.stdout.flush()
        return
    try:
        Path(target).write_text(document, encoding="utf-8")
    except OSError as failure:
        raise RecordError(f"can't write the JSON to {target!r}: {failure.strerror}") from None
